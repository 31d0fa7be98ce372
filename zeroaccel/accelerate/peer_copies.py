"""Copies states in memory to other machines, and restores a state from these copies after a machine is lost.

While training continues, a thread writes the files of each rank and sends them to a rank of the next machine
(`PeerCopies.send`). `PeerCopies.spread` then sends the files that only rank 0 writes to all machines. The folder gets
the name of a state only after all machines have all copies. `PeerCopies.newest` finds the newest state of which every
file is intact on some machine, and deletes damaged ones. `fetch_common` and `fetch_own` copy to each machine the files
that its ranks read: nearly all files if every rank has all master weights (stage 0), otherwise about as much as the
ranks have saved.

Every rank sends and receives: the k-th rank of one machine sends to the k-th rank of the next one, modulo its number of
ranks. If machines lack files, the k-th file is sent by the k-th rank of a machine that has it.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import shutil
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch

from zeroaccel.checkpoint.atomic_write import write_all, writing_to
from zeroaccel.checkpoint.rank_file import check_file
from zeroaccel.checkpoint.save import OVERWRITTEN, file_of_rank
from zeroaccel.comm.agree import agreed, from_rank
from zeroaccel.comm.collectives import Collectives
from zeroaccel.comm.environment import rack
from zeroaccel.comm.topology import pair_backends
from zeroaccel.comm.transport import PairLink, PendingTransfer
from zeroaccel.errors import CheckpointError
from zeroaccel.logs import log_always
from zeroaccel.ops.device_threads import CPU, start_thread

Sizes = Mapping[str, int]
"""Relative path of each file of a folder -> size in bytes."""

Listing = Mapping[str, tuple[int, str]]
"""Relative path of each file of a state -> size in bytes, and SHA-256. A rank's file of a checkpoint has checksums of
its own, and "" here."""

_LIST_NAME = "files.json"
"""File with the listing of a state; every machine has it."""

_CHUNK_NBYTES = 16 << 20
_SENT_NBYTES = 1 << 20  # chunk size of the threads: it fits the processor's caches and avoids allocating memory
_DIVIDED = ".safetensors"  # files of one rank each; rank 0 writes all other files, which are small
_OF_ONE_RANK = re.compile(r"(.*/)?(rank(?P<rank>\d{5,})-[^/]*|run_state_rank\d{5})\.safetensors")  # read by some ranks


@dataclass(frozen=True)
class _Piece:
    """A part of a file that one rank sends to another."""

    name: str
    offset: int
    nbytes: int


@dataclass(frozen=True)
class FoundState:
    """A state that the machines have together.

    Attributes:
        machines: intact files on each machine.
    """

    name: str
    machines: Sequence[Sizes]
    listing: Listing


class PeerCopies:
    """The states that a job keeps in folders of several machines. (calls of all ranks)

    Args:
        folder: folder in memory of this machine's launcher. Ranks with different folders count as different machines.

    Attributes:
        num_machines: number of machines.
        is_first: True on the first rank of each machine.
    """

    def __init__(self, collectives: Collectives, folder: Path) -> None:
        self._collectives = collectives
        self._copies = Collectives(collectives.topology, records_sizes=False)
        node_of = {rank: node for node, ranks in enumerate(collectives.nodes) for rank in ranks}
        machines: dict[tuple[int, str], list[int]] = {}
        racks: list[str] = []
        for rank, (name, its_rack) in enumerate(
            collectives.gather_objects((str(folder), rack()), "states in memory: folders")
        ):
            states = machines.setdefault((node_of[rank], name), [])
            racks += [] if states else [its_rack]
            states.append(rank)
        self._nodes = list(machines.values())
        self._next = next_machines(racks)
        self.num_machines = len(self._nodes)
        self.is_first = any(collectives.rank == ranks[0] for ranks in self._nodes)
        neighbour = {
            rank: self._rank_at(self._next[machine], place)
            for machine, ranks in enumerate(self._nodes)
            for place, rank in enumerate(ranks)
        }
        self._target = neighbour[collectives.rank]
        self._sources = [rank for rank, target in neighbour.items() if target == collectives.rank]
        self._links: dict[int, PairLink] = {}

    def short_of_room(self, own_nbytes: int, free: int, limit: int | None, *, reads_all: bool) -> str:
        """Returns a message that names a machine with too little memory for states; "" if all have enough.

        A machine holds the files of its ranks and copies of another machine's files, twice while it saves. After a loss
        it holds the files that its ranks read.

        Args:
            own_nbytes: size in bytes of the part of a state that this rank saves.
            reads_all: True if each rank reads the whole state.
            free: free memory of this machine in bytes.
            limit: maximum number of bytes for states, if the config sets one.
        """
        room = free if limit is None else min(free, limit)
        found = self._collectives.gather_objects((own_nbytes, room, room < free), "states in memory: room")
        sizes = [sum(found[rank][0] for rank in ranks) for ranks in self._nodes]
        for machine, ranks in enumerate(self._nodes):
            copies = sizes[self._next.index(machine)] if self.num_machines > 1 else 0
            needed = max(2 * (sizes[machine] + copies), sum(sizes) if reads_all else 0)
            _, room, is_limited = min((found[rank] for rank in ranks), key=lambda entry: entry[1])
            if room < needed:
                where = f"the machine of {self._collectives.named(ranks)}"
                what = f"two states of {_megabytes(sizes[machine])} of its ranks"
                what += f" and {_megabytes(copies)} of another machine's" if copies else ""
                has = (
                    f"may take {_megabytes(room)} by checkpoint.peer.memory"
                    if is_limited
                    else f"has {_megabytes(room)} free"
                )
                return f"{where} needs {_megabytes(needed)} for {what}, and {has}"
        return ""

    def connect(self) -> None:
        """Connects this rank to the ranks with which `send` exchanges files; later calls do nothing."""
        if self.num_machines > 1 and not self._links:
            rank, topology = self._collectives.rank, self._collectives.topology
            pairs = pair_backends(topology, [self._target, *self._sources])
            self._links = {peer: PairLink(pairs[peer], is_first=rank < peer) for peer in (self._target, *self._sources)}

    def send(self, folder: Path, names: Sequence[str] | None) -> None:
        """Sends files to a rank of the next machine and receives those of the previous one, in a thread of each rank.

        Args:
            names: relative paths of this rank's files; None if it could not write them.

        Raises:
            OSError: a file cannot be read or written. RuntimeError: another rank has died.
        """
        if self.num_machines == 1:
            return
        failures: list[Exception] = []
        receivers = [
            start_thread(partial(_noted, failures, partial(_receive_files, self._links[rank], folder)), "states", CPU)
            for rank in self._sources
        ]
        _noted(failures, partial(_send_files, self._links[self._target], folder, names or ()))
        for thread in receivers:
            thread.join()
        if failures:
            raise failures[0]

    def spread(self, written: Path, state: Path) -> None:
        """Copies the missing files of the folder `written` to each machine, and renames the folder to `state`.

        Raises:
            CheckpointError: a machine's memory does not suffice; on every rank.
        """
        listing: Listing = {}
        with agreed(self._collectives, "states in memory: digests"), writing_to(written):
            listing = _listing(written) if self.is_first else {}
        found = self._collectives.gather_objects(listing, "states in memory: files")
        listings = [found[ranks[0]] for ranks in self._nodes]
        count = self.num_machines
        moves = []
        for name in sorted({name for files in listings for name in files}):
            has = [name in files for files in listings]
            source = has.index(True)
            if name.endswith(_DIVIDED):
                targets = [self._next[source]] if sum(has) == 1 < count else []
            else:
                targets = [machine for machine in range(count) if not has[machine]]
            moves += [(source, target, name) for target in targets]
        self._send(written, moves, {name: entry for files in listings for name, entry in files.items()})
        with agreed(self._collectives, "states in memory: name"), writing_to(written):
            if self.is_first:
                written.rename(state)

    def newest(self, states: Iterable[Path]) -> FoundState | None:
        """Returns the newest state of which each file is intact on a machine. Deletes damaged files and states.

        Args:
            states: folders of states on this machine, complete or not.
        """
        folders = {path.name: path for path in states}
        sizes_of = {name: _sizes(path) for name, path in folders.items()} if self.is_first else {}
        lists = _lists(folders.values()) if self.is_first else {}
        found = self._collectives.gather_objects((sizes_of, list(lists)), "states in memory")
        with_list = {name: rank for rank, (_, names) in reversed(list(enumerate(found))) for name in names}
        for name in sorted({name for sizes, _ in found for name in sizes}, key=step_of, reverse=True):
            if name not in with_list:
                self._delete(folders, name, f"{_LIST_NAME}: damaged")
                continue
            # All have the same list. It is long with many ranks, so only one rank sends it.
            listing = from_rank(
                self._collectives, with_list[name], partial(lists.__getitem__, name), "states in memory: list"
            )
            there = [found[ranks[0]][0].get(name, {}) for ranks in self._nodes]
            if missing := sorted(listing.keys() - {file for sizes in there for file in sizes}):
                log_always(f"skipped the state of step {step_of(name)} in memory: no machine has {missing[0]}")
                continue
            damaged = self._damaged(folders.get(name), there, listing)
            machines = [
                {file: size for file, size in sizes.items() if file in listing and file not in damaged[machine]}
                for machine, sizes in enumerate(there)
            ]
            if lost := sorted(listing.keys() - {file for sizes in machines for file in sizes}):
                self._delete(folders, name, next(why[lost[0]] for why in damaged if lost[0] in why))
                continue
            if self.is_first and name in folders:
                own_machine = next(at for at, ranks in enumerate(self._nodes) if self._collectives.rank in ranks)
                for file in damaged[own_machine]:
                    (folders[name] / file).unlink(missing_ok=True)
            return FoundState(name, machines, listing)
        return None

    def _damaged(self, folder: Path | None, there: Sequence[Sizes], listing: Listing) -> list[dict[str, str]]:
        """Returns for each machine the damaged files of a state, with the reason. Its ranks share the reading."""
        damage: dict[str, str] = {}
        with agreed(self._collectives, "states in memory: damage"):
            for ranks, sizes in zip(self._nodes, there, strict=True):
                if self._collectives.rank in ranks and folder is not None:
                    files = sorted(sizes.keys() & listing.keys(), key=lambda file: (bool(listing[file][1]), file))
                    damage = _damage(folder, files[ranks.index(self._collectives.rank) :: len(ranks)], listing)
        found = self._collectives.gather_objects(damage, "states in memory: damage")
        return [{file: why for rank in ranks for file, why in found[rank].items()} for ranks in self._nodes]

    def _delete(self, folders: Mapping[str, Path], name: str, why: str) -> None:
        log_always(f"deleted the state of step {step_of(name)} in memory: {why}")
        if self.is_first and name in folders:
            shutil.rmtree(folders[name], ignore_errors=True)

    def fetch_common(self, folder: Path, found: FoundState) -> None:
        """Copies the files of a state that all ranks read into the folder of each machine.

        Args:
            found: result of `newest`.
        """
        common = {name for name in found.listing if not _OF_ONE_RANK.fullmatch(name)}
        self._complete(folder, found, [common] * self.num_machines)

    def fetch_own(self, folder: Path, found: FoundState, to_read: Callable[[], Collection[str]]) -> None:
        """Copies to each machine the files of single ranks that its ranks read, after `fetch_common`.

        Args:
            to_read: returns the files of single ranks that this rank reads.
        """
        names: Collection[str] = ()
        with agreed(self._collectives, "states in memory: files to read"):
            names = to_read() if self.num_machines > 1 else ()
        asked = self._collectives.gather_objects(sorted(names), "states in memory: files to read")
        self._complete(folder, found, [{name for rank in ranks for name in asked[rank]} for ranks in self._nodes])

    def _complete(self, folder: Path, found: FoundState, needed: Sequence[Collection[str]]) -> None:
        source = {name: machine for machine, states in reversed(list(enumerate(found.machines))) for name in states}
        moves = [
            (source[name], target, name)
            for target, names in enumerate(needed)
            for name in sorted(names)
            if name not in found.machines[target]
        ]
        self._send(folder, moves, found.listing)

    def _send(self, folder: Path, moves: Sequence[tuple[int, int, str]], listing: Listing) -> None:
        """Copies files by `moves` (from, to, name), the same on all ranks, and writes `listing` to every machine."""
        counts: dict[tuple[int, int], int] = {}
        pieces: dict[tuple[int, int], list[_Piece]] = {}  # those that this rank sends or receives
        for number, (source, target, name) in enumerate(moves):
            pair, nbytes = (self._rank_at(source, number), self._rank_at(target, number)), listing[name][0]
            counts[pair] = counts.get(pair, 0) - (-nbytes // _CHUNK_NBYTES)
            if self._collectives.rank in pair:
                pieces.setdefault(pair, []).extend(_pieces(name, nbytes))
        error: CheckpointError | None = None
        for turn in range(max(counts.values(), default=0)):
            now = {pair: parts[turn] for pair, parts in pieces.items() if turn < len(parts)}
            try:
                self._exchange(folder, now)
            except OSError as failure:
                error = error or CheckpointError(f"{folder}: cannot be copied ({failure.strerror})")
        with agreed(self._collectives, "states in memory: copies"), writing_to(folder):
            if error is not None:
                raise error
            if self.is_first:
                (folder / _LIST_NAME).write_text(json.dumps(dict(listing)))

    def _rank_at(self, machine: int, number: int) -> int:
        ranks = self._nodes[machine]
        return ranks[number % len(ranks)]

    def _exchange(self, folder: Path, pieces: Mapping[tuple[int, int], _Piece]) -> None:
        """Exchanges at most one piece per pair of ranks; raises OSError only after the exchange."""
        ranks, rank_here = range(self._collectives.world_size), self._collectives.rank
        sent = [pieces[rank_here, rank].nbytes if (rank_here, rank) in pieces else 0 for rank in ranks]
        received = [pieces[rank, rank_here].nbytes if (rank, rank_here) in pieces else 0 for rank in ranks]
        rows = torch.empty(sum(sent), 1, dtype=torch.uint8)
        failure: OSError | None = None
        try:
            leaving = [pieces[rank_here, rank] for rank in ranks if sent[rank]]
            for piece, content in zip(leaving, rows.split(_positive(sent)), strict=True):
                with open(folder / piece.name, "rb") as file:
                    file.seek(piece.offset)
                    file.readinto(_memory_of(content))
        except OSError as error:
            failure = error
        out = torch.empty(sum(received), 1, dtype=torch.uint8)
        self._copies.exchange_rows(out, rows, received, sent, "states in memory: copy").wait()
        if failure is not None:
            raise failure
        arrived = [pieces[rank, rank_here] for rank in ranks if received[rank]]
        for piece, content in zip(arrived, out.split(_positive(received)), strict=True):
            _write(folder, piece, content)


def next_machines(racks: Sequence[str]) -> list[int]:
    """Returns for each machine the one with its copies: in another rack, if no rack has more than half the machines.

    Args:
        racks: rack of each machine.

    Example:
        >>> next_machines(["", "", ""]), next_machines(["a", "a", "b", "b"])
        ([1, 2, 0], [2, 3, 0, 1])
    """
    order = sorted(range(len(racks)), key=lambda machine: racks[machine])
    most = max(racks.count(rack) for rack in racks)
    shift = most if most < len(racks) else 1
    after = dict(zip(order, order[shift:] + order[:shift], strict=True))
    return [after[machine] for machine in range(len(racks))]


def _noted(failures: list[Exception], call: Callable[[], object]) -> None:
    try:
        call()
    except Exception as error:
        failures.append(error)


def _send_files(link: PairLink, folder: Path, names: Sequence[str]) -> None:
    """Sends files in chunks: it reads one chunk while it sends the other."""
    sizes = {name: (folder / name).stat().st_size for name in names}
    link.send_bytes(json.dumps(sizes).encode())
    chunks = torch.empty(2, _SENT_NBYTES, dtype=torch.uint8)
    sent: PendingTransfer | None = None
    number = 0
    for name, nbytes in sizes.items():
        with open(folder / name, "rb", buffering=0) as file:
            for piece in _pieces(name, nbytes, _SENT_NBYTES):
                chunk = chunks[number % 2][: piece.nbytes]
                file.readinto(_memory_of(chunk))
                if sent is not None:
                    sent.wait()
                sent = link.begin_send(chunk)
                number += 1
    if sent is not None:
        sent.wait()


def _receive_files(link: PairLink, folder: Path) -> None:
    """Receives files into those that a save may overwrite (`OVERWRITTEN`), if there are any.

    After a write error it still receives all chunks, because the other rank sends them, and raises at the end.
    """
    sizes: dict[str, int] = json.loads(link.receive_bytes())
    chunk = torch.empty(_SENT_NBYTES, dtype=torch.uint8)
    failure: OSError | None = None
    for name, nbytes in sizes.items():
        _take_file_to_overwrite(folder, name)
        for piece in _pieces(name, nbytes, _SENT_NBYTES):
            content = chunk[: piece.nbytes]
            link.receive(content)
            try:
                _write(folder, piece, content)
                if piece.offset + piece.nbytes == nbytes:
                    os.truncate(folder / name, nbytes)
            except OSError as error:
                failure = failure or error
    if failure is not None:
        raise failure


def _take_file_to_overwrite(folder: Path, name: str) -> None:
    path = folder / name
    if (match := _OF_ONE_RANK.fullmatch(name)) is None or match["rank"] is None:
        return
    over = file_of_rank((folder.with_name(OVERWRITTEN) / name).parent, int(match["rank"]))
    if over is not None:
        with suppress(OSError):  # if the rename fails, `_write` creates a new file
            path.parent.mkdir(parents=True, exist_ok=True)
            over.rename(path)


def _write(folder: Path, piece: _Piece, content: torch.Tensor) -> None:
    path = folder / piece.name
    path.parent.mkdir(parents=True, exist_ok=True)
    with open(os.open(path, os.O_WRONLY | os.O_CREAT, 0o666), "wb", buffering=0) as file:
        file.seek(piece.offset)
        write_all(file.fileno(), _memory_of(content))


def _memory_of(rows: torch.Tensor) -> memoryview:
    return memoryview(rows.numpy()).cast("B")  # type: ignore[arg-type]


def _megabytes(nbytes: int) -> str:
    return f"{nbytes / 1e6:,.2f} MB"


def _pieces(name: str, nbytes: int, most: int = _CHUNK_NBYTES) -> Iterator[_Piece]:
    for offset in range(0, nbytes, most):
        yield _Piece(name, offset, min(most, nbytes - offset))


def _positive(sizes: Iterable[int]) -> list[int]:
    return [size for size in sizes if size]


def _sizes(folder: Path) -> dict[str, int]:
    """Returns the sizes of a state's files, without its list."""
    files = sorted(path for path in folder.rglob("*") if path.is_file() and path.name != _LIST_NAME)
    return {str(path.relative_to(folder)): path.stat().st_size for path in files}


