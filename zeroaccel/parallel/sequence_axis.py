"""The `sp` axis: ranks that share sequences."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

from torch import nn

from zeroaccel.comm.collectives import Collectives
from zeroaccel.comm.topology import Topology, peer_recorder
from zeroaccel.config.parallel import ParallelConfig
from zeroaccel.errors import UsageError
from zeroaccel.parallel.sequence import SequenceGroup
from zeroaccel.parallel.ulysses import UlyssesAttention
from zeroaccel.setup.axis import Axis
from zeroaccel.setup.job import JobSpec
from zeroaccel.zero.engine_base import EngineBase


class SequenceAxis(Axis):
    """Ranks with runs of the same sequences; every engine has it, as `engine.sequence_group`.

    Args:
        layer_ranks: ranks that share the attention heads already (`tp`).
    """

    name: ClassVar[str] = "sp"

    def __init__(self, group: SequenceGroup, layer_ranks: int) -> None:
        self.group, self._layer_ranks = group, layer_ranks
        self._attention: UlyssesAttention | None = None

    @classmethod
    def join(cls, mesh: ParallelConfig, topology: Topology, job: JobSpec) -> SequenceAxis:
        # Stages of a pipeline issue other collectives, whose histories are compared within a stage only.
        recorder = peer_recorder(topology, mesh.peer_groups)
        return cls(SequenceGroup.of(topology, mesh.sp, stride=mesh.tp, recorder=recorder), mesh.tp)

    @classmethod
    def check_launched(cls, mesh: ParallelConfig, sources: Mapping[str, str]) -> None:
        """Refuses a launch with `sp` for a caller that names no mesh: the script has to cut its batches.

        Raises:
            UsageError: the launcher asks for `sp`.
        """
        if mesh.sp > 1:
            raise UsageError(
                f"initialize(parallel): the launch asks for sp={mesh.sp} ({sources.get('sp_size', 'its environment')})",
                expected=f"parallel=ParallelConfig(sp={mesh.sp}), with batches by data-parallel rank",
                got=None,
                fix="pass it, prepare model and loaders by an Accelerator, or launch without",
            )

    def connect(self, collectives: Collectives) -> None:
        if self.group.size > 1:
            collectives.observe(self.name, self.group.collectives)

    def install(self, model: nn.Module) -> None:
        """Has the model's attention exchange heads, unless it does already.

        Raises:
            UsageError: the model has no attention of transformers, or its heads cannot be shared out.
        """
        if self.group.size > 1 and UlyssesAttention.of(model) is None:
            self._attention = UlyssesAttention(model, self.group, head_parts=self._layer_ranks)

    def attach(self, engine: EngineBase, loader: Any) -> None:
        vars(engine)["sequence_group"] = self.group

    def undo(self) -> None:
        if self._attention is not None:
            self._attention.undo()
            self._attention = None
