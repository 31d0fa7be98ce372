"""Reads DeepSpeed's checkpoints: stages 0 to 3, BF16_Optimizer, universal ones, tensor, pipeline and expert parallel.

`open_deepspeed_checkpoint` sorts the files by name, reads the pickles (`torch_pickle.py` has the allowed names) and
locates the elements of every tensor, which are read on request only. Keys, records and pieces have the form of this
package's manifest, so the same code reads both kinds. `open_source` opens either kind for `zero_to_fp32.py`, a
standalone file that supports this package's format only. Needs neither torch nor DeepSpeed.
"""

from __future__ import annotations

import hashlib
import os
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from zeroaccel.checkpoint.formats.deepspeed_parallel import (
    EXPERT,
    LAYER,
    Parts,
    SliceRules,
    add_weights_of_files,
    require_parts,
)
from zeroaccel.checkpoint.formats.deepspeed_partitioned import (
    DeepSpeedContents,
    FlatStates,
    ParamGroup,
    named_shapes,
    pieces,
    positions_of_wholes,
    read_chunked,
    read_frozen_chunks,
    read_module,
    read_partitioned,
)
from zeroaccel.checkpoint.formats.deepspeed_unpartitioned import name_positions, read_universal, read_unsharded
from zeroaccel.checkpoint.formats.pickle_machine import StandIn
from zeroaccel.checkpoint.formats.torch_file import TorchFile
from zeroaccel.checkpoint.manifest import MANIFEST_NAME, TensorRecord, check_tag, read_latest
from zeroaccel.checkpoint.zero_to_fp32 import ConversionError, Source, Weight, read_source
from zeroaccel.errors import CheckpointError

_MODEL = re.compile(r"(?:zero_pp_rank_(?P<rank>\d+)_)?mp_rank_(?P<mp>\d+)_model_states\.pt")
_OPTIM = re.compile(r"(?P<bf16>bf16_)?zero_pp_rank_(?P<rank>\d+)_mp_rank_(?P<mp>\d+)_?optim_states\.pt")
_MOST_NAMES = 50
_EXPERT_OPTIM = re.compile(r"expp_rank_\d+_mp_rank_\d+_optim_states\.pt")
_KINDS = (_MODEL, _OPTIM, LAYER, EXPERT, _EXPERT_OPTIM)


@dataclass(frozen=True)
class CheckpointFiles:
    """The files of one tag, of one combination of tensor rank and pipeline stage.

    Attributes:
        full_model: the model file of stages 0 to 2, or None.
        models: rank -> model file, stage 3.
        optims: rank -> optimizer file.
        universal: the folder with a subfolder for each parameter, or None.
    """

    folder: Path
    full_model: Path | None
    models: dict[int, Path]
    optims: dict[int, Path]
    universal: Path | None

    def require_ranks(self, world_size: int, *, models: bool) -> None:
        """Raises CheckpointError unless each of `world_size` ranks has its files, and there are no others."""
        kinds = [("optim_states.pt", self.optims)] + ([("model_states.pt", self.models)] if models else [])
        for kind, paths in kinds:
            example = next(iter(paths.values())).name if paths else f"zero_pp_rank_0_mp_rank_00_{kind}"
            absent = islice((rank for rank in range(world_size) if rank not in paths), _MOST_NAMES)
            missing = [re.sub(r"pp_rank_\d+", f"pp_rank_{rank}", example) for rank in absent]
            extra = [path.name for rank, path in sorted(paths.items()) if rank >= world_size]
            if missing:
                raise CheckpointError(
                    f"{self.folder}: incomplete: each of the {world_size} ranks needs a file; "
                    f"missing: {', '.join(missing)}{', ...' if len(missing) == _MOST_NAMES else ''}",
                    fix="copy them from the machines that wrote them",
                )
            if extra:
                raise CheckpointError(
                    f"{self.folder}: saved by {world_size} ranks; has files of another save: {', '.join(extra)}",
                    fix="move them elsewhere",
                )


def is_deepspeed_checkpoint(root: Path, tag: object = None) -> bool:
    """Returns True if a folder, or the tag in it, has files with DeepSpeed's names and no manifest."""
    try:
        folder, _ = resolve_folder(root, tag)
    except CheckpointError:
        return False
    return not (folder / MANIFEST_NAME).exists() and has_files(folder)


