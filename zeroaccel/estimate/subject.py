"""Reads the MODEL of an estimate: a number of parameters, a known name, a Hugging Face config, or a user's function.

Each becomes a `Subject`, which builds the model (without values) and runs its forward. A number of parameters becomes a
`Decoder` of that size. Imports transformers only for its own configs.
"""

from __future__ import annotations

import importlib
import importlib.util
import json
import re
import sys
import urllib.error
import urllib.request
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from zeroaccel.config.bounds import parse_plain_json, read_at_most
from zeroaccel.config.diagnostics import near_names
from zeroaccel.errors import ConfigError, UsageError
from zeroaccel.estimate.decoder import MODELS, Decoder, known_shape, plain_names, shape_of
from zeroaccel.estimate.extrapolate import MemoryTrace
from zeroaccel.estimate.known_models import CONFIGS, READ_PICTURES, ModelConfig
from zeroaccel.estimate.shapes_only import WithoutValues
from zeroaccel.parallel.experts import expert_count
from zeroaccel.setup.axis_estimate import Shape

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
        name: name of the model in reports.
        note: description of the model, or of its substitute; may be empty.
        build: builds the model and its step.
        layers: number of equal consecutive blocks, if nothing else grows with them; 0 if unknown.
        build_short: builds the same model with another number of blocks.
        layer_numel: number of parameters in one block.
        leading: number of first blocks of another kind.
        shape: shape of a `Decoder`; None for other models.
        traces: traces of the model so far, for estimates that need the same ones again.
    """

    name: str
    note: str
    build: Callable[[], tuple[nn.Module, Step]]
    layers: int = 0
    build_short: Callable[[int], tuple[nn.Module, Step]] | None = None
    layer_numel: int = 0
    leading: int = 0
    shape: Shape | None = None
    traces: dict[object, MemoryTrace] = field(default_factory=dict, init=False, compare=False, repr=False)


def subject(text: str | nn.Module | Callable[[], Any]) -> Subject:
    """Returns the subject for a model's name, or for a function that builds it.

    Args:
        text: see `_EXPECTED`; or a function that returns a model, or a model and a `Step`.

    Raises:
        ConfigError: `text` does not name a model, or the model is unreadable.
    """
    if callable(text) and not isinstance(text, (str, nn.Module)):
        return _of_function(getattr(text, "__qualname__", "function"), text)
    if not isinstance(text, str):
        raise UsageError("estimate(model)", expected=_EXPECTED, got=type(text).__name__)
    path = Path(text).expanduser()
    if path.exists():
        return _of_folder(path)
    if text.startswith((".", "/", "~")):  # a path, also where its last part is the name of a known model
        fix = "pass the path of a config.json or of its folder, or a name without a path"
        raise ConfigError("MODEL", expected="a path that exists", got=text, fix=fix)
    if match := _COUNT.fullmatch(text.strip().replace("_", "")):
        return _of_count(text, round(float(match[1]) * _UNITS[match[2].lower()]))
    if shape := known_shape(text):
        return _of_shape(text, f"{shape.numel:,} parameters in {shape.layers} layers of width {shape.width}", shape)
    if known := next((CONFIGS[name] for name in plain_names(text) if name in CONFIGS), None):
        return _of_known_config(text, known)
    if ":" in text and "/" not in text:
        return _of_function(text, _imported(text))
    near = _near_models(text)
    fixes = [f"did you mean {' or '.join(near)}?"] if near else [f"known families: {', '.join(_families())}"]
    if not _HUB_NAME.fullmatch(text):
        raise ConfigError("MODEL", expected="a known model" if near else _EXPECTED, got=text, fix="; ".join(fixes))
    file, problem = _from_hub(text)
    if file is not None:
        return replace(_of_folder(file), name=text)
    fixes += ["without the hub, pass the path of a config.json or of its folder"]
    raise ConfigError(f"MODEL {text}: {problem}", fix="; ".join(fixes))


def _families() -> dict[str, list[str]]:
    """Returns known names by their family, the letters before the first other character."""
    families: dict[str, list[str]] = {}
    for name in sorted({**MODELS, **CONFIGS}):
        families.setdefault(_letters(name), []).append(name)
    return families


def _letters(name: str) -> str:
    match = re.match(r"[a-z]+", name)
    return match[0] if match else ""


def _near_models(text: str) -> list[str]:
    """Returns similar names of the most similar family, closest first."""
    name = text.rsplit("/", 1)[-1].lower().removeprefix("meta-")
    families = _families()
    family = near_names(_letters(name), families, 1, cutoff=0.7)
    return near_names(name, families[family[0]], 3, cutoff=0.3) if family else []


_HUB_NAME = re.compile(r"[\w.-]+/[\w.-]+")
_HUB_SECONDS = 3


def _from_hub(name: str) -> tuple[Path | None, str]:
    """Returns the config.json of a model on the Hugging Face hub, or from its cache; or None and the reason."""
    try:
        from huggingface_hub import constants, hf_hub_download, hf_hub_url, try_to_load_from_cache
        from huggingface_hub.utils import build_hf_headers  # type: ignore[attr-defined]
    except ImportError:
        needs = "it requires huggingface_hub (pip install 'zeroaccel[hf]')"
        return None, f"the Hugging Face hub was not searched: {needs}"
    if isinstance(cached := try_to_load_from_cache(name, "config.json"), str):
        return Path(cached), ""
    if constants.HF_HUB_OFFLINE:
        return None, "the Hugging Face hub was not searched (HF_HUB_OFFLINE)"
    # Send a request with a short timeout first: the download alone would retry for half a minute without a network.
    url = hf_hub_url(name, "config.json")
    request = urllib.request.Request(url, headers=dict(build_hf_headers()), method="HEAD")
    try:
        with urllib.request.urlopen(request, timeout=_HUB_SECONDS):
            return Path(hf_hub_download(name, "config.json")), ""
    except urllib.error.HTTPError as error:
        words = {401: "has no such model, or requires a login", 403: "requires that you accept the model's licence"}
        missing = "has no such model, or it has no config.json"
        return None, f"the Hugging Face hub {words.get(error.code, missing)} ({error.code})"
    except OSError as error:
        return None, f"the Hugging Face hub did not answer: {getattr(error, 'reason', None) or error}"


def _of_count(text: str, numel: int) -> Subject:
    if not 1000 <= numel <= 10**13:
        raise ConfigError("MODEL", expected="between 1000 and 10 trillion parameters", got=text)
    shape = shape_of(numel)
    note = f"estimated as a decoder of {shape.layers} layers and width {shape.width}, with {shape.numel:,} parameters"

    return _of_shape(f"{text} parameters", note, shape)


def _of_shape(name: str, note: str, shape: Shape) -> Subject:
    def build(layers: int = shape.layers) -> tuple[nn.Module, Step]:
        return Decoder(replace(shape, layers=layers)), predict_tokens

    return Subject(name, note, build, shape.layers, build, shape.block_numel, shape=shape)


def numel_of(what: Subject) -> int:
    """Returns the number of parameters of the whole model; tied parameters count once."""
    if what.shape is not None:
        return what.shape.numel
    return _of_model(what, lambda model: sum(param.numel() for param in model.parameters()))


def experts_of(what: Subject) -> int:
    """Returns the largest number of ranks that can divide the experts of the model's layers."""
    return _of_model(what, expert_count) if what.shape is None else 1


