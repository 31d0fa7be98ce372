"""The engine with the calls that save and load it: what `zeroaccel.initialize` returns.

A subclass, since checkpoints are above the engine: `zero/` does not know that there are any. It decides when things
happen and who has to agree; the work is in `save`, `background`, `load` and `weights`.
"""

from __future__ import annotations

import os
from dataclasses import asdict, dataclass
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
from zeroaccel.checkpoint.loader import LoadReport, load_optimizer, load_weights, refresh_copies
from zeroaccel.checkpoint.manifest import Manifest
from zeroaccel.checkpoint.plain_codec import decode, random_state, restore_random_state
from zeroaccel.checkpoint.rank_file import CHUNK_NBYTES
from zeroaccel.checkpoint.rank_file_writer import Staging
from zeroaccel.checkpoint.save import CommitRules, Progress, SaveRequest, prepare
from zeroaccel.checkpoint.save_plan import EngineState, persistent_buffers, ties_of
from zeroaccel.checkpoint.tensor_store import TensorStore
from zeroaccel.checkpoint.weights import consolidated_state_dict, save_model_files, save_weights
from zeroaccel.comm.agree import agreed
from zeroaccel.errors import CheckpointError, EngineStateError
from zeroaccel.logs import logger
from zeroaccel.zero.engine import Engine
from zeroaccel.zero.precision import DynamicLossScale

__all__ = ["CheckpointSettings", "CheckpointingEngine"]

PathLike = str | os.PathLike[str]


@dataclass(frozen=True)
class CheckpointSettings:
    """How an engine saves; the config's `checkpoint` section.

    Attributes:
        background: write beside training.
        staging_nbytes: host memory per rank that a background save copies through.
        keep_last: checkpoints that stay in a folder; None for all.
        random_state: save the random generators too.
    """

    background: bool = False
    staging_nbytes: int = 1 << 30
    keep_last: int | None = None
    random_state: bool = False


@dataclass(frozen=True)
class _Wanted:
    """What `load_checkpoint` is asked to load besides the weights."""

    strict: bool
    optimizer: bool
    scheduler: bool
    progress: bool


