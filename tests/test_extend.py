"""Rules of one's own: faults in them are named, and they run however their op is called."""

import contextlib
import dataclasses
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

import psgrad
from psgrad.extend import Call, Composite, Decline, Dense, Factor, Fold, Outer, Plan, Rule, register, unregister

N = 6


@contextlib.contextmanager
def registered(rule: Any) -> Iterator[None]:
    """The rule in the table, for as long as the block runs."""
    register(rule)
    try:
        yield
    finally:
        unregister(rule)


# ---- a rule that is right -----------------------------------------------------------------------------------


def bind(input: Any, other: Any) -> Call | Decline:
    return Call(input, (other,)) if other.shape == (1,) else Decline("more than one number")


def forward(options: Any, x: Tensor, w: Tensor) -> Any:
    y = torch.hypot(x, w)
    return y, (y,)


def backward(options: Any, g: Tensor, x: Tensor, params: Any, saved: Any, needs: Any) -> Any:
    each = g / saved[0]
    gx = each * x if needs.x else None
    return gx, [Dense(params[0] * each.flatten(1).sum(1, keepdim=True))]


HYPOT = Rule("hypot", (torch.hypot,), bind, forward, backward, saves=1)


def fn(p: dict[str, Tensor], x: Tensor) -> Tensor:
    return torch.hypot(x * p["scale"], p["w"]).sin().sum()


def problem() -> tuple[dict[str, Tensor], Tensor]:
    params = {"scale": torch.randn(5, dtype=torch.float64), "w": torch.randn(1, dtype=torch.float64)}
    return params, torch.randn(N, 5, dtype=torch.float64)


def test_the_rule_that_the_others_are_broken_from() -> None:
    with registered(HYPOT):
        psgrad.testing.check(fn, *problem(), rules={"params['scale']": ["mul"], "params['w']": ["hypot"]})


# ---- faults -------------------------------------------------------------------------------------------------


def raises(error: Exception) -> Callable[..., Any]:
    def step(*args: Any, **kwargs: Any) -> Any:
        raise error

    return step


def returns(change: Callable[..., Any], step: Callable[..., Any]) -> Callable[..., Any]:
    """`step` with its answer changed."""
    return lambda *args: change(step(*args))


@dataclasses.dataclass(frozen=True, eq=False)
class Unwritten(Factor):
    """A factor that says its shape, and fails when it is written out."""

    grads: Tensor

    plan = Plan("never", 0, 0)
    shape = (1,)

    def dense(self, out: Tensor | None = None) -> Tensor:
        raise ArithmeticError("no gradients today")


MEND = "mend the rule, or let its bind return Decline(reason) for such a call: plain vmap does it, exactly."
PAIR = "return the output and a tuple of tensors for the backward, perhaps ()."
FACTORS = "return the gradient of x and a list with one factor per parameter."
ONE_GRADIENT = "its backward must yield one gradient per sample: mend the rule."

