"""Tensor-parallel modules other than linear layers: experts, and attention with its own parameters.

A plan of transformers gives such a module a style, and styles of linear layers to its parameters:

```text
layers.*.mlp.experts                moe_tp_experts   parameters (E, 2I, H) and (E, H, I): each rank has a part of I of
layers.*.mlp.experts.gate_up_proj   packed_colwise   every expert, whose outputs are summed, like a colwise layer
layers.*.mlp.experts.down_proj      rowwise          followed by a rowwise one
layers.*.mlp.shared_experts         all_reduce       the same for experts that every token goes to
layers.*.self_attn                  local_params     computes with this rank's part of its own parameters
layers.*.self_attn.sinks            colwise
layers.*.self_attn.kv_a_proj        mla_kv_a_proj    a whole linear layer; each rank uses its last outputs, the rotary
                                                     part, for its own heads: the ranks sum their gradients
```
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from zeroaccel.comm.tracked_group import TrackedGroup
from zeroaccel.errors import UsageError, listed
from zeroaccel.nested import map_tensors
from zeroaccel.zero.layout import Split

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

# Style of a parameter -> (dim to cut, counted from the last one; number of blocks that are cut separately).
PARAMETER_STYLES: Mapping[str, tuple[int, int]] = {
    "colwise": (-2, 1),
    "packed_colwise": (-2, 2),
    "rowwise": (-1, 1),
    "packed_rowwise": (-1, 2),
}
SUMMED = ("moe_tp_experts", "all_reduce")
"""Styles of modules whose outputs the ranks sum: routed experts, and experts that every token goes to."""
OWN_PARAMETERS, ROTARY, IDENTITY = "local_params", "mla_kv_a_proj", "moe_identity_expert"
MODULE_STYLES = (*SUMMED, OWN_PARAMETERS, ROTARY, IDENTITY)


def note_calls(mesh: DeviceMesh, name: str, phase: str) -> None:
    """Sets the module and phase of the group's next calls, for messages and counts."""
    group = mesh.get_group()
    if isinstance(group, TrackedGroup):
        group.label, group.flight_recorder.phase = name, phase


