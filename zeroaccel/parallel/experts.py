"""Expert parallelism: the ranks that divide the experts of each layer, and the way of tokens to them and back.

(GShard: Lepikhin et al., 2020, arXiv:2006.16668, section 3.) A mixture's router chooses K of E experts for each of a
rank's T tokens. Of P ranks each has E / P experts, and for them the tokens of all P:

```text
hidden (T, H), choices (T, K), weights (T, K)        this rank's tokens
  sort by expert, exchange how many go where         (P, E/P) numbers
  send tokens and weights                            one all-to-all of exactly the rows that were chosen
hidden (n, H), choices (n, 1), weights (n, 1)        tokens of all ranks, for this rank's experts
  the module's own forward, with E / P experts
  return the rows                                    one all-to-all
(T, K, H), summed over K
```

No token is dropped and none is padded, whatever the load. A rank that no token chose sends and receives nothing, yet
takes part in each exchange, forward and backward: it computes one row of zeros, so that its graph and gradients are
those of the other ranks.

An expert's gradient is the sum over the tokens of all P ranks already, so its reduction over the ranks that hold it
has all terms of plain data parallelism, and the same divisor, the number of data ranks, makes it the mean.

**Which experts**: modules of transformers whose forward is (hidden, choices, weights), with one tensor for each
projection of all experts, (E, ..): the interface of `use_experts_implementation`. Its implementations ("eager",
"grouped_mm", "batched_mm") run as they are, on the rows that arrived.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from zeroaccel.comm.agree import agreed
from zeroaccel.comm.collectives import Collectives
from zeroaccel.comm.topology import RankGroup, Topology, connect, subgroup
from zeroaccel.comm.transport import GATHERS, HOPS, REDUCTIONS
from zeroaccel.config import Config
from zeroaccel.config.parallel import ParallelConfig
from zeroaccel.errors import ConfigError, UsageError, listed
from zeroaccel.optim.optimizer_kinds import OptimizerKind
from zeroaccel.setup.axis import Axis
from zeroaccel.setup.axis_estimate import AxisEstimate, EstimatedJob
from zeroaccel.setup.cut_check import Cut
from zeroaccel.setup.job import JobSpec
from zeroaccel.setup.optimizer_plan import OptimizerPlan
from zeroaccel.zero.build_units import refuse_split
from zeroaccel.zero.compiled import check_not_compiled
from zeroaccel.zero.from_config import EngineSettings
from zeroaccel.zero.layout import Split
from zeroaccel.zero.wrap_policy import is_mixture

_WHERE = "expert parallelism"
# What `use_experts_implementation` of transformers 5 sets on each module.
_INTERFACE = ("num_experts", "has_gate", "has_bias", "is_transposed", "_is_expert_parallel")
# Keys that have weights and gradients travel or lie otherwise than in one shard per rank: their second groups know
# nothing of ranks with other experts.
_PLAIN_COLLECTIVES = {
    "frozen_weights": None,
    "zero_quantized_weights": False,
    "zero_quantized_gradients": False,
    "zero_quantized_nontrainable_weights": False,
    "zero_hpz_partition_size": 1,
    "mics_shard_size": -1,
}


@dataclass(frozen=True)
class Experts:
    """The experts of one layer.

    Attributes:
        name: of the module, for messages.
        module: has parameters of the dims (E, ..).
        count: E.
        params: names of those.
    """

    name: str
    module: nn.Module
    count: int
    params: tuple[str, ...]


class ExpertAxis(Axis):
    """The `ep` axis: ranks with other experts of the same layers."""

    name: ClassVar[str] = "ep"
    refuses_compiled: ClassVar[str] = "a graph cannot contain the exchange of tokens (expert parallelism)"

    def __init__(self, group: RankGroup, same: RankGroup, topology: Topology) -> None:
        self._group, self._same, self._topology = group, same, topology
        self._experts: list[Experts] = []
        self._tokens: Collectives | None = None
        self._before: list[tuple[nn.Module, Any]] = []
        self._cut: ExpertCut | None = None

    @classmethod
    def join(cls, mesh: ParallelConfig, topology: Topology, job: JobSpec) -> ExpertAxis | None:
        if mesh.ep == 1:
            return None
        group, same = subgroup(topology, mesh.expert_groups), subgroup(topology, mesh.expert_holders)
        groups = {
            "experts": (group.gather_group, (*GATHERS, *HOPS)),
            "gathers of experts": (same.gather_group, GATHERS),
            "sums of experts": (same.reduce_group, REDUCTIONS),
        }
        connect(topology, groups)
        return cls(group, same, topology)

    @classmethod
    def estimate(cls, mesh: ParallelConfig) -> AxisEstimate | None:
        return ExpertEstimate(mesh.ep) if mesh.ep > 1 else None

    @property
    def splits(self) -> Mapping[int, Split]:
        return _splits(self._experts, self._group.size, self._group.rank)

    @property
    def cut(self) -> Cut | None:
        return self._cut

    def divide(self, model: nn.Module, others: Sequence[Axis]) -> None:
        """Finds the experts. Changes nothing of the model.

        Raises:
            UsageError: there are none, or none that can be divided; or the model is compiled.
        """
        check_not_compiled(model, self.refuses_compiled)
        self._experts = find_experts(model, self._group.size)

    def keep(self, modules: Iterable[nn.Module]) -> None:
        remaining = {id(module) for module in modules}
        self._experts = [one for one in self._experts if id(one.module) in remaining]

    def check(
        self, config: Config, settings: EngineSettings, optimizer: OptimizerPlan, names: Mapping[int, str]
    ) -> None:
        zero = config.zero_optimization
        for key, plain in _PLAIN_COLLECTIVES.items():
            if getattr(zero, key) != plain:
                raise ConfigError(
                    config.where(f"zero_optimization.{key}"),
                    expected=f"{plain} with expert parallelism",
                    got=getattr(zero, key),
                    fix="remove the key, or leave ep at 1",
                )
        if OptimizerKind.COUPLED in optimizer.group_kinds:
            raise UsageError(
                f"optimizer {type(optimizer.optimizer).__name__}",
                expected="one that updates elements by themselves, with expert parallelism",
                got="one whose rule sums over several parameters",
                fix="use AdamW, SGD or the like, or leave ep at 1",
            )
        splits = self.splits
        for param, index in optimizer.groups.items():
            if param in splits and optimizer.group_kinds[index] is OptimizerKind.PER_TENSOR:
                refuse_split(names[param])

    def facts(self) -> Mapping[str, object]:
        return {"size": self._group.size}

    def connect(self, collectives: Collectives) -> None:
        recorder = collectives.flight_recorder
        holders = Collectives(self._topology, self._same, recorder=recorder)
        holders.parts = Collectives(self._topology, self._group, recorder=recorder)
        holders.job, holders.peers = collectives.job, collectives.peers
        self._job = collectives.job
        # How many tokens go where differs between ranks.
        self._tokens = Collectives(self._topology, self._group, records_sizes=False, recorder=recorder)
        collectives.part_holders = holders
        collectives.observe("dp_shard", holders)
        collectives.observe(self.name, holders.parts)
        collectives.observe(self.name, self._tokens)

    def install(self, model: nn.Module) -> None:
        assert self._tokens is not None, "experts are divided after their ranks are connected"
        computed = [(one, one.module.forward) for one in self._experts]
        for one, compute in computed:
            self._before.append((one.module, vars(one.module).get("forward")))
            vars(one.module)["forward"] = partial(_dispatched, one, compute, self._tokens)
        self._cut = ExpertCut(computed, self._tokens, self._job)

    def undo(self) -> None:
        while self._before:
            module, forward = self._before.pop()
            if forward is None:
                vars(module).pop("forward", None)
            else:
                vars(module)["forward"] = forward


class ExpertCut(Cut):
    """Experts that ranks divide, for the check at the start.

    Whole, a module computes with the experts of all ranks, one layer at a time. Its gradients are those for a loss that
    weighs the elements of its output; as all ranks have the trial's tokens, divided experts have them `size` times.

    Args:
        computed: the experts of each layer, and the module's own forward.
        ranks: that divide them.
        job: all ranks.
    """

    whole = "all experts on each rank"
    by_tokens = False
    cure = "train it with ep=1"

    def __init__(
        self, computed: Sequence[tuple[Experts, Callable[..., Tensor]]], ranks: Collectives, job: Collectives
    ) -> None:
        self._computed, self._ranks, self._job = computed, ranks, job
        self._found: list[tuple[str, Tensor]] = []
        self.name, self.size, self.index = f"{_WHERE} (ep={ranks.world_size})", ranks.world_size, ranks.rank

    @contextmanager
    def computing(self, *, whole: bool) -> Iterator[None]:
        if whole:
            with agreed(self._job, "initialize: memory for all experts of a layer"):
                self._reserve()
        before = [vars(one.module)["forward"] for one, _ in self._computed]
        for (one, compute), divided in zip(self._computed, before, strict=True):
            forward = compute if whole else divided
            vars(one.module)["forward"] = partial(self._compare, one, forward, whole)
        try:
            yield
        finally:
            for (one, _), divided in zip(self._computed, before, strict=True):
                vars(one.module)["forward"] = divided

    def gradients(self) -> Iterable[tuple[str, Tensor]]:
        found, self._found = self._found, []
        return found

    def _reserve(self) -> None:
        """Fails where the experts of a layer and their gradients have no room, before ranks wait for each other."""
        layers = [[one.module.get_parameter(key) for key in one.params] for one, _ in self._computed]
        most = max((sum(part.numel() * part.element_size() for part in parts) for parts in layers), default=0)
        torch.empty(2 * self.size * most, dtype=torch.uint8, device=self._ranks.topology.device)

    def _compare(
        self,
        one: Experts,
        forward: Callable[..., Tensor],
        whole: bool,
        hidden_states: Tensor,
        top_k_index: Tensor,
        top_k_weights: Tensor,
    ) -> Tensor:
        """The module's output; its gradients are for `gradients`. (all ranks of the group)"""
        leaves = {"hidden states": hidden_states, "weights of the router": top_k_weights}
        leaves = {name: value.detach().requires_grad_() for name, value in leaves.items()}
        own: dict[str, Any] = {key: getattr(one.module, key) for key in one.params}
        used = {key: (self._join(part) if whole else part.detach()).requires_grad_() for key, part in own.items()}
        shadowed = {key: vars(one.module)[key] for key in own if key in vars(one.module)}
        vars(one.module).update(used)
        try:
            with torch.enable_grad():
                hidden, weights = leaves.values()
                out = forward(hidden, top_k_index, weights)
                loss = torch.linspace(-1, 1, out.numel(), device=out.device).view_as(out).to(out.dtype)
                grads = torch.autograd.grad(out, [*leaves.values(), *used.values()], loss, materialize_grads=True)
        finally:
            for key in own:
                del vars(one.module)[key]
            vars(one.module).update(shadowed)
        inputs, params = grads[: len(leaves)], grads[len(leaves) :]
        self._found = list(zip(leaves, inputs, strict=True))
        for key, grad in zip(own, params, strict=True):
            self._found.append((key, grad.chunk(self.size)[self.index] if whole else grad / self.size))
        return out.detach()

    def _join(self, part: Tensor) -> Tensor:
        rows = part.new_empty(self.size * part.shape[0], *part.shape[1:]).detach()
        self._ranks.all_gather(rows.view(-1), part.detach().contiguous().view(-1), "join experts").wait()
        return rows