# what is broken, what is said of it, the remedy, and the rule's own exception
Fault = tuple[dict[str, Any], str, str, type[Exception] | None]
FAULTS: dict[str, Fault] = {
    "bind raises": ({"bind": raises(KeyError("x"))}, "the bind of {} raised KeyError: 'x'", MEND, KeyError),
    "bind takes other arguments": (
        {"bind": lambda input: Call(input, ())},
        "the bind of {} raised TypeError: <lambda>() takes 1 positional argument but 2 were given",
        MEND,
        TypeError,
    ),
    "bind returns None": (
        {"bind": lambda input, other: None},
        "the bind of {} returned nothing (None)",
        "return Call(x, params, options) or Decline(reason).",
        None,
    ),
    "bind returns a tuple": (
        {"bind": lambda input, other: (input, (other,))},
        "the bind of {} returned a tuple",
        "return Call(x, params, options) or Decline(reason).",
        None,
    ),
    "bind names no input": (
        {"bind": lambda input, other: Call(None, (input, other))},
        "the bind of {} says that the input is nothing (None)",
        "x must be a tensor among the arguments.",
        None,
    ),
    "bind names one parameter, not a tuple": (
        {"bind": lambda input, other: Call(input, other)},
        "the bind of {} returned params that are no tuple of tensors",
        "give a tuple; None may be in it.",
        None,
    ),
    "bind leaves a parameter out": (
        {"bind": lambda input, other: Call(input, (), other.value)},
        "the bind of {} leaves params['w'] out",
        "name it as x, in params or in others, or return Decline(reason).",
        None,
    ),
    "before raises": (
        {"bind": lambda input, other: Call(input, (other,), before=raises(ArithmeticError()))},
        "the call's before of {} raised ArithmeticError",
        MEND,
        ArithmeticError,
    ),
    "after raises": (
        {"bind": lambda input, other: Call(input, (other,), after=raises(ArithmeticError()))},
        "the call's after of {} raised ArithmeticError",
        MEND,
        ArithmeticError,
    ),
    "after loses samples": (
        {"bind": lambda input, other: Call(input, (other,), after=lambda y: y[1:])},
        "the call's after of {} gives an output of shape (5, 5) for 6 samples",
        "the output must have the sample axis in front, as the input has: mend the rule.",
        None,
    ),
    "forward raises": (
        {"forward": raises(ZeroDivisionError("one\ntwo"))},
        "the forward of {} raised ZeroDivisionError: one",
        MEND,
        ZeroDivisionError,
    ),
    "forward returns the output alone": (
        {"forward": returns(lambda pair: pair[0], forward)},
        "the forward of {} returned a Tensor",
        PAIR,
        None,
    ),
    "forward returns three": (
        {"forward": returns(lambda pair: (*pair, None), forward)},
        "the forward of {} returned a tuple of 3",
        PAIR,
        None,
    ),
    "forward returns a pair of tensors": (
        {"forward": returns(lambda pair: (pair[0], pair[0]), forward)},
        "the forward of {} returned a pair of something else",
        PAIR,
        None,
    ),
    "forward saves a number": (
        {"forward": returns(lambda pair: (pair[0], (1.5,)), forward)},
        "the forward of {} saves a float at 0",
        "only tensors are saved for the backward: put the rest in options.",
        None,
    ),
    "forward sums over samples": (
        {"forward": returns(lambda pair: (pair[0].sum(0), pair[1]), forward)},
        "the forward of {} gives an output of shape (5,) for 6 samples",
        "the output must have the sample axis in front, as the input has: mend the rule.",
        None,
    ),
    "native, but without a graph": (
        {"forward": lambda options, x, w: (torch.hypot(x.detach(), w.detach()), ()), "native": True},
        "the forward of {} gives an output without a graph",
        "torch must be able to differentiate the forward of a native rule: mend it, or drop native=True.",
        None,
    ),
    "backward raises": (
        {"backward": raises(IndexError("tuple index out of range"))},
        "the backward of {} raised IndexError: tuple index out of range",
        MEND,
        IndexError,
    ),
    "native, and the backward raises": (
        {"backward": backward, "native": True},
        "the backward of {} raised IndexError: tuple index out of range",
        MEND,
        IndexError,
    ),
    "backward returns None": (
        {"backward": lambda *args: None},
        "the backward of {} returned nothing (None)",
        FACTORS,
        None,
    ),
    "backward returns three": (
        {"backward": returns(lambda pair: (*pair, None), backward)},
        "the backward of {} returned a tuple of 3",
        FACTORS,
        None,
    ),
    "backward returns one factor, not a list": (
        {"backward": returns(lambda pair: (pair[0], pair[1][0]), backward)},
        "the backward of {} returned a pair of something else",
        FACTORS,
        None,
    ),
    "no gradient for x": (
        {"backward": returns(lambda pair: (None, pair[1]), backward)},
        "the backward of {} yields no gradient for x",
        "return one where needs.x says so: zeros, where it is zero.",
        None,
    ),
    "a gradient for x of another shape": (
        {"backward": returns(lambda pair: (torch.ones(N, 1), pair[1]), backward)},
        "the backward of {} yields a gradient of shape (6, 1) for x of shape (6, 5)",
        "it must be a tensor of the shape of x: mend the rule.",
        None,
    ),
    "a number for x": (
        {"backward": returns(lambda pair: (0.0, pair[1]), backward)},
        "the backward of {} yields a float for x of shape (6, 5)",
        "it must be a tensor of the shape of x: mend the rule.",
        None,
    ),
    "too few factors": (
        {"backward": returns(lambda pair: (pair[0], []), backward)},
        "the backward of {} yields 0 factors for 1 parameters",
        "return one for each of the call's params, None where needs.params says that nobody asks.",
        None,
    ),
    "no factor": (
        {"backward": returns(lambda pair: (pair[0], [None]), backward)},
        "the backward of {} yields no factor for params['w']",
        "return one where needs.params says so: zeros, where it is zero.",
        None,
    ),
    "a tensor for a factor": (
        {"backward": returns(lambda pair: (pair[0], [pair[1][0].grads]), backward)},
        "the backward of {} yields a Tensor for params['w']",
        "it must be a Factor: wrap gradients (N, *shape) in Dense.",
        None,
    ),
    "gradients of another shape": (
        {"backward": returns(lambda pair: (pair[0], [Dense(torch.ones(N, 5))]), backward)},
        "the backward of {} yields (6, 5) gradients for params['w'], not (6, 1)",
        ONE_GRADIENT,
        None,
    ),
    "gradients of too few samples": (
        {"backward": returns(lambda pair: (pair[0], [Dense(torch.ones(1, 1))]), backward)},
        "the backward of {} yields (1, 1) gradients for params['w'], not (6, 1)",
        ONE_GRADIENT,
        None,
    ),
}
WRITTEN: dict[str, Fault] = {  # faults that show where a factor is written out
    "a factor that fails": (
        {"backward": returns(lambda pair: (pair[0], [Unwritten(torch.ones(N, 1))]), backward)},
        "the factor of {} raised ArithmeticError: no gradients today",
        MEND,
        ArithmeticError,
    ),
    "a factor of parts that do not fit": (
        {"backward": returns(lambda pair: (pair[0], [Outer(torch.ones(N, 2, 1), torch.ones(N, 3, 1))]), backward)},
        "the factor of {} raised RuntimeError: "
        "Expected size for first two dimensions of batch2 tensor to be: [6, 3] but got: [6, 2].",
        MEND,
        RuntimeError,
    ),
}


