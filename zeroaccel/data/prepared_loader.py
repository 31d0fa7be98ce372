"""The loader that a training loop iterates over after `prepare`: this rank's batches, on its device, with a position.

`prepare_data_loader` checks a user's `DataLoader` and wraps it in a `PreparedLoader`. Its position (epoch, batches
yielded) is plain data: a loader that loads it continues with the next batch.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Protocol

import torch
from torch.utils.data import DataLoader, DistributedSampler, IterableDataset

from zeroaccel.comm.agree import agreed, from_rank_0
from zeroaccel.comm.collectives import Collectives
from zeroaccel.data.batch_sharding import BALANCED_ROUNDS, ShardingRules
from zeroaccel.data.batch_sources import (
    Epochs,
    IndexedSource,
    LoadedBatch,
    Order,
    Share,
    StreamSource,
    dispatched_epoch,
    length_of,
    lengths_of,
    warn_unbalanced,
)
from zeroaccel.data.metric_samples import RealSamples
from zeroaccel.errors import CheckpointError, UsageError
from zeroaccel.logs import log_once, logger
from zeroaccel.nested import batch_size_of, to_device
from zeroaccel.telemetry.throughput import data_wait


class LoaderProgress(Protocol):
    """Registers loaders during their iteration; implemented by an accelerator's `GradientState`."""

    def add_dataloader(self, loader: Any) -> None:
        """Called when an iteration over `loader` begins."""

    def next_batch(self) -> None:
        """Called before the loader reads a batch."""

    def remove_dataloader(self, loader: Any) -> None:
        """Called after the iteration has ended or was abandoned."""


@dataclass
class _Position:
    """A position in the data.

    Attributes:
        epoch: number of the epoch; each iteration over the loader is one.
        batches: number of batches of the epoch yielded so far.
        next_: True if the next iteration starts here; False during an iteration, as the next one is another epoch.
    """

    epoch: int = 0
    batches: int = 0
    next_: bool = True

    def end(self) -> None:
        """Moves the position to the start of the next epoch."""
        self.epoch, self.batches, self.next_ = self.epoch + 1, 0, True


class _Around(DataLoader[Any]):
    """A `DataLoader` by type that delegates missing attributes to the loader it reads."""

    _loader: DataLoader[Any]

    def __getattr__(self, name: str) -> Any:
        loader = self.__dict__.get("_loader")
        if loader is None or name.startswith("__"):
            raise AttributeError(name)
        return getattr(loader, name)


