"""Expert parallelism: one process's training, up to the order of sums, and the same bits at every stage.

python -m pytest -m slow tests/multi/parallel/test_expert_parallel.py -k any_mixture --sweep-report build/experts.jsonl
"""

from __future__ import annotations

import json
import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor, nn

import zeroaccel
from tests.support.mesh_training import with_frozen_base
from tests.support.mixtures import MIXTURE_VOCABULARY, MIXTURES, small_mixture
from tests.support.pool import Ranks
from tests.support.refusals import message
from tests.support.sweeps import Case, Sweep
from tests.support.training import ADAMW, Run, config, differences, finished, offloaded, recording, train_step
from zeroaccel.checkpoint.consolidate import get_fp32_state_dict_from_zero_checkpoint
from zeroaccel.comm.collectives import Collectives
from zeroaccel.comm.topology import init_process_group
from zeroaccel.compat.deepspeed_engine import initialize as as_deepspeed
from zeroaccel.config.launch.launch_settings import LaunchSettings
from zeroaccel.config.launch.launch_sources import launched_environment
from zeroaccel.config.parallel import ParallelConfig
from zeroaccel.errors import ZeroAccelError
from zeroaccel.parallel.expert_dispatch import _chunks
from zeroaccel.zero import (
    Init,
    safe_get_full_fp32_param,
    safe_get_full_grad,
    safe_get_full_optimizer_state,
    safe_set_full_fp32_param,
)
from zeroaccel.zero.grad_reducer import GradientBuffer, GradReducer

transformers = pytest.importorskip("transformers")

STEPS = 3
SGD = {"type": "SGD", "params": {"lr": 0.1, "momentum": 0.9}}
# Gradients of rarely chosen experts are small: with a smaller eps, rounding would determine the first steps.
EPS = 1e-4
OPTIMIZERS = {"sgd": SGD, "adamw": {**ADAMW, "params": {**ADAMW["params"], "eps": EPS}}}  # type: ignore[dict-item]
IS_ROUTED = ("experts", "gate.", "router", "shared_expert")


@dataclass
class MixtureRun(Run):
    """A run with the gradients of routers and experts of each step."""

    grads: list[dict[str, Tensor]] = field(default_factory=list)


def _batch(step: int, place: int) -> dict[str, Tensor]:
    """Makes the batch of one rank."""
    generator = torch.Generator().manual_seed(100 * step + place)
    ids = torch.randint(MIXTURE_VOCABULARY, (2, 12), generator=generator)
    return {"input_ids": ids, "labels": ids}


def _plain(model: nn.Module, optimizer: str, places: int) -> MixtureRun:
    """Trains in one process without an engine, on the mean of all ranks' losses."""
    stepped: torch.optim.Optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    if optimizer == "adamw":
        stepped = torch.optim.AdamW(model.parameters(), lr=1e-2, weight_decay=0.1, eps=EPS)
    run = MixtureRun()
    for step in range(STEPS):
        loss = sum(model(**_batch(step, place)).loss for place in range(places)) / places
        loss.backward()
        run.grads.append({name: param.grad.clone() for name, param in _routed(model)})
        run.norms.append(nn.utils.clip_grad_norm_(model.parameters(), 0.5).item())
        stepped.step()
        stepped.zero_grad()
        run.losses.append(loss.item())
    run.weights = {name: param.detach() for name, param in model.named_parameters()}
    return run


def _routed(model: nn.Module) -> list[tuple[str, nn.Parameter]]:
    return [(n, p) for n, p in model.named_parameters() if any(part in n for part in IS_ROUTED) and p.requires_grad]


def _train(model: nn.Module, settings: Mapping[str, Any], parallel: ParallelConfig, **arguments: Any) -> MixtureRun:
    engine, *_ = zeroaccel.initialize(model, config=dict(settings), parallel=parallel, **arguments)
    run = MixtureRun()
    for step in range(STEPS):
        loss = engine(**_batch(step, torch.distributed.get_rank())).loss
        engine.backward(loss)
        run.grads.append({name: safe_get_full_grad(param) for name, param in _routed(engine.module)})
        engine.step()
        run.losses.append(loss.item())
        run.norms.append(engine.get_global_grad_norm())
    finished(engine, run)
    return run


def _divided(kind: str, settings: list[dict[str, Any]], parallel: ParallelConfig) -> list[MixtureRun]:
    init_process_group()
    return [_train(small_mixture(kind), each, parallel) for each in settings]


