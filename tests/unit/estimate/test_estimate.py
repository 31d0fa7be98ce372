"""Estimates against the paper's formulas and against each other, and the errors for wrong arguments."""

from __future__ import annotations

import http.server
import json
import threading
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from tests.support.refusals import refused
from zeroaccel.cli.pages.estimate_page import positions
from zeroaccel.errors import ConfigError, UsageError, ZeroAccelError
from zeroaccel.estimate import (
    HEADROOM,
    PLANS,
    Capacity,
    ClosedForms,
    Estimate,
    Workload,
    estimate,
    plan_table,
    smaller_that_fits,
    subject,
)
from zeroaccel.estimate.decoder import Decoder, known_shape, shape_of
from zeroaccel.estimate.extrapolate import MemoryTrace, Moment, extrapolate_depth
from zeroaccel.estimate.known_models import CONFIGS, READ_PICTURES
from zeroaccel.estimate.shapes_only import META, RULES, SHAPES, ShapesOnly, fused_attention
from zeroaccel.estimate.simulate import MemoryTracker, simulate
from zeroaccel.estimate.subject import Step, Subject, predict_tokens
from zeroaccel.setup.axis_estimate import Shape

PLAIN = [(stage, "none", "none") for stage in range(4)]
TINY = {
    "model_type": "llama",
    "architectures": ["LlamaForCausalLM"],
    "hidden_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "intermediate_size": 128,
    "vocab_size": 512,
}


def test_masters_as_residuals_take_2_bytes_and_a_bit() -> None:
    plans = ((2, "none", "none"), (2, "cpu", "none"), (3, "nvme", "none"))
    whole = estimate(_Blocks, Workload(ranks=2, sequence=8), plans)  # type: ignore[arg-type]
    split = estimate(_Blocks, Workload(ranks=2, sequence=8, residual_masters=True), plans)  # type: ignore[arg-type]
    places = [lambda one: one.device.optimizer, lambda one: one.host.optimizer, lambda one: one.disk.optimizer]
    for place, before, after in zip(places, whole, split, strict=True):
        numel = place(before) / 12
        assert place(after) == pytest.approx(numel * (8 + 2 + 1 / 8), rel=0.02)
    with pytest.raises(UsageError, match='precision "bf16"'):
        Workload(precision="fp16", residual_masters=True)


@pytest.mark.parametrize(("precision", "nbytes"), [("bf16", 14), ("fp32", 12)])
def test_updates_in_the_backward_take_spare_memory_on_the_host(precision: Any, nbytes: int) -> None:
    plans = ((2, "none", "none"), (2, "cpu", "none"))
    work = Workload(ranks=2, sequence=8, precision=precision)
    (one, before) = estimate(_Blocks, work, plans)  # type: ignore[arg-type]
    (other, after) = estimate(_Blocks, replace(work, early_updates=True), plans)  # type: ignore[arg-type]
    assert one == other
    assert after.host.optimizer - before.host.optimizer == before.host.optimizer / 12 * nbytes


@pytest.mark.parametrize(
    ("precision", "accumulation", "param"),
    [("bf16", 1, "none"), ("fp32", 1, "none"), ("bf16", 3, "cpu"), ("fp32", 3, "cpu")],
)
def test_a_share_of_the_optimizer_stays_on_the_device(precision: Any, accumulation: int, param: Any) -> None:
    plans = tuple((3, device, param) for device in ("none", "cpu", "nvme"))
    work = Workload(ranks=2, sequence=8, precision=precision, accumulation=accumulation)
    (device, host, files) = estimate(_Blocks, work, plans)  # type: ignore[arg-type]
    assert estimate(_Blocks, replace(work, ratio=1.0, device_budget=1), plans)[1:] == [host, files]  # type: ignore[arg-type]
    for share in ({"ratio": 0.0}, {"device_budget": 10**12}):
        for one in estimate(_Blocks, replace(work, **share), plans)[1:]:  # type: ignore[arg-type]
            assert (one.device, one.host, one.disk) == (device.device, device.host, device.disk)
    (_, half, _) = estimate(_Blocks, replace(work, ratio=0.5), plans)  # type: ignore[arg-type]
    share = half.device.optimizer / device.device.optimizer
    assert 0.3 < share <= 0.5
    assert half.host.optimizer == pytest.approx((1 - share) * host.host.optimizer, rel=1e-6)
    gradients = device.device.gradients - (1 - share) * (device.device.gradients - host.device.gradients)
    assert half.device.gradients == pytest.approx(gradients, rel=1e-6)
    for wrong in ({"ratio": 1.5}, {"ratio": 0.5, "device_budget": 1}):
        with pytest.raises(UsageError, match=r"Workload\.(ratio|device_budget): expected"):
            replace(work, **wrong)  # type: ignore[arg-type]


