"""The checkpoint calls of an engine: their checks, the agreement between ranks, and their order with training.

An engine (`zeroaccel/engine.py`) has a `Checkpointer`, to which its calls delegate; the core in `zero/` knows none.
`save`, `background_save`, `loader` and `weights` do the work.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Collection
from contextlib import ExitStack
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from zeroaccel.checkpoint.background_save import BackgroundSave
from zeroaccel.checkpoint.compatibility import CheckpointMisfit, check_model, check_optimizer
from zeroaccel.checkpoint.find import find_checkpoint, newest_first
from zeroaccel.checkpoint.formats.dcp_import import find_dcp, open_dcp
from zeroaccel.checkpoint.formats.deepspeed_checkpoint import is_deepspeed_checkpoint
from zeroaccel.checkpoint.formats.deepspeed_resume import open_to_resume
from zeroaccel.checkpoint.loader import (
    LoadReport,
    load_optimizer,
    load_weights,
    note_files,
    read_buffers,
    refresh_copies,
)
from zeroaccel.checkpoint.manifest import Manifest
from zeroaccel.checkpoint.plain_codec import decode, random_state, restore_random_state
from zeroaccel.checkpoint.rank_file_writer import Staging
from zeroaccel.checkpoint.save import CommitRules, Progress, Save, SaveRequest, prepare
from zeroaccel.checkpoint.save_plan import EngineState, WholeModel, left_out, persistent_buffers
from zeroaccel.checkpoint.tensor_store import TensorStore, UnreadStore
from zeroaccel.checkpoint.weights import Requantize, consolidated_state_dict, save_model_files, save_weights
from zeroaccel.checkpoint.zero_to_fp32 import CHUNK_NBYTES
from zeroaccel.comm.agree import agreed
from zeroaccel.comm.environment import is_in_launcher_memory
from zeroaccel.config.schema import Checkpoint
from zeroaccel.errors import CheckpointError, EngineStateError, Preempted
from zeroaccel.logs import logger
from zeroaccel.telemetry.timeline import named_range
from zeroaccel.zero.engine_core import EngineCore
from zeroaccel.zero.precision import DynamicLossScale

PathLike = str | os.PathLike[str]


@dataclass(frozen=True)
class SavingRules:
    """The facts on which the checkpoints of an engine depend, besides the engine itself.

    Attributes:
        section: section `checkpoint` of the config.
        whole: the model before an axis of the mesh removed parameters; None if no axis did.
        mesh: sizes of the mesh's axes, as words.
    """

    section: Checkpoint = field(default_factory=Checkpoint)
    whole: WholeModel | None = None
    mesh: str = ""


@dataclass(frozen=True)
class SaveOptions:
    """Options of `save_checkpoint`: what to save besides the training, and whether a load without a tag finds it."""

    client_state: dict[str, Any] | None = None
    save_latest: bool = True
    exclude_frozen: bool | None = None


@dataclass(frozen=True)
class LoadOptions:
    """Options of `load_checkpoint`: strictness, and the parts to load besides the weights."""

    strict: bool
    optimizer: bool
    scheduler: bool
    progress: bool


_MOST_LISTINGS = 5  # of a folder from which another job removes checkpoints


class Checkpointer:
    """Saves and loads one engine. `EngineBase` documents the calls; all ranks must make them.

    At most one save runs in the background: the next save or load waits until it has finished, the next update until
    it has copied the tensors.

    Attributes:
        loaded: bytes that the last `load_checkpoint` read; None before.
    """

    def __init__(self, engine: EngineCore, rules: SavingRules) -> None:
        self._engine = engine
        self._whole, self._mesh = rules.whole, rules.mesh
        self._ranks = engine.collectives.job
        self._section = section = rules.section
        staging_nbytes = section.staging_nbytes if section.async_save else 4 * CHUNK_NBYTES
        self._staging = Staging(staging_nbytes, pinned=self._is_on_device)
        self._state_staging = Staging(4 * CHUNK_NBYTES, pinned=self._is_on_device)  # for `begin_save`
        self._copied = threading.Event()  # set when `begin_save` has copied its tensors
        self._copied.set()
        engine.registry.before_write = self._wait_copied
        self._saving: BackgroundSave | None = None
        self._half_loaded: str | None = None
        self.loaded: LoadReport | None = None
        if self._is_divided:  # warn at the start, not at the first save hours later
            logger.warning(
                "the model is divided on another axis of the mesh: save_checkpoint() and the other calls that save or "
                "load it will raise an error; engine.iter_named_full_params() gives each rank of that axis its part"
            )

    # -- saving

    def save_checkpoint(self, save_dir: PathLike, tag: object, options: SaveOptions) -> None:
        self.wait()
        save = self._prepared(save_dir, tag, self._staging, options)
        # After `prepare` the ranks agree on everything, so writing needs no collectives and can run in the background
        # while training issues its own.
        if self._section.async_save:
            self._saving = BackgroundSave(save)
        else:
            with named_range("save checkpoint", save.folder.name):
                save.write_now()
            logger.info("saved checkpoint %s", save.folder)

    def begin_save(self, folder: PathLike, tag: str) -> Save:
        """Prepares a save that the caller writes in a thread and commits, or abandons. (all ranks)

        Updates, loads and `wait` block until the save has copied its tensors.
        """
        save = self._prepared(folder, tag, self._state_staging, SaveOptions())
        self._copied = save.writer.copied
        return save

    def _prepared(self, save_dir: PathLike, tag: object, staging: Staging, options: SaveOptions) -> Save:
        self.prepare_to_save("save_checkpoint")
        engine = self._engine
        with agreed(self._ranks, "save_checkpoint: state"):
            self._require_boundary()
            excludes = options.exclude_frozen
            excludes = self._section.exclude_frozen_parameters if excludes is None else excludes
            parameters, base = left_out(engine.module, excludes)
        request = SaveRequest(
            save_dir,
            f"global_step{engine.global_steps}" if tag is None else tag,
            options.client_state if options.client_state is not None else {},
            parameters,
            base,
            CommitRules(options.save_latest, self._section.keep_last, is_shared=not is_in_launcher_memory(save_dir)),
        )
        return prepare(request, self.state(), self._progress(), staging)

    def save_and_leave(self, save_dir: PathLike) -> None:
        """Saves a checkpoint, waits until it is complete, and raises Preempted."""
        self.save_checkpoint(save_dir, None, SaveOptions())
        self.wait()
        raise Preempted(f"saved checkpoint {os.path.abspath(save_dir)} at step {self._engine.global_steps}")

    def save_16bit_model(self, path: PathLike, *, exclude_frozen: bool, requantize: Requantize) -> None:
        self.prepare_to_save("save_16bit_model")
        save_weights(Path(path), self.state(), exclude_frozen=exclude_frozen, requantize=requantize)

    def save_model(
        self, save_dir: PathLike, max_nbytes: int, *, pickled: bool, exclude_frozen: bool, requantize: Requantize
    ) -> list[str]:
        self.prepare_to_save("save_model")
        return save_model_files(
            Path(save_dir),
            self.state(),
            max_nbytes=max_nbytes,
            pickled=pickled,
            exclude_frozen=exclude_frozen,
            requantize=requantize,
        )

    def consolidated_state_dict(self, *, exclude_frozen: bool, also: Collection[str] = ()) -> dict[str, Tensor] | None:
        self.prepare_to_save("consolidated_state_dict")
        return consolidated_state_dict(self.state(), exclude_frozen=exclude_frozen, also=also)

    def prepare_to_save(self, call: str) -> None:
        """Finishes a delayed update; raises if the weights are incomplete, mixed or divided between ranks."""
        self._engine.require_states_loaded()
        self.require_intact(call)
        self._require_one_model(call)
        self._finish_update()

    # -- loading

    def load_checkpoint(
        self, load_dir: PathLike, tag: object, options: LoadOptions
    ) -> tuple[str | None, dict[str, Any]]:
        engine = self._engine
        self._prepare_to_load()
        root = Path(os.path.abspath(load_dir))
        options = replace(
            options,
            optimizer=options.optimizer and engine.sharded_optimizer is not None,
            scheduler=options.scheduler and engine.lr_scheduler is not None,
        )
        if tag == "auto":
            return self._load_newest(root, options)
        with agreed(self._ranks, "load_checkpoint: find"):
            folder, store = self._find(root, tag, options)
        return str(folder), self._load(folder, store, options)

    def _prepare_to_load(self) -> None:
        engine = self._engine
        self._require_one_model("load_checkpoint")
        engine.registry.require_free("engine.load_checkpoint()")
        engine.require_states_loaded()
        self.wait()
        self._finish_update()
        if engine.weight_update is not None:
            engine.weight_update.forget()
        # The load writes shards and masters only, so drop old gradients and unsharded weights.
        engine.reset()
        for unit in engine.units:
            if not unit.persistent:
                unit.reshard()

    def _find(self, root: Path, tag: object, options: LoadOptions) -> tuple[Path, TensorStore]:
        engine = self._engine
        if is_deepspeed_checkpoint(root, tag):
            scheduler = None if engine.lr_scheduler is None else type(engine.lr_scheduler).__name__
            groups = (
                engine.sharded_optimizer.group_of
                if options.optimizer and engine.sharded_optimizer is not None
                else None
            )
            return open_to_resume(root, tag, scheduler_type=scheduler, group_of=groups)
        if (dcp := find_dcp(root, tag)) is not None:
            whole = self._whole
            buffers = {name for name, _ in persistent_buffers(engine.module)} | set(whole.buffers if whole else ())
            return dcp, open_dcp(dcp, ties=self.state().ties, is_buffer=buffers.__contains__)
        folder, manifest = find_checkpoint(root, tag, complete=not is_in_launcher_memory(root))
        return folder, TensorStore(folder, manifest)

    def _load_newest(self, root: Path, options: LoadOptions) -> tuple[str | None, dict[str, Any]]:
        for attempt in range(_MOST_LISTINGS):
            candidates: list[Path] = []
            skipped: list[str] = []
            with agreed(self._ranks, "load_checkpoint: list"):
                if self._ranks.rank == 0:
                    candidates, skipped = newest_first(root)
            candidates, skipped = self._ranks.gather_objects((candidates, skipped), "load_checkpoint: candidates")[0]
            for reason in skipped:
                logger.warning("skipped a checkpoint: %s", reason)
            for folder in candidates:
                try:
                    with agreed(self._ranks, "load_checkpoint: read"):
                        folder, store = self._find(root, folder.name, options)
                    return str(folder), self._load(folder, store, options)
                except CheckpointMisfit:
                    raise  # a different model: older checkpoints do not fit either
                except (CheckpointError, FileNotFoundError) as error:
                    skipped.append(str(error))
                    logger.warning("skipped a checkpoint: %s", error)
            are_there = [folder.is_dir() for folder in candidates]
            if all(self._ranks.gather_objects(all(are_there), "load_checkpoint: candidates")):
                break
            if attempt + 1 < _MOST_LISTINGS:
                logger.warning("%s: another job has removed checkpoints; reading the list again", root)
        if not skipped:
            logger.warning("%s: no checkpoint to resume from", root)
            return None, {}
        raise CheckpointError(f"{root}: no valid checkpoint", got="; ".join(skipped))

    def _load(self, folder: Path, opened: TensorStore, options: LoadOptions) -> dict[str, Any]:
        engine = self._engine
        manifest = opened.manifest
        self._require_same(folder, manifest)
        state, optimizer, where = self.state(), engine.sharded_optimizer, f"checkpoint {folder}"
        what = f"checkpoint {folder.name}"  # the path of the folder may differ between machines
        with agreed(self._ranks, f"{what}: fit"):
            check_model(state, manifest, where, strict=options.strict)
            if options.optimizer and optimizer is not None:
                check_optimizer(optimizer, manifest, where)
            if options.scheduler:
                self._check_scheduler(manifest, where)
        client_state: dict[str, Any] = {}
        with named_range("load", what), ExitStack() as files:
            with agreed(self._ranks, f"{what}: buffers"):
                store = files.enter_context(opened)
                buffers = read_buffers(state, store)
            # From here on weights change in place. If the files turn out to be damaged, the weights are a mixture and
            # the engine refuses to run: a second copy of all states, for a rollback, would take too much memory.
            self._half_loaded = str(folder)
            with agreed(self._ranks, f"{what}: read"):
                load_weights(state, store, buffers)
                if options.optimizer and optimizer is not None:
                    load_optimizer(optimizer, store, where)
                self._load_progress(store, options)
                client_state = decode(manifest.client_state, store.fetch)
                self.loaded = LoadReport(store.requested_nbytes, store.read_nbytes)
        refresh_copies(engine.units)
        with agreed(self._ranks, f"{what}: store"):
            engine.tier_set.settle()
        self._half_loaded = None
        if engine.weight_update is not None:
            engine.weight_update.broken = None
        return client_state

    def files_to_read(self, root: Path, tag: str) -> set[str]:
        """Returns the names of the rank files that this rank would read."""
        folder, manifest = find_checkpoint(root, tag, complete=False)
        state, store, where = self.state(), UnreadStore(folder, manifest), f"checkpoint {folder}"
        check_model(state, manifest, where, strict=True)
        if state.optimizer is not None:
            check_optimizer(state.optimizer, manifest, where)
        note_files(state, store, where)
        return store.names

    def _load_progress(self, store: TensorStore, options: LoadOptions) -> None:
        engine = self._engine
        manifest = store.manifest
        if options.scheduler and manifest.lr_scheduler is None:
            logger.warning("the checkpoint has no scheduler; the scheduler of this run starts from the beginning")
        elif options.scheduler:
            engine.lr_scheduler.load_state_dict(decode(manifest.lr_scheduler, store.fetch)["state"])
        if not options.progress:
            return
        engine.global_steps = manifest.counters["global_steps"]
        engine.micro_steps = manifest.counters["micro_steps"]
        engine.global_samples = manifest.counters["global_samples"]
        engine.skipped_steps = manifest.counters["skipped_steps"]
        scale = decode(manifest.loss_scale, store.fetch)
        if isinstance(engine.loss_scale, DynamicLossScale) and scale["type"] == type(engine.loss_scale).__name__:
            engine.loss_scale.load_state_dict(scale["state"])
        if manifest.random_state is not None:
            if manifest.world_size != self._ranks.world_size:
                logger.warning("random state: not restored, because %d ranks saved it", manifest.world_size)
                return
            states = decode(manifest.random_state[self._ranks.rank], store.fetch)
            if states.get("mesh", self._mesh) != self._mesh:
                # Ranks that share layers could draw different numbers, and ranks with different samples equal ones.
                logger.warning(
                    "random state: not restored, because it was saved on mesh %s, not %s", states["mesh"], self._mesh
                )
                return
            restore_random_state(states, self._device())

    def _check_scheduler(self, manifest: Manifest, where: str) -> None:
        ours = type(self._engine.lr_scheduler).__name__
        if manifest.lr_scheduler is not None and manifest.lr_scheduler["type"] != ours:
            raise CheckpointMisfit(
                f"{where}: the scheduler's type",
                expected=ours,
                got=manifest.lr_scheduler["type"],
                fix="use the same scheduler, or pass load_lr_scheduler_states=False",
            )

    # -- a save in the background

    def before_update(self) -> None:
        """Waits until the running save has copied the weights; the engine calls it before they change.

        Raises:
            CheckpointError: the save failed; raised on every rank.
        """
        self._wait_copied()
        if self._saving is not None:
            self._agree_on_outcome(self._saving)

    def _wait_copied(self) -> None:
        self._copied.wait()
        if self._saving is not None:
            self._saving.wait_copied()

    def wait(self) -> None:
        """Waits for the save in the background to end, and for a save of `begin_save` to copy its tensors.

        Raises:
            CheckpointError: the save failed; raised on every rank.
        """
        self._copied.wait()
        if self._saving is not None:
            self._saving.wait()
            self._agree_on_outcome(self._saving)

    def close(self) -> None:
        """Waits for this rank's part of a save in the background, without the other ranks.

        Raises:
            CheckpointError: the save failed here; on rank 0, also if it failed on another rank.
        """
        self._copied.wait()
        saving, self._saving = self._saving, None
        if saving is not None:
            saving.wait()
            if saving.error is not None:
                saving.abandon()
                raise CheckpointError(f"checkpoint {saving.tag}: the background save failed: {saving.error}")

    def _agree_on_outcome(self, saving: BackgroundSave) -> None:
        """Gathers the ranks' progress with a save; raises on all ranks if it failed on any. (all ranks)"""
        finished = saving.finished
        outcomes = self._ranks.gather_objects(
            (finished, str(saving.error) if saving.error is not None else None), f"checkpoint {saving.tag}: standing"
        )
        errors = {rank: error for rank, (_, error) in enumerate(outcomes) if error is not None}
        if errors:
            self._saving = None
            saving.abandon()
            # After the barrier no rank opens a file in the folder, so it can be removed.
            self._ranks.barrier(f"checkpoint {saving.tag}: given up")
            saving.discard_folder()
            reasons = "\n".join(f"{error} [rank {rank}]" for rank, error in errors.items())
            raise CheckpointError(f"checkpoint {saving.tag}: the background save failed: {reasons}")
        if all(done for done, _ in outcomes):
            self._saving = None

    # -- saved state

    def state(self) -> EngineState:
        """Returns the model, units and optimizer, for the functions that save and load them."""
        engine = self._engine
        return EngineState(engine.module, engine.units, engine.sharded_optimizer, engine.collectives, self._whole)

    def _device(self) -> torch.device:
        return self._engine.units[0].buffers[0].full.device if self._engine.units else torch.device("cpu")

    @property
    def _is_on_device(self) -> bool:
        return self._device().type != "cpu"

    def _progress(self) -> Progress:
        engine = self._engine
        scheduler = engine.lr_scheduler
        return Progress(
            counters={
                "global_steps": engine.global_steps,
                "micro_steps": engine.micro_steps - self._open_micro_steps(),
                "global_samples": engine.global_samples,
                "skipped_steps": engine.skipped_steps,
            },
            loss_scale={"type": type(engine.loss_scale).__name__, "state": engine.loss_scale.state_dict()},
            lr_scheduler=None
            if scheduler is None or not hasattr(scheduler, "state_dict")
            else {"type": type(scheduler).__name__, "state": scheduler.state_dict()},
            config=engine.zero_config,
            sharded=asdict(engine.settings.plan),
            random_state={**random_state(self._device()), "mesh": self._mesh}
            if self._section.save_random_state
            else None,
        )

    # -- checks

    def require_intact(self, call: str) -> None:
        """Raises EngineStateError if the last load failed after it had changed weights."""
        if self._half_loaded is not None:
            raise EngineStateError(
                f"engine.{call}(): the weights are incomplete, because loading {self._half_loaded} failed halfway",
                fix="load another checkpoint first",
            )

    def _finish_update(self) -> None:
        """Applies an update that runs one step late, unless the weights already are a mixture of two steps."""
        if self._engine.weight_update is not None and self._engine.weight_update.broken is None:
            self._engine.weight_update.finish()

    @property
    def _is_divided(self) -> bool:
        """True if the program itself splits the model over another axis of the mesh."""
        ranks = self._engine.collectives
        is_ours = ranks.parts is not None or self._whole is not None
        return not is_ours and ranks.job.world_size != ranks.world_size

    def _require_one_model(self, call: str) -> None:
        ranks = self._engine.collectives
        if self._is_divided:
            raise EngineStateError(
                f"engine.{call}(): the model is divided on another axis of the mesh ({ranks.world_size} of the job's "
                f"{ranks.job.world_size} ranks hold this part of it)",
                fix="on each rank of that axis, save engine.iter_named_full_params() to a separate file",
            )

    def _require_boundary(self) -> None:
        if not self._engine.has_gradients:
            return
        if not self._engine.settings.loop.saves_within_accumulation:
            raise EngineStateError(
                "engine.save_checkpoint()",
                expected="no gradients of an unfinished accumulation, because a checkpoint does not contain them",
                fix="save after the step() at the boundary",
            )
        logger.warning(
            "engine.save_checkpoint(): the checkpoint omits the gradients of %d micro-steps of an unfinished "
            "accumulation; a run that resumes from it restarts the accumulation",
            self._open_micro_steps(),
        )

    def _open_micro_steps(self) -> int:
        """Returns the number of micro-steps since the last boundary; checkpoints omit their gradients."""
        engine = self._engine
        return engine.micro_steps % engine.settings.accumulation if engine.has_gradients else 0

    def _require_same(self, folder: Path, manifest: Manifest) -> None:
        ids = self._ranks.gather_objects((str(folder), manifest.id), "load_checkpoint: which")
        if len({save_id for _, save_id in ids}) > 1:
            raise CheckpointError(
                "load_checkpoint",
                expected="the same checkpoint on all ranks",
                got=", ".join(f"{path} ({save_id}) on rank {rank}" for rank, (path, save_id) in enumerate(ids)),
                fix="load from a folder that is shared between all machines",
            )
