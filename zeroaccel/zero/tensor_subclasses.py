"""Parameters that are more than an `nn.Parameter`: DTensors, and parameters while they are sharded.

**DTensors.** Tensor parallelism (`torch.distributed.tensor.parallel`) makes a parameter a DTensor over its axis of the
mesh; ZeRO shards, gathers and updates the local tensor, among the ranks of the other axis. An ordinary parameter is its
own local tensor. DTensors are recognized by their attributes, so that only programs that use them import
`torch.distributed.tensor`.

[Note: sharded parameters] Between uses a parameter shows one NaN in its shape (`param_unit.py`). torch would compute
with it, and accept writes, such as `fill_`, which would be lost. So while it is sharded the object's class is
`ShardedParameter`, which checks every use. Accesses to metadata such as the shape are allowed, and so are views and
casts, such as `param.data`, which are checked like the parameter. Within a pass of the model, a read of the values
gathers them, for example when a module reads another one's parameter; outside a pass it is an error, as is every write.
The object stays the same, and is an ordinary `nn.Parameter` while it is unsharded, so that computing with it costs
nothing. A deep copy has no values; it becomes an ordinary parameter once it is overwritten. A sharded DTensor gets a
subclass of `DTensor` instead, with the same checks; its deep copy is an error.

Before there is an engine, the parameter has a `BuiltOwner`: every operation on it, or on a view of it, that needs or
writes values gathers them on all ranks, runs, and shards them again, and a deep copy is a sharded parameter with the
same values. A view stores the call that made it, and `_remade` repeats that call on the gathered parameter.

After the engine's end a sharded parameter is *released*: the first operation that needs or writes values unshards it
for good, on all ranks, so that `destroy` itself needs no other rank.

To decide if a function of torch reads values, it is tried on tensors of the meta device, which have none: a list of
function names would depend on torch's version.
"""

from __future__ import annotations

import copy
import functools
import inspect
import re
import sys
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack
from dataclasses import dataclass, replace
from types import CodeType, FrameType
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.nn.utils import clip_grad_value_
from torch.utils._pytree import tree_leaves, tree_map

from zeroaccel.errors import EngineStateError, UsageError
from zeroaccel.zero.module_names import plain_names


def _split(tensor: Tensor) -> Any:
    """Returns the tensor as a DTensor; None for an ordinary one."""
    return tensor if hasattr(tensor, "_local_tensor") else None


def local(tensor: Tensor) -> Tensor:
    """Returns this rank's local tensor."""
    split = _split(tensor)
    return tensor.detach() if split is None else split._local_tensor


def set_local(param: nn.Parameter, data: Tensor) -> None:
    """Makes `data` the local tensor of the parameter; the object stays the same."""
    split = _split(param)
    if split is None:
        param.data = data
    else:
        split._local_tensor = data
    for owner, name in vars(param).get(_FOLLOWERS, ()):
        setattr(owner, name, data)


def show(params: Sequence[nn.Parameter], tensors: Sequence[Tensor], uses: Sequence[_ShardedUse] | None) -> None:
    """Makes each of `tensors` the local tensor of its parameter.

    Args:
        uses: one per parameter, from `sharded_use`, makes the parameters sharded ones; None makes them ordinary.
    """
    # Each unit comes here several times per step: a plain parameter needs no calls except the check that it is plain.
    for index, (param, tensor) in enumerate(zip(params, tensors, strict=True)):
        kind, attrs = type(param), param.__dict__
        if (kind is not nn.Parameter and kind is not ShardedParameter) or _SCALES in attrs or _FOLLOWERS in attrs:
            as_ordinary(param)
            set_local(param, tensor)
            if uses is not None:
                as_sharded(param, uses[index])
            continue
        if kind is ShardedParameter:
            del attrs[_RECORD]
            param.__class__ = nn.Parameter
        param.data = tensor
        if uses is not None:
            param.__class__ = ShardedParameter
            attrs[_RECORD] = uses[index]


def sharded_use(
    fqn: str, gather: Callable[[], None], param: nn.Parameter, owner: BuiltOwner | None = None
) -> _ShardedUse:
    """Returns the record of a sharded parameter.

    Args:
        fqn: its name.
        gather: unshards it during a pass.
        owner: its owner, until there is an engine.
    """
    return _ShardedUse(fqn, gather, owner=owner, param=weakref.ref(param))


