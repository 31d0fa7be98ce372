"""Sequence parallelism: the ranks that share a sequence, and their exchanges.

(Ulysses: Jacobs et al., 2023, arXiv:2309.14509, section 3.) A sequence of S tokens is cut into P runs of s = S / P, one
per rank. All modules except attention work on each token by itself. For attention, an all-to-all gives each rank all
tokens of H / P heads; a second one returns the outputs to the ranks of the tokens (`ulysses.py`).

Labels are shifted before the cut, since the last token of a run predicts the first of the next one. A rank's loss is
the mean over its own labels, so the sequence's loss is the mean of these, weighted by each rank's number of labels.
"""

from __future__ import annotations

import itertools
from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn import functional
from torch.utils.weak import WeakIdKeyDictionary

from zeroaccel.comm.agree import agreed
from zeroaccel.comm.collectives import Collectives
from zeroaccel.comm.hangs.flight_recorder import FlightRecorder
from zeroaccel.comm.mesh_layout import consecutive
from zeroaccel.comm.topology import RankGroup, Topology, connect, subgroup
from zeroaccel.errors import UsageError

IGNORED_LABEL = -100
"""Losses ignore positions with this label, as in torch and transformers."""

SHIFTED_LABELS = "shift_labels"
"""Key of the labels in a batch that was cut: the label at each position is the next token."""


