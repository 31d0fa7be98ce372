"""The engine's hooks on modules, parameters and autograd nodes.

Translates PyTorch's events into calls of `ParamCoordinator` and the engine, without making decisions.
`detach()` removes every hook. Hooks of state dicts, recordings, `zero.Init` and optimizers are where these are.

[Note: backward events] A prehook on the node that produced an output reports that the use's backward begins. A view
output that is later changed in place gets a new node, so the node of its base gets a prehook too. The end of a use's
backward follows from the order of autograd ([Note: forward uses] in `coordinator.py`). FSDP2 and others insert a node
around a module's inputs for that; here the graph stays unchanged, because such nodes changed the order in which
autograd adds the gradients of an input with several readers, and so the last bits (docs/design.md, section 4).
"""

from __future__ import annotations

import copy
import sys
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import fields, is_dataclass
from functools import partial
from types import FrameType
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from zeroaccel.errors import EngineStateError
from zeroaccel.nested import leaves_of, map_tensors
from zeroaccel.zero.compiled import (
    AroundCompiled,
    check_not_compiled,
    compiled_calls,
    compiled_within,
)
from zeroaccel.zero.coordinator import ForwardUse, ParamCoordinator
from zeroaccel.zero.module_copies import LiveHook, reads_nan
from zeroaccel.zero.param_unit import ParamUnit, ShardState
from zeroaccel.zero.tensor_subclasses import carriers
from zeroaccel.zero.wrap_policy import computes_in_turn

_CALL = nn.Module._call_impl.__code__


class BackwardListener(Protocol):
    """The calls of the hooks to the engine.

    Attributes:
        weights_version: number that changes with each update of the weights.
    """

    @property
    def weights_version(self) -> int: ...

    def on_backward(self, version: int | None = None) -> None:
        """Handles a backward that reached the model; called often. `version` is `weights_version` at its forward."""

    def on_grad_ready(self, param: nn.Parameter) -> None:
        """Handles a gradient that autograd has finished accumulating in `param.grad`."""


