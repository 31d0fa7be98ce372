"""From the gradients that autograd leaves behind to each rank's shard of their mean.

[Note: gradient path] A gradient is copied once, into its slot of its buffer's flat gradient, as soon as autograd
has accumulated it. When the last one of a buffer arrives its reduce-scatter starts; what never comes counts as zero
when the backward ends. Where gradients are sharded (`ShardPlan.grads`) every backward reduces and the shards are
summed over the micro-steps; otherwise the flat gradients are summed and reduced once, at the boundary.

[Note: order of reductions] Collectives must start in one order on all ranks, yet a rank may miss a gradient that
another has. So buffers are launched in a fixed order, each waiting for its predecessors, as DDP's buckets do.

The reduced gradient has the communication dtype; it becomes the accumulation dtype when a second one is added.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

from zeroaccel.comm.collectives import Collectives, Work
from zeroaccel.config.shard_plan import ShardPlan
from zeroaccel.errors import EngineStateError, ShardStateError
from zeroaccel.ops.reductions import max_abs, norm_exponent, norm_from, square_sums
from zeroaccel.zero.param_unit import FlatBuffer
from zeroaccel.zero.storage.copy_stream import CopyHandle, CopyStream
from zeroaccel.zero.tensor_subclasses import local_grad

__all__ = ["GradReducer", "GradStats", "GradientBuffer", "ReduceRules", "clip_factor", "examine"]

_LEAVING_LIMIT = 2  # reduced gradients that stay on the device while they are copied to the host


@dataclass(frozen=True)
class ReduceRules:
    """How gradients are summed.

    Attributes:
        dtype: what travels; None for each buffer's own dtype.
        accumulation_dtype: what micro-steps are summed in; None for the buffer's own.
        predivide: gradients are divided by this before the collective.
        postscale: and the sum is multiplied by this after it; together 1/W for the mean.
        bucket_numel: gradients on their way at a time, in elements (`reduce_bucket_size`).
        overlap: False waits for each reduction before backward goes on.
    """

    dtype: torch.dtype | None = None
    accumulation_dtype: torch.dtype | None = torch.float32
    predivide: float = 1.0
    postscale: float = 1.0
    bucket_numel: int = 500_000_000
    overlap: bool = True


@dataclass(eq=False)
class GradientBuffer:
    """The gradients of one flat buffer on their way.

    Attributes:
        flat: (N,) this rank's own gradients, communication or accumulation dtype; None before the first arrives
            and after they are reduced.
        shard: (S,) the mean over ranks of this rank's shard, summed over micro-steps; None when there is none.
        full: (N,) the same for all elements, only where the optimizer is replicated.
        arrived: indices of the parameters whose gradient came in this backward.
        touched: and in any backward since the flat gradient was allocated.
    """

    buffer: FlatBuffer
    name: str
    flat: Tensor | None = None
    shard: Tensor | None = None
    full: Tensor | None = None
    arrived: set[int] = field(default_factory=set)
    touched: set[int] = field(default_factory=set)
    launched: bool = False

    @property
    def complete(self) -> bool:
        """Every parameter's gradient came."""
        return len(self.arrived) == len(self.buffer.params)

    def allocate(self, dtype: torch.dtype) -> Tensor:
        """A flat gradient whose padding is zero; the slots are written as gradients arrive."""
        layout = self.buffer.layout
        flat = torch.empty(layout.numel, dtype=dtype, device=self.buffer.full.device)
        for start, end in layout.gaps():
            flat[start:end].zero_()
        return flat

    def take(self, index: int, grad: Tensor, dtype: torch.dtype, predivide: float) -> None:
        """Copies one gradient into its slot, or adds it to what an earlier micro-step left there."""
        if self.flat is None:
            self.flat = self.allocate(dtype)
            self.touched.clear()
        slot = self.buffer.layout.slots[index]
        place = self.flat[slot.start : slot.end].view(slot.shape)
        grad = grad.to_dense() if grad.is_sparse else grad
        if predivide != 1.0:
            grad = grad / predivide
        if index in self.touched:
            place.add_(grad)
        else:
            place.copy_(grad)
        self.touched.add(index)
        self.arrived.add(index)

    def fill_missing(self, dtype: torch.dtype) -> Tensor:
        """The flat gradient with zeros for every parameter that got none."""
        if self.flat is None:
            self.flat = self.allocate(dtype)
            self.touched.clear()
        for index, slot in enumerate(self.buffer.layout.slots):
            if index not in self.touched:
                self.flat[slot.start : slot.end].zero_()
        return self.flat

    def clear(self) -> None:
        """Drops all gradients."""
        self.flat = self.shard = self.full = None
        self.arrived.clear()
        self.touched.clear()
        self.launched = False


