"""Loads weights from safetensors files straight into shards: each rank reads only the bytes that it keeps.

For models on the meta device, of `zero.Init`, or of ordinary parameters. A parameter that is neither in the files nor
initialized is an error; one message lists all misfits before any values are read. `deferred_init.py` lays out the
shards; `checkpoint/` saves.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType

import torch
from torch import Tensor, nn

from zeroaccel.comm.agree import agreed
from zeroaccel.comm.collectives import Collectives
from zeroaccel.comm.topology import init_process_group
from zeroaccel.config.bounds import parse_plain_json, read_at_most
from zeroaccel.errors import UsageError, listed
from zeroaccel.logs import logger
from zeroaccel.zero.access.deferred_init import ModuleShards, destination, leave_meta, note_places
from zeroaccel.zero.access.full_params import GatheredParameters
from zeroaccel.zero.access.lazy_tensors import LazyTensor, OpenFile, Stored, read_into, release
from zeroaccel.zero.access.param_registry import ParamHandle, handle_of
from zeroaccel.zero.access.safetensors_file import MOST_HEADER_NBYTES, TensorLocation, dtype_of, tensor_locations
from zeroaccel.zero.module_names import finder, plain_modules, plain_names
from zeroaccel.zero.storage.shards import absent_value
from zeroaccel.zero.tensor_subclasses import local, mark_small_floats, scales_of, tensors_of


class SafetensorsFolder:
    """The tensors of safetensors files by name; values are read only on request.

    Args:
        path: a file, a folder with at least one, an index (`*.safetensors.index.json`), or files.
        indexed: the index of several files: name of a tensor -> name of its file.

    Attributes:
        tensors: name -> location.

    Raises:
        UsageError: a file is missing, damaged or incomplete, or two files have a tensor of one name.
    """

    def __init__(
        self, path: str | os.PathLike[str] | Sequence[Path], indexed: Mapping[str, str] = MappingProxyType({})
    ) -> None:
        self.tensors: dict[str, TensorLocation] = {}
        self._files: dict[Path, OpenFile] = {}
        if isinstance(path, (str, os.PathLike)):
            files, indexed = _files(Path(path))
        else:
            files = list(path)
        for file in files:
            try:
                tensors = dict(tensor_locations(file))
            except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
                raise UsageError(
                    f"{file}: not a valid safetensors file ({type(error).__name__}: {error})",
                    fix="download or save the file again",
                ) from error
            for name in tensors.keys() & self.tensors.keys():
                if indexed.get(name) not in (file.name, self.tensors[name].path.name):
                    raise UsageError(
                        f"tensor {name}",
                        expected="one file that has it",
                        got=f"{self.tensors[name].path} and {file}",
                        fix="remove the file that does not belong to the checkpoint, or load its index",
                    )
                if indexed[name] != file.name:
                    del tensors[name]
            self.tensors.update(tensors)
            self._files[file] = OpenFile(file)
        self._check(files, indexed)

    def _check(self, files: Sequence[Path], indexed: Mapping[str, str]) -> None:
        absent = [f"{name} in {file}" for name, file in indexed.items() if name not in self.tensors]
        if absent:
            raise UsageError(
                f"{files[0].parent}: the index lists tensors that its files do not have: {listed(absent)}",
                fix="download or save the checkpoint again",
            )

    @property
    def read_nbytes(self) -> int:
        """Number of bytes read so far, without headers."""
        return sum(file.read_nbytes for file in self._files.values())

    def __getitem__(self, name: str) -> LazyTensor:
        place = self.tensors[name]
        return LazyTensor(Stored(name, place, self._files[place.path]))

    def close(self) -> None:
        """Closes the files."""
        for file in self._files.values():
            file.close()


def load_safetensors(
    model: nn.Module,
    path: str | os.PathLike[str],
    *,
    dtype: torch.dtype | None = None,
    remote_device: str | None = None,
    strict: bool = True,
    initialize_missing: Callable[[nn.Module], object] | None = None,
    rename: Callable[[str], str] | None = None,
    collectives: Collectives | None = None,
) -> int:
    """Fills a model from safetensors files. (all ranks)

    Parameters on the meta device become shards: each rank keeps 1/W of them (W ranks) and reads 1/W of the bytes.
    Parameters of `zero.Init` are filled in their shards, ordinary ones in full on every rank. Pass the model to
    `initialize()` afterwards. The files may store a tied parameter under any of its names.

    Args:
        path: a file, a folder of files, or an index.
        dtype: dtype of floating-point parameters on the meta device; None for the model's. Others keep theirs.
        remote_device: see `zero.Init`.
        strict: require every parameter and persistent buffer in the files, and nothing else. False warns instead, and
            leaves missing parameters on the meta device.
        initialize_missing: called with each module whose own parameters or buffers are missing in the files, to fill
            them; all ranks get rank 0's values.
        rename: maps a name in the model to the name in the files.
        collectives: the communication backend.

    Returns:
        Number of tensor bytes that this rank has read.

    Raises:
        UsageError: shapes or names do not match (the message lists them), or a file is missing or damaged; on every
            rank.
    """
    topology = init_process_group()
    collectives = collectives or Collectives(topology)
    with agreed(collectives, "load_safetensors: files"):
        folder = SafetensorsFolder(path)
        plan = _match(model, folder.tensors, rename or (lambda name: name))
        _check(plan, str(path), strict=strict, initialized=initialize_missing is not None)
        where = destination(None, topology.device, dtype=dtype, remote_device=remote_device)
    # Modules with missing values first: an initializer needs full tensors, allocated for one module at a time.
    shards = ModuleShards(collectives, where)
    if initialize_missing is not None:
        for module in plan.incomplete:
            _make_real(module, where.device)
            with GatheredParameters(module.parameters(recurse=False), modifier_rank=0):
                initialize_missing(module)
            shards.shard(module)
    _read(plan, folder, shards, where.device)
    note_places(model)
    shards.watch_uses()
    return folder.read_nbytes


def _read(plan: _Plan, folder: SafetensorsFolder, shards: ModuleShards, device: torch.device) -> None:
    new = [each for module in plan.parameters for _, each in _own_tensors(module) if each.is_meta]
    try:
        # Each rank reads only its own ranges. A file may be damaged or unreadable on one node, so the ranks agree.
        with agreed(shards.collectives, "load_safetensors: read"), torch.no_grad(), closing(folder):
            # An initializer may have removed parameters.
            parameters = {
                m: keys for m, keys in plan.parameters.items() if all(m._parameters[n] is not None for n in keys)
            }
            for module, names in parameters.items():
                make_room(module, names, shards)
            for module, names in parameters.items():
                load_module(module, {key: folder[name] for key, name in names.items()})
            for (module, key), name in plan.buffers.items():
                load_buffer(module, key, folder[name], device)
    except BaseException:
        with torch.no_grad():
            for param in new:  # the memory is new, and only a part of it has values
                _own_values(param, handle_of(param)).fill_(absent_value(param.dtype))
        raise


@dataclass
class _Plan:
    """The tensor in the files for each parameter and buffer, and the misfits.

    Attributes:
        parameters: module -> the module's name of a parameter -> name in the files; each parameter once.
        buffers: (module, its name of a buffer) -> name in the files.
        incomplete: modules with own parameters or buffers that are in no file.
        missing, unexpected, misshapen: misfits, as text for the error message.
        unset: non-persistent buffers on the meta device, which files do not store.
    """

    parameters: dict[nn.Module, dict[str, str]]
    buffers: dict[tuple[nn.Module, str], str]
    incomplete: list[nn.Module]
    missing: list[str]
    unexpected: list[str]
    misshapen: list[str]
    unset: list[str]


def _match(model: nn.Module, there: Mapping[str, TensorLocation], rename: Callable[[str], str]) -> _Plan:
    plan = _Plan({}, {}, [], [], [], [], [])
    # Tied parameters are one tensor under several names, and libraries may save it under any of them.
    names: dict[int, list[str]] = {}
    plain, find = plain_names(model), finder(there)
    for name, each in model.named_parameters(remove_duplicate=False):
        names.setdefault(id(each), []).append(rename(plain(name)))
    seen: set[int] = set()
    for prefix, module in plain_modules(model):
        for key, param in module._parameters.items():
            if param is None or id(param) in seen:
                continue
            seen.add(id(param))
            aliases = names[id(param)]
            stored = next(filter(None, map(find, aliases)), None)
            if stored is None:
                plan.missing.append(aliases[0])
                _note_missing(plan, module)
            elif _fits(plan, stored, param, there[stored]):
                plan.parameters.setdefault(module, {})[key] = stored
        for key, buffer in module._buffers.items():
            if buffer is not None:
                name = rename(f"{prefix}.{key}" if prefix else key)
                _match_buffer(plan, module, key, buffer, find(name) or name, there)
    of_model = {name for several in names.values() for name in several}
    of_model |= {rename(plain(name)) for name, _ in model.named_buffers(remove_duplicate=False)}
    plan.unexpected += sorted(there.keys() - {find(name) for name in of_model})
    return plan


def _match_buffer(
    plan: _Plan, module: nn.Module, key: str, buffer: Tensor, name: str, there: Mapping[str, TensorLocation]
) -> None:
    if key in module._non_persistent_buffers_set:
        if buffer.is_meta:
            plan.unset.append(name)
            _note_missing(plan, module)
    elif name not in there:
        plan.missing.append(name)
        _note_missing(plan, module)
    elif _fits(plan, name, buffer, there[name]):
        plan.buffers[module, key] = name


def _fits(plan: _Plan, name: str, tensor: Tensor, stored: TensorLocation) -> bool:
    shape, dtype = tuple(tensor.shape), dtype_of(stored.dtype)
    if stored.shape != shape:
        plan.misshapen.append(f"{name}: {stored.shape} in the file, {shape} in the model")
    elif dtype is not tensor.dtype and tensor.is_floating_point() and 1 in (dtype.itemsize, tensor.dtype.itemsize):
        plan.misshapen.append(
            f"{name}: {dtype} in the file, {tensor.dtype} in the model, and codes have no other dtype"
        )
        return False
    return stored.shape == shape


def _note_missing(plan: _Plan, module: nn.Module) -> None:
    if module not in plan.incomplete:
        plan.incomplete.append(module)


def _check(plan: _Plan, where: str, *, strict: bool, initialized: bool) -> None:
    problems = ["other shapes or dtypes: " + listed(plan.misshapen, "; ")] if plan.misshapen else []
    absent = [] if initialized else plan.missing
    if absent:
        problems.append("neither in the files nor initialized: " + listed(absent))
    if plan.unset and not initialized:
        problems.append("non-persistent buffers on the meta device, which no file stores: " + listed(plan.unset))
    if plan.unexpected:
        problems.append("not in the model: " + listed(plan.unexpected))
    # A different shape is an error even without `strict`: the tensor belongs to another model.
    if plan.misshapen or (strict and problems):
        raise UsageError(
            f"{where} does not fit the model: " + ". ".join(problems),
            fix="load it into the model that saved it, or pass initialize_missing, or strict=False if names differ",
        )
    if problems:
        logger.warning("%s: %s", where, ". ".join(problems))


def make_room(module: nn.Module, names: Collection[str], shards: ModuleShards, *, whole: bool = False) -> None:
    """Allocates those of a module's own parameters that are on the meta device, as shards, before values are read.

    Memory for all modules comes first: buffers of a read between shards would leave holes that nothing fills.

    Args:
        names: the module's names of parameters, or of tensors in a wrapper.
        shards: owner of new shards.
        whole: every rank gets all values.
    """
    if not any(param.is_meta for key, param in _own_tensors(module) if key in names):
        return
    # One rank does not shard: it allocates its parameters and fills them in full.
    if shards.collectives.world_size > 1 and not whole:
        shards.reserve(module, list(names))
    else:
        _make_real(module, shards.destination.device, names, shards.destination.dtype)


def load_module(module: nn.Module, values: Mapping[str, Tensor]) -> None:
    """Fills a module's own parameters; of those that are sharded, a rank reads its own part.

    Args:
        values: the module's name of a parameter, or of a tensor in a wrapper -> values of its shape.
    """
    params = dict(_own_tensors(module))
    for key, value in values.items():
        param = params[key]
        with torch._C.DisableTorchFunction():  # otherwise each question about a sharded parameter takes 0.3 ms
            handle = handle_of(param)
            handle = None if handle is None or handle.replaced else handle
            data = _own_values(param, handle)
        if handle is None:
            full = data if data.is_contiguous() else torch.empty_like(data, memory_format=torch.contiguous_format)
            read_into(value, 0, full.view(-1))
            if full is not data:
                data.copy_(full)
        else:
            read_into(value, handle.reach(handle.buffer.rank).start - handle.slot.start, data)
            handle.buffer.shard.commit()
        release(value)


def _own_values(param: nn.Parameter, handle: ParamHandle | None) -> Tensor:
    """Returns this rank's values of a parameter: a part of its shard, (n,), or all of them, in its shape."""
    return local(param).detach() if handle is None else handle.buffer.shard.stage()[handle.reach(handle.buffer.rank)]


