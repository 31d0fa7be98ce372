"""`TrainPlan`: every decision about a training, made before a tensor moves and compared between the ranks."""

from __future__ import annotations

import hashlib
import logging
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields, is_dataclass, replace
from itertools import zip_longest
from typing import Any

import torch
from torch import nn
from torch.utils.data import DataLoader

from zeroaccel.activations import Recomputation
from zeroaccel.comm.collectives import Collectives
from zeroaccel.comm.environment import check_own_variables
from zeroaccel.config import (
    BatchSizes,
    CommPlan,
    Config,
    Fact,
    Facts,
    ShardPlan,
    TierPlan,
    comm_plan,
    load_config,
    overlaps_communication,
    shard_plan,
    solve_batch,
    tier_plan,
)
from zeroaccel.config.document import Document
from zeroaccel.data.training_data import loader_of
from zeroaccel.errors import ConfigError, UsageError, listed
from zeroaccel.logs import log_note, log_once, logger, set_log_level
from zeroaccel.optim.rank_facts import require_same
from zeroaccel.setup.job import Compilation, JobSpec, compilation_of
from zeroaccel.setup.optimizer_plan import OptimizerPlan
from zeroaccel.setup.orders import ordered_config
from zeroaccel.setup.ranks import JobRanks
from zeroaccel.zero.build_units import Placement
from zeroaccel.zero.from_config import (
    DTYPES,
    EngineSettings,
    autocast_of,
    engine_settings_of,
    loss_scale_of,
    model_rules_of,
)
from zeroaccel.zero.model_check import check_dtypes
from zeroaccel.zero.module_names import plain_names
from zeroaccel.zero.precision import LossScale
from zeroaccel.zero.quantized_weights import attach_codes, refuse_codes_in_buffers
from zeroaccel.zero.storage.placement import OffloadRules
from zeroaccel.zero.tensor_subclasses import tensors_of
from zeroaccel.zero.wrap_policy import UnitSpec


@dataclass(frozen=True)
class ParameterFacts:
    """The properties of a parameter that ranks compare."""

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    requires_grad: bool
    group: int | None


