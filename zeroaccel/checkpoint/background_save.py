"""A save that runs concurrently with training: one thread copies, one writes, and neither uses a collective.

A background thread's collectives would interleave with those of training in an order that differs between ranks. So
ranks communicate through the disk: each writes a small part file when its tensors are on the disk, or a part file with
its error; rank 0 polls for these files and commits. `checkpointer.py` checks `finished` and `error` in the main thread.
The threads are not daemons: the interpreter waits for them at exit.
"""

from __future__ import annotations

import contextlib
import json
import time
from pathlib import Path
from threading import Event

from zeroaccel.checkpoint.atomic_write import TEMPORARY_SUFFIX, write_durably, writing_to
from zeroaccel.checkpoint.save import Part, Save
from zeroaccel.errors import CheckpointError
from zeroaccel.logs import logger
from zeroaccel.ops.device_threads import start_thread

_POLL_SECONDS = 0.02
_STALL_SECONDS = 120.0
"""How long another rank's file may go without growing before rank 0 fails the save."""


class BackgroundSave:
    """Starts the threads of a save: one copies tensors to host memory, one writes and commits.

    Attributes:
        error: the error that failed the save; None while it runs, and after success.
    """

    def __init__(self, save: Save) -> None:
        self._save = save
        self.tag = save.tag
        self.error: Exception | None = None
        self._abandoned = Event()
        device = save.writer.device
        self._copier = start_thread(save.writer.copy, f"checkpoint copy {save.tag}", device)
        self._writer = start_thread(self._run, f"checkpoint write {save.tag}", device)

    @property
    def finished(self) -> bool:
        """True if this rank's threads have ended. On rank 0, the checkpoint is then complete or has failed."""
        return not self._writer.is_alive()

    def wait_copied(self) -> None:
        """Waits until all tensors are copied, so that the optimizer may change the weights."""
        self._save.writer.copied.wait()

    def wait(self) -> None:
        """Waits until this rank has finished, also after a failure."""
        self._writer.join()

    def abandon(self) -> None:
        """Stops waiting for other ranks and removes this rank's files. Call `discard_folder` when all ranks have."""
        self._abandoned.set()
        self.wait()
        with contextlib.suppress(OSError):
            self._part_path(self._save.ranks.rank).unlink(missing_ok=True)
        self._save.discard()

    def discard_folder(self) -> None:
        """Removes the folder if it is empty. Every rank must have abandoned the save."""
        self._save.discard_folder()

    def _run(self) -> None:
        try:
            self._write()
        except Exception as error:
            self.error = error
            logger.error("checkpoint %s: %s", self.tag, error)
        finally:
            self._copier.join()
            self._save.release()

    def _write(self) -> None:
        save = self._save
        try:
            description = save.write_part()
            if save.ranks.rank:
                self._send(description)
        except Exception as error:
            save.discard()
            if save.ranks.rank:
                with contextlib.suppress(CheckpointError):  # the disk may be full; then rank 0 sees a stalled file
                    self._send({"error": str(error)})
            raise
        if save.ranks.rank == 0:
            save.commit([description, *(self._wait_for(rank) for rank in range(1, save.ranks.world_size))])

    def _send(self, description: Part) -> None:
        """Writes the part file that rank 0 polls for."""
        path = self._part_path(self._save.ranks.rank)
        with writing_to(path, keeps_others=True):
            write_durably(path, json.dumps(description).encode())

    def _part_path(self, rank: int) -> Path:
        return self._file_path(rank).with_suffix(".part.json")

    def _file_path(self, rank: int) -> Path:
        file = self._save.writer.path
        return file.with_name(file.name.replace(f"rank{self._save.ranks.rank:05d}", f"rank{rank:05d}", 1))

    def _wait_for(self, rank: int) -> Part:
        """Waits for the part file of a rank and returns the part; raises CheckpointError if it will never arrive."""
        path = self._part_path(rank)
        last_nbytes, since = -1, time.monotonic()
        while not path.exists():
            # A process that has ended is detected at once on the same machine. On other machines, or if a disk hangs,
            # a file that stops growing shows that the rank no longer writes.
            if self._save.processes[rank].is_gone() and not path.exists():
                raise CheckpointError(
                    f"checkpoint {self.tag}: rank {rank} ended before it wrote its part",
                    fix="look at the log of that rank; earlier checkpoints are unchanged",
                )
            nbytes = self._nbytes_written(rank)
            if nbytes != last_nbytes:
                last_nbytes, since = nbytes, time.monotonic()
            if time.monotonic() - since > _STALL_SECONDS:
                raise CheckpointError(
                    f"checkpoint {self.tag}: rank {rank} has written nothing for {_STALL_SECONDS:.0f} s",
                    fix="look at the log of that rank; earlier checkpoints are unchanged",
                )
            if self._abandoned.wait(_POLL_SECONDS):
                raise CheckpointError(f"checkpoint {self.tag}: abandoned, because another rank failed")
        description: Part = json.loads(path.read_text(encoding="utf-8"))
        if "error" in description:
            raise CheckpointError(f"checkpoint {self.tag}: rank {rank}: {description['error']}")
        return description

    def _nbytes_written(self, rank: int) -> int:
        path = self._file_path(rank)
        for candidate in (path, path.with_name(path.name + TEMPORARY_SUFFIX)):
            with contextlib.suppress(OSError):
                return candidate.stat().st_size
        return 0
