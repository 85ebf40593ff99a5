"""What psgrad raises on purpose: whole messages, with the path, the op, the place and the remedy."""

import collections
import contextlib
import dataclasses
import re
import warnings
from collections.abc import Iterator
from typing import Any, NamedTuple

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import psgrad
from psgrad import ArgumentError, ArgumentTypeError, PsgradError, UnsupportedOpError


@contextlib.contextmanager
def raises(cls: Any, message: Any) -> Iterator[Any]:
    """The error has just this class and just this message."""
    with pytest.raises(PsgradError) as caught:
        yield
    assert type(caught.value) is cls
    assert str(caught.value) == message


def linear(p: Any, x: Any) -> Any:
    return F.linear(x, p["w"]).square().sum()


def params() -> Any:
    return {"w": torch.ones(3, 4)}


def batch() -> Any:
    return torch.ones(5, 4)


def call(fn: Any = linear, params: Any = None, batch: Any = None, **options: Any) -> Any:
    given = {"w": torch.ones(3, 4)} if params is None else params
    return psgrad.per_sample_grads(fn, given, torch.ones(5, 4) if batch is None else batch, **options)


def test_classes() -> None:
    """Usual handlers catch psgrad's errors, and one handler catches them all."""
    assert issubclass(ArgumentError, PsgradError)
    assert issubclass(ArgumentError, ValueError)
    assert issubclass(ArgumentTypeError, PsgradError)
    assert issubclass(ArgumentTypeError, TypeError)
    assert issubclass(UnsupportedOpError, PsgradError)
    assert issubclass(UnsupportedOpError, NotImplementedError)
    assert issubclass(psgrad.FallbackWarning, UserWarning)


@pytest.mark.parametrize("name", ["PsgradError", "ArgumentError", "ArgumentTypeError", "UnsupportedOpError"])
def test_tracebacks_show_the_public_name(name: Any) -> None:
    assert getattr(psgrad, name).__module__ == "psgrad"
    assert getattr(psgrad, name).__doc__


# ---- fn -----------------------------------------------------------------------------------------------


def by_its_sample(p: Any, x: Any) -> Any:
    (g,) = torch.autograd.grad(linear(p, x), x, create_graph=True)
    return g.square().sum()


def test_a_sample_that_torch_autograd_differentiates_by() -> None:
    """The batch requires grad, the sample does not; what the message says to do works, and needs no loop."""
    line = by_its_sample.__code__.co_firstlineno + 1
    message = (
        "torch.autograd says in fn: One of the differentiated Tensors does not require grad\n"
        f"  called at test_errors.py:{line} in by_its_sample\n"
        "  fn gets its sample without a graph, even where the batch requires grad: "
        "differentiate by it with torch.func.grad in fn."
    )
    given = torch.randn(5, 4, requires_grad=True)
    with raises(UnsupportedOpError, message):
        call(by_its_sample, batch=given)
    remedy = lambda p, x: torch.func.grad(linear, 1)(p, x).square().sum()
    wanted = [
        torch.autograd.grad(by_its_sample(p := {"w": torch.ones(3, 4, requires_grad=True)}, x), p["w"])[0]
        for x in given
    ]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        torch.testing.assert_close(call(remedy, batch=given)["w"], torch.stack(wanted))


def test_fn_that_is_not_callable() -> None:
    with raises(ArgumentTypeError, "fn is a Tensor, not a function\n  give fn(params, sample) -> loss."):
        call(torch.ones(3))
    with raises(ArgumentTypeError, "fn is nothing (None), not a function\n  give fn(params, sample) -> loss."):
        psgrad.per_sample_grads(None, params(), batch())


def test_fn_that_returns_nothing() -> None:
    message = (
        "fn must return the loss of one sample as a tensor, but returned nothing (None)\n"
        "  return a tensor with one element."
    )
    with raises(ArgumentTypeError, message):
        call(lambda p, x: None)


