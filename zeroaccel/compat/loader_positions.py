"""Positions of accelerate's own loaders in its states, so that a resumed script reads the batches that would have come.

accelerate saves neither the number of a loader's epoch nor the state of the generator that draws its order, and its
`skip_first_batches` skips batches of whatever order comes next. `finder.py` replaces the functions of this module's
patches when accelerate is imported: `follow` notes each epoch of a loader, `saving` writes the notes beside a state,
`loading` reads them, and `skipping` lets a copy that skips batches count for the loader that it copies.
"""

from __future__ import annotations

import functools
import inspect
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import chain, islice
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import IterableDataset

from zeroaccel.checkpoint.plain_codec import preserved_random_state, random_state, restore_random_state
from zeroaccel.errors import CheckpointError
from zeroaccel.logs import logger
from zeroaccel.telemetry.throughput import data_wait

_CPU = torch.device("cpu")
_POSITION, _SOURCE, _BEGIN, _SKIP, _AHEAD, _LOADED = (
    f"_zeroaccel_{name}" for name in ("position", "source", "begin", "skip", "ahead", "loaded")
)


@dataclass
class _LoaderEpoch:
    """An epoch under way: its number, its first random state, and how many batches the loop got, if not all."""

    epoch: int
    start: Any
    batches: int = 0
    ended: bool = False


def follow(original: Callable[..., Any]) -> Callable[..., Any]:
    """Wraps `__iter__` of accelerate's loaders: notes the epoch, and begins a resumed one with the order it had."""

    @functools.wraps(original)
    def iterate(loader: Any) -> Iterator[Any]:
        source, skipped = vars(loader).get(_SOURCE, (loader, 0))
        base = loader.base_dataloader
        if getattr(base, "_initial_iter_for_state_dict", False):  # a stateful loader began an epoch when it was made
            base._iterator, base._initial_iter_for_state_dict = None, False
        if (skip := vars(loader).pop(_SKIP, 0)) > 0:
            yield from sys.modules["accelerate.data_loader"].skip_first_batches(loader, skip)
            return
        ahead, following = vars(source).get(_AHEAD, (0, 0))
        if ahead and loader.iteration + ahead == following:
            loader.iteration = following  # the loop counts epochs without those that the resume passed over
        if _SOURCE in vars(loader) and callable(set_epoch := getattr(_sampler(loader), "set_epoch", None)):
            set_epoch(loader.iteration)  # accelerate and Trainer do not reach the sampler of a copy that skips
        passing, loader.skip_batches = (0, loader.skip_batches) if _has_length(loader) else (loader.skip_batches, 0)
        while True:
            begin = vars(source).pop(_BEGIN, None)
            if _LOADED not in vars(source):
                _draw_earlier_epochs(loader)
            position = _LoaderEpoch(loader.iteration, _state(loader) if begin is None else begin)
            position.batches = 0 if passing else skipped
            vars(source)[_POSITION] = position
            batches = original(loader)
            if begin is not None and _generator(loader) is None:
                # The order comes from the process's generators, which the rest of the state has advanced since.
                with preserved_random_state(_CPU):
                    restore_random_state(begin, _CPU)
                    batches = chain(list(islice(batches, 1)), batches)
            for batch in data_wait.timed(batches):
                position.batches += 1
                position.ended = loader.end_of_dataloader
                if position.batches > passing:
                    yield batch
            if position.batches > passing or not passing:
                break
            # Trainer counts the steps of a stream without a length as one epoch, and no step at the end of an epoch
            # that has fewer batches: their gradients go to the next epoch's first step.
            steps = loader.gradient_state.num_steps
            counted = position.batches // steps * steps
            passing = max(passing - counted, 0) if counted else 0
            ahead += 1
        vars(source)[_POSITION] = None
        source.iteration = loader.iteration
        vars(source)[_AHEAD] = ahead, loader.iteration

    return iterate


def skipping(original: Callable[..., Any]) -> Callable[..., Any]:
    """Wraps `skip_first_batches`: the result counts for its loader, and skips whole rounds of a dispatcher."""

    @functools.wraps(original)
    def skip_first_batches(dataloader: Any, num_batches: int = 0) -> Any:
        source, before = vars(dataloader).get(_SOURCE, (dataloader, 0))
        batches = num_batches
        sends = type(dataloader).__name__ == "DataLoaderDispatcher" and not dataloader.split_batches
        if sends and not isinstance(dataloader.dataset, IterableDataset):
            batches *= _ranks()  # its sampler has the batches of all ranks
        result = original(dataloader, batches)
        if hasattr(result, "iteration"):
            result.iteration = dataloader.iteration  # accelerate 1.10 begins a copy with the first epoch
            vars(result)[_SOURCE] = source, before + num_batches
        return result

    return skip_first_batches


def saving(original: Callable[..., Any]) -> Callable[..., Any]:
    """Wraps `save_accelerator_state`: writes the positions of the loaders, on each rank."""
    signature = inspect.signature(original)

    @functools.wraps(original)
    def save_accelerator_state(*args: Any, **kwargs: Any) -> Any:
        result = original(*args, **kwargs)
        bound = signature.bind(*args, **kwargs).arguments
        notes = [_note(loader) for loader in bound["dataloaders"]]
        torch.save(notes, _file(bound["output_dir"], bound["process_index"]))
        return result

    return save_accelerator_state


