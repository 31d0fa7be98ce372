"""Small models of transformers' classes, and inputs for them, from one script for all.

`classes` lists them by head, `build` makes a model of a class from its default config with every size reduced by the
name of its field, and `batches` gives the inputs that its forward takes. There is no code for single classes; one that
cannot be made this way raises `NotBuilt` with the reason.
"""

from __future__ import annotations

import copy
import inspect
import math
import random
import re
from collections.abc import Iterator
from typing import Any

import numpy
import torch
import transformers
from torch import Tensor, nn
from transformers.models.auto import configuration_auto, modeling_auto

VOCABULARY, WIDTH, LENGTH, IMAGE = 128, 32, 12, 32
LARGEST = 5_000_000  # parameters

HEADS = {
    "causal LM": "MODEL_FOR_CAUSAL_LM",
    "masked LM": "MODEL_FOR_MASKED_LM",
    "seq2seq": "MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM",
    "image classification": "MODEL_FOR_IMAGE_CLASSIFICATION",
    "sequence classification": "MODEL_FOR_SEQUENCE_CLASSIFICATION",
    "CTC": "MODEL_FOR_CTC",
    "audio classification": "MODEL_FOR_AUDIO_CLASSIFICATION",
    "speech seq2seq": "MODEL_FOR_SPEECH_SEQ_2_SEQ",
    "image and text": "MODEL_FOR_ZERO_SHOT_IMAGE_CLASSIFICATION",
    "image-text to text": "MODEL_FOR_IMAGE_TEXT_TO_TEXT",
}


class NotBuilt(Exception):
    """Raised for a class that this script cannot shrink, or that does not train in plain torch."""


def classes() -> list[tuple[str, str, str]]:
    """Returns (head, model type, class name) of every class, each class once."""
    found = {}
    for head, mapping in HEADS.items():
        for kind, names in getattr(modeling_auto, f"{mapping}_MAPPING_NAMES").items():
            for name in [names] if isinstance(names, str) else names:
                found.setdefault(name, (head, kind, name))
    return list(found.values())


# -- configs


def _at_most(limit: int) -> Any:
    return lambda value, index: min(value, limit)


# Limits of sizes by the name of the field; the first match counts. Lists are reduced element by element.
SIZES: list[tuple[str, Any]] = [
    (r"vocab|num_embeddings", _at_most(VOCABULARY)),
    (r"(experts_per_to|top_?k|moe_k|n_group|topk_group|shared_experts)", _at_most(2)),
    (r"expert.*(size|dim)|moe.*(size|dim)", _at_most(WIDTH)),
    (r"experts?$|expert_num", _at_most(4)),
    (r"(key_value|kv|query_group).*(heads|num)$|num_kv|n_head_kv|multi_query_group_num", _at_most(2)),
    (r"mamba.*heads|ssm.*heads|linear_num.*heads", _at_most(4)),
    (r"(n|num)_?(attention_)?heads?$|heads$|n_head$", lambda value, index: 4 if value >= 4 else 2),
    (r"head_(dim|size)$|kv_channels|^d_kv$|rope_dim|rotary_dim|rope_head|nope_head|attention_dim", _at_most(8)),
    (r"layers?$|layer_num$|^depth$|depths$|num_blocks|blocks$|layer_count|encoder_depth|num_stages", _at_most(2)),
    (r"rank", _at_most(8)),
    (r"^(image|input|crop|img)_(size|resolution)$|image_size|^img_size$", _at_most(IMAGE)),
    (r"patch_size$|tubelet", _at_most(8)),
    (r"num_channels|in_chans|in_channels|input_channels|frames|mel_bins|temporal", lambda value, index: value),
    (r"intermediate|ffn|mlp.*(dim|size)|inner|d_ff|feed_?forward|linear_units", _at_most(2 * WIDTH)),
    (r"window", _at_most(4)),
    (r"chunk|block_size|local_attn|num_query|num_latents|state_size|d_state", _at_most(8)),
    (r"(hidden|embed|embedding|d_|proj|projection|output|model|out|n_|z_|word|text|vision)_?(size|dim|embd)s?$", None),
    (r"hidden|d_model|n_embd|^dim$|_dim$|^dims?$|_dims$|channels$|width|planes|embed|n_state|d_", None),
    (r"max_.*(position|length|len|size)|n_positions|n_ctx|seq_len", lambda value, index: min(value, 128)),
]


def _width(value: int, index: int) -> int:
    return min(value, WIDTH)


def _size(name: str, value: int, index: int) -> int:
    if value <= 1:
        return value
    for pattern, cut in SIZES:
        if re.search(pattern, name):
            return (cut or _width)(value, index)
    return value


# Settings of `generate`, which configs of transformers 4 have: a save refuses them without the settings that they need.
_GENERATION = getattr(transformers.PretrainedConfig, "_get_global_generation_defaults", dict)()


