"""Sequence parallelism of models that carry a state or a window along the sequence, and of any number of heads."""

from __future__ import annotations

import inspect
import sys
from importlib import import_module, reload
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import zeroaccel
from tests.support.mesh_training import small_llama
from tests.support.pool import Ranks
from tests.support.recurrent_models import FAMILIES, VOCAB, recurrent_model
from tests.support.training import config
from zeroaccel.errors import UsageError
from zeroaccel.parallel import ParallelConfig, SequenceLoader, UlyssesAttention

transformers = pytest.importorskip("transformers")

BATCH, LENGTH = 2, 32
# Large enough that differences of weights show gradients to 1e-6.
SGD = {"type": "SGD", "params": {"lr": 1.0}}


def _batch(what: str) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(7)
    ids = torch.randint(3, VOCAB, (BATCH, 36 if what == "for three ranks" else LENGTH), generator=generator)
    labels = ids.clone()
    labels[:, :5] = -100
    batch = {"input_ids": ids, "labels": labels}
    if what == "padded":
        mask = torch.ones_like(ids)
        mask[0, 21:], mask[1, :9] = 0, 0
        batch |= {"attention_mask": mask, "labels": labels.masked_fill(mask == 0, -100)}
    if what == "packed":
        batch["position_ids"] = torch.cat([torch.arange(11), torch.arange(14), torch.arange(7)]).expand(BATCH, -1)
    return batch


def _plain(model: nn.Module, what: str) -> tuple[float, float, dict[str, Tensor]]:
    """Returns (loss, norm of the gradient, gradients) of one process without an engine."""
    model.train()
    loss = model(**_batch(what)).loss
    loss.backward()
    grads = {name: torch.zeros_like(p) if p.grad is None else p.grad for name, p in model.named_parameters()}
    return loss.item(), torch.stack([grad.norm() for grad in grads.values()]).norm().item(), grads


def _family(family: str) -> nn.Module:
    return recurrent_model(family)


def _llama(heads: int, key_heads: int, attention: str, kind: str = "Llama") -> nn.Module:
    window = {} if kind == "Llama" else {"sliding_window": 6}
    sizes = {"num_attention_heads": heads, "num_key_value_heads": key_heads, "hidden_size": 4 * heads}
    return small_llama(kind, vocab_size=VOCAB, attn_implementation=attention, head_dim=4, **sizes, **window)


def _attention(kind: str) -> nn.Module:
    """A model whose attention has values per head (sinks), or caps its logits; their windows are of 6 tokens."""
    sizes: dict[str, Any] = {
        "num_attention_heads": 6,
        "num_key_value_heads": 2,
        "hidden_size": 48,
        "head_dim": 8,
        "sliding_window": 6,
    }
    more: dict[str, Any] = {"num_local_experts": 2, "num_experts_per_tok": 1} if kind == "GptOss" else {}
    model = small_llama(kind, vocab_size=VOCAB, attn_implementation="eager", **sizes, **more)
    for name, param in model.named_parameters():
        if name.endswith("sinks"):
            nn.init.normal_(param)
    return model


_MAKERS = {"family": _family, "llama": _llama, "attention": _attention}


def _cut(
    make: str, args: tuple[Any, ...], what: str, sp: int, stage: int, keys: dict[str, Any]
) -> tuple[float, float, dict[str, Tensor]]:
    """Returns the same of an engine on cut sequences."""
    model: Any = _MAKERS[make](*args)
    if keys.get("recompute"):
        # The name before transformers 5.20.
        enable = getattr(model, "activation_checkpointing_enable", None) or model.gradient_checkpointing_enable
        enable()  # type: ignore[operator]
    before = {name: param.detach().clone() for name, param in model.named_parameters()}
    engine, *_ = zeroaccel.initialize(
        model, config=config(stage, "fp32", optimizer=SGD), parallel=ParallelConfig(sp=sp)
    )
    engine.train()
    (batch,) = SequenceLoader([_batch(what)], engine.sequence_group, same_batches=True)
    labels = batch["shift_labels"]
    loss = engine.sequence_group.mean_loss(engine(**batch, labels=labels).loss, labels)
    engine.backward(loss)
    engine.step()
    norm = engine.get_global_grad_norm()
    engine.destroy()
    assert UlyssesAttention.of(model) is None
    grads = {name: before[name] - param.detach() for name, param in model.named_parameters()}
    return loss.item(), float(norm), grads


