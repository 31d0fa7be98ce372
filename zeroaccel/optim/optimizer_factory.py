"""Builds the optimizer that a config's `optimizer` section names, over the model's own parameters."""

from __future__ import annotations

import difflib
import inspect
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from zeroaccel.errors import ConfigError
from zeroaccel.ops.elementwise import SGD, Adagrad, Adam, Lion
from zeroaccel.ops.tensorwise import Lamb, Muon
from zeroaccel.optim.muon_groups import MUON_SETTINGS, muon_groups

__all__ = ["build_optimizer", "known_optimizers"]

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
    settings.pop("adam_w_mode", None)  # it is one whatever the flag says
    return _adam(params, torch_adam=torch_adam, **settings)


_OWN: Mapping[str, tuple[Callable[..., Optimizer], Callable[..., Optimizer], tuple[str, ...]]] = {
    # name -> (builder, whose signature lists the settings, settings besides those)
    "adam": (_adam, Adam, ("adam_w_mode", "torch_adam", "foreach", "fused", "fp32_optimizer_states")),
    "adamw": (_adamw, Adam, ("adam_w_mode", "torch_adam", "foreach", "fused", "fp32_optimizer_states")),
    "lion": (Lion, Lion, ()),
    "adagrad": (Adagrad, Adagrad, ()),
    "sgd": (SGD, SGD, ()),
    "lamb": (Lamb, Lamb, ()),
}
_REFUSED = {
    "lbfgs": "its step() evaluates the model again through a closure, which an engine has not",
    "sparseadam": "it takes sparse gradients only, and gradients that are reduced over ranks are dense; use Adam",
    "onebitadam": "1-bit communication is not part of zeroaccel; use AdamW with ZeRO++ quantised gradients",
    "onebitlamb": "1-bit communication is not part of zeroaccel; use AdamW with ZeRO++ quantised gradients",
    "zerooneadam": "1-bit communication is not part of zeroaccel; use AdamW with ZeRO++ quantised gradients",
}


def known_optimizers() -> list[str]:
    """Every name `optimizer.type` takes, own kernels first."""
    own = ["Adam", "AdamW", "Lion", "Adagrad", "SGD", "Lamb", "Muon"]
    return own + sorted(name for name in _TORCH if name not in own and name.lower() not in _REFUSED)


def build_optimizer(
    kind: str,
    settings: Mapping[str, Any],
    params: Iterable[nn.Parameter] | Iterable[dict[str, Any]],
    model: nn.Module | None = None,
) -> Optimizer:
    """An optimizer of the named type.

    Adam, AdamW, Lion, Adagrad and SGD (any case) have kernels of their own that update, unscale, clip and round in
    one pass; `moments_dtype` ("fp32", "bf16", "int8"; not of SGD) is theirs alone; `torch_adam: true` takes torch's.
    "Adam" means decoupled weight decay unless `adam_w_mode` is false, as in DeepSpeed. Lamb and Muon (any case) are
    `ops.tensorwise`, on whole tensors. Any other `torch.optim` class goes by its exact name, and each of them
    by "torch.optim." before it.

    Args:
        model: whose parameters they are; tells Muon embeddings and heads from hidden matrices, see `muon_groups`.

    Raises:
        ConfigError: an unknown type, a type that cannot be sharded, or a setting the type does not have.
    """
    settings = dict(settings)
    if settings.get("max_grad_norm"):
        raise ConfigError(
            "optimizer.params.max_grad_norm", got=settings["max_grad_norm"], fix='set "gradient_clipping" instead'
        )
    settings.pop("max_grad_norm", None)
    name = kind.lower()
    exact = kind.removeprefix("torch.optim.")
    if exact.lower() in _REFUSED:
        raise ConfigError(f"optimizer.type {kind!r} is not supported", fix=_REFUSED[exact.lower()])
    if name == "muon":
        _check(kind, settings, MUON_SETTINGS)
        groups = muon_groups(_materialized(params), settings, model)
        settings = {key: value for key, value in settings.items() if key not in {"muon_lr", "adam_lr"}}
        return _built(kind, Muon, groups, settings)
    if name in _OWN:
        build, signature, extra = _OWN[name]
        if not settings.get("torch_adam"):
            settings = {key: value for key, value in settings.items() if key not in {"foreach", "fused"}}
            _apply_state_dtype(settings)
        _check(kind, settings, [*_settings_of(signature), *extra])
    elif exact in _TORCH:
        build = _TORCH[exact]
        _check(kind, settings, _settings_of(build))
    else:
        raise _unknown(kind)
    return _built(kind, build, _materialized(params), settings)


def _built(kind: str, build: Callable[..., Optimizer], params: list[Any], settings: Mapping[str, Any]) -> Optimizer:
    try:
        return build(params, **settings)
    except (TypeError, ValueError) as error:
        raise ConfigError(f"optimizer.params of {kind}: {error}") from error


def _settings_of(signature: Callable[..., Any]) -> list[str]:
    return [name for name in inspect.signature(signature).parameters if name != "params"]


def _apply_state_dtype(settings: dict[str, Any]) -> None:
    """DeepSpeed's word for moments in 16 bits, put into ours."""
    if settings.pop("fp32_optimizer_states", True):
        return
    if settings.setdefault("moments_dtype", "bf16") == "fp32":
        raise ConfigError(
            "optimizer.params.moments_dtype",
            expected='"bf16" beside "fp32_optimizer_states": false',
            got="fp32",
            fix="remove one of the two",
        )


def _materialized(params: Iterable[Any]) -> list[Any]:
    """Param groups are copied: the optimizer's dictionaries are not the caller's."""
    return [dict(item) if isinstance(item, dict) else item for item in params]


def _check(kind: str, settings: Mapping[str, Any], allowed: Sequence[str]) -> None:
    for key in settings:
        if key not in allowed:
            near = difflib.get_close_matches(key, allowed, 1)
            hint = f"did you mean {near[0]!r}?" if near else f"it takes {', '.join(sorted(allowed))}"
            raise ConfigError(f"optimizer.params.{key}", expected=f"a setting of {kind}", fix=hint)


def _unknown(kind: str) -> ConfigError:
    known = {name.lower(): name for name in known_optimizers()}
    near = difflib.get_close_matches(kind.lower(), known, 1)
    hint = f"did you mean {known[near[0]]!r}?" if near else f"choose one of {', '.join(known_optimizers())}"
    return ConfigError("optimizer.type", expected="a known optimizer", got=kind, fix=hint)
