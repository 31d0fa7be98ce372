"""The results of `prepare` as tables: optimizer x schedule x config, and every "auto" with its value.

One process; tests/multi has several ranks.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import BatchSampler, DataLoader, SequentialSampler

from tests.support.refusals import refused
from zeroaccel import Accelerator, DummyOptim, DummyScheduler, ProjectConfiguration, ZeroPlugin, initialize
from zeroaccel.accelerate.preparation import batch_size_fact
from zeroaccel.errors import ConfigError, UsageError

pytestmark = pytest.mark.usefixtures("own_job")
WIDTH = 6
ADAMW = {"type": "AdamW", "params": {"lr": "auto", "weight_decay": "auto", "betas": "auto", "eps": "auto"}}
STEPS_OF_DECAY = ("warmup_min_lr", "warmup_max_lr", "warmup_num_steps", "total_num_steps")
DECAY = {"type": "WarmupDecayLR", "params": dict.fromkeys(STEPS_OF_DECAY, "auto")}


def _model() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.ReLU(), nn.Linear(WIDTH, 1))


def _loader(batch_size: int = 4) -> DataLoader[Any]:
    return DataLoader(torch.randn(16, WIDTH), batch_size=batch_size)  # type: ignore[arg-type]


def _halving(optimizer: Any) -> Any:
    return torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 0.5**step)


def _tree(**sections: Any) -> dict[str, Any]:
    return {"zero_optimization": {"stage": 3}, **{name: value for name, value in sections.items() if value}}


def _prepare(optimizer: str, scheduler: str, tree: dict[str, Any]) -> tuple[Accelerator, list[Any]]:
    """Prepares a model with the optimizer and schedule of these kinds, passed in an unusual order."""
    model = _model()
    made: Any = {"code": lambda: torch.optim.SGD(model.parameters(), lr=0.1), "dummy": lambda: _dummy(model)}[
        optimizer
    ]()
    schedule: Any = {
        "code": lambda: _halving(made if optimizer == "code" else torch.optim.SGD(model.parameters(), lr=0.1)),
        "dummy": lambda: DummyScheduler(made, total_num_steps=20, warmup_num_steps=4),
        "callable": lambda: DummyScheduler(made, lr_scheduler_callable=_halving),
        "none": lambda: None,
    }[scheduler]()
    if scheduler == "code" and optimizer == "dummy":
        schedule.optimizer = made
    accelerator = Accelerator(zero_plugin=ZeroPlugin(hf_ds_config=tree))
    objects = [schedule, _loader(), made, model] if schedule is not None else [_loader(), made, model]
    return accelerator, list(accelerator.prepare(*objects))


def _dummy(model: nn.Module) -> DummyOptim:
    return DummyOptim(model.parameters(), lr=0.02, weight_decay=0.3, betas=(0.8, 0.9), eps=1e-6)


def _steps(accelerator: Accelerator, prepared: list[Any], count: int) -> list[float]:
    """Returns the learning rate of each update."""
    *head, loader, optimizer, model = prepared
    rates = []
    for batch in [batch for _ in range(count) for batch in loader][:count]:
        rates.append(optimizer.param_groups[0]["lr"])
        accelerator.backward(model(batch).square().mean())
        optimizer.step()
        if head:
            head[0].step()
        optimizer.zero_grad()
    assert model.global_steps == count
    return rates


WORKING = [
    # optimizer, schedule, optimizer in the config, schedule in the config; type of the optimizer; rates of 4 updates
    ("code", "none", None, None, "SGD", [0.1, 0.1, 0.1, 0.1]),
    ("code", "code", None, None, "SGD", [0.1, 0.05, 0.025, 0.0125]),
    ("code", "callable", None, None, "SGD", [0.1, 0.05, 0.025, 0.0125]),
    ("code", "dummy", None, DECAY, "SGD", [0.0, 0.0, 0.05, 0.0792481]),
    ("code", "none", None, {"type": "ExponentialLR", "params": {"gamma": 0.5}}, "SGD", [0.1, 0.05, 0.025, 0.0125]),
    ("dummy", "none", ADAMW, None, "Adam", [0.02, 0.02, 0.02, 0.02]),
    ("dummy", "callable", ADAMW, None, "Adam", [0.02, 0.01, 0.005, 0.0025]),
    ("dummy", "dummy", ADAMW, DECAY, "Adam", [0.0, 0.0, 0.01, 0.0158496]),
]


@pytest.mark.parametrize(("optimizer", "scheduler", "has_optimizer", "has_scheduler", "kind", "rates"), WORKING)
def test_cases_that_work(
    optimizer: str, scheduler: str, has_optimizer: Any, has_scheduler: Any, kind: str, rates: list[float]
) -> None:
    tree = _tree(optimizer=has_optimizer, scheduler=has_scheduler)
    accelerator, prepared = _prepare(optimizer, scheduler, tree)
    assert type(prepared[-2].optimizer).__name__ == kind  # never a substitute for the requested class
    assert _steps(accelerator, prepared, 4) == pytest.approx(rates, rel=1e-4)


ADD_SCHEDULER = 'add a "scheduler" section'
REFUSED = [
    # optimizer, schedule, optimizer in the config, schedule in the config; parts of the message
    ("dummy", "none", None, None, 'DummyOptim needs an optimizer in the config|add an "optimizer" section|or pass a'),
    (
        "code",
        "none",
        {**ADAMW, "type": "AdamV"},
        None,
        "optimizer.type: expected a known optimizer, got 'AdamV'|Adam'?",
    ),
    ("code", "none", {**ADAMW, "type": "lbfgs"}, None, "optimizer.type 'lbfgs' is not supported"),
    ("code", "none", ADAMW, None, "optimizer AdamW, and SGD in code|remove the section|or pass DummyOptim"),
    (
        "code",
        "code",
        None,
        DECAY,
        "scheduler WarmupDecayLR, and LambdaLR in code|remove the section|or pass DummySched",
    ),
    ("code", "callable", None, DECAY, "scheduler WarmupDecayLR, and lr_scheduler_callable|remove|or the argument"),
    ("code", "dummy", None, None, f"DummyScheduler needs a scheduler|{ADD_SCHEDULER}|lr_scheduler_callable"),
    ("dummy", "code", ADAMW, None, f"LambdaLR in code, but|optimizer AdamW|lr_scheduler_callable|{ADD_SCHEDULER}"),
    ("dummy", "dummy", ADAMW, None, "DummyScheduler needs a scheduler in the config"),
    ("dummy", "code", ADAMW, DECAY, "scheduler WarmupDecayLR, and LambdaLR in code"),
]


@pytest.mark.parametrize(("optimizer", "scheduler", "has_optimizer", "has_scheduler", "parts"), REFUSED)
def test_cases_that_are_refused(
    optimizer: str, scheduler: str, has_optimizer: Any, has_scheduler: Any, parts: str
) -> None:
    with refused(ConfigError, *parts.split("|")):
        _prepare(optimizer, scheduler, _tree(optimizer=has_optimizer, scheduler=has_scheduler))


# -- every "auto"


class Configured(nn.Module):
    """A model whose config has another width than its weights."""

    def __init__(self, config: Any) -> None:
        super().__init__()
        self.config = config
        self.inner = nn.Linear(WIDTH, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.inner(x).mean()  # type: ignore[no-any-return]


class _Config:
    def __init__(self, **values: Any) -> None:
        self.__dict__.update(values)


SIZES = ("reduce_bucket_size", "stage3_prefetch_bucket_size", "stage3_param_persistence_threshold")
BUCKETS = dict.fromkeys(("stage", *SIZES, "stage3_gather_16bit_weights_on_model_save"), "auto")
EVERYTHING: dict[str, Any] = {
    **dict.fromkeys(
        ("train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps", "gradient_clipping"),
        "auto",
    ),
    "fp16": {"enabled": "auto"},
    "bf16": {"enabled": "auto"},
    "zero_optimization": BUCKETS,
    "optimizer": ADAMW,
    "scheduler": DECAY,
}


@pytest.mark.parametrize(
    ("config", "hidden", "source"),
    [
        (_Config(hidden_size=10), 10, "model.config.hidden_size"),
        (_Config(hidden_sizes=[4, 12, 8]), 12, "max(model.config.hidden_sizes)"),
        (_Config(text_config=_Config(hidden_size=14)), 14, "model.config.text_config.hidden_size"),
        (_Config(), WIDTH, "2-D weights"),
    ],
)
def test_every_auto_and_where_it_came_from(config: Any, hidden: int, source: str) -> None:
    model = Configured(config)
    optimizer = _dummy(model)
    scheduler = DummyScheduler(optimizer, total_num_steps=20, warmup_num_steps=4)
    accelerator = Accelerator(
        mixed_precision="bf16",
        gradient_accumulation_steps=3,
        zero_plugin=ZeroPlugin(EVERYTHING, zero_stage=2, gradient_clipping=0.7, zero3_save_16bit_model=True),
    )
    model, *_ = accelerator.prepare(model, optimizer, scheduler, _loader(batch_size=5))
    assert accelerator.zero_config == {
        "train_batch_size": 15,
        "train_micro_batch_size_per_gpu": 5,
        "gradient_accumulation_steps": 3,
        "gradient_clipping": 0.7,
        "fp16": {"enabled": False},
        "bf16": {"enabled": True},
        "zero_optimization": {
            "stage": 2,
            "reduce_bucket_size": hidden * hidden,
            "stage3_prefetch_bucket_size": int(0.9 * hidden * hidden),
            "stage3_param_persistence_threshold": 10 * hidden,
            "stage3_gather_16bit_weights_on_model_save": True,
        },
        "optimizer": {"type": "AdamW", "params": {"lr": 0.02, "weight_decay": 0.3, "betas": (0.8, 0.9), "eps": 1e-6}},
        "scheduler": {
            "type": "WarmupDecayLR",
            "params": {"warmup_max_lr": 0.02, "warmup_num_steps": 4, "total_num_steps": 20},
        },
    }
    shown = str(accelerator.state)
    for line in (
        f"hidden^2 = {hidden * hidden}, hidden {hidden} from ",
        "DummyOptim(lr=0.02)",
        "DummyOptim(betas=(0.8, 0.9))",
        "DummyScheduler(total_num_steps=20)",
        "optimizer.params.lr = 0.02",
        "ZeroPlugin(gradient_clipping=0.7)",
        "Accelerator(gradient_accumulation_steps=3)",
        "Accelerator(mixed_precision='bf16')",
        "DataLoader(batch_size=5)",
        source,
    ):
        assert line in shown, shown
    assert accelerator.gradient_accumulation_steps == 3
    assert accelerator.mixed_precision == "bf16"
    assert model.config is config  # the model's own, not the engine's


class _Sampler:
    """A batch sampler without a `batch_size`."""

    def __iter__(self) -> Iterator[list[int]]:
        return iter([[0, 1, 2], [3, 4, 5]])

    def __len__(self) -> int:
        return 2


DATA: Any = torch.randn(16, WIDTH)


@pytest.mark.parametrize(
    ("loaders", "smallest", "micro", "source"),
    [
        ([DataLoader(DATA, batch_size=3)], True, 3, "DataLoader(batch_size=3)"),
        ([DataLoader(DATA, batch_size=8), DataLoader(DATA, batch_size=2)], True, 2, "smallest of [2, 8]"),
        ([DataLoader(DATA, batch_size=8), DataLoader(DATA, batch_size=2)], False, 8, "largest of [2, 8]"),
        ([DataLoader(DATA, batch_sampler=BatchSampler(SequentialSampler(DATA), 6, False))], True, 6, "BatchSampler"),
        ([DataLoader(DATA, batch_sampler=_Sampler())], True, 3, "first batch"),  # type: ignore[arg-type]
        ([], True, 1, "no loader"),
    ],
)
def test_where_the_batch_size_comes_from(loaders: list[Any], smallest: bool, micro: int, source: str) -> None:
    model = _model()
    accelerator = Accelerator(zero_plugin=ZeroPlugin(zero_stage=1, is_train_batch_min=smallest))
    accelerator.prepare(*loaders, torch.optim.SGD(model.parameters(), lr=0.1), model)
    assert accelerator.zero_config["train_micro_batch_size_per_gpu"] == micro
    assert source in str(accelerator.state)


class _Shuffled(_Sampler):
    """A batch sampler without a `batch_size` that draws from its own generator and from torch's."""

    def __init__(self) -> None:
        self.generator = torch.Generator().manual_seed(5)

    def __iter__(self) -> Iterator[list[int]]:
        yield torch.randperm(16, generator=self.generator)[: int(torch.randint(3, 4, ()))].tolist()


