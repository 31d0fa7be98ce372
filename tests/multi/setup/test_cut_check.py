"""The engine refuses, at construction, sequence and tensor parallelism that would change a model's numbers."""

from __future__ import annotations

import random
from collections.abc import Mapping
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import zeroaccel
from tests.support.mixtures import MIXTURES, small_mixture
from tests.support.pool import Ranks
from tests.support.recurrent_models import recurrent_model
from tests.support.training import config
from zeroaccel.comm.collectives import Collectives
from zeroaccel.comm.recording import RecordingCollectives
from zeroaccel.comm.topology import init_process_group
from zeroaccel.errors import UsageError
from zeroaccel.parallel import ParallelConfig, expert_dispatch

transformers = pytest.importorskip("transformers")


SGD = {"type": "SGD", "params": {"lr": 0.1, "momentum": 0.9}}
SIZES: dict[str, Any] = {
    **{"vocab_size": 64, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2},
    **{"num_attention_heads": 4, "num_key_value_heads": 2},
}


class TokenShift(nn.Module):
    """Mixes each token with the one before, and so reads across the boundary between ranks."""

    def __init__(self) -> None:
        super().__init__()
        self.mix = nn.Parameter(torch.rand(32))
        self.out = nn.Linear(32, 32)

    def forward(self, x: Tensor) -> Tensor:
        before = nn.functional.pad(x, (0, 0, 1, -1))
        out: Tensor = self.out(x * self.mix + before * (1 - self.mix))
        return out


class CausalConvolution(nn.Module):
    """A window of four tokens, or of seven with gaps."""

    def __init__(self, padding: int = 3, dilation: int = 1) -> None:
        super().__init__()
        self.before = padding
        self.conv = nn.Conv1d(32, 32, 4, padding=3 * dilation - padding, groups=32, dilation=dilation)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.conv(nn.functional.pad(x.transpose(1, 2), (self.before, 0)))[..., : x.shape[1]]
        return out.transpose(1, 2)


class _Before(nn.Module):
    """A layer in front of an attention."""

    def __init__(self, layer: nn.Module, attention: nn.Module) -> None:
        super().__init__()
        self.layer, self.attention = layer, attention

    def forward(self, hidden_states: Tensor, **kwargs: Any) -> Any:
        return self.attention(hidden_states=self.layer(hidden_states), **kwargs)


def _with_layer(layer: nn.Module) -> nn.Module:
    model = _model("llama")
    block: Any = model.get_submodule("model.layers.1")
    block.self_attn = _Before(layer, block.self_attn)
    return model


def _model(kind: str) -> nn.Module:
    torch.manual_seed(3)
    if kind == "qwen3-next":
        linear = {"linear_num_key_heads": 2, "linear_num_value_heads": 2}
        linear |= {"linear_key_head_dim": 8, "linear_value_head_dim": 8}
        experts = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16}
        settings = transformers.Qwen3NextConfig(
            **SIZES, **linear, **experts, head_dim=8, shared_expert_intermediate_size=16
        )
        return transformers.Qwen3NextForCausalLM(settings)
    if kind == "minimax":
        return recurrent_model("minimax")
    if kind == "classifier":
        settings = transformers.LlamaConfig(**SIZES, num_labels=3, pad_token_id=0)
        return transformers.LlamaForSequenceClassification(settings)
    if kind == "convolution":
        return _with_layer(CausalConvolution())
    if kind == "window of a module":
        return _with_layer(CausalConvolution(padding=0, dilation=2))
    if kind == "token shift":
        return _with_layer(TokenShift())
    if kind == "qwen3":
        return transformers.Qwen3ForCausalLM(transformers.Qwen3Config(**SIZES, head_dim=8))
    return transformers.LlamaForCausalLM(transformers.LlamaConfig(**SIZES))


