"""Cuts a model into the stages of a pipeline: an unedited causal model of transformers, or an nn.Sequential.

A stage is the model itself without the parameters of the other stages: modules of other stages are replaced by modules
without parameters, so names and numbers of the blocks stay those of the whole model. The model's own forward runs on
every stage, including everything without parameters: positions, masks, rotary angles. At the beginning of a stage, the
output of the previous stage replaces the hidden states that its own forward computed so far.

A causal model is a row of blocks, with modules before (embeddings) and after (norm, head) them. A forward over three
tokens finds their places: it must pass through the blocks once, in their order, and nothing may run between them.
The same forward runs on each stage after the cut, and must give the same bits.

This module creates no process groups and sends nothing.
"""

from __future__ import annotations

import contextlib
import inspect
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.func import functional_call

from zeroaccel.checkpoint.save_plan import WholeModel
from zeroaccel.config.parallel import PipelineConfig
from zeroaccel.errors import UsageError, ZeroAccelError, listed
from zeroaccel.zero.layout import Split

_CAUSAL = "a causal model of transformers or an nn.Sequential"
_HIDDEN = "hidden_states"
_PROBE_LENGTH = 3
_TRIAL_ROWS = 64
_LOSS_KEYS = ("labels", "shift_labels", "num_items_in_batch")


@dataclass
class Carry:
    """State of one micro-batch: the hidden states received and sent by a stage.

    Attributes:
        begin, end: first block of the running stage, and the block after its last one.
    """

    begin: int = 0
    end: int = 0
    received: Tensor | None = None
    sent: Tensor | None = None


@dataclass(frozen=True)
class StagePart:
    """One of the stages that a rank holds.

    Attributes:
        index: number of the stage in the pipeline.
        is_first: it computes from the batch.
        is_last: it computes the loss.
        params: ids of its parameters.
        others: modules of the rank's other stages, as (parent, name, stand-in while this stage runs).
        begin, end: its range of blocks or children.
    """

    index: int
    is_first: bool
    is_last: bool
    params: frozenset[int]
    others: tuple[tuple[nn.Module, str, nn.Module], ...]
    begin: int
    end: int

    @contextlib.contextmanager
    def alone(self) -> Iterator[None]:
        """Context in which stand-ins replace the modules of the rank's other stages."""
        undo = []
        for parent, name, replacement in self.others:
            undo.append((parent, name, parent._modules[name]))
            parent._modules[name] = replacement
        try:
            yield
        finally:
            for parent, name, module in undo:
                parent._modules[name] = module


@dataclass(eq=False)
class SharedParameter:
    """A parameter that modules of two stages read, such as tied embeddings. The earlier stage trains it.

    Attributes:
        name: name of the parameter in the whole model.
        owner, reader: pipeline ranks of the two stages; the same one if one rank has all stages.
        owning_part, reading_part: numbers of the two stages in the pipeline.
        param: the parameter, on the owner.
        copy: the module that reads a copy, on the reader.
    """

    name: str
    owner: int
    reader: int
    owning_part: int
    reading_part: int
    param: nn.Parameter | None = None
    copy: ReadsCopy | None = None


class ReadsCopy(nn.Module):
    """A module that computes with a copy of another stage's parameter, and collects the copy's gradients.

    The copy is not an nn.Parameter: optimizer, norm and checkpoints of this stage ignore it.

    Attributes:
        value: the copy; before the owner sends it, the value that this rank's model was built with.
        is_trained: True if an optimizer updates the parameter.
        leaves: micro-batch -> leaf tensor of its forward; its gradient goes to the owner.
        micro_batch: micro-batch whose forward is running.
    """

    def __init__(self, module: nn.Module, name: str) -> None:
        super().__init__()
        self.value: Tensor = module._parameters[name].detach()  # type: ignore[union-attr]
        self.is_trained = False
        self.leaves: dict[int, Tensor] = {}
        self.micro_batch = 0
        self._name = name
        self._unregistered = (module,)  # as a submodule, its parameters would count as this stage's
        for other, param in module._parameters.items():
            if other != name:
                self.register_parameter(other, param)
        module._parameters[name] = nn.Parameter(torch.empty(0))

    @property
    def module(self) -> nn.Module:
        """The wrapped module, without the copied parameter."""
        return self._unregistered[0]

    def split(self, splits: Mapping[str, Split]) -> None:
        """Reduces the copy to this rank's part, if the parameter is in `splits`."""
        if self._name in splits:
            self.value = splits[self._name].part(self.value).contiguous()

    def __getattr__(self, name: str) -> Any:
        # Methods of the module, such as those of a tied layer, read the parameter itself.
        return self._leaf() if name == self.__dict__.get("_name") else super().__getattr__(name)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        params = {**dict(self.named_parameters()), self._name: self._leaf()}
        return functional_call(self.module, params, args, kwargs)

    def _leaf(self) -> Tensor:
        if torch.is_grad_enabled() and self.is_trained:
            return self.leaves.setdefault(self.micro_batch, self.value.detach().requires_grad_())
        return self.value


