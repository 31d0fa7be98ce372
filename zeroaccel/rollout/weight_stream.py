"""Weight streams to other programs: all weights, gathered unit by unit, or the changed elements of each shard.

`initialize` gives the engine a `WeightSender`, to which the engine's calls delegate. It makes packets (`receiver.py`
defines them); `sinks.py` sends them. `stream_weights` gathers each byte once, and holds one unit and one bucket at a
time; on an accelerator two, of which one is on its way to page-locked host memory while the program has the other.
`stream_deltas` gathers nothing: each rank sends the elements of its shards that `zero/changed_bits.py` marks.

Adapter layers like PEFT's (a wrapper with `base_layer`, `merge()` and `merged_adapters`) merge their adapters into
copies of the base weights with their own `merge()`. `as_saved` converts units to the layout of transformers' files.

[Note: versions] Each stream has its own version number within the run of its engine, which has an id: a program that
starts again begins with version 1, which receivers must not take for that of the earlier run. A stream of all weights
in their own dtypes is a base: the next delta contains the elements that changed since, and becomes the base of the
following delta. If `since` is not the base, or the marks were lost, the delta contains all values of every shard, still
without a gather.
"""

from __future__ import annotations

import hashlib
import uuid
from collections.abc import Callable, Collection, Generator, Iterable, Iterator
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from zeroaccel.checkpoint.save_plan import EngineState, code_names, persistent_buffers
from zeroaccel.checkpoint.source_layout import reverted
from zeroaccel.comm.agree import agree_or_raise, agreed, from_rank_0
from zeroaccel.comm.collective_tracker import DONE
from zeroaccel.errors import EngineStateError, UsageError
from zeroaccel.ops.device_threads import CPU
from zeroaccel.rollout.receiver import ALIGN_NBYTES, Packet, encode_high_bytes, encode_positions
from zeroaccel.zero.access.param_registry import ParamHandle
from zeroaccel.zero.changed_bits import ChangedBits
from zeroaccel.zero.engine_core import EngineCore
from zeroaccel.zero.layout import FlatRange, Slot
from zeroaccel.zero.param_unit import FlatBuffer, ParamUnit
from zeroaccel.zero.storage.copy_stream import CopyHandle, CopyStream

Names = Collection[str] | Callable[[str], bool] | None

_FLOATS = (torch.float32, torch.bfloat16, torch.float16)


@dataclass(frozen=True)
class _StreamRequest:
    """Arguments of a stream of weights, the same on all ranks.

    Attributes:
        dtype: dtype to send floating-point values in; None for their own.
        wants: returns True for the names of parameters and buffers to send.
        is_whole: True for a stream of all weights in their own dtypes, without merged adapters.
        merges: True to merge adapters into their base weights.
        as_saved: True to send tensors in the layout of `save_pretrained`.
        rank: the only rank whose packets have payloads; None for all ranks.
        codes: names of quantized weights' codes and scales, which keep their dtypes.
    """

    dtype: torch.dtype | None
    wants: Callable[[str], bool]
    is_whole: bool
    merges: bool
    as_saved: bool
    rank: int | None
    bucket_nbytes: int
    codes: frozenset[str] = frozenset()


@dataclass
class _Bucket:
    """Packs values one after the other into one buffer of bytes.

    Attributes:
        head: the keys that all manifests of this stream share.
        data: (nbytes,) uint8, allocated with the first value; None on a rank that only joins collectives.
    """

    nbytes: int
    head: dict[str, Any]
    has_payload: bool
    data: Tensor | None = None
    used: int = 0
    count: int = 0
    entries: list[dict[str, Any]] = field(default_factory=list)

    def add(self, name: str, value: Tensor, dtype: torch.dtype) -> Iterator[Packet]:
        """Packs a full tensor, in pieces if it does not fit; yields the packets that it fills."""
        flat, start = value.reshape(-1) if self.has_payload else value, 0
        while start < value.numel() or not value.numel():
            room = (self.nbytes - self.used) // dtype.itemsize
            count = min(room, value.numel() - start)
            if value.numel() and not count:
                yield self.packet(last=False)
                continue
            entry = {"name": name, "shape": list(value.shape), "dtype": str(dtype).removeprefix("torch.")}
            cut = [max(value.numel(), 1), 1, 0]
            self.entries.append(
                {**entry, "offset": self.used, "numel": count, "start": start, "cut": cut, "positions": 0}
            )
            nbytes = count * dtype.itemsize
            if self.has_payload:
                if self.data is None:
                    self.data = torch.empty(self.nbytes, dtype=torch.uint8, device=value.device)
                self.data[self.used : self.used + nbytes].view(dtype).copy_(flat[start : start + count])
            self.used = min(self.nbytes, self.used + nbytes + -nbytes % ALIGN_NBYTES)
            start += count
            if not value.numel():
                return

    def packet(self, *, last: bool, ties: dict[str, str] | None = None) -> Packet:
        """Returns the packed values as a packet. In host memory the next values overwrite its payload."""
        manifest = {**self.head, "index": self.count, "last": last, "tensors": self.entries, "ties": ties or {}}
        payload = None
        if self.has_payload:
            payload = torch.empty(0, dtype=torch.uint8) if self.data is None else self.data[: self.used]
        self.count, self.used, self.entries = self.count + 1, 0, []
        if payload is not None and payload.device.type != "cpu":
            self.data = None  # the copy to the host still reads it
        return Packet(manifest, payload)