def test_a_probed_batch_takes_no_random_numbers() -> None:
    sampler = _Shuffled()
    before = torch.get_rng_state(), sampler.generator.get_state()
    assert batch_size_fact([DataLoader(DATA, batch_sampler=sampler)]).value == 3  # type: ignore[arg-type]
    assert torch.equal(torch.get_rng_state(), before[0])
    assert torch.equal(sampler.generator.get_state(), before[1])


# -- settings given twice


STEPS = "gradient_accumulation_steps"


@pytest.mark.parametrize(
    ("plugin", "arguments", "parts"),
    [
        (
            {"hf_ds_config": {"zero_optimization": {"stage": 3}}, "zero_stage": 2},
            {},
            'stage: 3 here, but 2 from ZeroPlugin(zero_stage=2)|write 2 or "auto" here, or 3 there',
        ),
        ({"hf_ds_config": {STEPS: 2}}, {STEPS: 4}, f"{STEPS}: 2 here, but 4 from Accelerator({STEPS}=4)"),
        (
            {"hf_ds_config": {"bf16": {"enabled": True}}},
            {"mixed_precision": "fp16"},
            "bf16.enabled: true here, but false from Accelerator(mixed_precision='fp16')",
        ),
        (
            {"hf_ds_config": {"bf16": {"enabled": False}}},
            {"mixed_precision": "bf16"},
            "bf16.enabled: false here, but true from Accelerator(mixed_precision='bf16')",
        ),
        ({"hf_ds_config": {"train_micro_batch_size_per_gpu": 8}}, {}, "8 here, but 4 from DataLoader(batch_size=4)"),
        (
            {"hf_ds_config": {"train_batch_size": 9}},
            {},
            f"train_batch_size: 9 is not|train_micro_batch_size_per_gpu 4|{STEPS} not given|ranks 1",
        ),
        ({STEPS: 2}, {STEPS: 4}, f"{STEPS}: 4 from Accelerator({STEPS}=4), but 2 from ZeroPlugin"),
        (
            {"hf_ds_config": {"zero_optimization": {"frozen_weights": "int8"}}, "frozen_weights": "nf4"},
            {},
            'zero_optimization.frozen_weights: "int8" here, but "nf4" from ZeroPlugin(frozen_weights=\'nf4\')',
        ),
    ],
)
def test_two_meanings_are_reported_with_both_places(
    plugin: dict[str, Any], arguments: dict[str, Any], parts: str
) -> None:
    model = _model()
    with refused(ConfigError, *parts.split("|")):
        accelerator = Accelerator(zero_plugin=ZeroPlugin(**plugin), **arguments)
        accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1), _loader(4))


