"""Reads the pickles inside torch's files without running any code that they name.

A pickle may contain the names in the table below: plain types, tensors, and four classes of DeepSpeed, for which it
gets stand-ins. Any other name is an error. For a tensor, the result has a description of the place of its bytes, which
`torch_file.py` converts to offsets in a file. `pickle_machine.py` executes the instructions. Needs neither torch nor
numpy.
"""

from __future__ import annotations

import math
from collections import Counter, OrderedDict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from zeroaccel.checkpoint.formats.pickle_machine import Admitted, PickleMachine, StandIn
from zeroaccel.config.bounds import is_size
from zeroaccel.errors import CheckpointError
from zeroaccel.zero.access.safetensors_file import TORCH_NAMES

_MOST_DIMS = 64
_MOST_REPEATED_NUMEL = 1 << 20
_LONGEST_NAME = 400
_SET_NBYTES = 220


class DtypeName(str):
    """A dtype that is a value in a pickle, by safetensors' name."""

    __slots__ = ()


@dataclass(frozen=True, slots=True)
class StoredTensor:
    """A tensor as a pickle describes it.

    Attributes:
        storage: name of the record with its bytes.
        storage_numel: number of elements in that record.
        offset: offset of its first element, in elements; strides are in elements too.
    """

    dtype: str
    storage: str
    storage_numel: int
    offset: int
    shape: tuple[int, ...]
    strides: tuple[int, ...]

    @property
    def numel(self) -> int:
        """Number of elements."""
        return math.prod(self.shape)

    @property
    def place(self) -> tuple[str, int, tuple[int, ...], tuple[int, ...]]:
        """Place of the elements, which is equal for two names of the same tensor."""
        return self.storage, self.offset, self.shape, self.strides


_STORAGES: Mapping[str, str] = {
    "BoolStorage": "BOOL",
    "ByteStorage": "U8",
    "CharStorage": "I8",
    "ShortStorage": "I16",
    "HalfStorage": "F16",
    "BFloat16Storage": "BF16",
    "IntStorage": "I32",
    "FloatStorage": "F32",
    "DoubleStorage": "F64",
    "LongStorage": "I64",
    "ComplexFloatStorage": "C64",
}
_STAND_INS = frozenset(
    {
        "deepspeed.runtime.fp16.loss_scaler.LossScaler",
        "deepspeed.runtime.fp16.loss_scaler.DynamicLossScaler",
        "deepspeed.utils.tensor_fragment.fragment_address",
        "deepspeed.runtime.zero.config.ZeroStageEnum",
    }
)


def load_pickle(content: bytes, where: str, also: Mapping[str, Any] | None = None) -> Any:
    """Returns the object in a pickle, with a `StoredTensor` for each tensor.

    Args:
        where: the file, for messages.
        also: dotted name -> function or value, for names in addition to the table.

    Raises:
        CheckpointError: `content` is not a valid pickle, or has a forbidden name.
    """
    return _Restricted(content, where, also or {}).load()


