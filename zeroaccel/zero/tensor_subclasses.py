"""Parameters that are more than an `nn.Parameter`: DTensors, and parameters while they are sharded.

**DTensors.** Tensor parallelism (`torch.distributed.tensor.parallel`) makes a parameter a DTensor over its axis of the
mesh; ZeRO shards, gathers and updates the local tensor, among the ranks of the other axis. An ordinary parameter is its
own local tensor. DTensors are recognised by their attributes, so that `torch.distributed.tensor` is imported only by
programs that use it.

[Note: sharded parameters] Between uses a parameter shows one NaN in its shape (`param_unit.py`). torch refuses most
writes to that without naming the parameter, and accepts others, such as `fill_`, which would be lost. So while it is
sharded the object's class is `ShardedParameter`, which checks what is done with it. Reads go through; results that
share the storage, such as `param.data`, are checked for writes too. The object stays the same, and is an ordinary
`nn.Parameter` while it is unsharded, so that computing with it costs nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from zeroaccel.errors import EngineStateError, UsageError


def _split(tensor: Tensor) -> Any:
    """The tensor as a DTensor; None for an ordinary one."""
    return tensor if hasattr(tensor, "_local_tensor") else None


def local(tensor: Tensor) -> Tensor:
    """This rank's local tensor."""
    split = _split(tensor)
    return tensor.detach() if split is None else split._local_tensor


def set_local(param: nn.Parameter, data: Tensor) -> None:
    """Makes `data` the local tensor of the parameter; the object stays the same."""
    split = _split(param)
    if split is None:
        param.data = data
    else:
        split._local_tensor = data


def is_split(param: Tensor) -> bool:
    """Whether ranks of another axis have other parts of it; a replicated DTensor is not split."""
    split = _split(param)
    return split is not None and any(placement.is_shard() for placement in split.placements)


def local_grad(param: nn.Parameter, grad: Tensor) -> Tensor:
    """The local gradient, redistributed to the parameter's placements if it has others (collective on its axis)."""
    split, target = _split(grad), _split(param)
    if split is None:
        return grad
    if target is not None and tuple(split.placements) != tuple(target.placements):
        split = split.redistribute(placements=target.placements)
    part: Tensor = split.to_local()
    wait = getattr(part, "wait", None)  # an AsyncCollectiveTensor: the redistribution may still be running
    return wait() if wait is not None and type(part) is not Tensor else part


