"""Trainers that are preempted repeatedly under `enable_jit_checkpoint`; run on every rank, with the facade installed.

    preempted_trainer.py FOLDER STAGE COUNT SEED

A run of ten steps is repeated until COUNT attempts have ended early: a random rank sends itself SIGTERM at a random
place of a random step, and the next attempt resumes from the newest checkpoint. With COUNT 0 there is one attempt that
ends early, and the program ends with it. Rank 0 prints a line of JSON: the numbers of runs and preemptions, and the
number of runs whose final weights differ from those of an uninterrupted run.
"""

from __future__ import annotations

import json
import os
import random
import shutil
import signal
import sys
from pathlib import Path
from typing import Any

import torch
from transformers import Trainer, TrainerCallback, TrainingArguments
from transformers.trainer_utils import get_last_checkpoint

import zeroaccel.comm.topology
from tests.e2e.huggingface_runs import Samples, arguments, config, forget, llama, set_seed, state_digest, tokens

STEPS = 10
PLACES = ("on_step_begin", "on_substep_end", "on_pre_optimizer_step", "on_step_end")


class Preemption(TrainerCallback):  # type: ignore[misc]
    """Sends SIGTERM to one rank at one place."""

    def __init__(self, step: int, place: str, rank: int) -> None:
        self._step = step
        if rank == torch.distributed.get_rank():
            setattr(self, place, self._send)

    def _send(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        if state.global_step == self._step:
            os.kill(os.getpid(), signal.SIGTERM)


def life(folder: Path, stage: str, preemption: Preemption | None) -> tuple[int, str]:
    """Runs one attempt; returns the step that it reached and a digest of the weights."""
    forget()
    set_seed(0)
    settings: TrainingArguments = arguments(
        folder, config(stage), max_steps=STEPS, enable_jit_checkpoint=True, save_only_model=False
    )
    callbacks = [] if preemption is None else [preemption]
    run = Trainer(
        model=llama(attention_dropout=0.2), args=settings, train_dataset=Samples(24, tokens), callbacks=callbacks
    )
    run.train(resume_from_checkpoint=get_last_checkpoint(str(folder)) if folder.exists() else None)
    engine = run.model_wrapped
    with engine.gathered():
        digest = state_digest({name: value.detach() for name, value in run.model.state_dict().items()})
    engine.destroy()
    return run.state.global_step, digest


def main(folder: str, stage: str, count: str, seed: str) -> None:
    zeroaccel.comm.topology.init_process_group()
    root, draw = Path(folder) / f"stage{stage}", random.Random(int(seed))
    if count == "0":
        life(root / "once", stage, Preemption(3, "on_step_end", 1))
        return
    _, whole = life(root / "whole", stage, None)
    runs = preemptions = wrong = 0
    while preemptions < int(count):
        step, digest, target = 0, "", root / str(runs)
        while step < STEPS:
            when = draw.randrange(step, STEPS)
            before = step
            step, digest = life(target, stage, Preemption(when, draw.choice(PLACES), draw.randrange(2)))
            preemptions += step < STEPS
            assert step > before, f"no progress from step {before}"
        runs, wrong = runs + 1, wrong + (digest != whole)
        torch.distributed.barrier()
        if torch.distributed.get_rank() == 0:
            shutil.rmtree(target, ignore_errors=True)
    if torch.distributed.get_rank() == 0:
        print(json.dumps({"stage": stage, "runs": runs, "preemptions": preemptions, "wrong": wrong}), flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
