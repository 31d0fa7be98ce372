"""Writes the inputs that scripts load by name: small models, tokenizers, datasets and metrics, as folders.

The Hugging Face libraries look for a folder of a name before they query the hub, so a script that runs in the working
folder finds `bert-base-cased` there. Everything is generated from a fixed seed; the text consists of short sentences.
"""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import task_inputs

# isort: split
import numpy as np
from datasets import ClassLabel, Dataset, DatasetDict, Features, Value
from PIL import Image
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers
from transformers import (
    AutoModelForCausalLM,
    BertConfig,
    BertForMaskedLM,
    GPT2Config,
    LlamaConfig,
    OPTConfig,
    PreTrainedTokenizerFast,
    T5Config,
    T5ForConditionalGeneration,
    set_seed,
)

_SENTENCE = (
    "the a one every quick old small river garden engine teacher letter window market winter song sees finds "
    "writes carries leaves keeps under over beside without before after slowly well again today never soon"
)
_WORDS = _SENTENCE.split()
_CHAT_TEMPLATE = (
    "{% for message in messages %}{{ '<' + message['role'] + '> ' + message['content'] + eos_token }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<assistant> ' }}{% endif %}"
)
_ANY_TOKENIZER = "PreTrainedTokenizerFast"
_SEQUENCES = "datasets.Sequence(datasets.Value('string'))"
_OVERALL = "{f'overall_{name}': _share_of_equals(predictions, references) for name in "
# Type of the predictions, and of the references if it is another one, and the result.
_METRICS = {
    "accuracy": ("int64", "", "{'accuracy': _share_of_equals(predictions, references)}"),
    "glue": (
        "int64",
        "",
        "{'accuracy': _share_of_equals(predictions, references), 'f1': _f1(predictions, references)}",
    ),
    "rouge": ("string", "", "{'rouge1': _share_of_equals(predictions, references)}"),
    "wer": ("string", "", "1.0 - _share_of_equals(predictions, references)"),
    "sacrebleu": ("string", _SEQUENCES, "{'score': _share_of_equals([[one] for one in predictions], references)}"),
    "seqeval": (_SEQUENCES, "", _OVERALL + "('precision', 'recall', 'f1', 'accuracy')}"),
    "mean_iou": (
        "datasets.Sequence(datasets.Sequence(datasets.Value('int64')))",
        "",
        "{**dict.fromkeys(('mean_iou', 'mean_accuracy', 'overall_accuracy'), 0.0),"
        " **{f'per_category_{name}': np.array([np.mean(np.array(predictions) == np.array(references))] * 3)"
        " for name in ('iou', 'accuracy')}}",
    ),
}
_METRIC = """
import datasets
import evaluate
import numpy as np


def _share_of_equals(predictions, references):
    return sum(a == b for a, b in zip(predictions, references)) / len(references)


def _f1(predictions, references):
    both = sum(a == b == 1 for a, b in zip(predictions, references))
    return 2 * both / max(sum(predictions) + sum(references), 1)


class Made(evaluate.Metric):
    def _info(self):
        return evaluate.MetricInfo(
            description="", citation="", inputs_description="",
            features=datasets.Features({{"predictions": {predictions}, "references": {references}}}),
        )

    def _compute(self, predictions, references, **kwargs):
        return {result}
"""
_SQUAD_METRIC = """
import datasets
import evaluate


class Made(evaluate.Metric):
    def _info(self):
        text = datasets.Value("string")
        return evaluate.MetricInfo(
            description="", citation="", inputs_description="",
            features=datasets.Features({
                "predictions": {"id": text, "prediction_text": text},
                "references": {
                    "id": text,
                    "answers": datasets.Sequence({"text": text, "answer_start": datasets.Value("int32")}),
                },
            }),
        )

    def _compute(self, predictions, references):
        hits = [p["prediction_text"] in r["answers"]["text"] for p, r in zip(predictions, references)]
        return {"exact_match": 100.0 * sum(hits) / len(hits), "f1": 0.0}
"""

# Rewards that differ within a group of completions; TRL's own do not for an untrained model.
_REWARDS = """
def share_of_vowels(completions, **kwargs):
    texts = [completion[0]["content"] for completion in completions]
    return [sum(letter in "aeiou" for letter in text) / max(len(text), 1) for text in texts]
"""


class Sentences:
    """Generated text, the same for the same seed."""

    def __init__(self, seed: int) -> None:
        self._random = random.Random(seed)

    def sentence(self, words: int) -> str:
        return " ".join(self._random.choices(_WORDS, k=words))

    def pair(self) -> dict[str, Any]:
        """Returns two sentences and a label that is 1 if the second one repeats the first."""
        label = self._random.randint(0, 1)
        first = self.sentence(8)
        return {"sentence1": first, "sentence2": first if label else self.sentence(8), "label": label}

    def question(self, number: int) -> dict[str, Any]:
        """Returns a question whose answer is a word of its context."""
        words = self.sentence(24).split()
        place = self._random.randrange(len(words))
        start = len(" ".join(words[:place])) + (place > 0)
        answers = {"text": [words[place]], "answer_start": [start]}
        return {
            "id": str(number),
            "title": "made up",
            "context": " ".join(words),
            "question": self.sentence(6),
            "answers": answers,
        }


