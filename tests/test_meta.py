"""On any device, shown without one: the case table on meta tensors, whose ops refuse a tensor of another device.

A device that this machine does not have cannot be tested here. What breaks there is mostly a tensor that was made on
the CPU in passing, or a look at values that waits for the device. A meta tensor has a device and no values: both show.
"""

import os
import sys
from collections.abc import Callable, Iterator
from types import FrameType
from typing import Any

import optree
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

import psgrad
from psgrad import display

from .cases import CASES, Case, N

META = torch.device("meta")
_OURS = os.path.dirname(psgrad.__file__) + os.sep
_TORCH = os.path.dirname(torch.__file__) + os.sep
_WIDE = (
    "Outer.spread",
    "wide_norms",
    "_norms_of_any",
    "in_float64",
)  # float64 for a difference of sums; it knows which devices have none
_MADE = (torch.ops.aten.lift_fresh.default,)  # by torch.tensor(...): it comes as an input


def _tensors(values: Any) -> Iterator[Tensor]:
    for value in values:
        if isinstance(value, Tensor):
            yield value
        elif isinstance(value, list | tuple):
            yield from _tensors(value)


class Watch(TorchDispatchMode):
    """Lists what psgrad itself makes on another device than meta, or in float64 of float32 numbers.

    What `fn` makes is its own affair: its calls go through psgrad's frames that have a `func` to pass on. What is
    computed from a tensor on the CPU follows that tensor.
    """

    def __init__(self) -> None:
        super().__init__()
        self.found: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        out = func(*args, **kwargs)
        for t in out if isinstance(out, list | tuple) else (out,):
            if isinstance(t, Tensor) and (t.device != META or t.dtype == torch.float64):
                self._meet(func, t, list(_tensors((*args, *kwargs.values()))))
        return out

    def _meet(self, func: Any, t: Tensor, operands: list[Tensor]) -> None:
        strays = func in _MADE or not any(o.device == t.device for o in operands)
        widens = t.dtype == torch.float64 and not any(o.dtype == t.dtype for o in operands)
        frame = _innermost(sys._getframe(2))
        if frame is None or not _is_psgrads_own(frame):
            return
        code = frame.f_code
        if strays or (widens and code.co_qualname not in _WIDE):
            file = os.path.basename(code.co_filename)
            self.found.append(f"{file}:{frame.f_lineno} in {code.co_qualname}: {func} makes {t.dtype} on {t.device}")


def _innermost(frame: FrameType | None) -> FrameType | None:
    """The innermost frame that is neither torch's nor this file's."""
    while frame is not None and frame.f_code.co_filename.startswith((_TORCH, __file__)):
        frame = frame.f_back
    return frame


def _is_psgrads_own(frame: FrameType) -> bool:
    return frame.f_code.co_filename.startswith(_OURS) and "func" not in frame.f_code.co_varnames


def made_on_meta(case: Case) -> Any:
    with META:
        return case.make(torch.float32)


Shapes = list[tuple[Tensor, tuple[int, ...]]]  # tensors of a result, and the shapes that they should have


def _like(tree: Any, params: Any, *lead: int) -> Shapes:
    pairs = zip(optree.tree_leaves(tree), optree.tree_leaves(params), strict=True)
    return [(t, (*lead, *p.shape)) for t, p in pairs]


def _grads(fn: Any, params: Any, batch: Any) -> Shapes:
    grads, values = psgrad.per_sample_grads(fn, params, batch, return_value=True)
    return [*_like(grads, params, N), (values, (N,))]


def _in_chunks(fn: Any, params: Any, batch: Any) -> Shapes:
    return _like(psgrad.per_sample_grads(fn, params, batch, chunk_size=3), params, N)


def _norms(fn: Any, params: Any, batch: Any) -> Shapes:
    return [(psgrad.per_sample_norms(fn, params, batch), (N,))]


def _clipped(fn: Any, params: Any, batch: Any) -> Shapes:
    grad, norms, values, count, sensitivity = psgrad.clipped_grad(fn, params, batch, 1.0, nonfinite="propagate")
    assert (count, sensitivity) == (N, 1.0)
    return [*_like(grad, params), (norms, (N,)), (values, (N,))]


