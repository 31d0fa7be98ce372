"""Training with PEFT adapters: equal at every stage, and checkpoints that leave out a base model with a known name."""

from __future__ import annotations

import json
import warnings
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import zeroaccel
from tests.support.pool import Ranks
from tests.support.refusals import message
from tests.support.training import plain_step, train_step
from zeroaccel import zero
from zeroaccel.accelerate import pretrained_saving
from zeroaccel.comm.collectives import Collectives
from zeroaccel.comm.recording import RecordingCollectives
from zeroaccel.comm.topology import init_process_group
from zeroaccel.errors import CheckpointError

pytestmark = pytest.mark.skipif(find_spec("peft") is None, reason="needs peft")  # importing it takes seconds

_KINDS: dict[str, dict[str, Any]] = {
    "lora": {},
    "dora": {"use_dora": True},
    "rank-stabilised": {"use_rslora": True},
    "saved modules": {"modules_to_save": ["head"]},
    "parameters": {"target_modules": [], "target_parameters": ["first.weight"]},
}


class Network(nn.Module):
    """A network whose config has a name, like a transformers model."""

    def __init__(self, name: str) -> None:
        super().__init__()
        self.config: dict[str, Any] = {"model_type": "custom", "_name_or_path": name}
        self.name_or_path = name
        self.first = nn.Linear(8, 16)
        self.second = nn.Linear(16, 8)
        self.head = nn.Linear(8, 1)

    def forward(self, inputs: Tensor) -> Tensor:
        result: Tensor = self.head(torch.tanh(self.second(torch.tanh(self.first(inputs)))))
        return result


def _adapted(kind: str, *, name: str = "org/base", adapters: int = 1, seed: int = 1) -> Any:
    import peft

    torch.manual_seed(0)
    model = Network(name)
    torch.manual_seed(seed)
    settings = {"r": 2, "target_modules": ["first", "second"], "init_lora_weights": False, **_KINDS[kind]}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        adapted = peft.get_peft_model(model, peft.LoraConfig(**settings))
        for index in range(1, adapters):
            adapted.add_adapter(f"other{index}", peft.LoraConfig(**settings))
    for config in adapted.peft_config.values():
        config.base_model_name_or_path = name
    return adapted


def _engine(model: Any, stage: int, **sections: Any) -> Any:
    config = {
        "train_micro_batch_size_per_gpu": 2,
        "optimizer": {"type": "SGD", "params": {"lr": 0.1, "momentum": 0.9}},
        "zero_optimization": {"stage": stage, "stage3_param_persistence_threshold": 0},
    }
    return zeroaccel.initialize(model, config=config | sections)[0]


def _steps(engine: Any, count: int, seed: int = 7) -> list[float]:
    generator = torch.Generator().manual_seed(seed)  # the same on all ranks, so means are exact
    return [train_step(engine, engine(torch.randn(2, 8, generator=generator)).square().mean()) for _ in range(count)]


def _plain(kind: str) -> list[float]:
    model = _adapted(kind)
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.1, momentum=0.9)
    generator = torch.Generator().manual_seed(7)
    losses = []
    for _ in range(3):
        losses.append(plain_step(optimizer, model(torch.randn(2, 8, generator=generator)).square().mean()))
    return losses


def _at_stages(kind: str) -> tuple[list[float], list[list[float]]]:
    runs = []
    for stage in range(4):
        engine = _engine(_adapted(kind, adapters=2), stage)
        runs.append(_steps(engine, 3))
        engine.destroy()
    return _plain(kind), runs


@pytest.mark.parametrize("kind", _KINDS)
def test_adapters_train_alike_at_all_stages(ranks: Ranks, kind: str) -> None:
    for plain, runs in ranks(2).run(_at_stages, kind):
        assert runs == [runs[0]] * 4
        assert runs[0] == pytest.approx(plain, abs=1e-6)


