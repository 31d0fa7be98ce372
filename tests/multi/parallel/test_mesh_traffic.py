"""Bytes along each axis of a mesh, counted message by message on a small Llama, equal the closed formulas."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

import zeroaccel
from tests.support.mesh_training import NEEDS_SPLIT_LAYERS, NEEDS_STAGES, small_llama
from tests.support.pool import Ranks
from tests.support.recurrent_models import recurrent_model
from tests.support.training import SGD, config, recording, train_step
from zeroaccel.comm import topology
from zeroaccel.comm.recording import BytesSent, RecordingCollectives
from zeroaccel.config.comm_plan import StepTraffic
from zeroaccel.config.parallel import ParallelConfig
from zeroaccel.parallel.traffic import (
    SplitLayerShape,
    pipeline_traffic,
    recurrence_traffic,
    sequence_traffic,
    shard_traffic,
    tensor_traffic,
)

transformers = pytest.importorskip("transformers")


VOCAB, HIDDEN, INNER, LAYERS, HEADS, KEY_HEADS = 64, 32, 48, 2, 4, 2
BATCH, TOKENS, MICRO_BATCHES = 2, 8, 2
ITEMSIZE = 4


def _split(key_heads: int) -> list[SplitLayerShape]:
    """Returns the layers that transformers' plan for a Llama splits: the embedding, each block, and the head."""
    keys = HIDDEN // HEADS * key_heads
    block = [
        *(SplitLayerShape("colwise", HIDDEN, width) for width in (HIDDEN, keys, keys, INNER, INNER)),
        *(SplitLayerShape("rowwise", width, HIDDEN) for width in (HIDDEN, INNER)),
    ]
    embedding, head = (VOCAB, HIDDEN), (HIDDEN, VOCAB)
    return [
        SplitLayerShape("embedding_rowwise", *embedding),
        *block * LAYERS,
        SplitLayerShape("colwise_gather_output", *head),
    ]


def _batch(place: int) -> dict[str, Tensor]:
    ids = torch.randint(VOCAB, (BATCH, TOKENS), generator=torch.Generator().manual_seed(place))
    return {"input_ids": ids, "labels": ids}


def _loss(engine: Any, place: int) -> Tensor:
    batch, sequences = _batch(place), engine.sequence_group
    if sequences.size == 1:
        return engine(**batch).loss
    cut = sequences.shard(batch | {"attention_mask": torch.ones(BATCH, TOKENS, dtype=torch.long)})
    return sequences.mean_loss(engine(**cut, labels=cut["shift_labels"]).loss, cut["shift_labels"])


def _step(axes: dict[str, Any], node_size: int, stage: int, **model: Any) -> tuple[list[BytesSent], list[int]]:
    """Returns the bytes that the second step sends, and the elements of this rank's units."""
    mesh = ParallelConfig(**axes).resolve(torch.distributed.get_world_size())
    micro_batches = _micro_batches(mesh)
    settings = config(stage, accumulation=micro_batches, optimizer=SGD, stage3_max_reuse_distance=0)
    nodes = [range(first, first + node_size) for first in range(0, 4, node_size)]
    recorder = RecordingCollectives(recording().inner, nodes)
    family = model.pop("family", None)
    built = recurrent_model(family, vocab_size=VOCAB) if family else small_llama(**model)
    engine, *_ = zeroaccel.initialize(built, config=settings, collectives=recorder, parallel=mesh)
    recorder = engine.collectives
    place = recorder.rank // mesh.sp
    for _ in range(2):
        recorder.reset()
        if mesh.pp > 1:
            engine.train_batch(iter([_batch(place)] * micro_batches))
            continue
        for _ in range(micro_batches):
            train_step(engine, _loss(engine, place))
    traffic, by_axis = recorder.traffic(), recorder.nbytes_by_axis()
    engine.destroy()
    assert {axis: sum(links.values()) for axis, links in by_axis.items()} == {
        axis: sum(one.nbytes for one in traffic if one.axis == axis) for axis in by_axis
    }
    return traffic, [unit.numel for unit in engine.units]


def _micro_batches(mesh: ParallelConfig) -> int:
    return max(MICRO_BATCHES, mesh.pp)  # the number that a pipeline's schedule needs


def _counted(sent: list[list[BytesSent]], axis: str) -> StepTraffic:
    """Returns the mean over the ranks."""
    inside, across = (
        sum(one.nbytes for of_rank in sent for one in of_rank if (one.axis, one.link) == (axis, link)) / len(sent)
        for link in ("inside", "across")
    )
    return StepTraffic(inside, across)


