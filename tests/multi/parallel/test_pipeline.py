"""Pipelines: the number of stages changes no bit of losses, norms and weights."""

from __future__ import annotations

import traceback
from collections import Counter
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

import zeroaccel
from tests.support.mesh_training import NEEDS_STAGES, small_gpt2, small_llama
from tests.support.pool import Ranks
from tests.support.training import ADAMW, SGD, Run, config, differences, finished
from zeroaccel.checkpoint.consolidate import get_fp32_state_dict_from_zero_checkpoint
from zeroaccel.compat.deepspeed_engine import initialize
from zeroaccel.compat.deepspeed_pipe import LayerSpec, PipelineModule, TiedLayerSpec
from zeroaccel.config.parallel import ParallelConfig, PipelineConfig
from zeroaccel.errors import UsageError, ZeroAccelError
from zeroaccel.zero.param_unit import ParamUnit, ShardState

transformers = pytest.importorskip("transformers")
pytestmark = NEEDS_STAGES


VOCABULARY, BATCH, LENGTH, MICRO_BATCHES, STEPS = 61, 2, 8, 4, 2


def causal(kind: str, tied: bool = False) -> nn.Module:
    """Makes a model of four blocks, the same on every rank."""
    if kind == "gpt2":
        return small_gpt2(vocab_size=VOCABULARY)
    return small_llama(vocab_size=VOCABULARY, num_hidden_layers=4, tie_word_embeddings=tied)


def layers() -> nn.Sequential:
    torch.manual_seed(3)
    blocks = [nn.Sequential(nn.Linear(12, 12), nn.Tanh()) for _ in range(4)]
    return nn.Sequential(nn.Linear(7, 12), *blocks, nn.LayerNorm(12), nn.Linear(12, 5))


class Detached(nn.Linear):
    """A linear layer whose weight gets no gradient."""

    def forward(self, x: Tensor) -> Tensor:
        return nn.functional.linear(x, self.weight.detach())


def tied_layers(kind: str) -> nn.Sequential:
    """Makes layers with weights tied across stages: in two of three stages, or two pairs, trained by both or one."""
    torch.manual_seed(3)
    first = Detached if kind == "layers-detached" else nn.Linear
    one, two, same, other = (layer(12, 12, bias=False) for layer in (first, nn.Linear, nn.Linear, nn.Linear))
    same.weight, other.weight = one.weight, two.weight
    between = [nn.Tanh(), nn.Linear(12, 12)]
    if kind != "layers-middle":
        return nn.Sequential(nn.Linear(7, 12), one, two, *between, same, other, nn.Linear(12, 5))
    return nn.Sequential(nn.Linear(7, 12), one, *between, same, nn.Tanh(), nn.Linear(12, 5))


def batches(kind: str, place: int, count: int = STEPS * MICRO_BATCHES) -> Iterator[Any]:
    """Makes the batches of data-parallel rank `place`."""
    generator = torch.Generator().manual_seed(100 + place)
    for _ in range(count):
        if kind.startswith("layers"):
            yield torch.randn(BATCH, 7, generator=generator), torch.randn(BATCH, 5, generator=generator)
        else:
            ids = torch.randint(VOCABULARY, (BATCH, LENGTH), generator=generator)
            mask = torch.ones_like(ids)
            mask[0, 6:] = 0
            yield {"input_ids": ids, "attention_mask": mask, "labels": ids.masked_fill(mask == 0, -100)}


def build(kind: str) -> nn.Module:
    if kind.startswith("layers-"):
        return tied_layers(kind)
    return layers() if kind == "layers" else causal(kind.removesuffix("-tied"), kind.endswith("-tied"))


def plain(settings: Mapping[str, Any], kind: str) -> Run:
    """Trains without stages: an ordinary loop with an ordinary engine."""
    model = build(kind)
    engine, *_ = zeroaccel.initialize(model, config=dict(settings))
    run, losses = Run(), []
    for batch in batches(kind, engine.collectives.rank):
        if kind.startswith("layers"):
            loss = nn.functional.mse_loss(engine(batch[0]), batch[1])
        else:
            loss = engine(**batch, use_cache=False).loss
        engine.backward(loss)
        at_boundary = engine.is_gradient_accumulation_boundary()
        engine.step()
        losses.append(loss.item())
        if at_boundary:
            total = torch.tensor([torch.tensor(losses, dtype=torch.float64).mean()]) / engine.collectives.world_size
            engine.collectives.all_reduce(total, "sum", "loss of the test")
            run.losses.append(total.float().item())
            run.norms.append(engine.get_global_grad_norm())
            losses.clear()
    run.skipped = engine.skipped_steps
    return finished(engine, run)


