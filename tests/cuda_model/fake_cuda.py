"""`cuda:1` or `xpu:1` without the device: fake tensors whose operations are all recorded in a `StreamModel`.

`FakeTensorMode` gives shapes, dtypes and storages without values; the library of `guard.cpp` makes autograd accept them
on a device, so that hooks run in autograd's own thread and under its stream guards. A dispatch mode intercepts each
operation, as torch's own sanitizer of streams does (torch/cuda/_sanitizer.py), and records the bytes that it accesses.

There are two devices, and the engine uses the second one. A thread begins on the first, as with CUDA: on a real
machine, work there that names no device takes half a gigabyte of another rank's GPU, and orders nothing on its own.
torch's operations select their tensors' device and restore the previous one; leaving `torch.cuda.stream()` does not.

[Note: small tensors have values] A step decides by a few numbers: the largest gradient, digests that ranks compare,
the success of a read from a file. So storages of up to `_VALUED_NBYTES` have a *twin*, real memory of their size, on
which small operations are carried out too. Values computed from large tensors, which have no values, are 1.
"""

from __future__ import annotations

import math
import re
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from types import SimpleNamespace
from typing import Any

from tests.cuda_model import guard_library

_LIBRARY = guard_library.loaded()  # before torch is imported

import torch  # noqa: E402
from torch import Tensor  # noqa: E402
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode  # noqa: E402
from torch.distributed._functional_collectives import AsyncCollectiveTensor  # noqa: E402
from torch.distributed.tensor import DTensor  # noqa: E402
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes  # noqa: E402
from torch.utils._pytree import tree_leaves, tree_map_only  # noqa: E402

from tests.cuda_model.replacements import Replacements  # noqa: E402
from tests.cuda_model.stream_model import Memory, Moment, StreamModel, Use  # noqa: E402

aten = torch.ops.aten
DEVICE = torch.device(guard_library.device_type, 1)
_MODULE = torch.get_device_module(DEVICE)
_NUM_DEVICES = 2
_VALUED_NBYTES = 4096
_EMPTY = re.compile(r"aten::(empty|new_empty|empty_like|empty_strided|new_empty_strided|empty_permuted)$")
_BY_SHAPE_ONLY = re.compile(r"aten::(new_.*|.*_like)$")  # they do not read the values of their argument
_NO_ACCESS = {"aten::detach", "aten::alias", "aten::lift_fresh", "aten::_unsafe_view", "aten::set_", "aten::resize_"}
_NO_READ = {"aten::copy_", "aten::_foreach_copy_", "aten::zero_", "aten::fill_", "aten::uniform_", "aten::normal_"}
_PRODUCTS = {"aten::mm": 0, "aten::bmm": 0, "aten::addmm": 1, "aten::baddbmm": 1}  # -> position of the left factor


