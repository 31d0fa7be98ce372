"""Unchanged programs of Hugging Face users; `test_huggingface.py` runs them on every rank, with the facade installed.

    huggingface_runs.py FOLDER SCENARIO:STAGE,... ...

Rank 0 prints one JSON line per scenario and stage with its losses and a digest of the final weights; stage "ddp"
is the same program without a DeepSpeed config. Models are tiny and made from configs; nothing is downloaded. Only the
code between the runs is not a user's: libraries keep one state per process, and `forget` clears it.
"""

from __future__ import annotations

import gc
import hashlib
import json
import os
import sys
import threading
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import datasets
import deepspeed  # type: ignore[import-not-found]
import torch
import transformers
from accelerate import Accelerator
from accelerate.state import AcceleratorState, PartialState
from accelerate.utils import DeepSpeedPlugin
from safetensors.torch import load_file
from torch.utils.data import DataLoader, Dataset
from transformers import Trainer, TrainingArguments, set_seed

import zeroaccel.comm.topology
from zeroaccel.compat import deepspeed_engine

transformers.logging.set_verbosity_error()
transformers.logging.disable_progress_bar()
datasets.disable_progress_bars()

VOCABULARY = 96


class Samples(Dataset[dict[str, torch.Tensor]]):
    """Dataset of `count` samples that `make` draws from one generator."""

    def __init__(self, count: int, make: Callable[[torch.Generator], dict[str, torch.Tensor]]) -> None:
        generator = torch.Generator().manual_seed(count)
        self._items = [make(generator) for _ in range(count)]

    def __len__(self) -> int:
        return len(self._items)

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        return self._items[index]


def tokens(generator: torch.Generator) -> dict[str, torch.Tensor]:
    ids = torch.randint(5, VOCABULARY, (12,), generator=generator)
    return {"input_ids": ids, "labels": ids.clone(), "attention_mask": torch.ones_like(ids)}


SIZES = {
    "vocab_size": VOCABULARY,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "max_position_embeddings": 64,
}


def llama(**more: Any) -> Any:
    special = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
    config = transformers.LlamaConfig(**SIZES, num_key_value_heads=2, **special, **more)
    return transformers.AutoModelForCausalLM.from_config(config)


def written(folder: Path, make: Callable[[], Any] = llama) -> Callable[[], Any]:
    """Saves a model first, before a config exists, so that all stages start equally; returns a call that loads it."""
    model = make()
    source = folder.with_name(f"{folder.name}-source")
    if torch.distributed.get_rank() == 0:
        model.save_pretrained(source)
    torch.distributed.barrier()
    return lambda: type(model).from_pretrained(source)


def config(stage: str, **sections: Any) -> dict[str, Any] | None:
    """Returns a config with every value "auto", as in the libraries' guides."""
    if stage == "ddp":
        return None
    zero: dict[str, Any] = {"stage": int(stage), "reduce_bucket_size": "auto"}
    if stage == "3":
        zero["stage3_prefetch_bucket_size"] = "auto"
        zero["stage3_param_persistence_threshold"] = 16
        zero["stage3_gather_16bit_weights_on_model_save"] = True
    autos = ("train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps", "gradient_clipping")
    precision = {"bf16": {"enabled": "auto"}, "fp16": {"enabled": "auto"}}
    return {**dict.fromkeys(autos, "auto"), **precision, "zero_optimization": zero, **sections}


OPTIMIZER = {"type": "AdamW", "params": dict.fromkeys(("lr", "betas", "eps", "weight_decay"), "auto")}
SCHEDULER = {
    "type": "WarmupDecayLR",
    "params": dict.fromkeys(("warmup_min_lr", "warmup_max_lr", "warmup_num_steps", "total_num_steps"), "auto"),
}


def arguments(folder: Path, deepspeed: Mapping[str, Any] | None, kind: Any = TrainingArguments, **more: Any) -> Any:
    settings = {
        "per_device_train_batch_size": 2,
        "gradient_accumulation_steps": 2,
        "max_steps": 4,
        "learning_rate": 2e-3,
        "logging_steps": 1,
        "save_strategy": "no",
        "report_to": [],
        "disable_tqdm": True,
        "seed": 3,
        "bf16": False,
        "dataloader_pin_memory": False,
    }
    if deepspeed is None:
        settings["use_cpu"] = True
    return kind(str(folder), deepspeed=deepspeed, **{**settings, **more})


