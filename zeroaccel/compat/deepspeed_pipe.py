"""`deepspeed.pipe`: a model as a list of layers. `parallel/pipeline.py` cuts and trains it.

Every rank builds all layers before it drops those of other stages; DeepSpeed builds only the rank's own stage. This
lets ranks compare their stages, but needs host memory for the whole model at the start.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import nn

from zeroaccel.config.parallel import PipelineConfig
from zeroaccel.errors import UsageError


class LayerSpec:
    """A layer to build later: its class and the arguments of its constructor.

    Example:
        >>> LayerSpec(nn.Linear, 2, 3).build()
        Linear(in_features=2, out_features=3, bias=True)
    """

    def __init__(self, typename: Callable[..., nn.Module], *module_args: Any, **module_kwargs: Any) -> None:
        if not (isinstance(typename, type) and issubclass(typename, nn.Module)):
            raise UsageError("LayerSpec(typename)", expected="a class of torch.nn.Module", got=typename)
        self.typename, self.module_args, self.module_kwargs = typename, module_args, module_kwargs

    def build(self, log: bool = False) -> nn.Module:
        """Builds the layer; `log` has no effect."""
        return self.typename(*self.module_args, **self.module_kwargs)


class TiedLayerSpec(LayerSpec):
    """A layer that shares one module with all layers of the same key.

    Args:
        key: identifies the shared module.
        forward_fn: function of (module, inputs) that replaces the module's own forward.
        tied_weight_attr: no effect: the whole module is tied.
    """

    def __init__(
        self,
        key: str,
        typename: Callable[..., nn.Module],
        *module_args: Any,
        forward_fn: Callable[[nn.Module, Any], Any] | None = None,
        tied_weight_attr: str | Sequence[str] = "weight",
        **module_kwargs: Any,
    ) -> None:
        super().__init__(typename, *module_args, **module_kwargs)
        self.key, self.forward_fn, self.tied_weight_attr = key, forward_fn, tied_weight_attr


class _Function(nn.Module):
    """A layer that calls a function."""

    def __init__(self, function: Callable[[Any], Any]) -> None:
        super().__init__()
        self._function = function

    def forward(self, inputs: Any) -> Any:
        return self._function(inputs)


class _TiedLayer(nn.Module):
    """One of the positions of a tied module.

    Attributes:
        shared_by: names the tie in messages, in the user's terms.
        sharing_fix: how the user avoids a tie that two stages cannot share.
    """

    sharing_fix = (
        "give the tied module a single parameter (bias=False), place its layers on one stage by "
        "PipelineModule(partition_method), or set num_stages=1"
    )

    def __init__(self, module: nn.Module, forward_fn: Callable[[nn.Module, Any], Any] | None, key: str) -> None:
        super().__init__()
        self.shared_by = f"TiedLayerSpec({key!r})"
        self.module = module
        self._forward_fn = forward_fn

    def forward(self, inputs: Any) -> Any:
        return self.module(inputs) if self._forward_fn is None else self._forward_fn(self.module, inputs)


class PipelineModule(nn.Sequential):
    """A model as a list of layers; `deepspeed.initialize` gives each rank one stage.

    Args:
        layers: `LayerSpec`s, modules, and functions of one argument.
        num_stages: number of pipeline stages; 1 trains without stages.
        loss_fn: function of (outputs, labels) that returns a scalar.
        seed_layers: seed each layer with `base_seed` plus its index.
        partition_method: "parameters", "uniform", or "type:REGEX" for equal numbers of layers whose class matches.

    Raises:
        UsageError: an argument is not supported.

    Example:
        >>> layers = [LayerSpec(nn.Linear, 4, 8), torch.relu, LayerSpec(nn.Linear, 8, 2)]
        >>> PipelineModule(layers, num_stages=1, loss_fn=nn.functional.mse_loss)(torch.ones(3, 4)).shape
        torch.Size([3, 2])
    """

    def __init__(
        self,
        layers: Iterable[Any],
        num_stages: int | None = None,
        topology: Any = None,
        loss_fn: Callable[[Any, Any], Any] | None = None,
        seed_layers: bool = False,
        seed_fn: Callable[[int], Any] | None = None,
        base_seed: int = 1234,
        partition_method: str = "parameters",
        activation_checkpoint_interval: int = 0,
        **others: Any,
    ) -> None:
        for name, value in {"topology": topology, **others}.items():
            if value is not None:
                raise UsageError(f"PipelineModule({name})", expected="none", got=value, fix="pass num_stages")
        if num_stages is None:
            raise UsageError("PipelineModule(num_stages)", expected="the number of stages", got=None)
        if activation_checkpoint_interval:
            raise UsageError(
                "PipelineModule(activation_checkpoint_interval)",
                expected="0",
                got=activation_checkpoint_interval,
                fix="call torch.utils.checkpoint in the layers to recompute",
            )
        super().__init__()
        self.num_stages, self.loss_fn = num_stages, loss_fn
        tied: dict[str, nn.Module] = {}
        for index, layer in enumerate(layers):
            if seed_layers:
                (seed_fn or torch.manual_seed)(base_seed + index)
            self.append(_built(layer, tied, index))
        self._partition = partition_method.lower()
        if not self._partition.startswith("type:") and self._partition not in ("parameters", "uniform"):
            raise UsageError(
                "PipelineModule(partition_method)",
                expected='"parameters", "uniform" or "type:..."',
                got=partition_method,
            )

    def pipeline_config(self) -> PipelineConfig:
        """Returns the rules of the cut into stages."""
        if not self._partition.startswith("type:"):
            return PipelineConfig(split=self._partition, loss=self.loss_fn)
        pattern = re.compile(self._partition.removeprefix("type:"), re.IGNORECASE)
        costs = [float(pattern.search(type(_own(layer)).__name__) is not None) for layer in self]
        if not any(costs):
            raise UsageError("PipelineModule(partition_method)", expected="the class of a layer", got=self._partition)
        return PipelineConfig(loss=self.loss_fn, costs=costs)


def _built(layer: Any, tied: dict[str, nn.Module], index: int) -> nn.Module:
    if isinstance(layer, TiedLayerSpec):
        if layer.key not in tied:
            tied[layer.key] = layer.build()
        return _TiedLayer(tied[layer.key], layer.forward_fn, layer.key)
    if isinstance(layer, LayerSpec):
        return layer.build()
    if isinstance(layer, nn.Module):
        return layer
    if callable(layer):
        return _Function(layer)
    raise UsageError(f"PipelineModule(layers)[{index}]", expected="a LayerSpec, a module or a function", got=layer)


def _own(layer: nn.Module) -> nn.Module:
    return layer.module if isinstance(layer, _TiedLayer) else layer
