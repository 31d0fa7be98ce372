"""Meshes of several axes (pipelines, tensor, sequence and expert parallelism) against one process."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import zeroaccel
from tests.support.mesh_training import NEEDS_SPLIT_LAYERS, NEEDS_STAGES, small_gpt2, small_llama, train_micro_step
from tests.support.mixtures import MIXTURES, small_mixture
from tests.support.pool import Ranks
from tests.support.refusals import message
from tests.support.training import Run, config, differences
from zeroaccel.checkpoint.consolidate import get_fp32_state_dict_from_zero_checkpoint
from zeroaccel.config.parallel import ParallelConfig
from zeroaccel.errors import ZeroAccelError
from zeroaccel.zero import safe_get_full_fp32_param, safe_get_full_optimizer_state

pytest.importorskip("transformers")


VOCABULARY, BATCH, LENGTH, MICRO_BATCHES, STEPS = 64, 2, 8, 3, 2
# The gradient of the keys' bias consists of rounding errors; Adam with a small eps would turn them into full steps.
ADAMW = {"type": "AdamW", "params": {"lr": 1e-2, "weight_decay": 0.1, "eps": 1e-4}}
SGD = {"type": "SGD", "params": {"lr": 0.1, "momentum": 0.9}}
CLIPPING = 0.5


def build(kind: str) -> nn.Module:
    """Makes a model of four blocks, the same on every rank; "gpt2" and "llama-tied" tie embedding and head."""
    if kind in MIXTURES:
        return small_mixture(kind, num_hidden_layers=4)
    if kind == "gpt2":
        return small_gpt2(use_cache=False)
    family = "Llama" if kind.startswith("llama") else kind
    return small_llama(
        family, num_hidden_layers=4, tie_word_embeddings=kind == "llama-tied", attn_implementation="sdpa"
    )


def batches(place: int, count: int) -> Iterator[dict[str, Tensor]]:
    """Makes whole sequences of one data-parallel rank; the last tokens of one have no labels."""
    generator = torch.Generator().manual_seed(100 + place)
    for _ in range(count):
        ids = torch.randint(VOCABULARY, (BATCH, LENGTH), generator=generator)
        labels = ids.clone()
        labels[0, 6:] = -100
        yield {"input_ids": ids, "labels": labels}


def alone(kind: str, optimizer: Mapping[str, Any], places: int) -> Run:
    """Trains in one process without an engine, on the mean over micro-batches and data-parallel ranks."""
    model = build(kind)
    cls = torch.optim.AdamW if optimizer["type"] == "AdamW" else torch.optim.SGD
    own = cls(model.parameters(), **optimizer["params"])
    data = [batches(place, STEPS * MICRO_BATCHES) for place in range(places)]
    run = Run()
    for _ in range(STEPS):
        losses = [model(**next(source)).loss for _ in range(MICRO_BATCHES) for source in data]
        loss = torch.stack(losses).mean()
        loss.backward()
        run.norms.append(nn.utils.clip_grad_norm_(model.parameters(), CLIPPING).item())
        own.step()
        own.zero_grad()
        run.losses.append(loss.item())
    run.weights = {name: param.detach() for name, param in model.named_parameters()}
    return run


def train(engine: Any, mesh: ParallelConfig, run: Run) -> None:
    """Trains on this rank's batches, in the same loop with and without stages."""
    place = mesh.resolve(torch.distributed.get_world_size()).data_parallel_rank(torch.distributed.get_rank())
    data: Iterator[Any] = batches(place, STEPS * MICRO_BATCHES)
    if mesh.sp > 1:
        data = map(engine.sequence_group.shard, data)
    for _ in range(STEPS):
        if mesh.pp > 1:
            run.losses.append(engine.train_batch(data).item())
        else:
            run.losses.append(sum(train_micro_step(engine, next(data)) for _ in range(MICRO_BATCHES)) / MICRO_BATCHES)
        run.norms.append(engine.get_global_grad_norm())


def on_mesh(kind: str, settings: list[dict[str, Any]], mesh: ParallelConfig) -> list[Run]:
    """Trains one run per config; the weights are whole, on rank 0."""
    runs = []
    for each in settings:
        engine, *_ = zeroaccel.initialize(build(kind), config=dict(each), parallel=mesh)
        run = Run()
        train(engine, mesh, run)
        run.skipped = engine.skipped_steps
        run.weights = engine.consolidated_state_dict() or {}
        engine.destroy()
        runs.append(run)
    return runs


def settings_of(stage: int, optimizer: Mapping[str, Any], precision: str = "fp32", **zero: Any) -> dict[str, Any]:
    return config(stage, precision, MICRO_BATCHES, optimizer=optimizer, gradient_clipping=CLIPPING, **zero)


OFFLOAD = {"offload_optimizer": {"device": "cpu"}}
AUTO = {"tp_plan": "auto"}
SLOW = pytest.mark.slow

