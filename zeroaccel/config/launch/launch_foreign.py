"""Keys of accelerate's launch files that are not this engine's: translated, dropped with a note, or refused by name.

The first step of `launch_file`, on the tree as it was parsed, and of `config convert`. What accelerate ignores for the
distributed_type of the file is dropped; what would train differently is left to be refused. FSDP's settings become the
ZeRO stage and offload that shard the same way: FSDP1's strategies and FSDP2's `reshard_after_forward` say what stays
sharded between forward and backward, which is what a stage says (ZeRO, arXiv:1910.02054, section 5). Pure.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from zeroaccel.config.diagnostics import KeyPath, Problem, closest
from zeroaccel.config.launch.launch_settings import DeepSpeedSection, HostSettings, LaunchFile
from zeroaccel.config.section import as_text, out_of_quotes, spellings
from zeroaccel.errors import ConfigError

_STAGES = {"FULL_SHARD": 3, "SHARD_GRAD_OP": 2, "NO_SHARD": 0, "HYBRID_SHARD": 3, "HYBRID_SHARD_ZERO2": 2}
_NUMBERED = {"1": "FULL_SHARD", "2": "SHARD_GRAD_OP", "3": "NO_SHARD", "4": "HYBRID_SHARD", "5": "HYBRID_SHARD_ZERO2"}
_STRATEGY, _RESHARD = "fsdp_sharding_strategy", "fsdp_reshard_after_forward"
_BLOCKS = "zeroaccel finds the repeated blocks of a model"
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
    "fsdp_sync_module_states": "the weights of rank 0 always apply",
    "fsdp_activation_checkpointing": "recomputation is the model's own (model.gradient_checkpointing_enable()), or "
    "activation_checkpointing.wrap_blocks of the JSON config",
    "fsdp_activation_checkpointing_offload": "activations are offloaded by activation_checkpointing of the JSON config",
    "fsdp_version": "there is one engine",
    "fsdp_ignored_modules": "every module is sharded",
}
_TRANSLATED = (_STRATEGY, _RESHARD, "fsdp_offload_params", "fsdp_cpu_ram_efficient_loading", "fsdp_state_dict_type")

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
    translation = FsdpTranslation()
    written = {key if str(key).startswith("fsdp_") else f"fsdp_{key}": key for key in fsdp}
    settings = {name: fsdp[key] for name, key in written.items() if fsdp[key] is not None}
    stage = _stage(settings, written, num_machines, translation)
    for key, value in settings.items():
        if key == "fsdp_offload_params":
            _offload(_is_true(value), stage, translation)
        elif key == "fsdp_cpu_ram_efficient_loading":
            _at_stage_3(key, value, "zero3_init_flag", _is_true(value), stage, translation)
        elif key == "fsdp_state_dict_type":
            is_full = str(value).upper() in ("FULL_STATE_DICT", "1")
            _at_stage_3(key, value, "zero3_save_16bit_model", is_full, stage, translation)
        elif key in _LEFT_OUT:
            translation.notes.append((key, f"left out, {_LEFT_OUT[key]}"))
        elif key not in (_STRATEGY, _RESHARD):
            _unknown(key, written[key], translation)
    return translation


def fsdp_of_words(words: str) -> dict[str, Any]:
    """The settings of FSDP in the value of an older `--fsdp`: "full_shard auto_wrap", "full shard", "offload".

    Raises:
        ConfigError: a word is unknown.
    """
    fsdp: dict[str, Any] = {}
    for word in _joined(words).replace(",", " ").split():
        if word.upper() in _STAGES and _STRATEGY not in fsdp:
            fsdp[_STRATEGY] = word.upper()
        elif word == "offload":
            fsdp["fsdp_offload_params"] = True
        elif word != "auto_wrap":
            strategies = ", ".join(name.lower() for name in _STAGES)
            raise ConfigError("--fsdp", expected=f"one of {strategies}, auto_wrap and offload", got=words)
    return fsdp


def _joined(words: str) -> str:
    return re.sub(r"[ -]+(?=(shard|grad|op|wrap|zero2)\b)", "_", words.strip().lower())


def _stage(
    settings: Mapping[str, Any], written: Mapping[str, str], num_machines: int, translation: FsdpTranslation
) -> int:
    # FSDP2 has no strategy: accelerate looks at the other key only.
    is_second = str(settings.get("fsdp_version", "")) == "2" and _RESHARD in settings
    key = _RESHARD if is_second or _STRATEGY not in settings else _STRATEGY
    strategy = _joined(str(settings.get(key, "FULL_SHARD"))).upper().removeprefix("SHARDINGSTRATEGY.").removeprefix("_")
    # FSDP2 without reshard_after_forward keeps parameters unsharded between forward and backward, as stage 2 does.
    word = {"TRUE": "FULL_SHARD", "FALSE": "SHARD_GRAD_OP"}.get(strategy, _NUMBERED.get(strategy, strategy))
    if word not in _STAGES:
        expected = " or ".join(_STAGES) if key == _STRATEGY else "true or false"
        translation.problems.append(Problem((written[key],), expected=expected, got=settings[key]))
        return 3
    stage = _STAGES[word]
    translation.say("zero_stage", stage, key if key in settings else "")
    text = f"{as_text(settings[key])} -> " if key in settings else "not given, which shards everything -> "
    translation.notes.append((key if key in settings else _STRATEGY, f"{text}zero_stage {stage}"))
    other = _STRATEGY if key == _RESHARD else _RESHARD
    if other in settings:
        translation.notes.append((other, f"left out, {key} decides"))
    if word.startswith("HYBRID") and num_machines > 1:
        text = (
            "sharded over the ranks of all machines instead of within each, which trains the same; "
            "mics_shard_size of a JSON config shards within groups"
        )
        translation.notes.append((key, text))
    return stage


def _offload(enabled: bool, stage: int, translation: FsdpTranslation) -> None:
    key = "fsdp_offload_params"
    if not enabled:
        translation.notes.append((key, "false -> nothing is offloaded"))
    elif stage < 1:
        translation.notes.append((key, "left out, nothing is sharded at stage 0, and nothing offloaded"))
    else:
        translation.say("offload_optimizer_device", "cpu", key)
        if stage == 3:
            translation.say("offload_param_device", "cpu", key)
        devices = "offload_optimizer_device and offload_param_device" if stage == 3 else "offload_optimizer_device"
        translation.notes.append((key, f"true -> {devices} cpu"))


def _at_stage_3(key: str, value: Any, name: str, meaning: bool, stage: int, translation: FsdpTranslation) -> None:
    if stage == 3:
        translation.say(name, meaning, key)
        translation.notes.append((key, f"{as_text(value)} -> {name} {as_text(meaning)}"))
    else:
        translation.notes.append((key, f"left out, every rank has whole parameters at stage {stage}"))


def _unknown(key: str, written: str, translation: FsdpTranslation) -> None:
    meant = closest(key, FSDP_KEYS)
    if meant:
        translation.problems.append(Problem((written,), text="unknown key", fix=f"did you mean {meant}?"))
    else:
        translation.notes.append((key, "left out, accelerate has no such setting and ignores it"))


def _is_true(value: Any) -> bool:
    return str(value).lower() in ("true", "1", "yes", "y", "on", "t")


_AXES = "parallelism_config"
OTHER_AXES: Mapping[str, str] = {
    "cp_size": "context parallelism is not available; sp_size cuts sequences",
    "cp_backend": "",
    "cp_comm_strategy": "",
    "sp_backend": "sequences are cut as DeepSpeed does (Ulysses)",
}
"""Settings of accelerate's mesh that are none here -> why, where a value that divides something is refused."""
_SECTION = "deepspeed_config"
_FSDP = "fsdp_config"
_LIKE_GPU = ("MULTI_XPU", "MULTI_NPU", "MULTI_MLU", "MULTI_SDAA", "MULTI_MUSA", "MULTI_HPU", "MULTI_NEURON")
_TPU = "a setting of TPUs"
# Key -> why accelerate does nothing with it on a machine without TPUs, and so does a launch here.
_IDLE: Mapping[str, str] = {
    "tpu_name": _TPU,
    "tpu_zone": _TPU,
    "tpu_env": _TPU,
    "tpu_vm": _TPU,
    "tpu_use_cluster": _TPU,
    "tpu_use_sudo": _TPU,
    "commands": _TPU,
    "command_file": _TPU,
    "downcast_bf16": _TPU,
    "main_training_function": f"{_TPU}; scripts are run as they are",
    "ipex_config": "zeroaccel does not use that library",
    "ipex_plugin_kwargs": "zeroaccel does not use that library",
}
_SAYS_NOTHING: tuple[object, ...] = (None, {}, [], "", False, "no", "main", "NO")
# Section -> the kinds of training it is for.
_FOR_KIND: Mapping[str, tuple[str, ...]] = {_FSDP: ("FSDP",), "megatron_lm_config": ("MEGATRON_LM",)}
_JSON_KEYS = (
    "zero_optimization", "fp16", "bf16", "optimizer", "scheduler", "train_batch_size", "steps_per_print",
    "train_micro_batch_size_per_gpu", "wall_clock_breakdown", "activation_checkpointing",
    "zero_allow_untested_optimizer",
)  # fmt: skip


