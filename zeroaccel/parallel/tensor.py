"""Tensor parallelism: finds the layers that the ranks of the `tp` axis share, and runs their forward.

(Megatron-LM, Shoeybi et al., 2019, arXiv:1909.08053, section 3.) The styles in `torch.distributed.tensor.parallel`
define the cut of a layer and the exchange of its inputs and outputs. This module applies them to a meta-device twin
of each layer and takes the placements and hooks from it. The model's parameters stay the ordinary parameters of the
program: the units keep this rank's part of them (`layout.py`: `Split`), and during its forward a layer reads DTensors
built from the parts. So units, shards, gradients and optimizers do not depend on DTensors, and `detach` restores the
original model.
"""

from __future__ import annotations

import hashlib
import inspect
import re
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from zeroaccel.comm.collectives import Collectives
from zeroaccel.errors import UsageError, listed
from zeroaccel.nested import leaves_of
from zeroaccel.parallel.tensor_modules import MODULE_STYLES, PARAMETER_STYLES, SplitModule, SplitPart, note_calls
from zeroaccel.zero.layout import Split

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.tensor import Placement
    from torch.distributed.tensor.parallel import ParallelStyle


_HEAD_NORM = "replicated_with_grad_allreduce"
_HEADS = ("num_attention_heads", "num_key_value_heads")
# Attributes with an attention module's head counts; `split_size` is the width of the queries in GPT-2's packed layer.
_COUNTS = (
    *("num_heads", "num_attention_heads", "num_key_value_heads", "num_kv_heads", "n_head", "n_heads"),
    "split_size",
)
_ATTENTION_LAYERS = ("q_proj", "k_proj", "v_proj", "c_attn", "q_b_proj", "kv_b_proj")
# Layers by the last part of their names, as in DeepSpeed's AutoTP (docs/tensor_parallel.md): layers whose output adds
# to the residual stream are cut by rows, the layers before them by columns.
_ROWWISE = frozenset({"o_proj", "down_proj", "out_proj", "dense_4h_to_h", "fc2", "fc_out", "wo", "w2", "c_proj"})
_COLUMNWISE = frozenset(
    {"q_proj", "k_proj", "v_proj", "gate_proj", "up_proj", "dense_h_to_4h", "fc1", "fc_in"}
    | {"wi", "wi_0", "wi_1", "w1", "w3", "c_fc", "q_attn"}
)
# Styles of layers that pack several layers, each cut separately: style -> number of layers.
_PACKED = {"packed_colwise": 2, "packed_colwise_2": 2, "packed_colwise_3": 3}
_WHOLE = "replicate"
# Styles of modules that take and return whole tensors, so that they can also stay whole.
_WHOLE_ENDS = ("colwise_gather_output", "colwise_rep", "embedding_rowwise", "embedding_colwise")


def _styles() -> dict[str, Callable[[], ParallelStyle]]:
    """Returns torch's styles by transformers' names; a function, since the import is slow."""
    from torch.distributed.tensor import Replicate
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, SequenceParallel

    return {
        "colwise": ColwiseParallel,
        **dict.fromkeys(_PACKED, ColwiseParallel),
        "colwise_gather_output": lambda: ColwiseParallel(output_layouts=Replicate()),
        "colwise_rep": lambda: ColwiseParallel(output_layouts=Replicate()),
        "rowwise": RowwiseParallel,
        "rowwise_rep": lambda: RowwiseParallel(input_layouts=Replicate()),
        "rowwise_split_input": lambda: RowwiseParallel(input_layouts=Replicate()),
        "embedding_rowwise": lambda: RowwiseParallel(input_layouts=Replicate()),
        "embedding_colwise": lambda: ColwiseParallel(output_layouts=Replicate()),
        # A norm of each head, (B, S, heads, d): all ranks have its weights, each has the gradients of its own heads.
        _HEAD_NORM: lambda: SequenceParallel(sequence_dim=2, use_local_output=True),
    }