class FakeCuda:
    """The memory and the operations of fake tensors, in a `StreamModel`.

    Attributes:
        model: the model that records the operations.
        mode: mode of the fake tensors.
        functional: called for torch's functional collectives, with (name, arguments, results).
        other_default: lane of the other device's default stream.
    """

    def __init__(self, model: StreamModel) -> None:
        self.model = model
        self.mode = FakeTensorMode(allow_non_fake_inputs=True)
        self._memories: dict[int, Memory] = {}
        self._ended: dict[int, Callable[[], object]] = {}
        self._twins: dict[int, Tensor] = {}
        self._events: dict[int, Moment] = {}
        self.functional: Callable[[str, Any, Sequence[Tensor]], object] = lambda op, args, produced: None
        model.current_stream = lambda: int(_LIBRARY.current_stream(DEVICE.index))
        self.other_default = model.add_stream(f"the default stream of {DEVICE.type}:0")

    # -- memory

    def memory_of(self, tensor: Tensor, *, pinned: bool = False, is_from_outside: bool = False) -> Memory:
        """Returns the memory of a tensor's storage; the first call for a storage adds it to the model."""
        storage = tensor.untyped_storage()
        key = storage._cdata
        memory = self._memories.get(key)
        if memory is None:
            on_device = tensor.device.type == DEVICE.type
            if on_device and tensor.device != DEVICE:
                self.on_another_device("memory", tensor.device.index)
            memory = self.model.allocate(storage.nbytes(), on_device=on_device, pinned=pinned)
            memory.is_from_outside = is_from_outside
            self._memories[key] = memory
            weakref.finalize(storage, self._forget, key)
        return memory

    def on_another_device(self, what: str, index: int) -> None:
        """Records a finding if an operation used another device than the engine's."""
        if index != DEVICE.index:
            self.model.find(
                f"ANOTHER DEVICE: {what} of {DEVICE.type}:{index} at {self.model.place()}; the engine's is {DEVICE}"
            )

    def use_of(self, tensor: Tensor) -> Use:
        """Returns the bytes between a tensor's first and last element."""
        first = tensor.storage_offset() * tensor.itemsize
        last = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
        return Use(self.memory_of(tensor, is_from_outside=True), first, first + (last + 1) * tensor.itemsize)

    def uses_of(self, tensors: Sequence[Tensor]) -> list[Use]:
        """Returns the bytes of the tensors that have elements."""
        return [self.use_of(tensor) for tensor in tensors if tensor.numel()]

    def pin(self, tensor: Tensor) -> None:
        """Records that the package itself page-locks the tensor's memory."""
        self.model.pin(self.memory_of(tensor))

    def populate(self, tensor: Tensor) -> None:
        """Records that the package makes the system allocate the tensor's pages."""
        self.model.populate(self.memory_of(tensor))

    def place_in(self, tensor: Tensor, base: Tensor, ended: Callable[[], object]) -> None:
        """Places a new tensor in the memory of `base`; calls `ended` when the tensor is freed."""
        key = tensor.untyped_storage()._cdata
        self._memories[key] = self.memory_of(base)
        self._ended[key] = ended

    def _forget(self, key: int) -> None:
        self._twins.pop(key, None)
        memory = self._memories.pop(key, None)
        if key in self._ended:
            self._ended.pop(key)()
        elif memory is not None:
            self.model.free(memory)

    # -- values of small tensors

    def values_of(self, tensor: Tensor) -> Tensor:
        """Returns a real tensor with the values of a small one, or with ones; see [Note: small tensors have values]."""
        twin = self._twin(tensor)
        if twin is not None:
            return twin
        with _disable_current_modes():
            return torch.full(tensor.shape, _unknown(tensor.dtype), dtype=tensor.dtype)

    def compute(self, out: Tensor, function: Callable[..., Tensor], *inputs: Tensor) -> None:
        """Assigns a small tensor the values that a function of real tensors returns; does nothing if `out` is large."""
        twin, values = self._twin(out), [self.values_of(tensor) for tensor in inputs]
        if twin is not None:
            with _disable_current_modes():
                twin.copy_(function(*values).to(twin.dtype).view(twin.shape))

    def call(self, function: Callable[..., object], *tensors: Tensor) -> None:
        """Calls a function that changes some of its arguments, with the values of small tensors."""
        values = [self.values_of(tensor) for tensor in tensors]
        with _disable_current_modes():
            function(*values)

    def _twin(self, tensor: Tensor) -> Tensor | None:
        """Returns the view of a tensor's twin; None if the tensor is large, the tensor itself if it is real."""
        if not isinstance(tensor, FakeTensor):
            return tensor
        storage = tensor.untyped_storage()
        nbytes = storage.nbytes()
        if nbytes > _VALUED_NBYTES or tensor.layout is not torch.strided:
            return None
        with _disable_current_modes():
            twin = self._twins.get(storage._cdata)
            if twin is None or twin.numel() < nbytes:
                twin = torch.zeros(nbytes, dtype=torch.uint8)
                self._twins[storage._cdata] = twin
                self.memory_of(tensor)  # its finalizer also drops the twin
            empty = torch.empty(0, dtype=tensor.dtype)
            return empty.set_(twin.untyped_storage(), tensor.storage_offset(), tensor.shape, tensor.stride())

    def carry_out(
        self, func: Any, args: Any, kwargs: Any, produced: Sequence[Tensor], written: Sequence[Tensor]
    ) -> None:
        """Repeats an operation on twins if all its tensors are small; otherwise fills its small results with ones."""
        results = [tensor for tensor in (*produced, *written) if tensor.untyped_storage().nbytes() <= _VALUED_NBYTES]
        if not results:
            return
        inputs = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
        twins = {id(tensor): self._twin(tensor) for tensor in inputs}
        if all(twin is not None for twin in twins.values()) and len(results) == len(produced) + len(written):
            plain = tree_map_only(Tensor, lambda tensor: twins[id(tensor)], (args, kwargs))
            plain_args, plain_kwargs = tree_map_only(torch.device, lambda device: torch.device("cpu"), plain)
            with _disable_current_modes():
                outcome = func(*plain_args, **plain_kwargs)
                for tensor, value in zip(produced, _tensors(outcome), strict=False):
                    own = self._twin(tensor)
                    if own is not None and own.shape == value.shape:
                        own.copy_(value)
            return
        for tensor in results:
            twin = self._twin(tensor)
            if twin is not None:
                with _disable_current_modes():
                    twin.fill_(_unknown(tensor.dtype))

    # -- operations

    def copy_across(self, target: Tensor, source: Tensor, *, non_blocking: bool) -> None:
        """Records a copy between the host and the device."""
        model, stream, rates = self.model, self.model.current_stream(), self.model.rates
        if not target.numel():
            return
        to_device = target.device.type == DEVICE.type
        what = "H2D copy" if to_device else "D2H copy"
        pinned = self.memory_of(source if to_device else target).pinned
        nbytes = source.numel() * source.itemsize
        seconds = nbytes / (rates.pinned if pinned else rates.pageable)
        model.launch(stream, self.uses_of([source]), self.uses_of([target]), what, seconds, nbytes)
        if not (non_blocking and pinned):
            # The driver stages pageable memory, and returns when it has copied its part.
            model.wait_on_host(model.moment(stream), f"{what} of {'pinned' if pinned else 'pageable'} memory")

    def kernel(self, what: str, reads: Sequence[Tensor], writes: Sequence[Tensor], nbytes: int, flops: float) -> None:
        """Records an operation of the device."""
        rates = self.model.rates
        seconds = max(rates.kernel_seconds, nbytes / rates.device, flops / rates.flops)
        self.model.launch(self.model.current_stream(), self.uses_of(reads), self.uses_of(writes), what, seconds, nbytes)

    def on_host(self, what: str, reads: Sequence[Tensor], writes: Sequence[Tensor]) -> None:
        """Records work of the calling thread on host memory."""
        nbytes = sum(tensor.numel() * tensor.itemsize for tensor in (*reads, *writes))
        self.model.run_on_host(self.uses_of(reads), self.uses_of(writes), what, nbytes / self.model.rates.host)

    def read_on_host(self, tensor: Tensor) -> Tensor:
        """Returns a tensor's values to the host, which waits for them."""
        if tensor.device.type == DEVICE.type:
            stream = self.model.current_stream()
            seconds = self.model.rates.kernel_seconds
            self.model.launch(stream, self.uses_of([tensor]), [], "copy of values", seconds, 0)
            self.model.wait_on_host(self.model.moment(stream), "value read")
        elif tensor.numel():
            self.model.run_on_host(self.uses_of([tensor]), [], "value read", 0.0)
        return self.values_of(tensor)

    def _plainly(self, tensor: Tensor, method: Callable[[Tensor], Any]) -> Any:
        """Calls a method of real tensors on the values of a fake one."""
        values = self.read_on_host(tensor)
        with _disable_current_modes():
            return method(values)

    def resized(self, storage: torch.UntypedStorage, before: int, after: int) -> None:
        """Records that a storage was freed or allocated in place."""
        memory = self._memories.get(storage._cdata)
        if memory is not None and before and not after:
            self.model.free(memory)
        elif memory is not None and after and not before:
            self.model.reallocate(memory, after)

    # -- installing it

    @contextmanager
    def modes(self) -> Iterator[None]:
        """Makes tensors of this thread fake, and records its operations."""
        with self.mode, _Recorder(self):
            yield

    @contextmanager
    def installed(self) -> Iterator[None]:
        """Replaces torch's module for the device in this thread; other threads enter `modes`."""
        replacements = Replacements()
        with ExitStack() as stack:
            stack.callback(replacements.undo)
            before = _LIBRARY.current_device()
            stack.callback(_LIBRARY.set_current_device, before)
            stack.callback(_LIBRARY.set_current_stream, DEVICE.index, 0)
            _LIBRARY.set_current_device(DEVICE.index)
            for name, value in _torch_module(self).items():
                replacements.set(_MODULE, name, value)
            resize = replacements.set(torch.UntypedStorage, "resize_", None)
            replacements.set(torch.UntypedStorage, "resize_", _noting(self, resize))
            replacements.set(Tensor, "record_stream", lambda tensor, s: self.memory_of(tensor).recorded.add(s.lane))
            replacements.set(Tensor, "is_pinned", lambda tensor, device=None: self.memory_of(tensor).pinned)
            replacements.set(FakeTensor, "tolist", lambda tensor: self._plainly(tensor, Tensor.tolist))
            replacements.set(FakeTensor, "numpy", lambda tensor, **_: self._plainly(tensor, Tensor.numpy))
            replacements.set(FakeTensor, "data_ptr", _address)
            replacements.set(torch, "tensor", _made_on_host(torch.tensor))
            replacements.set(FakeTensor, "data", property(Tensor.data.__get__, _set_data))
            reports = guard_library.EventReport(self._on_record), guard_library.EventReport(self._on_wait)
            _LIBRARY.report_events(*reports)
            stack.callback(_LIBRARY.report_events, guard_library.EventReport(), guard_library.EventReport())
            stack.enter_context(self.modes())
            yield
        del reports

    def _on_record(self, event: int, device: int, stream: int) -> None:
        self._events[event] = self.model.moment(self.lane_of(device, stream))

    def _on_wait(self, event: int, device: int, stream: int) -> None:
        if event in self._events:
            self.model.join(self.lane_of(device, stream), self._events[event])

    def lane_of(self, device: int, stream: int) -> int:
        """Returns a stream's lane, given the number that torch has for it; 0 is each device's default stream."""
        return stream if stream or device == DEVICE.index else self.other_default

    def current_lane(self) -> int:
        """Returns the lane of the current stream of the thread's current device."""
        device = int(_LIBRARY.current_device())
        return self.lane_of(device, int(_LIBRARY.current_stream(device)))