@pytest.mark.parametrize("fault", FAULTS | WRITTEN)
def test_a_fault_in_a_rule_is_named(fault: str) -> None:
    """It does not hide behind the loop over samples, which would answer with a warning."""
    changes, said, remedy, cause = (FAULTS | WRITTEN)[fault]
    with registered(dataclasses.replace(HYPOT, **changes)), pytest.raises(psgrad.RuleError) as error:
        psgrad.per_sample_grads(fn, *problem())
    line = fn.__code__.co_firstlineno + 1
    said = said.format("rule 'hypot' for torch.hypot")
    assert str(error.value) == f"{said}\n  called at test_extend.py:{line} in fn\n  {remedy}"
    assert type(error.value.__cause__) is (type(None) if cause is None else cause)


QUANTITIES: dict[str, Callable[..., Any]] = {
    "per_sample_norms": psgrad.per_sample_norms,
    "clipped_grad": lambda *problem: psgrad.clipped_grad(*problem, 1.0),
    "weighted_grad": lambda *problem: psgrad.weighted_grad(*problem, torch.ones(N)),
    "gram": psgrad.gram,
    "grad_stats": psgrad.grad_stats,
    "factored_grads": psgrad.factored_grads,
    "rules_used": psgrad.testing.rules_used,
    "in chunks": lambda *problem: psgrad.per_sample_grads(*problem, chunk_size=4),
    "max_bytes": lambda *problem: psgrad.per_sample_grads(*problem, max_bytes=1 << 20),
}


@pytest.mark.parametrize("quantity", QUANTITIES)
@pytest.mark.parametrize("fault", ["bind raises", "forward raises", "backward raises", "no factor"])
def test_a_fault_in_a_rule_is_named_by_every_quantity(fault: str, quantity: str) -> None:
    rule = dataclasses.replace(HYPOT, **FAULTS[fault][0])
    with registered(rule), pytest.raises(psgrad.RuleError, match=r"rule 'hypot' for torch\.hypot"):
        QUANTITIES[quantity](fn, *problem())


def test_an_error_of_psgrads_own_passes() -> None:
    """A rule may refuse a call for good."""
    refusal = psgrad.UnsupportedOpError("not on a Sunday")
    for step in ("bind", "forward", "backward"):
        rule = dataclasses.replace(HYPOT, **{step: raises(refusal)})
        with registered(rule), pytest.raises(psgrad.UnsupportedOpError, match="not on a Sunday"):
            psgrad.per_sample_grads(fn, *problem())


@pytest.mark.parametrize("error", [MemoryError(), torch.OutOfMemoryError("CUDA out of memory")])
@pytest.mark.parametrize("step", ["bind", "forward", "backward"])
def test_no_memory_is_no_fault_of_the_rule(step: str, error: Exception) -> None:
    with registered(dataclasses.replace(HYPOT, **{step: raises(error)})), pytest.raises(type(error)):
        psgrad.per_sample_grads(fn, *problem())