class Stage(ABC):
    """A rank's part of a model, without the parameters of other ranks: one stage, or several.

    Attributes:
        model: the model that was passed in.
        whole: description of the model before the cut.
        index, count: this rank's number in the pipeline, and the number of ranks.
        parts: its stages, in order.
        num_parts: number of stages in the whole pipeline.
        shared: parameters that a stage here shares with a stage of another rank.
    """

    def __init__(self, model: nn.Module, whole: WholeModel, index: int, count: int, stages_per_rank: int) -> None:
        self.model, self.whole, self.index, self.count = model, whole, index, count
        self.parts: list[StagePart] = []
        self.num_parts = count * stages_per_rank
        self.shared: list[SharedParameter] = []

    @property
    def is_first(self) -> bool:
        """True if this rank computes from the batch."""
        return self.index == 0

    @property
    def is_last(self) -> bool:
        """True if this rank computes the loss."""
        return self.index == self.count - 1

    @property
    def own_parts(self) -> list[int]:
        """Numbers of the pipeline's stages on this rank."""
        return list(range(self.index, self.num_parts, self.count))

    @abstractmethod
    def run(self, stage: StagePart, forward: Callable[..., Any], batch: Any, received: Tensor | None) -> Tensor:
        """Runs one micro-batch; returns the hidden states for the next stage, or on the last one the loss, a scalar.

        Args:
            stage: the stage to run.
            forward: forward of the model.
            received: output of the previous stage; None on the first.
        """

    def run_trial(self, batch: Mapping[str, Any]) -> Any:
        """Runs a forward of this rank's stages separately, for the check at the start of training."""
        return self.model(**batch)

    def needs_batch(self) -> bool:
        """True if the rank computes anything from the batch."""
        return True

    def modules(self) -> Iterator[nn.Module]:
        """Yields the modules that this rank computes with: those of its model, and those that read copies."""
        yield from self.model.modules()
        for shared in self.shared:
            if shared.copy is not None:
                yield shared.copy.module

    def split_copies(self, splits_of: Callable[[nn.Module], Mapping[str, Split]]) -> None:
        """Reduces copies to this rank's parts, as tensor parallelism does with parameters.

        Args:
            splits_of: module -> splits of its parameters, by their names in the module.
        """
        for shared in self.shared:
            if shared.copy is not None:
                shared.copy.split(splits_of(shared.copy.module))


def cut(model: nn.Module, index: int, count: int, config: PipelineConfig, *, verify: bool = True) -> Stage:
    """Reduces a model to one rank's stages. Every rank makes the same cut, and keeps different stages.

    Args:
        verify: False for tensors without values, as in estimates, for which stage and model cannot be compared.

    Raises:
        UsageError: the model cannot be cut, or not into this number of stages.
    """
    from torch.distributed.pipelining import ScheduleGPipe  # imported here, since it is slow

    if "return_outputs" not in inspect.signature(ScheduleGPipe.step).parameters:
        fix = "install torch 2.10 or newer, or set pp=1"
        raise UsageError("pipeline: torch", expected="schedules that keep no outputs", got=torch.__version__, fix=fix)
    whole = WholeModel.of(model) if verify else WholeModel((), {}, (), (), frozenset(), "")
    meta = next((name for name, param in model.named_parameters() if param.is_meta or not param.numel()), None)
    if meta is not None and verify:
        raise UsageError(
            f"pipeline: parameter {meta}",
            expected="values on every rank before the model is cut",
            got="no values, as on the meta device or under zero.Init",
            fix="build the model without the meta device and zero.Init",
        )
    if isinstance(model, nn.Sequential):
        return _cut_sequential(model, whole, index, count, config)
    if hasattr(model, "config") and hasattr(model, "get_input_embeddings"):
        return _BlockCut(model, config).to_stage(whole, index, count, verify=verify)
    raise _cannot(model, f"{type(model).__name__}, whose modules are in no known order")


