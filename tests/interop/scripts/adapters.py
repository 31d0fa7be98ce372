"""PEFT's methods beside DDP: each initialises, trains two steps and saves an adapter under DDP and at stages 2 and 3.

    python tests/interop/scripts/adapters.py --work DIR [--only 'lora*,poly'] [--table FILE]

A row is "equal" if stage 3 has the losses, norms and files of stage 2 to the last bit, and DDP within rounding.
All models are tiny, random and made here.
"""

from __future__ import annotations

import argparse
import dataclasses
import sys
import warnings
from collections.abc import Callable, Mapping
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[3]))

from tests.interop.scripts import beside_ddp  # before transformers
from tests.interop.scripts.beside_ddp import VOCAB, Case, Samples, arguments, tokens, train, verdict

# isort: split
import peft
import torch
import transformers
from peft.mapping import PEFT_TYPE_TO_CONFIG_MAPPING

_QV = ["q_proj", "v_proj"]
_SOURCE = Path()


def _config(kind: str, **more: Any) -> Any:
    """Returns a config of a method with small sizes."""
    config = PEFT_TYPE_TO_CONFIG_MAPPING[kind]
    names = {field.name for field in dataclasses.fields(config)}
    settings = {"task_type": "CAUSAL_LM", "target_modules": _QV, "r": 4, "num_virtual_tokens": 4}
    return config(**{key: value for key, value in {**settings, **more}.items() if key in names})


# Arguments without which a method does not fit the tiny model.
_ARGUMENTS: Mapping[str, Mapping[str, Any]] = {
    "ADALORA": {"init_r": 4, "target_r": 2, "total_step": 8, "tinit": 1, "tfinal": 2},
    "ADAPTION_PROMPT": {"adapter_len": 4, "adapter_layers": 1, "target_modules": None},
    "BOFT": {"boft_block_size": 8},
    "C3A": {"block_size": 8, "target_modules": ["q_proj"]},
    "CARTRIDGE": {"num_frozen_tokens": 1},
    "CPT": {"cpt_token_ids": [1, 5, 6, 7], "cpt_mask": [1, 1, 1, 1], "cpt_tokens_type_mask": [1, 2, 3, 4]},
    "FOURIERFT": {"n_frequency": 20},
    "GRALORA": {"gralora_k": 2},
    "IA3": {"target_modules": ["k_proj", "v_proj", "down_proj"], "feedforward_modules": ["down_proj"]},
    "LN_TUNING": {"target_modules": ["input_layernorm", "norm"]},
    "OFT": {"oft_block_size": 8, "r": 0},
    "POLY": {"n_tasks": 1, "n_skills": 2},
    "PROMPT_TUNING": {"prompt_tuning_init": "SAMPLE_VOCAB"},
    "P_TUNING": {"encoder_hidden_size": 16},
    "PVERA": {"target_modules": ["q_proj", "o_proj"]},
    "ROAD": {"group_size": 4},
    "SUPERTUNING": {"sparsity": 0.5},
    "TRAINABLE_TOKENS": {"token_indices": [5, 6, 7], "target_modules": ["embed_tokens"]},
    "VBLORA": {"vector_length": 8, "num_vectors": 16, "topk": 2},
    "VERA": {"target_modules": ["q_proj", "o_proj"]},
    "WAVEFT": {"n_frequency": 20},
}


def _model(kind: str = "causal") -> Any:
    kinds = {
        "causal": transformers.AutoModelForCausalLM,
        "tied": transformers.AutoModelForCausalLM,
        "tasks": transformers.AutoModelForCausalLM,
        "classes": transformers.AutoModelForSequenceClassification,
        "token_classes": transformers.AutoModelForTokenClassification,
        "bert": transformers.AutoModelForSequenceClassification,
        "bert_mlm": transformers.AutoModelForMaskedLM,
    }
    return kinds[kind].from_pretrained(_SOURCE / ("causal" if kind == "tasks" else kind))


