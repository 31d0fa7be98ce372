"""What PEFT and transformers make of weights that leave the model: adapters are merged in, layouts are those of files.

Adapters are merged into copies of the weights that they are on, by their own rule. For layers in the manner of PEFT: a
wrapper with `base_layer`, `merge()` and `merged_adapters`. Layouts are converted unit by unit: what is
converted together, such as the experts of a layer, is in one unit.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch import Tensor, nn

from zeroaccel.errors import UsageError


def merged_weights(layers: Iterable[tuple[str, Any]], params: Iterable[nn.Parameter]) -> dict[int, Tensor]:
    """id(parameter) -> its value with the active adapters, for those of `params` that have any.

    Parameters of the layers around them are unsharded.

    Args:
        layers: those of `adapter_layers`.

    Raises:
        UsageError: adapters are merged into the weights already, or an adapter replaces a parameter.
    """
    wanted = {id(param) for param in params}
    merged: dict[int, Tensor] = {}
    for name, layer in layers:
        if any(id(param) in wanted for param in layer.base_layer.parameters(recurse=False)):
            merged.update(_merged(name, layer))
    return {key: value for key, value in merged.items() if key in wanted}


def adapter_layers(model: nn.Module) -> Iterator[tuple[str, Any]]:
    """(name, layer) of each layer that wraps another in adapters. (PEFT's other wrappers answer for what they wrap.)"""
    for name, layer in model.named_modules():
        if "merged_adapters" in vars(layer) and "base_layer" in layer._modules:
            yield name, layer


def _merged(name: str, layer: Any) -> dict[int, Tensor]:
    if layer.merged_adapters:
        raise UsageError(
            f"engine.stream_weights(merge_adapters): {name}",
            expected="adapters that are not merged",
            got=layer.merged_adapters,
            fix="call model.unmerge_adapter() before",
        )
    base = layer.base_layer
    own = dict(base.named_parameters(recurse=False))
    before = {key: param.data for key, param in own.items()}
    try:
        with torch.no_grad():
            for key, param in own.items():
                param.data = before[key].clone()
            layer.merge()
        after = dict(base.named_parameters(recurse=False))
        if any(after.get(key) is not param for key, param in own.items()):
            raise UsageError(f"engine.stream_weights(merge_adapters): {name}", expected="an adapter that adds in place")
        return {id(param): param.data for param in own.values()}
    finally:
        for key, param in own.items():
            param.data = before[key]
        layer.merged_adapters.clear()


def stream_name(model: nn.Module, fqn: str) -> str | None:
    """The name that the model without adapters has for a parameter; None for those of adapters.

    Example:
        >>> stream_name(nn.Linear(1, 1), "weight")
        'weight'
    """
    prefix = getattr(model, "prefix", "")
    if not hasattr(model, "peft_config"):
        return fqn
    if (prefix and prefix in fqn) or "original_module" in fqn:
        return None
    name = fqn.removeprefix("base_model.model.").replace(".base_layer", "")
    if ".modules_to_save." in name:
        before, _, rest = name.partition(".modules_to_save.")
        name = f"{before}.{rest.partition('.')[2]}"  # without the name of the adapter
    return name


def saved_layout(model: nn.Module, values: dict[str, Tensor], *, merged: bool) -> dict[str, Tensor]:
    """The tensors as `save_pretrained` writes them; unchanged for models of other libraries.

    Args:
        merged: the names are those of the model inside of adapters.
    """
    outer: Any = model
    inner = outer.get_base_model() if merged and hasattr(model, "get_base_model") else model
    library: Any = sys.modules.get("transformers.modeling_utils")
    kind, revert = (getattr(library, name, None) for name in ("PreTrainedModel", "revert_weight_conversion"))
    if kind is None or revert is None or not isinstance(inner, kind) or not values:
        return values
    converted: dict[str, Tensor] = revert(inner, values)
    return converted
