"""Per-sample gradients for any PyTorch function, exactly, at about the price of one backward pass.

Write the loss of one sample as `fn(params, sample)`, or have it made of a module. Then ask for what you need:

>>> model = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.Tanh(), torch.nn.Linear(8, 3))
>>> fn, params = psgrad.from_module(model, torch.nn.functional.cross_entropy)
>>> batch = torch.randn(16, 4), torch.randint(3, (16,))
>>> psgrad.per_sample_grads(fn, params, batch)["0.weight"].shape  # one gradient for each of 16 samples
torch.Size([16, 8, 4])
>>> step = psgrad.clipped_grad(fn, params, batch, 1.0)  # their sum, each clipped to norm 1
>>> step.grad["0.weight"].shape, step.count, step.sensitivity
(torch.Size([8, 4]), 16, 1.0)

A map of the library:

    the function     from_module        a module and a loss as fn and params

    quantities       per_sample_grads   the gradients themselves, one for each sample
                     per_sample_norms   how large each is
                     clipped_grad       their sum, each clipped first: ClippedGrad
                     weighted_grad      their sum with weights, given or a function of the norms
                     gram               inner products, of a batch with itself or with another
                     grad_stats         mean, variance, gradient noise scale: GradStats
                     factored_grads     one backward, then any number of questions: FactoredGrads; concat joins several

    before and after verify             beside a plain loop over a few samples: Verification, with a Comparison for
                                        each quantity; a VerificationError names what differs
                     explain            what a call will do with every parameter: Report

    again and again  compile            a quantity of one function as a graph: Compiled, with its CacheInfo

    going on         use_rules, ops     the rules inside vmap(grad(f)), jacrev, hessian of your own
                     extend             rules for ops of your own; rules holds those of the package
                     testing            the oracle, and checks against it
                     parallel           collectives for functions that have parameters in pieces

    memory           empty_cache        gives back what is kept for the next results

    errors           PsgradError is the base of ArgumentError (a ValueError), ArgumentTypeError (a TypeError),
                     UnsupportedOpError, RuleError, RemoteError (another process of the group failed)
    warnings         FallbackWarning (samples run in a loop), UnusedParametersWarning (every gradient is zero),
                     SharedSeedWarning (processes drew the same random numbers)

The quantities share their options: `in_dims` (where the samples are), `has_aux`, `chunk_size` or `max_bytes` (memory,
never the answer), `randomness`, `progress`; most have `valid` (which samples count) and `group` (processes that share
a batch). `help(psgrad.clipped_grad)` and
its like say the rest. `python -m psgrad` is a demo.
"""

from . import extend, ops, parallel, rules, testing
from .compilation.compiled import CacheInfo, Compiled, compile
from .composable import use_rules
from .errors import (
    ArgumentError,
    ArgumentTypeError,
    FallbackWarning,
    PsgradError,
    RemoteError,
    RuleError,
    SharedSeedWarning,
    UnsupportedOpError,
    UnusedParametersWarning,
    VerificationError,
)
from .factors.warm_memory import empty_cache
from .module import from_module
from .quantities.clipped import clipped_grad
from .quantities.clipping import ClippedGrad
from .quantities.factored import FactoredGrads, concat, factored_grads
from .quantities.grads import per_sample_grads
from .quantities.gram import gram
from .quantities.norms import per_sample_norms
from .quantities.stats import GradStats, grad_stats
from .quantities.sums import weighted_grad
from .report import Report, explain
from .verification import Comparison, Verification, verify

__version__ = "0.2.0"

__all__ = [
    "ArgumentError",
    "ArgumentTypeError",
    "CacheInfo",
    "ClippedGrad",
    "Comparison",
    "Compiled",
    "FactoredGrads",
    "FallbackWarning",
    "GradStats",
    "PsgradError",
    "RemoteError",
    "Report",
    "RuleError",
    "SharedSeedWarning",
    "UnsupportedOpError",
    "UnusedParametersWarning",
    "Verification",
    "VerificationError",
    "clipped_grad",
    "compile",
    "concat",
    "empty_cache",
    "explain",
    "extend",
    "factored_grads",
    "from_module",
    "grad_stats",
    "gram",
    "ops",
    "parallel",
    "per_sample_grads",
    "per_sample_norms",
    "rules",
    "testing",
    "use_rules",
    "verify",
    "weighted_grad",
]
