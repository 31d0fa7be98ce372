"""From where every rank stands to one message that says how they came apart. Pure: no network, no threads.

`watchdog.py` collects the positions and prints what `compose` makes of them; `agree.py` uses `first_difference` alone.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Literal

from zeroaccel.comm.hangs.flight_recorder import KINDS, Call, Kind

__all__ = ["Alarm", "HangReport", "ProcessStatus", "RankState", "compose", "first_difference", "rank_list"]


@dataclass(frozen=True)
class RankState:
    """Where one rank is.

    Attributes:
        waiting: the collective its longest-blocked thread is in, since `waited_seconds`; None when in none.
        finished: the collective it completed last.
        issued: how many collectives it has issued, by kind.
        recent: its newest calls of each kind, oldest first.
        where: "file:line in function" of its main thread; empty once it has left.
        left: how it left the job ("exited normally", "exited with ValueError: ..."), empty while it runs.
        failed: whether it left by an exception.
    """

    rank: int
    waiting: Call | None = None
    waited_seconds: float = 0.0
    finished: Call | None = None
    issued: Mapping[str, int] = field(default_factory=dict)
    recent: Sequence[Call] = ()
    phase: str = ""
    step: int = -1
    where: str = ""
    left: str = ""
    failed: bool = False

    def has_issued(self, call: Call) -> bool:
        return self.issued.get(call.kind, 0) >= call.seq

    def to_json(self) -> str:
        return json.dumps(asdict(self))

    @staticmethod
    def from_json(text: str | bytes) -> RankState:
        fields = json.loads(text)
        for name in ("waiting", "finished"):
            fields[name] = Call(*fields[name]) if fields[name] else None
        fields["recent"] = tuple(Call(*call) for call in fields["recent"])
        return RankState(**fields)


@dataclass(frozen=True)
class Alarm:
    """Why a rank calls the job off.

    Attributes:
        headline: what it saw, as the first line of the message.
        timed_out: whether the limit had passed, or the ranks were known to have parted before it did.
    """

    rank: int
    headline: str
    timed_out: bool


@dataclass(frozen=True)
class HangReport:
    """The message all ranks end with."""

    text: str
    timed_out: bool


@dataclass(frozen=True)
class ProcessStatus:
    """What can be seen of a rank's process without asking it.

    Attributes:
        who: "pid 4711"; of a process that cannot be seen the name of its machine, if that is another one.
    """

    state: Literal["stopped", "gone", "running", "unseen"]
    who: str = ""


_UNSEEN = ProcessStatus("unseen")


def compose(
    alarm: Alarm,
    positions: Mapping[int, RankState],
    world_size: int,
    statuses: Mapping[int, ProcessStatus] | None = None,
    store_silence: str = "",
) -> str:
    """The whole message.

    Args:
        positions: of the ranks that answered or said farewell; the others are named as silent.
        statuses: of the silent ranks.
        store_silence: "the rendezvous store at ... has not answered for 4 s", if that is why ranks are not heard of.
    """
    statuses = statuses or {}
    lines = [f"{alarm.headline}."]
    described: dict[str, list[int]] = {}
    for rank in range(world_size):
        position = positions.get(rank)
        if position is None:
            text = _describe_silent(statuses.get(rank, _UNSEEN), may_be_cut_off=bool(store_silence))
        else:
            text = _describe(position)
        described.setdefault(text, []).append(rank)
    lines += [f"  {rank_list(ranks)}: {text}" for text, ranks in described.items()]
    if difference := first_difference({rank: position.recent for rank, position in positions.items()}):
        lines.append(f"  First difference: {difference}.")
    silent = [rank for rank in range(world_size) if rank not in positions]
    stopped = [rank for rank in silent if statuses.get(rank, _UNSEEN).state == "stopped"]
    if store_silence:
        lines.append(f"  {store_silence[0].upper()}{store_silence[1:]}.")
    if stopped:
        advice = f"{_sentence(stopped)} stopped by a signal: by Ctrl-Z, a debugger, or a batch system."
    elif store_silence:
        advice = "The process that keeps the store is stopped or gone, or the network between the machines is cut."
    else:
        hosts = sorted({statuses[rank].who for rank in silent if rank in statuses and _is_elsewhere(statuses[rank])})
        advice = _advice(positions.values(), silent, difference, hosts)
    lines.append(f"  {advice}")
    return "\n".join(lines)


def _sentence(ranks: Sequence[int]) -> str:
    return f"R{rank_list(ranks)[1:]} {'were' if len(ranks) > 1 else 'was'}"


def _is_elsewhere(status: ProcessStatus) -> bool:
    return status.state == "unseen" and bool(status.who)


def first_difference(recent: Mapping[int, Sequence[Call]]) -> str:
    """The earliest collective of each kind that is not the same on all ranks that issued it; "" when there is none.

    Args:
        recent: per rank its newest calls. Only numbers that at least two ranks still remember can be compared.
    """
    found = [text for kind in KINDS if (text := _first_of_kind(kind, recent))]
    return "; ".join(found)


def _first_of_kind(kind: Kind, recent: Mapping[int, Sequence[Call]]) -> str:
    by_seq: dict[int, dict[int, Call]] = {}
    for rank, calls in recent.items():
        for call in calls:
            if call.kind == kind:
                by_seq.setdefault(call.seq, {})[rank] = call
    for seq in sorted(by_seq):
        calls_here = by_seq[seq]
        reference = calls_here[min(calls_here)]
        if not all(call.same_as(reference) for call in calls_here.values()):
            return f"{kind} #{seq} is {_variants(calls_here)}"
    return ""


def _variants(calls: Mapping[int, Call]) -> str:
    variants: dict[tuple[str, str, int, str], list[int]] = {}
    for rank in sorted(calls):
        call = calls[rank]
        variants.setdefault((call.op, call.label, call.numel, call.dtype), []).append(rank)
    return ", ".join(
        f'{op} "{label}"{f" of {numel} x {dtype}" if dtype else ""} on {rank_list(ranks)}'
        for (op, label, numel, dtype), ranks in variants.items()
    )


def _describe_silent(status: ProcessStatus, *, may_be_cut_off: bool) -> str:
    """What follows "rank 3: " of a rank that has not answered, in one line."""
    if status.state in ("stopped", "gone"):
        return f"no answer; its process ({status.who}) is {status.state}"
    if may_be_cut_off:
        return "not heard of"
    if status.state == "running":
        return f"no answer; its process ({status.who}) runs, but is stuck inside native code"
    if _is_elsewhere(status):
        return f"no answer; {status.who} cannot be reached, or its process is gone, stopped, or stuck in native code"
    return "no answer; its process is gone, stopped, or stuck inside native code"


def _describe(position: RankState) -> str:
    """What follows "rank 3: ", in one line."""
    step = f", in step {position.step}" if position.step >= 0 else ""
    if position.left:
        last = f", after {position.finished}" if position.finished else ", before any collective"
        return f"{position.left}{step}{last}"
    where = f"; main thread at {position.where}" if position.where else ""
    if position.waiting is not None:
        return f"waiting for {position.waiting}{step}{where}"
    last = f"last finished {position.finished}" if position.finished else "none finished yet"
    return f"in no collective{step}; {last}{where}"


def _advice(positions: Iterable[RankState], silent: Sequence[int], difference: str, hosts: Sequence[str]) -> str:
    positions = list(positions)
    left = [position.rank for position in positions if position.left]
    outside = [position.rank for position in positions if not position.left and position.waiting is None]
    if difference:
        return "Every rank has to go through the same modules, with the same shapes, in the same order."
    if failed := [position.rank for position in positions if position.failed]:
        return f"The cause is the exception on {rank_list(failed)}."
    if silent:
        look = f"Look at the end of the output of {rank_list(silent)}; a process out of memory is killed without a word"
        return f"{look}. Or the network to {', '.join(hosts)} is cut." if hosts else f"{look}."
    if left:
        return f"Give every rank the same number of steps; {rank_list(left)} had fewer."
    if outside:
        return (
            f"What keeps {rank_list(outside)} must be done by every rank, or take less than the limit "
            "(ZEROACCEL_COLLECTIVE_TIMEOUT, in seconds)."
        )
    return (
        "The ranks went different ways: look for a branch that some of them did not take, and for a save, an "
        "evaluation or a step under `if rank == 0`."
    )


def rank_list(ranks: Iterable[int]) -> str:
    """ "rank 3", "ranks 0-6, 9"."""
    ordered = sorted(ranks)
    spans: list[list[int]] = []
    for rank in ordered:
        if spans and spans[-1][1] == rank - 1:
            spans[-1][1] = rank
        else:
            spans.append([rank, rank])
    text = ", ".join(str(first) if first == last else f"{first}-{last}" for first, last in spans)
    return f"rank{'s' if len(ordered) > 1 else ''} {text}"
