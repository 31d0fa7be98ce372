"""The way of tokens to the ranks with their experts, and back.

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

**Experts that take all tokens** (Llama 4): their forward is of (E T, H), each token times its score of each expert,
most of which are 0. Only the rows of the K experts that were chosen are sent. The module's forward multiplies equal
numbers of rows by each expert, so those that arrive are filled up with zeros to the number of the fullest expert.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from zeroaccel.comm.collectives import Collectives
from zeroaccel.errors import UsageError

WHERE = "expert parallelism"


@dataclass(frozen=True)
class Experts:
    """The experts of one layer.

    Attributes:
        name: of the module, for messages.
        module: has parameters of the dims (E, ..).
        count: E.
        params: names of those.
        router: of experts that take all tokens; None of those that take choices and weights.
        adapters: PEFT's `target_parameters` around the module, outermost first.
    """

    name: str
    module: nn.Module
    count: int
    params: tuple[str, ...]
    router: nn.Module | None = None
    adapters: tuple[Any, ...] = ()

    @property
    def inputs(self) -> tuple[str, ...]:
        """The arguments of the module's forward."""
        return ("hidden_states",) if self.router is not None else ("hidden_states", "top_k_index", "top_k_weights")

    def share(self, ranks: int) -> None:
        """Tells the adapters how many experts their weights are for on each of so many ranks."""
        for adapter in self.adapters:
            adapter.num_experts = self.count // ranks


@dataclass(frozen=True)
class Route:
    """Where the chosen tokens of one forward go.

    Attributes:
        order: (sum of `sent`,) places among the T K choices, by expert.
        sent, received: rows to and from each rank.
        ids: (sum of `received`,) which of its own experts each row that arrives is for: ranks one after another, and of
            each its tokens by expert.
        fullest: rows that arrive for the own expert with most.
    """

    order: Tensor
    sent: list[int]
    received: list[int]
    ids: Tensor
    fullest: int


Router = Callable[[Tensor, int, Collectives], Route]


def route(chosen: Tensor, experts: int, ranks: Collectives) -> Route:
    """The way of tokens to the experts that were chosen. (all ranks of the group)

    Args:
        chosen: (T K,) numbers of experts; one that is no expert's counts nothing.
        experts: of all ranks.
    """
    own = experts // ranks.world_size
    counts = torch.bincount(chosen, minlength=experts)[:experts].view(ranks.world_size, own)
    incoming = torch.empty_like(counts)
    ranks.all_to_all(incoming, counts, "count tokens").wait()
    to_ranks, from_ranks = torch.stack([counts, incoming]).tolist()
    sent, received = [sum(row) for row in to_ranks], [sum(row) for row in from_ranks]
    fullest = max(map(sum, zip(*from_ranks, strict=True)))
    order = chosen.argsort(stable=True)[: sum(sent)]
    ids = torch.arange(own, device=chosen.device).repeat(ranks.world_size).repeat_interleave(incoming.view(-1))
    return Route(order, sent, received, ids, fullest)


