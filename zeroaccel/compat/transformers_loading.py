"""transformers' `from_pretrained` at stage 3, by ranges: each rank reads the bytes of its shards from the files.

transformers' own stage 3 path reads every file on rank 0, converts there and broadcasts. Here its other path runs on
`LazyTensor`s: the library matches names, reports missing, unexpected and mismatched ones, and applies its conversions;
the place where it would set a parameter notes the lazy result instead. Then each rank reads its ranges of them. So
names, shapes and values are those of the library on one process, and no rank reads for another.

`finder.py` patches the methods when transformers is imported. Other stages, and formats that the library has to read
whole (GGUF, `.bin` files of old torch versions, a `state_dict` of the caller), keep the library's path.
"""

from __future__ import annotations

import os
import re
import sys
import time
import zipfile
import zlib
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager, suppress
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from zeroaccel.comm.agree import agreed
from zeroaccel.comm.collectives import Collectives
from zeroaccel.comm.topology import init_process_group
from zeroaccel.compat.deepspeed_config import from_library
from zeroaccel.compat.deepspeed_init import DeepSpeedInit
from zeroaccel.config import load_config
from zeroaccel.errors import CheckpointError, UsageError, listed
from zeroaccel.logs import logger
from zeroaccel.zero.access.coded_weights import CODES, as_codes
from zeroaccel.zero.access.deferred_init import ModuleShards, ShardTarget, note_places
from zeroaccel.zero.access.lazy_tensors import LazyTensor, Loaded, Stored, materialized
from zeroaccel.zero.access.load_safetensors import SafetensorsFolder, indexed_files, load_buffer, load_module, make_room
from zeroaccel.zero.access.param_registry import handle_of
from zeroaccel.zero.access.safetensors_file import dtype_name, tensor_locations
from zeroaccel.zero.from_config import DTYPES
from zeroaccel.zero.precision import forget_cast

_CONVERSIONS = "transformers.core_model_loading"
_INTEGRATION = "transformers.integrations.deepspeed"
_DEQUANTIZED = ("fp8", "mxfp8", "mxfp4")
_SCALE = re.compile(r"(?<!activation_)(?<!input_)scales?(_inv)?$")


def codes_dtype() -> torch.dtype | None:
    """Returns the dtype to compute in with frozen weights that stay codes; None if the job's config decodes them."""
    source = sys.modules[_INTEGRATION].deepspeed_config()
    if source is None:
        return None
    settings = load_config(from_library(source), unknown_keys="lenient")
    return DTYPES[settings.precision] if settings.zero_optimization.frozen_weights == "codes" else None


def dequantize(quantizer: Any) -> None:
    """Makes a quantizer describe decoded weights on any device, in jobs whose config stores them as codes."""
    quantization = quantizer.quantization_config
    if quantizer.pre_quantized and _method(quantization) in _DEQUANTIZED and codes_dtype() is not None:
        quantization.dequantize = True


def load(
    original: Callable[..., Any],
    model: Any,
    state_dict: Any,
    checkpoint_files: Any,
    load_config: Any,
    *args: Any,
    **kwargs: Any,
) -> Any:
    """Replaces `PreTrainedModel._load_pretrained_model`. (all ranks)

    Args:
        original: the replaced method.
    """
    if state_dict is None:
        _refuse_codes(model, checkpoint_files or (), load_config.hf_quantizer)
    if state_dict is not None or not _is_for_ranges(checkpoint_files, load_config):
        made = original(model, state_dict, checkpoint_files, load_config, *args, **kwargs)
        if load_config.hf_quantizer is None and sys.modules[_INTEGRATION].is_deepspeed_zero3_enabled():
            _copy_rank0(model, made[0].missing_keys)
        if state_dict is None and checkpoint_files and sys.modules[_INTEGRATION].deepspeed_config() is not None:
            missing, unexpected = made[0].missing_keys, made[0].unexpected_keys
            num_found = len(model.state_dict().keys() - missing)
            _check_model(
                Path(checkpoint_files[0]).parent, num_found, unexpected, len(missing), num_found + len(unexpected)
            )
        return made
    return _load(model, [Path(file) for file in checkpoint_files], load_config), None


def _copy_rank0(model: Any, missing: Collection[str]) -> None:
    """Gives all ranks the parameters that transformers has read on rank 0 and that nothing shards. (all ranks)

    Adapters of `load_adapter` are such parameters.
    """
    collectives = Collectives(init_process_group())
    for name, param in model.named_parameters():
        if name not in missing and handle_of(param) is None and not param.is_meta:
            collectives.broadcast(param.detach(), 0, f"from_pretrained: {name}")