def load_buffer(module: nn.Module, key: str, value: Tensor, device: torch.device) -> None:
    """Fills a buffer; one on the meta device becomes a buffer on `device`."""
    buffer = module.get_buffer(key)
    values = torch.empty(buffer.shape, dtype=buffer.dtype, device=device if buffer.is_meta else buffer.device)
    read_into(value, 0, values.view(-1))
    if buffer.is_meta:
        module._buffers[key] = values
    else:
        buffer.copy_(values)


def _make_real(
    module: nn.Module, device: torch.device, names: Collection[str] | None = None, dtype: torch.dtype | None = None
) -> None:
    """Allocates memory for the module's own meta parameters and buffers; the values are uninitialized."""
    mark_small_floats(module)
    for key, param in _own_tensors(module):
        if param.is_meta and (names is None or key in names):
            casts = dtype is not None and param.is_floating_point() and scales_of(param) is None
            kind = dtype if casts else param.dtype
            leave_meta(param, torch.empty(param.shape, dtype=kind, device=device))
    if names is None:
        for key, buffer in module._buffers.items():
            if buffer is not None and buffer.is_meta:
                module._buffers[key] = torch.empty_like(buffer, device=device)


def _own_tensors(module: nn.Module) -> Iterator[tuple[str, nn.Parameter]]:
    for key, param in module._parameters.items():
        if param is not None:
            yield from tensors_of(key, param)