def _compare(
    ranks: Ranks, make: str, args: tuple[Any, ...], what: str, sp: int, stage: int, keys: dict[str, Any], size: int = 0
) -> None:
    model = _MAKERS[make](*args)
    loss, norm, grads = _plain(model, what)
    for own_loss, own_norm, own in ranks(size or sp).run(_cut, make, args, what, sp, stage, keys):
        assert own_loss == pytest.approx(loss, rel=1e-6)
        assert own_norm == pytest.approx(norm, rel=1e-6)
        for name, grad in grads.items():
            assert torch.allclose(own[name], grad, rtol=1e-5, atol=1e-5), name


_ON_THREE = ("qwen3_next", "qwen3_5", "mamba2", "bamba", "jamba", "lfm2", "rwkv", "recurrent_gemma")


@pytest.mark.slow
@pytest.mark.parametrize("family", _ON_THREE)
def test_heads_and_channels_need_not_divide(ranks: Ranks, family: str) -> None:
    _compare(ranks, "family", (family,), "for three ranks", 3, 3, {})


REFUSED = {
    "minimax": "(MiniMaxLightningAttention): expected layers that work on each token by itself",
    "xlstm": "(xLSTMLayer): expected layers that work on each token by itself",
    "zaya": "model.layers.0.self_attn",
    "inkling": "InklingAttention: expected attention whose heads differ only in their weights, got 'position_bias",
    "inkling2": "Inkling2SlidingAttention: expected attention whose heads differ only in their weights",
    "qwen4_exp": "model.layers.1.self_attn (Qwen4ExpTextAttention): expected a forward that runs",
}
WORKS = sorted(set(FAMILIES) - set(REFUSED))
HEADS = [
    # heads, heads of keys, attention, model, batch, sp, stage, further keys
    (7, 1, "sdpa", "Llama", "packed", 2, 3, {}),
    (14, 2, "eager", "Llama", "padded", 4, 1, {"recompute": True}),
    (2, 1, "sdpa", "Mistral", "packed", 4, 3, {"recompute": True}),  # more ranks than heads
    (2, 2, "sdpa", "Llama", "plain", 8, 1, {}),
]
SWEPT = [
    (heads, keys, attention, kind, what, sp, stage, {})
    for heads, keys in ((7, 7), (12, 3), (14, 7), (28, 4), (2, 1))
    for sp, stage in ((2, 3), (4, 1), (8, 3))
    for attention, kind, what in (("sdpa", "Llama", "padded"), ("eager", "Mistral", "packed"))
] + [
    (heads, keys, attention, kind, "for three ranks", 3, 3, {})
    for heads, keys in ((7, 7), (12, 3), (14, 7), (28, 4), (2, 1))
    for attention, kind in (("sdpa", "Llama"), ("eager", "Mistral"))
]


@pytest.mark.parametrize(
    ("heads", "key_heads", "attention", "kind", "what", "sp", "stage", "keys"),
    [*HEADS, *(pytest.param(*case, marks=pytest.mark.slow) for case in SWEPT)],
)
def test_any_number_of_heads_trains_as_in_one_process(
    ranks: Ranks,
    heads: int,
    key_heads: int,
    attention: str,
    kind: str,
    what: str,
    sp: int,
    stage: int,
    keys: dict[str, Any],
) -> None:
    _compare(ranks, "llama", (heads, key_heads, attention, kind), what, sp, stage, keys)


