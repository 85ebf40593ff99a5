"""A linear map of the sample inside a transform of `fn`'s own: `grad`, `jvp`, `vmap`, `hessian`.

The layers of such a transform lie above vmap's, and its tensors have parts. y = x W^T + b is linear in x, so that each
part is a call of the same rule, by W or by W transposed, and yields a factor of its own:

    jvp    the tangent of y is dx W^T     -> the map without b
    grad   the cotangent of x is g W      -> the map of g by W transposed
    vmap   y has K values                 -> the map of K positions

`torch_/parts.py` takes the layers off one by one, until a part is at our own: there the rule runs, for all samples.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from ..registry.params import Param
from ..torch_ import levels, parts


@dataclass(eq=False, frozen=True, slots=True)
class LinearMap:
    """x (K, ..., I) to x W^T + b, or x (K, H, T, I) where W is (H, O, I); K: what inner vmaps run over, 1 at least."""

    weight: Param
    turned: Param  # the weight transposed
    bias: Any  # a Param, a constant tensor, or None
    rule: Callable[[Param, Any, Tensor], Tensor]  # the same of a plain x with samples in front
    constant: Callable[[Param, Any, Tensor], Tensor]  # the same of any x, W and b being constants
    n: int
    level: int  # of the vmap over samples

    def __call__(self, x: Tensor) -> Tensor:
        if not torch.is_grad_enabled():
            return self.constant(self.weight, self.bias, x)
        if levels.current_level() != self.level:
            return parts.apply(self, x)
        return levels.sampled_below(self.level, self._at_samples, levels.lower(levels.alive(x), self.n, self.level))

    @property
    def tangent(self) -> "LinearMap":
        return replace(self, bias=None)

    @property
    def transposed(self) -> "LinearMap":
        return replace(self, weight=self.turned, turned=self.weight, bias=None)

    def _at_samples(self, x: Tensor) -> Tensor:
        """The rule on a plain tensor (N, K, ...): K become positions."""
        if self.weight.dim() == 2:
            return self.rule(self.weight, self.bias, x)
        y = self.rule(self.weight, self.bias, x.transpose(1, 2).flatten(2, 3))  # (N, H, K T, O)
        return y.reshape(*y.shape[:2], x.shape[1], x.shape[3], -1).transpose(1, 2)
