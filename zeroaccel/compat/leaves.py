"""Modules whose parameters are gathered together: marks that DeepSpeed's calls leave, read when an engine is made."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from torch import nn

from zeroaccel.errors import UsageError

__all__ = ["get_z3_leaf_modules", "marked_names", "set_z3_leaf_modules", "unset_z3_leaf_modules", "z3_leaf_module"]

_MARK = "_z3_leaf"  # libraries and their tests look at this name


def set_z3_leaf_modules(model: nn.Module, leaf_module_classes: Iterable[type[nn.Module] | str]) -> list[nn.Module]:
    """Marks every module of these classes. Returns them.

    Args:
        leaf_module_classes: classes, or their names.

    Raises:
        UsageError: none is in the model.
    """
    return list(_mark(model, leaf_module_classes, value=True))


def unset_z3_leaf_modules(model: nn.Module, leaf_module_classes: Iterable[type[nn.Module] | str]) -> list[nn.Module]:
    """Takes the marks off again. Returns the modules."""
    return list(_mark(model, leaf_module_classes, value=False))


def get_z3_leaf_modules(model: nn.Module) -> list[nn.Module]:
    """The marked modules."""
    return [module for module in model.modules() if z3_leaf_module(module)]


def z3_leaf_module(module: nn.Module) -> bool:
    """Whether a module is marked."""
    return bool(module.__dict__.get(_MARK, False))


def marked_names(model: nn.Module) -> list[str]:
    """Where in the model the marked modules are."""
    return [name for name, module in model.named_modules() if z3_leaf_module(module)]


def _mark(model: nn.Module, classes: Iterable[type[nn.Module] | str], *, value: bool) -> Iterator[nn.Module]:
    wanted = list(classes)
    found = [
        module
        for module in model.modules()
        if any(type(module).__name__ == kind if isinstance(kind, str) else isinstance(module, kind) for kind in wanted)
    ]
    if not found:
        names = sorted({type(module).__name__ for module in model.modules()})
        raise UsageError(
            "set_z3_leaf_modules",
            expected=f"classes of modules of the model ({', '.join(names)})",
            got=", ".join(kind if isinstance(kind, str) else kind.__name__ for kind in wanted),
        )
    for module in found:
        module.__dict__[_MARK] = value
    yield from found