class _Recorder(TorchDispatchMode):
    """Records the operations of one thread, and of autograd's thread while that one waits for it."""

    def __init__(self, cuda: FakeCuda) -> None:
        super().__init__()
        self._cuda = cuda

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        cuda, kwargs = self._cuda, dict(kwargs or {})
        if any(issubclass(kind, (DTensor, AsyncCollectiveTensor)) for kind in types):
            return NotImplemented  # their own implementation calls plain operations, which are recorded then
        if func is torch.ops.prim.device.default and isinstance(args[0], FakeTensor):
            return args[0].fake_device
        if func is aten._local_scalar_dense.default:
            values = cuda.read_on_host(args[0])
            with _disable_current_modes():
                return values.item()
        if func is aten.equal.default or func is aten.allclose.default:
            return self._compare(func, args)
        if func is aten._pin_memory.default:
            copy = torch.empty_like(args[0])
            cuda.memory_of(copy, pinned=True)
            cuda.on_host("pin_memory", [args[0]], [copy])
            cuda.compute(copy, lambda values: values, args[0])
            return copy
        name = func._schema.name
        pinned = bool(kwargs.pop("pin_memory", False))
        out = func(*args, **kwargs)
        produced = _tensors(out)
        reads, writes, returns_view = _accesses(func, name, args, kwargs, produced)
        # A view shares the memory of its argument, which is new to the model if it was not made here.
        is_from_outside = name == "aten::lift_fresh" or returns_view
        for tensor in produced:
            cuda.memory_of(tensor, pinned=pinned, is_from_outside=is_from_outside)
        if name.startswith("_c10d_functional::"):
            op = name.rpartition(":")[2]
            cuda.functional(op, args, produced)
            return args[0] if op == "wait_tensor" else out
        if not reads and not writes:
            cuda.model.spend(cuda.model.rates.view_seconds)
            if not returns_view:
                cuda.carry_out(func, args, kwargs, produced, [])
            return out
        self._enter(name, args, kwargs, reads, writes, out)
        fresh = [] if returns_view else produced
        cuda.carry_out(func, args, kwargs, fresh, [] if fresh else writes)
        return out

    def _enter(self, name: str, args: Any, kwargs: Any, reads: list[Tensor], writes: list[Tensor], out: Any) -> None:
        if name in ("aten::copy_", "aten::_to_copy"):
            in_place = name == "aten::copy_"
            target, source = (args[0], args[1]) if in_place else (out, args[0])
            if isinstance(source, Tensor) and target.device.type != source.device.type:
                non_blocking = bool(kwargs.get("non_blocking") or (in_place and len(args) > 2 and args[2]))
                self._cuda.copy_across(target, source, non_blocking=non_blocking)
                return
        tensors = [*reads, *writes]
        what = name.rpartition(":")[2]
        if not any(tensor.device.type == DEVICE.type for tensor in tensors):
            self._cuda.on_host(what, reads, writes)
            return
        # A scalar in host memory travels with the launch; any other tensor on another device is an error on a GPU.
        mixed = [tensor for tensor in tensors if tensor.device.type != DEVICE.type and tensor.dim()]
        assert not mixed, f"{name} mixes tensors on {DEVICE} and on the host"
        reads, writes = ([tensor for tensor in side if tensor.device.type == DEVICE.type] for side in (reads, writes))
        nbytes = sum(tensor.numel() * tensor.itemsize for tensor in (*reads, *writes))
        if name.endswith("_") and name not in _NO_READ:
            nbytes += sum(tensor.numel() * tensor.itemsize for tensor in writes)
        self._cuda.kernel(what, reads, writes, nbytes, _flops(name, args))

    def _compare(self, func: Any, args: Any) -> bool:
        values = [self._cuda.read_on_host(tensor) for tensor in args[:2]]
        with _disable_current_modes():
            return values[0].numel() > _VALUED_NBYTES or bool(func(*values))