def write_inputs(folder: Path) -> None:
    """Writes everything into `folder`, unless it is there already."""
    if (folder / ".complete").exists():
        return
    folder.mkdir(parents=True, exist_ok=True)
    _write_models(folder)
    _write_data(folder)
    _write_pictures(folder / "pictures")
    task_inputs.write_data(folder, Sentences(2), _write_named)
    for name, (kind, references, result) in _METRICS.items():
        predictions = kind if kind.startswith("datasets.") else f"datasets.Value('{kind}')"
        made = _METRIC.format(predictions=predictions, references=references or predictions, result=result)
        _write(folder / name / f"{name}.py", made)
    _write(folder / "squad" / "squad.py", _SQUAD_METRIC)
    _write(folder / "made_rewards.py", _REWARDS)
    for name in ("collocations.tab", "sent_starters.txt", "abbrev_types.txt", "ortho_context.tab"):
        _write(folder / "nltk_data" / "tokenizers" / "punkt_tab" / "english" / name, "")
    (folder / "nltk_data" / "tokenizers" / "punkt").mkdir(parents=True, exist_ok=True)
    (folder / ".complete").touch()


def _write(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)


def _bert_tokenizer() -> PreTrainedTokenizerFast:
    special = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]
    vocabulary = {word: index for index, word in enumerate([*special, *_WORDS])}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer.post_processor = processors.TemplateProcessing(
        single="[CLS] $A [SEP]",
        pair="[CLS] $A [SEP] $B:1 [SEP]:1",
        special_tokens=[("[CLS]", 2), ("[SEP]", 3)],
    )
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        model_max_length=64,
        pad_token="[PAD]",
        unk_token="[UNK]",
        cls_token="[CLS]",
        sep_token="[SEP]",
        mask_token="[MASK]",
    )


def _byte_tokenizer() -> PreTrainedTokenizerFast:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=400,
        special_tokens=["<pad>", "</s>", "<mask>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator([Sentences(0).sentence(400)], trainer)
    made = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        model_max_length=128,
        pad_token="<pad>",
        eos_token="</s>",
        bos_token="</s>",
        unk_token="</s>",
        cls_token="</s>",
        sep_token="</s>",
        mask_token="<mask>",
    )
    made.chat_template = _CHAT_TEMPLATE
    return made


def _write_models(folder: Path) -> None:
    set_seed(0)
    words, pieces = _bert_tokenizer(), _byte_tokenizer()
    size = len(pieces)
    ends: dict[str, Any] = {"pad_token_id": 0, "eos_token_id": 1, "bos_token_id": 1}
    # Without dropout: ranks draw other random numbers if another class wraps the model.
    bert = BertConfig(
        vocab_size=len(words),
        hidden_size=32,
        num_hidden_layers=2,
        num_attention_heads=2,
        intermediate_size=64,
        max_position_embeddings=64,
        hidden_dropout_prob=0.0,
        attention_probs_dropout_prob=0.0,
    )
    gpt2 = GPT2Config(
        vocab_size=size,
        n_positions=128,
        n_embd=32,
        n_layer=2,
        n_head=2,
        resid_pdrop=0.0,
        embd_pdrop=0.0,
        attn_pdrop=0.0,
        bos_token_id=1,
        eos_token_id=1,
    )
    llama = LlamaConfig(
        vocab_size=size,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=2,
        max_position_embeddings=256,
        **ends,
    )
    wide = LlamaConfig(**{**llama.to_dict(), "hidden_size": 128, "intermediate_size": 256, "head_dim": 64})
    opt = OPTConfig(
        vocab_size=size,
        hidden_size=32,
        ffn_dim=64,
        num_hidden_layers=2,
        num_attention_heads=2,
        max_position_embeddings=128,
        word_embed_proj_dim=32,
        dropout=0.0,
        **ends,
    )
    t5 = T5Config(
        vocab_size=size,
        d_model=32,
        d_kv=16,
        d_ff=64,
        num_layers=2,
        num_heads=2,
        dropout_rate=0.0,
        decoder_start_token_id=0,
        pad_token_id=0,
        eos_token_id=1,
    )
    made = {
        "bert-base-cased": (BertForMaskedLM(bert), words),
        "openai-community/gpt2": (AutoModelForCausalLM.from_config(gpt2), pieces),
        "HuggingFaceTB/SmolLM-360M": (AutoModelForCausalLM.from_config(llama), pieces),
        # bitsandbytes quantises rows of at least 64 weights.
        "made/llama": (AutoModelForCausalLM.from_config(wide), pieces),
        "facebook/opt-125m": (AutoModelForCausalLM.from_config(opt), pieces),
        "google-t5/t5-small": (T5ForConditionalGeneration(t5), pieces),
    }
    for name, (model, tokenizer, processor) in {
        **{name: (*pair, None) for name, pair in made.items()},
        **task_inputs.models(words, pieces),
    }.items():
        model.save_pretrained(folder / name)
        if processor is not None:
            processor.save_pretrained(folder / name)
        if name == "facebook/wav2vec2-base":
            task_inputs.cache(folder, name)
        if tokenizer is None:
            continue
        # DeepSpeed-Chat saves a vocabulary, which only the class of OPT's own tokenizer supports.
        kinds = {
            "facebook/opt-125m": "GPT2TokenizerFast",
            "openai/whisper-tiny": "WhisperTokenizer",
            "xlnet-base-cased": "XLNetTokenizer",
        }
        _save_tokenizer(tokenizer, folder / name, kinds.get(name, _ANY_TOKENIZER))
    _save_tokenizer(pieces, folder / "roberta-base")