@pytest.mark.parametrize("kind", ["GptOss", "Gemma2"])
def test_sinks_and_caps_of_attention_go_with_their_heads(ranks: Ranks, kind: str) -> None:
    _compare(ranks, "attention", (kind,), "padded", 4, 3, {})


def _mistaken(what: str) -> str:
    model: Any = recurrent_model("lfm2", conv_L_cache=9) if what == "window" else recurrent_model("qwen3_5")
    if what == "dropout":
        model.config.attention_dropout = 0.5
        for module in model.modules():
            if hasattr(module, "attention_dropout"):
                module.attention_dropout = 0.5
    engine, *_ = zeroaccel.initialize(model, config=config(1, "fp32", optimizer=SGD), parallel=ParallelConfig(sp=2))
    engine.train()
    ids = _batch("plain")["input_ids"][:, : 6 if what == "window" else 16]
    try:
        engine(input_ids=ids)
    except UsageError as error:
        return str(error)
    finally:
        engine.destroy()
    return ""


@pytest.mark.parametrize(
    ("what", "says"),
    [
        (
            "window",
            "layers.0.conv.conv (Conv1d): expected at least 8 tokens on each rank, which it reads from",
        ),
        ("dropout", "Qwen3_5Attention: expected attention without dropout, whose random numbers differ"),
    ],
)
def test_what_a_cut_would_change_is_refused_on_every_rank(ranks: Ranks, what: str, says: str) -> None:
    for said in ranks(2).run(_mistaken, what):
        assert says in said


QUICK = [
    ("qwen3_next", "padded", 2, 3),
    ("lfm3", "padded", 2, 1),
    ("bamba", "packed", 4, 1),
    ("jamba", "plain", 2, 1),
    ("rwkv", "plain", 4, 3),
]


@pytest.mark.parametrize(("family", "what", "sp", "stage"), QUICK)
def test_families_train_as_in_one_process(ranks: Ranks, family: str, what: str, sp: int, stage: int) -> None:
    _compare(ranks, "family", (family,), what, sp, stage, {"recompute": what == "packed"})


@pytest.mark.slow
@pytest.mark.parametrize("stage", [1, 3])
@pytest.mark.parametrize("sp", [2, 4])
@pytest.mark.parametrize("what", ["plain", "padded", "packed"])
@pytest.mark.parametrize("family", WORKS)
def test_all_families_train_as_in_one_process(ranks: Ranks, family: str, what: str, sp: int, stage: int) -> None:
    _compare(ranks, "family", (family,), what, sp, stage, {})


def _refused(family: str) -> str:
    model: Any = recurrent_model(family)
    engine = None
    try:
        engine, *_ = zeroaccel.initialize(model, config=config(1, "fp32", optimizer=SGD), parallel=ParallelConfig(sp=2))
        engine.train()
        (batch,) = SequenceLoader([_batch("plain")], engine.sequence_group, same_batches=True)
        engine(**batch)
    except UsageError as error:
        return str(error)
    finally:
        if engine is not None:
            engine.destroy()
    return ""


@pytest.mark.slow
@pytest.mark.parametrize("family", sorted(REFUSED))
def test_other_families_are_refused_by_the_name_of_a_module(ranks: Ranks, family: str) -> None:
    for said in ranks(2).run(_refused, family):
        assert REFUSED[family] in said


