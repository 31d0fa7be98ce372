"""Expert parallelism: the ranks that divide the experts of each layer. `expert_dispatch.py` exchanges the tokens.

An expert's gradient is already the sum over the tokens of all P ranks. Its reduction over the ranks that hold it then
has all terms of plain data parallelism, and the same divisor, the number of data-parallel ranks, gives the mean.

**Which experts**: transformers modules with forward(hidden, choices, weights) and one tensor per projection of all
experts, (E, ..), the interface of `use_experts_implementation`; its implementations ("eager", "grouped_mm",
"batched_mm") run unchanged on the rows that arrive. Also the experts of Llama 4, which take all tokens.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
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
from zeroaccel.errors import UsageError, listed
from zeroaccel.parallel.expert_dispatch import WHERE, Experts, divided_forwards, even_route
from zeroaccel.setup.axis import Axis, require_plain, require_uncoupled
from zeroaccel.setup.axis_estimate import AxisEstimate, EstimatedJob
from zeroaccel.setup.cut_check import Cut
from zeroaccel.setup.job import JobSpec
from zeroaccel.setup.optimizer_plan import OptimizerPlan
from zeroaccel.zero.compiled import check_not_compiled
from zeroaccel.zero.from_config import EngineSettings
from zeroaccel.zero.layout import Split
from zeroaccel.zero.wrap_policy import has_expert_interface, is_mixture, scored_experts

_WRAPPED = ".base_layer"  # PEFT's name for the module that an adapter wraps
# Keys whose collectives or shards use further process groups, which are not divided by expert.
_PLAIN_COLLECTIVES = {
    "zero_quantized_weights": False,
    "zero_quantized_gradients": False,
    "zero_quantized_nontrainable_weights": False,
    "zero_hpz_partition_size": 1,
    "mics_shard_size": -1,
}


class ExpertAxis(Axis):
    """The `ep` axis: the ranks that hold different experts of the same layers."""

    name: ClassVar[str] = "ep"
    refuses_compiled: ClassVar[str] = "a graph cannot contain the exchange of tokens (expert parallelism)"

    def __init__(self, group: RankGroup, same: RankGroup, topology: Topology, buffer_nbytes: int) -> None:
        self._group, self._same, self._topology, self._buffer_nbytes = group, same, topology, buffer_nbytes
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
        return cls(group, same, topology, mesh.ep_buffer_nbytes)

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
        """Finds the experts. Does not change the model.

        Raises:
            UsageError: the model has no experts that the ranks can divide, or it is compiled.
        """
        check_not_compiled(model, self.refuses_compiled)
        self._experts = find_experts(model, self._group.size)

    def keep(self, modules: Iterable[nn.Module]) -> None:
        remaining = {id(module) for module in modules}
        self._experts = [layer for layer in self._experts if id(layer.module) in remaining]

    def check(
        self, config: Config, settings: EngineSettings, optimizer: OptimizerPlan, names: Mapping[int, str]
    ) -> None:
        require_plain(config, _PLAIN_COLLECTIVES, "ep", "expert")
        require_uncoupled(optimizer, self.splits, names, "ep", "expert")

    def facts(self) -> Mapping[str, object]:
        return {"size": self._group.size, "buffer_nbytes": self._buffer_nbytes}

    def connect(self, collectives: Collectives) -> None:
        recorder = collectives.flight_recorder
        holders = Collectives(self._topology, self._same, recorder=recorder)
        holders.parts = Collectives(self._topology, self._group, recorder=recorder)
        holders.job, holders.peers = collectives.job, collectives.peers
        self._job = collectives.job
        # The numbers of tokens differ between ranks.
        self._tokens = Collectives(self._topology, self._group, records_sizes=False, recorder=recorder)
        collectives.part_holders = holders
        collectives.observe("dp_shard", holders)
        collectives.observe(self.name, holders.parts)
        collectives.observe(self.name, self._tokens)

    def install(self, model: nn.Module) -> None:
        assert self._tokens is not None, "call connect before install"
        computed = [(layer, layer.module.forward) for layer in self._experts]
        for layer in self._experts:
            layer.share(self._group.size)
            for module, forward in divided_forwards(layer, self._tokens, self._buffer_nbytes).items():
                self._before.append((module, vars(module).get("forward")))
                vars(module)["forward"] = forward
        self._cut = ExpertCut(computed, self._tokens, self._job)

    def undo(self) -> None:
        for layer in self._experts:
            layer.share(1)
        while self._before:
            module, forward = self._before.pop()
            if forward is None:
                vars(module).pop("forward", None)
            else:
                vars(module)["forward"] = forward


_LEAVES = {"hidden_states": "hidden states", "top_k_weights": "weights of the router"}


class ExpertCut(Cut):
    """Divided experts, for the check at the start of training.

    For the reference, a module computes with the experts of all ranks, one layer at a time. Gradients are those of a
    loss that weighs the output's elements; all ranks have the trial's tokens, so divided experts get them `size` times.

    Args:
        computed: experts of each layer, with the module's own forward.
        ranks: ranks that divide the experts.
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
        self._inside = {id(module) for layer, _ in computed for module in layer.module.modules()}
        self._inside -= {id(layer.module) for layer, _ in computed}
        self.name, self.size, self.index = f"{WHERE} (ep={ranks.world_size})", ranks.world_size, ranks.rank

    @contextmanager
    def computing(self, *, whole: bool) -> Iterator[None]:
        if whole:
            with agreed(self._job, "initialize: memory for all experts of a layer"):
                self._reserve()
        before = [vars(layer.module)["forward"] for layer, _ in self._computed]
        for (layer, compute), divided in zip(self._computed, before, strict=True):
            forward = compute if whole else divided
            vars(layer.module)["forward"] = partial(self._compare, layer, forward, whole)
        try:
            yield
        finally:
            for (layer, _), divided in zip(self._computed, before, strict=True):
                vars(layer.module)["forward"] = divided

    def is_split(self, module: nn.Module) -> bool:
        # An activation within experts has different rows, whose number may match by chance.
        return id(module) in self._inside

    def gradients(self) -> Iterable[tuple[str, Tensor]]:
        found, self._found = self._found, []
        return found

    def _reserve(self) -> None:
        """Raises if memory is too small for a layer's experts and gradients, before ranks wait for each other."""
        layers = [[layer.module.get_parameter(key) for key in layer.params] for layer, _ in self._computed]
        most = max((sum(param.numel() * param.element_size() for param in parts) for parts in layers), default=0)
        torch.empty(2 * self.size * most, dtype=torch.uint8, device=self._ranks.topology.device)

    def _compare(
        self, layer: Experts, forward: Callable[..., Tensor], whole: bool, *args: Tensor, **named: Tensor
    ) -> Tensor:
        """Returns the module's output, and keeps its gradients for `gradients`. (all ranks of the group)"""
        inputs = dict(zip(layer.inputs, args, strict=False)) | named
        leaves = {key: inputs[key].detach().requires_grad_() for key in layer.inputs if key in _LEAVES}
        params: dict[str, Any] = {key: getattr(layer.module, key) for key in layer.params}
        used = {key: (self._join(param) if whole else param.detach()).requires_grad_() for key, param in params.items()}
        with layer.using(used), torch.enable_grad():
            out = forward(*((inputs | leaves)[key] for key in layer.inputs))
            loss = torch.linspace(-1, 1, out.numel(), device=out.device).view_as(out).to(out.dtype)
            grads = torch.autograd.grad(out, [*leaves.values(), *used.values()], loss, materialize_grads=True)
        self._found = [(_LEAVES[key], grad) for key, grad in zip(leaves, grads, strict=False)]
        for key, grad in zip(params, grads[len(leaves) :], strict=True):
            self._found.append((key, grad.chunk(self.size)[self.index] if whole else grad / self.size))
        return out.detach()

    def _join(self, rows: Tensor) -> Tensor:
        joined = rows.new_empty(self.size * rows.shape[0], *rows.shape[1:]).detach()
        self._ranks.all_gather(joined.view(-1), rows.detach().contiguous().view(-1), "join experts").wait()
        return joined


