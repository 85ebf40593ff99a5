"""Types that public signatures have in common."""

from typing import TYPE_CHECKING, Any, Literal

if TYPE_CHECKING:
    from typing_extensions import TypeVar  # the default lets people write FactoredGrads without its parameter

    P = TypeVar("P", default=Any)
else:
    from typing import TypeVar

    P = TypeVar("P")  # params: a tensor, or a tree of them

Randomness = Literal["different", "same", "error"]
Nonfinite = Literal["raise", "zero", "propagate"]
