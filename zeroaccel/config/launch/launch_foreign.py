"""Handles keys of accelerate's launch files for other engines: translates, drops (with a note) or refuses them.

The first step of `launch_file`, on the parsed tree, and of `config convert`. It drops keys that accelerate ignores for
the file's distributed_type, and leaves keys that would change the training as errors. FSDP's settings become the ZeRO
stage and offload with the same sharding: FSDP1's strategies and FSDP2's `reshard_after_forward` determine which states
stay sharded between forward and backward, as a stage does (ZeRO, arXiv:1910.02054, section 5). Pure functions.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import zeroaccel.config.launch.foreign_names as names
from zeroaccel.config.diagnostics import KeyPath, Problem, closest
from zeroaccel.config.launch.launch_settings import LaunchFile
from zeroaccel.config.launch.setting_table import DYNAMO_SECTION, MACHINES, MESH_SECTION, SETTINGS, ZERO_SECTION
from zeroaccel.config.section import as_text, out_of_quotes
from zeroaccel.errors import ConfigError


@dataclass
class FsdpTranslation:
    """Translation of FSDP's settings.

    Attributes:
        values: ZeRO setting -> value.
        said_by: ZeRO setting -> FSDP key that it was translated from; "" for a default.
        notes: each given key with its translation, or with the reason why it has none.
        problems: unknown keys and invalid values; the path is the key as written.
    """

    values: dict[str, Any] = field(default_factory=dict)
    said_by: dict[str, str] = field(default_factory=dict)
    notes: list[tuple[str, str]] = field(default_factory=list)
    problems: list[Problem] = field(default_factory=list)

    def say(self, name: str, value: Any, key: str) -> None:
        """Sets the translation of an FSDP key."""
        self.values[name], self.said_by[name] = value, key


def translate_fsdp(fsdp: Mapping[str, Any], num_machines: int = 1) -> FsdpTranslation:
    """Returns the ZeRO stage and offload with the same sharding as these FSDP settings.

    Args:
        fsdp: accelerate's keys, with or without the prefix "fsdp_"; values as in its files or as text.
        num_machines: number of machines in the job, for strategies that shard within one machine.
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
        elif key in names.FSDP_LEFT_OUT:
            translation.notes.append((key, f"left out, {names.FSDP_LEFT_OUT[key]}"))
        elif key not in (names.FSDP_STRATEGY, names.FSDP_RESHARD):
            _unknown(key, written[key], translation)
    return translation


def fsdp_of_words(words: str) -> dict[str, Any]:
    """Returns the FSDP settings for the value of an older `--fsdp`: "full_shard auto_wrap", "full shard", "offload".

    Raises:
        ConfigError: a word is unknown.
    """
    fsdp: dict[str, Any] = {}
    for word in _joined(words).replace(",", " ").split():
        if word.upper() in names.FSDP_STAGES and names.FSDP_STRATEGY not in fsdp:
            fsdp[names.FSDP_STRATEGY] = word.upper()
        elif word == "offload":
            fsdp["fsdp_offload_params"] = True
        elif word != "auto_wrap":
            strategies = ", ".join(name.lower() for name in names.FSDP_STAGES)
            raise ConfigError("--fsdp", expected=f"one of {strategies}, auto_wrap and offload", got=words)
    return fsdp


def _joined(words: str) -> str:
    return re.sub(r"[ -]+(?=(shard|grad|op|wrap|zero2)\b)", "_", words.strip().lower())


def _stage(
    settings: Mapping[str, Any], written: Mapping[str, str], num_machines: int, translation: FsdpTranslation
) -> int:
    # FSDP2 has no strategy: accelerate reads only the other key.
    is_second = str(settings.get("fsdp_version", "")) == "2" and names.FSDP_RESHARD in settings
    key = names.FSDP_RESHARD if is_second or names.FSDP_STRATEGY not in settings else names.FSDP_STRATEGY
    strategy = _joined(str(settings.get(key, "FULL_SHARD"))).upper().removeprefix("SHARDINGSTRATEGY.").removeprefix("_")
    # FSDP2 without reshard_after_forward keeps parameters unsharded between forward and backward, as stage 2 does.
    word = {"TRUE": "FULL_SHARD", "FALSE": "SHARD_GRAD_OP"}.get(strategy, names.FSDP_NUMBERS.get(strategy, strategy))
    if word not in names.FSDP_STAGES:
        expected = " or ".join(names.FSDP_STAGES) if key == names.FSDP_STRATEGY else "true or false"
        translation.problems.append(Problem((written[key],), expected=expected, got=settings[key]))
        return 3
    stage = names.FSDP_STAGES[word]
    translation.say("zero_stage", stage, key if key in settings else "")
    text = f"{as_text(settings[key])} -> " if key in settings else "not given, so all states are sharded -> "
    translation.notes.append((key if key in settings else names.FSDP_STRATEGY, f"{text}zero_stage {stage}"))
    other = names.FSDP_STRATEGY if key == names.FSDP_RESHARD else names.FSDP_RESHARD
    if other in settings:
        translation.notes.append((other, f"left out, because {key} takes precedence"))
    if word.startswith("HYBRID") and num_machines > 1:
        text = (
            "shards over the ranks of all machines instead of within each, with the same training; "
            "mics_shard_size in a JSON config shards within groups"
        )
        translation.notes.append((key, text))
    return stage