class Hooks:
    """The hooks of one engine; attached on construction.

    Args:
        root: the model.
        units: the sharded units; persistent ones need no hooks.
        optimized: parameters whose gradients are reduced.
        unoptimized: trainable parameters that no optimizer updates; the hooks drop their gradients.
    """

    def __init__(
        self,
        root: nn.Module,
        units: Sequence[ParamUnit],
        coordinator: ParamCoordinator,
        listener: BackwardListener,
        *,
        optimized: Sequence[nn.Parameter],
        unoptimized: Sequence[nn.Parameter] = (),
    ) -> None:
        self._coordinator = coordinator
        self._listener = listener
        self._handles = ExitStack()
        self._watched: list[nn.Module] = []
        self._uses: list[tuple[nn.Module, ForwardUse]] = []
        self._version = 0
        self._compiled: dict[int, Any] = {}
        self._all_modules: tuple[nn.Module, ...] = ()
        self._calls: list[Any] | None = None  # compiled calls of these modules at the last forward
        self._root, self._units, self._optimized, self._unoptimized = root, units, optimized, unoptimized
        self._attach()

    def attach_outside_graphs(self, refusal: str) -> None:
        """Attaches the hooks again, before a forward, to a model that has been compiled since.

        Args:
            refusal: reason why a compiled model is refused; "" if it is allowed.

        Raises:
            UsageError: the model was compiled, and `refusal` has a reason.
        """
        # Every forward runs this: one list comparison, and no call per module.
        if [module._compiled_call_impl for module in self._all_modules] == self._calls:
            return
        if compiled_calls(self._root) != self._compiled:
            check_not_compiled(self._root, refusal)
            self.attach_anew()
        self._all_modules = tuple(self._root.modules())
        self._calls = [module._compiled_call_impl for module in self._all_modules]

    @property
    def is_compiled(self) -> bool:
        """True if calls of some modules are compiled."""
        return bool(self._compiled)

    def attach_anew(self) -> None:
        """Detaches the hooks, between passes, and attaches them again to the modules that are compiled now."""
        self._detach_from_model()
        self._attach()

    def _attach(self) -> None:
        root, units = self._root, self._units
        calls = compiled_calls(root)
        # Order matters: hooks of one module run in the order of registration, and always_call ones also after an
        # exception. The root's pre-hook must run before, and its post-hook after, the hooks of the root's own unit.
        is_around = calls.get(id(root)) is not None
        # [Note: hooks and graphs]; this imports the compiler.
        attach: Callable[..., Any] = torch.compiler.disable if calls else lambda hook: hook
        if not is_around:
            self._handles.callback(root.register_forward_pre_hook(LiveHook(attach(self._root_pre_forward))).remove)
        for unit in units:
            parts = _owners_below(root, unit) if root in unit.modules else []
            for module in [*unit.modules, *parts]:
                before, after = self._around(unit, inner=module not in unit.modules)
                if calls.get(id(module)) is not None:
                    self._handles.callback(AroundCompiled(module, before, after).remove)
                else:
                    self._handles.callback(module.register_forward_pre_hook(LiveHook(attach(before), unit)).remove)
                    self._handles.callback(
                        module.register_forward_hook(LiveHook(attach(after)), always_call=True).remove
                    )
        if is_around:
            self._handles.callback(AroundCompiled(root, self._root_pre_forward, self._root_post_forward).remove)
        else:
            self._handles.callback(
                root.register_forward_hook(LiveHook(attach(self._root_post_forward)), always_call=True).remove
            )
        # torch holds these hooks where the garbage collector does not look, so that a strong reference would keep
        # every dropped engine in memory; the forward hooks keep it alive as long as the model.
        listener = weakref.ref(self._listener)

        def on_grad_ready(param: nn.Parameter) -> None:
            if (found := listener()) is not None:
                found.on_grad_ready(param)

        for param in self._optimized:
            self._handles.callback(param.register_post_accumulate_grad_hook(on_grad_ready).remove)
        for param in self._unoptimized:
            self._handles.callback(param.register_post_accumulate_grad_hook(_discard).remove)
        self._watch(root, units)
        self._compiled = compiled_calls(root)

    def detach(self) -> None:
        """Removes every hook and restores the modules' plain parameter dictionaries."""
        self._detach_from_model()

    def _detach_from_model(self) -> None:
        self._handles.close()  # hooks around a compiled call come off before inner ones
        for module in self._watched:
            module.__dict__["_parameters"] = dict(module._parameters)
        self._watched.clear()

    def forget(self) -> None:
        """Drops the forwards in progress, after an exception."""
        self._uses.clear()

    # -- forward

    def _root_pre_forward(self, module: nn.Module, args: Any) -> None:
        _refuse_transforms(module, is_sharded=bool(self._units))
        self._version = self._listener.weights_version
        self._coordinator.root_pre_forward(training=torch.is_grad_enabled())

    def _root_post_forward(self, module: nn.Module, args: Any, output: Any) -> None:
        training = torch.is_grad_enabled()
        self._coordinator.root_post_forward(training=training)
        if training and not self._coordinator.in_backward:
            # Needed even if all units are persistent and have no hooks: the engine must notice a plain
            # `loss.backward()`, and know the version of the weights in its forward.
            version = self._version
            for node in producers(output):
                node.register_prehook(lambda _: self._listener.on_backward(version))

    def _around(self, unit: ParamUnit, *, inner: bool) -> tuple[Callable[..., Any], Callable[..., Any]]:
        """Returns the pre- and post-forward hook of a module of `unit`.

        Args:
            inner: the module lies below the root, whose unit this is; a use only when called outside the root.
        """
        coordinator = self._coordinator

        def before(module: nn.Module, args: tuple[Any, ...]) -> None:
            _refuse_tracing()
            _refuse_transforms(module, is_sharded=True)
            if not (inner and coordinator.is_running(unit)):
                task, in_turn = torch._C._current_graph_task_id(), self._is_in_turn(unit, module)
                self._uses.append((module, coordinator.pre_forward(unit, task, in_turn=in_turn)))

        def after(module: nn.Module, args: tuple[Any, ...], output: Any) -> Any:
            if not self._uses or self._uses[-1][0] is not module:
                return None  # an inner module, or another program's pre-hook raised before ours ran
            _, use = self._uses.pop()
            try:
                copied = _in_own_memory(output, module, coordinator.needed_by(unit))
            except EngineStateError:
                coordinator.post_forward(use, has_raised=True)
                raise
            training = torch.is_grad_enabled()
            nodes = producers(copied) if training else []
            for node in nodes:
                node.register_prehook(lambda _: self._pre_backward(use))
            opaque = training and next(tensors_in(copied), None) is None
            coordinator.post_forward(use, opaque=opaque, has_grad=bool(nodes), has_raised=output is None)
            return None if copied is output else copied

        return before, after

    def _is_in_turn(self, unit: ParamUnit, module: nn.Module) -> bool:
        """Returns True if the module reads its units one after the other, and the hooks see each read."""
        if unit.modules != (module,) or not isinstance(module._parameters, WatchedParameters):
            return False
        ids = {id(param) for param in module._parameters.values()}  # an adapter may have removed some since
        all_own = all(id(param) in ids for buffer in unit.buffers for param in buffer.params)
        return all_own and computes_in_turn(module)

    def _pre_backward(self, use: ForwardUse) -> None:
        self._listener.on_backward()
        self._coordinator.pre_backward(use, torch._C._current_graph_task_id())
        if torch.is_grad_enabled():  # create_graph=True, e.g. for a gradient penalty
            self._coordinator.keep_for_second_order()

    # -- parameters read outside their module

    def _watch(self, root: nn.Module, units: Sequence[ParamUnit]) -> None:
        # torch has no hook for reads of a parameter; `module.weight` reads the module's parameter dictionary.
        unit_of = {id(param): unit for unit in units for buffer in unit.buffers for param in buffer.params}
        # `ShardedParameter`s that are read in another way, such as `root.parameters()`, report it themselves.
        for unit in units:
            for buffer in unit.buffers:
                buffer.on_read = partial(self._read, unit)
        compiled = compiled_within(root)
        self._modules = {id(module) for module in root.modules()}
        for module in root.modules():
            owned = {
                name: unit_of[id(each)]
                for name, param in module._parameters.items()
                for each in (carriers(param)[:1] if param is not None else ())
                if id(each) in unit_of
            }
            if owned and id(module) not in compiled:
                module.__dict__["_parameters"] = WatchedParameters(module._parameters, owned, self._read)
                self._watched.append(module)

    def _read(self, unit: ParamUnit) -> None:
        if self._coordinator.idle:
            if self._within_forward():  # a submodule is called directly; outside calls a read may only need the shape
                self._coordinator.unshard_for_submodule(unit)
        else:
            self._coordinator.unshard_external(unit)

    def _within_forward(self) -> bool:
        """Returns True if a module of the model is being called; reads the stack, since counting needs more hooks."""
        frame: FrameType | None = sys._getframe(2)
        while frame is not None:
            if frame.f_code is _CALL and id(frame.f_locals.get("self")) in self._modules:
                return True
            frame = frame.f_back
        return False