def _refused(model: nn.Module, precision: str, stage: int, parallel: ParallelConfig, *, accumulation: int = 1) -> str:
    settings = config(stage, precision, optimizer=SGD) | {"gradient_accumulation_steps": accumulation}
    try:
        engine, *_ = zeroaccel.initialize(model, config=settings, parallel=parallel)
    except UsageError as error:
        # The changes for the trial are undone: the model computes whole sequences again.
        assert not any(module._forward_hooks or module._forward_pre_hooks for module in model.modules())
        return str(error)
    engine.destroy()
    return ""


def _cut_sequences(kind: str, precision: str, stage: int) -> str:
    return _refused(_model(kind), precision, stage, ParallelConfig(sp=2))


@pytest.mark.parametrize(
    ("kind", "module"),
    [
        ("minimax", "model.layers.0.self_attn (MiniMaxLightningAttention)"),
    ],
)
def test_layers_that_are_known_to_carry_a_state_are_refused(ranks: Ranks, kind: str, module: str) -> None:
    for message in ranks(2).run(_cut_sequences, kind, "fp32", 3):
        assert message.startswith(f"sequence parallelism: {module}: expected layers that work on each token by itself")
        assert "train it with sp=1" in message


def test_a_convolution_that_pads_by_itself_gets_the_tokens_of_the_rank_before(ranks: Ranks) -> None:
    assert ranks(2).run(_cut_sequences, "window of a module", "fp32", 3) == ["", ""]


@pytest.mark.parametrize(("precision", "stage"), [("fp32", 3), ("bf16", 0)])
@pytest.mark.parametrize(
    ("kind", "module"),
    [
        ("convolution", "model.layers.1.self_attn.layer.conv (Conv1d)"),
        ("token shift", "model.layers.1.self_attn.layer (TokenShift)"),
        ("classifier", "the model's output"),
    ],
)
def test_the_first_module_that_differs_is_named_with_the_figure(
    ranks: Ranks, kind: str, module: str, precision: str, stage: int
) -> None:
    messages = ranks(2).run(_cut_sequences, kind, precision, stage)
    assert len(set(messages)) == 1
    where = f"sequence parallelism (sp=2): {module}: expected a relative difference of at most 0.001 from the values"
    assert messages[0].startswith(where)
    figure = float(messages[0].partition("got ")[2].partition(";")[0])
    assert figure > 0.01
    assert "train it with sp=1" in messages[0]


PLAN = {
    **{f"layers.*.self_attn.{name}_proj": "colwise" for name in "qkv"},
    "layers.*.self_attn.o_proj": "rowwise",
    **{"layers.*.mlp.gate_proj": "colwise", "layers.*.mlp.up_proj": "colwise", "layers.*.mlp.down_proj": "rowwise"},
}
NORMS = {f"layers.*.self_attn.{name}_norm": "replicated_with_grad_allreduce" for name in "qk"}


def _split_layers(kind: str, plan: Mapping[str, str]) -> str:
    return _refused(_model(kind), "fp32", 1, ParallelConfig(tp=2, tp_plan=plan))


def _without(*names: str) -> dict[str, str]:
    return {pattern: style for pattern, style in PLAN.items() if not pattern.endswith(names)}


@pytest.mark.parametrize(
    ("kind", "plan", "says"),
    [
        ("qwen3", PLAN, "layers.0.self_attn.q_norm (Qwen3RMSNorm): expected a style that adds up gradients of weight"),
        (
            "llama",
            {**PLAN, "layers.*.self_attn.q_proj": "rowwise", "layers.*.self_attn.o_proj": "colwise"},
            "layers.0.self_attn.q_proj (Linear): expected a forward that runs",
        ),
        (
            "llama",
            _without("k_proj", "v_proj"),
            "layers.0.self_attn (LlamaAttention): expected a relative difference of at most 0.001 from the values",
        ),
        ("llama", {**PLAN, "lm_head": "colwise"}, "the model's output: expected the shape (1, 16, 64)"),
    ],
    ids=["a norm is missing", "two styles are swapped", "keys are not split", "logits stay cut"],
)
def test_a_plan_that_changes_numbers_is_refused(ranks: Ranks, kind: str, plan: Mapping[str, str], says: str) -> None:
    for message in ranks(2).run(_split_layers, kind, plan):
        assert message.startswith("tensor parallelism (tp=2): ")
        assert says in message
        assert "correct tp_plan" in message