class WeightSender:
    """Streams the weights of one engine. `Engine` documents the calls; all ranks must make them.

    Attributes:
        version: version of the last stream that began; 0 before the first.
        run: id of this engine's versions, the same on all ranks; "" before the first stream.
        base: version that the next delta can be based on; None if there is none.
    """

    def __init__(self, engine: EngineCore, state: Callable[[], EngineState]) -> None:
        self._engine = engine
        self._state = state
        self._ranks = engine.collectives.job
        self._is_open = self._may_be_base = False
        self.version = 0
        self.run = ""
        self.base: int | None = None

    @cached_property
    def _copies(self) -> CopyStream | None:
        """The copies to host memory; None on a CPU."""
        device = next((buffer.full.device for unit in self._engine.units for buffer in unit.buffers), CPU)
        return None if device.type == "cpu" else CopyStream(device, pinned=True)

    @property
    def _marks(self) -> bool:
        return any(buffer.changed is not None for unit in self._engine.units for buffer in unit.buffers)

    # -- all weights

    def stream_weights(
        self,
        *,
        dtype: torch.dtype | None,
        names: Names,
        bucket_bytes: int,
        merge_adapters: bool,
        only_rank: int | None,
        as_saved: bool,
    ) -> Iterator[Packet]:
        """See `Engine.stream_weights`. Checks immediately, and gathers when the caller requests packets."""
        with agreed(self._ranks, "stream_weights"):
            self._require_closed("stream_weights")
            request = self._request(dtype, names, bucket_bytes, merge_adapters, only_rank, as_saved=as_saved)
        facts = (str(dtype), bucket_bytes, merge_adapters, only_rank, as_saved, self._wanted_names(request))
        if any(other != facts for other in self._ranks.gather_objects(facts, "stream_weights: arguments")):
            raise UsageError("engine.stream_weights()", expected="the same arguments on all ranks", got=facts[:5])
        self._engine.finish_update()
        self._begin()
        self._may_be_base = request.is_whole
        return _Stream(_on_host(self._weights(request), self._copies), self._end)

    def _request(
        self,
        dtype: torch.dtype | None,
        names: Names,
        bucket_bytes: int,
        merges: bool,
        only_rank: int | None,
        *,
        as_saved: bool,
    ) -> _StreamRequest:
        where = "engine.stream_weights"
        state = self._state()
        if dtype is not None and dtype not in _FLOATS:
            raise UsageError(f"{where}(dtype)", expected="float32, bfloat16, float16 or None", got=dtype)
        if type(bucket_bytes) is not int or bucket_bytes < ALIGN_NBYTES or bucket_bytes % ALIGN_NBYTES:
            raise UsageError(f"{where}(bucket_bytes)", expected=f"a multiple of {ALIGN_NBYTES}", got=bucket_bytes)
        if only_rank is not None and not (type(only_rank) is int and 0 <= only_rank < self._ranks.world_size):
            raise UsageError(f"{where}(only_rank)", expected=f"0 to {self._ranks.world_size - 1}", got=only_rank)
        if only_rank is not None and state.whole_model is not None and self._num_stages > 1:
            raise UsageError(
                f"{where}(only_rank)",
                expected="None, because the stages of the pipeline have different layers",
                got=only_rank,
                fix="send the packets of the first rank of each stage",
            )
        named = self._all_names()
        wants = names if callable(names) else (lambda name: True) if names is None else frozenset(names).__contains__
        if names is not None and not callable(names):
            unknown = sorted(set(names) - named)
            if unknown and self._num_stages == 1:
                raise UsageError(f"{where}(names)", expected="names of parameters or buffers", got=unknown[0])
        if merges and any(buffer.is_split for buffer in state.buffers() if buffer.params):
            raise UsageError(
                f"{where}(merge_adapters)", expected="layers that each rank holds whole", got="layers split by tp or ep"
            )
        is_whole = names is None and dtype is None and not merges
        request = _StreamRequest(dtype, wants, is_whole, merges, as_saved, only_rank, bucket_bytes)
        codes = (self._sent_name(name, request) for name in code_names(self._engine.module))
        return replace(request, codes=frozenset(name for name in codes if name is not None))

    def _weights(self, request: _StreamRequest) -> Generator[Packet]:
        engine, state = self._engine, self._state()
        receives = request.rank is None or request.rank == self._ranks.rank
        leads = self._leads()
        head = {
            **{"run": self.run, "version": self.version, "since": None},
            **{"sender": leads.index(state.lead), "senders": len(leads)},
        }
        bucket = _Bucket(request.bucket_nbytes, head, receives)
        failure: Exception | None = None
        layers = list(adapter_layers(engine.module)) if request.merges else []
        for unit in engine.units:
            handles = self._wanted(unit, request)
            if not handles:
                continue
            units = [unit, *self._adapter_units(handles, layers)]
            engine.registry.acquire(units)
            try:
                merged: dict[int, Tensor] = {}
                if request.merges and receives and failure is None:
                    try:
                        merged = merged_weights(layers, [handle.param for handle in handles])
                    except Exception as error:  # this rank must continue to gather with the other ranks
                        failure = error
                values = {
                    name: merged.get(id(handle.param), state.whole(handle.slot, _view(handle)))
                    for handle in handles
                    if (name := self._sent_name(handle.slot.fqn, request)) is not None
                }
                yield from self._packed(values, bucket, request)
                del merged, values
            finally:
                engine.registry.release(units)
        if state.lead == self._ranks.rank or request.rank is not None or self._num_stages == 1:
            buffers = {name: value.detach() for name, value in persistent_buffers(engine.module) if request.wants(name)}
            yield from self._packed(buffers, bucket, request)
        agree_or_raise(self._ranks, failure, "stream_weights: adapters")
        ties = {
            alias: name
            for fqn, first in state.ties.items()
            if (alias := self._sent_name(fqn, request)) and (name := self._sent_name(first, request))
        }
        yield bucket.packet(last=True, ties=ties)

    def _packed(self, values: dict[str, Tensor], bucket: _Bucket, request: _StreamRequest) -> Iterator[Packet]:
        if request.as_saved:
            saved = saved_layout(self._engine.module, values, merged=request.merges)
            self._may_be_base &= saved.keys() == values.keys()
            values = saved
        for name, value in values.items():
            casts = value.is_floating_point() and name not in request.codes
            yield from bucket.add(name, value, request.dtype if casts and request.dtype is not None else value.dtype)

    def _wanted(self, unit: ParamUnit, request: _StreamRequest) -> list[ParamHandle]:
        handles = [self._engine.registry.handle(param) for buffer in unit.buffers for param in buffer.params]
        return [
            handle
            for handle in handles
            if handle is not None
            and request.wants(handle.slot.fqn)
            and self._sent_name(handle.slot.fqn, request) is not None
        ]

    def _adapter_units(self, handles: Iterable[ParamHandle], layers: Iterable[tuple[str, Any]]) -> list[ParamUnit]:
        """Returns other units that hold adapters of these parameters; none if the units hold their own adapters."""
        from_layers = {id(handle.unit): handle.unit for handle in handles}
        others: dict[int, ParamUnit] = {}
        ids = {id(handle.param) for handle in handles}
        for _, layer in layers:
            if any(id(param) in ids for param in layer.base_layer.parameters(recurse=False)):
                for param in layer.parameters():
                    handle = self._engine.registry.handle(param)
                    if handle is not None and id(handle.unit) not in from_layers:
                        others[id(handle.unit)] = handle.unit
        return [unit for unit in self._engine.units if id(unit) in others]

    def _sent_name(self, fqn: str, request: _StreamRequest) -> str | None:
        return stream_name(self._engine.module, fqn) if request.merges else fqn

    # -- changed elements

    def mark_changes(self, *, enabled: bool) -> None:
        """See `Engine.mark_changes`."""
        for unit in self._engine.units:
            for buffer in unit.buffers:
                if not enabled:
                    buffer.changed = None
                elif buffer.changed is None:
                    buffer.changed = ChangedBits(
                        buffer.own, _place(buffer), has_bits=buffer.dtype.itemsize == 2 or not buffer.trainable
                    )
        self.base = None

    def stream_deltas(self, since: int | None) -> Iterator[Packet]:
        """See `Engine.stream_deltas`. Checks immediately, and reads shards when the caller requests packets."""
        with agreed(self._ranks, "stream_deltas"):
            self._require_closed("stream_deltas")
            if not self._marks:
                raise EngineStateError(
                    "engine.stream_deltas()",
                    expected="marks of changed weights",
                    got="none",
                    fix="call engine.mark_changes() before the first stream",
                )
            if since is not None and type(since) is not int:
                raise UsageError("engine.stream_deltas(since)", expected="a version number or None", got=since)
        facts = self._ranks.gather_objects((since, self.base), "stream_deltas: since")
        if len(set(facts)) > 1:
            raise UsageError("engine.stream_deltas(since)", expected="the same version on all ranks", got=facts)
        self._engine.finish_update()
        is_delta = since is not None and since == self.base
        self._begin()
        self._may_be_base = True
        return _Stream(_on_host(self._deltas(since if is_delta else None), self._copies), self._end)

    def _deltas(self, since: int | None) -> Generator[Packet]:
        state, version = self._state(), self._engine.weights_version
        head = {
            **{"run": self.run, "version": self.version, "since": since},
            **{"sender": self._ranks.rank, "senders": self._ranks.world_size},
        }
        index = 0
        for buffer in state.buffers():
            if not state.saves(buffer):
                continue
            if self._engine.weights_version != version:
                raise EngineStateError("engine.step() during a stream of weights", fix="step before or after it")
            entries, payload = _changed_parts(buffer, self._read, every=since is None)
            if entries:
                manifest: dict[str, Any] = {**head, "index": index, "last": False, "tensors": entries, "ties": {}}
                yield Packet(manifest, payload)
                index += 1
        buffers = persistent_buffers(self._engine.module) if state.lead == self._ranks.rank else ()
        bucket_nbytes = sum(value.nbytes + ALIGN_NBYTES for _, value in buffers) if buffers else 0
        bucket = _Bucket(bucket_nbytes, head, has_payload=True, count=index)
        if bucket_nbytes:
            for name, value in persistent_buffers(self._engine.module):
                yield from bucket.add(name, value.detach(), value.dtype)
        yield bucket.packet(last=True, ties=dict(state.ties))

    def _read(self, tensor: Tensor) -> Tensor:
        """Returns a tensor in host memory, for which the host waits once: the codes are made there."""
        copies = None if tensor.device.type == "cpu" else self._copies
        return tensor if copies is None else copies.to_host(tensor, DONE).wait()

    # -- one stream at a time

    def _require_closed(self, call: str) -> None:
        self._engine.require_states_loaded()
        if self._is_open:
            raise EngineStateError(
                f"engine.{call}()",
                expected="no other stream of weights",
                got="a stream that has not ended",
                fix="iterate over it to the last packet, or close or drop it on all ranks",
            )

    def _begin(self) -> None:
        if not self.run:
            self.run = from_rank_0(self._ranks, lambda: uuid.uuid4().hex, "weights: run")
        self.version += 1
        self._is_open = True

    def _end(self, done: bool) -> None:
        """Ends a stream. If it can be the base of a delta, it becomes the base, and the marks are cleared."""
        self._is_open = False
        if done and self._may_be_base and self._marks:
            self.base = self.version
            for unit in self._engine.units:
                for buffer in unit.buffers:
                    assert buffer.changed is not None, "marks on some buffers only"
                    buffer.changed.clear()

    # -- names and ranks

    def _all_names(self) -> set[str]:
        names = {slot.fqn for buffer in self._state().buffers() for slot in buffer.layout.slots}
        return names | {name for name, _ in persistent_buffers(self._engine.module)}

    def _wanted_names(self, request: _StreamRequest) -> str:
        """Returns a digest of the names, to compare between ranks; "" with pipeline stages, whose names differ."""
        if self._num_stages > 1:
            return ""
        names = sorted(filter(request.wants, self._all_names()))
        return hashlib.sha256("\n".join(names).encode()).hexdigest()

    @property
    def _num_stages(self) -> int:
        ranks = self._engine.collectives
        return ranks.job.world_size // ranks.peers.world_size

    def _leads(self) -> list[int]:
        """Returns the first rank of each stage."""
        return list(range(0, self._ranks.world_size, self._engine.collectives.peers.world_size))