def check_folder(path: Any, subfolder: str, variant: str | None) -> None:
    """Raises an error that names the file if the files of a local checkpoint are damaged, in jobs with a config.

    At stage 3 every rank raises it (all ranks): transformers reads files before the ranks meet, and the others would
    wait for a rank that fails there. Below stage 3, scripts load on one rank, or on one after the other.
    """
    deepspeed = sys.modules[_INTEGRATION]
    is_path = isinstance(path, (str, os.PathLike))
    if not is_path or not torch.distributed.is_initialized() or deepspeed.deepspeed_config() is None:
        return
    folder = Path(path, subfolder)
    is_there, suffix = os.path.isdir(folder), f".{variant}" if variant else ""
    if not deepspeed.is_deepspeed_zero3_enabled():
        if is_there:
            _check_files(folder, suffix)
        return
    collectives = Collectives(init_process_group())
    if not any(collectives.gather_objects(is_there, "from_pretrained: is there a folder")):
        return  # a name on a hub, or an error that transformers raises on every rank
    with agreed(collectives, "from_pretrained: folder"):
        if not is_there:
            raise UsageError(
                f"from_pretrained: {folder}", expected="the folder that other ranks have", got="no readable folder here"
            )
        _check_files(folder, suffix)


def _check_files(folder: Path, variant: str) -> None:
    """Raises UsageError or CheckpointError if transformers would load damaged files of a folder."""
    try:
        names = {file.name for file in folder.iterdir()}
        (folder / "config.json").read_bytes() if "config.json" in names else None
        for name in (f"model{variant}.safetensors", f"model.safetensors.index{variant}.json"):
            if name in names:
                SafetensorsFolder(folder / name)
                return
        if f"pytorch_model{variant}.bin" in names:
            files = [folder / f"pytorch_model{variant}.bin"]
        elif (index := f"pytorch_model.bin.index{variant}.json") in names:
            files = indexed_files(folder / index)[0]
        else:
            return
        for file in files:
            with open(file, "rb") as opened:
                begin = opened.read(2)
            # A pickle of a torch before 1.6 is not a zip file; a damaged zip file still begins like one.
            if not _has_ranges(str(file)) and begin in (b"PK", b""):
                _mapped(file)
    except OSError as error:
        raise UsageError(f"{error.filename or folder}: cannot be read ({error.strerror or error})") from error
    except (UsageError, CheckpointError) as error:
        partial = [*folder.glob("*.incomplete"), *folder.glob(".cache/huggingface/download/*.incomplete")]
        if not partial:
            raise
        raise UsageError(f"{error}. A download of {folder} is not complete: {partial[0]}") from error


def _check_model(folder: Path, num_found: int, others: Collection[str], num_missing: int, num_values: int) -> None:
    """Raises UsageError if files have hardly any tensor of the model, which another config.json describes.

    Args:
        num_found: number of the files' tensors that the model has.
        others: names of tensors in the files.
        num_missing: number of the model's tensors that the files do not have.
        num_values: number of tensors in the files.
    """
    if 10 * num_found < min(num_values, num_missing):
        raise UsageError(
            f"from_pretrained: {folder}",
            expected="weights of the model that config.json describes",
            got=f"{num_values} tensors, {num_found or 'none'} of which the model has: {listed(sorted(others))}",
            fix="download config.json and the weights from the same source",
        )


def _is_for_ranges(files: Sequence[str] | None, load_config: Any) -> bool:
    deepspeed = sys.modules[_INTEGRATION]
    library = sys.modules.get(_CONVERSIONS)  # transformers 4 has no such module
    quantizer = load_config.hf_quantizer
    if not files or not hasattr(library, "set_param_for_module"):
        return False
    if not deepspeed.is_deepspeed_zero3_enabled() and codes_dtype() is None:
        return False
    if quantizer is not None and not (quantizer.pre_quantized and _dequantizes(quantizer.quantization_config)):
        return False
    return load_config.device_map is None and all(map(_has_ranges, map(str, files)))


def _method(quantization: Any) -> str:
    return str(getattr(quantization.quant_method, "value", quantization.quant_method))


def _dequantizes(quantization: Any) -> bool:
    """True if the library computes plain weights from codes and scales, by functions that are known to be exact."""
    return _method(quantization) in _DEQUANTIZED and getattr(quantization, "dequantize", False) is True