def test_fn_that_returns_a_number() -> None:
    message = (
        "fn must return the loss of one sample as a tensor, but returned a float\n  return a tensor with one element."
    )
    with raises(ArgumentTypeError, message):
        call(lambda p, x: 1.0)


def test_fn_that_returns_a_tuple_without_has_aux() -> None:
    message = (
        "fn must return the loss of one sample as a tensor, but returned a tuple "
        "(with has_aux=True it may return (loss, aux))\n"
        "  return a tensor with one element."
    )
    with raises(ArgumentTypeError, message):
        call(lambda p, x: (linear(p, x), x))


def test_fn_that_returns_a_vector() -> None:
    message = (
        "fn must return one number per sample, but its loss has shape (3,)\n"
        "  reduce it, for example with .mean() or .sum(); fn sees one sample, without the batch axis.\n"
        "  For every output by itself there are per_sample_jacobians and ntk."
    )
    with raises(ArgumentError, message):
        call(lambda p, x: F.linear(x, p["w"]))


def test_fn_that_returns_no_elements() -> None:
    message = (
        "fn must return one number per sample, but its loss has shape (0,)\n"
        "  reduce it, for example with .mean() or .sum(); fn sees one sample, without the batch axis.\n"
        "  For every output by itself there are per_sample_jacobians and ntk."
    )
    with raises(ArgumentError, message):
        call(lambda p, x: F.linear(x, p["w"])[:0])


@pytest.mark.parametrize("dtype", [torch.int64, torch.bool, torch.complex64])
def test_fn_that_returns_no_real_number(dtype: Any) -> None:
    message = f"fn must return a real loss, but its dtype is {dtype}\n  return a floating-point tensor."
    with raises(ArgumentTypeError, message):
        call(lambda p, x: linear(p, x).to(dtype))


@pytest.mark.parametrize(
    ("out", "kind"),
    [
        (lambda loss: loss, "a Tensor"),
        (lambda loss: (loss, 1, 2), "a tuple"),
        (lambda loss: [loss, 1], "a list"),
        (lambda loss: None, "nothing (None)"),
    ],
)
def test_fn_that_returns_no_aux(out: Any, kind: Any) -> None:
    message = (
        f"fn must return (loss, aux) with has_aux=True, but returned {kind}\n"
        "  return the two as a tuple, or drop has_aux."
    )
    with raises(ArgumentTypeError, message):
        call(lambda p, x: out(linear(p, x)), has_aux=True)


def test_fn_that_returns_aux_and_loss_the_wrong_way_round() -> None:
    message = (
        "fn must return the loss of one sample as a tensor, but returned a dict\n  return a tensor with one element."
    )
    with raises(ArgumentTypeError, message):
        call(lambda p, x: ({"x": x}, linear(p, x)), has_aux=True)


def test_aux_leaf_of_the_wrong_type() -> None:
    message = "aux['names'][1] is a str, not a tensor or a number\n  aux travels back per sample: return tensors only."
    with raises(ArgumentTypeError, message):
        call(lambda p, x: (linear(p, x), {"names": [1, "a"], "x": x}), has_aux=True)


@pytest.mark.parametrize("way", ["chunks", "loop", "none"])
def test_fn_is_checked_whatever_way_it_runs(way: Any) -> None:
    """In chunks, in the loop over samples, and with aux for an empty batch."""

    def fn(p: Any, x: Any) -> Any:
        if way == "loop":
            x = x[x > 0]  # data-dependent shape: vmap refuses
        return p["w"][:, 0] * x.sum(), x.sum()

    message = (
        "fn must return one number per sample, but its loss has shape (3,)\n"
        "  reduce it, for example with .mean() or .sum(); fn sees one sample, without the batch axis.\n"
        "  For every output by itself there are per_sample_jacobians and ntk."
    )
    with raises(ArgumentError, message):
        call(
            fn, batch=torch.ones(0 if way == "none" else 5, 4), has_aux=True, chunk_size=2 if way == "chunks" else None
        )


# ---- params -------------------------------------------------------------------------------------------


class Layer(NamedTuple):
    w: torch.Tensor
    lr: float


