"""Frozen weights of quantized classes: shards and gathers the tensors that they consist of, unchanged.

A library for quantized weights has a parameter class for the codes, and keeps the scales in plain attributes.
`attach_codes` turns scales that are large enough to shard into parameters, and notes them on the weight;
`group_parameters` puts both into one unit. Codes and scales keep dtype and bits under any precision, and no gather
rounds them. Smaller state is on every rank; `broadcast_state` gives it the values of rank 0.

bitsandbytes' classes are recognized by name, so that nothing imports the library: `Params4bit` (NF4, FP4) with
`absmax`, which also parameters within a parametrization have (`replace_parameter_4bit`), and `Int8Params`, whose layer
has a second reference to the codes, which follows the parameter. Its CPU kernel for evaluation repacks 4-bit codes in
the first forward and rounds the scales: `forbid_packing` turns that kernel off.

A frozen wrapper, as in torchao and quanto, has codes and scales in other tensors, which torch's `__tensor_flatten__`
names. They become parameters that the wrapper refers to, and units contain them in its place: a gather fills them, and
the wrapper itself does not change. HQQ's layers have scales and zeros in a dictionary. GPTQ's and AWQ's have all of
them in buffers, which are not sharded. Parameters of other classes are sharded as they are; their attributes belong to
the program. Frozen parameters in 8-bit floats of any class are codes too, with the scales that their module has beside
them: a cast without the scale would change the weight.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from zeroaccel.comm.collectives import Collectives
from zeroaccel.errors import UsageError
from zeroaccel.zero.module_names import plain_modules
from zeroaccel.zero.tensor_subclasses import (
    follow,
    inner_tensors,
    is_small_float,
    is_wrapper,
    mark_codes,
    mark_small_floats,
    refuse_half_bytes,
    rewrapped,
    scales_of,
    unmark_codes,
)

_SMALL = 64  # scales of at most this fraction of their codes' bytes are on every rank
_LIBRARY = "bitsandbytes"
_WITH_BUFFERS = ("awq", "auto_gptq", "gptqmodel")  # GPTQ and AWQ: their layers keep codes and scales in buffers
PACKED = ".quant_state."
"""Part of the name of a tensor that is JSON, whose length may differ."""
LAYOUT = "_format"
"""Name, after that of int8 codes, of a constant in the library's own state dicts."""
_OFFSET = "nested_offset"


def _kind(param: Tensor | None) -> str:
    """Returns the bitsandbytes class of a quantized weight, or "wrapper"; "" for any other parameter."""
    if is_wrapper(param):
        return "wrapper"
    for kind in type(param).__mro__:
        if kind.__module__.partition(".")[0] == _LIBRARY and kind.__name__ in ("Params4bit", "Int8Params"):
            is_float = kind.__name__ == "Int8Params" and getattr(param, "has_fp16_weights", False)
            return "" if is_float else kind.__name__
    return ""


def _quantized(model: nn.Module, *, recurse: bool = True) -> Iterator[tuple[str, Any, Any, str]]:
    """Yields (fqn, module, weight, class) of every registration of a quantized weight."""
    for prefix, module in plain_modules(model) if recurse else (("", model),):
        for name, param in module._parameters.items():
            if kind := _kind(param) or _kind_of_parametrized(module, param) or _kind_of_layer(module, name, param):
                yield (f"{prefix}.{name}" if prefix else name), module, param, kind


def _kind_of_parametrized(module: nn.Module, param: Any) -> str:
    """Returns the class of codes from `replace_parameter_4bit`, such as fused experts, in a parametrization."""
    first = next(iter(module._modules.values()), None)
    is_library = type(first).__module__.partition(".")[0] == _LIBRARY
    if param is None or not is_library or type(first).__name__ != "Bnb4bitParametrization":
        return ""
    param.quant_state = first.quant_state  # type: ignore[union-attr] # the attribute of `Params4bit`
    return "Params4bit"


