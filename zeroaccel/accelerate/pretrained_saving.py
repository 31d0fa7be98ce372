"""A patch of transformers' `PreTrainedModel.save_pretrained`, which without a state dict reads the model's own.

At stage 3 that is sharded: the patch gathers the weights, one unit at a time, as the files are written. It is made when
an engine is, if transformers is imported, and `detach()` takes it back. Models without an engine are saved as before.
"""

from __future__ import annotations

import functools
import inspect
import sys
import weakref
from collections.abc import Callable
from typing import Any

from torch import nn

from zeroaccel.checkpoint.weights_on_demand import state_dict_on_demand
from zeroaccel.comm.agree import agree_or_raise
from zeroaccel.errors import EngineStateError
from zeroaccel.zero.engine_base import EngineBase

_ENGINES: weakref.WeakSet[EngineBase] = weakref.WeakSet()
_ORIGINALS: dict[type, Callable[..., Any]] = {}


def attach(engine: EngineBase) -> None:
    """Makes `save_pretrained` of the engine's model, or of a part of it, gather its weights, until it is destroyed."""
    _ENGINES.add(engine)
    engine.at_destroy(functools.partial(_ENGINES.discard, engine))
    owner = getattr(sys.modules.get("transformers.modeling_utils"), "PreTrainedModel", None)
    if owner is not None and owner not in _ORIGINALS:
        _ORIGINALS[owner] = owner.__dict__["save_pretrained"]
        owner.save_pretrained = _gathering(_ORIGINALS[owner])


def detach() -> None:
    """Restores the original."""
    _ENGINES.clear()
    while _ORIGINALS:
        owner, original = _ORIGINALS.popitem()
        owner.save_pretrained = original  # type: ignore[attr-defined]


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
        collectives = engine.collectives.job
        # Who says which is the main process calls on all ranks; without that a Trainer may have called on one.
        on_all_ranks = "is_main_process" in bound.arguments or collectives.world_size == 1
        if collectives.rank != 0:
            bound.arguments["is_main_process"] = False  # it has no values; rank 0 writes

        def save(state: dict[str, Any]) -> Any:
            inside = {name.removeprefix(prefix): state.pop(name) for name in list(state) if name.startswith(prefix)}
            bound.arguments["state_dict"] = inside
            return original(*bound.args, **bound.kwargs)

        if not on_all_ranks:
            gathered = getattr(engine, "gathered_state", None)
            if gathered is None:
                raise EngineStateError(
                    f"{type(model).__name__}.save_pretrained(): the weights are sharded, and other ranks may not be "
                    "here",
                    fix="pass state_dict=accelerator.get_state_dict(model), which all ranks call, or have all ranks "
                    "call save_pretrained with is_main_process=accelerator.is_main_process",
                )
            return save(dict(gathered))
        engine.checkpointer.prepare_to_save("save_pretrained")
        result, failure = None, None
        try:
            with state_dict_on_demand(engine.checkpointer.state(), collectives) as state:
                result = save(state)
        except Exception as error:
            failure = error
        agree_or_raise(collectives, failure, "save_pretrained")
        return result

    return save_pretrained


def _engine_of(model: nn.Module) -> tuple[Any, str] | None:
    """The engine that shards the model, or a model that it is part of; and the prefix of its names there."""
    for engine in _ENGINES:
        ranks = engine.collectives
        if engine.settings.plan.params or ranks.parts is not None or ranks.part_holders is not None:
            for name, module in engine.module.named_modules():
                if module is model:
                    return engine, f"{name}." if name else ""
    return None