def test_params_leaf_that_is_not_a_tensor() -> None:
    message = (
        "params['layers'][1].lr is a float, not a tensor\n"
        "  params holds just what is differentiated: let fn close over the rest."
    )

    with raises(ArgumentTypeError, message):
        call(params={"layers": [torch.ones(3), Layer(torch.ones(3), 0.1)]})


@pytest.mark.parametrize("dtype", [torch.int64, torch.bool])
def test_params_leaf_that_has_no_gradient(dtype: Any) -> None:
    message = (
        f"params['counts'][0] has dtype {dtype}, which has no gradient\n"
        "  params holds just what is differentiated: let fn close over the rest."
    )
    with raises(ArgumentTypeError, message):
        call(params={"counts": [torch.ones(3, dtype=dtype)], "w": torch.ones(3, 4)})


@pytest.mark.parametrize("empty", [{}, [], (), None, {"a": {}, "b": [None]}])
def test_params_without_a_tensor(empty: Any) -> None:
    with raises(ArgumentError, "params holds no tensor\n  give a pytree with the tensors to differentiate."):
        psgrad.per_sample_grads(lambda p, x: x.sum(), empty, batch())


# ---- batch and in_dims --------------------------------------------------------------------------------


def test_batch_leaves_of_different_lengths() -> None:
    message = (
        "batch leaves disagree on the number of samples: batch[0] has 5, batch[1]['y'] has 4, batch[1]['z'] has 5\n"
        "  every leaf needs one row per sample along its in_dims axis; in_dims=None shares a leaf."
    )
    with raises(ArgumentError, message):
        call(batch=(torch.ones(5, 4), {"y": torch.ones(4), "z": torch.ones(5)}))


def test_batch_leaves_of_different_lengths_along_in_dims() -> None:
    message = (
        "batch leaves disagree on the number of samples: batch[0] has 4, batch[1] has 3\n"
        "  every leaf needs one row per sample along its in_dims axis; in_dims=None shares a leaf."
    )
    with raises(ArgumentError, message):
        call(batch=(torch.ones(5, 4), torch.ones(3)), in_dims=(1, 0))


@pytest.mark.parametrize(("given", "in_dims"), [(torch.ones(5, 4), None), ((), 0), (None, 0), ({"x": None}, 0)])
def test_batch_without_a_sample_axis(given: Any, in_dims: Any) -> None:
    message = "batch has no tensor with a sample axis\n  give at least one tensor, with in_dims other than None."
    with raises(ArgumentError, message):
        psgrad.per_sample_grads(linear, params(), given, in_dims=in_dims)


def test_batch_leaf_that_is_not_a_tensor() -> None:
    message = (
        "batch['lr'] is a float, not a tensor\n"
        "  make it a tensor with one row per sample, or give it in_dims=None: the same for all samples."
    )
    with raises(ArgumentTypeError, message):
        call(batch={"x": torch.ones(5, 4), "lr": 0.1})


def test_batch_leaf_that_is_a_mapping_but_no_dict() -> None:
    """As a tokenizer returns it."""
    message = (
        "batch[0] is a UserDict, not a tensor\n"
        "  give dict(batch[0]): dicts are taken apart, and other mappings are not."
    )
    with raises(ArgumentTypeError, message):
        call(batch=(collections.UserDict(x=torch.ones(5, 4)), torch.ones(5)))


def test_sample_that_is_no_pair() -> None:
    fn, given = psgrad.from_module(nn.Linear(4, 1), F.mse_loss)
    message = (
        "a sample of from_module's fn must be (inputs, target), but is a tuple of 1\n"
        "  give batch=(inputs, targets), with None where there are no targets; inputs may be a tensor, a tuple\n"
        "  or a dict."
    )
    with pytest.raises(ArgumentError) as error:
        psgrad.per_sample_norms(fn, given, (torch.ones(5, 4),))
    assert str(error.value) == message