# -- files


def _files(path: Path) -> tuple[list[Path], dict[str, str]]:
    """Returns the files of a file, folder or index, and the index: name of a tensor -> name of its file."""
    if ".index." in path.name and path.suffix == ".json":
        return indexed_files(path)
    if path.is_dir():
        index = sorted(path.glob("*.safetensors.index.json"))
        files, names = indexed_files(index[0]) if index else (sorted(path.glob("*.safetensors")), {})
        if not files:
            raise UsageError(f"{path}", expected="a folder with *.safetensors files")
        return files, names
    if not path.is_file():
        raise UsageError(f"{path}: no such file or folder")
    return [path], {}


def indexed_files(path: Path) -> tuple[list[Path], dict[str, str]]:
    """Returns the files of an index, which are there, and the index: name of a tensor -> name of its file."""
    try:
        indexed = dict(parse_plain_json(read_at_most(path, MOST_HEADER_NBYTES))["weight_map"])
        names = sorted(set(indexed.values()))
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise UsageError(f"{path}: not an index of files ({type(error).__name__}: {error})") from error
    for name in names:
        if not isinstance(name, str) or Path(name).name != name:
            raise UsageError(f"{path}: file name", expected="the name of a file in the same folder", got=name)
        if not (path.parent / name).is_file():
            raise UsageError(f"{path.parent / name}: missing, although {path.name} lists it")
    return [path.parent / name for name in names], indexed