def even_route(chosen: Tensor, experts: int, ranks: Collectives) -> Route:
    """As many tokens to each rank, for tensors without values."""
    size, rows = ranks.world_size, chosen.numel()
    counts = chosen.new_empty(size, experts // size)
    ranks.all_to_all(torch.empty_like(counts), counts, "count tokens").wait()
    even = [rows * (rank + 1) // size - rows * rank // size for rank in range(size)]
    return Route(chosen.argsort(stable=True), even, even, chosen.new_empty(rows), -(-rows * size // experts))


def divided_forwards(experts: Experts, ranks: Collectives, route: Router = route) -> dict[nn.Module, Any]:
    """Module -> the forward that it has where ranks divide these experts."""
    compute, router = experts.module.forward, experts.router
    if router is None:
        return {experts.module: partial(_dispatched, experts, compute, ranks, route)}
    seen = _SeenScores(router.forward)
    return {router: seen, experts.module: partial(_dispatched_by_scores, experts, compute, ranks, route, seen)}


def _dispatched(
    experts: Experts,
    compute: Callable[..., Tensor],
    ranks: Collectives,
    route: Router,
    hidden_states: Tensor,
    top_k_index: Tensor,
    top_k_weights: Tensor,
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
    returned: Tensor = _Move.apply(out[:0] if idle else out, ranks, received, sent, _BACK)  # type: ignore[no-untyped-call]
    placed = returned.new_zeros(chosen.numel(), returned.shape[1]).index_copy(0, order, returned)
    return placed.view(*choices.shape, -1).sum(1).to(hidden.dtype)


class _SeenScores:
    """A router's forward that keeps the scores, which the experts are not passed.

    Args:
        compute: the router's own: hidden (T, H) -> scores (T, E), 0 of experts that were not chosen, and logits.
    """

    def __init__(self, compute: Callable[..., Any]) -> None:
        self._compute = compute
        self.scores: Tensor | None = None

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        out = self._compute(*args, **kwargs)
        self.scores = out[0].detach()
        return out


def _dispatched_by_scores(
    experts: Experts,
    compute: Callable[[Tensor], Tensor],
    ranks: Collectives,
    route: Router,
    seen: _SeenScores,
    hidden_states: Tensor,
) -> Tensor:
    """The forward of experts that take all tokens, of which this rank has some. (all ranks of the group)

    Args:
        compute: the module's own forward.
        hidden_states: (E T, H), all tokens for each expert, times their scores.
    """
    scores, count, own = seen.scores, experts.count, experts.count // ranks.world_size
    shape = None if scores is None else tuple(scores.shape)
    if scores is None or scores.dim() != 2 or shape != (len(hidden_states) // count, count):
        raise UsageError(
            f"{WHERE}: {experts.name}",
            expected="(E T, H) hidden states, and a router with scores (T, E) before it",
            got=f"{tuple(hidden_states.shape)}, {shape}",
            fix="leave ep at 1",
        )
    # An expert with the score 0 adds nothing to a token, and the token nothing to its gradients.
    choices = scores.topk(experts.router.top_k, dim=1).indices  # type: ignore[arg-type, union-attr]
    tokens = torch.arange(len(choices), device=choices.device).unsqueeze(1)
    found = route(choices.reshape(-1), count, ranks)
    places = (choices * len(choices) + tokens).reshape(-1)[found.order]
    sent, received, ids = found.sent, found.received, found.ids
    rows: Tensor = _Move.apply(hidden_states[places], ranks, sent, received, _OUT)  # type: ignore[no-untyped-call]
    # Row n of expert e comes to place n of its `room` ones.
    room, by_expert = max(found.fullest, 1), ids.argsort(stable=True)
    counts = ids.new_zeros(own).scatter_add_(0, ids, torch.ones_like(ids))
    sorted_ids = ids[by_expert]
    within = torch.arange(len(ids), device=ids.device) - (counts.cumsum(0) - counts)[sorted_ids]
    slots = torch.empty_like(ids).index_copy_(0, by_expert, sorted_ids * room + within)
    out = compute(rows.new_zeros(own * room, rows.shape[1]).index_copy(0, slots, rows))[slots]
    returned: Tensor = _Move.apply(out, ranks, received, sent, _BACK)  # type: ignore[no-untyped-call]
    return returned.new_zeros(len(hidden_states), returned.shape[1]).index_copy(0, places, returned)


def _check_routing(name: str, hidden: Tensor, choices: Tensor, weights: Tensor) -> None:
    """Refuses a router that gives something else than K experts and K weights for each token."""
    shapes = [tuple(one.shape) for one in (hidden, choices, weights)]
    is_known = shapes[1] == shapes[2] and hidden.dim() == choices.dim() == 2 and len(hidden) == len(choices)
    if not is_known or choices.dtype not in (torch.int64, torch.int32):
        raise UsageError(
            f"{WHERE}: {name}",
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


_OUT = ("send tokens to experts", "return gradients of tokens")
_BACK = ("return outputs of experts", "send gradients to experts")


class _Move(torch.autograd.Function):
    """Rows to other ranks, and their gradients back. `labels` says what each is for."""

    @staticmethod
    def forward(
        ctx: Any, rows: Tensor, ranks: Collectives, sent: list[int], received: list[int], labels: tuple[str, str]
    ) -> Tensor:
        ctx.of = ranks, sent, received, labels[1]
        return _exchanged(rows, ranks, received, sent, labels[0])

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        ranks, sent, received, label = ctx.of
        return _exchanged(grads[0], ranks, sent, received, label), None, None, None, None
