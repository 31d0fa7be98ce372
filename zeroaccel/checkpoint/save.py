"""Saving: the ranks agree on tag and folder, each rank writes its file, and rank 0 commits the checkpoint.

1. `prepare` collects a `SavePlan`, agrees on tag and folder, and takes the folder's lock (all ranks).
2. `Save.write_part` writes this rank's file (each rank; in this thread, or in one of `background_save.py`).
3. `commit` writes the manifest, then `latest` and the conversion script, then removes obsolete files (rank 0).

A folder is a checkpoint once it has a manifest: a crash before step 3 leaves no checkpoint, a later one a complete one.
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
"""How long a failed save waits for the lock of its empty folder; after that, the folder stays."""

Part = Mapping[str, Any]
"""Description of a rank's file that rank 0 needs for the commit: plain data from `describe_part`."""


@dataclass(frozen=True)
class CommitRules:
    """Options of a commit.

    Attributes:
        latest: write the tag to the file `latest`.
        keep_last: number of checkpoints to keep in the folder; None for all.
        is_shared: all machines share the folder, so the commit first checks that all files are there.
    """

    latest: bool = True
    keep_last: int | None = None
    is_shared: bool = True


OVERWRITTEN = "overwritten"
"""Name of the folder beside a folder in memory whose files the next save overwrites, to avoid new memory pages."""


@dataclass(frozen=True)
class SaveRequest:
    """The arguments of `save_checkpoint`.

    Attributes:
        root: the folder of checkpoints, the same on all ranks.
        tag: the name of the new checkpoint.
        client_state: the caller's plain data and tensors; rank 0's is saved.
        left_out: ids of the parameters whose values are not saved.
        base_model: name of the adapters' base model; "" without adapters.
        rules: options of the commit.
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
        random_state: states of this rank's random generators, or None.
    """

    counters: Mapping[str, int]
    loss_scale: Mapping[str, Any]
    lr_scheduler: Mapping[str, Any] | None
    config: Mapping[str, Any]
    sharded: Mapping[str, bool]
    random_state: Mapping[str, Any] | None


@dataclass(frozen=True)
class RankProcess:
    """The process of a rank, so that other ranks can check whether it still runs. The rank creates it with `own`.

    Only processes on the same machine, in the same container, see each other; for others, `is_gone` is always False.

    Attributes:
        machine: equal for processes in the same PID namespace since the same boot.
        pid, create_time: identify a process together, because the system reuses PIDs.
    """

    machine: str
    pid: int
    create_time: float

    @classmethod
    def own(cls) -> RankProcess:
        """Describes the calling process."""
        return cls(_machine(), os.getpid(), psutil.Process().create_time())

    def is_gone(self) -> bool:
        """Returns True only if the process has certainly ended."""
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
        return f"{os.getpid()}"  # unique, because without /proc no process can see another


def prepare(request: SaveRequest, engine_state: EngineState, progress: Progress, staging: Staging) -> Save:
    """Collects the ranks' save plans and agrees on tag and folder. (all ranks)

    Copies counters, buffers and client state immediately; the plan has live views of parameters, masters and states.

    Raises:
        UsageError: the folder is missing, the ranks' tags differ, or `client_state` has values that cannot be saved.
        CheckpointError: the tag is invalid, the disk does not have enough space, the folder cannot be created, or
            another save is writing into it.
    """
    # A mistake (client state that is not plain data, a bad tag) may occur on one rank only: each rank collects inside
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
            # If machines do not share the folder, each folder receives the files of its machine only.
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
    """Returns the id of this save, and the process of each rank. (all ranks)"""
    tags = ranks.gather_objects((tag, secrets.token_hex(4), RankProcess.own()), "save_checkpoint: tag")
    if len({name for name, *_ in tags}) > 1:
        raise UsageError(
            "save_checkpoint(tag)",
            expected="the same tag on all ranks",
            got=", ".join(f"{name!r} on rank {rank}" for rank, (name, *_) in enumerate(tags)),
        )
    # Rank 0's id is part of the file names on all ranks. Every save has new names, so that a save under an existing tag
    # never overwrites a file of the complete checkpoint before it replaces the manifest.
    return tags[0][1], tuple(process for *_, process in tags)


