"""Frozen weights of quantised classes: the tensors that they consist of, which are sharded and gathered as they are.

A library of quantised weights has a parameter of its own class for the codes, and keeps the scales beside it in plain
attributes. `attach_codes` makes parameters of the scales that are large enough to be sharded, and notes them on the
weight; `group_parameters` puts both into one unit. Codes and scales keep dtype and bits whatever the precision is, and
no gather rounds them. Smaller state is on every rank; `broadcast_state` gives it the values of rank 0.

bitsandbytes' classes are known by name, so that nothing imports the library: `Params4bit` (NF4, FP4) with `absmax`, as
parameters outside of layers have within a parametrization (`replace_parameter_4bit`), and `Int8Params`, whose layer has
a second reference to the codes, which follows the parameter. Its CPU kernel for evaluation packs 4-bit codes anew in
the first forward and rounds the scales: `forbid_packing` turns that kernel off.
Parameters of other classes are carried as they are; attributes of theirs belong to the program.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from zeroaccel.comm.collectives import Collectives
from zeroaccel.errors import UsageError
from zeroaccel.zero.tensor_subclasses import follow, mark_codes, scales_of

_SMALL = 64  # scales of at most this part of their codes' bytes are on every rank
_LIBRARY = "bitsandbytes"
PACKED = ".quant_state."
"""In the name of a tensor that is JSON, whose length may differ."""
LAYOUT = "_format"
"""Behind the name of int8 codes, that of a constant in the library's own state dicts."""
_OFFSET = "nested_offset"


def _kind(param: Tensor | None) -> str:
    """The class of a quantised weight of bitsandbytes; "" for any other parameter."""
    for kind in type(param).__mro__:
        if kind.__module__.partition(".")[0] == _LIBRARY and kind.__name__ in ("Params4bit", "Int8Params"):
            is_float = kind.__name__ == "Int8Params" and getattr(param, "has_fp16_weights", False)
            return "" if is_float else kind.__name__
    return ""


def _quantized(model: nn.Module, *, recurse: bool = True) -> Iterator[tuple[str, Any, Any, str]]:
    """(fqn, module, weight, class) of every registration of a quantised weight."""
    for prefix, module in model.named_modules() if recurse else (("", model),):
        for name, param in module._parameters.items():
            if kind := _kind(param) or _kind_of_parametrized(module, param):
                yield (f"{prefix}.{name}" if prefix else name), module, param, kind


def _kind_of_parametrized(module: nn.Module, param: Any) -> str:
    """That of codes from `replace_parameter_4bit`, as of fused experts: a plain parameter within a parametrization."""
    first = next(iter(module._modules.values()), None)
    is_library = type(first).__module__.partition(".")[0] == _LIBRARY
    if param is None or not is_library or type(first).__name__ != "Bnb4bitParametrization":
        return ""
    param.quant_state = first.quant_state  # type: ignore[union-attr] # where `Params4bit` has it
    return "Params4bit"


def check_quantized(model: nn.Module) -> None:
    """Refuses quantised weights that cannot be carried.

    Raises:
        UsageError: one is to be trained, has no codes yet, or was packed for the library's kernel of evaluation.
    """
    for fqn, _, param, kind in _quantized(model):
        if param.requires_grad:
            raise UsageError(
                f"parameter {fqn}",
                expected="to be frozen, as its codes cannot be trained",
                got=f"a quantised weight ({kind}) with requires_grad=True",
                fix="call requires_grad_(False) and train adapters (peft.get_peft_model), or load it unquantised",
            )
        if not _has_codes(param, kind):
            raise UsageError(
                f"parameter {fqn}",
                expected=f"the codes of a quantised weight ({kind})",
                got=f"{param.dtype} values, which {_LIBRARY} quantises when they are moved to a device",
                fix='call model.to("cpu") or model.to("cuda") before initialize() or prepare()',
            )
        if getattr(getattr(param, "quant_state", None), "packing_format_for_cpu", False):
            raise UsageError(
                f"parameter {fqn}",
                expected="the codes and scales of its quantisation",
                got=f"those that {_LIBRARY} packed for its CPU kernel in an evaluation, with scales in bf16",
                fix="call initialize() or prepare() before the first forward, or load the model again",
            )