class CheckpointingEngine(Engine):
    """An `Engine` that can be saved and resumed. Arguments as of `Engine`.

    Attributes:
        loaded: what the last `load_checkpoint` read; None before.
    """

    def __init__(self, *args: Any, checkpoint: CheckpointSettings | None = None, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._checkpoint_settings = checkpoint or CheckpointSettings()
        settings = self._checkpoint_settings
        self._staging = Staging(settings.staging_nbytes if settings.background else 4 * CHUNK_NBYTES)
        self._saving: BackgroundSave | None = None
        self._half_loaded: str | None = None
        self.loaded: LoadReport | None = None
        if self._is_divided:  # while there is time to think of something else
            logger.warning(
                "the model is divided on another axis of the mesh: save_checkpoint() and the other calls that save or "
                "load it will refuse; engine.iter_named_full_params() gives each rank of that axis its part"
            )

    # -- saving

    def save_checkpoint(
        self,
        save_dir: PathLike,
        tag: object = None,
        client_state: dict[str, Any] | None = None,
        save_latest: bool = True,
        exclude_frozen_parameters: bool = False,
    ) -> bool:
        """Saves everything a resumed run needs into `save_dir/<tag>`. (all ranks)

        With `checkpoint.async_save` it returns at once and the writing goes on beside training; an error in it is
        raised by the next `step()`, save or load.

        Args:
            save_dir: a folder that all ranks see.
            tag: a name, the same on all ranks; `global_step<N>` by default. One that exists is replaced.
            client_state: plain data and tensors of the caller's, given back by `load_checkpoint`; rank 0's counts.
            save_latest: whether a load without a tag finds this one.
            exclude_frozen_parameters: leave out the values of parameters that need no gradient.

        Returns:
            True: it is saved, or on its way.

        Raises:
            CheckpointError: it cannot be written; earlier checkpoints are as they were. Or an earlier save in the
                background failed.
            UsageError: the ranks' tags differ, or something in `client_state` is neither plain data nor a tensor.
            EngineStateError: gradients of unfinished accumulation would be lost.
        """
        self._require_usable("save_checkpoint")
        self._require_one_model("save_checkpoint")
        self._finish_weights()
        self._finish_saving()
        with agreed(self.collectives, "save_checkpoint: state"):
            self._require_boundary()
        request = SaveRequest(
            save_dir,
            f"global_step{self.global_steps}" if tag is None else tag,
            client_state if client_state is not None else {},
            exclude_frozen_parameters,
            CommitRules(save_latest, self._checkpoint_settings.keep_last),
        )
        save = prepare(request, self._holdings(), self._progress(), self.collectives, self._staging)
        if self._checkpoint_settings.background:
            self._saving = BackgroundSave(save)
        else:
            save.write_now(self.collectives)
            logger.info("saved checkpoint %s", save.folder)
        return True

    def save_16bit_model(
        self,
        save_dir: PathLike,
        save_filename: str = "pytorch_model.bin",
        exclude_frozen_parameters: bool = False,
    ) -> bool:
        """Writes the parameters in the dtypes they have in the engine, and the buffers, to one file. (all ranks)

        Rank 0 writes, at every stage; one unit at a time is whole. A name ending in .safetensors is streamed; .bin,
        .pt and .pth are made by `torch.save`, with all weights in rank 0's memory.

        Returns:
            True: it is saved.

        Raises:
            CheckpointError: it cannot be written.
        """
        self._require_usable("save_16bit_model")
        self._require_one_model("save_16bit_model")
        self._finish_weights()
        save_weights(
            Path(save_dir) / save_filename,
            self._holdings(),
            self.collectives,
            exclude_frozen=exclude_frozen_parameters,
        )
        return True

    def save_model(
        self, save_dir: PathLike, *, max_nbytes: int, pickled: bool = False, exclude_frozen_parameters: bool = False
    ) -> list[str]:
        """Writes the model as files of at most `max_nbytes` with an index, as libraries of models read it. (all ranks)

        Returns:
            The names of the files.

        Raises:
            CheckpointError: the folder cannot be written.
        """
        self._require_usable("save_model")
        self._require_one_model("save_model")
        self._finish_weights()
        return save_model_files(
            Path(save_dir),
            self._holdings(),
            self.collectives,
            max_nbytes=max_nbytes,
            pickled=pickled,
            exclude_frozen=exclude_frozen_parameters,
        )

    def consolidated_state_dict(self, exclude_frozen_parameters: bool = False) -> dict[str, Tensor] | None:
        """The whole model's state dict in host memory, on rank 0; None on the others. (all ranks)

        At every stage; one unit at a time is whole, and rank 0 holds a copy of all weights, in the dtypes they have in
        the engine. Tied parameters are one tensor under each of their names.
        """
        self._require_usable("consolidated_state_dict")
        self._require_one_model("consolidated_state_dict")
        self._finish_weights()
        return consolidated_state_dict(self._holdings(), exclude_frozen=exclude_frozen_parameters)

    def wait_for_checkpoint(self) -> None:
        """Returns when no save is running in the background. (all ranks)

        Raises:
            CheckpointError: it failed; on every rank.
        """
        self._finish_saving()

    # -- loading

    def load_checkpoint(
        self,
        load_dir: PathLike,
        tag: object = None,
        load_module_strict: bool = True,
        load_optimizer_states: bool = True,
        load_lr_scheduler_states: bool = True,
        load_module_only: bool = False,
    ) -> tuple[str | None, dict[str, Any]]:
        """Resumes from a checkpoint that any number of ranks saved, at any stage and precision. (all ranks)

        A folder that DeepSpeed wrote, or torch.distributed.checkpoint with the state dicts of FSDP2, can be resumed
        from as well.

        Args:
            tag: which; by default the one that `latest` names. "auto" takes the newest that is valid, whoever wrote
                it, and says which it skipped and why.
            load_module_strict: all names must agree; False loads those that do. Shapes must agree anyway.
            load_optimizer_states: moments and the like, and the param groups' hyperparameters.
            load_lr_scheduler_states: the scheduler's.
            load_module_only: nothing but weights and buffers; training starts at step 0 with them.

        Returns:
            (the checkpoint's folder, the `client_state` it was saved with); (None, {}) for "auto" where there is no
            checkpoint at all.

        Raises:
            CheckpointError: there is none, it is damaged or incomplete, or it does not fit; on every rank. If damage
                showed only while reading, the engine refuses to run until a load succeeds.
        """
        self._require_one_model("load_checkpoint")
        self.keeper.require_free("engine.load_checkpoint()")
        self._require_states_here()
        self._finish_saving()
        self._finish_weights()
        self.reset()
        for unit in self.units:
            if not unit.resident:
                unit.reshard()
        root = Path(os.path.abspath(load_dir))
        wanted = _Wanted(
            load_module_strict,
            load_optimizer_states and not load_module_only and self._shard is not None,
            load_lr_scheduler_states and not load_module_only and self.lr_scheduler is not None,
            not load_module_only,
        )
        if tag == "auto":
            return self._load_newest(root, wanted)
        with agreed(self.collectives, "load_checkpoint: find"):
            folder, store = self._find(root, tag, wanted)
        return str(folder), self._load(folder, store, wanted)

    def _find(self, root: Path, tag: object, wanted: _Wanted) -> tuple[Path, TensorStore]:
        if is_deepspeed_checkpoint(root, tag):
            scheduler = None if self.lr_scheduler is None else type(self.lr_scheduler).__name__
            groups = self._shard.group_of if wanted.optimizer and self._shard is not None else None
            return open_to_resume(root, tag, scheduler_type=scheduler, group_of=groups)
        if (dcp := find_dcp(root, tag)) is not None:
            buffers = {name for name, _ in persistent_buffers(self.module)}
            return dcp, open_dcp(dcp, ties=ties_of(self.module), is_buffer=buffers.__contains__)
        folder, manifest = find_checkpoint(root, tag)
        return folder, TensorStore(folder, manifest)

    def _load_newest(self, root: Path, wanted: _Wanted) -> tuple[str | None, dict[str, Any]]:
        found: list[Path] = []
        skipped: list[str] = []
        with agreed(self.collectives, "load_checkpoint: look around"):
            if self.collectives.rank == 0:
                found, skipped = newest_first(root)
        found, skipped = self.collectives.gather_objects((found, skipped), "load_checkpoint: candidates")[0]
        for reason in skipped:
            logger.warning("skipped a checkpoint: %s", reason)
        for folder in found:
            try:
                with agreed(self.collectives, "load_checkpoint: read"):
                    folder, store = self._find(root, folder.name, wanted)
                return str(folder), self._load(folder, store, wanted)
            except CheckpointMisfit:
                raise  # another model: an older checkpoint would be no answer
            except CheckpointError as error:
                skipped.append(str(error))
                logger.warning("skipped a checkpoint: %s", error)
        if not skipped:
            logger.warning("%s: no checkpoint to resume from", root)
            return None, {}
        raise CheckpointError(f"{root}: no valid checkpoint", got="; ".join(skipped))

    def _load(self, folder: Path, opened: TensorStore, wanted: _Wanted) -> dict[str, Any]:
        manifest = opened.manifest
        self._require_same(folder, manifest)
        holdings, shard, where = self._holdings(), self._shard, f"checkpoint {folder}"
        with agreed(self.collectives, f"{where}: fit"):
            check_model(holdings, manifest, where, strict=wanted.strict)
            if wanted.optimizer and shard is not None:
                check_optimizer(shard, manifest, where)
            if wanted.scheduler:
                self._check_scheduler(manifest, where)
        client_state: dict[str, Any] = {}
        self._half_loaded = str(folder)
        with agreed(self.collectives, f"{where}: read"), opened as store:
            load_weights(holdings, store)
            if wanted.optimizer and shard is not None:
                load_optimizer(shard, store, where)
            self._load_progress(store, wanted)
            client_state = decode(manifest.client_state, store.fetch)
            self.loaded = LoadReport(store.requested_nbytes, store.read_nbytes)
        refresh_copies(self.units)
        if self._tiers is not None:
            with agreed(self.collectives, f"{where}: store"):
                self._tiers.settle()
        self._half_loaded = None
        if self._weights is not None:
            self._weights.broken = None
        return client_state

    def _load_progress(self, store: TensorStore, wanted: _Wanted) -> None:
        manifest = store.manifest
        if wanted.scheduler:
            self._load_scheduler(decode(manifest.lr_scheduler, store.fetch))
        if not wanted.progress:
            return
        self.global_steps = manifest.counters["global_steps"]
        self.micro_steps = manifest.counters["micro_steps"]
        self.global_samples = manifest.counters["global_samples"]
        self.skipped_steps = manifest.counters["skipped_steps"]
        scale = decode(manifest.loss_scale, store.fetch)
        if isinstance(self.loss_scale, DynamicLossScale) and scale["type"] == type(self.loss_scale).__name__:
            self.loss_scale.load_state_dict(scale["state"])
        if manifest.random_state is not None:
            if manifest.world_size == self.collectives.world_size:
                own = manifest.random_state[self.collectives.rank]
                restore_random_state(decode(own, store.fetch), self._device())
            else:
                logger.warning("random state: saved by %d ranks, so it is not restored", manifest.world_size)

    def _load_scheduler(self, saved: dict[str, Any] | None) -> None:
        if saved is None:
            logger.warning("the checkpoint has no scheduler; this run's starts anew")
            return
        self.lr_scheduler.load_state_dict(saved["state"])

    def _check_scheduler(self, manifest: Manifest, where: str) -> None:
        ours = type(self.lr_scheduler).__name__
        if manifest.lr_scheduler is not None and manifest.lr_scheduler["type"] != ours:
            raise CheckpointMisfit(
                f"{where}: the scheduler's type",
                expected=ours,
                got=manifest.lr_scheduler["type"],
                fix="use the same scheduler, or pass load_lr_scheduler_states=False",
            )

    # -- the loop, with a save beside it

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """The model's forward; sharded parameters are gathered as their modules run."""
        self._require_usable("forward")
        return super().forward(*args, **kwargs)

    def step(self) -> None:
        """As `Engine.step`; before weights change it waits for a running save to have copied them.

        Raises:
            CheckpointError: a save in the background failed; on every rank.
        """
        self._require_usable("step")
        if self._saving is not None and self.is_gradient_accumulation_boundary():
            self._saving.wait_copied()
            self._settle()
        super().step()

    def destroy(self) -> None:
        """As `Engine.destroy`, once a running save is done.

        Raises:
            CheckpointError: it failed; on every rank.
        """
        try:
            self._finish_saving()
        finally:
            super().destroy()

    def _finish_saving(self) -> None:
        if self._saving is not None:
            self._saving.wait()
            self._settle()

    def _settle(self) -> None:
        """Asks all ranks how the save in the background stands, and raises on all if it failed on any."""
        saving = self._saving
        assert saving is not None, "nothing to settle"
        finished = saving.finished
        standings = self.collectives.gather_objects(
            (finished, str(saving.error) if saving.error is not None else None), f"checkpoint {saving.tag}: standing"
        )
        errors = {rank: error for rank, (_, error) in enumerate(standings) if error is not None}
        if errors:
            self._saving = None
            saving.abandon()
            self.collectives.barrier(f"checkpoint {saving.tag}: given up")  # nobody opens a file there any more
            saving.discard_folder()
            told = "\n".join(f"{error} [rank {rank}]" for rank, error in errors.items())
            raise CheckpointError(f"checkpoint {saving.tag}: saving in the background failed: {told}")
        if all(done for done, _ in standings):
            self._saving = None

    # -- what there is

    def _holdings(self) -> EngineState:
        ranks = self.collectives
        return EngineState(self.module, self.units, self._shard, ranks.rank, ranks.world_size, ranks.replica)

    def _device(self) -> torch.device:
        return self.units[0].buffers[0].full.device if self.units else torch.device("cpu")

    def _progress(self) -> Progress:
        scheduler = self.lr_scheduler
        return Progress(
            counters={
                "global_steps": self.global_steps,
                "micro_steps": self.micro_steps,
                "global_samples": self.global_samples,
                "skipped_steps": self.skipped_steps,
            },
            loss_scale={"type": type(self.loss_scale).__name__, "state": self.loss_scale.state_dict()},
            lr_scheduler=None
            if scheduler is None or not hasattr(scheduler, "state_dict")
            else {"type": type(scheduler).__name__, "state": scheduler.state_dict()},
            config=self.zero_config,
            sharded=asdict(self.settings.plan),
            random_state=random_state(self._device()) if self._checkpoint_settings.random_state else None,
        )

    def _require_usable(self, call: str) -> None:
        self._require_states_here()
        if self._half_loaded is not None:
            raise EngineStateError(
                f"engine.{call}(): loading {self._half_loaded} failed half way, so the weights are a mixture",
                fix="load another checkpoint first",
            )

    def _finish_weights(self) -> None:
        """Puts an update that runs one step late in force, unless the weights are a mixture anyway."""
        if self._weights is not None and self._weights.broken is None:
            self._weights.finish()

    @property
    def _is_divided(self) -> bool:
        """Other ranks hold other parts of the model, on an axis of the mesh that is not this engine's."""
        return self.collectives.job.world_size != self.collectives.world_size

    def _require_one_model(self, call: str) -> None:
        ranks = self.collectives
        if self._is_divided:
            raise EngineStateError(
                f"engine.{call}(): the model is divided on another axis of the mesh ({ranks.world_size} of the job's "
                f"{ranks.job.world_size} ranks hold this part of it)",
                fix="save engine.iter_named_full_params() on each rank of that axis to a file of its own",
            )

    def _require_boundary(self) -> None:
        if self._backwards or any(held.flat is not None or held.shard is not None for held in self._reducer.gradients):
            raise EngineStateError(
                "engine.save_checkpoint()",
                expected="no gradients that wait for the end of their accumulation, as they would be lost",
                fix="save after the step() at the boundary",
            )

    def _require_same(self, folder: Path, manifest: Manifest) -> None:
        seen = self.collectives.gather_objects((str(folder), manifest.id), "load_checkpoint: which")
        if len({save_id for _, save_id in seen}) > 1:
            raise CheckpointError(
                "load_checkpoint",
                expected="the same checkpoint on all ranks",
                got=", ".join(f"{path} ({save_id}) on rank {rank}" for rank, (path, save_id) in enumerate(seen)),
                fix="load from a folder that all ranks share",
            )