def _listing(folder: Path) -> Listing:
    """Returns the listing of a state's files on this machine."""
    return {
        name: (nbytes, "" if _has_checksums(name) else hashlib.sha256((folder / name).read_bytes()).hexdigest())
        for name, nbytes in _sizes(folder).items()
    }


def _has_checksums(name: str) -> bool:
    match = _OF_ONE_RANK.fullmatch(name)
    return match is not None and match["rank"] is not None


def _damage(folder: Path, names: Iterable[str], listing: Listing) -> dict[str, str]:
    """Returns the damaged files of a state on this machine, with the reason: reads them all."""
    found = {}
    for name in names:
        nbytes, digest = listing[name]
        path = folder / name
        try:
            if (size := path.stat().st_size) != nbytes:
                found[name] = f"{path}: damaged: expected {nbytes} bytes, got {size}"
            elif not digest:
                check_file(path)
            elif hashlib.sha256(path.read_bytes()).hexdigest() != digest:
                found[name] = f"{path}: damaged: its digest differs from the list's"
        except CheckpointError as error:
            found[name] = str(error)
        except OSError as error:
            found[name] = f"{path}: cannot be read ({error.strerror})"
    return found


def _lists(states: Iterable[Path]) -> dict[str, Listing]:
    found: dict[str, Listing] = {}
    for path in states:
        with suppress(OSError, ValueError, TypeError, AttributeError, RecursionError):
            items = json.loads((path / _LIST_NAME).read_text()).items()
            found[path.name] = {name: (int(nbytes), str(digest)) for name, (nbytes, digest) in items}
    return found


def step_of(name: str) -> int:
    """Returns the step in the name of a state's folder."""
    return int(name.rpartition("_")[2])