def _unknown(dtype: torch.dtype) -> bool | int:
    """Returns the substitute for a value computed from large tensors."""
    return dtype is not torch.bool


def _tensors(data: Any) -> list[Tensor]:
    return [leaf for leaf in tree_leaves(data) if isinstance(leaf, Tensor)]


def _accesses(
    func: Any, name: str, args: Any, kwargs: Any, produced: Sequence[Tensor]
) -> tuple[list[Tensor], list[Tensor], bool]:
    """Returns (tensors read, tensors written, True if results are views of arguments), from the schema."""
    schema = func._schema
    returns_view = any(result.alias_info is not None for result in schema.returns)
    if _EMPTY.match(name) or name in _NO_ACCESS or (returns_view and not schema.is_mutable):
        fresh = name in ("aten::lift_fresh", "aten::_unsafe_view")  # of Python numbers, or of a result nobody else has
        return [], [], not fresh and (returns_view or name in _NO_ACCESS)
    named = {argument.name: argument for argument in schema.arguments}
    pairs = [*zip(schema.arguments, args, strict=False), *((named[key], kwargs[key]) for key in kwargs if key in named)]
    reads: list[Tensor] = []
    writes: list[Tensor] = []
    for argument, value in pairs:
        alias = argument.alias_info
        tensors = [tensor for tensor in _tensors(value) if tensor.numel()]
        if alias is not None and alias.is_write:
            writes += tensors
        elif not _BY_SHAPE_ONLY.match(name):
            reads += tensors
    if not returns_view:
        writes += [tensor for tensor in produced if tensor.numel()]
    return reads, writes, returns_view


