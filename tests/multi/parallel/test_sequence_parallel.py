"""Sequence parallelism: the same training as with whole sequences, up to the order of sums."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import zeroaccel
from tests.support.mesh_training import small_gpt2, small_llama
from tests.support.pool import Ranks
from tests.support.refusals import message
from tests.support.training import config, plain_step, train_step
from zeroaccel import Accelerator, DataLoaderConfiguration, ZeroPlugin
from zeroaccel.comm.topology import init_process_group
from zeroaccel.errors import UsageError, ZeroAccelError
from zeroaccel.parallel import ParallelConfig, SequenceGroup, SequenceLoader, UlyssesAttention
from zeroaccel.parallel.ulysses import _check_eager, _interfaces

transformers = pytest.importorskip("transformers")

LOOKS_EAGER_UP = pytest.mark.skipif(
    not hasattr(_interfaces()[0], "get_interface"), reason="models of transformers 4 look eager attention up nowhere"
)

Batch = dict[str, Tensor]

VOCAB, BATCH, LENGTH, STEPS = 61, 2, 16, 2
SGD = {"type": "SGD", "params": {"lr": 0.1, "momentum": 0.9}}


def _model(kind: str, attention: str, key_heads: int = 2) -> nn.Module:
    sizes: dict[str, Any] = {"vocab_size": VOCAB, "attn_implementation": attention}
    if kind == "gpt2":
        return small_gpt2(n_layer=2, use_cache=False, **sizes)
    if kind == "mistral":  # its tokens attend to the last 5 only
        return small_llama("Mistral", num_key_value_heads=key_heads, sliding_window=5, **sizes)
    return small_llama(num_key_value_heads=key_heads, **sizes)


def _batch(step: int, place: int, what: str) -> Batch:
    """Makes batch `step` of data-parallel rank `place`; the first 5 labels are a prompt's and are ignored."""
    generator = torch.Generator().manual_seed(100 * step + place)
    ids = torch.randint(VOCAB, (BATCH, LENGTH), generator=generator)
    labels = ids.clone()
    labels[:, :5] = -100
    batch = {"input_ids": ids, "labels": labels}
    if what == "padded":
        mask = torch.ones_like(ids)
        mask[0, 11:], mask[1, :3] = 0, 0
        batch |= {"attention_mask": mask, "labels": labels.masked_fill(mask == 0, -100)}
    if what == "packed":
        starts = torch.tensor([0, 1, 2, 3, 4, 5, 0, 1, 2, 3, 4, 5, 6, 7, 8, 0])
        batch["position_ids"] = starts.expand(BATCH, -1)
    return batch


def _plain(kind: str, attention: str, key_heads: int, what: str, places: int) -> tuple[list[float], dict[str, Tensor]]:
    """Trains in one process without an engine, on the mean loss of the data-parallel ranks' batches."""
    model = _model(kind, attention, key_heads)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    losses = []
    for step in range(STEPS):
        loss = sum(model(**_batch(step, place, what)).loss for place in range(places)) / places
        losses.append(plain_step(optimizer, loss))
    return losses, {name: param.detach() for name, param in model.named_parameters()}