@pytest.mark.parametrize(("kind", "plan"), [("llama", PLAN), ("qwen3", {**PLAN, **NORMS})])
def test_a_correct_plan_is_accepted(ranks: Ranks, kind: str, plan: Mapping[str, str]) -> None:
    assert set(ranks(2).run(_split_layers, kind, plan)) == {""}


class _Centred(nn.Module):
    """Experts whose outputs depend on the other tokens in their batch."""

    def __init__(self, experts: nn.Module) -> None:
        super().__init__()
        self.experts = experts
        forward = experts.forward
        experts.forward = lambda *args: (out := forward(*args)) - out.mean(0)

    def forward(self, *args: Tensor) -> Tensor:
        out: Tensor = self.experts(*args)
        return out


class _AllScores(nn.Module):
    """A router that returns the weights of all experts instead of the chosen ones."""

    def __init__(self, gate: nn.Module) -> None:
        super().__init__()
        self.gate = gate

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        logits, _, choices = self.gate(x)
        return logits, logits.float().softmax(-1), choices


def _mixture(kind: str) -> nn.Module:
    if kind in MIXTURES:
        return small_mixture(kind)
    if kind == "equal loads":  # as many rows on each rank as without ranks, but different rows
        return small_mixture("Mixtral", num_local_experts=2)
    model = small_mixture("Mixtral", experts="eager")
    block: Any = model.get_submodule("model.layers.1.mlp")
    if kind == "centred":
        block.experts = _Centred(block.experts)
    elif kind == "all scores":
        block.gate = _AllScores(block.gate)
    return model


def _scaled(function: Any, method: str, factor: float, place: int) -> Any:
    """Wraps a method of an autograd function and multiplies its result at position `place`."""
    right = getattr(function, method)

    def wrong(ctx: Any, *args: Any) -> Any:
        results = right(ctx, *args)
        if not isinstance(results, tuple):
            return results * factor
        return tuple(one * factor if index == place else one for index, one in enumerate(results))

    return staticmethod(wrong)


def _divided_experts(kind: str, precision: str, stage: int, faults: list[tuple[str, str, float, int]]) -> str:
    with pytest.MonkeyPatch.context() as patch:
        for function, method, factor, place in faults:
            found = getattr(expert_dispatch, function)
            patch.setattr(found, method, _scaled(found, method, factor, place))
        unchecked: list[str] = []
        patch.setattr("zeroaccel.setup.cut_check.log_once", lambda level, message: unchecked.append(message))
        message = _refused(_mixture(kind), precision, stage, ParallelConfig(ep=2))
    return "\n".join([message, *unchecked])


OUTPUTS = ("_Move", "forward", 1.01, 0)
# Gradients with an extra sum or division over the expert-parallel ranks: of everything, or of inputs only.
GRADIENTS = [("_Move", "backward", 2.0, 0), ("_Move", "backward", 0.5, 0)]
OF_INPUTS, OF_WEIGHTS = ("_Send", "backward", 2.0, 0), ("_Send", "backward", 0.5, 1)


