"""FSDP's settings of accelerate, as the ZeRO settings that shard and offload the same way, with a note for each.

Used by `launch_file` for files, by the launch for flags, and by `config convert`. FSDP1's strategies and FSDP2's
`reshard_after_forward` name what lives where between steps, which is what a stage says. Pure: reads one mapping.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from zeroaccel.config.problems import Problem, closest

__all__ = ["FSDP_KEYS", "FsdpTranslation", "translate_fsdp"]

_STAGES = {
    "FULL_SHARD": 3,
    "SHARD_GRAD_OP": 2,
    "NO_SHARD": 0,
    "HYBRID_SHARD": 3,
    "HYBRID_SHARD_ZERO2": 2,
}
_NUMBERED = {"1": "FULL_SHARD", "2": "SHARD_GRAD_OP", "3": "NO_SHARD", "4": "HYBRID_SHARD", "5": "HYBRID_SHARD_ZERO2"}
_STRATEGY, _RESHARD = "fsdp_sharding_strategy", "fsdp_reshard_after_forward"
_BLOCKS = "the repeated blocks of a model are found by themselves"
_PREFETCH = "prefetching is set in the JSON config: stage3_prefetch_bucket_size"
# Settings of FSDP without a counterpart, and why none is needed.
_LEFT_OUT: Mapping[str, str] = {
    "fsdp_auto_wrap_policy": _BLOCKS,
    "fsdp_transformer_layer_cls_to_wrap": _BLOCKS,
    "fsdp_min_num_params": _BLOCKS,
    "fsdp_backward_prefetch": _PREFETCH,
    "fsdp_backward_prefetch_policy": _PREFETCH,
    "fsdp_forward_prefetch": _PREFETCH,
    "fsdp_use_orig_params": "parameters always keep their names and shapes",
    "fsdp_sync_module_states": "the weights of rank 0 always count",
    "fsdp_activation_checkpointing": "recomputation is the model's own (model.gradient_checkpointing_enable()), or "
    "activation_checkpointing.wrap_blocks of the JSON config",
    "fsdp_activation_checkpointing_offload": "activations are offloaded by activation_checkpointing of the JSON config",
    "fsdp_version": "there is one engine",
    "fsdp_ignored_modules": "every module is sharded",
}
_TRANSLATED = (
    _STRATEGY,
    _RESHARD,
    "fsdp_offload_params",
    "fsdp_cpu_ram_efficient_loading",
    "fsdp_state_dict_type",
)

FSDP_KEYS: tuple[str, ...] = (*_TRANSLATED, *_LEFT_OUT)
"""The settings of FSDP that are known, each also a flag of accelerate's launcher."""


@dataclass
class FsdpTranslation:
    """What stands for FSDP's settings here.

    Attributes:
        values: ZeRO setting -> value.
        said_by: ZeRO setting -> the key of FSDP that it was made of; "" where none was given.
        notes: for each key that was given, the key and what it stands for here, or why for nothing.
        problems: keys and values that mean nothing; the path is the key as it was written.
    """

    values: dict[str, Any] = field(default_factory=dict)
    said_by: dict[str, str] = field(default_factory=dict)
    notes: list[tuple[str, str]] = field(default_factory=list)
    problems: list[Problem] = field(default_factory=list)

    def say(self, name: str, value: Any, key: str) -> None:
        """Sets a setting that a key of FSDP stands for."""
        self.values[name], self.said_by[name] = value, key


