"""Kills jobs in the middle of a save and checks what can be resumed. A program: `checkpoint_kills.py DIR TRIALS`.

The jobs are forked from this process, which has imported torch but never used it, so that starting one takes a fraction
of a second. Each job trains and saves after every step, and reports each completed save through a pipe. SIGKILL comes
at a random moment (to one rank or to all), or right before the k-th call that changes the disk. A separate process
resumes with tag="auto" and must find exactly the weights of a step that the job had saved or was saving.
"""

from __future__ import annotations

import hashlib
import json
import os
import random
import shutil
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from tests.support.checkpoint_runs import make_engine, train
from tests.support.environment import free_port, rank_environment
from tests.support.training import batches
from zeroaccel.logs import set_log_level
from zeroaccel.ops.elementwise import Adam
from zeroaccel.ops.reductions import sum_ranks

STEPS = 40
CALLS = ("write", "fsync", "replace", "unlink", "mkdir")


def warm_up() -> None:
    """Imports and compiles, before the first fork, everything that each child needs for an optimizer step."""
    weights = torch.nn.Parameter(torch.zeros(64))
    weights.grad = torch.ones(64)
    Adam([weights]).step()
    sum_ranks(torch.zeros(32), torch.ones(2, 32), 0.5)


def digest(engine: Any) -> str:
    """Returns a digest of all weights; requires one rank, or a stage at which weights are not sharded."""
    text = hashlib.sha256()
    for param in engine.module.parameters():
        text.update(param.detach().numpy().tobytes())
    return text.hexdigest()


def job(root: Path, told: int, *, background: bool, keep_last: int | None, kill_at: int | None) -> None:
    """Trains and saves until it is killed; writes the step as a line to `told` after each completed save."""
    engine = make_engine(1, checkpoint={"async_save": background, "keep_last": keep_last})
    os.write(told, b"0\n")
    if kill_at is not None:
        die_at(kill_at)
    for step, batch in enumerate(batches(0, STEPS), start=1):
        train(engine, [batch])
        engine.save_checkpoint(root, tag=f"even{step % 3}" if keep_last is None else None)
        os.write(told, f"{step - background}\n".encode())


def die_at(count: int) -> None:
    """Sends SIGKILL to this process right before its `count`-th call that changes the disk."""
    left = [count]

    def counted(call: Callable[..., Any]) -> Callable[..., Any]:
        def counting(*args: Any, **kwargs: Any) -> Any:
            left[0] -= 1
            if left[0] == 0:
                os.kill(os.getpid(), signal.SIGKILL)
            return call(*args, **kwargs)

        return counting

    for name in CALLS:
        setattr(os, name, counted(getattr(os, name)))


def fork(rank: int, world_size: int, port: int, body: Callable[[], None]) -> int:
    """Forks a child that runs `body` as a rank; returns its pid."""
    child = os.fork()
    if child:
        return child
    try:
        os.environ.update(rank_environment(rank, world_size, port))
        body()
        os._exit(0)
    except BaseException as error:
        print(f"rank {rank}: {type(error).__name__}: {error}", file=sys.stderr, flush=True)
        os._exit(1)


def in_child(body: Callable[[], Any]) -> Any:
    """Runs `body` in a forked process and returns its result."""
    reading, writing = os.pipe()
    child = fork(0, 1, free_port(), lambda: _send(writing, body()))
    os.close(writing)
    with os.fdopen(reading) as answers:
        text = answers.read()
    os.waitpid(child, 0)
    return json.loads(text) if text else None


def _send(writing: int, value: Any) -> None:
    os.write(writing, json.dumps(value).encode())


def reference() -> list[str]:
    """Returns the digest of the weights before training and after each step of an uninterrupted job."""
    engine = make_engine(1)
    found = [digest(engine)]
    for batch in batches(0, STEPS):
        train(engine, [batch])
        found.append(digest(engine))
    return found


def resumed(root: Path) -> list[Any]:
    """Resumes from the newest valid checkpoint; returns (global step, digest)."""
    set_log_level("ERROR")
    engine = make_engine(3)
    engine.load_checkpoint(root, tag="auto")
    return [engine.global_steps, digest(engine)]


def trial(root: Path, chance: random.Random, kind: str, kill_at: int | None) -> tuple[int, list[Any] | None]:
    """Runs and kills one job; returns (last step known to be saved, resumed step and digest)."""
    world_size = 1 if kind == "alone" or kill_at is not None else 2
    options = {"background": chance.random() < 0.3, "keep_last": chance.choice([None, None, 2])}
    if kill_at is not None:
        options = {"background": False, "keep_last": 2 if kill_at % 2 else None}
    port = free_port()
    reading, writing = os.pipe()
    children = []
    for rank in range(world_size):
        told = writing if rank == 0 else os.open(os.devnull, os.O_WRONLY)
        children.append(
            fork(rank, world_size, port, lambda told=told: job(root, told, kill_at=kill_at, **options))  # type: ignore[misc]
        )
    os.close(writing)
    with os.fdopen(reading, "rb") as pipe:
        heard = pipe.readline()
        if kill_at is None:
            time.sleep(chance.uniform(0.0, 0.3))
            victims = [chance.choice(children)] if kind == "one" else children
            for child in victims:
                os.kill(child, signal.SIGKILL)
            if kind == "one":
                time.sleep(0.1)  # the other rank goes on as far as it can
                for child in children:
                    os.kill(child, signal.SIGKILL)
        heard += pipe.read()
    for child in children:
        os.waitpid(child, 0)
    steps = [int(line) for line in heard.split()]
    return max(steps), in_child(lambda: resumed(root))


def main(folder: str, trials: str) -> None:
    """Prints the results as JSON; `wrong` lists every trial that resumed a wrong state, or none."""
    chance = random.Random(20)
    warm_up()
    expected = in_child(reference)
    wrong, interrupted, kinds = [], 0, {"alone": 0, "one": 0, "all": 0, "call": 0}
    plans = [(("alone", "one", "all")[index % 3], None) for index in range(int(trials))]
    plans += [("call", count) for count in range(1, 31, 3)]
    for index, (kind, kill_at) in enumerate(plans):
        root = Path(folder, str(index))
        saved, found = trial(root, chance, kind, kill_at)
        kinds[kind] += 1
        if root.exists():
            interrupted += any(path.suffix == ".tmp" for path in root.rglob("*")) or any(
                not (path / "manifest.json").exists() for path in root.iterdir() if path.is_dir()
            )
        if saved == 0 and found is not None and found[0] == 0:
            continue  # killed before the first save was complete: nothing to resume
        if found is None or not saved <= found[0] <= saved + 2 or found[1] != expected[found[0]]:
            wrong.append([index, kind, kill_at, saved, found and found[0]])
        shutil.rmtree(root, ignore_errors=True)
    print(json.dumps({"kinds": kinds, "interrupted": interrupted, "wrong": wrong}))


if __name__ == "__main__":
    main(*sys.argv[1:])
