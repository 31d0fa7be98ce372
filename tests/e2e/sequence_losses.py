"""Programs of users whose sequences ranks may share; run by `test_sequence_losses.py`, on one process or as ranks.

    sequence_losses.py FOLDER PROGRAM:MODEL:BATCH:ACCUMULATION ...

One process without the launcher trains on whole sequences, without a DeepSpeed config. Rank 0 prints one JSON line per
case with the losses and gradient norms of its steps.
"""

from __future__ import annotations

import gc
import json
import os
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import datasets
import torch
import transformers
from accelerate import Accelerator
from accelerate.state import AcceleratorState, PartialState
from torch.utils.data import DataLoader
from transformers import Trainer, TrainingArguments, set_seed
from trl import SFTConfig, SFTTrainer

from tests.support.recurrent_models import VOCAB, recurrent_model

RANKS = int(os.environ.get("WORLD_SIZE", "1"))
GROUPS = max(1, RANKS // int(os.environ.get("PARALLELISM_CONFIG_SP_SIZE", RANKS)))  # each trains other samples
STEPS, BATCH, LENGTH = 2, 2, 32
AUTO = ("train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps", "gradient_clipping")
CONFIG = {**dict.fromkeys(AUTO, "auto"), "zero_optimization": {"stage": 3}}
transformers.logging.set_verbosity_error()
datasets.disable_progress_bars()


def made(name: str) -> Any:
    if name != "llama":
        return recurrent_model(name)
    set_seed(0)
    sizes = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4}
    return transformers.LlamaForCausalLM(
        transformers.LlamaConfig(vocab_size=VOCAB, num_key_value_heads=2, use_cache=False, **sizes)
    )


def samples(kind: str, count: int) -> list[dict[str, torch.Tensor]]:
    """Sequences with another number of labels each; "padded" and "packed" as their names say."""
    generator = torch.Generator().manual_seed(3)
    made = []
    for number in range(count):
        ids = torch.randint(3, VOCAB, (LENGTH,), generator=generator)
        labels = ids.clone()
        labels[: 3 * number % 11] = -100  # a prompt
        sample = {"input_ids": ids, "labels": labels}
        if kind == "padded":  # the second half of some batches has no token
            mask = torch.arange(LENGTH) < (14 - number % 3 if number // BATCH % 2 else LENGTH - number % 5)
            sample |= {"attention_mask": mask.long(), "labels": labels.masked_fill(~mask, -100)}
        elif kind == "packed":
            sample["position_ids"] = torch.cat([torch.arange(7 + number % 4), torch.arange(25 - number % 4)])
        else:
            sample["attention_mask"] = torch.ones_like(ids)
        made.append(sample)
    return made


def settings(kind: Any, folder: Path, accumulation: int, **more: Any) -> Any:
    return kind(
        str(folder),
        per_device_train_batch_size=BATCH,
        gradient_accumulation_steps=accumulation // GROUPS,
        max_steps=STEPS,
        logging_steps=1,
        learning_rate=1e-2,
        max_grad_norm=1.0,
        optim="sgd",
        save_strategy="no",
        report_to=[],
        disable_tqdm=True,
        train_sampling_strategy="sequential",
        dataloader_pin_memory=False,
        bf16=False,
        use_cpu=True,
        deepspeed=CONFIG if RANKS > 1 else None,
        **more,
    )


def logged(trainer: Any) -> list[list[float]]:
    trainer.train()
    return [[entry["loss"], float(entry["grad_norm"])] for entry in trainer.state.log_history if "loss" in entry]


def by_trainer(folder: Path, model: Any, kind: str, accumulation: int) -> list[list[float]]:
    arguments = settings(TrainingArguments, folder, accumulation)
    return logged(Trainer(model, arguments, train_dataset=samples(kind, STEPS * accumulation * BATCH)))


def by_sft(folder: Path, model: Any, kind: str, accumulation: int) -> list[list[float]]:
    """TRL pads and masks by itself; its trainer takes lists of tokens."""
    generator = torch.Generator().manual_seed(5)
    rows = [
        torch.randint(3, VOCAB, (LENGTH - 3 * number % 20,), generator=generator).tolist()
        for number in range(STEPS * accumulation * BATCH)
    ]
    data = datasets.Dataset.from_dict(
        {"input_ids": rows, "completion_mask": [[int(place > 4) for place in range(len(row))] for row in rows]}
    )
    more: dict[str, Any] = {"pad_to_multiple_of": 8}
    if kind == "packed":
        more |= {"packing": True, "max_length": LENGTH}
    arguments = settings(SFTConfig, folder, accumulation, gradient_checkpointing=False, **more)
    return logged(SFTTrainer(model, arguments, train_dataset=data, processing_class=tokenizer()))


def tokenizer() -> Any:
    from tokenizers import Tokenizer, models

    made = Tokenizer(models.WordLevel({"<pad>": 0, "<s>": 1, "</s>": 2}, unk_token="<pad>"))
    return transformers.PreTrainedTokenizerFast(
        tokenizer_object=made, pad_token="<pad>", bos_token="<s>", eos_token="</s>"
    )


def by_loop(folder: Path, model: Any, kind: str, accumulation: int) -> list[list[float]]:
    """accelerate's loop, with the loss of sequences that its guide about sequence parallelism prints."""
    from accelerate.utils import DeepSpeedPlugin

    plugin = DeepSpeedPlugin(hf_ds_config={**CONFIG, "gradient_clipping": 1.0}) if RANKS > 1 else None
    accelerator = Accelerator(deepspeed_plugin=plugin, gradient_accumulation_steps=accumulation)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-2)
    loader = DataLoader(samples(kind, STEPS * accumulation * BATCH), batch_size=BATCH)  # type: ignore[arg-type]
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    steps, losses = [], []
    for batch in loader:
        with accelerator.accumulate(model):
            loss = _loss_of(model, batch)
            accelerator.backward(loss)
            losses.append(loss.item())
            if accelerator.sync_gradients:
                norm = accelerator.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
        if accelerator.sync_gradients:
            steps.append([sum(losses) / len(losses), float(norm)])
            losses.clear()
    return steps


def _loss_of(model: Any, batch: dict[str, Any]) -> torch.Tensor:
    if RANKS == 1:
        loss: torch.Tensor = model(**batch).loss
        return loss
    from deepspeed.utils import groups

    labels = batch["shift_labels"]
    loss, group = model(**batch, labels=labels).loss, groups._get_sequence_parallel_group()
    gathered = torch.distributed.nn.functional.all_gather
    counts = torch.stack([*gathered((labels != -100).sum(), group=group)])
    parts = torch.stack([*gathered(loss, group=group)])
    return (torch.where(counts > 0, parts, 0.0) * counts).sum() / counts.sum().clamp(min=1)


PROGRAMS = {"trainer": by_trainer, "sft": by_sft, "loop": by_loop}


def main(folder: str, cases: Iterable[str]) -> None:
    for case in cases:
        program, model, kind, accumulation = case.split(":")
        AcceleratorState._reset_state(reset_partial_state=True)
        PartialState._reset_state()
        transformers.integrations.deepspeed.unset_hf_deepspeed_config()
        os.environ.pop("ACCELERATE_USE_DEEPSPEED", None)  # Trainer sets it
        gc.collect()
        steps = PROGRAMS[program](Path(folder), made(model), kind, int(accumulation))
        if os.environ.get("RANK", "0") == "0":
            print(json.dumps({"case": case, "steps": steps}), flush=True)


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2:])
