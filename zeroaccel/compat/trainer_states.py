"""States in memory for transformers' Trainer: `train()` saves one every few steps, and resumes from the newest.

`checkpoint.peer` in the config enables them, in a job whose launcher preserves memory (`memory_states.py`). A state is
a Trainer checkpoint without the weights for other programs: the engine's checkpoint, which a thread writes, and
Trainer's own state, random generators and schedule. `Trainer.train` gets its folder as `resume_from_checkpoint`,
unless the checkpoint that the script requests has a later step.

A state is saved where Trainer saves a checkpoint: after a step's logs and evaluations. The last step of an epoch waits
for those of the epoch, since a resumed run begins with the next epoch. A script may call `train()` several times, and
skip calls that an earlier attempt completed: a digest of the trained model and arguments names the owner of the states,
see [Note: owners of states].
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from copy import copy
from functools import wraps
from pathlib import Path
from typing import Any

import torch

from zeroaccel.accelerate.memory_states import MemoryStates, StateSave, digest_of, folder_for_states
from zeroaccel.accelerate.project import STATE_NAME
from zeroaccel.checkpoint.atomic_write import writing_to
from zeroaccel.comm.agree import agreed
from zeroaccel.comm.collectives import Collectives
from zeroaccel.config import load_config
from zeroaccel.config.bounds import read_at_most
from zeroaccel.config.schema import PeerStates
from zeroaccel.engine import EngineBase
from zeroaccel.errors import CheckpointError
from zeroaccel.logs import logger
from zeroaccel.operations import collectives_of_process

_TRAINER_STATE = "trainer_state.json"  # Trainer's file names
_SCHEDULER = "scheduler.pt"
_MOST_NBYTES = 1 << 30
_TAG = "global_step"  # prefix that Trainer expects; equal for all states, so that a save overwrites older files

_ARGUMENTS = (  # distinguish the trainings of a script
    *("output_dir", "max_steps", "num_train_epochs", "per_device_train_batch_size", "gradient_accumulation_steps"),
    *("learning_rate", "lr_scheduler_type", "warmup_steps", "weight_decay", "seed", "data_seed"),
)

_current: TrainerStates | None = None
_is_asked = False


def are_asked() -> bool:
    """True while a `Trainer.train` runs whose config enables states in memory."""
    return _is_asked


def attach(engine: EngineBase) -> None:
    """Uses the engine for the running `Trainer.train`, if the engine has an optimizer. (all ranks)"""
    if _current is not None and engine.optimizer is not None:
        _current.use(engine)


def train(
    original: Callable[..., Any],
    trainer: Any,
    resume_from_checkpoint: Any = None,
    trial: Any = None,
    *args: Any,
    **kwargs: Any,
) -> Any:
    """Runs `Trainer.train`; saves states in memory and resumes from them, if the config enables them.

    Args:
        original: Trainer's own method.
    """
    global _current, _is_asked
    settings = None if _is_asked else _settings(trainer)
    if settings is None:
        return original(trainer, resume_from_checkpoint, trial, *args, **kwargs)
    _is_asked = True
    try:
        folder = None if trial is not None else folder_for_states(collectives_of_process(), "checkpoint.peer")
        if folder is None:
            return original(trainer, resume_from_checkpoint, trial, *args, **kwargs)
        with _states(trainer, folder, settings) as _current:
            return original(trainer, _current.newest(resume_from_checkpoint), trial, *args, **kwargs)
    finally:
        _current, _is_asked = None, False


def naming_ranks(original: Callable[..., Any]) -> Callable[..., Any]:
    """Wraps `deepspeed_load_checkpoint`: says that a resume on another number of processes trains on other samples."""

    @wraps(original)
    def deepspeed_load_checkpoint(deepspeed_engine: Any, checkpoint_path: Any, *args: Any, **kwargs: Any) -> Any:
        result = original(deepspeed_engine, checkpoint_path, *args, **kwargs)
        files, job = list(Path(checkpoint_path).glob("rng_state*.pth")), deepspeed_engine.collectives.job
        if files and len(files) != job.world_size and job.rank == 0:
            logger.warning(
                "Trainer: resume from %s: expected %d processes, as it was saved on, got %d: Trainer skips the same "
                "number of steps, whose samples are others here; resume on %d processes to read the rest of the epoch",
                *(checkpoint_path, len(files), job.world_size, len(files)),
            )
        return result

    return deepspeed_load_checkpoint


def _settings(trainer: Any) -> PeerStates | None:
    """Returns `checkpoint.peer` of the config that Trainer passes to `deepspeed.initialize`."""
    plugin = getattr(trainer.accelerator.state, "deepspeed_plugin", None)
    section = (getattr(plugin, "deepspeed_config", None) or {}).get("checkpoint")
    if not isinstance(section, dict) or section.get("peer") is None:
        return None
    document = {"train_micro_batch_size_per_gpu": 1, "checkpoint": {"peer": section["peer"]}}
    peer = load_config(document).checkpoint.peer
    return peer if peer is not None and peer.enabled else None


@contextmanager
def _states(trainer: Any, folder: Path, settings: PeerStates) -> Iterator[TrainerStates]:
    states = TrainerStates(trainer, folder, settings)
    call = trainer._maybe_log_save_evaluate

    def after_step(*args: Any, **kwargs: Any) -> Any:
        result = call(*args, **kwargs)
        states.after_step()
        return result

    trainer._maybe_log_save_evaluate = after_step
    try:
        yield states
    finally:
        del trainer._maybe_log_save_evaluate
        states.close()


class TrainerStates:
    """The states in memory of one call of `Trainer.train`. (all ranks call each method)

    Args:
        folder: folder in memory of this machine's launcher.
    """

    def __init__(self, trainer: Any, folder: Path, settings: PeerStates) -> None:
        self._trainer = trainer
        self._collectives = collectives_of_process()
        self._memory = MemoryStates(folder, settings, self._begin, self._collectives)
        self._memory.belong_to(f"train_{_digest(trainer)}")
        self._engine: EngineBase | None = None
        self._found: Path | None = None
        self._num_steps = -1

    def newest(self, asked: Any) -> Any:
        """Returns the checkpoint for `Trainer.train` to resume from: the newest state, or `asked` if it is newer.

        Args:
            asked: the script's `resume_from_checkpoint`.
        """
        if not self._memory.has_newest(lambda: _asked(asked, self._trainer.args.output_dir)):
            return asked
        self._found = self._memory.open()
        return str(self._found)

    def use(self, engine: EngineBase) -> None:
        """Completes the state that `newest` returned, with the files that this engine reads, and reserves memory."""
        self._engine = engine
        if self._found is not None:
            found, self._found = self._found, None
            self._memory.fetch(lambda: [f"{_TAG}/{name}" for name in engine.checkpointer.files_to_read(found, _TAG)])
        self._memory.reserve([engine])

    def after_step(self) -> None:
        """Saves a state if it is due; called after the logs of a step, and of an epoch."""
        state = self._trainer.state
        is_first, self._num_steps = state.global_step != self._num_steps, state.global_step
        ends_epoch = state.epoch is not None and state.epoch == int(state.epoch)
        if is_first != ends_epoch and self._engine is not None:
            self._memory.at_batch(state.global_step, 0)

    def close(self) -> None:
        """Ends work in the background."""
        self._memory.close()

    def _begin(self, folder: Path, step: int) -> StateSave:
        engine = self._engine
        assert engine is not None, "no engine has made a step"
        if self._trainer.hp_search_backend is None:
            self._trainer.store_flos()
        trainer_part = _TrainerPart(folder, self._trainer, engine.collectives.job)
        return StateSave(folder, {_TAG: engine}, trainer_part, engine.device)


class _TrainerPart:
    """Trainer's own state, random generators and schedule: a small `StatePart`."""

    def __init__(self, folder: Path, trainer: Any, collectives: Collectives) -> None:
        self._folder, self._collectives = folder, collectives
        self.name = "rng_state.pth" if trainer.args.world_size <= 1 else f"rng_state_{trainer.args.process_index}.pth"
        with agreed(collectives, "states in memory: Trainer's part"), writing_to(folder):
            try:
                self._write_small(trainer)
            except RuntimeError as error:  # from torch.save, on a full file system
                raise CheckpointError(f"{folder}: cannot be written ({error})") from error

    def write(self) -> None:
        """Does nothing: the constructor wrote everything."""

    def complete(self) -> None:
        """Marks the folder as a complete state. (all ranks)"""
        with agreed(self._collectives, "states in memory: Trainer's state"):
            if self._collectives.rank == 0:
                with writing_to(self._folder):
                    (self._folder / STATE_NAME).write_text(json.dumps({"trainer": True}))

    def _write_small(self, trainer: Any) -> None:
        trainer._save_rng_state(str(self._folder))
        if self._collectives.rank != 0:
            return
        # The engine's checkpoint contains a schedule that the engine steps.
        if type(trainer.lr_scheduler).__name__ != "DeepSpeedSchedulerWrapper":
            torch.save(trainer.lr_scheduler.state_dict(), self._folder / _SCHEDULER)
        state = copy(trainer.state)
        exported: dict[str, list[Any]] = {name: [] for name in state.stateful_callbacks}
        for exporter in (*trainer.callback_handler.callbacks, trainer.control):
            if type(exporter).__name__ in exported:
                exported[type(exporter).__name__].append(exporter.state())
        state.stateful_callbacks = {name: each[0] if len(each) == 1 else each for name, each in exported.items()}
        state.save_to_json(str(self._folder / _TRAINER_STATE))


def _digest(trainer: Any) -> str:
    """Returns a digest of a call of `train()`: its arguments, the model's parameters, the number of samples."""
    dataset = trainer.train_dataset
    model = [(name, list(param.shape), param.requires_grad) for name, param in trainer.model.named_parameters()]
    facts = [
        [str(getattr(trainer.args, name, None)) for name in _ARGUMENTS],
        model if trainer.model_init is None else [],
        len(dataset) if hasattr(dataset, "__len__") else None,
    ]
    return digest_of(facts)


def _asked(asked: Any, output_dir: str) -> tuple[str | None, int | None]:
    """Returns the checkpoint that `resume_from_checkpoint` names, and its step; (None, None) if there is none."""
    if asked is True:
        found = [path for path in Path(output_dir).glob("checkpoint-*") if path.name[len("checkpoint-") :].isdecimal()]
        asked = max(found, key=lambda path: int(path.name.rpartition("-")[2]), default=None)
    if not asked:
        return None, None
    try:
        return str(asked), int(json.loads(read_at_most(Path(asked, _TRAINER_STATE), _MOST_NBYTES))["global_step"])
    except (OSError, ValueError, KeyError, TypeError):
        return str(asked), None
