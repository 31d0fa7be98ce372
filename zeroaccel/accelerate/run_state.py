"""`save_state` and `load_state`: save a training run to a folder, and restore it.

A run consists of engines, schedulers, loader positions, random generators and registered objects. The engines write
their own checkpoints (`checkpoint/`) into the folder; `save_run` adds one safetensors file per rank for the rest, and
finally `run_state.json`, without which the folder is not a complete state. States contain only plain data and tensors
and are never pickled. They load on any number of ranks; random generators exist per rank, and are restored only on the
same number of ranks.

`RunSaving` is the part of an `Accelerator` that collects the parts of the run and chooses folders (`project.py`), and
`RunCalls` documents the calls. The module `model_saving.py` saves weights for other programs.
"""

from __future__ import annotations

import hashlib
import json
import os
import weakref
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load as load_tensors
from safetensors.torch import save as save_tensors
from torch import Tensor
from torch.utils.data import DataLoader
from torch.utils.hooks import RemovableHandle

from zeroaccel.accelerate.accelerator_state import AcceleratorState
from zeroaccel.accelerate.kwargs_handlers import note
from zeroaccel.accelerate.memory_states import MemoryStates, StateSave, digest_of, folder_for_states
from zeroaccel.accelerate.project import (
    STATE_NAME,
    ProjectConfiguration,
    next_state_folder,
    prune_states,
    saved_states,
)
from zeroaccel.accelerate.training_loop import TrainingLoop
from zeroaccel.checkpoint.atomic_write import remove_abandoned, write_durably, writing_to
from zeroaccel.checkpoint.plain_codec import decode, encode, random_state, restore_random_state
from zeroaccel.comm.agree import agreed, from_rank_0
from zeroaccel.comm.collectives import Collectives
from zeroaccel.config.bounds import parse_plain_json, read_at_most
from zeroaccel.config.schema import PeerStates
from zeroaccel.data import PreparedLoader, skip_first_batches
from zeroaccel.engine import EngineBase
from zeroaccel.errors import CheckpointError, ConfigError, Preempted, UsageError
from zeroaccel.logs import logger
from zeroaccel.zero.access.safetensors_file import parse_header

PathLike = str | os.PathLike[str]
SaveHook = Callable[[list[Any], list[Any], str], None]
LoadHook = Callable[[list[Any], str], None]

_VERSION = 1
_KEY = "zeroaccel_run_state"
_MOST_NBYTES = 16 << 30
_WHAT = {
    "schedulers": "state of scheduler",
    "loaders": "position of loader",
    "objects": "register_for_checkpointing: state of object",
}


@dataclass
class RunParts:
    """The parts of a run that a state contains.

    Attributes:
        engines: engines, which save their models, optimizers, schedulers, loss scales and counters.
        schedulers: schedulers that no engine steps.
        loaders: prepared loaders.
        objects: registered objects with `state_dict` and `load_state_dict`.
        counters: counters of the accelerator; `load_run` replaces them.
        iteration: number of this state.
    """

    engines: Sequence[EngineBase] = ()
    schedulers: Sequence[Any] = ()
    loaders: Sequence[PreparedLoader] = ()
    objects: Sequence[Any] = ()
    counters: dict[str, int] = field(default_factory=dict)
    iteration: int = 0

    def counts(self) -> dict[str, int]:
        """Returns the number of parts of each kind, to compare with a saved state."""
        return {
            "models": len(self.engines),
            "schedulers": len(self.schedulers),
            "dataloaders": len(self.loaders),
            "objects registered for checkpointing": len(self.objects),
        }

    def with_states(self) -> dict[str, Sequence[Any]]:
        """Returns the parts whose `state_dict()` is in each rank's file, by kind."""
        return {"schedulers": self.schedulers, "loaders": self.loaders, "objects": self.objects}