def _dots(fn: Any, params: Any, batch: Any) -> Shapes:
    return [(psgrad.per_sample_dots(fn, params, batch, params), (N,))]


def _projected(fn: Any, params: Any, batch: Any) -> Shapes:
    found = psgrad.projected_grads(fn, params, batch, 5)
    return [(found, (N, 5)), (psgrad.projected_grads(fn, params, batch, 5, kind="two_sided"), (N, 5))]


def _outputs(fn: Any, params: Any, batch: Any) -> Shapes:
    several = lambda p, s: torch.stack([fn(p, s).reshape(()), fn(p, s).reshape(()).sin()])
    kernel = psgrad.ntk(several, params, batch)
    return [*_like(psgrad.per_sample_jacobians(several, params, batch), params, N, 2), (kernel, (N, N, 2, 2))]


def _gram(fn: Any, params: Any, batch: Any) -> Shapes:
    return [(psgrad.gram(fn, params, batch), (N, N))]


def _weighted(fn: Any, params: Any, batch: Any) -> Shapes:
    return _like(psgrad.weighted_grad(fn, params, batch, torch.ones(N, device=META)), params)


def _kron(fn: Any, params: Any, batch: Any) -> Shapes:
    sizes = {name: (p.shape[0], p[0].numel()) for name, p in display.leaves(params) if p.dim() > 1 and len(p)}
    found: Shapes = []
    for name, (inputs, output) in psgrad.kron_factors(fn, params, batch).items():
        o, i = sizes[name]
        found += [(inputs, (i, i)), (output, (o,) * output.dim())]
    return found


def _mapped(fn: Any, params: Any, batch: Any) -> Shapes:
    names = [(name, p) for name, p in display.leaves(params) if p.dim() > 1 and p.numel()]
    sides = {name: (torch.ones(2, len(p), device=META), torch.ones(p[0].numel(), device=META)) for name, p in names}
    fg = psgrad.factored_grads(fn, params, batch).precondition(sides)
    return [(fg.norms(), (N,)), (fg.dots(), (N, N))]


def _stats(fn: Any, params: Any, batch: Any) -> Shapes:
    stats = psgrad.grad_stats(fn, params, batch)
    scalars = [(t, ()) for t in (stats.trace, stats.sq_mean, stats.noise_scale)]
    return [*_like(stats.mean, params), *_like(stats.variance, params), (stats.sq_norms, (N,)), *scalars]


def _factored(fn: Any, params: Any, batch: Any) -> Shapes:
    fg = psgrad.factored_grads(fn, params, batch)
    return [
        *_like(fg.dense(), params, N),
        *_like(fg.weighted_sum(torch.ones(N, device=META)), params),
        *_like(fg.clipped_sum(1.0, nonfinite="propagate"), params),
        *_like(fg.variance(), params),
        (fg.norms(), (N,)),
        (fg.dots(), (N, N)),
        (fg.dots(params), (N,)),
        (fg.values, (N,)),
    ]


Quantity = Callable[..., Shapes]
EACH: tuple[Quantity, ...] = (_grads, _factored)  # of every case: gradients written out, and all questions to factors
# of every case one of these, to save time
ONE_OF: tuple[Quantity, ...] = (
    _norms,
    _weighted,
    _clipped,
    _dots,
    _gram,
    _stats,
    _in_chunks,
    _kron,
    _mapped,
    _projected,
    _outputs,
)

# Cases whose `fn` wants a number of a tensor, and torch's words where there is none.
_ITEM, _COPY = r"Tensor\.item\(\) cannot be called on meta tensors", "Cannot copy out of meta tensor; no data!"
ASIDE = {
    "branch-agrees": _ITEM,
    "branches-agree": _ITEM,
    "branch-diverges": _ITEM,
    "item": _ITEM,
    "item-agrees": _ITEM,
    "int": _ITEM,
    "float": _ITEM,
    "range": _ITEM,
    "parameters-alone": _ITEM,
    "tolist": _COPY,
    "lstm-list": _COPY,
    "gru-packed": _COPY,
    "rnn-packed": _COPY,
    "lstm-packed-by-sample": "'lengths' argument should be a 1D CPU int64 tensor",
}
NO_OUTPUTS = ("index-scalar",)  # `ntk` runs one sample by itself, where torch wants the number of an index without axes
RUN = [case for case in CASES if case.id not in ASIDE]


