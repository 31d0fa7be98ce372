"""DeepSpeed's calls for leaf modules: those whose parameters are gathered together at stage 3.

A mark is an attribute of a module, which libraries and their tests read. `deepspeed.initialize` names the marked
modules in the engine's config, and marks those that the config names.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

from torch import nn

from zeroaccel.config import Config
from zeroaccel.errors import UsageError, listed
from zeroaccel.zero.wrap_policy import LeafRules

_LEAF_MARK = "_z3_leaf"


def set_z3_leaf_modules(
    model: nn.Module, leaf_module_classes: Iterable[type[nn.Module] | str], raise_if_not_found: bool = True
) -> list[nn.Module]:
    """Marks every module of these classes. Returns them.

    Args:
        leaf_module_classes: classes, or their names, bare or with their module.

    Raises:
        UsageError: something else is among them; or none is in the model, with `raise_if_not_found`.
    """
    return _set_of_classes(model, leaf_module_classes, flag=True, required=raise_if_not_found)


def unset_z3_leaf_modules(
    model: nn.Module, leaf_module_classes: Iterable[type[nn.Module] | str], raise_if_not_found: bool = True
) -> list[nn.Module]:
    """Unmarks them. Returns the modules."""
    return _set_of_classes(model, leaf_module_classes, flag=False, required=raise_if_not_found)


def set_z3_leaf_modules_by_name(
    model: nn.Module, module_names: Iterable[str], flag: bool = True, raise_if_not_found: bool = True
) -> tuple[list[nn.Module], list[str]]:
    """Marks, or with `flag` False unmarks, the modules of these full names. Returns (them, names without a module).

    Raises:
        UsageError: there are names without a module, with `raise_if_not_found`.
    """
    return _set_of_names(model, module_names, str.__eq__, flag=flag, required=raise_if_not_found)


def set_z3_leaf_modules_by_suffix(
    model: nn.Module, module_name_suffixes: Iterable[str], flag: bool = True, raise_if_not_found: bool = True
) -> tuple[list[nn.Module], list[str]]:
    """The same for the modules whose full names end so. Returns (them, endings without a module).

    Raises:
        UsageError: there are endings without a module, with `raise_if_not_found`.
    """
    return _set_of_names(model, module_name_suffixes, str.endswith, flag=flag, required=raise_if_not_found)


def set_z3_leaf_module(model: nn.Module, flag: bool) -> None:
    """Marks or unmarks this one module."""
    model.__dict__[_LEAF_MARK] = flag


def get_z3_leaf_modules(model: nn.Module) -> list[nn.Module]:
    """The marked modules."""
    return [module for module in model.modules() if z3_leaf_module(module)]


def z3_leaf_module(model: nn.Module) -> bool:
    """Whether a module is marked."""
    return bool(model.__dict__.get(_LEAF_MARK, False))


def z3_leaf_parameter(model: nn.Parameter) -> bool:
    """Whether a parameter is one of a leaf module of an engine that `deepspeed.initialize` made."""
    return bool(getattr(model, "ds_z3_leaf_module", None))


def marked_names(model: nn.Module) -> list[str]:
    """Names of the marked modules in the model."""
    return [name for name, module in model.named_modules() if z3_leaf_module(module)]


def mark_configured(model: nn.Module, config: Config) -> None:
    """Marks the modules that a config's `leaf_module` names."""
    leaf = config.zero_optimization.leaf_module
    rules = LeafRules(tuple(leaf.classes), tuple(leaf.names), tuple(leaf.name_suffixes))
    for name, module in model.named_modules():
        if rules.match(name, module):
            set_z3_leaf_module(module, True)


def mark_parameters(model: nn.Module) -> None:
    """Notes on the parameters of marked modules which module that is."""
    for module in get_z3_leaf_modules(model):
        for param in module.parameters():
            param.ds_z3_leaf_module = module  # type: ignore[attr-defined]


def _set_of_classes(
    model: nn.Module, classes: Iterable[type[nn.Module] | str], *, flag: bool, required: bool
) -> list[nn.Module]:
    kinds = list(classes)
    if wrong := [kind for kind in kinds if not isinstance(kind, (type, str))]:
        raise UsageError("set_z3_leaf_modules", expected="classes or names of classes", got=wrong[0])
    types = tuple(kind for kind in kinds if isinstance(kind, type))
    rules = LeafRules(tuple(kind for kind in kinds if isinstance(kind, str)))
    modules = [module for module in model.modules() if isinstance(module, types) or rules.match("", module)]
    if not modules and required:
        names = sorted({type(module).__name__ for module in model.modules()})
        raise UsageError(
            "set_z3_leaf_modules",
            expected=f"classes of modules of the model ({listed(names)})",
            got=", ".join(kind if isinstance(kind, str) else kind.__name__ for kind in kinds),
        )
    for module in modules:
        set_z3_leaf_module(module, flag)
    return modules


def _set_of_names(
    model: nn.Module, names: Iterable[str], fits: Callable[[str, str], bool], *, flag: bool, required: bool
) -> tuple[list[nn.Module], list[str]]:
    known = dict(model.named_modules())
    found: dict[str, nn.Module] = {}
    missing = []
    for name in names:
        matches = {fqn: module for fqn, module in known.items() if fits(fqn, name)}
        found.update(matches)
        if not matches:
            missing.append(name)
    if missing and required:
        raise UsageError(
            "set_z3_leaf_modules: names", expected=f"modules of the model ({listed(list(known))})", got=missing
        )
    for module in found.values():
        set_z3_leaf_module(module, flag)
    return list(found.values()), missing
