"""A script with accelerate and one with Trainer that do not mention DeepSpeed: the launcher chooses their engine.

    huggingface_launched.py FOLDER

`test_huggingface.py` runs it on every rank; rank 0 prints the results that the test compares.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import torch
from accelerate import Accelerator
from accelerate.utils import set_seed
from torch import nn
from transformers import Trainer, TrainingArguments

from tests.e2e.huggingface_runs import Samples, forget, llama, outcome, tokens


def by_hand() -> dict[str, object]:
    set_seed(0)
    accelerator = Accelerator(gradient_accumulation_steps=2)
    model = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 0.9**step)
    data = torch.utils.data.TensorDataset(torch.randn(32, 8), torch.randn(32, 1))
    loader = torch.utils.data.DataLoader(data, batch_size=4)
    model, optimizer, loader, scheduler = accelerator.prepare(model, optimizer, loader, scheduler)
    losses = []
    for inputs, targets in loader:
        with accelerator.accumulate(model):
            loss = nn.functional.mse_loss(model(inputs), targets)
            accelerator.backward(loss)
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()
        losses += accelerator.gather(loss.detach()).tolist()
    plugin = accelerator.state.deepspeed_plugin
    return {
        "engine": type(model).__module__,
        "stage": plugin.zero_stage,
        "world": accelerator.num_processes,
        "losses": losses,
    }


def by_trainer(folder: Path) -> dict[str, object]:
    set_seed(0)
    settings = TrainingArguments(
        str(folder),
        per_device_train_batch_size=2,
        gradient_accumulation_steps=2,
        max_steps=3,
        logging_steps=1,
        report_to=[],
        disable_tqdm=True,
        save_strategy="no",
        dataloader_pin_memory=False,
    )
    run = Trainer(model=llama(), args=settings, train_dataset=Samples(16, tokens))
    run.train()
    return {"engine": type(run.model_wrapped).__module__, **outcome(run)}


if __name__ == "__main__":
    first = by_hand()
    forget(keep_environment=True)
    second = by_trainer(Path(sys.argv[1]))
    if torch.distributed.get_rank() == 0:
        print(json.dumps({"by_hand": first, "by_trainer": second}), flush=True)
