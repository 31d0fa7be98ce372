"""Builds the optimizer of a config's `optimizer` section, over the model's own parameters.

Muon needs two param groups per group: matrices that it orthogonalises, and all other parameters, for its AdamW. The
flags that DeepSpeed's users set on parameters select them; without flags, the model's embeddings and heads go to AdamW.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from zeroaccel.config.diagnostics import hint
from zeroaccel.errors import ConfigError
from zeroaccel.logs import logger
from zeroaccel.ops.elementwise import SGD, Adagrad, Adam, Lion, RMSprop
from zeroaccel.ops.tensorwise import Lamb, Muon
from zeroaccel.optim.lr_schedules import note_written_lrs

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
    "per_head_muon",
)
"""The keys of `optimizer.params` for Muon."""

_NAMES = ("embed", "lm_head")


def muon_groups(params: Iterable[Any], settings: Mapping[str, Any], model: nn.Module | None) -> list[dict[str, Any]]:
    """Returns param groups for `Muon`: each group of `params` split in two by "use_muon", without empty halves.

    Muon takes parameters whose attribute `use_muon` is true. Without the attribute it takes parameters with two or more
    dimensions, except embeddings and heads: parameters of `nn.Embedding`, of the module that a Hugging Face model's
    `get_output_embeddings()` returns, and those with "embed" or "lm_head" in their names. A group with a "use_muon"
    entry is not split. With `per_head_muon`, projections of attention get groups by their number of heads. The lr is
    the group's own, else `muon_lr` or `adam_lr`, else `lr`.

    Raises:
        ConfigError: a parameter has no attribute and belongs to no known model, or a flag is not a boolean.
    """
    items = list(params)
    groups = items if items and isinstance(items[0], dict) else [{"params": items}]
    rule = _MuonRule(model)
    split: list[dict[str, Any]] = []
    for group in groups:
        members = [group["params"]] if isinstance(group["params"], Tensor) else list(group["params"])
        # A group that has the entry already, for example from a script for DeepSpeed's Muon, is not split again.
        if "use_muon" in group:
            halves = {bool(group["use_muon"]): members}
        else:
            flags = [rule.is_for_muon(param) for param in members]
            halves = {
                use_muon: [param for param, flag in zip(members, flags, strict=True) if flag is use_muon]
                for use_muon in (True, False)
            }
        for use_muon, half in halves.items():
            if not half:
                continue
            lr = settings.get("muon_lr" if use_muon else "adam_lr")
            common = {**({} if lr is None else {"lr": lr}), **group, "use_muon": use_muon}
            by_heads = rule.by_heads(half) if use_muon and settings.get("per_head_muon") else {1: half}
            split += [{**common, **({"heads": n} if n > 1 else {}), "params": subset} for n, subset in by_heads.items()]
    counts = {flag: sum(len(group["params"]) for group in split if group["use_muon"] is flag) for flag in (True, False)}
    if settings.get("per_head_muon") and not any("heads" in group for group in split):
        raise ConfigError(
            "optimizer.params.per_head_muon",
            expected="a model of transformers whose attention has projections of heads, such as q_proj",
            got="none among Muon's parameters",
            fix="remove the key, or pass param groups with use_muon and heads",
        )
    logger.info("Muon steps %d parameters, and its AdamW %d", counts[True], counts[False])
    return split


class _MuonRule:
    """Selects Muon's parameters by flag, or by dimensions and name: embeddings and heads are not for Muon."""

    def __init__(self, model: nn.Module | None) -> None:
        self._names: dict[int, str] = {}
        self._embeddings: set[int] = set()
        config: Any = getattr(model, "config", None)
        self._config = config.get_text_config() if hasattr(config, "get_text_config") else config
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
        self._embeddings = {id(param) for module in ends for param in module.parameters()}

    def by_heads(self, params: Iterable[Tensor]) -> dict[int, list[Tensor]]:
        """Returns number of heads -> parameters; 1 for those that are no projections of attention."""
        found: dict[int, list[Tensor]] = {}
        for param in params:
            leaf = ".".join(self._names.get(id(param), "").split(".")[-2:-1])
            count, width = _heads_of(leaf, self._config) or (1, 1)
            rows = param.shape[0]  # of a rank, where ranks share the heads
            fits = param.dim() == 2 and rows % width == 0 and count * width % rows == 0
            found.setdefault(rows // width if fits and width > 1 else 1, []).append(param)
        return found

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
                got="no attribute, and a parameter that is not in the model",
                fix="set it on every parameter",
            )
        return (
            param.dim() >= 2 and id(param) not in self._embeddings and not any(word in name.lower() for word in _NAMES)
        )