class _Stream(Iterator[Packet]):
    """An iterator of packets that calls `end` once, even if the program closes or drops it before the first packet."""

    def __init__(self, packets: Generator[Packet], end: Callable[[bool], None]) -> None:
        self._packets, self._end = packets, end
        self._is_over = False

    def __next__(self) -> Packet:
        try:
            return next(self._packets)
        except StopIteration:
            self._finish(True)
            raise
        except BaseException:
            self._finish(False)
            raise

    def close(self) -> None:
        """Ends the stream early. (all ranks, after the same packet)"""
        self._packets.close()
        self._finish(False)

    __del__ = close

    def _finish(self, done: bool) -> None:
        if not self._is_over:
            self._is_over = True
            self._end(done)


def _on_host(packets: Generator[Packet], copies: CopyStream | None) -> Generator[Packet]:
    """Yields packets with payloads in host memory, and copies each during the work on the next one. (all ranks)

    Args:
        copies: None on a CPU.
    """
    if copies is None:
        yield from packets
        return
    coming: tuple[Packet, CopyHandle | None] | None = None
    try:
        for packet in packets:
            payload = packet.payload
            on_device = None if payload is None or payload.device.type == "cpu" else payload
            following = packet, None if on_device is None else copies.to_host(on_device, DONE)
            if coming is not None:
                yield _landed(*coming)
            coming = following
        if coming is not None:
            yield _landed(*coming)
    finally:
        packets.close()