@pytest.mark.parametrize(("moments", "optimizer", "nbytes"), [("bf16", "adam", 4), ("int8", "adam", 2 + 2 / 32)])
def test_moments_in_fewer_bits_take_fewer_bytes(moments: Any, optimizer: Any, nbytes: float) -> None:
    plans = ((2, "none", "none"), (2, "cpu", "none"), (3, "nvme", "none"))
    whole = estimate(_Blocks, Workload(ranks=2, sequence=8), plans)  # type: ignore[arg-type]
    work = Workload(ranks=2, sequence=8, optimizer=optimizer, moments_dtype=moments)
    small = estimate(_Blocks, work, plans)  # type: ignore[arg-type]
    places = [lambda one: one.device.optimizer, lambda one: one.host.optimizer, lambda one: one.disk.optimizer]
    for place, before, after in zip(places, whole, small, strict=True):
        assert place(after) == pytest.approx(place(before) / 12 * (4 + nbytes), rel=0.02)
    saved = replace(work, peer_checkpoints=True)
    (one,) = estimate(_Blocks, saved, [(1, "none", "none")])  # type: ignore[arg-type]
    assert one.host.saved == pytest.approx(2 * (4 + 4) * one.numel / 2, rel=0.05)  # files have bf16 for either format


@pytest.mark.parametrize(("optimizer", "moments"), [("lion", "int8"), ("sgd", "bf16"), ("momentum", "int8")])
def test_an_optimizer_without_such_moments_is_refused(optimizer: Any, moments: Any) -> None:
    with pytest.raises(UsageError, match=f"moments_dtype: expected fp32.* with optimizer {optimizer}, got '{moments}'"):
        Workload(optimizer=optimizer, moments_dtype=moments)


def test_13_billion_parameters_fit_32_gb_with_residual_masters_and_int8_moments() -> None:
    work = Workload(batch=8, sequence=1024, checkpointing=True, residual_masters=True, moments_dtype="int8")
    (one,) = estimate("13.3b", work, [(3, "cpu", "cpu")])
    assert one.numel > 13.2e9
    assert one.host.total / one.numel == pytest.approx(2 + 2 + 1 / 8 + 2 + 2 / 32 + 2, rel=1e-3)
    assert one.device.total < 0.9 * 32e9


def test_in_memory_states_are_two_of_each_rank_and_of_a_neighbour() -> None:
    for stage, ranks, local, copies in ((0, 4, 4, 2), (1, 8, 1, 4), (0, 8, 1, 8)):  # at stage 0, resuming reads all
        work = Workload(ranks=ranks, ranks_per_machine=local, sequence=8, peer_checkpoints=True)
        (one,) = estimate(_Blocks, work, [(stage, "none", "none")])  # type: ignore[arg-type]
        assert one.host.total == one.host.saved == pytest.approx(copies * 12 * one.numel / ranks, rel=0.05)


CODE_NBYTES = {
    "": 2.0,
    "int8": 1 + 4 / 512,
    "nf4": 0.5625,
    "mxfp4": 0.53125,
    "bnb_nf4": 0.5625,
    "bnb_nf4_double": 0.516,
}


