"""The figures in the README and on the site, written there from the records of runs: `read FILE ... --pages`.

A block of a page begins with `<!-- figures: NAME -->` and ends with `<!-- /figures -->`; what is between is replaced.
"""

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from itertools import product
from pathlib import Path

from .models import LARGE, WORKLOADS
from .peers import BASE, BY_TORCH, OURS, PEERS
from .results import Record

ROOT = Path(__file__).resolve().parent.parent
PAGES = (ROOT / "README.md", ROOT / "docs" / "measurements.md")
FIGURES = ROOT / "docs" / "figures.json"  # the records that the pages show
BLOCK = re.compile(r"(?<=<!-- figures: )(\S+)( -->\n).*?(?=<!-- /figures -->)", re.S)
CLEARLY = 1.05  # by so much a peer has to be ahead to be named: what is nearer changes from run to run

MODELS = {
    "mlp-tiny": "MLP 20-64-2",
    "mlp": "MLP 784-1024-1024-10",
    "resnet": "ResNet, widths 16/32/64",
    "resnet-wide": "ResNet, widths 64/128/256",
    "instance": "conv net with instance norm",
    "conv1d": "1d conv net, length 4000",
    "conv3d": "3d conv net, 24 x 24 x 24",
    "gpt": "GPT, 4 blocks of width 256, length 128",
    "gpt-tied": "the same GPT, head tied to the embedding",
    "lstm": "LSTM, 2 layers of width 128, length 64",
    "resnet50": "ResNet-50, images of 160 x 160",
    "gpt2-small": "GPT-2 small, 124 million parameters, length 256",
}
SHORT = ("mlp-tiny", "mlp", "resnet", "gpt", "lstm")  # in the README
WORDS = {"grads": "gradients", "norms": "norms", "clipped": "clipped sums", "gram": "inner products"}

Key = tuple[str, str, str, str]  # kind, quantity, workload, contender
Ratios = Mapping[Key, float | None]  # None: it failed


def table(head: Sequence[str], rows: Iterable[Sequence[str]], words: int = 1) -> str:
    """A table whose first `words` columns are words, and the others numbers."""
    rule = ["---" if i < words else "---:" for i in range(len(head))]
    return "".join(f"| {' | '.join(row)} |\n" for row in (head, rule, *rows))


def figure(ratios: Ratios, *key: str) -> str:
    """A ratio with two digits behind the point; a figure that no run has is an error, and no gap in a table."""
    kind, quantity, workload, contender = key
    try:
        ratio = ratios[kind, quantity, workload, contender]
    except KeyError:
        raise LookupError(f"no figure of {', '.join(key)} in these runs") from None
    return "failed" if ratio is None else f"{ratio:.2f}"


# ---- the blocks --------------------------------------------------------------------------------------------


def speed(ratios: Ratios) -> str:
    """Times of the models that the README shows."""
    columns = [("grads", "vmap(grad)"), *product(("grads", "norms", "clipped"), (OURS[0], OURS[2]))]
    head = ["workload", "N", "gradients: `vmap(grad)`", "psgrad", "compiled", "norms: psgrad", "compiled"]
    head += ["clipped sum: psgrad", "compiled"]
    return table(head, times(ratios, {name: MODELS[name] for name in SHORT}, columns))


def time(ratios: Ratios) -> str:
    """Times of all models."""
    columns = [("grads", "vmap(grad)"), ("grads", "psgrad"), ("grads", "psgrad out=")]
    columns += [("norms", "psgrad"), ("clipped", "psgrad")]
    head = ["workload", "N", "gradients: `vmap(grad)`", "psgrad", "with `out=`", "norms: psgrad", "clipped sum: psgrad"]
    return table(head, times(ratios, {name: f"{name}: {MODELS[name]}" for name in WORKLOADS}, columns))


def times(ratios: Ratios, names: Mapping[str, str], columns: Iterable[tuple[str, str]]) -> list[list[str]]:
    known = list(columns)
    return [
        [shown, str(WORKLOADS[name][0]), *(figure(ratios, "time", quantity, name, who) for quantity, who in known)]
        for name, shown in names.items()
    ]