def stepped(engine: Any, data: Iterator[Any]) -> Run:
    run = Run()
    for _ in range(STEPS):
        run.losses.append(engine.train_batch(data).item())
        run.norms.append(engine.get_global_grad_norm())
    run.skipped = engine.skipped_steps
    return finished(engine, run)


def staged(settings: Mapping[str, Any], kind: str, pp: int, **cutting: Any) -> Run:
    model = build(kind)
    if kind.startswith("layers"):
        cutting["loss"] = nn.functional.mse_loss
    pipeline = PipelineConfig(**cutting)
    engine, *_ = zeroaccel.initialize(model, config=dict(settings), parallel=ParallelConfig(pp=pp), pipeline=pipeline)
    return stepped(engine, batches(kind, engine.collectives.rank))


def require_same(runs: list[Run], whole: Run) -> None:
    """Checks that all stages together equal the run without stages."""
    weights: dict[str, Tensor] = {}
    for run in runs:
        assert (run.losses, run.norms, run.skipped) == (whole.losses, whole.norms, whole.skipped)
        for name, weight in run.weights.items():
            assert torch.equal(weights.setdefault(name, weight), weight), name
    together = Run(whole.losses, whole.norms, weights, whole.skipped)
    assert weights.keys() == whole.weights.keys()
    assert differences(whole, together) == []


CASES = [
    # model, pp, dp, stage, precision, optimizer, cutting
    ("llama", 2, 1, 0, "fp32", SGD, {}),
    pytest.param(*("llama", 3, 1, 1, "bf16", ADAMW, {"schedule": "gpipe"}), marks=pytest.mark.slow),
    pytest.param(*("llama", 2, 2, 2, "bf16", SGD, {}), marks=pytest.mark.slow),
    ("gpt2", 2, 1, 1, "fp32", ADAMW, {}),
    ("gpt2", 2, 2, 2, "bf16", SGD, {"schedule": "gpipe"}),
    ("gpt2", 3, 1, 0, "fp16", SGD, {"split": (1, 1, 2)}),
    pytest.param(*("llama-tied", 4, 1, 1, "bf16", SGD, {"split": "uniform"}), marks=pytest.mark.slow),
    ("layers", 3, 1, 2, "fp32", SGD, {"split": "parameters"}),
    pytest.param(*("layers", 2, 2, 1, "fp32", ADAMW, {}), marks=pytest.mark.slow),
    ("gpt2", 2, 2, 3, "fp32", SGD, {}),
    pytest.param(*("llama", 2, 2, 3, "bf16", ADAMW, {"schedule": "gpipe"}), marks=pytest.mark.slow),
    # Several stages per rank: three of one block and one of two.
    ("gpt2", 2, 1, 1, "fp32", SGD, {"schedule": "interleaved_1f1b"}),
    pytest.param(*("gpt2", 2, 2, 3, "fp16", SGD, {"schedule": "interleaved_1f1b"}), marks=pytest.mark.slow),
    pytest.param(*("llama", 2, 2, 2, "bf16", SGD, {"schedule": "interleaved_1f1b"}), marks=pytest.mark.slow),
    ("gpt2", 2, 1, 2, "fp32", SGD, {"schedule": "zero_bubble"}),
    ("llama", 2, 1, 1, "bf16", ADAMW, {"schedule": "zero_bubble", "stages_per_rank": 1}),
    pytest.param(*("layers", 2, 2, 2, "fp32", SGD, {"schedule": "zero_bubble"}), marks=pytest.mark.slow),
    pytest.param(*("layers", 3, 1, 2, "fp32", SGD, {"schedule": "interleaved_1f1b"}), marks=pytest.mark.slow),
    # All micro-batches pass through a stage before the next one.
    ("llama", 1, 2, 3, "bf16", ADAMW, {"schedule": "layer_major"}),
    ("llama", 1, 1, 1, "fp16", SGD, {"schedule": "layer_major", "stages_per_rank": 2}),
    ("layers", 1, 2, 2, "fp32", SGD, {"schedule": "layer_major"}),
    pytest.param(*("llama", 1, 2, 0, "fp32", SGD, {"schedule": "layer_major"}), marks=pytest.mark.slow),
    # Weights that two stages share: the first two of three, and two pairs in two stages, one trained by the later
    # stage.
    ("layers-middle", 3, 1, 1, "fp32", SGD, {"split": (2, 3, 2)}),
    ("layers-twice", 2, 1, 2, "fp32", SGD, {"split": (4, 4)}),
    ("layers-detached", 2, 1, 2, "fp32", SGD, {"split": (4, 4)}),
    pytest.param(*("layers-twice", 2, 1, 3, "fp32", ADAMW, {"split": (4, 4)}), marks=pytest.mark.slow),
    pytest.param(
        *("layers-twice", 2, 1, 2, "fp32", SGD, {"split": (4, 4), "schedule": "zero_bubble", "stages_per_rank": 1}),
        marks=pytest.mark.slow,
    ),
]


