"""Patches of two calls of transformers that fail where parameters are sharded.

`PreTrainedModel.save_pretrained` without a state dict is `accelerate/pretrained_saving.py`'s. `Trainer.train` after
`evaluate` goes on with the engine of the evaluation, which has no optimizer and is destroyed by then: the patch starts
from the model. Both are patched when an engine is made, and only if transformers is imported; `detach()` restores the
originals.
"""

from __future__ import annotations

import copy
import functools
import sys
from collections.abc import Callable
from typing import Any

from zeroaccel.accelerate import pretrained_saving
from zeroaccel.zero.engine_base import EngineBase

_ORIGINALS: dict[type, Callable[..., Any]] = {}


def attach(engine: EngineBase) -> None:
    """Makes the two calls use this engine until it is destroyed."""
    pretrained_saving.attach(engine)
    owner = getattr(sys.modules.get("transformers.trainer"), "Trainer", None)
    if owner is not None and owner not in _ORIGINALS:
        _ORIGINALS[owner] = owner.__dict__["train"]
        owner.train = _from_the_model(_ORIGINALS[owner])


def detach() -> None:
    """Restores the original calls."""
    pretrained_saving.detach()
    while _ORIGINALS:
        owner, original = _ORIGINALS.popitem()
        owner.train = original  # type: ignore[attr-defined]


def _from_the_model(original: Callable[..., Any]) -> Callable[..., Any]:
    """`Trainer.train` that does not go on with an engine for inference."""

    @functools.wraps(original)
    def train(trainer: Any, *args: Any, **kwargs: Any) -> Any:
        engine = trainer.model_wrapped
        if isinstance(engine, EngineBase) and engine.optimizer is None:
            engine.destroy()
            _restore_config(trainer)
            trainer.model_wrapped, trainer.deepspeed = trainer.model, None
        return original(trainer, *args, **kwargs)

    return train


def _restore_config(trainer: Any) -> None:
    """Undoes what an evaluation did to the config: lengths of a training of no steps, and no optimizer.

    transformers deletes the optimizer's section for an evaluation. Left so, the training would take torch's AdamW.
    """
    plugin = getattr(trainer.accelerator.state, "deepspeed_plugin", None)
    config = getattr(plugin, "hf_ds_config", None)
    if config is None or not getattr(trainer.args, "deepspeed", None):
        return
    written = type(config).__mro__[-2](trainer.args.deepspeed)  # accelerate's own class, which only reads
    for name in ("total_num_steps", "warmup_num_steps"):
        if written.get_value(f"scheduler.params.{name}") == "auto":
            config.config["scheduler"]["params"][name] = "auto"
    section = written.config.get("optimizer")
    if section is not None and "optimizer" not in config.config:
        config.config["optimizer"] = copy.deepcopy(section)
        config.trainer_config_process(trainer.args)  # fills in what is "auto" by the arguments, as at the start
