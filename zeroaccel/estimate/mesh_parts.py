"""Builds the part of a model that one rank of a mesh holds, and the schedule of its step, for `simulate`.

The `AxisEstimate` of each axis divides the model; this module depends on no particular axis.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import torch
from torch import nn

from zeroaccel.config.parallel import ParallelConfig
from zeroaccel.engine import Engine
from zeroaccel.estimate.decoder import Decoder
from zeroaccel.estimate.fake_ranks import FakeRanks, SentBytes
from zeroaccel.estimate.subject import Step, Subject, predict_tokens
from zeroaccel.estimate.workload import Workload
from zeroaccel.parallel.axes import AXES
from zeroaccel.setup.axis_estimate import AxisEstimate, EstimatedJob, Schedule
from zeroaccel.zero.layout import Split

PHASES = ("forward", "backward", "step")
"""Phases of a micro-step."""
_DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}


class Part(NamedTuple):
    """A rank's part of a model.

    Attributes:
        build: builds it and its step; takes another number of blocks if `layers` is not 0.
        layers: number of equal consecutive blocks, if nothing else grows with them; 0 if unknown.
    """

    build: Callable[[int | None], tuple[nn.Module, Schedule]]
    layers: int


def axes_of(mesh: ParallelConfig) -> list[AxisEstimate]:
    """Returns the axes of a mesh with several ranks, except those of ZeRO."""
    return [estimate for axis in AXES if (estimate := axis.estimate(mesh)) is not None]


def places_of(subject: Subject, workload: Workload) -> Sequence[int]:
    """Returns the indices that may need the most memory, along the axis whose ranks hold different parts."""
    places = [axis.places(subject.shape) for axis in axes_of(workload.mesh)]
    return max(places, key=len, default=(0,))


def splits_of(model: nn.Module, workload: Workload) -> Mapping[int, Split]:
    """Returns id(parameter) -> the engine's split of it when it lays out a part of a model."""
    return {key: split for axis in axes_of(workload.mesh) for key, split in axis.splits(model).items()}


def micro_steps(workload: Workload, place: int) -> int:
    """Returns the number of micro-steps to simulate; further ones repeat the same operations."""
    most = max((axis.micro_steps(place) for axis in axes_of(workload.mesh)), default=2)
    return min(workload.accumulation, most)


def part_of(subject: Subject, workload: Workload, place: int, sent: SentBytes) -> Part:
    """Returns the part of a model that a rank holds; the whole model if each rank has its own samples.

    Args:
        place: index of the rank; see `places_of`.
        sent: counter for the bytes that the part sends along the axes.

    Raises:
        UsageError: the axes cannot divide the model. For a model that is not a `Decoder`, `build` raises.
    """
    axes, shape, sequence = axes_of(workload.mesh), subject.shape, workload.sequence
    for axis in axes:
        sequence = axis.tokens(sequence)
        if shape is not None:
            axis.check(subject.name, shape)
    job = EstimatedJob(
        name=subject.name,
        shape=shape,
        place=place,
        batch=workload.batch,
        sequence=sequence,
        accumulation=workload.accumulation,
        dtype=_DTYPES[workload.precision],
        count=sent.add,
        ranks=lambda size, axis: FakeRanks(size, sent, axis=axis),
    )

    def divided(model: nn.Module, step: Step) -> tuple[nn.Module, Schedule]:
        orders = [axis.share(job, model) for axis in axes]
        return model, next((order for order in orders if order is not None), _in_turn(step, job))

    if shape is None or not axes:

        def build(layers: int | None) -> tuple[nn.Module, Schedule]:
            short = subject.build_short
            return divided(*(subject.build() if layers is None or short is None else short(layers)))

        alike = all(axis.blocks_alike for axis in axes)
        return Part(build, subject.layers if subject.build_short is not None and alike else 0)
    blocks = min((axis.blocks(shape, place) for axis in axes), key=len)

    def build_decoder(layers: int | None) -> tuple[nn.Module, Schedule]:
        sizes = replace(shape, layers=len(blocks) if layers is None else layers)
        return divided(Decoder(sizes, is_first=blocks.start == 0, is_last=blocks.stop == shape.layers), predict_tokens)

    return Part(build_decoder, len(blocks))


def _in_turn(step: Step, job: EstimatedJob) -> Schedule:
    """Returns a schedule that runs one micro-step after another, like a training loop."""

    def run(engine: Engine) -> Iterator[tuple[int, str]]:
        output: Any = None  # lives until the next micro-step replaces it, as in a training loop
        last = engine.gradient_accumulation_steps() - 1
        for number in range(last + 1):
            moment = "last" if number == last else "earlier"
            yield len(PHASES) * number, moment
            output = step(engine, job.batch, job.sequence)
            loss = output[0] if isinstance(output, tuple) else output
            yield len(PHASES) * number + 1, moment
            engine.backward(loss)
            yield len(PHASES) * number + 2, "step"
            engine.step()
        del output

    return run