@pytest.mark.parametrize(
    ("kind", "faults", "says"),
    [
        ("Mixtral", [OUTPUTS], "model.layers.0.mlp.experts (MixtralExperts): expected a relative"),
        ("GptOss", [GRADIENTS[0]], "experts (GptOssExperts): gradient of hidden states: expected a relative"),
        ("Mixtral", [GRADIENTS[1]], "experts (MixtralExperts): gradient of hidden states: expected a relative"),
        ("Mixtral", [GRADIENTS[0], ("_Send", "backward", 0.5, 0), OF_WEIGHTS], "gradient of gate_up_proj: expected"),
        ("Mixtral", [OF_INPUTS], "gradient of hidden states: expected a relative"),
        ("Mixtral", [OF_WEIGHTS], "gradient of weights of the router: expected a relative"),
        ("centred", [], "model.layers.1.mlp.experts.experts (MixtralExperts): expected a relative"),
        ("all scores", [], "model.layers.1.mlp.experts: expected a router that returns K expert numbers"),
    ],
    ids=["outputs", "doubled", "halved", "of experts", "of inputs", "of the router", "of the batch", "router"],
)
def test_experts_that_compute_something_else_are_refused(
    ranks: Ranks, kind: str, faults: list[tuple[str, str, float, int]], says: str
) -> None:
    messages = ranks(2).run(_divided_experts, kind, "fp32", 3, faults)
    assert len(set(messages)) == 1
    assert messages[0].startswith("expert parallelism")
    assert says in messages[0]


@pytest.mark.parametrize("kind", [*MIXTURES, "equal loads"])
def test_correct_experts_are_accepted(ranks: Ranks, kind: str) -> None:
    for precision, stage in (("fp32", 1), ("bf16", 3)):
        assert set(ranks(2).run(_divided_experts, kind, precision, stage, [])) == {""}


def _random_states() -> list[Any]:
    words = np.random.get_state()[1]
    return [random.getstate(), np.asarray(words).tolist(), torch.get_rng_state().tolist()]


def _snapshot(model: nn.Module) -> dict[str, Any]:
    modules = dict(model.named_modules())
    return {
        "modes": {name: module.training for name, module in modules.items()},
        "buffers": {name: buffer.tolist() for name, buffer in model.named_buffers()},
        "gradients": {name: param.grad for name, param in model.named_parameters()},
        "forwards": {name: vars(module).get("forward") for name, module in modules.items()},
        "random": _random_states(),
    }


class _Counting(nn.Module):
    """Counts its forwards in a buffer and in an attribute, and draws a random number in each."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("forwards", torch.zeros(1))
        self.seen = 0

    def forward(self, x: Tensor) -> Tensor:
        self.forwards += 1
        self.seen += 1
        torch.rand(1), random.random(), np.random.rand()
        return x


def _traced(parallel: ParallelConfig, stage: int) -> tuple[list[str], int, int]:
    """Returns the differences, the number of calls of the program's hook, and the number of training collectives."""
    layer = _Counting()
    model = _with_layer(layer)
    model.get_submodule("model.layers.0").eval()  # a frozen part, as programs leave it
    calls = []
    handle = model.register_forward_hook(lambda *args: calls.append(1))
    before = _snapshot(model)
    recording = RecordingCollectives(Collectives(init_process_group()))
    engine, *_ = zeroaccel.initialize(
        model, config=config(stage, optimizer=SGD), parallel=parallel, collectives=recording
    )
    after = _snapshot(model)
    counted = recording.count("all_to_all") + sum(sent.axis in ("sp", "tp") for sent in recording.traffic())
    changed = [key for key, value in before.items() if after[key] != value]
    changed += ["seen"] * (layer.seen != 0) + ["hook"] * (handle.id not in model._forward_hooks)
    handle.remove()
    engine.destroy()
    return changed, len(calls), counted


@pytest.mark.parametrize("parallel", [ParallelConfig(sp=2), ParallelConfig(tp=2, tp_plan=PLAN)], ids=["sp", "tp"])
@pytest.mark.parametrize("stage", [1, 3])
def test_the_check_leaves_no_trace(ranks: Ranks, parallel: ParallelConfig, stage: int) -> None:
    for changed, calls, counted in ranks(2).run(_traced, parallel, stage):
        assert changed == []
        assert calls == counted == 0


def _regardless(kind: str) -> tuple[int, str]:
    logged: list[str] = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("zeroaccel.setup.cut_check.log_always", logged.append)
        parallel = ParallelConfig(sp=2, verify_cut=False)
        engine, *_ = zeroaccel.initialize(_model(kind), config=config(1, optimizer=SGD), parallel=parallel)
    size = engine.sequence_group.size
    engine.destroy()
    return size, "\n".join(logged)