@dataclass
class _Flight:
    gradients: GradientBuffer
    flat: Tensor
    reduced: Tensor
    work: Work


class GradReducer:
    """Receives gradients, launches reductions in a fixed order and keeps what they yield.

    Life of a backward (all ranks): 1. `begin(reduce)`, 2. `receive(param)` per gradient, 3. `end()`; and once a step
    `finish()`, after which every `GradientBuffer.shard` is complete, then `clear()`.

    Args:
        copies: takes reduced gradients to host memory as they come, where they are to be stepped there.
    """

    def __init__(
        self,
        buffers: Sequence[tuple[str, FlatBuffer]],
        collectives: Collectives,
        plan: ShardPlan,
        rules: ReduceRules,
        copies: CopyStream | None = None,
    ) -> None:
        # Backward meets the modules last to first; the root comes first in registration and so is launched last.
        self.gradients = [GradientBuffer(buffer, name) for name, buffer in reversed(buffers)]
        self._collectives = collectives
        self._plan = plan
        self._rules = rules
        self._home = {
            param: (gradients, index)
            for gradients in self.gradients
            for index, param in enumerate(gradients.buffer.params)
        }
        self._late: list[tuple[nn.Parameter, Tensor]] = []
        self._flights: deque[_Flight] = deque()
        self._copies = copies
        self._leaving: deque[tuple[GradientBuffer, CopyHandle]] = deque()
        self._next = 0
        self._reducing = False
        self._hand_over: Callable[[GradientBuffer], None] | None = None
        self._handed_over: set[int] = set()
        self._twice: set[int] = set()

    def begin(self, *, reduce: bool, hand_over: Callable[[GradientBuffer], None] | None = None) -> None:
        """Starts a backward.

        Args:
            reduce: whether this one reduces, or only adds to the flat gradients.
            hand_over: called with each buffer, in the order of `gradients`, as soon as its shard is complete; not with
                those whose gradients come twice. Must not change the shards.
        """
        self._reducing = reduce
        self._hand_over = hand_over
        self._handed_over.clear()
        self._next = 0
        for gradients in self.gradients:
            gradients.arrived.clear()
            gradients.launched = False

    def receive(self, param: nn.Parameter) -> None:
        """Takes the gradient that autograd has just accumulated in `param.grad`, and frees it there."""
        grad, param.grad = param.grad, None
        if grad is None:
            return
        grad = local_grad(param, grad.detach())  # create_graph gives it a history
        gradients, index = self._home[param]
        if gradients.launched:  # a second arrival, e.g. a block that two re-entrant checkpoints recomputed
            self._twice.add(id(gradients))
            self._require_not_handed_over(gradients)
            self._late.append((param, grad))
            return
        dtype = self._wire(gradients) if self._reducing else self._accumulation(gradients)
        gradients.take(index, grad, dtype, self._rules.predivide)
        if self._reducing and gradients.complete:
            self._launch_ready()

    def end(self) -> None:
        """Ends a backward: launches what is left, with zeros for gradients that never came, and waits for all."""
        if self._reducing:
            self._launch_ready(force=True)
            self._reduce_late()
        self._drain(0)

    def comes_twice(self, gradients: GradientBuffer) -> bool:
        """Whether a gradient of it has ever come again after it was sent off."""
        return id(gradients) in self._twice

    def finish(self) -> None:
        """Makes every shard complete, at the boundary; needed where a backward thought it was not the last."""
        if any(gradients.flat is not None for gradients in self.gradients):
            self.begin(reduce=True)
            self.end()
        if not self._plan.optimizer:
            self._gather_full()

    def clear(self) -> None:
        """Drops every gradient, waiting for the reductions in flight."""
        self._drain(0)
        self._late.clear()
        for gradients in self.gradients:
            gradients.clear()

    def forget(self) -> None:
        """Drops every gradient, and what a backward that broke off left at the parameters."""
        self.clear()
        for param in self._home:
            param.grad = None

    def nbytes(self) -> int:
        """Bytes of all gradients held now."""
        held = [t for g in self.gradients for t in (g.flat, g.full if g.full is not None else g.shard)]
        return sum(t.numel() * t.itemsize for t in held if t is not None)

    def in_flight_nbytes(self) -> int:
        """Bytes of the gradients that are being reduced, and of what they are reduced into."""
        return sum(flight.flat.nbytes + flight.reduced.nbytes for flight in self._flights)

    # -- launching

    def _launch_ready(self, *, force: bool = False) -> None:
        while self._next < len(self.gradients):
            gradients = self.gradients[self._next]
            if not (force or gradients.complete):
                return
            self._launch(gradients)
            self._next += 1

    def _launch(self, gradients: GradientBuffer) -> None:
        wire = self._wire(gradients)
        flat = gradients.fill_missing(wire)
        flat = flat if flat.dtype is wire else flat.to(wire)
        gradients.flat, gradients.launched = None, True
        self._start(gradients, flat)

    def _start(self, gradients: GradientBuffer, flat: Tensor) -> None:
        """Reduce-scatter over the shard group: (N,) -> (S,), each rank sends N (W-1)/W elements."""
        room = self._rules.bucket_numel - flat.numel()
        if self._hand_over is not None and self._flights:  # the last is probably through: somebody waits for it
            room = min(room, self._flights[-1].flat.numel())
        self._drain(max(room, 0))
        layout = gradients.buffer.layout
        reduced = torch.empty(layout.shard_numel(gradients.buffer.rank), dtype=flat.dtype, device=flat.device)
        label = f"reduce {gradients.name}"
        work = self._collectives.reduce_scatter(reduced, flat, label, self._rules.postscale, layout.uneven_sizes)
        self._flights.append(_Flight(gradients, flat, reduced, work))
        if not self._rules.overlap:
            self._drain(0)

    def _drain(self, limit_numel: int) -> None:
        """Waits for the oldest reductions until at most `limit_numel` elements are in flight."""
        while self._flights and sum(flight.flat.numel() for flight in self._flights) > limit_numel:
            flight = self._flights.popleft()
            flight.work.wait()
            if self._copies is None:
                self._accept(flight.gradients, flight.reduced)
            else:
                self._leaving.append((flight.gradients, self._copies.to_host(flight.reduced)))
                self._land(_LEAVING_LIMIT)
        if limit_numel == 0:
            self._land(0)

    def _land(self, limit: int) -> None:
        """Takes in what has left for host memory, until at most `limit` reductions are on their way."""
        while len(self._leaving) > limit:
            gradients, arrival = self._leaving.popleft()
            self._accept(gradients, arrival.wait())

    def _accept(self, gradients: GradientBuffer, reduced: Tensor) -> None:
        if gradients.shard is None:
            gradients.shard = reduced
        else:
            accumulation = self._accumulation(gradients)
            if gradients.shard.dtype is not accumulation:
                gradients.shard = gradients.shard.to(accumulation)
            gradients.shard.add_(reduced)
        if self._hand_over is not None and not self.comes_twice(gradients):
            self._handed_over.add(id(gradients))
            self._hand_over(gradients)

    def _require_not_handed_over(self, gradients: GradientBuffer) -> None:
        if id(gradients) in self._handed_over:
            raise EngineStateError(
                f"a gradient of {gradients.name} came again after its update had begun, as in no step before",
                fix='set zero_optimization.offload_optimizer.update_during to "step" for a model that changes',
            )

    def _reduce_late(self) -> None:
        late, self._late = self._late, []
        again: dict[int, GradientBuffer] = {}
        for param, grad in late:
            gradients, index = self._home[param]
            gradients.take(index, grad, self._wire(gradients), self._rules.predivide)
            again[id(gradients)] = gradients
        for gradients in self.gradients:
            if id(gradients) in again:
                self._launch(gradients)

    def _gather_full(self) -> None:
        """All-gather of the reduced gradients, (S,) -> (N,): with the reduce-scatter before it, an all-reduce."""
        works = []
        for gradients in self.gradients:
            shard = gradients.shard
            if shard is None:
                raise ShardStateError(f"gradients of {gradients.name}: gathered before they were reduced")
            if gradients.full is None:
                layout = gradients.buffer.layout
                gradients.full = torch.empty(layout.numel, dtype=shard.dtype, device=shard.device)
                label = f"gather gradients {gradients.name}"
                works.append(self._collectives.all_gather(gradients.full, shard, label, layout.uneven_sizes))
        for work in works:
            work.wait()
        for gradients in self.gradients:
            if gradients.full is not None:
                gradients.shard = gradients.full[slice(*gradients.buffer.layout.bounds(self._collectives.shard_rank))]

    def _wire(self, gradients: GradientBuffer) -> torch.dtype:
        return self._rules.dtype or gradients.buffer.dtype

    def _accumulation(self, gradients: GradientBuffer) -> torch.dtype:
        return self._rules.accumulation_dtype or gradients.buffer.dtype


