"""Per-sample gradients for any PyTorch function, exactly, at about the price of one backward pass."""

from . import _versions  # noqa: F401, first of all: says which of torch's private names are gone

# isort: split
from . import extend, ops, rules, testing
from ._api import per_sample_grads
from ._errors import (
    ArgumentError,
    ArgumentTypeError,
    FallbackWarning,
    PsgradError,
    RuleError,
    UnsupportedOpError,
    UnusedParametersWarning,
    VerificationError,
)
from ._factored import FactoredGrads, concat
from ._module import from_module
from ._quantities import (
    ClippedGrad,
    GradStats,
    clipped_grad,
    factored_grads,
    grad_stats,
    gram,
    per_sample_norms,
    weighted_grad,
)
from ._report import Report, explain
from ._verify import Comparison, Verification, verify
from .ops import use_rules

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
