"""Sequence parallelism: the ranks that share a sequence, and what goes between them.

(Ulysses: Jacobs et al., 2023, arXiv:2309.14509, section 3.) A sequence of S tokens is cut into P runs of s = S / P, one
per rank. Everything but attention works on tokens by themselves. For attention the ranks exchange parts: each gives up
its run of the other heads and gets all tokens of its own, and gives them back afterwards (`ulysses.py`).

Labels are shifted before the cut, since the last token of a run predicts the first of the next one. A rank's loss is
the mean over its own labels, so the sequence's loss is their mean weighted by how many labels count on each rank.
"""

from __future__ import annotations

import itertools
from collections import deque
from collections.abc import Iterable, Iterator, Mapping
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
"""Positions with this label do not count, as in torch's and transformers' losses."""

SHIFTED_LABELS = "shift_labels"
"""The name of the labels of a batch that was cut: those of the next token."""


class SequenceGroup:
    """The ranks of one sequence.

    Attributes:
        rank: 0 has the sequence's beginning.
        size: P.
        collectives: over these ranks.
        checks: the same for exchanges that other groups of the job do not make at the same time.
        process_group: of these ranks, for a program's own calls of torch.distributed; nothing here uses it.

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
        self._counted: Any = WeakIdKeyDictionary()  # positions that `shard` has made

    def counts_from_0(self, positions: Tensor) -> bool:
        """Whether `shard` has made these positions: each row is one sequence, which need not be read on the device."""
        return positions in self._counted

    @classmethod
    def of(
        cls, topology: Topology, size: int, *, stride: int = 1, recorder: FlightRecorder | None = None
    ) -> SequenceGroup:
        """The group of this rank, of `size` ones. (all ranks)

        Args:
            stride: how far apart they are: ranks between them share layers with them (`tp`).
            recorder: of the calls, where ranks elsewhere in the job issue others.
        """
        if size == 1:  # no process groups are made where nothing is exchanged
            job = topology.all_ranks
            own = RankGroup((topology.rank,), 0, job.gather_group, job.reduce_group, job.control_group)
            return cls(Collectives(topology, own), job.reduce_group)
        blocks = consecutive((topology.all_ranks.ranks,), size * stride)
        group = subgroup(topology, tuple(block[place::stride] for block in blocks for place in range(stride)))
        connect(topology, {"sequences": (group.gather_group, ("all_gather", "all_to_all"))})
        # Sequences of other groups may have other lengths.
        alone = topology.recorder(f"sequences of ranks {group.ranks}", group.ranks, alike=True)
        checks = Collectives(topology, group, recorder=alone)
        return cls(Collectives(topology, group, records_sizes=False, recorder=recorder), group.reduce_group, checks)

    def shard(self, batch: Mapping[str, Any]) -> dict[str, Any]:
        """This rank's run of a batch of whole sequences, which all ranks of the group have.

        Tensors of two and more dims, (B, S, ...), are cut along the second; everything else stays. `labels` become
        `shift_labels`, those of the next token. Without `position_ids`, tokens count from 0.

        Raises:
            UsageError: S is not divisible by the ranks, or a tensor has another length.
        """
        length = _length(batch)
        if length % self.size:
            raise UsageError(
                "sequence parallelism",
                expected=f"a sequence length that is divisible by the {self.size} ranks of a sequence",
                got=f"{length} tokens",
                fix=f"pad to a multiple of {self.size} (pad_to_multiple_of={self.size} of transformers' collators)",
            )
        whole = dict(batch)
        labels = whole.pop("labels", None)
        if labels is not None and SHIFTED_LABELS not in whole:
            whole[SHIFTED_LABELS] = functional.pad(labels, (0, 1), value=IGNORED_LABEL)[..., 1:]
        counts = "position_ids" not in whole
        if counts:
            ids = whole["input_ids"] if "input_ids" in whole else whole["inputs_embeds"]
            whole["position_ids"] = torch.arange(length, device=ids.device).expand(len(ids), -1)
        own = slice(self.rank * (length // self.size), (self.rank + 1) * (length // self.size))
        cut = {name: value[:, own].contiguous() if _is_cut(value) else value for name, value in whole.items()}
        if counts:
            self._counted[cut["position_ids"]] = True
        return cut

    def mean_loss(self, loss: Tensor, labels: Tensor) -> Tensor:
        """The loss of whole sequences, the same value on each rank of the group. (all ranks of the group)

        Its gradient on each rank is such that gradients averaged over all ranks are those of the whole batch.

        Args:
            loss: the mean over this rank's labels; whatever it is where none counts.
            labels: this rank's, shifted.
        """
        with torch.no_grad():
            count = (labels != IGNORED_LABEL).sum()
            own = torch.stack([torch.where(count > 0, loss.detach().double(), 0.0), count.double()])
            losses, counts = self.gather(own.view(1, 1, 2))[0].unbind(1)
            total = counts.sum().clamp(min=1)
            mean = (losses * counts).sum() / total
        weight = (self.size * count / total).to(loss.dtype)
        scaled = torch.where(count > 0, loss, 0.0) * weight
        # The value of the mean, with the gradient of this rank's part: the difference has none.
        return scaled + (mean.to(loss.dtype) - scaled).detach()

    def gather(self, own: Tensor) -> Tensor:
        """(B, s, ...) -> (B, S, ...): the runs of all ranks, without a gradient. (all ranks of the group)"""
        own = own.detach().contiguous()
        runs = own.new_empty(self.size * own.numel())
        self.collectives.all_gather(runs, own.view(-1), "gather sequences").wait()
        return runs.view(self.size, *own.shape).movedim(0, 1).reshape(own.shape[0], -1, *own.shape[2:])

    def exchange(self, parts: Tensor, label: str) -> Tensor:
        """(P, n) -> (P, n): row r of the result is row `rank` of rank r. Differentiable. (all ranks of the group)"""
        exchanged: Tensor = _Exchange.apply(parts, self, label)  # type: ignore[no-untyped-call]
        return exchanged

    def exchange_rows(self, parts: Tensor, label: str) -> Tensor:
        """As `exchange`, without a gradient."""
        parts = parts.contiguous()
        out = torch.empty_like(parts)
        self.collectives.all_to_all(out, parts, label).wait()
        return out


class _Exchange(torch.autograd.Function):
    """An all-to-all of equal parts, which is its own transpose."""

    @staticmethod
    def forward(ctx: Any, parts: Tensor, group: SequenceGroup, label: str) -> Tensor:
        ctx.group, ctx.label = group, label
        return group.exchange_rows(parts, label)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None]:
        return ctx.group.exchange_rows(grads[0], f"{ctx.label}, backward"), None, None


class SequenceLoader:
    """A loader's batches, cut along the sequence. (all ranks of the group, together)

    Where each rank of the group loads batches of its own, as data loaders for all ranks do, one batch per rank
    becomes P batches for the group, one after another. Where they load the same ones, as loaders for data-parallel
    ranks do, each batch is cut as it is.

    Args:
        loader: its batches are mappings with `input_ids` or `inputs_embeds`.
        group: the ranks of a sequence.
        same_batches: the ranks of the group load the same batches.
        device: of the batches; None leaves them where they are.

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
        # `dataset`, `sampler`, `batch_size` and the like, which trainers ask for.
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
        """What the next batch of each rank is cut into; empty where there is none."""
        if self._same_batches:
            return [self._placed(self._group.shard(batch)) for batch in itertools.islice(batches, 1)]
        collectives = self._group.collectives
        with agreed(collectives, "sequence parallelism: batch"):
            batch = next(batches, None)
            own = None if batch is None else {name: _on_host(value) for name, value in dict(batch).items()}
        per_rank = collectives.gather_objects(own, "batches of sequences")
        missing = [rank for rank, item in enumerate(per_rank) if item is None]
        if missing and len(missing) < len(per_rank):
            raise UsageError(
                "sequence parallelism",
                expected="as many batches on each rank of a sequence",
                got=f"none left on {collectives.named(missing)}",
                fix="drop_last=True, or a loader that fills up the last batches",
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
                expected=f"(batch, sequence, ...) with {length} tokens, as {name} has",
                got=tuple(value.shape),
                fix="leave it out of the batch, or make it a mask of two dims",
            )
    return length


def _is_cut(value: Any) -> bool:
    return isinstance(value, Tensor) and value.ndim >= 2


def _on_host(value: Any) -> Any:
    return value.detach().cpu() if isinstance(value, Tensor) else value
