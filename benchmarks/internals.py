"""Every private name of psgrad that the benchmarks use: where one moves, this file alone changes."""

# ruff: noqa: F401
# `budget.chunk_size` and `conv_plan.conv_turns` are replaced for a while: their callers must find them in the modules.
from psgrad import _conv_plan as conv_plan
from psgrad import _memory as budget
from psgrad._param import Param, Source
from psgrad._patches import Patches, weight_gradient
from psgrad._plan import ConvGeometry
from psgrad._registry import RULES, Call, Fold, Needs
from psgrad.rules import recurrence