def _splits(found: Iterable[Experts], ranks: int, rank: int) -> dict[int, Split]:
    split = Split(dim=0, parts=ranks, index=rank, in_data_group=True)
    return {id(one.module.get_parameter(key)): split for one in found for key in one.params}


class ExpertEstimate(AxisEstimate):
    """Ranks with other experts, in an estimate: as many tokens go to each of them, which is their mean load."""

    name: ClassVar[str] = "ep"
    blocks_alike: ClassVar[bool] = True

    def share(self, job: EstimatedJob, model: nn.Module) -> None:
        ranks = job.ranks(self.size, self.name)
        for one in find_experts(model, self.size):
            one.module.forward = partial(_dispatched, one, one.module.forward, ranks, route=_even_route)

    def splits(self, model: nn.Module) -> Mapping[int, Split]:
        found = [_experts_of(name, module) for name, module in model.named_modules() if _has_interface(module)]
        return _splits(found, self.size, 0)


def expert_count(model: nn.Module) -> int:
    """The largest number of ranks that can divide the experts of a model's layers; 1 where it has none to divide."""
    counts: list[Any] = [module.num_experts for module in model.modules() if _has_interface(module)]
    return math.gcd(*counts) or 1


def find_experts(model: nn.Module, ranks: int) -> list[Experts]:
    """The experts of a model's layers, that so many ranks can divide.

    Raises:
        UsageError: there are none, or in a form that is not known, or ranks would have unequal numbers of them.
    """
    found = [_experts_of(name, module) for name, module in model.named_modules() if _has_interface(module)]
    if not found:
        raise _without_experts(model)
    for one in found:
        if one.count % ranks:
            raise UsageError(
                f"{_WHERE}: {one.name}",
                expected=f"a number of experts that is divisible by ep {ranks}",
                got=one.count,
                fix="choose an ep that divides it",
            )
    return found


