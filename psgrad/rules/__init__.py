"""The rules, one file per family of ops. A new op is a file here and a line below."""

from .._registry import Fold, Rule, register
from . import attention, conv, elementwise, embedding, linear, loss, norm

_FAMILIES: tuple[Rule | Fold, ...] = (
    *linear.RULES,
    *conv.RULES,
    *norm.RULES,
    *embedding.RULES,
    *elementwise.RULES,
    *attention.RULES,
    *loss.RULES,
)
for _rule in _FAMILIES:
    register(_rule)
