"""A script, run by `test_first_uses.py`: which process groups engines use for the first time during training.

    python first_uses.py CASE ...

NCCL connects the ranks of a group at the first use of each kind of collective and, for messages outside of batches, of
each pair of ranks. Gloo does not, so the script records each use by the operation that NCCL would issue for it
(`NativeTransport`), and the topology connects its groups as it does with NCCL.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

import zeroaccel
from tests.support.mesh_training import small_llama, train_micro_step
from tests.support.training import ADAMW, SGD, Toy, batches, config, train_step
from zeroaccel.comm import topology as topologies
from zeroaccel.comm.tracked_group import TrackedGroup
from zeroaccel.comm.transport import P2PTransport
from zeroaccel.parallel import ParallelConfig

UNCONNECTED = ", unconnected"
MUON = {"type": "Muon", "params": {"lr": 0.01}}
NODES = {"node_size": 2, "quantize_gradients_on_one_node": True}


class Uses:
    """Records (group, kind) of every use; a message between two ranks names the pair in its kind.

    Attributes:
        connecting: True while uses serve to connect.
        connected: uses that served to connect.
        first: uses of the program, in order, that were not connected before.
    """

    def __init__(self) -> None:
        self.connecting = False
        self.connected: set[tuple[str, str]] = set()
        self.first: list[tuple[str, str]] = []

    def note(self, group: dist.ProcessGroup, kind: str) -> None:
        """Records one use, unless it is of a control group, because these use gloo with every backend."""
        topology = topologies._current
        if topology is not None:
            controls = [one.control_group for one in topology[1].subgroups.values()]
            if any(group is one for one in [topology[1].control_group, *controls]):
                return
        use = (group.group_name, kind)
        if self.connecting:
            self.connected.add(use)
        elif use not in self.connected and use not in self.first:
            self.first.append(use)


def watch(uses: Uses) -> None:
    """Records all uses from now on."""
    begin, init = topologies._FirstUse.wait, P2PTransport.__init__

    def wait(first: Any, *arguments: Any) -> bool:
        uses.connecting = True
        try:
            return begin(first, *arguments)
        finally:
            uses.connecting = False

    def made(transport: P2PTransport, group: dist.ProcessGroup, *arguments: Any) -> None:
        init(transport, group, *arguments)
        transport.group = group  # type: ignore[attr-defined]

    topologies._FirstUse.wait = wait  # type: ignore[method-assign]
    P2PTransport.__init__ = made  # type: ignore[method-assign]
    by_parts = {"all_gather": "broadcast", "reduce_scatter": "reduce"}
    for name in ("all_gather", "reduce_scatter", "all_to_all", "broadcast", "send"):
        setattr(P2PTransport, name, _noted(getattr(P2PTransport, name), name, by_parts.get(name), uses))

    start = TrackedGroup._start

    def started(group: TrackedGroup, kind: Any, op: str, *arguments: Any) -> dist.Work:
        uses.note(group._target, op)
        return start(group, kind, op, *arguments)

    TrackedGroup._start = started  # type: ignore[method-assign]
    _watch_torch(uses)


def _noted(call: Callable[..., Any], name: str, by_parts: str | None, uses: Uses) -> Callable[..., Any]:
    def noted(transport: Any, *arguments: Any) -> Any:
        is_split = by_parts is not None and bool(arguments[2])
        # Only sums over replicas send to one rank; NCCL issues an all-reduce for them.
        kind = "all_reduce" if name == "send" else (by_parts or name) if is_split else name
        uses.note(transport.group, kind)
        return call(transport, *arguments)

    return noted


def _watch_torch(uses: Uses) -> None:
    """Records calls of torch's functions: for connecting, for pipeline schedules, and for shared parameters."""
    batch = dist.batch_isend_irecv

    def batched(operations: Sequence[dist.P2POp]) -> Any:
        for operation in operations:
            peers = sorted({dist.get_rank(), operation.peer})
            assert operation.group is not None
            uses.note(operation.group, f"messages of {peers}")
        return batch(list(operations))

    dist.batch_isend_irecv = batched
    for name in ("all_reduce", "broadcast", "reduce", "all_to_all_single"):
        setattr(dist, name, _noted_call(getattr(dist, name), name.removesuffix("_single"), uses))
    from zeroaccel.comm import transport

    for name in ("all_gather", "reduce_scatter", "all_to_all"):
        setattr(transport, f"_{name}", _noted_call(getattr(transport, f"_{name}"), name, uses))
    for name in ("isend", "irecv", "send", "recv"):
        alone = _alone(getattr(dist, name), uses)
        setattr(dist, name, alone)
        setattr(dist.distributed_c10d, name, alone)  # torch compares the operations of a batch with these