# ---- a wrong call is the caller's ---------------------------------------------------------------------------


@pytest.mark.parametrize("step", ["bind", "forward"])
def test_what_the_op_itself_refuses_is_said_in_its_own_words(step: str) -> None:
    """Whatever the rule raises there."""
    w, x = torch.randn(3, dtype=torch.float64), torch.randn(N, 5, dtype=torch.float64)
    bound = {"bind": lambda input, other: Call(input, (other,))}
    rule = dataclasses.replace(HYPOT, **(bound | {step: raises(ValueError("the rule's own words"))}))
    with registered(rule), pytest.raises(RuntimeError, match=r"The size of tensor a \(5\) must match") as error:
        psgrad.per_sample_grads(lambda w, x: torch.hypot(x, w).sum(), w, x)
    assert error.value.__cause__ is None


@pytest.mark.filterwarnings("ignore:psgrad runs fn in a loop")  # of which the first samples come to an end
def test_a_sample_that_the_op_itself_refuses() -> None:
    """One that is not the first, of an op that looks at values."""

    @torch.library.custom_op("psgrad_tests::picky", mutates_args=())
    def picky(x: Tensor, w: Tensor) -> Tensor:
        if bool((x < 0).any()):
            raise ValueError("below zero")
        return x * w

    picky.register_autograd(lambda ctx, g: (None, g))
    rule = Rule("picky", (picky,), lambda x, w: Call(x, (w,)), lambda options, x, w: (picky(x, w), ()), backward)
    x = torch.tensor([[1.0], [2.0], [-1.0]])
    with registered(rule), pytest.raises(ValueError, match="below zero"):
        psgrad.per_sample_grads(lambda w, x: picky(x, w).sum(), torch.ones(1), x)


# ---- folds and composites -----------------------------------------------------------------------------------


def fold_bind(randomness: str, input: Tensor, other: Tensor) -> Any:
    return (input, other), None


def fold_run(options: Any, x: Tensor, w: Tensor) -> Tensor:
    return torch.hypot(x, w)


FOLDS: dict[str, Fault] = {
    "bind raises": ({"bind": raises(KeyError("x"))}, "the bind of {} raised KeyError: 'x'", MEND, KeyError),
    "bind returns None": (
        {"bind": lambda *args: None},
        "the bind of {} returned nothing (None)",
        "return (tensors, options) with a tuple of tensors, or Decline(reason).",
        None,
    ),
    "bind returns the tensors alone": (
        {"bind": lambda randomness, x, w: (x, w)},
        "the bind of {} returned a tuple",
        "return (tensors, options) with a tuple of tensors, or Decline(reason).",
        None,
    ),
    "run raises": ({"run": raises(KeyError("x"))}, "the run of {} raised KeyError: 'x'", MEND, KeyError),
    "run returns None": (
        {"run": lambda *args: None},
        "the run of {} gives nothing (None) as the output",
        "the output must be a tensor: mend the rule.",
        None,
    ),
    "run sums over samples": (
        {"run": lambda options, x, w: torch.hypot(x, w).sum(0)},
        "the run of {} gives an output of shape (5,) for 6 samples",
        "the output must have the sample axis in front, as the input has: mend the rule.",
        None,
    ),
}


def test_a_fold_of_ones_own_runs() -> None:
    runs = []
    fold = Fold("fold", (torch.hypot,), fold_bind, lambda *args: runs.append(len(args[1])) or fold_run(*args))
    with registered(fold):
        psgrad.testing.check(fn, *problem())
    assert runs == [N]


@pytest.mark.parametrize("fault", FOLDS)
def test_a_fault_in_a_fold_is_named(fault: str) -> None:
    changes, said, remedy, cause = FOLDS[fault]
    fold = Fold("fold", (torch.hypot,), fold_bind, fold_run)._replace(**changes)
    with registered(fold), pytest.raises(psgrad.RuleError) as error:
        psgrad.per_sample_grads(fn, *problem())
    line = fn.__code__.co_firstlineno + 1
    said = said.format("rule 'fold' for torch.hypot")
    assert str(error.value) == f"{said}\n  called at test_extend.py:{line} in fn\n  {remedy}"
    assert type(error.value.__cause__) is (type(None) if cause is None else cause)


