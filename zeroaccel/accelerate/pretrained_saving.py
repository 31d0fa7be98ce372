"""Patches transformers' `PreTrainedModel.save_pretrained`, which reads the model's state dict if it gets none, and
PEFT's `PeftModel.save_pretrained`, which runs prompt encoders besides.

At stage 3 that state dict is sharded: the patch gathers the weights, one unit at a time, while the files are written.
`attach` installs it for a new engine if transformers is imported, and `detach` removes it. It does not change how
models without an engine are saved.

`state_dict_on_demand` is a full state dict that gathers a value when a program reads it: rank 0 requests it by name,
and the other ranks take part in the all-gather of its unit until rank 0 is done. The state dict itself uses addresses
and no memory, so the host holds only one unit and the program's own copies.
"""

from __future__ import annotations

import copy
import functools
import inspect
import mmap
import sys
import warnings
import weakref
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from zeroaccel.checkpoint.save_plan import EngineState
from zeroaccel.checkpoint.source_layout import compare_with_source, reverted
from zeroaccel.checkpoint.weights import Requests, placeholder_state_dict, tensor_specs, with_ties
from zeroaccel.comm.agree import agree_or_raise, from_rank_0
from zeroaccel.comm.topology import all_ranks_call
from zeroaccel.engine import EngineBase
from zeroaccel.errors import EngineStateError, UsageError
from zeroaccel.nested import map_tensors
from zeroaccel.zero.access.lazy_tensors import LazyTensor, materialized
from zeroaccel.zero.access.load_safetensors import SafetensorsFolder
from zeroaccel.zero.module_names import plain_modules
from zeroaccel.zero.tensor_subclasses import inner_tensors, is_wrapper, rewrapped

_ENGINES: weakref.WeakSet[EngineBase] = weakref.WeakSet()
_ORIGINALS: dict[type, Callable[..., Any]] = {}
_MEETING_SECONDS = 60.0  # within which all ranks call; a rank may still have to finish what the others have done


def attach(engine: EngineBase) -> None:
    """Makes `save_pretrained` of the engine's model or its submodules gather weights, until the engine is destroyed."""
    _ENGINES.add(engine)
    engine.at_destroy(functools.partial(_ENGINES.discard, engine))
    for module, name, patched in (
        ("transformers.modeling_utils", "PreTrainedModel", _gathering),
        ("peft.peft_model", "PeftModel", _gathering_adapters),
    ):
        owner = getattr(sys.modules.get(module), name, None)
        if owner is not None and owner not in _ORIGINALS:
            _ORIGINALS[owner] = owner.__dict__["save_pretrained"]
            owner.save_pretrained = patched(_ORIGINALS[owner])


def detach() -> None:
    """Restores the original `save_pretrained`."""
    _ENGINES.clear()
    while _ORIGINALS:
        owner, original = _ORIGINALS.popitem()
        owner.save_pretrained = original  # type: ignore[attr-defined]


def _gathering(original: Callable[..., Any]) -> Callable[..., Any]:
    """Returns a `save_pretrained` that gathers the weights of a sharded model if no state dict is passed."""
    signature = inspect.signature(original)

    @functools.wraps(original)
    def save_pretrained(*args: Any, **kwargs: Any) -> Any:
        bound = signature.bind(*args, **kwargs)
        model, state = bound.args[0], bound.arguments.get("state_dict")
        engine_and_prefix = _engine_of(model) if state is None else None
        if engine_and_prefix is None:
            is_main = bound.arguments.get("is_main_process", True)
            # This rank has no values, and rank 0 writes; transformers 4 would write here as well.
            is_without_values = not is_main and any(isinstance(v, Tensor) and v.is_meta for v in (state or {}).values())
            return None if is_without_values else original(*args, **kwargs)
        engine, prefix = engine_and_prefix
        collectives = engine.collectives.job
        gathered = _gathered_before(engine, model, bound.arguments)

        def save(state: dict[str, Any]) -> Any:
            if collectives.rank != 0:
                return None
            inside = {name.removeprefix(prefix): state.pop(name) for name in list(state) if name.startswith(prefix)}
            if any(map(is_wrapper, inside.values())):  # torchao's writer accepts its classes with plain tensors only
                inside = {name: _in_full(value) for name, value in inside.items()}
            bound.arguments["state_dict"] = inside
            # For a quantized base model, transformers ignores the argument and calls the model's `state_dict`.
            vars(model)["state_dict"] = lambda *args, **kwargs: inside
            try:
                with _converting_on_demand():
                    result = original(*bound.args, **bound.kwargs)
            finally:
                del vars(model)["state_dict"]
            if bound.arguments.get("is_main_process", True):
                folder = Path(bound.arguments["save_directory"])
                with suppress(UsageError, OSError):  # a folder of adapters
                    compare_with_source(model, SafetensorsFolder(folder).tensors, folder)
            return result

        if gathered is not None:
            return save(gathered)
        engine.checkpointer.prepare_to_save("save_pretrained")
        result, failure = None, None
        try:
            with state_dict_on_demand(engine.checkpointer.state()) as state:
                result = save(state)
        except Exception as error:
            failure = error
        agree_or_raise(collectives, failure, "save_pretrained")
        return result

    return save_pretrained