def _cannot(model: nn.Module, why: str) -> UsageError:
    return UsageError(
        f"pipeline: {type(model).__name__} cannot be cut",
        expected=f"{_CAUSAL}, with a row of blocks that each compute from the previous one",
        got=why,
        fix="write it as an nn.Sequential, or set pp=1",
    )


def own_params(stage: Stage, optimizer: Any, params: Any) -> tuple[Any, Any]:
    """Removes the parameters of other stages from an optimizer of the whole model, or from parameters for one.

    Groups remain, even if empty, so that all stages have the same groups. A callable is returned unchanged.

    Parameters outside the whole model remain, for the caller to refuse.
    """
    whole, ids = stage.whole.param_ids, {id(param) for param in stage.model.parameters()}

    def kept_of(group: Any) -> list[Any]:
        items = [group] if isinstance(group, Tensor) else list(group)
        return [param for param in items if id(param) in ids or id(param) not in whole]

    if isinstance(optimizer, torch.optim.Optimizer):
        for group in optimizer.param_groups:
            for param in group["params"]:
                if id(param) in whole - ids:
                    optimizer.state.pop(param, None)
            group["params"] = kept_of(group["params"])
    if params is not None:
        params = list(params)
        if params and isinstance(params[0], dict):
            params = [{**group, "params": kept_of(group["params"])} for group in params]
        else:
            params = kept_of(params)
    return optimizer, params


# -- where to cut


def divide(costs: Sequence[float], count: int) -> list[int]:
    """Returns the first item of each stage, minimizing the largest sum of costs of a stage.

    Example:
        >>> divide([1, 1, 1, 1, 4], 2)
        [0, 4]
        >>> divide([3, 1, 1, 1], 3)
        [0, 1, 2]
    """
    sums = [0.0]
    for cost in costs:
        sums.append(sums[-1] + cost)
    # best[stages][end]: smallest largest sum for the first `end` items in so many stages, and where the last begins.
    best: list[dict[int, tuple[float, int]]] = [{end: (sums[end], 0) for end in range(1, len(costs) + 1)}]
    for stages in range(2, count + 1):
        best.append(
            {
                end: min((max(best[-1][begin][0], sums[end] - sums[begin]), begin) for begin in range(stages - 1, end))
                for end in range(stages, len(costs) + 1)
            }
        )
    firsts, end = [], len(costs)
    for stages in range(count, 0, -1):
        end = best[stages - 1][end][1]
        firsts.append(end)
    return firsts[::-1]


def _firsts(costs: Sequence[float], count: int, config: PipelineConfig, model: nn.Module) -> list[int]:
    if len(costs) < count:
        raise UsageError(
            f"pipeline: {type(model).__name__}",
            expected=f"at least {count} blocks, one for each stage",
            got=f"{len(costs)} blocks",
            fix="choose a smaller pp",
        )
    if isinstance(config.split, str):
        return divide([1.0] * len(costs) if config.split == "uniform" else costs, count)
    if len(config.split) != count or sum(config.split) != len(costs):
        raise UsageError(
            "PipelineConfig(split)",
            expected=f"{count} numbers whose sum is {len(costs)}, the number of blocks",
            got=tuple(config.split),
        )
    return [sum(config.split[:stage]) for stage in range(count)]


def _cost(modules: Sequence[nn.Module], config: PipelineConfig) -> float:
    """Returns the cost of these modules in elements of parameters."""
    return sum(_own_cost(inner, config) for outer in modules for inner in outer.modules())