def _landed(packet: Packet, copy: CopyHandle | None) -> Packet:
    return packet if copy is None else Packet(packet.manifest, copy.wait())


def _view(handle: ParamHandle) -> Tensor:
    return handle.buffer.view(handle.index).detach()


def _place(buffer: FlatBuffer) -> torch.device:
    """Returns the device that holds the shard, where a step writes it and changes are marked."""
    return next(buffer.shard.tensors(), torch.empty(0)).device


def _changed_parts(
    buffer: FlatBuffer, read: Callable[[Tensor], Tensor], *, every: bool
) -> tuple[list[dict[str, Any]], Tensor]:
    """Returns the entries and the payload of this rank's elements of a buffer: the changed ones, or all.

    Args:
        read: returns a tensor in host memory.
    """
    assert buffer.changed is not None, "a delta of a buffer without marks"
    marked = None if every else buffer.changed.positions(read)
    entries: list[dict[str, Any]] = []
    pieces: list[Tensor] = []
    used = 0
    if marked is not None and not marked.numel():
        return entries, torch.empty(0, dtype=torch.uint8)
    values = read(buffer.shard.read(buffer.own))  # one read from a tier for all parameters in the buffer
    for slot, interval in buffer.layout.slots_in(buffer.own):
        chosen = _chosen(marked, interval, buffer.own, values)
        if not chosen.numel:
            continue
        run, parts, index = _cut(slot)
        entries.append(
            {
                "name": slot.fqn,
                "shape": list(slot.whole_shape),
                "dtype": str(buffer.dtype).removeprefix("torch."),
                "offset": used,
                "numel": chosen.numel,
                "start": interval.start - slot.start,
                "cut": [run, parts, index],
                "high": chosen.high,
                "positions": chosen.places.numel(),
            }
        )
        nbytes = chosen.values.numel() + chosen.places.numel()
        padding = chosen.values.new_zeros(-nbytes % ALIGN_NBYTES)
        pieces += [chosen.values, chosen.places, padding]
        used += nbytes + padding.numel()
    return entries, torch.cat(pieces) if pieces else torch.empty(0, dtype=torch.uint8)