def _settings(optimizer: str, folder: Path) -> list[dict[str, Any]]:
    """Returns configs of all stages; from stage 1 also with states in host memory, at stage 3 with weights, too."""
    common: dict[str, Any] = {"optimizer": OPTIMIZERS[optimizer], "gradient_clipping": 0.5}
    plain = [config(stage, **common) for stage in range(4)]
    return [
        *plain,
        config(1, **common, **offloaded(folder, "cpu")),
        config(2, **common, **offloaded(folder, "cpu")),
        config(3, **common, **offloaded(folder, "cpu", "cpu")),
    ]


def _close(runs: list[MixtureRun], plain: MixtureRun) -> dict[str, float]:
    """Checks that the ranks' runs match the plain run; returns the largest differences of each kind."""
    losses = torch.tensor([run.losses for run in runs], dtype=torch.float64).mean(0).tolist()
    loss = max(abs(one - other) / other for one, other in zip(losses, plain.losses, strict=True))
    found = {"loss": loss, "norm": 0.0, "gradients": 0.0}
    for run in runs:
        for norm, of_plain in zip(run.norms, plain.norms, strict=True):
            assert norm is not None
            assert of_plain is not None
            found["norm"] = max(found["norm"], abs(norm - of_plain) / of_plain)
        for step, grads in enumerate(plain.grads):
            assert grads.keys() == run.grads[step].keys()
            for name, grad in grads.items():
                assert run.grads[step][name].shape == grad.shape, name
                found["gradients"] = max(found["gradients"], _distance(run.grads[step][name], grad))
    assert all(distance < 1e-6 for distance in found.values()), found
    for run in runs:
        for name, weight in plain.weights.items():
            assert run.weights[name].shape == weight.shape, name
            assert torch.allclose(run.weights[name], weight, rtol=1e-4, atol=3e-6), name
    return found


def _close_and_alike(of_ranks: list[list[MixtureRun]], plain: MixtureRun) -> list[dict[str, float]]:
    """Checks that each run is close to the plain one, and has the bits of the other runs."""
    for first, *others in of_ranks:
        assert [differences(first, other) for other in others] == [[] for _ in others]
    return [_close(list(runs), plain) for runs in zip(*of_ranks, strict=True)]


def _distance(one: Tensor, other: Tensor) -> float:
    return (one - other).abs().max().item()


@pytest.mark.parametrize("kind", ["GptOss", "DeepseekV3"])
def test_mixture_trains_as_one_process_at_every_stage(ranks: Ranks, kind: str, tmp_path: Path) -> None:
    of_ranks = ranks(2).run(_divided, kind, _settings("sgd", tmp_path)[::6], ParallelConfig(ep=2))
    plain = _plain(small_mixture(kind), "sgd", 2)
    _close_and_alike(of_ranks, plain)


@pytest.mark.slow  # each kind, both optimizers, and groups of experts within the data ranks
@pytest.mark.parametrize("ep", [1, 2, 4])
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize("kind", MIXTURES)
def test_any_mixture_on_any_ranks(
    ranks: Ranks, sweep: Sweep, kind: str, optimizer: str, ep: int, tmp_path: Path
) -> None:
    of_ranks = ranks(4).run(_divided, kind, _settings(optimizer, tmp_path), ParallelConfig(ep=ep))
    plain = _plain(small_mixture(kind), optimizer, 4)
    found = _close_and_alike(of_ranks, plain)
    most = {key: max(one[key] for one in found) for key in found[0]}
    most["largest gradient"] = max(grad.abs().max().item() for grads in plain.grads for grad in grads.values())
    sweep.add(Case("experts", f"{optimizer}, ep {ep}", kind, "equal", json.dumps(most)))


def _planted(factor: float) -> MixtureRun:
    """Scales the gradients of experts, as an extra sum or an extra division over the expert-parallel ranks would."""
    launch = GradReducer._start_reduction

    def wrong(reducer: GradReducer, gradients: GradientBuffer, flat: Tensor, label: str) -> Any:
        return launch(reducer, gradients, flat.mul_(factor) if gradients.buffer.is_split else flat, label)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(GradReducer, "_start_reduction", wrong)
        return _divided(
            "Mixtral", [config(1, optimizer=OPTIMIZERS["adamw"], gradient_clipping=0.5)], ParallelConfig(ep=2)
        )[0]


