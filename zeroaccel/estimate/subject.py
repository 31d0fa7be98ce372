"""The MODEL of an estimate: a number of parameters, a known name, a Hugging Face config, or a function of the user's.

Each becomes a `Subject`, which builds the model (without weights under fake tensors) and runs one forward of it. A
number of parameters stands for a `Decoder` of today's open shape: gated MLP, heads of 128, RMS norms, an untied head.
Only its sizes matter; it is never trained. transformers is imported only for its own configs.
"""

from __future__ import annotations

import importlib
import importlib.util
import json
import math
import re
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from zeroaccel.config.bounds import parse_plain_json, read_at_most
from zeroaccel.config.diagnostics import near_names
from zeroaccel.errors import ConfigError, UsageError

_MOST_NBYTES = 4 << 20


Step = Callable[[nn.Module, int, int], Any]
"""(model, batch, sequence) -> the loss, or a tuple that begins with it and lives until the next step."""

_COUNT = re.compile(r"(\d+(?:\.\d+)?)([kmbt]?)", re.IGNORECASE)
_UNITS = {"": 1, "k": 10**3, "m": 10**6, "b": 10**9, "t": 10**12}
_EXPECTED = (
    "a parameter count such as 7b, a name such as llama-3.1-8b, a folder or config.json of a Hugging Face model, "
    "or module:function"
)


@dataclass(frozen=True)
class Subject:
    """A model to estimate.

    Attributes:
        name: for reports.
        note: what represents the model; empty for the model itself.
        build: makes the model and its step.
        layers: number of equal blocks in a row, with nothing else that grows with them; 0 where that is unknown.
        build_short: makes the same model with another number of these blocks.
        layer_numel: parameters of one block.
        shapes_only: built and run by operations whose results' shapes follow from those of the arguments, and that
            write to their first argument alone, if to any.
    """

    name: str
    note: str
    build: Callable[[], tuple[nn.Module, Step]]
    layers: int = 0
    build_short: Callable[[int], tuple[nn.Module, Step]] | None = None
    layer_numel: int = 0
    shapes_only: bool = False


def subject(text: str | nn.Module | Callable[[], Any]) -> Subject:
    """The subject that `text` names.

    Args:
        text: see `_EXPECTED`; a function that returns a model, or a model and a `Step`, may be given itself.

    Raises:
        ConfigError: it is none of these, or it cannot be read.
    """
    if callable(text) and not isinstance(text, (str, nn.Module)):
        return _of_function(getattr(text, "__qualname__", "function"), text)
    if not isinstance(text, str):
        raise UsageError("estimate(model)", expected=_EXPECTED, got=type(text).__name__)
    path = Path(text).expanduser()
    if path.exists():
        return _of_folder(path)
    if match := _COUNT.fullmatch(text.strip().replace("_", "")):
        return _of_count(text, round(float(match[1]) * _UNITS[match[2].lower()]))
    if shape := known_shape(text):
        return _of_shape(text, f"{shape.numel:,} parameters in {shape.layers} layers of width {shape.width}", shape)
    if ":" in text and "/" not in text:
        return _of_function(text, _imported(text))
    near = near_names(text.rsplit("/", 1)[-1], MODELS, 3, cutoff=0.5)
    fixes = [f"did you mean {' or '.join(near)}?"] if near else []
    fixes += ["give the path of a downloaded folder"] if "/" in text else []
    fix = "; ".join(fixes) or f"names that are known: {', '.join(MODELS)}"
    raise ConfigError("MODEL", expected=_EXPECTED, got=text, fix=fix)


def _of_count(text: str, numel: int) -> Subject:
    if not 1000 <= numel <= 10**13:
        raise ConfigError("MODEL", expected="between 1000 and 10 trillion parameters", got=text)
    shape = shape_of(numel)
    note = (
        f"a decoder of {shape.layers} layers and width {shape.width}, with {shape.numel:,} parameters, stands in for it"
    )

    return _of_shape(f"{text} parameters", note, shape)


def _of_shape(name: str, note: str, shape: Shape) -> Subject:
    def build(layers: int = shape.layers) -> tuple[nn.Module, Step]:
        return Decoder(replace(shape, layers=layers)), predict_tokens

    return Subject(name, note, build, shape.layers, build, shape.block_numel, shapes_only=True)