def _flops(name: str, args: Any) -> float:
    left = _PRODUCTS.get(name)
    return 0.0 if left is None else 2.0 * math.prod(args[left].shape) * args[left + 1].shape[-1]


def _address(tensor: Tensor) -> int:
    """Returns a substitute for an address; each storage has pages of its own."""
    return tensor.untyped_storage()._cdata * 4096 + tensor.storage_offset() * tensor.itemsize


def _made_on_host(make: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """Wraps `torch.tensor`, which moves its result to the device before a dispatch mode sees it."""

    def tensor(data: Any, *, device: Any = None, **options: Any) -> Tensor:
        made = make(data, device=None if device is None else "cpu", **options)
        if device is None:
            return made
        if isinstance(made, FakeTensor):
            made.constant = None  # torch would use it for the move
        return made.to(device)

    return tensor


def _set_data(tensor: FakeTensor, value: Tensor) -> None:
    """Sets `tensor.data = value`; torch's own assignment does not change the device that a fake tensor reports."""
    Tensor.data.__set__(tensor, value)
    if isinstance(value, FakeTensor):
        tensor.fake_device = value.fake_device


def _noting(cuda: FakeCuda, resize: Callable[..., Any]) -> Callable[..., Any]:
    def resize_(storage: torch.UntypedStorage, nbytes: int) -> Any:
        before = storage.nbytes()
        result = resize(storage, nbytes)
        cuda.resized(storage, before, nbytes)
        return result

    return resize_


class _Event:
    """Replaces `torch.cuda.Event`."""

    def __init__(
        self, cuda: FakeCuda, enable_timing: bool = False, blocking: bool = False, interprocess: bool = False
    ) -> None:
        self._cuda, self._model = cuda, cuda.model
        self._moment: Moment | None = None
        self._model.spend(self._model.rates.event_seconds)

    def record(self, stream: _Stream | None = None) -> None:
        stream = stream or _current_stream(self._cuda)
        self._cuda.on_another_device("an event", stream.device.index)
        self._moment = self._model.moment(stream.lane)
        self._model.spend(self._model.rates.event_seconds)

    def wait(self, stream: _Stream | None = None) -> None:
        stream = stream or _current_stream(self._cuda)
        self._cuda.on_another_device("a wait", stream.device.index)
        if self._moment is not None:
            self._model.join(stream.lane, self._moment)

    def synchronize(self) -> None:
        if self._moment is not None:
            self._model.wait_on_host(self._moment, "event synchronize")

    def query(self) -> bool:
        """Returns True only if the host has already waited for it: correctness must not depend on luck."""
        return self._moment is None or self._model.has_seen(self._model.thread, self._moment)

    def elapsed_time(self, other: _Event) -> float:
        assert self._moment is not None, "the first event was not recorded"
        assert other._moment is not None, "the second event was not recorded"
        return (other._moment.seconds - self._moment.seconds) * 1e3


class _Stream:
    """Replaces `torch.cuda.Stream`.

    Attributes:
        number: torch's number; 0 is the device's default stream.
        lane: the model's lane.
    """

    def __init__(self, cuda: FakeCuda, device: Any = None, priority: int = 0, number: int | None = None) -> None:
        self._cuda, self._model = cuda, cuda.model
        self.device = torch.device(DEVICE.type, _index_of(device))
        if number is None:
            cuda.on_another_device("a stream", self.device.index)
        self.number = self._model.add_stream() if number is None else number
        self.lane = cuda.lane_of(self.device.index, self.number)
        self.cuda_stream = self.stream_id = self.number

    def wait_event(self, event: _Event) -> None:
        event.wait(self)

    def wait_stream(self, other: _Stream) -> None:
        self._cuda.on_another_device("an event", other.device.index)
        self._model.join(self.lane, self._model.moment(other.lane))
        self._model.spend(2 * self._model.rates.event_seconds)

    def record_event(self, event: _Event | None = None) -> _Event:
        event = event or _Event(self._cuda)
        event.record(self)
        return event

    def synchronize(self) -> None:
        self._model.wait_on_host(self._model.moment(self.lane), "stream synchronize")

    def query(self) -> bool:
        return self._model.has_seen(self._model.thread, self._model.moment(self.lane))

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Stream) and other.lane == self.lane

    def __hash__(self) -> int:
        return hash(self.lane)