def _refuse_codes(model: Any, files: Sequence[str], quantizer: Any = None) -> None:
    """Raises UsageError for weights in 8 bits that transformers would cast: their scales would have no effect.

    Args:
        quantizer: transformers' quantizer for the model, which knows codes that have scales beside them.
    """
    is_known = quantizer is not None and quantizer.pre_quantized
    # A quantizer without functions for loading reads values by their names, and casts them.
    casts = not is_known or not getattr(quantizer, "get_load_operations", lambda: True)()
    dtypes: dict[str, str] = {}
    for file in filter(Path.is_file, map(Path, files)):
        with suppress(ValueError, KeyError, TypeError, AttributeError, OSError):  # transformers reports these
            if file.suffix == ".safetensors":
                dtypes |= {name: place.dtype for name, place in tensor_locations(file)}
            elif _has_ranges(str(file)):
                dtypes |= {name: dtype_name(value.dtype) for name, value in _mapped(file).items()}
    scaled = {name.rpartition(".")[0] for name in dtypes if _SCALE.search(name)} if is_known else set()
    small = {name: dtype for name, dtype in dtypes.items() if dtype.startswith("F8_") or dtype in ("I8", "U8")}
    state = model.state_dict() if casts and small else {}
    floats = {name for name, each in state.items() if each.is_floating_point() and each.element_size() > 1}
    codes = [
        f"{name}: {dtype}"
        for name, dtype in small.items()
        if (dtype.startswith("F8_") and not _SCALE.search(name) and name.rpartition(".")[0] not in scaled)
        or name in floats
    ]
    if codes:
        raise UsageError(
            f"from_pretrained: {Path(files[0]).parent} has weights in 8 bits: {listed(codes, '; ')}",
            expected="their scales in the files, and a config.json whose quantization_config describes them",
            fix="load a checkpoint in 16 bits or more, or the config.json that belongs to these files",
        )


def _has_ranges(file: str) -> bool:
    return file.endswith(".safetensors") or (Path(file).is_file() and zipfile.is_zipfile(file))


def _load(model: Any, files: Sequence[Path], load_config: Any) -> Any:
    """Loads the files' values into the model; returns transformers' record of names. (all ranks)"""
    collectives = Collectives(init_process_group())
    library: Any = sys.modules[_CONVERSIONS]
    targets = _Targets()
    with agreed(collectives, "from_pretrained: files"):
        indexed = (load_config.sharded_metadata or {}).get("weight_map") or {}
        weight_map = {name: file for name, file in indexed.items() if str(file).endswith(".safetensors")}
        safe = SafetensorsFolder([file for file in files if file.suffix == ".safetensors"], weight_map)
        values: dict[str, Tensor] = {name: safe[name] for name in safe.tensors}
        for file in files:
            if file.suffix != ".safetensors":
                values |= _mapped(file)
        with _setting(library, {"set_param_for_module": targets.add, "tqdm": _no_bar}), _pure_mxfp4():
            record, _ = library.convert_and_load_state_dict_in_model(model, values, load_config)
        targets.check(values, files, len(record.missing_keys))
    _check_same(collectives, values)
    failed = record.conversion_errors or (record.mismatched_keys and not load_config.ignore_mismatched_sizes)
    if not failed:  # otherwise transformers reports it, and no bytes need to be read
        _fill(model, targets, safe, collectives)
    return record


