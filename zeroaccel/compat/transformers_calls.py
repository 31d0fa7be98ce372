"""Patches of two calls of transformers that fail where parameters are sharded.

`PreTrainedModel.save_pretrained` without a state dict reads the model's own, which is sharded at stage 3: the patch
gathers the weights. `Trainer.train` after `evaluate` goes on with the engine of the evaluation, which has no optimizer
and
is destroyed by then: the patch starts from the model. Both are patched when an engine is made, and only if transformers
is imported; `detach()` restores the originals. Models without an engine are saved as without the patch.
"""

from __future__ import annotations

import functools
import inspect
import sys
import weakref
from collections.abc import Callable
from typing import Any

from torch import nn

from zeroaccel.errors import EngineStateError
from zeroaccel.zero.engine import Engine

_ENGINES: weakref.WeakSet[Engine] = weakref.WeakSet()
_ORIGINALS: dict[tuple[type, str], Callable[..., Any]] = {}


def attach(engine: Engine) -> None:
    """Makes the two calls use this engine until it is destroyed."""
    _ENGINES.add(engine)
    engine.at_destroy(functools.partial(_ENGINES.discard, engine))
    for module, kind, call, change in (
        ("transformers.modeling_utils", "PreTrainedModel", "save_pretrained", _gathering),
        ("transformers.trainer", "Trainer", "train", _from_the_model),
    ):
        owner = getattr(sys.modules.get(module), kind, None)
        if owner is not None and (owner, call) not in _ORIGINALS:
            original = owner.__dict__[call]
            _ORIGINALS[owner, call] = original
            setattr(owner, call, change(original))


def detach() -> None:
    """Restores the original calls."""
    _ENGINES.clear()
    while _ORIGINALS:
        (owner, call), original = _ORIGINALS.popitem()
        setattr(owner, call, original)


def _gathering(original: Callable[..., Any]) -> Callable[..., Any]:
    """`save_pretrained` that gathers the weights of a sharded model where no state dict is passed."""
    signature = inspect.signature(original)

    @functools.wraps(original)
    def save_pretrained(*args: Any, **kwargs: Any) -> Any:
        bound = signature.bind(*args, **kwargs)
        model = bound.args[0]
        engine_and_prefix = _engine_of(model) if bound.arguments.get("state_dict") is None else None
        if engine_and_prefix is None:
            return original(*args, **kwargs)
        engine, prefix = engine_and_prefix
        state = (
            engine._consolidated_16bit_state_dict() if "is_main_process" in bound.arguments else engine.gathered_state
        )
        if state is None:
            raise EngineStateError(
                f"{type(model).__name__}.save_pretrained(): the weights are sharded, and other ranks may not be here",
                fix="pass state_dict=accelerator.get_state_dict(model), which all ranks call, or have all ranks call "
                "save_pretrained with is_main_process=accelerator.is_main_process",
            )
        if engine.collectives.rank != 0:
            bound.arguments["is_main_process"] = False  # it has no values; rank 0 writes
        inside = {name.removeprefix(prefix): value for name, value in state.items() if name.startswith(prefix)}
        bound.arguments["state_dict"] = inside
        return original(*bound.args, **bound.kwargs)

    return save_pretrained


def _engine_of(model: nn.Module) -> tuple[Any, str] | None:
    """The engine that shards the model, or a model that it is part of; and the prefix of its names there."""
    for engine in _ENGINES:
        if engine.settings.plan.params:
            for name, module in engine.module.named_modules():
                if module is model:
                    return engine, f"{name}." if name else ""
    return None


def _from_the_model(original: Callable[..., Any]) -> Callable[..., Any]:
    """`Trainer.train` that does not go on with an engine for inference."""

    @functools.wraps(original)
    def train(trainer: Any, *args: Any, **kwargs: Any) -> Any:
        engine = trainer.model_wrapped
        if isinstance(engine, Engine) and engine.optimizer is None:
            engine.destroy()
            _forget_lengths(trainer)
            trainer.model_wrapped, trainer.deepspeed = trainer.model, None
        return original(trainer, *args, **kwargs)

    return train


def _forget_lengths(trainer: Any) -> None:
    """Resets the scheduler's lengths to "auto", which the evaluation has resolved for a training of no steps."""
    plugin = getattr(trainer.accelerator.state, "deepspeed_plugin", None)
    config = getattr(plugin, "hf_ds_config", None)
    if config is None or not getattr(trainer.args, "deepspeed", None):
        return
    written = type(config).__mro__[-2](trainer.args.deepspeed)  # accelerate's own class, which only reads
    for name in ("total_num_steps", "warmup_num_steps"):
        if written.get_value(f"scheduler.params.{name}") == "auto":
            config.config["scheduler"]["params"][name] = "auto"