MESHES = [
    # model, mesh, ranks, optimizer
    pytest.param(
        "llama",
        ParallelConfig(pp=2, dp_shard=2, tp=2),
        8,
        SGD,
        marks=[NEEDS_SPLIT_LAYERS, NEEDS_STAGES, SLOW],
        id="2x2x2",
    ),
    pytest.param("gpt2", ParallelConfig(tp=2, **AUTO), 2, ADAMW, marks=NEEDS_SPLIT_LAYERS, id="gpt2"),
    pytest.param(
        "gpt2", ParallelConfig(dp_shard=2, tp=2, **AUTO), 4, SGD, marks=[NEEDS_SPLIT_LAYERS, SLOW], id="dp-tp"
    ),
    pytest.param("llama", ParallelConfig(sp=2, tp=2), 4, SGD, marks=NEEDS_SPLIT_LAYERS, id="sp-tp"),
    pytest.param("gpt2", ParallelConfig(dp_shard=2, sp=2), 4, SGD, marks=SLOW, id="dp-sp"),
    # With a router loss, which depends on all tokens of a sequence.
    pytest.param("Mixtral", ParallelConfig(sp=2, ep=2), 2, SGD, id="sp-ep"),
    pytest.param("Qwen3Moe", ParallelConfig(sp=2, ep=4), 4, SGD, marks=SLOW, id="dp-sp-ep"),
    pytest.param("Qwen3Moe", ParallelConfig(pp=2, ep=2), 4, SGD, marks=[NEEDS_STAGES, SLOW], id="pp-ep"),
]


@pytest.mark.parametrize(("kind", "mesh", "world", "optimizer"), MESHES)
def test_training_is_that_of_one_process(
    ranks: Ranks, kind: str, mesh: ParallelConfig, world: int, optimizer: dict[str, Any]
) -> None:
    settings = [settings_of(3, optimizer), settings_of(2, optimizer, **OFFLOAD)]
    of_ranks = ranks(world).run(on_mesh, kind, settings, mesh)
    plain = alone(kind, optimizer, mesh.resolve(world).data_parallel_size)
    losses = torch.tensor([runs[0].losses for runs in of_ranks]).mean(0).tolist()
    assert losses == pytest.approx(plain.losses, rel=2e-6)
    weights = of_ranks[0][0].weights
    for name, weight in plain.weights.items():
        assert torch.allclose(weights[name], weight, rtol=1e-4, atol=3e-6), name
    for sharded, offloaded in of_ranks:
        assert differences(sharded, offloaded) == []
        assert sharded.norms == pytest.approx(plain.norms, rel=2e-6)


def _with_stages() -> str:
    parallel = ParallelConfig(pp=2)
    return message(
        ZeroAccelError, zeroaccel.initialize, build("Mixtral"), config=settings_of(1, SGD), parallel=parallel
    )


@NEEDS_STAGES
def test_a_loss_of_routers_is_refused_with_stages(ranks: Ranks) -> None:
    assert all("MixtralForCausalLM: expected output_router_logits=False" in said for said in ranks(2).run(_with_stages))


STAGED = [
    # model, mesh without stages, precision
    pytest.param("gpt2", {"tp": 2, **AUTO}, "fp16", id="tp", marks=NEEDS_SPLIT_LAYERS),
    pytest.param("llama-tied", {"tp": 2, **AUTO}, "fp32", id="tp-tied", marks=[NEEDS_SPLIT_LAYERS, SLOW]),
    pytest.param("llama", {"sp": 2}, "bf16", id="sp"),
]


@NEEDS_STAGES
@pytest.mark.parametrize(("kind", "axes", "precision"), STAGED)
def test_stages_change_no_bit_of_shared_layers_and_sequences(
    ranks: Ranks, kind: str, axes: dict[str, Any], precision: str
) -> None:
    settings = settings_of(2, SGD, precision)
    if precision == "fp16":  # the first step overflows, on some rank of some stage
        settings["fp16"] = {"enabled": True, "initial_scale_power": 19, "loss_scale_window": 5, "hysteresis": 1}
    whole = ranks(2).run(on_mesh, kind, [settings], ParallelConfig(**axes))[0][0]
    assert whole.skipped == (1 if precision == "fp16" else 0)
    losses = torch.tensor(whole.losses, dtype=torch.float32).tolist()
    of_ranks = ranks(4).run(on_mesh, kind, [settings], ParallelConfig(pp=2, **axes))
    for (staged,) in of_ranks:
        assert (staged.losses, staged.norms, staged.skipped) == (losses, whole.norms, whole.skipped)
    assert differences(Run(weights=whole.weights), Run(weights=of_ranks[0][0].weights)) == []


# -- resumed on other meshes


def states_of(engine: Any) -> dict[str, Tensor]:
    """Returns the whole masters and states of this rank's stage; moments only if the optimizer has them."""
    found = {}
    for name, param in engine.module.named_parameters():
        found[name] = safe_get_full_fp32_param(param)
        for key in ("exp_avg", "exp_avg_sq") if engine.global_steps else ():
            found[f"{key} {name}"] = safe_get_full_optimizer_state(param, key)
    return found


