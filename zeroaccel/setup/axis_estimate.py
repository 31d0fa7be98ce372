"""`AxisEstimate`: the part of a mesh axis in an estimate.

An estimate runs one rank on tensors without values, beside simulated ranks. Each axis reduces the model to that rank's
part and counts the bytes that the rank would send. `Axis.estimate` returns the object.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import ClassVar, Literal

import torch
from torch import nn

from zeroaccel.comm.collectives import Collectives
from zeroaccel.engine import Engine
from zeroaccel.errors import UsageError
from zeroaccel.zero.layout import Split

_HEAD_DIM = 128


@dataclass(frozen=True)
class Shape:
    """Sizes of a decoder with a gated MLP.

    Attributes:
        layers: number of blocks.
        width: width of the residual stream.
        inner: inner width of the MLPs.
        vocabulary: rows of the embedding and of the head.
        heads: number of query heads; 0 for the width divided by `head_dim`.
        head_dim: 0 for 128, or for 16 if the width is no multiple of 128.
        key_heads: number of key and value heads; 0 for the number of query heads.
        tied: True if head and embedding share their weight.
        biased: True if queries, keys and values have biases.
    """

    layers: int
    width: int
    inner: int
    vocabulary: int
    heads: int = 0
    head_dim: int = 0
    key_heads: int = 0
    tied: bool = False
    biased: bool = False

    def __post_init__(self) -> None:
        head_dim = self.head_dim or (_HEAD_DIM if self.width % _HEAD_DIM == 0 else 16)
        heads = self.heads or max(1, self.width // head_dim)
        if not self.heads:
            head_dim = self.width // heads
        for name, value in (("head_dim", head_dim), ("heads", heads), ("key_heads", self.key_heads or heads)):
            object.__setattr__(self, name, value)

    @property
    def block_numel(self) -> int:
        """Number of parameters of one layer."""
        queries, keys = self.heads * self.head_dim, self.key_heads * self.head_dim
        attention = 2 * self.width * (queries + keys) + (queries + 2 * keys) * self.biased
        return attention + 3 * self.width * self.inner + 2 * self.width

    @property
    def numel(self) -> int:
        """Number of parameters of the decoder."""
        tables = 1 if self.tied else 2
        return self.layers * self.block_numel + tables * self.vocabulary * self.width + self.width


Schedule = Callable[[Engine], Iterator[tuple[int, str]]]
"""Runs one step; yields before each phase the number of complete phases, and a moment of `SentBytes`."""


@dataclass(frozen=True)
class EstimatedJob:
    """One rank's step in an estimate.

    Attributes:
        name: name of the model, for messages.
        shape: shape of the decoder that represents the model; None for other models.
        place: position of the rank along the axis whose ranks have different parts; see `AxisEstimate.places`.
        batch, sequence: samples of a micro-step, and the tokens of each on this rank.
        accumulation: micro-steps per step.
        dtype: dtype of hidden states.
        count: counts a message: (axis, bytes).
        ranks: returns collectives of (size, axis) simulated ranks, which count the bytes that they would send.
    """

    name: str
    shape: Shape | None
    place: int
    batch: int
    sequence: int
    accumulation: int
    dtype: torch.dtype
    count: Callable[[str, float], None]
    ranks: Callable[[int, str], Collectives]


class AxisEstimate:
    """One axis of the mesh in an estimate. Every method does nothing by default.

    Args:
        size: number of ranks along the axis.

    Attributes:
        name: see `Axis`.
        receivers: the ranks of its group to which a rank sends the same number of bytes: all others, the next in a
            ring, or the neighbours in a line.
        in_blocks: True if ranks wait for each other in every block, so that a group should not span machines.
        blocks_alike: True if a rank has the same part of every block of any model, so that a few represent all.
    """

    name: ClassVar[str]
    receivers: ClassVar[Literal["all", "ring", "line"]] = "all"
    in_blocks: ClassVar[bool] = False
    blocks_alike: ClassVar[bool] = False

    def __init__(self, size: int) -> None:
        self.size = size

    def tokens(self, sequence: int) -> int:
        """Returns the number of tokens of each sample on one rank."""
        return sequence

    def places(self, shape: Shape | None) -> Sequence[int]:
        """Returns the positions along the axis whose ranks can need the most memory."""
        return (0,)

    def micro_steps(self, place: int) -> int:
        """Returns the number of micro-steps after which a step repeats itself."""
        return 2

    def idle(self, accumulation: int) -> float:
        """Returns the fraction of a step in which a rank waits for others."""
        return 0.0

    def check(self, name: str, shape: Shape) -> None:
        """Refuses a decoder that the engine would refuse.

        Raises:
            UsageError: sizes that the axis cannot divide.
        """

    def divide_heads(self, name: str, **heads: int) -> None:
        """Refuses a number of ranks that does not divide a decoder's heads; `heads` has their numbers by kind."""
        for kind, number in heads.items():
            if number % self.size:
                expected = f"a divisor of its {number} heads of {kind}"
                raise UsageError(f"{name}: {self.name} {self.size}", expected=expected, got=self.size)

    def blocks(self, shape: Shape, place: int) -> range:
        """Returns the blocks of a decoder at a position."""
        return range(shape.layers)

    def share(self, job: EstimatedJob, model: nn.Module) -> Schedule | None:
        """Reduces a model to the rank's part; of a decoder, `estimate` builds only the `blocks`.

        Returns:
            The order of the step's forwards and backwards, or None if the axis does not change it.

        Raises:
            UsageError: the model cannot be divided.
        """
        return None

    def splits(self, model: nn.Module) -> Mapping[int, Split]:
        """Maps id(parameter) to the engine's split of it, for parameters that `share` leaves whole."""
        return {}
