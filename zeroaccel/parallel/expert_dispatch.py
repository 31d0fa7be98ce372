"""Dispatch of tokens to the ranks that hold their experts, and back.

(GShard: Lepikhin et al., 2020, arXiv:2006.16668, section 3.) A mixture's router chooses K of E experts for each of a
rank's T tokens. Each of P ranks holds E / P experts, and computes them for the tokens of all P ranks:

```text
hidden (T, H), choices (T, K), weights (T, K)        this rank's tokens
  sort by expert, gather the counts                  (P, E + 2) numbers
  send tokens and weights                            one all-to-all of exactly the chosen rows
hidden (n, H), choices (n, 1), weights (n, 1)        tokens of all ranks, for this rank's experts
  the module's own forward, with E / P experts
  return the rows                                    one all-to-all
(T, K, H), summed over K
```

No token is dropped or padded, whatever the load. A rank without chosen tokens sends and receives nothing, but takes
part in each exchange, forward and backward: it computes one row of zeros, so that its graph and gradients have the form
of the other ranks'.

**Chunks.** If any rank would send or receive more rows than its buffer holds, each rank computes a few of its experts
at a time, in the order of their numbers. All ranks know all counts, so they agree on the chunks and take part in each.
An expert is never cut: its product has all its rows, in one order, so the bits equal those of one chunk; only the rows
of one expert may exceed the buffer. (transformers' `grouped_mm` sorts the rows again, with an unstable sort: it sums
gradients of experts in another order, which differ by less than 1e-7.) A rank sorts its own tokens once for all chunks,
so that their gradients have one order of additions.

**Experts that take all tokens** (Llama 4): their forward takes (E T, H), each token times its score for each expert,
mostly 0. Only the rows of the K chosen experts are sent. The module's forward multiplies equal numbers of rows by each
expert, so the arriving rows are padded with zeros to the number of the fullest expert.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.nn.utils.parametrize import type_before_parametrizations

from zeroaccel.comm.collectives import Collectives
from zeroaccel.errors import UsageError
from zeroaccel.telemetry.timeline import named_range

WHERE = "expert parallelism"

Numbers = NDArray[np.int64]


@dataclass(frozen=True)
class Experts:
    """The experts of one layer.

    Attributes:
        name: name of the module, for messages.
        module: module whose parameters have dims (E, ..).
        count: E.
        params: names of these parameters.
        router: router of experts that take all tokens; None for experts that take choices and weights.
        adapters: PEFT's `target_parameters` wrappers around the module, outermost first.
    """

    name: str
    module: nn.Module
    count: int
    params: tuple[str, ...]
    router: nn.Module | None = None
    adapters: tuple[Any, ...] = ()

    @property
    def inputs(self) -> tuple[str, ...]:
        """Names of the arguments of the module's forward."""
        return ("hidden_states",) if self.router is not None else ("hidden_states", "top_k_index", "top_k_weights")

    def share(self, ranks: int) -> None:
        """Sets the adapters' number of experts to the number on each of `ranks` ranks."""
        for adapter in self.adapters:
            adapter.num_experts = self.count // ranks

    @contextmanager
    def using(self, tensors: Mapping[str, Tensor]) -> Iterator[None]:
        """Context in which the module computes with these tensors in place of its parameters."""
        module = self.module
        attributes, kind = vars(module), type(module)
        shadowed = {key: attributes[key] for key in tensors if key in attributes}
        attributes.update(tensors)
        # An adapter temporarily makes its parameter a property of a new class, which would take precedence.
        module.__class__ = type_before_parametrizations(module)
        try:
            yield
        finally:
            module.__class__ = kind
            for key in tensors:
                del attributes[key]
            attributes.update(shadowed)


@dataclass(frozen=True)
class Route:
    """Destinations of the chosen tokens of one forward, for a range of each rank's experts.

    Attributes:
        first, last: range of each rank's experts, without `last`.
        sent, received: numbers of rows to and from each rank.
        ids: (sum of `received`,) expert of each arriving row, counted from `first`; rows arrive by rank, and from each
            rank by expert.
        fullest: largest number of rows that arrive for one of all own experts.
    """

    first: int
    last: int
    sent: list[int]
    received: list[int]
    ids: Tensor
    fullest: int


Routes = tuple[Tensor, list[Route]]
"""((rows sent,) places among the T K choices, sorted by expert; routes, one for each chunk)."""

Router = Callable[[Experts, Collectives, int, Tensor, Tensor], Routes]