@pytest.mark.parametrize("factor", [2.0, 0.5])
def test_gradients_of_experts_that_are_counted_twice_or_divided_once_more_are_found(
    ranks: Ranks, factor: float
) -> None:
    runs, plain = ranks(2).run(_planted, factor), _plain(small_mixture("Mixtral"), "adamw", 2)
    with pytest.raises(AssertionError):
        _close(runs, plain)


def _one_sided(stage: int, **parallel: Any) -> MixtureRun:
    init_process_group()
    settings = config(stage, optimizer=SGD, gradient_clipping=0.5)
    return _train(_biased(), settings, ParallelConfig(ep=2, **parallel))


def _biased() -> nn.Module:
    """Makes a model in which all tokens choose the first two of four experts."""
    model = small_mixture("GptOss")
    with torch.no_grad():
        for name, param in model.named_parameters():
            if name.endswith("router.bias"):
                param.copy_(torch.tensor([60.0, 50.0, 0.0, 0.0]))
    return model


@pytest.mark.parametrize(("stage", "chunks"), [(0, {}), (3, {}), (3, {"ep_buffer_nbytes": 1})])
def test_a_rank_that_no_token_chooses_takes_part_in_each_chunk(
    ranks: Ranks, stage: int, chunks: dict[str, int]
) -> None:
    of_ranks, plain = ranks(2).run(_one_sided, stage, **chunks), _plain(_biased(), "sgd", 2)
    unused = [grad for name, grad in plain.grads[0].items() if name.endswith("gate_up_proj")]
    assert all(not grad[2:].any() for grad in unused), "every token chooses the experts of rank 0"
    _close(of_ranks, plain)


# -- chunks


_ROW_NBYTES = 4 * 32  # bytes of a hidden state


def _chunked(kind: str, experts: str, rows: int) -> tuple[MixtureRun, int, int]:
    """Returns a run, the most rows of one exchange, and the number of token exchanges in the last step."""
    ranks, most, sent = recording(), 0, 0
    exchange = Collectives.exchange_rows

    def noted(self: Collectives, out: Tensor, rows: Tensor, *rest: Any) -> Any:
        nonlocal most, sent
        most, sent = max(most, len(out), len(rows)), sent + 1
        return exchange(self, out, rows, *rest)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Collectives, "exchange_rows", noted)
        parallel = ParallelConfig(ep=2, ep_buffer_nbytes=rows * _ROW_NBYTES, verify_cut=False)
        settings = config(2, optimizer=SGD, gradient_clipping=0.5)
        run = _train(small_mixture(kind, experts), settings, parallel, collectives=ranks)
    return run, most, sent


def _in_chunks(kind: str, experts: str) -> list[tuple[MixtureRun, int, int]]:
    return [_chunked(kind, experts, rows) for rows in (1 << 20, 24, 1)]


@pytest.mark.parametrize(
    ("kind", "experts"),
    [
        ("Llama4", ""),
        ("GptOss", "batched_mm"),
        ("Qwen3Moe", "grouped_mm"),
        pytest.param("Qwen3Moe", "eager", marks=pytest.mark.slow),
    ],
)
def test_chunks_have_the_bits_of_one_exchange(ranks: Ranks, kind: str, experts: str) -> None:
    own, layers = {"Qwen3Moe": 4, "Llama4": 2, "GptOss": 2}[kind], 2
    of_ranks = ranks(2).run(_in_chunks, kind, experts)
    for (one, all_rows, few), (some, rows, more), (each, _, most) in of_ranks:
        for step, grads in enumerate(one.grads):
            for name, grad in grads.items():
                assert _distance(grad, each.grads[step][name]) < 1e-7, name
        if experts == "grouped_mm":  # its sort by expert is not stable, so the order of an expert's sums differs
            assert one.losses[0] == some.losses[0] == each.losses[0]
        else:
            assert differences(one, some) == differences(one, each) == []
        assert few == STEPS * layers * 4, "one exchange out and one back per pass"
        assert few < more <= most == few * own, "with less room than one row, one exchange per expert"
        assert rows < all_rows
    assert len({most for *_, (_, _, most) in of_ranks}) == 1


