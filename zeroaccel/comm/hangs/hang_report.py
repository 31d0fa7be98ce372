"""The hang report: one message, made of the states of all ranks, that says how they desynced. No network, no threads.

`watchdog.py` collects the states and logs what `compose` makes of them; `agree.py` uses `first_difference` alone.
`RankNames` names ranks in these and in other messages.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from typing import Literal

from zeroaccel.comm.hangs.flight_recorder import KINDS, Call, Kind
from zeroaccel.config.parallel import AXES, ParallelConfig


@dataclass(frozen=True)
class RankState:
    """Where one rank is in the program.

    Attributes:
        waiting: the collective its longest-blocked thread is in, since `waited_seconds`; None when in none.
        waiting_in: the name of the recorder that has it; empty for that of calls that all ranks issue.
        finished: the collective it completed last.
        issued: how many collectives it has issued, by kind.
        issued_in_groups: the same by the name of a recorder, of calls that not all ranks issue.
        recent: its newest calls of each kind, oldest first.
        activity: which part of a schedule it computes: "forward of micro-batch 2 on stage 1"; empty outside of any.
        where: "file:line in function" of its main thread; empty once it has left.
        exit_reason: how it left the job ("finished and left", "left with ValueError: ..."), empty while it runs.
        failed: whether it left by an exception.
    """

    rank: int
    waiting: Call | None = None
    waiting_in: str = ""
    waited_seconds: float = 0.0
    finished: Call | None = None
    issued: Mapping[str, int] = field(default_factory=dict)
    issued_in_groups: Mapping[str, Mapping[str, int]] = field(default_factory=dict)
    recent: Sequence[Call] = ()
    phase: str = ""
    step: int = -1
    activity: str = ""
    where: str = ""
    exit_reason: str = ""
    failed: bool = False

    def has_issued(self, call: Call, group: str = "") -> bool:
        """Whether it has issued a call of all ranks, or one of those that the recorder of this name has."""
        issued = self.issued_in_groups.get(group, {}) if group else self.issued
        return issued.get(call.kind, 0) >= call.seq

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
    """Why a rank ends the job.

    Attributes:
        headline: what it saw, as the first line of the message.
        timed_out: True if the limit had passed; False if the collective could not complete even before it did.
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
    """What the operating system shows of a rank's process.

    Attributes:
        who: "pid 4711"; of a process that cannot be seen the name of its machine, if that is another one.
    """

    state: Literal["stopped", "gone", "running", "unseen"]
    who: str = ""


_UNSEEN = ProcessStatus("unseen")

Names = Callable[[Iterable[int]], str]
"""Puts ranks into words."""


def compose(
    alarm: Alarm,
    states: Mapping[int, RankState],
    world_size: int,
    statuses: Mapping[int, ProcessStatus] | None = None,
    store_silence: str = "",
    names: Names | None = None,
) -> str:
    """The text of the report.

    Args:
        states: of the ranks that answered or left; the others are named as silent.
        statuses: of the silent ranks.
        store_silence: "the rendezvous store at ... has not answered for 4 s", if that is why ranks are not heard of.
        names: puts ranks into words; by default `rank_list`.
    """
    statuses, names = statuses or {}, names or rank_list
    lines = [f"{alarm.headline}."]
    # Ranks in one and the same state share a line: on a thousand ranks there are a few lines, not a thousand.
    ranks_by_line: dict[str, list[int]] = {}
    for rank in range(world_size):
        state = states.get(rank)
        if state is None:
            text = _describe_silent(statuses.get(rank, _UNSEEN), may_be_cut_off=bool(store_silence))
        else:
            text = _describe(state)
        ranks_by_line.setdefault(text, []).append(rank)
    lines += [f"  {names(ranks)}: {text}" for text, ranks in ranks_by_line.items()]
    if difference := first_difference({rank: state.recent for rank, state in states.items()}, names):
        lines.append(f"  First difference: {difference}.")
    # The last line says what to do. A stopped process explains everything else, and a silent store most of it.
    silent = [rank for rank in range(world_size) if rank not in states]
    stopped = [rank for rank in silent if statuses.get(rank, _UNSEEN).state == "stopped"]
    if store_silence:
        lines.append(f"  {store_silence[0].upper()}{store_silence[1:]}.")
    if stopped:
        advice = f"{_sentence(stopped, names)} stopped by a signal: by Ctrl-Z, a debugger, or a batch system."
    elif store_silence:
        advice = "The process that keeps the store is stopped or gone, or the network between the machines is cut."
    else:
        unreachable = [statuses[rank] for rank in silent if rank in statuses and _is_elsewhere(statuses[rank])]
        hosts = sorted({status.who for status in unreachable})
        parted = parted_blocks({rank: state.recent for rank, state in states.items()}, names)
        advice = parted or _advice(states.values(), silent, difference, hosts, names)
    lines.append(f"  {advice}")
    return "\n".join(lines)