@pytest.mark.parametrize(
    ("axes", "node_size"),
    [
        pytest.param({"tp": 2}, 1, marks=NEEDS_SPLIT_LAYERS),
        pytest.param({"tp": 4}, 2, marks=NEEDS_SPLIT_LAYERS),
        ({"sp": 2}, 2),
        ({"sp": 4}, 2),
        pytest.param({"tp": 2, "dp_replicate": 2}, 2, marks=NEEDS_SPLIT_LAYERS),
        ({"dp_replicate": 4}, 2),
    ],
)
def test_traffic_of_tensor_and_sequence_parallelism(ranks: Ranks, axes: dict[str, int], node_size: int) -> None:
    mesh = ParallelConfig(**axes).resolve(4)
    key_heads = max(KEY_HEADS, mesh.tp)
    of_ranks = ranks(4).run(_step, axes, node_size, 3, num_key_value_heads=key_heads)
    sent = [traffic for traffic, _ in of_ranks]
    counts = {"gathers": 2 * MICRO_BATCHES, "reductions": MICRO_BATCHES}  # units are released between the passes
    forms = shard_traffic(mesh, of_ranks[0][1], node_size, itemsize=ITEMSIZE, **counts)
    split = _split(key_heads)
    shape = {"itemsize": ITEMSIZE, "accumulation": MICRO_BATCHES}
    forms["tp"] = tensor_traffic(mesh, split, BATCH * TOKENS, node_size, **shape)
    forms["sp"] = sequence_traffic(
        mesh,
        layers=LAYERS,
        batch=BATCH,
        tokens=TOKENS,
        heads=HEADS,
        key_heads=key_heads,
        head_width=HIDDEN // HEADS,
        ranks_per_node=node_size,
        padded=True,
        **shape,
    )
    assert {axis: _counted(sent, axis) for axis in forms} == forms
    used = {axis for axis, form in forms.items() if form != StepTraffic(0, 0)}
    assert {one.axis for of_rank in sent for one in of_rank} == used
    # Two messages to each other rank per sum: one sum for the embedding, one per layer after it. The head is gathered.
    messages = {op: sum(one.messages for one in sent[0] if (one.axis, one.op) == ("tp", op)) for op in TP_OPS}
    others = (mesh.tp - 1) * MICRO_BATCHES
    assert messages == {"all_reduce": 2 * len(split) * others, "all_gather": others}


@pytest.mark.parametrize(("heads", "key_heads"), [(6, 2), (2, 1)])  # dealt unevenly; more ranks than heads
def test_traffic_of_any_number_of_heads(ranks: Ranks, heads: int, key_heads: int) -> None:
    mesh = ParallelConfig(sp=4).resolve(4)
    sizes = {"num_attention_heads": heads, "num_key_value_heads": key_heads, "hidden_size": 8 * heads}
    sent = [traffic for traffic, _ in ranks(4).run(_step, {"sp": 4}, 2, 1, **sizes)]
    shape = {"batch": BATCH, "tokens": TOKENS, "itemsize": ITEMSIZE, "accumulation": MICRO_BATCHES, "padded": True}
    assert _counted(sent, "sp") == sequence_traffic(
        mesh, layers=LAYERS, heads=heads, key_heads=key_heads, head_width=8, ranks_per_node=2, **shape
    )


def test_traffic_of_a_recurrence_is_that_of_its_heads_and_windows(ranks: Ranks) -> None:
    mesh = ParallelConfig(sp=2).resolve(4)
    sent = [traffic for traffic, _ in ranks(4).run(_step, {"sp": 2}, 2, 1, family="mamba2")]
    shape = {"batch": BATCH, "tokens": TOKENS, "itemsize": ITEMSIZE, "accumulation": MICRO_BATCHES}
    # 8 heads of 8, with a step size each; B and C of 8 states in 2 groups; 4 taps over the channels of all three.
    form = recurrence_traffic(
        mesh,
        layers=2,
        heads=8,
        head_numel=17,
        groups=2,
        group_numel=16,
        window_numel=(64 + 32) * 3,
        ranks_per_node=2,
        **shape,
    )
    inputs = sequence_traffic(
        mesh, layers=0, heads=8, key_heads=8, head_width=8, ranks_per_node=2, padded=True, **shape
    )
    assert _counted(sent, "sp") == form + inputs