def check_split(named: Sequence[tuple[str, nn.Parameter]], dtype_of: Any) -> None:
    """Refuses DTensors that would have to change dtype, or whose local tensors differ in size.

    Args:
        dtype_of: (name, parameter) -> the dtype it is to have.

    Raises:
        UsageError: its dtype would have to change, or its parts are of different sizes.
    """
    for fqn, param in named:
        split = _split(param)
        if split is None:
            continue
        # A DTensor's spec records the dtype, and stays as `parallelize_module` made it.
        dtype: torch.dtype = dtype_of(fqn, param)
        if param.dtype is not dtype:
            raise UsageError(
                f"parameter {fqn}, a DTensor",
                expected=f"{dtype}, as the config's precision says",
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


_FQN = "_sharded_fqn"
_NO_WRITES = frozenset({"requires_grad_", "detach_", "rename_", "share_memory_", "retain_grad_"})
_ARITHMETIC = "add sub mul truediv floordiv mod pow matmul and or xor lshift rshift"
_OPERATORS = frozenset(f"__i{name}__" for name in _ARITHMETIC.split()) | {"__setitem__"}


def as_sharded(param: nn.Parameter, fqn: str) -> None:
    """Makes writes to an ordinary parameter errors; of others, such as DTensors, the class is left as it is."""
    # Exactly nn.Parameter: the memory layout of an object with another class, or with slots, may differ.
    if type(param) is nn.Parameter:
        vars(param)[_FQN] = fqn
        _change_class(param, ShardedParameter)


def as_ordinary(param: nn.Parameter) -> None:
    """Undoes `as_sharded`."""
    if type(param) is ShardedParameter:
        _change_class(param, nn.Parameter)
        del vars(param)[_FQN]


def _change_class(param: Any, to: type[nn.Parameter]) -> None:
    param.__class__ = to


class ShardedParameter(nn.Parameter):
    """A parameter for as long as it is sharded. Made by `as_sharded` only.

    Raises:
        EngineStateError: it, or a view of it, is written.
    """

    def __new__(cls, data: Any = None, requires_grad: bool = True) -> Any:
        """`type(param)(data)` is how programs make another parameter: an ordinary one."""
        return nn.Parameter(data, requires_grad)

    @classmethod
    def __torch_function__(
        cls, func: Callable[..., Any], types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        return _call(func, args, kwargs or {})

    def __deepcopy__(self, memo: dict[int, Any]) -> nn.Parameter:
        with torch._C.DisableTorchFunctionSubclass():
            copied = memo[id(self)] = nn.Parameter(self.data.clone(), self.requires_grad)
        return copied

    def __reduce_ex__(self, protocol: Any) -> Any:
        # The name must not travel: unpickled, it is an ordinary parameter.
        with torch._C.DisableTorchFunctionSubclass():
            fqn = vars(self).pop(_FQN)
            try:
                return nn.Parameter.__reduce_ex__(self, protocol)
            finally:
                vars(self)[_FQN] = fqn


class _ShardedValues(Tensor):
    """A view of what a sharded parameter shows.

    Attributes:
        fqn: of the parameter.
    """

    fqn: str = ""

    @classmethod
    def __torch_function__(
        cls, func: Callable[..., Any], types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        return _call(func, args, kwargs or {})

    def __deepcopy__(self, memo: dict[int, Any]) -> Tensor:
        with torch._C.DisableTorchFunctionSubclass():
            copied = memo[id(self)] = self.clone().as_subclass(Tensor)
        return copied

    def __reduce_ex__(self, protocol: Any) -> Any:
        with torch._C.DisableTorchFunctionSubclass():
            return self.as_subclass(Tensor).__reduce_ex__(protocol)


def _call(func: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    with torch._C.DisableTorchFunctionSubclass():  # else the calls below would come back here
        call = function_name(func)
        target = next(_targets(func, call, args, kwargs), None)
        if target is not None:
            raise EngineStateError(
                f"parameter {_fqn(target)}",
                expected="no write while it is sharded: its values are not here, and what is written would be lost",
                got=call,
                fix="write inside zero.GatheredParameters(param, modifier_rank=0)",
            )
        result = func(*args, **kwargs)
        if call == "detach" and isinstance(args[0], ShardedParameter):  # nn.Parameter(param) wants the same class
            detached = result.as_subclass(ShardedParameter)
            vars(detached)[_FQN] = _fqn(args[0])
            return detached
        return _checked(result, args)


def _targets(
    func: Callable[..., Any], call: str, args: Sequence[Any], kwargs: Mapping[str, Any]
) -> Iterator[ShardedParameter | _ShardedValues]:
    """The sharded tensors among the arguments that the call would write."""
    targets: list[Any] = [kwargs.get("out")]
    if call == "data":
        if func.__name__ == "__set__" and _is_other_storage(*args[:2]):
            targets.append(args[0])
    # torch's convention: a trailing underscore means in place. The exceptions change no values.
    elif call in _OPERATORS or (call.endswith("_") and not call.endswith("__") and call not in _NO_WRITES):
        targets.append(args[0] if args else kwargs.get("tensor", kwargs.get("input")))
    for value in targets:
        for tensor in value if isinstance(value, (list, tuple)) else (value,):
            if isinstance(tensor, (ShardedParameter, _ShardedValues)):
                yield tensor


def _is_other_storage(param: Tensor, data: Tensor) -> bool:
    """Whether new data are other values; another dtype or device is a conversion, which `param_check.py` reports."""
    if (data.dtype, data.device) != (param.dtype, param.device):
        return False
    return bool(data.untyped_storage()._cdata != param.untyped_storage()._cdata)


def _checked(result: Any, args: Sequence[Any]) -> Any:
    """A result, as `_ShardedValues` where it is a view of the first argument."""
    if isinstance(result, (list, tuple)) and result and isinstance(result[0], Tensor):
        return type(result)([_checked(item, args) for item in result]) if type(result) in (list, tuple) else result
    source = args[0] if args else None
    if type(result) is not Tensor or not isinstance(source, (ShardedParameter, _ShardedValues)):
        return result
    if result.is_sparse or result.untyped_storage()._cdata != source.untyped_storage()._cdata:
        return result
    # A view: a write to it would be lost as one to the parameter is, so it carries the parameter's name.
    values = result.as_subclass(_ShardedValues)
    values.fqn = _fqn(source)
    return values


def _fqn(tensor: ShardedParameter | _ShardedValues) -> str:
    return tensor.fqn if isinstance(tensor, _ShardedValues) else vars(tensor)[_FQN]


def function_name(func: Callable[..., Any]) -> str:
    """The name of a torch function, or of the attribute that a getter or setter is for."""
    name = str(getattr(func, "__name__", ""))
    return str(func.__self__.__name__) if name in ("__get__", "__set__") else name  # type: ignore[attr-defined]