class _Chosen(NamedTuple):
    """Elements to send: their number, the bytes of their values, the number of coded high bytes among these, and the
    encoded positions, empty for all elements."""

    numel: int
    values: Tensor
    high: int
    places: Tensor


def _chosen(marked: Tensor | None, interval: FlatRange, shard: FlatRange, values: Tensor) -> _Chosen:
    """Returns the marked elements of an interval, or all its elements if these take fewer bytes."""
    everything = values[interval.at(shard.start)]
    whole = _Chosen(interval.numel, everything.contiguous().view(torch.uint8), 0, torch.empty(0, dtype=torch.uint8))
    if marked is None:
        return whole
    bounds = torch.tensor([interval.start - shard.start, interval.end - shard.start])
    first, end = torch.searchsorted(marked, bounds).tolist()
    inside = marked[first:end]
    places = encode_positions(inside - (interval.start - shard.start))
    chosen, high = _coded(values[inside])
    if places.numel() + chosen.numel() >= everything.nbytes:
        return whole
    return _Chosen(inside.numel(), chosen, high, places)


def _coded(values: Tensor) -> tuple[Tensor, int]:
    """Returns the bytes of the values, and the number of coded high bytes: 0 if coding would not save bytes."""
    plain = values.contiguous().view(torch.uint8)
    if values.itemsize != 2 or not values.numel():
        return plain, 0
    low, high = plain.view(-1, 2).unbind(1)
    coded = encode_high_bytes(high)
    return (torch.cat([low, coded]), coded.numel()) if coded.numel() < high.numel() else (plain, 0)