# What accelerate looks at for several machines only.
_OTHER_MACHINES = (
    "deepspeed_hostfile", "deepspeed_inclusion_filter", "deepspeed_exclusion_filter", "deepspeed_multinode_launcher",
)  # fmt: skip
MPI_LAUNCHERS = ("openmpi", "mpich", "impi", "mvapich")
"""Ways of DeepSpeed to start processes on the machines of a hostfile, which ssh does here."""
_NAMED = ("_path", "_file", "_clipping", "hostfile")


@dataclass
class ForeignKeys:
    """A launch file's tree in our keys, and what was found on the way.

    Attributes:
        tree: the tree; the one that was given is not changed.
        moved: path in `tree` -> path in the file, of keys that were translated.
        notes: path in the file, and what the key there stands for here, or why for nothing.
        problems: what cannot be translated; paths as in the file.
    """

    tree: dict[Any, Any]
    moved: dict[KeyPath, KeyPath] = field(default_factory=dict)
    notes: list[tuple[KeyPath, str]] = field(default_factory=list)
    problems: list[Problem] = field(default_factory=list)


def settle_foreign_keys(
    tree: Mapping[Any, Any], kind: str | None = None, fsdp_flags: Mapping[str, Any] | None = None
) -> ForeignKeys:
    """Translates or drops the keys that are not for this engine.

    Args:
        tree: the file, parsed; not changed.
        kind: the distributed_type that a flag or a variable gives, which counts more than the file's.
        fsdp_flags: FSDP's settings that were typed, which count more than the file's.
    """
    foreign = ForeignKeys({key: value for key, value in tree.items() if value is not None and value != ""})
    _brought_to_this_machine(foreign)
    _of_older_files(foreign)
    kind = kind or _kind(foreign.tree)
    _drop_idle(foreign, kind)
    if kind == "FSDP":
        _translate(foreign, fsdp_flags or {})
    elif fsdp_flags:
        names = ", ".join(f"--{key}" for key in fsdp_flags)
        foreign.notes.append(((), f"{names}: no effect without --use_fsdp"))
    if kind in ("NO", "MULTI_GPU", "MULTI_CPU"):
        _drop_zero(foreign, kind)
    if kind == "NO" and _count(foreign.tree, "num_processes") != 1:
        foreign.notes.append((("num_processes",), "does nothing, as distributed_type is NO, which is one process"))
        foreign.tree["num_processes"] = 1
    _settle_section(foreign)
    return foreign


