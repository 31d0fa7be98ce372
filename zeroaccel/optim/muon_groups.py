"""Which parameters Muon steps as matrices, and which its AdamW: param groups for `ops.tensorwise`.

By the flags that users of DeepSpeed set on parameters, and without one by what the model tells of its embeddings and
heads. Reads only; builds no optimizer.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from torch import Tensor, nn

from zeroaccel.errors import ConfigError
from zeroaccel.logs import logger

__all__ = ["MUON_SETTINGS", "muon_groups"]

MUON_SETTINGS = (
    "lr",
    "muon_lr",
    "adam_lr",
    "momentum",
    "nesterov",
    "ns_steps",
    "ns_method",
    "betas",
    "eps",
    "weight_decay",
)
"""What `optimizer.params` of Muon may say."""

_NAMES = ("embed", "lm_head")


def muon_groups(params: Iterable[Any], settings: Mapping[str, Any], model: nn.Module | None) -> list[dict[str, Any]]:
    """Param groups for `Muon`: each group that is given, split in two by "use_muon"; empty halves are left out.

    Muon takes a parameter whose attribute `use_muon` is true. Without the attribute it takes those of two dimensions
    or more, but embeddings and heads: parameters of `nn.Embedding`, of what `get_output_embeddings()` of a Hugging
    Face model returns, and those with "embed" or "lm_head" in their names. A group that has "use_muon" itself is as it
    is. A group's own lr counts, then `muon_lr` or `adam_lr`, then `lr`.

    Raises:
        ConfigError: a parameter without the attribute, where the model is not known, or a flag that is not a boolean.
    """
    items = list(params)
    given = items if items and isinstance(items[0], dict) else [{"params": items}]
    apart = _Apart(model)
    found: list[dict[str, Any]] = []
    for group in given:
        held = [group["params"]] if isinstance(group["params"], Tensor) else list(group["params"])
        if "use_muon" in group:
            halves = {bool(group["use_muon"]): held}
        else:
            flags = [apart.is_for_muon(param) for param in held]
            halves = {
                use_muon: [param for param, flag in zip(held, flags, strict=True) if flag is use_muon]
                for use_muon in (True, False)
            }
        for use_muon, half in halves.items():
            if not half:
                continue
            lr = settings.get("muon_lr" if use_muon else "adam_lr", settings.get("lr"))
            found.append({**({} if lr is None else {"lr": lr}), **group, "params": half, "use_muon": use_muon})
    counts = {flag: sum(len(group["params"]) for group in found if group["use_muon"] is flag) for flag in (True, False)}
    logger.info("Muon steps %d parameters, and its AdamW %d", counts[True], counts[False])
    return found


class _Apart:
    """Tells which parameters are embeddings, heads, or no matrices."""

    def __init__(self, model: nn.Module | None) -> None:
        self._names: dict[int, str] = {}
        self._ends: set[int] = set()
        if model is None:
            return
        self._names = {id(param): fqn for fqn, param in model.named_parameters(remove_duplicate=True)}
        ends: list[nn.Module] = []
        for module in model.modules():
            if isinstance(module, (nn.Embedding, nn.EmbeddingBag)):
                ends.append(module)
            find = getattr(module, "get_output_embeddings", None)
            if callable(find) and isinstance(head := find(), nn.Module):
                ends.append(head)
        self._ends = {id(param) for module in ends for param in module.parameters()}

    def is_for_muon(self, param: Tensor) -> bool:
        name = self._names.get(id(param))
        flag = getattr(param, "use_muon", None)
        if isinstance(flag, bool):
            return flag
        where = f"parameter {name or f'of shape {tuple(param.shape)}'}, attribute use_muon"
        if flag is not None:
            raise ConfigError(where, expected="True or False", got=flag)
        if name is None:
            raise ConfigError(
                where,
                expected="True or False, for an optimizer of type Muon",
                got="none, and a parameter of no model that is known",
                fix="set it on every parameter",
            )
        return param.dim() >= 2 and id(param) not in self._ends and not any(word in name.lower() for word in _NAMES)
