"""Several models in one accelerator, models for inference, and changes that a program makes behind the engine.

Every rank sees the same batch, so one process with plain torch gives the reference.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests.support.pool import Ranks
from tests.support.refusals import message
from tests.support.training import Toy, batches
from zeroaccel import Accelerator, ZeroPlugin
from zeroaccel.errors import ConfigError, EngineStateError, UsageError

Weights = dict[str, Tensor]
WIDTH = 9


def _net(seed: int, inputs: int = WIDTH, outputs: int = WIDTH) -> nn.Sequential:
    torch.manual_seed(seed)
    middle = [nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh()) for _ in range(2)]
    return nn.Sequential(nn.Linear(inputs, WIDTH), *middle, nn.Linear(WIDTH, outputs))


def _sgd(model: nn.Module, lr: float = 0.1) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=lr, momentum=0.9)


def _data(step: int) -> Tensor:
    return torch.randn(4, WIDTH, generator=torch.Generator().manual_seed(step))


def _plugins(*stages: int) -> dict[str, ZeroPlugin]:
    names = ("first", "second", "third")
    tree = {"stage3_param_persistence_threshold": 0}
    return {
        name: ZeroPlugin({"zero_optimization": {"stage": stage, **tree}})
        for name, stage in zip(names, stages, strict=False)
    }


def _weights(*models: nn.Module) -> list[Weights]:
    return [{fqn: param.detach().clone() for fqn, param in model.named_parameters()} for model in models]


def _end(accelerator: Accelerator, *models: Any) -> list[Weights]:
    inner = [accelerator.unwrap_model(model) for model in models]
    accelerator.free_memory()
    return _weights(*inner)


def _agree(found: list[list[Weights]], expected: list[Weights]) -> None:
    for per_rank in found:
        for got, wanted in zip(per_rank, expected, strict=True):
            for fqn, weight in wanted.items():
                torch.testing.assert_close(got[fqn], weight, rtol=1e-5, atol=1e-6, msg=lambda m, n=fqn: f"{n}: {m}")


# -- loops for both plain torch and an accelerator


def _distill(student: Any, teacher: Any, optimizer: Any, backward: Callable[[Tensor], Any]) -> None:
    for step in range(3):
        with torch.no_grad():
            target = teacher(_data(step))
        backward((student(_data(step)) - target).square().mean())
        optimizer.step()
        optimizer.zero_grad()


def _adversarial(
    maker: Any, judge: Any, make: Any, judging: Any, backward: Callable[[Tensor], Any], freeze: bool
) -> None:
    for step in range(3):
        judging.zero_grad()
        backward(nn.functional.softplus(-judge(_data(step))).mean())
        backward(nn.functional.softplus(judge(maker(_data(10 + step)).detach())).mean())
        judging.step()
        make.zero_grad()
        if freeze:
            judge.requires_grad_(False)
        backward(nn.functional.softplus(-judge(maker(_data(20 + step)))).mean())
        if freeze:
            judge.requires_grad_(True)
        make.step()
        make.zero_grad()


def _perceptual(maker: Any, feature: Any, optimizer: Any, backward: Callable[[Tensor], Any]) -> None:
    for step in range(3):
        with torch.no_grad():
            target = feature(_data(step))
        backward((feature(maker(_data(10 + step))) - target).square().mean())
        optimizer.step()
        optimizer.zero_grad()


def _jointly(encoder: Any, decoder: Any, optimizers: Any, backward: Callable[[Tensor], Any], clip: Any) -> list[float]:
    norms = []
    for step in range(3):
        backward((decoder(encoder(_data(step))) - _data(step)).square().mean())
        norms.append(float(clip([*encoder.parameters(), *decoder.parameters()], 0.05)))
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    return norms


# -- on ranks


def _run_distill(student_stage: int, teacher_stage: int) -> list[Weights]:
    accelerator = Accelerator(deepspeed_plugins=_plugins(student_stage, teacher_stage))
    student: Any = _net(1)
    teacher: Any = _net(2)
    student, optimizer = accelerator.prepare(student, _sgd(student))
    accelerator.state.select_zero_plugin("second")
    assert accelerator.deepspeed_plugin is accelerator.state.get_deepspeed_plugin("second")
    teacher = accelerator.prepare(teacher)
    assert student.zero_config["zero_optimization"]["stage"] == student_stage
    assert teacher.zero_config["zero_optimization"]["stage"] == teacher_stage
    assert teacher.optimizer is None
    shown = str(accelerator.state)
    assert "Sequential (trained)" in shown
    assert "Sequential (inference)" in shown
    _distill(student, teacher, optimizer, accelerator.backward)
    return _end(accelerator, student, teacher)


@pytest.mark.parametrize("stages", [(2, 3), (3, 0)])
def test_a_student_learns_from_a_teacher_under_another_plugin(ranks: Ranks, stages: tuple[int, int]) -> None:
    student, teacher = _net(1), _net(2)
    _distill(student, teacher, _sgd(student), Tensor.backward)
    _agree(ranks(2).run(_run_distill, *stages), _weights(student, teacher))


def _run_adversarial(stage: int, freeze: bool, precision: str) -> list[Weights]:
    accelerator = Accelerator(zero_plugin=_plugins(stage)["first"], mixed_precision=precision)
    maker, judge = _net(1), _net(2, outputs=1)
    found = accelerator.prepare(judge, _sgd(maker), maker, _sgd(judge))  # in one call, in mixed order
    prepared_judge, make, prepared_maker, judging = found
    _adversarial(prepared_maker, prepared_judge, make, judging, accelerator.backward, freeze)
    assert (prepared_maker.global_steps, prepared_judge.global_steps) == (3, 3)
    return _end(accelerator, prepared_maker, prepared_judge)


@pytest.mark.parametrize("stage", [1, 3])
@pytest.mark.parametrize("freeze", [False, True])
def test_two_models_train_against_each_other(ranks: Ranks, stage: int, freeze: bool) -> None:
    maker, judge = _net(1), _net(2, outputs=1)
    _adversarial(maker, judge, _sgd(maker), _sgd(judge), Tensor.backward, freeze)
    _agree(ranks(2).run(_run_adversarial, stage, freeze, "no"), _weights(maker, judge))


def test_under_fp16_the_other_model_has_to_be_frozen(ranks: Ranks) -> None:
    ranks(2).run(_run_adversarial, 3, True, "fp16")
    for said in ranks(2).run(partial(message, UsageError, _run_adversarial), 3, False, "fp16"):
        assert "depends on one trained model, because each model has its own loss scale" in said
        assert "freeze the others for this loss" in said


def _run_perceptual(stage: int) -> list[Weights]:
    accelerator = Accelerator(zero_plugin=_plugins(stage)["first"])
    maker: Any = _net(1)
    feature: Any = _net(2)
    maker, feature, optimizer = accelerator.prepare(maker, feature, _sgd(maker))
    _perceptual(maker, feature, optimizer, accelerator.backward)
    assert all(param.grad is None for param in feature.parameters())
    return _end(accelerator, maker, feature)


@pytest.mark.parametrize("stage", [0, 3])
def test_gradients_pass_through_a_model_for_inference(ranks: Ranks, stage: int) -> None:
    maker, feature = _net(1), _net(2)
    _perceptual(maker, feature, _sgd(maker), Tensor.backward)
    _agree(ranks(2).run(_run_perceptual, stage), _weights(maker, feature))


def _run_jointly(stages: tuple[int, int]) -> tuple[list[float], list[Weights]]:
    accelerator = Accelerator(deepspeed_plugins=_plugins(*stages))
    encoder: Any = _net(1)
    decoder: Any = _net(2)
    encoder, first = accelerator.prepare(encoder, _sgd(encoder))
    accelerator.state.select_deepspeed_plugin("second")
    decoder, second = accelerator.prepare(decoder, _sgd(decoder, 0.05))
    norms = _jointly(encoder, decoder, (first, second), accelerator.backward, accelerator.clip_grad_norm_)
    return norms, _end(accelerator, encoder, decoder)


def test_one_loss_trains_two_models(ranks: Ranks) -> None:
    encoder, decoder = _net(1), _net(2)
    clip = torch.nn.utils.clip_grad_norm_
    norms = _jointly(encoder, decoder, (_sgd(encoder), _sgd(decoder, 0.05)), Tensor.backward, clip)
    found = ranks(2).run(_run_jointly, (3, 0))
    assert found[0][0] == pytest.approx(norms, rel=1e-5)
    _agree([weights for _, weights in found], _weights(encoder, decoder))


def _inference() -> float:
    """Prepares a model and a loader under a config for training: no optimizer is needed or created."""
    tree = {
        "zero_optimization": {"stage": 3, "stage3_param_persistence_threshold": 0},
        "optimizer": {"type": "AdamW", "params": {"lr": "auto"}},
        "scheduler": {"type": "WarmupDecayLR", "params": {"warmup_num_steps": "auto", "total_num_steps": "auto"}},
    }
    accelerator = Accelerator(zero_plugin=ZeroPlugin(tree))
    data = torch.stack([_data(0), _data(1)])
    loader: Any = torch.utils.data.DataLoader(data, batch_size=1)  # type: ignore[arg-type]
    model, loader = accelerator.prepare(_net(1), loader)
    model.eval()
    with torch.no_grad():
        outputs = [accelerator.gather(model(batch)) for batch in loader]
    with pytest.raises(
        EngineStateError, match=r"backward\(loss\): expected a model prepared with its optimizer, got '1"
    ):
        accelerator.backward(model(data[0]).sum())
    model.reset()
    assert "optimizer" not in accelerator.zero_config
    total = float(torch.cat(outputs).detach().double().sum())
    accelerator.free_memory()
    return total


def test_a_model_and_a_loader_are_inference(ranks: Ranks) -> None:
    with torch.no_grad():
        expected = float(_net(1)(torch.stack([_data(0), _data(1)])).double().sum())
    assert ranks(2).run(_inference) == [pytest.approx(expected)] * 2


def _mistakes() -> list[str]:
    accelerator = Accelerator(deepspeed_plugins=_plugins(2, 3))
    told = []

    def refused(kind: type[Exception], function: Callable[..., Any], *args: Any) -> None:
        told.append(message(kind, function, *args))

    refused(EngineStateError, accelerator.backward, torch.ones((), requires_grad=True))
    refused(UsageError, accelerator.state.select_zero_plugin, "fourth")
    refused(UsageError, accelerator.state.get_deepspeed_plugin("first").select)
    one: Any = _net(1)
    one, optimizer = accelerator.prepare(one, _sgd(one))
    refused(UsageError, accelerator.clip_grad_norm_, list(one.parameters())[:2], 1.0)
    refused(UsageError, accelerator.clip_grad_norm_, [torch.ones(2)], 1.0)
    refused(UsageError, accelerator.clip_grad_norm_, one.parameters(), 1.0, 1.0)
    refused(EngineStateError, accelerator.clip_grad_norm_, one.parameters(), 1.0)
    refused(UsageError, accelerator.accumulate(_net(3)).__enter__)
    refused(EngineStateError, optimizer.load_state_dict, {})
    refused(EngineStateError, optimizer.add_param_group, {})
    refused(UsageError, accelerator.backward, torch.ones(2, requires_grad=True))
    accelerator.state.select_zero_plugin("second")
    other: Any = _net(2)
    other, _ = accelerator.prepare(other, _sgd(other))
    refused(UsageError, accelerator.backward, torch.ones((), requires_grad=True).sum())
    third: Any = _net(4)
    accelerator.deepspeed_plugin.deepspeed_config["gradient_accumulation_steps"] = 5  # type: ignore[union-attr]
    refused(ConfigError, accelerator.prepare, third, _sgd(third))
    accelerator.free_memory()
    return told


def test_mistakes_are_reported_on_every_rank(ranks: Ranks) -> None:
    expected = [
        "accelerator.backward(loss): expected a model prepared with its optimizer, got 'nothing prepared'; call model",
        "zero plugin: expected one of the names 'first', 'second', got 'fourth'",
        "call accelerator.state.select_zero_plugin(name)",
        "all trained parameters of Sequential, which have one common norm, got '2 of 8, without 1.0.weight'; pass",
        "expected parameters of a model prepared with its optimizer, got '1 others'; pass model.parameters()",
        "norm_type: expected 2, the L2 norm, got 1.0",
        "gradient_norm(): expected a backward before this call; call it between backward and step()",
        "accelerator.accumulate(Sequential): expected a model that this accelerator prepared, got 'Sequential'",
        "use accelerator.load_state(folder)",
        "add the group before prepare()",
        "expected a scalar, got 'shape (2,)'",
        "a loss without a path to Sequential, Sequential",
        "gradient_accumulation_steps: 5 from plugin.deepspeed_config in code, but 1 from",
    ]
    for told in ranks(2).run(_mistakes):
        assert [part in said for part, said in zip(expected, told, strict=True)] == [True] * len(expected), told


# -- changes behind the engine


def _train_on(model: Any, optimizer: Any, accelerator: Accelerator) -> float:
    loss = model(batches(0, 1)[0])
    accelerator.backward(loss)
    optimizer.step()
    return float(loss.detach())


def _changed_behind(stage: int) -> list[str]:
    """Freezes, unfreezes and converts parameters: each error names the parameter, and the engine keeps working."""
    accelerator = Accelerator(zero_plugin=_plugins(stage)["first"])
    torch.manual_seed(7)
    inner = Toy()
    params = [param for param in inner.parameters() if param.requires_grad]
    model, optimizer = accelerator.prepare(inner, torch.optim.SGD(params, lr=0.1))
    told = []

    def refused(function: Callable[..., Any], *args: Any) -> None:
        told.append(message(EngineStateError, function, *args))
        model.reset()

    inner.layers[1].up.weight.requires_grad_(False)
    refused(_train_on, model, optimizer, accelerator)
    inner.layers[1].up.weight.requires_grad_(True)
    inner.frozen.requires_grad_(True)
    refused(_train_on, model, optimizer, accelerator)
    inner.frozen.requires_grad_(False)
    refused(model.half)
    refused(model.to, torch.float64)
    assert model.to(accelerator.device) is model
    assert model.float() is model
    _train_on(model, optimizer, accelerator)
    assert model.global_steps == 1
    held = {fqn: param.data for fqn, param in inner.named_parameters()}
    inner.half()
    refused(model, batches(0, 1)[0])
    for fqn, param in inner.named_parameters():
        param.data = held[fqn]
    inner.offset.data = inner.offset.float()
    _train_on(model, optimizer, accelerator)
    accelerator.free_memory()
    return told


@pytest.mark.parametrize("stage", [1, 3])
def test_changes_behind_the_engine_are_reported(ranks: Ranks, stage: int) -> None:
    expected = [
        "parameter layers.1.up.weight: expected requires_grad=True, as when the engine was made, got 'requires",
        "parameter frozen: expected requires_grad=False, as when the engine was made, got 'requires_grad=True'",
        "expected no change of torch.float32 on cpu, got 'a change to torch.float16 on cpu'",
        "got 'a change to torch.float64 on cpu'",
        "expected torch.float32 on cpu, where the engine keeps it, got 'torch.float16 on cpu'; call model.half()",
    ]
    for told in ranks(2).run(_changed_behind, stage):
        assert [part in said for part, said in zip(expected, told, strict=True)] == [True] * len(expected), told


def _loaded(stage: int, precision: str, when: str) -> tuple[list[float], Weights]:
    """Trains with other weights, loaded into the model before `prepare`, or into model, engine or parts after it."""
    torch.manual_seed(11)
    wanted = {fqn: value + 1e-4 * torch.randn_like(value) for fqn, value in Toy().state_dict().items()}
    torch.manual_seed(7)
    inner = Toy()
    if when == "before":
        inner.load_state_dict(wanted)
    tree = {
        "zero_optimization": {"stage": stage, "stage3_param_persistence_threshold": 0},
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-3}},
    }
    from zeroaccel import DummyOptim

    accelerator = Accelerator(zero_plugin=ZeroPlugin(tree), mixed_precision=precision)
    model, optimizer = accelerator.prepare(inner, DummyOptim([p for p in inner.parameters() if p.requires_grad]))
    if when == "model":
        inner.load_state_dict(wanted)
    elif when == "engine":
        model.load_state_dict(wanted)
    elif when == "parts":
        inner.layers.load_state_dict({k.removeprefix("layers."): v for k, v in wanted.items() if "layers" in k})
        inner.load_state_dict({k: v for k, v in wanted.items() if "layers" not in k}, strict=False)
    losses = [_train_on(model, optimizer, accelerator) for _ in range(3)]
    with pytest.raises(EngineStateError, match="assign=True"):
        inner.load_state_dict(wanted, assign=True)
    return losses, _end(accelerator, model)[0]


@pytest.mark.parametrize(("stage", "precision"), [(0, "bf16"), (2, "bf16"), (3, "bf16"), (3, "no")])
def test_loading_a_state_dict_reaches_the_masters(ranks: Ranks, stage: int, precision: str) -> None:
    losses, weights = ranks(2).run(_loaded, stage, precision, "before")[0]
    for when in ("model", "engine", "parts"):
        for got_losses, got in ranks(2).run(_loaded, stage, precision, when):
            assert got_losses == losses, when
            assert all(torch.equal(got[fqn], weight) for fqn, weight in weights.items()), when
