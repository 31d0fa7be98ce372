"""Writes the inputs of the scripts for tasks other than language models: pictures, sounds, and further texts.

`inputs.py` calls it and has the parts that both share.
"""

from __future__ import annotations

import io
import json
import wave
from collections.abc import Callable, Mapping
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

import without_binaries  # noqa: F401, before transformers

# isort: split
import numpy as np
import transformers
from datasets import Audio, ClassLabel, Dataset, Features, Image, List, Value
from PIL import Image as Picture
from transformers import PreTrainedTokenizerFast

if TYPE_CHECKING:
    from inputs import Sentences

_SIZE = 32
_KINDS = ["river", "garden", "engine"]
_RATE = 16000


def models(words: PreTrainedTokenizerFast, pieces: PreTrainedTokenizerFast) -> dict[str, tuple[Any, Any, Any]]:
    """Returns tiny models by name, each with its tokenizer and its processor of pictures or sounds, or None."""
    ends: dict[str, Any] = {"pad_token_id": 0, "eos_token_id": 1, "bos_token_id": 1, "decoder_start_token_id": 0}
    small = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 64}
    picture: dict[str, Any] = {**small, "image_size": _SIZE, "patch_size": 8}
    layers: dict[str, Any] = {"encoder_layers": 2, "decoder_layers": 2, "d_model": 32, "dropout": 0.0}
    heads: dict[str, Any] = {"encoder_attention_heads": 2, "decoder_attention_heads": 2}
    ffn: dict[str, Any] = {"encoder_ffn_dim": 64, "decoder_ffn_dim": 64}
    stages = {"depths": [1, 1], "hidden_sizes": [16, 32], "num_labels": len(_KINDS)}
    pixels = {"size": {"height": _SIZE, "width": _SIZE}}
    vit = transformers.ViTConfig(**picture, encoder_stride=8)
    sound = transformers.Wav2Vec2Config(
        **small,
        vocab_size=32,
        conv_dim=(16, 16),
        conv_kernel=(10, 8),
        conv_stride=(10, 8),
        num_feat_extract_layers=2,
        num_conv_pos_embeddings=16,
        num_conv_pos_embedding_groups=2,
        hidden_dropout=0.0,
        attention_dropout=0.0,
        feat_proj_dropout=0.0,
        layerdrop=0.0,
        mask_time_prob=0.0,
        apply_spec_augment=False,
        proj_codevector_dim=16,
        codevector_dim=16,
        num_codevectors_per_group=8,
    )
    made = {
        "xlnet-base-cased": (
            transformers.XLNetLMHeadModel(
                transformers.XLNetConfig(
                    vocab_size=2 * len(words), d_model=32, n_layer=2, n_head=2, d_inner=64, dropout=0.0, pad_token_id=0
                )
            ),
            _pieces_of_words(words),
            None,
        ),
        "facebook/bart-large": (
            transformers.BartForConditionalGeneration(
                transformers.BartConfig(
                    vocab_size=len(pieces), max_position_embeddings=128, **layers, **heads, **ffn, **ends
                )
            ),
            pieces,
            None,
        ),
        "bigscience/bloomz-7b1": (
            transformers.BloomForCausalLM(
                transformers.BloomConfig(
                    vocab_size=len(pieces), hidden_size=32, n_layer=2, n_head=2, pad_token_id=0, eos_token_id=1
                )
            ),
            pieces,
            None,
        ),
        "google/vit-base-patch16-224-in21k": (
            transformers.ViTForMaskedImageModeling(vit),
            None,
            transformers.ViTImageProcessor(**pixels),
        ),
        "facebook/vit-mae-base": (
            transformers.ViTMAEForPreTraining(
                transformers.ViTMAEConfig(
                    **picture,
                    decoder_hidden_size=32,
                    decoder_num_hidden_layers=1,
                    decoder_num_attention_heads=2,
                    decoder_intermediate_size=64,
                )
            ),
            None,
            transformers.ViTImageProcessor(**pixels),
        ),
        "nvidia/mit-b0": (
            transformers.SegformerForSemanticSegmentation(
                transformers.SegformerConfig(
                    num_encoder_blocks=2,
                    depths=[1, 1],
                    sr_ratios=[2, 1],
                    hidden_sizes=[16, 32],
                    patch_sizes=[7, 3],
                    strides=[4, 2],
                    num_attention_heads=[1, 2],
                    mlp_ratios=[2, 2],
                    decoder_hidden_size=32,
                    hidden_dropout_prob=0.0,
                    classifier_dropout_prob=0.0,
                    drop_path_rate=0.0,
                    num_labels=len(_KINDS),
                )
            ),
            None,
            transformers.SegformerImageProcessor(**pixels),
        ),
        "facebook/detr-resnet-50": (
            transformers.DetrForObjectDetection(
                transformers.DetrConfig(
                    use_timm_backbone=False,
                    use_pretrained_backbone=False,
                    backbone_config=transformers.ResNetConfig(
                        embedding_size=16, layer_type="basic", out_features=["stage2"], **stages
                    ),
                    num_queries=8,
                    num_labels=len(_KINDS),
                    **layers,
                    **heads,
                    **ffn,
                )
            ),
            None,
            transformers.DetrImageProcessor(),
        ),
        **(_instance_model(pixels) if find_spec("scipy") else {}),  # which its loss needs
        "facebook/wav2vec2-base": (
            transformers.Wav2Vec2ForPreTraining(sound),
            None,
            transformers.Wav2Vec2FeatureExtractor(return_attention_mask=True),
        ),
        "openai/whisper-tiny": _whisper(pieces, {**layers, **heads, **ffn}),
        "made/clip": (_clip(vit, len(words), small), words, transformers.ViTImageProcessor(**pixels)),
    }
    return made