def has_files(folder: Path) -> bool:
    """Returns True if a folder has files with DeepSpeed's names."""
    return any(form.fullmatch(path.name) for path in folder.iterdir() for form in _KINDS)


def resolve_folder(root: Path, tag: object = None) -> tuple[Path, str]:
    """Returns (folder, tag) for a tag; by default, for `root` if it is a checkpoint, else for the tag in `latest`.

    If there is no `latest`, it reads `latest_universal`.

    Raises:
        CheckpointError: the checkpoint does not exist; the message lists the existing ones.
    """
    if tag is None and root.is_dir() and has_files(root):
        return root, root.name
    if tag is None:
        for name in ("latest", "latest_universal"):
            if (root / name).exists():
                tag = read_latest(root, name)
                break
    there = sorted(path.name for path in root.iterdir() if path.is_dir() and has_files(path)) if root.is_dir() else []
    listed = f"checkpoints in {root}: {', '.join(there) or 'none'}"
    if tag is None:
        raise CheckpointError(f"{root / 'latest'}: cannot be read", fix=f"{listed}; pass a tag")
    folder = root / check_tag(tag)
    if not folder.is_dir():
        raise CheckpointError(f"{folder}: no such checkpoint", fix=listed)
    return folder, str(tag)


@dataclass
class FoundFiles:
    """The files of one tag.

    Attributes:
        parts: those of each combination of tensor rank and pipeline stage.
        layers, experts, expert_optims: files of a pipeline's layers, of experts, and of experts' optimizers at stage 0.
    """

    parts: list[CheckpointFiles]
    layers: list[Path] = field(default_factory=list)
    experts: list[Path] = field(default_factory=list)
    expert_optims: list[Path] = field(default_factory=list)


def find_files(folder: Path) -> FoundFiles:
    """Sorts the files of a tag's folder.

    Raises:
        CheckpointError: the files come from two saves, or some are missing.
    """
    full_models: dict[int, Path] = {}
    models: dict[int, dict[int, Path]] = {}
    optims: dict[int, dict[int, Path]] = {}
    # A bf16 and an fp16 run that saved into one folder have optimizer files with different prefixes.
    prefixes: dict[str, str] = {}
    found = FoundFiles([])
    for path in sorted(folder.iterdir(), key=lambda path: [int(digits) for digits in re.findall(r"\d+", path.name)]):
        if LAYER.fullmatch(path.name):
            found.layers.append(path)
        elif EXPERT.fullmatch(path.name):
            found.experts.append(path)
        elif _EXPERT_OPTIM.fullmatch(path.name):
            found.expert_optims.append(path)
        match = _MODEL.fullmatch(path.name) or _OPTIM.fullmatch(path.name)
        if match is None:
            continue
        mp_rank = int(match["mp"])
        if match.re is _OPTIM:
            prefixes[match["bf16"] or ""] = path.name
            optims.setdefault(mp_rank, {})[int(match["rank"])] = path
        elif match["rank"] is None:
            full_models[mp_rank] = path
        else:
            models.setdefault(mp_rank, {})[int(match["rank"])] = path
    if len(prefixes) > 1:
        raise CheckpointError(
            f"{folder}: files of two saves, {' and '.join(sorted(prefixes.values()))}", fix="remove the older ones"
        )
    numbers = full_models.keys() | models.keys() | optims.keys()
    universal = folder / "zero" if (folder / "zero").is_dir() else None
    for mp_rank in range(max(numbers, default=0) + 1):
        files = full_models.get(mp_rank), models.get(mp_rank, {}), optims.get(mp_rank, {})
        found.parts.append(CheckpointFiles(folder, *files, universal))
    require_parts(folder, [(bundle.full_model, bundle.models, bundle.optims) for bundle in found.parts], found.experts)
    return found


_MODEL_KEYS = frozenset(
    {
        *("module", "buffer_names", "optimizer", "param_shapes", "frozen_param_shapes", "frozen_param_fragments"),
        *("shared_params", "lr_scheduler", "data_sampler", "random_ltd", "sparse_tensor_module_names", "skipped_steps"),
        *("global_steps", "global_samples", "dp_world_size", "mp_world_size", "checkpoint_parallel_dimensions"),
        *("ds_config", "ds_version", "universal_checkpoint_info", "num_experts"),
    }
)
_SCALER_KEYS = ("cur_scale", "cur_iter", "last_overflow_iter", "scale_factor", "scale_window")


