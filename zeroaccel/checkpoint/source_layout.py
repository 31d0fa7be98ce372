"""Gives weights the names, shapes and layout of the files that a transformers model comes from.

transformers renames, merges, splits and transposes weights when it loads them, and its `save_pretrained` reverses that.
Here its reverse functions run on `LazyTensor`s, so that a writer evaluates ranges of their results: `reverted` for a
model in memory, `as_in_files` for a checkpoint and the files of `zero-to-fp32 --like`.
"""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Mapping, Sequence, Set
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from zeroaccel.checkpoint.requantize import requantized
from zeroaccel.checkpoint.zero_to_fp32 import ConversionError, Source, Weight
from zeroaccel.config.bounds import parse_plain_json, read_at_most
from zeroaccel.errors import UsageError, listed
from zeroaccel.logs import logger
from zeroaccel.zero.access.lazy_tensors import LazyTensor, Stored, read_into
from zeroaccel.zero.access.load_safetensors import SafetensorsFolder
from zeroaccel.zero.access.safetensors_file import ITEMSIZE, TensorLocation, dtype_name
from zeroaccel.zero.module_names import plain_names

_MOST_NBYTES = 256 << 20  # of an index or a config
_INDEXES = ("model.safetensors.index.json", "pytorch_model.bin.index.json")
_SCALES = re.compile(r"_(scale|scales|scale_inv|scale_2|input_scale|activation_scale)$|\.(input|weight)_scale$")
_ADAPTED = re.compile(r"^base_model\.model\.|\.(base_layer|original_module)(?=\.)")