def _cut(slot: Slot) -> tuple[int, int, int]:
    """Returns (run, parts, part) of a slot, the place of its elements in the full parameter; see `receiver.py`."""
    split = slot.split
    if split is None:
        return max(slot.numel, 1), 1, 0
    run = slot.numel
    for size in slot.shape[: split.dim]:
        run //= max(size, 1)
    return max(run // split.blocks, 1), split.parts, split.index


def merged_weights(layers: Iterable[tuple[str, Any]], params: Iterable[nn.Parameter]) -> dict[int, Tensor]:
    """Returns id(parameter) -> its value with the active adapters merged, for those of `params` that have adapters.

    The caller must have unsharded all parameters of the adapter layers around them.

    Args:
        layers: the result of `adapter_layers`.

    Raises:
        UsageError: the adapters are already merged into the weights, or an adapter replaces a parameter.
    """
    wanted = {id(param) for param in params}
    merged: dict[int, Tensor] = {}
    for name, layer in layers:
        if any(id(param) in wanted for param in layer.base_layer.parameters(recurse=False)):
            merged.update(_merged(name, layer))
    return {key: value for key, value in merged.items() if key in wanted}


def adapter_layers(model: nn.Module) -> Iterator[tuple[str, Any]]:
    """Yields (name, layer) for each layer that wraps a base layer in adapters."""
    # Reads __dict__ and _modules, because attributes of PEFT's other wrappers delegate to the wrapped module.
    for name, layer in model.named_modules():
        if "merged_adapters" in vars(layer) and "base_layer" in layer._modules:
            yield name, layer


def _merged(name: str, layer: Any) -> dict[int, Tensor]:
    if layer.merged_adapters:
        raise UsageError(
            f"engine.stream_weights(merge_adapters): {name}",
            expected="adapters that are not merged yet",
            got=layer.merged_adapters,
            fix="call model.unmerge_adapter() first",
        )
    base = layer.base_layer
    params = dict(base.named_parameters(recurse=False))
    before = {key: param.data for key, param in params.items()}
    try:
        with torch.no_grad():
            for key, param in params.items():
                param.data = before[key].clone()
            layer.merge()
        after = dict(base.named_parameters(recurse=False))
        if any(after.get(key) is not param for key, param in params.items()):
            raise UsageError(f"engine.stream_weights(merge_adapters): {name}", expected="an adapter that adds in place")
        return {id(param): param.data for param in params.values()}
    finally:
        for key, param in params.items():
            param.data = before[key]
        layer.merged_adapters.clear()


def stream_name(model: nn.Module, fqn: str) -> str | None:
    """Returns a parameter's name in the model without adapters; None for parameters of adapters.

    Example:
        >>> stream_name(nn.Linear(1, 1), "weight")
        'weight'
    """
    prefix = getattr(model, "prefix", "")
    if not hasattr(model, "peft_config"):
        return fqn
    if (prefix and prefix in fqn) or "original_module" in fqn:
        return None
    name = fqn.removeprefix("base_model.model.").replace(".base_layer", "")
    if ".modules_to_save." in name:
        before, _, rest = name.partition(".modules_to_save.")
        name = f"{before}.{rest.partition('.')[2]}"  # without the name of the adapter
    return name


def saved_layout(model: nn.Module, values: dict[str, Tensor], *, merged: bool) -> dict[str, Tensor]:
    """Returns the tensors as `save_pretrained` writes them; unchanged for models of other libraries.

    Args:
        merged: True if the names are those of the model inside the adapters.
    """
    return values if hasattr(model, "peft_config") and not merged else reverted(model, values)
