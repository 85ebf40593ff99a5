"""How to add a rule for an op: everything that a rule file needs.

A rule says how a call is bound, how the op runs for the whole batch, and which `Factor` each parameter
gets in the backward. Here is one for `torch.nn.functional.prelu` with a single slope:

>>> import torch, psgrad
>>> from psgrad.extend import Call, Dense, Decline, Rule, register
>>> def bind(input, weight):
...     return Call(input, (weight,)) if weight.shape == (1,) else Decline("more than one slope")
>>> def forward(options, x, weight):
...     return torch.nn.functional.prelu(x, weight), ()
>>> def backward(options, g, x, params, saved, needs):
...     gx = torch.where(x > 0, g, g * params[0]) if needs.x else None
...     slope = (g * x.clamp(max=0)).flatten(1).sum(1, keepdim=True)  # (N, 1)
...     return gx, [Dense(slope)]
>>> rule = register(Rule("prelu", (torch.nn.functional.prelu,), bind, forward, backward))
>>> fn = lambda p, x: torch.nn.functional.prelu(x, p["slope"]).square().sum()
>>> params, batch = {"slope": torch.tensor([0.2])}, torch.randn(6, 5)
>>> psgrad.testing.check(fn, params, batch, rules={"params['slope']": ["prelu"]})
>>> psgrad.extend.unregister(rule)
"""

from ._factors import Dense, Factor, Outer, Patches, Rows
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
    "Rows",
    "Rule",
    "register",
    "unregister",
]