def _own_cost(module: nn.Module, config: PipelineConfig) -> float:
    """Returns the `_cost` of a module without its submodules."""
    params = [param for param in module._parameters.values() if param is not None]
    if config.split == "compute":
        is_table = isinstance(module, (nn.Embedding, nn.EmbeddingBag))
        params = [param for param in params if param.dim() >= 2 and not is_table]
    return float(sum(param.numel() for param in params))


# -- a rank's modules


@dataclass(frozen=True)
class _StageModule:
    """A module that one stage computes.

    Attributes:
        kind: a child of an nn.Sequential; a block; or one of the ends before and after the blocks, which counts its
            own parameters and not those of its submodules.
        number: number of the stage.
        places: (parent, name) pairs of the module in the model.
        stand_in: replacement on other ranks, and on the same rank while another stage runs.
    """

    kind: Literal["child", "block", "end"]
    number: int
    module: nn.Module
    places: Sequence[tuple[nn.Module, str]]
    stand_in: nn.Module

    def modules(self) -> Iterable[nn.Module]:
        """Returns the modules that hold its parameters."""
        return (self.module,) if self.kind == "end" else self.module.modules()


def _divide(stage: Stage, pieces: Sequence[_StageModule], firsts: Sequence[int]) -> None:
    """Keeps in the model only the modules that this rank computes, and appends its `StagePart`s.

    Args:
        firsts: first block or child of each stage, and last the number of blocks or children.
    """
    stage.shared = _shared(stage, pieces)
    local_parts, last = stage.own_parts, stage.num_parts - 1
    for piece in pieces:
        for parent, name in piece.places if piece.number not in local_parts else ():
            parent._modules[name] = piece.stand_in
    copies = {id(item.copy.module): item.copy for item in stage.shared if item.copy is not None}
    for parent in list(stage.model.modules()):
        for name, module in parent._modules.items():
            if id(module) in copies:
                parent._modules[name] = copies[id(module)]
    for index in local_parts:
        params = (
            param
            for piece in pieces
            if piece.number == index
            for module in piece.modules()
            for param in copies.get(id(module), module)._parameters.values()
        )
        others = tuple(
            (*place, piece.stand_in)
            for piece in pieces
            if piece.number in local_parts and piece.number != index
            for place in piece.places
        )
        ids = frozenset(id(param) for param in params if param is not None)
        stage.parts.append(StagePart(index, index == 0, index == last, ids, others, firsts[index], firsts[index + 1]))


def _shared(stage: Stage, pieces: Sequence[_StageModule]) -> list[SharedParameter]:
    """Returns the parameters that a stage here shares with another; two ranks share only between one pair of stages."""
    holders: dict[int, list[tuple[_StageModule, nn.Module, str]]] = {}
    for piece in pieces:
        for module in piece.modules():
            for attribute, param in module._parameters.items():
                if param is not None:
                    holders.setdefault(id(param), []).append((piece, module, attribute))
    names = {id(param): name for name, param in stage.model.named_parameters()}
    params = {id(param): param for param in stage.model.parameters()}
    shared = []
    parts_between: dict[tuple[int, int], tuple[int, int]] = {}
    for key, places in holders.items():
        parts = sorted({piece.number for piece, *_ in places})
        if len(parts) == 1:
            continue
        first, last = parts[0], parts[-1]
        owner, reader = first % stage.count, last % stage.count
        readers = [place for place in places if place[0].number == last]
        piece, module, attribute = readers[0]
        is_alone = piece.kind == "end" or sum(param is not None for param in module._parameters.values()) == 1
        if (
            len(parts) > 2
            or (owner == reader and stage.count > 1)
            or len(readers) > 1
            or not is_alone
            or any(piece.kind == "block" for piece, *_ in places)
            or parts_between.setdefault((owner, reader), (first, last)) != (first, last)
        ):
            raise _shared_by_stages(names[key], _tie_of(stage.model, params[key]))
        item = SharedParameter(names[key], owner, reader, first, last)
        if stage.index == owner:
            item.param = params[key]
        if stage.index == reader:
            item.copy = ReadsCopy(module, attribute)
        if stage.index in (owner, reader):
            shared.append(item)
    return shared