_SHARED: dict[str, dict[str, Any]] = {
    "LoraConfig": {"r": 2, "modules_to_save": ["head"], "use_dora": True},
    "VeraConfig": {"r": 2},
    "IA3Config": {"feedforward_modules": ["second"], "init_ia3_weights": False},
    "PromptEncoderConfig": {"task_type": "CAUSAL_LM", "num_virtual_tokens": 2, "encoder_hidden_size": 8},
    "TrainableTokensConfig": {"token_indices": [3, 5]},
}
_OF_TOKENS = ("PromptEncoderConfig", "TrainableTokensConfig")


def _language_model() -> Any:
    import transformers

    sizes = {"vocab_size": 16, "hidden_size": 8, "intermediate_size": 8, "num_hidden_layers": 1}
    return transformers.LlamaForCausalLM(transformers.LlamaConfig(**sizes, num_attention_heads=2))


def _saved_at(stage: int, method: str, folder: Path) -> tuple[list[float], dict[str, Tensor]]:
    """Adapts a sharded base, trains, and saves on all ranks."""
    import peft
    from safetensors.torch import load_file

    config = {"train_micro_batch_size_per_gpu": 2, "zero_optimization": {"stage": 3}}
    torch.manual_seed(0)
    with zero.Init(enabled=stage == 3, config_dict_or_path=config):
        model = _language_model() if method in _OF_TOKENS else Network("")
    torch.manual_seed(1)
    targets = {"target_modules": ["first", "second"]} if method not in _OF_TOKENS else {}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        adapted = peft.get_peft_model(model, getattr(peft, method)(**targets, **_SHARED[method]))
    engine = _engine(adapted, stage)
    pretrained_saving.attach(engine)
    try:
        losses = _token_steps(engine) if method in _OF_TOKENS else _steps(engine, 2)
        rank = torch.distributed.get_rank()
        adapted.save_pretrained(folder / f"{stage}", is_main_process=rank == 0, save_embedding_layers=False)
        if stage == 3:
            adapted.save_pretrained(folder / "plainly", save_embedding_layers=False)  # on all ranks, as PEFT's examples
        torch.distributed.barrier()
        if stage == 3:
            assert all(
                same.read_bytes() == (folder / "3" / same.name).read_bytes()
                for same in (folder / "plainly").glob("*.safetensors")
            )
            assert (folder / "plainly" / "adapter_config.json").exists()
        return losses, load_file(folder / f"{stage}" / "adapter_model.safetensors")
    finally:
        pretrained_saving.detach()
        engine.destroy()


def _token_steps(engine: Any) -> list[float]:
    tokens = torch.arange(12).view(2, 6)
    return [train_step(engine, engine(input_ids=tokens, labels=tokens).loss) for _ in range(2)]


@pytest.mark.parametrize("method", _SHARED)
def test_adapters_of_a_sharded_base_are_saved_as_of_a_whole_one(ranks: Ranks, method: str, tmp_path: Path) -> None:
    whole, sharded = (ranks(2).run(_saved_at, stage, method, tmp_path) for stage in (1, 3))
    for (losses, values), (own_losses, own) in zip(whole, sharded, strict=True):
        assert own_losses == losses
        assert own.keys() == values.keys()
        assert all(torch.equal(own[name], value) for name, value in values.items())


def _gathers_of_attaching(folder: Path) -> tuple[list[Any], list[Any], list[float]]:
    import peft

    counted = RecordingCollectives(Collectives(init_process_group()))
    place = folder / str(counted.rank)
    _adapted("lora", seed=3).save_pretrained(place, save_embedding_layers=False)
    config = {"zero_optimization": {"stage": 3, "stage3_param_persistence_threshold": 0}}
    torch.manual_seed(0)
    with zero.Init(config_dict_or_path=config | {"train_micro_batch_size_per_gpu": 2}, collectives=counted):
        model = Network("org/base")
    built = len(counted.calls)
    adapted = peft.get_peft_model(model, peft.LoraConfig(r=2, target_modules=["first", "second"]))
    adapted.add_adapter("other", peft.LoraConfig(r=2, target_modules=["first", "second"], use_rslora=True))
    attached = list(counted.calls[built:])
    adapted.load_adapter(place, "loaded", is_trainable=True)
    adapted.set_adapter("loaded")
    loaded = list(counted.calls[built:])
    engine = _engine(adapted, 3)
    losses = _steps(engine, 3)
    engine.destroy()
    plain = _engine(_adapted("lora", seed=3), 3)
    losses = [a - b for a, b in zip(losses, _steps(plain, 3), strict=True)]
    plain.destroy()
    return attached, loaded, losses