@dataclass(frozen=True)
class TrainPlan:
    """A training that is ready to be built. `TrainPlan.of` makes it, `compare` checks it, `build` carries it out.

    Attributes:
        engine: settings of the engine: sharding, batch sizes, precision of inputs, limits.
        comm: layout of shards over the ranks, and quantization of transfers.
        tiers: storage of shards and optimizer states between uses.
        optimizer: optimizer, scheduler, and the ways in which they may be sharded.
        axes: for each axis, the facts that its ranks must agree on.
        parameters: parameters in this rank's part of the model.
        job, ranks, config: inputs of the plan.
        names: id(parameter) -> fqn.
        compilation: compilation of the model, or None.
        buffer_dtypes: dtypes of the model's buffers, by name.
        offload: rules that move shards and states to their tiers.
        loss_scale: loss scale for fp16.
        autocast: dtype of `torch_autocast`; None if it is disabled.
        units: parameters by unit.
        placement: dtype, device and storage of each parameter.
        unoptimized: trainable parameters in no param group.
        recomputation: blocks to recompute in backward, or None.
        loader: loader of the training data, or None.
    """

    engine: EngineSettings
    comm: CommPlan
    tiers: TierPlan
    optimizer: OptimizerPlan
    axes: Mapping[str, Mapping[str, object]]
    parameters: tuple[ParameterFacts, ...]
    job: JobSpec = field(metadata={"local": True})
    ranks: JobRanks = field(metadata={"local": True})
    config: Config = field(metadata={"local": True})
    names: Mapping[int, str] = field(metadata={"local": True})
    compilation: Compilation | None = field(metadata={"local": True})
    buffer_dtypes: Mapping[str, torch.dtype] = field(metadata={"local": True})
    offload: OffloadRules = field(metadata={"local": True})
    loss_scale: LossScale = field(metadata={"local": True})
    autocast: torch.dtype | None = field(metadata={"local": True})
    units: Sequence[UnitSpec] = field(metadata={"local": True})
    placement: Placement = field(metadata={"local": True})
    unoptimized: Sequence[nn.Parameter] = field(metadata={"local": True})
    recomputation: Recomputation | None = field(metadata={"local": True})
    loader: DataLoader[Any] | None = field(metadata={"local": True})

    @property
    def shards(self) -> ShardPlan:
        """The sharding of parameters, gradients and optimizer states."""
        return self.engine.plan

    @classmethod
    def of(cls, job: JobSpec, ranks: JobRanks) -> TrainPlan:
        """Makes the plan of a job. Builds optimizer, scheduler and loader; allocates nothing on the device.

        The axes divide the model here, so parameters in other ranks' parts are gone afterwards. No collectives.

        Raises:
            ConfigError: the config is wrong, or contradicts the arguments.
            UsageError: the model or the optimizer does not fit.
        """
        check_own_variables()
        config = _config(job, ranks)
        optimizer, params = ranks.divide(job)
        # The decisions of the config alone.
        device, samplers, sizes = ranks.topology.device, ranks.samplers.value, ranks.shard_size_of(config)
        has_streams = device.type != "cpu"
        shards, tiers = shard_plan(config), tier_plan(config)
        is_sized = config.train_batch_size or config.train_micro_batch_size_per_gpu
        trains = optimizer is not None or (config.optimizer is not None and config.optimizer.type is not None)
        batch = solve_batch(config, samplers) if trains or is_sized else BatchSizes(samplers, micro=1, accumulation=1)
        overlaps = overlaps_communication(config, has_streams=has_streams)
        comm = comm_plan(config, shards, ranks.world_size, sizes)
        compilation = job.compilation or compilation_of(config)
        # The decisions of config and model together.
        model = job.model
        check_dtypes(model, DTYPES[config.precision])
        if shards.params:
            refuse_codes_in_buffers(model)
        attach_codes(model)
        plain = plain_names(model)
        names = {id(param): plain(fqn) for fqn, param in model.named_parameters()}
        trained = OptimizerPlan.of(model, optimizer, params, job.lr_scheduler, job.optimizer_kind, config, names)
        trained.check(config, shards, tiers)
        groups = trained.groups
        splits = {key: split for axis in ranks.axes for key, split in axis.splits.items()}
        settings = engine_settings_of(
            config, shards, batch, ranks.world_size, samplers, job.loop, has_streams=has_streams, overlaps=overlaps
        )
        scale, autocast = loss_scale_of(config), autocast_of(config)
        tensors = model_rules_of(model, plain, config, shards, tiers, device, groups, trained.group_kinds, splits)
        plan = cls(
            engine=settings,
            comm=comm,
            tiers=tiers,
            optimizer=trained,
            axes={axis.name: axis.facts() for axis in ranks.axes},
            parameters=tuple(
                ParameterFacts(name, tuple(each.shape), each.dtype, each.requires_grad, groups.get(id(each)))
                for param in model.parameters()
                for name, each in tensors_of(names[id(param)], param)
            ),
            job=job,
            ranks=ranks,
            config=config,
            names=names,
            compilation=compilation,
            buffer_dtypes=tensors.buffer_dtypes,
            offload=OffloadRules.of(config, tiers),
            loss_scale=scale,
            autocast=autocast,
            units=tensors.units,
            placement=tensors.placement,
            unoptimized=[p for p in model.parameters() if p.requires_grad and id(p) not in groups],
            recomputation=Recomputation.of(model, config.activation_checkpointing),
            loader=loader_of(job.training_data, batch, ranks.sampler, samplers, job.collate_fn, config),
        )
        for axis in ranks.axes:
            axis.check(config, settings, trained, names)
        if trained.optimizer is not None and plan.unoptimized:
            logger.warning(
                "%d trainable parameters are in no param group of the optimizer, so they will not be updated: %s",
                len(plan.unoptimized),
                listed([names[id(param)] for param in plan.unoptimized], most=5),
            )
        return plan

    def compare(self) -> None:
        """Compares the plans of all ranks, field by field. (all ranks)

        An undetected difference would cause a hang in a later collective.

        Raises:
            UsageError: on every rank, if they differ; names the first differing field.
        """
        ranks = self.ranks.collectives
        # A digest first, because the parameters of all ranks together may be many. Settings before parameters, because
        # different settings usually cause different models.
        local = _Compared(dict(_leaves(self)), dict(self.optimizer.facts), self.ranks.part, self.parameters)
        common, parameters = (_digest(facts) for facts in ((local.settings, local.optimizer), local.parameters))
        of_ranks = set(ranks.gather_objects((common, local.place, parameters), "compare plans"))
        if len({facts for facts, _, _ in of_ranks}) == 1 and len(of_ranks) == len({place for _, place, _ in of_ranks}):
            return
        compared: Sequence[_Compared] = ranks.gather_objects(local, "compare plans in detail")
        _compare_fields(
            "settings", {rank: list(summary.settings.items()) for rank, summary in enumerate(compared)}, ranks
        )
        require_same("initialize", [summary.optimizer for summary in compared], ranks.named)
        for place in sorted({summary.place for summary in compared}):
            of_part = {rank: summary.parameters for rank, summary in enumerate(compared) if summary.place == place}
            _compare_fields("models", of_part, ranks)


@dataclass(frozen=True)
class _Compared:
    """The facts that one rank compares with the others."""

    settings: Mapping[str, object]
    optimizer: dict[str, str]
    place: int
    parameters: tuple[ParameterFacts, ...]