def _tie_of(model: nn.Module, param: nn.Parameter) -> nn.Module | None:
    """Returns the module that names a tie of the parameter in the user's terms, by `shared_by` and `sharing_fix`."""
    holders = (module for module in model.modules() if hasattr(module, "shared_by"))
    return next((module for module in holders if any(candidate is param for candidate in module.parameters())), None)


def _shared_by_stages(name: str, tie: nn.Module | None) -> UsageError:
    if tie is not None:
        params = dict(tie.named_parameters())
        return UsageError(
            f"{tie.shared_by}: {name}",
            expected="a tied module with one parameter, used once by each of two stages, or by one stage",
            got=f"a module with {len(params)} parameters: {listed(list(params))}"
            if len(params) > 1
            else "use by more layers or stages",
            fix=str(tie.sharing_fix),
        )
    return UsageError(
        f"pipeline: parameter {name}",
        expected="use by one stage, or outside the blocks by two, with no other parameter in the later one's module",
        got="use by several stages",
        fix="choose another PipelineConfig(split), or set pp=1",
    )


# -- nn.Sequential


class _Nothing(nn.Module):
    """Stands in for a module of another stage: returns its input."""

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return next(iter((*args, *kwargs.values())))


class _SequentialStage(Stage):
    def __init__(self, model: nn.Sequential, whole: WholeModel, index: int, count: int, config: PipelineConfig) -> None:
        super().__init__(model, whole, index, count, config.stages_on(count, len(model)))
        self._loss = config.loss

    def run(self, stage: StagePart, forward: Callable[..., Any], batch: Any, received: Tensor | None) -> Tensor:
        with stage.alone():
            output = forward(batch[0] if received is None else received)
        if not stage.is_last:
            return _single(output, f"stage {stage.index} of the nn.Sequential")
        assert self._loss is not None, "an nn.Sequential needs a loss"
        return _scalar(self._loss(output, batch[1]), "PipelineConfig(loss)")

    def needs_batch(self) -> bool:
        return self.is_first or self.is_last


def _cut_sequential(
    model: nn.Sequential, whole: WholeModel, index: int, count: int, config: PipelineConfig
) -> _SequentialStage:
    if config.loss is None:
        raise UsageError(
            "PipelineConfig(loss)",
            expected="a function of (output, targets), since an nn.Sequential computes no loss",
            got=None,
            fix="pass pipeline=PipelineConfig(loss=...)",
        )
    own_costs = config.costs or [_cost([child], config) for child in model]
    stage = _SequentialStage(model, whole, index, count, config)
    firsts = [*_firsts(own_costs, stage.num_parts, config, model), len(model)]
    children = list(model._modules.items())
    pieces = [
        _StageModule("child", number, child, [(model, name)], _Nothing())
        for number in range(stage.num_parts)
        for name, child in children[firsts[number] : firsts[number + 1]]
        if child is not None
    ]
    _divide(stage, pieces, firsts)
    return stage


def _single(output: Any, where: str) -> Tensor:
    if not isinstance(output, Tensor):
        raise UsageError(f"pipeline: {where}", expected="one tensor for the next stage", got=type(output).__name__)
    return output


def _scalar(loss: Any, where: str) -> Tensor:
    if not isinstance(loss, Tensor) or loss.numel() != 1:
        got = tuple(loss.shape) if isinstance(loss, Tensor) else type(loss).__name__
        raise UsageError(f"pipeline: {where}", expected="the loss, a scalar", got=got)
    return loss


# -- causal models of transformers


class _OtherBlock(nn.Module):
    """Stands in for a block of another stage: passes its input on; receives and sends at the ends of this stage."""

    def __init__(self, block: nn.Module, carry: Carry, position: int, *, in_tuple: int) -> None:
        super().__init__()
        for name, value in vars(block).items():  # the model's forward may read the kind of a block
            if not name.startswith("_") and (value is None or isinstance(value, (str, int, float))):
                setattr(self, name, value)
        self._carry, self._position, self._in_tuple = carry, position, in_tuple

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        hidden = args[0] if args else kwargs[_HIDDEN]
        if self._position == self._carry.begin - 1:
            hidden = self._carry.received
        if self._position == self._carry.end:
            self._carry.sent = hidden
        return (hidden, *[None] * (self._in_tuple - 1)) if self._in_tuple else hidden


