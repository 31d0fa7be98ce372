"""`torchcodec.decoders`: reads WAV files of 16 bits and one channel at their own rate."""

from __future__ import annotations

import io
import wave
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from torch import Tensor


@dataclass(frozen=True)
class Samples:
    """All samples of a sound, as float32 of channels x time, with their rate in Hz."""

    data: Tensor
    sample_rate: int


class AudioDecoder:
    """Decodes a file or its bytes; the arguments are torchcodec's."""

    def __init__(self, source: str | Path | bytes | Any, *, sample_rate: int | None = None, **_: Any) -> None:
        opened = io.BytesIO(source) if isinstance(source, bytes) else source
        with wave.open(str(opened) if isinstance(opened, Path) else opened) as file:
            rate = file.getframerate()
            values = np.frombuffer(file.readframes(file.getnframes()), dtype="<i2")
        assert sample_rate in (None, rate), f"the generated sounds have {rate} Hz, not {sample_rate}"
        self.metadata = SimpleNamespace(path=None)
        self._samples = Samples(torch.from_numpy(values.astype(np.float32) / 32768)[None], rate)

    def get_all_samples(self) -> Samples:
        return self._samples

    def get_samples_played_in_range(self, start: float, stop: float) -> Samples:
        return self._samples


class VideoDecoder:
    """Is only a name that datasets compares with."""
