"""Layers that ranks share: the training of one process, up to the order of sums, and the same bits at every stage."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import zeroaccel
from tests.multi.pool import Pool
from tests.multi.training import ADAMW, Run, config, differences, offloaded
from zeroaccel.comm.topology import init_process_group
from zeroaccel.config.parallel import ParallelConfig
from zeroaccel.errors import ZeroAccelError
from zeroaccel.zero import Init

transformers = pytest.importorskip("transformers")

Ranks = Callable[[int], Pool]

VOCAB, STEPS = 64, 3
SGD = {"type": "SGD", "params": {"lr": 0.1, "momentum": 0.9}}
ATTENTION = {f"layers.*.self_attn.{name}_proj": "colwise" for name in "qkv"} | {
    "layers.*.self_attn.o_proj": "rowwise",
}


def _llama(**changes: Any) -> nn.Module:
    torch.manual_seed(3)
    sizes: dict[str, Any] = {
        "vocab_size": VOCAB,
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "use_cache": False,
    }
    return transformers.LlamaForCausalLM(transformers.LlamaConfig(**{**sizes, **changes}))


class Biased(nn.Module):
    """Linear layers with biases, of which one is added once and not by each rank, under a plan of names."""

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


def _plain(make: Callable[[], nn.Module], adam: bool, places: int, clipping: float) -> Run:
    """One process, no engine: the mean over the data-parallel ranks of their batches' losses."""
    model = make()
    optimizer: torch.optim.Optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    if adam:
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, weight_decay=0.1)
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
    """Each data-parallel rank sees its own batches, its ranks of `tp` the same."""
    engine, *_ = zeroaccel.initialize(model, config=dict(settings), parallel=parallel)
    place = torch.distributed.get_rank() // parallel.tp
    assert engine.train_batch_size() == 2 * torch.distributed.get_world_size() // parallel.tp
    run = Run()
    for step in range(STEPS):
        loss = engine(**_batch(step, place)).loss
        engine.backward(loss)
        engine.step()
        run.losses.append(loss.item())
        run.norms.append(engine.get_global_grad_norm())
    engine.destroy()
    run.weights = {name: param.detach().clone() for name, param in model.named_parameters()}
    return run


def _split(
    make: Callable[[], nn.Module], settings: list[dict[str, Any]], parallel: ParallelConfig, precision: str = "fp32"
) -> list[Run]:
    init_process_group()
    return [_train(make(), each, parallel) for each in settings]


def _close(runs: list[Run], plain: Run) -> None:
    losses = torch.tensor([run.losses for run in runs]).mean(0).tolist()
    assert losses == pytest.approx(plain.losses, rel=2e-6)
    for run in runs:
        # Each element counts once, whether the ranks share it or all have it.
        assert run.norms == pytest.approx(plain.norms, rel=2e-6)
        for name, weight in plain.weights.items():
            assert run.weights[name].shape == weight.shape, name
            assert torch.allclose(run.weights[name], weight, rtol=1e-4, atol=3e-6), name


def _tied() -> nn.Module:
    return _llama(tie_word_embeddings=True, attention_bias=True)


CASES = [
    # model, plan, ranks, optimizer, clipping
    (_llama, None, 2, "adamw", 0.05),
    (_llama, ATTENTION, 4, "sgd", 0.0),
    (_tied, None, 4, "adamw", 0.0),
    (Biased, {"up": "colwise", "down": "rowwise", "embed": "embedding_colwise"}, 2, "sgd", 0.05),
]


