"""`deepspeed.runtime.sequence_parallel.ulysses_sp`: sequences divided among ranks, and tiled computation.

Supports any attention of transformers, including "eager", and padding masks, which DeepSpeed ignores. Also the loss of
`deepspeed.sequence.linear_cross_entropy`.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from types import ModuleType
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

from zeroaccel.compat import parallel_state_sp
from zeroaccel.errors import UsageError
from zeroaccel.parallel.sequence import IGNORED_LABEL, SHIFTED_LABELS, SequenceLoader
from zeroaccel.parallel.tiling import tiled_cross_entropy
from zeroaccel.parallel.ulysses import UlyssesAttention

__all__ = [
    "SequenceTiledCompute",
    "TiledFusedLogitsLoss",
    "TiledMLP",
    "UlyssesSPAttentionHF",
    "UlyssesSPDataLoaderAdapter",
    "sequence_tiled_compute",
    "vocab_parallel_linear_cross_entropy",
]


class UlyssesSPAttentionHF:
    """Call that enables sequence parallelism, with `UlyssesAttention`."""

    @classmethod
    def register_with_transformers(
        cls,
        model_name_or_path: nn.Module,
        core_attn_implementation: str | None,
        sequence_parallel_size: int,
        micro_batch_size: int,
        seq_length: int | None = None,
        seq_length_is_variable: bool = True,
        disable_in_eval: bool = False,
        max_length: int | None = None,
    ) -> ModuleType | None:
        """Exchanges heads in the attention of a model. (all ranks)

        Args:
            model_name_or_path: the model; names, accepted by DeepSpeed, would apply to every model of the process.
            core_attn_implementation: the implementation in the model's config; None, accelerate's value for no choice,
                accepts any.
            micro_batch_size, seq_length, seq_length_is_variable, max_length: no effect: supports any length that the
                ranks divide.
            disable_in_eval: in eval mode, each rank computes its own sequences.

        Returns:
            The mpu for `deepspeed.initialize`; None for one rank.

        Raises:
            UsageError: no model is passed, its attention differs, or its heads are not divisible.
        """
        if sequence_parallel_size == 1:
            return None
        where = "UlyssesSPAttentionHF.register_with_transformers"
        if not isinstance(model_name_or_path, nn.Module):
            raise UsageError(
                f"{where}(model_name_or_path)",
                expected="the model",
                got=model_name_or_path,
                fix="create the model first, and pass it",
            )
        parallel_state_sp.initialize_sequence_parallel(sequence_parallel_size)
        attention = UlyssesAttention(
            model_name_or_path, parallel_state_sp.sequence_group(), in_eval=not disable_in_eval
        )
        if core_attn_implementation not in (None, attention.implementation):
            attention.undo()
            raise UsageError(
                f"{where}(core_attn_implementation)",
                expected=f'"{attention.implementation}", as in the model\'s config',
                got=core_attn_implementation,
                fix="load the model with the same attn_implementation",
            )
        return parallel_state_sp


class UlyssesSPDataLoaderAdapter(SequenceLoader):
    """A loader that cuts each rank's batches over the ranks of a sequence, one batch after another.

    Iteration continues where it stopped, as in DeepSpeed; after the last batch it restarts.
    """

    def __init__(self, dl: Any, sp_rank: int, sp_group: Any, sp_world_size: int, device: torch.device) -> None:
        group = parallel_state_sp.sequence_group()
        if (sp_rank, sp_world_size) != (group.rank, group.size):
            raise UsageError(
                "UlyssesSPDataLoaderAdapter(sp_rank, sp_world_size)",
                expected=f"{(group.rank, group.size)} of the sequence parallel group",
                got=(sp_rank, sp_world_size),
            )
        super().__init__(dl, group, device=torch.device(device))
        self._batches: Iterator[dict[str, Any]] | None = None

    def __iter__(self) -> Iterator[dict[str, Any]]:
        return self

    def __next__(self) -> dict[str, Any]:
        if self._batches is None:
            self._batches = super().__iter__()
        try:
            batch = next(self._batches)
        except StopIteration:
            self._batches = None
            raise
        self._left -= 1
        if self._ends:  # accelerate's loader, which closes the step at its last batch; here, several runs follow
            self.loader.end_of_dataloader = not self._left  # type: ignore[attr-defined]
        return batch

    def _next(self, batches: Iterator[Any]) -> list[dict[str, Any]]:
        runs = super()._next(batches)
        self._left, self._ends = len(runs), getattr(self.loader, "end_of_dataloader", False)
        return runs


def weigh_tokens(trainer: Any, batches: Sequence[dict[str, Any]]) -> None:
    """Adds `num_items_in_batch` to the micro-batches of a step, so that the step's loss is the mean over its tokens.

    transformers' Trainer takes the mean over each micro-batch's tokens, and then the mean of these; without sequence
    parallelism it divides all sums by the tokens of the step. Its formula under sequence parallelism is

        sum over ranks r of (sum_r / items_r) n_r / n, divided by the number of micro-batches A

    with n_r of n labels of a micro-batch on rank r. With items_r = n_r N / (n A D) it is D sum / N, for N labels in the
    step on D groups of ranks, whose gradients the engine averages.

    Raises:
        UsageError: the Trainer has a loss of its own, which it would not call.
    """
    for name in ("compute_loss_func", "label_smoother"):
        if getattr(trainer, name, None) is not None:
            raise UsageError(
                f"Trainer: {'label_smoothing_factor' if name == 'label_smoother' else name}",
                expected="none: with sequence parallelism, Trainer calls only the loss of the model",
                got="one",
                fix="compute it in the model's forward from shift_labels, or train with sp_size=1",
            )
    group = parallel_state_sp.sequence_group()
    if SHIFTED_LABELS not in batches[0] or not _counts_items(trainer):
        return
    counts = torch.stack([(batch[SHIFTED_LABELS] != IGNORED_LABEL).sum() for batch in batches])
    of_batches = group.gather(counts.view(1, 1, -1))[0].sum(0)
    total, shares = of_batches.sum(), 1
    if trainer.args.average_tokens_across_devices:
        total = trainer.accelerator.gather(counts.sum()).sum()
        shares = trainer.args.world_size // group.size
    items = counts * total / (of_batches.clamp(min=1) * len(batches) * shares)
    for batch, count in zip(batches, items.clamp(min=1e-9).unbind(), strict=True):
        batch["num_items_in_batch"] = count


def _counts_items(trainer: Any) -> bool:
    """True if Trainer passes `num_items_in_batch` to this model without sequence parallelism."""
    model = trainer.accelerator.unwrap_model(trainer.model)
    model = getattr(model, "get_base_model", lambda: model)()
    parameters = inspect.signature(model.forward).parameters.values()
    takes_any = any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters)
    return bool(getattr(model, "accepts_loss_kwargs", takes_any))


def sequence_tiled_compute(
    fn: Callable[..., Tensor],
    seqlen: int,
    shards: int,
    kwargs_to_shard: Mapping[str, Any],
    kwargs_to_pass: Mapping[str, Any],
    grad_requiring_tensor_key: str,
    compute_params: Any = None,
    output_unshard_dimension: int = 1,
    output_reduction: Literal["mean", "sum"] | None = "mean",
) -> Tensor:
    """Computes `fn` on tiles of the sequence; backward recomputes each tile.

    Args:
        seqlen: S, length of all tensors in `kwargs_to_shard`, (B, S, ...).
        shards: number of tiles.
        grad_requiring_tensor_key, compute_params: no effect; every input and parameter gets its gradient.
        output_unshard_dimension: dim along which outputs are concatenated; 0 stacks them.

    Raises:
        UsageError: the reduction is unknown, or the number of tiles is not positive.
    """
    if output_reduction not in (None, "mean", "sum"):
        expected = 'None, "mean" or "sum"'
        raise UsageError("sequence_tiled_compute(output_reduction)", expected=expected, got=output_reduction)
    if shards < 1:
        raise UsageError("sequence_tiled_compute(shards)", expected="a positive number", got=shards)
    step = math.ceil(seqlen / shards)
    outputs = []
    for start in range(0, seqlen, step):
        tile = {name: value[:, start : start + step] for name, value in kwargs_to_shard.items()}
        outputs.append(_tile(fn, **tile, **kwargs_to_pass))
    dim = output_unshard_dimension
    whole = torch.stack(outputs) if dim == 0 else torch.cat(outputs, dim=dim)
    return whole if output_reduction is None else whole.mean() if output_reduction == "mean" else whole.sum()


class SequenceTiledCompute:
    """Calls `sequence_tiled_compute` with the names of its arguments."""

    @staticmethod
    def apply(
        fn: Callable[..., Tensor],
        seqlen: int,
        shards: int,
        keys_to_shard: Sequence[str],
        keys_to_pass: Sequence[str],
        *others_and_args: Any,
    ) -> Tensor:
        """Takes the last four settings of `sequence_tiled_compute`, then the values of the keys."""
        key, params, dim, reduction, *args = others_and_args
        values = iter(args)
        shard = {name: next(values) for name in keys_to_shard}
        passed = {name: next(values) for name in keys_to_pass}
        return sequence_tiled_compute(fn, seqlen, shards, shard, passed, key, params, dim, reduction)


class TiledMLP:
    """An MLP over tiles of the tokens; backward recomputes each tile."""

    @staticmethod
    def apply(fn: Callable[..., Tensor], self: Any, x: Tensor, shards: int, compute_params: Any = None) -> Tensor:
        """Computes `fn(self, tile)` for the tiles of `x`, (..., S, H). `compute_params` has no effect."""
        return torch.cat([_tile(fn, self, tile) for tile in x.chunk(shards, dim=-2)], dim=-2)


class TiledFusedLogitsLoss:
    """A loss over tiles of the tokens; logits exist only during their tile's computation."""

    @staticmethod
    def apply(
        fn: Callable[..., Tensor],
        self: Any,
        x: Tensor,
        y: Tensor,
        mask: Tensor | None,
        shards: int,
        compute_params: Any = None,
        output_reduction: Literal["mean", "sum"] = "mean",
    ) -> Tensor:
        """Computes the mean or sum of `fn(self, x, y)`, or `fn(self, x, y, mask)`, over tiles of (B, S, ...)."""
        if output_reduction not in ("mean", "sum"):
            raise UsageError("TiledFusedLogitsLoss", expected='"mean" or "sum"', got=output_reduction)
        tensors = [x, y] if mask is None else [x, y, mask]
        tiles = zip(*(tensor.chunk(shards, dim=1) for tensor in tensors), strict=True)
        losses = torch.stack([_tile(fn, self, *tile) for tile in tiles])
        return losses.mean() if output_reduction == "mean" else losses.sum()