_SCALES, _FOLLOWERS = "_zero_scales", "_zero_followers"


def mark_codes(param: nn.Parameter, scales: Mapping[str, nn.Parameter]) -> None:
    """Notes that a frozen parameter's values are codes, with fixed dtype and bits, and which scales belong to it."""
    vars(param)[_SCALES] = dict(scales)


def unmark_codes(param: nn.Parameter) -> None:
    """Undoes `mark_codes`."""
    for scales in vars(param).pop(_SCALES, {}).values():
        unmark_codes(scales)


def scales_of(param: Tensor) -> Mapping[str, nn.Parameter] | None:
    """Returns name -> scales that are sharded with a parameter's codes; None if the parameter is not a code."""
    scales: Mapping[str, nn.Parameter] | None = vars(param).get(_SCALES)
    return scales


def is_small_float(tensor: Tensor) -> bool:
    """Returns True for floats of 8 bits and less: codes, whose values mean nothing without a scale beside them."""
    return tensor.dtype.is_floating_point and tensor.dtype.itemsize == 1


_HALF_BYTES = getattr(torch, "float4_e2m1fn_x2", None)  # torch 2.6 lacks it


def refuse_half_bytes(where: str, tensor: Tensor) -> None:
    """Raises UsageError for a tensor with two elements per byte, which torch can neither fill nor convert."""
    if tensor.dtype is _HALF_BYTES:
        raise UsageError(
            where,
            expected="a dtype of at least 8 bits per element",
            got=str(tensor.dtype),
            fix="keep its bytes, as in tensor.view(torch.uint8), and view them as that dtype in the module's forward",
        )


_SCALE_NAMES = re.compile(r"scale|zero|a(bs)?max", re.IGNORECASE)


def is_scale_beside_codes(module: nn.Module, name: str) -> bool:
    """Returns True if a module's own tensor is a scale of its codes: rounding it would change the weight.

    Codes are tensors in 8-bit floats, and `qweight` in the layers of GPTQ and AWQ.
    """
    if not _SCALE_NAMES.search(name):
        return False
    tensors = {**module._parameters, **module._buffers}
    return "qweight" in tensors or any(each is not None and is_small_float(each) for each in tensors.values())


def mark_small_floats(module: nn.Module) -> None:
    """Marks a module's own parameters in 8-bit floats, and frozen scales beside them, as codes; meta ones too."""
    for name, param in module._parameters.items():
        if param is None or scales_of(param) is not None or not param.dtype.is_floating_point:
            continue
        refuse_half_bytes(f"parameter {name} of {type(module).__name__}", param)
        if is_small_float(param) or (not param.requires_grad and is_scale_beside_codes(module, name)):
            mark_codes(param, {})


def follow(param: nn.Parameter, owner: object, name: str) -> None:
    """Makes an attribute follow the parameter's data, whenever that is replaced."""
    followers = vars(param).setdefault(_FOLLOWERS, [])
    if not any(known is owner for known, _ in followers):
        followers.append((owner, name))


def is_wrapper(tensor: object) -> bool:
    """Returns True if a tensor keeps its values in other tensors, as in torchao and quanto; False for DTensors."""
    return hasattr(type(tensor), "__tensor_flatten__") and not hasattr(tensor, "_local_tensor")


def inner_tensors(wrapper: Any, prefix: str = "") -> Iterator[tuple[str, Any, str]]:
    """Yields (name, owner, attribute of the owner) of each tensor in a wrapper; nested names have dots."""
    for name in wrapper.__tensor_flatten__()[0]:
        inner = getattr(wrapper, name)
        if is_wrapper(inner):
            yield from inner_tensors(inner, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}", wrapper, name


def rewrapped(wrapper: Any, tensors: Mapping[str, Tensor], prefix: str = "") -> Tensor:
    """Returns another wrapper with the same class and metadata, over tensors by their names in `inner_tensors`.

    A class that decodes the codes of files, which its model does not describe, becomes a plain tensor with the values.
    """
    names, facts = wrapper.__tensor_flatten__()
    inner = {
        name: rewrapped(t, tensors, f"{prefix}{name}.") if is_wrapper(t) else tensors[f"{prefix}{name}"]
        for name, t in ((name, getattr(wrapper, name)) for name in names)
    }
    result: Any = type(wrapper).__tensor_unflatten__(inner, facts, wrapper.shape, wrapper.stride())
    return result.decoded_values() if hasattr(result, "decoded_values") else result  # type: ignore[no-any-return]


