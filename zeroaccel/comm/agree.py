"""Agreement: an exception on one rank is raised on all, and a value of rank 0 is broadcast with its exception.

An exception that only one rank raises leaves the others blocked in their next collective. Code that can raise on one
rank therefore exchanges the outcome first, and all ranks raise the same error.
"""

from __future__ import annotations

import functools
import pickle
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, TypeVar, cast

import torch

from zeroaccel.comm.collectives import Collectives
from zeroaccel.comm.hangs.hang_report import first_difference, parted_blocks
from zeroaccel.comm.topology import init_process_group
from zeroaccel.errors import CollectiveError

T = TypeVar("T")
_Call = TypeVar("_Call", bound=Callable[..., Any])


def names_ranks(call: _Call) -> _Call:
    """Decorates a call whose errors name ranks by their mesh coordinates; if it raises, the mesh is forgotten.

    The decorated call joins the ranks, as `init_process_group` does.
    """

    @functools.wraps(call)
    def named(*args: Any, **kwargs: Any) -> Any:
        with init_process_group().names.unless_raised():
            return call(*args, **kwargs)

    return cast(_Call, named)


@contextmanager
def agreed(collectives: Collectives, label: str) -> Iterator[None]:
    """If the block raises on any rank, every rank raises the error of the lowest failing rank. (all ranks)

    The block itself must contain no collective.

    Example:
        >>> from zeroaccel.comm.topology import destroy, init_process_group
        >>> ranks = Collectives(init_process_group())
        >>> with agreed(ranks, "read the number of rows"):
        ...     rows = int("7")
        >>> destroy()
    """
    error: Exception | None = None
    try:
        yield
    except Exception as raised:
        error = raised
    agree_or_raise(collectives, error, label)


def agree_or_raise(collectives: Collectives, error: Exception | None, label: str) -> None:
    """Raises on every rank if any rank has an error; otherwise returns on every rank. (all ranks)

    Args:
        error: this rank's error, or None.
        label: name of the check in messages and traces, the same on all ranks.

    Raises:
        Exception: of the class of the lowest failing rank's error, with the messages of all failing ranks.
    """
    if collectives.world_size == 1:
        if error is not None:
            raise error
        return
    with collectives.flight_recorder.holding(error):
        try:
            failures: list[tuple[bytes, str] | None] = collectives.gather_objects(_portable(error), label)
        except CollectiveError as report:
            if error is not None:
                raise error from report
            raise
    failed = {rank: failure for rank, failure in enumerate(failures) if failure is not None}
    if not failed:
        return
    # Ranks with the same error share a line of the message.
    ranks_by_message: dict[str, list[int]] = {}
    for rank, (_, message) in failed.items():
        ranks_by_message.setdefault(message, []).append(rank)
    text = "\n".join(f"{message} [{collectives.named(ranks)}]" for message, ranks in ranks_by_message.items())
    kind = pickle.loads(failed[min(failed)][0])
    raise _instance(kind, text) from error


def from_rank_0(collectives: Collectives, make: Callable[[], T], label: str) -> T:
    """Calls `make` on rank 0 only and returns its result, pickled, on every rank. (all ranks)

    Args:
        label: name of the value in messages and traces, the same on all ranks.

    Raises:
        Exception: the error that `make` raised; on the other ranks of the same class with the same message.
    """
    return from_rank(collectives, 0, make, label)


def from_rank(collectives: Collectives, source: int, make: Callable[[], T], label: str) -> T:
    """Like `from_rank_0`, with `make` called on rank `source`."""
    if collectives.world_size == 1:
        return make()
    value: T | None = None
    error: Exception | None = None
    payload = torch.empty(0, dtype=torch.uint8)
    if collectives.rank == source:
        try:
            value = make()
            payload = _bytes((None, value))
        except Exception as raised:
            error = raised
            payload = _bytes((_portable(error), None))
    # The size first, since only that rank knows it. An exception is broadcast like a value, so that no rank hangs.
    size = torch.tensor([payload.numel()])
    with collectives.flight_recorder.holding(error):
        collectives.broadcast(size, source, f"{label}: size")
        if collectives.rank != source:
            payload = torch.empty(int(size.item()), dtype=torch.uint8)
        collectives.broadcast(payload, source, label)
    if error is not None:
        raise error
    if collectives.rank != source:
        failure, value = pickle.loads(payload.numpy().tobytes())
        if failure is not None:
            raise _instance(pickle.loads(failure[0]), f"{failure[1]} [rank {source}]")
    return value  # type: ignore[return-value]


def disagreement_report(collectives: Collectives) -> str:
    """Describes where the ranks desynced: the first collective that differs between them. (all ranks)

    Call it if the digests of their flight recorders differ. Returns the same text on every rank.
    """
    histories = collectives.gather_objects(collectives.flight_recorder.recent(per_kind=128), "compare histories")
    recent = dict(enumerate(histories))
    difference = first_difference(recent, collectives.named)
    if not difference:
        return "the ranks have issued different collectives, but too long ago for the recorded history to show which"
    parted = parted_blocks(recent, collectives.named)
    return f"the ranks have issued different collectives: {difference}" + (f". {parted}" if parted else "")


def _bytes(obj: object) -> torch.Tensor:
    return torch.frombuffer(bytearray(pickle.dumps(obj, pickle.HIGHEST_PROTOCOL)), dtype=torch.uint8)


def _portable(error: Exception | None) -> tuple[bytes, str] | None:
    """Returns (pickled class, message); the exception itself may hold objects that other processes cannot load."""
    if error is None:
        return None
    try:
        return pickle.dumps(type(error)), str(error)
    except (pickle.PicklingError, AttributeError):  # pickle cannot find a class defined inside a function
        return pickle.dumps(RuntimeError), f"{type(error).__name__}: {error}"


def _instance(kind: type[Exception], message: str) -> Exception:
    try:
        return kind(message)
    except TypeError:  # the class takes other arguments
        return RuntimeError(f"{kind.__name__}: {message}")