def test_attaching_and_loading_adapters_to_a_sharded_model_gathers_nothing(ranks: Ranks, tmp_path: Path) -> None:
    for attached, loaded, differences in ranks(2).run(_gathers_of_attaching, tmp_path):
        assert (attached, loaded) == ([], [])
        assert differences == [0.0] * 3


def _resumed(folder: Path, kind: str, stages: tuple[int, int]) -> tuple[list[float], list[float], set[str]]:
    engine = _engine(_adapted(kind, adapters=2), stages[0])
    _steps(engine, 2)
    engine.save_checkpoint(folder, "adapters")
    expected = _steps(engine, 2, seed=8)
    engine.destroy()
    resumed = _engine(_adapted(kind, adapters=2, seed=2), stages[1])
    resumed.load_checkpoint(folder)
    losses = _steps(resumed, 2, seed=8)
    resumed.destroy()
    records = json.loads((folder / "adapters" / "manifest.json").read_text())["manifest"]["parameters"]
    return expected, losses, {name for name, record in records.items() if not record["saved"]}


@pytest.mark.parametrize("kind", ["lora", "saved modules"])
def test_a_base_with_a_name_is_left_out_and_the_run_resumes(ranks: Ranks, tmp_path: Path, kind: str) -> None:
    base = {f"{layer}.base_layer.{what}" for layer in ("first", "second") for what in ("weight", "bias")}
    head = "head.original_module" if kind == "saved modules" else "head"
    names = {f"base_model.model.{name}" for name in (*base, f"{head}.weight", f"{head}.bias")}
    for expected, losses, absent in ranks(2).run(_resumed, tmp_path, kind, (3, 1)):
        assert losses == expected
        assert absent == names  # and the inactive adapter is saved


def _saved(folder: Path) -> tuple[list[int], str]:
    """Returns the bytes of checkpoints by setting and argument, and the error of loading them over another base."""
    nbytes = []
    for tag, section, argument in (
        ("default", None, None),
        ("setting", False, None),
        ("argument", None, False),
        ("all frozen", False, True),
        ("no name", None, None),
    ):
        sections = {} if section is None else {"checkpoint": {"exclude_frozen_parameters": section}}
        engine = _engine(_adapted("lora", name="" if tag == "no name" else "org/base"), 2, **sections)
        engine.save_checkpoint(folder, tag, exclude_frozen_parameters=argument)
        engine.destroy()
        records = json.loads((folder / tag / "manifest.json").read_text())["manifest"]["parameters"].values()
        nbytes.append(sum(4 * torch.Size(record["shape"]).numel() for record in records if record["saved"]))
    engine = _engine(_adapted("lora", name="org/other"), 2)
    refusal = message(CheckpointError, engine.load_checkpoint, folder, "default")
    engine.load_checkpoint(folder, "default", load_module_strict=False)
    engine.load_checkpoint(folder, "setting")  # this checkpoint has all values
    engine.destroy()
    return nbytes, refusal


def test_a_setting_saves_the_base_and_another_base_is_refused(ranks: Ranks, tmp_path: Path) -> None:
    adapters = 4 * 2 * (8 + 16 + 16 + 8)
    base = 4 * (8 * 16 + 16 + 16 * 8 + 8 + 8 + 1)
    for nbytes, refusal in ranks(2).run(_saved, tmp_path):
        assert nbytes == [adapters, adapters + base, adapters + base, adapters, adapters + base]
        assert "expected adapters over org/base, got 'adapters over org/other'" in refusal
        assert "; load that base first, or pass load_module_strict=False to accept a different one" in refusal
