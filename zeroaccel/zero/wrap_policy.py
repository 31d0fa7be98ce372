"""The wrap policy: which parameters form a unit, which the engine gathers and reduces together.

A unit is, by default, one repeated block (a child of a ModuleList, ModuleDict or Sequential), a large leaf outside the
blocks (an embedding, a head), one projection of all experts of a layer, or the remainder at the root. This module only
decides; `build_units.py` builds, `hooks.py` attaches.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Container, Iterator, Sequence
from dataclasses import dataclass, field, replace

from torch import nn

from zeroaccel.errors import ConfigError
from zeroaccel.zero.compiled import compiled_within
from zeroaccel.zero.module_names import plain_name
from zeroaccel.zero.tensor_subclasses import tensors_of

LARGE_LEAF_NUMEL = 1 << 16
"""A leaf module outside the blocks with at least this many elements is its own unit; for experts of a layer with at
least this many, each projection is one."""

ROOT = "root"
"""Name of the unit with the parameters outside all blocks."""

_MIXTURE = re.compile(r"moe|mixture_?of_?experts", re.IGNORECASE)
_EXPERTS = re.compile(r"experts$", re.IGNORECASE)
_ROUTERS = frozenset({"gate", "router", "gating", "gate_proj_router"})
_LISTS = (nn.ModuleList, nn.ModuleDict)
_CONTAINERS = (*_LISTS, nn.Sequential)
# Attributes that transformers' `use_experts_implementation` sets on each module, since 5.0.
_INTERFACE = ("num_experts", "has_bias", "is_transposed")
# Its implementations that finish with one projection before they read the next, for any routing of tokens.
_IN_TURN = frozenset({"grouped_mm", "batched_mm"})


@dataclass(frozen=True)
class LeafRules:
    """Modules that form one unit because ranks may run different parts of them (`leaf_module` of the config).

    `classes` are class names, bare or dotted; `names` are module fqns; `name_suffixes` are endings of fqns.
    `granularity` makes a leaf of any module with fewer elements per module than this; 0 disables it.
    """

    classes: tuple[str, ...] = ()
    names: tuple[str, ...] = ()
    name_suffixes: tuple[str, ...] = ()
    granularity: int = 0

    def match(self, fqn: str, module: nn.Module) -> bool:
        """Returns True if a rule names this module."""
        kind = type(module)
        if kind.__name__ in self.classes or f"{kind.__module__}.{kind.__qualname__}" in self.classes:
            return True
        if fqn in self.names or any(fqn.endswith(suffix) for suffix in self.name_suffixes):
            return True
        if not self.granularity or next(module.children(), None) is None:
            return False
        return sum(p.numel() for p in module.parameters()) < self.granularity * sum(1 for _ in module.modules())


@dataclass
class UnitSpec:
    """A planned unit: its name, the modules whose forward needs it, and its parameters in order.

    Attributes:
        persistent: True if the unit is never resharded.
        is_code: True for frozen weights that the engine stores as codes, and decodes for each use.
    """

    name: str
    modules: list[nn.Module]
    params: list[tuple[str, nn.Parameter]] = field(default_factory=list)
    persistent: bool = False
    is_code: bool = False

    @property
    def numel(self) -> int:
        """Number of elements of all its parameters."""
        return sum(p.numel() for _, p in self.params)


def group_parameters(
    model: nn.Module,
    *,
    rules: LeafRules | None = None,
    persistence_threshold: int = 0,
    model_persistence_threshold: int | None = None,
    coded: Container[int] = (),
    plain: Callable[[str], str] = plain_name,
) -> list[UnitSpec]:
    """Cuts `model` into units; every parameter is in exactly one, tied ones once.

    Args:
        persistence_threshold: parameters with at most this many elements go to one persistent unit, which is gathered
            once per step and never resharded. 0 disables it.
        model_persistence_threshold: upper bound on the elements of that unit.
        coded: id() of the frozen parameters that are stored as codes. They form separate units, never persistent.
        plain: result of `plain_names` for the model; the default is enough for a model without parallel wrappers.

    Raises:
        ConfigError: a leaf rule names a module that does not exist.

    Example:
        >>> blocks = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
        >>> [(spec.name, spec.numel) for spec in group_parameters(blocks)]
        [('0', 20), ('1', 20)]
    """
    rules = rules or LeafRules()
    _check_rules(model, rules)
    experts = dict(_fused_experts(model, "", rules, compiled_within(model)))
    boundaries = dict(_boundaries(model, rules)) | {id(module): fqn for fqn, module in experts.items()}
    projections = {key: name for module in experts.values() for key, name in _projections(module)}
    owners = _owners(model, boundaries)
    persistent = _persistent(model, persistence_threshold, model_persistence_threshold, coded)

    # In the order of named_parameters, which is the same on all ranks: the order of units decides that of collectives.
    specs: dict[object, UnitSpec] = {}
    for fqn, param in model.named_parameters():
        key, name, modules = _home(param, owners[id(param)], model, persistent)
        if id(param) in projections and name in experts:
            key, name = (key, projections[id(param)]), f"{name}.{projections[id(param)]}"
        is_code = id(param) in coded
        if is_code:  # trained parameters beside them may be persistent, but a unit must not mix both kinds
            key, name = ("codes", key), f"codes of {name}"
        spec = specs.setdefault(key, UnitSpec(name, modules, persistent=key == "persistent", is_code=is_code))
        spec.params += tensors_of(plain(fqn), param)
    return list(specs.values())


@dataclass
class _Owner:
    """One place where a parameter is registered: the module that owns it and the enclosing unit boundary."""

    fqn: str
    module: nn.Module
    boundary_fqn: str
    boundary: nn.Module


def _home(
    param: nn.Parameter, owners: Sequence[_Owner], root: nn.Module, persistent: set[int]
) -> tuple[object, str, list[nn.Module]]:
    """Returns the unit of a parameter: (key, name, modules that need it unsharded in their forward)."""
    if id(param) in persistent:
        return "persistent", "persistent", [root]
    boundaries = {id(owner.boundary): owner for owner in owners}
    if len(boundaries) == 1:
        owner = owners[0]
        return id(owner.boundary), owner.boundary_fqn or ROOT, [owner.boundary]
    # Tied across units: it must be unsharded in each of its owners, so it forms a unit with hooks on all of them.
    modules = list({id(owner.module): owner.module for owner in owners}.values())
    name = "+".join(owner.fqn or ROOT for owner in owners)
    return tuple(sorted(id(module) for module in modules)), f"tied({name})", modules


def _owners(model: nn.Module, boundaries: dict[int, str]) -> dict[int, list[_Owner]]:
    """Returns every registration of every parameter, several for tied ones."""
    owners: dict[int, list[_Owner]] = {}

    def walk(module: nn.Module, fqn: str, boundary: nn.Module, boundary_fqn: str, seen: set[int]) -> None:
        if id(module) in boundaries and id(module) not in seen:
            boundary, boundary_fqn = module, fqn
        for param in module._parameters.values():
            if param is not None:
                owners.setdefault(id(param), []).append(_Owner(fqn, module, boundary_fqn, boundary))
        # Walk a shared module once, but count each of its registrations: it has several parents.
        if id(module) in seen:
            return
        seen.add(id(module))
        for name, child in module.named_children():
            walk(child, f"{fqn}.{name}" if fqn else name, boundary, boundary_fqn, seen)

    walk(model, "", model, "", set())
    return owners


def _boundaries(model: nn.Module, rules: LeafRules) -> Iterator[tuple[int, str]]:
    """Yields (id, fqn) of the root, and of every module below it that starts a unit."""
    yield id(model), ""
    if replace(rules, granularity=0).match("", model):
        return  # a rule names the root itself: ranks may run different parts of it
    yield from _walk_boundaries(model, "", rules, inside=False)


def _walk_boundaries(module: nn.Module, fqn: str, rules: LeafRules, *, inside: bool) -> Iterator[tuple[int, str]]:
    repeated = isinstance(module, _CONTAINERS)
    for name, child in module.named_children():
        child_fqn = f"{fqn}.{name}" if fqn else name
        if not any(True for _ in child.parameters()):
            continue
        if rules.match(child_fqn, child) or (not inside and is_mixture(name, child)):
            # Experts: ranks route to different ones, and a gather that only some ranks start would hang. So a mixture
            # is one unit as a whole, and no module below it starts another.
            yield id(child), child_fqn
            continue
        if isinstance(child, _LISTS) and _EXPERTS.search(name):
            yield from _walk_boundaries(child, child_fqn, rules, inside=True)  # they belong to the unit of their router
            continue
        # One unit per block balances the size of a gather against overlap: the next block is gathered while one
        # computes (also FSDP's guidance for transformers). A unit per small leaf would cost a latency-bound collective.
        block = not inside and repeated and not isinstance(child, _CONTAINERS)
        leaf = not inside and next(child.children(), None) is None
        large = leaf and sum(p.numel() for p in child.parameters()) >= LARGE_LEAF_NUMEL
        if block or large:
            yield id(child), child_fqn
        yield from _walk_boundaries(child, child_fqn, rules, inside=inside or block)


def _fused_experts(
    module: nn.Module, fqn: str, rules: LeafRules, compiled: Container[int]
) -> Iterator[tuple[str, nn.Module]]:
    """Yields (fqn, module) of the experts whose projections are units: all ranks call them, for any routing of tokens.

    Excludes modules inside one that a rule names, which stays whole, and compiled ones, whose graphs hooks would break.
    """
    if id(module) in compiled or (rules if fqn else replace(rules, granularity=0)).match(fqn, module):
        return
    if has_expert_interface(module):
        if sum(param.numel() for param in module.parameters()) >= LARGE_LEAF_NUMEL:
            yield fqn, module
        return
    for name, child in module.named_children():
        yield from _fused_experts(child, f"{fqn}.{name}" if fqn else name, rules, compiled)


def _projections(experts: nn.Module) -> Iterator[tuple[int, str]]:
    """Yields id() of each parameter -> its projection's name; biases and norms belong to the projection before them."""
    dims = max((param.dim() for param in experts._parameters.values() if param is not None), default=0)
    projection = ""
    for name, param in experts.named_parameters():
        if not projection or (param.dim() == dims and "." not in name):
            projection = name
        yield id(param), projection