def _samples(kind: str) -> Samples:
    def make(generator: torch.Generator) -> dict[str, torch.Tensor]:
        sample = tokens(generator)
        if kind in ("classes", "bert"):
            sample["labels"] = torch.randint(3, (), generator=generator)
        elif kind == "tasks":
            sample["task_ids"] = torch.tensor(0)
        elif kind == "token_classes":
            sample["labels"] = torch.randint(3, (12,), generator=generator)
        return sample

    return Samples(make)


def _run(settings: Any, model: Any, folder: Path, kind: str = "causal") -> dict[str, Any]:
    return train(transformers.Trainer(model=model, args=settings, train_dataset=_samples(kind)), folder)


def _method(make: Callable[[], Any], kind: str = "causal") -> Case:
    def case(mode: str, folder: Path) -> Mapping[str, Any]:
        settings = arguments(mode, folder)
        model = _model(kind)
        torch.manual_seed(7)
        return _run(settings, peft.get_peft_model(model, make()), folder, kind)

    return case


def _lora(**more: Any) -> Callable[[], Any]:
    return lambda: _config("LORA", **more)


def _cases() -> dict[str, Case]:
    cases: dict[str, Case] = {}
    for kind in PEFT_TYPE_TO_CONFIG_MAPPING:
        if kind.value not in ("LORA", "XLORA"):
            model = "tasks" if kind.value in ("POLY", "MULTITASK_PROMPT_TUNING") else "causal"
            cases[kind.value.lower()] = _method(
                lambda kind=kind: _config(kind, **_ARGUMENTS.get(kind.value, {})), model
            )
    for start in (True, False, "gaussian", "olora", "pissa", "pissa_niter_4", "orthogonal", "mica"):
        cases[f"lora init {start}"] = _method(_lora(init_lora_weights=start))
    for name, more in {
        "dora": {"use_dora": True},
        "rslora": {"use_rslora": True},
        "bias all": {"bias": "all"},
        "bias lora_only": {"lora_bias": True},
        "embedding and head": {"target_modules": ["embed_tokens", "q_proj", "lm_head"]},
        "dora embedding": {"target_modules": ["embed_tokens", "q_proj"], "use_dora": True},
        "all-linear": {"target_modules": "all-linear"},
        "modules_to_save": {"modules_to_save": ["embed_tokens", "lm_head"]},
        "modules_to_save norm": {"modules_to_save": ["norm"]},
        "target_parameters": {"target_modules": [], "target_parameters": ["q_proj.weight"]},
        "trainable tokens": {"trainable_token_indices": {"embed_tokens": [5, 6]}},
        "tied weights": {"modules_to_save": ["embed_tokens"], "ensure_weight_tying": True},
        "replicated layers": {"layer_replication": [(0, 1), (0, 2)]},
    }.items():
        cases[f"lora {name}"] = _method(_lora(**more), "tied" if name == "tied weights" else "causal")
    for kind, task in (("classes", "SEQ_CLS"), ("bert", "SEQ_CLS"), ("token_classes", "TOKEN_CLS")):
        modules = ["query", "value"] if kind == "bert" else _QV
        cases[f"lora {kind}"] = _method(_lora(task_type=task, target_modules=modules), kind)
        cases[f"ia3 {kind}"] = _method(
            lambda task=task, modules=modules: _config(
                "IA3", task_type=task, target_modules=modules, feedforward_modules=[]
            ),
            kind,
        )
    cases["prompt_tuning classes"] = _method(
        lambda: _config("PROMPT_TUNING", task_type="SEQ_CLS", **_ARGUMENTS["PROMPT_TUNING"]), "classes"
    )
    cases["prefix projection"] = _method(
        lambda: _config("PREFIX_TUNING", prefix_projection=True, encoder_hidden_size=16)
    )
    cases["lora bert mlm"] = _method(_lora(target_modules=["query", "value"], task_type=None), "bert_mlm")
    cases |= {f"lora {one.__name__.strip('_')}": one for one in (_eva, _corda, _lora_ga, _loftq)}
    cases |= {
        f"lora {one.__name__.strip('_')}": one for one in (_grown, _loaded, _merged, _several, _checkpoint, _weighted)
    }
    cases["xlora"] = _xlora
    return cases