@pytest.mark.parametrize(("make", "plan", "world", "optimizer", "clipping"), CASES)
def test_training_is_that_of_one_process(
    ranks: Ranks, make: Callable[[], nn.Module], plan: Any, world: int, optimizer: str, clipping: float
) -> None:
    adam = optimizer == "adamw"
    keys = {"optimizer": ADAMW if adam else SGD, "gradient_clipping": clipping}
    settings = [config(stage, "fp32", **keys) for stage in (0, 1, 2, 3)]
    of_ranks = ranks(world).run(_split, make, settings, ParallelConfig(tp=2, tp_plan=plan))
    for first, *others in of_ranks:
        assert [differences(first, other) for other in others] == [[]] * 3
    _close([runs[0] for runs in of_ranks], _plain(make, adam, world // 2, clipping))
    for rank in range(0, world, 2):  # what both ranks have, they have to the last bit, and so has each data rank
        assert differences(of_ranks[rank][0], of_ranks[rank + 1][0]) == []
        assert of_ranks[rank][0].norms == of_ranks[0][0].norms


def test_tiers_keep_the_bits(ranks: Ranks, tmp_path: Path) -> None:
    plain = config(3, "fp32", optimizer=ADAMW, gradient_clipping=0.05)
    tiers = [offloaded(tmp_path, "cpu", "cpu"), offloaded(tmp_path, "nvme", "nvme")]
    settings = [plain, *(config(3, "fp32", optimizer=ADAMW, gradient_clipping=0.05, **tier) for tier in tiers)]
    for first, *others in ranks(4).run(_split, _llama, settings, ParallelConfig(tp=2)):
        assert [differences(first, other) for other in others] == [[]] * 2


def test_bf16_has_the_same_bits_at_every_stage(ranks: Ranks) -> None:
    settings = [config(stage, "bf16", optimizer=ADAMW) for stage in (0, 2, 3)]
    for first, *others in ranks(4).run(_split, _llama, settings, ParallelConfig(dp_replicate=2, tp=2)):
        assert [differences(first, other) for other in others] == [[]] * 2


def _constructed(built: bool, parallel: ParallelConfig) -> Run:
    """Of a model that `zero.Init` shards while it is built; without it, ranks that drew other values."""
    init_process_group()
    settings = config(3, "fp32", optimizer=SGD)
    if built:
        with Init(config_dict_or_path=settings):
            return _train(_llama(), settings, parallel)
    model = _llama()
    if torch.distributed.get_rank():
        for param in model.parameters():
            param.data.normal_()
    return _train(model, settings, parallel)


def test_weights_are_those_of_rank_0_however_the_model_was_built(ranks: Ranks) -> None:
    plain = _plain(_llama, False, 2, 0.0)
    for built in (True, False):
        _close(ranks(4).run(_constructed, built, ParallelConfig(tp=2)), plain)


def _held() -> tuple[bool, bool, list[int]]:
    """Parameters and an optimizer that the program has made before."""
    init_process_group()
    model = _llama()
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
    engine.backward(engine(**_batch(0, 0)).loss)
    engine.step()
    engine.destroy()
    same = model.get_submodule("model.layers.0.mlp.up_proj").weight is weight
    model(**_batch(0, 0))  # a plain model again
    return same, bool((weight - before).abs().amax(dim=1).gt(0).all()), shape


def test_objects_of_the_program_stay_the_models(ranks: Ranks) -> None:
    assert ranks(2).run(_held) == [(True, True, [24, 32])] * 2


def _gpt2() -> nn.Module:
    return transformers.GPT2LMHeadModel(transformers.GPT2Config(n_embd=16, n_layer=1, n_head=2))


WRONG: dict[str, dict[str, Any]] = {
    # What differs from a Llama on its own plan under stage 3: a model, or arguments.
    "heads": {"model": {"num_key_value_heads": 1}},
    "sizes": {"model": {"intermediate_size": 49}, "tp_plan": {"up_proj": "colwise"}},
    "pattern": {"tp_plan": {"layers.*.mlp.up": "colwise"}},
    "style": {"tp_plan": {"mlp.up_proj": "columns"}},
    "styles": {"tp_plan": {"mlp.up_proj": "colwise", "layers.*.mlp.up_proj": "rowwise"}},
    "norm": {"tp_plan": {"model.norm": "colwise"}},
    "none": {"model": _gpt2},
    "conv1d": {"model": _gpt2, "tp_plan": {"attn.c_attn": "colwise"}},
    "tied": {"model": {"tie_word_embeddings": True}, "tp_plan": {"lm_head": "colwise_gather_output"}},
    "tied otherwise": {
        "model": {"tie_word_embeddings": True},
        "tp_plan": {"lm_head": "colwise_gather_output", "embed_tokens": "embedding_colwise"},
    },
    "muon": {"settings": {"optimizer": {"type": "Muon", "params": {"lr": 0.01}}}},
    "quantized": {"settings": {"zero_quantized_weights": True}},
    "both": {"sp": 2},
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
    model = changes() if callable(changes) else _llama(**changes)
    settings = config(3, "fp32", **{"optimizer": SGD, **wrong.pop("settings", {})})
    try:
        zeroaccel.initialize(model, config=settings, parallel=ParallelConfig(**{"tp": 2, **wrong}))
    except ZeroAccelError as error:
        # The ranks are in step all the same.
        zeroaccel.initialize(_llama(), config=config(0), parallel=ParallelConfig(tp=2))[0].destroy()
        return f"{type(error).__name__}: {error}"
    raise AssertionError("it was taken")


MISTAKES = [
    ("heads", "num_key_value_heads of LlamaForCausalLM: expected a multiple of 2, the ranks of the tp axis, got 1"),
    (
        "sizes",
        "parameter model.layers.0.mlp.up_proj.weight: expected a multiple of 2, the ranks of the tp axis, in dim",
    ),
    ("pattern", "tp_plan): layers.*.mlp.up: expected the end of a module's name, * one part of it, got 'no match'"),
    ("style", "got 'columns for mlp.up_proj'"),
    ("styles", "layers.*.mlp.up_proj: expected one style for model.layers.0.mlp.up_proj, got 'colwise and"),
    ("norm", "model.norm: expected a torch.nn.Linear or torch.nn.Embedding, got 'transformers.models.llama"),
    ("none", "ParallelConfig(tp_plan): expected a plan, as GPT2LMHeadModel has none of its own"),
    (
        "conv1d",
        "attn.c_attn: expected a torch.nn.Linear or torch.nn.Embedding, got 'transformers.pytorch_utils.Conv1D'",
    ),
    ("tied", "model.embed_tokens: expected tied parameters that are cut alike in all their modules"),
    ("tied otherwise", "expected tied parameters that are cut alike in all their modules"),
    ("muon", "expected to be whole, since its optimizer looks at whole tensors"),
    ("quantized", "zero_quantized_weights: expected false with tensor parallelism, got True"),
    ("both", "expected sp or tp above 1, not both"),
    ("ranks", "ParallelConfig: expected sizes that divide the job's 2 ranks, got 'dp_replicate 1 x sp 1 x tp 3 = 3'"),
    ("differs", "initialize(parallel): dp_shard on rank 1: expected 1 as on rank 0, got 2"),
    ("plan differs", "initialize(parallel): tp_plan on rank 1: expected None as on rank 0, got {'up_proj': 'colwise'}"),
]


@pytest.mark.parametrize(("what", "says"), MISTAKES)
def test_what_cannot_be_split_is_named(ranks: Ranks, what: str, says: str) -> None:
    for message in ranks(2).run(_mistaken, what):
        assert says in message