def computes_in_turn(module: nn.Module) -> bool:
    """Returns True if a module's current forward is done with each parameter before it reads the next."""
    chosen = getattr(getattr(module, "config", None), "_experts_implementation", None)
    return chosen in _IN_TURN and has_expert_interface(module) and "forward" not in vars(module)


def has_expert_interface(module: nn.Module) -> bool:
    """Returns True if a module is the experts of a transformers 5 layer: its forward is (hidden, choices, weights)."""
    return all(hasattr(module, key) for key in _INTERFACE)


def scored_experts(module: nn.Module) -> tuple[nn.Module, list[nn.Module]] | None:
    """Returns router and experts of a mixture whose experts take all tokens, times the router's scores (Llama 4).

    None for other modules. The experts include the adapters around them, outermost first.
    """
    router, inner = getattr(module, "router", None), getattr(module, "experts", None)
    nested: list[nn.Module] = []
    while isinstance(inner, nn.Module):
        nested.append(inner)
        inner = getattr(inner, "base_layer", None)  # PEFT's name for the module inside an adapter
    if not nested or not isinstance(router, nn.Module) or not isinstance(getattr(router, "top_k", None), int):
        return None
    experts = nested[-1]
    takes_all = list(inspect.signature(experts.forward).parameters) == ["hidden_states"]
    return (router, nested) if takes_all and isinstance(getattr(experts, "num_experts", None), int) else None