@pytest.mark.parametrize(("kind", "pp", "dp", "stage", "precision", "optimizer", "cutting"), CASES)
def test_stages_change_no_bit(
    ranks: Ranks,
    kind: str,
    pp: int,
    dp: int,
    stage: int,
    precision: str,
    optimizer: dict[str, Any],
    cutting: dict[str, Any],
) -> None:
    settings = config(stage, precision, MICRO_BATCHES, optimizer=optimizer, gradient_clipping=0.5)
    whole = ranks(dp).run(plain, settings, kind)[0]
    require_same(ranks(pp * dp).run(staged, settings, kind, pp, **cutting), whole)


def by_layers(settings: Mapping[str, Any], kind: str, folder: Path | None, schedule: str) -> tuple[Run, Counter[str]]:
    """Trains with weights in files; also returns the number of times that the last step gathered each unit."""
    gathers: Counter[str] = Counter()
    unshard = ParamUnit.unshard

    def counted(unit: ParamUnit, **kwargs: Any) -> None:
        gathers[unit.name] += unit.state is not ShardState.UNSHARDED
        unshard(unit, **kwargs)

    settings = {**settings, "zero_optimization": {**settings["zero_optimization"], **in_files(folder)}}
    pipeline = PipelineConfig(schedule=schedule)
    engine, *_ = zeroaccel.initialize(build(kind), config=settings, pipeline=pipeline)
    data, run = batches(kind, engine.collectives.rank), Run()
    for step in range(STEPS):
        with pytest.MonkeyPatch.context() as patch:
            if step == STEPS - 1:
                patch.setattr(ParamUnit, "unshard", counted)
            run.losses.append(engine.train_batch(data).item())
        run.norms.append(engine.get_global_grad_norm())
    run.losses.append(engine.eval_batch(batches(kind, engine.collectives.rank)).item())
    return finished(engine, run), gathers


def in_files(folder: Path | None) -> dict[str, Any]:
    if folder is None:
        return {}
    tier = {"device": "nvme", "nvme_path": str(folder)}
    return {"offload_param": tier, "offload_optimizer": tier}


def test_layer_major_order_gathers_each_unit_twice_a_step(ranks: Ranks, tmp_path: Path) -> None:
    settings = config(3, "bf16", MICRO_BATCHES, gradient_clipping=0.5, stage3_param_persistence_threshold=0)
    usual, often = ranks(2).run(by_layers, settings, "llama", tmp_path, "1f1b")[0]
    run, gathers = ranks(2).run(by_layers, settings, "llama", tmp_path, "layer_major")[0]
    assert differences(usual, run) == []
    assert gathers == {"root": 1, **{f"model.layers.{block}": 2 for block in range(4)}}
    assert all(often[name] >= 2 * MICRO_BATCHES for name in gathers if name != "root"), often


def test_layer_major_order_sums_the_gradients_of_a_tied_head_first(ranks: Ranks, tmp_path: Path) -> None:
    def settings(stage: int) -> dict[str, Any]:
        return config(stage, "fp32", MICRO_BATCHES, optimizer=SGD)

    usual = ranks(1).run(plain, settings(0), "llama-tied")[0]
    runs = [ranks(1).run(by_layers, settings(stage), "llama-tied", None, "layer_major")[0][0] for stage in (0, 3)]
    runs.append(ranks(1).run(by_layers, settings(3), "llama-tied", tmp_path, "layer_major")[0][0])
    assert differences(runs[0], runs[1]) == differences(runs[0], runs[2]) == []
    assert runs[0].losses[:STEPS] == pytest.approx(usual.losses, rel=1e-6)
    assert runs[0].weights.keys() == usual.weights.keys()
    for name, weight in usual.weights.items():
        torch.testing.assert_close(runs[0].weights[name], weight, rtol=1e-4, atol=1e-6, msg=name)


