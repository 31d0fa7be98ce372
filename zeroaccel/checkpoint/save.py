"""Saving: the ranks agree on what goes where, each writes its file, and rank 0 commits the checkpoint.

1. `prepare` collects a `SavePlan`, agrees on tag and folder, and takes the folder's lock (all ranks).
2. `Save.write_part` writes this rank's file (each rank; in this thread, or in one of `background_save.py`).
3. `commit` writes the manifest, then `latest` and the conversion script, then removes what is out of date (rank 0).

The manifest is what makes a folder a checkpoint: a crash before it leaves no checkpoint, one after it a complete one.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import shutil
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
import torch

from zeroaccel.checkpoint.atomic_write import FolderLock, remove_abandoned, write_durably, writing_to
from zeroaccel.checkpoint.consolidate import drop_script
from zeroaccel.checkpoint.find import checkpoint_folders
from zeroaccel.checkpoint.manifest import (
    LATEST_NAME,
    MANIFEST_NAME,
    FileRecord,
    Manifest,
    Piece,
    TensorRecord,
    check_new_tag,
    read_latest,
    read_manifest,
    write_manifest,
)
from zeroaccel.checkpoint.plain_codec import encode
from zeroaccel.checkpoint.rank_file import is_part_of_a_save, rank_file_name
from zeroaccel.checkpoint.rank_file_writer import RankFileWriter, Staging
from zeroaccel.checkpoint.save_plan import EngineState, SavePlan, code_names, describe_parameters, persistent_buffers
from zeroaccel.comm.agree import agreed
from zeroaccel.comm.collectives import Collectives
from zeroaccel.errors import CheckpointError, CollectiveError, UsageError
from zeroaccel.logs import logger
from zeroaccel.ops.device_threads import start_thread

_DISCARD_TIMEOUT_SECONDS = 1.0
"""How long a failed save waits for the lock of its empty folder; after that the folder stays."""

Part = Mapping[str, Any]
"""What rank 0 needs to commit a rank's file: plain data, made by `describe_part`."""


@dataclass(frozen=True)
class CommitRules:
    """What follows the manifest of a save.

    Attributes:
        latest: whether the file `latest` is set to its tag.
        keep_last: how many checkpoints stay in the folder; None for all.
        is_shared: all machines see one folder, where the manifest is only written if all files are there.
    """

    latest: bool = True
    keep_last: int | None = None
    is_shared: bool = True


OVERWRITTEN = "overwritten"
"""Beside a folder in memory: one whose files the next save overwrites, instead of taking fresh memory."""


@dataclass(frozen=True)
class SaveRequest:
    """The arguments of `save_checkpoint`.

    Attributes:
        root: the folder of checkpoints, the same on all ranks.
        tag: the name of this one.
        client_state: the caller's own plain data and tensors; rank 0's is saved.
        left_out: ids of the parameters whose values are left out.
        base_model: where the adapters' base comes from; "" without adapters.
        rules: what follows the manifest.
    """

    root: str | os.PathLike[str]
    tag: object
    client_state: Mapping[str, Any]
    left_out: frozenset[int]
    base_model: str
    rules: CommitRules


@dataclass(frozen=True)
class Progress:
    """The state of training besides parameters and optimizer: plain data of the engine.

    Attributes:
        random_state: of this rank, or None.
    """

    counters: Mapping[str, int]
    loss_scale: Mapping[str, Any]
    lr_scheduler: Mapping[str, Any] | None
    config: Mapping[str, Any]
    sharded: Mapping[str, bool]
    random_state: Mapping[str, Any] | None


@dataclass(frozen=True)
class RankProcess:
    """The process of a rank, by which other ranks can see whether it still runs; created in it, by `own`.

    Only processes of the same machine and container see each other; of others `is_gone` is always False.

    Attributes:
        machine: equal for processes of one PID namespace of one boot.
        pid, create_time: identify a process together, since a PID is reused.
    """

    machine: str
    pid: int
    create_time: float

    @classmethod
    def own(cls) -> RankProcess:
        """Of this process."""
        return cls(_machine(), os.getpid(), psutil.Process().create_time())

    def is_gone(self) -> bool:
        """True only if the process has certainly ended."""
        if self.machine != _machine():
            return False
        try:
            process = psutil.Process(self.pid)
            return process.create_time() != self.create_time or process.status() == psutil.STATUS_ZOMBIE
        except psutil.NoSuchProcess:
            return True
        except psutil.Error:
            return False


def _machine() -> str:
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
        return f"{boot} {os.readlink('/proc/self/ns/pid')}"
    except OSError:
        return f"{os.getpid()}"  # unique: without /proc no process counts as visible to another


