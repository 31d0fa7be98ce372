"""Models and inputs on other devices than the engine's, by fake tensors with a device and no data."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode

import zeroaccel
from zeroaccel.config import load_config
from zeroaccel.errors import UsageError
from zeroaccel.zero import from_config
from zeroaccel.zero.model_check import check_model_device, misplaced_inputs

GPU = torch.device("cuda", 0)
CPU = torch.device("cpu")


def on(device: str, *size: int) -> torch.Tensor:
    return FakeTensor(FakeTensorMode(), torch.empty(*size, device="meta"), device)


class Model(nn.Module):
    """Parameters named `0`, `1`, ... and a buffer, each on its device."""

    def __init__(self, *devices: str, buffer: str = "cpu") -> None:
        super().__init__()
        for index, device in enumerate(devices):
            self.register_parameter(str(index), nn.Parameter(on(device, 3)))
        self.register_buffer("mean", on(buffer, 3))


@pytest.mark.parametrize("devices", [("cpu", "cpu"), ("cuda:0", "cuda:0"), ("cpu", "cuda:0")])
def test_host_memory_and_the_own_device_fit(devices: tuple[str, ...]) -> None:
    check_model_device(Model(*devices), GPU)


@pytest.mark.parametrize(
    ("model", "device", "parts"),
    [
        (Model(*["cuda:3"] * 5), GPU, ("on cuda:0 or in host memory", "0, 1, 2 and 2 more on cuda:3", "set_device(3)")),
        (Model("cpu", buffer="cuda:1"), GPU, ("'mean on cuda:1'", 'model.to("cuda:0")')),
        (Model("cuda:0", "cuda:1", "cuda:2"), GPU, ("'1 on cuda:1, 2 on cuda:2'", "without device_map")),
        (Model("cuda:0"), CPU, ("'0 on cuda:0'", "this process trains on the CPU: call model.cpu()")),
        (Model("xpu:0"), CPU, ("'0 on xpu:0'", "call model.cpu() first; train on the CPU, or with torch's own FSDP")),
        (Model("mps:0"), GPU, ("'0 on mps:0'", "call model.cpu() first; train on the CPU, or with torch's own FSDP")),
    ],
)
def test_a_model_elsewhere_is_named(model: Model, device: torch.device, parts: tuple[str, ...]) -> None:
    with pytest.raises(UsageError) as raised:
        check_model_device(model, device)
    for part in ("initialize(model): devices: expected all of it on", *parts):
        assert part in str(raised.value)


MESSAGES = (
    "Expected all tensors to be on the same device, but found at least two devices, cuda:0 and cpu!",
    "Expected all tensors to be on the same device, but got mat1 is on cpu, different from other tensors on cuda:0",
    "Input type (torch.FloatTensor) and weight type (torch.cuda.FloatTensor) should be the same",
    "indices should be either on cpu or on the same device as the indexed tensor (cpu)",
)


@pytest.mark.parametrize("message", MESSAGES)
def test_inputs_elsewhere_are_named(message: str) -> None:
    batch = {"ids": torch.ones(2), "more": [on("cuda:1", 2), on("cuda:0", 2)]}
    mistake = misplaced_inputs(RuntimeError(message), (on("cuda:0", 1), 7), {"batch": batch}, GPU)
    assert mistake is not None
    for part in (
        "engine.forward: expected inputs on cuda:0, where the parameters are",
        "batch['ids'] on cpu, batch['more'][0] on cuda:1",
        'pass the loader to prepare(), which moves batches, or move each with .to("cuda:0"); torch says: ' + message,
    ):
        assert part in str(mistake)


@pytest.mark.parametrize(
    ("message", "args"),
    [
        ("mat1 and mat2 shapes cannot be multiplied (2x3 and 4x5)", (torch.ones(2),)),
        (MESSAGES[0], (on("cuda:0", 2), 3, "text")),
    ],
)
def test_other_errors_are_unchanged(message: str, args: tuple[Any, ...]) -> None:
    assert misplaced_inputs(RuntimeError(message), args, {}, GPU) is None


@pytest.mark.parametrize(
    ("device", "section", "expected"),
    [
        (GPU, {}, 50_000_000),
        (CPU, {}, 10**9),
        (GPU, {"sub_group_size": 10**9}, 10**9),
        (GPU, {"sub_group_size": 0}, 0),
    ],
)
def test_a_device_has_a_limited_number_of_fp32_gradients_at_a_time(
    device: torch.device, section: dict[str, int], expected: int
) -> None:
    config = load_config({"train_micro_batch_size_per_gpu": 1, "zero_optimization": {"stage": 2, **section}})
    assert from_config._sub_group_numel(config, has_streams=device.type != "cpu") == expected


def test_a_forward_says_which_input_is_elsewhere(own_job: None) -> None:
    """On a CPU machine, the meta device is the other device."""
    settings = {"train_micro_batch_size_per_gpu": 1, "optimizer": {"type": "SGD", "params": {"lr": 0.1}}}
    engine, *_ = zeroaccel.initialize(nn.Linear(4, 2), config=settings)
    try:
        match = r"inputs on cpu.*got 'args\[0\] on meta'; pass the loader to prepare\(\)"
        with pytest.raises(UsageError, match=match) as raised:
            engine(torch.ones(1, 4, device="meta"))
        assert isinstance(raised.value.__cause__, RuntimeError)
        with pytest.raises(RuntimeError, match="shapes cannot be multiplied"):
            engine(torch.ones(1, 5))
        batch: Any = [torch.ones(1, 4)]
        with pytest.raises(TypeError, match=r"^zeroaccel\.engine\.Engine\(\) argument after \*\* must be a mapping"):
            engine(**batch)
        engine.backward(engine(torch.ones(1, 4)).sum())
        engine.step()
    finally:
        engine.destroy()
