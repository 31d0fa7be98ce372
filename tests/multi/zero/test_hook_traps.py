"""Situations in which hooks of sharded engines have gone wrong before, one test each.

Each test compares stage 3 with stage 0, which has no hooks: the bits must be equal.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import zeroaccel
from tests.support.pool import Ranks
from tests.support.refusals import message
from tests.support.training import SGD, WIDTH, Block, Run, Toy, batches, config, differences, train, train_step
from zeroaccel.engine import Engine
from zeroaccel.errors import EngineStateError, UsageError


class Recomputed(Toy):
    """Blocks under activation checkpointing, each alone or all in one segment."""

    def __init__(self, *, reentrant: bool, segments: bool = False) -> None:
        super().__init__()
        self.reentrant, self.segments = reentrant, segments

    def run_layers(self, x: Tensor) -> Tensor:
        for part in [super().run_layers] if self.segments else self.layers:
            x = checkpoint(part, x, use_reentrant=self.reentrant)
        return x


class Adapted(Toy):
    """Frozen blocks with a trainable low-rank addition: the weights are needed after the last gradient arrives."""

    def __init__(self, *, recompute: bool | None = None) -> None:
        super().__init__()
        self.recompute = recompute
        for param in self.parameters():
            param.requires_grad_(False)
        for layer in self.layers:
            layer.low = nn.Linear(WIDTH, 3, bias=False)
            layer.high = nn.Linear(3, WIDTH, bias=False)
            layer.forward = lambda x, layer=layer: Block.forward(layer, x) + layer.high(layer.low(x))

    def run_layers(self, x: Tensor) -> Tensor:
        if self.recompute is None:
            return super().run_layers(x)
        x = x.requires_grad_()
        for layer in self.layers:
            x = checkpoint(layer, x, use_reentrant=self.recompute)
        return x


class Shared(Toy):
    """One block applied twice, and a projection that belongs to two blocks."""

    def __init__(self) -> None:
        super().__init__()
        self.layers[2].up = self.layers[0].up
        self.layers[2].down.weight = self.layers[0].down.weight

    def run_layers(self, x: Tensor) -> Tensor:
        return self.layers[1](super().run_layers(x))


class Outside(Toy):
    """Reads parameters of other units directly: the embedding as a head, a block's norm in the root."""

    def __init__(self) -> None:
        super().__init__()
        del self.head
        self.big = nn.Embedding(3000, WIDTH)  # large enough to be a separate unit

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.run_layers(self.embed(tokens[:, :-1]) + self.big(tokens[:, :-1]))
        x = x * self.layers[0].norm.weight + self.big.weight[:1]
        logits = nn.functional.linear(x, self.embed.weight)
        return nn.functional.cross_entropy(logits.flatten(0, 1).float(), tokens[:, 1:].flatten())


