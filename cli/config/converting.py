"""`zeroaccel config convert`: files of others, in the form that is read here.

An accelerate YAML with a DeepSpeed section comes out with the keys a launch takes; FSDP's settings are translated to
the stage and offload that shard the same way; a JSON config of DeepSpeed loses what is refused or has no effect here.
What is left out is told, each with its reason; the file that was read is not changed.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import click
import yaml
from pydantic import ValidationError

from zeroaccel.config.canonical import Canonical
from zeroaccel.config.document import read_document
from zeroaccel.config.launch_file import text_of_file
from zeroaccel.config.launch_schema import LaunchFile
from zeroaccel.config.load import load_config
from zeroaccel.config.origin import Origin, dotted
from zeroaccel.config.origin import Path as KeyPath
from zeroaccel.config.problems import closest, report
from zeroaccel.config.schema import Config
from zeroaccel.config.support import KEYS, Kind, refusals
from zeroaccel.config.yaml_text import parse_yaml
from zeroaccel.errors import ConfigError

from .command import CONTEXT
from .making import say
from .render import checked
from .write import write_file

__all__ = ["convert", "convert_json", "convert_launch"]

_STAGES = {"FULL_SHARD": 3, "SHARD_GRAD_OP": 2, "NO_SHARD": 0, "HYBRID_SHARD": 3, "HYBRID_SHARD_ZERO2": 2}
_NUMBERED = {"1": "FULL_SHARD", "2": "SHARD_GRAD_OP", "3": "NO_SHARD", "4": "HYBRID_SHARD", "5": "HYBRID_SHARD_ZERO2"}
# Settings of FSDP without a counterpart, and why none is needed.
_FSDP_LEFT_OUT = {
    "fsdp_auto_wrap_policy": "the repeated blocks of a model are found by themselves",
    "fsdp_transformer_layer_cls_to_wrap": "the repeated blocks of a model are found by themselves",
    "fsdp_min_num_params": "the repeated blocks of a model are found by themselves",
    "fsdp_backward_prefetch": "prefetching is set in the JSON config: stage3_prefetch_bucket_size",
    "fsdp_forward_prefetch": "prefetching is set in the JSON config: stage3_prefetch_bucket_size",
    "fsdp_use_orig_params": "parameters always keep their names and shapes",
    "fsdp_sync_module_states": "the weights of rank 0 always count",
    "fsdp_activation_checkpointing": "recomputation is the model's own: model.gradient_checkpointing_enable()",
    "fsdp_version": "there is one engine",
    "fsdp_ignored_modules": "every module is sharded",
}
_TPU = ("tpu_env", "tpu_use_cluster", "tpu_use_sudo", "downcast_bf16")
_OTHERS = ("megatron_lm_config", "parallelism_config", "fp8_config", "ipex_config", "mpirun_config")


@click.command(context_settings=CONTEXT)
@click.argument("file")
@click.option("-o", "--output", metavar="PATH", help="Write it there, rather than to stdout.")
@click.option("--drop_unknown", is_flag=True, help="Leave unknown keys of a JSON config out, each with a line.")
def convert(file: str, output: str | None, drop_unknown: bool) -> None:
    """Make a file for zeroaccel of FILE: an accelerate YAML with DeepSpeed or FSDP settings, or a DeepSpeed JSON."""
    text = text_of_file(file)
    if Path(file).suffix == ".json" and "distributed_type" not in text:
        tree, notes = convert_json(file, drop_unknown=drop_unknown)
        result = json.dumps(tree, indent=2) + "\n"
        load_config(result)
    else:
        tree, notes = convert_launch(text, file)
        result = yaml.safe_dump(tree, sort_keys=False, allow_unicode=True, width=120)
        checked(result, f"the result of {file}")
    for note in notes:
        say(note)
    if output is None:
        click.echo(result, nl=False)
        return
    kept = write_file(Path(output), result)
    say(f"written: {output}" + (f" (what was there is in {kept})" if kept else ""))


def convert_json(file: str, *, drop_unknown: bool = False) -> tuple[dict[str, Any], list[str]]:
    """A JSON config without what is refused or has no effect, and a line, with its place, for each key left out.

    Args:
        drop_unknown: leave unknown keys out too, rather than refuse them.

    Raises:
        ConfigError: the file cannot be read, or has a key that does not exist.
    """
    document = read_document(Path(file))
    canonical = Canonical(Config, document.tree, "strict")
    origin = Origin(name=document.name, places=document.places, written=canonical.written)
    tree = _copy(document.tree)
    notes = []
    if canonical.unknown and not drop_unknown:
        problems = [problem for problem in canonical.problems if problem.text == "unknown key"]
        lines = [str(report([problem], origin, [])) for problem in problems]
        heading = [f"{file}: {len(lines)} unknown keys"] if len(lines) > 1 else []
        raise ConfigError("\n  ".join([*heading, *lines]), fix="correct them, or leave them out by --drop_unknown")
    for path in canonical.unknown:
        _remove(tree, path)
        notes.append(f"left out {origin.where_written(path)}: unknown key")
    for note in canonical.notes:
        if note.path[-1:] and str(note.path[-1]).startswith("_") and _remove(tree, note.path):
            notes.append(f"left out {note.line(origin)}")
    try:
        refused = {_key_of(problem.path) for problem in refusals(Config(**canonical.tree), set(canonical.unresolved))}
    except ValidationError:
        load_config(file, unknown_keys="lenient")  # tells every wrong value
        raise
    for key, standing in KEYS.items():
        written = canonical.written.get(tuple(key.split(".")))
        if written is None or not (key in refused or standing.kind is Kind.MOOT):
            continue
        if _remove(tree, written):
            fix = f"; {standing.fix}" if key in refused and standing.fix else ""
            notes.append(f"left out {origin.where_written(written)}: {standing.reason}{fix}")
    return tree, notes


def _key_of(path: KeyPath) -> str:
    """The key of the table that a refusal is about: the path itself, or the section whose switch it names."""
    key = dotted(path)
    return key if key in KEYS else key.rpartition(".")[0]


def convert_launch(text: str, name: str) -> tuple[dict[str, Any], list[str]]:
    """A launch file with the keys that are read here, and a line for each that was left out or stands for another.

    Raises:
        ConfigError: it is no YAML, or has a key that neither accelerate nor we have.
    """
    tree = parse_yaml(text, name).value
    if not isinstance(tree, dict):
        raise ConfigError(name, expected="settings as in `num_processes: 2`", got=tree)
    tree = {key: value for key, value in tree.items() if value not in (None, {}, [], "")}
    notes: list[str] = []
    for key in (*_TPU, *_OTHERS, "main_training_function"):
        value = tree.pop(key, None)
        if value and value not in ("no", "main"):
            notes.append(f"left out {key}: it has no counterpart")
    fsdp = tree.pop("fsdp_config", None)
    if fsdp or tree.get("distributed_type") == "FSDP":
        tree["distributed_type"] = "DEEPSPEED"
        tree["deepspeed_config"] = _of_fsdp(fsdp or {}, name, notes)
    if tree.get("compute_environment", "LOCAL_MACHINE") != "LOCAL_MACHINE":
        raise ConfigError(f"{name}: compute_environment", expected="LOCAL_MACHINE", got=tree["compute_environment"])
    if tree.get("rdzv_backend") == "static" and tree.get("num_machines", 1) == 1:
        del tree["rdzv_backend"]  # what accelerate writes where nobody has chosen
    for key in [key for key in tree if key not in LaunchFile.model_fields]:
        meant = closest(str(key), LaunchFile.model_fields)
        raise ConfigError(f"{name}: {key}: unknown key", fix=f"did you mean {meant}?" if meant else "remove it")
    return tree, notes


def _of_fsdp(fsdp: Mapping[str, Any], name: str, notes: list[str]) -> dict[str, Any]:
    """The section that shards and offloads as FSDP would."""
    section: dict[str, Any] = {"zero_stage": _stage(fsdp, name)}
    for key, value in fsdp.items():
        if key in ("fsdp_sharding_strategy", "fsdp_reshard_after_forward"):
            notes.append(f"{key} {value} -> zero_stage {section['zero_stage']}")
            if str(value).startswith("HYBRID") or str(value) in ("4", "5"):
                notes.append("left out the second sharding within machines: zero_hpz_partition_size of a JSON config")
        elif key == "fsdp_offload_params":
            if _is_true(value):
                section["offload_optimizer_device"] = "cpu"
                if section["zero_stage"] == 3:
                    section["offload_param_device"] = "cpu"
                notes.append("fsdp_offload_params true -> offload devices cpu")
        elif key == "fsdp_cpu_ram_efficient_loading":
            if section["zero_stage"] == 3:
                section["zero3_init_flag"] = _is_true(value)
                notes.append(f"{key} -> zero3_init_flag {section['zero3_init_flag']}".lower())
        elif key == "fsdp_state_dict_type":
            if section["zero_stage"] == 3:
                section["zero3_save_16bit_model"] = str(value) in ("FULL_STATE_DICT", "1")
                notes.append(f"{key} {value} -> zero3_save_16bit_model {section['zero3_save_16bit_model']}")
        elif key in _FSDP_LEFT_OUT:
            notes.append(f"left out {key}: {_FSDP_LEFT_OUT[key]}")
        else:
            meant = closest(str(key), [*_FSDP_LEFT_OUT, "fsdp_sharding_strategy", "fsdp_offload_params"])
            raise ConfigError(f"{name}: fsdp_config.{key}: unknown key", fix=f"did you mean {meant}?" if meant else "")
    return section


def _stage(fsdp: Mapping[str, Any], name: str) -> int:
    key = "fsdp_sharding_strategy" if "fsdp_sharding_strategy" in fsdp else "fsdp_reshard_after_forward"
    said = str(fsdp.get(key, "FULL_SHARD")).upper()
    # Parameters that stay whole between forward and backward are stage 2.
    word = {"TRUE": "FULL_SHARD", "FALSE": "SHARD_GRAD_OP"}.get(said, _NUMBERED.get(said, said))
    if word not in _STAGES:
        raise ConfigError(f"{name}: fsdp_config.{key}", expected=" or ".join(_STAGES), got=fsdp[key])
    return _STAGES[word]


def _is_true(value: Any) -> bool:
    return str(value).lower() in ("true", "1", "yes")


def _copy(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _copy(item) for key, item in value.items()}
    return [_copy(item) for item in value] if isinstance(value, list) else value


def _remove(tree: dict[str, Any], path: KeyPath) -> bool:
    """Removes a key, and what holds nothing else; false if it is gone already."""
    *above, last = map(str, path)
    for part in above:
        tree = tree.get(part, {})
    return tree.pop(last, path) is not path  # which is no value of a file
