"""One rank of one contender: builds it, then follows the orders of the driver, one JSON line at a time.

`race.py` starts it and sets the environment. Between two lines it blocks on a pipe, so that a waiting contender takes
no time from the running one.

    {"do": "steps", "count": 5}  ->  {"seconds": [[forward, backward, update], ...], "processor": [...], "loss": ...,
                                       "facts": {...}}
    {"do": "peak"}               ->  {"peak_rss": bytes since the last such order}
"""

from __future__ import annotations

import json
import os
import sys
import time
from pathlib import Path
from typing import Any, TextIO

import torch
from contenders import CONTENDERS, Contender
from models import Decoder, Shape, batches

SEED = 1234


def main() -> None:
    job = json.loads(sys.argv[1])
    answers = _private_stdout()
    torch.set_num_threads(job["threads"])
    shape = Shape(**job["shape"])
    torch.manual_seed(SEED)
    model = Decoder(shape)
    numel = sum(param.numel() for param in model.parameters())
    trainer = Trainer(CONTENDERS[job["contender"]](model), shape)
    _answer(answers, {"numel": numel, "torch": torch.__version__})
    for line in sys.stdin:
        order = json.loads(line)
        _answer(answers, trainer.steps(order["count"]) if order["do"] == "steps" else {"peak_rss": _peak_rss()})
    # The groups' threads may wait for peers that have already ended.
    sys.stderr.flush()
    os._exit(0)


class Trainer:
    """Trains on the batches in turn and times every phase."""

    def __init__(self, contender: Contender, shape: Shape) -> None:
        self.contender = contender
        self.batches = batches(shape, int(os.environ["RANK"]))
        self.taken = 0

    def steps(self, count: int) -> dict[str, Any]:
        """Runs `count` steps; returns their times and the loss of the last one."""
        contender, seconds, processor = self.contender, [], []
        loss = torch.tensor(float("nan"))
        contender.facts()
        for _ in range(count):
            tokens, targets = self.batches[self.taken % len(self.batches)]
            self.taken += 1
            busy = time.process_time()
            start = time.perf_counter()
            loss = contender.forward(tokens, targets)
            forward = time.perf_counter()
            contender.backward(loss)
            backward = time.perf_counter()
            contender.update()
            update = time.perf_counter()
            seconds.append([forward - start, backward - forward, update - backward])
            processor.append(time.process_time() - busy)
        return {"seconds": seconds, "processor": processor, "loss": loss.item(), "facts": contender.facts()}


def _private_stdout() -> TextIO:
    """Returns the pipe to the driver; redirects all other output to the log."""
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    return answers


def _answer(answers: TextIO, fact: dict[str, Any]) -> None:
    answers.write(json.dumps(fact) + "\n")
    answers.flush()


def _peak_rss() -> int:
    """Returns the kernel's high-water mark of this process, and resets it to the current size."""
    status = Path("/proc/self/status").read_text()
    kilobytes = next(line.split()[1] for line in status.splitlines() if line.startswith("VmHWM"))
    Path("/proc/self/clear_refs").write_text("5")
    return int(kilobytes) * 1024


if __name__ == "__main__":
    main()
