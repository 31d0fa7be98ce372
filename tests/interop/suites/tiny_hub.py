"""A Hugging Face cache of tiny random models under the names that other projects' tests load, for use without the hub.

Each model is made from a config of its architecture and, where needed, a tokenizer of the matching kind, trained on a
few sentences. The weights are random, so a test that needs a trained model cannot pass.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

REVISION = "0" * 40
"""Revision in place of the commit hash that the hub uses."""

_SENTENCES = [
    "The quick brown fox jumps over the lazy dog.",
    "A journey of a thousand miles begins with a single step.",
    "To be or not to be, that is the question.",
    "All that glitters is not gold, and not all who wander are lost.",
] * 50

_WIDTHS = {
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "intermediate_size": 64,
}


_METRIC = """
import datasets
import evaluate


class Agreement(evaluate.Metric):
    def _info(self):
        number = datasets.Features({"predictions": datasets.Value("int64"), "references": datasets.Value("int64")})
        return evaluate.MetricInfo(description="", citation="", inputs_description="", features=number)

    def _compute(self, predictions, references):
        pairs = list(zip(predictions, references))
        both = sum(p == r == 1 for p, r in pairs)
        ones = sum(p == 1 for p, _ in pairs) + sum(r == 1 for _, r in pairs)
        return {"accuracy": sum(p == r for p, r in pairs) / len(pairs), "f1": 2 * both / ones if ones else 0.0}
"""


@dataclass(frozen=True)
class TinyModel:
    """One model: its architecture, sizes that differ from the usual ones, head and tokenizer."""

    model_type: str
    sizes: Mapping[str, Any] = field(default_factory=dict)
    head: str = "AutoModelForCausalLM"
    """Auto class that makes the model; "" for a config without a model."""
    tokenizer: bool = False

    def save(self, folder: Path) -> None:
        """Writes config, weights and tokenizer."""
        import torch
        import transformers

        torch.manual_seed(0)
        sizes = {**_WIDTHS, **self.sizes} if self.head else dict(self.sizes)
        tokenizer = self._tokenizer(folder) if self.tokenizer else None
        if tokenizer is not None:
            sizes["vocab_size"] = len(tokenizer)
            names = ("pad_token_id", "bos_token_id", "eos_token_id")
            sizes.update({name: getattr(tokenizer, name) for name in names if getattr(tokenizer, name) is not None})
        config = transformers.AutoConfig.for_model(self.model_type, **sizes)
        if not self.head:
            config.save_pretrained(folder)
            return
        getattr(transformers, self.head).from_config(config).save_pretrained(folder)

    def _tokenizer(self, folder: Path) -> Any:
        from transformers.models.auto.tokenization_auto import TOKENIZER_MAPPING_NAMES, tokenizer_class_from_name

        kind = self.model_type if self.model_type in TOKENIZER_MAPPING_NAMES else "gpt2"  # Llama's is a file of its own
        make: Callable[[], Any] | None = tokenizer_class_from_name(TOKENIZER_MAPPING_NAMES[kind])
        assert make is not None, f"{kind}: transformers has no tokenizer for it"
        tokenizer = make().train_new_from_iterator(_SENTENCES, vocab_size=600)
        tokenizer.model_max_length = 512
        tokenizer.save_pretrained(folder)
        return tokenizer


def make_hub(home: Path, models: Mapping[str, TinyModel]) -> dict[str, str]:
    """Writes the models that `home` lacks; returns the variables with which Hugging Face's libraries read the cache."""
    for name, model in models.items():
        repository = home / "hub" / ("models--" + name.replace("/", "--"))
        snapshot = repository / "snapshots" / REVISION
        if (repository / "refs" / "main").exists():
            continue
        snapshot.mkdir(parents=True, exist_ok=True)
        model.save(snapshot)
        (repository / "refs").mkdir(exist_ok=True)
        (repository / "refs" / "main").write_text(REVISION)  # last: it marks the model as complete
        print(f"made {name}", flush=True)
    _make_sentence_pairs(home)
    return {"HF_HOME": str(home), "HF_HUB_OFFLINE": "1", "HF_DATASETS_OFFLINE": "1"}


def _make_sentence_pairs(home: Path) -> None:
    """Writes pairs of sentences, labelled by equality, and a metric to the cache entries of GLUE's MRPC."""
    import datasets
    from datasets.arrow_writer import ArrowWriter

    folder = home / "datasets" / "nyu-mll___glue" / "mrpc" / "0.0.0" / REVISION
    if (folder / "dataset_info.json").exists():
        return
    folder.mkdir(parents=True, exist_ok=True)
    label = datasets.ClassLabel(names=["not_equivalent", "equivalent"])
    text, number = datasets.Value("string"), datasets.Value("int32")
    features = datasets.Features({"sentence1": text, "sentence2": text, "label": label, "idx": number})
    splits = {}
    for split, rows in (("train", 64), ("validation", 36), ("test", 36)):
        writer = ArrowWriter(path=str(folder / f"glue-{split}.arrow"), features=features)
        for row in range(rows):
            pair = _SENTENCES[row % 4], _SENTENCES[(row + row // 4 % 2) % 4]
            example = {"sentence1": pair[0], "sentence2": pair[1], "label": int(pair[0] == pair[1]), "idx": row}
            writer.write(example)
        _, nbytes = writer.finalize()
        splits[split] = {"name": split, "num_bytes": nbytes, "num_examples": rows, "dataset_name": "glue"}
    metric = home / "modules" / "evaluate_modules" / "metrics" / "evaluate-metric--glue" / ("0" * 64)
    metric.mkdir(parents=True, exist_ok=True)
    (metric / "glue.py").write_text(_METRIC)
    about = {"builder_name": "parquet", "dataset_name": "glue", "config_name": "mrpc", "splits": splits}
    # Last: it marks the data as complete.
    info = datasets.DatasetInfo(features=features)
    info.write_to_directory(str(folder))
    path = folder / "dataset_info.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **about}))