class _NoInput(nn.Module):
    """Stands in for a module before the blocks: returns zeros in the shape of its output, which no stage reads."""

    def __init__(self, carry: Carry, width: int, *, adds_dim: bool) -> None:
        super().__init__()
        self._carry, self._width, self._adds_dim = carry, width, adds_dim

    def forward(self, *args: Any, **kwargs: Any) -> Tensor:
        source = _first_tensor(args, kwargs)
        assert source is not None and self._carry.received is not None, "the stage received nothing"
        shape = source.shape if self._adds_dim else source.shape[:-1]
        return self._carry.received.new_zeros((*shape, self._width))


class _BlockStage(Stage):
    def __init__(
        self, model: nn.Module, whole: WholeModel, index: int, count: int, config: PipelineConfig, blocks: int
    ) -> None:
        super().__init__(model, whole, index, count, config.stages_on(count, blocks))
        self.carry = Carry()
        self.width = 0  # of hidden states
        self._loss = config.loss

    def run_trial(self, batch: Mapping[str, Any]) -> Any:
        # Each token alone determines its received row, so that a run of a sequence receives a run of the whole.
        ids = batch["input_ids"]
        dtype = next(param.dtype for param in self.model.parameters() if param.is_floating_point())
        rows = torch.randn(_TRIAL_ROWS, self.width, generator=torch.Generator().manual_seed(0))
        received = rows.to(ids.device, dtype)[ids % _TRIAL_ROWS]
        return [self.outputs(stage, self.model, batch, None if stage.is_first else received) for stage in self.parts]

    def run(self, stage: StagePart, forward: Callable[..., Any], batch: Any, received: Tensor | None) -> Tensor:
        output = self.outputs(stage, forward, batch, received)
        if not stage.is_last:
            return output  # type: ignore[no-any-return]
        if self._loss is not None:
            return _scalar(self._loss(output, batch), "PipelineConfig(loss)")
        loss = output.get("loss") if isinstance(output, Mapping) else None
        if loss is None:
            raise UsageError("pipeline: batch", expected='"labels", from which the model computes its loss', got=None)
        return _scalar(loss, "the model's loss")

    def outputs(
        self, stage: StagePart, forward: Callable[..., Any], batch: Mapping[str, Any], received: Tensor | None
    ) -> Any:
        """Returns the hidden states for the next stage, or on the last one the model's own output."""
        _refuse_router_loss("pipeline: batch", batch.get("output_router_logits"))
        kwargs = {**batch, "use_cache": False, "return_dict": True}
        if not stage.is_last:
            kwargs = {key: value for key, value in kwargs.items() if key not in _LOSS_KEYS}
        elif kwargs.get("labels") is None and "shift_labels" in kwargs:  # models need `labels` for a loss
            kwargs["labels"] = kwargs["shift_labels"]
        self.carry.begin, self.carry.end, self.carry.received = stage.begin, stage.end, received
        try:
            with stage.alone():
                output = forward(**kwargs)
            return output if stage.is_last else self.carry.sent
        finally:
            self.carry.received = self.carry.sent = None


@dataclass
class _Trace:
    """Record of one forward over a few tokens.

    Attributes:
        inputs, outputs: hidden states of each block.
        calls: module with parameters outside the blocks -> places of its calls: "before", "after" or "between" them.
        shapes: such a module -> (shape of its input, shape of its output).
        in_tuple: length of the tuples that blocks return; 0 if they return a tensor.
        result: the model's logits.
    """

    inputs: list[Tensor] = field(default_factory=list)
    outputs: list[Tensor] = field(default_factory=list)
    order: list[int] = field(default_factory=list)
    calls: dict[str, set[str]] = field(default_factory=dict)
    shapes: dict[str, tuple[torch.Size, torch.Size]] = field(default_factory=dict)
    in_tuple: int = 0
    result: Tensor | None = None