def test_a_fault_in_a_composite_is_named() -> None:
    composite = Composite("parts", (torch.hypot,), raises(NameError("name 'torhc' is not defined")))
    with registered(composite), pytest.raises(psgrad.RuleError) as error:
        psgrad.per_sample_grads(fn, *problem())
    assert str(error.value) == (
        "the run of rule 'parts' for torch.hypot raised NameError: name 'torhc' is not defined\n"
        f"  called at test_extend.py:{fn.__code__.co_firstlineno + 1} in fn\n"
        f"  {MEND}"
    )


def test_samples_may_part_ways_in_a_composite() -> None:
    """What psgrad raises for its own purposes is not taken for a fault."""

    def run(x: Tensor, w: Tensor) -> Tensor:
        root = (x * x + w * w).sqrt()
        return root if x.sum() > 0 else root.abs()

    with registered(Composite("parts", (torch.hypot,), run)):
        psgrad.testing.check(fn, *problem())
        used = psgrad.testing.rules_used(fn, *problem())
    assert used["Tensor.mul(params['w'])"] == ["add", "add"]


# ---- a rule that looks at values ----------------------------------------------------------------------------


def test_a_rule_may_look_at_values() -> None:
    """Where psgrad first runs `fn` on shapes alone, it cannot; then psgrad asks samples."""

    def looking(options: Any, x: Tensor, w: Tensor) -> Any:
        return forward(options, x, w) if bool((w != 7).all()) else None

    with registered(dataclasses.replace(HYPOT, forward=looking)):
        params, batch = problem()
        report = psgrad.explain(fn, params, batch)
        bounded = psgrad.per_sample_grads(fn, params, batch, max_bytes=1 << 20)
        free = psgrad.per_sample_grads(fn, params, batch)
    assert [row.how for row in report.rows] == ["rule mul", "rule hypot"]
    assert report.note.startswith("fn looks at values")
    torch.testing.assert_close(bounded, free)


# ---- ops of torch.library -----------------------------------------------------------------------------------


@torch.library.custom_op("psgrad_tests::cube", mutates_args=())
def cube(x: Tensor, w: Tensor, shift: float = 0.5) -> Tensor:
    return (x + shift) * w**3


def _keep(ctx: Any, inputs: Any, output: Any) -> None:
    x, w, ctx.shift = inputs
    ctx.save_for_backward(x, w)


def _cube_grads(ctx: Any, g: Tensor) -> Any:
    x, w = ctx.saved_tensors
    return g * w**3, (3 * w**2 * g * (x + ctx.shift)).sum_to_size(w.shape), None


cube.register_autograd(_cube_grads, setup_context=_keep)

# The same under a name with several overloads.
LIBRARY = torch.library.Library("psgrad_tests", "FRAGMENT")
LIBRARY.define("power(Tensor x, Tensor w, float shift=0.5) -> Tensor")
LIBRARY.define("power.text(Tensor x, Tensor w, str shift) -> Tensor")
for overload in ("power", "power.text"):
    LIBRARY.impl(overload, lambda x, w, shift=0.5: (x + float(shift)) * w**3, "CompositeImplicitAutograd")


def bind_cube(x: Any, w: Any, shift: float = 0.5) -> Call | Decline:
    return Call(x, (w,), float(shift)) if w.dim() == 1 else Decline("not one number per feature")


def cube_forward(shift: float, x: Tensor, w: Tensor) -> Any:
    return (x + shift) * w**3, ()


def cube_backward(shift: float, g: Tensor, x: Tensor, params: Any, saved: Any, needs: Any) -> Any:
    (w,) = params
    gw = (3 * w**2 * g * (x + shift)).flatten(1, -2).sum(1) if needs.params[0] else None
    return g * w**3 if needs.x else None, [None if gw is None else Dense(gw)]


def cubes(*functions: Any, name: str = "cube") -> Rule:
    return Rule(name, functions, bind_cube, cube_forward, cube_backward)


def check_cube(call: Callable[..., Tensor], rule: str = "cube") -> None:
    """`call` is right, and the rule runs."""
    params = {"scale": torch.randn(3, dtype=torch.float64), "w": torch.randn(3, dtype=torch.float64)}
    batch = torch.randn(N, 2, 3, dtype=torch.float64)
    rules = {"params['scale']": ["mul"], "params['w']": [rule]}
    psgrad.testing.check(lambda p, x: call(x * p["scale"], p["w"]).sin().sum(), params, batch, rules=rules)


