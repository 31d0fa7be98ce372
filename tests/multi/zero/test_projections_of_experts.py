"""Stage 3 gathers the experts of a mixture one projection at a time: the bits of whole layers, in less memory."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import zeroaccel
from tests.support.libraries import NEEDS_EXPERTS
from tests.support.mixtures import MIXTURE_VOCABULARY, small_mixture
from tests.support.pool import Ranks
from tests.support.training import ADAMW, SGD, Run, config, differences, finished, offloaded, recording, train_step
from zeroaccel.zero.grad_reducer import GradientBuffer, GradReducer
from zeroaccel.zero.param_unit import FlatBuffer
from zeroaccel.zero.wrap_policy import LeafRules, group_parameters

pytest.importorskip("transformers")
pytestmark = NEEDS_EXPERTS

LAYERS, HIDDEN, INNER, EXPERTS = 3, 64, 64, 16
SIZES = {"num_hidden_layers": LAYERS, "hidden_size": HIDDEN, "intermediate_size": INNER, "num_local_experts": EXPERTS}
WHOLE = {"leaf_module": {"classes": ["MixtralDecoderLayer", "GptOssDecoderLayer"]}}
# Each use gathers, one unit ahead.
NARROW = {"stage3_max_reuse_distance": 0, "stage3_prefetch_bucket_size": 1}
UP, DOWN = 2 * EXPERTS * INNER * HIDDEN, EXPERTS * INNER * HIDDEN


def _mixture(kind: str = "Mixtral", experts: str = "grouped_mm", **changes: Any) -> nn.Module:
    return small_mixture(kind, experts, **{**SIZES, **changes})


def _batch(step: int) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(100 * step + torch.distributed.get_rank())
    ids = torch.randint(MIXTURE_VOCABULARY, (2, 12), generator=generator)
    return {"input_ids": ids, "labels": ids}


def _trained(make: Callable[[], nn.Module], settings: dict[str, Any]) -> Run:
    engine, *_ = zeroaccel.initialize(make(), config=settings, collectives=recording())
    run = Run()
    for step in range(3):
        with torch.no_grad():
            run.losses.append(engine(**_batch(step)).loss.item())
        run.losses.append(train_step(engine, engine(**_batch(step)).loss))
        run.norms.append(engine.get_global_grad_norm())
    return finished(engine, run)


@dataclass(frozen=True)
class _Case:
    kind: str = "Mixtral"
    experts: str = "grouped_mm"
    recomputes: bool = False
    freezes: bool = False

    def __call__(self) -> nn.Module:
        model = _mixture(self.kind, self.experts, num_hidden_layers=2)
        if self.recomputes:
            model.activation_checkpointing_enable()  # type: ignore[operator]
            model.train()
        if self.freezes:
            for name, param in model.named_parameters():
                param.requires_grad_("experts" not in name)
        return model


def _runs(case: _Case, optimizer: dict[str, Any], folder: Path) -> list[Run]:
    common = {"optimizer": optimizer, "gradient_clipping": 0.5}
    settings = [
        config(3, **common, **WHOLE),
        config(3, **common),
        config(3, **common, **NARROW),
        config(2, **common),
        config(0, **common),
        config(3, **common, **NARROW, **offloaded(folder, "cpu", "cpu")),
        config(3, **common, **NARROW, **offloaded(folder, "nvme", "nvme")),
    ]
    return [_trained(case, each) for each in settings]


CASES = {
    "grouped": _Case(),
    "loops": _Case(experts="eager"),
    "biases": _Case("GptOss", "batched_mm"),
    "recomputed": _Case(recomputes=True),
    "frozen": _Case(freezes=True),
}


@pytest.mark.parametrize("case", CASES)
def test_projections_train_with_the_bits_of_whole_layers(ranks: Ranks, case: str, tmp_path: Path) -> None:
    for whole, *others in ranks(2).run(_runs, CASES[case], SGD if case == "grouped" else ADAMW, tmp_path):
        assert len(others) == 6
        for other in others:
            assert differences(whole, other) == []


# -- contents and order of gathers


@dataclass
class _Gathered:
    order: list[str]
    nbytes: int
    peak: int


def _gathered(changes: dict[str, Any], *, trains: bool, experts: str = "grouped_mm") -> _Gathered:
    """Returns, for the third pass: labels of gathers, bytes sent for them, peak elements of full parameters."""
    ranks, live, peak = recording(), dict[int, int](), 0
    allocate, free = FlatBuffer.allocate, FlatBuffer.free

    def allocated(buffer: FlatBuffer) -> None:
        nonlocal peak
        allocate(buffer)
        live[id(buffer)] = buffer.layout.numel
        peak = max(peak, sum(live.values()))

    def freed(buffer: FlatBuffer) -> None:
        free(buffer)
        live.pop(id(buffer), None)

    engine, *_ = zeroaccel.initialize(_mixture("Mixtral", experts), config=config(3, **changes), collectives=ranks)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(FlatBuffer, "allocate", allocated)
        patch.setattr(FlatBuffer, "free", freed)
        for step in range(3):
            ranks.reset()
            peak = 0
            with torch.set_grad_enabled(trains):
                loss = engine(**_batch(step)).loss
            if trains:
                train_step(engine, loss)
    calls = [call for call in ranks.calls if call.label.startswith("unshard")]
    order = [call.label.removeprefix("unshard ").removeprefix("model.layers.") for call in calls]
    engine.destroy()
    return _Gathered(order, sum(call.nbytes for call in calls), peak)


def _both(trains: bool, experts: str = "grouped_mm") -> tuple[_Gathered, _Gathered]:
    whole = _gathered({**NARROW, **WHOLE}, trains=trains, experts=experts)
    return whole, _gathered(NARROW, trains=trains, experts=experts)


def test_a_forward_has_two_projections_where_it_had_two_layers(ranks: Ranks) -> None:
    for whole, split in ranks(2).run(_both, False):
        assert split.nbytes == whole.nbytes
        rest = {name: [f"{layer}{name}" for layer in range(LAYERS)] for name in ("", ".up", ".down")}
        names = {"mlp.experts.gate_up_proj": "up", "mlp.experts.down_proj": "down"}
        order = [label for label in split.order if label[0].isdigit()]
        for name, short in names.items():
            order = [label.replace(name, short) for label in order]
        assert order == [label for of_layer in zip(*rest.values(), strict=True) for label in of_layer]
        layer = UP + DOWN
        assert 2 * layer < whole.peak < 2.3 * layer
        assert UP + DOWN < split.peak < 1.2 * layer


def test_a_backward_has_a_layer_and_one_unit_ahead(ranks: Ranks) -> None:
    for whole, split in ranks(2).run(_both, True):
        assert split.nbytes == whole.nbytes
        assert whole.peak > 2 * (UP + DOWN)
        assert split.peak < 1.5 * (UP + DOWN)


def test_experts_that_are_looped_over_stay_for_the_whole_forward(ranks: Ranks) -> None:
    for whole, split in ranks(2).run(_both, False, "eager"):
        assert split.nbytes == whole.nbytes
        assert UP + DOWN < split.peak < whole.peak


def _dropped(settings: dict[str, Any]) -> Run:
    """Drops the output of a layer on rank 1, so that its backward skips the layer's experts."""
    engine, *_ = zeroaccel.initialize(_mixture(output_router_logits=False), config=settings, collectives=recording())
    if torch.distributed.get_rank() == 1:
        engine.module.model.layers[1].register_forward_hook(lambda layer, args, output: args[0])
    run = Run()
    for step in range(2):
        run.losses.append(train_step(engine, engine(**_batch(step)).loss))
        run.norms.append(engine.get_global_grad_norm())
    return finished(engine, run)