@dataclass(frozen=True)
class States:
    """The optimizer's states.

    Attributes:
        tensors: "state/KIND/FQN" -> record of a state with one value per element of the parameter.
        scalars: fqn -> the other states, such as step; tensors are (number of the file, `StoredTensor`).
    """

    tensors: Mapping[str, TensorRecord]
    scalars: Mapping[str, Mapping[str, Any]]


@dataclass(kw_only=True)
class DeepSpeedCheckpoint(DeepSpeedContents):
    """A checkpoint after its pickles are read; no file stays open.

    Keys of `tensors` are "master/FQN", "value/FQN" (parameters without a master) and "buffer/NAME".

    Attributes:
        stage: ZeRO stage 0 to 3 of the run; for a universal checkpoint, of the run before the conversion.
        model: the content of the model file besides tensors: `counters`, `lr_scheduler`, `client_state` read it.
        loss_scaler: attributes of DeepSpeed's loss scaler and its "type", or None.
        model_file: number of the file that contains `model`.
        positional: states without names, see `name_positions`.
        unread: a file whose optimizer states have neither names nor an order in the whole model, or None.
    """

    folder: Path
    tag: str
    stage: int = 0
    world_size: int = 1
    model: Mapping[str, Any] = field(default_factory=dict)
    loss_scaler: Mapping[str, Any] | None = None
    model_file: int = 0
    positional: list[list[dict[str, Any]]] = field(default_factory=list)
    unread: Path | None = None

    @property
    def version(self) -> str:
        """Version of DeepSpeed that wrote the checkpoint."""
        return str(self.model.get("ds_version"))

    @property
    def counters(self) -> dict[str, int]:
        """Numbers of steps, samples and skipped steps."""
        return {name: int(self.model.get(name) or 0) for name in ("global_steps", "global_samples", "skipped_steps")}

    @property
    def lr_scheduler(self) -> Any:
        """State dict of the scheduler, or None."""
        return self.model.get("lr_scheduler")

    @property
    def client_state(self) -> dict[str, Any]:
        """The user's own data; tensors are `StoredTensor`s in `model_file`."""
        return {key: value for key, value in self.model.items() if key not in _MODEL_KEYS}

    @property
    def config(self) -> Mapping[str, Any]:
        """DeepSpeed config of the run."""
        return self.model.get("ds_config") or {}

    @property
    def fingerprint(self) -> str:
        """A digest that changes with every byte of the checkpoint."""
        return hashlib.sha256("".join(file.fingerprint for file in self.files).encode()).hexdigest()

    # -- weights

    def weights(self) -> Iterator[Weight]:
        """Yields parameters in the model's order, then buffers; a tied parameter once, without its aliases."""
        for fqn in self.order:
            if (key := self.weight_key(fqn)) is not None:
                record = self.tensors[key]
                yield Weight(fqn, record.dtype, record.shape, record.runs, excludable=fqn not in self.shapes)
        for name in self.buffers:
            record = self.tensors[f"buffer/{name}"]
            yield Weight(name, record.dtype, record.shape, record.pieces, is_buffer=True)

    def weight_key(self, fqn: str) -> str | None:
        """Returns the key of a parameter's values, those of its master if it has one; None if they are not saved."""
        name = self.ties.get(fqn, fqn)
        return next((key for key in (f"master/{name}", f"value/{name}") if key in self.tensors), None)

    @property
    def left_out(self) -> list[str]:
        """Names of the parameters whose values are not in the checkpoint."""
        return [fqn for fqn in self.order if self.weight_key(fqn) is None]

    # -- optimizer

    @property
    def has_positions(self) -> bool:
        """True if the checkpoint has states without names; see `name_positions`."""
        return any(state for group in self.positional for state in group)

    def name_positions(self, names: Sequence[Sequence[str]]) -> None:
        """Names the states of fp32 training at stage 0, which DeepSpeed saves by position; else does nothing.

        Args:
            names: for each param group of the resuming optimizer, the names of its parameters in order.

        Raises:
            CheckpointError: numbers or shapes do not agree.
        """
        if self.positional:
            name_positions(self, self.positional, names, f"checkpoint {self.folder}")
            self.positional = []
            self.__dict__.pop("states", None)

    @cached_property
    def states(self) -> States:
        """The optimizer's states by name.

        Raises:
            CheckpointError: a state does not have one value per element.
        """
        tensors: dict[str, TensorRecord] = {}
        scalars: dict[str, dict[str, Any]] = {}
        for flat in self.flats:
            self._cut(flat, tensors, scalars)
        return States(tensors, scalars)

    def _cut(self, flat: FlatStates, tensors: dict[str, TensorRecord], scalars: dict[str, dict[str, Any]]) -> None:
        """Splits the states of a flat tensor by parameter, and adds them to `tensors` and `scalars`."""
        first = flat.states[0]
        other: dict[str, Any] = {}
        for kind, value in first.items():
            # DeepSpeed steps one flat tensor: a scalar (step) belongs to all its parameters and is equal on all ranks.
            if not isinstance(value, tuple) or not value[1].shape:
                other[kind] = value
                continue
            parts = [state.get(kind) for state in flat.states]
            if not all(isinstance(in_file, tuple) for in_file in parts):
                raise CheckpointError(f"{self.folder}: state {kind} of {flat.names[0]}: missing in a rank's file")
            ranks = [self.elements(in_file) for in_file in parts if in_file is not None]
            by_parameter = positions_of_wholes(flat, ranks) or flat.positions
            if by_parameter is flat.positions and any(each.numel > flat.partition_numel for each in ranks):
                raise CheckpointError(
                    f"{self.folder}: state {kind} of {flat.names[0]}",
                    expected=f"one value per element, {flat.partition_numel} on each rank",
                    got=[partition.numel for partition in ranks],
                    fix="resume without the optimizer's states (load_optimizer_states=False)",
                )
            for name, shape, positions in zip(flat.names, flat.shapes, by_parameter, strict=True):
                cut = pieces(positions, ranks, f"{self.folder}: state {kind} of {name}")
                tensors[f"state/{kind}/{name}"] = TensorRecord(value[1].dtype, shape, cut)
        for name in flat.names:
            if first:
                scalars[name] = other

    # -- reading

    def verify(self) -> None:
        """Reads every file and compares it with its checksums; raises CheckpointError that names a damaged record."""
        for file in self.files:
            file.verify()