def _kind(tree: Mapping[Any, Any]) -> str | None:
    kind = tree.get("distributed_type")
    return None if kind is None else "NO" if kind is False else str(kind).upper()


def _count(tree: Mapping[Any, Any], name: str, default: int | None = 1) -> object:
    return out_of_quotes(int, tree.get(name, default))


def _brought_to_this_machine(foreign: ForeignKeys) -> None:
    kind = _kind(foreign.tree)
    if kind in _LIKE_GPU:
        foreign.tree["distributed_type"] = "MULTI_GPU"
        foreign.notes.append((("distributed_type",), f"{kind} -> MULTI_GPU, on the accelerators that this machine has"))


def _of_older_files(foreign: ForeignKeys) -> None:
    switch = out_of_quotes(bool, foreign.tree.pop("fp16", None))
    if isinstance(switch, bool):
        precision = "fp16" if switch else "no"
        if foreign.tree.setdefault("mixed_precision", precision) == precision:
            foreign.moved[("mixed_precision",)] = ("fp16",)
        foreign.notes.append((("fp16",), f"{str(switch).lower()} -> mixed_precision {foreign.tree['mixed_precision']}"))
    elif switch is not None:
        foreign.tree["fp16"] = switch


def _drop_idle(foreign: ForeignKeys, kind: str | None) -> None:
    tree = foreign.tree
    for key, reason in _IDLE.items():
        is_filled = tree.get(key) not in _SAYS_NOTHING
        if key in tree and (is_filled or key not in LaunchFile.model_fields):
            del tree[key]
        if is_filled:
            foreign.notes.append(((key,), f"does nothing, {reason}"))
    for key, kinds in _FOR_KIND.items():
        if tree.get(key) and kind not in kinds:
            del tree[key]
            about_kind = "no distributed_type is given" if kind is None else f"distributed_type is {kind}"
            foreign.notes.append(((key,), f"does nothing, as {about_kind}"))
    if tree.get("fp8_config") and str(tree.get("mixed_precision", "no")).lower() != "fp8":
        del tree["fp8_config"]
        foreign.notes.append((("fp8_config",), "does nothing, as mixed_precision is not fp8"))
    if tree.get("mpirun_config") and (kind != "MULTI_CPU" or _count(tree, "num_machines") == 1):
        del tree["mpirun_config"]
        foreign.notes.append(
            (("mpirun_config",), "does nothing; the launcher starts the processes of this machine itself")
        )
    _settle_axes(foreign)