class _Targets:
    """The values for the parameters and buffers of a model.

    Attributes:
        parameters: module -> its name of a parameter -> values.
        buffers: (module, its name of a buffer) -> values.
        num_mismatches: number of values of another shape than their parameter's.
    """

    def __init__(self) -> None:
        self.parameters: dict[nn.Module, dict[str, Tensor]] = {}
        self.buffers: dict[tuple[nn.Module, str], Tensor] = {}
        self.num_mismatches = 0
        self._misfits: list[str] = []

    def add(self, model: Any, name: str, value: Tensor, record: Any, quantizer: Any) -> None:
        """Notes a value; takes the place of transformers' `set_param_for_module`."""
        path, _, key = name.rpartition(".")
        module = model.get_submodule(path) if path else model
        if key == "_extra_state":
            module.set_extra_state(materialized(value))
            record.missing_keys.discard(name)
            return
        target = getattr(module, key)
        if target is None:
            record.unexpected_keys.add(name)
            return
        record.missing_keys.discard(name)
        if value.shape != target.shape:
            record.mismatched_keys.add((name, value.shape, target.shape))
            self.num_mismatches += 1
            return
        self._check_codes(name, target, value, is_known=quantizer is not None)
        target._is_hf_initialized = True  # transformers' initialization leaves it alone
        if key in module._buffers:
            self.buffers[module, key] = value
        else:
            self.parameters.setdefault(module, {})[key] = value

    def _check_codes(self, name: str, target: Tensor, value: Tensor, *, is_known: bool) -> None:
        nodes = value.nodes() if isinstance(value, LazyTensor) else ()
        sources = {id(each): each.dtype for each in nodes if isinstance(each, (Stored, Loaded))}
        dtypes = list(sources.values()) or [value.dtype]
        codes = [each for each in dtypes if each not in (target.dtype, torch.bool) and each.itemsize == 1]
        # Every code of a quantizer has a scale; that of 8-bit floats may be in 8 bits too, but not in their dtype.
        num_floats = sum(each in (torch.float8_e4m3fn, torch.float8_e5m2, torch.int8) for each in codes)
        if is_known and len(dtypes) > 1 and 2 * num_floats <= len(dtypes):
            return
        if target.is_floating_point() and (codes or (target.element_size() == 1 and value.dtype is not target.dtype)):
            self._misfits.append(f"{name}: {(codes or dtypes)[0]} in the files, {target.dtype} in the model")

    def widen(self, shards: ModuleShards) -> None:
        """Gives parameters and buffers the dtype of their values: transformers keeps some in fp32.

        Args:
            shards: owner of new shards.
        """
        for module, values in self.parameters.items():
            for key, value in values.items():
                param = module._parameters.get(key)  # None for codes, which `keep_codes` added
                if param is None or param.is_meta or param.dtype is value.dtype:
                    continue
                if (handle := handle_of(param)) is not None:
                    handle.registry.drop([param])
                param.data = torch.empty(value.shape, dtype=value.dtype, device=param.device)
                forget_cast(param)
                if handle is not None:
                    shards.shard(module)
        for (module, key), value in self.buffers.items():
            module._buffers[key] = module.get_buffer(key).to(value.dtype)

    def keep_codes(self, model: Any, dtype: torch.dtype, device: torch.device) -> None:
        """Replaces parameters whose values come from codes by `CodedWeight`s.

        Args:
            dtype: dtype to compute in.
            device: device that computes.
        """
        names = {module: name for name, module in model.named_modules()}
        for module, values in self.parameters.items():
            for key, value in list(values.items()):
                made = as_codes(f"{names[module]}.{key}", value, dtype, device)
                if made is not None:
                    weight, codes = made
                    weight._is_hf_initialized = True  # type: ignore[attr-defined]
                    module._parameters[key] = weight
                    del values[key]
                    values[f"{key}.{CODES}"] = codes

    def check(self, values: Mapping[str, Tensor], files: Sequence[Path], num_missing: int) -> None:
        """Raises UsageError if the files belong to another model, or have codes without known scales."""
        found = sum(map(len, self.parameters.values())) + len(self.buffers) + self.num_mismatches
        _check_model(files[0].parent, found, values, num_missing, len(values))
        if self._misfits:
            raise UsageError(
                "from_pretrained: weights in 8 bits or fewer, which mean nothing without their scales: "
                + listed(self._misfits, "; "),
                expected="a config.json whose quantization_config describes the codes, or weights in 16 bits or more",
                fix="load a checkpoint in bf16, or add the quantization_config of the model that the files come from",
            )


def _fill(model: Any, targets: _Targets, safe: SafetensorsFolder, collectives: Collectives) -> None:
    """Reads this rank's ranges. (all ranks)"""
    deepspeed = sys.modules[_INTEGRATION]
    # For parameters on the meta device, where transformers builds models with a quantization config.
    shards = DeepSpeedInit(config_dict_or_path=deepspeed.deepspeed_config()).shards
    if shards is None:  # below stage 3, as transformers does
        shards = ModuleShards(collectives, ShardTarget(None, torch.device("cpu")))
    started = time.perf_counter()
    whole = not deepspeed.is_deepspeed_zero3_enabled()
    if (dtype := codes_dtype()) is not None:
        targets.keep_codes(model, dtype, init_process_group().device)
    total = sum(each.numel() * each.element_size() for each in _values(targets))
    with agreed(collectives, "from_pretrained: read"), torch.no_grad(), closing(safe), _bar(total, collectives) as show:
        targets.widen(shards)
        for module, values in targets.parameters.items():
            make_room(module, values, shards, whole=whole)
        for module, values in targets.parameters.items():
            load_module(module, values)
            show(sum(each.numel() * each.element_size() for each in values.values()))
        for (module, key), value in targets.buffers.items():
            load_buffer(module, key, value, shards.destination.device)
            show(value.numel() * value.element_size())
    if shards.registry.units:
        note_places(model)
        shards.watch_uses()
    logger.debug("from_pretrained: read %d bytes in %.2f s", safe.read_nbytes, time.perf_counter() - started)


