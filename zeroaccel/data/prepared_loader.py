"""The loader that a training loop iterates over after `prepare`: this rank's batches, on its device, and where it is.

Every iteration is the next epoch. The position (epoch, batches of it already given) is plain data: a loader that loads
it goes on with the very next batch. What a batch consists of is the source's matter.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, Protocol

from torch.utils.data import DataLoader

from zeroaccel.data.batch_sources import BatchSource, TakenBatch
from zeroaccel.errors import CheckpointError, UsageError
from zeroaccel.logs import logger
from zeroaccel.nested import batch_size_of

__all__ = ["LoaderProgress", "PreparedLoader", "skip_first_batches"]


class LoaderProgress(Protocol):
    """Who wants to know which loaders are being iterated over: an accelerator's `GradientState`."""

    def add_dataloader(self, loader: Any) -> None:
        """An iteration over `loader` begins."""

    def remove_dataloader(self, loader: Any) -> None:
        """It has ended, or nobody goes on with it."""


@dataclass
class _Position:
    """Where in which epoch.

    Attributes:
        epoch: counts iterations over the loader.
        batches: of the epoch, given so far.
        next_: the next iteration begins here; False once one has begun, for the next is then another epoch.
    """

    epoch: int = 0
    batches: int = 0
    next_: bool = True


