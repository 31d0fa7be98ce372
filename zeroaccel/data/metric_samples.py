"""Finds the samples in data for metrics, to drop those that a loader repeated to fill its last round.

`operations.gather_for_metrics` calls it on every rank before it gathers. Rows and items belong to samples by these
conventions, with a batch of B samples:

- A tensor or array has a row per sample, or one row: a value of the rank, like a number or a 0-dim tensor.
- A list has an item per sample, unless it has another number of items, or tensors of B rows each.
- A dict, tuple or dataclass has such values. A tuple of B texts has a text per sample.

Data that fits no convention, or two, is an error. Only a rank that has both kinds of samples distinguishes them: the
data of others are real or repeated as a whole.
"""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from numbers import Number
from typing import Any

from torch import Tensor

from zeroaccel.errors import UsageError
from zeroaccel.nested import tensors_of

_TEXTS = (str, bytes)


@dataclasses.dataclass(frozen=True)
class RealSamples:
    """The samples of a rank's batch: `size` in all, of which the first `real` are not repeated."""

    real: int
    size: int


def real_rows(data: Any, samples: RealSamples | None) -> Iterator[int]:
    """Yields, for each tensor in `data` in order, the number of its first rows that belong to real samples.

    A 0-dim tensor counts as one row.

    Raises:
        UsageError: a tensor does not show which of its rows belong to a sample.
    """
    if samples is None or not 0 < samples.real < samples.size:
        repeated = samples is not None and samples.real == 0
        yield from (0 if repeated else _rows(tensor) for tensor in tensors_of(data))
    else:
        yield from _rows_of(data, samples, "")


def real_objects(data: Any, samples: RealSamples | None) -> list[Any]:
    """Returns a list of `data` without its repeated samples; the empty list if all of them are repeated.

    Raises:
        UsageError: an object does not show which of its parts belong to a sample.
    """
    if samples is None or samples.real >= samples.size > 0:
        return [data]
    return [_without(data, samples, "")] if samples.real else []


def _rows(leaf: Any) -> int:
    return int(leaf.shape[0]) if len(leaf.shape) else 1


def _rows_of(data: Any, samples: RealSamples, path: str) -> Iterator[int]:
    if isinstance(data, Mapping):
        for key, item in data.items():
            yield from _rows_of(item, samples, f"{path}[{key!r}]")
    elif isinstance(data, (list, tuple)):
        columns = all(isinstance(item, Tensor) and _rows(item) == samples.size for item in data)
        per_sample = isinstance(data, list) and len(data) == samples.size and not columns
        _require_clear(data, samples, path)
        for index, item in enumerate(data):
            if per_sample:
                yield from (_rows(tensor) if index < samples.real else 0 for tensor in tensors_of(item))
            else:
                yield from _rows_of(item, samples, f"{path}[{index}]")
    else:
        yield _real(data, samples, path)


def _without(data: Any, samples: RealSamples, path: str) -> Any:
    if isinstance(data, Mapping):
        items = {key: _without(item, samples, f"{path}[{key!r}]") for key, item in data.items()}
        try:
            return type(data)(items)  # type: ignore[call-arg]
        except TypeError:
            return items
    if isinstance(data, (list, tuple)):
        texts = all(isinstance(item, _TEXTS) for item in data) and not hasattr(data, "_fields")
        if len(data) == samples.size and (isinstance(data, list) or texts):
            return type(data)(data[: samples.real])
        _require_clear(data, samples, path)
        parts = [_without(item, samples, f"{path}[{index}]") for index, item in enumerate(data)]
        return type(data)(*parts) if hasattr(data, "_fields") else type(data)(parts)
    if data is None or isinstance(data, (Number, *_TEXTS)):
        return data
    if hasattr(data, "shape") and hasattr(data, "__getitem__"):
        count = _real(data, samples, path)
        return data if count == _rows(data) else data[:count]
    if dataclasses.is_dataclass(data) and not isinstance(data, type):
        shortened = copy.copy(data)
        for field in dataclasses.fields(data):
            value = _without(getattr(data, field.name), samples, f"{path}.{field.name}")
            object.__setattr__(shortened, field.name, value)  # also of a frozen class
        return shortened
    raise _unclear(path, samples, type(data).__name__)


def _real(leaf: Any, samples: RealSamples, path: str) -> int:
    rows = _rows(leaf)
    if rows not in (1, samples.size):
        raise _unclear(path, samples, f"{type(leaf).__name__} of shape {tuple(leaf.shape)}")
    return min(rows, samples.real)


def _is_value(item: Any) -> bool:
    """True for a value that may be one sample's or the whole rank's."""
    return isinstance(item, (Number, *_TEXTS)) or len(getattr(item, "shape", (1,))) == 0


def _require_clear(items: Sequence[Any], samples: RealSamples, path: str) -> None:
    """Raises if the items of a list or tuple may be samples and values of the rank, or are too many or too few."""
    if hasattr(items, "_fields") or len(items) == 1:
        return
    whole = [item for item in items if isinstance(item, (Number, *_TEXTS))]
    if isinstance(items, list):
        unclear = len(items) != samples.size and bool(whole)
    elif len(items) == samples.size:
        unclear = any(_is_value(item) or isinstance(item, Mapping) for item in items)
    else:
        unclear = any(isinstance(item, _TEXTS) for item in items)
    if unclear:
        kinds = ", ".join(sorted({type(item).__name__ for item in items}))
        raise _unclear(path, samples, f"a {type(items).__name__} of {len(items)} items ({kinds})")


def _unclear(path: str, samples: RealSamples, got: str) -> UsageError:
    repeated = samples.size - samples.real
    return UsageError(
        f"gather_for_metrics: the value at {path or 'the top'}",
        expected=f"a row or list item for each of the {samples.size} samples of this rank's batch, because the "
        f"loader repeated {repeated} of them, which have to be dropped",
        got=got,
        fix="pass a tensor with a row per sample or a list with an item per sample, values of the whole rank in a "
        "dict; or call gather() or gather_object() and drop the repeated samples yourself",
    )
