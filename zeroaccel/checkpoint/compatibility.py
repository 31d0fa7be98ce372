"""Whether a checkpoint fits a model and its optimizer, checked before anything changes.

All mismatches come in one error, by name.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Any

from zeroaccel.checkpoint.manifest import Manifest
from zeroaccel.checkpoint.save_plan import EngineState, base_name, code_names, persistent_buffers
from zeroaccel.errors import CheckpointError, listed
from zeroaccel.logs import logger
from zeroaccel.zero.quantized_weights import PACKED
from zeroaccel.zero.sharded_optimizer import ShardedOptimizer

_OPTIMIZER_OF_STATES: Sequence[tuple[frozenset[str], str]] = (
    (frozenset({"exp_avg", "exp_avg_sq"}), "AdamW"),
    (frozenset({"exp_avg"}), "Lion"),
    (frozenset({"momentum_buffer"}), "SGD"),
    (frozenset({"sum"}), "Adagrad"),
    (frozenset({"square_avg"}), "RMSprop"),
)


class CheckpointMisfit(CheckpointError):
    """A sound checkpoint, of another model or optimizer: no older one would do either."""


def check_model(engine_state: EngineState, manifest: Manifest, where: str, *, strict: bool) -> None:
    """Raises CheckpointMisfit unless the names and shapes of parameters and buffers agree.

    Args:
        where: the checkpoint, for the message.
        strict: False lets names be missing on either side; shapes must agree all the same.
    """
    model = {slot.fqn: slot.whole_shape for buffer in engine_state.buffers() for slot in buffer.layout.slots}
    saved_names = {fqn: manifest.canonical(fqn) for fqn in model}
    used = {name for name in saved_names.values() if name is not None}
    elsewhere: set[str] = set()
    if engine_state.whole_model is not None:  # what other stages load
        used |= {name for fqn in engine_state.whole_model.order if (name := manifest.canonical(fqn)) is not None}
        elsewhere = set(engine_state.whole_model.buffers)
    buffers = {name: tuple(buffer.shape) for name, buffer in persistent_buffers(engine_state.model)}
    shapes = [
        f"{fqn}: {tuple(manifest.parameters[name].shape)} in the checkpoint, {model[fqn]} in the model"
        for fqn, name in saved_names.items()
        if name is not None and tuple(manifest.parameters[name].shape) != model[fqn]
    ]
    saved_buffers = {name: manifest.tensors[f"buffer/{name}"].shape for name in manifest.buffers}
    shapes += [
        f"{name}: {saved_buffers[name]} in the checkpoint, {shape} in the model"
        for name, shape in buffers.items()
        if name in saved_buffers and tuple(saved_buffers[name]) != shape and PACKED not in name
    ]
    # All differences in one message: a wrong model is rarely wrong in one name only.
    missing = [fqn for fqn, name in saved_names.items() if name is None] + sorted(set(buffers) - set(saved_buffers))
    extra = [fqn for fqn in manifest.order if fqn not in used] + sorted(set(saved_buffers) - set(buffers) - elsewhere)
    problems = [
        *(["other shapes: " + listed(shapes, "; ")] if shapes else []),
        *(["not in the checkpoint: " + listed(missing)] if missing else []),
        *(["not in the model: " + listed(extra)] if extra else []),
    ]
    if shapes or (strict and problems):
        codes = set(manifest.codes).intersection(used) - set(code_names(engine_state.model))
        fix = "build the model it was saved from" + ("" if shapes else ", or pass load_module_strict=False")
        if codes:
            fix = f"{listed(sorted(codes))}: codes there; quantise the base by the library of the checkpoint before"
        raise CheckpointMisfit(f"{where} does not fit the model: " + ". ".join(problems), fix=fix)
    if problems:
        logger.warning("%s: %s", where, ". ".join(problems))
    base = base_name(engine_state.model)
    lacks = not all(record.saved for record in manifest.parameters.values())
    if strict and lacks and manifest.base_model and manifest.base_model != base:
        raise CheckpointMisfit(
            f"{where}: the base under its adapters is not in it",
            expected=f"adapters over {manifest.base_model}",
            got=f"adapters over {base or 'a base without a name'}",
            fix="load that base before; load_module_strict=False takes another one",
        )


def check_optimizer(optimizer: ShardedOptimizer, manifest: Manifest, where: str) -> None:
    """Raises CheckpointMisfit unless the checkpoint has states that this optimizer can go on with."""
    saved = manifest.optimizer
    if saved is None:
        raise CheckpointMisfit(
            f"{where}: saved without an optimizer", fix="pass load_optimizer_states=False to load the weights only"
        )
    ours = type(optimizer.optimizer).__name__
    if _family(saved["type"]) != _family(ours):
        raise CheckpointMisfit(
            f"{where}: the optimizer's type",
            expected=ours,
            got=saved["type"],
            fix="use the same optimizer, or pass load_optimizer_states=False",
        )
    hyperparameters(optimizer, manifest, where)
    # A checkpoint without any state is that of a run before its first step; one with some has to have all.
    with_state = set(filter(manifest.has_state, manifest.order))
    without = [
        fqn
        for fqn in optimizer.group_of
        if (name := manifest.canonical(fqn)) is not None
        and name not in with_state
        and manifest.parameters[name].shape.count(0) == 0
    ]
    if with_state and without:
        raise CheckpointMisfit(
            f"{where}: no optimizer state of {listed(without)}",
            fix="train the same parameters, or pass load_optimizer_states=False",
        )


def optimizer_of_states(names: Collection[str]) -> str | None:
    """The class of torch.optim whose states have these names; None if there is none.

    For checkpoints of DeepSpeed and DCP, which do not say which class the optimizer had.
    """
    return next((kind for required, kind in _OPTIMIZER_OF_STATES if required <= set(names)), None)


def _family(name: str) -> str:
    lowered = name.lower()
    return "adam" if lowered in ("adam", "adamw", "cpuadam", "fusedadam") else lowered


def hyperparameters(optimizer: ShardedOptimizer, manifest: Manifest, where: str) -> list[Mapping[str, Any]]:
    """For each of the optimizer's param groups the saved group of its parameters, encoded.

    Groups are matched by the names in them, so their order and their number may differ.

    Raises:
        CheckpointMisfit: parameters that are one group now were in groups of different hyperparameters.
    """
    saved = manifest.saved_optimizer["param_groups"]
    group_of = {fqn: index for index, group in enumerate(saved) for fqn in group["params"]}
    chosen: list[Mapping[str, Any]] = []
    for index in range(len(optimizer.optimizer.param_groups)):
        names = [manifest.canonical(fqn) for fqn, owner in optimizer.group_of.items() if owner == index]
        saved_groups = sorted({group_of[name] for name in names if name in group_of})
        settings = [{key: value for key, value in saved[i].items() if key != "params"} for i in saved_groups]
        if any(other != settings[0] for other in settings[1:]):
            raise CheckpointMisfit(
                f"{where}: param group {index} of the optimizer",
                expected="parameters of one param group, or of groups with equal hyperparameters",
                got=f"those of groups {saved_groups}, which differ in {_differing(settings)}",
                fix="group the parameters as when it was saved, or pass load_optimizer_states=False",
            )
        chosen.append(settings[0] if settings else {})
    return chosen


def _differing(settings: list[dict[str, Any]]) -> str:
    keys = {key for group in settings for key in group}
    return ", ".join(sorted(key for key in keys if len({repr(group.get(key)) for group in settings}) > 1))
