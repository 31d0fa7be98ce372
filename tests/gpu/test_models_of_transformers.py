"""Models of transformers on a CUDA device: stages 2 and 3, also with states in host memory, have the bits of stage 0.

    python -m pytest -m slow tests/gpu/test_models_of_transformers.py    # every class

Stage 0 in fp32 also equals a plain loop of torch on that device up to rounding. A class is skipped if torch itself is
not deterministic for it, that is, if two runs at stage 0 differ.
"""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests.multi.zero import test_zoo, zoo
from tests.support.training import Run, config, differences
from zeroaccel.comm.topology import init_process_group

pytestmark = pytest.mark.gpu

HOST = {"device": "cpu"}
WAYS: dict[str, tuple[int, dict[str, Any]]] = {
    "stage 2": (2, {"reduce_bucket_size": 300}),
    "stage 3": (3, test_zoo.SHARDED),
    "stage 3, both on host": (3, {**test_zoo.SHARDED, "offload_param": HOST, "offload_optimizer": HOST}),
}
SAMPLE = (
    "BertForMaskedLM",
    "DeepseekV3ForCausalLM",
    "GPT2LMHeadModel",
    "LlamaForCausalLM",
    "Mamba2ForCausalLM",
    "MixtralForCausalLM",
    "Qwen3NextForCausalLM",
    "ResNetForImageClassification",
    "T5ForConditionalGeneration",
    "ViTForImageClassification",
)


@pytest.fixture(autouse=True)
def exact(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Selects deterministic kernels of torch where they exist."""
    monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    torch.use_deterministic_algorithms(True, warn_only=True)
    init_process_group()
    yield
    torch.use_deterministic_algorithms(False)


def _cuda(batch: dict[str, Tensor]) -> dict[str, Tensor]:
    return {name: value.cuda() for name, value in batch.items()}


def _wrong(head: str, kind: str, name: str, optimizer: dict[str, Any]) -> list[str]:
    try:
        model, batch = zoo.build(kind, name, 0)
    except zoo.NotBuilt as error:
        pytest.skip(f"not built: {error}")
    model = model.cuda()
    if reason := zoo.failure(copy.deepcopy(model), _cuda(batch)):
        pytest.skip(f"plain torch on this device: {reason}")
    batches = [_cuda(each) for each in test_zoo._batches(batch, 0)]

    def run(stage: int, precision: str, **keys: Any) -> Run:
        settings = config(stage, precision, optimizer=optimizer, **keys)
        return test_zoo._engine(copy.deepcopy(model), batches, 0, settings)

    def plain(start: nn.Module) -> Run:
        return test_zoo._plain(copy.deepcopy(start), batches, 0, optimizer)

    wrong = []
    for precision in ("fp32", "bf16"):
        half = copy.deepcopy(model).to(torch.bfloat16)
        if precision == "bf16" and zoo.failure(half, test_zoo._cast(_cuda(batch), torch.bfloat16)):
            continue
        whole = run(0, precision)
        if differences(whole, run(0, precision)):
            pytest.skip(f"two runs differ at stage 0 in {precision}")
        for way, (stage, keys) in WAYS.items():
            wrong += [f"{precision}, {way}: {each}" for each in differences(whole, run(stage, precision, **keys))]
        if precision == "fp32" and test_zoo._far(plain(model), whole, model):
            wrong += test_zoo._far(plain(model), whole, model, plain(test_zoo._nudged(model)))
    return wrong


@pytest.mark.parametrize("name", SAMPLE)
def test_stages_have_the_bits_of_one_another(name: str) -> None:
    found = next(each for each in zoo.classes() if each[2] == name)
    assert _wrong(*found, optimizer=test_zoo.SGD) == []


@pytest.mark.slow
@pytest.mark.parametrize(("head", "kind", "name"), zoo.classes(), ids=lambda value: value)
def test_every_class_on_a_device(head: str, kind: str, name: str) -> None:
    assert _wrong(head, kind, name, test_zoo.SGD) == []
