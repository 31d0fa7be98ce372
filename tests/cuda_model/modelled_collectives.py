"""Collectives and messages of one rank without the others: torch's group without peers, with a stream per group.

As in ProcessGroupNCCL, a collective runs on its group's stream, behind the current one, and holds its tensors
until `wait`; messages outside a batch have a communicator of the two ranks. The data of other ranks is unknown; results
are computed as if all ranks had the same data.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Any

from tests.cuda_model.fake_cuda import DEVICE, FakeCuda  # first: it loads the library before torch

import torch  # isort: skip
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor._sharding_prop import ShardingPropagator
from torch.utils._python_dispatch import _disable_current_modes

from tests.cuda_model.replacements import Replacements
from tests.cuda_model.stream_model import Moment, StreamModel
from zeroaccel.comm import rank_device, transport
from zeroaccel.comm import topology as topologies
from zeroaccel.comm.collectives import Collectives

Said = dict[tuple[str, int], dict[int, Any]]
"""Objects that ranks sent, by (label, number of the call), then by rank."""


class _Pending:
    """A collective on its group's stream; it holds its tensors until `wait`, like ProcessGroupNCCL."""

    def __init__(self, model: StreamModel, end: Moment, tensors: Sequence[Tensor]) -> None:
        self._model, self._end, self._tensors = model, end, tuple(tensors)

    def wait(self, timeout: object = None) -> bool:
        self._model.join(self._model.current_stream(), self._end)
        self._tensors = ()
        return True

    def is_completed(self) -> bool:
        return self._model.has_seen(self._model.thread, self._end)


class _PendingOnHost:
    """A collective in host memory; it blocks the thread that waits for it."""

    def __init__(self, model: StreamModel, op: str, communicator: str, ranks: tuple[int, ...]) -> None:
        self._model, self._op, self._communicator, self._ranks = model, op, communicator, ranks

    def wait(self, timeout: object = None) -> bool:
        self._model.control_collective(self._op)
        self._model.log.block_host(self._communicator, self._ranks, self._op)
        return True

    def is_completed(self) -> bool:
        return False


class _Groups:
    """The process groups of the job, each with a stream, like NCCL's communicators."""

    def __init__(self, cuda: FakeCuda) -> None:
        self._cuda = cuda
        self._streams: dict[object, int] = {}

    def collective(
        self,
        op: str,
        group: dist.ProcessGroup | None,
        reads: Sequence[Tensor],
        writes: Sequence[Tensor],
        share: float,
        async_op: bool,
    ) -> Any:
        """Records a collective; `share` of the larger tensor's bytes leave this rank."""
        model = self._cuda.model
        tensors = [*reads, *writes]
        group = group or dist.group.WORLD
        assert group is not None, "the default process group is missing"
        name, ranks = _name_of(group), tuple(dist.get_process_group_ranks(group))
        if all(tensor.device.type == "cpu" for tensor in tensors):
            self._cuda.on_host(op, reads, writes)
            pending: Any = _PendingOnHost(model, op, name, ranks)
        else:
            model.log.first_use(name, ranks, op)
            lane = self._stream_of(id(group), name)
            pending = self._enter(op, lane, reads, writes, share)
            model.log.launch(name, ranks, "collective", op, lane)
        if async_op:
            return pending
        pending.wait()
        return None

    def message(
        self, op: str, tensor: Tensor, peer: int | None, group: dist.ProcessGroup | None, group_peer: int | None
    ) -> _Pending:
        """Records a message outside a batch, for which NCCL has a communicator of the two ranks."""
        if peer is None:
            assert group_peer is not None, "the message has no peer"
            peer = dist.get_global_rank(group or dist.group.WORLD, group_peer)
        return self._message(op, tensor, peer, group, None)

    def batch(self, operations: Sequence[dist.P2POp]) -> list[_Pending]:
        """Records messages that are one call of NCCL: they run side by side, on the group's stream."""
        made: list[_Pending] = []
        for operation in operations:
            op = "isend" if operation.op is dist.isend else "irecv"
            made.append(self._message(op, operation.tensor, operation.peer, operation.group, made))
        return made

    def _message(self, op: str, tensor: Tensor, peer: int, group: Any, batch: list[_Pending] | None) -> _Pending:
        group = group or dist.group.WORLD
        own, model = dist.get_rank(), self._cuda.model
        pair = min(own, peer), max(own, peer)
        name = _name_of(group) if batch is not None else f"the pair {pair} of {_name_of(group)}"
        model.log.first_use(name, pair, f"message of {pair}")
        lane = self._stream_of((id(group), None if batch is not None else pair), name)
        reads, writes = ([tensor], []) if op == "isend" else ([], [tensor])
        pending = self._enter(op, lane, reads, writes, 1.0)
        if op == "irecv":
            self._cuda.compute(tensor, lambda: torch.ones(tensor.shape))
        arrow = f"{own} -> {peer}" if op == "isend" else f"{peer} -> {own}"
        model.log.launch(name, pair, arrow, op, lane, beside=len(batch or ()))
        return pending

    def _enter(self, op: str, lane: int, reads: Sequence[Tensor], writes: Sequence[Tensor], share: float) -> _Pending:
        model, rates, tensors = self._cuda.model, self._cuda.model.rates, (*reads, *writes)
        nbytes = int(share * max(tensor.numel() * tensor.itemsize for tensor in tensors))
        # The group's stream starts behind the current stream at the time of the call.
        model.join(lane, model.moment(model.current_stream()))
        seconds = rates.collective_seconds + nbytes / rates.network
        model.launch(lane, self._cuda.uses_of(reads), self._cuda.uses_of(writes), op, seconds, nbytes)
        return _Pending(model, model.moment(lane), tensors)

    def _stream_of(self, key: object, name: str) -> int:
        if key not in self._streams:
            self._streams[key] = self._cuda.model.add_stream(f"NCCL's stream ({name})")
        return self._streams[key]