def predict_tokens(model: nn.Module, batch: int, sequence: int) -> tuple[Tensor, Any]:
    """Gives the model (batch, sequence) token ids; its output holds the loss, is the loss, or is logits."""
    ids = torch.zeros(batch, sequence, dtype=torch.long)
    output = model(ids)
    loss = getattr(output, "loss", None)
    if loss is None:
        loss = output if output.dim() == 0 else F.cross_entropy(output.flatten(0, -2), ids.flatten())
    return loss, output


def _of_folder(path: Path) -> Subject:
    file = path / "config.json" if path.is_dir() else path
    try:
        data = parse_plain_json(read_at_most(file, _MOST_NBYTES).decode("utf-8"))
    except FileNotFoundError:
        raise ConfigError(f"{path}: there is no config.json in it", fix="name the folder of a model") from None
    except UnicodeDecodeError:
        raise ConfigError(f"{file}: not a text file", fix="name a config.json, or its folder") from None
    except json.JSONDecodeError as error:
        line = error.doc.splitlines()[error.lineno - 1] if error.doc.strip() else ""
        raise ConfigError(f"{file}:{error.lineno}:{error.colno}: {error.msg}: {line.strip()[:80]}") from None
    except ValueError as error:
        raise ConfigError(f"{file}: not valid JSON: {error}") from None
    except OSError as error:
        raise ConfigError(f"{file}: {error.strerror}") from None
    if not isinstance(data, dict) or "model_type" not in data:
        raise ConfigError(str(file), expected='a config of a Hugging Face model, with a "model_type"', got=_kind(data))
    if importlib.util.find_spec("transformers") is None:
        raise ConfigError(
            f"{file}: needs transformers to build the model",
            fix="pip install 'zeroaccel[hf]', or give the number of parameters instead, such as 7b",
        )
    architectures = data.get("architectures") or []
    name = path.name if path.is_dir() else path.parent.name
    return Subject(name, "", lambda: _transformers_model(file, architectures))


def _kind(data: Any) -> str:
    return f"one with {', '.join(list(data)[:5]) or 'no keys'}" if isinstance(data, dict) else type(data).__name__


def _transformers_model(file: Path, architectures: list[str]) -> tuple[nn.Module, Step]:
    import transformers

    try:
        config = transformers.AutoConfig.from_pretrained(str(file))
        architecture = getattr(transformers, architectures[0], None) if architectures else None
        make: Any = architecture._from_config if architecture else transformers.AutoModelForCausalLM.from_config
        model: nn.Module = make(config)
    except (ValueError, KeyError, ImportError) as error:
        raise ConfigError(f"{file}: transformers cannot build this model: {error}") from error
    return model, _transformers_step


def _transformers_step(model: nn.Module, batch: int, sequence: int) -> tuple[Tensor, Any]:
    config: Any = getattr(model, "config", None)
    inputs: dict[str, Any]
    if getattr(model, "main_input_name", "input_ids") == "pixel_values":
        size = config.image_size
        height, width = size if isinstance(size, (list, tuple)) else (size, size)
        inputs = {"pixel_values": torch.zeros(batch, config.num_channels, height, width, dtype=_dtype_of(model))}
        labels = torch.zeros(batch, dtype=torch.long)
    else:
        ids = torch.zeros(batch, sequence, dtype=torch.long)
        inputs = {"input_ids": ids}
        labels = torch.zeros(batch, dtype=torch.long) if "SequenceClassification" in type(model).__name__ else ids
    module = getattr(model, "module", model)
    if "labels" in module.forward.__code__.co_varnames or hasattr(module.forward, "__wrapped__"):
        inputs["labels"] = labels
    output = model(**inputs)
    if getattr(output, "loss", None) is not None:
        return output.loss, output
    hidden = output[0]
    return hidden.float().pow(2).mean(), output  # a bare encoder has no loss; any function of its output will do


def _dtype_of(model: nn.Module) -> torch.dtype:
    return next(model.parameters()).dtype


def _imported(text: str) -> Callable[[], Any]:
    name, _, attribute = text.partition(":")
    sys.path.insert(0, "")
    try:
        module = importlib.import_module(name)
    except ModuleNotFoundError as error:
        if error.name is not None and (name == error.name or name.startswith(f"{error.name}.")):
            raise ConfigError(f"{text}: there is no module {error.name!r} here or among the installed ones") from None
        raise
    finally:
        sys.path.remove("")
    function = getattr(module, attribute, None)
    if not callable(function):
        names = ", ".join(name for name, value in vars(module).items() if callable(value) and not name.startswith("_"))
        raise ConfigError(f"{text}: {name} has no function {attribute!r}", fix=f"it has {names}" if names else "")
    return function  # type: ignore[no-any-return]


