"""Measures the cost of the engine's Python per unit and step, at several world sizes.

    python benchmarks/overhead.py

Trains a chain of small blocks with almost no arithmetic, each a unit of stage 3, once in plain torch and once in the
engine, and divides the difference by the number of units: hooks, schedule, unshard, reshard, gradients. The process is
one rank of a job without other processes, in one of two ways:

    none    collectives write zeros and return, so that all the time is the engine's;
    fake    torch's process group without peers, through the engine's own collectives; its copies, which replace those
            of the other ranks, do grow with the world size, so they are printed separately.

The process never waits, so times are processor times of its thread, which other programs on the machine disturb little.
Every parameter has 16 * 1024 elements, which need no padding up to 1024 ranks: flat buffers are equal, shards shrink.
"""

from __future__ import annotations

import json
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Literal

import click
import torch
import torch.distributed as dist
from rich.console import Console
from rich.table import Table
from torch import Tensor, nn
from torch.testing._internal.distributed.fake_pg import FakeStore

import zeroaccel
from zeroaccel.comm import topology
from zeroaccel.comm.collective_tracker import DONE
from zeroaccel.comm.collectives import Collectives, Work

PHASES = ("forward", "backward", "step")
WIDTH = 128

Times = dict[str, float]
"""Processor seconds per phase and step; "collectives" is the part of their sum spent inside those."""


class Silent(Collectives):
    """Collectives without communication: they write zeros, because arithmetic on uninitialized memory may be slow."""

    def all_gather(self, out: Tensor, shard: Tensor, label: str, split_sizes: Sequence[int] = ()) -> Work:
        out.zero_()
        return DONE

    def reduce_scatter(
        self, out: Tensor, flat: Tensor, label: str, scale: float = 1.0, split_sizes: Sequence[int] = ()
    ) -> Work:
        out.zero_()
        return DONE

    def all_reduce(self, tensor: Tensor, op: Literal["sum", "max"], label: str) -> None:
        return None

    def broadcast(self, tensor: Tensor, src: int, label: str) -> None:
        return None

    def gather_objects(self, obj: Any, label: str) -> list[Any]:
        return [obj] * self.world_size

    def barrier(self, label: str) -> None:
        return None


class Timed(Collectives):
    """Collectives that time their calls and the completion."""

    seconds = 0.0

    def all_gather(self, out: Tensor, shard: Tensor, label: str, split_sizes: Sequence[int] = ()) -> Work:
        work: Work = self._timed(super().all_gather, out, shard, label, split_sizes)
        return work

    def reduce_scatter(
        self, out: Tensor, flat: Tensor, label: str, scale: float = 1.0, split_sizes: Sequence[int] = ()
    ) -> Work:
        work: Work = self._timed(super().reduce_scatter, out, flat, label, scale, split_sizes)
        return work

    def all_reduce(self, tensor: Tensor, op: Literal["sum", "max"], label: str) -> None:
        self._timed(super().all_reduce, tensor, op, label)

    def _timed(self, call: Callable[..., Any], *args: Any) -> Any:
        start = time.thread_time()
        work = call(*args)
        if work is not None:
            work.wait()  # already finished; the call only needs to be counted
        self.seconds += time.thread_time() - start
        return work


@contextmanager
def _pretended_job(world_size: int) -> Iterator[None]:
    dist.init_process_group("fake", store=FakeStore(), rank=world_size - 1, world_size=world_size)
    try:
        yield
    finally:
        topology.destroy()
        dist.destroy_process_group()


class _Block(nn.Module):
    def __init__(self, parameters: int) -> None:
        super().__init__()
        self.layers = nn.Sequential(*(nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(parameters)))

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.layers(x)
        return y


def _chain(units: int, parameters: int) -> nn.Sequential:
    return nn.Sequential(*(_Block(parameters) for _ in range(units)))


def _plain(units: int, parameters: int, steps: int) -> Times:
    """Times the same arithmetic without an engine and without an optimizer: the update counts as the engine's."""
    model = _chain(units, parameters).bfloat16()
    return _timed_steps(model, lambda loss: loss.backward(), lambda: model.zero_grad(), lambda: 0.0, steps)


