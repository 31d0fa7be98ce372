"""Who does what among the processes: main and others, waiting, taking turns, parts of a list.

A mixin of `PartialState` and of `Accelerator`, which say who this process is; it holds nothing itself. Tensors do not
move here (`operations.py`).
"""

from __future__ import annotations

import builtins
import functools
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, Protocol, TypeVar, cast

import torch
from torch import Tensor

from zeroaccel.errors import UsageError
from zeroaccel.operations import collectives_of_process

__all__ = ["ProcessControl"]

F = TypeVar("F", bound=Callable[..., Any])


class _Place(Protocol):
    @property
    def num_processes(self) -> int: ...
    @property
    def process_index(self) -> int: ...
    @property
    def local_process_index(self) -> int: ...


class ProcessControl:
    """Properties, decorators and context managers; the class that mixes it in has the three numbers of `_Place`."""

    @property
    def _place(self) -> _Place:
        return cast(_Place, self)

    # -- who

    @property
    def is_main_process(self) -> bool:
        """Whether this is rank 0 of the job."""
        return self._place.process_index == 0

    @property
    def is_local_main_process(self) -> bool:
        """Whether this is the first rank on its machine."""
        return self._place.local_process_index == 0

    @property
    def is_last_process(self) -> bool:
        """Whether this is the last rank of the job."""
        return self._place.process_index == self._place.num_processes - 1

    @property
    def use_distributed(self) -> bool:
        """Whether there is more than one process."""
        return self._place.num_processes > 1

    # -- only some

    def on_main_process(self, function: F) -> F:
        """A decorator: the function runs on rank 0, and returns None at once elsewhere."""
        return self._only(function, lambda: self.is_main_process)

    def on_local_main_process(self, function: F) -> F:
        """A decorator: the function runs on the first rank of each machine."""
        return self._only(function, lambda: self.is_local_main_process)

    def on_last_process(self, function: F) -> F:
        """A decorator: the function runs on the last rank."""
        return self._only(function, lambda: self.is_last_process)

    def on_process(self, function: F | None = None, process_index: int | None = None) -> F | Callable[[F], F]:
        """A decorator: the function runs on one rank; `@on_process(process_index=1)`."""
        if function is None:
            return functools.partial(self.on_process, process_index=process_index)  # type: ignore[return-value]
        return self._only(function, lambda: self._place.process_index == self._checked(process_index))

    def on_local_process(
        self, function: F | None = None, local_process_index: int | None = None
    ) -> F | Callable[[F], F]:
        """A decorator: the function runs on one rank of each machine."""
        if function is None:
            return functools.partial(self.on_local_process, local_process_index=local_process_index)  # type: ignore[return-value]
        return self._only(function, lambda: self._place.local_process_index == local_process_index)

    def print(self, *args: Any, **kwargs: Any) -> None:
        """`print`, on the first rank of each machine."""
        if self.is_local_main_process:
            builtins.print(*args, **kwargs)

    def _only(self, function: F, mine: Callable[[], bool]) -> F:
        @functools.wraps(function)
        def run(*args: Any, **kwargs: Any) -> Any:
            return function(*args, **kwargs) if mine() else None

        return cast(F, run)

    def _checked(self, process_index: int | None) -> int:
        if process_index is None or not 0 <= process_index < self._place.num_processes:
            raise UsageError(
                "on_process: process_index", expected=f"0 to {self._place.num_processes - 1}", got=process_index
            )
        return process_index

    # -- one after the other

    def wait_for_everyone(self) -> None:
        """Returns once every process has called it. (all ranks)"""
        collectives_of_process().barrier("wait_for_everyone")

    @contextmanager
    def main_process_first(self) -> Iterator[None]:
        """Rank 0 goes through the block, then the others do. (all ranks)"""
        with self._first(self.is_main_process, "main_process_first"):
            yield

    @contextmanager
    def local_main_process_first(self) -> Iterator[None]:
        """The first rank of each machine goes through the block, then the others do. (all ranks)"""
        with self._first(self.is_local_main_process, "local_main_process_first"):
            yield

    @contextmanager
    def _first(self, is_first: bool, label: str) -> Iterator[None]:
        if not is_first:
            collectives_of_process().barrier(label)
        try:
            yield
        finally:
            if is_first:  # also when the block raised: the others shall find out by themselves
                collectives_of_process().barrier(label)

    # -- parts

    @contextmanager
    def split_between_processes(self, inputs: Any, apply_padding: bool = False) -> Iterator[Any]:
        """This process's part of `inputs`: a list, tuple, tensor, dataset, or a mapping of these of equal lengths.

        The first ranks get one item more where the length is not a multiple of the number of processes.

        Args:
            apply_padding: the shorter parts repeat their last item (of all inputs, if they have none), so that all
                are equally long.

        Raises:
            UsageError: it has no length, or a mapping's values have different ones.
        """
        yield self._part(inputs, apply_padding)

    def _part(self, inputs: Any, apply_padding: bool) -> Any:
        if isinstance(inputs, Mapping):
            lengths = {key: len(value) for key, value in inputs.items()}
            if len(set(lengths.values())) > 1:
                raise UsageError("split_between_processes", expected="values of equal lengths", got=lengths)
            return {key: self._part(value, apply_padding) for key, value in inputs.items()}
        if not (isinstance(inputs, Tensor) or (hasattr(inputs, "__len__") and hasattr(inputs, "__getitem__"))):
            raise UsageError(
                "split_between_processes",
                expected="a list, tuple, tensor, dataset, or mapping",
                got=type(inputs).__name__,
            )
        share, rest = divmod(len(inputs), self._place.num_processes)
        index = self._place.process_index
        start = index * share + min(index, rest)
        end = start + share + (index < rest)
        missing = 1 if apply_padding and rest and index >= rest else 0
        if isinstance(inputs, Tensor):
            part = inputs[start:end]
            last = part[-1:] if len(part) else inputs[-1:]
            return torch.cat([part, last]) if missing else part
        if isinstance(inputs, (list, tuple)):
            taken: Any = inputs[start:end]
            return taken + (taken[-1:] or inputs[-1:]) if missing else taken
        positions = [*range(start, end), *([end - 1 if end > start else len(inputs) - 1] * missing)]
        select = getattr(inputs, "select", None)  # a dataset of Hugging Face's keeps its kind
        return select(positions) if callable(select) else [inputs[position] for position in positions]