class RunSaving:
    """Saves and loads the run of an accelerator; `Accelerator` documents the methods.

    Args:
        loaders: the accelerator's list of prepared loaders.

    Attributes:
        project: settings of the project: its folders and the number of states to keep.
    """

    def __init__(
        self,
        state: AcceleratorState,
        loaders: list[PreparedLoader],
        collectives: Collectives,
        project: ProjectConfiguration,
    ) -> None:
        self._state = state
        self._loaders = loaders
        self._collectives = collectives
        self.project = project
        self._objects: list[Any] = []
        self._save_hooks: OrderedDict[int, SaveHook] = OrderedDict()
        self._load_hooks: OrderedDict[int, LoadHook] = OrderedDict()
        self._watched: weakref.WeakSet[EngineBase] = weakref.WeakSet()
        self._is_preempted = False
        self._memory: MemoryStates | None = None
        self._seen_steps: int | None = None

    def _reserve_memory(self) -> None:
        """Starts saving states in memory if the config or project enables it, and checks that the memory suffices."""
        settings = self._peer_states()
        if settings is None or not settings.enabled:
            return
        if self._memory is None:
            self._memory = self._memory_states(settings)
        if self._memory is not None:
            self._memory.belong_to(f"run_{self._digest()}")
            self._memory.reserve(self._watched)

    def _digest(self) -> str:
        """Returns a digest of the project's folder and the parameters of all models, the same on all ranks."""
        states = [item.engine.checkpointer.state() for item in self._state.prepared]
        digests = [
            sorted(
                (slot.fqn, slot.whole_shape, buffer.trainable)
                for buffer in state.buffers()
                for slot in buffer.layout.slots
            )
            for state in states
            if state.lead == state.job.rank  # the other ranks of a pipeline stage have the same parameters
        ]
        project = self.project.project_dir
        facts = (digests, None if project is None else os.path.abspath(project))
        found = self._collectives.gather_objects(facts, "states in memory: parameters")
        return digest_of((sorted(models for models, _ in found if models), found[0][1]))

    def _peer_states(self) -> PeerStates | None:
        """Returns the settings of states in memory: `checkpoint.peer` of the configs, or those of the project."""
        found: PeerStates | None = None
        for item in self._state.prepared:
            section = item.config.checkpoint.peer if item.optimizer is not None else None
            found = found or section
            if section is not None and section != found:
                raise ConfigError(
                    item.config.where("checkpoint.peer"),
                    expected=f"{found}, as in the config of the model prepared earlier, because a state has all models",
                    got=section,
                )
        interval = self.project.memory_interval
        if interval is None or found is None:
            return found if interval is None else PeerStates(interval=interval)
        if not found.enabled or found.interval != interval:
            raise ConfigError(
                "ProjectConfiguration.memory_interval",
                expected=f"{found.interval if found.enabled else None}, the value of checkpoint.peer in the config",
                got=interval,
                fix="keep one of the two",
            )
        return found

    def _memory_states(self, settings: PeerStates) -> MemoryStates | None:
        asked = "ProjectConfiguration.memory_interval" if self.project.memory_interval else "checkpoint.peer"
        folder = folder_for_states(self._collectives, asked)
        return None if folder is None else MemoryStates(folder, settings, self._begin_save, self._collectives)

    def register(self, obj: Any) -> None:
        missing = [name for name in ("state_dict", "load_state_dict") if not callable(getattr(obj, name, None))]
        if missing:
            raise UsageError(
                "register_for_checkpointing",
                expected="objects with state_dict() and load_state_dict()",
                got=f"{type(obj).__name__} without {' and '.join(missing)}",
            )
        where = f"register_for_checkpointing({type(obj).__name__})"
        if any(obj is other for other in (*self._objects, *self._loaders)):
            raise UsageError(where, expected="each object once", got="an object that is already registered")
        prepared = (known for item in self._state.prepared for known in (item.engine, item.optimizer, *item.schedulers))
        if any(obj is known for known in prepared):
            raise UsageError(
                where,
                expected="an object that prepare() did not return",
                got="a prepared object, which every state already contains",
            )
        self._objects.append(obj)

    def close(self) -> None:
        """Waits for the background thread that writes states in memory, and ends it; forgets the prepared models."""
        if self._memory is not None:
            self._memory.close()
        self._memory, self._seen_steps = None, None
        self._watched.clear()

    def add_save_hook(self, hook: SaveHook) -> RemovableHandle:
        return _added(self._save_hooks, hook)

    def add_load_hook(self, hook: LoadHook) -> RemovableHandle:
        return _added(self._load_hooks, hook)

    def save(self, folder: PathLike | None, step: int) -> str:
        target = Path(folder) if folder is not None else self._next_folder()
        self._call_save_hooks(target)
        saved = save_run(target, self._parts(step), self._collectives, self._state.partial.device)
        if folder is None:
            self.project.iteration += 1
            if self._collectives.rank == 0:
                # Saving in the background may still fail, so the previous state must be kept.
                background = any(item.config.checkpoint.async_save for item in self._state.prepared)
                prune_states(self.project, in_flight=1 if background else 0)
        return str(saved)

    def save_between_batches(self, loop: TrainingLoop) -> None:
        """Makes loaders save the run before a batch: after a preemption, and at the interval of states in memory."""
        for item in self._state.prepared:
            if item.optimizer is not None and item.engine not in self._watched:
                self._watched.add(item.engine)
                if self.project.save_on_preemption:
                    item.engine.when_preempted(self._note_preemption)
        self._reserve_memory()
        if self.project.save_on_preemption or self._memory is not None:
            loop.gradient_state.at_next_batch = lambda: self._save_between_batches(loop.step)

    def _note_preemption(self) -> None:
        self._is_preempted = True

    def _save_between_batches(self, step: int) -> None:
        """Saves a state and raises Preempted after a preemption; otherwise saves a state in memory if it is due.

        It does nothing within an accumulation, whose gradients would be lost, and during an evaluation. All ranks take
        the same branch: they learn of a preemption in the same step, and count the same steps.
        """
        if not all(engine.training and not engine.has_gradients for engine in self._watched):
            return
        if self._is_preempted:
            saved = self.save(None, step)
            for item in self._state.prepared:
                item.engine.wait_for_checkpoint()
            raise Preempted(f"saved state {saved}")
        steps = sum(engine.global_steps for engine in self._watched)
        # Only once per step: a pipeline reads all micro-batches of a step before it has gradients.
        if self._memory is not None and steps != self._seen_steps:
            self._seen_steps = steps
            self._memory.at_batch(steps, step)

    def load(self, folder: PathLike | None) -> tuple[str, int]:
        """Returns the folder and the accelerator's `step`."""
        found = self.resume() if folder is None else self._load(Path(folder))
        if found is None:
            raise CheckpointError(f"{self.project.project_dir}/checkpoints: no complete state to load")
        return found

    def resume(self) -> tuple[str, int] | None:
        """Loads the newest state of the project or in memory; returns the same as `load`, or None without a state."""
        source = self._newest_folder()
        memory = self._memory
        if memory is not None and memory.has_newest(lambda: (source, None if source is None else _num_steps(source))):
            try:
                found = memory.open()
                memory.fetch(lambda: self._files_to_read(found))
                return self._load(found)
            except CheckpointError as error:
                memory.discard()
                if source is None:
                    raise
                logger.warning("deleted the state in memory: %s; resuming from %s", error, source)
        return None if source is None else self._load(source)

    def _begin_save(self, folder: Path, step: int) -> StateSave:
        self._call_save_hooks(folder)
        run, device = self._parts(step), self._state.partial.device
        run_part = _RunPart(folder, run, self._collectives, device)
        engines = {_tag(index): engine for index, engine in enumerate(run.engines)}
        return StateSave(run_part.root, engines, run_part, device)

    def _call_save_hooks(self, folder: Path) -> None:
        models = [item.engine for item in self._state.prepared]
        for hook in list(self._save_hooks.values()):
            hook(models, [], str(folder))

    def _files_to_read(self, folder: Path) -> list[str]:
        """Returns the files of single ranks that this rank reads, by their paths in a state's folder."""
        rank = self._collectives.rank
        names = [_rank_name(rank if rank < _manifest(folder)["world_size"] else 0)]
        for index, item in enumerate(self._state.prepared):
            tag = _tag(index)
            names += [f"{tag}/{name}" for name in item.engine.checkpointer.files_to_read(folder, tag)]
        return names

    def _load(self, source: Path) -> tuple[str, int]:
        models = [item.engine for item in self._state.prepared]
        for hook in list(self._load_hooks.values()):
            hook(models, str(source))
        parts = self._parts(0)
        iteration = load_run(source, parts, self._collectives, self._state.partial.device)
        if self.project.automatic_checkpoint_naming:
            self.project.iteration = iteration + 1
        return str(source), parts.counters["step"]

    def _parts(self, step: int) -> RunParts:
        prepared = self._state.prepared
        return RunParts(
            engines=[item.engine for item in prepared],
            schedulers=[scheduler for item in prepared for scheduler in item.schedulers if not scheduler.engine_driven],
            loaders=self._loaders,
            objects=self._objects,
            counters={"step": step},
            iteration=self.project.iteration,
        )

    def _next_folder(self) -> Path:
        if not self.project.automatic_checkpoint_naming:
            raise UsageError(
                "save_state()",
                expected="a folder",
                got=None,
                fix="pass a folder, or set Accelerator(project_config=ProjectConfiguration(project_dir=..., "
                "automatic_checkpoint_naming=True))",
            )
        return from_rank_0(self._collectives, lambda: next_state_folder(self.project), "save_state: next folder")

    def _newest_folder(self) -> Path | None:
        def newest() -> Path | None:
            states = saved_states(self.project)
            return states[-1] if states else None

        return from_rank_0(self._collectives, newest, "load_state: newest folder")