class SplitLayers:
    """The split layers of one model. Life cycle: 1. created, with no effect on the model, 2. `attach`, 3. `detach`.

    Attributes:
        splits: id(parameter) -> its split.
        names: names of the split modules.
        size: number of ranks that share them.
    """

    def __init__(self, layers: list[SplitPart], size: int) -> None:
        self._layers = layers
        self._heads: list[tuple[nn.Module, dict[str, int]]] = []
        self._first_batch: RemovableHandle | None = None
        self._in_trial = False
        self.size = size
        self.splits = {key: split for layer in layers for key, split in layer.splits().items()}
        self.names = [layer.name for layer in layers]

    @classmethod
    def of(
        cls, model: nn.Module, mesh: DeviceMesh, index: int, plan: Mapping[str, str] | str | None = None
    ) -> SplitLayers:
        """Finds the layers of a plan and their splits. Does not change the model.

        Args:
            mesh: mesh of one axis, with the tensor-parallel ranks.
            index: index of this rank on it.
            plan: a value of `ParallelConfig.tp_plan`.

        Raises:
            UsageError: there is no plan, it does not fit the model, or this torch version is too old.
        """
        _check_torch()
        size = int(mesh.size())
        styles = _matched(model, plan)
        _check_heads(model, size, styles)
        layers, splits = list[SplitPart](), dict[int, Split]()
        for name, (style, plans) in by_module(model, styles).items():
            layer: SplitPart
            if style in MODULE_STYLES:
                layer = SplitModule.of(name, model, style, plans, mesh, index)
            else:
                layer = _SplitLayer.of(name, model.get_submodule(name), style, mesh, index)
            for key, split in layer.splits().items():
                if splits.setdefault(key, split) != split:
                    raise _tied(name)
            layers.append(layer)
        _check_ties(model, splits, set(styles))
        return cls(layers, size)

    def keep(self, modules: Iterable[nn.Module]) -> None:
        """Drops all layers except these: the model was cut into stages, and the others are on other ranks."""
        remaining = {id(module) for module in modules}
        self._layers = [layer for layer in self._layers if id(layer.module) in remaining]
        # Rebuilt from the remaining layers: ids of freed parameters may be reused.
        self.splits = {key: split for layer in self._layers for key, split in layer.splits().items()}
        self.names = [layer.name for layer in self._layers]

    def splits_of(self, module: nn.Module) -> Mapping[str, Split]:
        """Returns the splits of a module's parameters, by their names in the module."""
        return next((layer.cuts for layer in self._layers if layer.module is module), {})

    def attach(self, model: nn.Module, collectives: Collectives | None) -> None:
        """Makes the layers compute with their parts; call it after the engine's own hooks are on the model.

        Args:
            collectives: compares the ranks' first inputs; None if the caller compares them.
        """
        for layer in self._layers:
            layer.attach()
        for parent in {name.rpartition(".")[0]: None for name in self.names}:
            module = model.get_submodule(parent)
            if any(f"{parent}.{name}" in self.names for name in _ATTENTION_LAYERS):
                self._heads.append((module, {key: vars(module)[key] for key in _COUNTS if key in vars(module)}))
        for module, heads in self._heads:  # a rank computes attention of its own heads
            vars(module).update({key: count // self.size for key, count in heads.items()})
        if collectives is not None:
            self._first_batch = model.register_forward_pre_hook(partial(self._compare, collectives), with_kwargs=True)

    def detach(self) -> None:
        """Removes every hook; the parameters must be whole again before."""
        for layer in self._layers:
            layer.detach()
        for module, heads in self._heads:
            vars(module).update(heads)
        self._heads.clear()
        if self._first_batch is not None:
            self._first_batch.remove()

    @property
    def modules(self) -> set[int]:
        """Ids of the split modules."""
        return {id(layer.module) for layer in self._layers}

    @contextmanager
    def computing(self, *, whole: bool) -> Iterator[None]:
        """Context in which each layer takes and returns whole tensors, or parts; for trials, not for training."""
        self._in_trial = True
        for layer in self._layers:
            layer.takes_whole = whole
        heads_before = [(module, {key: vars(module)[key] for key in heads}) for module, heads in self._heads]
        for module, heads in self._heads if whole else ():
            vars(module).update(heads)
        try:
            yield
        finally:
            self._in_trial = False
            for layer in self._layers:
                layer.takes_whole = False
            for module, counts in heads_before:
                vars(module).update(counts)

    def _compare(self, collectives: Collectives, model: nn.Module, args: Any, kwargs: Any) -> None:
        """Compares the first inputs of the ranks that share layers. (all ranks)

        Raises:
            UsageError: on every rank: inputs differ, for example because the loader gives each rank different data.
        """
        if self._in_trial:  # trials use a generated batch
            return
        assert self._first_batch is not None, "the model is detached"
        self._first_batch.remove()
        sums = [(tuple(leaf.shape), _digest(leaf)) for _, leaf in leaves_of((args, kwargs)) if isinstance(leaf, Tensor)]
        of_ranks = collectives.job.gather_objects(sums, "first batch")
        for rank, batch in enumerate(of_ranks):
            first = rank - rank % self.size
            if batch != of_ranks[first]:
                raise UsageError(
                    f"tensor parallelism: the first batch of {collectives.job.named([rank])}",
                    expected=f"the batch of {collectives.job.named([first])}, since both share layers",
                    got="another one",
                    fix=f"divide the data between ranks by rank // {self.size}",
                )


@dataclass
class _SplitLayer(SplitPart):
    """A linear layer or an embedding whose parameters are split.

    Attributes:
        placements: placements of its parameters, by name.
        prepare, finish: torch's hooks for its style.
    """

    placements: Mapping[str, tuple[Placement, ...]]
    prepare: Callable[..., Any]
    finish: Callable[..., Any]

    @classmethod
    def of(cls, name: str, module: nn.Module, style: str, mesh: DeviceMesh, index: int) -> _SplitLayer:
        """Creates a layer of a style, for the rank at an index of the mesh.

        Raises:
            UsageError: this kind of module cannot be cut, or the parts would differ in size.
        """
        from torch.distributed.tensor.parallel import parallelize_module

        _check_packed(name, module, style)
        twin = _twin(name, module, style)
        parallelize_module(twin, mesh, _styles()[style](), src_data_rank=None)
        (prepare,), (finish,) = twin._forward_pre_hooks.values(), twin._forward_hooks.values()
        params: dict[str, Any] = dict(twin.named_parameters())
        placements = {key: param.placements for key, param in params.items()}
        if is_transposed(module):
            placements["weight"] = tuple(_transposed(placement) for placement in placements["weight"])
        parts = Split(0, int(mesh.size()), index, _PACKED.get(style, 1))
        return cls(name, module, mesh, _cuts(name, module, placements, parts), placements, prepare, finish)

    def _before(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        from torch.distributed.tensor import DTensor

        if not args:
            raise UsageError(
                f"tensor parallelism: {self.name}",
                expected="its input as the first positional argument",
                got="keyword arguments only",
                fix="pass it by position, or remove the module from tp_plan",
            )
        if self.takes_whole and not self.cuts:
            return None
        note_calls(self.mesh, self.name, "forward")
        inputs = self._spread(args[0]) if self.takes_whole else self.prepare(module, args)
        for key, placements in self.placements.items():
            # The instance's dict takes precedence over `_parameters`, which keeps the engine's parameter.
            shard = module._parameters[key]
            assert shard is not None, f"{self.name} has lost {key}"
            module.__dict__[key] = DTensor.from_local(shard, self.mesh, placements, run_check=False)
        return inputs if isinstance(inputs, tuple) else (inputs,), kwargs

    def _after(self, module: nn.Module, args: Any, output: Any) -> Any:
        for key in self.placements:
            module.__dict__.pop(key, None)
        if output is None:  # the forward raised
            return None
        if self.takes_whole:
            return self._joined(output) if self.cuts else output
        finished = self.finish(module, args, output)
        if "shared_expert" in self.name and isinstance(finished, Tensor):
            # Llama 4 adds to it in place, which autograd forbids for views of a DTensor.
            finished = finished.clone()
        if isinstance(finished, Tensor) and finished.requires_grad:
            # Runs before the rest of this layer's backward.
            finished.register_hook(lambda grad: note_calls(self.mesh, self.name, "backward"))
        return finished

    def _spread(self, source: Tensor) -> Any:
        """Converts a whole input to the placement that the layer's own weights need."""
        from torch.distributed.tensor import DTensor, Replicate, Shard

        spread = DTensor.from_local(source, self.mesh, [Replicate()], run_check=False)
        cut = self.cuts.get("weight")
        takes_part = cut is not None and not isinstance(self.module, nn.Embedding) and cut.dim != self._output_dim
        return spread.redistribute(placements=[Shard(source.ndim - 1)]) if takes_part else spread

    def _joined(self, output: Any) -> Tensor:
        """Joins the parts of all ranks to the whole output."""
        from torch.distributed.tensor import Replicate

        whole: Tensor = output.redistribute(placements=[Replicate()]).to_local()
        cut = self.cuts["weight"]
        if cut.blocks > 1:  # each part has its share of every block
            whole = whole.unflatten(-1, (cut.parts, cut.blocks, -1)).transpose(-3, -2).flatten(-3)
        return whole

    @property
    def _output_dim(self) -> int:
        """Dim of the weight that holds the outputs."""
        return 1 if is_transposed(self.module) else 0


def _cuts(
    name: str, module: nn.Module, placements: Mapping[str, tuple[Placement, ...]], parts: Split
) -> dict[str, Split]:
    """Returns the splits of a layer's sharded parameters; `parts` has all their fields except the dim.

    Raises:
        UsageError: the parts would differ in size.
    """
    cuts = {}
    for key, (placement,) in placements.items():
        if not placement.is_shard():
            continue
        param, dim = getattr(module, key), placement.dim  # type: ignore[attr-defined]
        if param.shape[dim] % (parts.parts * parts.blocks):
            of = f", for each of {parts.blocks} blocks" if parts.blocks > 1 else ""
            raise UsageError(
                f"tensor parallelism: parameter {name}.{key}",
                expected=f"a multiple of {parts.parts}, the ranks of the tp axis{of}, in dim {dim}",
                got=f"{param.shape[dim]} of shape {tuple(param.shape)}",
                fix="choose another tp, or remove the module from tp_plan",
            )
        cuts[key] = replace(parts, dim=dim)
    return cuts


def is_transposed(module: nn.Module) -> bool:
    """True for the linear layer of GPT-2, whose weight is (inputs, outputs)."""
    layers = sys.modules.get("transformers.pytorch_utils")  # imported by any model that has such a layer
    return layers is not None and isinstance(module, layers.Conv1D)


def _packed_style(module: nn.Module) -> str:
    """Returns the style of GPT-2's `c_attn`: packed queries, keys and values; in cross attention, keys and values."""
    inputs, outputs = module.get_parameter("weight").shape
    return f"packed_colwise_{outputs // inputs}"


def _check_packed(name: str, module: nn.Module, style: str) -> None:
    """Refuses a cut of GPT-2's `c_attn` that separates a rank's queries from their keys."""
    if name.rpartition(".")[2] == "c_attn" and is_transposed(module) and style != _packed_style(module):
        raise UsageError(
            f"tensor parallelism: {name}",
            expected=f'"{_packed_style(module)}", which cuts queries, keys and values separately',
            got=style,
            fix='change the style in tp_plan, or pass tp_plan="auto"',
        )


def _transposed(placement: Placement) -> Placement:
    from torch.distributed.tensor import Shard

    return Shard(1 - placement.dim) if isinstance(placement, Shard) else placement


def _digest(value: Tensor) -> str:
    data = value.detach().cpu().contiguous().view(-1)
    return hashlib.sha256(data.view(torch.uint8).numpy().tobytes() if data.numel() else b"").hexdigest()


# -- a plan


def _by_name(model: nn.Module) -> dict[str, str]:
    """Maps layer names to styles by the last part of the name, for the linear layers in rows of blocks.

    Raises:
        UsageError: some names are unknown, so that the position of the layers in a block is unknown.
    """
    blocks = [f"{name}." for name, module in model.named_modules() if isinstance(module, nn.ModuleList)]
    styles, unknown = {}, []
    for name, module in model.named_modules():
        last = name.rpartition(".")[2]
        transposed = is_transposed(module)
        if not (isinstance(module, nn.Linear) or transposed) or not any(map(name.startswith, blocks)):
            continue
        if transposed and last == "c_attn":
            styles[name] = _packed_style(module)
        elif last in _ROWWISE or last in _COLUMNWISE:
            styles[name] = "rowwise" if last in _ROWWISE else "colwise"
        else:
            unknown.append(name)
    if unknown:
        raise UsageError(
            f"tensor parallelism of {type(model).__name__}: {listed(unknown, most=3)}",
            expected=f"layer names with a known cut: {', '.join(sorted(_COLUMNWISE | _ROWWISE))}",
            fix="pass ParallelConfig(tp_plan={...}) with patterns of module names",
        )
    return styles


def _check_torch() -> None:
    """Refuses a torch that sends weights from rank 0 (torch 2.6), since each rank already has its weights."""
    from torch.distributed.tensor.parallel import parallelize_module

    if "src_data_rank" not in inspect.signature(parallelize_module).parameters:
        raise UsageError(
            "tensor parallelism: torch",
            expected="a parallelize_module with src_data_rank",
            got=torch.__version__,
            fix="upgrade torch, or set tp=1",
        )


def _matched(model: nn.Module, plan: Mapping[str, str] | str | None) -> dict[str, str]:
    """Maps module names to styles, in the order of the model.

    Raises:
        UsageError: there is no plan, a pattern matches nothing, or a style is unknown.
    """
    where = "ParallelConfig(tp_plan)"
    table = None if isinstance(plan, Mapping) else getattr(model, "_tp_plan", None)  # transformers' plan
    if not table and plan == "auto":
        table = _by_name(model)
    patterns = dict(plan if isinstance(plan, Mapping) else table or {})
    if not patterns:
        raise UsageError(
            where,
            expected="a pattern"
            if isinstance(plan, Mapping)
            else f"a plan, since {type(model).__name__} does not have one",
            got="none",
            fix='pass tp_plan={"layers.*.up": "colwise", "layers.*.down": "rowwise"}',
        )
    known = {*_styles(), *PARAMETER_STYLES, *MODULE_STYLES, _WHOLE}
    unknown = {pattern: style for pattern, style in patterns.items() if style not in known}
    found: dict[str, tuple[str, str]] = {}
    unused = []
    names = [name for name, _ in model.named_modules() if name]
    # Parameters too, for modules with a style for their own parameters.
    names += [name for name, _ in model.named_parameters()]
    for pattern, style in patterns.items():
        shape = re.compile(r"(?:.*\.)?" + re.escape(pattern).replace(r"\*", r"[^.]+"))
        matches = [name for name in names if shape.fullmatch(name)]
        if not matches:
            unused.append(pattern)
            unknown.pop(pattern, None)  # transformers' plans list the modules of all variants
        for name in matches:
            other, first = found.setdefault(name, (style, pattern))
            if other != style:
                raise UsageError(
                    f"{where}: {first} and {pattern}", expected=f"one style for {name}", got=f"{other} and {style}"
                )
    if unknown:
        raise UsageError(
            where if table is None else f"tensor parallelism: the plan of {type(model).__name__}",
            expected="one of the styles " + ", ".join(sorted(known)),
            got=", ".join(f"{style} for {pattern}" for pattern, style in unknown.items()),
            fix="pass a tp_plan without these modules, if the others can be split without them",
        )
    if unused and (isinstance(plan, Mapping) or not found):
        raise UsageError(
            f"{where}: {listed(unused)}",
            expected="the end of a module's name, with * for one part of it",
            got="no match",
            fix=f"modules are named like {listed(names[-3:])}",
        )
    styles = {name: found[name][0] for name in names if name in found and found[name][0] != _WHOLE}
    return styles if table is None else _of_variant(model, styles)


def _of_variant(model: nn.Module, styles: Mapping[str, str]) -> dict[str, str]:
    """Removes modules that this variant does not need from a plan of transformers, which covers all variants.

    These are heads that are tied to a whole embedding, and norms over heads without weights.
    """
    whole = {
        id(param)
        for name, module in model.named_modules()
        if name not in styles
        for param in module.parameters(recurse=False)
    }

    def is_needed(name: str, style: str) -> bool:
        owner, _, key = name.rpartition(".")
        if key in getattr(model.get_submodule(owner), "_parameters", {}):
            return True
        params = list(model.get_submodule(name).parameters())
        tied = style in _WHOLE_ENDS and any(id(param) in whole for param in params)
        return not tied and (bool(params) or style != _HEAD_NORM)

    return {name: style for name, style in styles.items() if is_needed(name, style)}


def by_module(model: nn.Module, styles: Mapping[str, str]) -> dict[str, tuple[str, dict[str, str]]]:
    """Maps module names to (style, styles of the module's own parameters).

    Raises:
        UsageError: a parameter has a style, but the style of its module allows none.
    """
    params = [name for name, _ in model.named_parameters() if name in styles]  # the same order on all ranks
    found: dict[str, tuple[str, dict[str, str]]] = {name: (styles[name], {}) for name in styles if name not in params}
    for name in params:
        module, _, key = name.rpartition(".")
        style, styles_of = found.get(module, ("none", {}))
        if style not in MODULE_STYLES:
            raise UsageError(
                f"ParallelConfig(tp_plan): {name}",
                expected=f"a style for its module {module} too, one of: {', '.join(MODULE_STYLES)}",
                got=style,
            )
        styles_of[key] = styles[name]
    return found


def _check_heads(model: nn.Module, size: int, styles: Mapping[str, str]) -> None:
    """Refuses attention heads that the ranks cannot share equally, by the config of a transformers model."""
    config = getattr(model, "config", None)
    if config is None or not any("attn" in name or "attention" in name for name in styles):
        return
    text = config.get_text_config() if hasattr(config, "get_text_config") else config  # for vision-language models
    for key in _HEADS:
        heads = getattr(text, key, None)
        if isinstance(heads, int) and heads % size:
            raise UsageError(
                f"tensor parallelism: {key} of {type(model).__name__}",
                expected=f"a multiple of {size}, the ranks of the tp axis",
                got=heads,
                fix="choose another tp, or remove the attention from tp_plan",
            )


def _twin(name: str, module: nn.Module, style: str) -> nn.Module:
    """Creates a module of the same kind and sizes on the meta device.

    Raises:
        UsageError: torch's styles do not support its kind.
    """
    if style == _HEAD_NORM:
        norm = nn.Module()
        for key, param in module.named_parameters(recurse=False):
            norm.register_parameter(key, nn.Parameter(torch.empty_like(param, device="meta")))
        return norm
    with torch.device("meta"):
        if is_transposed(module):
            twin: nn.Module = nn.Linear(*module.get_parameter("weight").shape)
        elif isinstance(module, nn.Linear):
            twin = nn.Linear(module.in_features, module.out_features, module.bias is not None)
        elif isinstance(module, nn.Embedding):
            twin = nn.Embedding(module.num_embeddings, module.embedding_dim)
        else:
            raise _kind_error(name, module, "a torch.nn.Linear, a torch.nn.Embedding, or GPT-2's Conv1D")
    shapes = {key: param.shape for key, param in module.named_parameters()}
    if is_transposed(module):
        shapes["weight"] = shapes["weight"][::-1]
    if shapes != {key: param.shape for key, param in twin.named_parameters()}:  # quantized, or with adapters
        raise _kind_error(name, module, "the parameters of the torch class that it is derived from")
    return twin


def _kind_error(name: str, module: nn.Module, expected: str) -> UsageError:
    return UsageError(
        f"tensor parallelism: {name}",
        expected=expected,
        got=f"{type(module).__module__}.{type(module).__qualname__}",
        fix="remove the module from tp_plan",
    )


def _check_ties(model: nn.Module, splits: Mapping[int, Split], split_modules: set[str]) -> None:
    """Refuses a split parameter that is read whole by a module outside the plan."""
    for prefix, module in model.named_modules():
        for param in module._parameters.values():
            if param is not None and id(param) in splits and prefix not in split_modules:
                raise _tied(prefix)


def _tied(name: str) -> UsageError:
    return UsageError(
        f"tensor parallelism: {name}",
        expected="tied parameters with the same split in all their modules",
        got="a different split in another module of tp_plan",
        fix='name all of its modules or none; "embedding_rowwise" and "colwise_gather_output" cut the same dim',
    )


# -- for estimates, without ranks


def layer_styles(model: nn.Module, size: int) -> dict[str, str]:
    """Maps layer names to styles, for the layers that `size` ranks share by the model's plan or by layer names.

    Raises:
        UsageError: there is no plan, or heads cannot be shared equally.
    """
    styles = _matched(model, "auto")
    _check_heads(model, size, styles)
    return styles


def local_head_counts(module: nn.Module, size: int) -> dict[str, int]:
    """Returns an attention module's attributes with head counts, reduced to each of `size` ranks."""
    return {key: vars(module)[key] // size for key in _COUNTS if key in vars(module)}