class _HostReads(TorchDispatchMode):
    """Counts the values that the host reads from tensors, which would wait for a device; excludes reads of masks."""

    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.aten._local_scalar_dense.default:
            self.count += all("masking_utils" not in frame.filename for frame in traceback.extract_stack())
        return func(*args, **(kwargs or {}))


def reads(micro_batches: int) -> tuple[int, list[float], float]:
    """Returns, for the second step, the number of values read, the losses of its micro-batches, and their mean."""
    settings = config(1, "fp32", micro_batches, optimizer=SGD)
    engine, *_ = zeroaccel.initialize(causal("llama"), config=settings, parallel=ParallelConfig(pp=2))
    data = batches("llama", 0, 2 * micro_batches)
    engine.train_batch(data)
    with _HostReads() as seen:
        loss = engine.train_batch(data)
    losses, count = engine.micro_losses.tolist(), seen.count
    engine.destroy()
    return count, losses, loss.item()


def test_the_host_waits_for_no_micro_batch(ranks: Ranks) -> None:
    few, many = ranks(2).run(reads, 2), ranks(2).run(reads, 6)
    assert [count for count, _, _ in few] == [count for count, _, _ in many]
    assert [len(losses) for _, losses, _ in many] == [0, 6]
    assert many[0][2] == many[1][2] == pytest.approx(sum(many[1][1]) / 6)


OFFLOAD = {"offload_optimizer": {"device": "cpu"}}


def recomputed(settings: Mapping[str, Any], kind: str, pp: int) -> Run:
    model = build(kind)
    # The name before transformers 5.20.
    enable = getattr(model, "activation_checkpointing_enable", None) or model.gradient_checkpointing_enable
    enable()  # type: ignore[operator]
    engine, *_ = zeroaccel.initialize(model, config=dict(settings), parallel=ParallelConfig(pp=pp))
    return stepped(engine, batches(kind, engine.collectives.rank))


def test_offload_and_recomputation_in_a_stage(ranks: Ranks) -> None:
    settings = config(2, "bf16", MICRO_BATCHES, gradient_clipping=0.5)
    whole = ranks(2).run(plain, settings, "llama")[0]
    offloaded = config(2, "bf16", MICRO_BATCHES, gradient_clipping=0.5, **OFFLOAD)
    require_same(ranks(4).run(recomputed, offloaded, "llama", 2), whole)


def test_an_overflow_on_one_stage_skips_the_step_of_all(ranks: Ranks) -> None:
    settings = config(1, "fp16", MICRO_BATCHES, optimizer=SGD)
    settings["fp16"] = {"enabled": True, "initial_scale_power": 24, "loss_scale_window": 5, "hysteresis": 1}
    whole = ranks(1).run(plain, settings, "gpt2")[0]
    assert whole.skipped > 0
    require_same(ranks(2).run(staged, settings, "gpt2", 2), whole)


def scheduled(pp: int) -> tuple[list[float], list[float]]:
    """Returns rates and losses under a schedule, with an optimizer that the program made for the whole model."""
    model = causal("gpt2")
    decayed = [param for param in model.parameters() if param.dim() > 1]
    rest = [param for param in model.parameters() if param.dim() < 2]
    optimizer = torch.optim.AdamW([{"params": decayed, "weight_decay": 0.1}, {"params": rest, "weight_decay": 0.0}])
    schedule = {"type": "WarmupLR", "params": {"warmup_max_lr": 0.01, "warmup_num_steps": 5}}
    settings = config(1, "fp32", MICRO_BATCHES, scheduler=schedule, optimizer=None)
    engine, *_ = zeroaccel.initialize(
        model, optimizer, config=settings, parallel=ParallelConfig(pp=pp), pipeline=PipelineConfig()
    )
    data = batches("gpt2", engine.collectives.rank)
    losses = [engine.train_batch(data).item() for _ in range(STEPS)]
    losses.append(engine.eval_batch(batches("gpt2", 5)).item())
    assert (engine.is_first_stage(), engine.is_last_stage()) == (
        engine.pipeline.rank == 0,
        engine.pipeline.rank == pp - 1,
    )
    assert engine.train_batch_size() == BATCH * MICRO_BATCHES
    rates = engine.get_lr()
    engine.destroy()
    return rates, losses


