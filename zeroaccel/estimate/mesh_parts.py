"""The part of a model that one rank of a mesh has, and what it sends along the axes: for `simulate`.

Each axis does to the model what the engine does with it, without values and without the other ranks:

```text
tp   layers of the model's plan have 1 / tp of their weights; sums over ranks are copies, as torch's are out of place
sp   1 / sp of the tokens; attention exchanges heads by the engine's own code, over ranks that do not exist
pp   the blocks of one stage, cut by the engine's own code, in the order of 1F1B; what stages send is counted
```
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from zeroaccel.config.parallel import PipelineConfig
from zeroaccel.errors import UsageError
from zeroaccel.estimate.decoder import Decoder, Shape
from zeroaccel.estimate.fake_ranks import FakeRanks, SentBytes
from zeroaccel.estimate.subject import Step, Subject
from zeroaccel.estimate.workload import Workload
from zeroaccel.parallel.pipeline_cut import Stage, cut, divide
from zeroaccel.parallel.sequence import SequenceGroup
from zeroaccel.parallel.tensor import is_transposed, layer_styles, local_head_counts
from zeroaccel.parallel.ulysses import UlyssesAttention, WholeSequences
from zeroaccel.zero.engine import Engine


def part_of(subject: Subject, workload: Workload, stage: int, sent: SentBytes) -> Subject:
    """The part of a model that a rank has; the model itself where each rank sees samples of its own.

    Args:
        stage: of the pipeline.
        sent: counts what the part sends to ranks along sp and tp.

    Raises:
        UsageError: the model cannot be cut that way. For a model that is not a `Decoder`, its `build` raises.
    """
    if workload.pp == workload.sp == workload.tp == 1:
        return subject
    if subject.shape is not None:
        return _part_of_shape(subject, subject.shape, workload, stage, sent)

    def build() -> tuple[nn.Module, Step]:
        model, step = subject.build()
        _share(model, workload, sent)
        if workload.pp == 1:
            return model, step
        return model, cast(Step, _cut_stage(model, subject.name, workload, stage))

    return replace(subject, build=build, layers=0, build_short=None)


def _part_of_shape(subject: Subject, shape: Shape, workload: Workload, stage: int, sent: SentBytes) -> Subject:
    _check_shape(subject.name, shape, workload)
    is_first, is_last = stage == 0, stage == workload.pp - 1
    firsts = [*stage_firsts(shape, workload.pp), shape.layers]
    layers = firsts[stage + 1] - firsts[stage]

    def build(layers: int = layers) -> tuple[nn.Module, Step]:
        model = Decoder(replace(shape, layers=layers), is_first=is_first, is_last=is_last)
        _share(model, workload, sent)
        if workload.pp == 1:
            return model, subject.build_short(1)[1] if subject.build_short else subject.build()[1]
        table = shape.vocabulary * shape.width if shape.tied and workload.pp > 1 else 0
        return model, cast(Step, StageStep(stage, workload.pp, _decoder_forward, shape.width, table))

    return replace(subject, build=build, layers=layers, build_short=build)


def stage_firsts(shape: Shape, count: int) -> list[int]:
    """The first block of each stage of a decoder: by matrix elements, as `PipelineConfig` divides by default.

    Example:
        >>> stage_firsts(Shape(layers=8, width=64, inner=256, vocabulary=1000), 4)
        [0, 2, 4, 6]
    """
    queries, keys = shape.heads * shape.head_dim, shape.key_heads * shape.head_dim
    block = shape.width * (2 * (queries + keys) + 3 * shape.inner)
    return divide([*[block] * (shape.layers - 1), block + shape.vocabulary * shape.width], count)


def stages_to_compare(subject: Subject, workload: Workload) -> list[int]:
    """The stages of a pipeline that can need the most memory.

    They are the first, the last, and of those between the one with the most blocks times micro-batches in flight.
    """
    count = workload.pp
    between = range(1, count - 1)
    if subject.shape is None or len(between) < 2 or count > subject.shape.layers:
        return list(range(count))
    firsts = [*stage_firsts(subject.shape, count), subject.shape.layers]
    blocks = [firsts[index + 1] - firsts[index] for index in range(count)]
    return [0, max(between, key=lambda index: blocks[index] * (count - index)), count - 1]


def _check_shape(name: str, shape: Shape, workload: Workload) -> None:
    """Refuses what the engine would refuse of such a model."""
    for axis, size in (("tp", workload.tp), ("sp", workload.sp)):
        for what, heads in (("heads of queries", shape.heads), ("heads of keys", shape.key_heads)):
            # Heads of keys are copied where sequences are shared.
            if heads % size and not (axis == "sp" and heads == shape.key_heads != shape.heads):
                raise UsageError(f"{name}: {axis} {size}", expected=f"a divisor of its {heads} {what}", got=size)
    if workload.pp > shape.layers:
        raise UsageError(f"{name}: pp {workload.pp}", expected=f"at most its {shape.layers} blocks", got=workload.pp)


def _share(model: nn.Module, workload: Workload, sent: SentBytes) -> None:
    if workload.tp > 1:
        share_layers(model, workload.tp, sent)
    if workload.sp > 1:
        ranks = FakeRanks(workload.sp, sent, axis="sp")
        group = SequenceGroup(ranks, cast(Any, None))  # no process group: what is exchanged goes through `ranks`
        if isinstance(model, Decoder):
            exchange = _ExchangeOnly(group)
            for block in model.blocks:
                vars(block)["exchange"] = exchange
        else:
            _UlyssesWithoutValues(model, group)


class _ExchangeOnly(UlyssesAttention):
    """The exchange of heads by itself, for a `Decoder`."""

    def __init__(self, group: SequenceGroup) -> None:
        self.group = group
        self._positions = {}


class _UlyssesWithoutValues(UlyssesAttention):
    """As in training, without a look at positions and masks: sequences are neither packed nor padded."""

    def _before(self, model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        tokens = kwargs["input_ids"] if "input_ids" in kwargs else args[0]
        self._sequences = WholeSequences(tokens.shape[1] * self.group.size, None, None)
        return None


# -- layers that ranks share


class _Summed(torch.autograd.Function):
    """A sum over the ranks, whose gradient is the same on all of them."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, count: Callable[[int], None]) -> Tensor:
        count(x.nbytes)
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        return grads[0], None


