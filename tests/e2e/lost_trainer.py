"""A script of transformers' Trainer whose ranks are lost: `zeroaccel launch --max_restarts N` runs it on each rank.

    lost_trainer.py FOLDER STAGE INTERVAL [FAULT,...]

A fault is STEP:RANK; the Nth attempt loses the rank of the Nth fault by SIGKILL, after the logs of that step. With
INTERVAL "off" there are no states in memory. Rank 0 writes `result.json`: a digest of the final weights, the losses
of all steps, the number of evaluations, and the steps at which the attempts began.
"""

from __future__ import annotations

import json
import os
import signal
import sys
from pathlib import Path
from typing import Any

from transformers import Trainer, TrainerCallback, TrainingArguments, set_seed

from tests.e2e.huggingface_runs import Samples, arguments, config, llama, state_digest, tokens


class Fault(TrainerCallback):  # type: ignore[misc]
    """Kills this process after a step, and records the step at which the attempt began."""

    def __init__(self, folder: Path, step: int) -> None:
        self._folder, self._step = folder, step

    def on_train_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        if state.is_world_process_zero:
            with open(self._folder / "begins", "a") as file:
                file.write(f"{state.global_step} ")

    def on_step_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        if state.global_step == self._step:
            os.kill(os.getpid(), signal.SIGKILL)


def main(folder: str, stage: str, interval: str, faults: str = "") -> None:
    root, attempt = Path(folder), int(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0"))
    peer = {} if interval == "off" else {"checkpoint": {"peer": {"interval": int(interval)}}}
    step, rank = ([*faults.split(","), *["-1:0"] * (attempt + 1)][attempt] or "-1:0").split(":")
    # 24 samples of 2 ranks with 2 x 2 each: epochs of 3 steps.
    settings: TrainingArguments = arguments(
        root / "out", config(stage, **peer), max_steps=11, eval_strategy="epoch", max_grad_norm=1.0
    )
    set_seed(0)
    run = Trainer(
        model=llama(attention_dropout=0.2),
        args=settings,
        train_dataset=Samples(24, tokens),
        eval_dataset=Samples(8, tokens),
        callbacks=[Fault(root, int(step) if settings.process_index == int(rank) else -1)],
    )
    run.train()
    engine = run.model_wrapped
    with engine.gathered():
        digest = state_digest({name: value.detach() for name, value in run.model.state_dict().items()})
    if settings.process_index == 0:
        history = run.state.log_history
        losses = {entry["step"]: entry["loss"] for entry in history if "loss" in entry}
        evaluations = [entry["eval_loss"] for entry in history if "eval_loss" in entry]
        begins = (root / "begins").read_text().split()
        result = {"digest": digest, "losses": losses, "evaluations": evaluations, "begins": begins}
        (root / "result.json").write_text(json.dumps(result))


if __name__ == "__main__":
    main(*sys.argv[1:])