def attach_codes(model: nn.Module, *, recurse: bool = True) -> None:
    """Notes on every quantised weight that has codes which tensors belong to it; changes no value.

    Args:
        recurse: in the modules within it too.
    """
    for _, module, param, kind in _quantized(model, recurse=recurse):
        if scales_of(param) is not None or not _has_codes(param, kind):
            continue
        if kind == "Int8Params":
            _attach_int8(module, param)
        else:
            state = param.quant_state
            mark_codes(param, {"absmax": _as_parameter(state, "absmax")} if _is_large(state.absmax, param) else {})


def _has_codes(param: Any, kind: str) -> bool:
    """Of a weight on the meta device, which a library makes for its shape, none are there."""
    if param.is_meta:
        return False
    return getattr(param, "quant_state", None) is not None if kind == "Params4bit" else param.dtype is torch.int8


def _attach_int8(module: Any, param: Any) -> None:
    if param.CB is not None:
        module.init_8bit_state()  # as the layer's first forward does: the layer has codes and scales from here on
    mark_codes(param, {})  # a scale per row is small
    module.state.CB = param.data
    follow(param, module.state, "CB")


def _is_large(scales: Tensor, codes: Tensor) -> bool:
    return scales.nbytes * _SMALL > codes.nbytes


def _as_parameter(owner: Any, name: str) -> nn.Parameter:
    scales = nn.Parameter(getattr(owner, name).detach(), requires_grad=False)
    mark_codes(scales, {})
    setattr(owner, name, scales)
    return scales


def state_tensors(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """The small state of quantised weights, by its name in a state dict of the library; each once."""
    return ((name, value) for _, _, name, value in _states(model))


def state_owners(model: nn.Module) -> dict[str, str]:
    """Name in `state_tensors` -> that of the weight."""
    return {name: fqn for fqn, _, name, _ in _states(model)}


def load_state(model: nn.Module, values: Mapping[str, Tensor]) -> None:
    """Overwrites the small state of quantised weights.

    Args:
        values: of the same names as in `state_tensors`; what is missing stays as it is.

    Raises:
        UsageError: the values belong to codes of another format.
    """
    for fqn, param, name, value in list(_states(model)):
        if name not in values:
            continue
        if PACKED not in name:
            value.detach().copy_(values[name].view(value.shape))
            continue
        # The library packs numbers into a tensor, as JSON, when a state dict is made; among them a scale.
        saved, own = _unpacked(values[name]), _unpacked(value)
        offset = saved.pop(_OFFSET, None)
        if saved != {key: number for key, number in own.items() if key != _OFFSET}:
            raise UsageError(f"parameter {fqn}", expected=f"codes as in the model: {own}", got=saved)
        if offset is not None:
            param.quant_state.offset.fill_(offset)


def _unpacked(packed: Tensor) -> dict[str, Any]:
    facts: dict[str, Any] = json.loads(bytes(packed.tolist()))
    return facts


def _states(model: nn.Module) -> Iterator[tuple[str, Any, str, Tensor]]:
    """(fqn of a weight, weight, name, value) of each tensor of its small state."""
    seen: set[int] = set()
    for fqn, module, param, kind in _quantized(model):
        if id(param) in seen:
            continue
        seen.add(id(param))
        if kind == "Int8Params":
            if module.state.SCB is not None:
                yield fqn, param, f"{fqn.removesuffix('weight')}SCB", module.state.SCB
            continue
        for name, value in param.quant_state.as_dict(packed=True).items():
            if name not in (scales_of(param) or {}):
                yield fqn, param, f"{fqn}.{name}", value


def broadcast_state(model: nn.Module, collectives: Collectives) -> None:
    """Gives every rank the small state of rank 0's quantised weights. (all ranks)"""
    for fqn, module, param, kind in _quantized(model):
        if kind == "Int8Params":
            tensors = {"SCB": module.state.SCB}
        else:
            state = param.quant_state
            tensors = {"quant_map": state.code} | ({} if scales_of(param) else {"absmax": state.absmax})
            if state.nested:
                tensors |= {"nested_absmax": state.state2.absmax, "nested_quant_map": state.state2.code}
                tensors |= {"nested_offset": state.offset}
        for name, value in tensors.items():
            flat = value.detach().contiguous().view(-1)
            collectives.broadcast(flat, 0, f"{fqn}.{name}")
            value.detach().copy_(flat.view(value.shape))


def forbid_packing(model: nn.Module) -> Callable[[], None]:
    """Has 4-bit layers compute from their codes in evaluations too; returns what undoes it."""
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