def resumed(kind: str, mesh: ParallelConfig, load: str, save: str) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """Loads, trains and saves; returns the loaded and the saved states."""
    engine, *_ = zeroaccel.initialize(build(kind), config=settings_of(2, ADAMW, "bf16"), parallel=mesh)
    if load:
        engine.load_checkpoint(load)
    loaded = states_of(engine)
    train(engine, mesh, Run())
    engine.save_checkpoint(save)
    saved = states_of(engine)
    engine.destroy()
    return loaded, saved


def together(per_rank: list[tuple[dict[str, Tensor], ...]], which: int) -> dict[str, Tensor]:
    """Merges the states of all stages; states on several ranks must be equal."""
    states: dict[str, Tensor] = {}
    for parts in per_rank:
        for name, value in parts[which].items():
            assert torch.equal(states.setdefault(name, value), value), name
    return states


RESUMES = [
    pytest.param("gpt2", [(4, {"pp": 2, "tp": 2, **AUTO}), (2, {"sp": 2}), (1, {})], id="short"),
    pytest.param(
        "llama",
        [
            (8, {"pp": 2, "dp_shard": 2, "tp": 2}),
            (6, {"pp": 3, "dp_shard": 2}),
            (4, {"dp_shard": 2, "sp": 2}),
            (4, {"dp_shard": 2, "tp": 2}),
            (1, {}),
        ],
        marks=SLOW,
        id="8-6-4-1",
    ),
]


@NEEDS_SPLIT_LAYERS
@NEEDS_STAGES
@pytest.mark.parametrize(("kind", "meshes"), RESUMES)
def test_states_are_the_same_on_every_mesh(
    ranks: Ranks, tmp_path: Path, kind: str, meshes: list[tuple[int, dict[str, Any]]]
) -> None:
    before: dict[str, Tensor] = {}
    load = ""
    for index, (world, axes) in enumerate(meshes):
        save = f"{tmp_path}/{index}"
        per_rank = ranks(world).run(resumed, kind, ParallelConfig(**axes), load, save)
        if before:
            assert differences(Run(weights=before), Run(weights=together(per_rank, 0))) == []
        before, load = together(per_rank, 1), save
        names = {name for name in before if " " not in name}
        assert names == {name for name, _ in build(kind).named_parameters()}
    exact = get_fp32_state_dict_from_zero_checkpoint(load)
    assert all(torch.equal(exact[name], before[name]) for name in names)


def drawn(folder: str, axes: dict[str, Any], *, loads: bool) -> float:
    """Draws a random number after a save, or after a load in a process with another seed."""
    settings = {**settings_of(1, SGD), "checkpoint": {"save_random_state": True}}
    engine, *_ = zeroaccel.initialize(build("llama"), config=settings, parallel=ParallelConfig(**axes))
    torch.manual_seed(5 if loads else 7 + torch.distributed.get_rank())
    if loads:
        engine.load_checkpoint(folder)
    else:
        engine.save_checkpoint(folder)
    engine.destroy()
    return torch.rand(1).item()


@NEEDS_SPLIT_LAYERS
def test_random_states_are_of_one_mesh(ranks: Ranks, tmp_path: Path) -> None:
    before = ranks(2).run(drawn, f"{tmp_path}", {}, loads=False)
    assert before[0] != before[1]
    assert ranks(2).run(drawn, f"{tmp_path}", {}, loads=True) == before
    # Tensor-parallel ranks would otherwise drop different elements of one tensor.
    first, second = ranks(2).run(drawn, f"{tmp_path}", {"tp": 2}, loads=True)
    assert first == second != before[0]


# -- refused meshes


def mistaken(what: str) -> str:
    axes: dict[str, Any] = {"pp": 2, "sp": 2} if what == "uncut" else {"sp": 2, "tp": 2}
    model = build("llama")
    engine = None
    try:
        engine, *_ = zeroaccel.initialize(model, config=settings_of(1, SGD), parallel=ParallelConfig(**axes))
        if what == "uncut":
            engine.train_batch(batches(0, MICRO_BATCHES))
    except ZeroAccelError as error:
        return f"{type(error).__name__}: {error}"
    finally:
        if engine is not None:
            engine.destroy()
    raise AssertionError("it was taken")


@NEEDS_SPLIT_LAYERS
@NEEDS_STAGES
@pytest.mark.parametrize(
    ("what", "says"),
    [
        (
            "uncut",
            "micro-batch 0: expected this rank's runs of sequences, with shift_labels, got ['input_ids', 'labels']",
        ),
    ],
)
def test_unsupported_meshes_are_refused_on_every_rank(ranks: Ranks, what: str, says: str) -> None:
    assert all(says in said for said in ranks(4).run(mistaken, what))