class RunCalls:
    """The calls of an `Accelerator` that save and load states to resume from; `RunSaving` implements them.

    Attributes:
        step: number of micro-steps in `accumulate` since the last update, which states contain.
    """

    step: int
    _run: RunSaving

    @property
    def project_configuration(self) -> ProjectConfiguration:
        """Settings of the project: its folders and the number of states to keep."""
        return self._run.project

    @property
    def project_dir(self) -> str | None:
        """Folder for states."""
        return self._run.project.project_dir

    @property
    def logging_dir(self) -> str | None:
        """Folder for tracker files."""
        return self._run.project.logging_dir

    @property
    def save_iteration(self) -> int:
        """Number of the next state, with automatic naming."""
        return self._run.project.iteration

    def register_for_checkpointing(self, *objects: Any) -> None:
        """Adds objects to every state, in the order of the calls.

        Args:
            objects: objects with `load_state_dict()` and a `state_dict()` of plain data and tensors. Every rank saves
                the state of its own objects.

        Raises:
            UsageError: an object lacks one of the methods, or is already registered.

        Example:
            >>> import torch
            >>> from zeroaccel import Accelerator
            >>> accelerator = Accelerator()
            >>> average = torch.optim.swa_utils.AveragedModel(torch.nn.Linear(4, 1))
            >>> accelerator.register_for_checkpointing(average)
        """
        for obj in objects:
            self._run.register(obj)

    def register_save_state_pre_hook(self, hook: SaveHook) -> RemovableHandle:
        """Registers `hook(models, weights, folder)`, which is called on every rank before a state is saved.

        `weights` is empty because the weights are sharded; call `accelerator.get_state_dict(model)` to gather them.
        """
        return self._run.add_save_hook(hook)

    def register_load_state_pre_hook(self, hook: LoadHook) -> RemovableHandle:
        """Registers `hook(models, folder)`, which is called on every rank before a state is loaded."""
        return self._run.add_load_hook(hook)

    def save_state(
        self, output_dir: PathLike | None = None, safe_serialization: bool = True, **save_model_func_kwargs: Any
    ) -> str:
        """Saves everything that a resumed run needs: models, optimizers, schedulers, loader positions, random
        generators and registered objects. (all ranks)

        Args:
            output_dir: a folder that all ranks share; an existing state in it is replaced. Defaults to the next
                numbered folder of the project; the oldest states above `total_limit` are then removed.
            safe_serialization: must be True; nothing is pickled.
            save_model_func_kwargs: arguments of DeepSpeed's `save_checkpoint`. `exclude_frozen_parameters=True` raises
                an error; the others have no effect, and a warning names them.

        Returns:
            The folder.

        Raises:
            CheckpointError: the state cannot be written; on every rank.
            UsageError: an object has a state that is not plain data and tensors, or no folder is configured.
            EngineStateError: an accumulation is unfinished; saving would lose its gradients.

        Example:
            >>> import torch
            >>> from zeroaccel import Accelerator
            >>> accelerator = Accelerator()
            >>> model = torch.nn.Linear(4, 1)
            >>> model, optimizer = accelerator.prepare(model, torch.optim.AdamW(model.parameters()))
            >>> folder = accelerator.save_state("runs/first/epoch_1")
        """
        if not safe_serialization:
            raise UsageError(
                "save_state(safe_serialization)", expected="True: states are never pickled", got=safe_serialization
            )
        if save_model_func_kwargs.pop("exclude_frozen_parameters", False):
            raise UsageError(
                "save_state(exclude_frozen_parameters)",
                expected="False, because resuming needs all weights",
                got=True,
                fix="remove it, or call engine.save_checkpoint(folder, exclude_frozen_parameters=True)",
            )
        for name in save_model_func_kwargs:
            note(f"save_state({name}=...)", "no effect: a state is always saved as one complete folder")
        return self._run.save(output_dir, self.step)

    def load_state(
        self,
        input_dir: PathLike | None = None,
        load_kwargs: Mapping[str, Any] | None = None,
        **load_model_func_kwargs: Any,
    ) -> str:
        """Resumes from a state. Prepare and register the same objects first. (all ranks)

        Loaders continue after the last batch that they yielded. Start the loop over epochs at `dataloader.epoch`.

        Args:
            input_dir: folder of the state. Defaults to the newest complete state of the project or in memory.
            load_kwargs, load_model_func_kwargs: arguments of torch's and DeepSpeed's loading functions. They have no
                effect, and a warning names them.

        Returns:
            The folder.

        Raises:
            CheckpointError: the state is missing or damaged, or does not match this run; on every rank.

        Example:
            >>> import torch
            >>> from zeroaccel import Accelerator, ProjectConfiguration
            >>> project = ProjectConfiguration("runs/second", automatic_checkpoint_naming=True)
            >>> accelerator = Accelerator(project_config=project)
            >>> loader = accelerator.prepare(torch.utils.data.DataLoader(torch.arange(8), batch_size=2))
            >>> folder = accelerator.save_state()
            >>> accelerator.load_state() == folder
            True
            >>> for epoch in range(loader.epoch, 3):
            ...     for batch in loader:
            ...         pass
        """
        for name in (*(load_kwargs or {}), *load_model_func_kwargs):
            note(f"load_state({name}=...)", "no effect: weights are read into their shards, other state by its name")
        folder, self.step = self._run.load(input_dir)
        return folder

    def resume(self) -> str | None:
        """Loads the newest state of the project or in memory, as `load_state()`. (all ranks)

        Returns:
            The folder; None without a state.
        """
        found = self._run.resume()
        if found is None:
            return None
        folder, self.step = found
        return folder

    def skip_first_batches(self, dataloader: DataLoader[Any], num_batches: int = 0) -> DataLoader[Any]:
        """Returns `dataloader` with each of its epochs starting at batch `num_batches`.

        Not needed after `load_state`, which restores loader positions; using both skips no batch twice.
        """
        return skip_first_batches(dataloader, num_batches)