@pytest.mark.parametrize(
    ("most", "chunks"), [(100, [(0, 4)]), (9, [(0, 2), (2, 4)]), (5, [(0, 1), (1, 2), (2, 3), (3, 4)])]
)
def test_chunks_are_as_large_as_the_fullest_rank_permits(most: int, chunks: list[tuple[int, int]]) -> None:
    counts = torch.zeros(2, 2, 4, dtype=torch.int64)
    counts[0, 1] = torch.tensor([5, 4, 6, 0])  # sent by rank 0 and received by rank 1
    counts[1, 0] = torch.tensor([0, 1, 0, 9])
    assert list(_chunks(counts.numpy(), most)) == chunks


# -- adapters


def _with_adapters(kind: str, *tensors: str, **changes: Any) -> nn.Module:
    """Adds LoRA to these tensors; its product is not 0 at the start."""
    peft = pytest.importorskip("peft")
    adapters = peft.LoraConfig(r=2, target_modules=[], target_parameters=list(tensors), init_lora_weights=False)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)  # transformers warns about peft
        return peft.get_peft_model(small_mixture(kind, **changes), adapters)  # type: ignore[no-any-return]


_PROJECTIONS = ("experts.gate_up_proj", "experts.down_proj")


def _adapted(kind: str, settings: list[dict[str, Any]], ep: int) -> list[MixtureRun]:
    init_process_group()
    return [_train(_with_adapters(kind, *_PROJECTIONS), each, ParallelConfig(ep=ep)) for each in settings]


@pytest.mark.parametrize(
    ("kind", "world", "ep"),
    [
        pytest.param("Qwen3Moe", 2, 2),
        pytest.param("GptOss", 4, 2, marks=pytest.mark.slow),
        pytest.param("Llama4", 2, 2, marks=pytest.mark.slow),
        pytest.param("Qwen3Moe", 2, 1, marks=pytest.mark.slow),
    ],
)
def test_adapters_of_experts_train_as_in_one_process(
    ranks: Ranks, kind: str, world: int, ep: int, tmp_path: Path
) -> None:
    settings = _settings("sgd", tmp_path)
    of_ranks = ranks(world).run(_adapted, kind, settings if ep == 1 or world > 2 else settings[:4:3], ep)
    plain = _plain(_with_adapters(kind, *_PROJECTIONS), "sgd", world)
    assert all("lora" in name for name in plain.grads[0]), "nothing else is trained"
    _close_and_alike(of_ranks, plain)


# -- traffic


def _traffic(ep: int, adapted: bool) -> tuple[int, int]:
    """Returns the bytes of weight gathers at stage 3, and the bytes of those without experts."""
    ranks = recording()
    model = _with_adapters("Qwen3Moe", *_PROJECTIONS) if adapted else small_mixture("Qwen3Moe")
    engine, *_ = zeroaccel.initialize(model, config=config(3), parallel=ParallelConfig(ep=ep), collectives=ranks)
    ranks.reset()
    train_step(engine, engine(**_batch(0, torch.distributed.get_rank())).loss)
    sent = sum(one.nbytes for one in ranks.traffic() if one.purpose == "unshard")
    apart = ranks.part_holders if ranks.part_holders is not None else ranks
    of_experts = [b for unit in engine.units for b in unit.buffers if "experts" in b.layout.slots[0].fqn]
    dense = sum(call.nbytes for call in ranks.calls if call.label.startswith("unshard")) if ep > 1 else 0
    assert all(b.layout.world_size == len(apart.ranks) for b in of_experts if b.is_split)
    engine.destroy()
    return sent, dense


@pytest.mark.parametrize("adapted", [False, True])
def test_no_experts_are_gathered_where_every_rank_has_its_own(ranks: Ranks, adapted: bool) -> None:
    (whole, _), (sent, dense) = (ranks(2).run(_traffic, ep, adapted)[0] for ep in (1, 2))
    assert 0 < sent == dense < whole


# -- refused models and settings


class _Gated(nn.Module):
    """A user's mixture: a gate and a list of experts."""

    def __init__(self) -> None:
        super().__init__()
        self.gate = nn.Linear(8, 2)
        self.experts = nn.ModuleList(nn.Linear(8, 8) for _ in range(2))


def _without_any() -> nn.Module:
    model: Any = small_mixture("Mixtral")
    for layer in model.model.layers:
        experts = layer.mlp.experts
        experts.num_experts = 0
        experts.gate_up_proj, experts.down_proj = (
            nn.Parameter(param[:0].detach()) for param in (experts.gate_up_proj, experts.down_proj)
        )
    return model