@pytest.mark.parametrize(
    ("peer", "argument", "interval", "message"),
    [
        (
            {"interval": 4},
            "auto",
            None,
            "config): checkpoint.peer: 4 here, but 'auto' from ZeroPlugin(peer_checkpoints='",
        ),
        ({"interval": 4}, False, None, "checkpoint.peer: 4 here, but False from"),
        ({"enabled": False}, 4, None, "checkpoint.peer: False here, but 4 from"),
        (
            {},
            None,
            3,
            "ProjectConfiguration.memory_interval: expected auto, the value of checkpoint.peer in the config, got 3",
        ),
        (None, False, 3, "memory_interval: expected None, the value of checkpoint.peer in the config, got 3"),
        (
            None,
            0,
            None,
            'peer_checkpoints=0): checkpoint.peer.interval: expected "auto" or a number of steps of at least 1, got 0',
        ),
        (
            {"interval": True},
            None,
            None,
            'checkpoint.peer.interval: expected "auto" or a number of steps of at least 1, got True',
        ),
    ],
)
def test_wrong_settings_of_in_memory_states_are_refused(
    peer: Any, argument: Any, interval: int | None, message: str
) -> None:
    sections = {} if peer is None else {"checkpoint": {"peer": peer}}

    def prepare() -> None:
        plugin = ZeroPlugin({"train_micro_batch_size_per_gpu": 1, **sections}, peer_checkpoints=argument)
        project = ProjectConfiguration("runs", memory_interval=interval)
        model = _model()
        Accelerator(zero_plugin=plugin, project_config=project, cpu=True).prepare(
            model, torch.optim.SGD(model.parameters())
        )

    with pytest.raises(ConfigError, match=re.escape(message)):
        prepare()