def _instance_model(pixels: dict[str, Any]) -> dict[str, tuple[Any, Any, Any]]:
    return {
        "facebook/mask2former-swin-tiny-coco-instance": (
            transformers.Mask2FormerForUniversalSegmentation(
                transformers.Mask2FormerConfig(
                    backbone_config=transformers.SwinConfig(
                        image_size=_SIZE,
                        patch_size=2,
                        embed_dim=8,
                        depths=[1, 1, 1, 1],
                        num_heads=[1, 1, 2, 2],
                        window_size=2,
                        out_features=["stage1", "stage2", "stage3", "stage4"],
                        drop_path_rate=0.0,
                    ),
                    hidden_dim=32,
                    feature_size=32,
                    mask_feature_size=32,
                    encoder_layers=1,
                    decoder_layers=2,
                    num_attention_heads=2,
                    encoder_feedforward_dim=64,
                    dim_feedforward=64,
                    num_queries=8,
                    train_num_points=64,
                    num_labels=len(_KINDS),
                )
            ),
            None,
            transformers.Mask2FormerImageProcessor(**pixels),
        ),
    }


def _pieces_of_words(words: PreTrainedTokenizerFast) -> Any:
    """Returns a tokenizer of XLNet's class, which scores pieces."""
    special = ["<unk>", "<s>", "</s>", "<cls>", "<sep>", "<pad>", "<mask>"]
    names = [word for word in words.get_vocab() if not word.startswith("[")]
    return transformers.XLNetTokenizer(vocab=[*((name, 0.0) for name in special), *((f"▁{w}", -1.0) for w in names)])


def _clip(picture: Any, vocabulary: int, small: dict[str, Any]) -> Any:
    text = transformers.BertConfig(
        vocab_size=vocabulary,
        max_position_embeddings=64,
        hidden_dropout_prob=0.0,
        attention_probs_dropout_prob=0.0,
        **small,
    )
    config = transformers.VisionTextDualEncoderConfig.from_vision_text_configs(picture, text, projection_dim=16)
    return transformers.VisionTextDualEncoderModel(config=config)