def _divided_by_transformers() -> nn.Module:
    model: Any = small_mixture("Mixtral")
    model.config.distributed_config = transformers.DistributedConfig(fsdp_size=2, ep_size=2)
    return model


_REFUSED: dict[str, tuple[Callable[[], nn.Module], dict[str, Any], str]] = {
    "unequal": (
        lambda: small_mixture("Mixtral", num_local_experts=3),
        {},
        "expert parallelism: model.layers.0.mlp.experts: expected a number of experts that is divisible by ep 2, got 3",
    ),
    "no experts": (
        _without_any,
        {},
        "expert parallelism: model.layers.0.mlp.experts: expected a number of experts that is divisible by ep 2, got 0",
    ),
    "divided by transformers": (
        _divided_by_transformers,
        {},
        "got 'a model that from_pretrained(distributed_config=DistributedConfig(ep_size=2)) has divided'; load it",
    ),
    "dense": (lambda: nn.Linear(4, 4), {}, "got 'no experts in Linear'; set ep to 1"),
    "lists": (
        lambda: nn.ModuleDict({"block": _Gated()}),
        {},
        "expert parallelism: block: expected transformers 5 experts",
    ),
    "an adapter on biases": (
        lambda: _with_adapters("GptOss", "experts.gate_up_proj_bias"),
        {},
        "mlp.experts.gate_up_proj_bias: expected PEFT's LoRA by target_parameters on a tensor of three dims",
    ),
    "one transposed expert": (
        lambda: _with_adapters("GptOss", "experts.gate_up_proj", num_local_experts=2),
        {},
        "mlp.experts.gate_up_proj: expected at least two experts on each rank",
    ),
    "rounded gathers": (
        lambda: small_mixture("Mixtral"),
        {"zero_quantized_weights": True},
        "zero_optimization.zero_quantized_weights: expected false with expert parallelism, got True",
    ),
    "second copy": (
        lambda: small_mixture("Mixtral"),
        {"zero_hpz_partition_size": 2},
        "zero_optimization.zero_hpz_partition_size: expected 1 with expert parallelism, got 2",
    ),
    "whole tensors": (
        lambda: small_mixture("Mixtral"),
        {"optimizer": {"type": "Muon", "params": {"lr": 0.1}}},
        "a parameter that tensor or expert parallelism splits",
    ),
}


def _refused(case: str) -> str:
    make, changes, _ = _REFUSED[case]
    init_process_group()
    settings, parallel = config(3, **changes), ParallelConfig(ep=2)
    return message(ZeroAccelError, zeroaccel.initialize, make(), config=settings, parallel=parallel)


@pytest.mark.parametrize("case", _REFUSED)
def test_experts_that_cannot_be_divided_are_refused_on_all_ranks(ranks: Ranks, case: str) -> None:
    for said in ranks(2).run(_refused, case):
        assert _REFUSED[case][2] in said


def _disagreed(what: str) -> str:
    """Makes rank 1 choose one more expert per token, or compute in another dtype."""
    init_process_group()
    model, is_other = small_mixture("Qwen3Moe"), torch.distributed.get_rank() == 1
    layers: Any = model.model.layers  # type: ignore[union-attr]
    parallel = ParallelConfig(ep=2, verify_cut=what == "choices")
    if what == "choices":
        for layer in layers:
            layer.mlp.gate.top_k = 2 + is_other
        return message(ZeroAccelError, zeroaccel.initialize, model, config=config(1), parallel=parallel)
    engine, *_ = zeroaccel.initialize(model, config=config(1), parallel=parallel)
    hidden = torch.ones(1, 6, 32, dtype=torch.bfloat16 if is_other else torch.float32)
    with torch.autocast("cpu", torch.bfloat16, enabled=is_other):
        said = message(ZeroAccelError, layers[0].mlp, hidden)
    engine.destroy()
    return said


@pytest.mark.parametrize(
    ("what", "words"),
    [
        ("choices", "expected 2 experts per token, rows of 128 bytes on rank 0, got '3 experts per token, rows of 128"),
        ("rows", "expected 2 experts per token, rows of 128 bytes on rank 0, got '2 experts per token, rows of 64"),
    ],
)
def test_ranks_that_disagree_on_shapes_of_routing_are_named(ranks: Ranks, what: str, words: str) -> None:
    for said in ranks(2).run(_disagreed, what):
        assert said.startswith("expert parallelism: model.layers.0.mlp.experts: ")
        assert words in said


