"""Names of a model's tensors in files: those of the plain model, without the wrappers of torch around its modules.

`torch.compile`, activation checkpointing and FSDP put a wrapper around a module, and with it one segment into the names
of all tensors inside: "1._orig_mod.weight". Every name that the engine writes or hands out leaves these segments out,
and every name that it reads may have them or not, so a file fits the wrapped model and the plain one. Imports no torch,
because commands without it read names too.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from itertools import chain
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torch import nn

_HIDDEN = frozenset({"_checkpoint_wrapped_module", "_fsdp_wrapped_module"})  # their state dicts leave them out
_SEGMENTS = _HIDDEN | {"_orig_mod"}
_PARALLEL = ("DataParallel", "DistributedDataParallel")  # their child is "module", which other modules may be named too
_CHILD = "module."


def plain_name(name: str) -> str:
    """Returns a name without the segments that only wrappers have.

    Example:
        >>> plain_name("_orig_mod.1._checkpoint_wrapped_module.weight"), plain_name("module.weight")
        ('1.weight', 'module.weight')
    """
    parts = name.split(".")
    return name if _SEGMENTS.isdisjoint(parts) else ".".join(segment for segment in parts if segment not in _SEGMENTS)


def plain_names(model: nn.Module | None, *, adapters: bool = False) -> Callable[[str], str]:
    """Returns a function from the names of a model's modules and tensors to those without any wrapper.

    Args:
        model: None for names of no known model, of which only plain wrappers are left out.
        adapters: leave out PEFT's wrappers too, so that the base's tensors have their names in the base model.
    """
    # Outer wrappers last, so that the prefix of an inner one is still in the name.
    wrapped = [
        (f"{name}.{child}" if name else child, child)
        for name, module in (model.named_modules() if model is not None else ())
        if (child := _child(module, adapters))
    ][::-1]

    def plain(name: str) -> str:
        for inside, child in wrapped:
            if f"{name}.".startswith(inside):
                name = f"{name}."[: len(inside) - len(child)] + f"{name}."[len(inside) :]
                name = name.removesuffix(".")
        return plain_name(name)

    return plain


def _child(module: nn.Module, adapters: bool) -> str:
    """Returns the name, with a dot, of the module that another one wraps; "" for one that is no wrapper."""
    kind = type(module)
    if kind.__name__ in _PARALLEL and kind.__module__.startswith("torch.nn.parallel"):
        return _CHILD
    if adapters and any(each.__module__.partition(".")[0] == "peft" for each in kind.__mro__):
        is_tuner = any(each.__name__ == "BaseTuner" for each in kind.__mro__)
        names = ("model",) if is_tuner else ("base_model", "base_layer", "original_module")
        return next((f"{name}." for name in names if name in module._modules), "")
    return ""


def plain_modules(model: nn.Module, *, remove_duplicate: bool = True) -> Iterator[tuple[str, nn.Module]]:
    """Yields `model.named_modules()` under plain names; a wrapper and its module have one name."""
    plain = plain_names(model)
    for name, module in model.named_modules(remove_duplicate=remove_duplicate):
        yield plain(name), module


def finder(stored: Iterable[str]) -> Callable[[str], str | None]:
    """Returns a function from a plain name to the name of that tensor in a file; None if the file lacks it.

    Example:
        >>> find = finder(["_orig_mod.weight"])
        >>> find("weight"), find("bias")
        ('_orig_mod.weight', None)
    """
    names = list(stored)
    there, plain = set(names), {plain_name(name): name for name in reversed(names)}
    if names and all(name.startswith(_CHILD) for name in plain):  # saved from a parallel wrapper
        plain = {name.removeprefix(_CHILD): stored_name for name, stored_name in plain.items()} | plain
    return lambda name: name if name in there else plain.get(name)


def for_model(state: Mapping[str, Any], model: nn.Module) -> Mapping[str, Any]:
    """Returns a state dict with the names of the model's own state dict; unknown names stay unchanged."""
    plain, find = plain_names(model), finder(state)
    tensors = chain(model.named_parameters(remove_duplicate=False), model.named_buffers(remove_duplicate=False))
    names = (".".join(segment for segment in name.split(".") if segment not in _HIDDEN) for name, _ in tensors)
    names_of_model = {stored: name for name in names if (stored := find(plain(name))) not in (None, name)}
    return {names_of_model.get(name, name): value for name, value in state.items()} if names_of_model else state
