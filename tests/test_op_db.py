"""Every differentiable operator of torch's own table gives what the loop over samples gives, in every spelling.

A sample input of each operator in `make test`, eight with `HYPOTHESIS_PROFILE=thorough`.
`python -m tests.op_programs` shows what psgrad makes of each.
"""

import os

import pytest
import torch
from packaging.version import Version

from .op_programs import CLASSES, operators, verdicts

THOROUGH = os.environ.get("HYPOTHESIS_PROFILE") == "thorough"
COUNT = 8 if THOROUGH else 1  # sample inputs
BLOCKS = 30  # tests that share the operators: few enough to be quick to collect, many enough to run side by side

# Operators that do not run for all samples at once, and how far down the ladder they go.
_LOOP = (
    "as_strided as_strided.partial_views as_strided_copy as_strided_scatter bernoulli linalg.pinv.singular "
    "nn.functional.rrelu normal normal.number_mean sparse.sampled_addmm stft to_sparse"
)
_OP_LOOP = (
    "_batch_norm_with_update _native_batch_norm_legit column_stack cov fft.ifft fft.ihfft index_put narrow "
    "native_batch_norm native_group_norm nn.functional.group_norm tensor_split to"
)
_OP_LOOP_OF_OLDER = "unbind_copy"  # for which torch 2.10 has no batching rule
_UNKNOWN_TO_OLDER = {"native_group_norm"}  # not in the table of torch 2.10
OLDER = Version(torch.__version__) < Version("2.13")
LOWER = dict.fromkeys(_LOOP.split(), "loop") | dict.fromkeys(_OP_LOOP.split(), "op loop")
LOWER |= dict.fromkeys(_OP_LOOP_OF_OLDER.split(), "op loop") if OLDER else {}


@pytest.mark.parametrize("block", range(BLOCKS))
def test_an_operator_gives_what_the_loop_gives(block: int) -> None:
    faults = []
    for name in list(operators())[block::BLOCKS]:
        found = [each[0] for each in verdicts(name, COUNT, THOROUGH).values()]  # the worst of each spelling
        expected = CLASSES.index(LOWER.get(name, "exact"))
        faults += [f"{v.kind}: {v.program}: {v.detail}" for v in found if CLASSES.index(v.kind) > expected]
        if not found:
            faults.append(f"{name}: no sample input that a loop can run")
        elif THOROUGH and max(CLASSES.index(v.kind) for v in found) < expected:
            faults.append(f"{name} is better than the table says")
    assert not faults, "\n".join(faults)


def test_the_table_of_exceptions_names_operators() -> None:
    assert LOWER.keys() <= operators().keys() | (_UNKNOWN_TO_OLDER if OLDER else set())