def _with_a_layer_dropped() -> tuple[Run, Run]:
    return _dropped(config(3, **NARROW, **WHOLE)), _dropped(config(3, **NARROW))


def test_a_backward_that_skips_experts_gathers_them_too(ranks: Ranks) -> None:
    for whole, split in ranks(2).run(_with_a_layer_dropped):
        assert differences(whole, split) == []


def _gradients_beside_their_reduction() -> tuple[int, list[str]]:
    """Returns the number of reduced buffers, and the gradients with separate memory when their reduction begins."""
    refs: dict[int, weakref.ref[Tensor]] = {}
    reductions, found = 0, list[str]()
    arrive, start = GradReducer.on_grad_ready, GradReducer._start_reduction

    def arrives(reducer: GradReducer, param: nn.Parameter) -> None:
        assert param.grad is not None
        refs[id(param)] = weakref.ref(param.grad)
        arrive(reducer, param)

    def starts(reducer: GradReducer, gradients: GradientBuffer, flat: Tensor, label: str) -> Any:
        nonlocal reductions
        reductions += 1
        pairs = zip(gradients.buffer.layout.slots, gradients.buffer.params, strict=True)
        grads = {slot.fqn: refs[id(param)]() for slot, param in pairs}
        own = flat.untyped_storage().data_ptr()
        found.extend(n for n, grad in grads.items() if grad is not None and grad.untyped_storage().data_ptr() != own)
        return start(reducer, gradients, flat, label)

    engine, *_ = zeroaccel.initialize(_mixture(num_hidden_layers=1), config=config(3), collectives=recording())
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(GradReducer, "on_grad_ready", arrives)
        patch.setattr(GradReducer, "_start_reduction", starts)
        engine.backward(engine(**_batch(0)).loss)
    engine.destroy()
    return reductions, found