def test_few_cases_stand_aside() -> None:
    """What is listed is a case, and the list does not grow unseen."""
    assert len(RUN) == len(CASES) - 14
    assert len(RUN) > 500


@pytest.mark.parametrize("id", ASIDE)
def test_a_case_that_wants_numbers_is_refused_in_torchs_words(id: str) -> None:
    (case,) = (case for case in CASES if case.id == id)
    with pytest.raises((RuntimeError, NotImplementedError), match=ASIDE[id]):
        psgrad.per_sample_grads(*made_on_meta(case))


@pytest.mark.parametrize(("i", "case"), list(enumerate(RUN)), ids=[case.id for case in RUN])
def test_every_quantity_stays_on_its_device(i: int, case: Case, recwarn: pytest.WarningsRecorder) -> None:
    """No tensor of psgrad's own strays, and results have the shape, dtype and device that they should."""
    one = ONE_OF[i % len(ONE_OF)]
    problem, quantities = made_on_meta(case), EACH if one is _outputs and case.id in NO_OUTPUTS else (*EACH, one)
    with Watch() as watch:
        results = [(quantity.__name__, *pair) for quantity in quantities for pair in quantity(*problem)]
    assert watch.found == []
    expected = [(name, shape, torch.float32, META) for name, _, shape in results]
    assert [(name, tuple(t.shape), t.dtype, t.device) for name, t, _ in results] == expected
    assert any(issubclass(w.category, psgrad.FallbackWarning) for w in recwarn) == case.loops


# ---- the watch sees what it is for --------------------------------------------------------------------------


_FORGETFUL = """
def own(torch, t):
    torch.arange(3)
    torch.tensor([1])
    t.double()
    t + 1
    torch.zeros(2, device="cpu") + 1

def passes(torch, func):
    return func(3)
"""


def test_the_watch_sees_what_strays() -> None:
    """In code that says it is psgrad's; what `fn` calls is not psgrad's own."""
    scope: dict[str, Any] = {}
    exec(compile(_FORGETFUL, f"{_OURS}forgetful.py", "exec"), scope)
    with Watch() as watch:
        scope["own"](torch, torch.ones(2, device=META))
        scope["passes"](torch, torch.arange)
        torch.arange(3)
    assert watch.found == [
        "forgetful.py:3 in own: aten.arange.default makes torch.int64 on cpu",
        "forgetful.py:4 in own: aten.lift_fresh.default makes torch.int64 on cpu",
        "forgetful.py:5 in own: aten._to_copy.default makes torch.float64 on meta",
        "forgetful.py:7 in own: aten.zeros.default makes torch.float32 on cpu",
    ]


# ---- questions about shapes ---------------------------------------------------------------------------------


def _linear() -> Any:
    fn = lambda p, x: F.linear(x, p["w"]).sin().sum()
    return fn, {"w": torch.empty(4, 3, device=META)}, torch.empty(N, 5, 3, device=META)


def test_memory_is_planned_for_a_device_that_is_not_there() -> None:
    report = psgrad.explain(*_linear(), max_bytes=1 << 20)
    assert [(row.how, row.factor) for row in report.rows] == [("rule linear", "Outer")]
    assert (report.note, report.chunk_size) == ("", N)
    grads = psgrad.per_sample_grads(*_linear(), max_bytes=1 << 20)["w"]
    assert (grads.shape, grads.device) == ((N, 4, 3), META)


@pytest.mark.parametrize("nonfinite", ["raise", "zero"])
def test_whether_gradients_are_finite_is_not_a_question_of_shapes(nonfinite: Any) -> None:
    with pytest.raises(psgrad.ArgumentError) as error:
        psgrad.clipped_grad(*_linear(), 1.0, nonfinite=nonfinite)
    assert str(error.value) == (
        f"nonfinite={nonfinite!r} depends on numbers, which meta tensors do not have\n"
        '  say nonfinite="propagate" for shapes alone.'
    )


def test_a_bound_may_be_a_tensor_on_the_device() -> None:
    clipped = psgrad.clipped_grad(*_linear(), torch.ones((), device=META), nonfinite="propagate")
    assert clipped.grad["w"].device == META