def reverted(model: Any, values: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Returns the values as their library writes them: under names without wrappers, also those of adapters, and for a
    model of transformers by its reverse conversions."""
    plain = plain_names(model, adapters=True)
    values = {plain(name): value for name, value in values.items()}
    library = sys.modules.get("transformers.core_model_loading")
    inner = without_wrappers(model)
    if library is None or not _is_pretrained(inner):
        return values
    result: dict[str, Tensor] = library.revert_weight_conversion(inner, values)
    # In the order of the model, not of the new names: a writer then gathers each unit of an engine once.
    places = {id(value.node): place for place, value in enumerate(values.values()) if isinstance(value, LazyTensor)}

    def place(item: tuple[str, Tensor]) -> int:
        nodes = item[1].nodes() if isinstance(item[1], LazyTensor) else ()
        return min((places[id(node)] for node in nodes if id(node) in places), default=-1)

    return dict(sorted(result.items(), key=place))


def without_wrappers(model: Any) -> Any:
    """Returns the model inside those of `torch.compile` and PEFT."""
    model = getattr(model, "_orig_mod", model)
    return model.get_base_model() if hasattr(model, "peft_config") and hasattr(model, "get_base_model") else model


def _is_pretrained(model: Any) -> bool:
    base = getattr(sys.modules.get("transformers.modeling_utils"), "PreTrainedModel", None)
    return base is not None and isinstance(model, base)


def renamed(model: Any, name: str) -> str:
    """Returns the name in files of a tensor that no conversion merges or splits, such as a tied weight."""
    names = list(reverted(model, {name: torch.empty(0, device="meta")}))
    return names[0] if len(names) == 1 else name


def source_of(model: Any, folder: bool | str | os.PathLike[str]) -> Path:
    """Returns the folder of the files that a model comes from: `folder`, or for True that of the model's config."""
    name = folder if not isinstance(folder, bool) else getattr(without_wrappers(model).config, "_name_or_path", "")
    if not Path(name or "missing").is_dir():
        raise UsageError(
            "save: requantize",
            expected="a local folder with the files that the model comes from",
            got=repr(str(name)),
            fix="pass it: requantize=FOLDER",
        )
    return Path(name)


def compare_with_source(model: Any, found: Mapping[str, Any], folder: Path) -> None:
    """Logs how names and shapes of a save differ from the local files that a transformers model comes from.

    A model of another class than the source's, and codes and scales of the source, are no reason for a line.

    Args:
        found: name -> something with the shape of the tensor.
    """
    model = without_wrappers(model)
    source = Path(getattr(getattr(model, "config", None), "_name_or_path", None) or folder)
    if not (source / "config.json").is_file() or source.resolve() == folder.resolve():
        return
    try:
        files = _Files.of(source)
    except ConversionError:
        return  # the source is gone, or has files of another format
    if type(model).__name__ not in (files.config.get("architectures") or ()):
        return
    pairs = (getattr(model, "all_tied_weights_keys", None) or {}).items()
    tied = {files.own_name(renamed(model, name), model) for pair in pairs for name in pair}
    values = {files.own_name(name, model): value for name, value in found.items()}
    if differences := files.differences(values, model, (), tied):
        logger.warning(
            "%s differs from its source %s, and servers that read its names may not load it: %s",
            folder,
            source,
            differences,
        )


def as_in_files(source: Source, path: Path, *, allow_differences: bool = False, requantize: bool = False) -> Source:
    """Returns a checkpoint with the names, shapes and layout of a model's files.

    Args:
        path: a folder, an index (`*.index.json`), or a safetensors file; of a transformers model with its config.json.
        allow_differences: print differences of names and shapes instead of raising an error.
        requantize: encode weights, and round the others, as in these files.

    Raises:
        ConversionError: names or shapes differ, or the files of `path` cannot be read; the message lists them.
    """
    files = _Files.of(path)
    model = files.model()
    parts = [_Contiguous(source, weight) for weight in source.weights]
    values = {_in_base(file.weight.name): file.tensor() for file in parts}
    ties = {_in_base(alias): _in_base(name) for alias, name in source.ties.items()}
    named = {**values, **{alias: values[name] for alias, name in ties.items()}}
    pairs = [(renamed(model, alias), renamed(model, name)) for alias, name in ties.items()]
    unsaved = set(getattr(model, "_keys_to_ignore_on_save", None) or ()) - files.shapes.keys()
    found = {
        files.own_name(name, model): value for name, value in reverted(model, named).items() if name not in unsaved
    }
    tied = [{files.own_name(name, model) for name in pair} for pair in pairs]
    for names in tied:  # the names that the files have; all files of one model agree on one at least
        for name in (names - files.shapes.keys()) if names & files.shapes.keys() else ():
            found.pop(name, None)
    if differences := files.differences(found, model, source.left_out):
        if not allow_differences:
            raise ConversionError(
                f"--like {path}: the checkpoint does not have the names and shapes of these files: {differences}; "
                "pass the model that was trained, or --allow-differences to write it anyway"
            )
        print(f"Differs from {path}: {differences}")
    at_end = None
    if requantize:
        try:
            found, errors = requantized(found, path)
        except UsageError as error:
            raise ConversionError(str(error)) from error
        at_end = errors.report
    kinds = {weight.name: weight for weight in source.weights}
    weights = []
    for index, (name, value) in enumerate(found.items()):
        assert isinstance(value, LazyTensor), f"{name} was computed"
        leaves = [kinds[node.name] for node in value.nodes() if isinstance(node, Stored) and node.name in kinds]
        piece = ((index, 0, value.numel(), 0),) if value.numel() else ()
        kind = {key: all(getattr(leaf, key) for leaf in leaves) for key in ("is_buffer", "excludable", "is_code")}
        kind["is_code"] = requantize or kind["is_code"]
        weights.append(Weight(name, dtype_name(value.dtype), tuple(value.shape), piece, **kind))
    made = tuple(map(_Converted, found.values()))
    fingerprint = f"{source.fingerprint} in the layout of {sorted(files.shapes)}, requantized: {requantize}"
    return replace(source, fingerprint=fingerprint, weights=tuple(weights), ties={}, files=made, at_end=at_end)


def _in_base(name: str) -> str:
    """Returns a name of a model with PEFT's adapters as that of the base model."""
    return _ADAPTED.sub("", name) if name.startswith("base_model.model.") else name


class _Contiguous:
    """A tensor of a checkpoint, whose pieces may lie in several files, as one file."""

    def __init__(self, source: Source, weight: Weight) -> None:
        self.source, self.weight = source, weight

    def tensor(self) -> LazyTensor:
        place = TensorLocation(Path(self.source.tag), self.weight.dtype, self.weight.shape, 0)
        file: Any = self
        return LazyTensor(Stored(self.weight.name, place, file))

    def read(self, offset: int, into: memoryview, name: str) -> None:
        """Fills `into` with the bytes from `offset` on; see `OpenFile.read`."""
        itemsize = ITEMSIZE[self.weight.dtype]
        first, end = offset // itemsize, (offset + into.nbytes) // itemsize
        for file, start, length, place in self.weight.pieces:
            low, high = max(first, start), min(end, start + length)
            if low < high:
                data = self.source.files[file].read(place + (low - start) * itemsize, (high - low) * itemsize)
                into[(low - first) * itemsize : (high - first) * itemsize] = data.data


@dataclass(frozen=True)
class _Converted:
    """A converted tensor as a file, which is computed range by range."""

    value: Tensor

    def read(self, start: int, nbytes: int) -> NDArray[np.uint8]:
        itemsize = self.value.element_size()
        out = torch.empty(nbytes // itemsize, dtype=self.value.dtype)
        with torch.no_grad():
            read_into(self.value, start // itemsize, out)
        data: NDArray[np.uint8] = out.view(torch.uint8).numpy()
        return data


@dataclass(frozen=True)
class _Files:
    """Files of a model.

    Attributes:
        shapes: name -> shape, or None if the index alone is there.
        config: the content of config.json, or an empty mapping.
    """

    path: Path
    shapes: Mapping[str, tuple[int, ...] | None]
    config: Mapping[str, Any]

    @classmethod
    def of(cls, path: Path) -> _Files:
        folder = path if path.is_dir() else path.parent
        try:
            index = path if path.name.endswith(".index.json") else None
            if path.is_dir():
                index = next((path / name for name in _INDEXES if (path / name).is_file()), None)
            shapes = _names_of_index(index) if index is not None else None
            if shapes is None:
                shapes = {name: place.shape for name, place in SafetensorsFolder(index or path).tensors.items()}
            config = _read(folder / "config.json") if (folder / "config.json").is_file() else {}
        except (UsageError, ValueError, OSError) as error:
            raise ConversionError(f"--like {path}: {error}") from error
        return cls(path, shapes, config)

    def model(self) -> Any:
        """Returns the model on the meta device, with the conversions that its files need; None if it is not known."""
        architecture = next(iter(self.config.get("architectures") or ()), "")
        try:
            import transformers  # imported only for a model of transformers
            from transformers import conversion_mapping, core_model_loading
        except ImportError:
            return None
        cls = getattr(transformers, architecture, None)
        if cls is None:
            return None
        with torch.device("meta"):
            model = cls(cls.config_class.from_pretrained(self.path if self.path.is_dir() else self.path.parent))
        conversions = conversion_mapping.get_model_conversion_mapping(model)
        renamings = [each for each in conversions if isinstance(each, core_model_loading.WeightRenaming)]
        converters = [each for each in conversions if isinstance(each, core_model_loading.WeightConverter)]
        there = model.state_dict()
        for name in self.shapes:  # which notes that a conversion was used
            core_model_loading.rename_source_key(name, renamings, converters, model.base_model_prefix, there)
        model._weight_conversions = [each for each in conversions if each.was_used()]
        return model

    def own_name(self, name: str, model: Any) -> str:
        """Returns a name with or without the prefix of the base model, as the files have it."""
        prefix = f"{getattr(model, 'base_model_prefix', '')}."
        others = [each for each in (name.removeprefix(prefix), prefix + name) if each in self.shapes]
        return name if name in self.shapes or prefix == "." or not others else others[0]

    def differences(
        self, found: Mapping[str, Any], model: Any, left_out: Sequence[str], tied: Set[str] = frozenset()
    ) -> str:
        """Returns how names and shapes differ from those of the files, or an empty text.

        Args:
            tied: names that may be missing on either side.
        """
        shapes = {**dict.fromkeys(tied & found.keys()), **self.shapes}
        if "quantization_config" in self.config and not any(
            map(_SCALES.search, found)
        ):  # 16-bit values instead of codes and scales
            shapes = {name.removesuffix("_blocks"): None for name in shapes if not _SCALES.search(name)}
        ignored = re.compile("|".join(getattr(model, "_keys_to_ignore_on_load_unexpected", None) or ("(?!)",)))
        more = sorted(found.keys() - shapes.keys())
        missing = sorted(name for name in shapes.keys() - found.keys() - tied if not ignored.search(name))
        other = [
            f"{name} is {list(found[name].shape)}, and {list(shape)} in the files"
            for name, shape in sorted(shapes.items())
            if shape is not None and name in found and tuple(found[name].shape) != shape
        ]
        parts = [
            f"{len(names)} {what}: {listed(names, '; ')}"
            for what, names in (
                ("names that the files do not have", more),
                ("names that the checkpoint does not have", missing),
                ("other shapes", other),
            )
            if names
        ]
        if parts and missing and left_out:
            parts.append(f"{len(left_out)} frozen parameters were saved without values")
        if parts and model is None and self.config:
            name = next(iter(self.config.get("architectures") or ("none",)))
            parts.append(f"transformers, which knows the conversions of {name}, is not installed or has no such class")
        return "; ".join(parts)


def _read(path: Path) -> Mapping[str, Any]:
    content = parse_plain_json(read_at_most(path, _MOST_NBYTES, regular=True))
    if not isinstance(content, dict):
        raise UsageError(f"{path}", expected="a JSON object", got=type(content).__name__)
    return content


def _names_of_index(index: Path) -> dict[str, tuple[int, ...] | None] | None:
    """Returns the names in an index without safetensors files beside it; None if there are some."""
    places = _read(index).get("weight_map")
    if not isinstance(places, dict) or not all(isinstance(file, str) for file in places.values()):
        raise UsageError(f"{index}: weight_map", expected="names of tensors and their files", got=places)
    is_there = any((index.parent / file).exists() for file in set(places.values()) if file.endswith(".safetensors"))
    return None if is_there else dict.fromkeys(places)