def test_batch_leaf_without_axes() -> None:
    message = (
        "batch[1] has shape (), which has no axis 0\n"
        "  the sample axis is in_dims (0 unless given); in_dims=None shares a leaf between all samples."
    )
    with raises(ArgumentError, message):
        call(batch=(torch.ones(5, 4), torch.ones(())))


@pytest.mark.parametrize("dim", [2, -3])
def test_in_dims_out_of_range(dim: Any) -> None:
    message = (
        f"batch has shape (5, 4), which has no axis {dim}\n"
        "  the sample axis is in_dims (0 unless given); in_dims=None shares a leaf between all samples."
    )
    with raises(ArgumentError, message):
        call(in_dims=dim)


@pytest.mark.parametrize(
    ("dim", "kind"), [("0", "a str"), (0.0, "a float"), (True, "a bool"), (torch.zeros(()), "a Tensor")]
)
def test_in_dims_of_the_wrong_type(dim: Any, kind: Any) -> None:
    message = f"in_dims for batch is {kind}\n  give an int, or None for a shared leaf."
    with raises(ArgumentTypeError, message):
        call(in_dims=dim)
    message = f"in_dims for batch['x'] is {kind}\n  give an int, or None for a shared leaf."
    with raises(ArgumentTypeError, message):
        call(batch={"x": torch.ones(5, 4), "y": torch.ones(5)}, in_dims={"x": dim, "y": 0})


@pytest.mark.parametrize(
    ("in_dims", "where"),
    [
        ((None, 0), "in_dims has 2 entries, batch 3"),
        ([0, 0, 0], "in_dims is a list, batch a tuple"),
        ({"x": 0}, "in_dims is a dict, batch a tuple"),
        ((0, (0, 0), 0), "in_dims[1] is a tuple, batch[1] a leaf"),
        ((None, 0, {"a": 0}), "in_dims[2] has the keys ['a'], batch[2] ['a', 'b']"),
        ((None, 0, {"a": 0, "b": [0, 0]}), "in_dims[2]['b'] has 2 entries, batch[2]['b'] 1"),
    ],
    ids=str,
)
def test_in_dims_that_does_not_fit(in_dims: Any, where: Any) -> None:
    given = (torch.ones(5, 4), torch.ones(5), {"a": torch.ones(5), "b": [torch.ones(5)]})
    message = (
        f"in_dims={in_dims!r} does not fit the batch: {where}\n"
        "  give one int, or a pytree prefix of the batch as in torch.vmap."
    )
    with raises(ArgumentError, message):
        call(batch=given, in_dims=in_dims)


# ---- options ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("value", ["diferent", None, True])
def test_unknown_randomness(value: Any) -> None:
    message = (
        f'randomness={value!r} is not one of "different", "same", "error"\n'
        "  different: each sample draws its own; same: all share one draw; error: drawing is refused."
    )
    with raises(ArgumentError, message):
        call(randomness=value)
    with raises(ArgumentError, message):
        psgrad.explain(linear, params(), batch(), randomness=value)


@pytest.mark.parametrize("option", ["chunk_size", "max_bytes"])
@pytest.mark.parametrize("value", [0, -1, 1.5, "2", True])
def test_invalid_sizes(option: Any, value: Any) -> None:
    with raises(ArgumentError, f"{option}={value!r} is not a positive int\n  give one, or None for no bound."):
        call(**{option: value})


def test_chunk_size_and_max_bytes_at_once() -> None:
    message = "chunk_size and max_bytes are both given\n  give one: max_bytes works out a chunk size."
    with raises(ArgumentError, message):
        call(chunk_size=2, max_bytes=10**6)


def test_max_bytes_that_no_sample_fits() -> None:
    """The number that the message asks for is enough, and the least that is."""
    with pytest.raises(ArgumentError) as caught:
        call(max_bytes=1)
    least = int(re.search(r"give at least max_bytes=(\d+)", str(caught.value)).group(1))
    message = (
        f"max_bytes=1 is too little: one sample at a time needs {least:,}\n"
        f"  give at least max_bytes={least}, or make the sample smaller."
    )
    assert str(caught.value) == message
    assert type(caught.value) is ArgumentError
    torch.testing.assert_close(call(max_bytes=least), call())
    with pytest.raises(ArgumentError, match="is too little"):
        call(max_bytes=least - 1)


