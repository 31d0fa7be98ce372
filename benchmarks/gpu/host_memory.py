"""Host memory of a machine that gets more as programs use it, as some virtual machines do.

    python benchmarks/gpu/host_memory.py BYTES   # prints how much the machine has for one program

The free memory at the start then says little, and a program that takes it at once is killed before more arrives. So
another process writes memory step by step, waits for more, and ends; the killer of the system takes that process first.
"""

from __future__ import annotations

import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path

sys.path[:0] = [str(Path(__file__).resolve().parents[2])]

from zeroaccel.offload import free_nbytes  # noqa: E402

__all__ = ["grown_nbytes"]

_STEP_NBYTES = 1 << 30
_SPARE_NBYTES = 1 << 30  # stays free, for the rest of the machine
_PATIENCE_SECONDS = 3.0


def grown_nbytes(nbytes: int) -> int:
    """Returns the free host memory, after a machine that gives memory on demand had the chance to give `nbytes`."""
    if (free := free_nbytes()) >= nbytes:
        return free
    command = [sys.executable, __file__, str(nbytes)]
    printed = subprocess.run(command, capture_output=True, text=True, check=False).stdout.split()
    return max(int(printed[-1]) if printed else 0, free_nbytes())


def _grow(nbytes: int) -> None:
    import torch

    with suppress(OSError):
        Path("/proc/self/oom_score_adj").write_text("1000")
    taken: list[torch.Tensor] = []
    waited = 0.0
    while (total := sum(each.numel() for each in taken) + free_nbytes()) < nbytes and waited < _PATIENCE_SECONDS:
        print(total, flush=True)
        if (step := min(_STEP_NBYTES, free_nbytes() - _SPARE_NBYTES)) > 0:
            taken.append(torch.ones(step, dtype=torch.uint8))
            waited = 0.0
        else:
            time.sleep(0.1)
            waited += 0.1
    print(total)


if __name__ == "__main__":
    _grow(int(sys.argv[1]))