def outcome(trainer: Any, **more: Any) -> dict[str, Any]:
    """Returns the losses by step, and on rank 0 a digest of the saved weights, loaded with plain `from_pretrained`."""
    losses = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
    folder = Path(trainer.args.output_dir) / "final"
    trainer.save_model(str(folder))
    result = {"losses": losses, **more}
    if trainer.args.process_index == 0:
        forget()  # so that the load is plain
        result["weights"] = adapter_digest(folder) or model_digest(
            folder, type(trainer.accelerator.unwrap_model(trainer.model))
        )
    return result


def trained(model: Any, settings: Any, sample: Any = tokens) -> dict[str, Any]:
    """Trains with a Trainer and returns the outcome."""
    run = Trainer(model=model, args=settings, train_dataset=Samples(32, sample))
    run.train()
    return outcome(run)


def adapter_digest(folder: Path) -> str:
    adapter = folder / "adapter_model.safetensors"
    return hashlib.sha256(adapter.read_bytes()).hexdigest() if adapter.exists() else ""


def model_digest(folder: Path, kind: Any) -> str:
    model, report = kind.from_pretrained(folder, output_loading_info=True)
    assert not any(report[what] for what in ("missing_keys", "unexpected_keys", "mismatched_keys")), report
    return state_digest(model.state_dict())


