"""The rules, one file per family of ops. A new op is a file here and a line below."""

from . import attention, conv, elementwise, embedding, linear, norm
from .._registry import register

for _rule in (
    *linear.RULES,
    *conv.RULES,
    *norm.RULES,
    *embedding.RULES,
    *elementwise.RULES,
    *attention.RULES,
):
    register(_rule)