def _index_of(device: Any) -> int:
    """Returns the index of a device as torch's functions accept it; without an index, the thread's current one."""
    index = device if isinstance(device, int) else None if device is None else torch.device(device).index
    return int(_LIBRARY.current_device()) if index is None or index < 0 else index


def _current_stream(cuda: FakeCuda, device: Any = None) -> _Stream:
    index = _index_of(device)
    return _Stream(cuda, index, number=int(_LIBRARY.current_stream(index)))


def _rng_state() -> Tensor:
    with _disable_current_modes():
        return torch.zeros(16, dtype=torch.uint8)


def _torch_module(cuda: FakeCuda) -> dict[str, Any]:
    """Returns replacements of the functions and classes of `torch.cuda` or `torch.xpu`."""
    model = cuda.model

    class Stream(_Stream):
        def __init__(self, *args: Any, **kwargs: Any) -> None:
            super().__init__(cuda, *args, **kwargs)

    class Event(_Event):
        def __init__(self, *args: Any, **kwargs: Any) -> None:
            super().__init__(cuda, *args, **kwargs)

    def set_device(device: Any) -> None:
        cuda.on_another_device("the choice", _index_of(device))
        _LIBRARY.set_current_device(_index_of(device))

    @contextmanager
    def on_device(device: Any) -> Iterator[None]:
        before = int(_LIBRARY.current_device())
        _LIBRARY.set_current_device(_index_of(device))
        try:
            yield
        finally:
            _LIBRARY.set_current_device(before)

    @contextmanager
    def stream(value: _Stream | None) -> Iterator[None]:
        if value is None:
            yield
            return
        device, index = int(_LIBRARY.current_device()), value.device.index
        before = int(_LIBRARY.current_stream(index))
        _LIBRARY.set_current_device(index)
        _LIBRARY.set_current_stream(index, value.number)
        try:
            yield
        finally:
            _LIBRARY.set_current_stream(index, before)
            cuda.on_another_device("the choice", device)
            _LIBRARY.set_current_device(device)

    def synchronize(device: Any = None) -> None:
        cuda.on_another_device("a wait", _index_of(device))
        model.synchronize("device synchronize")

    properties = SimpleNamespace(name="the stream model", total_memory=80 << 30, has_fp64=True)
    return {
        "Stream": Stream,
        "Event": Event,
        "stream": stream,
        "device": on_device,
        "current_stream": lambda device=None: _current_stream(cuda, device),
        "default_stream": lambda device=None: _Stream(cuda, _index_of(device), number=0),
        "synchronize": synchronize,
        "empty_cache": lambda: model.synchronize("cudaFree"),
        "set_device": set_device,
        "current_device": lambda: int(_LIBRARY.current_device()),
        "device_count": lambda: _NUM_DEVICES,
        "get_device_properties": lambda device=None: properties,
        "is_available": lambda: True,
        "is_initialized": lambda: True,
        "is_current_stream_capturing": lambda: False,
        "get_rng_state": lambda device=None: _rng_state(),
        "set_rng_state": lambda state, device=None: None,
        "memory_allocated": lambda device=None: model.live_nbytes,
        "max_memory_allocated": lambda device=None: model.peak_nbytes,
    }