def prepare(request: SaveRequest, engine_state: EngineState, progress: Progress, staging: Staging) -> Save:
    """Collects the ranks' save plans and agrees on tag and folder. (all ranks)

    Counters, buffers and client state are copied now; of parameters, masters and states the plan has live views.

    Raises:
        UsageError: no folder is named, the ranks name different checkpoints, or `client_state` cannot be saved.
        CheckpointError: the tag is not one, there is not enough space, the folder cannot be created, or another save is
            writing into it.
    """
    # A mistake (client state that is not plain data, a bad tag) can be on one rank only: each rank collects inside
    # `agreed`, so all of them raise before any file exists.
    ranks, is_first = engine_state.job, engine_state.job.rank == 0
    plan = SavePlan(ranks.rank)
    common: dict[str, Any] = {}
    random_state, tag, root = None, "", Path()
    with agreed(ranks, "save_checkpoint: what to save"):
        root = _folder_of(request.root)
        tag = check_new_tag(request.tag)
        plan = SavePlan.collect(engine_state, left_out=request.left_out)
        if progress.random_state is not None:
            random_state = encode(progress.random_state, "random state", plan.keep)
        client_state = _encode_client_state(request.client_state, plan if is_first else None)
        if is_first:
            common = _common(request, engine_state, progress, plan) | {"tag": tag, "client_state": client_state}
    if engine_state.whole_model is not None:
        _join_parts(common, engine_state, plan, left_out=request.left_out)
    save_id, processes = _agree_on_tag(tag, ranks)
    path = root / tag / rank_file_name(ranks.rank, ranks.world_size, save_id)
    over = None if request.rules.is_shared else file_of_rank(root.with_name(OVERWRITTEN) / tag, ranks.rank)
    with agreed(ranks, f"checkpoint {tag}: lay out"):
        writer = RankFileWriter(path, plan.entries, staging, over=over)
    sizes = ranks.gather_objects(writer.layout.nbytes, f"checkpoint {tag}: sizes")
    lock: FolderLock | None = None
    try:
        with agreed(ranks, f"checkpoint {tag}: folder"):
            # Of folders that machines do not share none gets everything.
            nbytes = sum(sizes) if request.rules.is_shared else writer.fresh_nbytes
            lock = _open_folder(root / tag, nbytes, locked=is_first)
    except Exception:
        if lock is not None:
            lock.release()
        raise
    if common:
        common |= {"id": save_id, "saved_at": time.time()}
    return Save(
        root,
        tag,
        save_id,
        ranks,
        writer,
        plan.scalars,
        random_state,
        common,
        request.rules,
        processes,
        lock,
    )


def _agree_on_tag(tag: str, ranks: Collectives) -> tuple[str, tuple[RankProcess, ...]]:
    """The id of this save, and the process of each rank. (all ranks)"""
    tags = ranks.gather_objects((tag, secrets.token_hex(4), RankProcess.own()), "save_checkpoint: tag")
    if len({name for name, *_ in tags}) > 1:
        raise UsageError(
            "save_checkpoint(tag)",
            expected="the same tag on all ranks",
            got=", ".join(f"{name!r} on rank {rank}" for rank, (name, *_) in enumerate(tags)),
        )
    # Rank 0's id names the files of this save on all ranks: new names in every save, so that a save under a tag that
    # exists never overwrites a file of the complete checkpoint before its manifest is replaced.
    return tags[0][1], tuple(process for *_, process in tags)


def _folder_of(save_dir: object) -> Path:
    """The absolute path; an empty one, which is the working directory to the system, is refused."""
    if not isinstance(save_dir, (str, os.PathLike)) or not os.fspath(save_dir):
        raise UsageError("save_checkpoint(save_dir)", expected="a folder", got=save_dir)
    return Path(os.path.abspath(save_dir))


def _encode_client_state(state: Mapping[str, Any], plan: SavePlan | None) -> Any:
    """Checked on every rank; its tensors are added to the plan of rank 0 only."""
    if type(state) is not dict:
        raise UsageError("save_checkpoint(client_state)", expected="a dict", got=type(state).__name__)
    return encode(state, "client_state", plan.keep if plan is not None else lambda tensor: "")