def _tile(fn: Callable[..., Tensor], *args: Any, **kwargs: Any) -> Tensor:
    if not torch.is_grad_enabled():
        return fn(*args, **kwargs)
    output: Tensor = checkpoint(fn, *args, use_reentrant=False, **kwargs)
    return output


def vocab_parallel_linear_cross_entropy(
    hidden: Tensor,
    weight: Tensor,
    target: Tensor,
    bias: Tensor | None = None,
    tp_group: Any = None,
    sp_group: Any = None,
    vocab_start_index: int | None = None,
    vocab_end_index: int | None = None,
    ignore_index: int = IGNORED_LABEL,
    reduction: Literal["none", "sum", "mean"] = "mean",
    chunk_size: int | None = None,
) -> Tensor:
    """Returns the cross entropy of `hidden @ weight.T + bias`, in fp32, with the logits of one tile at a time.

    With `sp_group`, sum and mean are those of whole sequences. Their gradients are scaled like those of
    `SequenceGroup.mean_loss`: this engine averages over the ranks of a sequence, where DeepSpeed's adds.

    Args:
        hidden: (..., H).
        weight, bias: (V, H) and (V,); the head's parameters, whole, also at stage 3 within a forward of the model.
        target: (...), labels of the same tokens, already shifted.
        tp_group, vocab_start_index, vocab_end_index: no parts of a vocabulary: tensor parallelism gathers logits.
        sp_group: None or the group of `initialize_sequence_parallel`.
        reduction: "none" returns (...), the loss of each token, 0 for ignored ones, without `sp_group`.
        chunk_size: tokens per tile; by default the logits of a tile are about as large as `hidden`.

    Raises:
        UsageError: shapes or labels do not fit, or an argument has another value than these.
    """
    _check_head(hidden, weight, target, ignore_index)
    _check_parts(len(weight), tp_group, (vocab_start_index, vocab_end_index), sp_group)
    _check_loss(reduction, chunk_size)
    tokens = max(target.numel(), 1)
    tiles = min(math.ceil(len(weight) / weight.shape[1] if chunk_size is None else tokens / chunk_size), tokens)
    dtype = torch.promote_types(hidden.dtype, weight.dtype)  # autocast casts them again

    def head(run: Tensor) -> Tensor:
        return functional.linear(run.to(dtype), weight.to(dtype), None if bias is None else bias.to(dtype))

    def losses(run: Tensor, labels: Tensor) -> Tensor:
        return functional.cross_entropy(head(run).float(), labels, ignore_index=ignore_index, reduction="none")

    if reduction == "none":
        runs = zip(hidden.flatten(0, -2).tensor_split(tiles), target.flatten().tensor_split(tiles), strict=True)
        return torch.cat([_tile(losses, run, labels) for run, labels in runs]).view(target.shape)
    group = None if _ranks(sp_group) == 1 else parallel_state_sp.sequence_group()
    count = (target != ignore_index).sum()
    if group is not None:
        count = group.gather(count.view(1, 1, 1)).sum()
    items = count.clamp(min=1) if reduction == "mean" else 1
    params: Any = [each for each in (weight, bias) if each is not None]
    loss = tiled_cross_entropy(hidden, head, params, target, tiles=tiles, num_items=items, ignored=ignore_index)
    return loss if group is None else group.mean_loss(loss, target, items)