def test_param_groups_rates_and_evaluation(ranks: Ranks) -> None:
    whole = ranks(1).run(scheduled, 1)[0]
    assert ranks(2).run(scheduled, 2) == [whole, whole]
    assert whole[1][-1] != whole[1][-2]


class Failing(nn.Linear):
    """A linear layer that raises at the given call from now, counted down from there."""

    calls = 0

    def forward(self, x: Tensor) -> Tensor:
        Failing.calls -= 1
        if Failing.calls == 0:
            raise ValueError("by the model")
        return super().forward(x)


def interrupted(schedule: str, fails: bool) -> list[float]:
    """Trains two stages. In the second step the first one raises at micro-batch 1, the other one at micro-batch 0."""
    torch.manual_seed(3)
    model = nn.Sequential(Failing(7, 12), *(nn.Linear(12, 12) for _ in range(4)), Failing(12, 7))
    pipeline = PipelineConfig(schedule=schedule, loss=nn.functional.mse_loss)
    settings = config(1, "fp32", MICRO_BATCHES, optimizer=SGD)
    engine, *_ = zeroaccel.initialize(model, config=settings, parallel=ParallelConfig(pp=2), pipeline=pipeline)
    losses = []
    for step in range(3):
        data = [(x, x.flip(0)) for x in torch.rand(MICRO_BATCHES, BATCH, 7)]
        if fails and step == 1:
            Failing.calls = 2 - engine.pipeline.rank
            with pytest.raises(ValueError, match="by the model"):
                engine.train_batch(iter(data))
            engine.reset()
        losses.append(engine.train_batch(iter(data)).item())
    engine.destroy()
    return losses


@pytest.mark.parametrize("schedule", ["1f1b", "gpipe"])
def test_after_an_exception_on_every_stage_and_a_reset_training_goes_on(ranks: Ranks, schedule: str) -> None:
    assert ranks(2).run(interrupted, schedule, True) == ranks(2).run(interrupted, schedule, False)


# -- deepspeed.pipe


def facade(settings: Mapping[str, Any], stages: int, partition: str) -> Run:
    """Trains a PipelineModule whose first and last layers share an embedding table."""
    torch.manual_seed(3)

    def logits(table: nn.Module, hidden: Tensor) -> Tensor:
        return hidden @ table.weight.t()

    def loss(output: Tensor, labels: Tensor) -> Tensor:
        return nn.functional.cross_entropy(output.flatten(0, 1), labels.flatten())

    layers = [
        TiedLayerSpec("table", nn.Embedding, VOCABULARY, 12),
        *(LayerSpec(nn.Linear, 12, 12) for _ in range(3)),
        torch.tanh,
        nn.LayerNorm(12),
        TiedLayerSpec("table", nn.Embedding, VOCABULARY, 12, forward_fn=logits),
    ]
    model = PipelineModule(layers, num_stages=stages, loss_fn=loss, partition_method=partition)
    engine, *_ = initialize(model=model, config=dict(settings))
    assert engine.is_pipe_parallel()
    return stepped(
        engine, ((batch["input_ids"], batch["input_ids"]) for batch in batches("llama", engine.collectives.rank))
    )


@pytest.mark.parametrize(("partition", "stages"), [("parameters", 2), ("type:linear", 3)])
def test_a_pipeline_module_of_deepspeed(ranks: Ranks, partition: str, stages: int) -> None:
    settings = config(1, "fp32", MICRO_BATCHES, optimizer=SGD, gradient_clipping=0.5)
    whole = ranks(1).run(facade, settings, 1, partition)[0]
    require_same(ranks(stages).run(facade, settings, stages, partition), whole)


def _tied_with_a_bias(settings: Mapping[str, Any]) -> str:
    layers = [TiedLayerSpec("k", nn.Linear, 8, 8), LayerSpec(nn.Linear, 8, 8), TiedLayerSpec("k", nn.Linear, 8, 8)]
    model = PipelineModule(layers, num_stages=2, loss_fn=nn.functional.mse_loss, partition_method="uniform")
    with pytest.raises(UsageError) as caught:
        initialize(model=model, config=dict(settings))
    return str(caught.value)