def _whisper(pieces: PreTrainedTokenizerFast, sizes: dict[str, Any]) -> tuple[Any, Any, Any]:
    tokens = ["<|endoftext|>", "<|startoftranscript|>", "<|transcribe|>", "<|translate|>", "<|notimestamps|>"]
    state = json.loads(pieces.backend_tokenizer.to_str())["model"]
    merges = [tuple(pair) for pair in state["merges"]]
    tokenizer = transformers.WhisperTokenizer(vocab=state["vocab"], merges=merges, unk_token="</s>", bos_token="</s>")
    tokenizer.add_special_tokens({"additional_special_tokens": tokens})
    tokenizer.pad_token = tokens[0]
    ids = {token: tokenizer.convert_tokens_to_ids(token) for token in tokens}
    ends: dict[str, Any] = {
        "pad_token_id": ids[tokens[0]],
        "eos_token_id": ids[tokens[0]],
        "bos_token_id": ids[tokens[0]],
        "decoder_start_token_id": ids[tokens[1]],
    }
    config = transformers.WhisperConfig(
        vocab_size=len(tokenizer),
        num_mel_bins=8,
        max_source_positions=50,
        max_target_positions=64,
        suppress_tokens=None,
        begin_suppress_tokens=None,
        **sizes,
        **ends,
    )
    model = transformers.WhisperForConditionalGeneration(config)
    model.generation_config = transformers.GenerationConfig(
        is_multilingual=False, no_timestamps_token_id=ids[tokens[4]], max_length=24, suppress_tokens=None, **ends
    )
    extractor = transformers.WhisperFeatureExtractor(feature_size=8, chunk_length=1)
    return model, tokenizer, transformers.WhisperProcessor(extractor, tokenizer)


def write_data(folder: Path, text: Sentences, write_named: Callable[..., None]) -> None:
    """Writes data sets as files and as folders that `load_dataset` reads."""
    generator = np.random.default_rng(0)
    for split, count in (("train", 48), ("validation", 14)):
        lines: dict[str, list[Any]] = {
            "choices": [
                {
                    "sent1": text.sentence(6),
                    "sent2": text.sentence(2),
                    **{f"ending{number}": text.sentence(4) for number in range(4)},
                    "label": index % 4,
                }
                for index in range(count)
            ],
            "entities": [
                {
                    "tokens": (words := text.sentence(10).split()),
                    "ner_tags": ["B-PLACE" if word in _KINDS else "O" for word in words],
                }
                for _ in range(count)
            ],
            "translations": [{"translation": {"en": text.sentence(10), "ro": text.sentence(8)}} for _ in range(count)],
            "captions": [
                {"image_path": str((folder / f"pictures/kind{i % 4}_{i}.jpg").resolve()), "caption": text.sentence(6)}
                for i in range(count)
            ],
        }
        for name, made in lines.items():
            (folder / f"{name}_{split}.json").write_text("\n".join(map(json.dumps, made)))
    sizes = {"train": 48, "validation": 14, "test": 14}
    kinds = ClassLabel(names=_KINDS)
    picture = lambda: _file(_picture(generator))  # noqa: E731
    tables: dict[str, tuple[str, Callable[[int], dict[str, Any]], Features | None]] = {
        "made/instructions": ("default", lambda _: _instruction(text), None),
        "made/pictures": (
            "default",
            lambda index: {"image": picture(), "label": index % len(_KINDS)},
            _features(image=Image(), label=kinds),
        ),
        "made/masks": (
            "default",
            lambda _: {"image": picture(), "label": _file(_picture(generator, 1))},
            _features(image=Image(), label=Image()),
        ),
        "made/boxes": ("default", lambda index: _boxed(generator, index), _boxed_features()),
        "made/instances": (
            "default",
            lambda _: _instances(generator),
            _features(
                image=Image(), annotation=Image(), semantic_class_to_id={name: Value("int64") for name in _KINDS}
            ),
        ),
        "made/sounds": (
            "default",
            lambda index: _sound(generator, text, index),
            _features(audio=Audio(sampling_rate=_RATE), label=kinds, text="string"),
        ),
    }
    for name, (config, make, features) in tables.items():
        splits = {
            split: Dataset.from_list([make(index) for index in range(count)], features=features)
            for split, count in sizes.items()
        }
        write_named(folder / name, config, splits)
    complaints = _features(**{"Tweet text": "string", "Label": ClassLabel(names=["no complaint", "complaint"])})
    for split, count in (("train", 24), ("test", 8)):
        rows = [{"Tweet text": text.sentence(8), "Label": index % 2} for index in range(count)]
        path = folder / "twitter_complaints" / split / "0000.parquet"
        path.parent.mkdir(parents=True, exist_ok=True)
        Dataset.from_list(rows, features=complaints).to_parquet(path)
    write_cached(folder, "datasets--made--masks", {"id2label.json": json.dumps(dict(enumerate(_KINDS)))})


