"""Tiled computation for long sequences: the loss over a vocabulary, and modules that treat each token by itself.

(Bekman et al., 2025, arXiv:2506.13996, section 3.1.) The logits of S tokens are S x V numbers, by far the largest
tensor of a long sequence; the inner activations of an MLP come next. Neither needs more than one tile of tokens at
a time.
**Loss.** The forward already differentiates each tile's loss, so its logits live no longer than the tile and are
computed once. The backward needs only the gradients of the hidden states and of the head's parameters. They are
gradients of the *sum* over tokens, whose scale does not depend on the number of tokens; the backward multiplies them by
its incoming gradient, which contains the loss's divisor and fp16's loss scale.
its incoming gradient, which contains the loss's divisor and fp16's loss scale.

**Modules.** The backward recomputes each tile, as with activation checkpointing.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

from zeroaccel.errors import UsageError
from zeroaccel.parallel.sequence import IGNORED_LABEL

__all__ = ["DeferredLogits", "TiledLoss", "TiledModules", "tiled_cross_entropy"]


def tiled_cross_entropy(
    hidden: Tensor,
    head: Callable[[Tensor], Tensor],
    params: Iterable[nn.Parameter],
    labels: Tensor,
    *,
    tiles: int,
    num_items: Tensor | int | None = None,
    ignored: int = IGNORED_LABEL,
) -> Tensor:
    """Returns the cross entropy of `head(hidden)`, without all of its logits in memory at once.

    Args:
        hidden: (..., H).
        head: (n, H) -> (n, V) logits.
        params: parameters of the head that get gradients.
        labels: (...), labels of the same tokens, already shifted.
        tiles: number of tiles that the tokens are divided into.
        num_items: divisor of the sum; by default the number of labels other than `ignored`.
        ignored: label of the positions to ignore.

    Raises:
        UsageError: tiles is not a positive number.

    Returns:
        A scalar in fp32; NaN if all labels are ignored, as in `torch.nn.functional.cross_entropy`.

    Example:
        >>> head = torch.nn.Linear(8, 100)
        >>> hidden, labels = torch.randn(2, 6, 8, requires_grad=True), torch.randint(100, (2, 6))
        >>> loss = tiled_cross_entropy(hidden, head, head.parameters(), labels, tiles=3)
        >>> torch.allclose(loss, torch.nn.functional.cross_entropy(head(hidden).flatten(0, 1), labels.flatten()))
        True
    """
    _check_tiles("tiled_cross_entropy(tiles)", tiles)
    trained = tuple(param for param in params if param.requires_grad)
    flat = hidden.reshape(-1, hidden.shape[-1])
    total: Tensor = _TiledSum.apply(flat, labels.reshape(-1), head, tiles, ignored, *trained)  # type: ignore[no-untyped-call]
    if num_items is None:
        return total / (labels != ignored).sum()
    return total / (num_items.to(total.device) if isinstance(num_items, Tensor) else num_items)


class _TiledSum(torch.autograd.Function):
    """Sum of the tokens' losses; the forward already computes its gradients."""

    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        labels: Tensor,
        head: Callable[[Tensor], Tensor],
        tiles: int,
        ignored: int,
        *params: nn.Parameter,
    ) -> Tensor:
        losses: list[Tensor] = []
        of_hidden = torch.empty_like(hidden)
        of_params: list[Tensor] = []
        for run, target, into in zip(
            *(tensor.tensor_split(tiles) for tensor in (hidden, labels, of_hidden)), strict=True
        ):
            with torch.enable_grad():
                tile = run.detach().requires_grad_()
                loss = functional.cross_entropy(head(tile).float(), target, ignore_index=ignored, reduction="sum")
                grads = torch.autograd.grad(loss, (tile, *params), materialize_grads=True)
            losses.append(loss.detach())
            into.copy_(grads[0])
            # Sums in fp32, like one product over all tokens; 16 bits would round after each tile.
            if not of_params:
                of_params = [grad.float() for grad in grads[1:]]
                continue
            for sum_, grad in zip(of_params, grads[1:], strict=True):
                sum_ += grad
        ctx.save_for_backward(of_hidden, *of_params)
        ctx.dtypes = [param.dtype for param in params]
        return torch.stack(losses).sum()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        of_hidden, *of_params = ctx.saved_tensors
        factor = grads[0]
        scaled = (of_hidden.float() * factor).to(of_hidden.dtype)
        each = ((grad * factor).to(dtype) for grad, dtype in zip(of_params, ctx.dtypes, strict=True))
        return scaled, None, None, None, None, *each


class DeferredLogits:
    """Stands in for the logits in the output of a model with `TiledLoss`, in a forward with gradients.

    Attributes:
        hidden: (..., H), the head's input.
    """

    def __init__(self, hidden: Tensor, head: Callable[[Tensor], Tensor]) -> None:
        self.hidden = hidden
        self._head = head

    def compute(self) -> Tensor:
        """Computes the logits, (..., V), all at once; at ZeRO stage 3 only inside the model's forward."""
        return self._head(self.hidden)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        raise UsageError(
            f"logits.{name}",
            expected="a forward without TiledLoss, which computes the loss tile by tile and keeps no logits",
            got="a forward with TiledLoss",
            fix="call TiledLoss.undo(), evaluate under torch.no_grad(), or call logits.compute()",
        )

    def _refuse(self, *_: Any) -> Any:
        return self.__getattr__("arithmetic")

    # A model that scales or caps its logits would train on a wrong loss; this error is clearer than a TypeError.
    __add__ = __radd__ = __sub__ = __mul__ = __rmul__ = __truediv__ = __getitem__ = __matmul__ = _refuse