def _leaves(value: Any, path: str = "") -> Iterator[tuple[str, object]]:
    """Yields (dotted path, value) for each compared field of a plan, except facts of optimizer and parameters."""
    if isinstance(value, Mapping):
        for name, item in value.items():
            yield from _leaves(item, f"{path}.{name}")
    elif isinstance(value, OptimizerPlan):
        yield f"{path}.kind", value.declared_kind
    elif is_dataclass(value):
        for entry in fields(value):
            if not entry.metadata.get("local") and entry.name != "parameters":
                yield from _leaves(getattr(value, entry.name), f"{path}.{entry.name}" if path else entry.name)
    else:
        yield path, value


def _digest(facts: object) -> str:
    return hashlib.sha256(repr(facts).encode()).hexdigest()


def _compare_fields(kind: str, of_ranks: Mapping[int, Sequence[object]], collectives: Collectives) -> None:
    first = min(of_ranks)
    for rank, facts in of_ranks.items():
        for expected, got in zip_longest(of_ranks[first], facts):
            if expected != got:
                raise UsageError(
                    f"the ranks have different {kind}",
                    expected=f"{_words(expected)} as on {collectives.named([first])}",
                    got=f"{_words(got)} on {collectives.named([rank])}",
                    fix="build the same model, with the same config and optimizer, on every rank",
                )


def _words(fact: Any) -> str:
    if fact is None:
        return "nothing"
    if isinstance(fact, tuple):
        return f"{fact[0]}={fact[1]!r}"
    role = "frozen" if not fact.requires_grad else f"in param group {fact.group}"
    role = "in no param group" if fact.requires_grad and fact.group is None else role
    return f"{fact.name} {fact.shape} {fact.dtype} {role}"


# -- the parts of a plan


def _config(job: JobSpec, ranks: JobRanks) -> Config:
    facts = replace(
        job.facts,
        hidden_size=job.facts.hidden_size or facts_from_model(job.model).hidden_size,
        world_size=ranks.samplers,
        training=job.facts.training or job.optimizer is not None,
    )
    config = load_config(job.document, sources=job.sources or None, facts=facts, unknown_keys=job.unknown_keys)
    document = job.document
    is_text = isinstance(document, Document) and bool(document.places)
    trains = facts.training or config.optimizer is not None
    if trains and is_text and "gradient_clipping" not in config.model_fields_set:
        log_note(
            logging.WARNING,
            "gradient_clipping: not in the config, so only a call of clip_grad_norm_ clips gradients (DeepSpeed clips "
            "at norm 1.0 since 0.19.3); set it to a norm, or to 0 to clip nothing",
        )
    peer = config.checkpoint.peer
    if peer is not None and peer.enabled and not job.loop.resumes:
        raise ConfigError(
            f"{config.where('checkpoint.peer')}: a loop around an engine can resume only from its own checkpoints",
            fix="remove the section, or train with zeroaccel.Accelerator, or with transformers' Trainer under "
            "`zeroaccel launch --max_restarts N`",
        )
    if config.log_level is not None:
        set_log_level(config.log_level)
        for note in config.notes:
            log_once(logging.INFO, note)  # again: some were below the log level when the config was loaded
    return ordered_config(config)


def facts_from_model(model: nn.Module) -> Facts:
    """Returns the hidden size of a model, and its source.

    The sources, in order: `config.hidden_size`, the largest of `config.hidden_sizes`, the same two of the text model's
    config (`text_config`, `get_text_config()`), the most common last dimension of the model's 2-D weights. Without any
    of these the result has no hidden size.
    """
    # The model's config comes first. The most common width of its weights is a guess, and its source says so in the
    # provenance of every value derived from it.
    for name, config in _configs(model):
        size, sizes = _read(config, "hidden_size"), _read(config, "hidden_sizes")
        if _is_size(size):
            return Facts(hidden_size=Fact(size, f"{name}.hidden_size"))
        if isinstance(sizes, (list, tuple)) and sizes and all(map(_is_size, sizes)):
            return Facts(hidden_size=Fact(max(sizes), f"max({name}.hidden_sizes)"))
    widths = Counter(param.shape[-1] for param in model.parameters() if param.dim() == 2 and param.shape[-1] > 0)
    if not widths:
        return Facts()
    width, count = max(widths.items(), key=lambda item: (item[1], item[0]))
    why = f"the last dimension of {count} of the model's {widths.total()} 2-D weights, as its config has no hidden size"
    return Facts(hidden_size=Fact(width, why))


def _configs(model: nn.Module) -> Iterator[tuple[str, Any]]:
    """Yields the model's config and that of its text model, each with the expression that leads to it."""
    config = getattr(model, "config", None)
    if config is None:
        return
    yield "model.config", config
    nested = _read(config, "text_config")
    if nested is not None:
        yield "model.config.text_config", nested
    find = getattr(config, "get_text_config", None)
    if callable(find):
        try:
            yield "model.config.get_text_config()", find()
        except ValueError:  # there are several text models, and the config does not say which one to use
            return


def _read(config: Any, name: str) -> Any:
    return config.get(name) if isinstance(config, Mapping) else getattr(config, name, None)


def _is_size(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value > 0
