"""Activation checkpointing without ranks: equal numbers wherever the inputs are stored, and refusals."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from zeroaccel import activations
from zeroaccel.activations import (
    Activations,
    Recomputation,
    checkpoint,
    configure,
    repeated_blocks,
)
from zeroaccel.config.schema import ActivationCheckpointing
from zeroaccel.errors import UsageError
from zeroaccel.offload import activation_store
from zeroaccel.offload.activation_store import ActivationStore, SavedActivation


@pytest.fixture(autouse=True)
def _as_before() -> Iterator[None]:
    yield
    activations.reset()


class Block(nn.Module):
    """Two layers with dropout, a mask and a keyword argument."""

    calls = 0

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(12, 30)
        self.down = nn.Linear(30, 12)
        self.drop = nn.Dropout(0.3)

    def forward(self, x: Tensor, mask: Tensor, *, scale: float = 1.0, extra: Tensor | None = None) -> Tensor:
        Block.calls += 1
        y = self.drop(self.down(torch.tanh(self.up(x)))) * mask * scale
        return x + y if extra is None else x + y + extra


class Model(nn.Module):
    def __init__(self, around: Callable[..., Any] | None = None) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.embed = nn.Linear(5, 12)
        self.blocks = nn.ModuleList(Block() for _ in range(4))
        self.around = around

    def forward(self, x: Tensor) -> Tensor:
        x = self.embed(x)
        mask = (torch.arange(12) % 3 != 0).float()
        for index, block in enumerate(self.blocks):
            extra = x * 0.5 if index == 2 else None
            if self.around is None:
                x = block(x, mask, scale=0.5, extra=extra)
            else:
                x = self.around(block, x, mask, scale=0.5, extra=extra)
        return x.square().mean()


class Mirror:
    """Host memory for a simulated device; copies at once, and records the order of the calls."""

    def __init__(self) -> None:
        self.sent = self.brought = self.protected = 0
        self.ahead = 0

    def allocate(self, nbytes: int) -> Tensor:
        return torch.empty(nbytes, dtype=torch.uint8)

    def copy_to_host(self, target: Tensor, source: Tensor) -> None:
        self.sent += source.numel()
        target.copy_(source)

    def protect_sources(self) -> None:
        self.protected += 1

    def copy_to_device(self, source: Tensor, device: torch.device) -> Any:
        self.brought += source.numel()
        mirror, blocks_before = self, Block.calls

        def wait() -> Tensor:
            mirror.ahead += Block.calls > blocks_before
            return source.clone()

        return wait


def gradients(model: nn.Module) -> tuple[float, list[Tensor], Tensor]:
    """Returns the loss, the gradients and the state of the random generator."""
    torch.manual_seed(11)
    model.train()
    loss = model(torch.randn(7, 5))
    model.zero_grad()
    loss.backward()
    return loss.item(), [p.grad.clone() for p in model.parameters() if p.grad is not None], torch.get_rng_state()


def same(one: tuple[Any, ...], other: tuple[Any, ...]) -> bool:
    pairs = zip(one[1], other[1], strict=True)
    return one[0] == other[0] and all(torch.equal(a, b) for a, b in pairs) and torch.equal(one[2], other[2])


SECTIONS: dict[str, dict[str, Any]] = {
    "plain": {"wrap_blocks": True},
    "host": {"cpu_checkpointing": True, "wrap_blocks": True},
    "buffer": {"contiguous_memory_optimization": True, "number_checkpoints": 5, "wrap_blocks": True},
    "host buffer": {
        **{"cpu_checkpointing": True, "contiguous_memory_optimization": True},
        **{"number_checkpoints": 5, "wrap_blocks": True},
    },
    "profile": {"profile": True, "synchronize_checkpoint_boundary": True, "wrap_blocks": True},
}


@pytest.mark.parametrize(
    ("name", "mirrored"), [*((name, False) for name in SECTIONS), ("host", True), ("host buffer", True)]
)
def test_numbers_are_those_of_a_run_without_it(name: str, mirrored: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    reference = gradients(Model())
    mirror = Mirror()
    if mirrored:
        monkeypatch.setattr(activation_store, "link_to", lambda device: mirror)
    section = ActivationCheckpointing(**SECTIONS[name])
    recomputation = Recomputation(model := Model(), section)
    recomputation.apply()
    for _ in range(2):
        assert same(gradients(model), reference)
    assert recomputation._activations.store.count == 0
    recomputation.undo()
    assert all("forward" not in vars(block) for block in model.blocks)
    assert same(gradients(model), reference)
    configure(section)
    assert same(gradients(Model(checkpoint)), reference)
    if mirrored:
        inputs = 7 * 12 * 5  # four hidden states, and the third block's extra input
        assert mirror.sent == mirror.brought == inputs * 3
        assert mirror.ahead == 4 * 3, "inputs return during the recomputation of a later block"


def test_only_the_inputs_are_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    saved: list[int] = []

    def count(tensor: Tensor) -> Tensor:
        saved.append(tensor.numel())
        return tensor

    def kept_by(model: nn.Module) -> int:
        saved.clear()
        with torch.autograd.graph.saved_tensors_hooks(count, lambda tensor: tensor):
            model(torch.randn(7, 5))
        return sum(saved)

    plain = kept_by(Model())
    assert kept_by(Model(checkpoint)) < plain / 4
    mirror = Mirror()
    monkeypatch.setattr(activation_store, "link_to", lambda device: mirror)
    recomputation = Recomputation(model := Model(), ActivationCheckpointing(cpu_checkpointing=True, wrap_blocks=True))
    recomputation.apply()
    loss = model(torch.randn(7, 5))
    store = recomputation._activations.store
    assert (store.count, store.stored_nbytes) == (5, 5 * 7 * 12 * 4)
    loss.backward()
    assert (store.count, store.stored_nbytes, store.peak_nbytes) == (0, 0, 5 * 7 * 12 * 4)


def test_strides_come_back_and_gaps_are_left_alone() -> None:
    store = ActivationStore(slots=3)
    for tensor in (
        torch.randn(2, 3, 4).permute(2, 0, 1),
        torch.randn(2, 3, 4, 5).to(memory_format=torch.channels_last),
    ):
        kept = store.save(tensor)
        assert isinstance(kept, SavedActivation)
        back = store.fetch(kept)
        assert torch.equal(back, tensor)
        assert back.stride() == tensor.stride()
        del kept
    assert store.save(gapped := torch.randn(4, 6)[:, ::2]) is gapped
    assert store.save(expanded := torch.randn(4, 1).expand(4, 6)) is expanded


def test_a_change_in_place_after_forward_does_not_change_the_kept_input() -> None:
    configure(ActivationCheckpointing(contiguous_memory_optimization=True, number_checkpoints=1))
    weight = torch.randn(4, requires_grad=True)
    hidden = weight * 2
    out = checkpoint(lambda x: x.sin() * 3, hidden)
    with torch.no_grad():
        hidden.zero_()
    out.sum().backward()
    assert torch.equal(weight.grad, 2 * (3 * (weight.detach() * 2).cos()))


class LateLink(Mirror):
    """Copies to the host as late as a device may: when the program may change the sources or fetches the copies."""

    def __init__(self) -> None:
        super().__init__()
        self.under_way: list[tuple[Tensor, Tensor]] = []

    def copy_to_host(self, target: Tensor, source: Tensor) -> None:
        self.under_way.append((target, source))

    def protect_sources(self) -> None:
        for target, source in self.under_way:
            target.copy_(source)
        self.under_way.clear()

    def copy_to_device(self, source: Tensor, device: torch.device) -> Any:
        self.protect_sources()
        return super().copy_to_device(source, device)


@pytest.mark.parametrize("raises", [False, True])
def test_an_input_may_be_changed_in_place_once_its_call_is_over(raises: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    link = LateLink()
    monkeypatch.setattr(activation_store, "link_to", lambda device: link)
    configure(ActivationCheckpointing(cpu_checkpointing=True))
    weight = torch.randn(4, requires_grad=True)
    hidden = weight * 2
    under_way_inside = []

    def function(x: Tensor) -> Tensor:
        under_way_inside.append(len(link.under_way))
        if raises:
            raise ValueError("a bad batch")
        return x.sin() * 3

    if raises:
        with pytest.raises(ValueError, match="a bad batch"):
            checkpoint(function, hidden)
        assert not link.under_way
        return
    out = checkpoint(function, hidden)
    with torch.no_grad():
        hidden.zero_()
    out.sum().backward()
    assert torch.equal(weight.grad, 2 * (3 * (weight.detach() * 2).cos()))
    assert under_way_inside[0] == 1, "the copy of an input did not overlap with the function"


def test_two_backwards_through_one_graph() -> None:
    configure(ActivationCheckpointing(contiguous_memory_optimization=True, number_checkpoints=2))
    x = torch.randn(5, requires_grad=True)
    y = checkpoint(lambda a, b: (a * b, a + b), x * 2, x.exp())
    assert isinstance(y, tuple)
    loss = (y[0] * y[1]).sum()
    loss.backward(retain_graph=True)
    first = x.grad.clone()
    loss.backward()
    assert torch.equal(x.grad, first * 2)


def test_nothing_is_recomputed_without_gradients() -> None:
    calls: list[bool] = []
    with torch.no_grad():
        checkpoint(lambda x: calls.append(torch.is_grad_enabled()) or x, torch.ones(1))
    assert calls == [False]


def test_a_copied_or_pickled_model_calls_itself() -> None:
    recomputation = Recomputation(model := Model(), ActivationCheckpointing(wrap_blocks=True))
    recomputation.apply()
    for twin in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        with torch.no_grad():
            for param in model.parameters():
                param.zero_()
        assert gradients(twin)[0] != gradients(model)[0]
        model.load_state_dict(twin.state_dict())
        assert same(gradients(twin), gradients(model))


def test_repeated_blocks_are_found() -> None:
    nested = nn.Sequential(
        nn.Linear(3, 3), nn.Sequential(*(nn.Sequential(nn.Linear(3, 3)) for _ in range(2))), nn.ReLU()
    )
    assert [fqn for fqn, _ in repeated_blocks(nested)] == ["1.0", "1.1"]
    assert [fqn for fqn, _ in repeated_blocks(Model())] == [f"blocks.{index}" for index in range(4)]
    assert repeated_blocks(nn.Linear(3, 3)) == []


def test_profile_is_logged_at_the_next_forward(caplog: pytest.LogCaptureFixture) -> None:
    configure(ActivationCheckpointing(profile=True, contiguous_memory_optimization=True, number_checkpoints=5))
    model = Model(checkpoint)
    with caplog.at_level("INFO", logger="zeroaccel"):
        gradients(model)
        assert "activations:" not in caplog.text
        gradients(model)
    assert "activations: 4 checkpointed calls," in caplog.text
    assert "again in backward" in caplog.text


def run_two(sizes: tuple[int, int]) -> None:
    inputs = [torch.randn(size, requires_grad=True) for size in sizes]
    sum(checkpoint(torch.sin, x * 2).sum() for x in inputs).backward()


def _of_one(wrap: bool = False) -> ActivationCheckpointing:
    return ActivationCheckpointing(contiguous_memory_optimization=True, number_checkpoints=1, wrap_blocks=wrap)


@pytest.mark.parametrize(
    ("act", "message"),
    [
        (
            lambda: Activations(ActivationCheckpointing(contiguous_memory_optimization=True)),
            "contiguous_memory_optimization: expected number_checkpoints",
        ),
        (
            lambda: configure(ActivationCheckpointing(partition_activations=True)),
            "partition_activations: expected a tensor-parallel group",
        ),
        (
            lambda: Recomputation(nn.Linear(2, 2), _of_one(wrap=True)),
            "activation_checkpointing.wrap_blocks: expected a model with repeated blocks",
        ),
        (lambda: run_two((4, 4)), "at most number_checkpoints = 1 tensors at a time, got '2'"),
        (lambda: run_two((4, 400)), "tensors of at most 64 bytes, the size of a slot in this pass, got 'one of 1600'"),
    ],
)
def test_what_is_refused(act: Callable[[], Any], message: str) -> None:
    configure(_of_one())
    with pytest.raises(UsageError, match=message):
        act()


def test_a_tensor_parallel_group_must_be_one() -> None:
    configure(tensor_parallel_group="tp")
    with pytest.raises(UsageError, match=r"tensor_parallel_group|expected"):
        configure(ActivationCheckpointing(partition_activations=True))