class _Restricted:
    def __init__(self, content: bytes, where: str, also: Mapping[str, Any]) -> None:
        self._where = where
        self._machine = PickleMachine(content, where, self._find, self._persistent)
        self.load = self._machine.load
        plain: dict[str, Callable[..., Any]] = {
            "set": lambda *arguments: set(self._members(arguments)),
            "frozenset": lambda *arguments: frozenset(self._members(arguments)),
            "complex": _complex,
            "dict": lambda *arguments: dict(self._pairs(arguments)),
            "list": lambda *arguments: list(self._charged(_items(arguments))),
            "tuple": lambda *arguments: tuple(self._charged(_items(arguments))),
            "int": lambda *arguments: int(_number(arguments)),
            "float": lambda *arguments: float(_number(arguments)),
            "bool": lambda *arguments: bool(_number(arguments)),
            "str": _string,
            "bytes": _no_bytes,
        }
        calls: dict[str, Callable[..., Any]] = {
            "collections.OrderedDict": lambda *arguments: OrderedDict(self._pairs(arguments)),
            "collections.Counter": lambda *arguments: Counter(dict(self._pairs(arguments))),
            "collections.defaultdict": lambda *arguments: self._empty_defaultdict(arguments),
            **{f"builtins.{name}": make for name, make in plain.items()},
            **{f"__builtin__.{name}": make for name, make in plain.items()},  # Python 2's name, in protocol 2
            "_codecs.encode": self._encode,
            "torch.Size": lambda *arguments: tuple(_sizes(_items(arguments))),
            "torch.device": _device,
            "torch._utils._rebuild_tensor_v2": self._tensor,
            "torch._utils._rebuild_parameter": self._parameter,
            "torch._utils._rebuild_parameter_with_state": self._parameter,
            "torch._tensor._rebuild_from_type_v2": self._subclass,
        }
        # A new table for each pickle, so that no pickle can change the table for the next one.
        self._admitted: dict[str, Any] = {
            **{name: Admitted(name, make) for name, make in calls.items()},
            **{name: Admitted(name, stand_in_of(name)) for name in _STAND_INS},
            **{name: _Type(name) for name in ("torch.Tensor", "torch.nn.parameter.Parameter")},
            "torch.storage.UntypedStorage": _Storage("U8"),
            **{f"torch.{name}": _Storage(dtype) for name, dtype in _STORAGES.items()},
            **{f"torch.{name}": DtypeName(dtype) for dtype, name in TORCH_NAMES.items()},
            **{name: Admitted(name, make) if callable(make) else make for name, make in also.items()},
        }

    def _find(self, full: str) -> Any:
        if full not in self._admitted:
            raise CheckpointError(
                f"{self._where}: its pickle refers to {full}",
                expected="tensors, plain types and DeepSpeed's loss scalers, stages and fragment addresses only",
                fix="do not load an untrusted file; in your own files, save objects as plain data",
            )
        return self._admitted[full]

    def _charged(self, items: Sequence[Any]) -> Sequence[Any]:
        self._machine.charge(16 * len(items))
        return items

    def _members(self, arguments: tuple[Any, ...]) -> Sequence[Any]:
        self._machine.charge(_SET_NBYTES)
        return self._machine.keys(_items(arguments))

    def _empty_defaultdict(self, arguments: tuple[Any, ...]) -> dict[Any, Any]:
        if len(arguments) > 1:
            raise TypeError("expected at most a default_factory")
        self._machine.charge(_SET_NBYTES)
        return {}

    def _pairs(self, arguments: tuple[Any, ...]) -> list[tuple[Any, Any]]:
        items = arguments[0] if len(arguments) == 1 else _items(arguments)
        pairs = list(items.items()) if isinstance(items, dict) else [tuple(pair) for pair in _items((items,))]
        self._machine.charge(400 + 200 * len(pairs))
        for pair in pairs:
            if len(pair) != 2:
                raise TypeError("expected pairs of a key and a value")
            self._machine.check_key(pair[0])
        return pairs

    def _persistent(self, pid: Any) -> _StorageRecord:
        if type(pid) is not tuple or len(pid) != 5:
            raise CheckpointError(f"{self._where}: its pickle refers to a storage", expected="torch's form", got=pid)
        kind, storage, key, _location, numel = pid
        if kind != "storage" or not isinstance(storage, _Storage) or not isinstance(key, str):
            raise CheckpointError(f"{self._where}: its pickle refers to a storage", expected="torch's form", got=pid)
        if type(numel) is not int or numel < 0:
            raise CheckpointError(f"{self._where}: storage {key}", expected="a number of elements", got=numel)
        return _StorageRecord(storage.dtype, key, numel)

    def _encode(self, text: Any, encoding: Any) -> bytes:
        if encoding != "latin1" or type(text) is not str:
            raise CheckpointError(f"{self._where}: bytes in its pickle", expected="latin1", got=encoding)
        self._machine.charge(80 + len(text))
        return text.encode("latin1")

    def _tensor(self, record: Any, offset: Any, shape: Any, strides: Any, *_: Any) -> StoredTensor:
        where = f"{self._where}: a tensor"
        if not isinstance(record, _StorageRecord) or type(shape) is not tuple or type(strides) is not tuple:
            raise CheckpointError(where, expected="a storage, an offset, a shape and strides", got=(record, offset))
        if len(shape) != len(strides) or len(shape) > _MOST_DIMS:
            raise CheckpointError(where, expected=f"at most {_MOST_DIMS} dims, each with a stride", got=len(shape))
        # Limit everything that may later be allocated or read: a view of one stored element can have any shape
        # (stride 0), so the size of its storage limits its size.
        numbers = (offset, *shape, *strides)
        if not all(is_size(number) for number in numbers):
            raise CheckpointError(where, expected="offset, shape and strides", got=numbers)
        tensor = StoredTensor(record.dtype, record.key, record.numel, offset, shape, strides)
        last = offset + sum((size - 1) * stride for size, stride in zip(shape, strides, strict=True))
        if tensor.numel and last >= record.numel:
            raise CheckpointError(
                f"{self._where}: a tensor of shape {tensor.shape}",
                expected=f"elements up to {last} in storage {record.key}",
                got=f"{record.numel} elements",
            )
        if tensor.numel > max(record.numel, _MOST_REPEATED_NUMEL):
            raise CheckpointError(
                f"{self._where}: a tensor of shape {tensor.shape} that repeats the elements of storage {record.key}",
                expected=f"at most the larger of {record.numel} and {_MOST_REPEATED_NUMEL} elements",
                got=tensor.numel,
                fix="save it after .contiguous()",
            )
        return tensor

    def _parameter(self, data: Any, *_: Any) -> StoredTensor:
        if not isinstance(data, StoredTensor):
            raise CheckpointError(f"{self._where}: a parameter", expected="a tensor", got=data)
        return data

    def _subclass(self, rebuild: Any, kind: Any, arguments: Any, _: Any) -> StoredTensor:
        rebuilds_tensor = isinstance(rebuild, Admitted) and rebuild.make in (self._tensor, self._parameter)
        if not rebuilds_tensor or not isinstance(kind, _Type) or type(arguments) is not tuple:
            raise CheckpointError(f"{self._where}: class of a tensor", expected="torch.Tensor", got=kind)
        tensor: StoredTensor = rebuild.make(*arguments)
        return tensor