class TiledLoss:
    """Makes a causal language model of transformers compute its loss tile by tile, until `undo`.

    In a forward with gradients, `logits` of the output is a `DeferredLogits`. Without gradients nothing changes.

    Args:
        model: has an output head (`get_output_embeddings`) and transformers' loss for causal language models. It may
            already be in an engine.
        tiles: number of tiles that the tokens of a forward are divided into.

    Raises:
        UsageError: the model has no such head or loss.

    Example:
        >>> from transformers import LlamaConfig, LlamaForCausalLM
        >>> config = LlamaConfig(hidden_size=32, intermediate_size=32, num_hidden_layers=1, num_attention_heads=4)
        >>> model = LlamaForCausalLM(config)
        >>> tiling = TiledLoss(model, tiles=4)
        >>> ids = torch.randint(100, (2, 16))
        >>> model(input_ids=ids, labels=ids).loss.backward()
        >>> tiling.undo()
    """

    def __init__(self, model: nn.Module, tiles: int) -> None:
        _check_tiles("TiledLoss(tiles)", tiles)
        model = getattr(model, "module", model)
        self.tiles = tiles
        self._head = _head_of(model)
        self._model = weakref.ref(model)
        self._had_loss = "_loss_function" in vars(model)
        self._loss: Any = model.loss_function
        self._forward: Callable[[Tensor], Tensor] = self._head.forward
        self._head.forward = self._of_head
        model.loss_function = self._of_model

    def undo(self) -> None:
        """Restores the model's loss."""
        vars(self._head).pop("forward", None)
        model = self._model()
        if model is None:
            return
        if self._had_loss:
            model.loss_function = self._loss
        else:
            vars(model).pop("_loss_function", None)

    def _of_head(self, hidden: Tensor, **loss: Any) -> Any:
        """The head's forward. With `labels`, returns the loss: parameters are whole only during this call."""
        if loss:
            return tiled_cross_entropy(hidden, self._forward, self._head.parameters(), tiles=self.tiles, **loss)
        return DeferredLogits(hidden, self._head) if torch.is_grad_enabled() else self._forward(hidden)

    def _of_model(
        self,
        logits: Tensor | DeferredLogits,
        labels: Tensor | None = None,
        vocab_size: int | None = None,
        num_items_in_batch: Tensor | int | None = None,
        ignore_index: int = IGNORED_LABEL,
        shift_labels: Tensor | None = None,
        **others: Any,
    ) -> Any:
        """Replaces the model's `loss_function`."""
        if not isinstance(logits, DeferredLogits):
            more = {"num_items_in_batch": num_items_in_batch, "ignore_index": ignore_index}
            return self._loss(logits, labels, vocab_size, shift_labels=shift_labels, **more, **others)
        if shift_labels is None:
            assert labels is not None, "transformers calls its loss with labels"
            shift_labels = functional.pad(labels, (0, 1), value=ignore_index)[..., 1:]
        target = shift_labels.to(logits.hidden.device)
        return self._head(logits.hidden, labels=target, num_items=num_items_in_batch, ignored=ignore_index)


class TiledModules:
    """Makes modules that treat each token by itself, such as MLPs, compute tile by tile, until `undo`.

    The inner activations of a tile exist only during its part of forward and backward; backward recomputes them.

    Args:
        modules: each takes one tensor, (B, S, H), and returns one, (B, S, ...).
        tiles: number of tiles that S is divided into.

    Example:
        >>> mlp = torch.nn.Sequential(torch.nn.Linear(8, 32), torch.nn.GELU(), torch.nn.Linear(32, 8))
        >>> tiling = TiledModules([mlp], tiles=4)
        >>> mlp(torch.randn(2, 16, 8)).sum().backward()
        >>> tiling.undo()
    """

    def __init__(self, modules: Iterable[nn.Module], tiles: int) -> None:
        _check_tiles("TiledModules(tiles)", tiles)
        self.tiles = tiles
        self._before = [(module, vars(module).get("forward")) for module in modules]  # it may be patched
        for module, _ in self._before:
            module.forward = self._tiled(module.forward)

    def undo(self) -> None:
        """Restores the modules' forward."""
        for module, forward in self._before:
            vars(module).pop("forward", None)
            if forward is not None:
                vars(module)["forward"] = forward

    def _tiled(self, forward: Callable[[Tensor], Tensor]) -> Callable[[Tensor], Tensor]:
        def tiled(tokens: Tensor) -> Tensor:
            # Contiguous like the whole input: modules may view their tokens as (B * S, H).
            runs = [run.contiguous() for run in tokens.tensor_split(self.tiles, dim=1)]
            if not torch.is_grad_enabled():
                return torch.cat([forward(run) for run in runs], dim=1)
            return torch.cat([checkpoint(forward, run, use_reentrant=False) for run in runs], dim=1)

        return tiled


def _check_tiles(where: str, tiles: object) -> None:
    if not isinstance(tiles, int) or isinstance(tiles, bool) or tiles < 1:
        raise UsageError(where, expected="a positive number of tiles", got=tiles)


def _head_of(model: Any) -> nn.Module:
    where = f"TiledLoss({type(model).__name__})"
    head = model.get_output_embeddings() if hasattr(model, "get_output_embeddings") else None
    if not isinstance(head, nn.Module):
        raise UsageError(where, expected="a model of transformers with an output head", got="one without")
    if "forward" in vars(head):
        raise UsageError(where, expected="a head with its original forward", got="a tiled or replaced forward")
    loss = getattr(getattr(model, "loss_function", None), "__name__", "none")
    if loss != "ForCausalLMLoss":
        fix = "call tiled_cross_entropy in your own loss"
        raise UsageError(where, expected="transformers' loss for causal language models", got=loss, fix=fix)
    return head