def _kind_of_layer(module: nn.Module, name: str, param: Any) -> str:
    """Returns the class of the codes in a layer of HQQ, which has scales and zeros in a dictionary."""
    is_layer = type(module).__name__ == "HQQLinear" and type(module).__module__.partition(".")[0] == "hqq"
    return "HQQLinear" if is_layer and name == "W_q" and param is not None else ""


def _get(owner: Any, name: str) -> Any:
    return owner[name] if isinstance(owner, dict) else getattr(owner, name)


def _set(owner: Any, name: str, value: Tensor) -> None:
    if isinstance(owner, dict):
        owner[name] = value
    else:
        setattr(owner, name, value)


def check_quantized(model: nn.Module, device: torch.device) -> None:
    """Refuses quantized weights that the engine cannot shard.

    Args:
        device: device on which the engine computes.

    Raises:
        UsageError: a weight requires a gradient, has no codes yet, or was packed for the library's evaluation kernel;
            or a wrapper is on another device, or consists of tensors that are not plain.
    """
    for fqn, module in model.named_modules():
        status = getattr(module, "quantization_status", None)
        if getattr(status, "value", status) == "compressed":
            raise UsageError(
                f"module {fqn}",
                expected="weights that do not change when the model runs",
                got="codes of compressed_tensors, which the first forward replaces with whole weights on every rank",
                fix='load the model unquantized with "zero_optimization": {"frozen_weights": "nf4"} (or "int8")',
            )
    for fqn, tensor in (*model.named_parameters(), *model.named_buffers()):
        if is_small_float(tensor):
            _check_small_float(fqn, tensor)
    for fqn, _, param, kind in _quantized(model):
        if param.requires_grad:
            raise UsageError(
                f"parameter {fqn}",
                expected="a frozen weight, because its codes cannot be trained",
                got=f"a quantized weight ({type(param).__name__}) with requires_grad=True",
                fix="call requires_grad_(False) and train adapters (peft.get_peft_model), or load it unquantized",
            )
        if kind == "wrapper" and scales_of(param) is None:
            _check_wrapper(fqn, param, device)
        elif not _has_codes(param, kind):
            raise UsageError(
                f"parameter {fqn}",
                expected=f"the codes of a quantized weight ({kind})",
                got=f"{param.dtype} values, which {_LIBRARY} quantizes on the way to a device",
                fix='call model.to("cpu") or model.to("cuda") before initialize() or prepare()',
            )
        if getattr(getattr(param, "quant_state", None), "packing_format_for_cpu", False):
            raise UsageError(
                f"parameter {fqn}",
                expected="the codes and scales of its quantization",
                got=f"codes that {_LIBRARY} packed for its CPU kernel in an evaluation, with scales in bf16",
                fix="call initialize() or prepare() before the first forward, or load the model again",
            )


def refuse_codes_in_buffers(model: nn.Module) -> None:
    """Refuses GPTQ's and AWQ's layers where parameters are sharded: only parameters are, and their codes are buffers.

    Raises:
        UsageError: the model has such a layer.
    """
    for fqn, module in model.named_modules():
        library = type(module).__module__.partition(".")[0]
        if library in _WITH_BUFFERS and "qweight" in module._buffers:
            raise UsageError(
                f"module {fqn}",
                expected="codes in parameters, because stage 3 shards parameters",
                got=f"{type(module).__name__} of {library}, which keeps its codes in buffers",
                fix='set "zero_optimization": {"stage": 2}, where each rank has the whole base, or load the model '
                'unquantized with "frozen_weights": "nf4" (or "int8")',
            )


def _check_small_float(fqn: str, tensor: Tensor) -> None:
    kind = "parameter" if isinstance(tensor, nn.Parameter) else "buffer"
    if tensor.requires_grad:
        raise UsageError(
            f"{kind} {fqn}",
            expected="a frozen weight, because codes of 8 bits cannot be trained",
            got=f"{tensor.dtype} with requires_grad=True",
            fix="call requires_grad_(False) and train adapters (peft.get_peft_model), or load it in 16 bits or more",
        )
    refuse_half_bytes(f"{kind} {fqn}", tensor)