class _Shrinking:
    """Reduces the fields of one config and its sub-configs; token ids stay distinct and inside the vocabulary."""

    def __init__(self) -> None:
        self._ids: dict[int, int] = {}

    def config(self, fields: dict[str, Any]) -> dict[str, Any]:
        fields = {str(name): value for name, value in fields.items()}
        layers = {v for k, v in fields.items() if isinstance(v, int) and re.search(r"layers?$|^depth$", k) and v > 2}
        return {name: self._field(name, value, layers) for name, value in fields.items()}

    def _field(self, name: str, value: Any, layers: set[int]) -> Any:
        if isinstance(value, bool) or value is None or name in ("id2label", "label2id", "dtype", "torch_dtype"):
            return value
        if name in _GENERATION:
            return value
        if name == "per_layer_config":
            return {index: each for index, each in value.items() if int(index) < 2}
        if isinstance(value, dict):
            if name.startswith("rope"):
                return {**value, **({"mrope_section": [1, 1, 2]} if "mrope_section" in value else {})}
            return self.config(value)
        if isinstance(value, (list, tuple)):
            if len(value) in layers and len(value) > 2:
                first = value[0]
                other = next((each for each in value if each != first), value[1])
                value = type(value)([first, other])
            if name == "mrope_section":
                return [1, 1, 2]
            return type(value)(
                self._number(name, each, index) if isinstance(each, int) and not isinstance(each, bool) else each
                for index, each in enumerate(value)
            )
        return self._number(name, value, 0) if isinstance(value, int) else value

    def _number(self, name: str, value: int, index: int) -> int:
        if re.search(r"(token|_id|_index|_idx|_ids)$|token_id|token_index", name):
            return value if value < 10 else self._ids.setdefault(value, VOCABULARY - 1 - len(self._ids))
        return _size(name, value, index)


# Changes to try one after the other if a config or its model refuses the sizes.
REPAIRS: list[dict[str, Any]] = [
    {},
    {"num_key_value_heads": 4},
    {"out_features": None, "out_indices": None, "stage_names": None},
    {"per_layer_config": None},
    {"num_heads": 8, "mamba_n_heads": 8, "mamba_d_head": 8, "n_mamba_heads": 8, "mamba_d_ssm": 64},
]
# Values that a class needs and its default config leaves out.
OPEN: dict[str, Any] = {
    "pad_token_id": 0,
    "eos_token_id": 2,
    "decoder_start_token_id": 3,
    "head_dim": 8,
    "initializer_range": 0.02,
    "num_experts_per_tok": 2,
    "rope_theta": 10000.0,
    "vision_feature_select_strategy": "full",
    "vocab_size": VOCABULARY,
    "moe_intermediate_size": WIDTH,
    "n_routed_experts": 4,
    "layer_types": ["conv", "full_attention"],
}


def shrink(cls: type[Any]) -> Iterator[Any]:
    """Yields configs of a class, smaller than the default; several if the sizes of the first may not fit."""
    try:
        fields = cls().to_dict()
    except Exception as error:
        raise NotBuilt(f"config: {_first_line(error)}") from error
    fields = {key: value for key, value in fields.items() if key not in ("transformers_version", "model_type")}
    small = _Shrinking().config(fields)
    error: Exception | None = None
    for repair in REPAIRS:
        if repair and _changed(small, repair) == small:
            continue
        try:
            config = cls.from_dict(_changed(small, repair))
            _fill(config)
            yield config
        except Exception as refused:
            error = error or refused
    if error:
        raise NotBuilt(f"config: {_first_line(error)}") from error


def _changed(fields: dict[str, Any], repair: dict[str, Any]) -> dict[str, Any]:
    return {
        name: _changed(value, repair) if isinstance(value, dict) else repair.get(name, value)
        for name, value in fields.items()
    }


def _fill(config: Any) -> None:
    config.use_cache = False
    for name, value in OPEN.items():
        if getattr(config, name, None) is None:
            setattr(config, name, value)
    for value in vars(config).values():
        if isinstance(value, transformers.PretrainedConfig):
            _fill(value)


def _first_line(error: BaseException) -> str:
    return f"{type(error).__name__}: {(str(error).splitlines() or [''])[0][:150]}"


def seed_all(seed: int) -> None:
    """Seeds the three generators that layers draw from."""
    random.seed(seed)
    numpy.random.seed(seed)
    torch.manual_seed(seed)