def carriers(param: nn.Parameter) -> tuple[nn.Parameter, ...]:
    """Returns the parameters that hold the values in a unit: the parameter, or the sharded tensors of a wrapper."""
    return tuple((scales_of(param) or {}).values()) if is_wrapper(param) else (param,)


def named_tensors(model: nn.Module) -> Iterator[tuple[str, nn.Parameter]]:
    """Yields the model's parameters, each once under its plain name; after codes their scales, wrappers' tensors."""
    plain = plain_names(model)
    for fqn, param in model.named_parameters():
        yield from tensors_of(plain(fqn), param)


def tensors_of(fqn: str, param: nn.Parameter) -> Iterator[tuple[str, nn.Parameter]]:
    """Yields the parameters that a unit contains for a parameter, by name."""
    scales = scales_of(param)
    if scales is None or not is_wrapper(param):
        yield fqn, param
    for name, scale in (scales or {}).items():
        yield f"{fqn}.{name}", scale


def is_split(param: Tensor) -> bool:
    """Returns True if ranks of another axis have other parts of the parameter; False for a replicated DTensor."""
    split = _split(param)
    return split is not None and any(placement.is_shard() for placement in split.placements)


def local_grad(param: nn.Parameter, grad: Tensor) -> Tensor:
    """Returns the local gradient, redistributed to the parameter's placements if needed (collective on its axis)."""
    split, target = _split(grad), _split(param)
    if split is None:
        return grad
    if target is not None and tuple(split.placements) != tuple(target.placements):
        split = split.redistribute(placements=target.placements)
    shard: Tensor = split.to_local()
    wait = getattr(shard, "wait", None)  # an AsyncCollectiveTensor: the redistribution may still be running
    return wait() if wait is not None and type(shard) is not Tensor else shard


def check_split(named: Sequence[tuple[str, nn.Parameter]], dtype_of: Any) -> None:
    """Refuses DTensors that would have to change dtype, or whose local tensors differ in size.

    Args:
        dtype_of: (name, parameter) -> the dtype that the parameter should have.

    Raises:
        UsageError: a dtype would have to change, or the parts have different sizes.
    """
    for fqn, param in named:
        split = _split(param)
        if split is None:
            continue
        # A DTensor's spec records the dtype, and stays as `parallelize_module` set it.
        dtype: torch.dtype = dtype_of(fqn, param)
        if param.dtype is not dtype:
            raise UsageError(
                f"parameter {fqn}, a DTensor",
                expected=f"{dtype}, from the config's precision",
                got=str(param.dtype),
                fix=f"call model.to({dtype}) before parallelize_module",
            )
        for axis, placement in enumerate(split.placements):
            size = split.device_mesh.size(axis)
            if placement.is_shard() and param.shape[placement.dim] % size:
                raise UsageError(
                    f"parameter {fqn}, a DTensor",
                    expected=f"a multiple of {size} in dim {placement.dim}, so that all ranks have equal parts",
                    got=tuple(param.shape),
                    fix="change the size, or leave the module out of the plan of parallelize_module",
                )


_RECORD, _ORIGIN = "_sharded", "_origin"
_METADATA_NAMES = """
    shape dtype device layout ndim is_meta is_cuda is_cpu is_sparse is_quantized requires_grad requires_grad_
    is_leaf grad grad_fn _version names itemsize nbytes size dim numel nelement element_size is_floating_point
    is_complex get_device __len__ __hash__ __reduce_ex__ is_contiguous stride storage_offset register_hook
    _backward_hooks is_same_size retains_grad output_nr is_nested is_inference is_mkldnn is_xla is_vulkan
    data_ptr storage untyped_storage register_post_accumulate_grad_hook
"""
METADATA = frozenset(_METADATA_NAMES.split())
"""Functions and attributes of a tensor that do not read its values."""