@dataclass
class SplitPart(ABC):
    """A module of which this rank computes a part.

    Attributes:
        cuts: name of a parameter in the module -> its split, for split parameters.
        takes_whole: the module currently takes and returns whole tensors, whatever its style.
    """

    name: str
    module: nn.Module
    mesh: DeviceMesh
    cuts: Mapping[str, Split]
    takes_whole: bool = field(default=False, kw_only=True)
    _handles: list[RemovableHandle] = field(default_factory=list, kw_only=True)

    def splits(self) -> dict[int, Split]:
        """Maps id(parameter) to its split, for split parameters."""
        return {id(self.module.get_parameter(key)): split for key, split in self.cuts.items()}

    def attach(self) -> None:
        """Makes the module compute with its part, and exchange inputs and outputs."""
        # The engine gathers before and reshards after a forward: this hook must read the gathered part, and return an
        # ordinary output to the engine. So it is the module's last pre-hook and its first hook.
        before = self.module.register_forward_pre_hook(self._before, with_kwargs=True)
        after = self.module.register_forward_hook(self._after, prepend=True, always_call=True)
        self._handles += before, after

    def detach(self) -> None:
        """Removes the hooks."""
        while self._handles:
            self._handles.pop().remove()

    @abstractmethod
    def _before(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Runs as the pre-hook of the module's forward."""

    @abstractmethod
    def _after(self, module: nn.Module, args: Any, output: Any) -> Any:
        """Runs as the hook of the module's forward; the output is None if the forward raised."""


@dataclass
class SplitModule(SplitPart):
    """A module that computes with this rank's parts of its parameters, as ordinary tensors.

    While it takes whole tensors, it computes with whole parameters, which the ranks gather at each call.

    Attributes:
        enter, leave: functions that the inputs and the outputs pass through; None for no change.
    """

    enter: Callable[[Tensor], Tensor] | None
    leave: Callable[[Tensor], Tensor] | None

    @classmethod
    def of(
        cls, name: str, model: nn.Module, style: str, plans: Mapping[str, str], mesh: DeviceMesh, index: int
    ) -> SplitModule:
        """Creates a module of a style, for the rank at an index of the mesh.

        Args:
            plans: styles of its parameters.

        Raises:
            UsageError: a parameter has no style that fits the module's, or the parts would differ in size.
        """
        module = model.get_submodule(name)
        cuts = cuts_of(name, module, style, plans, Split(0, int(mesh.size()), index))
        enter = leave = None
        if style in SUMMED:
            enter, leave = partial(_with_summed_gradient, mesh), partial(_summed, mesh)
        elif style == ROTARY:
            leave = partial(_with_summed_gradient_of_last, mesh, rotary_features(name, model))
        elif style == IDENTITY:  # the sum over the ranks counts its output once
            enter = partial(torch.mul, other=1.0 / int(mesh.size()))
        return cls(name, module, mesh, cuts, enter, leave)

    def _before(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        note_calls(self.mesh, self.name, "forward")
        if self.takes_whole:
            # The instance's dict takes precedence over its parameters.
            vars(module).update({key: self._whole(key) for key in self.cuts})
        elif self.enter is not None:
            return map_tensors(partial(_if_floating, self.enter), (args, kwargs))
        return None

    def _after(self, module: nn.Module, args: Any, output: Any) -> Any:
        if self.takes_whole:
            for key in self.cuts:
                vars(module).pop(key, None)
        elif self.leave is not None and output is not None:  # None: the forward raised
            left = map_tensors(partial(_if_floating, self.leave), output)
            if isinstance(left, Tensor) and left.requires_grad:
                left.register_hook(lambda grad: note_calls(self.mesh, self.name, "backward"))
            return left
        return None

    def _whole(self, key: str) -> Tensor:
        """Gathers a whole parameter from the parts of all ranks."""
        from torch.distributed.tensor import DTensor, Shard

        split, shard = self.cuts[key], self.module.get_parameter(key).detach()
        parts: Any = DTensor.from_local(shard, self.mesh, [Shard(split.dim)], run_check=False)
        return split.join(parts.full_tensor().chunk(split.parts, split.dim))


def cuts_of(name: str, module: nn.Module, style: str, plans: Mapping[str, str], parts: Split) -> dict[str, Split]:
    """Maps names of a module's parameters to their splits.

    Args:
        plans: styles of its parameters.
        parts: a split with all fields except dim and blocks.

    Raises:
        UsageError: a parameter has no style that fits the module's, or the parts would differ in size.
    """
    where = f"tensor parallelism: {name}"
    names = [key for key, _ in module.named_parameters(recurse=False)]
    if style in SUMMED and (whole := [key for key in names if key not in plans]):
        raise UsageError(
            where,
            expected=f"a style in tp_plan for each parameter, since {style} sums outputs",
            got=f"none for {listed(whole)}",
            fix="remove the module and its parameters from tp_plan",
        )
    if style in (ROTARY, IDENTITY) and plans:
        raise UsageError(where, expected=f"no styles for parameters of {style}", got=dict(plans))
    cuts = {}
    for key, kind in plans.items():
        shape = module.get_parameter(key).shape
        offset, blocks = PARAMETER_STYLES.get(kind, (0, 1))
        dim = max(0, len(shape) + offset)
        if not offset or (len(shape) == 1 and kind not in ("colwise", "packed_colwise")):
            raise UsageError(
                f"{where}.{key}",
                expected=f"one of {', '.join(PARAMETER_STYLES)}; for one dim, colwise or packed_colwise",
                got=f"{kind} for shape {tuple(shape)}",
            )
        if shape[dim] % (parts.parts * blocks):
            raise UsageError(
                f"tensor parallelism: parameter {name}.{key}",
                expected=f"a multiple of {parts.parts * blocks} in dim {dim}, since tp is {parts.parts}",
                got=f"{shape[dim]} of shape {tuple(shape)}",
                fix="choose another tp, or remove the module and its parameters from tp_plan",
            )
        cuts[key] = Split(dim, parts.parts, parts.index, blocks)
    return cuts


def rotary_features(name: str, model: nn.Module) -> int:
    """Returns the width of DeepSeek's rotary part: the last outputs of a projection, which no other layer processes.

    Raises:
        UsageError: the attention module around it has no qk_rope_head_dim.
    """
    attention = model.get_submodule(name.rpartition(".")[0])
    found = getattr(attention, "qk_rope_head_dim", None)
    if not isinstance(found, int):
        raise UsageError(
            f"tensor parallelism: {name}, {ROTARY}",
            expected=f"qk_rope_head_dim as an integer in {type(attention).__name__}",
            got=found,
            fix="remove the attention from tp_plan",
        )
    return found


def _if_floating(function: Callable[[Tensor], Tensor], tensor: Tensor) -> Tensor:
    return function(tensor) if tensor.is_floating_point() else tensor


def _with_summed_gradient(mesh: DeviceMesh, tensor: Tensor) -> Tensor:
    """Passes a tensor that all ranks have; the ranks sum their parts of its gradient."""
    from torch.distributed.tensor import DTensor, Partial, Replicate

    spread: Any = DTensor.from_local(tensor, mesh, [Replicate()], run_check=False)
    shared: Tensor = spread.to_local(grad_placements=[Partial()])
    return shared


def _summed(mesh: DeviceMesh, output: Tensor) -> Tensor:
    """Sums all ranks' outputs; all ranks have the gradient of the sum."""
    from torch.distributed.tensor import DTensor, Partial, Replicate

    parts: Any = DTensor.from_local(output, mesh, [Partial()], run_check=False)
    total: Tensor = parts.redistribute(placements=[Replicate()]).to_local()
    return total


def _with_summed_gradient_of_last(mesh: DeviceMesh, features: int, output: Tensor) -> Tensor:
    """Sums the ranks' parts of the last features' gradient; of the other features, every rank has all of it."""
    first, last = output.split([output.shape[-1] - features, features], -1)
    return torch.cat([first, _with_summed_gradient(mesh, last)], -1)
