"""What checkpoints of DeepSpeed and of torch.distributed.checkpoint have in common once their names are understood.

Their tensors lie in torch's own files, at the places that a manifest made for them tells; and neither says which class
the optimizer had. Who makes the manifest is `deepspeed_resume.py` and `dcp_import.py`.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from pathlib import Path

from zeroaccel.checkpoint.formats.torch_file import TorchFile
from zeroaccel.checkpoint.manifest import Manifest
from zeroaccel.checkpoint.rank_file import ReadRequest
from zeroaccel.checkpoint.tensor_store import TensorFile, TensorStore

__all__ = ["TorchStore", "optimizer_of_states"]

_TYPES: Sequence[tuple[frozenset[str], str]] = (
    (frozenset({"exp_avg", "exp_avg_sq"}), "AdamW"),
    (frozenset({"exp_avg"}), "Lion"),
    (frozenset({"momentum_buffer"}), "SGD"),
    (frozenset({"sum"}), "Adagrad"),
    (frozenset({"square_avg"}), "RMSprop"),
)


class TorchStore(TensorStore):
    """The tensors of torch's files, by the keys of a manifest.

    Args:
        files: whose numbers the manifest's pieces tell.
    """

    def __init__(self, folder: Path, manifest: Manifest, files: Sequence[TorchFile]) -> None:
        super().__init__(folder, manifest)
        self.torch_files = [_OpenFile(file) for file in files]

    def _open(self, file: int) -> TensorFile:
        return self._files.setdefault(file, self.torch_files[file])


class _OpenFile:
    """A file of torch's as a store, and a copy, read it."""

    def __init__(self, file: TorchFile) -> None:
        self.read_nbytes = 0
        self._file = file

    def read(self, requests: Iterable[ReadRequest]) -> None:
        for request in sorted(requests, key=lambda request: request.offset):
            request.deliver(self._file.read(request.offset, request.nbytes))
            self.read_nbytes += request.nbytes

    def close(self) -> None:
        """Nothing stays open."""


def optimizer_of_states(kinds: Collection[str]) -> str | None:
    """The class of torch.optim whose states have these names; None if there is none."""
    return next((name for needed, name in _TYPES if needed <= set(kinds)), None)