def _eva(mode: str, folder: Path) -> Mapping[str, Any]:
    settings, model = arguments(mode, folder), _model()
    torch.manual_seed(7)
    config = _config("LORA", init_lora_weights="eva", eva_config=peft.EvaConfig(rho=1.0))
    model = peft.get_peft_model(model, config, low_cpu_mem_usage=False)
    batches = torch.utils.data.DataLoader(_samples("causal"), batch_size=4)
    peft.initialize_lora_eva_weights(model, batches, show_progress_bar=False)
    return _run(settings, model, folder)


def _corda(mode: str, folder: Path) -> Mapping[str, Any]:
    from peft.tuners.lora.config import CordaConfig
    from peft.tuners.lora.corda import preprocess_corda

    settings, model = arguments(mode, folder), _model()
    torch.manual_seed(7)
    config = _config("LORA", init_lora_weights="corda", corda_config=CordaConfig(corda_method="kpm"))
    batches = list(torch.utils.data.DataLoader(_samples("causal"), batch_size=1))

    @torch.no_grad()
    def run() -> None:
        for batch in batches:
            model(input_ids=batch["input_ids"])

    preprocess_corda(model, config, run_model=run)
    return _run(settings, peft.get_peft_model(model, config), folder)


def _lora_ga(mode: str, folder: Path) -> Mapping[str, Any]:
    from peft.tuners.lora import LoraGAConfig, preprocess_loraga

    settings, model = arguments(mode, folder), _model()
    torch.manual_seed(7)
    config = _config("LORA", init_lora_weights="lora_ga", lora_ga_config=LoraGAConfig())
    batches = list(torch.utils.data.DataLoader(_samples("causal"), batch_size=4))

    def run() -> None:
        for batch in batches:
            model(**batch).loss.backward()

    preprocess_loraga(model, config, run)
    return _run(settings, peft.get_peft_model(model, config), folder)


def _loftq(mode: str, folder: Path) -> Mapping[str, Any]:
    settings, model = arguments(mode, folder), _model()
    torch.manual_seed(7)
    config = _config("LORA", init_lora_weights="loftq", loftq_config=peft.LoftQConfig(loftq_bits=4))
    return _run(settings, peft.get_peft_model(model, config), folder)


def _grown(mode: str, folder: Path) -> Mapping[str, Any]:
    """More tokens than the base has: PEFT saves embeddings and head."""
    settings, model = arguments(mode, folder), _model()
    torch.manual_seed(7)
    model.resize_token_embeddings(VOCAB + 4, mean_resizing=False)
    config = _config("LORA", target_modules=[*_QV, "embed_tokens", "lm_head"])
    return _run(settings, peft.get_peft_model(model, config), folder)


def _adapter() -> Path:
    return _SOURCE / "adapter"


def _loaded(mode: str, folder: Path) -> Mapping[str, Any]:
    settings, model = arguments(mode, folder), _model()
    return _run(settings, peft.PeftModel.from_pretrained(model, _adapter(), is_trainable=True), folder)


def _merged(mode: str, folder: Path) -> Mapping[str, Any]:
    """Merges an adapter into the base before training, then trains the whole model."""
    settings, model = arguments(mode, folder), _model()
    merged = peft.PeftModel.from_pretrained(model, _adapter()).merge_and_unload()
    return _run(settings, merged.requires_grad_(True), folder)


def _several(mode: str, folder: Path) -> Mapping[str, Any]:
    settings, model = arguments(mode, folder), _model()
    torch.manual_seed(7)
    model = peft.get_peft_model(model, _config("LORA", modules_to_save=["lm_head"]), adapter_name="first")
    model.add_adapter("second", _config("LORA", r=2, modules_to_save=["lm_head"]))
    model.set_adapter("second")
    return _run(settings, model, folder)