def _cut(
    kind: str, attention: str, key_heads: int, what: str, sp: int, stage: int, keys: dict[str, Any]
) -> tuple[list[float], dict[str, Tensor]]:
    model = _model(kind, attention, key_heads)
    if keys.get("recompute"):
        # The name before transformers 5.20.
        enable = getattr(model, "activation_checkpointing_enable", None) or model.gradient_checkpointing_enable
        enable()  # type: ignore[operator]
    settings = config(stage, "fp32", optimizer=SGD, **{k: v for k, v in keys.items() if k != "recompute"})
    engine, *_ = zeroaccel.initialize(model, config=settings, parallel=ParallelConfig(sp=sp))
    group = engine.sequence_group
    assert (group.size, engine.train_batch_size()) == (sp, 2 * engine.collectives.world_size // sp)
    place = engine.collectives.rank // sp
    batches = SequenceLoader([_batch(step, place, what) for step in range(STEPS)], group, same_batches=True)
    assert len(batches) == STEPS
    losses = []
    for batch in batches:
        assert batch["input_ids"].shape == (BATCH, LENGTH // sp)
        labels = batch["shift_labels"]
        losses.append(train_step(engine, group.mean_loss(engine(**batch, labels=labels).loss, labels)))
    engine.destroy()
    assert UlyssesAttention.of(model) is None
    return losses, {name: param.detach().clone() for name, param in model.named_parameters()}


CASES = [
    # model, attention, heads of keys, batch, sp, stage, further keys
    ("llama", "sdpa", 2, "plain", 2, 3, {}),
    ("llama", "sdpa", 2, "padded", 2, 2, {}),
    ("llama", "sdpa", 1, "packed", 4, 3, {"recompute": True}),
    pytest.param("llama", "eager", 4, "packed", 2, 1, {}, marks=LOOKS_EAGER_UP),
    ("mistral", "sdpa", 2, "padded", 4, 0, {}),
    pytest.param("mistral", "eager", 1, "packed", 2, 3, {"offload_optimizer": {"device": "cpu"}}, marks=LOOKS_EAGER_UP),
    ("gpt2", "sdpa", 4, "packed", 4, 2, {}),
]


@pytest.mark.parametrize(("kind", "attention", "key_heads", "what", "sp", "stage", "keys"), CASES)
def test_training_is_that_of_whole_sequences(
    ranks: Ranks, kind: str, attention: str, key_heads: int, what: str, sp: int, stage: int, keys: dict[str, Any]
) -> None:
    losses, weights = _plain(kind, attention, key_heads, what, places=4 // sp)
    runs = ranks(4).run(_cut, kind, attention, key_heads, what, sp, stage, keys)
    means = torch.tensor([run[0] for run in runs]).mean(0)
    assert means.tolist() == pytest.approx(losses, rel=2e-6)
    for _, cut in runs:
        for name, weight in weights.items():
            assert torch.allclose(cut[name], weight, rtol=1e-4, atol=2e-6), name


def _accelerated(variables: dict[str, str], dispatch: bool) -> tuple[list[float], dict[str, Tensor], tuple[int, ...]]:
    """Runs the loop of an accelerate script, whose mesh is an argument or comes from the launcher."""
    with pytest.MonkeyPatch.context() as patch:
        for name, value in variables.items():
            patch.setenv(name, value)
        accelerator = Accelerator(
            cpu=True,
            zero_plugin=ZeroPlugin(zero_stage=3),
            dataloader_config=DataLoaderConfiguration(dispatch_batches=dispatch),
            parallelism_config=None if variables else ParallelConfig(sp=2),
        )
        model = _model("llama", "sdpa")
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        samples = [
            {name: value[index] for name, value in _batch(step, place, "padded").items()}
            for step in range(STEPS)
            for place in range(2)
            for index in range(BATCH)
        ]
        loader: Any = torch.utils.data.DataLoader(samples, batch_size=BATCH)
        model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    group, losses = model.sequence_group, []
    for batch in loader:
        assert batch["input_ids"].shape == (BATCH, LENGTH // 2)
        labels = batch["shift_labels"]
        loss = group.mean_loss(model(**batch, labels=labels).loss, labels)
        accelerator.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    with pytest.raises(UsageError, match=r"gather_for_metrics: expected a mesh in which every process"):
        accelerator.gather_for_metrics(loss)
    places = (accelerator.data_parallel_rank, accelerator.context_parallel_rank, model.train_batch_size())
    model.destroy()
    return losses, {name: param.detach().clone() for name, param in model.module.named_parameters()}, places


@pytest.mark.parametrize("dispatch", [False, True])
@pytest.mark.parametrize(
    "variables", [{}, {"ACCELERATE_USE_PARALLELISM_CONFIG": "true", "PARALLELISM_CONFIG_SP_SIZE": "2"}]
)
def test_an_accelerator_deals_out_sequences(ranks: Ranks, variables: dict[str, str], dispatch: bool) -> None:
    losses, weights = _plain("llama", "sdpa", 2, "padded", places=2)
    runs = ranks(4).run(_accelerated, variables, dispatch)
    assert [run[2] for run in runs] == [(0, 0, 4), (0, 1, 4), (1, 0, 4), (1, 1, 4)]
    assert torch.tensor([run[0] for run in runs]).mean(0).tolist() == pytest.approx(losses, rel=2e-6)
    for _, cut, _ in runs:
        for name, weight in weights.items():
            assert torch.allclose(cut[name], weight, rtol=1e-4, atol=2e-6), name


def _launched() -> str:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("ACCELERATE_USE_PARALLELISM_CONFIG", "true")
        patch.setenv("PARALLELISM_CONFIG_SP_SIZE", "2")
        model = _model("llama", "sdpa")
        return message(ZeroAccelError, zeroaccel.initialize, model, config=config(3, "fp32", optimizer=SGD))


def test_a_script_that_does_not_deal_out_sequences_says_so(ranks: Ranks) -> None:
    for said in ranks(2).run(_launched):
        assert "initialize(parallel): the launch requests sp=2 (environment PARALLELISM_CONFIG_SP_SIZE)" in said
        assert "expected parallel=ParallelConfig(sp=2), with batches loaded by data-parallel rank" in said


def _lengths_differ() -> list[float]:
    """Trains two groups of two ranks with sequences of 8 and 16 tokens; each rank loads one of its group's batches."""
    engine, *_ = zeroaccel.initialize(
        _model("llama", "sdpa"), config=config(3, "fp32", optimizer=SGD), parallel=ParallelConfig(sp=2)
    )
    group, rank = engine.sequence_group, engine.collectives.rank
    batch = _batch(0, rank, "plain")
    own = {name: value[:, : 8 * (1 + rank // 2)] for name, value in batch.items()}
    loader = SequenceLoader([{**own, "name": f"of rank {rank}"}], group)
    assert len(loader) == 2
    losses = []
    for place, cut in enumerate(loader):
        assert cut.pop("name") == f"of rank {rank - rank % 2 + place}"
        assert cut["position_ids"][0, 0] == group.rank * cut["input_ids"].shape[1]
        losses.append(
            train_step(engine, group.mean_loss(engine(**cut, labels=cut["shift_labels"]).loss, cut["shift_labels"]))
        )
    engine.destroy()
    return losses


def test_each_rank_loads_batches_of_its_own(ranks: Ranks) -> None:
    runs = ranks(4).run(_lengths_differ)
    assert runs[0] == runs[1]
    assert runs[2] == runs[3]
    model = _model("llama", "sdpa")
    for place, length in ((0, 8), (2, 16)):
        whole = {name: value[:, :length] for name, value in _batch(0, place, "plain").items()}
        assert runs[place][0] == pytest.approx(model(**whole).loss.item(), rel=2e-6)


def _attached_again() -> tuple[float, bool]:
    """Attaches twice, as a Trainer that trains twice does: the second attachment outlasts the first engine."""
    model = _model("llama", "sdpa")
    group = SequenceGroup.of(init_process_group(), 2)
    first = UlyssesAttention(model, group)
    second = UlyssesAttention(model, group)
    batch = group.shard(_batch(0, 0, "plain"))
    with torch.no_grad():
        loss = group.mean_loss(model(**batch, labels=batch["shift_labels"]).loss, batch["shift_labels"])
    first.undo()  # already replaced: the second one stays
    stays = UlyssesAttention.of(model) is second
    second.undo()
    return loss.item(), stays and UlyssesAttention.of(model) is None


def test_attaching_again_replaces_the_first_attachment(ranks: Ranks) -> None:
    whole = _model("llama", "sdpa")(**_batch(0, 0, "plain")).loss.item()
    for loss, is_undone in ranks(2).run(_attached_again):
        assert loss == pytest.approx(whole, rel=2e-6)
        assert is_undone


def _replicas(how: str) -> tuple[list[float], int]:
    keys: dict[str, Any] = {"mics_shard_size": 2} if how == "mics" else {}
    parallel = ParallelConfig(dp_replicate=2) if how == "mesh" else None
    engine, *_ = zeroaccel.initialize(
        _model("llama", "sdpa"), config=config(3, "bf16", optimizer=SGD, **keys), parallel=parallel
    )
    losses = [
        train_step(engine, engine(**_batch(step, engine.collectives.rank, "plain")).loss) for step in range(STEPS)
    ]
    size = engine.collectives.shard_world_size
    engine.destroy()
    return losses, size


def test_replicas_by_a_mesh_are_those_of_the_key(ranks: Ranks) -> None:
    assert ranks(4).run(_replicas, "mesh") == ranks(4).run(_replicas, "mics")


MESHES = {
    "product": {"dp_shard": 2, "sp": 4},
    "divisor": {"sp": 3},
    "size": {"sp": 0},
    "key": {"dp_replicate": 2},
}


def _checks_of_forwards() -> list[int]:
    """Returns the host exchanges per forward: two runs of 8 tokens, one of 4, and one of 8 again."""
    engine, *_ = zeroaccel.initialize(
        _model("llama", "sdpa"), config=config(3, "fp32", optimizer=SGD), parallel=ParallelConfig(sp=2)
    )
    group, counts = engine.sequence_group, []
    recorder = group.checks.flight_recorder
    for length in (16, 16, 8, 16):
        before = recorder._histories["control"].seq
        engine(**group.shard({"input_ids": _batch(0, 0, "plain")["input_ids"][:, :length]}))
        counts.append(recorder._histories["control"].seq - before)
    engine.destroy()
    return counts


def test_ranks_compare_a_shape_once(ranks: Ranks) -> None:
    # Two gathers per new shape: the sizes of the objects, then the objects.
    assert ranks(2).run(_checks_of_forwards) == [[2, 0, 2, 0]] * 2


def _mistaken(what: str) -> str:
    model = nn.Linear(4, 4) if what == "model" else _model("llama", "sdpa")
    keys: dict[str, Any] = {"mics_shard_size": 4} if what == "key" else {}
    engine: Any = None
    try:
        parallel = ParallelConfig(**MESHES.get(what, {"sp": 2}))
        engine, *_ = zeroaccel.initialize(model, config=config(3, "fp32", optimizer=SGD, **keys), parallel=parallel)
        _use_wrongly(engine, what)
    except ZeroAccelError as error:
        return f"{type(error).__name__}: {error}"
    finally:
        if engine is not None:
            engine.destroy()  # otherwise, messages in later tests name ranks by this mesh
    raise AssertionError("it was taken")


def _use_wrongly(engine: Any, what: str) -> None:
    group, rank, batch = engine.sequence_group, engine.collectives.rank, _batch(0, 0, "plain")
    if what == "length":
        group.shard({name: value[:, :15] for name, value in batch.items()})
    elif what == "ranks":
        engine(input_ids=batch["input_ids"][:, : 8 + rank % 2])
    elif what == "mask":
        engine(input_ids=batch["input_ids"][:, :8], attention_mask=torch.ones(BATCH, 1, 16, 16))
    elif what in ("past_key_values", "cache_params"):
        cache, ids = transformers.DynamicCache(), batch["input_ids"][:, :8]
        cache.update(torch.ones(BATCH, 2, 4, 8), torch.ones(BATCH, 2, 4, 8), 0)
        engine(ids, **{what: cache})
    elif what in ("tuples", "cache"):
        name = "past_key_values" if what == "tuples" else what
        engine(batch["input_ids"][:, :8], **{name: ((torch.ones(BATCH, 2, 4, 8),) * 2,)})
    elif what == "generate":
        engine.module.eval().generate(batch["input_ids"], max_new_tokens=1, use_cache=False)
    elif what == "uncut":
        engine(**batch)
    elif what == "tensor":
        group.shard({**batch, "pixels": torch.zeros(2, 3)})
    elif what == "fewer":
        list(SequenceLoader([batch] * (1 + rank % 2), group))


@pytest.mark.parametrize(
    ("what", "says"),
    [
        ("model", "sequence parallelism: Linear: expected a model of transformers"),
        ("product", "expected sizes that multiply to the job's 4 ranks, got 'dp_shard 2 x sp 4 = 8'"),
        ("divisor", "expected sizes that divide the job's 4 ranks, got 'sp 3 = 3'"),
        ("size", "ParallelConfig(sp): expected a positive number of ranks, got 0"),
        ("key", "zero_optimization.mics_shard_size: expected 2, dp_shard x sp of ParallelConfig, got 4"),
        ("length", "a sequence length that is divisible by the 2 ranks of a sequence, got '15 tokens'"),
        ("ranks", "got '((2, 8), False, False) on FIRST and ((2, 9), False, False) on SECOND'"),
        ("mask", "forward: attention_mask: expected (2, 8) for this rank's tokens, got (2, 1, 16, 16)"),
        ("past_key_values", "forward: past_key_values: expected none, got 'a cache'"),
        ("cache_params", "forward: cache_params: expected none, got 'a cache'"),
        ("cache", "forward: cache: expected none, got 'a cache'"),
        ("generate", "LlamaForCausalLM.generate: expected a forward over this rank's run of the tokens, got"),
        ("tuples", "forward: past_key_values: expected none, got 'a cache'"),
        (
            "uncut",
            "forward: expected a run of a batch, with shift_labels (the next token of each position), got",
        ),
        ("tensor", "sequence parallelism: pixels: expected (batch, sequence, ...) with 16 tokens"),
        ("fewer", "on each rank that shares a sequence, got 'no more batches on FIRST'"),
    ],
)
def test_unsuitable_models_and_batches_are_refused_on_every_rank(ranks: Ranks, what: str, says: str) -> None:
    for rank, said in enumerate(ranks(4).run(_mistaken, what)):
        group = rank // 2  # by ranks of the job, not of the sequence
        own = says.replace("FIRST", f"rank {2 * group} (dp_shard {group}, sp 0)")
        assert own.replace("SECOND", f"rank {2 * group + 1} (dp_shard {group}, sp 1)") in said


def test_eager_attention_that_no_table_replaces_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("zeroaccel.parallel.ulysses._interfaces", lambda: ({}, {}))
    with pytest.raises(UsageError, match=r'"eager".*expected a transformers version whose models.*"sdpa", or upgrade'):
        _check_eager("eager")
    _check_eager("sdpa")


def _losses_by_torch() -> tuple[list[float], list[int]]:
    """Combines the losses of sequence-parallel ranks as transformers' Trainer does."""
    from zeroaccel.compat import parallel_state_sp

    parallel_state_sp.initialize_sequence_parallel(2)
    group = parallel_state_sp.get_sequence_parallel_group()
    loss = torch.tensor(float(1 + torch.distributed.get_rank()), requires_grad=True)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)  # about its successor
        from torch.distributed.nn.functional import all_gather

        parts = all_gather(loss, group=group)
    (3 * parts[0] + 5 * parts[1]).backward()
    assert loss.grad is not None
    return [part.item() for part in parts] + [loss.grad.item()], torch.distributed.get_process_group_ranks(group)


@pytest.mark.skipif(torch.__version__.startswith("2.6."), reason="torch 2.6 mistakes a group's ranks for the job's")
def test_torchs_gather_has_gradients_in_every_group(ranks: Ranks) -> None:
    runs = ranks(4).run(_losses_by_torch)
    assert runs == [
        ([1, 2, 6], [0, 1]), ([1, 2, 10], [0, 1]), ([3, 4, 6], [2, 3]), ([3, 4, 10], [2, 3])
    ]  # fmt: skip


def _by_config() -> tuple[int, float, int, str]:
    settings = {**config(3, "fp32", optimizer=SGD), "sequence_parallel_size": 2}
    engine, *_ = zeroaccel.initialize(_model("llama", "sdpa"), config=settings)
    group = engine.sequence_group
    batch = group.shard(_batch(0, engine.collectives.rank // 2, "plain"))
    loss = group.mean_loss(engine(**batch, labels=batch["shift_labels"]).loss, batch["shift_labels"])
    size, samples = group.size, engine.train_batch_size()
    engine.destroy()
    with pytest.raises(UsageError) as caught:
        zeroaccel.initialize(_model("llama", "sdpa"), config=settings, parallel=ParallelConfig(sp=4))
    return size, loss.item(), samples, str(caught.value)


def test_the_size_may_come_from_the_config(ranks: Ranks) -> None:
    runs = ranks(4).run(_by_config)
    for rank, (size, loss, samples, said) in enumerate(runs):
        assert (size, samples) == (2, 4)
        whole = _model("llama", "sdpa")(**_batch(0, rank // 2, "plain")).loss.item()
        assert loss == pytest.approx(whole, rel=2e-6)
        assert "ParallelConfig(sp): expected 2, the value of sequence_parallel_size in the config, got 4" in said
