"""Long sequences tile by tile: the loss over a vocabulary, and modules that treat every token by itself.

(Bekman et al., 2025, arXiv:2506.13996, section 3.1.) The logits of S tokens are S x V numbers, by far the largest
tensor of a long sequence, and the inner activations of an MLP come next. Neither needs more than one tile of tokens at
a time.

**Loss.** Each tile's loss is differentiated in the forward already, so that its logits live no longer than the tile
and nothing is computed twice: what is kept for the backward are the gradients of the hidden states and of the head's
parameters. They are those of the *sum* over tokens, whose size does not depend on how many tokens there are, and are
scaled in the backward by what the loss is divided by, and by the loss scale of fp16.

**Modules.** Each tile is recomputed in the backward, as with activation checkpointing.
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
    """The cross entropy of `head(hidden)`, without all of its logits in memory at once.

    Args:
        hidden: (..., H).
        head: (n, H) -> (n, V) logits.
        params: of the head, those that get gradients.
        labels: (...), of the same tokens: shifted already.
        tiles: how many parts the tokens are computed in.
        num_items: divisor of the sum; by default the number of labels that count.
        ignored: the label that does not count.

    Raises:
        UsageError: tiles is no positive number.

    Returns:
        A scalar in fp32; NaN where no label counts, as of `torch.nn.functional.cross_entropy`.

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
    """The sum of the tokens' losses; its gradients are known when the forward ends."""

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
        for run, target, into in zip(*(one.tensor_split(tiles) for one in (hidden, labels, of_hidden)), strict=True):
            with torch.enable_grad():
                own = run.detach().requires_grad_()
                loss = functional.cross_entropy(head(own).float(), target, ignore_index=ignored, reduction="sum")
                grads = torch.autograd.grad(loss, (own, *params), materialize_grads=True)
            losses.append(loss.detach())
            into.copy_(grads[0])
            # Summed up in fp32, as one product over all tokens is; 16 bits would round after each tile.
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
    """Replaces the logits in the output of a model with `TiledLoss`, in a forward with gradients.

    Attributes:
        hidden: (..., H), the head's input.
    """

    def __init__(self, hidden: Tensor, head: Callable[[Tensor], Tensor]) -> None:
        self.hidden = hidden
        self._head = head

    def compute(self) -> Tensor:
        """The logits, (..., V), all at once; at ZeRO stage 3 inside the model's forward only."""
        return self._head(self.hidden)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        raise UsageError(
            f"logits.{name}",
            expected="a forward without TiledLoss, which computes the loss tile by tile and keeps no logits",
            got="a forward with it",
            fix="undo() it, evaluate under torch.no_grad(), or call logits.compute()",
        )

    def _refuse(self, *_: Any) -> Any:
        return self.__getattr__("arithmetic")

    # A model that scales or caps its logits would train on something else; it is told, instead of a TypeError.
    __add__ = __radd__ = __sub__ = __mul__ = __rmul__ = __truediv__ = __getitem__ = __matmul__ = _refuse


class TiledLoss:
    """A causal language model of transformers computes its loss tile by tile, until `undo`.

    In a forward with gradients its output has `DeferredLogits` for `logits`. Without gradients it is as before.

    Args:
        model: with an output head (`get_output_embeddings`) and transformers' loss for causal language models. It may
            be in an engine already.
        tiles: how many parts the tokens of a forward are computed in.

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
        """The model's loss is as before."""
        vars(self._head).pop("forward", None)
        model = self._model()
        if model is None:
            return
        if self._had_loss:
            model.loss_function = self._loss
        else:
            vars(model).pop("_loss_function", None)

    def _of_head(self, hidden: Tensor, **loss: Any) -> Any:
        """The head's forward. With `labels` the loss, since its parameters are whole only while it is called."""
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
        """The model's `loss_function`."""
        if not isinstance(logits, DeferredLogits):
            more = {"num_items_in_batch": num_items_in_batch, "ignore_index": ignore_index}
            return self._loss(logits, labels, vocab_size, shift_labels=shift_labels, **more, **others)
        if shift_labels is None:
            assert labels is not None, "transformers calls its loss with labels"
            shift_labels = functional.pad(labels, (0, 1), value=ignore_index)[..., 1:]
        target = shift_labels.to(logits.hidden.device)
        return self._head(logits.hidden, labels=target, num_items=num_items_in_batch, ignored=ignore_index)


class TiledModules:
    """Modules that treat every token by itself, as MLPs do, compute tile by tile, until `undo`.

    A tile's inner activations live in its part of forward and backward only; backward computes it again.

    Args:
        modules: each takes one tensor, (B, S, H), and returns one, (B, S, ...).
        tiles: how many parts S is cut into.

    Example:
        >>> mlp = torch.nn.Sequential(torch.nn.Linear(8, 32), torch.nn.GELU(), torch.nn.Linear(32, 8))
        >>> tiling = TiledModules([mlp], tiles=4)
        >>> mlp(torch.randn(2, 16, 8)).sum().backward()
        >>> tiling.undo()
    """

    def __init__(self, modules: Iterable[nn.Module], tiles: int) -> None:
        _check_tiles("TiledModules(tiles)", tiles)
        self.tiles = tiles
        self._before = [(module, vars(module).get("forward")) for module in modules]  # a module may have one of its own
        for module, _ in self._before:
            module.forward = self._tiled(module.forward)

    def undo(self) -> None:
        """The modules compute as before."""
        for module, forward in self._before:
            vars(module).pop("forward", None)
            if forward is not None:
                vars(module)["forward"] = forward

    def _tiled(self, forward: Callable[[Tensor], Tensor]) -> Callable[[Tensor], Tensor]:
        def tiled(tokens: Tensor) -> Tensor:
            # Contiguous, as the whole input is: modules may look at their tokens as (B * S, H).
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
        raise UsageError(where, expected="a head of its own forward", got="one that is tiled or replaced already")
    loss = getattr(getattr(model, "loss_function", None), "__name__", "none")
    if loss != "ForCausalLMLoss":
        fix = "call tiled_cross_entropy in a loss of your own"
        raise UsageError(where, expected="transformers' loss of causal language models", got=loss, fix=fix)
    return head
