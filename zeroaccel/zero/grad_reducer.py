"""Gradients of a step: reduce-scatter during backward, and accumulation over micro-steps.

[Note: gradient path] The reducer copies a gradient once, into its slot of its buffer's flat gradient: in one call with
earlier gradients, when `_PENDING_NUMEL` elements are pending or the buffer is complete. So small gradients of a unit
need one call, and large ones no extra memory. If a buffer has a single parameter, its gradient becomes the flat
gradient itself, unless it needs padding. The last gradient of a buffer starts its reduce-scatter; parameters without a
gradient count as zero when the backward ends. If gradients are sharded (`ShardPlan.grads`, ZeRO-2 and 3), every
backward reduces, and the shards are summed over the micro-steps; otherwise the flat gradients are summed and reduced
once, at the accumulation boundary.

[Note: order of reductions] Collectives must start in one order on all ranks, yet a parameter may be unused on one rank
only. So the reducer launches buffers in a fixed order, like DDP's buckets: each waits for its predecessors. A rank that
waits for room in the bucket does not gather the next unit, while another rank may wait for that gather before it
launches. So if units are sharded, a buffer is launched when its unit's backward is over, with zeros for unused
parameters.

[Note: gradients in host memory] For a step on the host the reducer queues the copy of a reduced gradient right after it
launches the reduction: the copy stream waits for the reduction, the host and the computation do not. `end` waits for
all copies of a backward at once. Meanwhile at most `_D2H_LIMIT` reduced gradients stay on the device; for one more, the
computation waits for the oldest copy.

[Note: norm of arriving gradients] A host that steps needs the largest magnitude of all gradients and, for the exponent
that follows from it, their sums of squares (`ops/reductions.py`): two passes at the boundary. The exponent rarely moves
by more than one from step to step. So in the last backward of a step each reduced gradient is examined in one pass when
it arrives: on the device, if it goes to the host unchanged, for the exponent of the last step and its neighbours; else
on the host, for that of the last step or of a larger gradient that has arrived, because sums for the neighbours cost
the host more time than a second pass now and then. Gradients without the sum for the exponent need one at the boundary.
Integers add to the same sum in any order.

The reduced gradient has the communication dtype until a second one is added, then the accumulation dtype.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial

import torch
from torch import Tensor, nn

from zeroaccel.comm.collective_tracker import DONE
from zeroaccel.comm.collectives import Collectives, Work
from zeroaccel.config.shard_plan import ShardPlan
from zeroaccel.errors import ShardStateError
from zeroaccel.ops.reductions import (
    Examined,
    examine,
    exponents_around,
    max_abs,
    max_abs_into,
    norm_exponent,
    square_sums,
    square_sums_into,
)
from zeroaccel.telemetry.timeline import named_range
from zeroaccel.zero.layout import FlatTensor
from zeroaccel.zero.param_unit import FlatBuffer
from zeroaccel.zero.storage.copy_stream import CopyHandle, CopyStream
from zeroaccel.zero.tensor_subclasses import local_grad

_PENDING_NUMEL = 1 << 18  # elements of a buffer's pending gradients that trigger their common copy
_FINAL_LIMIT = 2  # reductions in flight on a CPU while `GradReducer.on_final` waits for their results
_D2H_LIMIT = 2  # reduced gradients that stay on the device during their copy to the host, besides the newest


@dataclass(frozen=True)
class ReduceRules:
    """Rules for summing gradients.

    Attributes:
        dtype: dtype of the communication; None uses each buffer's own dtype.
        accumulation_dtype: dtype of the sum over micro-steps; None uses the buffer's own.
        predivide: divisor of the gradients before the collective.
        postscale: factor of the sum after the collective; `postscale / predivide` is 1/W for the mean.
        bucket_numel: bound on the elements of gradients in reduction at a time (`reduce_bucket_size`).
        overlap: False makes backward wait for each reduction.
    """

    dtype: torch.dtype | None = None
    accumulation_dtype: torch.dtype | None = torch.float32
    predivide: float = 1.0
    postscale: float = 1.0
    bucket_numel: int = 500_000_000
    overlap: bool = True


@dataclass(eq=False)
class GradientBuffer:
    """The gradients of one `FlatBuffer`, from autograd to this rank's reduced shard.

    Attributes:
        flat: (N,) this rank's unreduced gradients, communication or accumulation dtype; None before the first arrives
            and after they are reduced.
        shard: (S,) the mean over ranks of this rank's shard, summed over micro-steps; None if there is none.
        full: (N,) the same for all elements, only if the optimizer is replicated.
        ready: indices of the parameters whose gradient arrived in this backward.
        written: indices of those whose gradient arrived in any backward since the flat gradient was allocated.
        over: True if no more gradients arrive in this backward.
        pending: gradients of this backward that are not in `flat` yet, by the index of their parameter.
        pending_numel: number of elements of the pending gradients.
        paddings: the ranges of `flat` that belong to no parameter.
        launched: True if the reduction of this backward has started.
        comm_dtype: dtype of the reduction.
    """

    buffer: FlatBuffer
    name: str
    comm_dtype: torch.dtype
    flat: Tensor | None = None
    shard: Tensor | None = None
    full: Tensor | None = None
    ready: set[int] = field(default_factory=set)
    written: set[int] = field(default_factory=set)
    over: bool = False
    launched: bool = False
    pending: dict[int, Tensor] = field(default_factory=dict)
    pending_numel: int = 0
    paddings: tuple[slice, ...] = field(init=False)
    _examined: tuple[Examined, int, int] | None = None  # with address and version of the shard

    def __post_init__(self) -> None:
        self.paddings = tuple(padding.at(0) for padding in self.buffer.layout.padding())

    @property
    def stays(self) -> bool:
        """True if the device updates its masters, in an engine whose other gradients go to host memory."""
        return self.buffer.masters.is_resident

    @property
    def examined(self) -> Examined | None:
        """The results of a pass over `shard`; None without one, or if anything has written to the shard since."""
        if self._examined is None or self.shard is None:
            return None
        found, *seen = self._examined
        return found if seen == [self.shard.data_ptr(), self.shard._version] else None

    @examined.setter
    def examined(self, found: Examined | None) -> None:
        shard = self.shard
        self._examined = None if found is None or shard is None else (found, shard.data_ptr(), shard._version)

    @property
    def complete(self) -> bool:
        """True if the gradient of every parameter has arrived in this backward."""
        return len(self.ready) == len(self.buffer.params)

    def reduced(self) -> FlatTensor:
        """Returns the gradient for the step: of all elements if the optimizer is replicated, else of the shard."""
        if self.full is not None:
            return FlatTensor(self.buffer.layout.range, self.full)
        assert self.shard is not None, f"{self.name} is stepped without a gradient"
        return FlatTensor(self.buffer.own, self.shard)

    def largest(self) -> float:
        """Returns the largest magnitude of the shard, in host memory; inf if an element is not finite."""
        examined = self.examined
        return max_abs(self._own()) if examined is None else examined.largest

    def square_sums(self, exponent: int) -> tuple[int, int]:
        """Returns `reductions.square_sums` of the shard, in host memory."""
        examined = self.examined
        known = {} if examined is None else examined.sums
        return known[exponent] if exponent in known else square_sums(self._own(), exponent)

    def _own(self) -> Tensor:
        assert self.shard is not None, f"{self.name}: the norm of no gradient"
        return self.shard

    def copy_pending(self, dtype: torch.dtype, predivide: float) -> None:
        """Copies the pending gradients into their slots, or adds them to the gradients of earlier micro-steps."""
        if not self.pending:
            return
        if predivide == 1.0 and self._takes_only_one(dtype):
            self.forget_pending()
            return
        flat, slots = self._flat_of(dtype), self.buffer.layout.slots
        copied: tuple[list[Tensor], list[Tensor]] = [], []
        for index, grad in self.pending.items():
            slot = slots[index]
            view = flat.narrow(0, slot.start, slot.numel).view(slot.shape)
            grad = grad.to_dense() if grad.is_sparse else grad
            if predivide != 1.0:
                grad = grad / predivide
            if index in self.written:
                view.add_(grad)
            else:  # the buffer is uninitialized memory: the first micro-step overwrites, no memset needed
                copied[0].append(view)
                copied[1].append(grad)
        if copied[0]:
            torch._foreach_copy_(*copied)
        self.written.update(self.pending)
        self.forget_pending()

    def _takes_only_one(self, dtype: torch.dtype) -> bool:
        """Makes the buffer's only gradient the flat one without a copy, if it alone occupies its memory."""
        grad = self.pending.get(0)
        if self.flat is not None or grad is None or len(self.buffer.params) > 1:
            return False
        # Autograd may leave a parameter a gradient that shares its base with views that are other gradients.
        count = getattr(torch._C, "_storage_Use_Count", None)
        is_whole = grad.numel() == self.buffer.layout.numel and grad.dtype is dtype and not grad.is_sparse
        if count is None or not is_whole or not grad.is_contiguous():
            return False
        storage = grad.untyped_storage()
        # One use is the gradient, the other the Python object of this storage.
        if storage.nbytes() != grad.nbytes or count(storage._cdata) > 2:
            return False
        self.flat, self.written = grad.view(-1), {0}
        return True

    def forget_pending(self) -> None:
        """Drops the pending gradients."""
        self.pending.clear()
        self.pending_numel = 0

    def zero_fill_unused(self, dtype: torch.dtype) -> Tensor:
        """Returns the flat gradient, with zeros for every parameter without a gradient."""
        flat = self._flat_of(dtype)
        if len(self.written) < len(self.buffer.layout.slots):
            for index, slot in enumerate(self.buffer.layout.slots):
                if index not in self.written:
                    flat[slot.start : slot.end].zero_()
        return flat

    def clear(self) -> None:
        """Drops all gradients."""
        self.flat = self.shard = self.full = self._examined = None
        self.forget_pending()
        self.ready.clear()
        self.written.clear()
        self.launched = False

    def _flat_of(self, dtype: torch.dtype) -> Tensor:
        """Returns the flat gradient with zeros in new padding, which enters the norm like all other elements."""
        if self.flat is None:
            layout = self.buffer.layout
            self.flat = torch.empty(layout.numel, dtype=dtype, device=self.buffer.full.device)
            if self.paddings:
                torch._foreach_zero_([self.flat[padding] for padding in self.paddings])
            self.written.clear()
        return self.flat


