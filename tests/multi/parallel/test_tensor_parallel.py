"""Tensor parallelism: one process's training, up to the order of sums, and the same bits at every stage."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor, nn
from torch.testing._internal.two_tensor import TwoTensor

import zeroaccel
from tests.support.environment import ROOT
from tests.support.mesh_training import NEEDS_SPLIT_LAYERS, small_llama, with_frozen_base
from tests.support.pool import Ranks
from tests.support.refusals import message
from tests.support.training import ADAMW, Run, config, differences, finished, offloaded, train_step
from zeroaccel.checkpoint.consolidate import get_fp32_state_dict_from_zero_checkpoint
from zeroaccel.checkpoint.reshard import reshard
from zeroaccel.comm.topology import init_process_group
from zeroaccel.config.parallel import ParallelConfig
from zeroaccel.errors import ConfigError, EngineStateError, UsageError, ZeroAccelError
from zeroaccel.parallel.tensor import _check_torch
from zeroaccel.zero import (
    GatheredParameters,
    Init,
    safe_get_full_fp32_param,
    safe_get_full_grad,
    safe_get_full_optimizer_state,
    safe_set_full_fp32_param,
    safe_set_full_grad,
    safe_set_full_optimizer_state,
)

transformers = pytest.importorskip("transformers")


VOCAB, STEPS = 64, 3
SGD = {"type": "SGD", "params": {"lr": 0.1, "momentum": 0.9}}
ATTENTION = {f"layers.*.self_attn.{name}_proj": "colwise" for name in "qkv"} | {
    "layers.*.self_attn.o_proj": "rowwise",
}


class Biased(nn.Module):
    """Linear layers under a plan by name, with biases; one bias must be added once, not by each rank."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(5)
        self.embed = nn.Embedding(VOCAB, 16)
        self.layers = nn.ModuleList(
            nn.ModuleDict({"norm": nn.LayerNorm(16), "up": nn.Linear(16, 24), "down": nn.Linear(24, 16)})
            for _ in range(2)
        )
        self.head = nn.Linear(16, VOCAB)

    def forward(self, input_ids: Tensor, labels: Tensor) -> Any:
        x = self.embed(input_ids)
        for layer in self.layers:
            x = x + layer["down"](torch.relu(layer["up"](layer["norm"](x))))  # type: ignore[index]
        loss = nn.functional.cross_entropy(self.head(x).flatten(0, 1), labels.flatten())
        return transformers.modeling_outputs.CausalLMOutput(loss=loss)


def _batch(step: int, place: int) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(100 * step + place)
    ids = torch.randint(VOCAB, (2, 12), generator=generator)
    return {"input_ids": ids, "labels": ids}


def _plain(make: Callable[[], nn.Module], adam: bool, places: int, clipping: float, eps: float = 1e-8) -> Run:
    """Trains in one process without an engine, on the mean loss of the data-parallel ranks' batches."""
    model = make()
    optimizer: torch.optim.Optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    if adam:
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, weight_decay=0.1, eps=eps)
    run = Run()
    for step in range(STEPS):
        loss = sum(model(**_batch(step, place)).loss for place in range(places)) / places
        loss.backward()
        run.norms.append(nn.utils.clip_grad_norm_(model.parameters(), clipping or 1e9).item())
        optimizer.step()
        optimizer.zero_grad()
        run.losses.append(loss.item())
    run.weights = {name: param.detach() for name, param in model.named_parameters()}
    return run


def _train(model: nn.Module, settings: Mapping[str, Any], parallel: ParallelConfig) -> Run:
    """Trains on this data-parallel rank's batches, which its `tp` ranks share."""
    engine, *_ = zeroaccel.initialize(model, config=dict(settings), parallel=parallel)
    place = torch.distributed.get_rank() // parallel.tp
    assert engine.train_batch_size() == 2 * torch.distributed.get_world_size() // parallel.tp
    return _run_over(engine, [_batch(step, place) for step in range(STEPS)])


def _run_over(engine: Any, data: Iterable[dict[str, Tensor]]) -> Run:
    run = Run()
    for batch in data:
        run.losses.append(train_step(engine, engine(**batch).loss))
        run.norms.append(engine.get_global_grad_norm())
    return finished(engine, run)


def _split(
    make: Callable[[], nn.Module], settings: list[dict[str, Any]], parallel: ParallelConfig, precision: str = "fp32"
) -> list[Run]:
    init_process_group()
    return [_train(make(), each, parallel) for each in settings]