def _offload(enabled: bool, stage: int, translation: FsdpTranslation) -> None:
    key = "fsdp_offload_params"
    if not enabled:
        translation.notes.append((key, "false -> nothing is offloaded"))
    elif stage < 1:
        translation.notes.append((key, "left out, because stage 0 neither shards nor offloads"))
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
        translation.notes.append((key, f"left out, because every rank has whole parameters at stage {stage}"))


def _unknown(key: str, written: str, translation: FsdpTranslation) -> None:
    meant = closest(key, names.FSDP_KEYS)
    if meant:
        translation.problems.append(Problem((written,), text="unknown key", fix=f"did you mean {meant}?"))
    else:
        translation.notes.append((key, "left out, because accelerate has no such setting and ignores it"))


def _is_true(value: Any) -> bool:
    return str(value).lower() in ("true", "1", "yes", "y", "on", "t")


_FSDP = "fsdp_config"
_TP = "tp_config"
_NAMES = {name: row for row in SETTINGS.values() if row.section == ZERO_SECTION for name in (row.name, *row.spelled)}
"""Key of the section of ZeRO, in any spelling -> its setting."""


@dataclass
class ForeignKeys:
    """A launch file's tree in zeroaccel's keys, with notes and problems from the translation.

    Attributes:
        tree: a translated copy of the tree.
        moved: path in `tree` -> path in the file, for translated keys.
        notes: path in the file, with the translation of its key or the reason why it has no effect.
        problems: keys without a translation; paths as in the file.
    """

    tree: dict[Any, Any]
    moved: dict[KeyPath, KeyPath] = field(default_factory=dict)
    notes: list[tuple[KeyPath, str]] = field(default_factory=list)
    problems: list[Problem] = field(default_factory=list)


def settle_foreign_keys(
    tree: Mapping[Any, Any], kind: str | None = None, fsdp_flags: Mapping[str, Any] | None = None
) -> ForeignKeys:
    """Translates or drops the keys for other engines.

    Args:
        tree: the parsed file, which stays unchanged.
        kind: distributed_type from a flag or a variable, which takes precedence over the file's.
        fsdp_flags: FSDP settings from the command line, which take precedence over the file's.
    """
    foreign = ForeignKeys({key: value for key, value in tree.items() if value is not None and value != ""})
    _brought_to_this_machine(foreign)
    _of_older_files(foreign)
    kind = kind or _kind(foreign.tree)
    if kind == "TP":
        kind = _translate_tp(foreign)
    _drop_idle(foreign, kind)
    if kind == "FSDP":
        _translate(foreign, fsdp_flags or {})
    elif fsdp_flags:
        flags = ", ".join(f"--{key}" for key in fsdp_flags)
        foreign.notes.append(((), f"{flags}: no effect without --use_fsdp"))
    if kind in ("NO", "MULTI_GPU", "MULTI_CPU"):
        _drop_zero(foreign, kind)
    if kind == "NO" and _count(foreign.tree, "num_processes") != 1:
        foreign.notes.append((("num_processes",), "does nothing, because distributed_type is NO: one process"))
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
    if kind in names.LIKE_GPU:
        foreign.tree["distributed_type"] = "MULTI_GPU"
        foreign.notes.append((("distributed_type",), f"{kind} -> MULTI_GPU, on the accelerators of this machine"))