def _engine(units: int, parameters: int, steps: int, world_size: int, kind: type[Silent] | type[Timed]) -> Times:
    settings = {
        "train_micro_batch_size_per_gpu": 1,
        "bf16": {"enabled": True},
        "zero_optimization": {
            "stage": 3,
            "stage3_param_persistence_threshold": 0,
            "stage3_max_reuse_distance": 0,  # reshards and unshards every unit
        },
        "optimizer": {"type": "SGD", "params": {"lr": 0.0}},
    }
    with _pretended_job(world_size):
        collectives = kind(topology.current_topology())
        engine = zeroaccel.initialize(model=_chain(units, parameters), config=settings, collectives=collectives)[0]
        assert len(engine.units) == units, f"{units} layers became {len(engine.units)} units"
        spent = (lambda: collectives.seconds) if isinstance(collectives, Timed) else (lambda: 0.0)
        times = _timed_steps(engine, engine.backward, engine.step, spent, steps)
        engine.destroy()
    return times


def _timed_steps(
    model: nn.Module,
    backward: Callable[[Tensor], Any],
    step: Callable[[], None],
    spent: Callable[[], float],
    steps: int,
) -> Times:
    """Returns the medians over `steps` steps, after some warm-up steps."""
    x = torch.zeros(1, WIDTH, dtype=torch.bfloat16, requires_grad=True)
    rows: list[list[float]] = []
    for _ in range(steps + 5):
        before, start = spent(), time.thread_time()
        loss = model(x).sum()
        forward = time.thread_time()
        backward(loss)
        back = time.thread_time()
        step()
        end = time.thread_time()
        rows.append([forward - start, back - forward, end - back, spent() - before])
    names = (*PHASES, "collectives")
    return dict(zip(names, map(statistics.median, zip(*rows[5:], strict=True)), strict=True))


def _least(measure: Callable[[], Times], rounds: int) -> Times:
    """Returns the smallest value of each phase over several rounds, because other programs can only add time."""
    found = [measure() for _ in range(rounds)]
    return {name: min(times[name] for times in found) for name in found[0]}


@click.command(context_settings={"show_default": True})
@click.option("--units", default=32, help="Number of blocks, each a unit.")
@click.option("--parameters", default=2, help="Parameters of each unit.")
@click.option("--steps", default=40, help="Steps in a round; the result is the median.")
@click.option("--rounds", default=3, help="Rounds; the result is the fastest.")
@click.option("--world-sizes", default="2,64,1024", help="Separated by commas.")
@click.option("--json", "json_path", type=click.Path(dir_okay=False, path_type=Path), help="Write the results here.")
def main(units: int, parameters: int, steps: int, rounds: int, world_sizes: str, json_path: Path | None) -> None:
    """Measures the microseconds of the engine's Python per unit and step."""
    torch.set_num_threads(1)
    plain = _least(lambda: _plain(units, parameters, steps), rounds)
    rows: list[dict[str, Any]] = []
    for name, kind in (("none", Silent), ("fake", Timed)):
        for world_size in map(int, world_sizes.split(",")):
            times = _least(lambda size=world_size, kind=kind: _engine(units, parameters, steps, size, kind), rounds)  # type: ignore[misc]
            micros = {phase: (times[phase] - plain[phase]) / units * 1e6 for phase in PHASES}
            micros["collectives"] = times["collectives"] / units * 1e6
            micros["engine"] = sum(micros[phase] for phase in PHASES) - micros["collectives"]
            rows.append({"communication": name, "world_size": world_size, "microseconds_per_unit": micros})
    _show(rows, Console(width=None if sys.stdout.isatty() else 120))
    if json_path is not None:
        json_path.write_text(json.dumps({"units": units, "parameters": parameters, "rows": rows}, indent=1) + "\n")


def _show(rows: list[dict[str, Any]], console: Console) -> None:
    table = Table(title="microseconds per unit and step, above the same arithmetic without an engine")
    for head in ("communication", "ranks", *PHASES, "of it collectives", "engine"):
        table.add_column(head, justify="left" if head == "communication" else "right")
    for row in rows:
        micros = row["microseconds_per_unit"]
        numbers = [f"{micros[name]:.0f}" for name in (*PHASES, "collectives", "engine")]
        table.add_row(row["communication"], str(row["world_size"]), *numbers)
    console.print(table)


if __name__ == "__main__":
    main()
