"""Checkpoints to convert, whoever wrote them: ours, or DeepSpeed's put in the same form.

`zero_to_fp32.py` stands alone and knows only our own; `consolidate.py` and the command line open theirs here. No torch.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from zeroaccel.checkpoint.formats.deepspeed_files import is_deepspeed_checkpoint
from zeroaccel.checkpoint.formats.deepspeed_format import open_deepspeed_checkpoint
from zeroaccel.checkpoint.formats.torch_file import TorchFile
from zeroaccel.checkpoint.zero_to_fp32 import ConversionError, Source, Weight, read_source
from zeroaccel.errors import CheckpointError

__all__ = ["deepspeed_source", "open_source"]


def open_source(checkpoint_dir: str | os.PathLike[str], tag: str | None = None) -> Source:
    """The checkpoint of a tag, or the one `latest` names.

    Raises:
        ConversionError: there is none, or it is damaged, incomplete, or of a kind that cannot be read.
    """
    if is_deepspeed_checkpoint(Path(checkpoint_dir), tag):
        return deepspeed_source(checkpoint_dir, tag)
    return read_source(checkpoint_dir, tag)


def deepspeed_source(checkpoint_dir: str | os.PathLike[str], tag: str | None = None) -> Source:
    """A checkpoint of DeepSpeed's. ConversionError as `open_source`."""
    try:
        opened = open_deepspeed_checkpoint(Path(checkpoint_dir), tag)
    except CheckpointError as error:
        raise ConversionError(str(error)) from error
    return Source(
        tag=opened.tag,
        stage=opened.stage,
        world_size=opened.world_size,
        fingerprint=opened.fingerprint,
        weights=tuple(
            Weight(
                weight.fqn,
                weight.dtype,
                weight.shape,
                opened.tensors[weight.key].pieces,
                is_buffer=weight.is_buffer,
                excludable=not weight.trainable and not weight.is_buffer,
            )
            for weight in opened.weights()
        ),
        ties={alias: name for alias, name in opened.ties.items() if opened.weight_key(name) is not None},
        files=tuple(_File(file) for file in opened.files),
        left_out=tuple(opened.left_out),
    )


@dataclass(frozen=True)
class _File:
    file: TorchFile

    def read(self, start: int, nbytes: int) -> NDArray[np.uint8]:
        try:
            return self.file.read(start, nbytes)
        except CheckpointError as error:
            raise ConversionError(str(error)) from error