def _folder_of(save_dir: object) -> Path:
    """Returns the absolute path; raises for an empty path, which would mean the working directory."""
    if not isinstance(save_dir, (str, os.PathLike)) or not os.fspath(save_dir):
        raise UsageError("save_checkpoint(save_dir)", expected="a folder", got=save_dir)
    return Path(os.path.abspath(save_dir))


def _encode_client_state(state: Mapping[str, Any], plan: SavePlan | None) -> Any:
    """Checks and encodes the client state on every rank; adds its tensors to rank 0's plan only."""
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
    """Adds the parameters and buffers of the other stages to rank 0's description. (all ranks)

    The first rank that has a buffer saves it.
    """
    assert engine_state.whole_model is not None, "parts without a whole model"
    buffers = dict(persistent_buffers(engine_state.model))
    facts: tuple[dict[str, Any], list[str], dict[str, int], tuple[str, ...]] | None = None
    if engine_state.lead == engine_state.job.rank:
        groups = {} if engine_state.optimizer is None else dict(engine_state.optimizer.group_of)
        facts = (
            describe_parameters(engine_state, left_out=left_out),
            list(buffers),
            groups,
            code_names(engine_state.model),
        )
    parameters: dict[str, Any] = {}
    savers: dict[str, int] = {}
    group_of: dict[str, int] = {}
    codes: dict[str, None] = {}
    for rank, stage_facts in enumerate(engine_state.job.gather_objects(facts, "save_checkpoint: parts")):
        if stage_facts is not None:
            parameters |= stage_facts[0]
            savers = {**dict.fromkeys(stage_facts[1], rank), **savers}
            group_of |= stage_facts[2]
            codes |= dict.fromkeys(stage_facts[3])
    for name, saver in savers.items():
        if saver == engine_state.job.rank != 0:  # rank 0 has already added its own
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
            raise UsageError(f"optimizer.param_groups[{index}]", expected='strings other than "$" as keys')
        groups.append({**encoded, "params": [fqn for fqn, owner in sharded.group_of.items() if owner == index]})
    return {"type": type(sharded.optimizer).__name__, "param_groups": groups}


def file_of_rank(folder: Path, rank: int) -> Path | None:
    """Returns a file of this rank from any save in the folder; None if there is none."""
    return next(folder.glob(f"rank{rank:05d}-of-*.safetensors"), None)


def _open_folder(folder: Path, nbytes: int, *, locked: bool) -> FolderLock | None:
    """Creates the folder. If `locked`, also checks that `nbytes` fit, and returns the folder's lock."""
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
        raise CheckpointError(f"{folder}: cannot be created ({error.strerror})", fix="choose another folder") from error


@dataclass(frozen=True)
class Save:
    """One rank's part of a prepared save, before it writes.

    Life cycle: 1. `write_part` (each rank), 2. `commit` (rank 0), 3. `release`. After a failure: `discard`, `release`
    and `discard_folder`. `write_now` does all of it; or call `write` in a thread, then `commit_together` or `abandon`.

    Attributes:
        common: on rank 0, the fields of the manifest that do not depend on the parts; empty on other ranks.
        processes: the processes of all ranks.
        lock: on rank 0, the folder's lock, held until `release`.
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
        """Folder of the checkpoint."""
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
        """Removes this rank's file, unless the save is already committed."""
        with contextlib.suppress(OSError):
            if self.save_id in (self.folder / MANIFEST_NAME).read_text(encoding="utf-8"):
                return  # the save is committed, and a later step of the commit failed
        with contextlib.suppress(OSError):
            self.writer.path.unlink(missing_ok=True)

    def release(self) -> None:
        """Unlocks the folder for other saves, after the commit or a failure."""
        if self.lock is not None:
            self.lock.release()

    def discard_folder(self) -> None:
        """Removes the folder if it is empty. Call it when no rank will write into the folder any more.

        It takes the folder's lock, so that it does not remove the folder when another run has begun to save into it.
        """
        lock = FolderLock.if_free(self.folder, _DISCARD_TIMEOUT_SECONDS)
        if lock is not None:
            with contextlib.suppress(OSError):
                self.folder.rmdir()
            lock.release()

    def write_now(self) -> None:
        """Writes and commits, and returns when the checkpoint is complete. (all ranks)

        Raises:
            CheckpointError: a rank could not write; raised on every rank.
        """
        description: Part = {}
        with self._abandoned_if_it_fails():
            with agreed(self.ranks, f"checkpoint {self.tag}: write"):
                description = self.write()
            self._commit_together(description)

    def commit_together(self, description: Part) -> None:
        """Commits the parts that `write` returned on each rank. (all ranks)"""
        with self._abandoned_if_it_fails():
            self._commit_together(description)

    def abandon(self) -> None:
        """Removes the files of a save instead of committing it. A call of `write` must have ended."""
        self.writer.copied.set()
        self.discard()
        self.release()
        self.discard_folder()  # succeeds on the last rank to discard its file

    def _commit_together(self, description: Part) -> None:
        parts = self.ranks.gather_objects(description, f"checkpoint {self.tag}: parts")
        with agreed(self.ranks, f"checkpoint {self.tag}: commit"):
            if self.ranks.rank == 0:
                self.commit(parts)

    @contextlib.contextmanager
    def _abandoned_if_it_fails(self) -> Iterator[None]:
        try:
            yield
        except CollectiveError:
            raise  # a rank is gone, and rank 0 may have committed, so no file may be removed
        except Exception:
            self.abandon()
            raise
        finally:
            self.release()


