"""A save that runs beside training: one thread copies, one writes, and no thread of it uses a collective.

Ranks meet on the disk: each leaves a small part file when its tensors are down, or one with its error when they
cannot be; rank 0 waits for them and commits. What became of it is asked for by `status`, in the main thread. The
threads are no daemons: the interpreter's exit waits for them.
"""

from __future__ import annotations

import contextlib
import json
import time
from pathlib import Path
from threading import Event, Thread

from zeroaccel.checkpoint.atomic_write import write_durably
from zeroaccel.checkpoint.save import Part, Save
from zeroaccel.errors import CheckpointError
from zeroaccel.logs import logger

__all__ = ["BackgroundSave"]

_POLL_SECONDS = 0.02
_PATIENCE_SECONDS = 120.0
"""How long no rank may write anything before rank 0 gives a save up."""


class BackgroundSave:
    """Runs `save` from now on.

    Attributes:
        error: why it failed, once it has.
    """

    def __init__(self, save: Save) -> None:
        self._save = save
        self.tag = save.tag
        self.error: Exception | None = None
        self._abandoned = Event()
        self._copier = Thread(target=save.writer.copy, name=f"checkpoint copy {save.tag}")
        self._writer = Thread(target=self._run, name=f"checkpoint write {save.tag}")
        self._copier.start()
        self._writer.start()

    @property
    def finished(self) -> bool:
        """This rank has nothing left to do; on rank 0, the checkpoint is complete or has failed."""
        return not self._writer.is_alive()

    def wait_copied(self) -> None:
        """Returns once the weights may change."""
        self._save.writer.copied.wait()

    def wait(self) -> None:
        """Returns once this rank has finished, whether it failed or not."""
        self._writer.join()

    def abandon(self) -> None:
        """A rank has failed: what this one wrote goes, and it waits for nobody. `discard_folder` follows."""
        self._abandoned.set()
        self.wait()
        with contextlib.suppress(OSError):
            self._part_path(self._save.rank).unlink(missing_ok=True)
        self._save.discard()

    def discard_folder(self) -> None:
        """Removes the folder if nothing is left in it, once every rank has abandoned the save."""
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
            part = save.write_part()
            if save.rank:
                self._tell(part)
        except Exception as error:
            save.discard()
            if save.rank:
                with contextlib.suppress(CheckpointError):  # the disk may be full; then rank 0 runs out of patience
                    self._tell({"error": str(error)})
            raise
        if save.rank == 0:
            save.commit([part, *(self._wait_for(rank) for rank in range(1, save.world_size))])

    def _tell(self, part: Part) -> None:
        """Leaves a note for rank 0."""
        path = self._part_path(self._save.rank)
        try:
            write_durably(path, json.dumps(part).encode())
        except OSError as error:
            raise CheckpointError(
                f"{path}: cannot be written ({error.strerror})",
                fix="free some space or choose another folder; earlier checkpoints are as they were",
            ) from error

    def _part_path(self, rank: int) -> Path:
        return self._file_path(rank).with_suffix(".part.json")

    def _file_path(self, rank: int) -> Path:
        own = self._save.writer.path
        return own.with_name(own.name.replace(f"rank{self._save.rank:05d}", f"rank{rank:05d}", 1))

    def _wait_for(self, rank: int) -> Part:
        path = self._part_path(rank)
        written, since = -1, time.monotonic()
        while not path.exists():
            if self._save.processes[rank].is_gone() and not path.exists():
                raise CheckpointError(
                    f"checkpoint {self.tag}: rank {rank} has ended before its part was written",
                    fix="look at the log of that rank; earlier checkpoints are as they were",
                )
            now_written = self._written(rank)
            if now_written != written:
                written, since = now_written, time.monotonic()
            if time.monotonic() - since > _PATIENCE_SECONDS:
                raise CheckpointError(
                    f"checkpoint {self.tag}: rank {rank} has written nothing for {_PATIENCE_SECONDS:.0f} s",
                    fix="look at the log of that rank; earlier checkpoints are as they were",
                )
            if self._abandoned.wait(_POLL_SECONDS):
                raise CheckpointError(f"checkpoint {self.tag}: given up, as another rank has failed")
        part: Part = json.loads(path.read_text(encoding="utf-8"))
        if "error" in part:
            raise CheckpointError(f"checkpoint {self.tag}: rank {rank}: {part['error']}")
        return part

    def _written(self, rank: int) -> int:
        path = self._file_path(rank)
        for candidate in (path, path.with_name(path.name + ".tmp")):
            with contextlib.suppress(OSError):
                return candidate.stat().st_size
        return 0