class _Headed(nn.Module):
    """Layers that are large enough to be sharded, and a head, which quantization libraries leave unchanged."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(*(nn.Linear(512, 512, bias=False) for _ in range(3)))
        self.head = nn.Linear(512, 512, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.layers(x))  # type: ignore[no-any-return]


def _headed() -> tuple[nn.Module, Step]:
    def step(model: nn.Module, batch: int, sequence: int) -> Tensor:
        weight = next(model.parameters())
        return model(torch.zeros(batch, sequence, 512, dtype=torch.bfloat16, device=weight.device)).float().mean()

    return _Headed(), step


@pytest.mark.parametrize("frozen", CODE_NBYTES)
def test_adapters_alone_are_trained_and_a_frozen_base_counts_as_its_codes(frozen: Any) -> None:
    ranks, layer = 2, 512 * 512
    workload = Workload(ranks=ranks, sequence=16, lora_rank=128, frozen_weights=frozen)
    step = simulate(subject(_headed), workload, 3)
    adapters = 3 * 2 * 128 * 512
    assert ranks * sum(step.trained) == adapters
    assert step.numel == 4 * layer
    head = 2.0 if frozen.startswith("bnb") else CODE_NBYTES[frozen]
    expected = layer * (3 * CODE_NBYTES[frozen] + head)
    # Adapters are too small to be sharded.
    assert ranks * sum(nbytes for _, nbytes in step.shards) == pytest.approx(expected, rel=0.002)


def test_codes_are_counted_on_shapes_alone_too() -> None:
    what = subject("10m")
    assert what.shape is not None
    step = simulate(what, Workload(ranks=2, sequence=16, lora_rank=4, frozen_weights="nf4"), 3)
    matrices = what.shape.numel - 10_000 * 224 - 19 * 224  # all but the embedding and the norms
    nbytes = sum(nbytes for _, nbytes in step.shards) - 10_000 * 224
    assert 2 * nbytes == pytest.approx(0.5625 * matrices, rel=0.01)


def test_adapters_that_are_not_estimated_are_refused() -> None:
    with refused(UsageError, "Workload.lora_rank", "tp 1 and ep 1", "tp 2", "sequences (sp)"):
        Workload(ranks=2, tp=2, lora_rank=8)
    with refused(UsageError, "Workload.frozen_weights", "bnb_nf4_double", "got 'nf3'"):
        Workload(frozen_weights="nf3")  # type: ignore[arg-type]
    for frozen in ("bnb_nf4", "nf4"):
        with refused(UsageError, "Workload.frozen_weights", "which trains every matrix", "set Workload.lora_rank"):
            estimate("10m", Workload(sequence=16, frozen_weights=frozen))  # type: ignore[arg-type]


def _of(rows: list[Estimate], *, stage: int, optimizer: str = "none", param: str = "none") -> Estimate:
    return next(
        one for one in rows if (one.stage, one.offload_optimizer, one.offload_param) == (stage, optimizer, param)
    )


def test_a_model_in_64_bits_is_refused_as_by_the_engine() -> None:
    def make() -> nn.Module:
        return nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4, dtype=torch.float64))

    with pytest.raises(UsageError, match=r"parameter 1\.weight: expected at most 32 bits"):
        estimate(make, Workload(precision="fp32"))  # type: ignore[arg-type]


@pytest.mark.parametrize("precision", ["bf16", "fp32"])
def test_states_are_those_of_the_paper(precision: str) -> None:
    rows = estimate(_Blocks, Workload(ranks=4, sequence=16, precision=precision), PLAIN)  # type: ignore[arg-type]
    params, states = (2, 12) if precision == "bf16" else (4, 8)
    numel = rows[0].numel
    for one in rows:
        shared = 4 if one.stage >= 1 else 1
        assert one.device.optimizer == pytest.approx(states * numel / shared, rel=0.02)
        assert one.device.params >= params * numel / (4 if one.stage == 3 else 1)
    assert [one.device.params for one in rows[:3]] == [rows[0].device.params] * 3
    assert rows[3].device.params < rows[2].device.params


def test_states_depend_on_the_optimizer() -> None:
    held = {
        name: estimate(_Blocks, Workload(ranks=2, sequence=8, optimizer=name), PLAIN[1:2])[0].device.optimizer  # type: ignore[arg-type]
        for name in ("sgd", "momentum", "adam")
    }
    assert held["momentum"] == 2 * held["sgd"]
    assert held["adam"] == 3 * held["sgd"]


def test_recomputation_and_smaller_batches_take_less() -> None:
    def activations(**changes: object) -> int:
        return estimate("2m", Workload(sequence=512, **changes), PLAIN[3:])[0].device.activations  # type: ignore[arg-type]

    assert activations(checkpointing=True, batch=4) < activations(batch=4)
    assert activations(batch=2) < activations(batch=4)


def test_accumulation_keeps_unsharded_sums_below_stage_2() -> None:
    whole, sharded = estimate(_Blocks, Workload(ranks=8, sequence=8, accumulation=4), PLAIN[1:3])
    # Stage 1 keeps fp32 sums of all gradients; stage 2 their shards, and 16-bit gradients, which all fit the bucket.
    assert whole.device.gradients > 3.8 * whole.numel
    assert sharded.device.total < whole.device.total - 1.5 * whole.numel


def test_offload_moves_bytes_and_loses_none() -> None:
    rows = estimate(_Blocks, Workload(ranks=2, sequence=8))
    stay = _of(rows, stage=3)
    for residence in ("cpu", "nvme"):
        away = _of(rows, stage=3, optimizer=residence)
        moved = away.host if residence == "cpu" else away.disk
        assert away.device.total == stay.device.total - stay.device.optimizer
        assert moved.optimizer == stay.device.optimizer
    everything = _of(rows, stage=3, optimizer="nvme", param="nvme")
    # All shards stay in host memory, within max_in_cpu; the states pass through four buffers of the largest run.
    assert everything.disk.params == 0
    assert everything.host.params == pytest.approx(everything.numel, rel=0.05)  # 2 bytes each, on 2 ranks
    assert 0 < everything.host.optimizer < everything.disk.optimizer / 2
    assert everything.name == "stage 3, all on nvme"


def test_fp32_masters_on_the_host_are_copies() -> None:
    one = _of(estimate(_Blocks, Workload(sequence=8, precision="fp32")), stage=2, optimizer="cpu")
    assert one.host.optimizer == pytest.approx(12 * one.numel, rel=0.02)


def test_the_recommended_plan_comes_first_and_fits() -> None:
    large = partial(_Blocks, 8192)  # more than the 10^9 elements that stage 3 keeps unsharded
    workload = Workload(ranks=8, sequence=8)
    sizes = {one.stage: one.device.total for one in estimate(large, workload, PLAIN)}
    just_enough_for_3 = int((sizes[3] + sizes[2]) / 2 / 0.9)
    rows = plan_table(large, workload, Capacity(device=just_enough_for_3))
    assert rows[0].recommended
    assert rows[0].estimate.name == "stage 3"
    assert [row.recommended for row in rows[1:]] == [False] * (len(rows) - 1)
    assert all(row.short_of == "device" for row in rows if row.estimate.name in ("stage 0", "stage 1", "stage 2"))

    rows = plan_table(large, workload, Capacity(device=10**12))
    assert rows[0].estimate.name == "stage 1"
    assert all(row.fits for row in rows)

    rows = plan_table(large, workload, Capacity(device=10))
    assert not any(row.recommended or row.fits for row in rows)
    assert all(row.fits is None for row in plan_table(large, workload, Capacity()))


def test_a_smaller_workload_fits_with_recomputation_and_then_with_a_smaller_batch() -> None:
    shape = Shape(1, 64, 128, 256)
    what = Subject("small", "", lambda: (Decoder(shape), predict_tokens))
    workload = Workload(ranks=2, batch=8, sequence=256)

    def peak(one: Workload) -> int:
        return min(row.estimate.device.total for row in plan_table(what, one, Capacity()))

    again = replace(workload, checkpointing=True)
    halved = replace(again, batch=4, accumulation=2)
    for expected, before in ((again, workload), (halved, again)):
        capacity = Capacity(device=round((peak(expected) + peak(before)) / 2 / (1 - HEADROOM)))
        assert not any(row.fits for row in plan_table(what, workload, capacity))
        found = smaller_that_fits(what, workload, capacity)
        assert found is not None
        assert found[0] == expected
        assert found[1].fits
    assert smaller_that_fits(what, workload, Capacity(device=1000)) is None


def test_a_single_rank_needs_no_stage() -> None:
    assert plan_table(_Blocks, Workload(sequence=8), Capacity(device=10**12))[0].estimate.name == "stage 0"


def test_on_a_cpu_all_of_it_is_host_memory() -> None:
    workload = Workload(ranks=4, ranks_per_machine=2, sequence=8)
    need = 2 * max(one.device.total + one.host.total for one in estimate(_Blocks, workload, on_cpu=True))
    rows = plan_table(_Blocks, workload, Capacity(host=int(need / 0.89), on_cpu=True))
    assert all(row.fits for row in rows)
    rows = plan_table(_Blocks, workload, Capacity(host=int(need / 0.91), on_cpu=True))
    assert {row.short_of for row in rows} == {"", "host"}


def test_disks_and_hosts_are_shared_by_the_ranks_of_a_machine() -> None:
    workload = Workload(ranks=4, ranks_per_machine=4, sequence=8)
    one = _of(estimate(_Blocks, workload), stage=3, optimizer="nvme")
    row = next(
        row
        for row in plan_table(_Blocks, workload, Capacity(disk=2 * one.disk.total))
        if row.estimate.name == "stage 3, optimizer on nvme"
    )
    assert (row.fits, row.short_of) == (False, "disk")


@pytest.mark.parametrize("numel", [10_000, 3_000_000, 124_000_000, 1_500_000_000, 7_000_000_000, 70_000_000_000])
def test_the_stand_in_has_about_as_many_parameters(numel: int) -> None:
    shape = shape_of(numel)
    assert shape.numel == pytest.approx(numel, rel=0.05 if numel < 100_000 else 0.002)
    with torch.device("meta"):
        assert sum(param.numel() for param in Decoder(shape).parameters()) == shape.numel


def test_a_folder_of_hugging_face(tmp_path: Path) -> None:
    pytest.importorskip("transformers")
    (tmp_path / "config.json").write_text(json.dumps(TINY))
    for name in (tmp_path, tmp_path / "config.json"):
        one, two = (
            estimate(str(name), Workload(ranks=2, sequence=16, checkpointing=again), PLAIN[3:])[0]
            for again in (False, True)
        )
        assert one.numel == 2 * 512 * 64 + 2 * (4 * 64 * 64 + 3 * 64 * 128 + 2 * 64) + 64
        assert two.device.activations <= one.device.activations


class _Blocks(nn.Module):
    def __init__(self, width: int = 512) -> None:
        super().__init__()
        self.embedding = nn.Embedding(256, width)
        shapes = [(width, 2 * width), (2 * width, width)]
        self.blocks = nn.ModuleList(nn.Sequential(*(nn.Linear(*shape) for shape in shapes)) for _ in range(8))
        self.head = nn.Linear(width, 256)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embedding(ids)
        for block in self.blocks:
            x = x + block(x)
        out: Tensor = self.head(x)
        return out


def _with_a_step() -> tuple[nn.Module, object]:
    return nn.Linear(4, 4), lambda model, batch, sequence: model(torch.zeros(batch, sequence, 4)).sum()


def _with_values() -> tuple[nn.Module, object]:
    def step(model: nn.Module, batch: int, sequence: int) -> Tensor:
        out: Tensor = model(torch.zeros(batch, sequence, 4)).sum()
        return out if out > 0 else -out

    return nn.Linear(4, 4), step


def test_a_function_says_how_its_model_is_stepped() -> None:
    (one,) = estimate(f"{__name__}:_with_a_step", Workload(batch=2, sequence=3), PLAIN[:1])
    assert one.numel == 20
    assert estimate(_with_a_step, Workload(batch=2, sequence=3), PLAIN[:1]) == [one]


def test_a_model_that_looks_at_values_is_refused() -> None:
    with pytest.raises(UsageError, match="_with_values: its forward depends on values"):
        estimate(_with_values, Workload(sequence=3), PLAIN[:1])


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("seven", "^MODEL: expected a parameter count such as 7b.*, got 'seven'; known families: deepseek"),
        ("llama-9-7b", r"^MODEL: expected a known model, got 'llama-9-7b'; did you mean llama-2-7b"),
        ("meta-llama/nothing", "pass the path of a config.json or of its folder"),
        ("mixtral-9x7b", r"did you mean mixtral-8x7b or mixtral-8x22b\?"),
        ("mistral-9b", r"did you mean mistral-7b"),
        ("gpt-os-20b", r"did you mean gpt-oss-20b"),
        ("llama-3.1-9b", r"did you mean llama-3\.1-8b"),
        ("Qwen/Qwen2.5-8B", r"did you mean qwen2\.5-.*; without the hub, pass the path"),
        ("12", "expected between 1000 and 10 trillion parameters, got '12'"),
        ("no_such_module_here:f", "there is no module 'no_such_module_here'"),
        ("tests.unit.estimate.test_estimate:nothing", "has no function 'nothing'; it has"),
        ("json:__doc__", "has no function '__doc__'"),
        ("./Llama-3.2-1B", r"MODEL: expected a path that exists, got '?\./Llama-3\.2-1B"),
        ("/models/7b", "expected a path that exists"),
        ("platform:python_version", r"python_version\(\): expected a torch.nn.Module, or a module and a function"),
    ],
)
def test_wrong_models_are_reported(text: str, message: str) -> None:
    with pytest.raises(ZeroAccelError, match=message):
        estimate(text, Workload(), PLAIN[:1])


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (None, "there is no config.json in it"),
        ('{"model_type": "llama",\n oops}', r"config.json:2:2: .*: oops\}"),
        ('{"stage": 3}', "expected a config of a Hugging Face model, with a \"model_type\", got 'one with stage'"),
        ("[]", "got 'list'"),
        ('{"model_type": "no such type"}', "transformers cannot build this model"),
    ],
)
def test_wrong_folders_are_reported(tmp_path: Path, content: str | None, message: str) -> None:
    if content is not None:
        (tmp_path / "config.json").write_text(content)
    with pytest.raises(ConfigError, match=message):
        subject(str(tmp_path)).build()


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"ranks": 0}, "Workload.ranks: expected a whole number of at least 1, got 0"),
        ({"ranks": 6, "ranks_per_machine": 4}, "expected a divisor of the 6 ranks, got 4"),
        ({"precision": "fp8"}, "expected one of fp32, fp16, bf16, got 'fp8'"),
    ],
)
def test_wrong_workloads_are_reported(changes: dict[str, object], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        Workload(**changes)  # type: ignore[arg-type]


@pytest.mark.parametrize("stage", [0, 1, 3])
def test_a_few_of_many_blocks_give_the_estimate_of_all(stage: int) -> None:
    shape = Shape(layers=16, width=16384, inner=8192, vocabulary=1000)

    def build(layers: int = shape.layers) -> tuple[nn.Module, Step]:
        return Decoder(replace(shape, layers=layers)), predict_tokens

    lengths: list[int] = []

    def build_short(layers: int) -> tuple[nn.Module, Step]:
        lengths.append(layers)
        return build(layers)

    whole = Subject("whole", "", build)
    short = Subject("short", "", build, shape.layers, build_short, shape.block_numel)
    workload = Workload(ranks=16, sequence=64)
    one, other = (simulate(what, workload, stage) for what in (whole, short))
    assert lengths == [5, 6, 7]
    assert (one.numel, one.when, len(one.trained)) == (other.numel, other.when, len(other.trained))
    assert one.shards == other.shards
    for name in ("params", "optimizer", "gradients", "activations"):
        assert getattr(other.peak, name) == pytest.approx(getattr(one.peak, name), rel=1e-3)
    assert sum(other.trained) == pytest.approx(sum(one.trained), rel=1e-5)


def _course(*totals: int) -> MemoryTrace:
    return MemoryTrace(len(totals), tuple(Moment(0, total, 0, 0, 0) for total in totals), ((1, 2),), (1,))


def test_models_that_do_not_grow_evenly_are_not_lengthened() -> None:
    even = extrapolate_depth([_course(1, 2, 3), _course(1, 2, 3, 4), _course(1, 2, 3, 4, 5)], more=2)
    assert even is not None
    assert (even.numel, max(even.moments).total) == (7, 7)
    assert extrapolate_depth([_course(1, 2, 3), _course(1, 2, 3, 4), _course(1, 2, 3, 4, 9)], more=2) is None
    assert extrapolate_depth([_course(1, 2, 3), _course(1, 2, 3, 4), _course(1, 2, 3, 4)], more=2) is None


@pytest.fixture
def by_torch(monkeypatch: pytest.MonkeyPatch) -> Callable[[], None]:
    """Returns a function after which torch computes each layout, by its own rules and each time."""
    answers = ShapesOnly()

    def result(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if func.name().partition(".")[0] in ("aten::all", "aten::_local_scalar_dense"):
            return answers.result(func, args, kwargs)
        if any(argument.name == "device" for argument in func._schema.arguments):
            kwargs = {**kwargs, "device": META, "pin_memory": False}
        return func(*args, **kwargs)

    return lambda: monkeypatch.setattr(SHAPES, "result", result)


@pytest.mark.parametrize(
    ("stage", "changes"),
    [(0, {}), (3, {"checkpointing": True, "accumulation": 2}), (1, {"precision": "fp32", "batch": 2})],
)
def test_cached_layouts_are_those_of_torch(
    stage: int, changes: dict[str, object], by_torch: Callable[[], None]
) -> None:
    workload = Workload(ranks=4, sequence=32, **changes)  # type: ignore[arg-type]
    # Irregular sizes, heads that share keys, biases, and at stage 3 tied embeddings.
    shape = Shape(3, 48, 70, 301, heads=3, head_dim=16, key_heads=1, tied=stage == 3, biased=True)
    plain = Subject("small", "", lambda: (Decoder(shape), predict_tokens))
    found = simulate(plain, workload, stage)
    by_torch()
    assert found == simulate(replace(plain), workload, stage)


_QUICK = ("gpt_oss", "qwen3")


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=() if kind in _QUICK else pytest.mark.slow)
        for kind, name in sorted({one.model_type: name for name, one in CONFIGS.items()}.items())
    ],
)
@pytest.mark.parametrize("checkpointing", [False, True])
def test_cached_layouts_are_those_of_torch_for_transformers(
    name: str, checkpointing: bool, by_torch: Callable[[], None]
) -> None:
    pytest.importorskip("transformers")
    what = subject(name)
    short = what.build_short
    assert short is not None
    plain = replace(what, layers=0, build=lambda: short(1))
    workload = Workload(ranks=4, sequence=64, checkpointing=checkpointing)
    found = simulate(plain, workload, 3)
    by_torch()
    assert found == simulate(replace(plain), workload, 3)


class _AsksForConstants(nn.Module):
    def __init__(self, asks: bool) -> None:
        super().__init__()
        self.embedding = nn.Embedding(64, 32)
        self.asks = asks

    def forward(self, ids: Tensor) -> Tensor:
        factor = (torch.tensor([2.0, 3.0]) * 2).sum().item() if self.asks else 10.0
        factor *= torch.linspace(0, 1, 3, device="cpu").tolist()[-1] if self.asks else 1.0
        rows = torch.from_numpy(np.ones((1, 1, 32), dtype=np.float32)) if self.asks else torch.ones(1, 1, 32)
        return F.linear(self.embedding(ids) * rows, self.embedding.weight) * factor


def test_constants_of_a_model_have_values() -> None:
    found, expected = (
        simulate(subject(partial(_AsksForConstants, asks)), Workload(sequence=16, precision="fp32"), 1)
        for asks in (True, False)
    )
    assert found == expected


def test_attention_on_shapes_stores_no_scores_and_undoes_its_patch() -> None:
    before = F.scaled_dot_product_attention
    queries, keys = (torch.empty(1, heads, 64, 16, device="meta") for heads in (4, 4))
    mask = torch.ones(64, 64, dtype=torch.bool, device="meta")
    with MemoryTracker() as tracker, fused_attention():
        peaks = []
        tracker.begin(lambda _operation, total, _resizable: peaks.append(total))
        out = F.scaled_dot_product_attention(queries, keys, keys, attn_mask=mask)
    assert F.scaled_dot_product_attention is before
    assert out.shape == queries.shape
    assert max(peaks) < 2 * out.nbytes + 4 * 64 * 64 * 2  # the mask in the dtype of the queries, but no scores per head
    real = torch.rand(1, 2, 8, 16)
    with fused_attention():
        assert torch.equal(F.scaled_dot_product_attention(real, real, real), before(real, real, real))


def test_the_rules_agree_with_torchs_own() -> None:
    decoder = Decoder(Shape(layers=1, width=32, inner=48, vocabulary=50)).to("meta", torch.bfloat16)
    checked: set[object] = set()

    class Compared(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
            found = func(*args, **(kwargs or {}))
            if func in RULES:
                told = ShapesOnly().result(func, args, kwargs or {})
                pairs = zip(*(one if isinstance(one, tuple) else (one,) for one in (found, told)), strict=True)
                for real, other in pairs:
                    assert (real.shape, real.stride(), real.dtype) == (other.shape, other.stride(), other.dtype), func
                checked.add(func)
            return found

    with torch.device("meta"), fused_attention(), Compared():
        loss, _ = predict_tokens(decoder, 2, 8)
        loss.backward()
        torch.zeros_like(torch.empty(2, 3))
        torch.empty_like(torch.empty(2, 3))
        torch.empty(2, 3).clone()
    assert {str(func) for func in RULES} == {str(func) for func in checked}


def test_growth_in_two_runs_over_the_blocks_is_followed() -> None:
    def trace(blocks: int) -> MemoryTrace:
        totals = [*range(10, 10 + 10 * blocks, 10), 10 * blocks + 7, *range(9 + 3 * blocks, 9, -3)]
        return MemoryTrace(blocks, tuple(Moment(0, total, 0, 0, 0) for total in totals), (), (1,))

    grown = extrapolate_depth([trace(4), trace(5), trace(6)], more=3)
    assert grown is not None
    assert max(grown.moments).total == max(trace(9).moments).total


@pytest.mark.parametrize(
    ("name", "numel"),
    [
        ("llama-2-70b", 68_976_648_192),
        ("meta-llama/Llama-3.1-8B-Instruct", 8_030_261_248),
        ("Llama-3.1-405B", 405_853_388_800),
        ("llama-3.2-1b", 1_235_814_400),
        ("mistralai/Mistral-7B-Instruct-v0.1", 7_241_732_096),
        ("Qwen/Qwen2.5-0.5B", 494_032_768),
        ("qwen2.5-7b", 7_615_616_512),
        ("TinyLlama-1.1B-Chat-v1.0", 1_100_048_384),
        ("meta-llama/Meta-Llama-3-8B", 8_030_261_248),
        ("Llama-3.3-70B-Instruct", 70_553_706_496),
        ("Mistral-Nemo-Instruct-2407", 12_247_782_400),
        ("Mistral-Small-24B-Instruct-2501", 23_572_403_200),
        ("deepseek-llm-7b-base", 6_910_365_696),
        ("Falcon3-7B-Base", 7_455_550_464),
        ("microsoft/Phi-3-mini-4k-instruct", 3_821_079_552),
        ("Phi-3-medium-128k-instruct", 13_960_238_080),
        ("phi-4", 14_659_507_200),
        ("SmolLM2-135M", 134_515_008),
        ("SmolLM2-360M-Instruct", 361_821_120),
        ("SmolLM2-1.7B", 1_711_376_384),
        ("Yi-6B", 6_061_035_520),
        ("01-ai/Yi-34B-Chat", 34_388_917_248),
        ("Qwen2.5-3B", 3_085_938_688),
        ("Qwen2.5-14B", 14_770_033_664),
    ],
)
def test_known_models_have_their_published_numbers_of_parameters(name: str, numel: int) -> None:
    shape = known_shape(name)
    assert shape is not None
    with torch.device("meta"):
        made = sum(param.numel() for param in Decoder(replace(shape, layers=2)).parameters())
    assert (shape.numel, made) == (numel, replace(shape, layers=2).numel)
    assert subject(name).layer_numel == shape.block_numel


@pytest.mark.parametrize("name", sorted(CONFIGS))
def test_known_configs_have_their_published_numbers_of_parameters(name: str) -> None:
    transformers = pytest.importorskip("transformers")
    known = CONFIGS[name]
    if known.model_type not in transformers.CONFIG_MAPPING:
        pytest.skip(f"this transformers has no {known.model_type}")
    with torch.device("meta"):
        model, _ = subject(name).build()
    assert sum(param.numel() for param in model.parameters()) == known.numel


def test_the_note_of_a_vision_model_excludes_its_tower() -> None:
    for name in (*READ_PICTURES, "google/gemma-3-27b-it"):
        assert subject(name).note.endswith("only the text model, without its vision tower and projector")
    assert "tower" not in subject("gemma-3-1b").note + subject("qwen3-8b").note
    # The list has every text part of a larger model, except Gemma 3 1B, which has no tower.
    assert {name for name, one in CONFIGS.items() if one.model_type.endswith("_text")} - {"gemma-3-1b"} == {
        *READ_PICTURES
    }


def test_a_mixture_takes_memory_for_all_its_experts() -> None:
    pytest.importorskip("transformers", minversion="5")
    (one,) = estimate("mistralai/Mixtral-8x7B-Instruct-v0.1", Workload(ranks=8, sequence=128), PLAIN[1:2])
    assert one.numel == 46_702_792_704
    assert one.device.params == pytest.approx(2 * one.numel, rel=0.001)
    assert one.device.optimizer == pytest.approx(12 * one.numel / 8, rel=0.001)


class _Hub(http.server.BaseHTTPRequestHandler):
    """A hub with one model, `someone/tiny`; `someone/gated` requires a login."""

    def do_HEAD(self) -> None:
        self._answer()

    def do_GET(self) -> None:
        self.wfile.write(self._answer())

    def _answer(self) -> bytes:
        content = json.dumps(TINY).encode()
        found = self.path == "/someone/tiny/resolve/main/config.json"
        self.send_response(200 if found else 401 if "gated" in self.path else 404)
        self.send_header("ETag", '"1"')
        self.send_header("X-Repo-Commit", "a" * 40)
        self.send_header("Content-Length", str(len(content) if found else 0))
        self.end_headers()
        return content if found else b""

    def log_message(self, *_: object) -> None:
        pass


def test_names_of_the_hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    constants = pytest.importorskip("huggingface_hub.constants")
    pytest.importorskip("transformers")
    with http.server.HTTPServer(("127.0.0.1", 0), _Hub) as hub:
        thread = threading.Thread(target=hub.serve_forever, daemon=True)
        thread.start()
        address = f"http://127.0.0.1:{hub.server_port}"
        for name, value in (("ENDPOINT", address), ("HF_HUB_CACHE", str(tmp_path)), ("HF_HUB_OFFLINE", False)):
            monkeypatch.setattr(constants, name, value)
        template = f"{address}/{{repo_id}}/resolve/{{revision}}/{{filename}}"
        # Before 1.0 the download module has its own copy of the template.
        for module in ("constants", "file_download"):
            name = f"huggingface_hub.{module}.HUGGINGFACE_CO_URL_TEMPLATE"
            monkeypatch.setattr(name, template, raising=module == "constants")
        for name, words in (("gated", r"or requires a login \(401\)"), ("none", r"no such model.*\(404\)")):
            with pytest.raises(ConfigError, match=words):
                subject(f"someone/{name}")
        (one,) = estimate("someone/tiny", Workload(ranks=2, sequence=16), PLAIN[1:2])
        hub.shutdown()
        thread.join()
    with pytest.raises(ConfigError, match=r"did not answer: .*did you mean llama-3.1-8b"):
        subject("someone/llama-3.1-8bx")
    assert one.numel == 196_928 or one.numel > 100_000
    assert subject("someone/tiny").name == "someone/tiny"  # from the cache, without the hub


@pytest.mark.parametrize(
    ("shape", "changes"),
    [
        (Shape(layers=9, width=16384, inner=24576, vocabulary=32_000), {}),
        (
            Shape(4, 1024, 2048, 1024, heads=8, key_heads=2, tied=True),
            {"ranks": 1, "precision": "fp32", "optimizer": "sgd"},
        ),
        (Shape(layers=2, width=1024, inner=4096, vocabulary=8192), {"accumulation": 2, "tp": 2, "batch": 2}),
    ],
)
def test_closed_forms_agree_with_simulations(shape: Shape, changes: dict[str, Any]) -> None:
    def build(layers: int = shape.layers) -> tuple[nn.Module, Step]:
        return Decoder(replace(shape, layers=layers)), predict_tokens

    model = Subject("m", "", build, shape.layers, build, shape.block_numel, shape=shape)
    workload = Workload(**{"ranks": 4, "sequence": 32, **changes})
    at = [one for one in positions(workload) if not one.checkpointing]
    forms = ClosedForms(at)
    chosen = {9: (at[1], at[11]), 4: (at[1], at[6]), 2: (at[6],)}[shape.layers]
    for one in chosen:
        found, expected = (
            estimate(model, one, PLANS, simulate=how) if how else estimate(model, one, PLANS) for how in (forms, None)
        )
        for mine, theirs in zip(found, expected, strict=True):
            for place in ("device", "host", "disk"):
                for kind in ("params", "optimizer", "gradients", "activations"):
                    here, there = (getattr(getattr(row, place), kind) for row in (mine, theirs))
                    assert here == pytest.approx(there, abs=1e-4 * theirs.device.total), (one, theirs.name, place, kind)
                    assert (here == 0) == (there == 0), (one, theirs.name, place, kind)
            assert mine.sent == pytest.approx(theirs.sent, rel=1e-4)
    # One shard rank has nothing to shard. On 2 ranks the small model pads its shards, which other numbers do not.
    assert forms.simulated == {one for one in chosen if one.shard_ranks == 1 or shape.layers == 4}


def test_a_closed_form_takes_ten_simulations() -> None:
    shape, lengths = Shape(layers=12, width=16384, inner=24576, vocabulary=32_000), []

    def build(layers: int = shape.layers) -> tuple[nn.Module, Step]:
        lengths.append(layers)
        return Decoder(replace(shape, layers=layers)), predict_tokens

    model = Subject("m", "", build, shape.layers, build, shape.block_numel, shape=shape)
    at = [one for one in positions(Workload(ranks=4, sequence=32)) if not one.checkpointing]
    forms = ClosedForms(at)
    for one in at:
        forms(model, one, 1)
    # Ten simulations: four corners at each of the first two lengths, a check, and one corner at the third length.
    assert sorted(lengths) == [5] * 4 + [6] * 5 + [7]


class _Scores(nn.Module):
    """Saves attention scores for backward, which grow with the square of the sequence."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.head = nn.Embedding(64, 32), nn.Linear(32, 64)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embedding(ids)
        out: Tensor = self.head(torch.softmax(x @ x.transpose(1, 2), -1) @ x)
        return out


def test_models_without_a_closed_form_are_simulated() -> None:
    workload = Workload(ranks=2, sequence=64)
    at = [one for one in positions(workload) if not one.checkpointing]
    forms, what = ClosedForms(at), subject(_Scores)
    for one in (at[0], at[-1]):
        assert plan_table(what, one, Capacity(), simulate=forms) == plan_table(what, one, Capacity())
    assert forms.simulated == {at[0], at[-1]}
