"""`Axis`: the interface of a mesh axis to set-up, engine, checkpoints, traffic and estimates.

The axes are in `parallel/`; `parallel/axes.py` has their table. A new axis is one class and one line of that table.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, ClassVar

from torch import nn

from zeroaccel.checkpoint.save_plan import WholeModel
from zeroaccel.comm.collectives import Collectives
from zeroaccel.comm.topology import Topology
from zeroaccel.config import Config
from zeroaccel.config.parallel import ParallelConfig
from zeroaccel.engine import EngineBase
from zeroaccel.errors import ConfigError, UsageError
from zeroaccel.optim.optimizer_kinds import OptimizerKind
from zeroaccel.setup.axis_estimate import AxisEstimate
from zeroaccel.setup.cut_check import Cut
from zeroaccel.setup.job import JobSpec
from zeroaccel.setup.optimizer_plan import OptimizerPlan
from zeroaccel.zero.build_units import refuse_split
from zeroaccel.zero.from_config import EngineSettings
from zeroaccel.zero.layout import Split


class Axis:
    """One axis of the mesh with several ranks, from the view of this rank.

    Set-up calls, on all ranks and in this order:

    ```text
    join       makes the process groups of the axis
    divide     reduces the model to this rank's part, before parameters are laid out
    check      refuses settings that the axis does not support
    connect    connects the engine's collectives with the ranks of the axis
    install    changes the model's forward, before the engine's hooks are on it
    attach     completes the engine
    cut        returns a way to compute without the axis, so that set-up can compare
    undo       restores the model; also after a failure
    ```

    Every method does nothing by default.

    Attributes:
        name: name in `ParallelConfig` and in traffic reports.
        divides_parameters: True if a rank has a part of the model's parameters, or of their elements.
        refuses_compiled: reason why a compiled model cannot be used, or "".
    """

    name: ClassVar[str]
    divides_parameters: ClassVar[bool] = True
    refuses_compiled: ClassVar[str] = ""

    @classmethod
    def join(cls, mesh: ParallelConfig, topology: Topology, job: JobSpec) -> Axis | None:
        """Makes the groups of the axis; returns None if the axis has one rank. (all ranks)"""
        raise NotImplementedError

    @classmethod
    def check_launched(cls, mesh: ParallelConfig, sources: Mapping[str, str]) -> None:
        """Refuses a size that the launcher requests if only the script can set it.

        Args:
            sources: where each launch setting was written.
        """

    @classmethod
    def estimate(cls, mesh: ParallelConfig) -> AxisEstimate | None:
        """Returns the axis' part of an estimate; None if it has one rank, or changes neither memory nor traffic."""
        return None

    @property
    def engine_type(self) -> type[EngineBase] | None:
        """Engine class that this axis needs; None if every class is suitable."""
        return None

    @property
    def splits(self) -> Mapping[int, Split]:
        """Maps id(parameter) to the axis' split of it; other ranks have the other parts."""
        return {}

    @property
    def cut(self) -> Cut | None:
        """The cut that set-up compares with the whole model after making the engine; None to compare nothing."""
        return None

    @property
    def whole(self) -> WholeModel | None:
        """The model before the axis removed parameters, for checkpoints; None if it removed none."""
        return None

    def divide(self, model: nn.Module, others: Sequence[Axis]) -> None:
        """Reduces the model to this rank's part, or records which parameters the axis will cut. No collectives.

        Args:
            others: the preceding axes.
        """

    def keep(self, modules: Iterable[nn.Module]) -> None:
        """Called after another axis has reduced the model to these modules."""

    def splits_of(self, module: nn.Module) -> Mapping[str, Split]:
        """Returns the axis' splits of a module's parameters, by their names in the module."""
        return {}

    def own_params(self, optimizer: Any, params: Any) -> tuple[Any, Any]:
        """Removes the parameters that this rank no longer has from an optimizer, or from parameters for one."""
        return optimizer, params

    def check(
        self, config: Config, settings: EngineSettings, optimizer: OptimizerPlan, names: Mapping[int, str]
    ) -> None:
        """Refuses settings that the axis does not support.

        Args:
            names: id(parameter) -> fqn.

        Raises:
            ConfigError, UsageError: a setting or the optimizer is incompatible with the axis.
        """

    def facts(self) -> Mapping[str, object]:
        """Returns the facts that the ranks must agree on, by name."""
        return {}

    def connect(self, collectives: Collectives) -> None:
        """Connects the engine's collectives with the ranks of the axis, and has their traffic counted."""

    def install(self, model: nn.Module) -> None:
        """Changes the model's forward. No collectives; an error on one rank is raised on all."""

    def attach(self, engine: EngineBase, loader: Any) -> None:
        """Completes an engine. (all ranks)

        Args:
            loader: loader of the training data, or None.
        """

    def undo(self) -> None:
        """Undoes `divide` and `install` on the model; called when the engine is destroyed."""


def require_plain(config: Config, plain: Mapping[str, object], axis: str, parallelism: str) -> None:
    """Refuses values of `zero_optimization` keys that an axis does not support.

    Args:
        plain: the supported value of each key.
        axis: name of the axis in `ParallelConfig`.
        parallelism: name of its parallelism, for messages.

    Raises:
        ConfigError: a key has another value.
    """
    for key, value in plain.items():
        got = getattr(config.zero_optimization, key)
        if got != value:
            raise ConfigError(
                config.where(f"zero_optimization.{key}"),
                expected=f"{json.dumps(value)} with {parallelism} parallelism",
                got=got,
                fix=f"remove the key, or leave {axis} at 1",
            )


def require_uncoupled(
    optimizer: OptimizerPlan, splits: Mapping[int, Split], names: Mapping[int, str], axis: str, parallelism: str
) -> None:
    """Refuses an optimizer that needs more of a parameter than the part that an axis leaves on this rank.

    Args:
        splits: id(parameter) -> the axis' split of it.
        names: id(parameter) -> fqn.

    Raises:
        UsageError: its rule sums over several parameters, or uses the whole of a tensor that is split.
    """
    if OptimizerKind.COUPLED in optimizer.group_kinds:
        raise UsageError(
            f"optimizer {type(optimizer.optimizer).__name__}",
            expected=f"one that updates elements or tensors independently, with {parallelism} parallelism",
            got="one whose rule sums over several parameters",
            fix=f"use an optimizer such as AdamW or SGD, or leave {axis} at 1",
        )
    for param, index in optimizer.groups.items():
        if param in splits and optimizer.group_kinds[index] is OptimizerKind.PER_TENSOR:
            refuse_split(names[param])