def _of_older_files(foreign: ForeignKeys) -> None:
    switch = out_of_quotes(bool, foreign.tree.pop("fp16", None))
    if isinstance(switch, bool):
        precision = "fp16" if switch else "no"
        if foreign.tree.setdefault("mixed_precision", precision) == precision:
            foreign.moved[("mixed_precision",)] = ("fp16",)
        foreign.notes.append((("fp16",), f"{str(switch).lower()} -> mixed_precision {foreign.tree['mixed_precision']}"))
    elif switch is not None:
        foreign.tree["fp16"] = switch
    if "dynamo_backend" in foreign.tree:
        section = foreign.tree.get(DYNAMO_SECTION, {})
        backend = foreign.tree.pop("dynamo_backend")
        if not isinstance(section, dict):
            foreign.problems.append(Problem((DYNAMO_SECTION,), expected="an object", got=section))
        elif section.get("dynamo_backend", backend) != backend:
            text = f"the same setting as {DYNAMO_SECTION}.dynamo_backend"
            foreign.problems.append(Problem(("dynamo_backend",), text=text, fix="keep one of the two"))
        else:
            foreign.tree[DYNAMO_SECTION] = {**section, "dynamo_backend": backend}
            foreign.moved[(DYNAMO_SECTION, "dynamo_backend")] = ("dynamo_backend",)


def _translate_tp(foreign: ForeignKeys) -> str:
    """Translates the section of earlier accelerate for tensor parallelism; returns the new distributed_type."""
    section = foreign.tree.pop(_TP, {})
    if not isinstance(section, dict):
        foreign.problems.append(Problem((_TP,), expected="a size such as `tp_size: 2`", got=section))
        section = {}
    axes = foreign.tree.get(MESH_SECTION)
    for key, value in section.items():
        if key != "tp_size":
            foreign.problems.append(Problem((_TP, str(key)), text="unknown key", fix="its only key is tp_size"))
        elif axes is None or isinstance(axes, dict):
            foreign.tree[MESH_SECTION] = {**(axes or {}), key: value}
            foreign.moved[(MESH_SECTION, key)] = (_TP, key)
            foreign.notes.append(((_TP, key), f"{as_text(value)} -> {MESH_SECTION}.tp_size"))
    foreign.tree["distributed_type"] = "MULTI_GPU"
    foreign.notes.append((("distributed_type",), "TP -> MULTI_GPU; tp_size sets the ranks that share each layer"))
    return "MULTI_GPU"


def _drop_idle(foreign: ForeignKeys, kind: str | None) -> None:
    tree = foreign.tree
    for key, reason in names.IDLE_KEYS.items():
        is_filled = tree.get(key) not in names.SAYS_NOTHING
        if key in tree and (is_filled or key not in LaunchFile.model_fields):
            del tree[key]
        if is_filled:
            foreign.notes.append(((key,), f"does nothing, {reason}"))
    for key, kinds in names.KINDS_OF_SECTIONS.items():
        if tree.get(key) and kind not in kinds:
            del tree[key]
            about_kind = "no distributed_type is given" if kind is None else f"distributed_type is {kind}"
            foreign.notes.append(((key,), f"does nothing, because {about_kind}"))
    if tree.get("fp8_config") and str(tree.get("mixed_precision", "no")).lower() != "fp8":
        del tree["fp8_config"]
        foreign.notes.append((("fp8_config",), "does nothing, because mixed_precision is not fp8"))
    if tree.get("mpirun_config") and (kind != "MULTI_CPU" or _count(tree, "num_machines") == 1):
        del tree["mpirun_config"]
        foreign.notes.append(
            (("mpirun_config",), "does nothing, because the launcher itself starts the processes of this machine")
        )
    _settle_axes(foreign)


_NO_SIZES = ("None", "0", "1")


def refused_axis(name: str, value: object) -> str:
    """Returns why a value of `names.OTHER_AXES` is refused, or the empty string for a value without effect."""
    divides_nothing = str(value).lower() in ("none", "0", "1", "deepspeed" if name == "sp_backend" else "")
    return "" if divides_nothing else names.OTHER_AXES[name]


def _settle_context(foreign: ForeignKeys, key: str, size: object, other: object) -> object:
    """Returns the size of `sp` that cp_size gives; both are names of ranks that share a sequence."""
    place = (MESH_SECTION, key)
    if str(other) not in _NO_SIZES:
        text = f"cp_size and sp_size {other} both split sequences"
        foreign.problems.append(Problem(place, text=text, got=size, fix="remove one of them"))
        return other
    foreign.moved[(MESH_SECTION, "sp_size")] = place
    foreign.notes.append((place, names.CONTEXT_IS_SP))
    return size


