"""Meshes of an estimate: parts of a model, bytes by axis and by link, the recommended mesh, and its traffic."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from tests.support.commands import typed
from tests.support.mesh_training import NEEDS_SPLIT_LAYERS, NEEDS_STAGES
from tests.support.recurrent_models import recurrent_model
from zeroaccel.config.parallel import ParallelConfig
from zeroaccel.errors import UsageError
from zeroaccel.estimate import (
    Capacity,
    Estimate,
    Subject,
    Workload,
    estimate,
    mesh_row,
    mesh_table,
    needless_crossing,
    traffic_table,
)
from zeroaccel.estimate.decoder import Decoder
from zeroaccel.estimate.meshes import crossing_share, meshes_of
from zeroaccel.estimate.simulate import simulate
from zeroaccel.estimate.subject import predict_tokens, subject
from zeroaccel.parallel.axes import AXES
from zeroaccel.parallel.pipeline import PipelineEstimate
from zeroaccel.parallel.traffic import (
    SplitLayerShape,
    pipeline_traffic,
    sequence_traffic,
    shard_traffic,
    tensor_traffic,
)
from zeroaccel.setup.axis import Axis
from zeroaccel.setup.axis_estimate import AxisEstimate, EstimatedJob, Shape

SHAPE = Shape(8, 128, 256, 512, heads=8, head_dim=16, key_heads=4)
ROOMY = Capacity(device=10**12)
LLAMA = {
    "model_type": "llama",
    "architectures": ["LlamaForCausalLM"],
    "hidden_size": 128,
    "intermediate_size": 256,
    "vocab_size": 512,
    "num_hidden_layers": 8,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
}


def _subject(shape: Shape = SHAPE) -> Subject:
    return Subject("small", "", lambda: (Decoder(shape), predict_tokens), shape=shape)


def _stage_1(workload: Workload) -> Estimate:
    return estimate(_subject(), workload, [(1, "none", "none")])[0]


def _sent(workload: Workload) -> dict[str, int]:
    return dict(_stage_1(workload).sent)


def test_bytes_of_each_axis_are_those_of_the_closed_forms() -> None:
    tokens, accumulation = 2 * 64, 6
    workload = Workload(ranks=2, sequence=64, batch=2)
    # "dp" of four ranks: a gather and a reduction of all parameters.
    mesh = ParallelConfig(dp_shard=4)
    form = shard_traffic(mesh, [SHAPE.numel], 4, gathers=1, reductions=1)
    assert _sent(replace(workload, ranks=4))["dp"] == pytest.approx(form["dp_shard"].inside, rel=0.001)
    keys = SHAPE.key_heads * SHAPE.head_dim
    block = [
        *(SplitLayerShape("colwise", SHAPE.width, out) for out in (SHAPE.width, keys, keys, SHAPE.inner, SHAPE.inner)),
        *(SplitLayerShape("rowwise", width, SHAPE.width) for width in (SHAPE.width, SHAPE.inner)),
    ]
    layers = [
        SplitLayerShape("embedding_rowwise", SHAPE.vocabulary, SHAPE.width),
        *block * SHAPE.layers,
        SplitLayerShape("colwise_gather_output", SHAPE.width, SHAPE.vocabulary),
    ]
    mesh = ParallelConfig(dp_shard=1, tp=2)
    assert _sent(replace(workload, tp=2)) == {"tp": tensor_traffic(mesh, layers, tokens, 2).inside}
    mesh = ParallelConfig(dp_shard=1, sp=2)
    heads = {"heads": SHAPE.heads, "key_heads": SHAPE.key_heads, "head_width": SHAPE.head_dim}
    whole = sequence_traffic(mesh, layers=SHAPE.layers, batch=2, tokens=64, **heads, ranks_per_node=2)
    # An estimate leaves out positions (8 bytes per token) and the mean of the losses (16 bytes).
    assert _sent(replace(workload, sp=2))["sp"] == whole.inside - tokens // 2 * 8 - 16
    staged = replace(workload, pp=2, accumulation=accumulation)
    mesh = ParallelConfig(pp=2, dp_shard=1)
    form_of_stages = pipeline_traffic(mesh, tokens * SHAPE.width, 2, accumulation=accumulation)
    assert _sent(staged) == {"pp": form_of_stages.inside}


class _HalfEstimate(AxisEstimate):
    name = "half"

    def share(self, job: EstimatedJob, model: nn.Module) -> None:
        """Leaves out the second half of the blocks."""
        assert isinstance(model, Decoder)
        model.blocks = model.blocks[: len(model.blocks) // 2]


class _HalfAxis(Axis):
    name = "half"

    @classmethod
    def estimate(cls, mesh: ParallelConfig) -> AxisEstimate:
        return _HalfEstimate(2)


def test_a_new_axis_brings_its_part_of_an_estimate(monkeypatch: pytest.MonkeyPatch) -> None:
    whole = simulate(_subject(), Workload(sequence=64), 1)
    monkeypatch.setattr("zeroaccel.estimate.mesh_parts.AXES", [*AXES, _HalfAxis])
    half = simulate(_subject(), Workload(sequence=64), 1)
    assert half.numel == whole.numel - SHAPE.layers // 2 * SHAPE.block_numel
    assert half.peak.optimizer < whole.peak.optimizer


def _mixture(folder: Path, **sizes: int) -> str:
    transformers = pytest.importorskip("transformers")
    layers = {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "num_local_experts": 8}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "num_experts_per_tok": 2, "vocab_size": 128}
    settings = transformers.MixtralConfig(**{**layers, **heads, **sizes}, architectures=["MixtralForCausalLM"])
    settings.save_pretrained(folder)
    return str(folder)


def test_ranks_divide_experts(tmp_path: Path) -> None:
    model, tokens = _mixture(tmp_path), 2 * 64
    of_ep = {}
    for ep in (1, 2, 4):
        workload = Workload(ranks=4, batch=2, sequence=64, ep=ep)
        (of_ep[ep],) = estimate(model, workload, [(3, "none", "none")])
    experts = 2 * 8 * 3 * 64 * 96
    dense = of_ep[1].numel - experts
    for ep, one in of_ep.items():
        # Each rank has a fourth of all states, however the ranks share the experts.
        assert one.numel == dense + experts
        assert one.device.optimizer == pytest.approx(12 * one.numel / 4, rel=0.01)
        rows, counts = tokens * 2 * (ep - 1) // ep, (ep - 1) * (8 + 2) * 8
        # Rows of 64 bf16 values and one fp32 weight, to the experts and back, in forward and backward.
        assert one.sent.get("ep", 0) == 2 * (rows * (2 * (2 * 64 * 2 + 4)) + counts)
        # A gather and a sum of the experts that two ranks have; each sends half to the other.
        assert one.sent.get("dp of experts", 0) == (2 * experts / 2 * 2 / 2 if ep == 2 else 0)
    assert of_ep[4].sent["dp"] == of_ep[2].sent["dp"] < of_ep[1].sent["dp"] / 2


def test_meshes_of_a_mixture(tmp_path: Path) -> None:
    rows = mesh_table(_mixture(tmp_path, num_hidden_layers=1), Workload(ranks=2, sequence=64), ROOMY)
    assert {row.workload.mesh_name for row in rows} >= {"dp 2", "dp 2, ep 2", "sp 2, ep 2", "tp 2"}
    by_name = {row.workload.mesh_name: row for row in rows}
    assert [link.axis for link in by_name["dp 2, ep 2"].links] == ["dp", "ep"]
    apart = Workload(ranks=16, ranks_per_machine=4, ep=8)
    assert crossing_share(apart, "ep") == pytest.approx(4 / 7)
    assert crossing_share(apart, "dp of experts") == 1
    with pytest.raises(UsageError, match=r"ParallelConfig\(ep=3\): expected a divisor of dp_shard x sp, 4 ranks"):
        Workload(ranks=4, ep=3)
    three = mesh_row(subject(str(tmp_path)), Workload(ranks=16, sequence=64, ep=16), ROOMY)
    assert "expected a number of experts that is divisible by ep 16, got 8" in three.refused


def test_gpt2_is_cut_by_the_names_of_its_layers(tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    sizes = {"n_embd": 64, "n_layer": 2, "n_head": 4, "n_positions": 64, "vocab_size": 128}
    transformers.GPT2Config(**sizes, architectures=["GPT2LMHeadModel"]).save_pretrained(tmp_path)
    whole, split = (
        estimate(str(tmp_path), Workload(ranks=tp, batch=2, sequence=32, tp=tp), [(1, "none", "none")])[0]
        for tp in (1, 2)
    )
    shapes = [("packed_colwise_3", 64, 192), ("rowwise", 64, 64), ("colwise", 64, 256), ("rowwise", 256, 64)]
    layers = [SplitLayerShape(style, *sides) for style, *sides in shapes] * 2
    form = tensor_traffic(ParallelConfig(dp_shard=1, tp=2), layers, tokens=64, ranks_per_node=2)
    assert dict(split.sent) == {"tp": form.inside}
    cut = 2 * sum(inputs * outputs + (outputs if "col" in style else 0) for style, inputs, outputs in shapes)
    assert split.numel == whole.numel
    assert split.device.optimizer == pytest.approx(12 * (whole.numel - cut / 2), rel=0.001)


def test_parts_of_a_model_add_up_to_it() -> None:
    whole = _stage_1(Workload(ranks=1, sequence=64))
    layers = _stage_1(Workload(ranks=2, sequence=64, tp=2))
    assert layers.numel == whole.numel == SHAPE.numel
    both = (2 * SHAPE.layers + 1) * SHAPE.width  # the norms
    assert layers.device.optimizer == pytest.approx(12 * (both + (SHAPE.numel - both) / 2), rel=0.001)
    two = Workload(ranks=2, sequence=64, pp=2, accumulation=2)
    stages = [simulate(_subject(), two, 1, pipeline_stage=index) for index in (0, 1)]
    assert sum(one.numel for one in stages) == SHAPE.numel
    assert _stage_1(Workload(ranks=2, sequence=64, sp=2)).device.params == whole.device.params


@pytest.mark.parametrize(
    "axes",
    [
        pytest.param({"tp": 2}, marks=NEEDS_SPLIT_LAYERS),
        {"sp": 2},
        pytest.param({"pp": 2, "accumulation": 2}, marks=NEEDS_STAGES),
        pytest.param({"pp": 2, "tp": 2, "ranks": 4, "accumulation": 2}, marks=[NEEDS_SPLIT_LAYERS, NEEDS_STAGES]),
    ],
    ids=str,
)
def test_a_model_of_transformers_is_cut_as_the_same_decoder(axes: dict[str, int], tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    if "tp" in axes and transformers.__version__.startswith("4."):
        pytest.skip("transformers 4 splits fewer layers than `Decoder`, which follows the plans of transformers 5")
    (tmp_path / "config.json").write_text(json.dumps(LLAMA))
    workload = Workload(**{"ranks": 2, "sequence": 32, **axes})  # type: ignore[arg-type]
    (one,) = estimate(str(tmp_path), workload, [(1, "none", "none")])
    own = _stage_1(workload)
    assert dict(one.sent) == dict(own.sent)
    assert one.numel == own.numel
    assert one.device.optimizer == pytest.approx(own.device.optimizer, rel=0.001)


def test_first_stages_have_more_micro_batches_in_flight() -> None:
    assert _stage_1(Workload(ranks=4, sequence=512, pp=4, accumulation=8)).pipeline_stage == 0
    stages = PipelineEstimate(4)
    assert [stages.blocks(SHAPE, place).start for place in range(4)] == [0, 2, 4, 6]


def test_a_deep_stage_whose_memory_does_not_grow_evenly_is_simulated_whole() -> None:
    shape = replace(SHAPE, layers=24)
    workload = Workload(ranks=8, sequence=64, pp=2, accumulation=6)
    deep = estimate(_subject(shape), workload, [(3, "none", "none")])[0]
    assert deep.numel == shape.numel


def test_meshes_have_the_same_samples_per_step() -> None:
    meshes = list(meshes_of(Workload(ranks=8, sequence=64, accumulation=3)))
    assert len({(one.pp, one.sp, one.tp) for one in meshes}) == len(meshes) > 8
    assert {one.mesh.dp_shard * one.accumulation for one in meshes} == {24}


def test_shares_of_traffic_that_cross_machines() -> None:
    apart = Workload(ranks=16, ranks_per_machine=4, tp=8)
    assert crossing_share(apart, "tp") == pytest.approx(2 / 8)
    assert crossing_share(Workload(ranks=16, ranks_per_machine=4, tp=4), "tp") == 0
    assert crossing_share(Workload(ranks=16, ranks_per_machine=4), "dp") == pytest.approx(12 / 15)
    assert crossing_share(Workload(ranks=8, ranks_per_machine=4, pp=2, accumulation=2), "pp") == 1
    assert crossing_share(Workload(ranks=8, ranks_per_machine=4, pp=4, accumulation=4), "pp") == pytest.approx(1 / 3)


def test_tensor_parallelism_across_machines_is_noted_with_numbers() -> None:
    what = _subject()
    words = needless_crossing(
        what, mesh_row(what, Workload(ranks=8, ranks_per_machine=2, sequence=512, batch=8, tp=4), ROOMY), ROOMY
    )
    assert words.startswith("tp 4 spans machines of 2 ranks: each rank sends 0.0")
    assert "dp 4 x tp 2 sends 0.0" in words
    inside = mesh_row(what, Workload(ranks=8, ranks_per_machine=2, sequence=64, tp=2), ROOMY)
    assert needless_crossing(what, inside, ROOMY) == ""


def test_the_recommended_mesh_is_the_simplest_that_fits() -> None:
    # Device memory for the activations of a part of the sequence only, and no host memory for offload.
    long = Workload(ranks=2, sequence=8192)
    alone = mesh_row(_subject(), long, ROOMY)
    assert alone.plan is not None
    rows = mesh_table(_subject(), long, Capacity(device=round(alone.plan.estimate.device.total * 0.8), host=0, disk=0))
    assert rows[0].recommended
    assert rows[0].workload.pp * rows[0].workload.sp * rows[0].workload.tp > 1
    assert [row.recommended for row in rows[1:]] == [False] * (len(rows) - 1)


def test_meshes_that_a_model_cannot_be_divided_into() -> None:
    row = mesh_row(_subject(), Workload(ranks=8, sequence=64, tp=8), ROOMY)
    assert row.refused == "small: tp 8: expected a divisor of its 4 heads of keys, got 8"
    assert mesh_row(_subject(), Workload(ranks=8, sequence=64, sp=8), ROOMY).plan is not None  # key heads are copied
    six = mesh_row(_subject(replace(SHAPE, heads=6, key_heads=2)), Workload(ranks=4, sequence=64, tp=2, sp=2), ROOMY)
    assert six.plan is not None  # 3 heads are dealt as 1 and 2
    tied = _subject(replace(SHAPE, tied=True))
    assert mesh_row(tied, Workload(ranks=2, sequence=64, tp=2), ROOMY).plan is not None
    assert mesh_row(tied, Workload(ranks=2, sequence=64, pp=2, accumulation=2), ROOMY).plan is not None
    with pytest.raises(UsageError, match=r"Workload\.accumulation: expected at least 4 micro-steps"):
        Workload(ranks=4, pp=4, accumulation=2)
    with pytest.raises(UsageError, match="divide the job's 8 ranks"):
        Workload(ranks=8, tp=3)


def test_the_command_prints_meshes() -> None:
    job = "--ranks 2 --ranks_per_machine 1 --seq 64 --device_memory 80GB"
    said = typed(f"estimate 2m {job} --meshes")
    lines = said.out.splitlines()
    assert lines[1].split() == ["mesh", "micro-steps", "plan", "memory", "inside", "across", "idle", "fits"]
    assert lines[2].startswith("dp 2 ")
    assert lines[2].rstrip().endswith("recommended")
    assert all(len(line.rstrip()) <= 80 for line in lines)
    report = json.loads(typed(f"estimate 2m {job} --meshes --json").out)
    assert report["meshes"][0]["links"][0]["axis"] == "dp"
    said = typed("estimate 125m --ranks 4 --ranks_per_machine 2 --seq 64 --device_memory 80GB --tp_size 4")
    assert "GB that a rank sends per step, stage 1: tp 0." in said.out
    assert "tp 4 spans machines of 2 ranks" in said.err
    assert "on GPUs 2 communicators take about 1.4 GB of each device besides" in said.err
    said = typed("estimate 125m --ranks 4 --seq 64 --tp_size 2")
    assert "on GPUs 6 communicators take about 4.1 GB" in said.err
    assert "communicators" not in typed("estimate 2m --seq 64").err


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--tp_size", "3"], "--pp_size, --sp_size, --tp_size: expected sizes that divide the job's 4 ranks"),
        (["--pp_size", "2"], "--accumulation: expected at least 2 micro-steps"),
        (["--meshes", "--tp_size", "2"], "--meshes compares all meshes"),
        (["--ep_size", "3"], "--ep_size 3: expected a divisor of dp_shard x sp, 4 ranks"),
        (["--ep_size", "2"], "expected transformers 5 experts"),
    ],
)
def test_mistakes_name_the_flags(arguments: list[str], message: str) -> None:
    assert message in typed("estimate 125m --ranks 4", *arguments, code=2).err


def test_rows_in_units_of_the_model() -> None:
    rows = {row.name: row for row in traffic_table(10**9, Workload(ranks=32, ranks_per_machine=8))}
    unit = 2e9 * (32 - 8) / 32
    across = {name: row.across / unit for name, row in rows.items()}
    assert across["stage 3"] == pytest.approx(3, rel=1e-4)
    assert across["hpZ"] == pytest.approx(2, rel=1e-4)
    assert across["qwZ + hpZ"] == pytest.approx(1.5, rel=0.01)
    assert across["qwZ + hpZ + qgZ"] == pytest.approx(0.5 + 0.25 / 8, rel=0.01)
    assert across["replicas of one machine"] == pytest.approx(3 / 8, rel=1e-4)


def test_one_machine_has_no_traffic_across_machines() -> None:
    assert traffic_table(10**9, Workload(ranks=8)) == []
    alone = {row.name: row.across for row in traffic_table(10**6, Workload(ranks=2, ranks_per_machine=1))}
    assert alone["hpZ"] == alone["stage 3"]


def _labelled(model: nn.Module, batch: int, sequence: int) -> Tensor:
    ids = torch.zeros(batch, sequence, dtype=torch.long)
    loss: Tensor = model(input_ids=ids, labels=ids).loss
    return loss


def test_layers_along_the_sequence_are_planned_as_with_kernels() -> None:
    pytest.importorskip("transformers")
    nbytes = {}
    for tokens in (2048, 8192):
        hybrid = subject(lambda: (recurrent_model("qwen3_5"), _labelled))
        for sp in (1, 4):
            nbytes[tokens, sp] = simulate(hybrid, Workload(ranks=4, sequence=tokens, sp=sp), 1).peak.activations
    assert nbytes[8192, 4] <= 0.30 * nbytes[8192, 1]
    # Linear in the tokens, at once: torch's own loop over chunks of states would take a minute.
    assert nbytes[8192, 4] == pytest.approx(4 * nbytes[2048, 4], rel=0.02)