# ---- out ----------------------------------------------------------------------------------------------


def test_out_of_another_structure() -> None:
    remedy = "  give a tensor (N, *shape) for every parameter."
    message = f"out has another structure than params: it lacks out['w'], it has out['v']\n{remedy}"
    with raises(ArgumentError, message):
        call(out={"v": torch.ones(5, 3, 4)})
    message = f"out has another structure than params: it lacks out['w'], it has out\n{remedy}"
    with raises(ArgumentError, message):
        call(out=torch.ones(5, 3, 4))


def test_out_that_is_not_a_tensor() -> None:
    with raises(ArgumentTypeError, "out['w'] is a float, not a tensor\n  give a tensor of shape (5, 3, 4)."):
        call(out={"w": 1.0})


@pytest.mark.parametrize(
    ("shape", "dtype"), [((4, 3, 4), torch.float32), ((3, 4), torch.float32), ((5, 3, 4), torch.float64)]
)
def test_out_of_another_shape_or_dtype(shape: Any, dtype: Any) -> None:
    message = (
        f"out['w'] has shape {shape}, dtype {dtype}, device cpu\n"
        "  the gradients have shape (5, 3, 4), dtype torch.float32, device cpu."
    )
    with raises(ArgumentError, message):
        call(out={"w": torch.ones(shape, dtype=dtype)})


def test_out_on_another_device() -> None:
    message = (
        "out['w'] has shape (5, 3, 4), dtype torch.float32, device meta\n"
        "  the gradients have shape (5, 3, 4), dtype torch.float32, device cpu."
    )
    with raises(ArgumentError, message):
        call(out={"w": torch.ones(5, 3, 4, device="meta")})


def test_out_that_requires_grad() -> None:
    message = "out['w'] requires grad, and cannot be written in place\n  give out.detach()."
    with raises(ArgumentError, message):
        call(out={"w": torch.ones(5, 3, 4, requires_grad=True)})


def test_out_that_is_expanded() -> None:
    message = "out['w'] has several numbers at one place in memory\n  give a tensor that is not expanded: clone it."
    for out in (torch.ones(1, 3, 4).expand(5, 3, 4), torch.ones(40).as_strided((5, 3, 4), (7, 3, 1))):
        with raises(ArgumentError, message):
            call(out={"w": out})


def test_out_that_shares_memory_with_what_is_read() -> None:
    memory = torch.randn(100)
    w, x = memory[:12].view(3, 4), memory[12:32].view(5, 4)
    fn = lambda p, s: (p["w"] @ s[1]).sin().sum()
    for start, name in ((11, "params['w']"), (31, "batch[1]")):
        message = (
            f"out['w'] shares memory with {name}, which would be overwritten\n  give the gradients memory of their own."
        )
        with raises(ArgumentError, message):
            psgrad.per_sample_grads(fn, {"w": w}, (None, x), out={"w": memory[start : start + 60].view(5, 3, 4)})
    out = {"w": memory[32:92].view(5, 3, 4)}  # beside both
    want = psgrad.per_sample_grads(fn, {"w": w}, (None, x))
    torch.testing.assert_close(psgrad.per_sample_grads(fn, {"w": w}, (None, x), out=out), want)


def test_out_over_a_parameter_that_is_a_tensor_alone() -> None:
    w = torch.randn(4)
    message = "out shares memory with params, which would be overwritten\n  give the gradients memory of their own."
    with raises(ArgumentError, message):
        psgrad.per_sample_grads(lambda w, x: (w * x).sum(), w, torch.ones(1, 4), out=w[None])