def _check_wrapper(fqn: str, param: nn.Parameter, device: torch.device) -> None:
    kind = f"{type(param).__name__} of {type(param).__module__.partition('.')[0]}"
    if not param.is_meta and param.device != device:
        raise UsageError(
            f"parameter {fqn}",
            expected=f"a quantized weight on {device}, because its class records the device",
            got=f"{kind} on {param.device}",
            fix=f'call model.to("{device}") before initialize() or prepare()',
        )
    for name, owner, attribute in inner_tensors(param):
        inner = _get(owner, attribute)
        if type(inner) not in (Tensor, nn.Parameter) or inner.layout is not torch.strided or not inner.is_contiguous():
            raise UsageError(
                f"parameter {fqn}",
                expected="a quantized weight that consists of plain contiguous tensors",
                got=f"{kind}, whose {name} is a {type(inner).__name__} with strides {inner.stride()}",
                fix='load the model unquantized with "zero_optimization": {"frozen_weights": "int8"} (or "nf4"), or '
                "quantized by bitsandbytes",
            )


def attach_codes(model: nn.Module, *, recurse: bool = True) -> None:
    """Notes on every quantized weight with codes which tensors belong to it; changes no value.

    Args:
        recurse: include the modules inside.
    """
    for module in model.modules() if recurse else (model,):
        mark_small_floats(module)
    for _, module, param, kind in _quantized(model, recurse=recurse):
        if scales_of(param) is not None or not _has_codes(param, kind):
            continue
        if kind == "Int8Params":
            _attach_int8(module, param)
        else:
            owned = _tensors(module, param, kind)
            codes = max((_get(owner, attribute).nbytes for _, owner, attribute in owned), default=0)
            mark_codes(
                param,
                {
                    name: _as_parameter(owner, attribute)
                    for name, owner, attribute in owned
                    if _get(owner, attribute).nbytes * _SMALL > (codes if kind == "wrapper" else param.nbytes)
                },
            )


def release_codes(model: nn.Module) -> None:
    """Undoes `attach_codes`, so that the library has plain tensors again."""
    for _, module, param, kind in _quantized(model):
        for name, owner, attribute in _tensors(module, param, kind) if scales_of(param) else ():
            if name in (scales_of(param) or {}):
                _set(owner, attribute, _get(owner, attribute).data)
        unmark_codes(param)
    for param in model.parameters():  # those of `mark_small_floats`
        unmark_codes(param)


def _tensors(module: Any, param: Any, kind: str) -> list[tuple[str, Any, str]]:
    """Returns (name, owner, attribute) of the tensors that may be sharded besides the parameter itself."""
    if kind == "wrapper":
        return list(inner_tensors(param))
    if kind == "HQQLinear":
        return [(name, module.meta, name) for name in ("scale", "zero") if isinstance(module.meta.get(name), Tensor)]
    return [("absmax", param.quant_state, "absmax")] if kind == "Params4bit" else []


def _has_codes(param: Any, kind: str) -> bool:
    """Returns True if a weight has codes; on the meta device, where a library makes one for its shape, it has none."""
    if param.is_meta or kind == "wrapper":
        return not param.is_meta
    if kind == "Params4bit":
        return getattr(param, "quant_state", None) is not None
    return kind == "HQQLinear" or param.dtype is torch.int8


def _attach_int8(module: Any, param: Any) -> None:
    if param.CB is not None:
        module.init_8bit_state()  # as the layer's first forward does: from here on the layer has codes and scales
    mark_codes(param, {})  # a scale per row is small
    module.state.CB = param.data
    follow(param, module.state, "CB")


def _as_parameter(owner: Any, name: str) -> nn.Parameter:
    scales = nn.Parameter(_get(owner, name).detach(), requires_grad=False)
    mark_codes(scales, {})
    _set(owner, name, scales)
    return scales