def _refuse_router_loss(where: str, adds_loss: Any) -> None:
    """Refuses a loss over routers: the last stage computes the loss, and has only the routers of its own blocks."""
    if adds_loss:
        raise UsageError(
            where,
            expected="output_router_logits=False, since the routers' loss needs the logits of all stages",
            got=adds_loss,
            fix="set it to False in the model's config, or set pp=1",
        )


class _BlockCut:
    """Finds how one causal model divides into stages."""

    def __init__(self, model: nn.Module, config: PipelineConfig) -> None:
        _refuse_router_loss(type(model).__name__, getattr(getattr(model, "config", None), "output_router_logits", None))
        self.model, self.config = model, config
        self.path, self.blocks = self._find_blocks()
        inside = {id(module) for block in self.blocks for module in block.modules()}
        # Modules outside the blocks that have parameters of their own.
        self.others = {
            name: module
            for name, module in model.named_modules()
            if id(module) not in inside and any(param is not None for param in module._parameters.values())
        }
        self.ids = torch.arange(_PROBE_LENGTH, device=next(model.parameters()).device)[None]
        self.trace = self._run_once()
        self._check()

    def _find_blocks(self) -> tuple[str, list[nn.Module]]:
        lists = [(name, module) for name, module in self.model.named_modules() if isinstance(module, nn.ModuleList)]
        sized = [(sum(p.numel() for p in blocks.parameters()), name, list(blocks)) for name, blocks in lists]
        if not sized:
            raise _cannot(self.model, "no nn.ModuleList of blocks")
        _, path, blocks = max(sized, key=lambda item: item[0])
        return path, blocks

    # -- the forward that is recorded

    def _run_once(self) -> _Trace:
        trace = _Trace()
        wrapped: dict[nn.Module, Callable[..., Any]] = {
            **{block: partial(self._in_block, trace, i) for i, block in enumerate(self.blocks)},
            **{module: partial(self._outside, trace, name) for name, module in self.others.items()},
        }
        with evaluating(self.model), contextlib.ExitStack() as undo:
            for module, record in wrapped.items():
                before = {key: value for key, value in vars(module).items() if key == "forward"}  # restored later
                vars(module)["forward"] = partial(record, module.forward)
                undo.callback(vars(module).update, before)
                undo.callback(vars(module).pop, "forward")
            try:
                trace.result = self._logits(self.model(input_ids=self.ids, use_cache=False, return_dict=True))
            except ZeroAccelError:
                raise
            except Exception as error:
                raise _cannot(self.model, f"a forward that fails: {type(error).__name__}: {error}") from error
        return trace

    def _in_block(self, trace: _Trace, index: int, forward: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        hidden = args[0] if args else kwargs.get(_HIDDEN)
        output = forward(*args, **kwargs)
        result = output[0] if isinstance(output, tuple) else output
        if not isinstance(hidden, Tensor) or not isinstance(result, Tensor):
            raise _cannot(self.model, f"{self.path}.{index}, which takes and returns no hidden states")
        trace.in_tuple = len(output) if isinstance(output, tuple) else 0
        trace.order.append(index)
        trace.inputs.append(hidden)
        trace.outputs.append(result)
        return output

    def _outside(self, trace: _Trace, name: str, forward: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        before, source = len(trace.order), _first_tensor(args, kwargs)
        output = forward(*args, **kwargs)
        after = len(trace.order)
        all_blocks = len(self.blocks)
        place = "before" if after == 0 else "after" if before == all_blocks else "between"
        trace.calls.setdefault(name, set()).add(place)
        if isinstance(output, Tensor) and source is not None:
            trace.shapes[name] = source.shape, output.shape
        return output

    def _check(self) -> None:
        trace, path = self.trace, self.path
        if trace.order != list(range(len(self.blocks))):
            raise _cannot(self.model, f"blocks {path} that run in the order {trace.order}")
        for index in range(1, len(self.blocks)):
            if trace.inputs[index] is not trace.outputs[index - 1]:
                raise _cannot(self.model, f"something between {path}.{index - 1} and {path}.{index}")
        for name, places in trace.calls.items():
            if len(places) > 1 or "between" in places:
                owned = listed([key for key, param in self.others[name]._parameters.items() if param is not None])
                raise _cannot(self.model, f"parameters of {name or 'the model itself'} ({owned}) used among the blocks")

    # -- one stage

    def to_stage(self, whole: WholeModel, index: int, count: int, *, verify: bool) -> _BlockStage:
        """Reduces the model to the stages of rank `index`."""
        before = [name for name in self.others if self.trace.calls.get(name) == {"before"}]
        after = [name for name in self.others if name not in before]  # including modules that no forward reaches
        costs = [_cost([block], self.config) for block in self.blocks]
        costs[0] += sum(_own_cost(self.others[name], self.config) for name in before)
        costs[-1] += sum(_own_cost(self.others[name], self.config) for name in after)
        stage = _BlockStage(self.model, whole, index, count, self.config, len(self.blocks))
        stage.width = self.trace.inputs[0].shape[-1]
        firsts = [*_firsts(costs, stage.num_parts, self.config, self.model), len(self.blocks)]
        in_tuple = self.trace.in_tuple
        places: dict[int, list[tuple[nn.Module, str]]] = {}
        for parent in self.model.modules():
            for name, module in parent._modules.items():
                places.setdefault(id(module), []).append((parent, name))

        def piece(kind: Literal["block", "end"], number: int, module: nn.Module, stand_in: nn.Module) -> _StageModule:
            return _StageModule(kind, number, module, places.get(id(module), ()), stand_in)

        pieces = [
            piece("block", number, self.blocks[at], _OtherBlock(self.blocks[at], stage.carry, at, in_tuple=in_tuple))
            for number in range(stage.num_parts)
            for at in range(firsts[number], firsts[number + 1])
        ]
        several = stage.num_parts > 1
        for name in before:
            stand_in = self._no_input(name, stage.carry) if several else _Nothing()
            pieces.append(piece("end", 0, self.others[name], stand_in))
        pieces += [piece("end", stage.num_parts - 1, self.others[name], _Nothing()) for name in after]
        _divide(stage, pieces, firsts)
        for stage_part in stage.parts if verify else ():
            self._verify(stage, stage_part)
        return stage

    def _no_input(self, name: str, carry: Carry) -> _NoInput:
        if name not in self.trace.shapes:
            raise _cannot(self.model, f"{name}, which takes or returns no tensor")
        source, output = self.trace.shapes[name]
        adds_dim = output[:-1] == source
        if not adds_dim and output[:-1] != source[:-1]:
            raise _cannot(self.model, f"{name}, which maps {tuple(source)} to {tuple(output)}")
        return _NoInput(carry, output[-1], adds_dim=adds_dim)

    def _verify(self, stage: _BlockStage, stage_part: StagePart) -> None:
        """Raises unless the stage, given the whole model's hidden states, computes the same output as the model."""
        with evaluating(self.model):
            received = None if stage_part.is_first else self.trace.inputs[stage_part.begin]
            output = stage.outputs(stage_part, self.model, {"input_ids": self.ids}, received)
        result = self._logits(output) if stage_part.is_last else output
        expected = self.trace.result if stage_part.is_last else self.trace.outputs[stage_part.end - 1]
        if not isinstance(result, Tensor) or expected is None or not torch.equal(result, expected):
            raise _cannot(self.model, f"stage {stage_part.index}, which depends on more than the hidden states")

    @staticmethod
    def _logits(output: Any) -> Tensor:
        logits = output.get("logits") if isinstance(output, Mapping) else None
        if not isinstance(logits, Tensor):
            raise UsageError("pipeline: model", expected="a causal model, whose output has logits", got=type(output))
        return logits


def _first_tensor(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Tensor | None:
    return next((value for value in (*args, *kwargs.values()) if isinstance(value, Tensor)), None)


@contextlib.contextmanager
def evaluating(model: nn.Module) -> Iterator[None]:
    """Context without gradients and dropout; restores the modes of all modules."""
    modes = {module: module.training for module in model.modules()}
    model.eval()
    try:
        with torch.no_grad():
            yield
    finally:
        for module, mode in modes.items():
            module.training = mode