@pytest.mark.parametrize("said_by", ["argument", "launcher"])
def test_a_plugin_stores_frozen_matrices_as_codes(said_by: str, monkeypatch: pytest.MonkeyPatch) -> None:
    if said_by == "launcher":
        monkeypatch.setenv("ACCELERATE_DEEPSPEED_FROZEN_WEIGHTS", "nf4")
    plugin = ZeroPlugin(train_micro_batch_size_per_gpu=1, frozen_weights="nf4" if said_by == "argument" else None)
    model = torch.nn.Sequential(torch.nn.Linear(64, 64).requires_grad_(False), _model())
    optimizer = torch.optim.SGD([param for param in model.parameters() if param.requires_grad], lr=0.1)
    engine, _ = Accelerator(zero_plugin=plugin, cpu=True).prepare(model, optimizer)
    assert [unit.name for unit in engine.units if unit.name.startswith("codes of ")]
    engine.destroy()


def test_a_plugin_names_codes_that_there_are_not() -> None:
    with refused(ConfigError, "ZeroPlugin(frozen_weights='nf3')", "'int8', 'nf4', 'mxfp4' or 'codes'"):
        ZeroPlugin(frozen_weights="nf3")  # type: ignore[arg-type]


def test_an_engine_without_an_accelerator_refuses_states_in_memory() -> None:
    model = _model()
    config = {"train_micro_batch_size_per_gpu": 1, "checkpoint": {"peer": {"interval": 2}}}
    with pytest.raises(
        ConfigError, match=r"checkpoint\.peer: a loop around an engine can resume only from its own checkpoints"
    ):
        initialize(model, torch.optim.SGD(model.parameters(), lr=0.1), config=config)
    config["checkpoint"]["peer"]["enabled"] = False  # type: ignore[index]
    initialize(model, torch.optim.SGD(model.parameters(), lr=0.1), config=config)[0].destroy()