def _heads_of(leaf: str, config: Any) -> tuple[int, int] | None:
    """Returns the number of heads, and of rows per head, that a projection of this name has in the whole model."""
    heads = getattr(config, "num_attention_heads", None)
    if not isinstance(heads, int):
        return None
    size = getattr(config, "head_dim", None) or getattr(config, "hidden_size", 0) // heads
    of_keys = getattr(config, "num_key_value_heads", None) or heads
    plain, rotary, of_values = (getattr(config, f"{key}_head_dim", 0) for key in ("qk_nope", "qk_rope", "v"))
    if leaf in ("q_proj", "query", "wq", "q_b_proj"):
        count, rows = heads, plain + rotary if plain else size
    elif leaf in ("k_proj", "v_proj", "key", "value", "wk", "wv"):
        count, rows = of_keys, size
    elif leaf == "kv_b_proj":
        count, rows = heads, plain + of_values
    else:
        return None
    return (count, rows) if rows else None


_TORCH = {
    name: kind
    for name, kind in vars(torch.optim).items()
    if inspect.isclass(kind) and issubclass(kind, Optimizer) and kind is not Optimizer
}


def _adam(params: Any, *, adam_w_mode: bool = True, torch_adam: bool = False, **settings: Any) -> Optimizer:
    if torch_adam:
        return (torch.optim.AdamW if adam_w_mode else torch.optim.Adam)(params, **settings)
    return Adam(params, adamw_mode=adam_w_mode, **settings)


def _adamw(params: Any, *, torch_adam: bool = False, **settings: Any) -> Optimizer:
    settings.pop("adam_w_mode", None)  # AdamW is always decoupled, whatever the flag
    return _adam(params, torch_adam=torch_adam, **settings)


_OWN: Mapping[str, tuple[Callable[..., Optimizer], Callable[..., Optimizer], tuple[str, ...]]] = {
    # name -> (builder, class whose signature lists the settings, additional settings)
    "adam": (_adam, Adam, ("adam_w_mode", "torch_adam", "foreach", "fused", "fp32_optimizer_states")),
    "adamw": (_adamw, Adam, ("adam_w_mode", "torch_adam", "foreach", "fused", "fp32_optimizer_states")),
    "lion": (Lion, Lion, ()),
    "adagrad": (Adagrad, Adagrad, ()),
    "rmsprop": (RMSprop, RMSprop, ()),
    "sgd": (SGD, SGD, ()),
    "lamb": (Lamb, Lamb, ()),
}
_REFUSED = {
    "lbfgs": "its step() evaluates the model again through a closure, which an engine does not support",
    "sparseadam": "it needs sparse gradients, but gradients reduced over ranks are dense; use Adam",
}


def known_optimizers() -> list[str]:
    """Returns all names that `optimizer.type` accepts, those with native kernels first."""
    names = ["Adam", "AdamW", "Lion", "Adagrad", "RMSprop", "SGD", "Lamb", "Muon"]
    return names + sorted(name for name in _TORCH if name not in names and name.lower() not in _REFUSED)


