"""The hang report: one message from the states of all ranks that shows how they desynced. No network, no threads.

`watchdog.py` collects the states and logs the text that `compose` returns; `agree.py` uses `first_difference` alone.
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
    """The position of one rank in the program.

    Attributes:
        waiting: the collective that its longest-blocked thread is in, since `waited_seconds`; None if in none.
        waiting_in: name of the recorder of that collective; "" for the recorder of calls that all ranks issue.
        finished: the collective that it completed last.
        issued: number of collectives that it has issued, by kind.
        issued_in_groups: the same numbers for calls that not all ranks issue, by the name of their recorder.
        recent: its newest calls of each kind, oldest first.
        activity: the part of a schedule that it computes: "forward of micro-batch 2 on stage 1"; "" if none.
        where: "file:line in function" of its main thread; "" after it has left.
        exit_reason: how it left the job ("finished and left", "left with ValueError: ..."); "" while it runs.
        failed: True if it left with an exception.
        exception: "ValueError: ..., at file:line in function": one that it has raised, and that the other ranks have
            not been told of; "" if there is none.
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
    exception: str = ""

    def has_issued(self, call: Call, group: str = "") -> bool:
        """True if the rank has issued a call of all ranks, or one of the named recorder's calls."""
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
    """The reason why a rank ends the job.

    Attributes:
        headline: first line of the message: the rank's observation.
        timed_out: True if the limit had passed; False if the collective could not complete before that.
    """

    rank: int
    headline: str
    timed_out: bool


@dataclass(frozen=True)
class HangReport:
    """The message with which all ranks end."""

    text: str
    timed_out: bool


@dataclass(frozen=True)
class ProcessStatus:
    """The state of a rank's process in the operating system.

    Attributes:
        who: "pid 4711"; for a process that cannot be inspected, the name of its machine if that is another one.
    """

    state: Literal["stopped", "gone", "running", "unseen"]
    who: str = ""


_UNSEEN = ProcessStatus("unseen")

Names = Callable[[Iterable[int]], str]
"""Names ranks in messages."""


def compose(
    alarm: Alarm,
    states: Mapping[int, RankState],
    world_size: int,
    statuses: Mapping[int, ProcessStatus] | None = None,
    store_silence: str = "",
    names: Names | None = None,
) -> str:
    """Returns the text of the report.

    Args:
        states: states of the ranks that answered or left; all other ranks are silent.
        statuses: process states of the silent ranks.
        store_silence: "the rendezvous store at ... has not answered for 4 s", if that is why ranks are silent.
        names: names ranks in messages; by default `rank_list`.
    """
    statuses, names = statuses or {}, names or rank_list
    lines = [f"{alarm.headline}."]
    causes: dict[str, list[int]] = {}
    for rank in sorted(states):
        if states[rank].exception:
            causes.setdefault(states[rank].exception, []).append(rank)
    if causes:
        raised = "; ".join(f"{names(ranks)} raised {text}" for text, ranks in causes.items())
        lines = [f"{raised}.", f"  The other ranks could not be told: {lines[0]}"]
    # Ranks in the same state share a line: a thousand ranks need a few lines, not a thousand.
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
    # The last line is advice. A stopped process explains everything else, and a silent store most of it.
    silent = [rank for rank in range(world_size) if rank not in states]
    stopped = [rank for rank in silent if statuses.get(rank, _UNSEEN).state == "stopped"]
    if store_silence:
        lines.append(f"  {store_silence[0].upper()}{store_silence[1:]}.")
    if stopped:
        advice = f"{_sentence(stopped, names)} stopped by a signal: Ctrl-Z, a debugger, or a batch system."
    elif store_silence:
        advice = "The process that hosts the store has stopped or ended, or the network between the machines is cut."
    else:
        unreachable = [statuses[rank] for rank in silent if rank in statuses and _is_elsewhere(statuses[rank])]
        hosts = sorted({status.who for status in unreachable})
        parted = "" if causes else parted_blocks({rank: state.recent for rank, state in states.items()}, names)
        advice = parted or _advice(states.values(), silent, difference, hosts, names)
    lines.append(f"  {advice}")
    return "\n".join(lines)