class SequenceGroup:
    """The ranks that share one sequence.

    Attributes:
        rank: index of this rank in the group; rank 0 has the beginning of the sequence.
        size: P.
        collectives: collectives over these ranks.
        checks: the same, for exchanges that other groups of the job do not make at the same time.
        process_group: process group of these ranks, for a program's own calls of torch.distributed; not used here.

    Example:
        >>> from zeroaccel.comm.topology import destroy, init_process_group
        >>> group = SequenceGroup.of(init_process_group(), size=1)
        >>> batch = group.shard({"input_ids": torch.tensor([[5, 6, 7]]), "labels": torch.tensor([[5, 6, 7]])})
        >>> {name: tensor.tolist() for name, tensor in batch.items()}
        {'input_ids': [[5, 6, 7]], 'shift_labels': [[6, 7, -100]], 'position_ids': [[0, 1, 2]]}
        >>> destroy()
    """

    def __init__(
        self, collectives: Collectives, process_group: dist.ProcessGroup, checks: Collectives | None = None
    ) -> None:
        self.collectives, self.process_group = collectives, process_group
        self.checks = checks or collectives
        self.rank, self.size = collectives.rank, collectives.world_size
        self._counted: Any = WeakIdKeyDictionary()  # positions that `shard` created

    def counts_from_0(self, positions: Tensor) -> bool:
        """True if `shard` created these positions: each row is one sequence, with no need to read it on the device."""
        return positions in self._counted

    @classmethod
    def of(
        cls, topology: Topology, size: int, *, stride: int = 1, recorder: FlightRecorder | None = None
    ) -> SequenceGroup:
        """Creates the group of `size` ranks that contains this rank. (all ranks)

        Args:
            stride: distance between consecutive ranks of the group; the ranks between them are tensor-parallel (`tp`).
            recorder: records the collectives, if ranks elsewhere in the job issue different ones.
        """
        if size == 1:  # without exchanges, no process groups are needed
            job = topology.all_ranks
            single = RankGroup((topology.rank,), 0, job.gather_group, job.reduce_group, job.control_group)
            return cls(Collectives(topology, single), job.reduce_group)
        blocks = consecutive((topology.all_ranks.ranks,), size * stride)
        group = subgroup(topology, tuple(block[place::stride] for block in blocks for place in range(stride)))
        connect(topology, {"sequences": (group.gather_group, ("all_gather", "all_to_all"))})
        # Other groups may have sequences of another length.
        alone = topology.recorder(f"sequences of ranks {group.ranks}", group.ranks, alike=True)
        checks = Collectives(topology, group, recorder=alone)
        return cls(Collectives(topology, group, records_sizes=False, recorder=recorder), group.reduce_group, checks)

    def shard(self, batch: Mapping[str, Any]) -> dict[str, Any]:
        """Returns this rank's run of a batch of whole sequences. All ranks of the group must pass the same batch.

        Tensors of two and more dims, (B, S, ...), are cut along the second; other values stay whole. `labels` become
        `shift_labels`: the next token of each position. Without `position_ids`, positions count from 0.

        Raises:
            UsageError: S is not divisible by P, or a tensor has another length.
        """
        length = _length(batch)
        if length % self.size:
            raise UsageError(
                "sequence parallelism",
                expected=f"a sequence length that is divisible by the {self.size} ranks of a sequence",
                got=f"{length} tokens",
                fix=f"pad to a multiple of {self.size} (pad_to_multiple_of={self.size} in transformers' collators)",
            )
        whole = dict(batch)
        labels = whole.pop("labels", None)
        if labels is not None and SHIFTED_LABELS not in whole:
            whole[SHIFTED_LABELS] = functional.pad(labels, (0, 1), value=IGNORED_LABEL)[..., 1:]
        counts = "position_ids" not in whole
        if counts:
            ids = whole["input_ids"] if "input_ids" in whole else whole["inputs_embeds"]
            whole["position_ids"] = torch.arange(length, device=ids.device).expand(len(ids), -1)
        rows = slice(self.rank * (length // self.size), (self.rank + 1) * (length // self.size))
        cut = {name: value[:, rows].contiguous() if _is_cut(value) else value for name, value in whole.items()}
        if counts:
            self._counted[cut["position_ids"]] = True
        return cut

    def mean_loss(self, loss: Tensor, labels: Tensor, num_items_in_batch: Tensor | int | None = None) -> Tensor:
        """Returns the loss of whole sequences, the same value on each rank of the group. (all ranks of the group)

        Its gradient is scaled so that the average of gradients over all ranks is the gradient of the whole batch.

        Args:
            loss: mean over this rank's labels; ignored if all of them are `IGNORED_LABEL`.
            labels: labels of this rank's tokens, shifted.
            num_items_in_batch: with it, `loss` is the sum over this rank's labels divided by this number, as a model of
                transformers computes it, and the result is the sum over whole sequences divided by it.
        """
        with torch.no_grad():
            count = (labels != IGNORED_LABEL).sum()
            if num_items_in_batch is not None:
                count = torch.ones_like(count)
            sums = torch.stack([torch.where(count > 0, loss.detach().double(), 0.0), count.double()])
            losses, counts = self.gather(sums.view(1, 1, 2))[0].unbind(1)
            total = counts.sum().clamp(min=1) if num_items_in_batch is None else counts[0]
            mean = (losses * counts).sum() / total
        weight = (self.size * count / total).to(loss.dtype)
        scaled = torch.where(count > 0, loss, 0.0) * weight
        # The value is the mean; the gradient is that of this rank's part, since the difference is detached.
        return scaled + (mean.to(loss.dtype) - scaled).detach()

    def gather(self, shard: Tensor) -> Tensor:
        """Gathers the runs of all ranks, (B, s, ...) -> (B, S, ...), without a gradient. (all ranks of the group)"""
        shard = shard.detach().contiguous()
        runs = shard.new_empty(self.size * shard.numel())
        self.collectives.all_gather(runs, shard.view(-1), "gather sequences").wait()
        return runs.view(self.size, *shard.shape).movedim(0, 1).reshape(shard.shape[0], -1, *shard.shape[2:])

    def exchange(self, parts: Tensor, label: str) -> Tensor:
        """(P, n) -> (P, n): row r of the result is row `rank` of rank r. Differentiable. (all ranks of the group)"""
        sizes = [parts[0].numel()] * self.size
        exchanged: Tensor = _Exchange.apply(parts.reshape(-1), self, label, sizes, sizes)  # type: ignore[no-untyped-call]
        return exchanged.view(parts.shape)

    def exchange_parts(self, parts: Sequence[Tensor], received: Sequence[int], label: str) -> tuple[Tensor, ...]:
        """Sends part r to rank r and returns the parts from all ranks. Differentiable. (all ranks of the group)

        Args:
            parts: P tensors of one dim.
            received: number of elements from each rank.
        """
        sent = [tensor.numel() for tensor in parts]
        flat: Tensor = _Exchange.apply(torch.cat(list(parts)), self, label, sent, list(received))  # type: ignore[no-untyped-call]
        return torch.split(flat, list(received))

    def before(self, shard: Tensor, count: int, dim: int, label: str) -> Tensor:
        """Puts the last `count` tokens of the rank before in front of this rank's, differentiably; zeros on rank 0.

        (all ranks of the group)
        """
        tail = shard.narrow(dim, shard.shape[dim] - count, count)
        none = tail.reshape(-1)[:0]
        parts = [tail.reshape(-1) if rank == self.rank + 1 else none for rank in range(self.size)]
        received = [tail.numel() if rank == self.rank - 1 else 0 for rank in range(self.size)]
        tokens = torch.cat(self.exchange_parts(parts, received, label))
        # The sum over nothing keeps rank 0 in the graph, so that its backward joins that of the others.
        first = tokens.view(tail.shape) if self.rank else torch.zeros_like(tail) + tokens.sum()
        return torch.cat([first, shard], dim)

    def exchange_rows(self, parts: Tensor, label: str) -> Tensor:
        """Exchanges rows like `exchange`, without a gradient."""
        parts = parts.contiguous()
        out = torch.empty_like(parts)
        self.collectives.all_to_all(out, parts, label).wait()
        return out

    def exchange_sizes(self, flat: Tensor, sent: Sequence[int], received: Sequence[int], label: str) -> Tensor:
        """Exchanges parts like `exchange_parts`, without a gradient."""
        if len({*sent, *received}) == 1:
            return self.exchange_rows(flat.view(self.size, -1), label).view(-1)
        flat = flat.contiguous()
        out = flat.new_empty(sum(received), 1)
        self.collectives.exchange_rows(out, flat.view(-1, 1), received, sent, label).wait()
        return out.view(-1)


class _Exchange(torch.autograd.Function):
    """An all-to-all, whose transpose is the all-to-all with sent and received parts in each other's place."""

    @staticmethod
    def forward(
        ctx: Any, flat: Tensor, group: SequenceGroup, label: str, sent: Sequence[int], received: Sequence[int]
    ) -> Tensor:
        ctx.group, ctx.label, ctx.sent, ctx.received = group, label, sent, received
        return group.exchange_sizes(flat, sent, received, label)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None, None, None]:
        grad = ctx.group.exchange_sizes(grads[0].contiguous(), ctx.received, ctx.sent, f"{ctx.label}, backward")
        return grad, None, None, None, None


class SequenceLoader:
    """Cuts the batches of a loader along the sequence. (all ranks of the group, together)

    If each rank of the group loads different batches, as loaders for all ranks do, one batch per rank becomes P batches
    for the group, one after another. If the ranks load the same batches, as loaders for data-parallel ranks do, each
    batch is cut directly.

    Args:
        loader: yields mappings with `input_ids` or `inputs_embeds`.
        group: the ranks that share a sequence.
        same_batches: the ranks of the group load the same batches.
        device: device to move the batches to; None leaves them where they are.

    Raises:
        UsageError: on every rank of the group: a batch cannot be cut, or a rank has fewer batches than another.
    """

    def __init__(
        self,
        loader: Iterable[Any],
        group: SequenceGroup,
        *,
        same_batches: bool = False,
        device: torch.device | None = None,
    ) -> None:
        self.loader = loader
        self._group = group
        self._same_batches = same_batches
        self._device = device

    def __getattr__(self, name: str) -> Any:
        # Trainers read `dataset`, `sampler`, `batch_size` and other attributes.
        return getattr(self.__dict__["loader"], name)

    def __len__(self) -> int:
        batches = len(self.loader)  # type: ignore[arg-type]
        return batches if self._same_batches else batches * self._group.size

    def __iter__(self) -> Iterator[dict[str, Any]]:
        batches = iter(self.loader)
        waiting: deque[dict[str, Any]] = deque()
        while True:
            if not waiting:
                waiting.extend(self._next(batches))
            if not waiting:
                return
            yield waiting.popleft()

    def _next(self, batches: Iterator[Any]) -> list[dict[str, Any]]:
        """Cuts the next batch of each rank; returns an empty list if the loader is exhausted."""
        if self._same_batches:
            return [self._placed(self._group.shard(batch)) for batch in itertools.islice(batches, 1)]
        collectives = self._group.collectives
        with agreed(collectives, "sequence parallelism: batch"):
            batch = next(batches, None)
            batch_on_host = None if batch is None else {name: _on_host(value) for name, value in dict(batch).items()}
        per_rank = collectives.gather_objects(batch_on_host, "batches of sequences")
        missing = [rank for rank, item in enumerate(per_rank) if item is None]
        if missing and len(missing) < len(per_rank):
            raise UsageError(
                "sequence parallelism",
                expected="the same number of batches on each rank that shares a sequence",
                got=f"no more batches on {collectives.named(missing)}",
                fix="use drop_last=True, or a loader that fills up the last batches",
            )
        return [] if missing else [self._placed(self._group.shard(item)) for item in per_rank]

    def _placed(self, batch: dict[str, Any]) -> dict[str, Any]:
        if self._device is None:
            return batch
        return {k: v.to(self._device, non_blocking=True) if isinstance(v, Tensor) else v for k, v in batch.items()}


def _length(batch: Mapping[str, Any]) -> int:
    for name in ("input_ids", "inputs_embeds"):
        if isinstance(batch.get(name), Tensor):
            length: int = batch[name].shape[1]
            break
    else:
        raise UsageError(
            "sequence parallelism",
            expected="a batch with input_ids or inputs_embeds",
            got=", ".join(batch) or "none",
        )
    for key, value in batch.items():
        if _is_cut(value) and value.shape[1] != length:
            raise UsageError(
                f"sequence parallelism: {key}",
                expected=f"(batch, sequence, ...) with {length} tokens, like {name}",
                got=tuple(value.shape),
                fix="remove it from the batch, or pass a mask of two dims",
            )
    return length


def _is_cut(value: Any) -> bool:
    return isinstance(value, Tensor) and value.ndim >= 2


def _on_host(value: Any) -> Any:
    return value.detach().cpu() if isinstance(value, Tensor) else value
