"""The torch that psgrad was tested with, and the private names of torch that it uses: checked on import.

Private names come and go without notice. Where one is gone this says so at once, rather than in the middle of a call.
"""

from collections.abc import Iterator, Mapping
from functools import reduce
from importlib import import_module

import torch

TESTED = "2.10", "2.15"  # the oldest and the newest torch that the tests ran on

PRIVATE: Mapping[str, str] = {  # names by their module; of alternatives (a|b) one is enough
    "torch": (
        "Tensor._backward_hooks Tensor._base Tensor._is_view Tensor._version UntypedStorage._cdata "
        "_assert_async _make_dual _nested_tensor_from_mask_left_aligned "
        "_pack_padded_sequence _pad_packed_sequence ops.aten._efficientzerotensor ops.aten._fused_rms_norm "
        "ops.aten._local_scalar_dense "
        "ops.aten._prelu_kernel_backward ops.aten._scaled_dot_product_attention_math"
    ),
    "torch._C": (
        "DisableTorchFunction TensorBase _TorchDispatchModeKey.FAKE _TorchDispatchModeKey.PROXY _get_dispatch_mode "
        "_is_any_autocast_enabled _is_torch_function_mode_enabled _jit_resolve_packet _len_torch_dispatch_stack "
        "_len_torch_function_stack "
        "_dispatch_has_kernel_for_dispatch_key "
        "_autograd._top_saved_tensors_default_hooks _nn.cross_entropy_loss _nn.pad_sequence"
    ),
    "torch._C._dynamo.eval_frame": "_FrameAction.SKIP _FrameExecStrategy set_code_exec_strategy",
    "torch._C._dynamo.guards": "TensorGuards _empty_strided_cpu _reinterpret_tensor",
    "torch._C._functorch": (
        "TransformType.Grad TransformType.Jvp TransformType.Vmap _add_batch_dim _unwrap_batched _unwrap_for_grad "
        "_vmap_decrement_nesting _vmap_increment_nesting _wrap_for_grad get_interpreter_stack get_unwrapped "
        "is_batchedtensor is_functorch_wrapped_tensor is_gradtrackingtensor maybe_current_level maybe_get_level "
        "pop_dynamic_layer_stack push_dynamic_layer_stack"
    ),
    "torch._functorch.autograd_function": "custom_function_call",
    "torch._functorch.predispatch": "lazy_load_decompositions",
    "torch._functorch.pyfunctorch": "retrieve_current_functorch_interpreter",
    "torch._functorch.utils": "enable_single_level_autograd_function",
    "torch._guards": "TracingContext.try_get tracing",
    "torch._library.custom_ops": "CustomOpDef",
    "torch._ops": "HigherOrderOperator OpOverload OpOverloadPacket",
    "torch._subclasses.fake_tensor": "DataDependentOutputException DynamicOutputShapeException FakeTensorMode",
    "torch.autograd": "Variable._execution_engine.run_backward",
    "torch.autograd.forward_ad": "_current_level _set_fwd_grad_enabled",
    "torch.autograd.function": "_SingleLevelFunction",
    "torch.fx.experimental.proxy_tensor": "disable_proxy_modes_tracing has_proxy_slot",
    "torch.nn.modules.module": (
        "_global_backward_hooks _global_backward_pre_hooks _global_forward_hooks _global_forward_pre_hooks"
    ),
    "torch.overrides": "_get_current_function_mode_stack",
    "torch.utils._device": "DeviceContext",
    "torch.utils._python_dispatch": "TorchDispatchMode",
    "torch.utils.checkpoint": "_CheckpointFrame _CheckpointFrame.save_inputs|_NoopSaveInputs",
}

COMPILER: Mapping[str, str] = {  # the same of torch's compiler, which takes a second to load: checked when it is used
    "torch._functorch.config": "enable_autograd_cache patch",
    "torch._functorch._aot_autograd.schemas": "OutputType.non_alias",
    "torch._inductor.compile_fx": "compile_fx compile_fx_inner",
    "torch._inductor": "config",
    "torch._inductor.codecache": "CppCodeCache.load",
    "torch._inductor.cpp_builder": "get_cpp_compiler",
    "torch._inductor.decomposition": "select_decomp_table",
    "torch._dynamo": "nonstrict_trace",
    "torch._higher_order_ops.flat_apply": "FlatApply",
    "torch.utils._pytree": "tree_flatten tree_unflatten",
}


def _gone(listed: Mapping[str, str]) -> Iterator[str]:
    """The names in a list that this torch does not have."""
    for module, names in listed.items():
        try:
            home = import_module(module)
        except ImportError:
            yield module
            continue
        for name in names.split():
            if not any(_has(home, each) for each in name.split("|")):
                yield " or ".join(f"{module}.{each}" for each in name.split("|"))


def _has(home: object, name: str) -> bool:
    try:
        reduce(getattr, name.split("."), home)
    except AttributeError:
        return False
    return True


def check(listed: Mapping[str, str]) -> None:
    """Raise where a name in a list is gone."""
    if gone := list(_gone(listed)):
        raise ImportError(
            f"psgrad needs {', '.join(gone)}, which torch {torch.__version__} does not have\n"
            f"  psgrad was tested with torch {TESTED[0]} to {TESTED[1]}\n"
            "  install one of these, or a psgrad that was tested with the torch you have."
        )


check(PRIVATE)