_SHAPES = frozenset({"view_as", "expand_as", "reshape_as", "type_as", "retain_grad"})
_CASTS = frozenset({"to", "type", "cpu", "cuda", "float", "double", "half", "bfloat16", "contiguous"})
_NO_WRITES = frozenset({"requires_grad_", "detach_", "rename_", "share_memory_", "retain_grad_"})
_ARITHMETIC = "add sub mul truediv floordiv mod pow matmul and or xor lshift rshift"
_OPERATORS = frozenset(f"__i{name}__" for name in _ARITHMETIC.split()) | {"__setitem__"}
_DDP = inspect.unwrap(nn.parallel.DistributedDataParallel.__init__).__code__
_CLIP_VALUE = inspect.unwrap(clip_grad_value_).__code__
_OVERWRITES = frozenset({"copy_", "_foreach_copy_", "fill_", "zero_", "_foreach_zero_", "normal_", "uniform_", "data"})


class BuiltOwner(Protocol):
    """The owner of sharded parameters that no engine has yet."""

    def using(
        self, params: Sequence[nn.Parameter], call: str, *, writes: bool
    ) -> AbstractContextManager[Callable[[Tensor], bool]]:
        """Unshards parameters for one operation, in the block. (all ranks)

        Args:
            writes: the operation changes them; all ranks get rank 0's values.

        Returns:
            A context manager that yields a function: True for a tensor that shares memory with the parameters.
        """

    def copy(self, param: nn.Parameter) -> nn.Parameter:
        """Returns a parameter with the same values, sharded too. (all ranks)"""

    def has(self, param: nn.Parameter) -> bool:
        """Returns False if an engine has taken the parameter over."""


@dataclass(frozen=True)
class _Origin:
    """The operation that made a view, and the view's number among its results.

    Attributes:
        shape: the view of a tensor on the meta device, which has the strides that the view of real values has.
    """

    func: Callable[..., Any]
    args: Sequence[Any]
    kwargs: Mapping[str, Any]
    index: int | None
    with_grad: bool
    shape: Tensor


@dataclass(eq=False)
class _ShardedUse:
    """The record that a sharded parameter shares with its views and casts.

    Attributes:
        gather: unshards it during a pass of the model, and does nothing outside.
        ordinary: the class of the parameter while it is unsharded.
        copy: for a deep copy without values, the copied parameter.
        is_filled: True if the copy has been overwritten.
        owner: owner until an engine takes over.
        param: the parameter; None for a copy.
        is_released: True after the engine's end: `gather` then unshards it for good, at the first use of its values.
    """

    fqn: str
    gather: Callable[[], None]
    ordinary: type[Tensor] = nn.Parameter
    owner: BuiltOwner | None = None
    param: weakref.ref[nn.Parameter] | None = None
    copy: weakref.ref[nn.Parameter] | None = None
    is_filled: bool = False
    is_released: bool = False


def as_sharded(param: nn.Parameter, use: _ShardedUse) -> None:
    """Makes uses of the values of a parameter or DTensor errors; objects of other classes stay unchanged."""
    # Exactly these classes: the memory layout of an object with another class, or with slots, may differ.
    ordinary = type(param)
    if ordinary is nn.Parameter:
        _change_class(param, ShardedParameter)
    elif _split(param) is not None and ordinary is _dtensor():
        _change_class(param, _sharded_dtensor())
    elif scales_of(param) is not None:
        _change_class(param, _sharded_codes(ordinary))
    else:
        return
    vars(param)[_RECORD] = replace(use, ordinary=ordinary)


def as_ordinary(param: nn.Parameter) -> None:
    """Undoes `as_sharded`."""
    if isinstance(param, _Checked):
        _change_class(param, vars(param).pop(_RECORD).ordinary)


def _change_class(param: Any, to: type[Tensor]) -> None:
    param.__class__ = to


