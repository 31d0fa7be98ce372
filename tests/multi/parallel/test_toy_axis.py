"""A new axis of the mesh is one class and one table entry: setup and engine use only its protocol."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch
from torch import nn

import zeroaccel
from tests.support.pool import Ranks
from tests.support.training import SGD, config, train_step
from zeroaccel.comm.collectives import Collectives
from zeroaccel.comm.topology import Topology, init_process_group
from zeroaccel.config.parallel import ParallelConfig
from zeroaccel.engine import EngineBase
from zeroaccel.parallel.axes import AXES
from zeroaccel.setup.axis import Axis
from zeroaccel.setup.job import JobSpec


class LoggingAxis(Axis):
    """Records the calls of setup, and scales the output of the model."""

    name: ClassVar[str] = "log"
    lines: ClassVar[list[str]] = []
    fact = "the same"

    @classmethod
    def join(cls, mesh: ParallelConfig, topology: Topology, job: JobSpec) -> LoggingAxis:
        cls.lines.append(f"join {mesh.dp_shard}")
        return cls()

    def divide(self, model: nn.Module, others: Any) -> None:
        self.lines.append(f"divide after {[other.name for other in others]}")

    def check(self, config: Any, settings: Any, optimizer: Any, names: Mapping[int, str]) -> None:
        self.lines.append(f"check {settings.micro_batch_size} {sorted(names.values())}")

    def facts(self) -> Mapping[str, object]:
        return {"fact": self.fact}

    def connect(self, collectives: Collectives) -> None:
        self.lines.append(f"connect {collectives.world_size}")

    def install(self, model: nn.Module) -> None:
        self.lines.append("install")
        self._handle = model.register_forward_hook(lambda module, args, output: 2 * output)

    def attach(self, engine: EngineBase, loader: Any) -> None:
        self.lines.append(f"attach to {len(engine.units)} unit")

    def undo(self) -> None:
        self.lines.append("undo")
        self._handle.remove()


def _with_a_logging_axis(folder: str, differs: bool) -> tuple[list[str], float, float, str]:
    AXES.append(LoggingAxis)
    LoggingAxis.lines.clear()
    init_process_group()
    LoggingAxis.fact = f"rank {torch.distributed.get_rank()}" if differs else "same"
    torch.manual_seed(0)
    model = nn.Linear(4, 1)
    plain = model(torch.ones(2, 4)).sum().item()
    message = ""
    try:
        engine, *_ = zeroaccel.initialize(model, config=config(3, optimizer=SGD))
        output = engine(torch.ones(2, 4)).sum()
        train_step(engine, output)
        engine.save_checkpoint(folder, tag="one")
        engine.load_checkpoint(folder, tag="one")
        engine.destroy()
        return list(LoggingAxis.lines), plain, output.item(), message
    except zeroaccel.UsageError as error:
        return list(LoggingAxis.lines), plain, 0.0, str(error)
    finally:
        AXES.remove(LoggingAxis)


def test_setup_calls_an_axis_in_order_and_undoes_it(ranks: Ranks, tmp_path: Path) -> None:
    for lines, plain, scaled, _ in ranks(2).run(_with_a_logging_axis, str(tmp_path), False):
        assert lines == [
            "join 2",
            "divide after ['sp']",
            "check 2 ['bias', 'weight']",
            "connect 2",
            "install",
            "attach to 1 unit",
            "undo",
        ]
        assert scaled == pytest.approx(2 * plain)


def test_facts_of_an_axis_are_compared_between_ranks(ranks: Ranks, tmp_path: Path) -> None:
    for lines, _, _, message in ranks(2).run(_with_a_logging_axis, str(tmp_path), True):
        assert "expected axes.log.fact='rank 0' as on rank 0" in message
        assert "got \"axes.log.fact='rank 1' on rank 1" in message
        assert lines[-1].startswith("check")  # no axis was connected or installed