def test_equal_settings_given_twice_do_not_contradict() -> None:
    model = _model()
    tree = {"zero_optimization": {"stage": 1}, "gradient_accumulation_steps": 2, "train_batch_size": 8}
    accelerator = Accelerator(zero_plugin=ZeroPlugin(tree, zero_stage=1), gradient_accumulation_steps=2)
    accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1), _loader(4))
    assert accelerator.zero_config["train_micro_batch_size_per_gpu"] == 4


# -- objects that do not belong together


def test_an_optimizer_needs_its_model() -> None:
    model, other = _model(), _model()
    accelerator = Accelerator()
    with pytest.raises(UsageError, match="argument 0, SGD: expected its model in the same prepare"):
        accelerator.prepare(torch.optim.SGD(model.parameters(), lr=0.1), _loader())
    with pytest.raises(
        UsageError, match=r"argument 1, SGD: expected its model in the same prepare\(\), got 'Sequential'"
    ):
        accelerator.prepare(other, torch.optim.SGD(model.parameters(), lr=0.1))
    with pytest.raises(UsageError, match=r"requires_grad=True, got 'no parameters'; pass parameters that train"):
        accelerator.prepare(other, torch.optim.SGD([{"params": []}], lr=0.1))
    with pytest.raises(UsageError, match="of one model, got 'parameters of Sequential, Sequential'; create"):
        accelerator.prepare(model, other, torch.optim.SGD([*model.parameters(), *other.parameters()], lr=0.1))
    with pytest.raises(UsageError, match="expected one optimizer for Sequential, got 'a second one besides SGD"):
        accelerator.prepare(
            model, torch.optim.SGD(model[0].parameters(), lr=0.1), torch.optim.SGD(model[2].parameters(), lr=0.1)
        )
    prepared = accelerator.prepare(other)
    with pytest.raises(UsageError, match="got 'a model prepared earlier'; pass both to one prepare"):
        accelerator.prepare(torch.optim.SGD(other.parameters(), lr=0.1))
    with pytest.raises(UsageError, match="argument 0, Sequential, is already prepared; use the object that the first"):
        accelerator.prepare(other)
    assert accelerator.prepare(prepared) is prepared


