"""Reads the pickles inside torch's files without running anything that is in them.

What a pickle may name is the table below: plain types, tensors, and four stand-ins with the names of DeepSpeed's
classes; whatever else it names is refused by that name. Tensors come out as descriptions of where their bytes are;
`torch_file.py` turns those into places in a file. Needs neither torch nor numpy.
"""

from __future__ import annotations

import io
import math
import pickle
from collections import Counter, OrderedDict
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from zeroaccel.errors import CheckpointError

__all__ = ["DtypeName", "StandIn", "StoredTensor", "load_pickle"]


class DtypeName(str):
    """safetensors' name of a dtype that a pickle holds as a value."""

    __slots__ = ()


class StandIn:
    """An object of a class of DeepSpeed's: its attributes, and no behaviour.

    Attributes:
        class_name: the name of the class it stands for.
        arguments: what it was made from; a number for enumerations.
    """

    class_name: str = ""

    def __new__(cls, *arguments: Any) -> StandIn:
        made = super().__new__(cls)
        made.__dict__["arguments"] = arguments
        return made

    def __init__(self, *_: Any) -> None:
        pass

    def __repr__(self) -> str:
        return f"<{self.class_name} {vars(self)}>"


@dataclass(frozen=True)
class StoredTensor:
    """A tensor as a pickle describes it.

    Attributes:
        storage: the name of the record with its bytes.
        storage_numel: elements in that record.
        offset: of its first element, in elements; strides are in elements, too.
    """

    dtype: str
    storage: str
    storage_numel: int
    offset: int
    shape: tuple[int, ...]
    strides: tuple[int, ...]

    @property
    def numel(self) -> int:
        """Elements."""
        return math.prod(self.shape)

    @property
    def place(self) -> tuple[str, int, tuple[int, ...], tuple[int, ...]]:
        """Equal for two names of the same tensor."""
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
_DTYPES: Mapping[str, str] = {
    "bool": "BOOL",
    "uint8": "U8",
    "int8": "I8",
    "int16": "I16",
    "float16": "F16",
    "bfloat16": "BF16",
    "int32": "I32",
    "float32": "F32",
    "float64": "F64",
    "int64": "I64",
    "complex64": "C64",
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
    """The object of a pickle, with `StoredTensor` for tensors.

    Args:
        where: the file, for messages.
        also: dotted name -> what it means, beside the table.

    Raises:
        CheckpointError: it names something that is not admitted, or is no pickle.
    """
    try:
        return _Restricted(content, where, also or {}).load()
    except CheckpointError:
        raise
    except Exception as error:  # a damaged pickle can make the reader fail in any way
        raise CheckpointError(f"{where}: its pickle is damaged ({type(error).__name__}: {error})") from error


class _Restricted(pickle.Unpickler):
    def __init__(self, content: bytes, where: str, also: Mapping[str, Any]) -> None:
        super().__init__(io.BytesIO(content))
        self._where = where
        self._also = also
        # Made anew for each pickle, so that none can leave anything behind for the next.
        self._admitted: dict[str, Any] = {
            "collections.OrderedDict": OrderedDict,
            "collections.Counter": Counter,
            "collections.defaultdict": _plain_dict,
            "builtins.set": set,
            "builtins.frozenset": frozenset,
            "builtins.complex": complex,
            "builtins.dict": dict,
            "builtins.list": list,
            "builtins.tuple": tuple,
            "builtins.int": int,
            "builtins.float": float,
            "builtins.bool": bool,
            "builtins.str": str,
            "_codecs.encode": self._encode,
            "torch.Size": tuple,
            "torch.device": self._device,
            "torch.Tensor": _Type("torch.Tensor"),
            "torch.nn.parameter.Parameter": _Type("torch.nn.parameter.Parameter"),
            "torch._utils._rebuild_tensor_v2": self._tensor,
            "torch._utils._rebuild_parameter": self._parameter,
            "torch._utils._rebuild_parameter_with_state": self._parameter,
            "torch._tensor._rebuild_from_type_v2": self._subclass,
            "torch.storage.UntypedStorage": _Storage("U8"),
            **{f"torch.{name}": _Storage(dtype) for name, dtype in _STORAGES.items()},
            **{f"torch.{name}": DtypeName(dtype) for name, dtype in _DTYPES.items()},
            **{name: type(name.rpartition(".")[2], (StandIn,), {"class_name": name}) for name in _STAND_INS},
        }
        # Python 2's names, which pickles of protocol 2 hold.
        for name in ("set", "frozenset", "complex", "dict", "list", "tuple", "int", "float", "bool", "str"):
            self._admitted[f"__builtin__.{name}"] = self._admitted[f"builtins.{name}"]

    def find_class(self, module: str, name: str) -> Any:
        full = f"{module}.{name}"
        if full in self._also:
            return self._also[full]
        if full not in self._admitted:
            raise CheckpointError(
                f"{self._where}: its pickle refers to {full}",
                expected="tensors, plain types and DeepSpeed's loss scalers, stage and fragment addresses only",
                fix="do not load a file you do not trust; save what is yours in it as plain data",
            )
        return self._admitted[full]

    def persistent_load(self, pid: Any) -> _Record:
        kind, storage, key, _location, numel = pid
        if kind != "storage" or not isinstance(storage, _Storage) or not isinstance(key, str):
            raise CheckpointError(f"{self._where}: its pickle refers to a storage", expected="torch's form", got=pid)
        if type(numel) is not int or numel < 0:
            raise CheckpointError(f"{self._where}: storage {key}", expected="a number of elements", got=numel)
        return _Record(storage.dtype, key, numel)

    def _encode(self, text: str, encoding: str) -> bytes:
        if encoding != "latin1":
            raise CheckpointError(f"{self._where}: bytes in its pickle", expected="latin1", got=encoding)
        return text.encode("latin1")

    def _device(self, *arguments: Any) -> str:
        return ":".join(str(part) for part in arguments)

    def _tensor(self, record: _Record, offset: int, shape: Any, strides: Any, *_: Any) -> StoredTensor:
        numbers = (offset, *shape, *strides)
        if not isinstance(record, _Record) or any(type(number) is not int or number < 0 for number in numbers):
            raise CheckpointError(f"{self._where}: a tensor", expected="offset, shape and strides", got=numbers)
        tensor = StoredTensor(record.dtype, record.key, record.numel, offset, tuple(shape), tuple(strides))
        last = offset + sum((size - 1) * stride for size, stride in zip(shape, strides, strict=True))
        if tensor.numel and last >= record.numel:
            raise CheckpointError(
                f"{self._where}: a tensor of shape {tensor.shape}",
                expected=f"elements up to {last} in storage {record.key}",
                got=f"{record.numel} elements",
            )
        return tensor

    def _parameter(self, data: StoredTensor, *_: Any) -> StoredTensor:
        return data

    def _subclass(self, rebuild: Callable[..., Any], kind: Any, arguments: tuple[Any, ...], _: Any) -> StoredTensor:
        if rebuild not in (self._tensor, self._parameter) or not isinstance(kind, _Type):
            raise CheckpointError(f"{self._where}: a tensor of a class", expected="torch.Tensor", got=kind)
        made: StoredTensor = rebuild(*arguments)
        return made


def _plain_dict(*_: Any) -> dict[Any, Any]:
    return {}


@dataclass(frozen=True)
class _Storage:
    dtype: str


@dataclass(frozen=True)
class _Type:
    name: str


@dataclass(frozen=True)
class _Record:
    dtype: str
    key: str
    numel: int