def _name_of(group: dist.ProcessGroup) -> str:
    """Returns the name of a process group, the same on all its ranks: torch numbers the groups that it creates."""
    return f"group {group.group_name}"


def replace_collectives(cuda: FakeCuda, replacements: Replacements, said: Said) -> None:
    """Replaces the collectives of the package and torch. `said` has the objects that previously modelled ranks sent."""
    groups = _Groups(cuda)
    _replace_tensors(cuda, groups, replacements)
    _replace_messages(groups, replacements)
    _replace_functional(cuda, groups, replacements)
    calls: Counter[str] = Counter()

    def gather_objects(collectives: Collectives, obj: Any, label: str) -> list[Any]:
        ranks = tuple(collectives.ranks)
        if collectives.world_size > 1:
            cuda.model.control_collective("gather_objects")
            cuda.model.log.block_host(f"control of {ranks}", ranks, "gather_objects")
        calls[label] += 1
        of_ranks = said.setdefault((label, calls[label]), {})
        of_ranks[dist.get_rank()] = obj
        return [of_ranks.get(rank, obj) for rank in ranks]

    # Pickles have an unknown size; the collectives above carry numbers, and small tensors have values.
    replacements.set(Collectives, "gather_objects", gather_objects)
    # The package sees a job on NCCL, which needs connections.
    backends = f"cpu:fake,{DEVICE.type}:{rank_device.ACCELERATOR.backend},fake"
    replacements.set(dist, "get_backend_config", lambda group=None: backends)
    replacements.set(topologies, "_agreed_device", lambda device, *_: device)
    replacements.set(topologies, "_data_backend", lambda backend: None)


def _share_of_others(group: dist.ProcessGroup | None) -> float:
    size = dist.get_world_size(group)
    return (size - 1) / size