def test_a_schedule_needs_its_optimizer() -> None:
    model = _model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    accelerator = Accelerator()
    with pytest.raises(UsageError, match="argument 0, LambdaLR: expected its optimizer in the same prepare"):
        accelerator.prepare(_halving(optimizer), _loader())
    model, optimizer = accelerator.prepare(model, optimizer)
    late = accelerator.prepare(_halving(optimizer))  # its optimizer is the wrapper that prepare returned
    assert late.optimizer is optimizer
    with pytest.raises(UsageError, match="which creates the config's scheduler with its optimizer"):
        accelerator.prepare(DummyScheduler(optimizer))


def test_models_are_placed_by_the_engine() -> None:
    model = _model()
    with pytest.raises(UsageError, match=r"device_placement\): expected None or a bool, because the engine places"):
        Accelerator().prepare(model, device_placement=[True])
    model.hf_device_map = {"0": 0, "2": 1}  # type: ignore[assignment]
    with pytest.raises(UsageError, match="hf_device_map: expected a model on one device"):
        Accelerator().prepare(model)


def test_other_calls_of_accelerates_that_have_nothing_to_do_or_are_refused() -> None:
    accelerator = Accelerator()
    model: Any = _model()
    optimizer: Any = torch.optim.SGD(model.parameters(), lr=0.1)
    with pytest.raises(UsageError, match="SGD: expected its model in the same prepare"):
        accelerator.prepare_optimizer(optimizer)
    model, optimizer = accelerator.prepare(model, optimizer)
    assert accelerator.prepare_optimizer(optimizer) is optimizer
    with accelerator.join_uneven_inputs([model]):
        pass
    with (
        pytest.raises(UsageError, match=r"join_uneven_inputs\(even_batches\): expected True, because all processes"),
        accelerator.join_uneven_inputs([model], even_batches=False),
    ):
        pass
    assert accelerator.trackers == []
    assert (accelerator.non_blocking, accelerator.use_seedable_sampler) == (False, False)
