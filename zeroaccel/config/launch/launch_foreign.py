"""What accelerate's launch files hold beside what a launch here needs: brought into our keys, dropped, or refused.

The first step of `launch_file`, on the tree as it was parsed. What accelerate ignores for the kind of training that the
file asks for is dropped with a note; what would train otherwise is left to be refused by name. Pure.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from zeroaccel.config.launch.launch_fsdp import translate_fsdp
from zeroaccel.config.launch.launch_schema import DeepSpeedSection, HostSettings, LaunchFile
from zeroaccel.config.problems import Problem, closest
from zeroaccel.config.provenance import Path
from zeroaccel.config.section import spellings

__all__ = ["ForeignKeys", "settle_foreign_keys"]

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
    "ipex_config": "that library is not used",
    "ipex_plugin_kwargs": "that library is not used",
}
_SAYS_NOTHING: tuple[object, ...] = (None, {}, [], "", False, "no", "main", "NO")
# Section -> the kinds of training it is for.
_FOR_KIND: Mapping[str, tuple[str, ...]] = {
    _FSDP: ("FSDP",),
    "megatron_lm_config": ("MEGATRON_LM",),
}
_JSON_KEYS = (
    "zero_optimization", "fp16", "bf16", "optimizer", "scheduler", "train_batch_size", "steps_per_print",
    "train_micro_batch_size_per_gpu", "wall_clock_breakdown", "activation_checkpointing",
    "zero_allow_untested_optimizer",
)  # fmt: skip


_AS_TEXT = (
    "zero_stage", "gradient_accumulation_steps", "gradient_clipping", "zero3_init_flag", "zero3_save_16bit_model",
)  # fmt: skip
# What accelerate looks at for several machines only.
_OTHER_MACHINES = (
    "deepspeed_hostfile", "deepspeed_inclusion_filter", "deepspeed_exclusion_filter", "deepspeed_multinode_launcher",
)  # fmt: skip
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
    moved: dict[Path, Path] = field(default_factory=dict)
    notes: list[tuple[Path, str]] = field(default_factory=list)
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
    made = ForeignKeys({key: value for key, value in tree.items() if value is not None and value != ""})
    _brought_to_this_machine(made)
    _of_older_files(made)
    kind = kind or _kind(made.tree)
    _drop_idle(made, kind)
    if kind == "FSDP":
        _translate(made, fsdp_flags or {})
    elif fsdp_flags:
        names = ", ".join(f"--{key}" for key in fsdp_flags)
        made.notes.append(((), f"{names}: nothing is done with it, as there is no --use_fsdp"))
    if kind in ("NO", "MULTI_GPU", "MULTI_CPU"):
        _drop_zero(made, kind)
    if kind == "NO" and made.tree.get("num_processes", 1) != 1:
        made.notes.append((("num_processes",), "does nothing, as distributed_type is NO, which is one process"))
        made.tree["num_processes"] = 1
    _settle_section(made)
    return made


def _kind(tree: Mapping[Any, Any]) -> str | None:
    said = tree.get("distributed_type")
    return None if said is None else "NO" if said is False else str(said).upper()


def _brought_to_this_machine(made: ForeignKeys) -> None:
    kind = _kind(made.tree)
    if kind in _LIKE_GPU:
        made.tree["distributed_type"] = "MULTI_GPU"
        made.notes.append((("distributed_type",), f"{kind} -> MULTI_GPU, on the accelerators that this machine has"))


def _of_older_files(made: ForeignKeys) -> None:
    switch = made.tree.pop("fp16", None)
    if isinstance(switch, bool):
        precision = "fp16" if switch else "no"
        if made.tree.setdefault("mixed_precision", precision) == precision:
            made.moved[("mixed_precision",)] = ("fp16",)
        made.notes.append((("fp16",), f"{str(switch).lower()} -> mixed_precision {made.tree['mixed_precision']}"))
    elif switch is not None:
        made.tree["fp16"] = switch


def _drop_idle(made: ForeignKeys, kind: str | None) -> None:
    tree = made.tree
    for key, reason in _IDLE.items():
        is_filled = tree.get(key) not in _SAYS_NOTHING
        if key in tree and (is_filled or key not in LaunchFile.model_fields):
            del tree[key]
        if is_filled:
            made.notes.append(((key,), f"does nothing, {reason}"))
    for key, kinds in _FOR_KIND.items():
        if tree.get(key) and kind not in kinds:
            del tree[key]
            said = "no distributed_type is given" if kind is None else f"distributed_type is {kind}"
            made.notes.append(((key,), f"does nothing, as {said}"))
    if tree.get("fp8_config") and str(tree.get("mixed_precision", "no")).lower() != "fp8":
        del tree["fp8_config"]
        made.notes.append((("fp8_config",), "does nothing, as mixed_precision is not fp8"))
    if tree.get("mpirun_config") and (kind != "MULTI_CPU" or tree.get("num_machines", 1) == 1):
        del tree["mpirun_config"]
        made.notes.append((("mpirun_config",), "does nothing, the processes of this machine are started from here"))
    _drop_trivial_parallelism(made)


def _drop_trivial_parallelism(made: ForeignKeys) -> None:
    """Sizes of 1 divide nothing, and the data-parallel ones say how ranks are grouped that hold shards."""
    section = made.tree.get("parallelism_config")
    if not isinstance(section, dict):
        return
    sizes = {
        str(key): value
        for key, value in section.items()
        if str(key).endswith("_size") and "_dp_" not in str(key) and not str(key).startswith("dp_")
    }
    if all(value in (None, 0, 1) for value in sizes.values()):
        del made.tree["parallelism_config"]
        if section:
            text = "does nothing, there is data parallelism only, over all ranks"
            made.notes.append((("parallelism_config",), text))


def _translate(made: ForeignKeys, typed: Mapping[str, Any]) -> None:
    tree = made.tree
    section = tree.pop(_FSDP, None)
    fsdp = section if isinstance(section, dict) else {}
    machines = tree.get("num_machines", 1)
    translated = translate_fsdp({**fsdp, **typed}, machines if isinstance(machines, int) else 1)
    made.notes.append((("distributed_type",), "FSDP -> DEEPSPEED, whose stages shard the same way"))
    made.notes += [((_FSDP, key), text) for key, text in translated.notes]
    made.problems += [
        Problem((_FSDP, *one.path), one.text, one.expected, one.got, one.fix, as_written=True)
        for one in translated.problems
    ]
    if tree.pop(_SECTION, None):
        made.notes.append(((_SECTION,), "does nothing, as distributed_type is FSDP"))
    tree["distributed_type"], tree[_SECTION] = "DEEPSPEED", translated.values
    made.moved[(_SECTION,)] = (_FSDP,) if fsdp else ("distributed_type",)
    for name, key in translated.said_by.items():
        short = key.removeprefix("fsdp_")
        written = key if key in fsdp else short if short in fsdp else None
        made.moved[(_SECTION, name)] = ("distributed_type",) if written is None else (_FSDP, written)


def _drop_zero(made: ForeignKeys, kind: str) -> None:
    """A DeepSpeed section beside a kind of training without ZeRO; what it says of the machines counts here."""
    section = made.tree.get(_SECTION)
    if not isinstance(section, dict) or not section:
        return
    names = {mark.name for one in HostSettings.model_fields.values() for mark in spellings(one)}
    kept = {key: value for key, value in section.items() if key in {*HostSettings.model_fields, *names}}
    if len(kept) < len(section):
        made.tree[_SECTION] = kept
        made.notes.append(((_SECTION,), f"does nothing, as distributed_type is {kind}"))


def _settle_section(made: ForeignKeys) -> None:
    """accelerate hands the values of its DeepSpeed section on as text, and never looks at keys it does not know."""
    section = made.tree.get(_SECTION)
    if not isinstance(section, dict):
        return
    names = {mark.name for one in DeepSpeedSection.model_fields.values() for mark in spellings(one)}
    known = {*DeepSpeedSection.model_fields, *names}
    settled: dict[Any, Any] = {}
    for key, value in section.items():
        if key in known:
            if not (key.endswith(_NAMED) and str(value).lower() == "none"):
                settled[key] = _plain(value) if key in _AS_TEXT else value
        elif key in _JSON_KEYS:
            text = "does nothing, here as in accelerate: it is for the JSON file that deepspeed_config_file names"
            made.notes.append(((_SECTION, key), text))
        elif closest(str(key), known):
            settled[key] = value  # which is told as an unknown key, with the one that was meant
        else:
            made.notes.append(((_SECTION, key), "does nothing, accelerate has no such setting and ignores it"))
    if made.tree.get("num_machines") == 1:
        for key in [key for key in settled if key in _OTHER_MACHINES]:
            if settled[key] not in ("standard", "pdsh", "nossh"):
                del settled[key]
                made.notes.append(((_SECTION, key), "does nothing, as num_machines is 1"))
    made.tree[_SECTION] = settled


def _plain(value: Any) -> Any:
    """A quoted number or switch as what it says; accelerate passes both forms on as the same text."""
    if not isinstance(value, str):
        return value
    if value.lower() in ("true", "false"):
        return value.lower() == "true"
    for form in (int, float):
        try:
            return form(value)
        except ValueError:
            continue
    return value
