"""The `tp` axis: the ranks that hold parts of the same layers, in training and in estimates.

`tensor.py` splits the layers for training. In an estimate, layers of the model's plan have 1 / tp of their weights;
copies replace sums over ranks, since torch's are out of place.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from functools import partial
from typing import Any, ClassVar, Literal, cast

import torch
from torch import Tensor, nn

from zeroaccel.comm.collectives import Collectives
from zeroaccel.comm.topology import RankGroup, Topology, connect, mesh_of, subgroup, track
from zeroaccel.config import Config
from zeroaccel.config.parallel import ParallelConfig
from zeroaccel.engine import EngineBase
from zeroaccel.errors import UsageError
from zeroaccel.nested import map_tensors
from zeroaccel.parallel.tensor import SplitLayers, by_module, is_transposed, layer_styles, local_head_counts
from zeroaccel.parallel.tensor_modules import MODULE_STYLES, ROTARY, SUMMED, cuts_of, rotary_features
from zeroaccel.setup.axis import Axis, require_plain, require_uncoupled
from zeroaccel.setup.axis_estimate import AxisEstimate, EstimatedJob, Shape
from zeroaccel.setup.cut_check import Cut
from zeroaccel.setup.job import JobSpec
from zeroaccel.setup.optimizer_plan import OptimizerPlan
from zeroaccel.zero.compiled import check_not_compiled
from zeroaccel.zero.from_config import EngineSettings
from zeroaccel.zero.layout import Split

_PLAIN = {
    "zero_quantized_weights": False,
    "zero_quantized_gradients": False,
    "zero_quantized_nontrainable_weights": False,
}


class TensorAxis(Axis):
    """The `tp` axis: the ranks that hold parts of the same layers."""

    name: ClassVar[str] = "tp"
    refuses_compiled: ClassVar[str] = "a graph cannot contain the group that sums a layer's parts (tensor parallelism)"

    def __init__(self, group: RankGroup, topology: Topology, tp_plan: Mapping[str, str] | str | None) -> None:
        self._group, self._topology, self._plan = group, topology, tp_plan
        self._layers = SplitLayers([], group.size)

    @property
    def cut(self) -> Cut | None:
        return TensorCut(self._layers, self._group)

    @classmethod
    def join(cls, mesh: ParallelConfig, topology: Topology, job: JobSpec) -> TensorAxis | None:
        if mesh.tp == 1:
            return None
        groups = mesh.groups(cls.name)
        group = subgroup(topology, groups)
        connect(topology, {"layers": (group.reduce_group, ("all_gather", "all_reduce", "reduce_scatter"))})
        track(topology, groups)
        return cls(group, topology, mesh.tp_plan)

    @classmethod
    def estimate(cls, mesh: ParallelConfig) -> AxisEstimate | None:
        return TensorEstimate(mesh.tp) if mesh.tp > 1 else None

    @property
    def splits(self) -> Mapping[int, Split]:
        return self._layers.splits

    def divide(self, model: nn.Module, others: Sequence[Axis]) -> None:
        """Finds the layers to split. Does not change the model.

        Raises:
            UsageError: the plan does not fit the model, or the model is compiled.
        """
        check_not_compiled(model, self.refuses_compiled)
        self._layers = SplitLayers.of(model, mesh_of(self._topology, self._group), self._group.rank, self._plan)

    def keep(self, modules: Iterable[nn.Module]) -> None:
        self._layers.keep(modules)

    def splits_of(self, module: nn.Module) -> Mapping[str, Split]:
        return self._layers.splits_of(module)

    def check(
        self, config: Config, settings: EngineSettings, optimizer: OptimizerPlan, names: Mapping[int, str]
    ) -> None:
        require_plain(config, _PLAIN, "tp", "tensor")
        require_uncoupled(optimizer, self.splits, names, "tp", "tensor")

    def connect(self, collectives: Collectives) -> None:
        collectives.parts = Collectives(self._topology, self._group, recorder=collectives.flight_recorder)
        collectives.observe(self.name, collectives.parts)
        if (tracked := self._topology.tracked.get(self._group.ranks)) is not None:
            collectives.observe(self.name, tracked)

    def attach(self, engine: EngineBase, loader: Any) -> None:
        # Pipeline stages compare their batches themselves, since they do not all run the model at the same time.
        ranks = engine.collectives
        self._layers.attach(engine.module, ranks if ranks.peers is ranks.job else None)

    def undo(self) -> None:
        self._layers.detach()


class TensorCut(Cut):
    """Tensor-parallel layers, for the check at the start of training."""

    whole = "whole layers"
    by_tokens = False
    cure = "correct tp_plan (docs/tensor_parallel.md), or train it with tp=1"

    def __init__(self, layers: SplitLayers, group: RankGroup) -> None:
        self._layers, self._split = layers, layers.modules
        self.name, self.size, self.index = f"tensor parallelism (tp={layers.size})", layers.size, group.rank

    def computing(self, *, whole: bool) -> AbstractContextManager[None]:
        return self._layers.computing(whole=whole)

    def is_split(self, module: nn.Module) -> bool:
        return id(module) in self._split


# -- estimates

_ROWS, _COLUMNS = 0, 1
# Kind of module -> style -> dims in which torch's style cuts its parameters.
_CUT_DIMS: dict[type[nn.Module], dict[str, dict[str, int]]] = {
    nn.Linear: {
        **{style: {"weight": _ROWS, "bias": _ROWS} for style in ("colwise", "colwise_gather_output", "colwise_rep")},
        **{style: {"weight": _COLUMNS} for style in ("rowwise", "rowwise_split_input", "rowwise_rep")},
    },
    nn.Embedding: {"embedding_rowwise": {"weight": _ROWS}, "embedding_colwise": {"weight": _COLUMNS}},
}
# GPT-2's linear layers have weights (inputs, outputs).
_CUT_DIMS_TRANSPOSED: dict[str, dict[str, int]] = {
    **{style: {"weight": _COLUMNS, "bias": _ROWS} for style in ("colwise", "packed_colwise_2", "packed_colwise_3")},
    "rowwise": {"weight": _ROWS},
}
_GATHERED = ("colwise_gather_output", "colwise_rep", "embedding_colwise")
_SPLIT_INPUT = ("rowwise_split_input", "rowwise_rep")


class TensorEstimate(AxisEstimate):
    """The ranks that hold parts of the same layers; sums and gathers use rings."""

    name: ClassVar[str] = "tp"
    receivers: ClassVar[Literal["all", "ring", "line"]] = "ring"
    in_blocks: ClassVar[bool] = True

    def check(self, name: str, shape: Shape) -> None:
        self.divide_heads(name, queries=shape.heads, keys=shape.key_heads)

    def share(self, job: EstimatedJob, model: nn.Module) -> None:
        """Reduces the layers of the model's plan to one rank's part.

        Raises:
            UsageError: in the same cases as `initialize` with tensor parallelism.
        """
        count, size = partial(job.count, self.name), self.size
        styles = layer_styles(model, size)
        parts: dict[int, nn.Parameter] = {}
        whole = list(model.parameters())  # kept until the end, so that ids are not reused
        for name, (style, plans) in by_module(model, styles).items():
            if style in MODULE_STYLES:
                _share_module(name, model, style, plans, size, parts, count)
            else:
                _share_layer(name, model.get_submodule(name), style, size, parts, count)
        for prefix, module in model.named_modules():
            if any(id(param) in parts for param in module._parameters.values() if param is not None):
                raise UsageError(
                    f"tensor parallelism: {prefix}",
                    expected="tied parameters with the same split",
                    got="a whole parameter",
                )
        for parent in {name.rpartition(".")[0]: None for name in styles}:
            attention = model.get_submodule(parent)
            vars(attention).update(local_head_counts(attention, size))
        del whole


def _share_layer(
    name: str,
    module: nn.Module,
    style: str,
    size: int,
    parts: dict[int, nn.Parameter],
    count: Callable[[float], None],
) -> None:
    dims = _cut_dims(module).get(style)
    if dims is None:
        if style != "replicated_with_grad_allreduce":
            raise UsageError(f"tensor parallelism: {name}", expected="a style that fits this kind of layer", got=style)
        return
    for key, dim in dims.items():
        param = module._parameters.get(key)
        if param is not None:
            module._parameters[key] = _part(f"{name}.{key}", param, dim, size, parts)
    if is_transposed(module) and "bias" in dims:
        vars(module)["nf"] //= size  # number of outputs, which its forward reads
    module.forward = _forward_of_part(module.forward, style, size, count)


def _share_module(
    name: str,
    model: nn.Module,
    style: str,
    plans: Mapping[str, str],
    size: int,
    parts: dict[int, nn.Parameter],
    count: Callable[[float], None],
) -> None:
    module = model.get_submodule(name)
    for key, split in cuts_of(name, module, style, plans, Split(0, size, 0)).items():
        module._parameters[key] = _part(f"{name}.{key}", module.get_parameter(key), split.dim, size, parts)

    def shared(tensor: Tensor) -> Tensor:
        floats = tensor.is_floating_point()
        return cast(Tensor, _Shared.apply(tensor, partial(_count_sum, count, size))) if floats else tensor  # type: ignore[no-untyped-call]

    forward = module.forward
    if style in SUMMED:

        def of_part(*args: Any, **kwargs: Any) -> Tensor:
            args, kwargs = map_tensors(shared, (args, kwargs))
            out = forward(*args, **kwargs)
            return cast(Tensor, _Summed.apply(out, partial(_count_sum, count, size)))  # type: ignore[no-untyped-call]

        module.forward = of_part
    elif style == ROTARY:
        features = rotary_features(name, model)

        def of_whole(source: Tensor) -> Tensor:
            first, last = forward(source).tensor_split([-features], -1)
            return torch.cat([first, shared(last)], -1)

        module.forward = of_whole


def _count_sum(count: Callable[[float], None], size: int, nbytes: int) -> None:
    count(2 * (size - 1) / size * nbytes)  # in a ring


def _cut_dims(module: nn.Module) -> dict[str, dict[str, int]]:
    """Maps styles to the dims of the parameters that they cut, for a module of this kind."""
    if is_transposed(module):
        return _CUT_DIMS_TRANSPOSED
    return next((dims for kind, dims in _CUT_DIMS.items() if isinstance(module, kind)), {})


def _part(name: str, param: nn.Parameter, dim: int, size: int, parts: dict[int, nn.Parameter]) -> nn.Parameter:
    if id(param) not in parts:
        shape = list(param.shape)
        if shape[dim] % size:
            raise UsageError(
                f"tensor parallelism: parameter {name}", expected=f"a multiple of {size} in dim {dim}", got=shape[dim]
            )
        shape[dim] //= size
        parts[id(param)] = nn.Parameter(param.detach().new_empty(shape), param.requires_grad)
    return parts[id(param)]


def _forward_of_part(
    forward: Callable[..., Tensor], style: str, size: int, count: Callable[[float], None]
) -> Callable[..., Tensor]:
    count_sum = partial(_count_sum, count, size)

    def count_gather(nbytes: int) -> None:
        count((size - 1) * nbytes)

    def shared(x: Tensor) -> Tensor:
        if style in _SPLIT_INPUT:
            x = x[..., : x.shape[-1] // size]
        elif style.startswith(("colwise", "packed_colwise")):
            x = cast(Tensor, _Shared.apply(x, count_sum))  # type: ignore[no-untyped-call]
        out = forward(x)
        if style in _GATHERED:
            return cast(Tensor, _Joined.apply(out, size, count_gather))  # type: ignore[no-untyped-call]
        if "rowwise" in style:
            return cast(Tensor, _Summed.apply(out, count_sum))  # type: ignore[no-untyped-call]
        return out

    return shared


class _Summed(torch.autograd.Function):
    """Sum over the ranks, whose gradient is the same on all of them."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, count: Callable[[int], None]) -> Tensor:
        count(x.nbytes)
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        return grads[0], None


class _Shared(torch.autograd.Function):
    """Input that all ranks have; each rank has a part of its gradient, and the ranks sum the parts."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, count: Callable[[int], None]) -> Tensor:
        ctx.count = count
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        ctx.count(grads[0].nbytes)
        return grads[0].clone(), None


class _Joined(torch.autograd.Function):
    """Concatenation of the ranks' parts along the last dim."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, size: int, count: Callable[[int], None]) -> Tensor:
        ctx.width = x.shape[-1]
        count(x.nbytes)
        return x.new_empty((*x.shape[:-1], size * x.shape[-1]))

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        return grads[0][..., : ctx.width].contiguous(), None, None
