"""Checks that a checkpoint fits a model and its optimizer, before the load changes anything.

One error lists all mismatches by name.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Any

from zeroaccel.checkpoint.manifest import Manifest
from zeroaccel.checkpoint.save_plan import EngineState, base_name, code_names, persistent_buffers
from zeroaccel.errors import CheckpointError, listed
from zeroaccel.logs import logger
from zeroaccel.zero.access.safetensors_file import are_other_codes, dtype_name
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
    """A valid checkpoint of a different model or optimizer. An older checkpoint would not fit either."""


def check_model(engine_state: EngineState, manifest: Manifest, where: str, *, strict: bool) -> None:
    """Raises CheckpointMisfit unless the names and shapes of parameters and buffers agree.

    Args:
        where: the checkpoint, for the message.
        strict: if False, names may be missing on either side; shapes must still agree.
    """
    model = {slot.fqn: slot.whole_shape for buffer in engine_state.buffers() for slot in buffer.layout.slots}
    saved_names = {fqn: manifest.canonical(fqn) for fqn in model}
    used = {name for name in saved_names.values() if name is not None}
    elsewhere: set[str] = set()
    if engine_state.whole_model is not None:  # parameters and buffers that other stages load
        used |= {name for fqn in engine_state.whole_model.order if (name := manifest.canonical(fqn)) is not None}
        elsewhere = set(engine_state.whole_model.buffers)
    buffers = {name: tuple(buffer.shape) for name, buffer in persistent_buffers(engine_state.model)}
    shapes = [
        f"{fqn}: {tuple(manifest.parameters[name].shape)} in the checkpoint, {model[fqn]} in the model"
        for fqn, name in saved_names.items()
        if name is not None and tuple(manifest.parameters[name].shape) != model[fqn]
    ]
    of_buffers = {name: saved for name in buffers if (saved := manifest.buffer(name)) is not None}
    shapes += [
        f"{name}: {manifest.tensors[f'buffer/{saved}'].shape} in the checkpoint, {buffers[name]} in the model"
        for name, saved in of_buffers.items()
        if tuple(manifest.tensors[f"buffer/{saved}"].shape) != buffers[name] and PACKED not in name
    ]
    shapes += _other_codes(engine_state, manifest, saved_names)
    # All differences in one message: a wrong model rarely differs in one name only.
    # One name of a buffer with several is enough: other versions saved the first only.
    filled = {id(buffer) for name, buffer in persistent_buffers(engine_state.model) if name in of_buffers}
    missing = [fqn for fqn, name in saved_names.items() if name is None]
    missing += sorted(
        name
        for name, buffer in persistent_buffers(engine_state.model)
        if name not in of_buffers and id(buffer) not in filled
    )
    extra = [fqn for fqn in manifest.order if fqn not in used]
    extra += sorted(set(manifest.buffers) - set(of_buffers.values()) - elsewhere)
    problems = [
        *(["other shapes or dtypes: " + listed(shapes, "; ")] if shapes else []),
        *(["not in the checkpoint: " + listed(missing)] if missing else []),
        *(["not in the model: " + listed(extra)] if extra else []),
    ]
    if shapes or (strict and problems):
        codes = set(manifest.codes).intersection(used) - set(code_names(engine_state.model))
        fix = "build the model that was saved" + ("" if shapes else ", or pass load_module_strict=False")
        if codes:
            fix = f"{listed(sorted(codes))}: saved as codes; first quantize the base with the checkpoint's library"
        raise CheckpointMisfit(f"{where} does not fit the model: " + ". ".join(problems), fix=fix)
    if problems:
        logger.warning("%s: %s", where, ". ".join(problems))
    base = base_name(engine_state.model)
    lacks = not all(record.saved for record in manifest.parameters.values())
    if strict and lacks and manifest.base_model and manifest.base_model != base:
        raise CheckpointMisfit(
            f"{where}: it does not contain the base model of its adapters",
            expected=f"adapters over {manifest.base_model}",
            got=f"adapters over {base or 'a base without a name'}",
            fix="load that base first, or pass load_module_strict=False to accept a different one",
        )


def _other_codes(engine_state: EngineState, manifest: Manifest, saved_names: Mapping[str, str | None]) -> list[str]:
    """Describes tensors in 8-bit floats on one side only: a load would cast codes without their scale."""
    pairs = [
        (slot.fqn, manifest.parameters[name].dtype, dtype_name(buffer.dtype))
        for buffer in engine_state.buffers()
        for slot in buffer.layout.slots
        if (name := saved_names[slot.fqn]) is not None
    ]
    pairs += [
        (name, manifest.tensors[f"buffer/{saved}"].dtype, dtype_name(buffer.dtype))
        for name, buffer in persistent_buffers(engine_state.model)
        if (saved := manifest.buffer(name)) is not None
    ]
    return [
        f"{name}: {saved} in the checkpoint, {dtype} in the model"
        for name, saved, dtype in pairs
        if are_other_codes(saved, dtype)
    ]


def check_optimizer(optimizer: ShardedOptimizer, manifest: Manifest, where: str) -> None:
    """Raises CheckpointMisfit unless this optimizer can resume from the states in the checkpoint."""
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
    # A run before its first step saves no states at all; otherwise every parameter must have its states.
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
            f"{where}: no optimizer state for {listed(without)}",
            fix="train the same parameters, or pass load_optimizer_states=False",
        )


def optimizer_of_states(names: Collection[str]) -> str | None:
    """Returns the class of torch.optim whose states have these names; None if there is none.

    Checkpoints of DeepSpeed and DCP do not contain the class of the optimizer.
    """
    return next((kind for required, kind in _OPTIMIZER_OF_STATES if required <= set(names)), None)


def _family(name: str) -> str:
    lowered = name.lower()
    return "adam" if lowered in ("adam", "adamw", "cpuadam", "fusedadam") else lowered


def hyperparameters(optimizer: ShardedOptimizer, manifest: Manifest, where: str) -> list[Mapping[str, Any]]:
    """Returns the saved hyperparameters, still encoded, for each of the optimizer's param groups.

    Matches groups by the names of their parameters, so their order and number may differ.

    Raises:
        CheckpointMisfit: parameters of one group come from saved groups with different hyperparameters.
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
                got=f"parameters of groups {saved_groups}, which differ in {_differing(settings)}",
                fix="group the parameters as in the checkpoint, or pass load_optimizer_states=False",
            )
        chosen.append(settings[0] if settings else {})
    return chosen


def _differing(settings: list[dict[str, Any]]) -> str:
    keys = {key for group in settings for key in group}
    return ", ".join(sorted(key for key in keys if len({repr(group.get(key)) for group in settings}) > 1))
