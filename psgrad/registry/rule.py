"""What a rule is, and the table that says which torch function has which rule.

The core knows no concrete op: `rules/` fills this table, `extend` lets others do so.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from torch import Tensor

from ..factors.base import Factor
from .params import Param as Param


class Call(NamedTuple):
    """One use of parameters by an op, in the rule's own terms.

    `before` and `after` bring the input to the rule's layout and the output back to the op's. They see
    tensors with the sample axis in front, `others` behind the input or the output, and are differentiated
    by ordinary autograd.
    """

    x: Any  # the op's input: a tensor, or a Param used as one
    params: tuple[Any, ...]  # each a Param, a constant tensor, or None
    options: Any = None  # what else the rule needs to know; hashable
    before: Callable[..., Tensor] | None = None
    after: Callable[..., Tensor] | None = None
    others: tuple[Any, ...] = ()  # further inputs, each a tensor, a Param used as one, or None

    @property
    def is_complex(self) -> bool:
        """Whether an operand is of complex numbers, for which no rule is written."""
        return any([t is not None and t.dtype.is_complex for t in (self.x, *self.params)])  # noqa: C419, a third less


class Decline(NamedTuple):
    """A rule's answer to a call that it leaves to plain vmap: exact, dense, and why."""

    reason: str


class Needs(NamedTuple):
    """Which gradients a backward is asked for."""

    x: bool
    params: tuple[bool, ...]


Saved = tuple[Tensor, ...]
Bind = Callable[..., Call | Decline]
Forward = Callable[..., tuple[Tensor, Saved]]
Backward = Callable[..., tuple[Tensor | None, Sequence[Factor | None]]]


@dataclass(frozen=True, eq=False)
class Rule:
    """How one family of ops gives per-sample gradients.

    - `bind(*args, **kwargs)` takes the arguments as the op got them, parameters as `Param`, and says which is the
      input, which are the parameters and what the options are: a `Call`, or `Decline(reason)`.
    - `forward(options, x, *params)` runs the op for the whole batch: x is (N, ...), a parameter is stored once. It
      returns the output and the tensors that the backward wants besides x.
    - `backward(options, g, x, params, saved, needs)` returns the gradient of x and one Factor per parameter, None
      where `needs` says that nobody asks.
    - `plain(options, x, *params)` is the output alone, by ops that torch differentiates any number of times; only for
      rules whose forward is not.
    """

    name: str
    functions: tuple[Callable[..., Any], ...]
    bind: Bind
    forward: Forward
    backward: Backward
    plain: Callable[..., Tensor] | None = None
    native: bool = False  # torch differentiates forward by x itself; nothing is saved, the output is new
    keeps_input: bool = True  # False: the backward reads only the shape of x
    saves: int = 0  # how many tensors forward returns for the backward
    only_params: bool = False  # plain vmap is as good where no operand is a parameter
    takes_integers: bool = False  # integers among the parameters may differ between samples: forward gets (N, ...)
    linear: bool = False  # y = x W^T + b by params (W, b), W (O, I) or (H, O, I): also inside transforms of `fn`'s own
    autocast: str = "keep"  # the dtype under autocast: "lower", "float32", their " off the CPU", or the operands'
    factors: tuple[str, ...] = ()  # the factor types it yields, for the table in docs/supported.md


class BatchFold(NamedTuple):
    """An op without parameters that is faster with the sample axis folded into its own batch axis.

    - `bind(randomness, *args, **kwargs)` sorts the arguments into tensors and options, or declines.
    - `run(options, *tensors)` gets the (N, ...) operands.
    """

    name: str
    functions: tuple[Callable[..., Any], ...]
    bind: Callable[..., tuple[tuple[Any, ...], Any] | Decline]
    run: Callable[..., Tensor]


class Composite(NamedTuple):
    """An op that is taken apart into functions that have rules: run(*args, **kwargs) stands in for it."""

    name: str  # of the rule that its parts go by
    functions: tuple[Callable[..., Any], ...]
    run: Callable[..., Any]


Entry = Rule | BatchFold | Composite
RULES: dict[Any, Entry] = {}
# Functions whose arguments say which key of the table is meant: (func, args, kwargs) -> that key, and the call.
REDIRECTS: dict[Any, Callable[[Any, Any, Any], tuple[Any, Any, Any]]] = {}


def fill(rule: Entry) -> None:
    """Put a rule of this package in the table for each of its functions; those of others go by `plugin.register`."""
    for function in rule.functions:
        RULES[function] = rule