class _Shared(torch.autograd.Function):
    """What all ranks have; each has a part of its gradient, which are summed."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, count: Callable[[int], None]) -> Tensor:
        ctx.count = count
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        ctx.count(grads[0].nbytes)
        return grads[0].clone(), None


class _Joined(torch.autograd.Function):
    """The ranks' parts of the last dim, one after the other."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, size: int, count: Callable[[int], None]) -> Tensor:
        ctx.width = x.shape[-1]
        count(x.nbytes)
        return x.new_empty((*x.shape[:-1], size * x.shape[-1]))

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        return grads[0][..., : ctx.width].contiguous(), None, None


_ROWS, _COLUMNS = 0, 1
# Kind of module -> style -> the dims of its parameters that are cut, as torch's styles cut them.
_CUT_DIMS: dict[type[nn.Module], dict[str, dict[str, int]]] = {
    nn.Linear: {
        **{style: {"weight": _ROWS, "bias": _ROWS} for style in ("colwise", "colwise_gather_output", "colwise_rep")},
        **{style: {"weight": _COLUMNS} for style in ("rowwise", "rowwise_split_input", "rowwise_rep")},
    },
    nn.Embedding: {"embedding_rowwise": {"weight": _ROWS}, "embedding_colwise": {"weight": _COLUMNS}},
}
# GPT-2's linear layers have weights of (inputs, outputs).
_CUT_DIMS_TRANSPOSED: dict[str, dict[str, int]] = {
    **{style: {"weight": _COLUMNS, "bias": _ROWS} for style in ("colwise", "packed_colwise_2", "packed_colwise_3")},
    "rowwise": {"weight": _ROWS},
}
_GATHERED = ("colwise_gather_output", "colwise_rep", "embedding_colwise")
_SPLIT_INPUT = ("rowwise_split_input", "rowwise_rep")


def share_layers(model: nn.Module, size: int, sent: SentBytes) -> None:
    """Reduces the layers of a model's plan to what one of `size` ranks has of them.

    Raises:
        UsageError: as of `initialize` with tensor parallelism.
    """

    def count_sum(nbytes: int) -> None:
        sent.add("tp", 2 * (size - 1) / size * nbytes)  # as a ring does

    def count_gather(nbytes: int) -> None:
        sent.add("tp", (size - 1) * nbytes)

    styles = layer_styles(model, size)
    parts: dict[int, nn.Parameter] = {}
    whole = list(model.parameters())  # until the end, so that the id of one is no other's
    for name, style in styles.items():
        module = model.get_submodule(name)
        dims = _cut_dims(module).get(style)
        if dims is None and style != "replicated_with_grad_allreduce":
            raise UsageError(f"tensor parallelism: {name}", expected="a style of its kind of layer", got=style)
        for key, dim in (dims or {}).items():
            param = module._parameters.get(key)
            if param is not None:
                module._parameters[key] = _part(f"{name}.{key}", param, dim, size, parts)
        if is_transposed(module) and "bias" in (dims or {}):
            vars(module)["nf"] //= size  # outputs, by which its forward shapes them
        if dims is not None:
            module.forward = _forward_of_part(module.forward, style, size, count_sum, count_gather)
    for prefix, module in model.named_modules():
        if any(id(param) in parts for param in module._parameters.values() if param is not None):
            raise UsageError(
                f"tensor parallelism: {prefix}", expected="tied parameters with the same split", got="one that is whole"
            )
    for parent in {name.rpartition(".")[0]: None for name in styles}:
        attention = model.get_submodule(parent)
        vars(attention).update(local_head_counts(attention, size))
    del whole


def _cut_dims(module: nn.Module) -> dict[str, dict[str, int]]:
    """Style -> the dims of its parameters that are cut, for a module of its kind."""
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
    forward: Callable[..., Tensor],
    style: str,
    size: int,
    count_sum: Callable[[int], None],
    count_gather: Callable[[int], None],
) -> Callable[..., Tensor]:
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