def models(kind: str, name: str, seed: int) -> Iterator[nn.Module]:
    """Yields models of a class with configs of several sizes; every parameter is finite, and none is zero or one.

    Raises:
        NotBuilt: after the last, if there is none, with the reason.
    """
    cls = getattr(transformers, name)
    reason, found = "", False
    for config in shrink(cls.config_class or getattr(transformers, configuration_auto.CONFIG_MAPPING_NAMES[kind])):
        seed_all(seed)
        try:
            model = cls(config)
        except Exception as error:
            reason = reason or f"model: {_first_line(error)}"
            continue
        if sum(param.numel() for param in model.parameters()) > LARGEST:
            reason = reason or f"model: more than {LARGEST} parameters"
            continue
        with torch.no_grad():
            for tensor in [*model.parameters(), *model.buffers()]:
                if tensor.is_floating_point():
                    tensor.nan_to_num_(0.0, 0.0, 0.0)
            for param in model.parameters():
                if param.is_floating_point():
                    param.clamp_(-4, 4).add_(0.02 * torch.randn_like(param))
        found = True
        yield model.float().train()
    if not found:
        raise NotBuilt(reason)


def build(kind: str, name: str, seed: int) -> tuple[nn.Module, dict[str, Tensor]]:
    """Returns a model and a batch for it.

    Raises:
        NotBuilt: with the reason.
    """
    reason = ""
    for model in models(kind, name, seed):
        for batch in inputs(model, seed):
            found = failure(copy.deepcopy(model), batch)  # some keep states of a forward
            if not found:
                return model, batch
            for filled in _with_places(batch, model.config, found):
                if not failure(copy.deepcopy(model), filled):
                    return model, filled
            reason = reason or f"forward: {found}"
    raise NotBuilt(reason)


# -- inputs


def inputs(model: nn.Module, seed: int) -> Iterator[dict[str, Tensor]]:
    """Yields batches that the forward may take, the fullest first: images, sound and text together, then fewer."""
    taken = inspect.signature(model.forward).parameters
    generator = torch.Generator().manual_seed(seed)
    for kinds in (("image", "sound", "text"), ("image", "text"), ("sound", "text"), ("text",), ("image",), ("sound",)):
        if not all(any(name in taken for name in SOURCES[kind]) for kind in kinds):
            continue
        batches = [{}]
        for kind in kinds:
            batches = [{**batch, **more} for batch in batches for more in _SENSES[kind](model.config, taken, generator)]
        for batch in batches:
            for labels in _labels(model, batch, generator) if "labels" in taken else [None]:
                yield batch if labels is None else {**batch, "labels": labels}


SOURCES = {
    "text": ("input_ids",),
    "image": ("pixel_values", "pixel_values_images", "images", "inputs"),
    "sound": ("input_values", "input_features"),
}


def _fields(config: Any, *names: str) -> Iterator[Any]:
    """Yields the values of fields of a config and its sub-configs, nearest first."""
    for name in names:
        if isinstance(value := getattr(config, name, None), (int, list, tuple)) and not isinstance(value, bool):
            yield value
    for value in vars(config).values():
        if isinstance(value, transformers.PretrainedConfig):
            yield from _fields(value, *names)


def _field(config: Any, *names: str, otherwise: Any) -> Any:
    return next(_fields(config, *names), otherwise)


def _text(config: Any, taken: Any, generator: torch.Generator) -> Iterator[dict[str, Tensor]]:
    if "input_ids" not in taken:
        yield {}
        return
    batch = {"input_ids": torch.randint(10, 60, (2, LENGTH), generator=generator)}
    batch["input_ids"][:, -1] = (
        min(_field(config, "eos_token_id", otherwise=2), VOCABULARY - 1)
        if isinstance(_field(config, "eos_token_id", otherwise=2), int)
        else 2
    )
    if "attention_mask" in taken:
        batch["attention_mask"] = torch.ones(2, LENGTH, dtype=torch.long)
    if "mm_token_type_ids" in taken:
        batch["mm_token_type_ids"] = torch.zeros(2, LENGTH, dtype=torch.long)
    if "bbox" in taken:
        batch["bbox"] = torch.arange(4).expand(2, LENGTH, 4).clone()
    if "return_loss" in taken:
        batch["return_loss"] = torch.tensor(True)
    if "decoder_input_ids" in taken and "labels" not in taken:
        batch["decoder_input_ids"] = batch["input_ids"].clone()
    yield batch


def _image(config: Any, taken: Any, generator: torch.Generator) -> Iterator[dict[str, Tensor]]:
    name = next((name for name in SOURCES["image"] if name in taken), None)
    if name is None:
        yield {}
        return
    channels = _field(config, "num_channels", "in_chans", "in_channels", otherwise=3)
    patch = _field(config, "patch_size", otherwise=8)
    if "image_grid_thw" in taken and isinstance(patch, int):
        width = channels * _field(config, "temporal_patch_size", otherwise=1) * patch**2
        grid = torch.tensor([[1, 4, 4]] * 2)
        yield {name: torch.rand(32, width, generator=generator), "image_grid_thw": grid}
    size = _field(config, "image_size", "img_size", "input_size", otherwise=IMAGE)
    height, width = (size, size) if isinstance(size, int) else (size[-2], size[-1])
    for side in dict.fromkeys([(height, width), (64, 64), (224, 224)]):
        pixels = torch.rand(2, channels, *side, generator=generator)
        yield {name: pixels}
        if "image_sizes" in taken:
            yield {name: pixels, "image_sizes": torch.tensor([side] * 2)}
        if "input_ids" in taken:
            sizes = {"image_sizes": torch.tensor([side] * 2)} if "image_sizes" in taken else {}
            yield {name: pixels.unsqueeze(1), **sizes}
            yield {name: pixels.unsqueeze(1).repeat(1, 2, 1, 1, 1), **sizes}