def _gathered_before(engine: Any, model: nn.Module, arguments: Mapping[str, Any]) -> dict[str, Any] | None:
    """Returns the full state dict that the caller still has, as a Trainer that calls on one rank; otherwise None.

    Raises:
        EngineStateError: not all ranks call. A caller that passes `is_main_process` calls on all.
    """
    if "is_main_process" in arguments:
        return None
    gathered = getattr(engine, "gathered_state", None)
    if gathered is not None:
        return dict(gathered)
    if not all_ranks_call(engine.collectives.job.topology, "save_pretrained", _MEETING_SECONDS):
        raise EngineStateError(
            f"{type(model).__name__}.save_pretrained(): the weights are sharded, and all ranks must take part in "
            f"gathering them, but some have not called it within {_MEETING_SECONDS:g} s",
            fix="pass state_dict=accelerator.get_state_dict(model), called on all ranks, or call "
            "save_pretrained on all ranks with is_main_process=accelerator.is_main_process",
        )
    return None


def _gathering_adapters(original: Callable[..., Any]) -> Callable[..., Any]:
    """Returns PEFT's `save_pretrained` for a sharded model: it gathers the adapters' values, and saves on rank 0."""
    signature = inspect.signature(original)

    @functools.wraps(original)
    def save_pretrained(*args: Any, **kwargs: Any) -> Any:
        bound = signature.bind(*args, **kwargs)
        model = bound.args[0]
        engine_and_prefix = _engine_of(model)
        if engine_and_prefix is None:
            return original(*args, **kwargs)
        engine, prefix = engine_and_prefix
        more = bound.arguments.setdefault("kwargs", {})
        state = more.get("state_dict")
        if state is None:
            state = _gathered_before(engine, model, bound.arguments)
        if state is None:
            engine.checkpointer.prepare_to_save("save_pretrained")
            also = adapter_names(engine.checkpointer.state())
            state = engine.checkpointer.consolidated_state_dict(exclude_frozen=True, also=also)
        if state is None or not bound.arguments.get("is_main_process", True):
            return None  # rank 0 has the values, and writes
        more["state_dict"] = {name.removeprefix(prefix): value for name, value in state.items()}
        with _answering(model, more["state_dict"], prompts=True):
            return original(*bound.args, **bound.kwargs)

    return save_pretrained


@contextmanager
def _answering(model: nn.Module, state: Mapping[str, Tensor], *, prompts: bool) -> Iterator[None]:
    """Lets parts of a model that PEFT asks while it saves answer from a full state dict.

    Args:
        prompts: replace prompt encoders, which PEFT runs to save their result, by copies with the values.
    """
    with ExitStack() as undo:
        for prefix, module in model.named_modules():
            *_, name = prefix.split(".")
            if name not in ("modules_to_save", "prompt_encoder") or not isinstance(module, nn.ModuleDict):
                continue
            for adapter, submodule in list(module.items()):
                start = f"{prefix}.{adapter}."
                inside = {key.removeprefix(start): v for key, v in state.items() if key.startswith(start)}
                if name == "modules_to_save":  # PEFT reads the names only
                    vars(submodule)["state_dict"] = functools.partial(dict, inside)
                    undo.callback(vars(submodule).pop, "state_dict")
                elif prompts:
                    whole = copy.deepcopy(submodule)
                    whole.load_state_dict(inside)
                    module._modules[adapter] = whole
                    undo.callback(module._modules.__setitem__, adapter, submodule)
        yield


def adapter_names(engine_state: EngineState) -> frozenset[str]:
    """Returns the names in the state dict that PEFT saves for a model's adapters; empty for other models. (all ranks)

    PEFT chooses them on rank 0 and may look for the base's config. Prompt encoders are included whole.
    """
    model, peft = engine_state.model, sys.modules.get("peft")
    adapters = getattr(model, "peft_config", None)
    if peft is None or not isinstance(adapters, Mapping):
        return frozenset()

    def chosen() -> list[str]:
        state = placeholder_state_dict(engine_state, exclude_frozen=False)
        ids: set[int] = set()
        for name, adapter in adapters.items():
            if not adapter.is_prompt_learning:
                with warnings.catch_warnings(), _answering(model, state, prompts=False):
                    warnings.simplefilter("ignore")  # PEFT warns again when it saves
                    ids |= {id(value) for value in peft.get_peft_model_state_dict(model, state, name).values()}
        return [name for name, value in state.items() if id(value) in ids or name.startswith("prompt_encoder.")]

    return frozenset(from_rank_0(engine_state.job, chosen, "names of adapters"))


def _engine_of(model: nn.Module) -> tuple[Any, str] | None:
    """Returns the engine that shards the model or a parent module of it, and the prefix of its names in that engine."""
    for engine in _ENGINES:
        ranks = engine.collectives
        if engine.settings.plan.params or ranks.parts is not None or ranks.part_holders is not None:
            for name, module in plain_modules(engine.module):
                if module is model:
                    return engine, f"{name}." if name else ""
    return None