PIECES = {
    "the same": lambda rows: (rows[:, :4], rows[:, :4]),
    "columns that meet": lambda rows: (rows[:, :4], rows[:, 3:7]),
    "pieces that meet": lambda rows: (rows.view(-1)[:20].view(5, 4), rows.view(-1)[19:39].view(5, 4)),
    "columns around the edge": lambda rows: (rows[:, :4], rows.view(-1)[7:47].view(5, 8)[:, :4]),
    "rows and columns": lambda rows: (rows[:4, :5].mT, rows[:, 3:7]),
}


@pytest.mark.parametrize("pieces", PIECES)
def test_out_that_shares_memory_with_itself(pieces: Any) -> None:
    a, b = PIECES[pieces](torch.ones(8, 8))
    params = {"a": torch.ones(4), "b": torch.ones(4)}
    with raises(ArgumentError, "out['b'] shares memory with out['a']\n  give each gradient memory of its own."):
        psgrad.per_sample_grads(
            lambda p, x: (p["a"] * p["b"] * x).sum(), params, torch.ones(5, 4), out={"a": a[:5], "b": b[:5]}
        )


# ---- ops ----------------------------------------------------------------------------------------------


def test_embedding_with_max_norm() -> None:
    def fn(p: Any, tokens: Any) -> Any:
        return F.embedding(tokens, p["tok"]["weight"], max_norm=1.0).sum()

    message = (
        "F.embedding(max_norm=1.0) changes params['tok']['weight'] in place\n"
        f"  called at test_errors.py:{fn.__code__.co_firstlineno + 1} in test_embedding_with_max_norm.<locals>.fn\n"
        "  per-sample gradients need parameters that stay put: renormalise before the call instead."
    )
    with raises(UnsupportedOpError, message):
        call(fn, params={"tok": {"weight": torch.ones(7, 3)}}, batch=torch.zeros(5, 2, dtype=torch.long))
    with raises(UnsupportedOpError, message):
        psgrad.explain(fn, {"tok": {"weight": torch.ones(7, 3)}}, torch.zeros(5, 2, dtype=torch.long))