def test_a_tie_of_several_parameters_is_named_by_its_key(ranks: Ranks) -> None:
    for said in ranks(2).run(_tied_with_a_bias, config(1, "fp32", MICRO_BATCHES, optimizer=SGD)):
        assert said.startswith("TiedLayerSpec('k'): 0.module.weight: expected a tied module")
        assert "2 parameters: module.weight, module.bias" in said


# -- checkpoints


def resumed(settings: Mapping[str, Any], pp: int, load: str, save: str, steps: int) -> Run:
    """Resumes from a checkpoint, trains some steps, then saves."""
    model = causal("gpt2")
    engine, *_ = zeroaccel.initialize(
        model, config=dict(settings), parallel=ParallelConfig(pp=pp), pipeline=PipelineConfig()
    )
    if load:
        engine.load_checkpoint(load)
    data = batches("gpt2", engine.collectives.rank, 3 * MICRO_BATCHES)
    for _ in range(engine.global_steps * MICRO_BATCHES):
        next(data)
    run = Run()
    for _ in range(steps):
        run.losses.append(engine.train_batch(data).item())
        run.norms.append(engine.get_global_grad_norm())
    if save:
        engine.save_checkpoint(save)
    run.weights = engine.consolidated_state_dict() or {}
    if save:
        engine.save_model(f"{save}/model", max_nbytes=40_000)
    engine.destroy()
    return run


def test_checkpoints_are_of_the_whole_model(ranks: Ranks, tmp_path: Path) -> None:
    settings = config(2, "bf16", MICRO_BATCHES)
    whole = ranks(2).run(resumed, settings, 1, "", "", 3)[0]
    before = ranks(4).run(resumed, settings, 2, "", f"{tmp_path}/staged", 1)[0]
    assert before.losses == whole.losses[:1]
    # Two stages to one, with as many data-parallel ranks: the same training; and back.
    after = ranks(2).run(resumed, settings, 1, f"{tmp_path}/staged", f"{tmp_path}/whole", 1)[0]
    assert after.losses == whole.losses[1:2]
    last = ranks(4).run(resumed, settings, 2, f"{tmp_path}/whole", "", 1)[0]
    assert (last.losses, last.norms) == (whole.losses[2:], whole.norms[2:])
    assert last.weights.keys() == whole.weights.keys() == causal("gpt2").state_dict().keys()
    assert differences(Run(weights=whole.weights), Run(weights=last.weights)) == []
    # Three stages on one data-parallel rank have the same weights, and so does the checkpoint consolidated offline.
    loaded = ranks(3).run(resumed, settings, 3, f"{tmp_path}/staged", "", 0)[0]
    assert differences(Run(weights=before.weights), Run(weights=loaded.weights)) == []
    for folder in ("staged", "whole"):
        exact = get_fp32_state_dict_from_zero_checkpoint(f"{tmp_path}/{folder}")
        expected = before.weights if folder == "staged" else after.weights
        assert exact.keys() == expected.keys()
        for name, weight in expected.items():
            assert torch.equal(exact[name].to(weight.dtype), weight), name
        saved = transformers.GPT2LMHeadModel.from_pretrained(
            None, config=causal("gpt2").config, state_dict=_files(tmp_path / folder / "model")
        )
        for name, weight in saved.state_dict().items():
            assert torch.equal(weight.bfloat16(), expected[name].bfloat16()), name


def _files(folder: Path) -> dict[str, Tensor]:
    return {name: value for path in sorted(folder.glob("*.safetensors")) for name, value in load_file(path).items()}


# -- refused calls


def mistaken(what: str) -> str:
    model = nn.Linear(4, 4) if what == "model" else layers() if what == "loss" else causal("llama")
    keys: dict[str, Any] = OFFLOAD if what == "early" else {}
    accumulation = {"few": 1, "rounds": 5}.get(what, 2)
    settings = config(3 if what == "sharded" else 1, "fp32", accumulation, optimizer=SGD, **keys)
    if what == "early":
        settings["zero_optimization"]["offload_optimizer"] = {"device": "cpu", "update_during": "next_step"}
    engine: Any = None
    try:
        arguments: dict[str, Any] = {}
        schedules = {"schedule": "looped_bfs", "layers": "layer_major", "sharded": "zero_bubble"}
        if what in schedules:
            arguments["schedule"] = schedules[what]
        if what == "per rank":
            arguments["stages_per_rank"] = 2
        if what in ("rounds", "blocks"):
            arguments |= {"schedule": "interleaved_1f1b", "stages_per_rank": 3 if what == "blocks" else 2}
        if what in ("numbers", "many"):
            arguments["split"] = (1, 2) if what == "numbers" else (1, 0)
        if what == "weights" and int(torch.distributed.get_rank() if torch.distributed.is_initialized() else 0):
            next(model.parameters()).data.add_(1)
        if what == "between":
            _couple(model)
        parallel = ParallelConfig(pp=5 if what == "deep" else 2)
        if what == "plan":
            parallel = ParallelConfig(tp=2, tp_plan={"layers.*.mlp.middle": "colwise"})
        engine, *_ = zeroaccel.initialize(
            model, config=settings, parallel=parallel, pipeline=PipelineConfig(**arguments)
        )
        _use_wrongly(engine, what)
    except (ZeroAccelError, AttributeError) as error:
        return f"{type(error).__name__}: {error}"
    finally:
        if engine is not None:
            engine.destroy()  # otherwise, messages in later tests name ranks by this mesh
    raise AssertionError("it was taken")


