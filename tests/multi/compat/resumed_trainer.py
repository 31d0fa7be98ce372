"""Trains with transformers' Trainer and `deepspeed=`, and resumes; prints the batches of both runs beside each other.

resumed_trainer.py FOLDER KIND...   each "shuffled", "workers", "stream" or "rebalanced", by transformers' own sampler
"""

from __future__ import annotations

import json
import random
import sys
from collections.abc import Iterator
from functools import partial
from typing import Any

from zeroaccel import compat

compat.install()

import torch  # noqa: E402
from torch.utils.data import Dataset, IterableDataset  # noqa: E402
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments, set_seed  # noqa: E402

COUNT = 44  # 11 batches a rank and epoch on two ranks, so an epoch has half a step of two batches
SAVED = 7  # steps; in the second epoch


def sample(number: int, length: int = 6) -> dict[str, torch.Tensor]:
    ids = torch.full((length,), 3)
    ids[0] = number
    return {"input_ids": ids, "labels": ids}


def length_of(number: int) -> int:
    """Most are short, and a few are long."""
    return 4 + (number % 11) ** 2 // 2


def padded(samples: list[dict[str, torch.Tensor]]) -> dict[str, torch.Tensor]:
    pad = partial(torch.nn.utils.rnn.pad_sequence, batch_first=True)
    return {
        "input_ids": pad([each["input_ids"] for each in samples]),
        "labels": pad([each["labels"] for each in samples], padding_value=-100),
    }


class Numbers(Dataset[Any]):
    def __init__(self, *, is_uneven: bool) -> None:
        self.is_uneven = is_uneven

    def __len__(self) -> int:
        return COUNT

    def __getitem__(self, number: int) -> dict[str, torch.Tensor]:
        return sample(number, length_of(number) if self.is_uneven else 6)


class Stream(IterableDataset[Any]):
    """Reads its order from the number of the epoch; it has no length."""

    epoch = 0

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __iter__(self) -> Iterator[Any]:
        return map(sample, random.Random(self.epoch).sample(range(COUNT), COUNT))


class Noting(Trainer):  # type: ignore[misc]
    """Notes the samples of each batch, with the number of the step."""

    def training_step(self, model: Any, inputs: Any, *args: Any, **kwargs: Any) -> Any:
        ids = inputs["input_ids"]
        self.noted.append((self.state.global_step, ids[:, 0].tolist()))
        return super().training_step(model, inputs, *args, **kwargs)


def trained(kind: str, folder: str, resumed: str | None) -> list[Any]:
    set_seed(7)
    sizes = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2}
    workers = 1 if kind == "workers" else 0
    sampling = {"train_sampling_strategy": "batch_rebalance"} if kind == "rebalanced" else {}
    arguments = TrainingArguments(
        folder,
        per_device_train_batch_size=2,
        gradient_accumulation_steps=2,
        num_train_epochs=3,
        max_steps=15 if kind == "stream" else -1,
        save_steps=SAVED,
        report_to=[],
        dataloader_num_workers=workers,
        use_cpu=True,
        disable_tqdm=True,
        deepspeed={
            "train_micro_batch_size_per_gpu": "auto",
            "gradient_accumulation_steps": "auto",
            "gradient_clipping": 1.0,
            "zero_optimization": {"stage": 2},
        },
        **sampling,
    )
    model = LlamaForCausalLM(LlamaConfig(vocab_size=64, use_cache=False, **sizes))
    data = Stream() if kind == "stream" else Numbers(is_uneven=kind == "rebalanced")
    trainer = Noting(model, arguments, train_dataset=data, data_collator=padded)
    trainer.noted = []
    trainer.train(resume_from_checkpoint=resumed)
    return trainer.noted


def main() -> None:
    folder, *kinds = sys.argv[1:]
    for kind in kinds:
        whole = trained(kind, f"{folder}/{kind}", None)
        again = trained(kind, f"{folder}/{kind} resumed", f"{folder}/{kind}/checkpoint-{SAVED}")
        rest = [row for row in whole if row[0] >= SAVED]
        print(json.dumps([kind, rest == again, rest, again, whole]), flush=True)


if __name__ == "__main__":
    main()