# Calls that need no values (_FACTS), and calls whose results share the memory (_ALIASES).
_FACTS = frozenset(
    (
        *(Tensor.data_ptr, Tensor.untyped_storage, Tensor.storage, Tensor.storage_offset, Tensor.size, Tensor.stride),
        *(Tensor.dim, Tensor.numel, Tensor.nelement, Tensor.element_size, Tensor.is_contiguous, Tensor.get_device),
        *(Tensor.is_floating_point, Tensor.is_complex, Tensor.__len__, Tensor.__hash__, Tensor.is_shared),
    )
)
_ALIASES = frozenset((Tensor.view, Tensor.__getitem__, Tensor.detach, Tensor.narrow))


@contextmanager
def state_dict_on_demand(engine_state: EngineState) -> Iterator[dict[str, Tensor]]:
    """Yields the model's state dict in host memory on rank 0, and meta tensors on other ranks. (all ranks)

    At the end of the block, the other ranks take part in the all-gathers that rank 0 has requested in its block. Names
    and order are those of the model; tied parameters are one tensor under each of their names. Every operation that
    needs a value gathers it. The block must not call collectives.
    """
    requests = Requests(engine_state)
    if engine_state.job.rank != 0:
        try:
            yield placeholder_state_dict(engine_state, exclude_frozen=False)
        finally:
            requests.serve()
        return
    tensors: dict[str, Tensor] = {}
    for name, dtype, shape in tensor_specs(engine_state, exclude_frozen=False):
        tensors[name] = _on_demand(requests.lazy(name, dtype, shape))
    try:
        yield with_ties(tensors, engine_state)
    finally:
        requests.end()


class _OnDemand(Tensor):
    """A tensor with addresses but no memory; operations receive the value that `ask` gathers instead.

    Shape, dtype, storage and addresses are those of a tensor in host memory; programs compare the addresses to find
    tied tensors. Every operation that needs values gathers them again, so that this tensor holds none.
    """

    lazy: LazyTensor

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        with torch._C.DisableTorchFunctionSubclass():
            if func in _FACTS:
                return func(*args, **kwargs)
            if getattr(func, "__name__", "") == "__get__" or (func in _ALIASES and _is_basic(args[1:])):
                result = func(*args, **kwargs)
                return _on_demand(args[0].lazy, result) if isinstance(result, Tensor) else result
            return func(*map_tensors(_valued, args), **map_tensors(_valued, kwargs))


def _in_full(value: Tensor) -> Tensor:
    """Returns a value with its memory: gathers it if it is on demand, also inside a wrapper."""
    if is_wrapper(value):
        return rewrapped(value, {name: _in_full(getattr(owner, key)) for name, owner, key in inner_tensors(value)})
    return _valued(value)


def _on_demand(lazy: LazyTensor, view: Tensor | None = None) -> Tensor:
    wrapped = (_addresses(lazy.dtype, tuple(lazy.shape)) if view is None else view).as_subclass(_OnDemand)
    wrapped.lazy = lazy
    return wrapped


@contextmanager
def _converting_on_demand() -> Iterator[None]:
    """Lets transformers reverse its conversions without values, so that a file's values are gathered with the file."""
    library = sys.modules["transformers.modeling_utils"]
    original = getattr(library, "revert_weight_conversion", None)  # transformers 4 has no conversions

    def revert(model: Any, state: Mapping[str, Tensor]) -> dict[str, Tensor]:
        lazy = {name: value.lazy if isinstance(value, _OnDemand) else value for name, value in state.items()}
        made = reverted(model, lazy)
        return {name: _on_demand(value) if isinstance(value, LazyTensor) else value for name, value in made.items()}

    if original is not None:
        vars(library)["revert_weight_conversion"] = revert
    try:
        yield
    finally:
        if original is not None:
            vars(library)["revert_weight_conversion"] = original


def _is_basic(arguments: tuple[Any, ...]) -> bool:
    """Returns True if an index or shape contains no tensor; indexing by a tensor copies memory."""
    return all(isinstance(item, (int, slice, type(None))) for item in _flat(arguments))


def _flat(items: Any) -> Iterator[Any]:
    for item in items:
        if isinstance(item, (tuple, list)):
            yield from _flat(item)
        else:
            yield item


def _valued(tensor: Tensor) -> Tensor:
    """Returns a copy of the value, or of the part that the tensor is a view of; returns other tensors unchanged."""
    if not isinstance(tensor, _OnDemand):
        return tensor
    value: Tensor = materialized(tensor.lazy)
    return value.as_strided(tensor.size(), tensor.stride(), tensor.storage_offset())


def _addresses(dtype: torch.dtype, shape: tuple[int, ...]) -> Tensor:
    """Returns a tensor whose memory the kernel neither reserves nor commits, because nothing writes or reads it."""
    nbytes = torch.Size(shape).numel() * dtype.itemsize
    if nbytes == 0:
        return torch.empty(shape, dtype=dtype)
    flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | getattr(mmap, "MAP_NORESERVE", 0)
    return torch.frombuffer(mmap.mmap(-1, nbytes, flags=flags), dtype=torch.uint8).view(dtype).view(shape)