class Encoder(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.tok = nn.Embedding(7, 3, max_norm=2.5)
        self.line = Encoder.forward.__code__.co_firstlineno + 1

    def forward(self, tokens: Tensor) -> Tensor:
        return self.tok(tokens).mean(1)


def test_embedding_module_with_max_norm() -> None:
    """The place is the line of the user's module that calls torch's."""
    model = Encoder()
    fn, given = psgrad.from_module(model, F.mse_loss)
    message = (
        "F.embedding(max_norm=2.5) changes params['tok.weight'] in place\n"
        f"  called at test_errors.py:{model.line} in Encoder.forward\n"
        "  per-sample gradients need parameters that stay put: renormalise before the call instead."
    )
    before = model.tok.weight.detach().clone()
    with raises(UnsupportedOpError, message):
        call(fn, given, (torch.zeros(5, 2, dtype=torch.long), torch.ones(5, 3)))
    assert torch.equal(model.tok.weight, before)


class Normed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.lin, self.norm = nn.Linear(4, 3), nn.BatchNorm1d(3)
        self.line = Normed.forward.__code__.co_firstlineno + 1

    def forward(self, x: Tensor) -> Tensor:
        return self.norm(self.lin(x))


def test_batch_norm_over_one_element() -> None:
    model = Normed()
    fn, given = psgrad.from_module(model, F.mse_loss)
    message = (
        "F.batch_norm(training=True) with params['norm.weight'] normalises over a single value per channel\n"
        f"  called at test_errors.py:{model.line} in Normed.forward\n"
        "  a sample is normalised by its own statistics: call model.eval(), or use group or layer norm instead."
    )
    with raises(UnsupportedOpError, message):
        call(fn, given, (torch.ones(5, 4), torch.ones(5, 3)))
    with raises(UnsupportedOpError, message):
        psgrad.explain(fn, given, (torch.ones(5, 4), torch.ones(5, 3)))


def test_batch_norm_over_one_element_without_its_own_parameters() -> None:
    """Frozen or absent, the weight is not in params: the op is refused all the same."""

    def fn(p: Any, x: Any) -> Any:
        return F.batch_norm(F.linear(x[None], p["w"]), None, None, training=True).sum()

    place = f"test_errors.py:{fn.__code__.co_firstlineno + 1} in {fn.__qualname__}"
    message = (
        "F.batch_norm(training=True) with its weight normalises over a single value per channel\n"
        f"  called at {place}\n"
        "  a sample is normalised by its own statistics: call model.eval(), or use group or layer norm instead."
    )
    with raises(UnsupportedOpError, message):
        call(fn)


def test_randomness_that_is_refused() -> None:
    """randomness="error" means what it says: no fallback draws behind one's back."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        with pytest.raises(Exception, match="random"):
            call(lambda p, x: F.dropout(F.linear(x, p["w"])).sum(), randomness="error")


# ---- from_module --------------------------------------------------------------------------------------


def test_from_module_of_no_module() -> None:
    message = "model is a function, not a torch.nn.Module\n  write fn(params, sample) -> loss yourself."
    with raises(ArgumentTypeError, message):
        psgrad.from_module(linear, F.mse_loss)


def test_from_module_without_a_trainable_parameter() -> None:
    message = "no parameter of the model has requires_grad\n  set it on those to differentiate."
    for model in (nn.Linear(3, 2).requires_grad_(False), nn.Tanh()):
        with raises(ArgumentError, message):
            psgrad.from_module(model, F.mse_loss)


@pytest.mark.filterwarnings("ignore:Lazy modules are a new feature")
def test_from_module_of_a_lazy_module() -> None:
    message = (
        "parameter '1.weight' of the model has no shape yet\n  call the model once, so that its lazy modules are made."
    )
    with raises(ArgumentError, message):
        psgrad.from_module(nn.Sequential(nn.Tanh(), nn.LazyLinear(2)), F.mse_loss)


def test_from_module_with_a_loss_that_is_not_callable() -> None:
    with raises(ArgumentTypeError, "loss is a str, not a function\n  give loss(output, target)."):
        psgrad.from_module(nn.Linear(3, 2), "mse")


# ---- explain checks as the call itself does -----------------------------------------------------------


def test_explain_checks_its_arguments() -> None:
    with raises(ArgumentTypeError, "fn is a str, not a function\n  give fn(params, sample) -> loss."):
        psgrad.explain("fn", params(), batch())
    with raises(ArgumentError, "params holds no tensor\n  give a pytree with the tensors to differentiate."):
        psgrad.explain(linear, {}, batch())
    message = "batch has no tensor with a sample axis\n  give at least one tensor, with in_dims other than None."
    with raises(ArgumentError, message):
        psgrad.explain(linear, params(), batch(), in_dims=None)
    message = (
        "fn must return one number per sample, but its loss has shape (3,)\n"
        "  reduce it, for example with .mean() or .sum(); fn sees one sample, without the batch axis.\n"
        "  For every output by itself there are per_sample_jacobians and ntk."
    )
    with raises(ArgumentError, message):
        psgrad.explain(lambda p, x: F.linear(x, p["w"]), params(), batch())


@pytest.mark.parametrize("value", [0, -1, 1.5, "2", True])
def test_explain_checks_max_bytes(value: Any) -> None:
    with raises(ArgumentError, f"max_bytes={value!r} is not a positive int\n  give one, or None for no bound."):
        psgrad.explain(linear, params(), batch(), max_bytes=value)


# ---- what is not psgrad's ------------------------------------------------------------------------------


@pytest.mark.filterwarnings("ignore::psgrad.FallbackWarning")
def test_errors_of_torch_for_one_sample_come_out_as_they_are() -> None:
    with pytest.raises(IndexError, match="index out of range"):
        call(lambda p, t: F.embedding(t, p["w"]).sum(), batch=torch.tensor([0, 3]))


def test_errors_of_torch_come_out_as_they_are() -> None:
    """A wrong shape, an index out of range: torch's own message, not a wrapped one."""
    with pytest.raises(RuntimeError, match="shapes cannot be multiplied"):
        call(batch=torch.ones(5, 7))
    with pytest.raises(IndexError, match="index out of range"):
        call(lambda p, t: F.embedding(t, p["w"]).sum(), batch=torch.tensor([3, 4]))
    with pytest.raises(TypeError, match="linear"):
        call(lambda p, x: F.linear(x, p["w"], wrong=1).sum())


def test_errors_of_torch_say_what_fn_was_given() -> None:
    """fn is at fault: a note has the dtypes and shapes of the one sample that it saw."""
    given = (torch.ones(5, 7), torch.ones(5, 2, dtype=torch.int64))
    with pytest.raises(RuntimeError, match="cannot be multiplied") as error:
        call(lambda p, s: F.linear(s[0], p["w"]).sum(), batch=given)
    note = "psgrad called fn with one sample, detached: batch[0] torch.float32 (7,), batch[1] torch.int64 (2,)"
    assert error.value.__notes__ == [note]
    with pytest.raises(ArgumentError, match="one number per sample") as error:
        call(lambda p, x: x)
    assert not hasattr(error.value, "__notes__")  # our own say it all


def test_batches_that_are_not_tensors_yet() -> None:
    data = torch.utils.data.TensorDataset(torch.ones(5, 4))
    for given in (data, torch.utils.data.DataLoader(data)):
        message = (
            f"batch is a {type(given).__name__}, not a tensor\n"
            "  give one of the batches that a DataLoader makes of it, and call once for each."
        )
        with raises(ArgumentTypeError, message):
            call(batch=given)
    message = (
        "batch[0][1] has shape (), which has no axis 0\n"
        "  the sample axis is in_dims (0 unless given); in_dims=None shares a leaf between all samples.\n"
        "  is the batch a list of samples? stack them: default_collate(batch)."
    )
    with raises(ArgumentError, message):
        call(batch=[(torch.ones(4), torch.tensor(i)) for i in range(5)])


def test_params_that_are_not_tensors_yet() -> None:
    @dataclasses.dataclass
    class Weights:
        w: torch.Tensor

    message = "params is a Weights, not a tensor\n  give its tensors in a dict, a list, a tuple or a NamedTuple."
    with raises(ArgumentTypeError, message):
        call(params=Weights(torch.ones(3, 4)))
    with raises(ArgumentTypeError, "params['w'] is a ndarray, not a tensor\n  make it one with torch.as_tensor."):
        call(params={"w": torch.ones(3, 4).numpy()})


@pytest.mark.filterwarnings("ignore:.*torch.jit")
def test_scripted_modules_are_refused() -> None:
    message = (
        "model is a RecursiveScriptModule of torch.jit, whose ops nobody sees\n  give the module that it was made from."
    )
    with raises(ArgumentTypeError, message):
        psgrad.from_module(torch.jit.script(nn.Linear(3, 2)), F.cross_entropy)


def test_trees_of_another_structure_are_told_by_their_leaves() -> None:
    model = nn.Sequential(*[nn.Linear(3, 3) for _ in range(4)])
    fn, own = psgrad.from_module(model, F.cross_entropy)
    given = torch.ones(2, 3), torch.zeros(2, dtype=torch.int64)
    message = (
        "direction has another structure than params: it lacks direction['0.bias'], direction['0.weight'], "
        "direction['1.bias'] and 5 more, it has direction[0], direction[1]\n"
        "  give a tensor for every parameter, such as what weighted_grad returns."
    )
    with raises(ArgumentError, message):
        psgrad.per_sample_dots(fn, own, given, [torch.ones(3), torch.ones(3)])
    with pytest.raises(ArgumentError, match=r"other has .*\n  give a FactoredGrads, or a tensor for every parameter"):
        psgrad.factored_grads(fn, own, given).dots(given)
    with pytest.raises(ArgumentError, match=r"normalize has .*\n  give moments for every parameter: .*exp_avg_sq"):
        psgrad.projected_grads(fn, own, given, 4, normalize=torch.optim.Adam(model.parameters()).state_dict())