def _replace_tensors(cuda: FakeCuda, groups: _Groups, replacements: Replacements) -> None:
    others = _share_of_others

    def all_gather(out: Tensor, own: Tensor, group: Any = None, async_op: bool = False) -> Any:
        pending = groups.collective("all_gather", group, [own], [out], others(group), async_op)
        cuda.compute(out, lambda values: values.reshape(-1).repeat(out.numel() // max(own.numel(), 1)), own)
        return pending

    def reduce_scatter(out: Tensor, flat: Tensor, op: Any = None, group: Any = None, async_op: bool = False) -> Any:
        return groups.collective("reduce_scatter", group, [flat], [out], others(group), async_op)

    def all_to_all(
        out: Tensor, parts: Tensor, *splits: Any, group: Any = None, async_op: bool = False, **sizes: Any
    ) -> Any:
        return groups.collective("all_to_all", group, [parts], [out], others(group), async_op)

    def broadcast(tensor: Tensor, src: int = 0, group: Any = None, async_op: bool = False, **_: Any) -> Any:
        own = dist.get_rank() == src
        return groups.collective("broadcast", group, [tensor] if own else [], [] if own else [tensor], 1.0, async_op)

    def reduce(tensor: Tensor, dst: int, op: Any = None, group: Any = None, async_op: bool = False) -> Any:
        writes = [tensor] if dist.get_rank() == dst else []
        return groups.collective("reduce", group, [tensor], writes, 1.0, async_op)

    def all_reduce(tensor: Tensor, op: Any = dist.ReduceOp.SUM, group: Any = None, async_op: bool = False) -> Any:
        pending = groups.collective("all_reduce", group, [tensor], [tensor], 2 * others(group), async_op)
        if op == dist.ReduceOp.SUM:
            cuda.compute(tensor, lambda values: values * dist.get_world_size(group), tensor)
        return pending

    replacements.set(transport, "_all_gather", all_gather)
    replacements.set(transport, "_reduce_scatter", reduce_scatter)
    replacements.set(transport, "_all_to_all", all_to_all)
    replacements.set(dist, "broadcast", broadcast)
    replacements.set(dist, "reduce", reduce)
    replacements.set(dist, "all_reduce", all_reduce)


def _replace_messages(groups: _Groups, replacements: Replacements) -> None:
    def isend(tensor: Tensor, dst: Any = None, group: Any = None, tag: int = 0, group_dst: Any = None) -> Any:
        return groups.message("isend", tensor, dst, group, group_dst)

    def irecv(tensor: Tensor, src: Any = None, group: Any = None, tag: int = 0, group_src: Any = None) -> Any:
        return groups.message("irecv", tensor, src, group, group_src)

    for module in (dist, dist.distributed_c10d):  # torch compares the functions of a batch with its own
        replacements.set(module, "isend", isend)
        replacements.set(module, "irecv", irecv)
        replacements.set(module, "batch_isend_irecv", groups.batch)


def _replace_functional(cuda: FakeCuda, groups: _Groups, replacements: Replacements) -> None:
    """Replaces torch's functional collectives, which DTensors call."""
    pending: dict[int, _Pending] = {}  # by the result, for which a separate operation waits

    def begin_or_wait(op: str, args: Any, produced: Sequence[Tensor]) -> None:
        if op == "wait_tensor":
            if (begun := pending.pop(args[0].untyped_storage()._cdata, None)) is not None:
                begun.wait()
            return
        group = dist.distributed_c10d._resolve_process_group(args[-1])
        share = (2 if op == "all_reduce" else 1) * _share_of_others(group)
        begun = groups.collective(op, group, [args[0]], produced, share, async_op=True)
        pending[produced[0].untyped_storage()._cdata] = begun

    cuda.functional = begin_or_wait
    # A tensor of ranks, not of the model: torch computes this rank's place in it.
    mesh_of = topologies.mesh_of

    def real_mesh_of(*arguments: Any) -> Any:
        with _disable_current_modes():
            return mesh_of(*arguments)

    replacements.everywhere(mesh_of, real_mesh_of)
    # DTensor computes a result's shape with tensors that have no content.
    shape_of = ShardingPropagator._propagate_tensor_meta_non_cached

    def shape_apart(*arguments: Any) -> Any:
        with _disable_current_modes():
            return shape_of(*arguments)

    replacements.set(ShardingPropagator, "_propagate_tensor_meta_non_cached", shape_apart)