def _items(sp: int) -> tuple[list[float], float]:
    """Returns losses and norm of a step of three micro-batches with different numbers of labels."""
    parallel = ParallelConfig(sp=sp, dp_shard=1)
    model: Any = recurrent_model("qwen3_5")
    batches = [_batch("padded"), _batch("plain"), _batch("padded")]
    batches[0]["labels"][:, 12:] = -100  # none on the ranks behind the first
    items = sum(int((batch["labels"][:, 1:] != -100).sum()) for batch in batches)
    settings = config(1, "fp32", optimizer=SGD, accumulation=3)
    engine, *_ = zeroaccel.initialize(model, config=settings, parallel=parallel)
    engine.train()
    group, losses = engine.sequence_group, []
    for batch in SequenceLoader(batches, group, same_batches=True):
        labels = batch["shift_labels"]
        loss = engine(**batch, labels=labels, num_items_in_batch=items).loss
        loss = group.mean_loss(loss, labels, num_items_in_batch=items)
        engine.backward(loss, scale_wrt_gas=False)
        engine.step()
        losses.append(loss.item())
    norm = engine.get_global_grad_norm()
    engine.destroy()
    return losses, float(norm)


def test_a_step_is_the_mean_over_its_tokens(ranks: Ranks) -> None:
    ((losses, norm),) = ranks(1).run(_items, 1)
    for own_losses, own_norm in ranks(4).run(_items, 4):
        assert own_losses == pytest.approx(losses, rel=1e-6)
        assert own_norm == pytest.approx(norm, rel=1e-6)


# family -> where a package has its kernel, the kernel's parameters, and transformers' function of the same meaning
KERNELS = {
    "qwen3_next": (
        ("fla.ops.gated_delta_rule", "chunk_gated_delta_rule"),
        "q k v g beta scale=None initial_state=None output_final_state=False use_qk_l2norm_in_kernel=False "
        "cu_seqlens=None",
        "torch_chunk_gated_delta_rule",
    ),
    "mamba2": (
        ("mamba_ssm.ops.triton.ssd_combined", "mamba_chunk_scan_combined"),
        "x dt A B C chunk_size D=None z=None dt_bias=None initial_states=None seq_idx=None dt_softplus=False "
        "dt_limit=(0.0,float('inf')) return_final_states=False",
        "mamba2_chunk_scan",
    ),
}


def _with_kernel(family: str, what: str) -> tuple[Any, list[torch.Size]]:
    """Returns the results of an engine whose model finds a package's kernel, and the shapes that the kernel got."""
    (place, name), parameters, own = KERNELS[family]
    modeling = import_module(f"transformers.models.{family}.modeling_{family}")
    computed, shapes = inspect.unwrap(getattr(modeling, own)), []

    def compute(values: dict[str, Any]) -> Any:
        shapes.append(next(iter(values.values())).shape)
        names = dict(zip(("q", "k", "v", "x"), ("query", "key", "value", "hidden_states"), strict=True))
        values = {names.get(name, name): value for name, value in values.items()}
        return computed(
            **{name: value for name, value in values.items() if name in inspect.signature(computed).parameters}
        )

    packages: dict[str, ModuleType] = {}
    for part in place.split("."):
        whole = f"{next(reversed(packages), '')}.{part}".lstrip(".")
        packages[whole] = ModuleType(whole)
        if parent := packages.get(whole.rpartition(".")[0]):
            setattr(parent, part, packages[whole])
    spaces: dict[str, Any] = {"compute": compute}
    exec(f"def {name}({', '.join(parameters.split())}): return compute(dict(locals()))", spaces)
    setattr(packages[place], name, spaces[name])
    sys.modules.update(packages)
    try:
        reload(modeling)
        return _cut("family", (family,), what, 2, 3, {}), shapes
    finally:
        for package in packages:
            del sys.modules[package]
        reload(modeling)


@pytest.mark.parametrize("family", sorted(KERNELS))
def test_kernels_of_packages_get_whole_sequences_of_some_heads(ranks: Ranks, family: str) -> None:
    loss, norm, _ = _plain(_family(family), "padded")
    for (own_loss, own_norm, _), shapes in ranks(2).run(_with_kernel, family, "padded"):
        assert (own_loss, own_norm) == (pytest.approx(loss, rel=1e-6), pytest.approx(norm, rel=1e-6))
        assert shapes[-1][1] == LENGTH, shapes  # before, the check at the start runs layers on each rank's tokens