def _added(hooks: OrderedDict[int, Any], hook: Any) -> RemovableHandle:
    handle = RemovableHandle(hooks)
    hooks[handle.id] = hook
    return handle


def save_run(folder: str | os.PathLike[str], run: RunParts, collectives: Collectives, device: torch.device) -> Path:
    """Saves the run into `folder`, which all ranks share; an existing state in it is replaced. (all ranks)

    Returns:
        The folder's absolute path.

    Raises:
        CheckpointError: the state cannot be written.
        UsageError: a `state_dict()` has a value that is not plain data or a tensor; the message names its key.
        EngineStateError: an accumulation is unfinished; saving would lose its gradients.
    """
    run_part = _RunPart(folder, run, collectives, device)
    for index, engine in enumerate(run.engines):
        engine.save_checkpoint(run_part.root, tag=_tag(index))
    with agreed(collectives, f"save_state {run_part.root.name}: write"):
        run_part.write()
    run_part.complete()
    return run_part.root


class _RunPart:
    """The `StatePart` of a run: this rank's file without the engines. (created by all ranks; raises as `save_run`)

    The constructor encodes all parts before it writes, so that an object that cannot be saved leaves the old state.
    """

    def __init__(
        self, folder: str | os.PathLike[str], run: RunParts, collectives: Collectives, device: torch.device
    ) -> None:
        self.root = root = Path(os.path.abspath(folder))
        self.name = _rank_name(collectives.rank)
        self._collectives = collectives
        self._content = b""
        with agreed(collectives, f"save_state {root.name}: parts to save"):
            _check_keep_last(run)
            self._content = _encoded(run, device)
        self._facts = {
            "version": _VERSION,
            "world_size": collectives.world_size,
            "iteration": run.iteration,
            "counts": run.counts(),
            "num_steps": sum(engine.global_steps for engine in run.engines),
        }
        with agreed(collectives, f"save_state {root.name}: folder"):
            if collectives.rank == 0:
                with writing_to(root):
                    root.mkdir(parents=True, exist_ok=True)
                    (root / STATE_NAME).unlink(missing_ok=True)  # the folder is not a state until it is written again

    def write(self) -> None:
        """Writes this rank's file."""
        with writing_to(self.root):
            write_durably(self.root / self.name, self._content)
        remove_abandoned(self.root / self.name)

    def complete(self) -> None:
        """Makes the folder a complete state after every rank has written all its files. (all ranks)"""
        root, ranks = self.root, self._collectives
        # The manifest has the digest of every rank's file. Writing it last makes the folder a complete state.
        digests = ranks.gather_objects(hashlib.sha256(self._content).hexdigest(), f"save_state {root.name}: parts")
        with agreed(ranks, f"save_state {root.name}: finish"):
            if ranks.rank == 0:
                manifest = json.dumps(self._facts | {"sha256": digests}, indent=1).encode()
                with writing_to(root):
                    write_durably(root / STATE_NAME, manifest)
                remove_abandoned(root / STATE_NAME)
        logger.info("saved state %s", root)