def cache(folder: Path, name: str) -> None:
    """Copies a model into the cache of the hub as made/MODEL, for a script that takes a folder for a checkpoint."""
    files = {path.name: path.read_bytes() for path in (folder / name).iterdir()}
    write_cached(folder, f"models--made--{name.rpartition('/')[2]}", files)


def write_cached(folder: Path, name: str, files: Mapping[str, str | bytes]) -> None:
    """Writes files where the hub's client looks before it asks for them."""
    snapshot = folder / "hf_home/hub" / name / "snapshots/made"
    for path, content in {
        snapshot.parents[1] / "refs/main": "made",
        **{snapshot / k: v for k, v in files.items()},
    }.items():
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content if isinstance(content, bytes) else content.encode())


def _features(**columns: Any) -> Features:
    return Features({name: Value(kind) if isinstance(kind, str) else kind for name, kind in columns.items()})


def _instruction(text: Sentences) -> dict[str, Any]:
    """Returns one row with the columns of all scripts that fine-tune with instructions."""
    asked, answer = text.sentence(8), text.sentence(6)
    messages = [{"role": "user", "content": asked}, {"role": "assistant", "content": answer}]
    return {
        "text": f"{asked} {answer}",
        "instruction": asked,
        "input": asked,
        "output": answer,
        "query": asked,
        "response": answer,
        "messages": messages,
    }


def _picture(generator: np.random.Generator, channels: int = 3) -> Any:
    shape = (_SIZE, _SIZE, channels) if channels > 1 else (_SIZE, _SIZE)
    return generator.integers(0, 256 if channels > 1 else len(_KINDS), size=shape).astype(np.uint8)


def _file(pixels: Any) -> dict[str, Any]:
    buffer = io.BytesIO()
    Picture.fromarray(pixels).save(buffer, "PNG")
    return {"bytes": buffer.getvalue(), "path": None}


def _boxed(generator: np.random.Generator, index: int) -> dict[str, Any]:
    boxes = [[2.0, 4.0, 12.0, 10.0], [15.0, 12.0, 10.0, 16.0]]
    objects = {
        "id": [2 * index, 2 * index + 1],
        "area": [120.0, 160.0],
        "bbox": boxes,
        "category": [int(kind) for kind in generator.integers(0, len(_KINDS), size=2)],
    }
    return {
        "image_id": index,
        "image": _file(_picture(generator)),
        "width": _SIZE,
        "height": _SIZE,
        "objects": objects,
    }


def _boxed_features() -> Features:
    objects = {
        "id": List(Value("int64")),
        "area": List(Value("float32")),
        "bbox": List(List(Value("float32"))),
        "category": List(ClassLabel(names=_KINDS)),
    }
    return _features(image_id="int64", image=Image(), width="int32", height="int32", objects=objects)


def _instances(generator: np.random.Generator) -> dict[str, Any]:
    marks = np.zeros((_SIZE, _SIZE, 3), dtype=np.uint8)
    for number, start in enumerate((3, 18), start=1):
        marks[start : start + 10, start : start + 12, :2] = int(generator.integers(1, len(_KINDS))), number
    kinds = {name: index for index, name in enumerate(_KINDS)}
    return {"image": _file(_picture(generator)), "annotation": _file(marks), "semantic_class_to_id": kinds}


def _sound(generator: np.random.Generator, text: Sentences, index: int) -> dict[str, Any]:
    count = _RATE // 2 + 400 * (index % 3)
    tone = np.sin(np.arange(count) * 0.02 * (1 + index % len(_KINDS))) + generator.normal(0, 0.1, count)
    buffer = io.BytesIO()
    with wave.open(buffer, "wb") as file:
        file.setnchannels(1)
        file.setsampwidth(2)
        file.setframerate(_RATE)
        file.writeframes((np.clip(tone, -1.5, 1.5) * 20000).astype("<i2").tobytes())
    return {
        "audio": {"bytes": buffer.getvalue(), "path": None},
        "label": index % len(_KINDS),
        "text": text.sentence(3),
    }