def _sentence(ranks: Sequence[int], names: Names) -> str:
    return f"{_sentence_of(ranks, names)} {'were' if len(ranks) > 1 else 'was'}"


def _is_elsewhere(status: ProcessStatus) -> bool:
    return status.state == "unseen" and bool(status.who)


def first_difference(recent: Mapping[int, Sequence[Call]], names: Names | None = None) -> str:
    """The earliest collective of each kind that is not the same on all ranks that issued it; "" when there is none.

    Args:
        recent: per rank its newest calls. Only numbers that at least two ranks still remember can be compared.
        names: puts ranks into words; by default `rank_list`.

    Example:
        >>> barrier = Call("control", 1, "barrier", "save", 1, "", "")
        >>> first_difference({0: [barrier], 1: [barrier._replace(label="load")]})
        'control #1 is barrier "save" on rank 0, barrier "load" on rank 1'
    """
    differences = [text for kind in KINDS if (text := _first_of_kind(kind, recent, names or rank_list))]
    return "; ".join(differences)


def _first_of_kind(kind: Kind, recent: Mapping[int, Sequence[Call]], names: Names) -> str:
    for calls in _calls_by_number(kind, recent):
        reference = calls[min(calls)]
        if not all(call.same_as(reference) for call in calls.values()):
            return f"{kind} #{reference.seq} is {_variants(calls, names)}"
    return ""


def _calls_by_number(kind: Kind, recent: Mapping[int, Sequence[Call]]) -> Iterator[Mapping[int, Call]]:
    """The calls of one kind, number by number, by rank."""
    by_seq: dict[int, dict[int, Call]] = {}
    for rank, calls in recent.items():
        for call in calls:
            if call.kind == kind:
                by_seq.setdefault(call.seq, {})[rank] = call
    return (by_seq[seq] for seq in sorted(by_seq))


def parted_blocks(recent: Mapping[int, Sequence[Call]], names: Names | None = None) -> str:
    """Which block of a list some ranks left out, and what to do, where the first other gather says so; else "".

    Args:
        recent: per rank its newest calls.
        names: puts ranks into words; by default `rank_list`.

    Example:
        >>> first = Call("gather", 7, "all_gather", "unshard layers.1", 8, "float32", "forward")
        >>> second = first._replace(label="unshard layers.2")
        >>> parted_blocks({0: [first], 1: [second]}).partition(";")[0]
        'Rank 1 left out layers.1 in forward, which rank 0 runs'
    """
    for calls in _calls_by_number("gather", recent):
        if len({call.label for call in calls.values()}) > 1:
            return _left_out(calls, names or rank_list)
    return ""


