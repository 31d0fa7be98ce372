"""Activation checkpointing in the engine: the bits of a run without it at every stage; partitioned on two ranks."""

from __future__ import annotations

import contextlib
import inspect
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import zeroaccel
from tests.support.libraries import TRL_1_0
from tests.support.mesh_training import small_llama
from tests.support.pool import Ranks
from tests.support.training import SGD, Block, Run, Toy, batches, config, differences, finished, train, train_step
from zeroaccel import activations
from zeroaccel.activations import Activations
from zeroaccel.comm.topology import init_process_group
from zeroaccel.config.schema import ActivationCheckpointing
from zeroaccel.offload.activation_store import SavedActivation


class _Dropping(Block):
    def forward(self, x: Tensor) -> Tensor:
        return nn.functional.dropout(super().forward(x), 0.2, self.training)


class _Checkpointing(_Dropping):
    def forward(self, x: Tensor) -> Tensor:
        return activations.checkpoint(super().forward, x)


def _model(kind: type[Block]) -> nn.Module:
    model = Toy()
    model.layers = nn.ModuleList(kind(block.norm.normalized_shape[0]) for block in model.layers)
    return model


def _runs(settings: list[tuple[dict[str, Any], dict[str, Any] | None, bool]]) -> list[Run]:
    found = []
    for base, section, by_hand in settings:
        whole = {**base, **({} if section is None else {"activation_checkpointing": section})}
        torch.manual_seed(5)
        kind = _Checkpointing if by_hand else _Dropping
        found.append(train(whole, 6, make=lambda kind=kind: _model(kind)))
        assert activations._current.section == ActivationCheckpointing(), "settings of an earlier engine are in effect"
    return found


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_every_stage_gives_the_bits_of_a_run_without_it(ranks: Ranks, precision: str) -> None:
    host = {"wrap_blocks": True, "cpu_checkpointing": True, "contiguous_memory_optimization": True}
    cases: list[tuple[dict[str, Any], dict[str, Any] | None, bool]] = []
    for stage in range(4) if precision == "bf16" else (0, 3):
        base = config(stage, precision, gradient_clipping=0.5, **({"optimizer": SGD} if stage == 1 else {}))
        cases += [(base, None, False), (base, host, False), (base, {"wrap_blocks": False, "profile": True}, True)]
    for found in ranks(2).run(_runs, cases):
        for index in range(0, len(found), 3):
            assert found[index].losses[-1] < found[index].losses[0]
            assert differences(found[index], found[index + 1]) == [], index // 3
            assert differences(found[index], found[index + 2]) == [], index // 3


def _of_libraries(stage: int) -> list[Run]:
    """Trains with the ways of transformers and TRL to keep fewer activations on the device; the first run is plain."""
    from trl.models.activation_offloading import get_act_offloading_ctx_manager

    offload = {}
    # An earlier torch than 2.15 asks for page-locked memory also without an accelerator.
    with contextlib.suppress(RuntimeError), torch.autograd.graph.save_on_cpu(pin_memory=True, device_type="cpu"):
        torch.ones(1, requires_grad=True).exp()
        offload = {"offload": True}
    accelerator = torch.accelerator.current_accelerator
    found = []
    for way in ({}, {"every_n_layers": 2}, {"every_n_layers": 1, **offload}, None):
        model: Any = small_llama(num_hidden_layers=3)
        enable = getattr(model, "activation_checkpointing_enable", model.gradient_checkpointing_enable)
        if way:
            enable(**{key: value for key, value in way.items() if key in inspect.signature(enable).parameters})
        engine, *_ = zeroaccel.initialize(model, config=config(stage, "bf16", optimizer=SGD))
        offloading = contextlib.nullcontext()
        if way is None:  # it knows parameters by the storages that they have here, which gathers replace at stage 3
            torch.accelerator.current_accelerator = lambda *_: torch.device("cpu")  # the device to offload from
            offloading = get_act_offloading_ctx_manager(engine, False, False, 0)
            torch.accelerator.current_accelerator = accelerator
        run = Run()
        for tokens in batches(engine.collectives.rank, 1) * 3:
            with offloading:
                run.losses.append(train_step(engine, engine(input_ids=tokens, labels=tokens).loss))
        found.append(finished(engine, run))
    return found