def _noted_call(call: Callable[..., Any], kind: str, uses: Uses) -> Callable[..., Any]:
    def noted(*arguments: Any, group: dist.ProcessGroup, **keywords: Any) -> Any:
        uses.note(group, kind)
        return call(*arguments, group=group, **keywords)

    return noted


def _alone(call: Callable[..., Any], uses: Uses) -> Callable[..., Any]:
    """Wraps a message function: outside of batches, NCCL makes a communicator per pair of ranks."""

    def noted(tensor: Tensor, *places: Any, **names: Any) -> Any:
        if sys._getframe(1).f_code.co_name not in ("batch_isend_irecv", "send", "recv"):
            group = places[1] if len(places) > 1 else names["group"]
            in_group = [names[name] for name in ("group_dst", "group_src") if names.get(name) is not None]
            in_job = [*places[:1], *(names[name] for name in ("dst", "src") if names.get(name) is not None)]
            peer = in_job[0] if in_job else dist.get_global_rank(group, in_group[0])
            uses.note(group, f"messages of {sorted({dist.get_rank(), peer})} alone")
        return call(tensor, *places, **names)

    return noted


def _train_toy(settings: Mapping[str, Any]) -> None:
    engine, *_ = zeroaccel.initialize(Toy(), config=dict(settings))
    for tokens in batches(dist.get_rank(), 2):
        train_step(engine, engine(tokens))
    engine.destroy()


def _train_llama(**mesh: int) -> None:
    engine, *_ = zeroaccel.initialize(
        small_llama(), config=config(3, "bf16", optimizer=SGD), parallel=ParallelConfig(**mesh)
    )
    ids = torch.randint(64, (2, 8), generator=torch.Generator().manual_seed(engine.collectives.rank))
    batch: dict[str, Tensor] = {"input_ids": ids, "labels": ids}
    for _ in range(2):
        train_micro_step(engine, engine.sequence_group.shard(batch) if mesh.get("sp", 1) > 1 else dict(batch))
    engine.destroy()


def _train_stages(schedule: str) -> None:
    model = small_llama(num_hidden_layers=4, tie_word_embeddings=True)
    engine, *_ = zeroaccel.initialize(
        model,
        config=config(1, "bf16", 4, optimizer=SGD),
        parallel=ParallelConfig(pp=dist.get_world_size()),
        pipeline=zeroaccel.PipelineConfig(schedule=schedule),
    )
    generator = torch.Generator().manual_seed(engine.collectives.rank)
    ids = [torch.randint(64, (2, 8), generator=generator) for _ in range(8)]
    data = iter([{"input_ids": one, "labels": one} for one in ids])
    engine.train_batch(data)
    engine.train_batch(data)
    engine.destroy()


CASES: Mapping[str, Callable[[], None]] = {
    "stage 2": lambda: _train_toy(config(2, "bf16", optimizer=ADAMW, gradient_clipping=1.0)),
    "stage 3": lambda: _train_toy(config(3, "bf16", optimizer=ADAMW)),
    "stage 3, Muon": lambda: _train_toy(config(3, "bf16", optimizer=MUON)),
    "hpZ": lambda: _train_toy(config(3, "bf16", optimizer=SGD, zero_hpz_partition_size=2)),
    "MiCS": lambda: _train_toy(config(3, "bf16", optimizer=SGD, mics_shard_size=2)),
    "qgZ": lambda: _train_toy(config(3, "bf16", optimizer=SGD, zero_quantized_gradients=True, zeropp=NODES)),
    "sequences": lambda: _train_llama(sp=2),
    "split layers": lambda: _train_llama(tp=2),
    "stages": lambda: _train_stages("1f1b"),
    "several stages on a rank": lambda: _train_stages("interleaved_1f1b"),
}


def main() -> None:
    """Prints the uses during training that were not connected before."""
    uses = Uses()
    watch(uses)
    topologies._connects_at_first_use = lambda topology: True
    dist.init_process_group("gloo")
    topologies.init_process_group()
    for name in sys.argv[1:]:
        uses.first.clear()
        topologies._connects_at_first_use = lambda topology, name=name: not name.endswith(UNCONNECTED)
        CASES[name.removesuffix(UNCONNECTED)]()
        kinds = ", ".join(sorted({kind for _, kind in uses.first}))
        print(f"{name}: {kinds or 'nothing'}")


if __name__ == "__main__":
    main()