def _values(targets: _Targets) -> Iterator[Tensor]:
    for values in targets.parameters.values():
        yield from values.values()
    yield from targets.buffers.values()


@contextmanager
def _bar(total: int, collectives: Collectives) -> Iterator[Callable[[int], object]]:
    """Shows bytes, rate and the time left in transformers' progress bar on rank 0, unless the program disabled it."""
    if collectives.rank:
        yield lambda nbytes: None
        return
    tqdm = sys.modules["transformers.utils.logging"].tqdm
    with tqdm(total=total, unit="B", unit_scale=True, desc="Loading weights") as bar:
        yield bar.update


@contextmanager
def _pure_mxfp4() -> Iterator[None]:
    """Replaces transformers' dequantization of MXFP4, which writes into a buffer, during the block."""
    library = sys.modules.get("transformers.integrations.mxfp4")
    if library is None:
        yield
        return
    with _setting(library, {"_convert_moe_packed_tensors": _mxfp4_values}):
        yield


def _mxfp4_values(blocks: Tensor, scales: Tensor, *, dtype: torch.dtype = torch.bfloat16, **_: Any) -> Tensor:
    """Returns the weights of experts, (E, K, N), with the bits of transformers' function.

    E experts, N rows of K elements in G groups of 2B; an OCP microscaling format: 4-bit floats (E2M1) with an exponent
    per group.

    Args:
        blocks: (E, N, G, B) uint8, two codes per byte, the lower half first.
        scales: (E, N, G) uint8, exponents plus 127.
    """
    table = torch.tensor(sys.modules["transformers.integrations.mxfp4"].FP4_VALUES, dtype=dtype)
    # The transposition comes first: elementwise functions of a view need only the bytes of a range.
    packed = blocks.to(torch.uint8).permute(0, 2, 3, 1)
    codes = (packed[:, :, :, None] >> torch.tensor([[0], [4]], dtype=torch.uint8)) & 0x0F
    exponents = scales.to(torch.int32).permute(0, 2, 1)[:, :, None, None] - 127
    values = torch.ldexp(table[codes.to(torch.int)], exponents).to(dtype)
    return values.reshape(blocks.shape[0], -1, blocks.shape[1])


def _no_bar(items: Any, *args: Any, **kwargs: Any) -> Any:
    return items


def _mapped(file: Path) -> dict[str, Tensor]:
    """Returns the tensors of a `.bin` file, in memory that is mapped from it; unpickles plain data only."""
    try:
        state: Mapping[str, Any] = torch.load(file, mmap=True, weights_only=True, map_location="cpu")
    except Exception as error:  # torch's readers of zip files and pickles raise a dozen classes
        lines = str(error).splitlines() or [""]
        reason = next((line.strip() for line in lines if "GLOBAL" in line), lines[0])
        raise CheckpointError(
            f"{file}: not a valid file of weights ({type(error).__name__}: {reason.partition('. ')[0]})",
            fix="download or save the file again, as safetensors if it is not from a source that you trust",
        ) from error
    return {name: LazyTensor(Loaded(value)) for name, value in state.items() if isinstance(value, Tensor)}


def _check_same(collectives: Collectives, values: Mapping[str, Tensor]) -> None:
    """Raises UsageError if the ranks see files with different tensors. (all ranks)"""
    facts = {name: (tuple(each.shape), str(each.dtype)) for name, each in values.items()}
    digests = collectives.gather_objects(
        zlib.crc32(repr(sorted(facts.items())).encode()), "from_pretrained: names and shapes"
    )
    others = [rank for rank, each in enumerate(digests) if each != digests[0]]
    if others:
        raise UsageError(
            "from_pretrained: the files",
            expected="the same tensors on all ranks",
            got=f"other names, shapes or dtypes on {collectives.named(others)} than on rank 0",
            fix="copy the same checkpoint to all machines",
        )


@contextmanager
def _setting(module: Any, values: Mapping[str, Any]) -> Iterator[None]:
    """Replaces attributes of a module during the block."""
    before = {name: getattr(module, name) for name in values}
    vars(module).update(values)
    try:
        yield
    finally:
        vars(module).update(before)