def _sentence(ranks: Sequence[int], names: Names) -> str:
    return f"{_sentence_of(ranks, names)} {'were' if len(ranks) > 1 else 'was'}"


def _is_elsewhere(status: ProcessStatus) -> bool:
    return status.state == "unseen" and bool(status.who)


def first_difference(recent: Mapping[int, Sequence[Call]], names: Names | None = None) -> str:
    """Returns the earliest collective of each kind that differs between the ranks that issued it; "" if none does.

    Args:
        recent: newest calls of each rank. Only calls that at least two ranks still remember can be compared.
        names: names ranks in messages; by default `rank_list`.

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
    """Yields the calls of one kind, number by number, by rank."""
    by_seq: dict[int, dict[int, Call]] = {}
    for rank, calls in recent.items():
        for call in calls:
            if call.kind == kind:
                by_seq.setdefault(call.seq, {})[rank] = call
    return (by_seq[seq] for seq in sorted(by_seq))


def parted_blocks(recent: Mapping[int, Sequence[Call]], names: Names | None = None) -> str:
    """Returns which block of a list some ranks skipped, with advice, if the first differing gather shows it; else "".

    Args:
        recent: newest calls of each rank.
        names: names ranks in messages; by default `rank_list`.

    Example:
        >>> first = Call("gather", 7, "all_gather", "unshard layers.1", 8, "float32", "forward")
        >>> second = first._replace(label="unshard layers.2")
        >>> parted_blocks({0: [first], 1: [second]}).partition(";")[0]
        'Rank 1 skipped layers.1 in forward, which rank 0 runs'
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
        f"{_sentence_of(others, names)} skipped {block} in {phase}, which {names(ranks)} "
        f"{'run' if len(ranks) > 1 else 'runs'}; all ranks must skip the same blocks (LayerDrop: use one seed "
        f'for all ranks), or the module that runs them must be one unit (zero_optimization.leaf_module.names ["{around}'
        '"]), or train at stage 2.'
    )


def _missed(blocks: Mapping[str, Sequence[int]], calls: Mapping[int, Call]) -> str:
    """Returns the block that the other ranks skipped; "" if the order does not show it."""
    numbers = {block: int(number) for block in blocks if (number := block.rpartition(".")[2]).isdigit()}
    in_forward = [block for block, ranks in blocks.items() if calls[ranks[0]].phase.startswith("forward")]
    if len(numbers) == 1 or len(in_forward) == 1:  # the others are after the list, or already in backward
        return next(iter(numbers)) if len(numbers) == 1 else in_forward[0]
    if len({block.rpartition(".")[0] for block in numbers}) != 1:
        return ""
    # Blocks run in ascending order, in backward in descending order: the rank that is ahead has skipped one.
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
    """Returns the text after "rank 3: " for a rank that has not answered, in one line."""
    # The states differ only for processes of this machine; for others, at most the machine's name is known.
    if status.state in ("stopped", "gone"):
        return f"no answer; its process ({status.who}) is {status.state}"
    if may_be_cut_off:
        return "not heard from"
    if status.state == "running":
        return f"no answer; its process ({status.who}) runs, but is stuck inside native code"
    if _is_elsewhere(status):
        return f"no answer; {status.who} cannot be reached, or its process is gone, stopped, or stuck in native code"
    return "no answer; its process is gone, stopped, or stuck inside native code"


def _describe(state: RankState) -> str:
    """Returns the text after "rank 3: ", in one line."""
    step = f", in step {state.step}" if state.step >= 0 else ""
    step += f", in the {state.activity}" if state.activity else ""
    if state.exit_reason:
        last = f", after {state.finished}" if state.finished else ", before any collective"
        return f"{state.exit_reason}{step}{last}"
    where = f"; main thread at {state.where}" if state.where else ""
    if state.waiting is not None:
        # Ranks that wait for one call share a line, whichever function of the wait each is in.
        return f"waiting for {state.waiting}{step}{where.partition(', inside ')[0]}"
    last = f"last finished {state.finished}" if state.finished else "none finished yet"
    return f"in no collective{step}; {last}{where}"


