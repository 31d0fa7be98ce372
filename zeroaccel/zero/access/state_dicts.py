"""`state_dict` and `load_state_dict` of a model with sharded parameters, through hooks on its modules."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from contextlib import ExitStack
from typing import Any

from torch import Tensor, nn

from zeroaccel.errors import EngineStateError
from zeroaccel.logs import log_once
from zeroaccel.zero.access.full_params import overwrite
from zeroaccel.zero.access.param_registry import ParamHandle, ParamRegistry
from zeroaccel.zero.module_copies import LiveHook, reads_nan
from zeroaccel.zero.param_unit import ParamUnit, ShardState
from zeroaccel.zero.tensor_subclasses import inner_tensors, is_wrapper, tensors_of

_EMPTY = (
    "state_dict() of a model whose parameters are sharded returns tensors without elements, and a file of them has no "
    "weights; engine.save_16bit_model() writes weights, zero.GatheredParameters gathers them"
)


class StateDictHooks:
    """Makes `load_state_dict` of the model, or of a part of it, write shards and masters. Attached on construction.

    The hooks unshard each module's units while it loads, and write the loaded values to shards and masters, which keep
    the bits that 16-bit parameters drop. All ranks load the same values. `state_dict` raises rather than return NaN.

    Args:
        empty_when_sharded: return tensors of shape (0,) for sharded parameters, with a warning, instead of raising.
    """

    def __init__(self, root: nn.Module, registry: ParamRegistry, *, empty_when_sharded: bool = False) -> None:
        self._empty_when_sharded = empty_when_sharded
        self._handles = ExitStack()
        for module in root.modules():
            named = [
                each
                for name, param in module._parameters.items()
                if param is not None
                for each in tensors_of(name, param)
            ]
            handles = {name: registry.handle(param) for name, param in named}
            owned = {name: handle for name, handle in handles.items() if handle is not None}
            if owned:
                self._attach(module, owned)

    def detach(self) -> None:
        """Removes every hook."""
        self._handles.close()

    def _attach(self, module: nn.Module, owned: Mapping[str, ParamHandle]) -> None:
        units = list({id(handle.unit): handle.unit for handle in owned.values()}.values())
        loaded: dict[str, Tensor] = {}
        gathered: list[ParamUnit] = []

        def before(module: nn.Module, state: dict[str, Any], prefix: str, metadata: Any, *rest: Any) -> None:
            # assign=True would replace the parameters that units, hooks and optimizer refer to with new objects.
            if metadata.get("assign_to_params_buffers"):
                raise EngineStateError(
                    "load_state_dict(assign=True) would replace parameters that the engine manages",
                    fix="leave assign out: values are copied",
                )
            loaded.clear()
            gathered.clear()
            saved = {
                f"{name}.{inner}": getattr(owner, attribute)
                for name in module._parameters
                if is_wrapper(value := state.get(prefix + name))
                for inner, owner, attribute in inner_tensors(value)
            }
            for name, handle in owned.items():
                # Kept until torch has copied, which rounds to the parameter's dtype: the master gets all bits.
                value = saved.get(name, state.get(prefix + name))
                if isinstance(value, Tensor) and tuple(value.shape) == handle.slot.whole_shape:
                    split = handle.slot.split
                    loaded[name] = value if split is None else split.part(value)
                    if split is not None:  # the dict is torch's own copy: put in the part that the parameter has
                        state[prefix + name] = loaded[name]
            for unit in units:
                # torch copies into the parameter after this hook, and `after` writes shard and master from there.
                if unit.state is ShardState.SHARDED:
                    gathered.append(unit)
                unit.unshard()
                unit.wait()

        def after(module: nn.Module, incompatible: Any) -> None:
            for name, value in loaded.items():
                overwrite(owned[name], value)
            for unit in gathered:
                unit.reshard()
            loaded.clear()
            gathered.clear()

        self._handles.callback(module.register_load_state_dict_pre_hook(LiveHook(before)).remove)
        self._handles.callback(module.register_load_state_dict_post_hook(LiveHook(after)).remove)
        self._attach_to_reading(module, owned)

    def _attach_to_reading(self, module: nn.Module, owned: Mapping[str, ParamHandle]) -> None:
        empties = self._empty_when_sharded

        def refuse(module: nn.Module, prefix: str, keep_vars: bool) -> None:
            # A state dict must not silently contain NaN, or parts of parameters.
            for handle in () if empties else owned.values():
                if handle.is_absent:
                    raise reads_nan("state_dict()", handle.slot.fqn)
            for handle in owned.values():
                if handle.slot.split is not None:
                    raise EngineStateError(
                        f"state_dict(): {handle.slot.fqn} is split over ranks, and this rank has only a part of it",
                        fix="use engine.consolidated_state_dict(), or save with the checkpoint calls",
                    )

        self._handles.callback(module.register_state_dict_pre_hook(LiveHook(refuse)).remove)
        if not empties:
            return

        def leave_out_nans(module: nn.Module, state: dict[str, Any], prefix: str, metadata: Any) -> None:
            for name, handle in owned.items():
                if prefix + name in state and handle.is_absent:
                    log_once(logging.WARNING, _EMPTY)
                    state[prefix + name] = state[prefix + name].new_empty(0)

        self._handles.callback(module.register_state_dict_post_hook(LiveHook(leave_out_nans)).remove)