def _splits(found: Iterable[Experts], ranks: int, rank: int) -> dict[int, Split]:
    split = Split(dim=0, parts=ranks, index=rank, in_data_group=True)
    splits = {id(item.module.get_parameter(key)): split for item in found for key in item.params}
    for adapter in (adapter for item in found for adapter in item.adapters):
        # (r E, in), expert by expert, and (out, r E), r blocks with one column for each expert.
        splits |= {id(layer.weight): split for layer in adapter.lora_A.values()}
        splits |= {id(layer.weight): replace(split, dim=1, blocks=adapter.r[n]) for n, layer in adapter.lora_B.items()}
    return splits


class ExpertEstimate(AxisEstimate):
    """Estimates experts on `ep` ranks, with an equal number of tokens for each rank, its mean load."""

    name: ClassVar[str] = "ep"
    blocks_alike: ClassVar[bool] = True

    def share(self, job: EstimatedJob, model: nn.Module) -> None:
        ranks = job.ranks(self.size, self.name)
        for layer in find_experts(model, self.size):
            layer.share(self.size)
            for module, forward in divided_forwards(layer, ranks, 0, even_route).items():
                module.forward = forward

    def splits(self, model: nn.Module) -> Mapping[int, Split]:
        return _splits(map(_experts_of, _forms(model)), self.size, 0)