def loading(original: Callable[..., Any]) -> Callable[..., Any]:
    """Wraps `load_accelerator_state`: the loaders continue at their positions."""
    signature = inspect.signature(original)

    @functools.wraps(original)
    def load_accelerator_state(*args: Any, **kwargs: Any) -> Any:
        result = original(*args, **kwargs)
        bound = signature.bind(*args, **kwargs).arguments
        folder = bound["input_dir"]
        path = next((p for rank in (bound["process_index"], 0) if (p := _file(folder, rank)).is_file()), None)
        if path is not None:
            for loader, note in zip(bound["dataloaders"], _read(path), strict=False):
                if hasattr(loader, "iteration"):
                    _restore(loader, note)
        return result

    return load_accelerator_state


def _file(folder: Any, rank: int) -> Path:
    return Path(folder, f"loader_positions_{rank}.bin")


def _read(path: Path) -> list[dict[str, Any]]:
    try:
        notes: list[dict[str, Any]] = torch.load(path, weights_only=True)
    except Exception as error:  # torch.load raises many kinds
        raise CheckpointError(
            f"load_state: {path}",
            expected="the positions of this rank's loaders",
            got=f"{type(error).__name__}: {str(error).partition(chr(10))[0]}",
            fix="load an older state, or delete the file: the loaders then begin an epoch in another order",
        ) from error
    return notes


def _note(loader: Any) -> dict[str, Any]:
    position = vars(loader).get(_POSITION)
    if position is None or position.ended:
        position = _LoaderEpoch(getattr(loader, "iteration", 0) + (position is not None), _state(loader))
    seed = getattr(_sampler(loader), "initial_seed", None)
    return {**vars(position), "ranks": _ranks(), "seed": seed}


def _restore(loader: Any, note: dict[str, Any]) -> None:
    loader.iteration, vars(loader)[_LOADED] = note["epoch"], True
    sampler = _sampler(loader)
    if note["seed"] is not None and hasattr(sampler, "initial_seed"):
        sampler.initial_seed = note["seed"]
    else:
        _restore_order(loader, sampler, note["start"], begun=note["batches"] > 0)
    ranks, batches = _ranks(), note["batches"]
    if getattr(loader, "use_stateful_dataloader", False):
        of_map = not isinstance(loader.dataset, IterableDataset)
        if of_map or not batches:  # its own state has neither the order nor the start of the next epoch
            loader.base_dataloader.next_iter_state = None
        if of_map:
            vars(loader)[_SKIP] = batches * note["ranks"] // ranks
    if batches and note["ranks"] != ranks:
        logger.warning(
            "load_state: this loader had yielded %d batches of epoch %d on each of %d processes; on %d it continues "
            "there after skip_first_batches(loader, %d)%s",
            batches,
            note["epoch"],
            note["ranks"],
            ranks,
            batches * note["ranks"] // ranks,
            f", which repeats {rest} of the batches" if (rest := batches * note["ranks"] % ranks) else "",
        )


def _restore_order(loader: Any, sampler: Any, start: Any, *, begun: bool) -> None:
    generator = _generator(loader)
    if generator is None and isinstance(start, Tensor) and hasattr(sampler, "generator"):
        generator = sampler.generator = torch.Generator()  # one process continues the order of several
    if generator is None:
        vars(loader)[_BEGIN] = start if begun else None
        if loader.persistent_workers and loader.generator is None:
            loader.base_dataloader.generator = torch.Generator()  # new workers take no seed from the process's
    elif isinstance(start, Tensor):
        generator.set_state(start)
    else:  # several processes continue the order of one, whose sampler seeds a generator after the loader's workers
        generator.set_state(start["torch"])
        _, seed = (int(torch.empty((), dtype=torch.int64).random_(generator=generator)) for _ in range(2))
        generator.manual_seed(seed)


def _has_length(loader: Any) -> bool:
    try:
        return len(loader.dataset) >= 0
    except (AttributeError, TypeError):  # a stream, or accelerate's shard of one
        return False


def _draw_earlier_epochs(loader: Any) -> None:
    """Advances a generator without draws by the epochs before this one, as Trainer does not save its state."""
    generator, sampler = _generator(loader), _sampler(loader)
    if generator is None or not loader.iteration or hasattr(sampler, "initial_seed"):
        return
    streams = isinstance(loader.dataset, IterableDataset)
    if streams and (loader.num_workers or not hasattr(loader.dataset, "generator")):
        return  # a copy in a worker, or accelerate's shard, which seeds each epoch by its number
    if torch.equal(generator.get_state(), torch.Generator().manual_seed(generator.initial_seed()).get_state()):
        for _ in range(loader.iteration):
            for _ in loader.dataset if streams else sampler:
                pass


def _ranks() -> int:
    return int(sys.modules["accelerate.state"].PartialState().num_processes)


def _sampler(loader: Any) -> Any:
    """Returns the sampler of indices within the loader's batch samplers."""
    found = loader
    while True:
        inner = getattr(found, "batch_sampler", None)
        inner = getattr(found, "sampler", None) if inner is None else inner
        if inner is None:
            return found
        found = inner


def _generator(loader: Any) -> torch.Generator | None:
    """Returns the generator that draws the order; None if the process's own generators do."""
    found = getattr(loader, "synchronized_generator", None)
    if found is None:
        owner = loader.dataset if isinstance(loader.dataset, IterableDataset) else _sampler(loader)
        found = getattr(owner, "generator", None)
    return found if isinstance(found, torch.Generator) else None


def _state(loader: Any) -> Any:
    """Returns the state from which the next epoch's order comes."""
    generator = _generator(loader)
    if generator is not None:
        return generator.get_state()
    with preserved_random_state(_CPU):
        base = loader.base_dataloader
        if base.persistent_workers and base.generator is None and base._iterator is None:
            torch.empty((), dtype=torch.int64).random_()  # these workers get a seed in the first epoch only
        return random_state(_CPU)