def open_deepspeed_checkpoint(root: Path | str, tag: object = None) -> DeepSpeedCheckpoint:
    """Opens a checkpoint that DeepSpeed wrote.

    Args:
        root: the folder with `latest`, or a tag's own folder.
        tag: tag of the checkpoint; None for the tag in `latest`.

    Raises:
        CheckpointError: the checkpoint does not exist; a file is missing, cut off or damaged; a pickle contains a
            forbidden name; or it does not say how its tensor-parallel parts join.
    """
    folder, name = resolve_folder(Path(root), tag)
    files = find_files(folder)
    try:
        return _open(folder, name, files)
    except (KeyError, TypeError, ValueError, AttributeError, IndexError, ArithmeticError) as error:
        if isinstance(error, CheckpointError):
            raise
        raise CheckpointError(
            f"{folder}: not in DeepSpeed's format ({type(error).__name__}: {error})", fix="use another checkpoint"
        ) from error


def _open(folder: Path, name: str, found: FoundFiles) -> DeepSpeedCheckpoint:
    parts = [_open_part(folder, name, files) for files in found.parts]
    if len(parts) == 1 and not found.layers and not found.experts:
        return parts[0]
    first = parts[0]
    if first.model.get("ds_autoep_layers") or first.model.get("autoep_layers"):
        raise CheckpointError(
            f"{folder}: from DeepSpeed's AutoEP",
            expected="experts of deepspeed.moe, or none",
            fix="save the weights with its save_16bit_model",
        )
    whole = DeepSpeedCheckpoint(
        folder=folder, tag=name, stage=first.stage, world_size=first.world_size, loss_scaler=first.loss_scaler
    )
    whole.model, whole.model_file = first.model, first.model_file
    slices = [int(match["mp"] or 0) for path in found.layers if (match := LAYER.fullmatch(path.name))]
    num_slices = max(slices) + 1 if slices else len(parts)
    info, are_joined = first.model.get("universal_checkpoint_info") or {}, found.parts[0].universal is not None
    rules = SliceRules(info, num_slices, str(folder), are_joined)
    collected, starts = Parts(), []
    for checkpoint in parts:
        starts.append(len(whole.files))
        collected.add(whole, checkpoint.states, checkpoint)
    states = collected.join(whole, rules)
    buffers = frozenset(str(name) for checkpoint in parts for name in checkpoint.model.get("buffer_names") or ())
    rename = add_weights_of_files(whole, [*found.layers, *found.experts], buffers, rules)
    states = {rename(key): record for key, record in states.items()}
    vars(whole)["states"] = States(states, {rename(name): value for name, value in collected.scalars.items()})
    by_position = [checkpoint.files[checkpoint.model_file].path for checkpoint in parts if checkpoint.positional]
    whole.unread = next(iter([*found.expert_optims, *by_position]), None)
    if found.layers and first.model.get("optimizer") is not None:
        _add_unsharded(whole, parts, starts)
    return whole