def _has_interface(module: nn.Module) -> bool:
    return all(hasattr(module, key) for key in _INTERFACE)


def _experts_of(name: str, module: nn.Module) -> Experts:
    count: Any = module.num_experts
    of_all = tuple(key for key, param in module.named_parameters(recurse=False) if param.shape[:1] == (count,))
    others = [key for key, _ in module.named_parameters(recurse=False) if key not in of_all]
    where, kind = f"{_WHERE}: {name}", type(module).__name__
    if not of_all or others:
        raise UsageError(
            where,
            expected=f"parameters of all {count} experts, with dim 0 of that size",
            got=f"{listed(others) or 'none'} of {kind}",
            fix="leave ep at 1",
        )
    if name.endswith("base_layer") or hasattr(module, "parametrizations"):
        raise UsageError(
            where,
            expected="experts without adapters or parametrizations",
            got=f"adapters on {kind}",
            fix="leave ep at 1, or the experts out of target_parameters",
        )
    for key in of_all:
        if not module.get_parameter(key).is_floating_point():
            raise UsageError(
                f"{where}.{key}",
                expected="a floating-point dtype",
                got=module.get_parameter(key).dtype,
                fix="load the model without quantization, or leave ep at 1",
            )
    return Experts(name, module, int(count), of_all)