class PreparedLoader(DataLoader[Any]):
    """One rank's batches. Made by `prepare_data_loader`.

    A `DataLoader` by type, for code that asks; attributes that are not listed here are those of the loader that was
    given (`dataset`, `batch_size`, `collate_fn`...), whose settings it reads with.

    Args:
        given: the user's loader.
        source: of the batches.
        world_size: ranks that share the data.
        samples_per_round: samples of all ranks' batches together; None where batches differ.
        place: puts a batch where it is computed with.
        watch: told of every iteration.

    Attributes:
        end_of_dataloader: whether the batch given last was this rank's last of the epoch.
        remainder: how many samples of the last round are not repeated ones, over all ranks; -1 where all count.
    """

    def __init__(
        self,
        given: DataLoader[Any],
        source: BatchSource,
        *,
        world_size: int,
        samples_per_round: int | None,
        place: Callable[[Any], Any],
        watch: LoaderProgress | None = None,
    ) -> None:
        # Not initialised as a DataLoader: it has no settings of its own.
        self._given = given
        self._source = source
        self._world_size = world_size
        self._samples_per_round = samples_per_round
        self._place = place
        self._watch = watch
        self._position = _Position()
        self.end_of_dataloader = False
        self.remainder = -1

    def __iter__(self) -> Iterator[Any]:  # type: ignore[override]
        return self.iterate(None)

    def __len__(self) -> int:
        """Batches of this rank per epoch; TypeError where the data have no length."""
        return len(self._source)

    def __getattr__(self, name: str) -> Any:
        given = self.__dict__.get("_given")
        if given is None or name.startswith("__"):
            raise AttributeError(name)
        return getattr(given, name)

    @property
    def epoch(self) -> int:
        """The epoch that the next batch belongs to; a resumed run loops over `range(loader.epoch, n)`."""
        return self._position.epoch

    @property
    def batches_given(self) -> int:
        """Batches of `epoch` that have been given."""
        return self._position.batches

    @property
    def total_batch_size(self) -> int:
        """Samples of all ranks' batches together.

        Raises:
            UsageError: batches differ in size.
        """
        if self._samples_per_round is None:
            raise UsageError(
                "loader.total_batch_size",
                expected="a loader with a batch size",
                got="batches of different sizes",
            )
        return self._samples_per_round

    @property
    def total_dataset_length(self) -> int:
        """Items of the dataset, whoever gets them; TypeError where it has no length."""
        return len(self._given.dataset)  # type: ignore[arg-type]

    def set_epoch(self, epoch: int) -> None:
        """The next iteration is this epoch, from its first batch, unless a position in it has been loaded."""
        position = self._position
        if not (position.next_ and position.epoch == epoch):
            self._position = _Position(epoch)

    def iterate(self, start: int | None) -> Iterator[Any]:
        """The next epoch from batch `start` on; with None from where the position says."""
        position = self._position
        if not position.next_:
            position.epoch, position.batches = position.epoch + 1, 0
        if start is not None:
            position.batches = start
        position.next_ = False
        self.end_of_dataloader, self.remainder = False, -1
        if self._watch is not None:
            self._watch.add_dataloader(self)
        taken: TakenBatch | None = None
        try:
            for taken in self._source.epoch(position.epoch, position.batches):
                self._note(taken, position)
                yield self._place(taken.batch)
        finally:
            if self._watch is not None:
                self._watch.remove_dataloader(self)
        if taken is None and position is self._position:  # an epoch of which nothing was left
            position.epoch, position.batches, position.next_ = position.epoch + 1, 0, True

    def _note(self, taken: TakenBatch, position: _Position) -> None:
        self.end_of_dataloader = taken.last
        self.remainder = -1
        if taken.real is not None:
            single = self._given.batch_size is None and self._given.batch_sampler is None
            self.remainder = taken.real * ((batch_size_of(taken.batch) or 1) if single else 1)
        position.batches += 1
        if taken.last:  # what is saved in the last batch's turn goes on with the next epoch
            position.epoch, position.batches, position.next_ = position.epoch + 1, 0, True

    def state_dict(self) -> dict[str, Any]:
        """The position as plain data and a tensor."""
        position = self._position
        return {
            "epoch": position.epoch,
            "batches": position.batches,
            "order": self._source.state(started=not position.next_),
            "length": self._length_or_none(),
            "world_size": self._world_size,
            "samples_per_round": self._samples_per_round,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """The next iteration goes on behind the batch that was given last when `state` was made.

        Where other ranks' numbers share the data now, it starts at the same sample if a round starts there, else at
        the start of the round before, with a warning.

        Raises:
            CheckpointError: it is not the state of a loader of this length.
        """
        where = "position of a loader"
        missing = {"epoch", "batches", "order", "length", "world_size", "samples_per_round"} - set(state)
        if missing:
            raise CheckpointError(where, expected="one that a prepared loader saved", got=f"no {sorted(missing)}")
        batches: int = state["batches"]
        if state["world_size"] != self._world_size or state["samples_per_round"] != self._samples_per_round:
            batches = self._converted(batches, state["samples_per_round"], where)
        elif state["length"] != (length := self._length_or_none()):
            raise CheckpointError(
                where,
                expected=f"one in an epoch of {length} batches per rank",
                got=f"{state['length']} batches",
                fix="use the dataset and the batch size that the state was saved with",
            )
        self._position = _Position(state["epoch"], batches)
        self._source.restore(state["order"])

    def _converted(self, batches: int, samples_then: int | None, where: str) -> int:
        now = self._samples_per_round
        if batches == 0:
            return 0
        if samples_then is None or now is None:
            raise CheckpointError(
                where,
                expected="the number of ranks it was saved with, as batches have no common size",
                fix="resume on as many ranks, or from the end of an epoch",
            )
        rounds, between = divmod(batches * samples_then, now)
        if between:
            logger.warning(
                "loader: saved after %d samples, which is no multiple of %d; the last %d of them come again",
                batches * samples_then,
                now,
                between,
            )
        return rounds

    def _length_or_none(self) -> int | None:
        try:
            return len(self)
        except TypeError:
            return None


class _SkippingLoader(DataLoader[Any]):
    """A loader whose every epoch starts at a later batch; otherwise the loader itself."""

    def __init__(self, loader: DataLoader[Any], skipped: int) -> None:
        self._loader, self._skipped = loader, skipped

    def __iter__(self) -> Iterator[Any]:  # type: ignore[override]
        if isinstance(self._loader, PreparedLoader):
            return self._loader.iterate(self._skipped)
        return self._plain()

    def __len__(self) -> int:
        return max(0, len(self._loader) - self._skipped)

    def __getattr__(self, name: str) -> Any:
        loader = self.__dict__.get("_loader")
        if loader is None or name.startswith("__"):
            raise AttributeError(name)
        return getattr(loader, name)

    def set_epoch(self, epoch: int) -> None:
        self._loader.set_epoch(epoch)  # type: ignore[attr-defined]

    def _plain(self) -> Iterator[Any]:
        batches = iter(self._loader)
        for _ in range(self._skipped):
            if next(batches, batches) is batches:
                return
        yield from batches


def skip_first_batches(dataloader: DataLoader[Any], num_batches: int = 0) -> DataLoader[Any]:
    """`dataloader` with each of its epochs starting at batch `num_batches`.

    Of a prepared loader this shares the position. It says where an epoch starts, not how far to go from there: a loader
    whose position was loaded, and which is told to skip as many batches again, skips them once.
    """
    if num_batches < 0:
        raise UsageError("skip_first_batches(num_batches)", expected="0 or more", got=num_batches)
    loader = dataloader._loader if isinstance(dataloader, _SkippingLoader) else dataloader
    return _SkippingLoader(loader, num_batches)
