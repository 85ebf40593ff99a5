"""What torch.utils.checkpoint keeps of a checkpointed function until its backward runs it again."""

import functools
import types
from typing import Any

import torch
from torch.utils import checkpoint as _checkpoint

Frame: Any = _checkpoint._CheckpointFrame  # torch's record of one checkpointed function
# An older torch keeps a checkpoint's arguments by an autograd Function, a newer one in the frame itself.
Keeper: Any = getattr(_checkpoint, "_NoopSaveInputs", None)
saved_tensor_hooks = functools.partial(torch._C._autograd._top_saved_tensors_default_hooks, True)
"""The innermost saved-tensor hooks (pack, unpack), or None."""


def arguments(frame: Any) -> list[Any]:
    """What the checkpointed function of `frame` was given, or what closes over it; tensors may be missing."""
    return list(frame.saved_args) if Keeper is None else [frame.input_saver.grad_fn.get_args]


def runs_in(frame: types.FrameType) -> bool:
    """Whether it is torch's own code for checkpoints that runs in a frame of Python."""
    return frame.f_globals is vars(_checkpoint)