# -- stages of a pipeline


@dataclass(frozen=True)
class StageStep:
    """The step of one stage of a pipeline.

    Attributes:
        index, count: which stage of how many.
        forward: (engine, batch, sequence, what the previous stage sent) -> what goes to the next one, or the loss.
        width: of the hidden states, (batch, sequence, width), that go between stages.
        shared_numel: elements of the parameter that the first and the last stage share, if any.
        received: the buffers of a schedule, made once, as torch's schedules have them.
    """

    index: int
    count: int
    forward: Callable[[Engine, int, int, Tensor | None], Tensor]
    width: int
    shared_numel: int = 0
    received: dict[str, list[Tensor]] = field(default_factory=dict)

    @property
    def is_first(self) -> bool:
        return self.index == 0

    @property
    def is_last(self) -> bool:
        return self.index == self.count - 1


def micro_steps(workload: Workload, stage: int) -> int:
    """How many micro-steps are simulated; more of them repeat the same."""
    if workload.pp == 1:
        return min(workload.accumulation, 2)
    return min(workload.accumulation, workload.pp - stage + 2)


def run_stage(engine: Engine, step: StageStep, workload: Workload, sent: SentBytes) -> Iterator[int]:
    """Runs one step of a stage in the order of 1F1B; yields the number of each phase before it.

    (PipeDream-flush, Narayanan et al., 2021, arXiv:2006.09503.) What `PipelineEngine` does for a micro-batch.
    """
    count = micro_steps(workload, step.index)
    warm = min(count, step.count - step.index)
    actions = [("forward", micro) for micro in range(warm)]
    for micro in range(count):
        actions.append(("backward", micro))
        if warm + micro < count:
            actions.append(("forward", warm + micro))
    dtype = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}[workload.precision]
    hidden = workload.batch, workload.sequence // workload.sp, step.width
    nbytes = workload.batch * hidden[1] * step.width * dtype.itemsize
    shared_nbytes = step.shared_numel * dtype.itemsize
    device = next(engine.module.parameters()).device
    if not step.received:
        # torch's schedules have them for all micro-batches of a step.
        for direction, has in (("forward", not step.is_first), ("backward", not step.is_last)):
            buffers = [
                torch.empty(hidden, dtype=dtype, device=device) for _ in range(workload.accumulation if has else 0)
            ]
            step.received[direction] = buffers
    outputs: dict[int, Tensor] = {}
    for number, (kind, micro) in enumerate(actions):
        is_last = micro == count - 1
        sent.moment = "last" if is_last else "earlier"
        if kind == "forward":
            yield 3 * number
            received = None if step.is_first else step.received["forward"][micro].detach().requires_grad_()
            outputs[micro] = step.forward(engine, workload.batch, hidden[1], received)
            sent.add("pp", 0 if step.is_last else nbytes)
            continue
        yield 3 * number + 1
        engine.set_gradient_accumulation_boundary(is_last)
        engine._begin_backward(direct=False)
        gradient = None if step.is_last else step.received["backward"][micro]
        torch.autograd.backward([outputs.pop(micro)], [gradient])
        engine._end_backward()
        sent.add("pp", 0 if step.is_first else nbytes)
        sent.add("pp", shared_nbytes if step.is_last else 0)  # the gradient of the copy
        if not is_last:
            engine.step()
    yield 3 * len(actions) + 2
    sent.moment = "step"
    sent.add("pp", shared_nbytes if step.is_first else 0)  # the values of the copy
    engine.step()


def _decoder_forward(engine: Engine, batch: int, sequence: int, received: Tensor | None) -> Tensor:
    ids = torch.zeros(batch, sequence, dtype=torch.long)
    output: Tensor = engine(ids if received is None else received)
    stage = engine.module
    return F.cross_entropy(output.flatten(0, -2), ids.flatten()) if stage.norm is not None else output


def _cut_stage(model: nn.Module, name: str, workload: Workload, stage: int) -> StageStep:
    """Cuts a causal model of transformers, as `initialize` does."""
    cut_stage: Stage = cut(model, stage, workload.pp, PipelineConfig(), verify=False)
    config: Any = getattr(model, "config", None)
    if config is None:
        raise UsageError(
            f"{name}: pp {workload.pp}", expected="a causal model of transformers", got=type(model).__name__
        )

    def forward(engine: Engine, batch: int, sequence: int, received: Tensor | None) -> Tensor:
        ids = torch.zeros(batch, sequence, dtype=torch.long)
        return cut_stage.run(cut_stage.parts[0], engine, {"input_ids": ids, "labels": ids}, received)

    shared = sum(item.param.numel() for item in cut_stage.shared if item.param is not None)
    shared += sum(item.copy.value.numel() for item in cut_stage.shared if item.copy is not None)
    for item in cut_stage.shared:
        if item.copy is not None:
            item.copy.is_trained = True
    return StageStep(stage, workload.pp, forward, int(config.get_text_config().hidden_size), shared)
