"""Bugs planted into the engine, each of a kind that a change could introduce; the model has to find all of them.

Most remove one wait: a call of a stream or an event in one function. The others replace a method of the engine.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from importlib import import_module
from types import FrameType
from typing import TYPE_CHECKING, Any

from tests.cuda_model.replacements import Replacements

if TYPE_CHECKING:
    from torch import Tensor

    from zeroaccel.checkpoint.rank_file_writer import RankFileWriter
    from zeroaccel.comm.collective_tracker import MessageWork
    from zeroaccel.comm.collectives import Collectives
    from zeroaccel.zero.grad_norm import DeviceStats
    from zeroaccel.zero.grad_reducer import GradReducer
    from zeroaccel.zero.param_unit import ParamUnit
    from zeroaccel.zero.storage.copy_stream import CopyStream
    from zeroaccel.zero.storage.shards import SecondaryShard

_Plant = Callable[[Replacements], None]


@dataclass(frozen=True)
class Bug:
    """A planted bug.

    Attributes:
        case: name of the case that exposes it.
        plant: replaces code of the engine.
        finding: part of a finding or of an early free that the model must report.
    """

    case: str
    plant: _Plant
    finding: str


def _class(name: str) -> type:
    """Returns a class by its full name: only the process of the model may import modules that import torch."""
    module, _, attribute = name.rpartition(".")
    found: type = getattr(import_module(module), attribute)
    return found


def _without(owner: str, method: str, file: str, function: str, result: object = None) -> _Plant:
    """Removes the calls of a method that one function of a file makes."""

    def plant(replacements: Replacements) -> None:
        original = vars(_class(owner))[method]

        def replaced(self: Any, *args: Any, **kwargs: Any) -> Any:
            caller: FrameType = sys._getframe(1)
            if caller.f_code.co_name == function and caller.f_code.co_filename.endswith(file):
                return result
            return original(self, *args, **kwargs)

        replacements.set(_class(owner), method, replaced)

    return plant


def _no_stream_wait(file: str, function: str) -> _Plant:
    return _without("tests.cuda_model.fake_cuda._Stream", "wait_stream", file, function)


def _no_event_of_stream(file: str, function: str) -> _Plant:
    return _without("tests.cuda_model.fake_cuda._Stream", "wait_event", file, function)


def _no_event_wait(file: str, function: str) -> _Plant:
    return _without("tests.cuda_model.fake_cuda._Event", "wait", file, function)


def _no_synchronize(file: str, function: str) -> _Plant:
    return _without("tests.cuda_model.fake_cuda._Event", "synchronize", file, function)


def _no_record_stream(file: str, function: str) -> _Plant:
    return _without("torch.Tensor", "record_stream", file, function)


def _both(*plants: _Plant) -> _Plant:
    def plant(replacements: Replacements) -> None:
        for each in plants:
            each(replacements)

    return plant


def _with(owner: str, method: str, replaced: Callable[..., Any]) -> _Plant:
    """Replaces a method; `replaced` is called with the original one before its arguments."""

    def plant(replacements: Replacements) -> None:
        original = vars(_class(owner))[method]
        replacements.set(_class(owner), method, lambda self, *args, **kw: replaced(original, self, *args, **kw))

    return plant


def _wait_for_no_gather(original: Callable[..., Any], unit: ParamUnit) -> None:
    unit._works.clear()
    original(unit)


def _complete_at_once(original: Callable[..., Any], work: MessageWork) -> None:
    complete, work._complete = work._complete, None
    if complete is not None:
        complete()


def _wait_for_one_gather(original: Callable[..., Any], unit: ParamUnit) -> None:
    del unit._works[1:]
    original(unit)


def _forget_gathers(original: Callable[..., Any], unit: ParamUnit, **how: Any) -> None:
    if unit.state.value == "gathering":
        unit._works.clear()
    original(unit, **how)


def _free_before_use(original: Callable[..., Any], unit: ParamUnit) -> None:
    original(unit)
    for buffer in unit.buffers:
        buffer.free()


def _keep_a_view(original: Callable[..., Any], secondary: SecondaryShard, full: Tensor, ranks: Collectives) -> None:
    original(secondary, full, ranks)
    if secondary._part is not None:
        numel = secondary._part.numel()
        secondary._part = full[ranks.secondary_rank * numel :][:numel]


def _keep_what_is_freed(original: Callable[..., Any], secondary: SecondaryShard, full: Tensor, ranks: Any) -> None:
    full.untyped_storage().resize_(0)
    original(secondary, full, ranks)


def _release_at_once(original: Callable[..., Any], writer: RankFileWriter) -> Any:
    filled = original(writer)
    if filled is not None:
        writer._staging._free.put(filled.chunk)
    return filled


def _put_nothing_back(original: Callable[..., Any], staging: Any, chunk: Tensor) -> None:
    """Does nothing: the buffer has been put back already."""


def _refill(replacements: Replacements) -> None:
    _with(f"{_WRITER}.RankFileWriter", "_next", _release_at_once)(replacements)
    _with(f"{_WRITER}.Staging", "release", _put_nothing_back)(replacements)


def _select_nothing(replacements: Replacements) -> None:
    from zeroaccel.ops import device_threads

    replacements.set(device_threads, "_select", lambda device: None)


def _copies_on_current_device(original: Callable[..., Any], writer: RankFileWriter) -> None:
    import torch

    writer._copies._stream = torch.cuda.Stream()  # type: ignore[attr-defined]
    original(writer)


def _event_of_default_stream(original: Callable[..., Any], copies: Any) -> Any:
    import torch

    event = torch.cuda.Event()
    event.record(torch.cuda.default_stream(copies._stream.device))
    return event.synchronize


def _wait_for_current_device(original: Callable[..., Any], writer: RankFileWriter, *arguments: Any) -> Any:
    import torch

    torch.cuda.synchronize()
    return original(writer, *arguments)


def _one_word(original: Callable[..., Any], stats: DeviceStats, summary: Tensor) -> None:
    import torch

    made = torch.empty

    def empty(*shape: Any, **options: Any) -> Tensor:
        if not options.get("pin_memory"):
            return made(*shape, **options)
        if not _WORD:
            _WORD.append(made(*shape, **options))
        return _WORD[0]

    torch.empty = empty  # type: ignore[assignment]
    try:
        original(stats, summary)
    finally:
        torch.empty = made  # type: ignore[assignment]


_WORD: list[Tensor] = []


def _share_one_word(replacements: Replacements) -> None:
    _WORD.clear()  # of another run's model
    _with("zeroaccel.zero.grad_norm.DeviceStats", "_copy", _one_word)(replacements)


def _new_kind_in_a_hook(original: Callable[..., Any], reducer: GradReducer, *arguments: Any, **how: Any) -> None:
    import torch

    torch.distributed.broadcast(torch.zeros(1, device=reducer.device), 0)
    original(reducer, *arguments, **how)


def _connect_nothing(replacements: Replacements) -> None:
    from zeroaccel.comm import topology

    replacements.everywhere(topology.connect, lambda *arguments, **how: None)


def _connect_no_peers(replacements: Replacements) -> None:
    from zeroaccel.comm import topology

    replacements.everywhere(topology.connect_peers, lambda *arguments, **how: None)


def _one_communicator(original: Callable[..., Any], ranks: Collectives, *arguments: Any, **how: Any) -> None:
    original(ranks, *arguments, **how)
    if ranks.world_size > 1:
        ranks._gathers = ranks._shard_gathers = ranks._reductions


def _reduce_into_nothing(original: Callable[..., Any], reducer: Any, out: Any, *arguments: Any, **how: Any) -> Any:
    from zeroaccel.comm.collectives import DONE

    return DONE


def _free_what_is_reduced(original: Callable[..., Any], ranks: Any, out: Tensor, flat: Tensor, *rest: Any) -> Any:
    work = original(ranks, out, flat, *rest)
    flat.untyped_storage().resize_(0)
    return work


def _unfilled(original: Callable[..., Any], optimizer: Any, param: Tensor, shape: Any, dtype: Any, *_: Any) -> Any:
    """Returns moments that nothing fills."""
    return param.new_empty(tuple(shape), dtype=dtype)


def _copy_nothing(original: Callable[..., Any], copies: CopyStream, source: Tensor, work: Any, *rest: Any) -> Any:
    from zeroaccel.zero.storage.copy_stream import CopyHandle

    handle = original(copies, source, work, *rest)
    if source.numel() < 16:  # facts that the ranks found
        return handle
    host = copies._arena.empty(source.shape, source.dtype)
    return CopyHandle(host, source, handle._ready, handle._copied)


def _forget_streams(replacements: Replacements) -> None:
    import torch

    from zeroaccel.offload.page_locked import copying_stream

    replacements.everywhere(copying_stream, lambda device: torch.get_device_module(device).Stream(device))


def _prefetch_on_rank_0_only(replacements: Replacements) -> None:
    """Rank 1 gathers each unit at its use, so its gathers and reductions have another order than those of rank 0."""
    import torch

    trace = _class("zeroaccel.zero.prefetch.PrefetchTrace")
    need = vars(trace)["need"]

    def need_on(self: Any, *arguments: Any) -> Any:
        ahead = need(self, *arguments)
        return () if torch.distributed.get_rank() == 1 else ahead

    replacements.set(trace, "need", need_on)


def _waiting(original: Callable[..., Any], ranks: Collectives, *arguments: Any, **how: Any) -> Any:
    """As in the unlocking of pages or a second attempt to allocate, the host waits for the device."""
    import torch

    torch.cuda.synchronize()
    work = original(ranks, *arguments, **how)
    torch.cuda.synchronize()
    return work


_WAIT_AT_REDUCTIONS = _with("zeroaccel.comm.collectives.Collectives", "reduce_scatter", _waiting)

ORDERS: Mapping[str, _Plant] = {
    "waits in one order": _WAIT_AT_REDUCTIONS,
    "another order": _prefetch_on_rank_0_only,
    "waits in another order": _both(_prefetch_on_rank_0_only, _WAIT_AT_REDUCTIONS),
}
"""Changes of the order of gathers and reductions, for the logs of two ranks; only the last one is a deadlock."""

_COPIES, _ACTIVATIONS = "zero/storage/copy_stream.py", "offload/activation_store.py"
_UNIT, _SECONDARY = "zeroaccel.zero.param_unit.ParamUnit", "zeroaccel.zero.storage.shards.SecondaryShard"
_WRITER = "zeroaccel.checkpoint.rank_file_writer"
_COPY_STREAM = "zeroaccel.zero.storage.copy_stream.CopyStream"
_TRACKER = "zeroaccel.comm.collective_tracker"
_SMALL_CHUNKS = "a checkpoint saved in the background, small chunks"
_BOTH, _BACKGROUND = "stage 3, both on the host", "a checkpoint saved in the background"

BUGS: Mapping[str, Bug] = {
    "gathers are not waited for": Bug(
        "stage 3", _with("zeroaccel.zero.param_unit.ParamUnit", "wait", _wait_for_no_gather), "READ AFTER WRITE"
    ),
    "no collective is waited for": Bug(
        "stage 3", _with("zeroaccel.comm.collective_tracker.MessageWork", "wait", _complete_at_once), "READ AFTER WRITE"
    ),
    "a reduction in two hops is not waited for": Bug(
        "stage 3, qgZ", _no_event_of_stream("comm/hierarchical.py", "wait"), "READ AFTER WRITE"
    ),
    "a reduction in two hops does not wait for the gradients": Bug(
        "stage 3, qgZ", _no_stream_wait("comm/hierarchical.py", "run_on"), "READ AFTER WRITE"
    ),
    "copies to the device do not wait for the memory": Bug(
        _BOTH, _no_stream_wait(_COPIES, "to_device"), "USED TOO EARLY"
    ),
    "weights are used before they are copied": Bug(
        _BOTH, _no_event_wait("storage/shards.py", "wait"), "READ AFTER WRITE"
    ),
    "shards change while they are copied": Bug(
        "evaluation before the step, both on the host", _no_synchronize(_COPIES, "finish_reads"), "WRITE AFTER READ"
    ),
    "gradients leave before they are reduced": Bug(
        "stage 2, optimizer on the host, several ranks", _no_event_wait(_COPIES, "to_host"), "READ AFTER WRITE"
    ),
    "a gradient's memory goes back while it is copied": Bug(
        "stage 2, optimizer on the host", _no_event_wait(_COPIES, "drop_source"), "FREED IN USE"
    ),
    "gradients are freed before their reduction": Bug(
        "stage 2, optimizer on the host, small buckets", _no_event_wait(_COPIES, "wait_for_source"), "FREED IN USE"
    ),
    "codes behind a copy are freed before decoding": Bug(
        "stage 3, qwZ, parameters on the host",
        _no_record_stream("comm/hierarchical.py", "decode"),
        "waits for all_gather",
    ),
    "the host reads gradients before they have come": Bug(
        "stage 2, optimizer on the host", _no_synchronize(_COPIES, "finish"), "READ AFTER WRITE"
    ),
    "an update in the next step begins before its gradients have come": Bug(
        "stage 2, update during the next step", _no_synchronize(_COPIES, "finish"), "READ AFTER WRITE"
    ),
    "weights of an update in another thread are installed before it ends": Bug(
        "stage 2, update during the next step",
        _without("tests.cuda_model.model_threads._Result", "result", "zero/update_thread.py", "install", 0.0),
        "not ordered after",
    ),
    "an early update reads a gradient that is on its way": Bug(
        "stage 2, update during the backward",
        _no_synchronize("copy_stream.py", "wait"),
        "READ AFTER WRITE",
    ),
    "spare memory is exchanged before its update ends": Bug(
        "stage 2, update during the backward",
        _without("tests.cuda_model.model_threads._Result", "result", "zero/update_thread.py", "install", 0.0),
        "not ordered after",
    ),
    "weights are used before their update": Bug(
        "stage 3, both on the host",
        _without("tests.cuda_model.model_threads._Result", "result", "zero/update_thread.py", "install", 0.0),
        "not ordered after",
    ),
    "the host reads the norm before it has come": Bug(
        "stage 2", _no_synchronize("zero/grad_norm.py", "read"), "READ AFTER WRITE"
    ),
    "a file's data is used before it is read": Bug(
        "stage 3, parameters in files",
        _without("tests.cuda_model.model_threads._Event", "wait", "offload/nvme.py", "wait"),
        "not ordered after",
    ),
    "a buffer goes back to its tier while the device copies it": Bug(
        "stage 3, parameters in files",
        _with("zeroaccel.offload.nvme.NvmeTier", "release", lambda original, tier, buffer, **_: original(tier, buffer)),
        "not ordered after",
    ),
    "activations leave before they are computed": Bug(
        "stage 2, activations on the host", _no_stream_wait(_ACTIVATIONS, "copy_to_host"), "READ AFTER WRITE"
    ),
    "activations are used before they are back": Bug(
        "stage 2, activations on the host", _no_event_wait(_ACTIVATIONS, "wait"), "READ AFTER WRITE"
    ),
    "activations change while they leave": Bug(
        "an input changed in place, activations on the host",
        _no_event_wait(_ACTIVATIONS, "protect_sources"),
        "WRITE AFTER READ",
    ),
    "activations that nothing waits for are freed while they come back": Bug(
        "a graph dropped, activations on the host", _no_record_stream(_ACTIVATIONS, "copy_to_device"), "FREED IN USE"
    ),
    "a checkpoint is written before its copy": Bug(
        _BACKGROUND,
        _with("zeroaccel.checkpoint.rank_file_writer.DeviceChunkCopies", "mark", lambda original, copies: lambda: None),
        "READ AFTER WRITE",
    ),
    "a checkpoint is copied before the step ends": Bug(
        _BACKGROUND,
        _no_event_of_stream("checkpoint/rank_file_writer.py", "__init__"),
        "READ AFTER WRITE",
    ),
    "a step does not wait for the copy of a checkpoint": Bug(
        f"{_BACKGROUND}, both on the host",
        _with("zeroaccel.checkpoint.checkpointer.BackgroundSave", "wait_copied", lambda original, save: None),
        "not ordered after",
    ),
    "a program's stream does not wait for the default one": Bug(
        "evaluation on another stream",
        _no_stream_wait("cuda_model/training_loops.py", "evaluation_on_another_stream"),
        "not ordered after",
    ),
    "a unit is freed while its prefetched gather runs": Bug(
        "an aborted pass, parameters on the host", _with(_UNIT, "reshard", _forget_gathers), "FREED IN USE"
    ),
    "only the first of two buffers is waited for": Bug(
        "stage 3, two buffers for a unit", _with(_UNIT, "wait", _wait_for_one_gather), "READ AFTER WRITE"
    ),
    "only the first of two buffers is waited for, both on the host": Bug(
        "stage 3, both on the host, two buffers for a unit",
        _with(_UNIT, "wait", _wait_for_one_gather),
        "READ AFTER WRITE",
    ),
    "parameters are freed before they are used": Bug(
        "stage 3", _with(_UNIT, "wait", _free_before_use), "USED AFTER FREE"
    ),
    "a secondary copy is a view of the full parameters": Bug(
        "stage 3, hpZ", _with(_SECONDARY, "keep", _keep_a_view), "READ BEFORE ANY WRITE"
    ),
    "a secondary copy is taken after the free": Bug(
        "stage 3, hpZ", _with(_SECONDARY, "keep", _keep_what_is_freed), "USED AFTER FREE"
    ),
    "a secondary copy stays when the weights change": Bug(
        "stage 3, hpZ", _with(_SECONDARY, "drop", lambda original, secondary: None), "STALE COPY"
    ),
    "a chunk is filled again during its write": Bug(_SMALL_CHUNKS, _refill, "not ordered after"),
    "weights are copied to the device before they have arrived on the host": Bug(
        "stage 3, parameters on the host",
        _with("zeroaccel.zero.storage.copy_stream.CopyStream", "_await_writes", lambda original, copies: None),
        "READ AFTER WRITE",
    ),
    "a checkpoint is copied on a stream of the current device": Bug(
        _BACKGROUND,
        _both(_select_nothing, _with(f"{_WRITER}.RankFileWriter", "copy", _copies_on_current_device)),
        "ANOTHER DEVICE: a stream",
    ),
    "the end of a checkpoint's copies is recorded on another stream": Bug(
        _BACKGROUND, _with(f"{_WRITER}.DeviceChunkCopies", "mark", _event_of_default_stream), "READ AFTER WRITE"
    ),
    "the threads of a save select no device": Bug(_BACKGROUND, _select_nothing, "ANOTHER DEVICE: the choice"),
    "a thread waits for the current device": Bug(
        _BACKGROUND,
        _both(_select_nothing, _with(f"{_WRITER}.RankFileWriter", "write", _wait_for_current_device)),
        "ANOTHER DEVICE: a wait",
    ),
    "one pinned word for several steps' outcomes": Bug(
        "steps that nothing waits for", _share_one_word, "READ AFTER WRITE"
    ),
    "a new kind of collective in backward": Bug(
        "stage 3", _with("zeroaccel.zero.grad_reducer.GradReducer", "end", _new_kind_in_a_hook), "the first broadcast"
    ),
    "communicators are connected at their first use": Bug(
        "stage 3, MiCS", _connect_nothing, "the first reduce_scatter"
    ),
    "pairs of stages are connected at their first message": Bug("stage 1, pp", _connect_no_peers, "the first message"),
    "gathers on the reductions' communicator": Bug(
        "stage 3", _with("zeroaccel.comm.collectives.Collectives", "__init__", _one_communicator), "ONE COMMUNICATOR"
    ),
    "a reduction that nothing carries out": Bug(
        "stage 3",
        _with("zeroaccel.comm.collectives.Collectives", "reduce_scatter", _reduce_into_nothing),
        "READ BEFORE ANY WRITE",
    ),
    "gradients are freed during their reduction": Bug(
        "stage 3",
        _with("zeroaccel.comm.collectives.Collectives", "reduce_scatter", _free_what_is_reduced),
        "FREED IN USE",
    ),
    "moments that nothing fills": Bug(
        "stage 2", _with("zeroaccel.ops.shard_step.ShardOptimizer", "_new_state", _unfilled), "READ BEFORE ANY WRITE"
    ),
    "the host reads gradients that nothing copied": Bug(
        "stage 2, optimizer on the host", _with(_COPY_STREAM, "to_host", _copy_nothing), "READ BEFORE ANY WRITE"
    ),
    "new weights leave before they are rounded": Bug(
        "stage 3, parameters on the host", _no_stream_wait(_COPIES, "write_host"), "READ AFTER WRITE"
    ),
    "new weights are freed while they leave": Bug(
        "stage 3, parameters on the host", _no_record_stream(_COPIES, "write_host"), "is freed at"
    ),
    "a sum over the ranks is used before it is there": Bug(
        "stage 3",
        _without(f"{_TRACKER}.DeviceWork", "wait", "comm/collectives.py", "all_reduce_on_device"),
        "AFTER WRITE",
    ),
    "exchanged heads are used before they have come": Bug(
        "stage 3, sp",
        _without(f"{_TRACKER}.DeviceWork", "wait", "parallel/sequence.py", "exchange_rows"),
        "READ AFTER WRITE",
    ),
    "tokens are computed with before they have come": Bug(
        "stage 1, ep",
        _without(f"{_TRACKER}.DeviceWork", "wait", "parallel/expert_dispatch.py", "_exchanged"),
        "READ AFTER WRITE",
    ),
    "counts of tokens are read before they are there": Bug(
        "stage 1, ep",
        _without(f"{_TRACKER}.DeviceWork", "wait", "parallel/expert_dispatch.py", "route"),
        "READ AFTER WRITE",
    ),
    "the host reads counts of tokens before they have come": Bug(
        "stage 1, ep", _no_synchronize("parallel/expert_dispatch.py", "wait"), "READ AFTER WRITE"
    ),
    "weights change while a generator reads them": Bug(
        "weights in a generator on another stream",
        _no_stream_wait("rollout/receiver.py", "_between_kernels"),
        "WRITE AFTER READ",
    ),
    "a packet is used before it has come": Bug(
        "weights in a generator on another stream", _no_synchronize(_COPIES, "wait"), "READ AFTER WRITE"
    ),
    "pages are unlocked without a wait for a stream that copies": Bug(
        "a graph dropped, activations on the host", _forget_streams, "UNLOCKED IN USE"
    ),
}