def _generates() -> str:
    init_process_group()
    engine, *_ = zeroaccel.initialize(small_mixture("Mixtral"), config=config(3), parallel=ParallelConfig(ep=2))
    said = message(ZeroAccelError, engine.gathered().__enter__)
    engine.destroy()
    return said


def test_forwards_that_differ_between_ranks_are_refused(ranks: Ranks) -> None:
    for said in ranks(2).run(_generates):
        assert "expected all experts on every rank" in said


def _launched_with_stages() -> str:
    """Runs a program that calls DeepSpeed's initialize without a pipeline, launched with --pp_size and --ep_size."""
    init_process_group()
    asked = launched_environment(
        LaunchSettings(num_processes=4, pp_size=2, ep_size=2), {"pp_size": "--pp_size", "ep_size": "--ep_size"}
    )
    model = small_mixture("Mixtral", output_router_logits=False)
    with pytest.MonkeyPatch.context() as patch:
        for name, value in asked.items():
            patch.setenv(name, value)
        arguments = {"config": config(1, "fp32", 2), "model_parameters": model.parameters()}
        return message(ZeroAccelError, as_deepspeed, model=model, **arguments)


def test_a_program_of_deepspeed_without_stages_is_refused_with_them(ranks: Ranks) -> None:
    for said in ranks(4).run(_launched_with_stages):
        assert "pp: expected 1, because this program requests an engine without it" in said
        assert "ep 2'; launch without --pp_size" in said


# -- checkpoints, and access by name


def _state(engine: Any) -> dict[str, Tensor]:
    found = {}
    for name, param in engine.module.named_parameters():
        found[name] = safe_get_full_fp32_param(param)
        found[f"{name}: exp_avg"] = safe_get_full_optimizer_state(param, "exp_avg")
    return found


def _engine(stage: int, ep: int, **changes: Any) -> Any:
    init_process_group()
    engine, *_ = zeroaccel.initialize(
        small_mixture("GptOss"), config=config(stage, **changes), parallel=ParallelConfig(ep=ep)
    )
    return engine


def _step(engine: Any, number: int = 0) -> None:
    train_step(engine, engine(**_batch(number, torch.distributed.get_rank())).loss)


def _saved(folder: Path, stage: int, ep: int) -> dict[str, Tensor]:
    engine = _engine(stage, ep)
    _step(engine)
    engine.save_checkpoint(str(folder), tag="one")
    engine.save_model(str(folder / "model"), max_nbytes=1 << 30)
    state = _state(engine)
    engine.destroy()
    return state


def _loaded(folder: Path, stage: int, ep: int) -> dict[str, Tensor]:
    engine = _engine(stage, ep)
    engine.load_checkpoint(str(folder), tag="one")
    state = _state(engine)
    _step(engine, 1)
    engine.destroy()
    return state


@pytest.mark.parametrize(
    ("saved", "loaded"),
    [
        pytest.param((2, 3, 2), (2, 0, 1), id="divided to whole"),
        pytest.param((2, 0, 1), (2, 3, 2), id="whole to divided", marks=pytest.mark.slow),
        pytest.param((2, 3, 2), (4, 2, 4), id="2 to 4", marks=pytest.mark.slow),
        pytest.param((4, 3, 2), (1, 0, 1), id="groups of experts to one process", marks=pytest.mark.slow),
    ],
)
def test_a_checkpoint_is_independent_of_the_placement_of_experts(
    ranks: Ranks, saved: tuple[int, int, int], loaded: tuple[int, int, int], tmp_path: Path
) -> None:
    """`saved` and `loaded` are (ranks, stage, ep)."""
    before = ranks(saved[0]).run(_saved, tmp_path, *saved[1:])
    after = ranks(loaded[0]).run(_loaded, tmp_path, *loaded[1:])
    plain = small_mixture("GptOss").state_dict()
    for state in (*before, *after):
        assert state.keys() == before[0].keys()
        for name, value in before[0].items():
            assert torch.equal(state[name], value), name
    consolidated = get_fp32_state_dict_from_zero_checkpoint(str(tmp_path), tag="one")
    written = load_file(tmp_path / "model" / "model.safetensors")
    for name, value in plain.items():
        assert consolidated[name].shape == written[name].shape == value.shape, name
        assert torch.equal(consolidated[name], before[0][name]), name
        assert torch.equal(written[name], before[0][name]), name


