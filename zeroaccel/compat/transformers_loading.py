"""transformers' `from_pretrained` at stage 3, by ranges: each rank reads the bytes of its shards from the files.

transformers' own stage 3 path reads every file on rank 0, converts there and broadcasts. Here its other path runs on
`LazyTensor`s: the library matches names, reports missing, unexpected and mismatched ones, and applies its conversions;
the place where it would set a parameter notes the lazy result instead. Then each rank reads its ranges of them. So
names, shapes and values are those of the library on one process, and no rank reads for another.

`finder.py` patches the methods when transformers is imported. Other stages, and formats that the library has to read
whole (GGUF, `.bin` files of old torch versions, a `state_dict` of the caller), keep the library's path.
"""

from __future__ import annotations

import sys
import time
import zipfile
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from zeroaccel.comm.agree import agreed
from zeroaccel.comm.collectives import Collectives
from zeroaccel.comm.topology import init_process_group
from zeroaccel.errors import CheckpointError, UsageError, listed
from zeroaccel.logs import logger
from zeroaccel.zero.access.deferred_init import ModuleShards, destination
from zeroaccel.zero.access.lazy_tensors import LazyTensor, Loaded, Stored
from zeroaccel.zero.access.load_safetensors import SafetensorsFolder, load_buffer, load_module
from zeroaccel.zero.tensor_subclasses import local

_CONVERSIONS = "transformers.core_model_loading"


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
    if state_dict is not None or not _is_for_ranges(checkpoint_files, load_config):
        return original(model, state_dict, checkpoint_files, load_config, *args, **kwargs)
    return _load(model, [Path(file) for file in checkpoint_files], load_config), None


def _is_for_ranges(files: Sequence[str] | None, load_config: Any) -> bool:
    deepspeed = sys.modules["transformers.integrations.deepspeed"]
    library = sys.modules.get(_CONVERSIONS)  # transformers 4 has no such module
    if not files or load_config.hf_quantizer is not None or not hasattr(library, "set_param_for_module"):
        return False
    return deepspeed.is_deepspeed_zero3_enabled() and all(map(_has_ranges, map(str, files)))


def _has_ranges(file: str) -> bool:
    return file.endswith(".safetensors") or (Path(file).is_file() and zipfile.is_zipfile(file))


def _load(model: Any, files: Sequence[Path], load_config: Any) -> Any:
    """Loads the files' values into the model; returns transformers' record of names. (all ranks)"""
    collectives = Collectives(init_process_group())
    library: Any = sys.modules[_CONVERSIONS]
    targets = _Targets()
    with agreed(collectives, "from_pretrained: files"):
        safe = SafetensorsFolder([file for file in files if file.suffix == ".safetensors"])
        values: dict[str, Tensor] = {name: safe[name] for name in safe.tensors}
        for file in files:
            if file.suffix != ".safetensors":
                values |= _mapped(file)
        with _setting(library, set_param_for_module=targets.add, tqdm=_no_bar):
            record, _ = library.convert_and_load_state_dict_in_model(model, values, load_config)
        targets.check()
    _check_same(collectives, values)
    failed = record.conversion_errors or (record.mismatched_keys and not load_config.ignore_mismatched_sizes)
    if not failed:  # otherwise transformers reports it, and no bytes need to be read
        _fill(targets, safe, collectives)
    return record