_LOSS = "vocab_parallel_linear_cross_entropy"


def _ranks(group: Any) -> int:
    return 1 if group is None else torch.distributed.get_world_size(group)


def _check_head(hidden: Tensor, weight: Tensor, target: Tensor, ignored: int) -> None:
    if weight.dim() != 2 or weight.shape[1] != hidden.shape[-1] or hidden.shape[:-1] != target.shape:
        raise UsageError(
            f"{_LOSS}(hidden, weight, target)",
            expected="shapes (..., H), (V, H) and (...)",
            got=", ".join(str(tuple(each.shape)) for each in (hidden, weight, target)),
        )
    if target.device.type != "cpu":
        return  # reading the labels would make the host wait; the device's kernel asserts their range
    if (wrong := target[(target != ignored) & ((target < 0) | (target >= len(weight)))]).numel():
        raise UsageError(f"{_LOSS}(target)", expected=f"labels of 0 to {len(weight) - 1}", got=wrong[0].item())


def _check_parts(vocabulary: int, tp_group: Any, bounds: tuple[int | None, int | None], sp_group: Any) -> None:
    if _ranks(tp_group) > 1 or bounds not in ((None, None), (0, vocabulary)):
        raise UsageError(
            f"{_LOSS}(tp_group, vocab_start_index, vocab_end_index)",
            expected=f"no group of several ranks, and bounds of 0 and {vocabulary}",
            got=f"{_ranks(tp_group)} ranks, and {bounds}",
            fix="pass the whole weight; tensor parallelism gathers the logits of a divided head",
        )
    if _ranks(sp_group) > 1 and sp_group is not parallel_state_sp.get_sequence_parallel_group():
        raise UsageError(f"{_LOSS}(sp_group)", expected="the group of initialize_sequence_parallel()", got=sp_group)


def _check_loss(reduction: str, chunk_size: int | None) -> None:
    if reduction not in ("none", "sum", "mean"):
        raise UsageError(f"{_LOSS}(reduction)", expected='"none", "sum" or "mean"', got=reduction)
    if chunk_size is not None and chunk_size < 1:
        raise UsageError(f"{_LOSS}(chunk_size)", expected="a positive number of tokens", got=chunk_size)