def _with_places(batch: dict[str, Tensor], config: Any, failure: str) -> Iterator[dict[str, Tensor]]:
    """Yields the batch with as many image tokens as the model's error message counts image features."""
    found = re.search(r"tokens.*?features:? (?:shape )?\D*(\d+)", failure)
    token = _field(config, "image_token_id", "image_token_index", "img_context_token_id", otherwise=None)
    if not found or token is None or "input_ids" not in batch:
        return
    for count in (int(found[1]) // 2, int(found[1]) // 2 // WIDTH):  # some count features, some their elements
        if 0 < count <= 300:
            places = torch.full((2, count), token)
            more = {"input_ids": torch.cat([batch["input_ids"][:, :4], places, batch["input_ids"][:, 4:]], 1)}
            more["attention_mask"] = torch.ones_like(more["input_ids"])
            if "labels" in batch and batch["labels"].dim() == 2:
                more["labels"] = more["input_ids"].where(more["input_ids"] != token, -100)
            if "mm_token_type_ids" in batch:
                more["mm_token_type_ids"] = (more["input_ids"] == token).long()
            yield {**batch, **more}


def _sound(config: Any, taken: Any, generator: torch.Generator) -> Iterator[dict[str, Tensor]]:
    if "input_values" in taken and "input_features" not in taken:
        for shape in (
            (2, 1600),
            (2, _field(config, "max_length", otherwise=64), _field(config, "num_mel_bins", otherwise=128)),
        ):
            yield {"input_values": torch.rand(*shape, generator=generator)}
    elif "input_features" in taken:
        bins = _field(config, "num_mel_bins", "input_feat_per_channel", "feature_projection_input_dim", otherwise=80)
        frames = 2 * _field(config, "max_source_positions", otherwise=32)
        for shape in ((2, bins, frames), (2, 64, bins)):
            features = {"input_features": torch.rand(*shape, generator=generator)}
            yield features
            if "attention_mask" in taken and "input_ids" not in taken:
                yield {**features, "attention_mask": torch.ones(shape[0], shape[1], dtype=torch.long)}
    else:
        yield {}


_SENSES = {"text": _text, "image": _image, "sound": _sound}


def _labels(model: nn.Module, batch: dict[str, Tensor], generator: torch.Generator) -> list[Tensor]:
    words = torch.randint(10, 60, (2, LENGTH), generator=generator)
    kinds = torch.randint(0, 2, (2,), generator=generator)
    if "Classification" in type(model).__name__:
        return [kinds]
    if "CTC" in type(model).__name__:
        return [words[:, :3] % 9 + 1]
    return [words] if "input_ids" in batch else [words, kinds]


def failure(model: nn.Module, batch: dict[str, Tensor]) -> str:
    """Returns the error of a forward and a backward in plain torch, or an empty string."""
    try:
        loss = loss_of(model(**batch))
        loss.backward()
    except Exception as error:
        return _first_line(error)
    finally:
        model.zero_grad()
    return "" if math.isfinite(loss.item()) else "the loss is not finite"


def varied(batch: dict[str, Tensor], seed: int) -> dict[str, Tensor]:
    """Returns another batch of equal shapes: other pixels, sounds and words; special tokens keep their places."""
    generator = torch.Generator().manual_seed(seed)
    other = {}
    for name, value in batch.items():
        if value.is_floating_point():
            value = torch.rand(value.shape, generator=generator)
        elif name == "input_ids" or (name == "labels" and value.dim() > 1):
            words = torch.randint(10, 60, value.shape, generator=generator)
            value = words.where((value >= 10) & (value < 60), value)
        elif name == "labels":
            value = torch.randint(0, 2, value.shape, generator=generator)
        other[name] = value
    return other


def loss_of(output: Any) -> Tensor:
    """Returns the loss of an output, or the sum of the mean squares of its tensors."""
    loss = getattr(output, "loss", None)
    if isinstance(loss, Tensor):
        return loss.float().mean()
    floats = [each for each in output.values() if isinstance(each, Tensor) and each.is_floating_point()]
    return torch.stack([each.float().square().mean() for each in floats if each.requires_grad]).sum()