def _settle_axes(foreign: ForeignKeys) -> None:
    """Drops sizes of 1 and other values without effect, and refuses axes that are not available."""
    section = foreign.tree.get(MESH_SECTION)
    if section is None:
        return
    if not isinstance(section, dict):
        foreign.problems.append(Problem((MESH_SECTION,), expected="sizes such as `sp_size: 2`", got=section))
        del foreign.tree[MESH_SECTION]
        return
    keys = {str(key).removeprefix(f"{MESH_SECTION}_"): key for key in section}
    ours = {key: section[key] for name, key in keys.items() if name not in names.OTHER_AXES}
    for name in names.OTHER_AXES.keys() & keys.keys():
        key, value = keys[name], section[keys[name]]
        if name == names.CONTEXT and str(value) not in _NO_SIZES:
            sequence = keys.get("sp_size", "sp_size")
            ours[sequence] = _settle_context(foreign, str(key), value, section.get(sequence))
        elif reason := refused_axis(name, value):
            foreign.problems.append(Problem((MESH_SECTION, str(key)), text=reason, got=value, fix="remove it"))
    foreign.tree[MESH_SECTION] = ours


def _translate(foreign: ForeignKeys, typed: Mapping[str, Any]) -> None:
    tree = foreign.tree
    section = tree.pop(_FSDP, None)
    fsdp = section if isinstance(section, dict) else {}
    machines = _count(tree, "num_machines")
    translated = translate_fsdp({**fsdp, **typed}, machines if isinstance(machines, int) else 1)
    foreign.notes.append((("distributed_type",), "FSDP -> DEEPSPEED, with the equivalent ZeRO stage"))
    foreign.notes += [((_FSDP, key), text) for key, text in translated.notes]
    foreign.problems += [
        Problem((_FSDP, *problem.path), problem.text, problem.expected, problem.got, problem.fix, as_written=True)
        for problem in translated.problems
    ]
    if tree.pop(ZERO_SECTION, None):
        foreign.notes.append(((ZERO_SECTION,), "does nothing, because distributed_type is FSDP"))
    tree["distributed_type"], tree[ZERO_SECTION] = "DEEPSPEED", translated.values
    foreign.moved[(ZERO_SECTION,)] = (_FSDP,) if fsdp else ("distributed_type",)
    for name, key in translated.said_by.items():
        short = key.removeprefix("fsdp_")
        written = key if key in fsdp else short if short in fsdp else None
        foreign.moved[(ZERO_SECTION, name)] = ("distributed_type",) if written is None else (_FSDP, written)


def _drop_zero(foreign: ForeignKeys, kind: str) -> None:
    """Drops a DeepSpeed section, except its machine settings, if distributed_type does not use ZeRO."""
    section = foreign.tree.get(ZERO_SECTION)
    if not isinstance(section, dict) or not section:
        return
    of_hosts = {key: value for key, value in section.items() if key in _NAMES and _NAMES[key].group == MACHINES}
    if len(of_hosts) < len(section):
        foreign.tree[ZERO_SECTION] = of_hosts
        foreign.notes.append(((ZERO_SECTION,), f"does nothing, because distributed_type is {kind}"))


def _settle_section(foreign: ForeignKeys) -> None:
    """Handles the DeepSpeed section like accelerate, which passes its values on as text and ignores unknown keys."""
    section = foreign.tree.get(ZERO_SECTION)
    if not isinstance(section, dict):
        return
    settled: dict[Any, Any] = {}
    for key, value in section.items():
        if key in _NAMES:
            if not (_NAMES[key].kind in ("file", "folder", "number") and str(value).lower() == "none"):
                settled[key] = value
        elif key in names.JSON_KEYS:
            text = "does nothing, as in accelerate: it belongs in the JSON file of deepspeed_config_file"
            foreign.notes.append(((ZERO_SECTION, key), text))
        elif closest(str(key), _NAMES):
            settled[key] = value  # `normalize` reports it as unknown, with the key that was meant
        else:
            foreign.notes.append(((ZERO_SECTION, key), "does nothing, because accelerate ignores unknown keys"))
    for key in ("deepspeed_multinode_launcher", "multinode_launcher"):
        if _count(foreign.tree, "num_machines", None) != 1 and str(settled.get(key, "")).lower() in names.MPI_LAUNCHERS:
            text = f"{settled[key]} -> ssh, which starts the same job on the machines of the hostfile"
            foreign.notes.append(((ZERO_SECTION, key), text))
            settled[key] = "ssh"
    if _count(foreign.tree, "num_machines", None) == 1:
        for key in [
            key for key in settled if key in _NAMES and key == _NAMES[key].key[1] and _NAMES[key].group == MACHINES
        ]:
            if settled[key] not in ("standard", "pdsh", "nossh"):
                del settled[key]
                foreign.notes.append(((ZERO_SECTION, key), "does nothing, because num_machines is 1"))
    foreign.tree[ZERO_SECTION] = settled
