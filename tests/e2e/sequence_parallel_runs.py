"""Programs of Hugging Face users with sequences split over ranks; run by `test_sequence_parallel_libraries.py`.

    sequence_parallel_runs.py FOLDER

On one process the same programs train on whole sequences, without a DeepSpeed config. Rank 0 prints the losses.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator
from accelerate.utils import DeepSpeedPlugin, ParallelismConfig
from accelerate.utils.dataclasses import DeepSpeedSequenceParallelConfig
from torch.utils.data import DataLoader
from transformers import Trainer, TrainingArguments, set_seed

from tests.e2e.huggingface_runs import Samples, forget, llama, tokens

RANKS = int(os.environ.get("WORLD_SIZE", "1"))
STAGE_3 = {
    "train_micro_batch_size_per_gpu": "auto",
    "train_batch_size": "auto",
    "gradient_accumulation_steps": "auto",
    "gradient_clipping": "auto",
    "zero_optimization": {"stage": 3},
}


def mesh() -> ParallelismConfig | None:
    if RANKS == 1:
        return None
    attention = DeepSpeedSequenceParallelConfig(sp_seq_length_is_variable=True, sp_attn_implementation="sdpa")
    return ParallelismConfig(sp_backend="deepspeed", sp_size=RANKS, sp_handler=attention)


def data() -> Samples:
    def sample(generator: torch.Generator) -> dict[str, torch.Tensor]:
        made = tokens(generator)
        # The Trainer numbers positions per rank, so that they would start at 0 on each rank.
        made["position_ids"] = torch.arange(len(made["input_ids"]))
        made["labels"][:4] = -100
        return made

    return Samples(16, sample)


def by_trainer(folder: Path) -> list[float]:
    set_seed(0)
    model = llama(attn_implementation="sdpa")  # made before a config exists, which would shard it during construction
    more: dict[str, Any] = {} if RANKS == 1 else {"deepspeed": STAGE_3, "parallelism_config": mesh()}
    settings = TrainingArguments(
        str(folder),
        per_device_train_batch_size=2,
        max_steps=6,
        learning_rate=1e-2,
        logging_steps=1,
        report_to=[],
        disable_tqdm=True,
        save_strategy="no",
        train_sampling_strategy="sequential",
        use_cpu=True,
        **more,
    )
    trainer = Trainer(model, settings, train_dataset=data())
    trainer.train()
    return [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]


def by_hand() -> list[float]:
    set_seed(0)
    plugin = None if RANKS == 1 else DeepSpeedPlugin(zero_stage=2, gradient_clipping=1.0)
    accelerator = Accelerator(deepspeed_plugin=plugin)  # with the mesh of the launch
    model = llama(attn_implementation="sdpa")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    model, optimizer, loader = accelerator.prepare(model, optimizer, DataLoader(data(), batch_size=2))
    losses = []
    for batch in loader:
        labels = batch.pop("shift_labels", batch.pop("labels", None))
        names = ("labels", "shift_labels") if RANKS > 1 else ("labels",)
        loss = model(**batch, **dict.fromkeys(names, labels)).loss
        if RANKS > 1:
            from deepspeed.utils import groups

            group = groups._get_sequence_parallel_group()
            counts = torch.stack([*torch.distributed.nn.functional.all_gather((labels != -100).sum(), group=group)])
            parts = torch.stack([*torch.distributed.nn.functional.all_gather(loss, group=group)])
            loss = (torch.where(counts > 0, parts, 0.0) * counts).sum() / counts.sum()
        accelerator.backward(loss)
        if RANKS == 1:
            accelerator.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


if __name__ == "__main__":
    outcome = {"trainer": by_trainer(Path(sys.argv[1]))}
    forget()
    outcome["by hand"] = by_hand()
    if os.environ.get("RANK", "0") == "0":
        print(json.dumps(outcome), flush=True)