class WatchedParameters(dict[str, "nn.Parameter | None"]):
    """A module's parameter dictionary that reports reads of parameters of sharded units."""

    def __init__(
        self,
        params: Mapping[str, nn.Parameter | None],
        units: Mapping[str, ParamUnit],
        on_read: Callable[[ParamUnit], None],
    ) -> None:
        super().__init__(params)
        self._units = dict(units)
        self._on_read = on_read

    def __getitem__(self, name: str) -> nn.Parameter | None:
        unit = self._units.get(name)
        if unit is not None and unit.state is not ShardState.UNSHARDED:
            self._on_read(unit)
        return super().__getitem__(name)

    # A copied or pickled model gets an ordinary dictionary.

    def __deepcopy__(self, memo: dict[int, Any]) -> dict[str, nn.Parameter | None]:
        return copy.deepcopy(dict(self), memo)

    def __reduce__(self) -> Any:
        absent = next((unit for unit in self._units.values() if unit.state is ShardState.SHARDED), None)
        if absent is not None:
            raise reads_nan("pickling the model", next(absent.fqns()))
        return dict, (dict(self),)


def tensors_in(value: Any, *, within_object: bool = False) -> Iterator[Tensor]:
    """Yields all tensors in nested containers and dataclasses, and in the attributes of one other object."""
    for _, leaf in leaves_of(value):
        if isinstance(leaf, Tensor):
            yield leaf
        elif is_dataclass(leaf) and not isinstance(leaf, type):
            for field in fields(leaf):
                yield from tensors_in(getattr(leaf, field.name), within_object=within_object)
        elif hasattr(leaf, "__dict__") and not within_object and not isinstance(leaf, (type, nn.Module)):
            for item in vars(leaf).values():  # objects in objects are skipped: they may refer to anything
                yield from tensors_in(item, within_object=True)


