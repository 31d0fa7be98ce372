"""Encodes plain data as JSON, without pickle: client state, hyperparameters, the states of random generators.

Tensors go to the writer of the file, and the JSON refers to them by key. A value whose type would need code to restore
it is an error that names its key. Objects in an optimizer's states become namespaces of their attributes if the
optimizer's own module has their class, since the program that resumes has it too. docs/checkpoint_format.md describes
the encoding.
"""

from __future__ import annotations

import argparse
import base64
import math
import random
import sys
from collections import Counter, OrderedDict
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path, PurePath
from typing import Any

import numpy as np
import torch
from torch import Tensor

from zeroaccel.errors import CheckpointError, UsageError
from zeroaccel.nested import to_device
from zeroaccel.zero.access.safetensors_file import dtype_name, dtype_of

_PAIRS: Mapping[str, Callable[[list[tuple[Any, Any]]], Any]] = {
    "dict": dict,
    "OrderedDict": OrderedDict,
    "Counter": lambda items: Counter(dict(items)),
}
_VALUES: Mapping[str, Callable[[dict[str, Any]], Any]] = {
    "float": lambda value: float(value["value"]),
    "path": lambda value: Path(value["value"]),
    "bytes": lambda value: base64.b64decode(value["base64"], validate=True),
}
_SEQUENCES: Mapping[str, Callable[[list[Any]], Any]] = {"tuple": tuple, "set": set}


_CONVERT = "convert it, e.g. with .item(), .tolist() or .state_dict(), or leave it out"


def encode(value: Any, where: str, keep: Callable[[Tensor], str], fix: str = _CONVERT) -> Any:
    """Encodes `value` as JSON.

    Args:
        where: place of `value` for messages, such as "client_state"; nested keys are appended to it.
        keep: stores a tensor in the file and returns its key.
        fix: remedy for a value that is an object of another class.

    Raises:
        UsageError: a nested value is neither plain data nor a tensor; the message names its key.

    Example:
        >>> tensors = {}
        >>> def keep(tensor):
        ...     tensors["t0"] = tensor
        ...     return "t0"
        >>> state = encode({"epoch": 3, "seen": {7}, "ema": torch.ones(2)}, "client_state", keep)
        >>> state
        {'epoch': 3, 'seen': {'$': 'set', 'items': [7]}, 'ema': {'$': 'tensor', 'key': 't0'}}
        >>> decode(state, tensors.__getitem__)
        {'epoch': 3, 'seen': {7}, 'ema': tensor([1., 1.])}
    """
    kind = type(value)
    if value is None or kind in (bool, int, str):
        return value
    if kind is float:
        return value if math.isfinite(value) else {"$": "float", "value": repr(value)}
    if kind is bytes:
        return {"$": "bytes", "base64": base64.b64encode(value).decode("ascii")}
    if isinstance(value, Tensor):
        return _encode_tensor(value, where, keep)
    if kind is list:
        return [encode(item, f"{where}[{index}]", keep) for index, item in enumerate(value)]
    if kind is tuple or kind is set:
        items = [encode(item, f"{where}[{index}]", keep) for index, item in enumerate(value)]
        return {"$": kind.__name__, "items": items}
    if isinstance(value, PurePath):
        return {"$": "path", "value": str(value)}
    if kind is argparse.Namespace:
        return {"$": "namespace", "value": encode(vars(value), where, keep)}
    if kind in (dict, OrderedDict, Counter):
        if kind is dict and "$" not in value and all(type(key) is str for key in value):
            return {key: encode(item, f"{where}[{key!r}]", keep) for key, item in value.items()}
        pairs = [
            [encode(key, f"{where}, key {key!r}", keep), encode(item, f"{where}[{key!r}]", keep)]
            for key, item in value.items()
        ]
        return {"$": kind.__name__, "items": pairs}
    raise UsageError(
        where,
        expected="plain data (None, bool, int, float, str, bytes, list, tuple, set, dict), Path, Namespace or a tensor",
        got=f"{kind.__module__}.{kind.__qualname__}",
        fix=fix,
    )


def _encode_tensor(value: Tensor, where: str, keep: Callable[[Tensor], str]) -> Any:
    if value.layout is not torch.strided or value.is_meta or type(value) not in (Tensor, torch.nn.Parameter):
        raise UsageError(where, expected="a dense, plain tensor", got=f"{type(value).__name__}, {value.layout}")
    if value.dim() == 0 and not value.is_complex():
        return {"$": "scalar", "dtype": dtype_name(value.dtype), "value": encode(value.item(), where, keep)}
    return {"$": "tensor", "key": keep(value)}