def _of_model(what: Subject, count: Callable[[nn.Module], int]) -> int:
    with WithoutValues():  # type: ignore[no-untyped-call]
        return count(what.build()[0])


def predict_tokens(model: nn.Module, batch: int, sequence: int) -> tuple[Tensor, Any]:
    """Runs the model on (batch, sequence) token ids; its output contains the loss, is the loss, or is logits."""
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
        raise ConfigError(f"{path}: there is no config.json in it", fix="pass the folder of a model") from None
    except UnicodeDecodeError:
        raise ConfigError(f"{file}: not a text file", fix="pass a config.json, or its folder") from None
    except json.JSONDecodeError as error:
        line = error.doc.splitlines()[error.lineno - 1] if error.doc.strip() else ""
        raise ConfigError(f"{file}:{error.lineno}:{error.colno}: {error.msg}: {line.strip()[:80]}") from None
    except ValueError as error:
        raise ConfigError(f"{file}: not valid JSON: {error}") from None
    except OSError as error:
        raise ConfigError(f"{file}: {error.strerror}") from None
    if not isinstance(data, dict) or "model_type" not in data:
        raise ConfigError(str(file), expected='a config of a Hugging Face model, with a "model_type"', got=_kind(data))
    _check_transformers(str(file))
    architectures = data.get("architectures") or []
    name = path.name if path.is_dir() else path.parent.name
    return Subject(name, "", lambda: _transformers_model(file, architectures))


def _check_transformers(place: str) -> None:
    if importlib.util.find_spec("transformers") is None:
        raise ConfigError(
            f"{place}: transformers is required to build the model",
            fix="pip install 'zeroaccel[hf]', or pass the number of parameters instead, such as 7b",
        )


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


def _of_known_config(name: str, known: ModelConfig) -> Subject:
    _check_transformers(f"MODEL {name}")
    periods = known.fields["num_hidden_layers"] // known.period

    def build(count: int = periods) -> tuple[nn.Module, Step]:
        import transformers

        fields = {**known.fields, "num_hidden_layers": count * known.period}
        try:
            config = transformers.AutoConfig.for_model(known.model_type, **fields)
            make: Any = transformers.AutoModelForCausalLM.from_config
            model: nn.Module = make(config)
        except (ValueError, KeyError, ImportError) as error:
            raise ConfigError(f"MODEL {name}: transformers cannot build this model: {error}") from error
        return model, _transformers_step

    note = f"{known.numel:,} parameters in {periods * known.period} layers of {known.model_type}"
    if any(known is CONFIGS[listed_name] for listed_name in READ_PICTURES):
        note += ": only the text model, without its vision tower and projector"
    return Subject(name, note, build, periods, build, known.numel // periods, known.leading)


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
        labels = ids
        # Models compare ids with the padding's to warn about a missing mask; ids have no values here.
        if "SequenceClassification" in type(model).__name__:
            labels = torch.zeros(batch, dtype=torch.long)
            inputs["attention_mask"] = torch.ones_like(ids)
        elif config is not None:
            config.pad_token_id = None
    module = getattr(model, "module", model)
    if "labels" in module.forward.__code__.co_varnames or hasattr(module.forward, "__wrapped__"):
        inputs["labels"] = labels
    output = model(**inputs)
    if getattr(output, "loss", None) is not None:
        return output.loss, output
    hidden = output[0]
    return hidden.float().pow(2).mean(), output  # a bare encoder has no loss; any function of its output works


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
                expected="a torch.nn.Module, or a module and a function (model, batch, sequence) -> loss",
                got=type(result).__name__,
            )
        return model, step

    return Subject(name, "", build)