def is_mixture(name: str, module: nn.Module) -> bool:
    """Returns True if a module routes inputs to experts, so that ranks may run different children of it.

    A mixture has a child called experts, or a list of equal children next to a gate or router, or a matching name or
    class, unless a module below it matches too: then it is a model of such blocks.
    """
    children = dict(module.named_children())
    if isinstance(module, _CONTAINERS) or not children:
        return False
    if any(_EXPERTS.search(child) for child in children):
        return True
    below = [(fqn.rpartition(".")[2], m) for fqn, m in module.named_modules() if fqn]
    if _called_mixture(name, module) and not any(_called_mixture(*item) for item in below):
        return True
    experts = [c for c in children.values() if isinstance(c, nn.ModuleList) and len(c) > 1]
    return bool(_ROUTERS & children.keys()) and any(len({_shapes(e) for e in c}) == 1 for c in experts)


def _called_mixture(name: str, module: nn.Module) -> bool:
    return bool(_MIXTURE.search(name) or _MIXTURE.search(type(module).__name__))


def _shapes(module: nn.Module) -> tuple[tuple[int, ...], ...]:
    return tuple(tuple(p.shape) for p in module.parameters())


def _persistent(model: nn.Module, threshold: int, model_threshold: int | None, coded: Container[int]) -> set[int]:
    """Returns id() of the parameters that are never resharded: norms and biases, whose gathers are all latency."""
    persistent: set[int] = set()
    total = 0
    for param in model.parameters():
        if param.numel() > threshold or threshold <= 0 or id(param) in coded:
            continue
        # Stop rather than skip, so that the persistent parameters are a prefix of the model's small ones.
        if model_threshold is not None and total + param.numel() > model_threshold:
            break
        persistent.add(id(param))
        total += param.numel()
    return persistent


def _check_rules(model: nn.Module, rules: LeafRules) -> None:
    modules = dict(model.named_modules())
    for name in rules.names:
        if name not in modules:
            raise ConfigError(
                "zero_optimization.leaf_module.names",
                expected="names of modules of this model",
                got=name,
                fix=f"name a module of the model; its children are {', '.join(n for n, _ in model.named_children())}",
            )