def _common(request: SaveRequest, engine_state: EngineState, progress: Progress, plan: SavePlan) -> dict[str, Any]:
    buffers = list(persistent_buffers(engine_state.model))
    for name, buffer in buffers:
        plan.add_full(f"buffer/{name}", buffer.clone())  # the next forward may change it
    parameters = describe_parameters(engine_state, left_out=request.left_out)
    return {
        "world_size": engine_state.job.world_size,
        "sharded": dict(progress.sharded),
        "parameters": parameters,
        "order": tuple(parameters),
        "ties": dict(engine_state.ties),
        "buffers": tuple(name for name, _ in buffers),
        "base_model": request.base_model,
        "codes": code_names(engine_state.model),
        "optimizer": _optimizer(engine_state, plan),
        "counters": dict(progress.counters),
        "loss_scale": encode(dict(progress.loss_scale), "loss scale", plan.keep),
        "lr_scheduler": encode(progress.lr_scheduler, "lr_scheduler.state_dict()", plan.keep),
        "config": encode(dict(progress.config), "config", plan.keep),
        "writer": {"torch": torch.__version__},
    }


def _join_parts(common: dict[str, Any], engine_state: EngineState, plan: SavePlan, *, left_out: frozenset[int]) -> None:
    """Adds the parameters and buffers of other parts to rank 0's description. (all ranks)

    The first rank that has a buffer saves it.
    """
    assert engine_state.whole_model is not None, "parts of no model"
    buffers = dict(persistent_buffers(engine_state.model))
    own: tuple[dict[str, Any], list[str], dict[str, int], tuple[str, ...]] | None = None
    if engine_state.lead == engine_state.job.rank:
        groups = {} if engine_state.optimizer is None else dict(engine_state.optimizer.group_of)
        own = (
            describe_parameters(engine_state, left_out=left_out),
            list(buffers),
            groups,
            code_names(engine_state.model),
        )
    parameters: dict[str, Any] = {}
    savers: dict[str, int] = {}
    group_of: dict[str, int] = {}
    codes: dict[str, None] = {}
    for rank, part in enumerate(engine_state.job.gather_objects(own, "save_checkpoint: parts")):
        if part is not None:
            parameters |= part[0]
            savers = {**dict.fromkeys(part[1], rank), **savers}
            group_of |= part[2]
            codes |= dict.fromkeys(part[3])
    for name, saver in savers.items():
        if saver == engine_state.job.rank != 0:  # rank 0 has added its own
            plan.add_full(f"buffer/{name}", buffers[name].clone())
    if common:
        order = [name for name in engine_state.whole_model.order if name in parameters]
        common |= {"parameters": {name: parameters[name] for name in order}, "order": tuple(order)}
        common["codes"] = tuple(codes)
        common["buffers"] = tuple(name for name in engine_state.whole_model.buffers if name in savers)
        if common["optimizer"] is not None:
            for index, group in enumerate(common["optimizer"]["param_groups"]):
                group["params"] = [name for name in order if group_of.get(name) == index]


def _optimizer(engine_state: EngineState, plan: SavePlan) -> dict[str, Any] | None:
    sharded = engine_state.optimizer
    if sharded is None:
        return None
    groups = []
    for index, group in enumerate(sharded.optimizer.param_groups):
        hyperparameters = {name: value for name, value in group.items() if name != "params"}
        encoded = encode(hyperparameters, f"optimizer.param_groups[{index}]", plan.keep)
        if "$" in encoded:
            raise UsageError(f"optimizer.param_groups[{index}]", expected="names of hyperparameters as keys")
        groups.append({**encoded, "params": [fqn for fqn, owner in sharded.group_of.items() if owner == index]})
    return {"type": type(sharded.optimizer).__name__, "param_groups": groups}


def file_of_rank(folder: Path, rank: int) -> Path | None:
    """That of any save; None where there is none."""
    return next(folder.glob(f"rank{rank:05d}-of-*.safetensors"), None)