def _items(arguments: tuple[Any, ...]) -> Sequence[Any]:
    """Returns the items in the only argument of a container's constructor."""
    if not arguments:
        return ()
    if len(arguments) != 1 or type(arguments[0]) not in (list, tuple, set, frozenset):
        raise TypeError("expected one list, tuple or set")
    return arguments[0] if isinstance(arguments[0], (list, tuple)) else [*arguments[0]]


def _number(arguments: tuple[Any, ...]) -> float:
    if len(arguments) > 1 or any(type(value) not in (int, float, bool) for value in arguments):
        raise TypeError("expected a number")
    return arguments[0] if arguments else 0


def _complex(*arguments: Any) -> complex:
    if len(arguments) > 2 or any(type(value) not in (int, float) for value in arguments):
        raise TypeError("expected two numbers")
    return complex(*arguments)


def _string(*arguments: Any) -> str:
    if len(arguments) > 1 or any(type(value) is not str for value in arguments):
        raise TypeError("expected one string")
    return arguments[0] if arguments else ""


def _no_bytes() -> bytes:
    return b""  # protocol 2 writes non-empty bytes as `_codecs.encode` of text


def _sizes(items: Sequence[Any]) -> Sequence[int]:
    if len(items) > _MOST_DIMS or not all(is_size(size) for size in items):
        raise TypeError("expected the sizes of a tensor")
    return items


def _device(*arguments: Any) -> str:
    if any(type(argument) not in (str, int) for argument in arguments):
        raise TypeError("expected a name and a number")
    text = ":".join(str(argument) for argument in arguments)
    if len(text) > _LONGEST_NAME:
        raise TypeError(f"expected a name of at most {_LONGEST_NAME} characters")
    return text


def stand_in_of(name: str) -> Callable[..., StandIn]:
    """Returns a constructor of stand-ins for the objects of a class."""
    return lambda *arguments: StandIn(name, arguments)


@dataclass(frozen=True, slots=True)
class _Storage:
    dtype: str


@dataclass(frozen=True, slots=True)
class _Type:
    name: str


@dataclass(frozen=True, slots=True)
class _StorageRecord:
    dtype: str
    key: str
    numel: int