def load_run(folder: str | os.PathLike[str], run: RunParts, collectives: Collectives, device: torch.device) -> int:
    """Restores every part of the run from `folder`. (all ranks)

    Returns:
        The state's `iteration`.

    Raises:
        CheckpointError: the state is missing, incomplete or damaged, or of a run with other parts; on every rank.
    """
    root = Path(os.path.abspath(folder))
    manifest: Mapping[str, Any] = from_rank_0(collectives, lambda: _manifest(root), f"load_state {root.name}: manifest")
    state: dict[str, Any] = {}
    with agreed(collectives, f"load_state {root.name}: read"):
        # Checked before the first engine loads: a run with other parts must not be partly restored.
        _check_counts(root, manifest["counts"], run.counts())
        state = _read(root, manifest, collectives.rank)
    for index, engine in enumerate(run.engines):
        engine.load_checkpoint(root, tag=_tag(index))
    with agreed(collectives, f"load_state {root.name}: restore"):
        for kind, parts in run.with_states().items():
            for obj, saved in zip(parts, state[kind], strict=True):
                obj.load_state_dict(saved)
        run.counters.update(state["counters"])
        if manifest["world_size"] == collectives.world_size:
            restore_random_state(state["random_state"], device)
        else:
            logger.warning(
                "%s: saved by %d ranks, so the random generators are not restored", root, manifest["world_size"]
            )
    logger.info("loaded state %s", root)
    return int(manifest["iteration"])