def _without_experts(model: nn.Module) -> UsageError:
    expected = "experts as modules of transformers 5 with (experts, ..) tensors: forward(hidden, choices, weights)"
    for name, module in model.named_modules():
        if is_mixture(name.rpartition(".")[2], module):
            return UsageError(
                f"{_WHERE}: {name}",
                expected=expected,
                got=f"{type(module).__name__} with {listed([key for key, _ in module.named_children()])}",
                fix="leave ep at 1: the experts are then sharded like all parameters",
            )
    return UsageError(_WHERE, expected=expected, got=f"no experts in {type(model).__name__}", fix="leave ep at 1")


# -- the way of the tokens


@dataclass(frozen=True)
class _Route:
    """Where the chosen tokens of one forward go.

    Attributes:
        order: (sum of `sent`,) places among the T K choices, by expert.
        sent, received: rows to and from each rank.
        ids: (sum of `received`,) which of its own experts each row that arrives is for: ranks one after another, and of
            each its tokens by expert.
    """

    order: Tensor
    sent: list[int]
    received: list[int]
    ids: Tensor


def _route(chosen: Tensor, experts: int, ranks: Collectives) -> _Route:
    """(all ranks of the group)"""
    own = experts // ranks.world_size
    counts = torch.bincount(chosen, minlength=experts)[:experts].view(ranks.world_size, own)
    incoming = torch.empty_like(counts)
    ranks.all_to_all(incoming, counts, "count tokens").wait()
    sent, received = counts.sum(1).tolist(), incoming.sum(1).tolist()
    order = chosen.argsort(stable=True)[: sum(sent)]
    ids = torch.arange(own, device=chosen.device).repeat(ranks.world_size).repeat_interleave(incoming.view(-1))
    return _Route(order, sent, received, ids)