@pytest.mark.skipif(TRL_1_0 and not torch.cuda.is_available(), reason="TRL 1.0 asks CUDA for a stream")
@pytest.mark.parametrize("stage", [0, 3])
def test_checkpoints_of_transformers_and_offloading_of_trl_change_no_bit(ranks: Ranks, stage: int) -> None:
    for plain, *others in ranks(2).run(_of_libraries, stage):
        assert plain.losses[-1] < plain.losses[0]
        assert [differences(plain, other) for other in others] == [[]] * 3


def _shares(on_host: bool) -> tuple[list[Tensor], list[Tensor], int, int]:
    """Returns gradients with and without partitioning over both ranks, the bytes kept, and the bytes of the inputs."""
    init_process_group()
    section = ActivationCheckpointing(partition_activations=True, cpu_checkpointing=on_host)
    shared = Activations(section, group=dist.group.WORLD)
    results = []
    kept = whole = 0
    for call in (lambda function, x: function(x), shared.checkpoint):
        torch.manual_seed(9)  # tensor-parallel ranks have equal activations
        blocks = [_Dropping(23) for _ in range(3)]
        x = torch.randn(3, 5, 23, requires_grad=True)
        y = x * 2
        whole = 3 * y.numel() * 4
        for block in blocks:
            y = call(block, y)
        kept = shared.store.stored_nbytes
        y.square().sum().backward()
        results.append([x.grad, *(param.grad for block in blocks for param in block.parameters())])
    return results[0], results[1], kept, whole


@pytest.mark.parametrize("on_host", [False, True])
def test_a_group_keeps_a_share_per_rank(ranks: Ranks, on_host: bool) -> None:
    for plain, shared, kept, whole in ranks(2).run(_shares, on_host):
        assert all(torch.equal(one, other) for one, other in zip(plain, shared, strict=True))
        assert kept == pytest.approx(whole / 2, rel=0.01), "each rank keeps half"


def _in_an_engine(stage: int) -> list[str]:
    """Returns the differences from a run without partitioning; the ranks get equal batches."""
    init_process_group()

    def losses(section: dict[str, Any] | None) -> list[float]:
        settings = {**config(stage), **({} if section is None else {"activation_checkpointing": section})}
        torch.manual_seed(5)
        engine, *_ = zeroaccel.initialize(_model(_Dropping), config=settings)
        torch.manual_seed(6)
        found = [train_step(engine, engine(torch.randint(0, 61, (2, 8)))) for _ in range(4)]
        engine.destroy()
        return found

    section = {"wrap_blocks": True, "partition_activations": True}
    whole = losses(section)  # without a group, as in DeepSpeed at model-parallel size 1
    activations.configure(tensor_parallel_group=dist.group.WORLD)
    try:
        one, other = losses(None), losses(section)
    finally:
        activations.reset()
    return [] if one == other == whole else [f"{one} {other} {whole}"]


def test_shares_in_an_engine_that_shards_its_parameters(ranks: Ranks) -> None:
    assert ranks(2).run(_in_an_engine, 3) == [[], []]


def _kept_is_the_share() -> bool:
    init_process_group()
    shared = Activations(ActivationCheckpointing(partition_activations=True), group=dist.group.WORLD)
    tensor = torch.arange(7.0, requires_grad=True)  # not a multiple of the group size
    kept = shared.store.save(tensor)
    assert isinstance(kept, SavedActivation)
    assert kept.data is not None
    return kept.data.numel() == 4 and torch.equal(shared.store.fetch(kept), tensor.detach())


def test_a_share_is_padded(ranks: Ranks) -> None:
    assert ranks(2).run(_kept_is_the_share) == [True, True]