def expert_count(model: nn.Module) -> int:
    """Returns the largest number of ranks that can divide the experts of each layer; 1 without such experts."""
    return math.gcd(*(int(form.module.num_experts) for form in _forms(model))) or 1  # type: ignore[arg-type]


def find_experts(model: nn.Module, ranks: int) -> list[Experts]:
    """Returns the experts of a model's layers, if `ranks` ranks can divide them.

    Raises:
        UsageError: there are no experts, their form is unknown, or ranks would have unequal numbers of them.
    """
    found = [_experts_of(form) for form in _forms(model)]
    if not found:
        raise _without_experts(model)
    for layer in found:
        if layer.count < 1 or layer.count % ranks:
            raise UsageError(
                f"{WHERE}: {layer.name}",
                expected=f"a number of experts that is divisible by ep {ranks}",
                got=layer.count,
                fix="choose an ep that divides this number",
            )
        _check_adapters(layer, ranks)
    return found


@dataclass(frozen=True)
class _FoundExperts:
    """Candidate for divided experts: a module with the interface, or one that takes all tokens, with its router."""

    name: str
    module: nn.Module
    adapters: tuple[nn.Module, ...]
    router: nn.Module | None = None


def _forms(model: nn.Module) -> Iterator[_FoundExperts]:
    modules = dict(model.named_modules())
    for name, module in modules.items():
        if has_expert_interface(module):
            around = []
            while name.endswith(_WRAPPED):
                name = name.removesuffix(_WRAPPED)
                around.append(modules[name])
            yield _FoundExperts(name, module, tuple(reversed(around)))
        elif (found := scored_experts(module)) is not None:
            router, (*outer, experts) = found
            yield _FoundExperts(f"{name}.experts", experts, tuple(outer), router)


def _experts_of(form: _FoundExperts) -> Experts:
    module = form.module
    count: Any = module.num_experts
    of_all = tuple(key for key, param in module.named_parameters(recurse=False) if param.shape[:1] == (count,))
    others = [key for key, _ in module.named_parameters(recurse=False) if key not in of_all]
    where, kind = f"{WHERE}: {form.name}", type(module).__name__
    if not of_all or others:
        raise UsageError(
            where,
            expected=f"only parameters of all {count} experts, with dim 0 of that size",
            got=f"{listed(others) or 'none'} of {kind}",
            fix="set ep to 1",
        )
    if hasattr(module, "parametrizations"):
        raise UsageError(where, expected="experts without parametrizations", got=f"some on {kind}", fix="set ep to 1")
    for key in of_all:
        if not module.get_parameter(key).is_floating_point():
            raise UsageError(
                f"{where}.{key}",
                expected="a floating-point dtype",
                got=module.get_parameter(key).dtype,
                fix="load the model without quantization, or set ep=1",
            )
    return Experts(form.name, module, int(count), of_all, form.router, form.adapters)


def _check_adapters(layer: Experts, ranks: int) -> None:
    for adapter in layer.adapters:
        where = f"{WHERE}: {layer.name}.{getattr(adapter, 'parameter_name', '')}".removesuffix(".")
        if getattr(adapter, "num_experts", None) != layer.count or not getattr(adapter, "lora_A", None):
            raise UsageError(
                where,
                expected="PEFT's LoRA by target_parameters on a tensor of three dims, or no adapter",
                got=type(adapter).__name__,
                fix="set ep=1, or remove this tensor from target_parameters",
            )
        if layer.count == ranks and getattr(layer.module, "is_transposed", False):
            raise UsageError(
                where,
                expected="at least two experts on each rank: PEFT treats one transposed expert as a linear layer",
                got=f"{layer.count} experts and ep {ranks}",
                fix=f"choose an ep below {ranks}, or remove this tensor from target_parameters",
            )


def _without_experts(model: nn.Module) -> UsageError:
    expected = "transformers 5 experts with (experts, ..) tensors and forward(hidden, choices, weights)"
    for name, module in model.named_modules():
        if is_mixture(name.rpartition(".")[2], module):
            return UsageError(
                f"{WHERE}: {name}",
                expected=expected,
                got=f"{type(module).__name__} with {listed([key for key, _ in module.named_children()])}",
                fix="set ep=1: ZeRO then shards the experts like all parameters",
            )
    return UsageError(WHERE, expected=expected, got=f"no experts in {type(model).__name__}", fix="set ep to 1")
