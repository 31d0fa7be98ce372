"""Checks for contradictions between keys that are each valid by themselves.

The last step of `load`. A check names the keys that it reads, and is skipped if one of them is invalid, so that each
mistake appears once. The schema has the ranges of single keys, and `support` lists unavailable features.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator

from zeroaccel.config.diagnostics import KeyPath, Problem
from zeroaccel.config.schema import Config
from zeroaccel.config.schema_zero import OffloadOptimizer, OffloadParam
from zeroaccel.config.shard_plan import shard_plan, tier_plan

_HIGHEST_SCALE_POWER = 127
_ONE_BIT = {"onebitadam": "Adam", "onebitlamb": "Lamb", "zerooneadam": "Adam"}
_TO_HOST = {True: 'set device to "cpu" or "nvme"', False: "set zero_optimization.stage to 1, 2 or 3"}

_Found = Iterator[Problem]


_CHECKS: list[tuple[list[KeyPath], Callable[[Config], _Found]]] = []
"""Each check with the keys that it reads."""


def _check(*reads: str) -> Callable[[Callable[[Config], _Found]], Callable[[Config], _Found]]:
    """Registers a check with the keys that it reads."""

    def register(find: Callable[[Config], _Found]) -> Callable[[Config], _Found]:
        _CHECKS.append(([tuple(name.split(".")) for name in reads], find))
        return find

    return register


def contradictions(config: Config, invalid: Collection[KeyPath]) -> _Found:
    """Yields every contradiction among the keys of a config.

    Args:
        config: built from the keys that are valid by themselves.
        invalid: paths of the other keys, in the schema's names.
    """
    for reads, find in _CHECKS:
        if not any(_overlap(read, path) for read in reads for path in invalid):
            yield from find(config)


def _overlap(path: KeyPath, other: KeyPath) -> bool:
    """Returns True if one path equals the other or is a prefix of it."""
    shared = min(len(path), len(other))
    return path[:shared] == other[:shared]


def _both_enabled(config: Config) -> bool:
    return config.fp16.enabled and config.bf16.enabled


@_check("fp16.enabled", "bf16.enabled")
def _one_precision(config: Config) -> _Found:
    if _both_enabled(config):
        yield Problem(
            ("fp16", "enabled"),
            text="fp16 and bf16 are both enabled",
            fix="set one of fp16.enabled and bf16.enabled to false",
        )


@_check("fp16.enabled", "bf16.enabled", "data_types.param_dtype")
def _param_dtype(config: Config) -> _Found:
    dtype = config.data_types.param_dtype
    if dtype not in (None, config.precision) and not _both_enabled(config):
        yield Problem(
            ("data_types", "param_dtype"),
            expected=f'"{config.precision}", the enabled precision',
            got=dtype,
            fix="enable that precision instead, or remove the key",
        )


@_check("fp16.enabled", "bf16.enabled", "data_types.grad_accum_dtype")
def _grad_accum_dtype(config: Config) -> _Found:
    dtype = config.data_types.grad_accum_dtype
    if dtype not in (None, "fp32", config.precision) and not _both_enabled(config):
        choice = '"fp32"' if config.precision == "fp32" else f'"fp32" or "{config.precision}", the enabled precision'
        yield Problem(("data_types", "grad_accum_dtype"), expected=choice, got=dtype)


@_check("torch_autocast", "fp16.enabled", "bf16.enabled")
def _autocast_to_the_precision(config: Config) -> _Found:
    autocast = config.torch_autocast
    if autocast.enabled and autocast.dtype == "fp32":
        yield Problem(("torch_autocast", "dtype"), expected='"bfloat16" or "float16"', got=autocast.dtype)
    elif autocast.enabled and config.precision not in ("fp32", autocast.dtype) and not _both_enabled(config):
        yield Problem(
            ("torch_autocast", "dtype"),
            expected=f'"{config.precision}", the enabled precision of the parameters',
            got=autocast.dtype,
            fix=f"set {config.precision}.enabled to false, or the dtype to {config.precision}",
        )


@_check("torch_autocast.enabled", "zero_optimization.zero_quantized_weights")
def _autocast_without_codes(config: Config) -> _Found:
    if config.torch_autocast.enabled and config.zero_optimization.zero_quantized_weights:
        yield Problem(
            ("torch_autocast", "enabled"),
            text="weights cannot be gathered in quantized form under autocast",
            fix="set zero_quantized_weights to false, or enable bf16 instead of autocast",
        )


@_check("data_types.master_weights", "fp16.enabled", "bf16.enabled", "zero_optimization.stage")
def _residuals_are_of_bf16(config: Config) -> _Found:
    if config.data_types.master_weights == "fp32":
        return
    path = ("data_types", "master_weights")
    if config.precision != "bf16":
        text = f'"residual" stores the rounding error of bf16, but the precision is {config.precision}'
        yield Problem(path, text=text, fix='enable bf16, or set master_weights to "fp32"')
    elif not shard_plan(config).optimizer:
        text = '"residual" requires sharded masters, but zero_optimization.stage is 0'
        yield Problem(path, text=text, fix='set the stage to 1, 2 or 3, or master_weights to "fp32"')


@_check("fp16")
def _dynamic_loss_scale(config: Config) -> _Found:
    fp16 = config.fp16
    if not fp16.enabled or fp16.loss_scale != 0:
        return
    if fp16.loss_scale_window == 0:
        yield Problem(("fp16", "loss_scale_window"), expected="a number above 0 while fp16.loss_scale is 0", got=0)
    if fp16.initial_scale_power > _HIGHEST_SCALE_POWER:
        expected = f"at most {_HIGHEST_SCALE_POWER}, the largest exponent of fp32"
        yield Problem(("fp16", "initial_scale_power"), expected=expected, got=fp16.initial_scale_power)
        return
    highest = 2.0**fp16.initial_scale_power
    if not 0 < fp16.min_loss_scale <= highest:
        yield Problem(
            ("fp16", "min_loss_scale"),
            expected=f"above 0 and at most the initial scale 2**{fp16.initial_scale_power} = {highest:.0f}",
            got=fp16.min_loss_scale,
        )


@_check("zero_optimization.compute_grad_norm", "gradient_clipping")
def _clipping_needs_norm(config: Config) -> _Found:
    if not config.zero_optimization.compute_grad_norm and config.gradient_clipping > 0:
        yield Problem(
            ("zero_optimization", "compute_grad_norm"),
            text=f"gradient_clipping {config.gradient_clipping} requires the norm",
            fix="set compute_grad_norm to true or gradient_clipping to 0",
        )


@_check("zero_optimization.stage", "zero_optimization.offload_optimizer", "data_types.master_weights")
def _updates_on_the_host(config: Config) -> _Found:
    """Finds `update_during` without an update on the host."""
    offload = config.zero_optimization.offload_optimizer
    path: KeyPath = ("zero_optimization", "offload_optimizer", "update_during")
    if offload is None or offload.update_during in ("auto", "step"):
        return
    if tier_plan(config).optimizer == "device":
        where = 'offload_optimizer.device is "none"' if offload.device == "none" else "nothing is offloaded at stage 0"
        fix = _TO_HOST[offload.device == "none"]
        if offload.device != "none" and shard_plan(config).optimizer:
            where, fix = "offload_optimizer.ratio is 0: the device updates everything", "set ratio above 0"
        yield Problem(
            path,
            text=f'"{offload.update_during}" applies to updates on the host, but {where}',
            fix=f'{fix}, or update_during to "step"',
        )
    residual = config.data_types.master_weights == "residual"
    if offload.update_during == "backward" and (offload.device == "nvme" or residual):
        where = 'data_types.master_weights is "residual"' if residual else 'offload_optimizer.device is "nvme"'
        yield Problem(
            path,
            text=f'"backward" updates whole fp32 masters in memory, but {where}',
            fix='set the key to "auto"',
        )


@_check("zero_optimization.stage", "zero_optimization.offload_optimizer", "data_types.master_weights")
def _resident_share(config: Config) -> _Found:
    """Finds two sizes of the share of masters that stays on the device, and masters that cannot stay there."""
    offload, tiers = config.zero_optimization.offload_optimizer, tier_plan(config)
    if offload is None:
        return
    path: KeyPath = ("zero_optimization", "offload_optimizer", "device_budget")
    if offload.ratio < 1.0 and offload.device_budget:
        yield Problem(
            path,
            text=f"{offload.device_budget}, but ratio {offload.ratio} also says what stays on the device",
            fix="remove one of the two keys",
        )
    elif tiers.keeps_share and config.data_types.master_weights == "residual":
        yield Problem(
            path if tiers.device_budget else (*path[:-1], "ratio"),
            text='data_types.master_weights "residual": the host joins weights and residuals, so no share stays on the '
            "device",
            fix='remove the key, or set master_weights to "fp32"',
        )


@_check("zero_optimization.stage", "zero_optimization.offload_param", "zero_optimization.offload_optimizer")
def _nvme_needs_folder(config: Config) -> _Found:
    for name, offload in _in_files(config).items():
        if offload.nvme_path is None:
            yield Problem(
                ("zero_optimization", name, "nvme_path"),
                text='missing, and device is "nvme"',
                fix="set it to a folder on a local disk",
            )


def _in_files(config: Config) -> dict[str, OffloadParam | OffloadOptimizer]:
    """Returns the offload sections that store tensors in files, by name."""
    zero, tiers = config.zero_optimization, tier_plan(config)
    sections: dict[str, OffloadParam | OffloadOptimizer] = {}
    if zero.offload_param is not None and tiers.param == "nvme":
        sections["offload_param"] = zero.offload_param
    if zero.offload_optimizer is not None and tiers.optimizer == "nvme":
        sections["offload_optimizer"] = zero.offload_optimizer
    return sections


@_check(
    "aio.block_size",
    "zero_optimization.stage",
    "zero_optimization.offload_param",
    "zero_optimization.offload_optimizer",
)
def _blocks_are_made_of_pages(config: Config) -> _Found:
    if config.aio.block_size % 4096 and _in_files(config):
        yield Problem(("aio", "block_size"), expected="a multiple of 4096, for direct I/O", got=config.aio.block_size)


@_check(
    "zero_optimization.stage",
    "zero_optimization.zero_hpz_partition_size",
    "zero_optimization.zero_quantized_weights",
    "zero_optimization.zero_quantized_nontrainable_weights",
    "zero_optimization.zero_quantized_gradients",
    "zero_optimization.frozen_weights",
    "zero_optimization.mics_shard_size",
)
def _spread_needs_shards(config: Config) -> _Found:
    zero = config.zero_optimization
    sharded = shard_plan(config).params
    if zero.mics_shard_size > 0 and not sharded:
        yield Problem(
            ("zero_optimization", "mics_shard_size"),
            text=f"parameters are sharded at stage 3 only, and the stage is {zero.stage}",
            fix="set zero_optimization.stage to 3, or remove the key (docs/zeropp.md)",
        )
    if zero.zero_hpz_partition_size == 0:
        yield Problem(("zero_optimization", "zero_hpz_partition_size"), expected="a number above 0; 1 is off", got=0)
    if zero.mics_shard_size < 1 and zero.mics_shard_size != -1:
        yield Problem(
            ("zero_optimization", "mics_shard_size"),
            expected="a number above 0, or -1 for all ranks",
            got=zero.mics_shard_size,
        )
    if zero.zero_quantized_nontrainable_weights and zero.frozen_weights not in (None, "int8"):
        yield Problem(
            ("zero_optimization", "zero_quantized_nontrainable_weights"),
            text=f'frozen_weights stores frozen weights as "{zero.frozen_weights}", but this key as int8',
            fix="remove one of the two keys",
        )
    if sharded and zero.zero_quantized_gradients and zero.mics_shard_size > 0:
        yield Problem(
            ("zero_optimization", "zero_quantized_gradients"),
            text="gradient sums across replicas (mics_shard_size) cannot be quantized",
            fix="remove one; zero_hpz_partition_size keeps the gathers of backward inside a node (docs/zeropp.md)",
        )


@_check("optimizer")
def _an_optimizer_has_a_type(config: Config) -> _Found:
    section = config.optimizer
    if section is not None and section.type is None and (section.kind is None or section.params):
        yield Problem(("optimizer", "type"), text='missing or "auto"', fix="set it, or remove the section")


@_check("optimizer")
def _one_bit_optimizers_are_gone(config: Config) -> _Found:
    name = config.optimizer.type if config.optimizer is not None else None
    if name is not None and name.lower() in _ONE_BIT:
        yield Problem(
            ("optimizer", "type"),
            text=f"zeroaccel does not have the 1-bit communication of {name}",
            fix=f"use {_ONE_BIT[name.lower()]}; zero_quantized_gradients sends gradients in 4 bits at stage 3",
        )


@_check("optimizer")
def _clipping_is_no_argument(config: Config) -> _Found:
    if config.optimizer is not None and "max_grad_norm" in config.optimizer.params:
        yield Problem(
            ("optimizer", "params", "max_grad_norm"),
            text="clipping is not an argument of the optimizer",
            fix="set gradient_clipping at the top level instead",
        )
