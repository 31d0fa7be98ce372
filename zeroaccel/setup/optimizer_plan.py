"""`OptimizerPlan`: the optimizer and the scheduler of a training, and the ways to shard the optimizer."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import ReduceLROnPlateau

from zeroaccel.config import Config, ShardPlan, TierPlan
from zeroaccel.errors import ConfigError, UsageError, listed
from zeroaccel.logs import logger
from zeroaccel.ops.coupled import CoupledOptimizer
from zeroaccel.optim.lr_schedules import build_scheduler
from zeroaccel.optim.optimizer_factory import build_optimizer
from zeroaccel.optim.optimizer_kinds import OptimizerKind, OptimizerKinds, check_steppable, classify
from zeroaccel.optim.rank_facts import training_facts
from zeroaccel.zero.from_config import addressed


@dataclass(frozen=True)
class OptimizerPlan:
    """The optimizer of the parameters, with its scheduler.

    Attributes:
        optimizer: None for inference.
        scheduler: None for a constant learning rate.
        kinds: how each param group may be sharded; None for inference.
        declared_kind: kind from an argument or the config; None if the class decides.
        groups: id(parameter) -> index of its param group.
        facts: settings of optimizer and scheduler, for the ranks to compare.
    """

    optimizer: Optimizer | None
    scheduler: Any
    kinds: OptimizerKinds | None
    declared_kind: OptimizerKind | str | None
    groups: Mapping[int, int]
    facts: Mapping[str, str] = field(default_factory=dict)

    @classmethod
    def of(
        cls,
        model: nn.Module,
        optimizer: Optimizer | Callable[[list[nn.Parameter]], Optimizer] | None,
        params: Iterable[Any] | None,
        scheduler: Any,
        kind: OptimizerKind | str | None,
        config: Config,
        names: Mapping[int, str],
    ) -> OptimizerPlan:
        """Builds the objects that the config names, and takes those that the caller passed.

        Args:
            kind: kind from an argument; takes precedence over the config's.
            names: id(parameter) -> fqn.

        Raises:
            ConfigError, UsageError: config and arguments both name one, or it does not fit the model or the config.
        """
        built = _optimizer(model, optimizer, params, config, names)
        groups = {} if built is None else _group_index(built.param_groups, names)
        if built is not None:
            _require_trainable(built, model, names)
        schedule = _scheduler(scheduler, config, built)
        declared = config.optimizer.kind if kind is None and config.optimizer is not None else kind
        kinds = None if built is None else _classified(built, declared)
        return cls(built, schedule, kinds, declared, groups, training_facts(built, schedule))

    @property
    def group_kinds(self) -> tuple[OptimizerKind, ...]:
        """The kind of each param group; empty for inference."""
        return () if self.kinds is None else tuple(self.kinds.groups)

    def check(self, config: Config, shards: ShardPlan, tiers: TierPlan) -> None:
        """Refuses a config that is incompatible with sharding the optimizer."""
        if self.optimizer is None or self.kinds is None:
            return
        if OptimizerKind.PER_TENSOR in self.group_kinds and shards.params:
            _refuse_codes(config, type(self.optimizer).__name__, self.kinds.reason)
        if OptimizerKind.COUPLED in self.group_kinds:
            _check_coupled(self.optimizer, self.kinds.reason, config, shards, tiers)


def _require_trainable(optimizer: Optimizer, model: nn.Module, names: Mapping[int, str]) -> None:
    """Refuses an optimizer that has nothing to train, whose first step would otherwise lack a backward."""
    params = [param for group in optimizer.param_groups for param in group["params"]]
    if any(param.requires_grad for param in params):
        return
    trainable = [names[id(param)] for param in model.parameters() if param.requires_grad]
    fix = "pass the parameters that train, such as those of adapters, or no optimizer for an evaluation"
    if trainable:
        fix = f"pass parameters that train; the model has {len(trainable)}: {listed(trainable, most=3)}"
    elif params:
        fix = f"call requires_grad_(True) on parameters that train before this call; {fix}"
    raise UsageError(
        "optimizer.param_groups",
        expected="a parameter with requires_grad=True",
        got=f"{len(params)} parameters, all frozen" if params else "no parameters",
        fix=fix,
    )


def _classified(optimizer: Optimizer, declared: OptimizerKind | str | None) -> OptimizerKinds:
    check_steppable(optimizer)
    return classify(optimizer, declared)


def _refuse_codes(config: Config, optimizer: str, reason: str) -> None:
    # Codes need shards of equal size; the owner layout of full tensors has shards of different sizes.
    for key in ("zero_quantized_weights", "zero_quantized_gradients"):
        if getattr(config.zero_optimization, key):
            raise ConfigError(
                config.where(f"zero_optimization.{key}"),
                expected=f"false with optimizer {optimizer}, which updates whole tensors: {reason}",
                got=True,
                fix="set it to false; quantization needs shards of equal size, and whole tensors differ in size",
            )


def _check_coupled(optimizer: Optimizer, reason: str, config: Config, shards: ShardPlan, tiers: TierPlan) -> None:
    name = type(optimizer).__name__
    if shards.optimizer and not isinstance(optimizer, CoupledOptimizer):
        raise ConfigError(
            f"optimizer {name} at stage {config.zero_optimization.stage}: {reason}",
            expected="an optimizer that can update a part of the parameters",
            fix="use stage 0, where every rank has everything; or give the class a use_reductions() method "
            "(zeroaccel.CoupledOptimizer), so that its sums cover all shards",
        )
    # A coupled rule reads all its states at once, so none may be swapped out or split into residuals.
    needs_memory = {
        "data_types.master_weights": config.data_types.master_weights == "residual",
        "zero_optimization.offload_param.device": tiers.param == "nvme",
        "zero_optimization.offload_optimizer.device": tiers.optimizer == "nvme",
    }
    for key, is_wrong in needs_memory.items():
        if is_wrong:
            raise ConfigError(
                config.where(key),
                expected=f"states in memory with optimizer {name}, which updates all parameters at once: {reason}",
                got='"residual"' if key.startswith("data") else '"nvme"',
                fix='use "fp32" and "cpu", or another optimizer',
            )
    if tiers.keeps_share:
        key = "ratio" if tiers.host_share < 1.0 else "device_budget"
        raise ConfigError(
            f"{config.where(f'zero_optimization.offload_optimizer.{key}')}: optimizer {name} updates all parameters at "
            f"once: {reason}",
            expected="all masters in one memory",
            fix="remove the key, or use an elementwise optimizer, such as AdamW",
        )


def _optimizer(
    model: nn.Module,
    source: Optimizer | Callable[[list[nn.Parameter]], Optimizer] | None,
    params: Iterable[Any] | None,
    config: Config,
    names: Mapping[int, str],
) -> Optimizer | None:
    """Returns the optimizer of the argument or of the config's section; None for inference."""
    section = config.optimizer
    named = section is not None and section.type is not None
    if config.bf16.bf16_optimizer_states and (source is not None or not named):
        raise ConfigError(
            config.where("bf16.bf16_optimizer_states"),
            expected="an optimizer section with Adam, AdamW, Lion or Adagrad, whose states the key sets",
            got="an optimizer passed to initialize()" if source is not None else "none",
            fix="name the optimizer in the config, or remove the key",
        )
    if source is not None and named:
        raise _named_twice(config, "optimizer")
    if source is not None:
        made = source if isinstance(source, Optimizer) else source([p for p in model.parameters() if p.requires_grad])
        if not isinstance(made, Optimizer):
            raise UsageError("initialize(optimizer)", expected="a torch.optim.Optimizer", got=type(made).__name__)
        return made
    if section is None or section.type is None:
        return None
    groups = _read(params if params is not None else (p for p in model.parameters() if p.requires_grad), names)
    arguments = dict(section.params)
    if config.bf16.bf16_optimizer_states:
        arguments.setdefault("moments_dtype", "bf16")
    with addressed(config):
        return build_optimizer(section.type, arguments, groups, model)