@pytest.mark.parametrize("kind", ["token shift", "qwen3-next"])
def test_the_check_can_be_disabled_with_a_note_in_the_log(ranks: Ranks, kind: str) -> None:
    for size, logged in ranks(2).run(_regardless, kind):
        assert size == 2
        assert logged.startswith("initialize: verify_cut=False, so nothing checks that sequence parallelism (sp=2)")


class _TwoInputs(nn.Module):
    """A forward whose inputs a trial cannot make up."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(8, 16), nn.Linear(16, 8)

    def forward(self, x: Tensor, scale: Tensor) -> Tensor:
        out: Tensor = self.down(torch.relu(self.up(x))) * scale
        return out


class _Random(nn.Module):
    """Returns a different result in each forward."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(8, 16), nn.Linear(16, 8)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.down(torch.relu(self.up(x))) + torch.randn(())
        return out


def _unchecked(kind: type[nn.Module]) -> str:
    logged: list[str] = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("zeroaccel.setup.cut_check.log_once", lambda level, message: logged.append(message))
        parallel = ParallelConfig(tp=2, tp_plan={"up": "colwise", "down": "rowwise"})
        engine, *_ = zeroaccel.initialize(kind(), config=config(1, optimizer=SGD), parallel=parallel)
    engine.destroy()
    return "\n".join(logged)


@pytest.mark.parametrize(
    ("kind", "reason"),
    [(_TwoInputs, "its forward takes x, scale"), (_Random, "its forward draws random numbers in eval mode, too")],
)
def test_a_model_that_cannot_be_tried_is_named_in_the_log(ranks: Ranks, kind: type[nn.Module], reason: str) -> None:
    for logged in ranks(2).run(_unchecked, kind):
        model = f"tensor parallelism (tp=2) preserves results of {kind.__name__}"
        assert logged == f"initialize: nothing checks that {model}: {reason}"


def _built_in_shards(kind: str, precision: str) -> str:
    parallel = ParallelConfig(sp=2)
    settings = config(3, precision, optimizer=SGD)
    with zeroaccel.zero.Init(config_dict_or_path=settings):
        model = _model(kind)
    return _refused(model, precision, 3, parallel)


def test_a_model_that_was_built_in_shards_is_checked(ranks: Ranks) -> None:
    for message in ranks(2).run(_built_in_shards, "token shift", "bf16"):
        assert message.startswith("sequence parallelism (sp=2): model.layers.1.self_attn.layer (TokenShift)")
    assert set(ranks(2).run(_built_in_shards, "llama", "bf16")) == {""}


@pytest.mark.parametrize(
    ("kind", "axes", "says"),
    [
        ("token shift", {"sp": 2}, "sequence parallelism (sp=2): model.layers.1.self_attn.layer (TokenShift)"),
        ("qwen3", {"tp": 2, "tp_plan": PLAN}, "tensor parallelism (tp=2): model.layers.0.self_attn.q_norm"),
        ("llama", {"sp": 2}, ""),
        ("llama", {"tp": 2}, ""),
    ],
)
def test_stages_of_a_pipeline_are_checked(ranks: Ranks, kind: str, axes: dict[str, Any], says: str) -> None:
    for message, logged in ranks(4).run(_cut_stages, kind, axes):
        assert message.startswith(says)
        assert bool(message) == bool(says)
        assert logged == ""


def _cut_stages(kind: str, axes: dict[str, Any]) -> tuple[str, str]:
    logged: list[str] = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("zeroaccel.setup.cut_check.log_once", lambda level, message: logged.append(message))
        message = _refused(_model(kind), "fp32", 1, ParallelConfig(pp=2, **axes), accumulation=2)
    return message, "\n".join(logged)


def test_an_invalid_verify_cut_is_refused() -> None:
    with pytest.raises(UsageError, match=r"ParallelConfig\(verify_cut\): expected True or False, got 'no'"):
        ParallelConfig(verify_cut="no")  # type: ignore[arg-type]
