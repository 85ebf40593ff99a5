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
                     per_sample_dots    how far each points in a direction
                     clipped_grad       their sum, each clipped first: ClippedGrad
                     weighted_grad      their sum with weights, given or a function of the norms
                     projected_grads    few random numbers for each, whose inner products estimate those of gradients
                     gram               inner products, of a batch with itself or with another
                     grad_stats         mean, variance, gradient noise scale: GradStats
                     kron_factors       inputs and output gradients of every matrix, as K-FAC wants them: KronFactors
                     factored_grads     one backward, then any number of questions: FactoredGrads; concat joins several
                     per_sample_jacobians  for functions with several outputs
                     ntk                inner products of Jacobians: the empirical neural tangent kernel

    before and after verify             beside a plain loop over a few samples: Verification, with a Comparison for
                                        each quantity; a VerificationError names what differs
                     explain            what a call will do with every parameter: Report

    again and again  compile            a quantity of one function as a graph: Compiled, with its CacheInfo

    going on         use_rules, ops     the rules inside vmap(grad(f)), jacrev, hessian of your own
                     extend             rules for ops of your own; rules holds those of the package
                     testing            the oracle, and checks against it
                     parallel           collectives for functions that have parameters in pieces

    memory           empty_cache        gives back what is kept for the next results
                     keep_freed_memory  has malloc keep more, in the whole process

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
from .factors.warm_memory import empty_cache, keep_freed_memory
from .module import from_module
from .quantities.clipped import clipped_grad
from .quantities.clipping import ClippedGrad
from .quantities.dots import per_sample_dots
from .quantities.factored import FactoredGrads, concat, factored_grads
from .quantities.grads import per_sample_grads
from .quantities.gram import gram
from .quantities.jacobians import ntk, per_sample_jacobians
from .quantities.kron import KronFactors, kron_factors
from .quantities.norms import per_sample_norms
from .quantities.projected import projected_grads
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
    "KronFactors",
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
    "keep_freed_memory",
    "kron_factors",
    "ntk",
    "ops",
    "parallel",
    "per_sample_dots",
    "per_sample_grads",
    "per_sample_jacobians",
    "per_sample_norms",
    "projected_grads",
    "rules",
    "testing",
    "use_rules",
    "verify",
    "weighted_grad",
]