def test_a_gradient_is_freed_before_its_reduction_takes_memory(ranks: Ranks) -> None:
    assert ranks(2).run(_gradients_beside_their_reduction) == [(4, [])] * 2


# -- units


def _units(model: nn.Module, rules: LeafRules | None = None) -> dict[str, list[str]]:
    specs = group_parameters(model, rules=rules)
    return {
        spec.name.removeprefix("model.layers."): [name.rsplit(".")[-1] for name, _ in spec.params] for spec in specs
    }


def test_a_projection_is_a_unit_with_its_biases() -> None:
    units = _units(_mixture("GptOss", num_hidden_layers=1))
    assert set(units) == {"root", "0", "0.mlp.experts.gate_up_proj", "0.mlp.experts.down_proj"}
    assert units["0.mlp.experts.gate_up_proj"] == ["gate_up_proj", "gate_up_proj_bias"]
    assert units["0.mlp.experts.down_proj"] == ["down_proj", "down_proj_bias"]


@pytest.mark.parametrize(
    ("rules", "names"),
    [
        (LeafRules(names=("model.layers.0.mlp",)), {"root", "0", "0.mlp"}),
        (LeafRules(classes=("MixtralExperts",)), {"root", "0", "0.mlp.experts"}),
        (LeafRules(classes=("MixtralDecoderLayer",)), {"root", "0"}),
        (LeafRules(granularity=1 << 30), {"root", "model"}),
    ],
)
def test_experts_in_a_leaf_stay_whole(rules: LeafRules, names: set[str]) -> None:
    assert set(_units(_mixture(num_hidden_layers=1), rules)) == names


def test_experts_in_a_compiled_layer_stay_whole() -> None:
    model = _mixture(num_hidden_layers=1)
    model.model.layers[0]._compiled_call_impl = model.forward  # type: ignore[union-attr, index]
    assert set(_units(model)) == {"root", "0"}


def test_small_experts_travel_with_their_layer() -> None:
    assert set(_units(small_mixture("Mixtral"))) == {"root", "0", "1"}
