"""Time of a checkpoint of many gigabytes, and its memory in addition to the engine's own.

    python benchmarks/checkpoint_large.py FOLDER [--billions 1.5] [--ranks 2] [--loads 3]

An engine that is built in parts (`zero.Init`, stage 3, fp32) and has taken no step yet: its shards are the masters, and
all it has. So the checkpoint is as large as the engine, and what saving and loading take in addition is seen. The sum
of all weights' bits must be the same after loading on another number of ranks. Memory as of `checkpoint.py`.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

from checkpoint import COPY, private_nbytes, start, timed, watched

WIDTH = 2048
BLOCK_NUMEL = 2 * 4 * WIDTH * WIDTH + 5 * WIDTH


def main() -> None:
    """Runs everything and prints JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--billions", type=float, default=1.5, help="parameters of the model")
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--loads", type=int, default=3, help="ranks that load it")
    parser.add_argument("--rank-does", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.rank_does:
        print(json.dumps(as_rank(options)))
        return
    folder, out = options.folder, options.folder / "out"
    folder.mkdir(parents=True, exist_ok=True)
    words = [str(folder), "--billions", str(options.billions), "--rank-does"]
    saved = start([sys.executable, __file__, *words, "save"], options.ranks)
    print(json.dumps({"save": saved}, indent=2), flush=True)
    loaded = start([sys.executable, __file__, *words, "load"], options.loads)
    if loaded["bits"] != saved["bits"]:
        raise SystemExit("the weights that were loaded are not those that were saved")
    print(json.dumps({"load": loaded}, indent=2), flush=True)
    convert_seconds, convert_peak = watched([sys.executable, str(folder / "zero_to_fp32.py"), str(folder), str(out)])
    files = sorted(out.glob("*.safetensors"))
    copies = [watched([sys.executable, "-c", COPY, str(file), str(folder / "copy")])[0] for file in files]
    converted = {
        "seconds": convert_seconds,
        "peak_nbytes": convert_peak,
        "files": [file.stat().st_size for file in files],
        "copy_seconds": sum(copies),
    }
    print(json.dumps({"convert": converted, "load_average": os.getloadavg()[0]}, indent=2))
    shutil.rmtree(folder)


def as_rank(options: argparse.Namespace) -> dict[str, Any]:
    """One rank's part of a task; what it took the worst rank."""
    import torch
    from torch import nn

    import zeroaccel
    from zeroaccel import zero

    saves = options.rank_does == "save"
    torch.manual_seed(0 if saves else 1)
    config = {
        "train_micro_batch_size_per_gpu": 1,
        "zero_optimization": {"stage": 3, "stage3_param_persistence_threshold": 0},
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-5}},
    }
    with zero.Init(dtype=torch.float32):
        count = round(options.billions * 1e9 / BLOCK_NUMEL)
        blocks = [nn.Sequential(nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)) for _ in range(count)]
    engine, *_ = zeroaccel.initialize(nn.Sequential(*blocks), config=config)
    before = private_nbytes(os.getpid())
    call: Callable[[], object] = (
        (lambda: engine.save_checkpoint(options.folder)) if saves else (lambda: engine.load_checkpoint(options.folder))
    )
    with Peak() as peak:
        seconds = timed(engine, call)
    bits = sum(int(value.view(torch.int32).sum(dtype=torch.int64)) for _, value in engine.iter_named_full_params())
    found = {"seconds": seconds, "engine_nbytes": before, "extra_nbytes": peak.nbytes - before}
    everyone = engine.collectives.gather_objects(found, "what it took")
    worst = {key: max(rank[key] for rank in everyone) for key in found}
    file = max((path.stat().st_size for path in options.folder.glob("*/rank*")), default=0)
    share = {} if engine.loaded is None else {"read_share": engine.loaded.read_nbytes / engine.loaded.requested_nbytes}
    return {**worst, **share, "largest_file_nbytes": file, "bits": bits}


class Peak:
    """The most private memory of this process while a block runs, looked at every 20 ms."""

    def __init__(self) -> None:
        self.nbytes = 0
        self._done = threading.Event()
        self._thread = threading.Thread(target=self._watch)

    def __enter__(self) -> Peak:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._done.set()
        self._thread.join()

    def _watch(self) -> None:
        while True:
            self.nbytes = max(self.nbytes, private_nbytes(os.getpid()))
            if self._done.wait(0.02):
                return


if __name__ == "__main__":
    main()