TP_OPS = ("all_reduce", "all_gather")


EVERY_STYLE = {
    "embed_tokens": "embedding_colwise",
    **{f"layers.*.self_attn.{name}_proj": "colwise" for name in "qkv"},
    **{f"layers.*.self_attn.{name}_norm": "replicated_with_grad_allreduce" for name in "qk"},
    "layers.*.self_attn.o_proj": "rowwise",
    "layers.*.mlp.gate_proj": "colwise_rep",
    "layers.*.mlp.up_proj": "colwise_gather_output",
    "layers.*.mlp.down_proj": "rowwise_split_input",
}


@NEEDS_SPLIT_LAYERS
def test_styles_of_other_plans(ranks: Ranks) -> None:
    width, keys = HIDDEN // HEADS, HIDDEN // HEADS * KEY_HEADS
    block = [
        *(SplitLayerShape("colwise", HIDDEN, out) for out in (HIDDEN, keys, keys)),
        *[SplitLayerShape("replicated_with_grad_allreduce", width, width)] * 2,
        SplitLayerShape("rowwise", HIDDEN, HIDDEN),
        *[SplitLayerShape("colwise_rep", HIDDEN, INNER), SplitLayerShape("colwise_gather_output", HIDDEN, INNER)],
        SplitLayerShape("rowwise_split_input", INNER, HIDDEN),
    ]
    layers = [SplitLayerShape("embedding_colwise", VOCAB, HIDDEN), *block * LAYERS]
    of_ranks = ranks(2).run(_step, {"tp": 2, "tp_plan": EVERY_STYLE}, 2, 3, kind="Qwen3", head_dim=width)
    form = tensor_traffic(
        ParallelConfig(tp=2, dp_shard=1), layers, BATCH * TOKENS, 2, itemsize=ITEMSIZE, accumulation=MICRO_BATCHES
    )
    assert _counted([traffic for traffic, _ in of_ranks], "tp") == form


def _twice() -> list[list[BytesSent]]:
    axes = {"tp": 2, "tp_plan": {"layers.*.mlp.up_proj": "colwise_rep"}}
    first, _ = _step(axes, 2, 3)
    topology._made_default_group = False  # as if the program had made the default group: torch's group count continues
    topology.destroy()  # torch's records of the mesh would name destroyed groups
    try:
        second, _ = _step(axes, 2, 3)
    finally:
        topology._made_default_group = True
    return [first, second]


@NEEDS_SPLIT_LAYERS
def test_groups_made_again_have_the_same_traffic(ranks: Ranks) -> None:
    for first, second in ranks(2).run(_twice):
        assert first == second
        assert {one.op: one.messages for one in second if one.axis == "tp"} == {
            "all_reduce": 2 * LAYERS * MICRO_BATCHES,
            "all_gather": LAYERS * MICRO_BATCHES,
        }


@NEEDS_STAGES
@pytest.mark.parametrize(("pp", "node_size", "tied"), [(2, 2, False), (2, 1, True), (4, 2, True)])
def test_pipeline_traffic(ranks: Ranks, pp: int, node_size: int, tied: bool) -> None:
    mesh = ParallelConfig(pp=pp).resolve(4)
    of_ranks = ranks(4).run(_step, {"pp": pp}, node_size, 1, num_hidden_layers=4, tie_word_embeddings=tied)
    sent = [traffic for traffic, _ in of_ranks]
    form = pipeline_traffic(
        mesh,
        BATCH * TOKENS * HIDDEN,
        node_size,
        itemsize=ITEMSIZE,
        accumulation=pp,
        tied_numel=VOCAB * HIDDEN if tied else 0,
    )
    assert _counted(sent, "pp") == form
    first = {one.purpose: one.messages for one in sent[0] if one.axis == "pp"}
    assert first == {"activations": pp} | ({"values": 1} if tied else {})
    # Within a stage, ZeRO gathers and reduces once per step.
    for stage in range(pp):
        own = slice(stage * mesh.dp_shard, (stage + 1) * mesh.dp_shard)
        alone = ParallelConfig(dp_shard=mesh.dp_shard)
        forms = shard_traffic(alone, of_ranks[own][0][1], node_size, itemsize=ITEMSIZE, gathers=1, reductions=1)
        assert _counted(sent[own], "dp_shard") == forms["dp_shard"]