def _written() -> None:
    init_process_group()
    with Init(config_dict_or_path=config(3)):
        model = small_mixture("GptOss")
    engine, *_ = zeroaccel.initialize(model, config=config(3), parallel=ParallelConfig(ep=2))
    name, param = next((n, p) for n, p in model.named_parameters() if n.endswith("experts.down_proj"))
    whole = dict(small_mixture("GptOss").named_parameters())[name].detach()
    assert torch.equal(safe_get_full_fp32_param(param), whole), "differs from the values that zero.Init sharded"
    safe_set_full_fp32_param(param, whole + 1)
    assert torch.equal(safe_get_full_fp32_param(param), whole + 1)
    assert torch.equal(dict(engine.iter_named_full_params())[name], whole + 1)
    engine.destroy()
    assert torch.equal(param.detach(), whole + 1)


def test_experts_are_read_and_written_whole_by_name(ranks: Ranks) -> None:
    ranks(2).run(_written)


def _loaded_into_other_experts(folder: Path, ep: int) -> str:
    model: Any = small_mixture("Mixtral")
    for layer in model.model.layers:  # gate and up separately, as in other forms of the model
        experts = layer.mlp.experts
        experts.gate_proj, experts.up_proj = (nn.Parameter(part) for part in experts.gate_up_proj.detach().chunk(2, 1))
        del experts.gate_up_proj
    parallel = ParallelConfig(ep=ep, verify_cut=False)
    engine, *_ = zeroaccel.initialize(model, config=config(3), parallel=parallel)
    said = message(ZeroAccelError, engine.load_checkpoint, str(folder), tag="one")
    engine.destroy()
    return said


def _saved_mixture(folder: Path) -> None:
    init_process_group()
    engine, *_ = zeroaccel.initialize(small_mixture("Mixtral"), config=config(3), parallel=ParallelConfig(ep=2))
    engine.save_checkpoint(str(folder), tag="one")
    engine.destroy()


def test_a_checkpoint_of_experts_that_were_fused_otherwise_is_named(ranks: Ranks, tmp_path: Path) -> None:
    ranks(2).run(_saved_mixture, tmp_path)
    for said in ranks(2).run(_loaded_into_other_experts, tmp_path, 2):
        assert "not in the checkpoint: model.layers.0.mlp.experts.gate_proj" in said
        assert "not in the model: model.layers.0.mlp.experts.gate_up_proj" in said


def _frozen_codes(ep: int, folder: str) -> list[list[float]]:
    """Returns the losses at stages 0 and 3, also after a checkpoint, on equal samples; and an expert's weight."""
    init_process_group()
    found = []
    ids = torch.randint(64, (2, 12), generator=torch.Generator().manual_seed(1))
    for stage in (0, 3):
        model = with_frozen_base(small_mixture("Mixtral"))
        optimizer = torch.optim.SGD([param for param in model.parameters() if param.requires_grad], 0.5, momentum=0.9)
        zero = {"stage": stage, "frozen_weights": "nf4", "stage3_param_persistence_threshold": 0}
        settings = {"train_micro_batch_size_per_gpu": 2, "zero_optimization": zero}
        engine, *_ = zeroaccel.initialize(model, optimizer, config=settings, parallel=ParallelConfig(ep=ep))
        losses = []
        for step in range(3):
            losses.append(train_step(engine, engine(input_ids=ids, labels=ids).loss))
            if step == 1:
                engine.save_checkpoint(folder, tag=f"stage{stage}")
                engine.load_checkpoint(folder, tag=f"stage{stage}")
        found.append(losses)
        state = engine.consolidated_state_dict()
        engine.destroy()
        if state is not None:
            found.append(state["model.layers.0.mlp.experts.gate_up_proj"].view(-1).tolist())
    return found


def test_frozen_weights_are_codes_of_each_ranks_experts(ranks: Ranks, tmp_path: Path) -> None:
    """The values equal those of one process, because whole experts are whole blocks."""
    whole = ranks(1).run(_frozen_codes, 1, str(tmp_path / "whole"))[0]
    split = ranks(2).run(_frozen_codes, 2, str(tmp_path / "split"))
    for index, (expected, found) in enumerate(zip(whole, split[0], strict=True)):
        assert found == (expected if index % 2 else pytest.approx(expected, rel=2e-6))
    assert split[1] == split[0][::2]
