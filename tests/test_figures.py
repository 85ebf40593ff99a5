"""Figures in the README and on the site come from records of runs, and say the same in both places."""

import re
from itertools import product
from pathlib import Path
from typing import Any

import pytest

from benchmarks import __main__ as command
from benchmarks import pages, results
from benchmarks.measuring import Measured
from benchmarks.models import LARGE, WORKLOADS
from benchmarks.peers import BASE, PEERS
from benchmarks.results import Record, Run


def ratio(contender: str, quantity: str, workload: str) -> float | None:
    """Another number for each; JAX is ahead on the smallest net, BackPACK fails everywhere."""
    place = 1 + list(WORKLOADS | LARGE).index(workload)
    if contender == "BackPACK":
        return None
    if contender == "JAX":
        return 0.5 if (workload, quantity) == ("mlp-tiny", "norms") else 99.0
    if contender == "psgrad":
        return place + {"grads": 0.1, "norms": 0.2, "clipped": 0.3, "gram": 0.4}[quantity]
    return 20.0 + place if contender != BASE else 1.0


def measured() -> list[Record]:
    """What a run of every command would have."""
    found = []
    cells = product(("time", "memory"), ("grads", "norms", "clipped", "gram"), WORKLOADS | LARGE, PEERS)
    for kind, quantity, workload, contender in cells:
        r = ratio(contender, quantity, workload)
        found.append(Record(kind, quantity, workload, 7, contender, Measured(r, 1.0, 3), r))
    return found


def block(text: str, name: str) -> list[list[str]]:
    """The rows of a table on a page."""
    found = re.search(rf"<!-- figures: {name} -->\n(.*?)<!-- /figures -->", text, re.S)
    assert found, name
    return [line.strip("| ").split(" | ") for line in found[1].splitlines() if line.startswith("|")]


def test_pages_are_filled_from_records(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any) -> None:
    copies = [tmp_path / page.name for page in pages.PAGES]
    for page, copy in zip(pages.PAGES, copies, strict=True):
        copy.write_text(page.read_text())
    monkeypatch.setattr(pages, "PAGES", copies)
    run = Run({"torch": "2.0", "command": "workloads"}, tmp_path / "run.json")
    run.records += measured()
    run.save()
    assert command.main(["read", str(run.file), "--json", str(tmp_path / "kept.json"), "--pages"]) == 0
    assert capsys.readouterr().out.splitlines() == [str(copy) for copy in copies]
    assert results.about(tmp_path / "kept.json")["runs"] == [{"torch": "2.0", "command": "workloads"}]
    readme, site = (copy.read_text() for copy in copies)
    assert block(readme, "speed")[2] == [
        "MLP 20-64-2",
        "64",
        "21.00",
        "1.10",
        "21.00",
        "1.20",
        "21.00",
        "1.30",
        "21.00",
    ]
    assert block(site, "time")[3] == ["mlp: MLP 784-1024-1024-10", "256", "22.00", "2.10", "22.00", "2.20", "2.30"]
    assert block(site, "compiled")[2] == ["mlp-tiny", "64", "21.00", "21.00", "21.00", "21.00", "21.00"]
    assert block(site, "memory")[2] == [f"{n}.30" for n in range(2, 11)]
    assert block(site, "large")[2] == ["ResNet-50, images of 160 x 160", "4", "11.20", "11.20", "11.30", "11.30"]
    assert block(site, "ahead")[2:] == [["mlp-tiny, norms", "JAX 0.50", "1.20"]]
    assert block(site, "ahead-compiled")[2:] == [["mlp-tiny, norms", "JAX 0.50", "21.00"]]
    assert "by a twentieth or more: JAX on MLP 20-64-2; of what" in readme
    assert "among the peers: JAX on MLP 20-64-2.\n" in readme
    for page, text in zip(pages.PAGES, (readme, site), strict=True):  # the words around them stay
        assert pages.BLOCK.sub("", text) == pages.BLOCK.sub("", page.read_text())
        assert pages.filled(text, measured()) == text


def test_the_last_of_several_runs_counts(tmp_path: Path) -> None:
    for i, best in enumerate((1.0, 2.0)):
        run = Run({"command": "workloads"}, tmp_path / f"{i}.json")
        run.records += [Record("time", "grads", "gpt", 7, "psgrad", Measured(best, 1.0, 3), best)]
        run.save()
    command.main(["read", str(tmp_path / "0.json"), str(tmp_path / "1.json"), "--json", str(tmp_path / "kept.json")])
    assert [record.ratio for record in results.read(tmp_path / "kept.json")] == [2.0]


def test_what_failed_is_said_and_what_is_missing_writes_nothing() -> None:
    page = "<!-- figures: memory -->\nold\n<!-- /figures -->\n"
    failed = [r for r in measured() if (r.contender, r.workload) != ("psgrad", "gpt")]
    with pytest.raises(LookupError, match="no figure of memory, clipped, gpt, psgrad in these runs"):
        pages.filled(page, failed)
    failed.append(Record("memory", "clipped", "gpt", 7, "psgrad", Measured(error="broke"), None))
    assert block(pages.filled(page, failed), "memory")[2][6] == "failed"


def test_what_torch_compiles_is_held_against_what_psgrad_compiles() -> None:
    page = "<!-- figures: ahead -->\n<!-- /figures -->\n"
    faster = Record("time", "grads", "gpt", 7, "compiled vmap(grad)", Measured(0.1, 1.0, 3), 0.1)
    assert pages.filled(page, [*measured(), faster]) == pages.filled(page, measured())
    compiled = pages.filled(page.replace("ahead", "ahead-compiled"), [*measured(), faster])
    assert ["gpt, gradients", "compiled vmap(grad) 0.10", "28.00"] in block(compiled, "ahead-compiled")


def test_nobody_ahead_is_said_so() -> None:
    alone = [r for r in measured() if r.contender != "JAX"]
    assert pages.filled("<!-- figures: ahead -->\n<!-- /figures -->", alone).splitlines()[1] == "Nobody, in this run."


def test_every_block_is_on_a_page() -> None:
    used = [name for page in pages.PAGES for name in re.findall(r"<!-- figures: (\S+) -->", page.read_text())]
    assert sorted(used) == sorted(pages.BLOCKS)
    assert set(pages.MODELS) == set(WORKLOADS | LARGE)


def test_readme_and_site_have_the_same_figures() -> None:
    readme, site = (page.read_text() for page in pages.PAGES)
    on_site, compiled = dict[str, list[str]](), {row[0]: row[4:] for row in block(site, "compiled")[2:]}
    for name, *figures in ([row[0], *row[1:4], *row[5:]] for row in block(site, "time")[2:]):
        short, _, words = name.partition(": ")
        by_quantity = [f for pair in zip(figures[2:], compiled[short], strict=True) for f in pair]
        on_site[words] = [*figures[:2], *by_quantity]
    assert {row[0]: row[1:] for row in block(readme, "speed")[2:]}.items() <= on_site.items()
    assert len(block(readme, "speed")) == 2 + len(pages.SHORT)
    assert [row[0].partition(":")[0] for row in block(site, "time")[2:]] == list(WORKLOADS)


@pytest.mark.skipif(not pages.FIGURES.exists(), reason="no run has been kept in docs/figures.json")
def test_pages_show_the_run_that_is_kept() -> None:
    records = results.read(pages.FIGURES)
    for page in pages.PAGES:
        assert pages.filled(page.read_text(), records) == page.read_text(), "run `python -m benchmarks read --pages`"
