"""The part of `Accelerator` that saves a whole run and resumes it: `save_state`, `load_state` and what belongs to them.

A mixin over what is prepared. Chooses folders (`project.py`), gathers the parts of the run,
and leaves files to `accelerate/run_state.py`. Weights for other programs are another thing (`save_model`).
"""

from __future__ import annotations

import os
from collections import OrderedDict
from collections.abc import Callable
from pathlib import Path
from typing import Any

from torch.utils.data import DataLoader
from torch.utils.hooks import RemovableHandle

from zeroaccel.accelerate.accelerator_state import AcceleratorState
from zeroaccel.accelerate.preparation import Prepared
from zeroaccel.accelerate.run_state import RunParts, load_run, require_stateful, save_run
from zeroaccel.comm.agree import from_rank_0
from zeroaccel.comm.collectives import Collectives
from zeroaccel.data import PreparedLoader, skip_first_batches
from zeroaccel.errors import CheckpointError, UsageError
from zeroaccel.project import (
    ProjectConfiguration,
    next_state_folder,
    prune_states,
    saved_states,
)

__all__ = ["RunSaving"]

PathLike = str | os.PathLike[str]
SaveHook = Callable[[list[Any], list[Any], str], None]
LoadHook = Callable[[list[Any], str], None]


class RunSaving:
    """Mixed into `Accelerator`, which sets the attributes.

    Attributes:
        state: of the accelerator.
        prepared, dataloaders: everything that went through `prepare`, in order.
        collectives: of the process.
        step: micro-steps that `accumulate` has counted.
        project_configuration: folders and limits.
    """

    state: AcceleratorState
    prepared: list[Prepared]
    dataloaders: list[PreparedLoader]
    collectives: Collectives
    step: int
    project_configuration: ProjectConfiguration

    def _start_saving(self, project_dir: PathLike | None, configuration: ProjectConfiguration | None) -> None:
        """To be called once, by `Accelerator.__init__`."""
        self.project_configuration = configuration or ProjectConfiguration()
        if project_dir is not None:
            if self.project_configuration.project_dir not in (None, os.fspath(project_dir)):
                raise UsageError(
                    "Accelerator(project_dir, project_config)",
                    expected="one project folder",
                    got=f"{os.fspath(project_dir)} and {self.project_configuration.project_dir}",
                    fix="leave one of them out",
                )
            self.project_configuration.set_directories(project_dir)
        self._objects: list[Any] = []
        self._save_hooks: OrderedDict[int, SaveHook] = OrderedDict()
        self._load_hooks: OrderedDict[int, LoadHook] = OrderedDict()

    @property
    def project_dir(self) -> str | None:
        """Where states go."""
        return self.project_configuration.project_dir

    @property
    def logging_dir(self) -> str | None:
        """Where trackers write."""
        return self.project_configuration.logging_dir

    @property
    def save_iteration(self) -> int:
        """Number of the next state, where they are numbered."""
        return self.project_configuration.iteration

    def register_for_checkpointing(self, *objects: Any) -> None:
        """Makes objects part of every state, in the order of the calls.

        Args:
            objects: with `state_dict()`, of plain data and tensors, and `load_state_dict()`. Each rank has its own.

        Raises:
            UsageError: one lacks the methods, or is registered already.
        """
        for obj in objects:
            require_stateful(obj)
            if any(obj is other for other in (*self._objects, *self.dataloaders)):
                raise UsageError(
                    f"register_for_checkpointing({type(obj).__name__})",
                    expected="each object once",
                    got="one that is in",
                )
            if any(obj is held for item in self.prepared for held in (item.engine, item.optimizer, *item.schedulers)):
                raise UsageError(
                    f"register_for_checkpointing({type(obj).__name__})",
                    expected="an object that prepare() does not know",
                    got="one that it returned, which every state has already",
                )
            self._objects.append(obj)

    def register_save_state_pre_hook(self, hook: SaveHook) -> RemovableHandle:
        """`hook(models, weights, folder)` is called on every rank before a state is saved; `weights` is empty.

        Weights are sharded then: `accelerator.get_state_dict(model)` gathers them.
        """
        return _hooked(self._save_hooks, hook)

    def register_load_state_pre_hook(self, hook: LoadHook) -> RemovableHandle:
        """`hook(models, folder)` is called on every rank before a state is loaded."""
        return _hooked(self._load_hooks, hook)

    def save_state(self, output_dir: PathLike | None = None, safe_serialization: bool = True) -> str:
        """Saves everything a resumed run needs: models, optimizers, schedules, positions of loaders, random numbers and
        registered objects. (all ranks)

        Args:
            output_dir: a folder that all ranks share; a state in it is replaced. By default the next numbered one of
                the project, of which the oldest above `total_limit` are removed.
            safe_serialization: True; nothing is pickled.

        Returns:
            The folder.

        Raises:
            CheckpointError: it cannot be written; on every rank.
            UsageError: something is not plain data and tensors, which is named; or there is no folder.
            EngineStateError: in the middle of an accumulation, whose gradients would be lost.
        """
        if not safe_serialization:
            raise UsageError(
                "save_state(safe_serialization)", expected="True, as a state is never pickled", got=safe_serialization
            )
        project = self.project_configuration
        numbered = output_dir is None
        folder = Path(output_dir) if output_dir is not None else self._next_folder()
        models = [item.engine for item in self.prepared]
        for hook in list(self._save_hooks.values()):
            hook(models, [], str(folder))
        saved = save_run(folder, self._parts(), self.collectives, self.state.partial.device)
        if numbered:
            project.iteration += 1
            if self.collectives.rank == 0:
                background = any(item.config.checkpoint.async_save for item in self.prepared)
                prune_states(project, in_flight=1 if background else 0)
        return str(saved)

    def load_state(self, input_dir: PathLike | None = None) -> str:
        """Goes on where a state was saved: to be called with the same things prepared and registered. (all ranks)

        Loaders go on behind the last batch that was given. A loop over epochs starts at `dataloader.epoch`.

        Args:
            input_dir: the folder; by default the project's newest complete state.

        Returns:
            The folder.

        Raises:
            CheckpointError: there is no state, it is damaged, or does not fit; on every rank.
        """
        project = self.project_configuration
        folder = Path(input_dir) if input_dir is not None else self._newest_folder()
        models = [item.engine for item in self.prepared]
        for hook in list(self._load_hooks.values()):
            hook(models, str(folder))
        parts = self._parts()
        iteration = load_run(folder, parts, self.collectives, self.state.partial.device)
        self.step = parts.counters["step"]
        if project.automatic_checkpoint_naming:
            project.iteration = iteration + 1
        return str(folder)

    def skip_first_batches(self, dataloader: DataLoader[Any], num_batches: int = 0) -> DataLoader[Any]:
        """`dataloader` with each of its epochs starting at batch `num_batches`.

        Not needed after `load_state`, which sets positions; no batch is skipped twice with both.
        """
        return skip_first_batches(dataloader, num_batches)

    def _parts(self) -> RunParts:
        schedulers = [
            scheduler for item in self.prepared for scheduler in item.schedulers if not scheduler.engine_driven
        ]
        return RunParts(
            [item.engine for item in self.prepared],
            schedulers,
            self.dataloaders,
            self._objects,
            {"step": self.step},
            self.project_configuration.iteration,
        )

    def _next_folder(self) -> Path:
        project = self.project_configuration
        if not project.automatic_checkpoint_naming:
            raise UsageError(
                "save_state()",
                expected="a folder",
                got=None,
                fix="pass one, or make Accelerator(project_config=ProjectConfiguration(project_dir=..., "
                "automatic_checkpoint_naming=True))",
            )
        return from_rank_0(self.collectives, lambda: next_state_folder(project), "save_state: next folder")

    def _newest_folder(self) -> Path:
        project = self.project_configuration

        def newest() -> Path:
            if not (states := saved_states(project)):
                raise CheckpointError(f"{project.project_dir}/checkpoints: no complete state to load")
            return states[-1]

        return from_rank_0(self.collectives, newest, "load_state: newest folder")


def _hooked(hooks: OrderedDict[int, Any], hook: Any) -> RemovableHandle:
    handle = RemovableHandle(hooks)
    hooks[handle.id] = hook
    return handle