def decode(value: Any, fetch: Callable[[str], Tensor]) -> Any:
    """Decodes the result of `encode`.

    Args:
        fetch: returns the tensor that was saved under a key.

    Raises:
        CheckpointError: `value` is not a valid encoding.
    """
    if isinstance(value, list):
        return [decode(item, fetch) for item in value]
    if not isinstance(value, dict):
        return value
    if "$" not in value:
        return {key: decode(item, fetch) for key, item in value.items()}
    kind = value["$"]
    try:
        # The values come from a file: convert any error of the constructors to one CheckpointError.
        if kind in _VALUES:
            return _VALUES[kind](value)
        if kind == "scalar":
            return torch.tensor(decode(value["value"], fetch), dtype=dtype_of(value["dtype"]))
        if kind == "tensor":
            return fetch(value["key"])
        if kind == "namespace":
            return argparse.Namespace(**decode(value["value"], fetch))
        if kind in _SEQUENCES:
            return _SEQUENCES[kind]([decode(item, fetch) for item in value["items"]])
        if kind in _PAIRS:
            return _PAIRS[kind]([(decode(key, fetch), decode(item, fetch)) for key, item in value["items"]])
    except CheckpointError:
        raise
    except (KeyError, TypeError, ValueError, OverflowError, RuntimeError) as error:  # torch.tensor raises RuntimeError
        what = f"plain data of kind {str(kind)[:100]!r} in the manifest"
        raise CheckpointError(f"{what}: damaged ({str(error)[:200]})") from error
    raise CheckpointError(f"plain data of kind {str(kind)[:100]!r} in the manifest", expected="a known kind")


_CLASS, _ORDERS = "class", "with"  # keywords, which no attribute has as its name


def without_class(value: Any, owner: object) -> Any:
    """Returns an object of a class that the module of its owner has as a namespace; another value unchanged."""
    for name, kind in _classes_beside(owner).items():
        if type(value) is kind and not isinstance(value, Tensor) and hasattr(value, "__dict__"):
            tensors = {key: each for key, each in vars(value).items() if isinstance(each, Tensor)}
            orders = {key: list(each.dim_order()) for key, each in tensors.items() if not each.is_contiguous()}
            return argparse.Namespace(**{_CLASS: name, _ORDERS: orders, **vars(value)})
    return value


def with_class(value: Any, owner: object, device: torch.device, where: str) -> Any:
    """Returns the object of a namespace of `without_class`, with its tensors on `device`; another value unchanged.

    Tensors get their order of dims in memory, on which the rounding of products depends.

    Raises:
        CheckpointError: the module of the owner has no such class.
    """
    if type(value) is not argparse.Namespace or _CLASS not in vars(value):
        return value
    attributes = dict(vars(value))
    name, orders, classes = attributes.pop(_CLASS), attributes.pop(_ORDERS, {}), _classes_beside(owner)
    if name not in classes:
        expected = f"a class of {type(owner).__module__}: {', '.join(sorted(classes))}"
        raise CheckpointError(where, expected=expected, got=name, fix="resume with the optimizer of the checkpoint")
    attributes = to_device(attributes, device)
    try:
        restored: Any = object.__new__(classes[name])
        for key, order in orders.items():
            inverse = sorted(range(len(order)), key=order.__getitem__)
            attributes[key] = attributes[key].permute(order).contiguous().permute(inverse)
    except (AttributeError, IndexError, KeyError, TypeError, RuntimeError) as error:
        raise CheckpointError(f"{where}: state of kind {name}: damaged ({str(error)[:200]})") from error
    vars(restored).update(attributes)
    return restored


def _classes_beside(owner: object) -> dict[str, type]:
    """Returns the classes of the owner's package that its module has, by name."""
    module = type(owner).__module__
    found = [each for each in vars(sys.modules[module]).values() if isinstance(each, type)]
    package = module.partition(".")[0]
    return {each.__name__: each for each in found if each.__module__.partition(".")[0] == package}


def random_state(device: torch.device) -> dict[str, Any]:
    """Returns the states of the generators of Python, numpy, torch and, if `device` is a GPU, of that GPU."""
    version, words, gauss = random.getstate()
    numpy_state: Any = np.random.get_state(legacy=True)
    name, keys, position, has_gauss, cached = numpy_state
    return {
        "torch": torch.get_rng_state(),
        "cuda": None if device.type == "cpu" else torch.get_device_module(device).get_rng_state(device),
        "python": (version, torch.tensor(words, dtype=torch.int64), gauss),
        "numpy": (str(name), torch.from_numpy(keys.astype(np.int64)), int(position), int(has_gauss), float(cached)),
    }


@contextmanager
def preserved_random_state(device: torch.device) -> Iterator[None]:
    """Restores the generators of `random_state` at the end of the block."""
    state = random_state(device)
    try:
        yield
    finally:
        restore_random_state(state, device)


def restore_random_state(state: dict[str, Any], device: torch.device) -> None:
    """Restores every generator from the result of `random_state`.

    Raises:
        CheckpointError: `state` has a different form.
    """
    try:
        torch.set_rng_state(state["torch"])
        if state["cuda"] is not None and device.type != "cpu":
            torch.get_device_module(device).set_rng_state(state["cuda"], device)
        version, words, gauss = state["python"]
        random.setstate((version, tuple(words.tolist()), gauss))
        name, keys, position, has_gauss, cached = state["numpy"]
        np.random.set_state((name, keys.numpy().astype(np.uint32), position, has_gauss, cached))
    except (KeyError, TypeError, ValueError, RuntimeError) as error:
        raise CheckpointError(f"random state of the checkpoint: cannot be restored ({error})") from error