def _left_out(calls: Mapping[int, Call], names: Names) -> str:
    blocks: dict[str, list[int]] = {}
    for rank in sorted(calls):
        blocks.setdefault(calls[rank].label.removeprefix("unshard "), []).append(rank)
    if not all(call.label.startswith("unshard ") and call.phase for call in calls.values()):
        return ""
    block = _missed(blocks, calls)
    if not block:
        return ""
    ranks = blocks[block]
    others = [rank for rank in sorted(calls) if rank not in ranks]
    phase = calls[ranks[0]].phase.partition(" ")[0]
    around = block.rpartition(".")[0].rpartition(".")[0]  # the list itself has no forward; "" names the model
    return (
        f"{_sentence_of(others, names)} left out {block} in {phase}, which {names(ranks)} "
        f"{'run' if len(ranks) > 1 else 'runs'}; all ranks must leave out the same blocks (LayerDrop: seed its draw "
        f'alike), or have one unit of what runs them (zero_optimization.leaf_module.names ["{around}"]), or train at '
        "stage 2."
    )


def _missed(blocks: Mapping[str, Sequence[int]], calls: Mapping[int, Call]) -> str:
    """Which of the blocks that ranks are at was left out by the others; "" where the order does not say."""
    numbers = {block: int(number) for block in blocks if (number := block.rpartition(".")[2]).isdigit()}
    in_forward = [block for block, ranks in blocks.items() if calls[ranks[0]].phase.startswith("forward")]
    if len(numbers) == 1 or len(in_forward) == 1:  # the others are behind the list, or in backward already
        return next(iter(numbers)) if len(numbers) == 1 else in_forward[0]
    if len({block.rpartition(".")[0] for block in numbers}) != 1:
        return ""
    # Blocks run in the order of their numbers, and in backward against it: who is ahead has left one out.
    return (min if in_forward else max)(numbers, key=lambda block: numbers[block])


def _sentence_of(ranks: Sequence[int], names: Names) -> str:
    return f"R{names(ranks)[1:]}"


def _variants(calls: Mapping[int, Call], names: Names) -> str:
    variants: dict[tuple[str, str, int, str], list[int]] = {}
    for rank in sorted(calls):
        call = calls[rank]
        variants.setdefault((call.op, call.label, call.numel, call.dtype), []).append(rank)
    return ", ".join(
        f'{op} "{label}"{f" of {numel} x {dtype}" if dtype else ""} on {names(ranks)}'
        for (op, label, numel, dtype), ranks in variants.items()
    )


def _describe_silent(status: ProcessStatus, *, may_be_cut_off: bool) -> str:
    """What follows "rank 3: " of a rank that has not answered, in one line."""
    # Only a process of this machine can be told apart; of another machine's there is its name at best.
    if status.state in ("stopped", "gone"):
        return f"no answer; its process ({status.who}) is {status.state}"
    if may_be_cut_off:
        return "not heard of"
    if status.state == "running":
        return f"no answer; its process ({status.who}) runs, but is stuck inside native code"
    if _is_elsewhere(status):
        return f"no answer; {status.who} cannot be reached, or its process is gone, stopped, or stuck in native code"
    return "no answer; its process is gone, stopped, or stuck inside native code"


def _describe(state: RankState) -> str:
    """What follows "rank 3: ", in one line."""
    step = f", in step {state.step}" if state.step >= 0 else ""
    step += f", in the {state.activity}" if state.activity else ""
    if state.exit_reason:
        last = f", after {state.finished}" if state.finished else ", before any collective"
        return f"{state.exit_reason}{step}{last}"
    where = f"; main thread at {state.where}" if state.where else ""
    if state.waiting is not None:
        # Ranks that wait alike share a line, whichever function of the wait each is in: the call says it already.
        return f"waiting for {state.waiting}{step}{where.partition(', inside ')[0]}"
    last = f"last finished {state.finished}" if state.finished else "none finished yet"
    return f"in no collective{step}; {last}{where}"