def route(experts: Experts, ranks: Collectives, buffer_nbytes: int, choices: Tensor, hidden: Tensor) -> Routes:
    """Computes the routes of tokens to the chosen experts. (all ranks of the group)

    Args:
        buffer_nbytes: limit for the rows that a rank sends or receives at a time, except those of one expert.
        choices: (T, K) numbers of experts; a number outside the experts is ignored.
        hidden: has the width and dtype of the rows.

    Raises:
        UsageError: on each rank: K, or the size of a row, differs between the ranks.
    """
    count, size, me = experts.count, ranks.world_size, ranks.rank
    # `bincount` first reads the extremes of its input: on a GPU, the host would wait twice more.
    places = choices.reshape(-1).long().clamp(max=count)
    tally = places.new_zeros(count + 2).scatter_add_(0, places, torch.ones_like(places))
    # After the counts, the assumptions about the other ranks' rows.
    row_nbytes = hidden.shape[-1] * hidden.element_size()
    tally[count].fill_(choices.shape[-1])
    tally[count + 1].fill_(row_nbytes)
    table = tally.new_empty(size, len(tally))
    ranks.all_gather(table.view(-1), tally, "count tokens").wait()
    on_host = _HostCopy(table)
    # Before the host waits, so that the device has work meanwhile; ignored choices are last.
    order = places.argsort(stable=True)
    counts = on_host.wait()
    _check_agreed(experts.name, counts[:, count:].tolist(), ranks)
    counts = counts[:, :count].reshape(size, size, -1)  # from, to, expert
    incoming, outgoing = counts[:, me], counts[me]
    arriving = table[:, :count].unflatten(1, (size, -1))[:, me]
    fullest = int(incoming.sum(0).max())
    routes = []
    for first, last in _chunks(counts, buffer_nbytes // max(1, row_nbytes)):
        sent, received = outgoing[:, first:last].sum(1).tolist(), incoming[:, first:last].sum(1).tolist()
        ids = torch.arange(last - first, device=places.device).repeat(size)
        ids = ids.repeat_interleave(arriving[:, first:last].reshape(-1), output_size=sum(received))
        routes.append(Route(first, last, sent, received, ids, fullest))
    return order[: int(outgoing.sum())], routes


class _HostCopy:
    """A copy of a tensor in page-locked host memory; on a CPU, the tensor itself."""

    def __init__(self, source: Tensor) -> None:
        self._host, self._event = source, None
        if source.device.type != "cpu":
            streams = torch.get_device_module(source.device)
            self._host = torch.empty(source.shape, dtype=source.dtype, pin_memory=True).copy_(source, non_blocking=True)
            self._event = streams.Event()
            self._event.record(streams.current_stream(source.device))

    def wait(self) -> Numbers:
        """Blocks the host until the copy is complete; later work on the device does not delay it."""
        if self._event is not None:
            self._event.synchronize()
        return self._host.numpy()


def _check_agreed(name: str, of_ranks: Sequence[Sequence[int]], ranks: Collectives) -> None:
    """Refuses choices or rows whose shape differs between ranks; all ranks have the same table.

    Args:
        of_ranks: for each rank, experts per token and bytes of a row.
    """
    first = of_ranks[0]
    for rank, other in enumerate(of_ranks):
        if other != first:
            words = "{} experts per token, rows of {} bytes on {}"
            raise UsageError(
                f"{WHERE}: {name}",
                expected=words.format(*first, ranks.named([0])),
                got=words.format(*other, ranks.named([rank])),
                fix="build the same model, with the same config and dtype, on every rank",
            )


def _chunks(counts: Numbers, most: int) -> Iterator[tuple[int, int]]:
    """Yields the range (first, last) of experts in each chunk, without `last`; the same on all ranks.

    Args:
        counts: (P, P, E / P) rows from a rank, to a rank, for one of its experts.
        most: largest number of rows that a rank may send or receive at a time, except for one expert.
    """
    # Received and sent by each rank up to and including each expert, (2 P, E / P).
    totals = np.concatenate([counts.sum(0), counts.sum(1)]).cumsum(1)
    first, before = 0, np.zeros_like(totals[:, 0])
    if (totals[:, -1] > most).any():
        for expert in range(1, totals.shape[1]):
            if ((totals[:, expert] - before) > most).any():
                yield first, expert
                first, before = expert, totals[:, expert - 1]
    yield first, totals.shape[1]


def even_route(experts: Experts, ranks: Collectives, buffer_nbytes: int, choices: Tensor, hidden: Tensor) -> Routes:
    """Routes equal numbers of tokens to each rank, in one chunk, for tensors without values."""
    size, chosen = ranks.world_size, choices.reshape(-1)
    rows, counts = chosen.numel(), chosen.new_empty(experts.count + 2)
    ranks.all_gather(counts.new_empty(size * len(counts)), counts, "count tokens").wait()
    even = [rows * (rank + 1) // size - rows * rank // size for rank in range(size)]
    fullest = -(-rows * size // experts.count)
    ids = chosen.new_empty(rows)
    return chosen.argsort(stable=True), [Route(0, experts.count // size, even, even, ids, fullest)]


def divided_forwards(
    experts: Experts, ranks: Collectives, buffer_nbytes: int, route: Router = route
) -> dict[nn.Module, Any]:
    """Maps modules to their forwards on ranks that divide these experts.

    Args:
        buffer_nbytes: limit for the rows that a rank sends or receives at a time.
    """
    choose = partial(route, experts, ranks, buffer_nbytes)
    compute, router = experts.module.forward, experts.router
    if router is None:
        return {experts.module: partial(_dispatched, experts, compute, ranks, choose)}
    seen = _SeenScores(router.forward)
    return {router: seen, experts.module: partial(_dispatched_by_scores, experts, compute, ranks, choose, seen)}


def _parts(experts: Experts, routes: Sequence[Route]) -> list[dict[str, Tensor]]:
    """Returns the module's parameters for each route, by name; empty for a single route, which needs all."""
    if len(routes) == 1:
        return [{}]
    # One split for all routes: its backward joins their gradients once.
    sizes = [route.last - route.first for route in routes]
    split = {key: getattr(experts.module, key).split(sizes) for key in experts.params}
    return [{key: parts[place] for key, parts in split.items()} for place in range(len(routes))]


def _dispatched(
    experts: Experts,
    compute: Callable[..., Tensor],
    ranks: Collectives,
    choose: Callable[[Tensor, Tensor], Routes],
    hidden_states: Tensor,
    top_k_index: Tensor,
    top_k_weights: Tensor,
) -> Tensor:
    """Computes the forward of divided experts. (all ranks of the group)

    Args:
        compute: the module's own forward.
        choose: returns the routes of (T, K) numbers of experts.
        hidden_states: (T, H).
        top_k_index, top_k_weights: (T, K); an index outside the experts is ignored.
    """
    # The interface's argument names, since models may pass keywords.
    hidden, choices, weights = hidden_states, top_k_index, top_k_weights
    _check_routing(experts.name, hidden, choices, weights)
    order, routes = choose(choices, hidden)
    all_rows, all_scales = hidden[order // choices.shape[-1]], weights.reshape(-1)[order]
    parts = zip(routes, _cut(all_rows, routes), _cut(all_scales, routes), _parts(experts, routes), strict=True)
    del all_rows, all_scales
    returned = []
    for route, rows, scales, params in parts:
        rows, scales = _Send.apply(rows, scales, ranks, route.sent, route.received)  # type: ignore[no-untyped-call]
        ids, idle = route.ids, not len(rows)
        if idle:
            rows, scales = torch.cat([rows, rows.new_zeros(1, rows.shape[1])]), torch.cat([scales, scales.new_zeros(1)])
            ids = ids.new_zeros(1)
        experts.module.num_experts = route.last - route.first  # type: ignore[assignment]
        try:
            with experts.using(params) if params else nullcontext():
                out = compute(rows, ids.unsqueeze(1).to(choices.dtype), scales.unsqueeze(1))
        finally:
            experts.module.num_experts = experts.count  # type: ignore[assignment]
        out = out[:0] if idle else out
        returned.append(_Move.apply(out, ranks, route.received, route.sent, _BACK))  # type: ignore[no-untyped-call]
    joined = _join(returned, routes)
    placed = joined.new_zeros(choices.numel(), joined.shape[1]).index_copy(0, order, joined)
    return placed.view(*choices.shape, -1).sum(1).to(hidden.dtype)


def _cut(rows: Tensor, routes: Sequence[Route]) -> list[Tensor]:
    """Divides rows that are sorted by expert among the routes."""
    if len(routes) == 1:
        return [rows]
    pieces = rows.split([sent for of_rank in zip(*(route.sent for route in routes), strict=True) for sent in of_rank])
    return [torch.cat(pieces[place :: len(routes)]) for place in range(len(routes))]


def _join(parts: Sequence[Tensor], routes: Sequence[Route]) -> Tensor:
    """Joins the rows of all routes by expert: the inverse of `_cut`."""
    if len(routes) == 1:
        return parts[0]
    pieces = [rows.split(route.sent) for rows, route in zip(parts, routes, strict=True)]
    return torch.cat([piece for of_rank in zip(*pieces, strict=True) for piece in of_rank])


class _SeenScores:
    """A router's forward that keeps the scores, since the experts do not get them.

    Args:
        compute: the router's own forward: hidden (T, H) -> scores (T, E), 0 for experts not chosen, and logits.
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
    choose: Callable[[Tensor, Tensor], Routes],
    seen: _SeenScores,
    hidden_states: Tensor,
) -> Tensor:
    """Computes the forward of divided experts that take all tokens. (all ranks of the group)

    Args:
        compute: the module's own forward.
        choose: returns the routes of (T, K) numbers of experts.
        hidden_states: (E T, H), all tokens for each expert, times their scores.
    """
    scores, count = seen.scores, experts.count
    shape = None if scores is None else tuple(scores.shape)
    if scores is None or scores.dim() != 2 or shape != (len(hidden_states) // count, count):
        raise UsageError(
            f"{WHERE}: {experts.name}",
            expected="(E T, H) hidden states, and a router with scores (T, E) before it",
            got=f"{tuple(hidden_states.shape)}, {shape}",
            fix="set ep to 1",
        )
    # An expert with score 0 adds nothing to a token, and the token adds nothing to its gradients.
    choices = scores.topk(experts.router.top_k, dim=1).indices  # type: ignore[arg-type, union-attr]
    tokens = torch.arange(len(choices), device=choices.device).unsqueeze(1)
    order, routes = choose(choices, hidden_states)
    places = (choices * len(choices) + tokens).reshape(-1)[order]
    returned = []
    for route, rows, params in zip(routes, _cut(hidden_states[places], routes), _parts(experts, routes), strict=True):
        ids, local_count, sent, received = route.ids, route.last - route.first, route.sent, route.received
        rows = _Move.apply(rows, ranks, sent, received, _OUT)  # type: ignore[no-untyped-call]
        # Row n of expert e goes to place n of the expert's `room` places.
        room, by_expert = max(route.fullest, 1), ids.argsort(stable=True)
        counts = ids.new_zeros(local_count).scatter_add_(0, ids, torch.ones_like(ids))
        sorted_ids = ids[by_expert]
        within = torch.arange(len(ids), device=ids.device) - (counts.cumsum(0) - counts)[sorted_ids]
        slots = torch.empty_like(ids).index_copy_(0, by_expert, sorted_ids * room + within)
        with experts.using(params) if params else nullcontext():
            out = compute(rows.new_zeros(local_count * room, rows.shape[1]).index_copy(0, slots, rows))[slots]
        returned.append(_Move.apply(out, ranks, received, sent, _BACK))  # type: ignore[no-untyped-call]
    joined = _join(returned, routes)
    return joined.new_zeros(len(hidden_states), joined.shape[1]).index_copy(0, places, joined)


def _check_routing(name: str, hidden: Tensor, choices: Tensor, weights: Tensor) -> None:
    """Refuses a router whose output is not K experts and K weights for each token."""
    shapes = [tuple(tensor.shape) for tensor in (hidden, choices, weights)]
    is_known = shapes[1] == shapes[2] and hidden.dim() == choices.dim() == 2 and len(hidden) == len(choices)
    if not is_known or choices.dtype not in (torch.int64, torch.int32):
        raise UsageError(
            f"{WHERE}: {name}",
            expected="a router that returns K expert numbers (T, K) and K weights (T, K) for T tokens (T, H)",
            got=f"{shapes[0]}, {choices.dtype} {shapes[1]}, {shapes[2]}",
            fix="set ep to 1",
        )


def _exchanged(rows: Tensor, ranks: Collectives, received: Sequence[int], sent: Sequence[int], label: str) -> Tensor:
    out = rows.new_empty(sum(received), *rows.shape[1:])
    with named_range(label):
        ranks.exchange_rows(out, rows.contiguous(), received, sent, label).wait()
    return out


def _paired(
    rows: Tensor, scales: Tensor, ranks: Collectives, received: Sequence[int], sent: Sequence[int], label: str
) -> tuple[Tensor, Tensor]:
    """Exchanges rows, (n, H), and numbers of another dtype, (n,), in one message per rank."""
    bytes_of = [tensor.contiguous().view(torch.uint8) for tensor in (rows, scales.unsqueeze(1))]
    arrived = _exchanged(torch.cat(bytes_of, 1), ranks, received, sent, label)
    parts = arrived.split([columns.shape[1] for columns in bytes_of], 1)
    return parts[0].contiguous().view(rows.dtype), parts[1].contiguous().view(scales.dtype).squeeze(1)


class _Send(torch.autograd.Function):
    """Sends rows and weights to the ranks of their experts; a single node, so that its backward is one exchange too."""

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
    """Sends rows to other ranks, and their gradients back. `labels` names both exchanges."""

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