def _encoded(run: RunParts, device: torch.device) -> bytes:
    """Returns the content of this rank's file."""
    tensors: dict[str, Tensor] = {}

    def add(tensor: Tensor) -> str:
        key = str(len(tensors))
        tensors[key] = tensor.detach().cpu().contiguous().clone()
        return key

    state: dict[str, Any] = {
        kind: [
            encode(obj.state_dict(), f"{_WHAT[kind]} {index} ({type(obj).__name__})", add)
            for index, obj in enumerate(parts)
        ]
        for kind, parts in run.with_states().items()
    }
    state["counters"] = encode(run.counters, "counters", add)
    state["random_state"] = encode(random_state(device), "random state", add)
    return save_tensors(tensors, metadata={_KEY: json.dumps(state)})


def _read(root: Path, manifest: Mapping[str, Any], rank: int) -> dict[str, Any]:
    source = rank if rank < manifest["world_size"] else 0
    path = root / _rank_name(source)
    try:
        content = read_at_most(path, _MOST_NBYTES, regular=True)
    except OSError as error:
        raise CheckpointError(f"{path}: cannot be read ({error.strerror})") from error
    if hashlib.sha256(content).hexdigest() != manifest["sha256"][source]:
        raise CheckpointError(f"{path}: damaged: its digest differs from the manifest's", fix="load another state")
    try:
        header = parse_header(content[8 : 8 + int.from_bytes(content[:8], "little")])
        tensors = load_tensors(content)
        state = parse_plain_json(header["__metadata__"][_KEY])
        return {kind: decode(value, tensors.__getitem__) for kind, value in state.items()}
    except (SafetensorError, KeyError, ValueError, TypeError, AttributeError) as error:
        raise CheckpointError(f"{path}: not a rank's file of a state ({error})") from error


