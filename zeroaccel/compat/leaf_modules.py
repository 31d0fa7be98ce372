"""DeepSpeed's calls for leaf modules: modules whose parameters stage 3 gathers together.

The mark is a module attribute, which libraries and their tests read. `deepspeed.initialize` adds the names of marked
modules to the engine's config, and marks the modules that the config names.
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
    """Marks every module of these classes, and returns the modules.

    Args:
        leaf_module_classes: classes, or their names with or without the module's name.

    Raises:
        UsageError: an item is neither; or with `raise_if_not_found`, the model has no module of these classes.
    """
    return _set_of_classes(model, leaf_module_classes, flag=True, required=raise_if_not_found)


def unset_z3_leaf_modules(
    model: nn.Module, leaf_module_classes: Iterable[type[nn.Module] | str], raise_if_not_found: bool = True
) -> list[nn.Module]:
    """Removes the marks of `set_z3_leaf_modules`, and returns the modules."""
    return _set_of_classes(model, leaf_module_classes, flag=False, required=raise_if_not_found)


def set_z3_leaf_modules_by_name(
    model: nn.Module, module_names: Iterable[str], flag: bool = True, raise_if_not_found: bool = True
) -> tuple[list[nn.Module], list[str]]:
    """Marks the modules with these full names, or unmarks them with `flag` False; returns (modules, names not found).

    Raises:
        UsageError: with `raise_if_not_found`, a name has no module.
    """
    return _set_of_names(model, module_names, str.__eq__, flag=flag, required=raise_if_not_found)


def set_z3_leaf_modules_by_suffix(
    model: nn.Module, module_name_suffixes: Iterable[str], flag: bool = True, raise_if_not_found: bool = True
) -> tuple[list[nn.Module], list[str]]:
    """Marks or unmarks the modules whose full names have these endings; returns (modules, endings not found).

    Raises:
        UsageError: with `raise_if_not_found`, an ending has no module.
    """
    return _set_of_names(model, module_name_suffixes, str.endswith, flag=flag, required=raise_if_not_found)


def set_z3_leaf_module(model: nn.Module, flag: bool) -> None:
    """Marks or unmarks a single module."""
    model.__dict__[_LEAF_MARK] = flag


def get_z3_leaf_modules(model: nn.Module) -> list[nn.Module]:
    """Returns the marked modules."""
    return [module for module in model.modules() if z3_leaf_module(module)]


def z3_leaf_module(model: nn.Module) -> bool:
    """True if a module is marked."""
    return bool(model.__dict__.get(_LEAF_MARK, False))


def z3_leaf_parameter(model: nn.Parameter) -> bool:
    """True if a parameter belongs to a leaf module of an engine created by `deepspeed.initialize`."""
    return bool(getattr(model, "ds_z3_leaf_module", None))


def marked_names(model: nn.Module) -> list[str]:
    """Returns the names of the marked modules in the model."""
    return [name for name, module in model.named_modules() if z3_leaf_module(module)]


def mark_configured(model: nn.Module, config: Config) -> None:
    """Marks the modules that the config's `leaf_module` names."""
    leaf = config.zero_optimization.leaf_module
    rules = LeafRules(tuple(leaf.classes), tuple(leaf.names), tuple(leaf.name_suffixes))
    for name, module in model.named_modules():
        if rules.match(name, module):
            set_z3_leaf_module(module, True)


def mark_parameters(model: nn.Module) -> None:
    """Sets on each parameter of a marked module a reference to the module."""
    for module in get_z3_leaf_modules(model):
        for param in module.parameters():
            param.ds_z3_leaf_module = module  # type: ignore[attr-defined]


def _set_of_classes(
    model: nn.Module, classes: Iterable[type[nn.Module] | str], *, flag: bool, required: bool
) -> list[nn.Module]:
    kinds = list(classes)
    if wrong := [kind for kind in kinds if not isinstance(kind, (type, str))]:
        raise UsageError("set_z3_leaf_modules", expected="classes or class names", got=wrong[0])
    types = tuple(kind for kind in kinds if isinstance(kind, type))
    rules = LeafRules(tuple(kind for kind in kinds if isinstance(kind, str)))
    modules = [module for module in model.modules() if isinstance(module, types) or rules.match("", module)]
    if not modules and required:
        names = sorted({type(module).__name__ for module in model.modules()})
        raise UsageError(
            "set_z3_leaf_modules",
            expected=f"module classes of the model ({listed(names)})",
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
