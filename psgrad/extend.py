"""How to add a rule for an op: everything that a rule file needs.

A rule says how a call is bound, how the op runs for the whole batch, and which `Factor` each parameter
gets in the backward. Here is one for `torch.hypot(x, w)` with a single number w:

>>> import torch, psgrad
>>> from psgrad.extend import Call, Dense, Decline, Rule, register
>>> def bind(input, other):
...     return Call(input, (other,)) if other.shape == (1,) else Decline("more than one number")
>>> def forward(options, x, w):
...     y = torch.hypot(x, w)
...     return y, (y,)
>>> def backward(options, g, x, params, saved, needs):
...     each = g / saved[0]
...     gx = each * x if needs.x else None
...     gw = params[0] * each.flatten(1).sum(1, keepdim=True)  # (N, 1)
...     return gx, [Dense(gw)]
>>> rule = register(Rule("hypot", (torch.hypot,), bind, forward, backward, saves=1))
>>> fn = lambda p, x: torch.hypot(x, p["w"]).sin().sum()
>>> params, batch = {"w": torch.tensor([0.2])}, torch.randn(6, 5)
>>> psgrad.testing.check(fn, params, batch, rules={"params['w']": ["hypot"]})
>>> psgrad.extend.unregister(rule)
"""

from ._factors import Dense, Factor, Outer, Product, Rows
from ._patches import Patches
from ._plan import ConvGeometry, Plan
from ._registry import Call, Composite, Decline, Fold, Needs, Param, Rule, register, unregister

__all__ = [
    "Call",
    "Composite",
    "ConvGeometry",
    "Decline",
    "Dense",
    "Factor",
    "Fold",
    "Needs",
    "Outer",
    "Param",
    "Patches",
    "Plan",
    "Product",
    "Rows",
    "Rule",
    "register",
    "unregister",
]