class InPlace(Toy):
    """A block returns views, and its caller changes one in place."""

    def run_layers(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            parts = _Halves(layer)(x)
            parts[0].mul_(1.5)
            x = torch.cat(parts, dim=-1)
        return x


class _Halves(nn.Module):
    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.layer = [layer]

    def forward(self, x: Tensor) -> list[Tensor]:
        y = self.layer[0](x)
        return [y[..., :5], y[..., 5:]]


class ViewBlock(Block):
    """A block that returns a view of its result."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x)[...]


class InPlaceOnOutput(Toy):
    """A block returns a view, and its caller changes it in place: the hook must not be lost."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(ViewBlock(WIDTH) for _ in range(3))

    def run_layers(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
            x += 0.125
        return x


class InPlaceOnInput(Toy):
    """A block that changes its input in place."""

    def __init__(self) -> None:
        super().__init__()
        for layer in self.layers:
            layer.forward = lambda x, layer=layer: Block.forward(layer, x.mul_(0.5))

    def run_layers(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x * 2.0) + 0.0
        return x


class Nested(Toy):
    """Inputs and outputs inside dictionaries, tuples and keywords; one output is unused."""

    def __init__(self) -> None:
        super().__init__()
        for layer in self.layers:
            layer.forward = lambda state, *, scale, layer=layer: (
                {"x": Block.forward(layer, state["pair"][0]) * scale},
                layer.norm(state["pair"][1]),
            )

    def run_layers(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            out, _ = layer({"pair": (x, x + 1)}, scale=torch.ones((), dtype=x.dtype))
            x = out["x"]
        return x


class Encoder(Toy):
    """One tensor feeds every block, as an encoder's output does, and blocks run on different branches."""

    def run_layers(self, memory: Tensor) -> Tensor:
        x = sum(layer(memory) for layer in self.layers)
        return x + self.layers[0](x)


class MixtureOfExperts(Toy):
    """The ranks use different experts, and one expert is unused on all ranks."""

    def __init__(self) -> None:
        super().__init__()
        self.moe = nn.Module()
        self.moe.gate = nn.Linear(WIDTH, 4)
        self.moe.experts = nn.ModuleList(Block(WIDTH) for _ in range(4))
        self.moe.forward = lambda x, chosen: self.moe.experts[chosen](x) * self.moe.gate(x).softmax(-1)[..., :1]

    def run_layers(self, x: Tensor) -> Tensor:
        return self.moe(super().run_layers(x), torch.distributed.get_rank())


class RootExperts(Toy):
    """Experts in a list of the root itself; rank 0 runs none."""

    def __init__(self) -> None:
        super().__init__()
        self.experts = nn.ModuleList(Block(WIDTH) for _ in range(3))

    def run_layers(self, x: Tensor) -> Tensor:
        x = super().run_layers(x)
        return self.experts[1](x) if torch.distributed.get_rank() == 1 else x


class PartlyUsed(Toy):
    """Blocks with two experts, of which rank 0 uses one and rank 1 both."""

    def __init__(self) -> None:
        super().__init__()
        for layer in self.layers:
            layer.experts = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(2))
            layer.forward = lambda x, layer=layer: self._partly(layer, x)

    def _partly(self, layer: Block, x: Tensor) -> Tensor:
        for expert in layer.experts[: 1 + torch.distributed.get_rank()]:
            x = x + expert(x)
        return Block.forward(layer, x)


class PassedBy(Toy):
    """Blocks that are an identity in some steps, or whose output is dropped: different blocks on each rank."""

    def __init__(self, recompute: bool | None = None, drops: bool = True) -> None:
        super().__init__(layers=4)
        self.recompute, self.drops, self.calls = recompute, drops, 0
        for number, layer in enumerate(self.layers):
            layer.forward = lambda x, number=number, layer=layer: self._maybe(number, layer, x)

    def _is_out(self, number: int) -> bool:
        return (self.calls * (2 + torch.distributed.get_rank()) + number) % 3 == 0

    def _maybe(self, number: int, layer: Block, x: Tensor) -> Tensor:
        return x if self._is_out(number) and not self.drops else Block.forward(layer, x)

    def run_layers(self, x: Tensor) -> Tensor:
        self.calls += 1
        for number, layer in enumerate(self.layers):
            y = layer(x) if self.recompute is None else checkpoint(layer, x, use_reentrant=self.recompute)
            x = x if self.drops and self._is_out(number) else y
        return x


class ReturnsViews(Toy):
    """Modules that return views of their own parameter, as position embeddings do; one is read before its module."""

    def __init__(self) -> None:
        super().__init__()
        self.positions = nn.ModuleList(nn.Embedding(7, WIDTH) for _ in range(2))
        self.mixed = nn.Linear(WIDTH, WIDTH)
        first, second = self.positions
        first.forward = lambda count: first.weight[None].expand(count, -1, -1)
        second.forward = lambda count: {"at": [second.weight[1:].T, second.weight[0]]}

    def forward(self, tokens: Tensor) -> Tensor:
        up = self.layers[1].up.weight.T
        x = self.run_layers(self.embed(tokens[:, :-1]) + self.mixed(self.positions[0](len(tokens))))
        views, first = self.positions[1](len(tokens))["at"]
        return self.loss(x + torch.cat([first[None], views.T]) + (x @ up)[..., :WIDTH], tokens)


class Penalised(Toy):
    """A penalty on the gradient with respect to an input: a differentiable backward within forward."""

    def forward(self, tokens: Tensor) -> Tensor:
        start = self.embed(tokens[:, :-1])
        loss = self.loss(self.run_layers(start), tokens)
        if torch.is_grad_enabled():
            (slope,) = torch.autograd.grad(loss, start, create_graph=True)
            loss = loss + (slope.float().norm() - 1.0).square()
        return loss


class _OwnBackward(torch.autograd.Function):
    """Keeps the parameter itself, not as a saved tensor."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        ctx.x, ctx.weight = x.detach(), weight
        return x @ weight.t()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor]:
        (grad,) = grads
        return grad @ ctx.weight.detach(), grad.flatten(0, 1).t() @ ctx.x.flatten(0, 1)


class OwnFunctions(Toy):
    """Blocks with a function whose backward reads the parameter, parametrized weights, and lists of parameters."""

    def __init__(self) -> None:
        super().__init__()
        for layer in self.layers:
            nn.utils.parametrizations.weight_norm(layer.down)
            layer.forward = lambda x, layer=layer: (
                x + layer.down(torch.relu(_OwnBackward.apply(layer.norm(x), layer.up.weight)))
            )
        self.list = nn.ParameterList(nn.Parameter(torch.ones(WIDTH)) for _ in range(2))
        self.by_name = nn.ParameterDict({"shift": nn.Parameter(torch.zeros(WIDTH))})

    def run_layers(self, x: Tensor) -> Tensor:
        x = super().run_layers(x)
        for scale in self.list:
            x = x * scale + self.by_name["shift"]
        return x


def _compiled() -> nn.Module:
    model = Toy()
    for layer in model.layers:
        layer.compile(backend="aot_eager")
    return model


def _wrapped_compiled() -> nn.Module:
    model = Toy()
    model.layers = nn.ModuleList(torch.compile(layer, backend="aot_eager") for layer in model.layers)
    return model


TRAPS: dict[str, Callable[[], nn.Module]] = {
    "plain": Toy,
    "recomputation": partial(Recomputed, reentrant=False),
    "re-entrant recomputation": partial(Recomputed, reentrant=True),
    "recomputed segment": partial(Recomputed, reentrant=False, segments=True),
    "re-entrant segment": partial(Recomputed, reentrant=True, segments=True),
    "adapters": Adapted,
    "adapters, recomputation": partial(Adapted, recompute=False),
    "adapters, re-entrant recomputation": partial(Adapted, recompute=True),
    "shared block and parameters": Shared,
    "read outside": Outside,
    "view output": InPlace,
    "in-place on a view output": InPlaceOnOutput,
    "in-place on an input": InPlaceOnInput,
    "nested inputs and outputs": Nested,
    "branches": Encoder,
    "mixture of experts": MixtureOfExperts,
    "experts of the root": RootExperts,
    "partly used": PartlyUsed,
    "views of parameters": ReturnsViews,
    "output dropped": PassedBy,
    "output dropped, recomputed": partial(PassedBy, False),
    "an identity, recomputed": partial(PassedBy, False, False),
    "an identity, recomputed in a nested backward": partial(PassedBy, True, False),
    "gradient penalty": Penalised,
    "own functions": OwnFunctions,
    "compiled blocks": _compiled,
    "wrapped compiled blocks": _wrapped_compiled,
}


def _train(settings: dict[str, Any], trap: str) -> Run:
    with warnings.catch_warnings():
        if "compiled" in trap:
            warnings.simplefilter("ignore")  # the compiler reads .grad of every tensor
        return train(settings, 3, make=TRAPS[trap])


@pytest.mark.parametrize("trap", TRAPS)
def test_stage_3_gives_the_bits_of_stage_0(ranks: Ranks, trap: str) -> None:
    expected = ranks(2).run(_train, config(0, "bf16"), trap)
    for changes in ({}, {"stage3_max_reuse_distance": 0, "reduce_bucket_size": 300}):
        sharded = ranks(2).run(_train, config(3, "bf16", **changes), trap)
        assert [differences(a, b) for a, b in zip(expected, sharded, strict=True)] == [[], []], changes


class KeepsViews(Toy):
    """A block that passes a view of its parameter to later code, by an attribute or inside an object."""

    def __init__(self, way: str) -> None:
        super().__init__()
        first, forward = self.layers[0], self.layers[0].forward

        def kept(x: Tensor) -> Any:
            view = first.up.weight.T
            if way == "attribute":
                first.kept = view
                return forward(x)
            return SimpleNamespace(out=forward(x), view=view)

        first.forward = kept
        self.way = way

    def run_layers(self, x: Tensor) -> Tensor:
        x = self.layers[0](x)
        x, view = (x, self.layers[0].kept) if self.way == "attribute" else (x.out, x.view)
        return self.layers[1](x) + (x @ view)[..., :WIDTH]


def _kept(stage: int, way: str) -> str:
    engine, *_ = zeroaccel.initialize(KeepsViews(way), config=config(stage, stage3_max_reuse_distance=0))
    try:
        for batch in batches(engine.collectives.rank, 2):
            train_step(engine, engine(batch))
    except EngineStateError as error:
        return str(error)
    finally:
        engine.reset()
        engine.destroy()
    return ""


@pytest.mark.parametrize(
    ("way", "says"),
    [
        ("attribute", "engine.forward: expected views of a module's parameters to be used within the module"),
        ("object", "forward of Block: expected lists, tuples or mappings around a view of a parameter, because"),
    ],
)
def test_views_of_parameters_that_outlive_their_module_are_named(ranks: Ranks, way: str, says: str) -> None:
    assert ranks(2).run(_kept, 0, way) == ["", ""]
    for said in ranks(2).run(_kept, 3, way):
        assert said.startswith(says)
        assert "clone() of it" in said


# -- an error inside a hook affects only its engine

PLACES = (
    ("_coordinator", "root_pre_forward"),
    ("_coordinator", "pre_forward"),
    ("_coordinator", "post_forward"),
    ("_coordinator", "root_post_forward"),
    ("_coordinator", "begin_backward"),
    ("_coordinator", "pre_backward"),
    ("_coordinator", "post_backward"),
    ("_coordinator", "end_backward"),
    ("grad_reducer", "on_grad_ready"),
    ("grad_reducer", "end"),
)
OF_UNITS = ("pre_forward", "post_forward", "pre_backward", "post_backward")  # stage 0 has no such hooks
TRANSFORMS: dict[str, Callable[[Engine, Tensor], Any]] = {
    "grad": lambda engine, x: torch.func.grad(lambda y: _called(engine, x, y))(torch.ones(())),
    "vmap": lambda engine, x: torch.func.vmap(lambda y: _called(engine, x, y))(torch.ones(2)),
}


def _called(engine: Engine, batch: Tensor, scale: Tensor) -> Tensor:
    loss: Tensor = engine(batch) * scale
    return loss


def _another(stage: int) -> list[float]:
    torch.manual_seed(7)
    engine, *_ = zeroaccel.initialize(Toy(), config=config(stage, optimizer=SGD))
    losses = [train_step(engine, engine(batch)) for batch in batches(engine.collectives.rank, 2)]
    engine.destroy()
    return losses


def _raise(*args: Any, **kwargs: Any) -> None:
    raise LookupError("in a hook")


def _after_errors(stage: int) -> list[str]:
    """Returns the places and transforms whose error affects another engine, or this one after reset()."""
    plain, wrong = _another(stage), []
    for place in (*PLACES, *TRANSFORMS):
        engine, *_ = zeroaccel.initialize(Toy(), config=config(stage, optimizer=SGD))
        first, second = batches(engine.collectives.rank, 2)
        train_step(engine, engine(first))
        if isinstance(place, str):
            with pytest.raises(EngineStateError, match=f"torch.func.{place} of Toy: expected a call outside"):
                TRANSFORMS[place](engine, first)
        else:
            with pytest.MonkeyPatch.context() as patch, warnings.catch_warnings():
                warnings.simplefilter("ignore")  # torch's own, for a hook that raises again in the modules around
                patch.setattr(getattr(engine, place[0]), place[1], _raise)
                if stage == 3 or place[1] not in OF_UNITS:
                    with pytest.raises(LookupError):
                        train_step(engine, engine(second))
        if _another(stage) != plain:  # while the failed engine still exists
            wrong.append(f"another, after {place}")
        engine.reset()
        if not math.isfinite(train_step(engine, engine(second))):
            wrong.append(f"itself, after {place}")
        engine.destroy()
    return wrong


@pytest.mark.parametrize("stage", [0, 3])
def test_an_error_in_a_hook_leaves_other_engines_alone(ranks: Ranks, stage: int) -> None:
    assert ranks(2).run(_after_errors, stage) == [[], []]


def _torchs_own() -> list[str]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # deprecated by torch, but still available
        scripted = nn.Sequential(nn.Linear(2, 2), torch.jit.trace(nn.Linear(2, 1), torch.ones(1, 2)))
    said = [message(UsageError, zeroaccel.initialize, scripted, config=config(3))]
    engine, *_ = zeroaccel.initialize(Toy(), config=config(3))
    engine.backward(engine(batches(engine.collectives.rank, 1)[0]))
    said.append(message(EngineStateError, nn.utils.clip_grad_value_, engine.module.parameters(), 1.0))
    engine.clip_grad_value_(1e-6)
    engine.step()
    norm = engine.get_global_grad_norm()
    assert norm is not None
    assert norm < 1e-3
    engine.destroy()
    return said


def test_unsupported_uses_of_torch_are_named(ranks: Ranks) -> None:
    for scripted, clipped in ranks(2).run(_torchs_own):
        assert "initialize(model): module 1: expected Python modules" in scripted
        assert "a TorchScript module (Linear)" in scripted
        assert "call engine.clip_grad_value_(value) between backward and step" in clipped