def _manifest(root: Path) -> dict[str, Any]:
    path = root / STATE_NAME
    try:
        manifest = parse_plain_json(read_at_most(path, _MOST_NBYTES, regular=True))
    except FileNotFoundError:
        raise CheckpointError(
            f"{root}: no complete state",
            expected=f"a folder with {STATE_NAME}, which save_state writes last",
            fix="check the path; if saving was interrupted, load an earlier state",
        ) from None
    except OSError as error:
        raise CheckpointError(f"{path}: cannot be read ({error.strerror})") from error
    except ValueError as error:
        raise CheckpointError(f"{path}: damaged: not JSON ({error})", fix="load another state") from error
    if not isinstance(manifest, dict) or manifest.get("version") != _VERSION:
        version = manifest.get("version") if isinstance(manifest, dict) else manifest
        raise CheckpointError(f"{path}: version", expected=str(_VERSION), got=version)
    _check_manifest(path, manifest)
    return manifest


def _num_steps(root: Path) -> int:
    """Returns the number of steps of all engines at a state; 0 for a state that an earlier version saved."""
    number = _manifest(root).get("num_steps", 0)
    return number if type(number) is int else 0


def _check_manifest(path: Path, manifest: Mapping[str, Any]) -> None:
    digests, counts = manifest.get("sha256"), manifest.get("counts")
    if (
        not isinstance(digests, list)
        or not all(isinstance(digest, str) for digest in digests)
        or manifest.get("world_size") != len(digests)
        or type(manifest.get("iteration")) is not int
        or not isinstance(counts, dict)
        or not RunParts().counts().keys() <= counts.keys()
    ):
        raise CheckpointError(f"{path}: damaged: not a manifest of save_state", fix="load another state")


def _check_counts(root: Path, saved: Mapping[str, int], now: Mapping[str, int]) -> None:
    for what, count in now.items():
        if saved[what] != count:
            raise CheckpointError(
                f"{root}: number of {what}",
                expected=f"{count}, the number that this run has prepared or registered",
                got=saved[what],
                fix="prepare and register the same objects, in the same order, before load_state",
            )


def _check_keep_last(run: RunParts) -> None:
    for engine in run.engines:
        keep = engine.zero_config.get("checkpoint", {}).get("keep_last")
        if keep is not None and keep < len(run.engines):
            raise UsageError(
                "save_state: checkpoint.keep_last of the config",
                expected=f"at least {len(run.engines)}, because the state holds a checkpoint of each of its models",
                got=keep,
                fix="limit the number of states with ProjectConfiguration(total_limit=...) instead",
            )


def _tag(index: int) -> str:
    return "pytorch_model" if index == 0 else f"pytorch_model_{index}"


def _rank_name(rank: int) -> str:
    return f"run_state_rank{rank:05d}.safetensors"
