"""explain: what a call will do, said before it does it, from shapes where possible."""

import functools
import gc
import html.parser
import logging
import os
import re
import sys
import threading
import types
import warnings
from typing import Any, NamedTuple

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode

import psgrad
from psgrad.factors import conv_costs
from psgrad.streaming.budget import Meter


class ConvNet(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.stem, self.norm = nn.Conv2d(3, 8, 3, padding=1), nn.GroupNorm(2, 8)
        self.mix = nn.Conv2d(8, 16, 1)
        self.scale = nn.Parameter(torch.ones(16, 1, 1))
        self.head = nn.Linear(16, 4)
        self.idle = nn.Parameter(torch.zeros(2))

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        x = torch.relu(self.norm(x))
        x = self.mix(x) * self.scale
        return self.head(x.mean((2, 3)))

    LINES = {"stem": 1, "norm": 2, "mix": 3, "scale": 3, "head": 4}


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.qkv, self.out = nn.LayerNorm(8), nn.Linear(8, 24), nn.Linear(8, 8, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(self.norm(x)).chunk(3, -1)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return x + self.out(y)

    LINES = {"norm": 1, "qkv": 1, "out": 3}


class TinyGPT(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.tok, self.pos = nn.Embedding(11, 8), nn.Embedding(6, 8)
        self.block = Block()

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.tok(tokens) + self.pos(torch.arange(6))
        return F.linear(self.block(x), self.tok.weight)

    LINES = {"tok": 1, "pos": 1}


def line(cls: Any, name: Any) -> Any:
    """Where the forward of `cls` uses its layer `name`, as reports say it."""
    return f"test_explain.py:{cls.forward.__code__.co_firstlineno + cls.LINES[name]} in {cls.__name__}.forward"


def conv_net(n: Any = 6) -> Any:
    fn, params = psgrad.from_module(ConvNet(), F.cross_entropy)
    return fn, params, (torch.randn(n, 3, 8, 8), torch.randint(4, (n,)))


def gpt(n: Any = 5) -> Any:
    fn, params = psgrad.from_module(TinyGPT(), lambda logits, t: F.cross_entropy(logits.mT, t))
    tokens = torch.randint(11, (n, 6))
    return fn, params, (tokens, tokens)


# ---- rows ---------------------------------------------------------------------------------------------


def test_rows_of_a_conv_net() -> None:
    report = psgrad.explain(*conv_net())
    found = [(row.param, row.shape, row.op, row.place, row.how, row.factor) for row in report.rows]
    at = {name: line(ConvNet, name) for name in ConvNet.LINES}
    assert found == [
        ("params['stem.weight']", (8, 3, 3, 3), "F.conv2d", at["stem"], "rule conv2d", "Patches"),
        ("params['stem.bias']", (8,), "F.conv2d", at["stem"], "rule conv2d", "Dense"),
        ("params['norm.weight']", (8,), "F.group_norm", at["norm"], "rule group_norm", "Dense"),
        ("params['norm.bias']", (8,), "F.group_norm", at["norm"], "rule group_norm", "Dense"),
        ("params['mix.weight']", (16, 8, 1, 1), "F.conv2d", at["mix"], "rule conv2d", "Patches"),
        ("params['mix.bias']", (16,), "F.conv2d", at["mix"], "rule conv2d", "Dense"),
        ("params['scale']", (16, 1, 1), "Tensor.mul", at["scale"], "rule mul", "Dense"),
        ("params['head.weight']", (4, 16), "F.linear", at["head"], "rule linear", "Outer"),
        ("params['head.bias']", (4,), "F.linear", at["head"], "rule linear", "Dense"),
    ]


def test_rows_of_a_language_model() -> None:
    """The tied weight has two rows, one per use."""
    report = psgrad.explain(*gpt())
    found = [(row.param, row.op, row.place, row.how, row.factor) for row in report.rows]
    at = {name: line(cls, name) for cls in (TinyGPT, Block) for name in cls.LINES}
    head = f"test_explain.py:{TinyGPT.forward.__code__.co_firstlineno + 2} in TinyGPT.forward"
    assert found == [
        ("params['tok.weight']", "F.embedding", at["tok"], "rule embedding", "Rows"),
        ("params['pos.weight']", "F.embedding", at["pos"], "rule embedding", "Rows"),
        ("params['block.norm.weight']", "F.layer_norm", at["norm"], "rule layer_norm", "Dense"),
        ("params['block.norm.bias']", "F.layer_norm", at["norm"], "rule layer_norm", "Dense"),
        ("params['block.qkv.weight']", "F.linear", at["qkv"], "rule linear", "Outer"),
        ("params['block.qkv.bias']", "F.linear", at["qkv"], "rule linear", "Dense"),
        ("params['block.out.weight']", "F.linear", at["out"], "rule linear", "Outer"),
        ("params['tok.weight']", "F.linear", head, "rule linear", "Outer"),
    ]


def test_stock_modules_go_by_their_path() -> None:
    """No line of the user's runs there; the line that calls explain would be the same for all."""
    model = nn.Sequential(nn.Linear(4, 6), nn.Sequential(nn.Tanh(), nn.TransformerEncoderLayer(6, 2, 8, 0.0)))
    fn, params = psgrad.from_module(model, F.mse_loss)
    report = psgrad.explain(fn, params, (torch.randn(5, 3, 4), torch.randn(5, 3, 6)))
    assert {row.param: row.place for row in report.rows if row.param.endswith("weight']")} == {
        "params['0.weight']": "model.0 (Linear)",
        "params['1.1.self_attn.in_proj_weight']": "model.1.1.self_attn (MultiheadAttention)",
        "params['1.1.self_attn.out_proj.weight']": "model.1.1.self_attn (MultiheadAttention)",
        "params['1.1.norm1.weight']": "model.1.1.norm1 (LayerNorm)",
        "params['1.1.linear1.weight']": "model.1.1.linear1 (Linear)",
        "params['1.1.linear2.weight']": "model.1.1.linear2 (Linear)",
        "params['1.1.norm2.weight']": "model.1.1.norm2 (LayerNorm)",
    }


def test_a_stock_module_that_is_the_model_and_one_that_is_not() -> None:
    fn, params = psgrad.from_module(nn.Linear(4, 3), F.cross_entropy)
    (row, _) = psgrad.explain(fn, params, (torch.randn(5, 4), torch.zeros(5, dtype=torch.long))).rows
    assert row.place == "model (Linear)"
    model = nn.Sequential(nn.Linear(4, 1, bias=False))
    fn = functools.partial(torch.func.functional_call, model)
    (row,) = psgrad.explain(fn, dict(model.named_parameters()), torch.randn(5, 4)).rows
    assert row.place == "Sequential.0 (Linear)"


def test_no_line_and_no_module() -> None:
    """A function of torch as fn: all that is left to name is the call of explain."""
    (row,) = psgrad.explain(torch.dot, torch.randn(4), torch.randn(5, 4)).rows
    frame = sys._getframe()
    assert row.place == f"test_explain.py:{frame.f_lineno - 2} in {frame.f_code.co_qualname}"


SOURCE = """
def fn(p, x):
    return (x * p).sum()
"""


def place_in(filename: Any) -> Any:
    names = {}
    exec(compile(SOURCE, filename, "exec"), names)
    (row,) = psgrad.explain(names["fn"], torch.randn(4), torch.randn(5, 4)).rows
    return row.place


def test_code_that_is_in_no_file(monkeypatch: pytest.MonkeyPatch) -> None:
    assert place_in("<stdin>") == "standard input:3 in fn"
    assert place_in("<string>") == "code in a string:3 in fn"
    assert place_in("<doctest fold.txt[2]>") == "<doctest fold.txt[2]>:3 in fn"
    assert place_in("<ipython-input-7-53ab2>") == "cell [7]:3 in fn"
    monkeypatch.setitem(sys.modules, "IPython", None)  # no shell to ask
    assert place_in(os.path.join("tmp", "ipykernel_71", "1234.py")) == "a notebook cell:3 in fn"
    assert place_in(os.path.join("tmp", "other_71", "1234.py")) == "1234.py:3 in fn"


def test_code_of_a_notebook(monkeypatch: pytest.MonkeyPatch) -> None:
    """Cells by the number that stands beside them; what is no cell any more, as a cell all the same."""
    compiler = pytest.importorskip("ipykernel.compiler").XCachingCompiler()
    filename = compiler.cache(SOURCE, 12)
    shell = types.SimpleNamespace(compile=compiler)
    monkeypatch.setitem(sys.modules, "IPython", types.SimpleNamespace(get_ipython=lambda: shell))
    assert place_in(filename) == "cell [12]:3 in fn"
    assert place_in(filename.removesuffix(".py") + "1.py") == "a notebook cell:3 in fn"
    shell.compile = None
    assert place_in(filename) == "a notebook cell:3 in fn"


def test_rules_named_are_the_rules_that_run() -> None:
    for fn, params, batch in (conv_net(), gpt()):
        said = {}
        for row in psgrad.explain(fn, params, batch).rows:
            said.setdefault(row.param, []).append(row.how.removeprefix("rule "))
        assert said == psgrad.testing.rules_used(fn, params, batch)


def test_vmap_with_the_reason() -> None:
    """A use without a rule, and uses that a rule declines, each with its reason."""

    def fn(p: Any, x: Any) -> Any:
        y = torch.maximum(p["a"], x)
        z = torch.addmm(p["b"], x[None], p["w"], alpha=2)
        return y.sum() + z.sum()

    params = {"a": torch.randn(4), "b": torch.randn(3), "w": torch.randn(4, 3)}
    rows = {row.param: row for row in psgrad.explain(fn, params, torch.randn(5, 4)).rows}
    first = fn.__code__.co_firstlineno
    assert rows["params['a']"].how == "vmap: no rule for this function"
    assert rows["params['a']"].op == "torch.maximum"
    assert rows["params['a']"].place == f"test_explain.py:{first + 1} in {fn.__qualname__}"
    assert rows["params['w']"].how == rows["params['b']"].how == "vmap: only bias + x @ weight has a rule"
    assert rows["params['w']"].place == f"test_explain.py:{first + 2} in {fn.__qualname__}"
    assert {row.factor for row in rows.values()} == {"Dense"}


def test_views_and_functions_of_parameters() -> None:
    """A view goes by its parameter's name, with the view's shape; a value made of parameters by how it was made."""

    def fn(p: Any, x: Any) -> Any:
        return F.linear(x, p["w"][:2]).sum() + F.linear(x, torch.tanh(p["w"])).sum()

    rows = psgrad.explain(fn, {"w": torch.randn(3, 4)}, torch.randn(5, 4)).rows
    assert [(row.param, row.shape, row.how) for row in rows] == [
        ("params['w']", (2, 4), "rule linear"),
        ("torch.tanh(params['w'])", (3, 4), "rule linear"),
    ]


def test_use_that_the_loss_does_not_depend_on() -> None:
    rows = psgrad.explain(
        lambda p, x: F.linear(x, p["w"]).detach().sum() + F.linear(x, p["v"]).sum(),
        {"w": torch.randn(3, 4), "v": torch.randn(3, 4)},
        torch.randn(5, 4),
    ).rows
    by_param = {row.param: row for row in rows}
    assert by_param["params['w']"].strategy == "the loss does not depend on it"
    assert by_param["params['v']"].factor == "Outer"


@pytest.mark.parametrize(
    ("channels", "size", "kernel", "strategy"),
    [((8, 16), 8, 1, "pointwise"), ((3, 8), 16, 3, "grouped"), ((64, 64), 4, 3, "patches")],
)
def test_strategies_of_convolutions(
    channels: Any, size: Any, kernel: Any, strategy: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(conv_costs, "COSTS", conv_costs.EVEN)  # whatever machine this is
    conv_costs._cheapest.cache_clear()
    params = {"w": torch.randn(channels[1], channels[0], kernel, kernel)}
    fn = lambda p, x: F.conv2d(x[None], p["w"], padding=kernel // 2).sum()
    (row,) = psgrad.explain(fn, params, torch.randn(5, channels[0], size, size)).rows
    assert row.strategy == strategy
    assert row.flops == 5 * params["w"].numel() * size * size
    conv_costs._cheapest.cache_clear()


def test_strategies_of_other_factors() -> None:
    rows = {row.param: row for row in psgrad.explain(*gpt()).rows if row.how != "rule linear" or "tok" not in row.param}
    assert rows["params['tok.weight']"].strategy == "index_add"
    assert rows["params['block.qkv.weight']"].strategy == "bmm"
    assert rows["params['block.qkv.weight']"].flops == 5 * 6 * 8 * 24  # N T I O
    assert rows["params['block.norm.bias']"].strategy == "as it is"


# ---- totals -------------------------------------------------------------------------------------------


def test_totals() -> None:
    fn, params, batch = conv_net(6)
    report = psgrad.explain(fn, params, batch)
    count = sum(p.numel() for p in params.values())
    assert (report.samples, report.parameters, report.result_bytes) == (6, count, 6 * count * 4)
    assert report.unused == ("params['idle']",)
    assert report.chunk_size is None
    assert report.note == ""
    for row in report.rows:
        numel = torch.Size(row.shape).numel()
        assert row.bytes == 6 * numel * 4


@pytest.mark.parametrize("make", [conv_net, gpt])
@pytest.mark.parametrize("n", [1, 8, 64])
def test_peak_bytes_is_what_a_run_takes(make: Any, n: Any) -> None:
    fn, params, batch = make(n)
    report = psgrad.explain(fn, params, batch)
    out = {k: p.new_empty(n, *p.shape) for k, p in params.items()}
    with Meter([*params.values(), *batch, *out.values()]) as meter:
        psgrad.per_sample_grads(fn, params, batch, out=out)
    assert abs(report.peak_bytes - meter.peak) <= 0.1 * meter.peak


@pytest.mark.parametrize("make", [conv_net, gpt])
def test_peak_bytes_where_fn_looks_at_values(make: Any) -> None:
    """From runs on a few samples, all on the same side of the branch: within a quarter."""
    fn, params, batch = make(32)
    function = lambda p, s: fn(p, s) * (2 if s[0].sum() > 1e9 else 1)
    report = psgrad.explain(function, params, batch)
    out = {k: p.new_empty(32, *p.shape) for k, p in params.items()}
    with Meter([*params.values(), *batch, *out.values()]) as meter:
        psgrad.per_sample_grads(function, params, batch, out=out)
    assert abs(report.peak_bytes - meter.peak) <= 0.25 * meter.peak


def test_chunk_size_for_max_bytes() -> None:
    fn, params, batch = conv_net(64)
    whole = psgrad.explain(fn, params, batch).peak_bytes
    sizes = [psgrad.explain(fn, params, batch, max_bytes=whole // k).chunk_size for k in (1, 2, 8)]
    assert sizes[0] == 64
    assert 24 <= sizes[1] <= 40
    assert 4 <= sizes[2] <= 10
    for k, size in zip((2, 8), sizes[1:], strict=True):
        part = tuple(t[:size] for t in batch)
        bounded = psgrad.explain(fn, params, part, max_bytes=whole)  # under a bound less is held
        assert bounded.peak_bytes <= whole // k


def test_max_bytes_that_no_sample_fits() -> None:
    with pytest.raises(psgrad.ArgumentError, match=r"max_bytes=10 is too little: one sample at a time needs [\d,]+\n"):
        psgrad.explain(*conv_net(), max_bytes=10)


class Params(NamedTuple):
    w: torch.Tensor
    w2: torch.Tensor
    idle: torch.Tensor


def test_unused_parameters() -> None:
    """By themselves, not by how their names begin."""
    fn = lambda p, x: F.linear(x, p.w2).sum()
    report = psgrad.explain(fn, Params(torch.ones(3, 4), torch.ones(3, 4), torch.ones(2)), torch.randn(5, 4))
    assert report.unused == ("params.w", "params.idle")
    fn = lambda p, x: F.linear(x, torch.tanh(p.w)).sum()
    report = psgrad.explain(fn, Params(torch.ones(3, 4), torch.ones(3, 4), torch.ones(2)), torch.randn(5, 4))
    assert report.unused == ("params.w2", "params.idle")
    many = [torch.ones(4) for _ in range(12)]
    report = psgrad.explain(lambda p, x: (x * p[10]).sum(), many, torch.randn(5, 4))
    assert report.unused == tuple(f"params[{i}]" for i in range(12) if i != 10)


# ---- rendering ----------------------------------------------------------------------------------------


def test_text_table() -> None:
    report = psgrad.explain(*conv_net(), max_bytes=10**8)
    text = str(report)
    head, rule, *rest = text.splitlines()
    assert repr(report) == text
    columns = ["parameter", "shape", "op", "at", "how", "factor", "strategy", "mult-adds", "bytes"]
    assert re.split(r"\s{2,}", head) == columns
    assert rule == "-" * len(head)
    body, totals = rest[: len(report.rows)], rest[len(report.rows) :]
    starts = [head.index(name) for name in columns]
    for row, printed in zip(report.rows, body, strict=True):
        cells = [printed[a:b].strip() for a, b in zip(starts, [*starts[1:], None], strict=True)]
        shape = "x".join(map(str, row.shape))
        assert cells[:7] == [row.param, shape, row.op, row.place, row.how, row.factor, row.strategy]
    assert totals[0] == ""
    assert re.fullmatch(r"6 samples x \d+ parameters: result [\d.]+ kB, at most [\d.]+ kB beside it", totals[1])
    assert totals[2:] == ["9 of 9 uses by a rule", "chunk_size 6", "not used, so zeros: params['idle']"]


class Tags(html.parser.HTMLParser):
    """The cells of a table, and a check that tags close as they open."""

    def __init__(self) -> None:
        super().__init__()
        self.open, self.rows, self.text = [], [], ""

    def handle_starttag(self, tag: Any, attrs: Any) -> None:
        if tag == "br":
            return
        self.open.append(tag)
        if tag == "tr":
            self.rows.append([])
        if tag in ("td", "th"):
            self.rows[-1].append("")

    def handle_endtag(self, tag: Any) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: Any) -> None:
        self.text += data
        if self.open and self.open[-1] in ("td", "th"):
            self.rows[-1][-1] += data


def test_html_table() -> None:
    fn, params, batch = conv_net()
    known = lambda p, sample: fn({k: v for k, v in p.items() if k in params}, sample)
    report = psgrad.explain(known, {"<b>&": params["stem.weight"]} | params, batch)
    tags = Tags()
    tags.feed(report._repr_html_())
    assert not tags.open
    assert tags.rows[0] == [*report._HEAD, "share"]
    assert [row[0] for row in tags.rows[1:]] == [row.param for row in report.rows]
    assert [row[3] for row in tags.rows[1:]] == [row.place for row in report.rows]
    assert "uses by a rule 9 of 9" in tags.text
    assert "not used, so zeros: params['<b>&'], params['idle']" in tags.text
    assert "<b>" not in report._repr_html_()


def test_numbers_are_written_short() -> None:
    fn = lambda p, x: (p["a"] * x).sum() + p["c"] * x.sum()
    report = psgrad.explain(fn, {"a": torch.ones(500, 3), "c": torch.ones(())}, torch.ones(7, 3))
    assert "7 samples x 1.5 k parameters: result 42 kB" in str(report)
    assert [line.split()[1] for line in str(report).splitlines()[2:4]] == ["500x3", "scalar"]
    assert str(report).splitlines()[3].endswith("28 B")


def test_report_of_no_samples() -> None:
    fn, params, batch = conv_net(0)
    report = psgrad.explain(fn, params, batch)
    assert (report.rows, report.samples, report.result_bytes, report.peak_bytes) == ((), 0, 0, 0)
    assert report.note == "no samples: nothing runs"
    assert "no samples: nothing runs" in str(report)
    assert report._repr_html_()


# ---- where shapes do not suffice ----------------------------------------------------------------------


def test_data_dependent_branch() -> None:
    fn, params, batch = conv_net(6)
    report = psgrad.explain(lambda p, s: fn(p, s) * (2 if s[0].sum() > 0 else 1), params, batch)
    plain = psgrad.explain(fn, params, batch)
    assert report.note == "fn looks at values: found out by running the first sample"
    assert str(report).splitlines()[-1] == report.note
    assert [row._replace(strategy="") for row in report.rows] == [row._replace(strategy="") for row in plain.rows]
    assert report.unused == ("params['idle']",)
    assert (report.samples, report.result_bytes) == (plain.samples, plain.result_bytes)


def _knows_shapes(fn: Any, *args: Any) -> Any:
    with FakeTensorMode() as mode:
        try:
            fn(*map(mode.from_tensor, args))
        except RuntimeError:
            return False
    return True


@pytest.mark.filterwarnings("ignore:There is a performance drop")  # torch, of ops it has no batching rule for
def test_op_whose_shapes_torch_does_not_know(capfd: Any) -> None:
    """The note says what torch said; torch's own log of it, a traceback, does not come out."""

    def fn(p: Any, x: Any) -> Any:
        return F.grouped_mm(x, p).square().sum()

    if _knows_shapes(fn, torch.randn(2, 16, 8), torch.randn(2, 4, 16)):
        pytest.skip("this torch knows the shapes")
    records, log = [], logging.getLogger("torch._subclasses.fake_tensor")
    listening = logging.Handler()
    listening.emit = records.append
    log.addHandler(listening)
    before = list(log.filters)
    try:
        report = psgrad.explain(fn, torch.randn(2, 16, 8), torch.randn(5, 2, 4, 16))
    finally:
        log.removeHandler(listening)
    place = f"test_explain.py:{fn.__code__.co_firstlineno + 1} in {fn.__qualname__}"
    assert report.note.startswith(f"shapes alone were not enough at {place}: Expected inputs of BF16 type but got ")
    assert report.note.endswith("; found out by running the first sample")
    declined = "vmap: not the rows of a matrix with one of several matrices each"
    assert [(row.op, row.how) for row in report.rows] == [("torch._grouped_mm", declined)]
    assert not records
    assert "Traceback" not in capfd.readouterr().err
    assert log.filters == before


def test_logs_of_other_threads_are_not_touched() -> None:
    heard, log = [], logging.getLogger("torch._subclasses.fake_tensor")
    listening = logging.Handler()
    listening.emit = lambda record: heard.append(record.getMessage())

    def fn(p: Any, x: Any) -> Any:
        log.error("of this thread")
        other = threading.Thread(target=log.error, args=("of another",))
        other.start()
        other.join()
        return (x * p).sum()

    log.addHandler(listening)
    try:
        psgrad.explain(fn, torch.randn(4), torch.randn(5, 4))
    finally:
        log.removeHandler(listening)
    assert set(heard) == {"of another"}


def test_loop_over_samples() -> None:
    """Where vmap refuses, the note says where; explain itself has no fallback to warn of."""

    def fn(p: Any, x: Any) -> Any:
        h = F.linear(x, p["w"])
        return h.sum() * float(x.numpy().max())

    report = psgrad.explain(fn, {"w": torch.randn(3, 4)}, torch.randn(5, 4))
    place = f"test_explain.py:{fn.__code__.co_firstlineno + 2} in {fn.__qualname__}"
    assert report.note == f"vmap refuses at {place}: every sample runs on its own, in a loop"
    assert report.rows == ()
    assert report.unused == ()
    assert "vmap refuses" in str(report)


def test_fn_with_aux() -> None:
    params, x = {"w": torch.randn(3, 4)}, torch.randn(5, 4)
    report = psgrad.explain(lambda p, x: (F.linear(x, p["w"]).sum(), {"x": x}), params, x, has_aux=True)
    assert [row.how for row in report.rows] == ["rule linear"]


def test_in_dims() -> None:
    params, x = {"w": torch.randn(3, 4)}, torch.randn(4, 5)
    report = psgrad.explain(lambda p, s: F.linear(s[0] * s[1], p["w"]).sum(), params, (x, 2.0), in_dims=(1, None))
    assert report.samples == 5
    assert [row.how for row in report.rows] == ["rule linear"]


# ---- what it must not do ------------------------------------------------------------------------------


def _resident() -> Any:
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * 4096


def test_a_hundred_thousand_samples() -> None:
    """The result would be 200 MB and the activations ten times that: nothing of the kind is allocated."""
    fn, params, (x, y) = conv_net(1)
    n = 10**5
    gc.collect()
    before = _resident()
    report = psgrad.explain(fn, params, (x.expand(n, *x.shape[1:]), y.expand(n)), max_bytes=10**8)
    assert _resident() - before < 100 << 20
    assert report.samples == n
    assert report.result_bytes == n * 4 * report.parameters > 10**8
    assert report.peak_bytes > 10 * 10**8
    assert 100 < report.chunk_size < n / 10
    assert "100000 samples" in str(report)


def test_a_large_parameter() -> None:
    """N x P would be 400 GB."""
    params, x = {"w": torch.zeros(1).expand(1000, 10**5)}, torch.zeros(1, 1).expand(1000, 10**5)
    before = _resident()
    report = psgrad.explain(lambda p, x: F.linear(x, p["w"]).sum(), params, x)
    assert report.result_bytes == 4 * 10**11
    assert _resident() - before < 1 << 30


def test_a_million_samples_with_a_data_dependent_branch() -> None:
    fn, params, (x, y) = conv_net(1)
    n = 10**6
    before = _resident()
    function = lambda p, s: fn(p, s) * (2 if s[0].sum() > 0 else 1)
    report = psgrad.explain(function, params, (x.expand(n, *x.shape[1:]), y.expand(n)))
    assert _resident() - before < 100 << 20
    assert report.result_bytes == n * 4 * report.parameters
    assert report.note


def test_nothing_is_changed() -> None:
    fn, params, batch = conv_net()
    model = ConvNet()
    fn, params = psgrad.from_module(model, F.cross_entropy)
    state = {k: (id(t), t._version, t.detach().clone()) for k, t in model.state_dict(keep_vars=True).items()}
    rng, grad, dtype = torch.get_rng_state(), torch.is_grad_enabled(), torch.get_default_dtype()
    inputs = [(t, t.clone(), t._version) for t in (*params.values(), *batch)]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        psgrad.explain(fn, params, batch, max_bytes=10**7)
    assert torch.equal(torch.get_rng_state(), rng)
    assert (torch.is_grad_enabled(), torch.get_default_dtype()) == (grad, dtype)
    assert torch._C._functorch.maybe_current_level() is None
    assert not torch.overrides._get_current_function_mode_stack()
    assert not torch.utils._python_dispatch._get_current_dispatch_mode_stack()
    assert all(torch.equal(t, value) and t._version == version for t, value, version in inputs)
    for k, t in model.state_dict(keep_vars=True).items():
        identity, version, value = state[k]
        assert (id(t), t._version) == (identity, version)
        assert torch.equal(t, value)
        assert t.grad is None


def test_buffers_are_left_alone() -> None:
    """A batch norm in training, on fake tensors and on the first sample."""
    model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4)).train()
    before = {k: b.clone() for k, b in model.named_buffers()}
    fn, params = psgrad.from_module(model, F.mse_loss)
    batch = (torch.randn(5, 3, 6, 6), torch.randn(5, 4, 4, 4))
    psgrad.explain(fn, params, batch)
    psgrad.explain(lambda p, s: fn(p, s) * (2 if s[0].sum() > 0 else 1), params, batch)
    assert all(type(b) is torch.Tensor and torch.equal(b, before[k]) for k, b in model.named_buffers())


def test_surroundings_that_switch_gradients_off() -> None:
    fn, params, batch = conv_net()
    want = str(psgrad.explain(fn, params, batch))
    with torch.no_grad():
        assert str(psgrad.explain(fn, params, batch)) == want
    with torch.inference_mode():
        assert str(psgrad.explain(fn, params, batch)) == want


@pytest.mark.parametrize("wrapped", [False, True])
def test_backward_that_runs_no_line_of_the_users(wrapped: bool) -> None:
    """Torch's words about devices, which nobody has chosen, are not told."""
    net = nn.Sequential(nn.Linear(2, 8), nn.Tanh(), nn.Linear(8, 1))
    params = {name: p.detach() for name, p in net.named_parameters()}

    def fn(p: dict[str, torch.Tensor], z: torch.Tensor) -> torch.Tensor:
        u = lambda p, z: torch.func.functional_call(net, p, (z,))[0]
        return torch.func.hessian(u, argnums=1)(p, z).trace()

    report = psgrad.explain(functools.partial(fn) if wrapped else fn, params, torch.randn(6, 2))
    home = "fn" if wrapped else f"test_explain.py:{fn.__code__.co_firstlineno} in {fn.__qualname__}"
    assert report.note in (
        "",  # a torch that follows it
        f"shapes alone were not enough at the backward of {home}: torch does not follow this derivative on tensors "
        "without memory; found out by running the first sample",
    )
    assert {row.how for row in report.rows} == {"rule linear"}


def test_use_inside_another_transform_is_placed_where_fn_is_written() -> None:
    def fn(w: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        return torch.vmap(lambda row: torch.tanh(row * x).sum())(w).sum()

    (row,) = psgrad.explain(fn, torch.randn(4, 3), torch.randn(5, 3)).rows
    assert (row.how, row.place) == (
        "vmap: inside another transform",
        f"test_explain.py:{fn.__code__.co_firstlineno} in {fn.__qualname__}",
    )