def state_tensors(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Yields the small state of quantized weights, by its name in the library's state dicts; each once."""
    return ((name, value) for _, _, name, value in _states(model))


def state_owners(model: nn.Module) -> dict[str, str]:
    """Returns name in `state_tensors` -> name of the weight."""
    return {name: fqn for fqn, _, name, _ in _states(model)}


def load_state(model: nn.Module, values: Mapping[str, Tensor]) -> None:
    """Overwrites the small state of quantized weights.

    Args:
        values: values by the names of `state_tensors`; missing ones stay unchanged.

    Raises:
        UsageError: the values belong to codes of another format.
    """
    for fqn, param, name, value in list(_states(model)):
        if name not in values:
            continue
        if PACKED not in name:
            value.detach().copy_(values[name].view(value.shape))
            continue
        # For a state dict the library packs numbers, including a scale, as JSON into a tensor.
        saved, target = _unpacked(values[name]), _unpacked(value)
        offset = saved.pop(_OFFSET, None)
        if saved != {key: number for key, number in target.items() if key != _OFFSET}:
            raise UsageError(f"parameter {fqn}", expected=f"codes as in the model: {target}", got=saved)
        if offset is not None:
            param.quant_state.offset.fill_(offset)


def _unpacked(packed: Tensor) -> dict[str, Any]:
    facts: dict[str, Any] = json.loads(bytes(packed.tolist()))
    return facts


def _states(model: nn.Module) -> Iterator[tuple[str, Any, str, Tensor]]:
    """Yields (fqn of a weight, weight, name, value) for each tensor of its small state."""
    seen: set[int] = set()
    for fqn, module, param, kind in _quantized(model):
        if id(param) in seen:
            continue
        seen.add(id(param))
        values = _small(module, param, kind)
        if kind == "Params4bit":  # the form of the library's own state dicts
            values = param.quant_state.as_dict(packed=True)
        prefix = fqn.removesuffix("weight") if kind == "Int8Params" else f"{fqn}."
        for name, value in values.items():
            if name not in (scales_of(param) or {}):
                yield fqn, param, f"{prefix}{name}", value


def _small(module: Any, param: Any, kind: str) -> dict[str, Tensor]:
    """Returns the tensors of a weight's small state, which every rank has."""
    if kind == "Int8Params":
        return {} if module.state.SCB is None else {"SCB": module.state.SCB}
    named = {name: _get(owner, attribute) for name, owner, attribute in _tensors(module, param, kind)}
    if kind == "Params4bit":
        state = param.quant_state
        named["quant_map"] = state.code
        if state.nested:
            named |= {"nested_absmax": state.state2.absmax, "nested_quant_map": state.state2.code}
            named["nested_offset"] = state.offset
    return {name: value for name, value in named.items() if name not in (scales_of(param) or {})}


def broadcast_state(model: nn.Module, collectives: Collectives) -> None:
    """Broadcasts the small state of rank 0's quantized weights to every rank. (all ranks)"""
    for fqn, module, param, kind in _quantized(model):
        for name, value in _small(module, param, kind).items():
            flat = value.detach().contiguous().view(-1)
            collectives.broadcast(flat, 0, f"{fqn}.{name}")
            value.detach().copy_(flat.view(value.shape))


def join_wrappers(model: nn.Module, state: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Returns a state dict with wrappers, as in the model's own, in place of the tensors that they consist of.

    Excludes layers that write their weights by their own method: quanto's dict has the names of the tensors.
    """
    joined = dict(state)
    for fqn, module, param, kind in _quantized(model):
        is_plain = kind == "wrapper" and type(module)._save_to_state_dict is nn.Module._save_to_state_dict
        names = [name for name, *_ in inner_tensors(param)] if is_plain else []
        if names and all(f"{fqn}.{name}" in joined for name in names):
            joined[fqn] = rewrapped(param, {name: joined.pop(f"{fqn}.{name}") for name in names})
    return joined


def forbid_packing(model: nn.Module) -> Callable[[], None]:
    """Makes 4-bit layers compute from their codes in evaluations too; returns a function that undoes it."""
    flag = "support_avx512bf16_for_cpu"
    layers = [
        module for _, module, _, kind in _quantized(model) if kind == "Params4bit" and getattr(module, flag, False)
    ]
    for layer in layers:
        setattr(layer, flag, False)

    def undo() -> None:
        for layer in layers:
            setattr(layer, flag, True)

    return undo