def _close(runs: list[Run], plain: Run) -> None:
    losses = torch.tensor([run.losses for run in runs]).mean(0).tolist()
    assert losses == pytest.approx(plain.losses, rel=2e-6)
    for run in runs:
        # Each element counts once, whether the ranks split or replicate its parameter.
        assert run.norms == pytest.approx(plain.norms, rel=2e-6)
        for name, weight in plain.weights.items():
            assert run.weights[name].shape == weight.shape, name
            assert torch.allclose(run.weights[name], weight, rtol=1e-4, atol=3e-6), name


def _tied() -> nn.Module:
    return small_llama(tie_word_embeddings=True, attention_bias=True)


def _qwen3() -> nn.Module:
    """A Qwen3, whose queries and keys have norms between the split layers."""
    return small_llama("Qwen3", head_dim=8)


EXPERTS = {"num_local_experts": 4, "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16}


def _mixture(kind: str, **changes: Any) -> nn.Module:
    """A model of two blocks with experts."""
    return small_llama(kind, **{**EXPERTS, **changes})


def _qwen3_moe() -> nn.Module:
    return _mixture("Qwen3Moe", head_dim=8)


def _deepseek() -> nn.Module:
    """A model with latent attention: a projection's rotary part goes to attention, the rest through another layer."""
    latent = {"q_lora_rank": 12, "kv_lora_rank": 8, "qk_rope_head_dim": 4, "qk_nope_head_dim": 8, "v_head_dim": 8}
    groups = {"n_group": 1, "topk_group": 1, "n_shared_experts": 1, "first_k_dense_replace": 1, "n_routed_experts": 4}
    return _mixture("DeepseekV2", **latent, **groups, num_key_value_heads=4)


def _granite() -> nn.Module:
    """A model whose attention has its own parameter, one number per head."""
    return _mixture("GraniteMoeSWA")


def _aria() -> nn.Module:
    """A model whose expert weights are (experts, inputs, outputs)."""
    return _mixture("AriaText", moe_num_experts=4, moe_topk=2, moe_num_shared_experts=1)


CASES = [
    # model, plan, ranks, optimizer, clipping
    (small_llama, None, 2, "adamw", 0.05),
    (small_llama, ATTENTION, 4, "sgd", 0.0),
    (_tied, None, 2, "adamw", 0.05),
    pytest.param(_tied, None, 4, "adamw", 0.0, marks=pytest.mark.slow),
    (_qwen3, None, 2, "sgd", 0.05),
    (Biased, {"up": "colwise", "down": "rowwise", "embed": "embedding_colwise"}, 2, "sgd", 0.05),
    (_deepseek, None, 2, "sgd", 0.0),
    (_qwen3_moe, None, 2, "adamw, eps", 0.05),
    pytest.param(_granite, None, 2, "sgd", 0.05, marks=pytest.mark.slow),
    pytest.param(_aria, None, 2, "sgd", 0.0, marks=pytest.mark.slow),
]


@NEEDS_SPLIT_LAYERS
@pytest.mark.parametrize(("make", "plan", "world", "optimizer", "clipping"), CASES)
def test_training_is_that_of_one_process(
    ranks: Ranks, make: Callable[[], nn.Module], plan: Any, world: int, optimizer: str, clipping: float
) -> None:
    adam = optimizer != "sgd"
    # Gradients of rarely chosen experts are small: without a larger eps, rounding would determine the first steps.
    eps = 1e-4 if optimizer == "adamw, eps" else 1e-8
    kind = {**ADAMW, "params": {**ADAMW["params"], "eps": eps}} if adam else SGD
    keys = {"optimizer": kind, "gradient_clipping": clipping}
    settings = [config(stage, "fp32", **keys) for stage in (0, 1, 2, 3)]
    of_ranks = ranks(world).run(_split, make, settings, ParallelConfig(tp=2, tp_plan=plan))
    for first, *others in of_ranks:
        assert [differences(first, other) for other in others] == [[]] * 3
    _close([runs[0] for runs in of_ranks], _plain(make, adam, world // 2, clipping, eps))
    for rank in range(0, world, 2):  # equal bits of replicated weights, and on all data ranks
        assert differences(of_ranks[rank][0], of_ranks[rank + 1][0]) == []
        assert of_ranks[rank][0].norms == of_ranks[0][0].norms


@NEEDS_SPLIT_LAYERS
def test_tiers_keep_the_bits(ranks: Ranks, tmp_path: Path) -> None:
    plain = config(3, "fp32", optimizer=ADAMW, gradient_clipping=0.05)
    tiers = [offloaded(tmp_path, "cpu", "cpu"), offloaded(tmp_path, "nvme", "nvme")]
    settings = [plain, *(config(3, "fp32", optimizer=ADAMW, gradient_clipping=0.05, **tier) for tier in tiers)]
    for first, *others in ranks(4).run(_split, small_llama, settings, ParallelConfig(tp=2)):
        assert [differences(first, other) for other in others] == [[]] * 2


@NEEDS_SPLIT_LAYERS
def test_bf16_has_the_same_bits_at_every_stage(ranks: Ranks) -> None:
    settings = [config(stage, "bf16", optimizer=ADAMW) for stage in (0, 2, 3)]
    for first, *others in ranks(4).run(_split, small_llama, settings, ParallelConfig(dp_replicate=2, tp=2)):
        assert [differences(first, other) for other in others] == [[]] * 2


def _constructed(built: bool, parallel: ParallelConfig) -> Run:
    """Trains a model that `zero.Init` shards during construction, or else one with different values on the ranks."""
    init_process_group()
    settings = config(3, "fp32", optimizer=SGD)
    if built:
        with Init(config_dict_or_path=settings):
            return _train(small_llama(), settings, parallel)
    model = small_llama()
    if torch.distributed.get_rank():
        for param in model.parameters():
            param.data.normal_()
    return _train(model, settings, parallel)


@NEEDS_SPLIT_LAYERS
def test_weights_are_those_of_rank_0_however_the_model_was_built(ranks: Ranks) -> None:
    plain = _plain(small_llama, False, 2, 0.0)
    for built in (True, False):
        _close(ranks(4).run(_constructed, built, ParallelConfig(tp=2)), plain)


def _held() -> tuple[bool, bool, list[int]]:
    """Checks the parameters and the optimizer that the program made before."""
    init_process_group()
    model = small_llama()
    weight = model.get_submodule("model.layers.0.mlp.up_proj").weight
    optimizer = torch.optim.SGD([weight], lr=0.1)
    before = weight.detach().clone()
    engine, *_ = zeroaccel.initialize(
        model,
        optimizer,
        config={"train_micro_batch_size_per_gpu": 2, "zero_optimization": {"stage": 3}},
        parallel=ParallelConfig(tp=2),
    )
    shape = list(weight.shape)
    train_step(engine, engine(**_batch(0, 0)).loss)
    engine.destroy()
    same = model.get_submodule("model.layers.0.mlp.up_proj").weight is weight
    model(**_batch(0, 0))  # a plain model again
    return same, bool((weight - before).abs().amax(dim=1).gt(0).all()), shape


@NEEDS_SPLIT_LAYERS
def test_objects_of_the_program_stay_the_models(ranks: Ranks) -> None:
    assert ranks(2).run(_held) == [(True, True, [24, 32])] * 2


def _gpt2() -> nn.Module:
    return transformers.GPT2LMHeadModel(transformers.GPT2Config(n_embd=16, n_layer=1, n_head=2))


def _wide_llama() -> nn.Module:
    """A Llama whose parts are whole blocks of values that share a scale."""
    return with_frozen_base(small_llama(hidden_size=128, intermediate_size=256))


def _frozen_codes(tp: int, folder: str) -> list[list[float]]:
    """Returns the losses at stages 0 and 3, and after a checkpoint; every rank has the same samples."""
    init_process_group()
    found = []
    for format, stage in (("nf4", 0), ("nf4", 3), ("mxfp4", 3)):
        model = _wide_llama()
        optimizer = torch.optim.SGD([param for param in model.parameters() if param.requires_grad], 0.5, momentum=0.9)
        zero = {"stage": stage, "frozen_weights": format, "stage3_param_persistence_threshold": 0}
        settings = {"train_micro_batch_size_per_gpu": 2, "zero_optimization": zero}
        engine, *_ = zeroaccel.initialize(model, optimizer, config=settings, parallel=ParallelConfig(tp=tp))
        losses = [train_step(engine, engine(**_batch(step, 0)).loss) for step in range(2)]
        engine.save_checkpoint(folder, tag=f"{format}{stage}")
        engine.load_checkpoint(folder, tag=f"{format}{stage}")
        found.append([*losses, train_step(engine, engine(**_batch(2, 0)).loss)])
        state = engine.consolidated_state_dict()
        engine.destroy()
        if state is not None:
            found.append(state["model.layers.0.mlp.down_proj.weight"].view(-1).tolist())
    return found


@NEEDS_SPLIT_LAYERS
@pytest.mark.parametrize("size", [2, 4])
def test_frozen_weights_are_codes_of_each_ranks_part(ranks: Ranks, tmp_path: Path, size: int) -> None:
    """The values equal those of one process, because no block extends beyond a part."""
    whole = ranks(1).run(_frozen_codes, 1, str(tmp_path / "whole"))[0]
    split = ranks(size).run(_frozen_codes, 2, str(tmp_path / "split"))
    for index, (expected, found) in enumerate(zip(whole, split[0], strict=True)):
        if index % 2:
            assert found == expected
        else:
            assert found == pytest.approx(expected, rel=2e-6)
    assert all(one == split[0][::2] for one in split[1:])


def _with_wrapped_base(model: nn.Module) -> nn.Module:
    """Adds a frozen weight that consists of several tensors, like those of torchao."""
    layer = with_frozen_base(model).get_submodule("model.layers.0.mlp.up_proj")
    halves = TwoTensor(layer.weight.detach(), layer.weight.detach().clone())
    layer.weight = nn.Parameter(halves, requires_grad=False)
    return model


WRONG: dict[str, dict[str, Any]] = {
    # Each case changes a model or arguments, compared with a Llama on its own plan under stage 3.
    "heads": {"model": {"num_key_value_heads": 1}},
    "sizes": {"model": {"intermediate_size": 49}, "tp_plan": {"up_proj": "colwise"}},
    "pattern": {"tp_plan": {"layers.*.mlp.up": "colwise"}},
    "style": {"tp_plan": {"mlp.up_proj": "columns"}},
    "styles": {"tp_plan": {"mlp.up_proj": "colwise", "layers.*.mlp.up_proj": "rowwise"}},
    "norm": {"tp_plan": {"model.norm": "colwise"}},
    "none": {"model": _gpt2},
    "odd experts": {"model": partial(_mixture, "Qwen3Moe", head_dim=8, moe_intermediate_size=13)},
    "experts in part": {
        "model": _qwen3_moe,
        "tp_plan": {"mlp.experts": "moe_tp_experts", "mlp.experts.gate_up_proj": "packed_colwise"},
    },
    "parameter alone": {"model": _qwen3_moe, "tp_plan": {"mlp.experts.gate_up_proj": "packed_colwise"}},
    "blocks of experts": {
        "model": _qwen3_moe,
        "tp_plan": {
            "mlp.experts": "moe_tp_experts",
            "mlp.experts.gate_up_proj": "colwise",
            "mlp.experts.down_proj": "rowwise",
        },
    },
    "packed": {"model": _gpt2, "tp_plan": {"attn.c_attn": "colwise", "attn.c_proj": "rowwise"}},
    "tied": {"model": {"tie_word_embeddings": True}, "tp_plan": {"lm_head": "colwise_gather_output"}},
    "tied otherwise": {
        "model": {"tie_word_embeddings": True},
        "tp_plan": {"lm_head": "colwise_gather_output", "embed_tokens": "embedding_colwise"},
    },
    "muon": {"settings": {"optimizer": {"type": "Muon", "params": {"lr": 0.01}}}},
    "quantized": {"settings": {"zero_quantized_weights": True}},
    "wrapped": {"model": lambda: _with_wrapped_base(small_llama())},
    "ranks": {"tp": 3},
    "differs": {"rank 1": {"tp": 1}},
    "plan differs": {"rank 1": {"tp_plan": {"up_proj": "colwise"}}},
}


def _mistaken(what: str) -> str:
    init_process_group()
    wrong = dict(WRONG[what])
    own = wrong.pop("rank 1", {})
    wrong |= own if torch.distributed.get_rank() == 1 else {}
    changes = wrong.pop("model", {})
    model = changes() if callable(changes) else small_llama(**changes)
    settings = config(3, "fp32", **{"optimizer": SGD, **wrong.pop("settings", {})})
    try:
        zeroaccel.initialize(model, config=settings, parallel=ParallelConfig(**{"tp": 2, **wrong}))
    except ZeroAccelError as error:
        # The ranks remain synchronized.
        zeroaccel.initialize(small_llama(), config=config(0), parallel=ParallelConfig(tp=2))[0].destroy()
        return f"{type(error).__name__}: {error}"
    raise AssertionError("it was taken")


MISTAKES = [
    ("heads", "num_key_value_heads of LlamaForCausalLM: expected a multiple of 2, the ranks of the tp axis, got 1"),
    (
        "sizes",
        "parameter model.layers.0.mlp.up_proj.weight: expected a multiple of 2, the ranks of the tp axis, in dim",
    ),
    ("pattern", "tp_plan): layers.*.mlp.up: expected the end of a module's name, with * for one part"),
    ("style", "got 'columns for mlp.up_proj'"),
    ("styles", "layers.*.mlp.up_proj: expected one style for model.layers.0.mlp.up_proj, got 'colwise and"),
    (
        "norm",
        "model.norm: expected a torch.nn.Linear, a torch.nn.Embedding, or GPT-2's Conv1D, got 'transformers.models",
    ),
    ("odd experts", "layers.0.mlp.experts.gate_up_proj: expected a multiple of 4 in dim 1, since tp is 2"),
    ("experts in part", "experts: expected a style in tp_plan for each parameter, since moe_tp_experts sums"),
    ("parameter alone", "experts.gate_up_proj: expected a style for its module model.layers.0.mlp.experts too, one of"),
    ("blocks of experts", "model.layers.0.mlp (Qwen3MoeSparseMoeBlock): expected a relative difference"),
    ("none", "ParallelConfig(tp_plan): expected a plan, since GPT2LMHeadModel does not have one"),
    ("packed", 'attn.c_attn: expected "packed_colwise_3", which cuts queries, keys and values separately'),
    ("tied", "model.embed_tokens: expected tied parameters with the same split in all their modules"),
    ("tied otherwise", "expected tied parameters with the same split in all their modules"),
    ("muon", "expected a whole parameter, since its optimizer needs whole tensors"),
    ("quantized", "zero_quantized_weights: expected false with tensor parallelism, got True"),
    ("wrapped", "parameter model.layers.0.mlp.up_proj.weight: expected a weight that is a single tensor, because tp"),
    ("ranks", "ParallelConfig: expected sizes that divide the job's 2 ranks, got 'tp 3 = 3'"),
    ("differs", "initialize(parallel): dp_shard on rank 1: expected 1 as on rank 0, got 2"),
    ("plan differs", "initialize(parallel): tp_plan on rank 1: expected None as on rank 0, got {'up_proj': 'colwise'}"),
]


@NEEDS_SPLIT_LAYERS
@pytest.mark.parametrize(("what", "says"), MISTAKES)
def test_unsuitable_plans_and_settings_are_refused(ranks: Ranks, what: str, says: str) -> None:
    assert all(says in said for said in ranks(2).run(_mistaken, what))


def _contents(engine: Any, model: nn.Module) -> dict[str, Tensor]:
    """Returns the whole masters and states of every parameter."""
    found = {}
    for name, param in model.named_parameters():
        found[name] = safe_get_full_fp32_param(param)
        for key in ("exp_avg", "exp_avg_sq"):
            found[f"{key} {name}"] = safe_get_full_optimizer_state(param, key)
    return found


def _steps(engine: Any, first: int, count: int, parallel: ParallelConfig) -> list[float]:
    return [
        train_step(engine, engine(**_batch(step, torch.distributed.get_rank() // parallel.tp)).loss)
        for step in range(first, first + count)
    ]


def _heads() -> nn.Module:
    return small_llama(num_key_value_heads=4)


def _saves(
    folder: str, stage: int, parallel: ParallelConfig, keys: dict[str, Any], make: Callable[[], nn.Module] = _heads
) -> tuple[Any, ...]:
    init_process_group()
    model = make()
    settings = config(stage, "bf16", optimizer=ADAMW, **keys)
    engine, *_ = zeroaccel.initialize(model, config=settings, parallel=parallel)
    _steps(engine, 0, 2, parallel)
    engine.save_checkpoint(folder, "before", client_state={"epoch": 3})
    contents = _contents(engine, model)
    full = engine.consolidated_state_dict()
    engine.save_16bit_model(folder, "model.safetensors")
    streamed = {name: value.clone() for name, value in engine.iter_named_full_params()}
    losses = _steps(engine, 2, 2, parallel)
    engine.load_checkpoint(folder)
    again = _steps(engine, 2, 2, parallel)
    engine.destroy()
    return contents, full, streamed, losses, again


def _loads(
    folder: str, stage: int, parallel: ParallelConfig, keys: dict[str, Any], make: Callable[[], nn.Module] = _heads
) -> dict[str, Tensor]:
    init_process_group()
    model = make()
    with torch.no_grad():
        for param in model.parameters():
            param.mul_(0.9)
    settings = config(stage, "bf16", optimizer=ADAMW, **keys)
    engine, *_ = zeroaccel.initialize(model, config=settings, parallel=parallel)
    path, client = engine.load_checkpoint(folder)
    assert path is not None
    assert client == {"epoch": 3}
    contents = _contents(engine, model)
    assert all(loss < 10 for loss in _steps(engine, 2, 1, parallel))
    engine.destroy()
    return contents


def _same(one: Mapping[str, Tensor], other: Mapping[str, Tensor]) -> list[str]:
    assert one.keys() == other.keys()
    return [name for name, value in one.items() if not torch.equal(value, other[name])]


@NEEDS_SPLIT_LAYERS
@pytest.mark.parametrize(
    ("saved", "stage", "loaded"),
    [
        ((4, 2), 3, [(2, 1, 3)]),
        pytest.param((4, 2), 3, [(4, 4, 2), (2, 2, 0)], marks=pytest.mark.slow),
        ((2, 1), 2, [(4, 2, 3)]),
    ],
)
def test_checkpoints_are_of_any_mesh(
    ranks: Ranks, tmp_path: Path, saved: tuple[int, int], stage: int, loaded: list[tuple[int, int, int]]
) -> None:
    world, tp = saved
    folder = str(tmp_path)
    of_ranks = ranks(world).run(_saves, folder, stage, ParallelConfig(tp=tp), {})
    contents, full, streamed = of_ranks[0][:3]
    for rank, (other, _, _, losses, again) in enumerate(of_ranks):
        assert _same(contents, other) == []
        assert losses == again, rank
    for world, tp, other_stage in loaded:
        for found in ranks(world).run(_loads, folder, other_stage, ParallelConfig(tp=tp), {}):
            assert _same(contents, found) == []
    masters = {name: value for name, value in contents.items() if not name.startswith("exp_avg")}
    assert _same(masters, get_fp32_state_dict_from_zero_checkpoint(folder)) == []
    bf16 = {name: value.bfloat16() for name, value in masters.items()}
    assert _same(bf16, full) == _same(bf16, streamed) == _same(bf16, load_file(tmp_path / "model.safetensors")) == []
    version = json.loads((tmp_path / "before" / "manifest.json").read_text())["manifest"]["version"]
    assert version == (1 if saved[1] == 1 else 2)  # earlier releases can read version 1
    plain = reshard(tmp_path, tmp_path / "plain", 3)
    assert json.loads((plain / "manifest.json").read_text())["manifest"]["version"] == 1
    assert _same(masters, get_fp32_state_dict_from_zero_checkpoint(tmp_path / "plain")) == []


@NEEDS_SPLIT_LAYERS
def test_checkpoints_of_mixtures_are_of_any_mesh(ranks: Ranks, tmp_path: Path) -> None:
    folder = str(tmp_path)
    contents, full, *_ = ranks(2).run(_saves, folder, 3, ParallelConfig(tp=2), {}, _deepseek)[0]
    for tp, stage in ((1, 3), (2, 1)):
        for found in ranks(2).run(_loads, folder, stage, ParallelConfig(tp=tp), {}, _deepseek):
            assert _same(contents, found) == []
    masters = {name: value for name, value in contents.items() if not name.startswith("exp_avg")}
    assert _same(masters, get_fp32_state_dict_from_zero_checkpoint(folder)) == []
    assert _same({name: value.bfloat16() for name, value in masters.items()}, full) == []


def _access(stage: int, keys: dict[str, Any]) -> list[str]:
    """Reads and writes whole values between steps."""
    init_process_group()
    model = small_llama()
    values = {name: value.clone() for name, value in model.state_dict().items()}
    parallel = ParallelConfig(tp=2)
    engine, *_ = zeroaccel.initialize(model, config=config(stage, "bf16", optimizer=ADAMW, **keys), parallel=parallel)
    projection = model.get_submodule("model.layers.1.mlp.down_proj").weight
    norm = model.get_submodule("model.norm").weight
    assert torch.equal(safe_get_full_fp32_param(projection), values["model.layers.1.mlp.down_proj.weight"])
    engine.backward(engine(**_batch(0, torch.distributed.get_rank() // 2)).loss)
    gradient = safe_get_full_grad(projection)
    assert gradient.shape == (32, 48)
    safe_set_full_grad(projection, gradient * 0)
    assert not safe_get_full_grad(projection).any()
    safe_set_full_grad(projection, gradient)
    engine.step()
    # A new value for a split parameter, and states for it: all ranks pass the same whole tensors.
    new = torch.arange(32 * 48.0).view(32, 48) / 1000
    safe_set_full_fp32_param(projection, new)
    safe_set_full_optimizer_state(projection, new * 2, "exp_avg")
    assert torch.equal(safe_get_full_fp32_param(projection), new)
    assert torch.equal(safe_get_full_optimizer_state(projection, "exp_avg"), new * 2)
    assert torch.equal(dict(engine.iter_named_full_params())["model.layers.1.mlp.down_proj.weight"], new.bfloat16())
    with GatheredParameters(norm, modifier_rank=1):
        if torch.distributed.get_rank() == 1:
            norm.data.fill_(0.5)
    assert (safe_get_full_fp32_param(norm) == 0.5).all()
    told = [
        message(UsageError, GatheredParameters(projection, modifier_rank=0).__enter__),
        message(UsageError, safe_set_full_fp32_param, projection, new[:16]),
        message(UsageError, safe_set_full_fp32_param, projection, new + torch.distributed.get_rank()),
    ]
    with engine.gathered():
        told.append(message(EngineStateError, model.state_dict))
    engine.load_state_dict(values)
    for name, param in model.named_parameters():
        assert torch.equal(safe_get_full_fp32_param(param), values[name]), name
    engine.destroy()
    return told


@NEEDS_SPLIT_LAYERS
@pytest.mark.parametrize("stage", [0, 3])
def test_whole_values_are_read_and_written(ranks: Ranks, tmp_path: Path, stage: int) -> None:
    keys = offloaded(tmp_path, "nvme", "nvme") if stage == 3 else {}
    for gathered, shape, differs, states in ranks(4).run(_access, stage, keys):
        assert "(modifier_rank): model.layers.1.mlp.down_proj.weight: expected parameters that are whole" in gathered
        assert "the value: expected shape (32, 48), got (16, 48)" in shape
        assert "the value: expected the same on all ranks, got 'different ones'" in differs
        assert "state_dict(): model.embed_tokens.weight is split over ranks" in states


def _opt() -> nn.Module:
    """A model without its own plan, whose attention counts its heads."""
    torch.manual_seed(3)
    sizes: dict[str, Any] = {"vocab_size": VOCAB, "hidden_size": 32, "ffn_dim": 48, "word_embed_proj_dim": 32}
    settings = transformers.OPTConfig(
        num_hidden_layers=2, num_attention_heads=4, dropout=0.0, use_cache=False, pad_token_id=1, **sizes
    )
    return transformers.OPTForCausalLM(settings)


def _by_json(make: Callable[[], nn.Module], settings: dict[str, Any]) -> Run:
    """Trains with tp from the config, and batches from the engine's loader, which loads per data-parallel rank."""
    init_process_group()
    model = make()
    data = [{name: value[0] for name, value in _batch(step, 0).items()} for step in range(2 * STEPS)]
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    engine, _, loader, _ = zeroaccel.initialize(model, optimizer, training_data=data, config=settings)
    assert loader is not None
    return _run_over(engine, loader)


@NEEDS_SPLIT_LAYERS
@pytest.mark.parametrize("make", [small_llama, _opt])
def test_the_size_may_come_from_a_json_config(ranks: Ranks, make: Callable[[], nn.Module]) -> None:
    collection = ROOT / "tests" / "data" / "collection" / "deepspeed_configs.json"
    (entry,) = (one for one in json.loads(collection.read_text()) if "tensor_parallel" in one["settings"])
    values = {"train_micro_batch_size_per_gpu": 2, "gradient_accumulation_steps": 1, "gradient_clipping": 1.0}
    settings = {**entry["settings"], **values, "bf16": {"enabled": False}, "fp16": {"enabled": False}}
    settings |= {"train_batch_size": 2, "data_types": {}}
    assert settings["tensor_parallel"] == {"autotp_size": 2}
    first, second = ranks(2).run(_by_json, make, settings)
    assert differences(first, second) == []
    whole, _ = ranks(2).run(_by_json, make, {**settings, "tensor_parallel": {}, "train_micro_batch_size_per_gpu": 1})
    assert len(first.losses) == len(whole.losses) == STEPS
    assert first.norms == pytest.approx(whole.norms, rel=2e-6)
    for name, weight in whole.weights.items():
        assert torch.allclose(first.weights[name], weight, rtol=1e-4, atol=3e-6), name


def _fed(what: str) -> str:
    init_process_group()
    rank = torch.distributed.get_rank()
    section: dict[str, Any] = {"autotp_size": 2}
    if what == "keys":
        section["partition_config"] = {"layer_specs": []}
    settings = config(1, "fp32", optimizer=SGD) | {"tensor_parallel": section}
    try:
        if what == "batches":
            engine, *_ = zeroaccel.initialize(small_llama(), config=settings)
            engine(**_batch(0, rank))
        elif what == "names":
            zeroaccel.initialize(nn.Sequential(nn.Linear(4, 4)), config=settings)
        elif what == "unknown":
            model = nn.Module()
            model.layers = nn.ModuleList([nn.ModuleDict({"up_proj": nn.Linear(4, 8), "shrink": nn.Linear(8, 4)})])
            zeroaccel.initialize(model, config=settings)
        else:
            zeroaccel.initialize(small_llama(), config=settings, parallel=ParallelConfig(tp=4))
    except ZeroAccelError as error:
        if what == "batches":
            engine.destroy()
        return str(error)
    raise AssertionError("it was taken")


FED = [
    ("batches", "the first batch of rank 1 (tp 1): expected the batch of rank 0 (tp 0), since both share layers"),
    ("names", "expected a plan, since Sequential does not have one"),
    ("unknown", "tensor parallelism of Module: layers.0.shrink: expected layer names with a known cut"),
    ("sizes", "ParallelConfig(tp): expected 2, the value of tensor_parallel.autotp_size in the config, got 4"),
    ("keys", "tensor_parallel.partition_config: expected nothing: the model's own plan or the layers' names"),
]


@NEEDS_SPLIT_LAYERS
@pytest.mark.parametrize(("what", "says"), FED)
def test_mistakes_in_a_json_config_are_named(ranks: Ranks, what: str, says: str) -> None:
    assert all(says in said for said in ranks(2).run(_fed, what))


def _overflowed() -> list[float]:
    """Makes the gradient of one rank's part non-finite."""
    init_process_group()
    model = small_llama()
    settings = config(2, "fp16", optimizer=SGD)
    engine, *_ = zeroaccel.initialize(model, config=settings, parallel=ParallelConfig(tp=2))
    weight = model.get_submodule("model.layers.0.mlp.up_proj").weight
    before = safe_get_full_fp32_param(weight)
    engine.backward(engine(**_batch(0, 0)).loss)
    gradient = safe_get_full_grad(weight)
    gradient[-1, -1] = torch.inf
    safe_set_full_grad(weight, gradient)
    engine.step()
    assert torch.equal(safe_get_full_fp32_param(weight), before)
    facts = [engine.skipped_steps, engine.loss_scale.value]
    engine.destroy()
    return facts


@NEEDS_SPLIT_LAYERS
def test_an_overflow_of_one_part_skips_the_step_on_all_ranks(ranks: Ranks) -> None:
    first, second = ranks(2).run(_overflowed)
    assert first == second
    assert first[0] == 1


def _compiled(when: str) -> tuple[str, bool]:
    model = small_llama()
    before = {name: param.clone() for name, param in model.named_parameters()}
    settings = config(1, optimizer=SGD)
    try:
        if when == "before":
            model.compile(backend="eager")
        if when == "section":
            settings["compile"] = {"enabled": True, "backend": "eager"}
        engine, *_ = zeroaccel.initialize(model, config=settings, parallel=ParallelConfig(tp=2))
        model.compile(backend="eager")
        engine(**_batch(0, 0))
    except (ConfigError, UsageError) as error:
        is_whole = all(torch.equal(param, before[name]) for name, param in model.named_parameters())
        if when == "after":
            engine.destroy()
        return str(error), is_whole
    raise AssertionError("it was taken")


@NEEDS_SPLIT_LAYERS
@pytest.mark.parametrize("when", ["before", "after", "section"])
def test_compiled_models_are_refused(ranks: Ranks, when: str) -> None:
    expected = "torch.compile: expected a model that is not compiled: a graph cannot contain"
    for said, is_whole in ranks(2).run(_compiled, when):
        assert ("compile.enabled: a graph cannot contain" if when == "section" else expected) in said
        assert is_whole == (when != "after")  # unchanged, unless an engine has split it


def test_a_torch_that_cannot_leave_weights_where_they_are_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torch.distributed.tensor.parallel.parallelize_module", lambda module, mesh, plan: module)
    with pytest.raises(UsageError, match=r"tensor parallelism: torch: expected .*src_data_rank.*upgrade torch"):
        _check_torch()
