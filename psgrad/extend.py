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
...     gw = params[0] * each.reshape(len(x), -1).sum(1, keepdim=True)  # (N, 1)
...     return gx, [Dense(gw)]
>>> rule = register(Rule("hypot", (torch.hypot,), bind, forward, backward, saves=1))
>>> fn = lambda p, x: torch.hypot(x, p["w"]).sin().sum()
>>> params, batch = {"w": torch.tensor([0.2])}, torch.randn(6, 5)
>>> psgrad.testing.check(fn, params, batch, rules={"params['w']": ["hypot"]})
>>> psgrad.extend.unregister(rule)

The functions of a rule are torch functions, ops made with `torch.library.custom_op` or found in `torch.ops`, and
autograd Functions. The rule runs however these are called. An autograd Function goes by its class or its `apply`;
`bind` takes what `apply` got. A rule whose forward torch differentiates is `native`, and says the factors alone:

>>> from psgrad.extend import Outer
>>> class Project(torch.autograd.Function):
...     @staticmethod
...     def forward(x, w):
...         return x @ w.T
...     @staticmethod
...     def setup_context(ctx, inputs, output):
...         ctx.save_for_backward(*inputs)
...     @staticmethod
...     def backward(ctx, g):
...         x, w = ctx.saved_tensors
...         return g @ w, g.T @ x
>>> def backward(options, g, x, params, saved, needs):
...     return g @ params[0] if needs.x else None, [Outer(x, g)]
>>> rule = register(Rule(
...     "project", (Project,), lambda x, w: Call(x, (w,)), lambda options, x, w: (x @ w.T, ()), backward, native=True
... ))
>>> fn = lambda p, x: Project.apply(x, p["w"]).sin().sum()
>>> params, batch = {"w": torch.randn(4, 3)}, torch.randn(6, 2, 3)
>>> psgrad.testing.check(fn, params, batch, rules={"params['w']": ["project"]})
>>> psgrad.extend.unregister(rule)

A rule that raises, or returns what does not fit (no `Call`, too few factors, gradients of another shape), is a
`psgrad.RuleError` that names the rule, the op, the line of the call and the remedy. It never hides behind the loop
over samples. An error that the op itself raises for a wrong call stays the op's own. What nobody checks is the maths:
`psgrad.testing.check` does.
"""

from .factors.base import Factor
from .factors.costs import ConvGeometry, Plan
from .factors.dense import Dense, Product
from .factors.matrices import Matrices
from .factors.outer import Outer
from .factors.patches import Patches
from .factors.rows import Rows
from .registry.plugin import register, unregister
from .registry.rule import BatchFold as Fold
from .registry.rule import Call, Composite, Decline, Needs, Param, Rule

__all__ = [
    "Call",
    "Composite",
    "ConvGeometry",
    "Decline",
    "Dense",
    "Factor",
    "Fold",
    "Matrices",
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