def translate_fsdp(fsdp: Mapping[str, Any], num_machines: int = 1) -> FsdpTranslation:
    """The stage and the offload that shard as FSDP would with these settings.

    Args:
        fsdp: accelerate's keys, with or without their "fsdp_"; values as in its files or as text.
        num_machines: of the job, for the strategies that shard within one.
    """
    made = FsdpTranslation()
    written = {key if str(key).startswith("fsdp_") else f"fsdp_{key}": key for key in fsdp}
    given = {name: fsdp[key] for name, key in written.items() if fsdp[key] is not None}
    stage = _stage(given, written, num_machines, made)
    for key, value in given.items():
        if key == "fsdp_offload_params":
            _offload(_is_true(value), stage, made)
        elif key == "fsdp_cpu_ram_efficient_loading":
            _at_stage_3(key, value, "zero3_init_flag", _is_true(value), stage, made)
        elif key == "fsdp_state_dict_type":
            whole = str(value).upper() in ("FULL_STATE_DICT", "1")
            _at_stage_3(key, value, "zero3_save_16bit_model", whole, stage, made)
        elif key in _LEFT_OUT:
            made.notes.append((key, f"left out, {_LEFT_OUT[key]}"))
        elif key not in (_STRATEGY, _RESHARD):
            _unknown(key, written[key], made)
    return made


def _stage(given: Mapping[str, Any], written: Mapping[str, str], num_machines: int, made: FsdpTranslation) -> int:
    # FSDP2 has no strategy: accelerate looks at the other key only.
    is_second = str(given.get("fsdp_version", "")) == "2" and _RESHARD in given
    key = _RESHARD if is_second or _STRATEGY not in given else _STRATEGY
    said = str(given.get(key, "FULL_SHARD")).upper().removeprefix("SHARDINGSTRATEGY.").removeprefix("_")
    # Parameters that stay whole between forward and backward are stage 2.
    word = {"TRUE": "FULL_SHARD", "FALSE": "SHARD_GRAD_OP"}.get(said, _NUMBERED.get(said, said))
    if word not in _STAGES:
        expected = " or ".join(_STAGES) if key == _STRATEGY else "true or false"
        made.problems.append(Problem((written[key],), expected=expected, got=given[key]))
        return 3
    stage = _STAGES[word]
    made.say("zero_stage", stage, key if key in given else "")
    text = f"{_shown(given[key])} -> " if key in given else "not given, which shards everything -> "
    made.notes.append((key if key in given else _STRATEGY, f"{text}zero_stage {stage}"))
    other = _STRATEGY if key == _RESHARD else _RESHARD
    if other in given:
        made.notes.append((other, f"left out, {key} decides"))
    if word.startswith("HYBRID") and num_machines > 1:
        text = (
            "sharded over the ranks of all machines instead of within each, which trains the same; "
            "mics_shard_size of a JSON config shards within groups"
        )
        made.notes.append((key, text))
    return stage


def _offload(wanted: bool, stage: int, made: FsdpTranslation) -> None:
    key = "fsdp_offload_params"
    if not wanted:
        made.notes.append((key, "false -> nothing is offloaded"))
    elif stage < 1:
        made.notes.append((key, "left out, nothing is sharded at stage 0, and nothing offloaded"))
    else:
        made.say("offload_optimizer_device", "cpu", key)
        if stage == 3:
            made.say("offload_param_device", "cpu", key)
        devices = "offload_optimizer_device and offload_param_device" if stage == 3 else "offload_optimizer_device"
        made.notes.append((key, f"true -> {devices} cpu"))


def _at_stage_3(key: str, value: Any, name: str, meaning: bool, stage: int, made: FsdpTranslation) -> None:
    if stage == 3:
        made.say(name, meaning, key)
        made.notes.append((key, f"{_shown(value)} -> {name} {_shown(meaning)}"))
    else:
        made.notes.append((key, f"left out, every rank has whole parameters at stage {stage}"))


def _unknown(key: str, written: str, made: FsdpTranslation) -> None:
    meant = closest(key, FSDP_KEYS)
    if meant:
        made.problems.append(Problem((written,), text="unknown key", fix=f"did you mean {meant}?"))
    else:
        made.notes.append((key, "left out, accelerate has no such setting and ignores it"))


def _is_true(value: Any) -> bool:
    return str(value).lower() in ("true", "1", "yes", "y", "on", "t")


def _shown(value: Any) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)