@dataclass
class _InflightReduce:
    """A reduction in flight; `copy` copies `reduced` to host memory, None if it stays or has not started."""

    gradients: GradientBuffer
    flat: Tensor
    reduced: Tensor
    work: Work
    copy: CopyHandle | None = None


class GradReducer:
    """Takes gradients from autograd, launches reductions in a fixed order and holds the reduced shards.

    One backward (all ranks): 1. `begin`, 2. `on_grad_ready(param)` per gradient, 3. `end()`. Once per step:
    `finish()`, after which every `GradientBuffer.shard` is complete, then `clear()`.

    Args:
        copies: copies reduced gradients to host memory as they complete, for a step on the host.

    Attributes:
        changes: how often a program has changed reduced gradients.
        unreached: ids of the parameters without a gradient so far, for `UntrainedWatch`, which empties the set.
        facts: result of the `join` that `end` called, in host memory; None without it, or if gradients have changed.
    """

    def __init__(
        self,
        buffers: Sequence[tuple[str, FlatBuffer]],
        collectives: Collectives,
        plan: ShardPlan,
        rules: ReduceRules,
        copies: CopyStream | None = None,
    ) -> None:
        # Backward meets the modules last to first; the root comes first in registration, and so is launched last.
        self.gradients = [
            GradientBuffer(buffer, name, rules.dtype or buffer.dtype) for name, buffer in reversed(buffers)
        ]
        self._collectives = collectives
        self._plan = plan
        self._rules = rules
        self._slot_of = {
            id(param): (gradients, index)
            for gradients in self.gradients
            for index, param in enumerate(gradients.buffer.params)
        }
        self.unreached = set(self._slot_of)
        self._late: list[tuple[nn.Parameter, Tensor]] = []  # gradients that arrived after the reduction of their buffer
        self._inflight: deque[_InflightReduce] = deque()
        self._inflight_numel = 0
        self._copies = copies
        self._pending_d2h: deque[tuple[GradientBuffer, CopyHandle]] = deque()
        self._next = 0
        self._reducing = False
        self._expected: frozenset[int] | None = None
        self.facts: Tensor | None = None
        self.changes = 0
        self._on_final: Callable[[GradientBuffer], None] | None = None
        self._largest: Tensor | None = None  # (1,) int32, over gradients that go to the host unchanged
        self._expected_largest: float | None = None
        self._exponents: tuple[int, ...] = ()  # for which this backward sums squares; those of `_sums`
        self._magnitudes: dict[int, Tensor] = {}  # of `_below`
        self._sums: Tensor | None = None  # (gradients, exponents, 2) int64, of gradients that go to the host unchanged

    @property
    def device(self) -> torch.device:
        """Device on which gradients are computed and reduced."""
        return self.gradients[0].buffer.full.device if self.gradients else torch.device("cpu")

    @property
    def leaves_device(self) -> bool:
        """True if reduced gradients go to host memory, for a step there; some may stay."""
        return self._copies is not None

    def _copies_of(self, gradients: GradientBuffer) -> CopyStream | None:
        return None if gradients.stays else self._copies

    # -- one backward

    def expect(self, params: frozenset[int] | None) -> None:
        """Limits the next backwards to these parameters, by their ids; buffers with no such parameter are not reduced.

        For a model that runs part by part, such as several pipeline stages on one rank. None means all parameters.
        """
        self._expected = params

    def expect_largest(self, largest: float) -> None:
        """Sets the largest magnitude of a step's gradients on all ranks, which that of the next will be close to."""
        if 0.0 < largest < math.inf:
            self._expected_largest = largest

    def begin(
        self, *, reduce: bool, is_last: bool = False, on_final: Callable[[GradientBuffer], None] | None = None
    ) -> None:
        """Starts a backward.

        Args:
            reduce: reduce in this backward; False only adds to the flat gradients.
            is_last: it is the last backward of a step.
            on_final: called with each buffer whose shard has the gradient of the whole step, as early as possible; late
                gradients may still change it (`_reduce_late`), and a program.
        """
        self._reducing, self._on_final = reduce, on_final
        self._next = 0
        self.facts = self._largest = self._sums = None
        known = self._expected_largest if is_last else None
        self._exponents = () if known is None else exponents_around(known)
        leaves = self._copies is not None and self._copies.pinned and reduce
        if leaves and all(gradients.shard is None for gradients in self.gradients):
            self._largest = torch.zeros(1, dtype=torch.int32, device=self.device)
            if self._exponents:
                shape = len(self.gradients), len(self._exponents), 2
                self._sums = torch.zeros(shape, dtype=torch.int64, device=self.device)
        for gradients in self.gradients:
            gradients.ready.clear()
            gradients.launched = gradients.over = False
            gradients.examined = None

    def on_unit_over(self, name: str) -> None:
        """Handles the end of a unit's gradients in this backward: its unused parameters count as zero."""
        if not self._reducing:
            return
        for gradients in self.gradients:
            gradients.over = gradients.over or gradients.name == name
        self._launch_ready()

    def on_grad_ready(self, param: nn.Parameter) -> None:
        """Takes the gradient that autograd has just accumulated in `param.grad` and removes it there."""
        grad, param.grad = param.grad, None
        if grad is None:
            return
        if grad.requires_grad:  # create_graph=True gives it a history
            grad = grad.detach()
        if type(grad) is not Tensor:
            grad = local_grad(param, grad)
        gradients, index = self._slot_of[id(param)]
        if self.unreached:
            self.unreached.discard(id(param))
        if gradients.launched:
            # Autograd accumulated it a second time: two re-entrant checkpoints that recompute the same block each run
            # their own AccumulateGrad. The reduction cannot be stopped; `end` starts a second one for the late rest.
            self._late.append((param, grad))
            return
        if index in gradients.pending:  # accumulated a second time, see above
            self._copy_pending(gradients)
        gradients.pending[index] = grad
        gradients.pending_numel += gradients.buffer.layout.slots[index].numel
        gradients.ready.add(index)
        complete = gradients.complete
        if complete or gradients.pending_numel >= _PENDING_NUMEL:
            self._copy_pending(gradients)
        if complete and self._reducing:
            del grad  # the flat gradient has it now, and a reduction needs memory
            self._launch_ready()

    def _copy_pending(self, gradients: GradientBuffer) -> None:
        # Without a reduction in this backward, this forms the sum over micro-steps, which needs the accumulation
        # dtype; with one, the communication dtype saves a cast of the whole buffer.
        dtype = gradients.comm_dtype if self._reducing else self._accum_dtype(gradients)
        gradients.copy_pending(dtype, self._rules.predivide)

    def end(self, join: Callable[[Tensor], Tensor] | None = None) -> None:
        """Ends a backward: launches the remaining buffers, with zeros for missing gradients, and waits for all.

        Args:
            join: computes `facts` from the largest magnitude on the device (`max_abs_into`), for gradients that go to
                the host unchanged; called before the host waits for them, so that it waits once for both.
        """
        for gradients in self.gradients:
            self._copy_pending(gradients)
        if self._reducing:
            self._launch_ready(force=True)
            self._reduce_late()
        self._drain(0)
        joined = []
        if join is not None and self._largest is not None and self._copies is not None:
            self._copies.join()
            for gradients in self.gradients:
                if gradients.stays and gradients.shard is not None:
                    self._examine(gradients, gradients.shard)
            found = [join(self._largest), *([] if self._sums is None else [self._sums])]
            joined = [self._copies.to_host(each, DONE) for each in found]
        self._land_copies()
        if joined:
            if self._on_final is not None:
                joined[-1].wait()  # both copies are on one stream
            self.facts, *sums = [each.landed() for each in joined]
            for gradients, row in zip(self.gradients, sums[0].tolist() if sums else (), strict=False):
                by_exponent = {
                    exponent: (high, low) for exponent, (high, low) in zip(self._exponents, row, strict=True)
                }
                gradients.examined = Examined(float(self.facts[0]), by_exponent)
        self._on_final = None

    def changed(self) -> None:
        """Discards what is known of reduced gradients after a program has changed them, and counts the change."""
        self.facts = None
        for gradients in self.gradients:
            gradients.examined = None
        self.changes += 1

    # -- one step

    def finish(self) -> None:
        """Makes every shard complete, at the boundary; needed if the last backward was not known to be the last."""
        if any(gradients.flat is not None for gradients in self.gradients):
            self.begin(reduce=True, is_last=True)
            self.end()
        if not self._plan.optimizer:
            self._gather_full()

    def mean_so_far(self, gradients: GradientBuffer) -> Tensor | None:
        """Returns (S,) fp32, the shard if this were the boundary, without ending the accumulation. (all ranks)

        None if no rank has a gradient of this buffer, or if no unreduced gradient is pending.
        """
        if self._plan.grads or gradients.launched:
            return None
        label = f"gradients so far of {gradients.name}"
        if not any(self._collectives.gather_objects(gradients.flat is not None, label)):
            return None
        was_absent = gradients.flat is None
        flat = gradients.zero_fill_unused(self._accum_dtype(gradients)).to(gradients.comm_dtype, copy=True)
        if was_absent:
            gradients.flat = None
        reduced, work = self._start_reduction(gradients, flat, label)
        work.wait()
        return reduced.float() if gradients.shard is None else reduced.float() + gradients.shard

    def clear(self) -> None:
        """Drops every gradient, waiting for the reductions in flight."""
        self._on_final = None
        self._drain(0)
        self._land_copies()
        self._late.clear()
        self.facts = self._largest = None
        for gradients in self.gradients:
            gradients.clear()

    def reset(self) -> None:
        """Drops every gradient, including those that an interrupted backward left in `param.grad`."""
        self.clear()
        self._expected = None
        for gradients in self.gradients:
            for param in gradients.buffer.params:
                param.grad = None

    def nbytes(self) -> int:
        """Returns the bytes of all gradients, except those in flight."""
        tensors = [t for g in self.gradients for t in (g.flat, g.full if g.full is not None else g.shard)]
        return sum(t.numel() * t.itemsize for t in tensors if t is not None)

    def nbytes_now(self) -> tuple[int, int]:
        """Returns the bytes of all gradients, including those in flight and their results, and the bytes of the shards
        alone. With a step on the host the shards are in host memory. The estimate calls it after every operation."""
        others = shards = 0
        for gradients in self.gradients:
            if gradients.pending:
                others += sum([grad.nbytes for grad in gradients.pending.values()])
            if gradients.flat is not None:
                others += gradients.flat.nbytes
            if gradients.full is not None:
                others += gradients.full.nbytes
            elif gradients.shard is not None:
                shards += gradients.shard.nbytes
        if self._inflight:
            tensors = {id(tensor): tensor for reduce in self._inflight for tensor in (reduce.flat, reduce.reduced)}
            others += sum(tensor.nbytes for tensor in tensors.values())
        return others + shards, shards

    # -- launching

    def _launch_ready(self, *, force: bool = False) -> None:
        """Launches complete buffers up to the first incomplete one; see [Note: order of reductions]."""
        while self._next < len(self.gradients):
            gradients = self.gradients[self._next]
            expected = self._expected
            if expected is None or any(id(param) in expected for param in gradients.buffer.params):
                if not (force or gradients.complete or gradients.over):
                    return
                self._launch(gradients)
            self._next += 1

    def _launch(self, gradients: GradientBuffer) -> None:
        self._copy_pending(gradients)
        dtype = gradients.comm_dtype
        flat = gradients.zero_fill_unused(dtype)
        flat = flat if flat.dtype is dtype else flat.to(dtype)
        gradients.flat, gradients.launched = None, True
        self._reduce_scatter(gradients, flat)

    def _reduce_scatter(self, gradients: GradientBuffer, flat: Tensor) -> None:
        """Starts a reduce-scatter over the shard group: (N,) -> (S,), each rank sends N (W-1)/W elements."""
        # Both the unreduced and the reduced buffer stay allocated until `wait`, so `reduce_bucket_size` bounds the
        # memory of reductions, not only their number.
        self._drain(max(self._rules.bucket_numel - flat.numel(), 0))
        with named_range("reduce", gradients.name):
            reduced, work = self._start_reduction(gradients, flat, f"reduce {gradients.name}")
        reduce = _InflightReduce(gradients, flat, reduced, work)
        copies = self._copies_of(gradients)
        if copies is not None and copies.pinned:
            reduce.copy = copies.to_host(reduced, work, partial(self._examine, gradients))
        self._inflight.append(reduce)
        self._inflight_numel += gradients.buffer.layout.numel
        self._drain_finished()
        if not self._rules.overlap:
            self._drain(0)
        elif self._on_final is not None and self._copies is None:
            # gloo does not tell whether a reduction is complete.
            self._drain(math.inf, 0 if work is DONE else _FINAL_LIMIT)
        elif self._on_final is not None:
            self._land_copies(wait=False)

    def _examine(self, gradients: GradientBuffer, reduced: Tensor) -> None:
        if self._largest is not None:
            max_abs_into(reduced, self._largest)
        if self._sums is not None:
            for exponent, sums in zip(self._exponents, self._sums[self.gradients.index(gradients)], strict=True):
                square_sums_into(reduced, self._below(exponent), sums)

    def _below(self, exponent: int) -> Tensor:
        """Returns (1,) int32 on the device, a magnitude with this exponent, as `max_abs_into` gives it."""
        if exponent not in self._magnitudes:
            self._magnitudes[exponent] = torch.full((1,), math.ldexp(0.5, exponent), device=self.device)
        return self._magnitudes[exponent].view(torch.int32)

    def _start_reduction(self, gradients: GradientBuffer, flat: Tensor, label: str) -> tuple[Tensor, Work]:
        if self._collectives.world_size == 1 and self._rules.postscale == 1.0:
            return flat, DONE  # the mean over one rank; nothing else refers to `flat`
        layout = gradients.buffer.layout
        reduced = torch.empty(layout.shard_numel(gradients.buffer.rank), dtype=flat.dtype, device=flat.device)
        # Experts got the samples of all data ranks: a sum over fewer ranks still has all its terms.
        ranks = gradients.buffer.holders(self._collectives)
        return reduced, ranks.reduce_scatter(reduced, flat, label, self._rules.postscale, layout.uneven_sizes)

    def _drain(self, limit_numel: float, limit: float = math.inf) -> None:
        """Waits for the oldest reductions until at most `limit_numel` elements and `limit` reductions are in flight."""
        while self._inflight and (self._inflight_numel > limit_numel or len(self._inflight) > limit):
            reduce = self._next_inflight()
            if (copies := self._copies_of(reduce.gradients)) is None:
                with named_range("wait for reduce", reduce.gradients.name):
                    reduce.work.wait()
                self._accumulate(reduce.gradients, reduce.reduced)
            else:
                # Pageable memory: the copy blocks, so it begins as late as possible.
                copy = reduce.copy or copies.to_host(reduce.reduced, reduce.work)
                with named_range("wait for reduce", reduce.gradients.name):
                    copy.wait_for_source()  # but not for the copy, so that `flat` returns to the allocator now
                self._pending_d2h.append((reduce.gradients, copy))
                self._bound_copies()

    def _drain_finished(self) -> None:
        """Frees the inputs of the oldest finished reductions whose results go to the host."""
        while self._inflight and (copy := self._inflight[0].copy) is not None:
            # DONE means that the current stream itself has reduced, so there is nothing to wait for.
            if not (self._inflight[0].work is DONE or copy.is_source_ready):
                return
            self._pending_d2h.append((self._next_inflight().gradients, copy))
            self._bound_copies()

    def _next_inflight(self) -> _InflightReduce:
        reduce = self._inflight.popleft()
        self._inflight_numel -= reduce.gradients.buffer.layout.numel
        return reduce

    def _bound_copies(self) -> None:
        """Frees device memory of finished copies to the host, and bounds the unfinished ones."""
        on_device = [copy for _, copy in self._pending_d2h if copy.on_device]
        for copy in on_device[:-_D2H_LIMIT]:
            copy.drop_source()
        for copy in on_device[-_D2H_LIMIT:]:
            if not copy.is_copied:
                break
            copy.drop_source()

    def _land_copies(self, *, wait: bool = True) -> None:
        """Waits for all copies to host memory: once, or for each if `_on_final` uses it meanwhile.

        Args:
            wait: False lands only those that are complete.
        """
        while self._pending_d2h and self._on_final is not None:
            if not (wait or self._pending_d2h[0][1].is_copied):
                return
            gradients, copy = self._pending_d2h.popleft()
            self._accumulate(gradients, copy.wait())
        if self._pending_d2h:
            assert self._copies is not None, "copies to the host without a stream"
            self._copies.finish()
        while self._pending_d2h:
            gradients, copy = self._pending_d2h.popleft()
            self._accumulate(gradients, copy.landed())

    def _accumulate(self, gradients: GradientBuffer, reduced: Tensor) -> None:
        """Adds a reduced shard to the shard of earlier micro-steps."""
        if gradients.shard is None:
            gradients.shard = reduced
        else:
            # Only a second summand needs the accumulation dtype, so a single micro-step per step never pays for it.
            dtype = self._accum_dtype(gradients)
            if gradients.shard.dtype is not dtype:
                gradients.shard = gradients.shard.to(dtype)
            gradients.shard.add_(reduced)
        if self._exponents and self._sums is None and gradients.shard.device.type == "cpu":
            found = [
                examination.largest for examination in (g.examined for g in self.gradients) if examination is not None
            ]
            largest = max(value for value in (self._expected_largest or 0.0, *found) if value < math.inf)
            gradients.examined = examine(gradients.shard, [norm_exponent(largest)])
        if self._on_final is not None:
            self._on_final(gradients)

    def _reduce_late(self) -> None:
        """Reduces the buffers with late gradients again. Ranks agree on it, because they run the same graph."""
        late, self._late = self._late, []
        if late:
            self._largest = self._sums = None  # stale: late gradients change the reduced values
        again: dict[int, GradientBuffer] = {}
        for param, grad in late:
            gradients, index = self._slot_of[id(param)]
            if index in gradients.pending:
                self._copy_pending(gradients)
            gradients.pending[index] = grad
            again[id(gradients)] = gradients
        for gradients in self.gradients:  # in the fixed order, whatever order the gradients arrived in
            if id(gradients) in again:
                self._launch(gradients)

    def _gather_full(self) -> None:
        """All-gathers the reduced gradients, (S,) -> (N,): with the reduce-scatter before it, an all-reduce.

        Stage 0 uses the same reduce-scatter as the others, since only one order of summation gives the same bits at all
        stages (docs/design.md, "Collectives"); the backend's all-reduce would sum in a different order.
        """
        works = []
        for gradients in self.gradients:
            shard = gradients.shard
            if shard is None:
                raise ShardStateError(f"gradients of {gradients.name}: gathered before they were reduced")
            if gradients.full is None:
                layout = gradients.buffer.layout
                gradients.full = torch.empty(layout.numel, dtype=shard.dtype, device=shard.device)
                label = f"gather gradients {gradients.name}"
                ranks = gradients.buffer.holders(self._collectives)
                works.append(ranks.all_gather(gradients.full, shard, label, layout.uneven_sizes))
        for work in works:
            work.wait()
        for gradients in self.gradients:
            if gradients.full is not None:
                examined = gradients.examined
                gradients.shard = gradients.full[gradients.buffer.own.at(0)]  # the same values
                gradients.examined = examined

    def step_dtypes(self, gradients: GradientBuffer) -> set[torch.dtype]:
        """Returns the dtypes in which the gradients of a buffer may reach the optimizer."""
        return {gradients.comm_dtype, self._accum_dtype(gradients)}

    def _accum_dtype(self, gradients: GradientBuffer) -> torch.dtype:
        return self._rules.accumulation_dtype or gradients.buffer.dtype