def build_optimizer(
    kind: str,
    settings: Mapping[str, Any],
    params: Iterable[nn.Parameter] | Iterable[dict[str, Any]],
    model: nn.Module | None = None,
) -> Optimizer:
    """Returns an optimizer of the named type.

    Adam, AdamW, Lion, Adagrad, RMSprop and SGD (any case) have native kernels that update, unscale, clip and round in
    one pass. Only they (except RMSprop and SGD) support `moments_dtype` ("fp32", "bf16", "int8"); `torch_adam: true`
    uses torch's class. "Adam" has decoupled weight decay unless `adam_w_mode` is false, as in DeepSpeed. Lamb and Muon
    (any case) are `ops.Lamb` and `ops.Muon`, on full tensors. Other `torch.optim` classes have their exact names;
    "torch.optim." before a name selects torch's class.

    Args:
        model: model of the parameters, whose embeddings and heads Muon excludes, see `muon_groups`.

    Raises:
        ConfigError: the type is unknown or not supported, or a setting is unknown or wrong.

    Example:
        >>> import torch
        >>> params = [torch.nn.Parameter(torch.zeros(3))]
        >>> optimizer = build_optimizer("AdamW", {"lr": 1e-3, "moments_dtype": "bf16"}, params)
        >>> type(optimizer).__name__, optimizer.param_groups[0]["lr"]
        ('Adam', 0.001)
    """
    settings = dict(settings)
    name = kind.lower()
    exact = kind.removeprefix("torch.optim.")
    check_optimizer_type(kind)
    if name == "muon":
        _check(kind, settings, MUON_SETTINGS)
        groups = muon_groups(_materialized(params), settings, model)
        settings = {key: value for key, value in settings.items() if key not in {"muon_lr", "adam_lr", "per_head_muon"}}
        return _built(kind, Muon, groups, settings)
    if name in _OWN:
        build, signature, extra = _OWN[name]
        # torch's performance settings do not apply to a kernel; they are ignored, so that scripts with them run.
        if not settings.get("torch_adam"):
            settings = {key: value for key, value in settings.items() if key not in {"foreach", "fused"}}
            _apply_state_dtype(settings)
        _check(kind, settings, [*_settings_of(signature), *extra])
    else:
        build = _TORCH[exact]
        _check(kind, settings, _settings_of(build))
    return _built(kind, build, _materialized(params), settings)


def _built(kind: str, build: Callable[..., Optimizer], params: list[Any], settings: Mapping[str, Any]) -> Optimizer:
    groups = params if params and isinstance(params[0], dict) else [{}]
    written = [group.get("lr") is not None for group in groups]  # before torch fills in the defaults
    try:
        optimizer = build(params, **settings)
    except (TypeError, ValueError) as error:
        raise ConfigError(f"optimizer.params of {kind}: {error}") from error
    note_written_lrs(optimizer, written)
    return optimizer


def _settings_of(signature: Callable[..., Any]) -> list[str]:
    return [name for name in inspect.signature(signature).parameters if name != "params"]


def _apply_state_dtype(settings: dict[str, Any]) -> None:
    """Translates DeepSpeed's key for 16-bit moments to `moments_dtype`."""
    if settings.pop("fp32_optimizer_states", True):
        return
    if settings.setdefault("moments_dtype", "bf16") == "fp32":
        raise ConfigError(
            "optimizer.params.moments_dtype",
            expected='"bf16" with "fp32_optimizer_states": false',
            got="fp32",
            fix="remove one of the two keys",
        )


def _materialized(params: Iterable[Any]) -> list[Any]:
    """Copies param groups, so that the optimizer does not change the caller's dictionaries."""
    return [dict(item) if isinstance(item, dict) else item for item in params]


def _check(kind: str, settings: Mapping[str, Any], allowed: Sequence[str]) -> None:
    for key in settings:
        if key not in allowed:
            fix = hint(key, allowed, f"it takes {', '.join(sorted(allowed))}", 0.6, repr)
            raise ConfigError(f"optimizer.params.{key}", expected=f"a setting of {kind}", fix=fix)


def check_optimizer_type(kind: str, where: str = "optimizer.type") -> None:
    """Raises ConfigError if `build_optimizer` does not support a type; `where` is the address of the key."""
    exact = kind.removeprefix("torch.optim.")
    if exact.lower() in _REFUSED:
        raise ConfigError(f"{where} {kind!r} is not supported", fix=_REFUSED[exact.lower()])
    if kind.lower() == "muon" or kind.lower() in _OWN or exact in _TORCH:
        return
    fix = hint(kind, known_optimizers(), f"choose one of {', '.join(known_optimizers())}", 0.6, repr)
    raise ConfigError(where, expected="a known optimizer", got=kind, fix=fix)