def _advice(
    states: Iterable[RankState], silent: Sequence[int], difference: str, hosts: Sequence[str], names: Names
) -> str:
    """Returns advice, with the likeliest cause first: different programs, an exception, a killed process, and so on."""
    states = list(states)
    if causes := [state.rank for state in states if state.exception]:
        return f"The cause is the exception on {names(causes)}."
    exited = [state.rank for state in states if state.exit_reason]
    outside = [state.rank for state in states if not state.exit_reason and state.waiting is None]
    if difference:
        return "Every rank must run the same modules, with the same shapes, in the same order."
    if failed := [state.rank for state in states if state.failed]:
        return f"The cause is the exception on {names(failed)}."
    if silent:
        look = f"Look at the end of the output of {names(silent)}; a process out of memory is killed without a message"
        return f"{look}. Or the network to {', '.join(hosts)} is cut." if hosts else f"{look}."
    if used := _used_outside_passes(states, names):
        return used
    if exited:
        return f"Give every rank the same number of steps; {names(exited)} had fewer."
    if outside:
        return (
            f"Every rank must do the work that keeps {names(outside)} busy, or it must take less than the limit "
            "(ZEROACCEL_COLLECTIVE_TIMEOUT, in seconds)."
        )
    return (
        "The ranks took different paths: look for a branch that some of them did not take, and for a save, an "
        "evaluation or a step under `if rank == 0`."
    )


def _used_outside_passes(states: Iterable[RankState], names: Names) -> str:
    """Returns advice if ranks wait to gather parameters that no forward or backward needs; else ""."""
    ranks = [
        state.rank
        for state in states
        if (call := state.waiting) and call.kind == "gather" and call.label.startswith("unshard ") and not call.phase
    ]
    if not ranks:
        return ""
    return (
        f"All ranks must read, write or save a sharded parameter together, or inside one zero.GatheredParameters: look "
        f"for a use of it that only {names(ranks)} {'make' if len(ranks) > 1 else 'makes'}, as under `if rank == 0`."
    )


def rank_list(ranks: Iterable[int]) -> str:
    """Returns the ranks as text, with consecutive ones as spans.

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
    """Names ranks with mesh coordinates. Without a mesh, or with `dp_shard` as the only axis, it gives numbers only.

    It uses the mesh of the newest existing engine whose mesh has axes other than `dp_shard`.

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
        """The mesh by which ranks are named, or None."""
        return self._used[-1] if self._used else None

    def use(self, mesh: ParallelConfig) -> None:
        """Starts to name ranks by a resolved mesh, if it has axes other than `dp_shard`."""
        if any(getattr(mesh, axis) > 1 for axis in AXES if axis != "dp_shard"):
            self._used.append(mesh)

    def forget(self, mesh: ParallelConfig) -> None:
        """Ends one `use`: the engine is destroyed, or its set-up failed."""
        if mesh in self._used:
            self._used.remove(mesh)

    @contextmanager
    def unless_raised(self) -> Iterator[None]:
        """Ends each `use` within the block if the block raises."""
        before = list(self._used)
        try:
            yield
        except BaseException:
            self._used = [mesh for mesh in self._used if any(mesh is other for other in before)]
            raise

    def __call__(self, ranks: Iterable[int]) -> str:
        """Names the ranks, with the coordinates that all of them have."""
        ranks = list(ranks)
        mesh = self.mesh
        if mesh is None or not ranks:
            return rank_list(ranks)
        places = [mesh.coordinates(rank) for rank in ranks]
        # An axis of size 1 is omitted, and so is one along which these ranks differ: their numbers show it.
        shared = [
            f"{axis} {places[0][axis]}"
            for axis in AXES
            if getattr(mesh, axis) > 1 and len({place[axis] for place in places}) == 1
        ]
        return f"{rank_list(ranks)} ({', '.join(shared)})" if shared else rank_list(ranks)