def _open_folder(folder: Path, nbytes: int, *, locked: bool) -> FolderLock | None:
    """Creates the folder; where it is to be `locked`, also checks that `nbytes` fit, and returns the lock."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        if not locked:
            return None
        free = shutil.disk_usage(folder).free
        if nbytes > free:
            with contextlib.suppress(OSError):
                folder.rmdir()
            raise CheckpointError(
                f"{folder}: not enough space",
                expected=f"{nbytes} bytes",
                got=f"{free} bytes free",
                fix="free some space or choose another folder; nothing was written",
            )
        return FolderLock(folder)
    except OSError as error:
        raise CheckpointError(f"{folder}: cannot be made ({error.strerror})", fix="choose another folder") from error


@dataclass(frozen=True)
class Save:
    """One rank's part of a save that all ranks have agreed on; nothing is written yet.

    Life: 1. `write_part` (each rank), 2. `commit` (rank 0), 3. `release`; or `discard`, `release` and `discard_folder`
    after a failure. `write_now` does all of it; or `write` in a thread, then `commit_together` or `abandon`.

    Attributes:
        common: on rank 0 the fields of the manifest besides the parts; elsewhere empty.
        processes: of all ranks.
        lock: on rank 0, that of the folder, until `release`.
    """

    root: Path
    tag: str
    save_id: str
    ranks: Collectives
    writer: RankFileWriter
    scalars: Mapping[str, Any]
    random_state: Any
    common: Mapping[str, Any]
    rules: CommitRules
    processes: tuple[RankProcess, ...]
    lock: FolderLock | None

    @property
    def folder(self) -> Path:
        """The checkpoint's folder."""
        return self.root / self.tag

    def write(self) -> Part:
        """Writes this rank's file, with a thread that copies the tensors."""
        copier = start_thread(self.writer.copy, f"checkpoint copy {self.tag}", self.writer.device)
        try:
            return self.write_part()
        finally:
            copier.join()

    def write_part(self) -> Part:
        """Writes this rank's file; `writer.copy` must be running in another thread."""
        record = self.writer.write(self.ranks.rank)
        return describe_part(self.writer, record, self.scalars, self.random_state)

    def commit(self, parts: list[Part]) -> None:
        """Commits the parts of all ranks. (rank 0)"""
        commit(self.root, merge_parts(parts, self.common), self.rules)

    def discard(self) -> None:
        """Removes this rank's file of a save that will not be committed."""
        with contextlib.suppress(OSError):
            if self.save_id in (self.folder / MANIFEST_NAME).read_text(encoding="utf-8"):
                return  # it was committed, and a later step of the commit failed
        with contextlib.suppress(OSError):
            self.writer.path.unlink(missing_ok=True)

    def release(self) -> None:
        """Unlocks the folder for other saves: this one is committed, or will not be."""
        if self.lock is not None:
            self.lock.release()

    def discard_folder(self) -> None:
        """Removes the folder if it is empty; to be called when no rank will write into it any more.

        Under the folder's lock, so that it is not removed while another run has begun to save into it.
        """
        lock = FolderLock.if_free(self.folder, _DISCARD_TIMEOUT_SECONDS)
        if lock is not None:
            with contextlib.suppress(OSError):
                self.folder.rmdir()
            lock.release()

    def write_now(self) -> None:
        """Writes and commits, and returns when the checkpoint is complete. (all ranks)

        Raises:
            CheckpointError: on every rank, if any could not write.
        """
        part: Part = {}
        with self._abandoned_if_it_fails():
            with agreed(self.ranks, f"checkpoint {self.tag}: write"):
                part = self.write()
            self._commit_together(part)

    def commit_together(self, part: Part) -> None:
        """Commits what `write` has returned on each rank. (all ranks)"""
        with self._abandoned_if_it_fails():
            self._commit_together(part)

    def abandon(self) -> None:
        """Removes what is there of a save that will not be committed; its `write`, if it was called, has ended."""
        self.writer.copied.set()
        self.discard()
        self.release()
        self.discard_folder()  # succeeds on the last rank to discard its file

    def _commit_together(self, part: Part) -> None:
        parts = self.ranks.gather_objects(part, f"checkpoint {self.tag}: parts")
        with agreed(self.ranks, f"checkpoint {self.tag}: commit"):
            if self.ranks.rank == 0:
                self.commit(parts)

    @contextlib.contextmanager
    def _abandoned_if_it_fails(self) -> Iterator[None]:
        try:
            yield
        except CollectiveError:
            raise  # a rank is gone: rank 0 may have committed, so nothing may be removed
        except Exception:
            self.abandon()
            raise
        finally:
            self.release()


def describe_part(writer: RankFileWriter, record: FileRecord, scalars: Mapping[str, Any], random_state: Any) -> Part:
    """A rank's message to rank 0 about its file."""
    tensors = {
        entry.key: (
            (entry.dtype, entry.shape, entry.split),
            entry.start,
            entry.data.numel(),
            writer.layout.offsets[entry.key],
        )
        for entry in writer.entries
    }
    file = (record.name, record.nbytes, record.rank, record.table_sha256)
    return {"file": file, "tensors": tensors, "scalars": scalars, "random_state": random_state}