class PreparedLoader(_Around):
    """A loader of one rank's batches, from `prepare_data_loader`. Every iteration is the next epoch.

    It is a `DataLoader` by type; other attributes (`dataset`, `batch_size`, `collate_fn`...) are those of the user's
    loader, whose settings it uses.

    Args:
        loader: the user's loader.
        rules: sharding of its order.
        rank: rank whose batches it yields.
        epochs: reads these batches.
        order: order of the epochs; None on a rank that draws none, because rank 0 sends all batches.
        place: moves a batch to its device.
        progress: registers every iteration.

    Attributes:
        end_of_dataloader: True if the last batch yielded was this rank's last batch of the epoch.
        remainder: number of samples of the round, over all ranks, that are not repeated; -1 if no sample is. If the
            dataset yields whole batches, this counts each batch with the size of this rank's.
        real_samples: which samples of this rank's batch are not repeated; None if no sample of the round is.
    """

    def __init__(
        self,
        loader: DataLoader[Any],
        rules: ShardingRules,
        rank: int,
        *,
        epochs: Epochs,
        order: Order | None,
        place: Callable[[Any], Any],
        progress: LoaderProgress | None = None,
    ) -> None:
        # No super().__init__: a DataLoader checks and stores settings, which this class does not have.
        self._loader = loader
        self._rules, self._rank = rules, rank
        self._epochs, self._order = epochs, order
        self._samples_per_round = _samples_per_round(loader, rules)
        self._place = place
        self._progress = progress
        self._position = _Position()
        self.end_of_dataloader = False
        self.remainder = -1
        self.real_samples: RealSamples | None = None

    def __iter__(self) -> Iterator[Any]:  # type: ignore[override]
        return self.iterate(None)

    def __len__(self) -> int:
        """Returns the number of batches of this rank per epoch; TypeError if the data have no length."""
        return length_of(self._loader, self._rules, self._rank)

    @property
    def epoch(self) -> int:
        """Epoch of the next batch; a resumed run loops over `range(loader.epoch, n)`."""
        return self._position.epoch

    @property
    def batches_given(self) -> int:
        """Number of batches of `epoch` yielded so far."""
        return self._position.batches

    @property
    def total_batch_size(self) -> int:
        """Number of samples in all ranks' batches of a round.

        Raises:
            UsageError: the batches have different sizes.
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
        """Number of items of the dataset, over all ranks; TypeError if it has no length."""
        return len(self._loader.dataset)  # type: ignore[arg-type]

    def set_epoch(self, epoch: int) -> None:
        """Starts the next iteration at this epoch's first batch, or at the loaded position if it is in this epoch."""
        position = self._position
        if not (position.next_ and position.epoch == epoch):
            self._position = _Position(epoch)

    def iterate(self, start: int | None) -> Iterator[Any]:
        """Yields the next epoch from batch `start`, or with None from the position."""
        if self._progress is not None:
            self._progress.next_batch()
        position = self._position
        if not position.next_:
            position.end()
        if start is not None:
            position.batches = start
        position.next_ = False
        self.end_of_dataloader, self.remainder, self.real_samples = False, -1, None
        if self._progress is not None:
            self._progress.add_dataloader(self)
        loaded: LoadedBatch | None = None
        try:
            for loaded in data_wait.timed(self._epochs(position.epoch, position.batches)):
                self._advance(loaded, position)
                yield self._place(loaded.batch)
                if self._progress is not None and not loaded.last:
                    self._progress.next_batch()
        finally:
            if self._progress is not None:
                self._progress.remove_dataloader(self)
        if loaded is None and position.batches == 0:
            log_once(logging.WARNING, self._why_empty(position.epoch))
        if loaded is None and position is self._position:  # the position was at the end of the epoch
            position.end()

    def _why_empty(self, epoch: int) -> str:
        try:
            samples: int | None = self.total_dataset_length
        except TypeError:
            samples = None
        text = f"data loader: epoch {epoch} has no batch"
        if samples == 0:
            return f"{text}: the dataset is empty"
        if samples is not None and self._loader.drop_last and self._samples_per_round is not None:
            needed = f"fewer than the {self._samples_per_round} that all ranks need for one batch each, with drop_last"
            return f"{text}: the dataset has {samples} samples, {needed}; use a smaller batch size or drop_last=False"
        return f"{text}: the dataset or its sampler yields nothing"

    def _why_repeated(self, samples: int, needed: int) -> str:
        ranks = self._rules.world_size
        largest = samples // ranks * (ranks if self._rules.split else 1)
        size = f"use DataLoader(batch_size={largest}) or less, or fewer" if largest else f"use at most {samples}"
        return (
            f"data loader: an epoch has {samples} samples, fewer than the {needed} of one batch on each of {ranks} "
            f"ranks: {needed - samples} samples are repeats, which count in loss and gradient, but not in "
            f"gather_for_metrics; {size} processes"
        )

    def _advance(self, loaded: LoadedBatch, position: _Position) -> None:
        self.end_of_dataloader = loaded.last
        self.remainder, self.real_samples = -1, None
        if loaded.real is not None:
            if position.batches == 0 and self._samples_per_round is not None:
                log_once(logging.WARNING, self._why_repeated(sum(loaded.real), self._samples_per_round))
            # Without a batch size the dataset yields whole batches, and `real` counts batches.
            single = self._loader.batch_size is None and self._loader.batch_sampler is None
            size = (batch_size_of(loaded.batch) or 1) if single else 1
            self.remainder = sum(loaded.real) * size
            # Only batches of the rules' size are repeated in part; others are real or repeated as a whole.
            real = loaded.real[self._rank] * size
            self.real_samples = RealSamples(real, (None if single else self._rules.part) or real)
        position.batches += 1
        if loaded.last:  # a state saved during the last batch resumes with the next epoch
            position.end()

    def state_dict(self) -> dict[str, Any]:
        """Returns the position as plain data and a tensor."""
        position = self._position
        return {
            "epoch": position.epoch,
            "batches": position.batches,
            "order": None if self._order is None else self._order.state(started=not position.next_),
            "length": self._length_or_none(),
            "world_size": self._rules.world_size,
            "samples_per_round": self._samples_per_round,
            "balanced": self._rules.balanced,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Sets the position: the next iteration continues after the last batch yielded before `state` was saved.

        On another number of ranks it starts at the same sample if a round starts there. Otherwise it starts at the
        beginning of that sample's round, and logs a warning.

        Raises:
            CheckpointError: `state` is not from a loader of this length.
        """
        where = "position of a loader"
        missing = {"epoch", "batches", "order", "length", "world_size", "samples_per_round"} - set(state)
        if missing:
            raise CheckpointError(where, expected="the state of a prepared loader", got=f"no {sorted(missing)}")
        batches: int = state["batches"]
        if batches and state.get("balanced", False) != self._rules.balanced:
            raise CheckpointError(
                where,
                expected="the DataLoaderConfiguration(balance) of the saved run, which orders the samples of an epoch",
                got='balance="tokens"' if self._rules.balanced else "balance=None",
                fix="pass the same, or resume from the end of an epoch",
            )
        if state["world_size"] != self._rules.world_size or state["samples_per_round"] != self._samples_per_round:
            batches = self._converted(batches, state["samples_per_round"], where)
        elif state["length"] != (length := self._length_or_none()):
            raise CheckpointError(
                where,
                expected=f"a position in an epoch of {length} batches per rank",
                got=f"{state['length']} batches",
                fix="use the dataset and the batch size of the saved run",
            )
        self._position = _Position(state["epoch"], batches)
        if self._order is not None:
            self._order.restore(state["order"])

    def _converted(self, batches: int, samples_then: int | None, where: str) -> int:
        now = self._samples_per_round
        if batches == 0:
            return 0
        if samples_then is None or now is None:
            raise CheckpointError(
                where,
                expected="the number of ranks of the saved run, because the batches have different sizes",
                fix="resume on the same number of ranks, or from the end of an epoch",
            )
        read = complete = batches * samples_then
        both = now
        if self._rules.balanced:  # the order is the same where a window of both numbers of ranks ends
            both = BALANCED_ROUNDS * math.lcm(samples_then, now)
            complete = read // both * both
        rounds = complete // now
        if repeated := read - rounds * now:
            logger.warning(
                "loader: the state was saved after %d samples, not a multiple of %d; the last %d are repeated",
                read,
                both,
                repeated,
            )
        return rounds

    def _length_or_none(self) -> int | None:
        try:
            return len(self)
        except TypeError:
            return None


class _SkippingLoader(_Around):
    """A loader whose epochs start at a later batch."""

    def __init__(self, loader: DataLoader[Any], skipped: int) -> None:
        self._loader, self._skipped = loader, skipped

    def __iter__(self) -> Iterator[Any]:  # type: ignore[override]
        if isinstance(self._loader, PreparedLoader):
            return self._loader.iterate(self._skipped)
        return self._plain()

    def __len__(self) -> int:
        return max(0, len(self._loader) - self._skipped)

    def _plain(self) -> Iterator[Any]:
        batches = iter(self._loader)
        for _ in range(self._skipped):
            if next(batches, batches) is batches:
                return
        yield from batches


def skip_first_batches(dataloader: DataLoader[Any], num_batches: int = 0) -> DataLoader[Any]:
    """Returns a loader like `dataloader` in which each epoch starts at batch `num_batches`.

    The result for a prepared loader shares its position. If `load_state_dict` has set the position, skipping the same
    batches again has no effect.

    Example:
        >>> from torch.utils.data import DataLoader
        >>> from zeroaccel import skip_first_batches
        >>> loader = DataLoader(range(8), batch_size=2)
        >>> [batch.tolist() for batch in skip_first_batches(loader, 2)]
        [[4, 5], [6, 7]]
    """
    if num_batches < 0:
        raise UsageError("skip_first_batches(num_batches)", expected="0 or more", got=num_batches)
    loader = dataloader._loader if isinstance(dataloader, _SkippingLoader) else dataloader
    return _SkippingLoader(loader, num_batches)


# -- from the user's loader


@dataclass
class DataLoaderConfiguration:
    """Settings for sharding loaders over the ranks.

    Attributes:
        split_batches: divide each batch of the loader among the ranks; otherwise each rank gets batches of the loader's
            size, and a global batch is W times as large (W ranks).
        dispatch_batches: rank 0 reads all batches and sends them; default: only for iterable datasets.
        even_batches: fill the last round with the first samples, so that all ranks get the same number of full batches.
            Without it a rank may get one batch fewer, and the loop must not run collectives in that round.
        use_seedable_sampler: draw the order of epoch e from only `data_seed + e`.
        data_seed: seed of the order of samples; default: rank 0's `torch.initial_seed()`.
        non_blocking: copy to the device without waiting, which needs `pin_memory`.
        use_stateful_dataloader: has no effect: every prepared loader has `state_dict()` and `load_state_dict()`.
        balance: "tokens" reorders samples within 64 rounds, so that the ranks' batches of a round have about as many
            tokens and little padding.
        lengths: for `balance`, the number of tokens of each sample, or the name of a column with them; default: the
            column `length`, or the length of each sample's `input_ids`, for which the dataset is read once.

    Example:
        >>> from zeroaccel import Accelerator, DataLoaderConfiguration
        >>> settings = DataLoaderConfiguration(use_seedable_sampler=True, data_seed=42)
        >>> accelerator = Accelerator(dataloader_config=settings)
        >>> accelerator.use_seedable_sampler
        True
    """

    split_batches: bool = False
    dispatch_batches: bool | None = None
    even_batches: bool = True
    use_seedable_sampler: bool = False
    data_seed: int | None = None
    non_blocking: bool = False
    use_stateful_dataloader: bool = False
    balance: str | None = None
    lengths: Sequence[int] | str | None = None


def prepare_data_loader(
    loader: DataLoader[Any],
    settings: DataLoaderConfiguration | None = None,
    *,
    collectives: Collectives | None = None,
    rank: int | None = None,
    world_size: int | None = None,
    device: torch.device | str | None = None,
    watch: LoaderProgress | None = None,
    cut: Callable[[Any], Any] | None = None,
) -> PreparedLoader:
    """Returns a loader of this rank's shard; a prepared loader is returned unchanged. (all ranks, with `collectives`)

    Args:
        loader: loader with the batches of a single process; the same on all ranks.
        settings: sharding; default: `DataLoaderConfiguration()`.
        collectives: communication to share a random order and to dispatch batches.
        rank, world_size: index of the shard, and number of shards; default: those of `collectives`, or 0 and 1.
        device: device for batches; None does not move them.
        watch: registers every iteration.
        cut: returns this rank's part of a batch that several ranks share, for example a part of its sequences.

    Raises:
        UsageError: `loader` is not a loader, is already sharded, or does not support the settings.
    """
    if isinstance(loader, PreparedLoader):
        return loader
    settings = settings or DataLoaderConfiguration()
    if rank is None:
        rank = collectives.rank if collectives is not None else 0
    if world_size is None:
        world_size = collectives.world_size if collectives is not None else 1
    with nullcontext() if collectives is None else agreed(collectives, "prepare: dataloader"):
        _check(loader)
        rules = _rules(loader, settings, world_size)
    stream = isinstance(loader.dataset, IterableDataset)
    dispatches = stream if settings.dispatch_batches is None else settings.dispatch_batches
    dispatches = dispatches and world_size > 1
    share = _share(collectives) if collectives is not None and world_size > 1 else None
    lengths = None
    if settings.balance is not None:
        lengths, unknown = _lengths(loader, rules, settings, collectives)
        if unknown:
            warn_unbalanced(loader.dataset, unknown)
        rules = replace(rules, balanced=not unknown)
    seed = _seed(settings.data_seed, share)
    sampler = loader.batch_sampler if loader.batch_sampler is not None else loader.sampler
    # With dispatch, only rank 0 draws the order, so there is no state to share.
    order = Order(
        loader.dataset if stream else sampler,
        seed=seed,
        seedable=settings.use_seedable_sampler,
        share=None if dispatches else share,
        worker_generator=loader.generator,
        stream=stream,
    )
    of_rank = None if dispatches else rank
    epochs: Epochs
    if stream:
        epochs = StreamSource(loader, rules, order, of_rank, seed).epoch
    else:
        epochs = IndexedSource(loader, rules, order, of_rank, lengths).epoch
    draws = True
    if dispatches:
        if collectives is None:
            raise UsageError("prepare_data_loader(collectives)", expected="collectives with dispatch_batches", got=None)
        epochs = partial(dispatched_epoch, epochs, collectives, rank, world_size)
        draws = collectives.rank == 0
    return PreparedLoader(
        loader,
        rules,
        rank,
        epochs=epochs,
        order=order if draws else None,
        place=lambda batch: _placed(batch if cut is None else cut(batch), device, settings),
        progress=watch,
    )


def _placed(batch: Any, device: torch.device | str | None, settings: DataLoaderConfiguration) -> Any:
    return batch if device is None else to_device(batch, device, non_blocking=settings.non_blocking)


def _check(loader: Any) -> None:
    where = "prepare: dataloader"
    if not isinstance(loader, DataLoader):
        raise UsageError(where, expected="a torch.utils.data.DataLoader", got=type(loader).__name__)
    has_iterator = type(loader).__iter__ is not DataLoader.__iter__
    if has_iterator and not type(loader).__module__.startswith("torchdata."):
        raise UsageError(
            where,
            expected="a loader with torch's __iter__, because prepare() reads its dataset in another order",
            got=f"{type(loader).__name__}, which defines its own __iter__",
            fix="move its logic into the dataset or collate_fn, or do not prepare it and shard the data yourself",
        )
    samplers = (loader.sampler, getattr(loader.batch_sampler, "sampler", None))
    if any(isinstance(sampler, DistributedSampler) for sampler in samplers):
        raise UsageError(
            where,
            expected="a loader of the whole dataset, which prepare() shards over the ranks",
            got="a loader with a DistributedSampler, which has already sharded it",
            fix="remove the sampler (and set shuffle=True if it shuffled), or do not prepare this loader",
        )
    if loader.num_workers and not getattr(loader, "in_order", True):
        raise UsageError(
            where, expected="in_order=True, because a position is a number of batches", got="in_order=False"
        )


def _rules(loader: DataLoader[Any], settings: DataLoaderConfiguration, world_size: int) -> ShardingRules:
    batches: Any = loader.batch_sampler
    if loader.batch_size is not None:
        size: int | None = loader.batch_size
    elif batches is None:  # the dataset yields whole batches
        size = 1
    else:
        size = getattr(batches, "batch_size", None)
    if settings.balance not in (None, "tokens"):
        raise UsageError("DataLoaderConfiguration(balance)", expected='"tokens" or None', got=settings.balance)
    split = settings.split_batches and world_size > 1
    if split and (size is None or (batches is None and loader.batch_size is None) or size % world_size):
        raise UsageError(
            "split_batches=True: the loader's batch size",
            expected=f"a multiple of the {world_size} ranks, which share each batch",
            got=size if batches is not None or loader.batch_size is not None else "whole batches from the dataset",
            fix="choose another batch_size, or set split_batches to False",
        )
    # A user's own batch sampler may have its own drop_last.
    drop_last = bool(loader.drop_last or getattr(batches, "drop_last", False))
    return ShardingRules(world_size, split, settings.even_batches, drop_last, size)


def _lengths(
    loader: DataLoader[Any], rules: ShardingRules, settings: DataLoaderConfiguration, collectives: Collectives | None
) -> tuple[list[int] | None, str]:
    """Returns the tokens of the samples (None for a stream), and why they are unknown. (all ranks)"""

    def read() -> tuple[list[int] | None, str]:
        try:
            return lengths_of(loader.dataset, settings.lengths), ""
        except (TypeError, KeyError) as error:
            return None, str(error)

    if _samples_per_round(loader, rules) is None:
        return None, "its batches have their own sizes"
    if isinstance(loader.dataset, IterableDataset):
        return None, ""
    return read() if collectives is None else from_rank_0(collectives, read, "loader: lengths of the samples")


def _samples_per_round(loader: DataLoader[Any], rules: ShardingRules) -> int | None:
    if rules.batch_size is None or (loader.batch_sampler is None and loader.batch_size is None):
        return None
    return rules.batch_size * (1 if rules.split else rules.world_size)


def _share(collectives: Collectives) -> Share:
    return lambda tensor, what: collectives.broadcast(tensor, 0, f"loader: {what}")


def _seed(data_seed: int | None, share: Share | None) -> int:
    seed = torch.tensor((torch.initial_seed() if data_seed is None else data_seed) % 2**62)
    if share is not None:
        share(seed, "seed of the order")
    return int(seed.item())