CUBE = {"custom_op": cube, "op": torch.ops.psgrad_tests.cube, "overload": torch.ops.psgrad_tests.cube.default}


@pytest.mark.parametrize("called", CUBE)
@pytest.mark.parametrize("key", CUBE)
def test_a_custom_op_meets_its_rule_however_it_is_called(key: str, called: str) -> None:
    with registered(cubes(CUBE[key])):
        check_cube(CUBE[called])
        check_cube(lambda x, w: CUBE[called](x, w=w, shift=2.0))
    assert not set(CUBE.values()) & set(psgrad.registry.rule.RULES)


POWER = torch.ops.psgrad_tests.power
CALLS: dict[str, Callable[..., Tensor]] = {
    "op, one overload": lambda x, w: POWER(x, w, 1.5),
    "op, the other overload": lambda x, w: POWER(x, w, shift="2"),
    "one overload": lambda x, w: POWER.default(x, w),
    "the other overload": lambda x, w: POWER.text(x, w, "3"),
}


@pytest.mark.parametrize("call", CALLS)
def test_a_rule_for_an_op_is_for_all_its_overloads(call: str) -> None:
    with registered(cubes(POWER)):
        check_cube(CALLS[call])


@pytest.mark.filterwarnings("ignore:There is a performance drop")  # a newer torch, of an op without a batching rule
@pytest.mark.parametrize("call", CALLS)
def test_a_rule_for_one_overload_is_for_no_other(call: str) -> None:
    with registered(cubes(POWER.text)):
        check_cube(CALLS[call], "cube" if "other" in call else "vmap")


@pytest.mark.parametrize("call", CALLS)
def test_a_later_rule_for_an_overload_replaces_that_of_the_op(call: str) -> None:
    with registered(cubes(POWER)), registered(cubes(POWER.text, name="later")):
        check_cube(CALLS[call], "later" if "other" in call else "cube")


def test_a_call_that_no_overload_takes_is_refused_in_torchs_words() -> None:
    with registered(cubes(POWER)), pytest.raises(RuntimeError, match="failed to match any schema"):
        psgrad.per_sample_grads(lambda w, x: POWER(x, w, [1]).sum(), torch.ones(3), torch.ones(N, 2, 3))


def test_errors_name_an_op_as_people_write_it() -> None:
    rule = dataclasses.replace(cubes(cube), forward=raises(KeyError("x")))
    with registered(rule), pytest.raises(psgrad.RuleError, match=r"'cube' for torch\.ops\.psgrad_tests\.cube raised"):
        check_cube(cube)


# ---- autograd Functions -------------------------------------------------------------------------------------


class Cube(torch.autograd.Function):
    """With setup_context, as torch.func asks."""

    generate_vmap_rule = True

    @staticmethod
    def forward(x: Tensor, w: Tensor, shift: float = 0.5) -> Tensor:
        return (x + shift) * w**3

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        _keep(ctx, inputs, output)

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> Any:
        return _cube_grads(ctx, g)