@dataclass(frozen=True)
class GradStats:
    """What one step's gradients look like, equal on all ranks.

    Attributes:
        finite: no infinity and no NaN on any rank.
        norm: the global L2 norm as held, i.e. still multiplied by the loss scale; NaN when not computed or not finite.
        agreed: every rank went through the same collectives since the beginning.
        alike: every rank's optimizer has the same settings.
    """

    finite: bool
    norm: float
    agreed: bool
    alike: bool


def examine(
    shards: Sequence[Tensor],
    counted: Sequence[Tensor],
    collectives: Collectives,
    *,
    history: int,
    settings: int,
    norm: bool,
) -> GradStats:
    """Looks at the reduced gradients of this rank's shards; collective over all ranks.

    Args:
        shards: the mean gradients of this rank's own elements, any float dtype, any number.
        counted: those of them that are in the norm; what several ranks hold is in that of one of them.
        history: a number below 2^52 that sums up the collectives this rank has issued.
        settings: likewise, the settings that its optimizer goes by.
        norm: whether to compute the norm too.
    """
    largest = max((max_abs(shard) for shard in shards), default=0.0)
    facts = torch.tensor([largest, history, -history, settings, -settings], dtype=torch.float64)
    collectives.all_reduce(facts, "max", "gradient overflow check")
    largest, latest, earliest, highest, lowest = facts.tolist()
    agreed, alike = latest == -earliest, highest == -lowest
    finite = math.isfinite(largest)
    if not (finite and agreed and alike and norm):
        return GradStats(finite, math.nan, agreed, alike)
    if largest == 0.0:
        return GradStats(True, 0.0, agreed, alike)
    exponent = norm_exponent(largest)
    sums = torch.zeros(2, dtype=torch.int64)
    for shard in counted:
        sums += torch.tensor(square_sums(shard, exponent), dtype=torch.int64)
    collectives.all_reduce(sums, "sum", "gradient norm")
    return GradStats(True, norm_from(int(sums[0]), int(sums[1]), exponent), agreed, alike)


def clip_factor(norm: float, max_norm: float) -> float:
    """What to multiply gradients of this norm with so that it is at most `max_norm`; 1 when `max_norm` is 0 (off)."""
    if max_norm <= 0.0:
        return 1.0
    return min(1.0, max_norm / (norm + 1e-6))
