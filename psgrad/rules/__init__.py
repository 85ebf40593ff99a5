"""The rules, one file per family of ops. A new op is a file here and a line below."""

from ..registry.rule import Entry, fill
from ..torch_.operators import in_compiled_code
from . import attention, conv, elementwise, embedding, experts, linear, loss, norm, quick_steps, recurrence, recurrent

_FAMILIES: tuple[Entry, ...] = (
    *linear.RULES,
    *conv.RULES,
    *norm.RULES,
    *embedding.RULES,
    *elementwise.RULES,
    *experts.RULES,
    *attention.RULES,
    *loss.RULES,
    *recurrence.RULES,
    *recurrent.COMPOSITES,
)
for _rule in _FAMILIES:
    fill(_rule)
for _loop in quick_steps.LOOPS:
    in_compiled_code(_loop.written, _loop.run, quick_steps.can_run)
