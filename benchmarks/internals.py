"""Every private name of psgrad that the benchmarks use: where one moves, this file alone changes."""

# ruff: noqa: F401
# `budget.chunk_size` and `conv_plan.conv_turns` are replaced for a while: their callers must find them in the modules.
from psgrad.factors import conv_costs as conv_plan
from psgrad.factors.costs import ConvGeometry
from psgrad.factors.patches import Patches, weight_gradient
from psgrad.registry.params import Param, Source
from psgrad.registry.rule import RULES, Call, Needs
from psgrad.registry.rule import BatchFold as Fold
from psgrad.rules import recurrence
from psgrad.streaming import budget