def _add_unsharded(whole: DeepSpeedCheckpoint, parts: Sequence[DeepSpeedCheckpoint], starts: Sequence[int]) -> None:
    """Adds the optimizers of a pipeline's stages at stage 0, which the values in the layers' files give names."""
    groups: list[ParamGroup] = []
    for checkpoint, start in zip(parts, starts, strict=True):
        whole.groups = []
        for index, states in enumerate(read_unsharded(whole, start, checkpoint.model["optimizer"])):
            if index == len(whole.positional):
                whole.positional.append([])
            whole.positional[index] += states
        groups += whole.groups[len(groups) :]
        for group, more in zip(groups, whole.groups, strict=True):
            group.names += [name for name in more.names if name not in group.names]
    whole.groups = groups
    vars(whole).pop("states", None)


def _open_part(folder: Path, name: str, files: CheckpointFiles) -> DeepSpeedCheckpoint:
    checkpoint = DeepSpeedCheckpoint(folder=folder, tag=name)
    if files.universal is not None:
        _open_universal(checkpoint, files, files.universal)
    elif files.optims:
        _open_sharded(checkpoint, files)
    else:
        _open_unsharded(checkpoint, files)
    return checkpoint


def _open_sharded(checkpoint: DeepSpeedCheckpoint, files: CheckpointFiles) -> None:
    # Read the optimizer files first: only they contain the world size and the layout (chunks or partitions).
    ranks: list[tuple[int, Mapping[str, Any]]] = []
    for _, path in sorted(files.optims.items()):
        content = _open_file(checkpoint, path)
        ranks.append((len(checkpoint.files) - 1, content["optimizer_state_dict"]))
    first = ranks[0][1]
    count = first["partition_count"]
    counts = [int(each) for each in count] if isinstance(count, list) else [int(count)]
    checkpoint.world_size = max(counts)
    bf16_optimizer = "zero_stage" not in first  # BF16_Optimizer partitions like stage 1, but does not save the stage
    checkpoint.stage = 1 if bf16_optimizer else _number(first["zero_stage"])
    chunked = "fp32_flat_groups" in first  # the layout of stage 3
    files.require_ranks(checkpoint.world_size, models=chunked)
    # Stages 1 and 2 have one model file. At stage 3 each rank has one, with its chunks of frozen parameters.
    if chunked:
        models = [(len(checkpoint.files), _open_file(checkpoint, path)) for _, path in sorted(files.models.items())]
    else:
        if files.full_model is None:
            raise CheckpointError(f"{files.folder}: incomplete: mp_rank_00_model_states.pt is missing")
        models = [(len(checkpoint.files), _open_file(checkpoint, files.full_model))]
    file, model = checkpoint.model_file, checkpoint.model = models[0]
    checkpoint.loss_scaler = _scaler(first)
    shapes = [named_shapes(group) for group in model["param_shapes"] or ()]
    if not shapes:
        raise CheckpointError(
            f"{checkpoint.files[file].path}: the optimizer's shapes (param_shapes) are missing",
            fix="save a pipeline in bf16 with zero_optimization.stage 1, not 0",
        )
    read_module(checkpoint, file, model, full=not chunked)
    if chunked:
        read_chunked(checkpoint, shapes, models, ranks)
    else:
        read_partitioned(checkpoint, shapes, ranks, counts, padded=bf16_optimizer)


