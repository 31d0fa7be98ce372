"""`zero3_init_flag` and its context manager: models sharded during construction train to the bits of unsharded ones."""

from __future__ import annotations

import json
import sys
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.support.job import run_command
from tests.support.pool import Ranks
from tests.support.training import Toy, batches
from zeroaccel import Accelerator, ZeroPlugin


def _trained(stage: int, enable: bool | None) -> tuple[int, dict[str, Tensor]]:
    """Returns the bytes of a weight before `prepare`, and the weights after training."""
    plugin = ZeroPlugin({"zero_optimization": {"stage": stage, "stage3_param_persistence_threshold": 0}})
    accelerator = Accelerator(zero_plugin=plugin)
    torch.manual_seed(7)
    with nullcontext() if enable is None else plugin.zero3_init_context_manager(enable=enable):
        assert plugin.is_zero3_init_enabled() is (enable is True and stage == 3)
        inner: Any = Toy()
    assert not plugin.zero3_init_flag
    nbytes = inner.layers[0].up.weight.untyped_storage().nbytes()
    params = [param for param in inner.parameters() if param.requires_grad]
    model, optimizer = accelerator.prepare(inner, torch.optim.SGD(params, lr=0.1, momentum=0.9))
    for batch in batches(accelerator.process_index, 3):
        accelerator.backward(model(batch))
        optimizer.step()
        optimizer.zero_grad()
    accelerator.free_memory()
    return nbytes, {fqn: param.detach().clone() for fqn, param in inner.named_parameters()}


@pytest.mark.parametrize(("stage", "enable", "sharded"), [(3, True, True), (3, False, False), (2, True, False)])
def test_models_built_inside_are_sharded_and_train_to_the_same_bits(
    ranks: Ranks, stage: int, enable: bool, sharded: bool
) -> None:
    for (whole, expected), (nbytes, weights) in zip(
        ranks(2).run(_trained, stage, None), ranks(2).run(_trained, stage, enable), strict=True
    ):
        assert (nbytes < whole) is sharded
        assert all(torch.equal(weights[fqn], weight) for fqn, weight in expected.items())


SCRIPT = """\
import json, sys
import torch
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM
from transformers.integrations import is_deepspeed_zero3_enabled

from zeroaccel import Accelerator

def run(enable):
    accelerator = Accelerator()
    plugin = accelerator.zero_plugin
    assert plugin.zero3_init_flag and is_deepspeed_zero3_enabled()
    if enable:
        model = AutoModelForCausalLM.from_pretrained(sys.argv[1], dtype=torch.float32)
    else:
        with plugin.zero3_init_context_manager(enable=False):
            assert not is_deepspeed_zero3_enabled()
            model = AutoModelForCausalLM.from_pretrained(sys.argv[1], dtype=torch.float32)
        assert is_deepspeed_zero3_enabled()
    nbytes = model.model.layers[0].mlp.up_proj.weight.untyped_storage().nbytes()
    model, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9))
    losses = []
    tokens = torch.randint(0, 64, (2, 8), generator=torch.Generator().manual_seed(accelerator.process_index))
    for _ in range(3):
        loss = model(input_ids=tokens, labels=tokens).loss
        accelerator.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(accelerator.reduce(loss.detach(), "mean").item())
    accelerator.free_memory()
    return nbytes, losses, accelerator

sharded, first, accelerator = run(True)
whole, second, accelerator = run(False)
if accelerator.is_main_process:
    print(json.dumps([sharded, whole, first, second]))
accelerator.end_training()
"""


@pytest.mark.slow
def test_transformers_builds_sharded_where_the_launch_says_so(tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    sizes = {"vocab_size": 64, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2}
    config = transformers.LlamaConfig(**sizes, num_attention_heads=2, tie_word_embeddings=True)
    transformers.LlamaForCausalLM(config).save_pretrained(tmp_path / "model")
    (tmp_path / "script.py").write_text(SCRIPT)
    flags = ("--cpu", "--num_processes", 2, "--engine", "zeroaccel", "--zero_stage", 3, "--zero3_init_flag", "true")
    command = [sys.executable, "-m", "zeroaccel.cli", "launch", *flags, tmp_path / "script.py", tmp_path / "model"]
    result = run_command(command, timeout=200.0)
    assert result.returncode == 0, result.stderr
    assert "zero3_init_flag" not in result.stderr  # the flag takes effect, so there is no warning about it
    sharded, whole, first, second = json.loads(result.stdout.splitlines()[-1])
    assert sharded < 64 * 32 * 4 == whole
    assert first == second
    assert first[-1] < first[0]