def refused_axis(name: str, value: object) -> str:
    """Why a value of `OTHER_AXES` is refused; empty for one that divides nothing."""
    divides_nothing = str(value).lower() in ("none", "0", "1", "deepspeed" if name == "sp_backend" else "")
    return "" if divides_nothing else OTHER_AXES[name]


def _settle_axes(foreign: ForeignKeys) -> None:
    """Sizes of 1 divide nothing; what belongs to an axis that is not divided does nothing."""
    section = foreign.tree.get(_AXES)
    if section is None:
        return
    if not isinstance(section, dict):
        foreign.problems.append(Problem((_AXES,), expected="sizes as in `sp_size: 2`", got=section))
        del foreign.tree[_AXES]
        return
    ours = {}
    for key, value in section.items():
        name = str(key).removeprefix(f"{_AXES}_")
        if name not in OTHER_AXES:
            ours[key] = value
        elif reason := refused_axis(name, value):
            foreign.problems.append(Problem((_AXES, str(key)), text=reason, got=value, fix="remove it"))
    foreign.tree[_AXES] = ours


def _translate(foreign: ForeignKeys, typed: Mapping[str, Any]) -> None:
    tree = foreign.tree
    section = tree.pop(_FSDP, None)
    fsdp = section if isinstance(section, dict) else {}
    machines = _count(tree, "num_machines")
    translated = translate_fsdp({**fsdp, **typed}, machines if isinstance(machines, int) else 1)
    foreign.notes.append((("distributed_type",), "FSDP -> DEEPSPEED, whose stages shard the same way"))
    foreign.notes += [((_FSDP, key), text) for key, text in translated.notes]
    foreign.problems += [
        Problem((_FSDP, *one.path), one.text, one.expected, one.got, one.fix, as_written=True)
        for one in translated.problems
    ]
    if tree.pop(_SECTION, None):
        foreign.notes.append(((_SECTION,), "does nothing, as distributed_type is FSDP"))
    tree["distributed_type"], tree[_SECTION] = "DEEPSPEED", translated.values
    foreign.moved[(_SECTION,)] = (_FSDP,) if fsdp else ("distributed_type",)
    for name, key in translated.said_by.items():
        short = key.removeprefix("fsdp_")
        written = key if key in fsdp else short if short in fsdp else None
        foreign.moved[(_SECTION, name)] = ("distributed_type",) if written is None else (_FSDP, written)


def _drop_zero(foreign: ForeignKeys, kind: str) -> None:
    """Drops a DeepSpeed section where distributed_type does without ZeRO, but for its settings of the machines."""
    section = foreign.tree.get(_SECTION)
    if not isinstance(section, dict) or not section:
        return
    names = {mark.name for one in HostSettings.model_fields.values() for mark in spellings(one)}
    of_hosts = {key: value for key, value in section.items() if key in {*HostSettings.model_fields, *names}}
    if len(of_hosts) < len(section):
        foreign.tree[_SECTION] = of_hosts
        foreign.notes.append(((_SECTION,), f"does nothing, as distributed_type is {kind}"))


def _settle_section(foreign: ForeignKeys) -> None:
    """accelerate passes the values of its DeepSpeed section on as text, and ignores keys it does not know."""
    section = foreign.tree.get(_SECTION)
    if not isinstance(section, dict):
        return
    others = {mark.name for one in DeepSpeedSection.model_fields.values() for mark in spellings(one)}
    names = {*DeepSpeedSection.model_fields, *others}
    settled: dict[Any, Any] = {}
    for key, value in section.items():
        if key in names:
            if not (key.endswith(_NAMED) and str(value).lower() == "none"):
                settled[key] = value
        elif key in _JSON_KEYS:
            text = "does nothing, here as in accelerate: it is for the JSON file that deepspeed_config_file names"
            foreign.notes.append(((_SECTION, key), text))
        elif closest(str(key), names):
            settled[key] = value  # `normalize` reports it as unknown, with the key that was meant
        else:
            foreign.notes.append(((_SECTION, key), "does nothing, accelerate has no such setting and ignores it"))
    for key in ("deepspeed_multinode_launcher", "multinode_launcher"):
        if _count(foreign.tree, "num_machines", None) != 1 and str(settled.get(key, "")).lower() in MPI_LAUNCHERS:
            text = f"{settled[key]} -> ssh, by which the machines of the hostfile are reached; it trains the same"
            foreign.notes.append(((_SECTION, key), text))
            settled[key] = "ssh"
    if _count(foreign.tree, "num_machines", None) == 1:
        for key in [key for key in settled if key in _OTHER_MACHINES]:
            if settled[key] not in ("standard", "pdsh", "nossh"):
                del settled[key]
                foreign.notes.append(((_SECTION, key), "does nothing, as num_machines is 1"))
    foreign.tree[_SECTION] = settled