def _open_file(checkpoint: DeepSpeedCheckpoint, path: Path) -> dict[str, Any]:
    file = TorchFile(path)
    if not isinstance(file.content, dict):
        raise CheckpointError(f"{path}", expected="a dictionary", got=type(file.content).__name__)
    checkpoint.files.append(file)
    return file.content


def _open_unsharded(checkpoint: DeepSpeedCheckpoint, files: CheckpointFiles) -> None:
    if files.full_model is None:
        files.require_ranks(max(files.models) + 1, models=True)
    assert files.full_model is not None, "a checkpoint without model files"
    checkpoint.model = model = _open_file(checkpoint, files.full_model)
    checkpoint.world_size = int(model["dp_world_size"])
    if model.get("param_shapes"):
        files.require_ranks(checkpoint.world_size, models=False)
    read_module(checkpoint, 0, model, full=True)
    optimizer = model.get("optimizer")
    if model["module"] is not None:  # the weights of a pipeline are in files of its layers
        checkpoint.positional = read_unsharded(checkpoint, 0, optimizer)
    if isinstance(optimizer, dict) and "cur_scale" in optimizer:
        checkpoint.loss_scaler = {
            **{key: optimizer[key] for key in _SCALER_KEYS if key in optimizer},
            "type": "DynamicLossScaler" if optimizer["dynamic_loss_scale"] else "LossScaler",
        }


def _open_universal(checkpoint: DeepSpeedCheckpoint, files: CheckpointFiles, universal: Path) -> None:
    full = files.full_model is not None
    paths = [path for _, path in sorted(files.models.items())] if files.full_model is None else [files.full_model]
    models = [(index, _open_file(checkpoint, path)) for index, path in enumerate(paths)]
    checkpoint.model = model = models[0][1]
    checkpoint.world_size = int(model["dp_world_size"])
    read_module(checkpoint, 0, model, full=full)
    if not full:
        if len(models) != checkpoint.world_size:
            raise CheckpointError(f"{files.folder}: model files", expected=f"{model['dp_world_size']}", got=len(models))
        read_frozen_chunks(checkpoint, models)
    body = read_universal(checkpoint, universal, model)
    checkpoint.stage = _number(body["zero_stage"]) if "zero_stage" in body else 1
    checkpoint.loss_scaler = _scaler(body)


def _number(stage: Any) -> int:
    return int(vars(stage)["arguments"][0]) if isinstance(stage, StandIn) else int(stage)


def _scaler(body: Mapping[str, Any]) -> dict[str, Any] | None:
    scaler = body.get("loss_scaler")
    if not isinstance(scaler, StandIn):
        return None
    return {
        "type": scaler.class_name.rpartition(".")[2],
        **{k: v for k, v in vars(scaler).items() if k not in ("arguments", "class_name")},
    }


def open_source(checkpoint_dir: str | os.PathLike[str], tag: str | None = None) -> Source:
    """Opens a checkpoint of this package or of DeepSpeed with a tag, or with the tag in `latest`.

    Raises:
        ConversionError: the checkpoint does not exist, or is damaged, incomplete or of an unsupported kind.
    """
    if is_deepspeed_checkpoint(Path(checkpoint_dir), tag):
        return deepspeed_source(checkpoint_dir, tag)
    return read_source(checkpoint_dir, tag)


def deepspeed_source(checkpoint_dir: str | os.PathLike[str], tag: str | None = None) -> Source:
    """Opens a DeepSpeed checkpoint. Raises ConversionError like `open_source`."""
    try:
        opened = open_deepspeed_checkpoint(Path(checkpoint_dir), tag)
    except CheckpointError as error:
        raise ConversionError(str(error)) from error
    return Source(
        tag=opened.tag,
        stage=opened.stage,
        world_size=opened.world_size,
        fingerprint=opened.fingerprint,
        weights=tuple(opened.weights()),
        ties={alias: name for alias, name in opened.ties.items() if opened.weight_key(name) is not None},
        files=tuple(_SourceFile(file) for file in opened.files),
        left_out=tuple(opened.left_out),
    )


@dataclass(frozen=True)
class _SourceFile:
    """A `TorchFile` that raises the errors of `zero_to_fp32.py`."""

    file: TorchFile

    def read(self, start: int, nbytes: int) -> NDArray[np.uint8]:
        try:
            return self.file.read(start, nbytes)
        except CheckpointError as error:
            raise ConversionError(str(error)) from error