def _advice(
    states: Iterable[RankState], silent: Sequence[int], difference: str, hosts: Sequence[str], names: Names
) -> str:
    """The likeliest cause first: ranks that ran different programs, an exception, a killed process, and so on."""
    states = list(states)
    exited = [state.rank for state in states if state.exit_reason]
    outside = [state.rank for state in states if not state.exit_reason and state.waiting is None]
    if difference:
        return "Every rank has to go through the same modules, with the same shapes, in the same order."
    if failed := [state.rank for state in states if state.failed]:
        return f"The cause is the exception on {names(failed)}."
    if silent:
        look = f"Look at the end of the output of {names(silent)}; a process out of memory is killed without a word"
        return f"{look}. Or the network to {', '.join(hosts)} is cut." if hosts else f"{look}."
    if exited:
        return f"Give every rank the same number of steps; {names(exited)} had fewer."
    if outside:
        return (
            f"What keeps {names(outside)} must be done by every rank, or take less than the limit "
            "(ZEROACCEL_COLLECTIVE_TIMEOUT, in seconds)."
        )
    return (
        "The ranks went different ways: look for a branch that some of them did not take, and for a save, an "
        "evaluation or a step under `if rank == 0`."
    )


def rank_list(ranks: Iterable[int]) -> str:
    """The ranks in words, runs of them as spans.

    Example:
        >>> rank_list([3]), rank_list([0, 1, 2, 9])
        ('rank 3', 'ranks 0-2, 9')
    """
    ordered = sorted(ranks)
    spans: list[list[int]] = []
    for rank in ordered:
        if spans and spans[-1][1] == rank - 1:
            spans[-1][1] = rank
        else:
            spans.append([rank, rank])
    text = ", ".join(str(first) if first == last else f"{first}-{last}" for first, last in spans)
    return f"rank{'s' if len(ordered) > 1 else ''} {text}"


class RankNames:
    """Puts ranks into words. Without a mesh, or on one of `dp_shard` alone, they have their numbers only.

    The mesh is that of the newest engine, until it is destroyed, among those whose mesh has other axes than `dp_shard`.

    Example:
        >>> names = RankNames()
        >>> names([5])
        'rank 5'
        >>> names.use(mesh := ParallelConfig(dp_replicate=2, dp_shard=2, tp=2))
        >>> names([5]), names([4, 5]), names([0, 7])
        ('rank 5 (dp_replicate 1, dp_shard 0, tp 1)', 'ranks 4-5 (dp_replicate 1, dp_shard 0)', 'ranks 0, 7')
        >>> names.forget(mesh)
        >>> names([5])
        'rank 5'
    """

    def __init__(self) -> None:
        self._used: list[ParallelConfig] = []

    @property
    def mesh(self) -> ParallelConfig | None:
        """By which ranks are named."""
        return self._used[-1] if self._used else None

    def use(self, mesh: ParallelConfig) -> None:
        """Names ranks by a resolved mesh from now on, if it has other axes than `dp_shard`."""
        if any(getattr(mesh, axis) > 1 for axis in AXES if axis != "dp_shard"):
            self._used.append(mesh)

    def forget(self, mesh: ParallelConfig) -> None:
        """Ends one `use`: the engine is destroyed, or could not be made."""
        if mesh in self._used:
            self._used.remove(mesh)

    @contextmanager
    def unless_raised(self) -> Iterator[None]:
        """Ends each `use` within the block if that raises."""
        before = list(self._used)
        try:
            yield
        except BaseException:
            self._used = before
            raise

    def __call__(self, ranks: Iterable[int]) -> str:
        """The ranks, with the coordinates that all of them have."""
        ranks = list(ranks)
        mesh = self.mesh
        if mesh is None or not ranks:
            return rank_list(ranks)
        places = [mesh.coordinates(rank) for rank in ranks]
        # An axis of one rank says nothing, and one along which these ranks differ is said by their numbers.
        shared = [
            f"{axis} {places[0][axis]}"
            for axis in AXES
            if getattr(mesh, axis) > 1 and len({place[axis] for place in places}) == 1
        ]
        return f"{rank_list(ranks)} ({', '.join(shared)})" if shared else rank_list(ranks)
