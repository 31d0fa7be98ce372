"""`Axis`: what set-up, engine, checkpoints, traffic and estimates know of an axis of the mesh.

The axes themselves are in `parallel/`; `parallel/axes.py` has the table of them. A new axis is one class and one line
of that table.
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
from zeroaccel.errors import ConfigError, UsageError
from zeroaccel.optim.optimizer_kinds import OptimizerKind
from zeroaccel.setup.axis_estimate import AxisEstimate
from zeroaccel.setup.cut_check import Cut
from zeroaccel.setup.job import JobSpec
from zeroaccel.setup.optimizer_plan import OptimizerPlan
from zeroaccel.zero.build_units import refuse_split
from zeroaccel.zero.engine_base import EngineBase
from zeroaccel.zero.from_config import EngineSettings
from zeroaccel.zero.layout import Split


class Axis:
    """One axis of the mesh that has several ranks, as this rank sees it.

    Set-up calls, on all ranks and in this order:

    ```text
    join       makes the process groups of the axis
    divide     reduces the model to what this rank computes with, before parameters are laid out
    check      refuses settings that the axis does not support
    connect    tells the engine's collectives about the ranks of the axis
    install    changes the model's forward, before the engine's hooks are on it
    attach     completes the engine
    cut        says how to compute without the axis, so that set-up can compare
    undo       gives the model back as it was; also after a failure
    ```

    Every method does nothing by default.

    Attributes:
        name: as in `ParallelConfig` and in traffic reports.
        divides_parameters: a rank has a part of the model's parameters, or of their elements.
        refuses_compiled: why a compiled model cannot be used; "" where it can.
    """

    name: ClassVar[str]
    divides_parameters: ClassVar[bool] = True
    refuses_compiled: ClassVar[str] = ""

    @classmethod
    def join(cls, mesh: ParallelConfig, topology: Topology, job: JobSpec) -> Axis | None:
        """Makes the groups of the axis; None where it has one rank. (all ranks)"""
        raise NotImplementedError

    @classmethod
    def check_launched(cls, mesh: ParallelConfig, sources: Mapping[str, str]) -> None:
        """Refuses a size that the launcher asks for, where the script has to know of it.

        Args:
            sources: launch setting -> where it was written.
        """

    @classmethod
    def estimate(cls, mesh: ParallelConfig) -> AxisEstimate | None:
        """The axis' part of an estimate; None where it has one rank, or changes neither memory nor traffic."""
        return None

    @property
    def engine_type(self) -> type[EngineBase] | None:
        """The class that an engine on this axis needs; None where any will do."""
        return None

    @property
    def splits(self) -> Mapping[int, Split]:
        """id(parameter) -> how the axis cuts it; other ranks have the other parts."""
        return {}

    @property
    def cut(self) -> Cut | None:
        """What set-up compares with the whole model once the engine is made; None where there is nothing to compare."""
        return None

    @property
    def whole(self) -> WholeModel | None:
        """The model before the axis took parameters away, for checkpoints; None where it took none."""
        return None

    def divide(self, model: nn.Module, others: Sequence[Axis]) -> None:
        """Reduces the model to this rank's part, or notes which parameters it will cut. No collectives.

        Args:
            others: the axes that came before.
        """

    def keep(self, modules: Iterable[nn.Module]) -> None:
        """Another axis has reduced the model to these modules."""

    def splits_of(self, module: nn.Module) -> Mapping[str, Split]:
        """How the axis cuts the parameters of a module, by their names in it."""
        return {}

    def own_params(self, optimizer: Any, params: Any) -> tuple[Any, Any]:
        """An optimizer, or parameters for one, without the parameters that this rank no longer has."""
        return optimizer, params

    def check(
        self, config: Config, settings: EngineSettings, optimizer: OptimizerPlan, names: Mapping[int, str]
    ) -> None:
        """Refuses settings that the axis does not support.

        Args:
            names: id(parameter) -> fqn.

        Raises:
            ConfigError, UsageError: a setting, or the optimizer, does not go with the axis.
        """

    def facts(self) -> Mapping[str, object]:
        """What the ranks have to have in common, by name."""
        return {}

    def connect(self, collectives: Collectives) -> None:
        """Tells the engine's collectives about the ranks of the axis, and has their traffic counted."""

    def install(self, model: nn.Module) -> None:
        """Changes the model's forward. No collectives; what raises on one rank raises on all."""

    def attach(self, engine: EngineBase, loader: Any) -> None:
        """Completes an engine. (all ranks)

        Args:
            loader: of the training data; None without.
        """

    def undo(self) -> None:
        """Undoes `divide` and `install` as far as the model is concerned; called when the engine is destroyed."""


def require_plain(config: Config, plain: Mapping[str, object], axis: str, parallelism: str) -> None:
    """Refuses keys of `zero_optimization` that an axis does not support.

    Args:
        plain: the value of each of them that it does.
        axis: its name in `ParallelConfig`.
        parallelism: its name in words.

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
    """Refuses an optimizer that needs more of a parameter than the part that an axis leaves this rank.

    Args:
        splits: id(parameter) -> how the axis cuts it.
        names: id(parameter) -> fqn.

    Raises:
        UsageError: its rule sums over several parameters, or looks at a whole tensor that is split.
    """
    if OptimizerKind.COUPLED in optimizer.group_kinds:
        raise UsageError(
            f"optimizer {type(optimizer.optimizer).__name__}",
            expected=f"one that updates elements or tensors by themselves, with {parallelism} parallelism",
            got="one whose rule sums over several parameters",
            fix=f"use AdamW, SGD or the like, or leave {axis} at 1",
        )
    for param, index in optimizer.groups.items():
        if param in splits and optimizer.group_kinds[index] is OptimizerKind.PER_TENSOR:
            refuse_split(names[param])
