"""Weights in host memory that the device is still writing, and buffers whose memory a program may keep."""

from __future__ import annotations

from unittest.mock import Mock

import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from zeroaccel.zero.layout import FlatLayout
from zeroaccel.zero.param_unit import FlatBuffer
from zeroaccel.zero.storage.copy_stream import CopyStream
from zeroaccel.zero.storage.placement import BufferPlan
from zeroaccel.zero.storage.shards import MemoryShard, ShardPlace


@pytest.fixture
def buffer() -> FlatBuffer:
    layout = FlatLayout.build([("weight", (50,))], 1)
    plan = BufferPlan("", 0, layout, (nn.Parameter(torch.zeros(50)),), torch.float32, (0,), persistent=False)
    made = FlatBuffer(plan, torch.device("cpu"))
    place = ShardPlace("", layout, 0, made.full)
    made.adopt(torch.arange(float(layout.numel)), MemoryShard.on_device(place))
    return made


def test_the_host_waits_for_the_writes_of_an_update(buffer: FlatBuffer) -> None:
    values, numel = torch.zeros(buffer.own.numel), buffer.own.numel
    copies = Mock()
    shard = MemoryShard(ShardPlace("", buffer.layout, 0, buffer.full, None, copies), values)
    shard.stage()
    shard.gather_input()
    assert not copies.finish_writes.called, "an update and a gather follow the write on the device"
    uses = [
        lambda: shard.elements(shard.range),
        lambda: shard.write(shard.range, torch.ones(numel)),
        lambda: shard.replace(torch.ones(numel)),
        lambda: shard.load(lambda part, target: target.zero_(), lambda: None),
    ]
    for count, use in enumerate(uses, 1):
        use()
        assert copies.finish_writes.call_count == count


@pytest.mark.parametrize(("event", "finish"), [("_last_read", "finish_reads"), ("_last_write", "finish_writes")])
def test_a_copy_that_begins_during_a_wait_of_another_thread_is_awaited_later(event: str, finish: str) -> None:
    copies = object.__new__(CopyStream)
    first, second = Mock(**{"query.return_value": False}), Mock(**{"query.return_value": False})
    first.synchronize.side_effect = lambda: setattr(copies, event, second)  # the main thread begins the next copy
    setattr(copies, event, first)
    getattr(copies, finish)()
    assert first.synchronize.called
    getattr(copies, finish)()
    assert second.synchronize.called


class _Allocations(TorchDispatchMode):
    """Records the number of elements of every new tensor."""

    def __init__(self) -> None:
        super().__init__()
        self.numels: list[int] = []

    def __torch_dispatch__(self, func: object, types: object, args: tuple = (), kwargs: dict | None = None) -> object:
        out = func(*args, **(kwargs or {}))
        if "empty" in str(func) and isinstance(out, Tensor):
            self.numels.append(out.numel())
        return out


def test_memory_that_a_program_keeps_is_not_allocated_anew_to_be_freed(buffer: FlatBuffer) -> None:
    kept = buffer.params[0].data
    buffer.point(unsharded=False)
    with _Allocations() as allocations:
        buffer.replace_storage()
    assert allocations.numels == [1]
    assert buffer.full.shape == (buffer.layout.numel,)
    assert buffer.full.untyped_storage().nbytes() == 0
    buffer.allocate()
    buffer.full.fill_(7.0)
    buffer.point(unsharded=True)
    assert kept.tolist() == list(range(50))
    assert buffer.params[0].tolist() == [7.0] * 50
