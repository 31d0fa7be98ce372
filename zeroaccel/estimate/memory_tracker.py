"""Counting the bytes of live tensors while operations run, on fake tensors as on real ones.

An operation's results are entered when it returns and struck off when the last reference to their storage goes.
Storages whose size comes and goes are looked at whenever something else is entered. What a kernel allocates and frees
within one operation is not seen.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

__all__ = ["MemoryTracker"]

_DEVICE = torch.ops.prim.device.default


class MemoryTracker(TorchDispatchMode):
    """The books of all storages made inside it.

    Args:
        on_look: called after every operation, with the bytes that are alive then.
    """

    def __init__(self, on_look: Callable[[int], None]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._on_look = on_look
        self._nbytes: dict[int, int] = {}
        self._fixed = 0
        self._elastic: list[torch.UntypedStorage] = []

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        if func is _DEVICE and isinstance(args[0], FakeTensor):
            return args[0].fake_device  # two of three calls, through no more of torch's machinery than must be
        result = func(*args, **(kwargs or {}))
        for leaf in tree_leaves(result):
            if isinstance(leaf, Tensor):
                self._enter(leaf.untyped_storage())
        self.look()
        return result

    def follow(self, tensors: Iterable[Tensor]) -> None:
        """From now on these tensors' storages are counted with the size they have at the time."""
        for tensor in tensors:
            storage = tensor.untyped_storage()
            self._strike(storage._cdata)
            self._nbytes[storage._cdata] = 0  # known, and not to be entered again
            self._elastic.append(storage)

    @property
    def total(self) -> int:
        """Bytes that are alive now."""
        return self._fixed + sum(storage.nbytes() for storage in self._elastic)

    def look(self) -> None:
        """Tells what is alive now."""
        self._on_look(self.total)

    def _enter(self, storage: torch.UntypedStorage) -> None:
        key = storage._cdata
        if key not in self._nbytes:
            self._nbytes[key] = nbytes = storage.nbytes()
            self._fixed += nbytes
            weakref.finalize(storage, self._strike, key)

    def _strike(self, key: int) -> None:
        self._fixed -= self._nbytes.pop(key, 0)