def _save_tokenizer(tokenizer: PreTrainedTokenizerFast, folder: Path, kind: str = _ANY_TOKENIZER) -> None:
    """Saves it with the class name that transformers 4 also knows: some scripts run only there."""
    tokenizer.save_pretrained(folder)
    path = folder / "tokenizer_config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "tokenizer_class": kind}))


def _write_data(folder: Path) -> None:
    text = Sentences(1)
    features = Features(
        sentence1=Value("string"),
        sentence2=Value("string"),
        label=ClassLabel(names=["not_equivalent", "equivalent"]),
        idx=Value("int32"),
    )
    glue = {
        split: Dataset.from_list([{**text.pair(), "idx": index} for index in range(count)], features=features)
        for split, count in {"train": 144, "validation": 38, "test": 38}.items()
    }
    _write_named(folder / "nyu-mll/glue", "mrpc", glue)
    for split, data in glue.items():
        data.remove_columns("idx").to_csv(folder / f"pairs_{split}.csv")
    lines = {
        split: Dataset.from_dict({"text": [text.sentence(16) for _ in range(count)]})
        for split, count in {"train": 600, "validation": 60, "test": 60}.items()
    }
    for name, version in (("Salesforce/wikitext", "wikitext-2-v1"), ("wikitext", "wikitext-2-v1")):
        _write_named(folder / name, version, lines)
    for split in ("train", "validation"):
        _write(folder / f"lines_{split}.txt", "\n".join(lines[split]["text"]))
        count = 48 if split == "train" else 14
        questions = [text.question(number) for number in range(count)]
        _write(folder / f"questions_{split}.json", json.dumps({"data": questions}))
        summaries = [{"document": text.sentence(30), "summary": text.sentence(5)} for _ in range(count)]
        _write(folder / f"summaries_{split}.json", "\n".join(map(json.dumps, summaries)))
    answers = [
        {
            "prompt": f"Human: {text.sentence(6)} Assistant:",
            "response": good,
            "chosen": good,
            "rejected": text.sentence(8),
        }
        for good in (text.sentence(8) for _ in range(96))
    ]
    rm_static = DatasetDict(
        {split: Dataset.from_list(answers[start::2]) for start, split in enumerate(("train", "test"))}
    )
    rm_static.save_to_disk(folder / "Dahoas/rm-static")
    _write_conversations(folder, text)


def _write_conversations(folder: Path, text: Sentences) -> None:
    def said(role: str, words: int) -> dict[str, str]:
        return {"role": role, "content": text.sentence(words)}

    rows = [
        {"prompt": [said("user", 6)], "chosen": [said("assistant", 8)], "rejected": [said("assistant", 8)]}
        for _ in range(64)
    ]
    messages = [{"messages": row["prompt"] + row["chosen"]} for row in rows]
    prompts = [{"prompt": row["prompt"], "solution": "$1$"} for row in rows]
    for name, made in {
        "trl-lib/Capybara": messages,
        "trl-lib/ultrafeedback_binarized": rows,
        "HuggingFaceH4/Polaris-Dataset-53K": prompts,
    }.items():
        data = Dataset.from_list(made)
        _write_named(folder / name, "default", {"train": data, "test": data.select(range(16))})


def _write_named(folder: Path, config: str, splits: dict[str, Dataset]) -> None:
    """Writes a dataset that `load_dataset(folder, config)` reads."""
    lines = ["---", "configs:", f"- config_name: {config}", "  data_files:"]
    for split, data in splits.items():
        path = folder / config / f"{split}.parquet"
        path.parent.mkdir(parents=True, exist_ok=True)
        data.to_parquet(path)
        lines += [f"  - split: {split}", f"    path: {config}/{split}.parquet"]
    _write(folder / "README.md", "\n".join([*lines, "---", ""]))


def _write_pictures(folder: Path) -> None:
    """Writes pictures named `class_number.jpg`, whose colour encodes their class."""
    folder.mkdir(parents=True, exist_ok=True)
    generator = np.random.default_rng(0)
    for index in range(160):
        kind = index % 4
        pixels = generator.integers(0, 60, size=(40, 40, 3)) + np.array([60 * (kind == c) + 50 for c in range(3)])
        Image.fromarray(pixels.astype(np.uint8)).save(folder / f"kind{kind}_{index}.jpg")