def state_digest(state: Mapping[str, torch.Tensor]) -> str:
    digest = hashlib.sha256()
    for name, value in sorted(state.items()):
        digest.update(name.encode() + value.contiguous().view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()


def trainer(stage: str, folder: Path) -> dict[str, Any]:
    """Trainer, with optimizer and scheduler in the config, evaluation, checkpoints, prediction and saving."""
    model = written(folder)
    sections = {"optimizer": OPTIMIZER, "scheduler": SCHEDULER}
    settings = arguments(
        folder,
        config(stage, **sections),
        gradient_checkpointing=True,
        eval_strategy="steps",
        eval_steps=2,
        save_strategy="steps",
        save_steps=2,
        load_best_model_at_end=True,
        warmup_steps=1,
        lr_scheduler_type="linear",
    )
    run = Trainer(model=model(), args=settings, train_dataset=Samples(32, tokens), eval_dataset=Samples(4, tokens))
    run.train()
    evaluated = [entry["eval_loss"] for entry in run.state.log_history if "eval_loss" in entry]
    predicted = run.predict(Samples(4, tokens)).metrics["test_loss"]
    return outcome(run, evaluated=evaluated, predicted=predicted)


def resumed(stage: str, folder: Path) -> dict[str, Any]:
    """The second half of `trainer`, from its checkpoint."""
    sections = {"optimizer": OPTIMIZER, "scheduler": SCHEDULER}
    settings = arguments(
        folder, config(stage, **sections), gradient_checkpointing=True, warmup_steps=1, lr_scheduler_type="linear"
    )
    run = Trainer(model=llama(), args=settings, train_dataset=Samples(32, tokens))
    run.train(resume_from_checkpoint=str(folder.with_name(folder.name.replace("resumed", "trainer")) / "checkpoint-2"))
    return outcome(run)


def own_optimizer(stage: str, folder: Path) -> dict[str, Any]:
    """Trainer's own AdamW and cosine schedule, in bf16."""
    model = written(folder)
    settings = arguments(folder, config(stage), bf16=True, use_cpu=True, lr_scheduler_type="cosine")
    return trained(model(), settings)


def offloaded(stage: str, folder: Path) -> dict[str, Any]:
    """Stage 3 with all state on the host or on disk and the config's optimizer; the results must not change."""
    model = written(folder)
    zero = config(stage, optimizer=OPTIMIZER)
    if zero is not None and stage == "3":
        files = folder.with_name(f"{folder.name}-files")
        files.mkdir(parents=True, exist_ok=True)
        zero["zero_optimization"]["offload_optimizer"] = {"device": "nvme", "nvme_path": str(files)}
        zero["zero_optimization"]["offload_param"] = {"device": "cpu", "pin_memory": True}
    return trained(model(), arguments(folder, zero))


def lora(stage: str, folder: Path) -> dict[str, Any]:
    """PEFT: adapters over a frozen base, with gradient checkpointing; saves the adapter and loads it again."""
    from peft import LoraConfig, get_peft_model

    base = written(folder)
    settings = arguments(
        folder, config(stage), gradient_checkpointing=True, gradient_checkpointing_kwargs={"use_reentrant": False}
    )
    torch.manual_seed(0)
    model = get_peft_model(base(), LoraConfig(r=4, target_modules=["q_proj", "v_proj"], task_type="CAUSAL_LM"))
    model.enable_input_require_grads()
    return trained(model, settings)


def tokenizer() -> Any:
    """Makes a tokenizer of the words w0 ... w89 and five special tokens."""
    from tokenizers import Tokenizer, models, pre_tokenizers

    special = ["<pad>", "<s>", "</s>", "<unk>", "<sep>"]
    words = {word: index for index, word in enumerate([*special, *(f"w{n}" for n in range(VOCABULARY - 5))])}
    made = Tokenizer(models.WordLevel(words, unk_token="<unk>"))
    made.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return transformers.PreTrainedTokenizerFast(
        tokenizer_object=made, pad_token="<pad>", bos_token="<s>", eos_token="</s>", unk_token="<unk>"
    )


def texts(count: int, seed: int) -> list[str]:
    generator = torch.Generator().manual_seed(seed)
    return [" ".join(f"w{n}" for n in torch.randint(0, 90, (8,), generator=generator).tolist()) for _ in range(count)]


def sft(stage: str, folder: Path) -> dict[str, Any]:
    """TRL's SFTTrainer."""
    from trl import SFTConfig, SFTTrainer

    model = written(folder)
    settings = arguments(folder, config(stage), SFTConfig, max_length=16, gradient_checkpointing=False)
    data = datasets.Dataset.from_dict({"text": texts(32, 1)})
    run = SFTTrainer(model=model(), args=settings, train_dataset=data, processing_class=tokenizer())
    run.train()
    return outcome(run)


def dpo(stage: str, folder: Path) -> dict[str, Any]:
    """TRL's DPOTrainer, with a reference model that only runs forward."""
    from trl import DPOConfig, DPOTrainer

    model = written(folder)
    settings = arguments(folder, config(stage), DPOConfig, max_length=24, gradient_checkpointing=False)
    data = datasets.Dataset.from_dict({"prompt": texts(32, 1), "chosen": texts(32, 2), "rejected": texts(32, 3)})
    run = DPOTrainer(model=model(), ref_model=model(), args=settings, train_dataset=data, processing_class=tokenizer())
    run.train()
    return outcome(run)


def again(stage: str, folder: Path) -> dict[str, Any]:
    """A second training of one Trainer, after an evaluation, continues with weights and optimizer states."""
    model = written(folder)
    settings = arguments(folder, config(stage))
    run = Trainer(model=model(), args=settings, train_dataset=Samples(32, tokens), eval_dataset=Samples(4, tokens))
    run.train()
    first = run.evaluate()["eval_loss"]
    run.train()
    assert run.evaluate()["eval_loss"] != first
    return outcome(run)


def gradients(stage: str, folder: Path) -> dict[str, Any]:
    """A callback reads each gradient before the optimizer's step, clipped by Trainer with DDP, unclipped otherwise."""
    from deepspeed.utils import safe_get_full_grad

    read: list[list[float]] = []

    class Reader(transformers.TrainerCallback):  # type: ignore[misc]
        def on_pre_optimizer_step(self, *args: Any, model: Any, **kwargs: Any) -> None:
            found = [param.grad if stage == "ddp" else safe_get_full_grad(param) for param in model.parameters()]
            norms = torch.stack([gradient.norm() for gradient in found])
            read.append([norms.norm().item(), *(norms / norms.norm()).tolist()])

    model = written(folder)
    settings = arguments(folder, config(stage), max_grad_norm=0.5)
    run = Trainer(model=model(), args=settings, train_dataset=Samples(32, tokens), callbacks=[Reader()])
    run.train()
    logged = [float(entry["grad_norm"]) for entry in run.state.log_history if "grad_norm" in entry]
    return outcome(run, read=read, grad_norms=logged)


def live_nbytes() -> int:
    tensors = (each for each in gc.get_objects() if issubclass(type(each), torch.Tensor))
    return sum({each.untyped_storage().data_ptr(): each.untyped_storage().nbytes() for each in tensors}.values())


def searched(stage: str, folder: Path) -> dict[str, Any]:
    """A search over learning rates, in which rank 0 alone frees model and engine after each trial, as with optuna.

    `left` has the number of engines, the bytes of all tensors and the number of threads after each trial.
    """
    from accelerate.utils.memory import release_memory

    model = written(folder)
    run = Trainer(model_init=model, args=arguments(folder, config(stage)), train_dataset=Samples(32, tokens))
    left = []
    for rate in (1e-3, 1.5e-3, 2e-3):
        run.args.learning_rate = rate
        run.optimizer = run.lr_scheduler = None
        run.train()
        gc.collect()
        left.append((len(deepspeed_engine._ENGINES), live_nbytes(), threading.active_count()))
        if rate < 2e-3 and run.args.process_index == 0:
            run.model_wrapped, run.model = release_memory(run.model_wrapped, run.model)
            run.accelerator.clear()
    return outcome(run, left=left)


def vision(stage: str, folder: Path) -> dict[str, Any]:
    """An image classifier."""
    settings = transformers.ViTConfig(
        hidden_size=32, num_hidden_layers=2, num_attention_heads=4, intermediate_size=48, image_size=16, patch_size=8
    )
    settings.num_labels = 4

    def image(generator: torch.Generator) -> dict[str, torch.Tensor]:
        return {
            "pixel_values": torch.randn(3, 16, 16, generator=generator),
            "labels": torch.randint(0, 4, (), generator=generator),
        }

    return plain(stage, folder, lambda: transformers.ViTForImageClassification(settings), image)


def encoder_decoder(stage: str, folder: Path) -> dict[str, Any]:
    """T5: tied embeddings, relative positions, two stacks."""
    settings = transformers.T5Config(
        vocab_size=VOCABULARY, d_model=32, d_kv=8, d_ff=48, num_layers=2, num_heads=4, decoder_start_token_id=0
    )
    return plain(stage, folder, lambda: transformers.T5ForConditionalGeneration(settings), tokens)


def masked(stage: str, folder: Path) -> dict[str, Any]:
    """BERT from files, whose old versions named LayerNorm's parameters gamma and beta: it is saved under its own."""
    bert = transformers.BertConfig(**SIZES, hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0)
    load = written(folder, lambda: transformers.BertForMaskedLM(bert))
    settings = arguments(folder, config(stage))
    result = trained(load(), settings)
    if "weights" in result:  # on rank 0, which writes the files
        result["names"] = sorted(files_in(folder / "final"))
    return result


def experts(stage: str, folder: Path) -> dict[str, Any]:
    """A mixture of experts of which each rank uses different ones."""
    settings = transformers.MixtralConfig(**SIZES, num_key_value_heads=2, num_local_experts=4)
    return plain(stage, folder, lambda: transformers.MixtralForCausalLM(settings), tokens)


def multimodal(stage: str, folder: Path) -> dict[str, Any]:
    """LLaVA: the hidden size is in a nested config, and there are two towers."""
    text = transformers.LlamaConfig(**SIZES)
    sight = transformers.CLIPVisionConfig(
        hidden_size=16, intermediate_size=32, num_hidden_layers=2, num_attention_heads=2, image_size=8, patch_size=4
    )
    settings = transformers.LlavaConfig(vision_config=sight, text_config=text, image_token_index=4)

    def both(generator: torch.Generator) -> dict[str, torch.Tensor]:
        sample = tokens(generator)
        sample["input_ids"][:4] = 4  # one per patch
        return {**sample, "pixel_values": torch.randn(3, 8, 8, generator=generator)}

    return plain(stage, folder, lambda: transformers.LlavaForConditionalGeneration(settings), both)


def plain(stage: str, folder: Path, make: Callable[[], Any], sample: Any) -> dict[str, Any]:
    """Loads a model by its class, and trains it with Trainer's own optimizer."""
    model = written(folder, make)
    settings = arguments(folder, config(stage), max_steps=3, gradient_accumulation_steps=1)
    return trained(model(), settings, sample)


def generation(stage: str, folder: Path) -> dict[str, Any]:
    """New tokens, a resized embedding, training, then `generate` with ranks that stop at different times."""
    source = written(folder)
    settings = arguments(folder, config(stage), max_steps=2, gradient_accumulation_steps=1)
    model = source()
    model.resize_token_embeddings(VOCABULARY + 8, mean_resizing=False)
    run = Trainer(
        model=model,
        args=settings,
        train_dataset=Samples(32, tokens),
    )
    run.train()
    rank = run.args.process_index
    prompt = torch.arange(6, 10)[None] + 3 * rank
    text = run.model.generate(prompt, max_new_tokens=4 + 3 * rank, do_sample=False, eos_token_id=None, pad_token_id=0)
    return outcome(run, written=text.tolist())


def plugins(stage: str, folder: Path) -> dict[str, Any]:
    """accelerate with two plugins: a student that trains, and a teacher at the other stage that only runs forward."""
    student, teacher = llama(), llama()
    if stage == "ddp":
        accelerator = Accelerator(cpu=True)
    else:
        stages = {"student": int(stage), "teacher": 5 - int(stage)}
        accelerator = Accelerator(
            deepspeed_plugins={
                name: DeepSpeedPlugin(
                    {
                        "train_micro_batch_size_per_gpu": 2,
                        "gradient_clipping": 0.0,
                        "zero_optimization": {"stage": its_stage, "stage3_param_persistence_threshold": 0},
                    }
                )
                for name, its_stage in stages.items()
            }
        )
    optimizer = torch.optim.AdamW(student.parameters(), lr=2e-3)
    loader = DataLoader(Samples(16, tokens), batch_size=2)
    student, optimizer, loader = accelerator.prepare(student, optimizer, loader)
    if stage == "ddp":
        teacher = accelerator.prepare_model(teacher, evaluation_mode=True)
    else:
        accelerator.state.select_deepspeed_plugin("teacher")
        teacher = accelerator.prepare(teacher)
        accelerator.state.select_deepspeed_plugin("student")
        assert [student.zero_optimization_stage(), teacher.zero_optimization_stage()] == list(stages.values())
    losses = []
    for batch in loader:
        with torch.no_grad():
            wanted = teacher(**batch).logits
        loss = torch.nn.functional.mse_loss(student(**batch).logits, wanted)
        accelerator.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
        losses += accelerator.gather(loss.detach()[None]).tolist()
    model = accelerator.unwrap_model(student)
    with deepspeed.zero.GatheredParameters(model.parameters()):  # accelerate's call goes by the plugin prepared last
        weights = state_digest(model.state_dict())
    accelerator.free_memory()
    return {"losses": losses, "weights": weights}


def saves(stage: str, folder: Path) -> dict[str, Any]:
    """Saves a model with tied weights in each way that accelerate scripts use, and checks the files."""
    model = llama(tie_word_embeddings=True)
    wanted = state_digest({name: value for name, value in model.state_dict().items() if name != TIED})
    accelerator = Accelerator(
        deepspeed_plugin=DeepSpeedPlugin(
            {
                "train_micro_batch_size_per_gpu": 2,
                "gradient_clipping": 0.0,
                "gradient_accumulation_steps": 1,
                "zero_optimization": {"stage": int(stage), "stage3_param_persistence_threshold": 0},
            },
            zero3_init_flag=False,
        )
    )
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    model, optimizer = accelerator.prepare(model, optimizer)
    inner, main = accelerator.unwrap_model(model), accelerator.is_main_process
    found = {}

    def check(way: str) -> None:
        accelerator.wait_for_everyone()
        if main:
            found[way] = state_digest(files_in(folder / way)) == wanted

    inner.save_pretrained(
        folder / "documented",
        is_main_process=main,
        save_function=accelerator.save,
        state_dict=accelerator.get_state_dict(model),
    )
    check("documented")
    inner.save_pretrained(folder / "no_state_dict", is_main_process=main, save_function=accelerator.save)
    check("no_state_dict")
    inner.save_pretrained(folder / "in_parts", is_main_process=main, max_shard_size="20KB")
    check("in_parts")
    state = accelerator.get_state_dict(model)
    if main:  # like a Trainer's _save that ignores the state dict
        inner.save_pretrained(folder / "main_process_only")
        assert len(list((folder / "in_parts").glob("*.safetensors"))) > 2
    check("main_process_only")
    shapes = {name: value.shape for name, value in state.items()}
    assert shapes == {name: param.shape for name, param in inner.named_parameters(remove_duplicate=False)}
    assert main or stage != "3" or {value.device.type for value in state.values()} == {"meta"}
    del state
    if stage == "3":  # at other stages every rank has the weights, and all would write the same file
        inner.save_pretrained(folder / "plainly")
        check("plainly")
    accelerator.free_memory()
    return {"found": found}


TIED = "lm_head.weight"


def files_in(folder: Path) -> dict[str, torch.Tensor]:
    """Returns all tensors of a saved model; asserts that each is in one file only."""
    found: dict[str, torch.Tensor] = {}
    for path in folder.glob("*.safetensors"):
        tensors = load_file(path)
        assert not found.keys() & tensors.keys()
        found |= tensors
    return found


def evaluated(stage: str, folder: Path) -> dict[str, Any]:
    """Runs evaluate and predict with a config for training, then trains; compares with training alone."""
    sections = {"optimizer": OPTIMIZER, "scheduler": SCHEDULER}
    losses = []
    source = written(folder)
    for first in (True, False):
        settings = arguments(folder, config(stage, **sections), max_steps=4, warmup_steps=1, lr_scheduler_type="linear")
        run = Trainer(model=source(), args=settings, train_dataset=Samples(32, tokens), eval_dataset=Samples(8, tokens))
        before = None
        if first:
            before = run.evaluate()["eval_loss"]
            assert before == run.predict(Samples(8, tokens)).metrics["test_loss"]
        run.train()
        losses.append([entry["loss"] for entry in run.state.log_history if "loss" in entry])
        losses[-1].append(run.evaluate()["eval_loss"])
        assert losses[-1][-1] != before
        run.accelerator.free_memory()
        forget()
    return {"trained": losses}


SCENARIOS = {
    found.__name__: found
    for found in (
        trainer,
        resumed,
        own_optimizer,
        offloaded,
        lora,
        sft,
        dpo,
        again,
        gradients,
        searched,
        vision,
        encoder_decoder,
        masked,
        experts,
        multimodal,
        generation,
        plugins,
        saves,
        evaluated,
    )
}


def forget(*, keep_environment: bool = False) -> None:
    """Clears the state that accelerate and transformers keep per process, by default with environment variables."""
    AcceleratorState._reset_state(reset_partial_state=True)
    PartialState._reset_state()
    transformers.integrations.deepspeed.unset_hf_deepspeed_config()
    gc.collect()
    if not keep_environment:
        os.environ.pop("ACCELERATE_USE_DEEPSPEED", None)
        os.environ.pop("ACCELERATE_MIXED_PRECISION", None)


def main(folder: str, *wanted: str) -> None:
    zeroaccel.comm.topology.init_process_group()
    gc.freeze()  # Garbage collection of the libraries' objects, three times in each run, took most of the time
    for scenario in wanted:
        name, _, stages = scenario.partition(":")
        for stage in stages.split(","):
            forget()
            set_seed(0)
            result = SCENARIOS[name](stage, Path(folder) / f"{name}-{stage}")
            if torch.distributed.get_rank() == 0:
                print(json.dumps({"scenario": name, "stage": stage, **result}), flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