def merge_parts(parts: Sequence[Part], common: Mapping[str, Any]) -> Manifest:
    """The manifest of the ranks' parts, by rank.

    Args:
        common: the fields that rank 0 has already; the scalars are added to its `optimizer`.
    """
    pieces: dict[str, list[Piece]] = {}
    kinds: dict[str, tuple[str, tuple[int, ...], tuple[int, int, int] | None]] = {}
    scalars: dict[str, Any] = {}
    # Each rank describes its own shards only, so the covering list of pieces exists nowhere before this loop.
    for index, part in enumerate(parts):
        for key, ((dtype, shape, split), start, length, offset) in part["tensors"].items():
            kinds[key] = (dtype, tuple(shape), split and tuple(split))
            own = pieces.setdefault(key, [])
            if length:
                own.append((index, start, length, offset))
        for fqn, values in part["scalars"].items():
            # A parameter whose shards are on several ranks has its scalars (step counts) on each of them. Keys of plain
            # tensors contain the rank, so they differ by name though their values agree.
            if scalars.setdefault(fqn, values) != values and "plain/" not in str(values):
                raise CheckpointError(
                    f"optimizer, state of {fqn}", expected=f"the same on all ranks, {scalars[fqn]}", got=values
                )
    fields = dict(common)
    if fields["optimizer"] is not None:
        fields["optimizer"] = {**fields["optimizer"], "scalars": scalars}
    states = [part["random_state"] for part in parts]
    return Manifest(
        **fields,
        files=tuple(FileRecord(*part["file"]) for part in parts),
        tensors={
            key: TensorRecord(dtype, shape, tuple(sorted(pieces[key], key=lambda piece: piece[1])), split)
            for key, (dtype, shape, split) in kinds.items()
        },
        random_state=None if any(state is None for state in states) else states,
    )


def commit(root: Path, manifest: Manifest, rules: CommitRules) -> None:
    """Completes the checkpoint in `root/<tag>`: writing its manifest is the commit.

    Raises:
        CheckpointError: the disk is full or fails; earlier checkpoints stay valid.
    """
    folder = root / manifest.tag
    with writing_to(folder, keeps_others=True):
        # In this order, so that after a crash at any point `latest` names a complete checkpoint, the old or the new.
        for record in manifest.files if rules.is_shared else ():
            _check_visible(folder / record.name, record.nbytes)
        write_manifest(folder, manifest)
        if rules.latest:
            write_durably(root / LATEST_NAME, manifest.tag.encode())
            drop_script(root)
            remove_abandoned(root / LATEST_NAME)
    _remove_stale_files(folder, manifest)
    if rules.keep_last is not None:
        _prune(root, manifest, rules.keep_last)


def _check_visible(path: Path, nbytes: int) -> None:
    size = path.stat().st_size if path.exists() else None
    if size != nbytes:
        raise CheckpointError(
            f"{path}, written by another rank",
            expected=f"{nbytes} bytes",
            got=size,
            fix="save into a folder that all ranks share",
        )


def _remove_stale_files(folder: Path, manifest: Manifest) -> None:
    """Removes the files of earlier saves, complete or interrupted, under the same tag."""
    current = {record.name for record in manifest.files}
    for path in folder.iterdir():
        if is_part_of_a_save(path.name) and path.name not in current:
            with contextlib.suppress(OSError):
                path.unlink()


def _prune(root: Path, newest: Manifest, keep: int) -> None:
    """Removes the oldest checkpoints, and saves that were never finished; nothing that is not of this format."""
    complete: list[tuple[float, Path]] = []
    for folder in checkpoint_folders(root):
        if folder.name == newest.tag:
            continue
        try:
            complete.append((read_manifest(folder).saved_at, folder))
        except CheckpointError:
            if not (folder / MANIFEST_NAME).exists():
                _remove(folder)
    for _, folder in sorted(complete, reverse=True)[max(0, keep - 1) :]:
        if _remove(folder):
            logger.info("keep_last = %d: removed checkpoint %s", keep, folder)


def _remove(folder: Path) -> bool:
    """Removes a checkpoint, its manifest first; files that are not a checkpoint's stay, and the folder with them.

    A folder that another run is writing stays, and the one that `latest` names: a run holds the folder's lock until
    `latest` names it, so under the lock `latest` either names this folder already or never will.
    """
    lock = FolderLock.if_free(folder)
    if lock is None:
        return False
    try:
        with contextlib.suppress(CheckpointError):
            if read_latest(folder.parent) == folder.name:
                return False
        (folder / MANIFEST_NAME).unlink(missing_ok=True)
        for path in folder.iterdir():
            if is_part_of_a_save(path.name):
                path.unlink()
        if not any(folder.iterdir()):
            folder.rmdir()
    except OSError as error:
        logger.warning("checkpoint %s could not be removed: %s", folder, error)
        return False
    finally:
        lock.release()
    return True
