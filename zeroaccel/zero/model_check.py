"""Checks the model that a program passes to `initialize`, and the inputs of a forward.

The engine moves weights from host memory to its device, and nothing else. If a model lies on another GPU than this
process's, the program has put it there, and its inputs too.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Mapping, Sequence
from itertools import chain
from typing import Any

import torch
from torch import Tensor, nn

from zeroaccel.comm.rank_device import ACCELERATOR, NOT_TRAINED_ON
from zeroaccel.errors import UsageError
from zeroaccel.nested import leaves_of
from zeroaccel.zero.access.param_registry import handle_of
from zeroaccel.zero.quantized_weights import check_quantized
from zeroaccel.zero.tensor_subclasses import is_wrapper, unshard_released

# Words in torch's errors about tensors of one operation in different memories; some operations compare types only.
_MIXED = re.compile(r"\bdevices?\b|\btorch\.(cuda\.)?\w*Tensor\b|weight type", re.IGNORECASE)
_MOST_NAMES = 3


def check_model(model: object, device: torch.device) -> None:
    """Refuses objects other than modules, a model on another accelerator, and parameters that cannot be sharded.

    Args:
        device: device on which the engine computes.

    Raises:
        UsageError: the model is not a module, has TorchScript modules, or is not on `device`; or a parameter is on the
            meta device, complex, in another engine, a copy of a sharded one, has no shape yet, was made in inference
            mode, or shares memory with another.
    """
    if not isinstance(model, nn.Module):
        raise UsageError("initialize(model)", expected="a torch.nn.Module", got=type(model).__name__)
    _refuse_divided(model)
    for fqn, module in model.named_modules():
        if isinstance(module, torch.jit.ScriptModule):
            raise UsageError(
                f"initialize(model): module {fqn or 'itself'}",
                expected="Python modules, whose forwards can have hooks",
                got=f"a TorchScript module ({module.original_name})",
                fix="train the module that was scripted or traced, and script or trace the result",
            )
    for param in model.parameters():
        unshard_released(param)  # an earlier engine's
    # Each of these would fail later, inside a collective or with an error that names no parameter.
    for fqn, param in model.named_parameters():
        if (fault := _fault(param)) is not None:
            expected, got, fix = fault
            raise UsageError(f"parameter {fqn}", expected=expected, got=got, fix=fix)
    check_quantized(model, device)
    _refuse_shared_memory(model)
    check_model_device(model, device)


def _fault(param: nn.Parameter) -> tuple[str, str, str] | None:
    """Returns (expected, got, fix) for a parameter that cannot be sharded; None for others."""
    if isinstance(param, nn.UninitializedParameter):
        return "a shape", "a lazy module's parameter, which has none yet", "call the model once with an example first"
    if param.is_inference():
        expected = "a tensor that supports gradients"
        return expected, "a tensor made under torch.inference_mode()", "build the model outside that mode"
    handle = handle_of(param)
    if handle is not None and handle.registry.training is not None:
        return "a parameter without an engine", "a parameter of another engine", "call destroy() of that engine first"
    # A copy of a sharded parameter has the NaN that replaces its values: the values themselves are lost.
    if (handle is None or handle.replaced) and not is_wrapper(param) and _is_all_nan(param):
        fix = "copy or cast it inside zero.GatheredParameters; zero.Init(dtype=...) casts while it builds"
        return "values", "only NaN, as a copy or a cast of a sharded parameter has", fix
    if param.is_meta:
        fix = "load it with zero.load_safetensors, or build the model without the meta device"
        return "real values", "the meta device", fix
    if param.is_complex() and param.requires_grad:
        fix = "keep it as torch.view_as_real(...), or freeze it"
        return "a real dtype, because master weights are fp32", str(param.dtype), fix
    return None


def _refuse_divided(model: nn.Module) -> None:
    """Refuses a model that transformers has divided over the ranks: initialize would treat a part as the whole."""
    divided = getattr(getattr(model, "config", None), "distributed_config", None)
    for key in ("ep_size", "fsdp_size", "pp_size"):
        if (size := getattr(divided, key, None) or 1) > 1:
            raise UsageError(
                "initialize(model)",
                expected="a model with all experts, parameters and layers, because initialize itself divides them",
                got=f"a model that from_pretrained(distributed_config=DistributedConfig({key}={size})) has divided",
                fix="load it without a DistributedConfig, and pass that as initialize(parallel=)",
            )


def _refuse_shared_memory(model: nn.Module) -> None:
    """Raises UsageError if two parameters share elements, which separate shards would silently decouple."""
    spans: dict[int, list[tuple[int, int, str, nn.Parameter]]] = {}
    for fqn, param in model.named_parameters():
        if type(param) is nn.Parameter and handle_of(param) is None and param.layout is torch.strided and param.numel():
            start = int(param.storage_offset())
            reach = sum(int((size - 1) * stride) for size, stride in zip(param.shape, param.stride(), strict=True))
            spans.setdefault(param.untyped_storage()._cdata, []).append((start, start + reach + 1, fqn, param))
    for of_one in spans.values():
        of_one.sort(key=lambda span: span[:2])
        for index, (_, end, fqn, param) in enumerate(of_one):
            for start, _, other_fqn, other in of_one[index + 1 :]:
                if start >= end:
                    break
                if _share_elements(param, other):
                    raise UsageError(
                        f"parameters {fqn} and {other_fqn}",
                        expected="separate memory, or one nn.Parameter under both names",
                        got="two parameters that share elements of one storage",
                        fix="assign the parameter itself, as in head.weight = embed.weight, or clone() one",
                    )


def _share_elements(first: Tensor, other: Tensor) -> bool:
    """Returns True if two tensors of one storage share elements; columns of one matrix interleave, but share none."""
    if first.dtype is not other.dtype:
        return True
    numel = first.untyped_storage().nbytes() // first.itemsize
    used = torch.zeros(numel, dtype=torch.bool)
    used.as_strided(first.shape, first.stride(), first.storage_offset()).fill_(True)
    return bool(used.as_strided(other.shape, other.stride(), other.storage_offset()).any())


def _is_all_nan(param: nn.Parameter) -> bool:
    """Returns True if all values are NaN; reads more than the first value only if that one is NaN."""
    if param.is_meta or not param.is_floating_point() or not param.numel():
        return False
    with torch._C.DisableTorchFunctionSubclass():  # a `ShardedParameter` would refuse to be read
        data = param.detach()
        return bool(data[(0,) * data.dim()].isnan()) and bool(data.isnan().all())


def check_dtypes(model: nn.Module, dtype: torch.dtype) -> None:
    """Refuses a loss of precision that the config does not ask for.

    Args:
        dtype: dtype of the config's precision.

    Raises:
        UsageError: a parameter has 64 bits, and the precision is fp32.
    """
    if dtype is not torch.float32:
        return
    for fqn, param in model.named_parameters():
        if param.dtype is torch.float64:
            raise float64_error(fqn)


def float64_error(fqn: str) -> UsageError:
    """Returns the error for a parameter in float64, whose fp32 master would round it."""
    return UsageError(
        f"parameter {fqn}",
        expected="at most 32 bits: master weights, sums of gradients and optimizer states are fp32",
        got="torch.float64",
        fix='call model.float() first, or choose "bf16" or "fp16" in the config; constants in float64 can be buffers',
    )


def check_model_device(model: nn.Module, device: torch.device) -> None:
    """Refuses a model that lies on another accelerator than the engine, or on several.

    Args:
        device: device on which the engine computes.

    Raises:
        UsageError: parameters or buffers are neither there nor in host memory; the message lists devices and names.
    """
    names: dict[torch.device, list[str]] = defaultdict(list)
    for name, tensor in chain(model.named_parameters(), model.named_buffers()):
        if tensor.device.type not in ("cpu", "meta") and tensor.device != device:
            names[tensor.device].append(name)
    if not names:
        return
    found = ", ".join(f"{_listed(of_one)} on {place}" for place, of_one in names.items())
    if len(names) > 1:
        fix = "an engine has its model on one device: load it without device_map, and let the stage divide it"
    elif next(iter(names)).type != ACCELERATOR.type:
        fix = f"call model.cpu() first; {NOT_TRAINED_ON}"
    elif device.type == "cpu":
        fix = (
            "this process trains on the CPU: call model.cpu(), or let it train on the GPU, which needs a process group"
            ' with NCCL ("cpu:gloo,cuda:nccl") and no cpu=True'
        )
    else:
        (other,) = names
        fix = f'call model.to("{device}"), or torch.{other.type}.set_device({other.index}) before any call of zeroaccel'
    raise UsageError(
        "initialize(model): devices", expected=f"all of it on {device} or in host memory", got=found, fix=fix
    )


def misplaced_inputs(
    error: RuntimeError, args: Sequence[Any], kwargs: Mapping[str, Any], device: torch.device
) -> UsageError | None:
    """Returns the error for a forward that failed because of inputs on another device; None for another cause.

    Inputs may be in host memory, such as lengths, so this examines them only after an operation has failed.

    Args:
        device: device of the parameters.
    """
    if not _MIXED.search(str(error)):
        return None
    elsewhere: dict[torch.device, list[str]] = defaultdict(list)
    named = {f"args[{index}]": value for index, value in enumerate(args)} | dict(kwargs)
    for name, value in named.items():
        for path, leaf in leaves_of(value):
            if isinstance(leaf, Tensor) and leaf.device != device:
                elsewhere[leaf.device].append(f"{name}{path}")
    if not elsewhere:
        return None
    return UsageError(
        "engine.forward",
        expected=f"inputs on {device}, where the parameters are",
        got=", ".join(f"{_listed(of_one)} on {place}" for place, of_one in elsewhere.items()),
        fix=f'pass the loader to prepare(), which moves batches, or move each with .to("{device}"); '
        f"torch says: {str(error).splitlines()[0]}",
    )


def _listed(names: Sequence[str]) -> str:
    more = len(names) - _MOST_NAMES
    return ", ".join(names[:_MOST_NAMES]) + (f" and {more} more" if more > 0 else "")
