"""The warnings that transformers drops `Trainer(optimizers=...)`, and accelerate a DeepSpeed config on the CPU."""

from __future__ import annotations

import logging
import sys
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from tests.support.job import run_command
from zeroaccel.compat.transformers_calls import warn_of_dropped_optimizer


def _trainer(config: dict[str, Any], **changed: Any) -> Any:
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=0.5)
    plugin = SimpleNamespace(deepspeed_plugin=SimpleNamespace(deepspeed_config=config))
    members = {
        "is_deepspeed_enabled": True,
        "model_wrapped": None,
        "optimizer": optimizer,
        "lr_scheduler": torch.optim.lr_scheduler.ConstantLR(optimizer),
        "accelerator": SimpleNamespace(state=plugin),
        "args": SimpleNamespace(learning_rate=0.125),
    }
    return SimpleNamespace(**{**members, **changed})


@pytest.mark.parametrize(
    ("config", "words"),
    [
        (
            {},
            "its optimizer and scheduler with a DeepSpeed config, and makes the optimizer of TrainingArguments, with "
            "learning rate 0.125;",
        ),
        ({"optimizer": {"params": {"lr": 0.25}}}, "the optimizer of the config, with learning rate 0.25;"),
    ],
)
def test_it_names_the_rate_that_is_used(config: dict[str, Any], words: str, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING, "zeroaccel"):
        warn_of_dropped_optimizer(_trainer(config))
    assert words in caplog.text


@pytest.mark.parametrize("changed", [{"is_deepspeed_enabled": False}, {"optimizer": None, "lr_scheduler": None}])
def test_nothing_is_said_if_nothing_is_dropped(changed: dict[str, Any], caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING, "zeroaccel"):
        warn_of_dropped_optimizer(_trainer({}, **changed))
    assert not caplog.text


_PROGRAM = """
import zeroaccel.compat
zeroaccel.compat.install()
from accelerate import Accelerator
from accelerate.utils import DeepSpeedPlugin
plugin = DeepSpeedPlugin(hf_ds_config={"train_micro_batch_size_per_gpu": 2, "zero_optimization": {"stage": 2}})
print(Accelerator(deepspeed_plugin=plugin).distributed_type.name)
"""


@pytest.mark.parametrize(("variable", "kind"), [("true", "NO"), ("false", "DEEPSPEED")])
def test_a_config_that_the_cpu_drops_is_named(variable: str, kind: str) -> None:
    result = run_command([sys.executable, "-c", _PROGRAM], env={"ACCELERATE_USE_CPU": variable})
    assert result.stdout.split() == [kind]
    assert ("got plain data parallelism, since the variable ACCELERATE_USE_CPU" in result.stderr) == (kind == "NO")