class _Checked(Tensor):
    """A tensor without its values: torch's functions go through `_call`, which allows some of them."""

    @classmethod
    def __torch_function__(
        cls, func: Callable[..., Any], types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        return _call(func, args, kwargs or {})

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        if unshard_released(self):
            return copy.deepcopy(self, memo)
        if _record(self).owner is None:
            raise _no_values(self, "deepcopy")
        copied: Tensor = _call(Tensor.clone, (self.detach(),), {})
        memo[id(self)] = copied
        return copied

    def __reduce_ex__(self, protocol: Any) -> Any:
        if unshard_released(self):
            return self.__reduce_ex__(protocol)
        raise _no_values(self, "pickling")


class ShardedParameter(_Checked, nn.Parameter):
    """A parameter while it is sharded. Made only by `as_sharded`, or by a copy of another one.

    Raises:
        EngineStateError: a program writes the parameter, a view or a cast, or reads it outside a pass of its model.
    """

    def __new__(cls, data: Any = None, requires_grad: bool = True) -> Any:
        """Returns an ordinary parameter, since programs make another parameter by `type(param)(data)`."""
        return nn.Parameter(data, requires_grad)

    def __deepcopy__(self, memo: dict[int, Any]) -> nn.Parameter:
        if unshard_released(self):
            return copy.deepcopy(self, memo)
        record = vars(self)[_RECORD]
        if record.owner is not None and record.param() is self:
            whole: nn.Parameter = record.owner.copy(self)
            memo[id(self)] = whole
            return whole
        if record.owner is not None:  # a detached view
            return super().__deepcopy__(memo)  # type: ignore[no-any-return]
        with torch._C.DisableTorchFunctionSubclass():
            copied = memo[id(self)] = nn.Parameter(self.data.clone(), self.requires_grad)
        vars(copied)[_RECORD] = _ShardedUse(record.fqn, _gather_nothing, copy=weakref.ref(copied))
        _change_class(copied, ShardedParameter)
        return copied


class _ShardedValues(_Checked):
    """A view or a cast of a sharded parameter's NaN."""


@functools.cache
def _dtensor() -> type[Tensor]:
    from torch.distributed.tensor import DTensor

    return DTensor


@functools.cache
def _sharded_dtensor() -> type[Tensor]:
    """Returns the class of a DTensor while it is sharded; its own methods bypass torch's function protocol."""
    dtensor: Any = _dtensor()

    def checked(method: str) -> Callable[..., Any]:
        whole = getattr(dtensor, method)
        return functools.wraps(whole)(lambda self, *args, **kwargs: _call(whole, (self, *args), kwargs))

    methods = {method: checked(method) for method in ("to_local", "full_tensor", "redistribute")}
    return type("ShardedDTensor", (_Checked, dtensor), {"__slots__": (), **methods})


@functools.cache
def _sharded_codes(ordinary: Any) -> type[Tensor]:
    """Returns the class of a quantized weight while it is sharded, with the same name, because programs check it."""
    return type(ordinary)(  # type: ignore[no-any-return]
        ordinary.__name__, (_Checked, ordinary), {"__slots__": (), "__module__": ordinary.__module__}
    )


def unshard_released(param: object) -> bool:
    """Unshards a parameter that a destroyed engine left sharded; returns True if it was one. (all ranks)"""
    if not isinstance(param, _Checked) or not _record(param).is_released:
        return False
    with torch._C.DisableTorchFunctionSubclass():
        _record(param).gather()
    return True


def is_watched(param: nn.Parameter) -> bool:
    """Returns True for a sharded parameter whose uses are checked; see [Note: sharded parameters]."""
    return isinstance(param, _Checked)


def _gather_nothing() -> None:
    """Does nothing, because no engine owns the copy."""


def _call(func: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    with torch._C.DisableTorchFunctionSubclass():  # otherwise the calls below would recurse here
        call = function_name(func)
        if call == "grad":
            _refuse_to_clip(sys._getframe(2))
        elif call == "device":
            _refuse_to_wrap(sys._getframe(2), args[0])
        if call not in METADATA and call not in _SHAPES:
            for tensor in _sharded(args, kwargs):
                unshard_released(tensor)
        built = [tensor for tensor in _sharded(args, kwargs) if _record(tensor).owner is not None]
        if built:
            return _call_built(func, call, args, kwargs, built)
        _check_targets(func, call, args, kwargs)
        if _is_metadata(func, call):
            return _view(func, args, kwargs)
        for tensor in _sharded(args, kwargs):
            _record(tensor).gather()
        args, kwargs = tree_map(_remade, (tuple(args), dict(kwargs)))
        sharded = _sharded(args, kwargs)  # without the gathered ones
        if sharded:
            absent = next((tensor for tensor in sharded if not _record(tensor).is_filled), None)
            if absent is not None and call not in _CASTS and _reads_values(func, call, args, kwargs):
                raise _no_values(absent, call)
            return _view(func, args, kwargs)
    return func(*args, **kwargs)


def _call_built(
    func: Callable[..., Any], call: str, args: Sequence[Any], kwargs: Mapping[str, Any], built: Sequence[Any]
) -> Any:
    """Runs a function of sharded parameters that no engine has yet. (all ranks, unless it needs only metadata)"""
    if call in _CASTS and call != "contiguous" and func(*args, **kwargs) is args[0]:
        return args[0]  # it converts nothing
    writes = any(True for _ in _targets(func, call, args, kwargs))
    if writes:
        _refuse_to_step(sys._getframe(3), built[0])
    if writes or (not _is_metadata(func, call) and _reads_values(func, call, args, kwargs)):
        return _run_whole(func, call, args, kwargs, built, writes)
    return _view(func, args, kwargs)


def _run_whole(
    func: Callable[..., Any],
    call: str,
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
    built: Sequence[Any],
    writes: bool,
) -> Any:
    """Runs a function on the values of sharded parameters that no engine has yet. (all ranks)"""
    absent = next((t for t in _sharded(args, kwargs) if _record(t).owner is None and not _record(t).is_filled), None)
    if absent is not None:
        raise _no_values(absent, call)
    params: dict[int, tuple[BuiltOwner, nn.Parameter]] = {}
    for tensor in built:
        record = _record(tensor)
        param = record.param()
        if param is None or not record.owner.has(param):
            raise _outlived(record, call)
        params[id(param)] = record.owner, param
    with ExitStack() as stack:
        tests = []
        for owner in {id(owner): owner for owner, _ in params.values()}.values():
            all_of = [param for holder, param in params.values() if holder is owner]
            tests.append(stack.enter_context(owner.using(all_of, call, writes=writes)))
        whole: dict[int, Any] = {}
        originals: dict[int, Any] = {}

        def valued(leaf: Any) -> Any:
            if not isinstance(leaf, _Checked):
                return leaf
            if id(leaf) not in whole:
                whole[id(leaf)] = _remade(leaf)
                originals[id(whole[id(leaf)])] = leaf
            return whole[id(leaf)]

        def covered(leaf: Any) -> Any:
            if not isinstance(leaf, Tensor):
                return leaf
            if id(leaf) in originals:  # an operation in place returns its argument
                return originals[id(leaf)]
            is_part = type(leaf) is Tensor and leaf.layout is torch.strided and any(test(leaf) for test in tests)
            return leaf.clone() if is_part else leaf

        if torch.is_grad_enabled():
            # For a leaf, autograd saves the parameter itself, which is sharded again in backward: it saves an alias.
            stack.enter_context(saved_tensors_hooks(Tensor.detach, lambda saved: saved))
        return tree_map(covered, func(*tree_map(valued, tuple(args)), **tree_map(valued, dict(kwargs))))


def _remade(leaf: Any) -> Any:
    """Returns the view of the gathered parameter for a view of a sharded one; others stay."""
    origin = vars(leaf).get(_ORIGIN) if isinstance(leaf, _Checked) else None
    if origin is None:
        return leaf
    source = _record(leaf).param
    if source is None or isinstance(source(), (_Checked, type(None))):
        return leaf  # the parameter is still sharded, or it is gone
    with torch.set_grad_enabled(origin.with_grad):
        args, kwargs = tree_map(_remade, (tuple(origin.args), dict(origin.kwargs)))
        result = origin.func(*args, **kwargs)
    return result if origin.index is None else result[origin.index]


def _view(func: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    """Runs a function that reads no values; its views of a sharded parameter remember how to be made again."""
    call = function_name(func)
    if call == "__iter__":
        return iter(_view(torch.unbind, args, kwargs))
    result = _checked(func(*args, **kwargs), call, args)
    several = isinstance(result, (list, tuple))
    shapes: Any = None
    for index, item in enumerate(result) if several else ((None, result),):
        if isinstance(item, _Checked) and item is not (args[0] if args else None) and _ORIGIN not in vars(item):
            if _record(item).param is None or call in _CASTS:
                continue  # a copy without values, and its casts
            if shapes is None:
                shapes = _on_meta(func, args, kwargs)[0]
            shape = shapes if index is None else shapes[index]
            vars(item)[_ORIGIN] = _Origin(func, args, kwargs, index, torch.is_grad_enabled(), shape)
    return result


def _outlived(record: _ShardedUse, call: str) -> EngineStateError:
    return EngineStateError(
        f"a view of parameter {record.fqn}",
        expected="a view that was made of the parameter as it is: since then an engine took it over, or it got "
        "other storage",
        got=call,
        fix="read param.data or state_dict() again",
    )


def _refuse_to_clip(caller: FrameType) -> None:
    """Raises for torch's clip_grad_value_, which would find no gradients and raise an error without a name."""
    if _is_called_by(_CLIP_VALUE, caller):
        raise EngineStateError(
            "torch.nn.utils.clip_grad_value_",
            expected="gradients in param.grad",
            got="none, because the engine keeps them, reduced and sharded",
            fix="call engine.clip_grad_value_(value) between backward and step, or set gradient_clipping in the config",
        )


def _refuse_to_wrap(caller: FrameType, param: Any) -> None:
    """Raises for torch's DistributedDataParallel, which would broadcast and reduce the NaN of sharded parameters."""
    if _is_called_by(_DDP, caller):
        raise UsageError(
            f"torch.nn.parallel.DistributedDataParallel, parameter {_record(param).fqn}",
            expected="a model whose parameters are whole",
            got="a sharded parameter",
            fix="pass the model to zeroaccel.initialize() or to an Accelerator with a ZeRO config, and do not wrap it; "
            "accelerate wraps it if ACCELERATE_USE_CPU or cpu=True is set, so remove that. A model that needs no "
            "engine must be loaded before the Accelerator or TrainingArguments, after which models are sharded",
        )


def _refuse_to_step(caller: FrameType | None, param: Any) -> None:
    """Raises for a step of an optimizer without an engine, which would apply the gradients of rank 0 alone."""
    while caller is not None and caller.f_globals.get("__name__") != "torch.optim.optimizer":
        caller = caller.f_back
    if caller is not None:
        raise UsageError(
            f"optimizer.step(), parameter {_record(param).fqn}",
            expected="an engine, which sums the gradients of all ranks",
            got="a model of zero.Init without one",
            fix="pass model and optimizer to zeroaccel.initialize() or Accelerator.prepare(), and use what they return",
        )


def _is_called_by(code: CodeType, caller: FrameType) -> bool:
    """Returns True if a frame belongs to the code, or is within two calls of it: a comprehension, or a property."""
    frames = caller, caller.f_back, None if caller.f_back is None else caller.f_back.f_back
    return any(frame is not None and frame.f_code is code for frame in frames)


def _is_metadata(func: Callable[..., Any], call: str) -> bool:
    # Attributes are metadata, or views; a read or write of their values is another call.
    is_attribute = func.__name__ in ("__get__", "__set__")
    makes_another = call.startswith("new_") or call.endswith("_like")
    return is_attribute or makes_another or call in METADATA or call in _SHAPES or call in _NO_WRITES


def _sharded(args: Sequence[Any], kwargs: Mapping[str, Any]) -> list[Any]:
    return [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, _Checked)]


def _reads_values(func: Callable[..., Any], call: str, args: Sequence[Any], kwargs: Mapping[str, Any]) -> bool:
    """Returns True if a function computes with its tensors' values or copies them; views share a tensor's memory."""
    if call in _OPERATORS or (call.endswith("_") and not call.endswith("__")):
        return True  # it writes to another tensor
    try:
        result, views = _on_meta(func, args, kwargs)
    except Exception:  # it cannot run without values, so it needs them
        return True
    tensors = [leaf for leaf in tree_leaves(result) if isinstance(leaf, Tensor)]
    return any(tensor.untyped_storage()._cdata not in views for tensor in tensors)


def _on_meta(func: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]) -> tuple[Any, set[int]]:
    """Runs a function on tensors without memory; also returns the storages of those for sharded ones."""
    views: set[int] = set()

    def stand_in(leaf: Any) -> Any:
        if not isinstance(leaf, Tensor):
            return leaf
        origin = vars(leaf).get(_ORIGIN) if isinstance(leaf, _Checked) else None
        empty = torch.empty(leaf.shape, dtype=leaf.dtype, device="meta") if origin is None else origin.shape
        if isinstance(leaf, _Checked):
            views.add(empty.untyped_storage()._cdata)
        return empty

    with torch.no_grad():
        stand_ins = tree_map(stand_in, (tuple(args), dict(kwargs)))
        return func(*stand_ins[0], **stand_ins[1]), views


def _no_values(tensor: _Checked, call: str) -> EngineStateError:
    record = _record(tensor)
    if record.copy is not None:
        return EngineStateError(
            f"a copy of parameter {record.fqn}",
            expected="values: it was sharded when it was copied, so the copy has none",
            got=call,
            fix="copy inside zero.GatheredParameters(model.parameters()) or engine.gathered(), or load a state dict "
            "into the copy",
        )
    return EngineStateError(
        f"parameter {record.fqn}",
        expected="no read of its values while it is sharded, because this rank lacks them and it would read as NaN",
        got=call,
        fix="read it in the model's forward or inside zero.GatheredParameters(param); "
        "zero.safe_get_full_fp32_param(param) returns a copy",
    )


def _check_targets(func: Callable[..., Any], call: str, args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
    """Refuses writes to sharded parameters; in copies, writes that would leave some of the NaN."""
    for target in _targets(func, call, args, kwargs):
        record = _record(target)
        if record.copy is None:
            raise EngineStateError(
                f"parameter {record.fqn}",
                expected="no write while it is sharded, because this rank lacks its values and would lose the write",
                got=call,
                fix="write inside zero.GatheredParameters(param, modifier_rank=0)",
            )
        if not record.is_filled:
            if call not in _OVERWRITES:
                raise _no_values(target, call)
            record.is_filled = True
            param = record.copy()
            if param is not None:
                as_ordinary(param)


def _targets(func: Callable[..., Any], call: str, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Iterator[_Checked]:
    """Yields the sharded tensors among the arguments that the call would write."""
    targets: list[Any] = [kwargs.get("out")]
    if call == "data":
        if func.__name__ == "__set__" and _is_other_storage(*args[:2]):
            targets.append(args[0])
    # torch's convention: a trailing underscore means in place. The exceptions do not change values.
    elif call in _OPERATORS or (call.endswith("_") and not call.endswith("__") and call not in _NO_WRITES):
        targets.append(args[0] if args else kwargs.get("tensor", kwargs.get("input")))
    for value in targets:
        for tensor in value if isinstance(value, (list, tuple)) else (value,):
            if isinstance(tensor, _Checked):
                yield tensor


def _is_other_storage(param: Tensor, data: Tensor) -> bool:
    """Returns True if new data has other values; `param_check.py` reports conversions of dtype or device."""
    record = _record(param)
    if isinstance(data, _Checked) and _record(data) is record:
        origin = vars(data).get(_ORIGIN)
        return not (data.shape == param.shape and (origin is None or origin.shape.is_contiguous()))
    if record.copy is None and record.owner is None and (data.dtype, data.device) != (param.dtype, param.device):
        return False
    return bool(local(data).untyped_storage()._cdata != local(param).untyped_storage()._cdata)


def _checked(result: Any, call: str, args: Sequence[Any]) -> Any:
    """Returns a result, as `_ShardedValues` if it is a view or a cast of the first argument."""
    if isinstance(result, (list, tuple)) and result and isinstance(result[0], Tensor):
        return (
            type(result)([_checked(item, call, args) for item in result]) if type(result) in (list, tuple) else result
        )
    source = args[0] if args else None
    if not isinstance(source, _Checked) or _record(source).is_filled:
        return result
    if call == "__iter__":
        return iter(_checked(source.unbind(0), call, args))
    split = _split(source)
    if type(result) is not (Tensor if split is None else _dtensor()) or result.is_sparse:
        return result
    if call not in _CASTS and local(result).untyped_storage()._cdata != local(source).untyped_storage()._cdata:
        return result
    # A view: like a write to the parameter, a write to it would be lost, so it carries the parameter's record.
    if split is not None:
        _change_class(result, _sharded_dtensor())
    else:  # nn.Parameter(param) requires detach() to keep the class
        keeps_class = call == "detach" and isinstance(source, ShardedParameter)
        result = result.as_subclass(ShardedParameter if keeps_class else _ShardedValues)
    vars(result)[_RECORD] = _record(source)
    return result


def _record(tensor: Any) -> Any:
    return vars(tensor)[_RECORD]


def function_name(func: Callable[..., Any]) -> str:
    """Returns the name of a torch function, or of the attribute of a getter or setter."""
    name = str(getattr(func, "__name__", ""))
    return str(func.__self__.__name__) if name in ("__get__", "__set__") else name  # type: ignore[attr-defined]