class _Targets:
    """The values for the parameters and buffers of a model.

    Attributes:
        parameters: module -> its name of a parameter -> values.
        buffers: (module, its name of a buffer) -> values.
    """

    def __init__(self) -> None:
        self.parameters: dict[nn.Module, dict[str, Tensor]] = {}
        self.buffers: dict[tuple[nn.Module, str], Tensor] = {}
        self._misfits: list[str] = []

    def add(self, model: Any, name: str, value: Tensor, record: Any, quantizer: Any) -> None:
        """Notes a value; takes the place of transformers' `set_param_for_module`."""
        path, _, own = name.rpartition(".")
        module = model.get_submodule(path) if path else model
        if own == "_extra_state":
            module.set_extra_state(value)
            record.missing_keys.discard(name)
            return
        target = getattr(module, own)
        if target is None:
            record.unexpected_keys.add(name)
            return
        record.missing_keys.discard(name)
        if value.shape != target.shape:
            record.mismatched_keys.add((name, value.shape, target.shape))
            return
        if quantizer is None:
            self._check_codes(name, target, value)
        target._is_hf_initialized = True  # transformers' initialization leaves it alone
        if own in module._buffers:
            self.buffers[module, own] = value
        else:
            self.parameters.setdefault(module, {})[own] = value

    def _check_codes(self, name: str, target: Tensor, value: Tensor) -> None:
        nodes = value.nodes() if isinstance(value, LazyTensor) else ()
        dtypes = {each.dtype for each in nodes if isinstance(each, (Stored, Loaded))} or {value.dtype}
        for dtype in dtypes - {target.dtype, torch.bool}:
            if target.is_floating_point() and 1 in (dtype.itemsize, target.dtype.itemsize):
                self._misfits.append(f"{name}: {dtype} in the files, {target.dtype} in the model")

    def check(self) -> None:
        """Raises UsageError if the files have codes for a parameter, and no scales are known for them."""
        if self._misfits:
            raise UsageError(
                "from_pretrained: weights in 8 bits or fewer, which mean nothing without their scales: "
                + listed(self._misfits, "; "),
                expected="a config.json whose quantization_config describes the codes, or weights in 16 bits or more",
                fix="load a checkpoint in bf16, or add the quantization_config of the model that the files come from",
            )


def _fill(targets: _Targets, safe: SafetensorsFolder, collectives: Collectives) -> None:
    """Reads this rank's ranges. (all ranks)"""
    topology = init_process_group()
    shards = ModuleShards(collectives, destination(None, topology.device, dtype=None, remote_device=None))
    started = time.perf_counter()
    total = sum(each.numel() * each.element_size() for each in _values(targets))
    with agreed(collectives, "from_pretrained: read"), torch.no_grad(), closing(safe), _bar(total, collectives) as show:
        for module, values in targets.parameters.items():
            load_module(module, values, shards)
            show(sum(each.numel() * each.element_size() for each in values.values()))
        for (module, own), value in targets.buffers.items():
            load_buffer(module, own, value, local(module.get_buffer(own)).device)
            show(value.numel() * value.element_size())
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


def _no_bar(items: Any, *args: Any, **kwargs: Any) -> Any:
    return items


def _mapped(file: Path) -> dict[str, Tensor]:
    """Returns the tensors of a `.bin` file, in memory that is mapped from it; unpickles plain data only."""
    try:
        state: Mapping[str, Any] = torch.load(file, mmap=True, weights_only=True, map_location="cpu")
    except Exception as error:  # torch's readers of zip files and pickles raise a dozen classes
        raise CheckpointError(
            f"{file}: not a valid file of weights ({type(error).__name__}: {str(error).partition(chr(10))[0]})",
            fix="download or save the file again, as safetensors if it is not from a source that you trust",
        ) from error
    return {name: LazyTensor(Loaded(value)) for name, value in state.items() if isinstance(value, Tensor)}


def _check_same(collectives: Collectives, values: Mapping[str, Tensor]) -> None:
    """Raises UsageError if the ranks see files with different tensors. (all ranks)"""
    own = {name: (tuple(each.shape), str(each.dtype)) for name, each in values.items()}
    digests = collectives.gather_objects(
        zlib.crc32(repr(sorted(own.items())).encode()), "from_pretrained: names and shapes"
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
def _setting(module: Any, **values: Any) -> Iterator[None]:
    """Replaces attributes of a module during the block."""
    before = {name: getattr(module, name) for name in values}
    vars(module).update(values)
    try:
        yield
    finally:
        vars(module).update(before)