class _OwnMemory(torch.autograd.Function):
    """Copies a view of parameters to separate memory with the strides of the view: an expanded view stays small."""

    @staticmethod
    def forward(ctx: Any, view: Tensor) -> Tensor:
        """Copies the elements from the first to the last that the view covers."""
        copy = torch.empty_strided(view.shape, view.stride(), dtype=view.dtype, device=view.device)
        if view.numel():
            numel = 1 + sum((size - 1) * stride for size, stride in zip(view.shape, view.stride(), strict=True))
            copy.as_strided((numel,), (1,)).copy_(view.as_strided((numel,), (1,)))
        return copy

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Tensor:
        """Returns the copy's gradient as that of the view."""
        return grads[0]


def _in_own_memory(output: Any, module: nn.Module, units: Iterable[ParamUnit]) -> Any:
    """Returns a module's output, with copies of views of parameters whose memory is freed after the module.

    Raises:
        EngineStateError: such a view is inside an object that cannot be rebuilt.
    """
    storages = {b.full.untyped_storage()._cdata: b for unit in units for b in unit.buffers if not b.persistent}

    def is_view(tensor: Tensor) -> bool:
        # A parameter itself reports reads; a tensor of another class may have no storage to ask for.
        plain = type(tensor) is Tensor and tensor.layout is torch.strided
        return plain and tensor.untyped_storage()._cdata in storages

    if not any(is_view(tensor) for tensor in tensors_in(output)):
        return output
    copy: Callable[[Tensor], Tensor] = _OwnMemory.apply
    copied = map_tensors(lambda tensor: copy(tensor) if is_view(tensor) else tensor, output)
    if (view := next(filter(is_view, tensors_in(copied)), None)) is not None:
        buffer = storages[view.untyped_storage()._cdata]
        raise EngineStateError(
            f"forward of {type(module).__name__}",
            expected="lists, tuples or mappings around a view of a parameter, because the parameter is sharded next",
            got=f"a view of {' or '.join(slot.fqn for slot in buffer.layout.slots[:3])} inside {type(output).__name__}",
            fix="return a clone() of it, or run the module at stage 2",
        )
    return copied


def freed_view(error: RuntimeError) -> EngineStateError | None:
    """Returns the error for an operation that found a tensor without memory; None for another error."""
    if not any(words in str(error) for words in ("data is not allocated yet", "Cannot access data pointer")):
        return None
    return EngineStateError(
        "engine.forward",
        expected="views of a module's parameters to be used within the module: its parameters are sharded afterwards",
        got=f"a view that a module has kept; torch says: {str(error).splitlines()[0]}",
        fix="keep a clone() of it, name the modules that share it in zero_optimization.leaf_module, or train at "
        "stage 2",
    )


def producers(output: Any) -> list[Any]:
    """Returns the autograd nodes that made an output, each once, with the nodes of the bases of views."""
    nodes: dict[Any, None] = {}  # ordered, without duplicates: outputs often share a node, such as views of a split
    for tensor in tensors_in(output):
        if tensor.grad_fn is not None:
            nodes[tensor.grad_fn] = None
            base = tensor._base if tensor._is_view() else None
            if base is not None and base.grad_fn is not None:
                nodes[base.grad_fn] = None
    return list(nodes)


def _refuse_tracing() -> None:
    if torch._C._get_tracing_state() is not None:
        raise EngineStateError(
            "torch.jit.trace of a sharded model", fix="destroy() the engine, or trace a model without an engine"
        )


def _refuse_transforms(module: nn.Module, *, is_sharded: bool) -> None:
    """Raises before anything is gathered: a collective that fails inside a transform would abort the process group."""
    transform: Any = torch._C._functorch.peek_interpreter_stack()
    if transform is None:
        return
    kind = transform.key().name.lower()
    # Without gradients, vmap of a model that is not sharded is an ordinary forward.
    if kind == "vmap" and not is_sharded and not torch.is_grad_enabled():
        return
    raise EngineStateError(
        f"torch.func.{kind} of {type(module).__name__}",
        expected="a call outside torch.func's transforms, which would trace the engine's gathers and reductions",
        fix="transform a copy of the model: copy.deepcopy(engine.module) inside engine.gathered()",
    )


def _discard(param: nn.Parameter) -> None:
    param.grad = None


def _owners_below(root: nn.Module, unit: ParamUnit) -> list[nn.Module]:
    """Returns the modules below the root that hold parameters of its unit; code may call them without the root."""
    ids = {id(param) for buffer in unit.buffers for param in buffer.params}
    compiled = compiled_within(root)
    owners = [
        module
        for module in root.modules()
        if any(
            id(each) in ids for param in module._parameters.values() if param is not None for each in carriers(param)
        )
    ]
    return [module for module in owners if module is not root and id(module) not in compiled]