def _of_function(name: str, function: Callable[[], Any]) -> Subject:
    def build() -> tuple[nn.Module, Step]:
        result = function()
        model, step = result if isinstance(result, tuple) and len(result) == 2 else (result, predict_tokens)
        if not isinstance(model, nn.Module) or not callable(step):
            raise ConfigError(
                f"{name}()",
                expected="a torch.nn.Module, or one and a function (model, batch, sequence) -> loss",
                got=type(result).__name__,
            )
        return model, step

    return Subject(name, "", build)


# -- a decoder of a given number of parameters

# Parameters -> layers (Brown et al. 2020, table 2.1); the nearest by its logarithm.
_DEPTHS = {125e6: 12, 350e6: 24, 1.3e9: 24, 2.7e9: 32, 6.7e9: 32, 13e9: 40, 30e9: 48, 66e9: 64, 175e9: 96}
_VOCABULARY = 32_000
_HEAD_DIM = 128


@dataclass(frozen=True)
class Shape:
    """Sizes of a `Decoder`.

    Attributes:
        layers: blocks.
        width: of the residual stream.
        inner: of the MLPs.
        vocabulary: rows of the embedding and of the head.
        heads: of queries; 0 for as many as `head_dim` goes into the width.
        head_dim: 0 for 128, or 16 where the width is no multiple of it.
        key_heads: of keys and values; 0 for as many as of queries.
        tied: the head is the embedding.
        biased: queries, keys and values have biases.
    """

    layers: int
    width: int
    inner: int
    vocabulary: int
    heads: int = 0
    head_dim: int = 0
    key_heads: int = 0
    tied: bool = False
    biased: bool = False

    def __post_init__(self) -> None:
        head_dim = self.head_dim or (_HEAD_DIM if self.width % _HEAD_DIM == 0 else 16)
        heads = self.heads or max(1, self.width // head_dim)
        if not self.heads:
            head_dim = self.width // heads
        for name, value in (("head_dim", head_dim), ("heads", heads), ("key_heads", self.key_heads or heads)):
            object.__setattr__(self, name, value)

    @property
    def block_numel(self) -> int:
        """Parameters of one layer."""
        queries, keys = self.heads * self.head_dim, self.key_heads * self.head_dim
        attention = 2 * self.width * (queries + keys) + (queries + 2 * keys) * self.biased
        return attention + 3 * self.width * self.inner + 2 * self.width

    @property
    def numel(self) -> int:
        """Parameters of the decoder."""
        tables = 1 if self.tied else 2
        return self.layers * self.block_numel + tables * self.vocabulary * self.width + self.width


# From the config.json that each was published with.
_LLAMA_3 = partial(Shape, vocabulary=128_256, key_heads=8)
MODELS: Mapping[str, Shape] = {
    "llama-2-7b": Shape(32, 4096, 11008, 32_000),
    "llama-2-13b": Shape(40, 5120, 13824, 32_000),
    "llama-2-70b": Shape(80, 8192, 28672, 32_000, key_heads=8),
    "llama-3.1-8b": _LLAMA_3(32, 4096, 14336),
    "llama-3.1-70b": _LLAMA_3(80, 8192, 28672),
    "llama-3.1-405b": _LLAMA_3(126, 16384, 53248),
    "llama-3.2-1b": _LLAMA_3(16, 2048, 8192, heads=32, head_dim=64, tied=True),
    "llama-3.2-3b": _LLAMA_3(28, 3072, 8192, tied=True),
    "mistral-7b": Shape(32, 4096, 14336, 32_000, key_heads=8),
    "qwen2.5-0.5b": Shape(24, 896, 4864, 151_936, 14, 64, 2, tied=True, biased=True),
    "qwen2.5-1.5b": Shape(28, 1536, 8960, 151_936, 12, 128, 2, tied=True, biased=True),
    "qwen2.5-7b": Shape(28, 3584, 18944, 152_064, 28, 128, 4, biased=True),
    "qwen2.5-32b": Shape(64, 5120, 27648, 152_064, 40, 128, 8, biased=True),
    "qwen2.5-72b": Shape(80, 8192, 29568, 152_064, 64, 128, 8, biased=True),
    "tinyllama-1.1b": Shape(22, 2048, 5632, 32_000, 32, 64, 4),
}
"""Common models by name: dense decoders with gated MLPs and RMS norms."""
_NAME_ENDINGS = re.compile(r"(-(instruct|chat|base|hf|v\d[\d.]*))+$")


def known_shape(text: str) -> Shape | None:
    """The shape of a model by its name, in any case, with or without its owner and what it was tuned for.

    Example:
        >>> known_shape("meta-llama/Llama-3.1-8B-Instruct").numel
        8030261248
    """
    name = _NAME_ENDINGS.sub("", text.strip().rsplit("/", 1)[-1].lower()).removeprefix("meta-")
    return MODELS.get(name)


def shape_of(numel: int) -> Shape:
    """The shape whose number of parameters is nearest to `numel`, up to columns of the MLPs."""
    vocabulary = min(_VOCABULARY, max(256, numel // 1000))
    layers = _depth(numel)
    head = _HEAD_DIM if numel > 50e6 else 16
    # 4 d^2 of attention and 8 d^2 of MLP per layer, beside two tables of the vocabulary.
    width = (math.sqrt(vocabulary**2 + 12 * layers * numel) - vocabulary) / (12 * layers)
    width = max(head, round(width / head) * head)
    mlp_numel = numel - Shape(layers, width, 0, vocabulary).numel
    return Shape(layers, width, max(1, round(mlp_numel / (3 * layers * width))), vocabulary)


def _depth(numel: int) -> int:
    nearest = min(_DEPTHS, key=lambda count: abs(math.log(count / numel)))
    return _DEPTHS[nearest] if numel > 50e6 else max(1, min(12, round(math.log10(max(numel, 10)) * 3 - 12)))


class _Block(nn.Module):
    def __init__(self, shape: Shape) -> None:
        super().__init__()
        width, inner = shape.width, shape.inner
        self.head_dim = shape.head_dim
        self.shared_by = shape.heads // shape.key_heads
        queries, keys = shape.heads * shape.head_dim, shape.key_heads * shape.head_dim
        self.attention_norm, self.mlp_norm = nn.RMSNorm(width), nn.RMSNorm(width)
        self.q = nn.Linear(width, queries, bias=shape.biased)
        self.k, self.v = (nn.Linear(width, keys, bias=shape.biased) for _ in range(2))
        self.out = nn.Linear(queries, width, bias=False)
        self.gate, self.up = nn.Linear(width, inner, bias=False), nn.Linear(width, inner, bias=False)
        self.down = nn.Linear(inner, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        normed = self.attention_norm(x)
        parts = (self.q, self.k, self.v)
        q, k, v = (part(normed).unflatten(-1, (-1, self.head_dim)).transpose(1, 2) for part in parts)
        q, k = q * 1.0, k * 1.0  # for the rotation
        if self.shared_by > 1:
            k, v = (one.unsqueeze(2).expand(-1, -1, self.shared_by, -1, -1).flatten(1, 2) for one in (k, v))
        mixed = _attention(q, k, v)
        x = x + self.out(mixed.transpose(1, 2).flatten(-2))
        normed = self.mlp_norm(x)
        out: Tensor = x + self.down(F.silu(self.gate(normed)) * self.up(normed))
        return out


def _attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    if not q.is_meta:
        return F.scaled_dot_product_attention(q, k, v, is_causal=True)
    # Without a device, torch takes the kernel that makes the matrix of all scores.
    out: Tensor = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(q, k, v, 0.0, True)[0]
    return out


class Decoder(nn.Module):
    """(batch, length) integers -> (batch, length, vocabulary) logits in fp32."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.embedding = nn.Embedding(shape.vocabulary, shape.width)
        self.blocks = nn.ModuleList(_Block(shape) for _ in range(shape.layers))
        self.norm = nn.RMSNorm(shape.width)
        self.head = nn.Linear(shape.width, shape.vocabulary, bias=False)
        if shape.tied:
            self.head.weight = self.embedding.weight

    def forward(self, ids: Tensor) -> Tensor:
        x: Tensor = self.embedding(ids)
        for block in self.blocks:
            x = block(x)
        logits: Tensor = self.head(self.norm(x))
        return logits.to(torch.float32)