def _weighted(mode: str, folder: Path) -> Mapping[str, Any]:
    settings, model = arguments(mode, folder), _model()
    model = peft.PeftModel.from_pretrained(model, _adapter(), adapter_name="one")
    model.load_adapter(_adapter(), adapter_name="two")
    model.add_weighted_adapter(["one", "two"], [0.5, 0.25], "both", combination_type="linear")
    model.set_adapter("both")
    for name, param in model.named_parameters():
        param.requires_grad_(".both." in name)
    return _run(settings, model, folder)


def _checkpoint(mode: str, folder: Path) -> Mapping[str, Any]:
    """Saves a checkpoint, loads the best at the end, and saves again."""
    settings = arguments(mode, folder, save_strategy="steps", save_steps=1, max_steps=2)
    model = _model()
    torch.manual_seed(7)
    model = peft.get_peft_model(model, _config("LORA", modules_to_save=["lm_head"]))
    first = transformers.Trainer(model=model, args=settings, train_dataset=_samples("causal"))
    first.train()
    settings = arguments(mode, folder, max_steps=4)
    model = _model()
    torch.manual_seed(7)
    model = peft.get_peft_model(model, _config("LORA", modules_to_save=["lm_head"]))
    trainer = transformers.Trainer(model=model, args=settings, train_dataset=_samples("causal"))
    trainer.train(resume_from_checkpoint=str(folder / "run" / "checkpoint-2"))
    trainer.save_model(str(folder / "final"))
    return {"losses": [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]}


def _xlora(mode: str, folder: Path) -> Mapping[str, Any]:
    settings, model = arguments(mode, folder), _model()
    torch.manual_seed(7)
    model.config.use_cache = False
    adapters = {"0": str(_adapter()), "1": str(_adapter())}
    config = peft.XLoraConfig(task_type="CAUSAL_LM", hidden_size=32, xlora_depth=1, adapters=adapters)
    return _run(settings, peft.get_peft_model(model, config), folder)


def _write_sources() -> None:
    """Writes the base models and an adapter."""
    sizes: dict[str, Any] = {
        "vocab_size": VOCAB,
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "max_position_embeddings": 64,
        "pad_token_id": 0,
    }
    llama = {**sizes, "num_key_value_heads": 2, "bos_token_id": 1, "eos_token_id": 2}
    torch.manual_seed(0)
    for name, model in {
        "causal": transformers.LlamaForCausalLM(transformers.LlamaConfig(**llama)),
        "tied": transformers.LlamaForCausalLM(transformers.LlamaConfig(**llama, tie_word_embeddings=True)),
        "classes": transformers.LlamaForSequenceClassification(transformers.LlamaConfig(**llama, num_labels=3)),
        "token_classes": transformers.LlamaForTokenClassification(transformers.LlamaConfig(**llama, num_labels=3)),
        "bert": transformers.BertForSequenceClassification(transformers.BertConfig(**sizes, num_labels=3)),
        "bert_mlm": transformers.BertForMaskedLM(transformers.BertConfig(**sizes)),
    }.items():
        model.save_pretrained(_SOURCE / name)
    peft.get_peft_model(_model(), _config("LORA", init_lora_weights=False)).save_pretrained(_adapter())


def main() -> None:
    """Runs the chosen rows and prints the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--work", type=Path, required=True)
    parser.add_argument("--only", default="*")
    parser.add_argument("--table", type=Path)
    options = parser.parse_args()
    global _SOURCE
    _SOURCE = (options.work / "sources").absolute()
    warnings.simplefilter("ignore")
    transformers.logging.set_verbosity_error()
    _write_sources()
    rows = []
    for name, case in _cases().items():
        if any(fnmatch(name, each) for each in options.only.split(",")):
            outcomes = beside_ddp.run(case, name.replace(" ", "_"), options.work.absolute() / "runs")
            rows.append((name, verdict(outcomes)))
            print(*rows[-1], sep=": ", flush=True)
    beside_ddp.table(rows, ("method", "result"), options.table)


if __name__ == "__main__":
    main()
