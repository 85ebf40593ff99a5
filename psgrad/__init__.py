"""Per-sample gradients for any PyTorch function, exactly, at about the price of one backward pass."""

from . import extend, ops, rules, testing
from ._api import per_sample_grads
from ._errors import ArgumentError, ArgumentTypeError, FallbackWarning, PsgradError, UnsupportedOpError
from ._module import from_module
from ._report import Report, explain
from .ops import use_rules

__version__ = "0.1.0"

__all__ = [
    "ArgumentError",
    "ArgumentTypeError",
    "FallbackWarning",
    "PsgradError",
    "Report",
    "UnsupportedOpError",
    "explain",
    "extend",
    "from_module",
    "ops",
    "per_sample_grads",
    "rules",
    "testing",
    "use_rules",
]