def compiled(ratios: Ratios) -> str:
    """What compilers make of it: of the batch gradient, of vmap(grad), and of psgrad's quantities."""
    columns = [("grads", BY_TORCH[0]), ("grads", BY_TORCH[1]), *((q, OURS[2]) for q in ("grads", "norms", "clipped"))]
    head = ["workload", "N", "batch gradient", "gradients: `vmap(grad)`", "psgrad", "norms: psgrad"]
    return table([*head, "clipped sum: psgrad"], times(ratios, {name: name for name in WORKLOADS}, columns))


def leaders(ratios: Ratios, ours: str) -> dict[tuple[str, str], list[tuple[float, str]]]:
    """Who is clearly ahead of `ours`, by workload and quantity, the fastest first."""
    found = {}
    aside = (BASE, *OURS, *(BY_TORCH if ours == OURS[0] else BY_TORCH[:1]))
    for workload, quantity in product(WORKLOADS, WORDS):
        own = ratios.get(("time", quantity, workload, ours)) or 0.0
        names = [name for name in PEERS if name not in aside]
        others = [(ratios.get(("time", quantity, workload, name)), name) for name in names]
        if faster := sorted((r, name) for r, name in others if r and r * CLEARLY < own):
            found[workload, quantity] = faster
    return found


def ahead(ratios: Ratios, ours: str = OURS[0]) -> str:
    """Where a peer takes less time than `ours`, as a table."""
    rows = [
        [f"{workload}, {WORDS[quantity]}", ", ".join(f"{name} {r:.2f}" for r, name in faster), own]
        for (workload, quantity), faster in leaders(ratios, ours).items()
        for own in [figure(ratios, "time", quantity, workload, ours)]
    ]
    return table(["where", f"ahead of {ours}", ours], rows, words=2) if rows else "Nobody, in this run.\n"


def in_words(ratios: Ratios) -> str:
    """The same in a sentence: who, and on which models."""
    called, compiled = (_named(leaders(ratios, ours)) for ours in (OURS[0], OURS[2]))
    return (
        f"Ahead of psgrad there for some quantity, by a twentieth or more: {called}; of what `psgrad.compile` made, "
        f"with `torch.compile(vmap(grad))` among the peers: {compiled}.\n"
    )


def _named(faster: Mapping[tuple[str, str], Sequence[tuple[float, str]]]) -> str:
    """Those ahead, on each model."""
    names: dict[str, dict[str, None]] = {}
    for (workload, _), peers in faster.items():
        names.setdefault(workload, {}).update(dict.fromkeys(name for _, name in peers))
    parts = [f"{' and '.join(who)} on {MODELS[workload]}" for workload, who in names.items()]
    return ", ".join(parts) or "nobody"


def memory(ratios: Ratios) -> str:
    """Peak memory of the clipped sum; that of the smallest net is below what a process can tell."""
    names = [name for name in WORKLOADS if name != "mlp-tiny"]
    return table(names, [[figure(ratios, "memory", "clipped", name, "psgrad") for name in names]], words=0)


def large(ratios: Ratios) -> str:
    """Models of the size that people train, in time and memory."""
    kinds = [(kind, quantity) for quantity in ("norms", "clipped") for kind in ("time", "memory")]
    head = ["model", "N", "norms: time", "memory", "clipped sum: time", "memory"]
    rows = [
        [MODELS[name], str(LARGE[name][0]), *(figure(ratios, kind, q, name, "psgrad") for kind, q in kinds)]
        for name in LARGE
    ]
    return table(head, rows)


BLOCKS: dict[str, Callable[[Ratios], str]] = {
    "speed": speed,
    "time": time,
    "compiled": compiled,
    "ahead": ahead,
    "ahead-compiled": partial(ahead, ours=OURS[2]),
    "ahead-in-words": in_words,
    "memory": memory,
    "large": large,
}


# ---- the pages ---------------------------------------------------------------------------------------------


def filled(text: str, records: Iterable[Record]) -> str:
    """A page with its blocks made from `records`."""
    ratios = {(r.kind, r.quantity, r.workload, r.contender): r.ratio for r in records}
    return BLOCK.sub(lambda block: block[1] + block[2] + BLOCKS[block[1]](ratios), text)


def write(records: Sequence[Record]) -> list[Path]:
    """Fills the pages: all of them, or where a figure is missing none."""
    texts = {page: filled(page.read_text(), records) for page in PAGES}
    for page, text in texts.items():
        page.write_text(text)
    return list(texts)