class OldCube(torch.autograd.Function):
    """With ctx in the forward, which torch refuses inside transforms."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, w: Tensor, shift: float = 0.5) -> Tensor:
        _keep(ctx, (x, w, shift), None)
        return (x + shift) * w**3

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> Any:
        return _cube_grads(ctx, g)


class OtherCube(Cube):
    """Not the class that the rule is for."""


def _takes_keywords() -> bool:
    """Whether torch itself calls a Function with keywords: up to 2.10 only inside a transform."""
    try:
        Cube.apply(torch.ones(2, 3), shift=2.0, w=torch.ones(3))
    except TypeError:
        return False
    return True


TAKES_KEYWORDS = _takes_keywords()


@pytest.mark.parametrize("key", [Cube, Cube.apply], ids=["class", "apply"])
def test_an_autograd_function_meets_its_rule(key: Any) -> None:
    with registered(cubes(key)):
        check_cube(Cube.apply)
        check_cube(lambda x, w: Cube.apply(x, w, 2.0))
        if TAKES_KEYWORDS:
            check_cube(lambda x, w: Cube.apply(x, shift=2.0, w=w))
        check_cube(OtherCube.apply, "vmap")
    check_cube(Cube.apply, "vmap")


def test_a_rule_for_an_autograd_function_declines_to_vmap() -> None:
    fn = lambda p, x: Cube.apply(x, p["w"][None]).sin().sum()
    params, batch = {"w": torch.randn(3, dtype=torch.float64)}, torch.randn(N, 2, 3, dtype=torch.float64)
    with registered(cubes(Cube)):
        psgrad.testing.check(fn, params, batch, rules={"params['w']": ["vmap"]})


def test_an_autograd_function_of_parameters_alone_is_computed_once() -> None:
    calls = []

    def fn(p: dict[str, Tensor], x: Tensor) -> Tensor:
        return F.linear(x, Cube.apply(p["v"], p["w"])).sin().sum()

    def counted(options: Any, x: Tensor, w: Tensor) -> Any:
        calls.append(x.shape)
        return cube_forward(options, x, w)

    params = {"v": torch.randn(4, 3, dtype=torch.float64), "w": torch.randn(3, dtype=torch.float64)}
    with registered(dataclasses.replace(cubes(Cube), forward=counted)):
        psgrad.testing.check(fn, params, torch.randn(N, 3, dtype=torch.float64))
    assert calls == []


def test_an_autograd_function_without_setup_context_meets_its_rule() -> None:
    """Torch refuses it inside transforms before a mode sees it."""
    rule = cubes(OldCube.apply)
    bind = lambda x, w, shift=0.5: rule.bind(x, w, shift)
    with registered(dataclasses.replace(rule, bind=bind)):
        check_cube(lambda x, w: OldCube.apply(x, w))
        if hasattr(OldCube.apply, "__func__"):
            check_cube(OldCube.apply)
        else:  # where `apply` is no Python, what was looked up before the run is out of reach: the loop, and it says so
            with pytest.warns(psgrad.FallbackWarning, match="psgrad runs fn in a loop over samples"):
                psgrad.testing.check(
                    lambda w, x, kept=OldCube.apply: kept(x, w).sin().sum(), torch.randn(3), torch.randn(N, 2, 3)
                )


def test_errors_name_an_autograd_function_as_people_write_it() -> None:
    rule = dataclasses.replace(cubes(Cube), forward=raises(KeyError("x")))
    with registered(rule), pytest.raises(psgrad.RuleError, match=r"rule 'cube' for Cube\.apply raised"):
        check_cube(Cube.apply)


def test_a_wrong_call_of_an_autograd_function_is_its_callers() -> None:
    with registered(cubes(Cube)), pytest.raises(TypeError, match="missing a required argument: 'w'"):
        psgrad.per_sample_grads(lambda w, x: Cube.apply(x).sum(), torch.ones(3), torch.ones(N, 2, 3))


# ---- what register takes ------------------------------------------------------------------------------------


def test_register_refuses_what_is_no_rule() -> None:
    with pytest.raises(psgrad.ArgumentTypeError) as error:
        register(torch.hypot)  # type: ignore[arg-type]
    assert str(error.value) == (
        "register takes a Rule, a Fold or a Composite, not a builtin_function_or_method\n  make one of psgrad.extend's."
    )


def test_register_refuses_a_bare_function() -> None:
    with pytest.raises(psgrad.ArgumentTypeError) as error:
        register(dataclasses.replace(HYPOT, functions=torch.hypot))
    assert str(error.value) == (
        "the functions of rule 'hypot' are a builtin_function_or_method, not a tuple\n"
        "  give a tuple of them, also where there is one."
    )


@pytest.mark.parametrize(("key", "named"), [(torch.nn.Linear, "the class Linear"), ("mm", "a str")])
def test_register_refuses_what_no_mode_sees(key: Any, named: str) -> None:
    before = dict(psgrad.registry.rule.RULES)
    with pytest.raises(psgrad.ArgumentTypeError) as error:
        register(dataclasses.replace(HYPOT, functions=(torch.hypot, key)))
    assert str(error.value) == (
        f"a rule is for functions that torch lets a mode see, not for {named}\n"
        "  give torch functions, ops of torch.ops or torch.library.custom_op, or autograd Functions."
    )
    assert before == psgrad.registry.rule.RULES


def test_unregister_takes_out_its_own_rule_alone() -> None:
    later = dataclasses.replace(HYPOT, name="later")
    with registered(later):
        register(HYPOT)
        register(later)
        unregister(HYPOT)
        assert psgrad.testing.rules_used(fn, *problem())["params['w']"] == ["later"]
    assert psgrad.testing.rules_used(fn, *problem())["params['w']"] == ["vmap"]
