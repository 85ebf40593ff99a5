"""Per-sample gradients for any PyTorch function, exactly, at about the price of one backward pass."""

from . import extend, ops, rules, testing
from .composable import use_rules
from .errors import (
    ArgumentError,
    ArgumentTypeError,
    FallbackWarning,
    PsgradError,
    RuleError,
    UnsupportedOpError,
    UnusedParametersWarning,
    VerificationError,
)
from .module import from_module
from .quantities.factored import FactoredGrads, concat, factored_grads
from .quantities.grads import per_sample_grads
from .quantities.gram import gram
from .quantities.norms import per_sample_norms
from .quantities.stats import GradStats, grad_stats
from .quantities.sums import ClippedGrad, clipped_grad, weighted_grad
from .report import Report, explain
from .verification import Comparison, Verification, verify

__version__ = "0.1.0"

__all__ = [
    "ArgumentError",
    "ArgumentTypeError",
    "ClippedGrad",
    "Comparison",
    "FactoredGrads",
    "FallbackWarning",
    "GradStats",
    "PsgradError",
    "Report",
    "RuleError",
    "UnsupportedOpError",
    "UnusedParametersWarning",
    "Verification",
    "VerificationError",
    "clipped_grad",
    "concat",
    "explain",
    "extend",
    "factored_grads",
    "from_module",
    "grad_stats",
    "gram",
    "ops",
    "per_sample_grads",
    "per_sample_norms",
    "rules",
    "testing",
    "use_rules",
    "verify",
    "weighted_grad",
]
