"""Builds the optimizer that a config's `optimizer` section names, over the model's own parameters."""

from __future__ import annotations

import difflib
import inspect
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from zeroaccel.errors import ConfigError
from zeroaccel.ops.adagrad import Adagrad
from zeroaccel.ops.adam import Adam
from zeroaccel.ops.lion import Lion
from zeroaccel.ops.sgd import SGD

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
}
_REFUSED = {
    "lamb": "its trust ratio needs the norm of each whole parameter, which a shard does not have",
    "muon": "it orthogonalises whole matrices, which a shard does not have",
    "onebitadam": "1-bit communication is not part of zeroaccel; use AdamW with ZeRO++ quantised gradients",
    "onebitlamb": "1-bit communication is not part of zeroaccel; use AdamW with ZeRO++ quantised gradients",
    "zerooneadam": "1-bit communication is not part of zeroaccel; use AdamW with ZeRO++ quantised gradients",
}


def known_optimizers() -> list[str]:
    """Every name `optimizer.type` takes, own kernels first."""
    return ["Adam", "AdamW", "Lion", "Adagrad", "SGD", *sorted(set(_TORCH) - {"Adam", "AdamW", "Adagrad", "SGD"})]


def build_optimizer(
    kind: str, settings: Mapping[str, Any], params: Iterable[nn.Parameter] | Iterable[dict[str, Any]]
) -> Optimizer:
    """An optimizer of the named type.

    Adam, AdamW, Lion, Adagrad and SGD (any case) have kernels of their own that update, unscale, clip and round in
    one pass; `moments_dtype` ("fp32", "bf16", "int8"; not of SGD) is theirs alone; `torch_adam: true` takes torch's.
    "Adam" means decoupled weight decay unless `adam_w_mode` is false, as in DeepSpeed. Any other `torch.optim` class
    goes by its exact name.

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
    if name in _OWN:
        build, signature, extra = _OWN[name]
        if not settings.get("torch_adam"):
            settings = {key: value for key, value in settings.items() if key not in {"foreach", "fused"}}
            _apply_state_dtype(settings)
        _check(kind, settings, signature, extra)
    elif kind in _TORCH:
        build = _TORCH[kind]
        _check(kind, settings, build, ())
    else:
        raise _unknown(kind)
    try:
        return build(_materialized(params), **settings)
    except (TypeError, ValueError) as error:
        raise ConfigError(f"optimizer.params of {kind}: {error}") from error


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


def _check(kind: str, settings: Mapping[str, Any], signature: Callable[..., Any], extra: tuple[str, ...]) -> None:
    allowed = [name for name in inspect.signature(signature).parameters if name != "params"] + list(extra)
    for key in settings:
        if key not in allowed:
            near = difflib.get_close_matches(key, allowed, 1)
            hint = f"did you mean {near[0]!r}?" if near else f"it takes {', '.join(sorted(allowed))}"
            raise ConfigError(f"optimizer.params.{key}", expected=f"a setting of {kind}", fix=hint)


def _unknown(kind: str) -> ConfigError:
    if kind.lower() in _REFUSED:
        return ConfigError(f"optimizer.type {kind!r} is not supported", fix=_REFUSED[kind.lower()])
    known = {name.lower(): name for name in known_optimizers()}
    near = difflib.get_close_matches(kind.lower(), known, 1)
    hint = f"did you mean {known[near[0]]!r}?" if near else f"choose one of {', '.join(known_optimizers())}"
    return ConfigError("optimizer.type", expected="a known optimizer", got=kind, fix=hint)