def _named_twice(config: Config, section: str) -> ConfigError:
    return ConfigError(
        config.where(section),
        expected=f"one {section}",
        got="one in the config and one passed to initialize()",
        fix="remove the section or the argument",
    )


def _group_index(groups: Sequence[Mapping[str, Any]], names: Mapping[int, str]) -> dict[int, int]:
    """Maps id(parameter) to the index of its param group.

    Args:
        names: id(parameter) -> fqn, for all of the model's parameters.

    Raises:
        ConfigError: a parameter is in two groups.
        UsageError: a parameter does not belong to the model.
    """
    index_of: dict[int, int] = {}
    for index, group in enumerate(groups):
        for position, param in enumerate(group["params"]):
            if id(param) not in names:
                raise UsageError(
                    f"optimizer.param_groups[{index}]['params'][{position}]",
                    expected="a parameter of the model that is prepared with it",
                    got=f"a tensor of shape {tuple(param.shape)}",
                    fix="create the optimizer from the same model object; freeze a module that only the loss reads",
                )
            if id(param) in index_of:
                raise ConfigError(
                    f"parameter {names[id(param)]}",
                    expected="to be in one param group",
                    got=f"groups {index_of[id(param)]} and {index}",
                    fix="remove it from one of them",
                )
            index_of[id(param)] = index
    return index_of


def _read(params: Iterable[Any], names: Mapping[int, str]) -> list[Any]:
    """Returns parameters or param groups as lists; checks them here, because torch's own errors name no parameter."""
    groups = list(params)
    plain = []
    for group in (item for item in groups if isinstance(item, dict)):
        members = group["params"]
        group["params"] = members = [members] if isinstance(members, torch.Tensor) else list(members)
        plain.append({"params": [member[1] if isinstance(member, tuple) else member for member in members]})
    _group_index(plain, names)
    return groups


def _scheduler(source: Any, config: Config, optimizer: Optimizer | None) -> Any:
    section = config.scheduler
    if source is not None and section is not None:
        raise _named_twice(config, "scheduler")
    if optimizer is None:
        if source is not None:
            raise UsageError("initialize(lr_scheduler)", expected="an optimizer to schedule", got=None)
        if section is not None:  # a training config is used for evaluation
            logger.warning(
                "%s is ignored: this engine is for inference, and has no optimizer to schedule",
                config.where("scheduler"),
            )
        return None
    if section is not None:
        with addressed(config):
            return build_scheduler(section.type, dict(section.params), optimizer)
    is_scheduler = hasattr(source, "step") and not isinstance(source, type)
    scheduler = source if source is None or is_scheduler else source(optimizer)
    if isinstance(scheduler, ReduceLROnPlateau):
        raise UsageError(
            "initialize(lr_scheduler)",
            expected="a scheduler that the engine can step by itself",
            got="ReduceLROnPlateau, which needs a metric at each step",
            fix="leave it out, and step it in the training loop with a metric that is the same on every rank",
        )
    return scheduler