def _even_route(chosen: Tensor, experts: int, ranks: Collectives) -> _Route:
    """As many tokens to each rank, for tensors without values."""
    size, rows = ranks.world_size, chosen.numel()
    counts = chosen.new_empty(size, experts // size)
    ranks.all_to_all(torch.empty_like(counts), counts, "count tokens").wait()
    even = [rows * (rank + 1) // size - rows * rank // size for rank in range(size)]
    return _Route(chosen.argsort(stable=True), even, even, chosen.new_empty(rows))


def _dispatched(
    experts: Experts,
    compute: Callable[..., Tensor],
    ranks: Collectives,
    hidden_states: Tensor,
    top_k_index: Tensor,
    top_k_weights: Tensor,
    *,
    route: Callable[[Tensor, int, Collectives], _Route] = _route,
) -> Tensor:
    """The forward of experts of which this rank has some. (all ranks of the group)

    Args:
        compute: the module's own forward.
        hidden_states: (T, H).
        top_k_index, top_k_weights: (T, K); an index that is no expert counts nothing.
    """
    # The names are those that the interface has, as models may pass them.
    hidden, choices, weights = hidden_states, top_k_index, top_k_weights
    _check_routing(experts.name, hidden, choices, weights)
    chosen = choices.reshape(-1)
    found = route(chosen, experts.count, ranks)
    order, sent, received, ids = found.order, found.sent, found.received, found.ids
    rows, scales = hidden[order // choices.shape[-1]], weights.reshape(-1)[order]
    rows, scales = _Send.apply(rows, scales, ranks, sent, received)  # type: ignore[no-untyped-call]
    idle = not len(rows)
    if idle:
        rows, scales = torch.cat([rows, rows.new_zeros(1, rows.shape[1])]), torch.cat([scales, scales.new_zeros(1)])
        ids = ids.new_zeros(1)
    experts.module.num_experts = experts.count // ranks.world_size  # type: ignore[assignment]
    try:
        out = compute(rows, ids.unsqueeze(1).to(choices.dtype), scales.unsqueeze(1))
    finally:
        experts.module.num_experts = experts.count  # type: ignore[assignment]
    returned: Tensor = _Return.apply(out[:0] if idle else out, ranks, sent, received)  # type: ignore[no-untyped-call]
    placed = returned.new_zeros(chosen.numel(), returned.shape[1]).index_copy(0, order, returned)
    return placed.view(*choices.shape, -1).sum(1).to(hidden.dtype)


def _check_routing(name: str, hidden: Tensor, choices: Tensor, weights: Tensor) -> None:
    """Refuses a router that gives something else than K experts and K weights for each token."""
    shapes = [tuple(one.shape) for one in (hidden, choices, weights)]
    is_known = shapes[1] == shapes[2] and hidden.dim() == choices.dim() == 2 and len(hidden) == len(choices)
    if not is_known or choices.dtype not in (torch.int64, torch.int32):
        raise UsageError(
            f"{_WHERE}: {name}",
            expected="a router that gives each of T tokens (T, H) the numbers of K experts (T, K) and K weights (T, K)",
            got=f"{shapes[0]}, {choices.dtype} {shapes[1]}, {shapes[2]}",
            fix="leave ep at 1",
        )


def _exchanged(rows: Tensor, ranks: Collectives, received: Sequence[int], sent: Sequence[int], label: str) -> Tensor:
    out = rows.new_empty(sum(received), *rows.shape[1:])
    ranks.exchange_rows(out, rows.contiguous(), received, sent, label).wait()
    return out


def _paired(
    rows: Tensor, scales: Tensor, ranks: Collectives, received: Sequence[int], sent: Sequence[int], label: str
) -> tuple[Tensor, Tensor]:
    """Exchanges rows, (n, H), and numbers of other dtype, (n,), in one message for each rank."""
    bytes_of = [tensor.contiguous().view(torch.uint8) for tensor in (rows, scales.unsqueeze(1))]
    arrived = _exchanged(torch.cat(bytes_of, 1), ranks, received, sent, label)
    parts = arrived.split([part.shape[1] for part in bytes_of], 1)
    return parts[0].contiguous().view(rows.dtype), parts[1].contiguous().view(scales.dtype).squeeze(1)


class _Send(torch.autograd.Function):
    """Rows and weights to the ranks with their experts. One node, so that its backward is one exchange, too."""

    @staticmethod
    def forward(
        ctx: Any, rows: Tensor, scales: Tensor, ranks: Collectives, sent: list[int], received: list[int]
    ) -> tuple[Tensor, Tensor]:
        ctx.of = ranks, sent, received
        return _paired(rows, scales, ranks, received, sent, "send tokens to experts")

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        ranks, sent, received = ctx.of
        rows, scales = grads
        return *_paired(rows, scales, ranks, sent, received, "return gradients of tokens"), None, None, None


class _Return(torch.autograd.Function):
    """The experts' rows to the ranks that the tokens came from."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, ranks: Collectives, sent: list[int], received: list[int]) -> Tensor:
        ctx.of = ranks, sent, received
        return _exchanged(rows, ranks, sent, received, "return outputs of experts")

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        ranks, sent, received = ctx.of
        return _exchanged(grads[0], ranks, received, sent, "send gradients to experts"), None, None, None