def describe_part(writer: RankFileWriter, record: FileRecord, scalars: Mapping[str, Any], random_state: Any) -> Part:
    """Returns a rank's description of its file for rank 0."""
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
    """Returns the manifest for the ranks' parts, in rank order.

    Args:
        common: the fields from rank 0; the parts' scalars are added to its `optimizer`.
    """
    pieces: dict[str, list[Piece]] = {}
    kinds: dict[str, tuple[str, tuple[int, ...], tuple[int, int, int] | None]] = {}
    scalars: dict[str, Any] = {}
    # Each rank describes its own shards only; this loop joins them to the pieces that cover each tensor.
    for index, description in enumerate(parts):
        for key, ((dtype, shape, split), start, length, offset) in description["tensors"].items():
            kinds[key] = (dtype, tuple(shape), split and tuple(split))
            runs = pieces.setdefault(key, [])
            if length:
                runs.append((index, start, length, offset))
        for fqn, values in description["scalars"].items():
            # All ranks with shards of a parameter have its scalars, such as step counts. The keys of plain tensors
            # contain the rank, so they differ even if the values agree.
            if scalars.setdefault(fqn, values) != values and "plain/" not in str(values):
                raise CheckpointError(
                    f"optimizer state of {fqn}", expected=f"the same on all ranks, {scalars[fqn]}", got=values
                )
    fields = dict(common)
    if fields["optimizer"] is not None:
        fields["optimizer"] = {**fields["optimizer"], "scalars": scalars}
    states = [description["random_state"] for description in parts]
    return Manifest(
        **fields,
        files=tuple(FileRecord(*description["file"]) for description in parts),
        tensors={
            key: TensorRecord(dtype, shape, tuple(sorted(pieces[key], key=lambda piece: piece[1])), split)
            for key, (dtype, shape, split) in kinds.items()
        },
        random_state=None if any(state is None for state in states) else states,
    )


def commit(root: Path, manifest: Manifest, rules: CommitRules) -> None:
    """Commits the checkpoint in `root/<tag>` by writing its manifest; then updates `latest` and removes old files.

    Raises:
        CheckpointError: the disk is full or fails; earlier checkpoints stay valid.
    """
    folder = root / manifest.tag
    with writing_to(folder, keeps_others=True):
        # With this order, `latest` names a complete checkpoint, the old or the new one, after a crash at any point.
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
            fix="save into a folder that is shared between all machines",
        )


def _remove_stale_files(folder: Path, manifest: Manifest) -> None:
    """Removes the files of earlier saves, complete or interrupted, under the same tag."""
    current = {record.name for record in manifest.files}
    for path in folder.iterdir():
        if is_part_of_a_save(path.name) and path.name not in current:
            with contextlib.suppress(OSError):
                path.unlink()


def _prune(root: Path, newest: Manifest, keep: int) -> None:
    """Removes the oldest checkpoints and all interrupted saves; keeps folders and files of other formats."""
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
    """Removes a checkpoint, its manifest first. If there are other files, it keeps these and the folder.

    Keeps a folder that another run is writing, and the one that `latest` names: a run holds the folder's lock until it
    has written `latest`, so under the lock `latest` either names this folder already or never will.
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