def _couple(model: Any) -> None:
    """Adds a connection between two blocks, like a model with skip connections."""
    inner = model.model.layers[1].forward
    model.model.layers[1].forward = lambda hidden, *args, **kwargs: inner(hidden, *args, **kwargs)
    model.model.layers[2] = model.model.layers[1]


def _use_wrongly(engine: Any, what: str) -> None:
    data = list(batches("llama", 0, 4))
    if what == "forward":
        engine(**data[0])
    elif what == "backward":
        engine.backward(torch.ones((), requires_grad=True))
    elif what == "step":
        engine.step()
    elif what == "short":
        engine.train_batch(iter(data[:1]))
    elif what == "uneven":
        shorter = {name: value[:, :5] for name, value in data[1].items()}
        engine.train_batch(iter([data[0], shorter]))
    elif what == "others":
        engine.train_batch(iter(data[engine.pipeline.rank :]))
    elif what == "none":
        engine.train_batch()


@pytest.mark.parametrize(
    ("what", "says"),
    [
        ("model", "pipeline: Linear cannot be cut: expected a causal model of transformers or an nn.Sequential"),
        ("between", "LlamaForCausalLM cannot be cut"),
        ("loss", "PipelineConfig(loss): expected a function of (output, targets)"),
        ("few", "gradient_accumulation_steps: expected at least 2 micro-batches per step"),
        ("early", 'zero_optimization.offload_optimizer.update_during: expected "step" with a pipeline'),
        ("schedule", 'PipelineConfig(schedule): expected "1f1b" or "gpipe" or "interleaved_1f1b" or "zero_bubble"'),
        ("layers", 'PipelineConfig(schedule="layer_major"): expected pp=1: it is an order of one rank'),
        (
            "sharded",
            'zero_optimization.stage: expected 0, 1 or 2 with schedule "zero_bubble", which computes gradients',
        ),
        ("per rank", 'PipelineConfig(stages_per_rank): expected 1 with schedule "1f1b", got 2'),
        ("rounds", "gradient_accumulation_steps: expected a multiple of 2, the rounds of the interleaved"),
        ("blocks", "LlamaForCausalLM: expected at least 6 blocks, one for each stage, got '4 blocks'"),
        ("numbers", "PipelineConfig(split): expected 2 numbers whose sum is 4, the number of blocks, got (1, 2)"),
        ("many", "PipelineConfig(split): expected one of"),
        ("deep", "ParallelConfig: expected sizes that divide the job's 2 ranks, got 'pp 5"),
        ("plan", "tp_plan): layers.*.mlp.middle: expected the end of a module's name"),
        ("weights", "the ranks have different settings: expected axes.pp.weights="),
        ("forward", "engine(batch) on stage"),
        ("backward", "engine.backward() on stage"),
        ("step", "engine.step() on stage"),
        (
            "short",
            "engine.train_batch(data_iter): expected 2 micro-batches (gradient_accumulation_steps), got '1 more'",
        ),
        ("uneven", "micro-batch 1: expected the shapes of micro-batch 0, ['input_ids'] (2, 8)"),
        ("others", "batches of stage 1, rank 1 (pp 1): expected the batches of stage 0, rank 0 (pp 0)"),
        ("none", "engine.train_batch(data_iter): expected an iterator of micro-batches on stage 0"),
    ],
)
def test_unsupported_pipelines_are_refused_on_every_rank(ranks: Ranks, what: str, says: str) -> None:
    for message in ranks(2).run(mistaken, what):
        assert says in message
