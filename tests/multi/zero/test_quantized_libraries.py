"""A frozen base in a library's quantized classes: the engine handles its codes and scales, or raises a named error."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor, nn
from torch.nn.utils.parametrize import register_parametrization
from torch.testing._internal.two_tensor import TwoTensor
from torch.utils.checkpoint import checkpoint

import zeroaccel
from tests.support.checkpoint_runs import train as train_steps
from tests.support.libraries import TRANSFORMERS_4
from tests.support.pool import Ranks
from tests.support.refusals import message, refused
from tests.support.training import plain_step, train_step
from zeroaccel.accelerate import pretrained_saving
from zeroaccel.checkpoint.consolidate import (
    convert_zero_checkpoint_to_fp32_state_dict,
    load_state_dict_from_zero_checkpoint,
)
from zeroaccel.comm.collectives import Collectives
from zeroaccel.comm.recording import RecordingCollectives
from zeroaccel.comm.topology import init_process_group
from zeroaccel.errors import CheckpointError, EngineStateError, UsageError
from zeroaccel.zero import Init
from zeroaccel.zero.access.param_registry import handle_of
from zeroaccel.zero.model_check import check_model
from zeroaccel.zero.tensor_subclasses import inner_tensors, is_wrapper, scales_of

WIDTH = 128
KINDS = ["nf4, nested", "nf4", "fp4 in bfloat16", "int8"]
HQQ = ["hqq stand-in", "hqq"]
WRAPPERS = ["torchao int8", "torchao float8", "torchao int4", "quanto int8", "quanto int4"]


class Params4bit(nn.Parameter):
    """Replaces the library's class where it is not installed."""

    quant_state: Any

    def __new__(cls, data: Tensor, requires_grad: bool = False) -> Params4bit:
        return torch.Tensor._make_subclass(cls, data, requires_grad)  # type: ignore[return-value]


Params4bit.__module__ = "bitsandbytes.nn.modules"


class ScaledCodes:
    """The library's QuantState: scales of blocks of 64 values, and the value of each code."""

    nested = False

    def __init__(self, absmax: Tensor, code: Tensor) -> None:
        self.absmax, self.code = absmax, code

    def as_dict(self, packed: bool) -> dict[str, Tensor]:
        return {"absmax": self.absmax, "quant_map": self.code}


class OffsetCodes(ScaledCodes):
    """Codes with an offset, which the library packs into a tensor of JSON."""

    def __init__(self, absmax: Tensor, code: Tensor) -> None:
        super().__init__(absmax, code)
        self.offset = absmax.mean()

    def as_dict(self, packed: bool) -> dict[str, Tensor]:
        facts = json.dumps({"quant_type": "nf4", "nested_offset": self.offset.item()})
        return {**super().as_dict(packed), "quant_state.bitsandbytes__nf4": torch.tensor(list(facts.encode()))}


class StandIn(nn.Module):
    """A linear layer of 4-bit codes."""

    def __init__(self, width: int, storage: torch.dtype = torch.uint8) -> None:
        super().__init__()
        weight = torch.randn(width * width // 64, 64)
        absmax, code = weight.abs().amax(1), torch.linspace(-1, 1, 16)
        codes = (weight[..., None] / absmax[:, None, None] - code).abs().argmin(-1).to(torch.uint8).view(-1, 2)
        self.weight = Params4bit((codes[:, 0] << 4 | codes[:, 1]).view(storage)[:, None])
        self.weight.quant_state = ScaledCodes(absmax, code)
        self.width = width

    def forward(self, inputs: Tensor) -> Tensor:
        state = self.weight.quant_state
        packed = self.weight.data.view(torch.uint8).view(-1, 1)
        codes = torch.stack((packed >> 4, packed & 15), 1).view(-1, 64).int()
        base = (state.code[codes] * state.absmax[:, None]).view(self.width, self.width)
        return inputs @ base.to(inputs.dtype).t()


class Wrapper(Tensor):
    """Replaces weights of torchao and quanto: codes of 8 bits, a scale and a zero point per row."""

    codes: Tensor
    scale: Tensor
    zero: Tensor

    @staticmethod
    def __new__(cls, codes: Tensor, scale: Tensor, zero: Tensor) -> Wrapper:
        made = torch.Tensor._make_wrapper_subclass(cls, codes.shape, dtype=scale.dtype, device=codes.device)
        made.codes, made.scale, made.zero = codes, scale, zero
        return made

    def __tensor_flatten__(self) -> tuple[list[str], None]:
        return ["codes", "scale", "zero"], None

    @classmethod
    def __tensor_unflatten__(cls, inner: dict[str, Tensor], facts: None, size: Any, stride: Any) -> Wrapper:
        return cls(**inner)

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        with torch._C.DisableTorchFunctionSubclass():
            if func is nn.functional.linear:
                inputs, own, *_ = args
                return inputs @ ((own.codes.to(inputs.dtype) - own.zero) * own.scale.to(inputs.dtype)).t()
            return func(*args, **(kwargs or {}))

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        own = args[0]
        if func is torch.ops.aten.copy_.default:
            for name in ("codes", "scale", "zero"):
                getattr(own, name).copy_(getattr(args[1], name))
            return own
        if func in (torch.ops.aten.detach.default, torch.ops.aten._to_copy.default, torch.ops.aten.clone.default):
            return cls(*(func(getattr(own, name), **(kwargs or {})) for name in ("codes", "scale", "zero")))
        raise NotImplementedError(f"{func} of codes")


def _wrapped(weight: Tensor) -> nn.Parameter:
    scale = weight.abs().amax(1, keepdim=True) / 127
    codes = (weight / scale).round().to(torch.int8)
    return nn.Parameter(Wrapper(codes, scale, torch.zeros(len(codes), 1, dtype=torch.int8)), requires_grad=False)


def _require(kind: str) -> None:
    """Skips a test of a library that is not installed."""
    if "stand-in" not in kind and kind != "wrapper":
        pytest.importorskip(
            {"torchao": "torchao", "hqq": "hqq", "quanto": "optimum.quanto"}.get(kind.split()[0], "bitsandbytes")
        )


class HQQLinear(nn.Module):
    """Replaces HQQ's layer: two codes in a byte, with scales and zeros in a dictionary."""

    def __init__(self, weight: Tensor) -> None:
        super().__init__()
        groups = weight.view(-1, 64)
        low, high = groups.amin(1, keepdim=True), groups.amax(1, keepdim=True)
        self.meta = {"scale": (high - low) / 15, "zero": -low * 15 / (high - low), "shape": weight.shape}
        codes = (groups / self.meta["scale"] + self.meta["zero"]).round().to(torch.uint8).view(-1, 2)
        self.W_q = nn.Parameter(codes[:, 0] << 4 | codes[:, 1], requires_grad=False)

    def forward(self, inputs: Tensor) -> Tensor:
        codes = torch.stack((self.W_q >> 4, self.W_q & 15), 1).view(-1, 64)
        return inputs @ ((codes - self.meta["zero"]) * self.meta["scale"]).view(self.meta["shape"]).t()


HQQLinear.__module__ = "hqq.core.quantize"


def _linear(made: nn.Linear | None = None) -> nn.Linear:
    """Makes a layer of torch, or of a library, with weights like those of the stand-ins."""
    linear = nn.Linear(WIDTH, WIDTH, bias=False) if made is None else made
    with torch.no_grad():
        linear.weight.copy_(torch.randn(WIDTH, WIDTH) / 8)
    return linear


def _layer(kind: str) -> nn.Module:
    if kind == "hqq stand-in":
        return HQQLinear(torch.randn(WIDTH, WIDTH) / 8)
    if kind == "hqq":
        library = pytest.importorskip("hqq.core.quantize")
        settings = library.BaseQuantizeConfig(nbits=4, group_size=64)
        made: nn.Module = library.HQQLinear(_linear(), settings, compute_dtype=torch.float32, device="cpu")
        return made
    if kind == "wrapper":
        linear = _linear()
        linear.weight = _wrapped(linear.weight.detach())
        return linear
    if kind.startswith("torchao"):
        quantization = pytest.importorskip("torchao.quantization")
        linear = _linear().requires_grad_(False)
        formats = {
            "torchao int8": quantization.Int8WeightOnlyConfig,
            "torchao float8": quantization.Float8WeightOnlyConfig,
            "torchao int4": partial(quantization.IntxWeightOnlyConfig, weight_dtype=torch.int4),
        }
        quantization.quantize_(linear, formats[kind]())
        return linear
    if kind.startswith("quanto"):
        quanto = pytest.importorskip("optimum.quanto")
        model = nn.Sequential(_linear())
        quanto.quantize(model, weights=getattr(quanto, f"q{kind[7:]}"))
        quanto.freeze(model)
        return model.requires_grad_(False)[0]
    if kind.startswith("stand-in"):
        return StandIn(WIDTH, torch.bfloat16 if "bfloat16" in kind else torch.uint8)
    bnb = pytest.importorskip("bitsandbytes")
    if kind == "int8":
        layer = bnb.nn.Linear8bitLt(WIDTH, WIDTH, bias=False, has_fp16_weights=False)
    else:
        storage = torch.bfloat16 if "bfloat16" in kind else torch.uint8
        quant = {"quant_type": kind[:3], "compress_statistics": "nested" in kind, "quant_storage": storage}
        layer = bnb.nn.Linear4bit(WIDTH, WIDTH, bias=False, compute_dtype=torch.float32, **quant)
    return _linear(layer).to("cpu")


class Adapted(nn.Module):
    """A frozen quantized layer, and two small trained ones."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.base = _layer(kind)
        self.down = nn.Linear(WIDTH, 4, bias=False)
        self.up = nn.Linear(4, WIDTH, bias=False)

    def forward(self, inputs: Tensor) -> Tensor:
        result: Tensor = torch.tanh(self.base(inputs) + self.up(self.down(inputs)))
        return result


class Model(nn.Module):
    """Blocks that may be recomputed in backward."""

    def __init__(self, kind: str, recomputes: str) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.blocks = nn.ModuleList(Adapted(kind) for _ in range(3))
        self.recomputes = recomputes

    def forward(self, inputs: Tensor) -> Tensor:
        inputs.requires_grad_(self.recomputes == "reentrant")
        for block in self.blocks:
            if self.recomputes:
                inputs = checkpoint(block, inputs, use_reentrant=self.recomputes == "reentrant")
            else:
                inputs = block(inputs)
        return inputs.square().mean()


def _replace_base(model: Model, kind: str) -> None:
    """Replaces the base by other codes and scales of the same kind."""
    for block in model.blocks:
        block.base = _layer(kind)


STAGE_3 = {"stage": 3, "stage3_param_persistence_threshold": 0}
OPTIMIZERS: dict[str, Callable[[list[nn.Parameter]], torch.optim.Optimizer]] = {
    "SGD": partial(torch.optim.SGD, lr=0.5, momentum=0.9),
    "AdamW": partial(torch.optim.AdamW, lr=0.01),
}


def _inputs() -> list[Tensor]:
    generator = torch.Generator().manual_seed(3)
    return [torch.randn(2, WIDTH, generator=generator) for _ in range(4)]


def _optimizer(model: nn.Module, kind: str) -> torch.optim.Optimizer:
    return OPTIMIZERS[kind]([param for param in model.parameters() if param.requires_grad])


def _initialized(model: nn.Module, stage: int, optimizer: str, **zero: Any) -> Any:
    config = {"train_micro_batch_size_per_gpu": 2, "zero_optimization": {**STAGE_3, "stage": stage, **zero}}
    return zeroaccel.initialize(model, _optimizer(model, optimizer), config=config)[0]


def _save(model: nn.Module, folder: Path, **options: Any) -> None:
    engine = _initialized(model, 3, "SGD")
    engine.save_checkpoint(folder, **options)
    engine.destroy()


def _load(model: nn.Module, folder: Path) -> None:
    engine = _initialized(model, 3, "SGD")
    engine.load_checkpoint(folder)
    engine.destroy()


def _plain(model: nn.Module, optimizer: str) -> list[float]:
    trained = _optimizer(model, optimizer)
    return [plain_step(trained, model(inputs)) for inputs in _inputs()]


def _losses(kind: str, folder: str) -> dict[tuple[Any, ...], tuple[list[float], list[float], int]]:
    found = {}
    for recomputes, optimizer in (("", "SGD"), ("non-reentrant", "AdamW"), ("reentrant", "SGD")):
        expected = _plain(Model(kind, recomputes), optimizer)
        places: list[tuple[int, dict[str, Any]]] = [(3, {})]
        if not recomputes:
            places += [(0, {}), (2, {}), (3, {"offload_param": {"device": "cpu"}})]
            places += [(3, {"offload_param": {"device": "nvme", "nvme_path": folder}})]
        for stage, zero in places:
            engine = _initialized(Model(kind, recomputes), stage, optimizer, **zero)
            losses = train_steps(engine, _inputs())
            nbytes = engine.model_state_nbytes()["params"]
            engine.destroy()
            found[recomputes, stage, str(zero)] = losses, expected, nbytes
    return found


@pytest.mark.parametrize("kind", ["stand-in", "wrapper", *KINDS, *WRAPPERS, *HQQ])
def test_a_quantized_base_has_the_losses_of_one_process(ranks: Ranks, tmp_path: Path, kind: str) -> None:
    _require(kind)
    for found in ranks(2).run(_losses, kind, str(tmp_path)):
        for losses, expected, _ in found.values():
            assert losses == pytest.approx(expected, abs=1e-6)
            assert losses[0] != losses[-1]
        # Scales are sharded with the codes; only nested statistics and code books stay whole on every rank.
        adapters = 3 * 2 * 4 * WIDTH * 4
        per_value = 1 + 4 / WIDTH  # codes in 8 bits, of which torchao uses 4 bits in some kinds
        if kind in ("stand-in", *KINDS[:-1]):
            per_value = 0.5 + (1 / 64 if "nested" in kind else 4 / 64)
        elif kind in HQQ:
            per_value = 0.5 + 8 / 64
        elif kind == "quanto int4":
            per_value = 0.5 + 5 / WIDTH
        whole, sharded = found["", 0, "{}"][2], found["", 3, "{}"][2]
        assert whole - adapters == pytest.approx(3 * WIDTH * WIDTH * per_value, rel=0.05)
        assert sharded == pytest.approx(whole / 2, rel=0.05)


def _codes_here(params: Iterable[nn.Parameter]) -> tuple[int, int]:
    """Returns the bytes of quantized weights and their scales on this rank, and in the model."""
    handles = [handle_of(tensor) for param in params for tensor in (param, *(scales_of(param) or {}).values())]
    coded = [handle for handle in handles if handle is not None and scales_of(handle.param) is not None]
    assert all(handle.is_absent for handle in coded)
    buffers = {id(handle.buffer): handle.buffer for handle in coded}.values()
    here = sum(buffer.own.numel * buffer.dtype.itemsize for buffer in buffers)
    return here, sum(handle.slot.range.numel * handle.param.itemsize for handle in coded)


def _built_sharded(kind: str) -> tuple[tuple[int, int], list[float]]:
    with Init():
        model = Model(kind, "")
    nbytes = _codes_here(model.parameters())
    engine = _initialized(model, 3, "SGD")
    losses = train_steps(engine, _inputs())
    engine.destroy()
    return nbytes, losses


@pytest.mark.parametrize("kind", ["stand-in", "stand-in in bfloat16", "wrapper", *KINDS, *WRAPPERS])
def test_a_base_that_zero_init_shards_has_the_same_losses(ranks: Ranks, kind: str) -> None:
    """Regression: every rank held the whole base until the engine was made."""
    _require(kind)
    expected = _plain(Model(kind, ""), "SGD")
    for (here, whole), losses in ranks(2).run(_built_sharded, kind):
        assert losses == pytest.approx(expected, abs=1e-6)
        assert whole >= 3 * WIDTH * WIDTH // 2
        assert here == pytest.approx(whole / 2, rel=0.02)


def _save_llama(folder: Path) -> None:
    from transformers import LlamaConfig, LlamaForCausalLM

    sizes = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "vocab_size": 64}
    LlamaForCausalLM(LlamaConfig(num_attention_heads=4, **sizes)).save_pretrained(folder)


def _from_pretrained(folder: str, how: str) -> tuple[tuple[int, int], list[float]]:
    from transformers import AutoModelForCausalLM, BitsAndBytesConfig

    quantization = BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_use_double_quant=True)
    source, options = folder, {"quantization_config": quantization}
    if Path(folder, "quantized").exists():
        source, options = f"{folder}/quantized", {}
    with Init(enabled=how == "sharded"):
        model = AutoModelForCausalLM.from_pretrained(source, device_map="cpu", **options)
    nbytes = _codes_here(model.parameters())
    for param in model.parameters():
        param.requires_grad_(False)
    model.lm_head.weight.requires_grad_(True)
    engine = _initialized(model, 3, "SGD")
    tokens, losses = torch.arange(32).view(2, 16), []
    for _ in range(3):
        losses.append(train_step(engine, engine(input_ids=tokens, labels=tokens).loss))
    engine.destroy()
    return nbytes, losses


@pytest.mark.parametrize("on_disk", [False, True], ids=["quantized at load", "quantized on disk"])
def test_from_pretrained_within_zero_init_leaves_each_rank_a_part_of_the_codes(
    ranks: Ranks, tmp_path: Path, on_disk: bool
) -> None:
    pytest.importorskip("bitsandbytes")
    from transformers import AutoModelForCausalLM, BitsAndBytesConfig

    _save_llama(tmp_path)
    if on_disk:
        settings = BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_use_double_quant=True)
        model = AutoModelForCausalLM.from_pretrained(tmp_path, quantization_config=settings, device_map="cpu")
        model.save_pretrained(tmp_path / "quantized")
    plain = ranks(2).run(_from_pretrained, str(tmp_path), "whole")
    for (here, whole), losses in ranks(2).run(_from_pretrained, str(tmp_path), "sharded"):
        assert losses == plain[0][1]
        assert whole >= 2 * (4 * 64 * 64 + 3 * 64 * 128) // 2
        assert here == pytest.approx(whole / 2, rel=0.05)
    assert plain[0][0] == (0, 0)


def _evaluated_first(stages: tuple[int, ...]) -> list[list[float]]:
    results = []
    for stage in stages:
        model = Model("nf4", "").eval()
        engine = _initialized(model, stage, "SGD")
        losses = train_steps(engine, _inputs())
        engine.destroy()
        results.append(losses)
    return results


def test_the_kernel_for_evaluations_leaves_codes_alone(ranks: Ranks) -> None:
    """Regression: in evaluation mode, the first forward repacked codes: an error below stage 3, wrong results there."""
    pytest.importorskip("bitsandbytes")
    model = Model("nf4", "").eval()
    for block in model.blocks:
        block.base.support_avx512bf16_for_cpu = False
    expected = _plain(model, "SGD")
    for results in ranks(2).run(_evaluated_first, (0, 2, 3)):
        for losses in results:
            assert losses == pytest.approx(expected, abs=1e-6)


def _gathers(kind: str) -> tuple[list[tuple[str, int]], str]:
    recording = RecordingCollectives(Collectives(init_process_group()))
    model = Model(kind, "")
    config = {"train_micro_batch_size_per_gpu": 2, "zero_optimization": {**STAGE_3, "zero_quantized_weights": True}}
    engine = zeroaccel.initialize(model, _optimizer(model, "SGD"), config=config, collectives=recording)[0]
    recording.reset()
    engine(_inputs()[0])
    calls = [(call.dtype, call.numel) for call in recording.calls if call.label == "unshard blocks.0"]
    engine.reset()
    said = message(EngineStateError, lambda: model.blocks[0].base.weight + 1)
    engine.destroy()
    return calls, said


def test_gathers_are_of_codes_and_scales_which_nothing_rounds(ranks: Ranks) -> None:
    """Gathers the codes and scales of one block; qwZ rounds the adapters only."""
    for calls, said in ranks(2).run(_gathers, "stand-in"):
        codes, scales = WIDTH * WIDTH // 2, WIDTH * WIDTH // 64
        assert sorted(calls) == [("float32", scales), ("float32", 2 * 4 * WIDTH), ("uint8", codes)]
        assert codes + 4 * scales <= 0.30 * 2 * WIDTH * WIDTH
        assert "parameter blocks.0.base.weight: expected no read of its values while it is sharded" in said


def _bits(value: Tensor) -> list[int]:
    if is_wrapper(value):
        return [bit for _, owner, name in inner_tensors(value) for bit in _bits(getattr(owner, name))]
    bits: list[int] = value.detach().reshape(-1).view(torch.uint8).tolist()
    return bits


def _saved(kind: str, folder: str) -> tuple[list[float], list[float], list[str], bool]:
    engine = _initialized(Model(kind, ""), 3, "AdamW")
    train_steps(engine, _inputs()[:2])
    engine.save_checkpoint(folder)
    state = engine.consolidated_state_dict()
    losses = train_steps(engine, _inputs()[2:])
    engine.destroy()
    model = Model(kind, "")
    other = _initialized(model, 0, "AdamW")
    other.load_checkpoint(folder)
    resumed = train_steps(other, _inputs()[2:])
    other.destroy()
    names, same = list(model.state_dict()), True
    if state is not None:
        own = {name: value for name, value in model.state_dict().items() if name in state and "base" in name}
        names = sorted(set(names) ^ set(state))
        same = all(_bits(value) == _bits(state[name]) for name, value in own.items())
    return losses, resumed, names if state is not None else [], same


@pytest.mark.parametrize("kind", ["stand-in in bfloat16", "wrapper", *KINDS, *WRAPPERS])
def test_checkpoints_and_state_dicts_have_codes_and_scales(ranks: Ranks, tmp_path: Path, kind: str) -> None:
    _require(kind)
    for losses, resumed, differing, same in ranks(2).run(_saved, kind, str(tmp_path)):
        assert resumed == losses
        assert same
        own = "base.weight.absmax", "base.weight.quant_map"  # in no state dict of the stand-in
        differing = [name for name in differing if not (kind.startswith("stand-in") and name.endswith(own))]
        if kind == "quanto int4":  # its layers pack codes differently in a state dict
            continue
        assert [name for name in differing if not name.endswith("weight_format")] == []


@pytest.mark.parametrize(
    "kind", ["stand-in in bfloat16", "wrapper", "fp4 in bfloat16", "nf4, nested", "int8", *WRAPPERS]
)
def test_conversions_leave_codes_and_their_scales_as_they_are(tmp_path: Path, kind: str) -> None:
    """Regression: bfloat16 codes became float32, in which NaN codes lost their bits, and scales became 16-bit."""
    _require(kind)
    engine = _initialized(Model(kind, ""), 3, "AdamW")
    engine.save_checkpoint(tmp_path / "saved")
    state = engine.consolidated_state_dict()
    engine.destroy()
    assert state is not None
    for name in [name for name, value in state.items() if is_wrapper(value)]:
        wrapper = state.pop(name)
        state |= {f"{name}.{inner}": getattr(owner, key) for inner, owner, key in inner_tensors(wrapper)}
    for dtype in ("fp32", "bf16"):
        convert_zero_checkpoint_to_fp32_state_dict(tmp_path / "saved", tmp_path / dtype, dtype=dtype)
        found = load_file(tmp_path / dtype / "model.safetensors")
        adapters = {name for name in state if "base" not in name}
        assert {found[name].dtype for name in adapters} == {torch.float32 if dtype == "fp32" else torch.bfloat16}
        assert set(found) == set(state)
        for name in {name for name in set(state) - adapters if not name.endswith("put_scale")}:  # quanto's buffers
            assert (name, found[name].dtype, _bits(found[name])) == (name, state[name].dtype, _bits(state[name]))


class Bnb4bitParametrization(nn.Module):
    """Replaces the library's class where it is not installed."""

    def __init__(self, quant_state: Any) -> None:
        super().__init__()
        self.quant_state = quant_state

    @torch.no_grad()
    def forward(self, codes: Tensor) -> Tensor:
        state = self.quant_state
        levels = torch.stack((codes.view(-1) >> 4, codes.view(-1) & 15), 1).view(-1, 64).int()
        result: Tensor = (state.code[levels] * state.absmax[:, None]).view(4, WIDTH, WIDTH)
        return result


Bnb4bitParametrization.__module__ = "bitsandbytes.nn.parametrize"


class Experts(nn.Module):
    """A fused weight of three dimensions, which libraries quantize as a parameter outside of a layer."""

    def __init__(self, kind: str, seed: int) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.up = nn.Parameter(torch.randn(4, WIDTH, WIDTH) / 8, requires_grad=False)
        if kind == "stand-in":
            layers = [StandIn(WIDTH) for _ in range(4)]
            absmax = torch.cat([layer.weight.quant_state.absmax for layer in layers])
            state = OffsetCodes(absmax, torch.linspace(-1, 1, 16))
            self.up = nn.Parameter(torch.cat([layer.weight.data for layer in layers]), requires_grad=False)
            register_parametrization(self, "up", Bnb4bitParametrization(state), unsafe=True)
        else:
            library = pytest.importorskip("bitsandbytes.nn.parametrize")
            library.replace_parameter_4bit(self, "up", quant_type="nf4", compress_statistics="nested" in kind)
        torch.manual_seed(0)
        self.down = nn.Linear(WIDTH, WIDTH)

    def forward(self, inputs: Tensor) -> Tensor:
        return torch.einsum("bi,eio->beo", torch.tanh(self.down(inputs)), self.up).square().mean()


def _experts(kind: str, folder: str) -> tuple[list[float], list[float], list[float], int]:
    engine = _initialized(Experts(kind, 1), 3, "AdamW")
    nbytes = engine.model_state_nbytes()["params"]
    losses = train_steps(engine, _inputs()[:2])
    engine.save_checkpoint(folder)
    losses += train_steps(engine, _inputs()[2:])
    engine.destroy()
    resumed = []
    for stage in (0, 3):
        engine = _initialized(Experts(kind, 2), stage, "AdamW")  # with other codes, scales and offsets
        engine.load_checkpoint(folder)
        resumed.append(train_steps(engine, _inputs()[2:]))
        engine.destroy()
    return losses, *resumed, nbytes


@pytest.mark.parametrize("kind", ["stand-in", "nf4", "nf4, nested"])
def test_fused_experts_are_carried_by_codes_and_scales(ranks: Ranks, tmp_path: Path, kind: str) -> None:
    """Regression: their scales were whole on every rank, and missing in checkpoints."""
    _require(kind)
    expected = _plain(Experts(kind, 1), "AdamW")
    for losses, at_stage_0, at_stage_3, nbytes in ranks(2).run(_experts, kind, str(tmp_path)):
        assert losses == pytest.approx(expected, abs=1e-6)
        assert at_stage_0 == at_stage_3 == losses[2:]
        per_value = 0.5 + 1 / 64 if "nested" in kind else 0.5 + 4 / 64
        trained = 4 * (WIDTH * WIDTH + WIDTH)
        assert nbytes == pytest.approx((4 * WIDTH * WIDTH * per_value + trained) / 2, rel=0.02)


def _with_offsets(seed: int) -> Model:
    model = Model("stand-in", "")
    torch.manual_seed(seed)
    for block in model.blocks:
        state = block.base.weight.quant_state
        block.base.weight.quant_state = OffsetCodes(state.absmax + torch.rand(()), state.code)
    return model


def test_a_checkpoint_with_its_base_restores_offsets_of_scales(tmp_path: Path) -> None:
    """Regression: no tensor holds the offsets, so the model kept its own beside the codes of the checkpoint."""
    model = _with_offsets(1)
    _save(model, tmp_path)
    other = _with_offsets(2)
    _load(other, tmp_path)
    for one, saved in zip(other.blocks, model.blocks, strict=True):
        found, expected = one.base.weight.quant_state, saved.base.weight.quant_state
        assert found.offset == expected.offset
        assert torch.equal(found.absmax, expected.absmax)


@pytest.mark.parametrize("kind", ["stand-in", "wrapper", *KINDS, *WRAPPERS, "hqq stand-in"])
def test_a_plain_model_takes_scales_from_a_checkpoint(tmp_path: Path, kind: str) -> None:
    """Regression: the library loads codes by name and drops scales, so the model kept its own scales."""
    if kind == "stand-in":
        model, other = _with_offsets(1), _with_offsets(2)
    else:
        _require(kind)
        model, other = Model(kind, ""), Model(kind, "")
        _replace_base(other, kind)
    with torch.no_grad():
        expected = [block.base(_inputs()[0]) for block in model.train().blocks]
    _save(model, tmp_path)
    before = [block.base(_inputs()[0]) for block in other.train().blocks]
    load_state_dict_from_zero_checkpoint(other, tmp_path, strict=kind != "stand-in")
    for block, one, was in zip(other.blocks, expected, before, strict=True):
        assert torch.equal(block.base(_inputs()[0]), one)
        assert not torch.equal(was, one)
    if kind == "stand-in":
        offsets = [block.base.weight.quant_state.offset for block in model.blocks]
        assert [block.base.weight.quant_state.offset for block in other.blocks] == offsets


def _whole_saved(folder: str, kind: str) -> bool:
    from transformers import AutoModelForCausalLM, BitsAndBytesConfig
    from transformers.quantizers import HfQuantizer

    class Serializable(HfQuantizer):
        """Like bitsandbytes: transformers then ignores a state dict that is passed to it."""

        requires_calibration = False

        def __init__(self) -> None:
            pass

        def is_serializable(self) -> bool:
            return True

        @property
        def is_trainable(self) -> bool:
            return True

    quantization: Any = None
    if kind == "nf4":
        quantization = BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_quant_type="nf4")
    elif kind == "torchao int8":
        import torchao.quantization
        from transformers import TorchAoConfig

        quantization = TorchAoConfig(torchao.quantization.Int8WeightOnlyConfig())
    model = AutoModelForCausalLM.from_pretrained(folder, quantization_config=quantization, device_map="cpu")
    if kind == "stand-in":
        model.hf_quantizer = Serializable()
    expected = {name: _bits(value) for name, value in model.state_dict().items()}
    if kind == "torchao int8":  # its files have other names and tensors
        whole = Path(folder) / "whole"
        model.save_pretrained(whole)  # rank 0 writes
        torch.distributed.barrier()
        expected = {name: _bits(value) for name, value in load_file(whole / "model.safetensors").items()}
    model.requires_grad_(False)
    model.lm_head.weight.requires_grad_(True)
    engine = _initialized(model, 3, "SGD")
    pretrained_saving.attach(engine)
    saved = str(Path(folder) / "saved")
    try:
        model.save_pretrained(saved, is_main_process=torch.distributed.get_rank() == 0)
        assert "state_dict" not in vars(model)
    finally:
        engine.destroy()
        pretrained_saving.detach()
    return {name: _bits(value) for name, value in load_file(f"{saved}/model.safetensors").items()} == expected


@pytest.mark.parametrize("kind", ["stand-in", "nf4", "torchao int8"])
@pytest.mark.filterwarnings("ignore:Attempting to save a model with offloaded modules")
def test_save_pretrained_of_a_live_quantized_model_writes_codes_and_scales(
    ranks: Ranks, tmp_path: Path, kind: str
) -> None:
    _require(kind)
    if kind == "stand-in" and TRANSFORMERS_4:
        pytest.skip("quantizers of transformers 4 must have methods that those of 5 inherit")
    _save_llama(tmp_path)
    assert ranks(2).run(_whole_saved, str(tmp_path), kind) == [True, True]


def test_a_checkpoint_of_adapters_leaves_scales_to_the_base(tmp_path: Path) -> None:
    """Regression: it included the scales of its own base, which were then loaded beside another base's codes."""
    model, other = Model("stand-in", ""), Model("stand-in", "")
    _replace_base(other, "stand-in")
    expected = [block.base.weight.quant_state.absmax.clone() for block in other.blocks]
    _save(model, tmp_path, exclude_frozen_parameters=True)
    _load(other, tmp_path)
    for block, own in zip(other.blocks, expected, strict=True):
        assert torch.equal(block.base.weight.quant_state.absmax, own)


def test_adapters_over_another_quantized_base_are_refused(tmp_path: Path) -> None:
    _save(_with_offsets(1), tmp_path, exclude_frozen_parameters=True)
    engine = _initialized(_with_offsets(2), 3, "SGD")
    before = engine.consolidated_state_dict()
    with refused(CheckpointError, "blocks.0.base.weight", "a base whose quant_state", "load that base first"):
        engine.load_checkpoint(tmp_path)
    after = engine.consolidated_state_dict()
    engine.destroy()
    assert all(torch.equal(after[name], value) for name, value in before.items())


def test_codes_that_a_model_without_its_library_loads_are_named(tmp_path: Path) -> None:
    _save(Model("stand-in", ""), tmp_path)
    model = Model("stand-in", "")
    for block in model.blocks:
        block.base = nn.Linear(WIDTH, WIDTH, bias=False).requires_grad_(False)
    engine = _initialized(model, 3, "SGD")
    with refused(CheckpointError, "blocks.0.base.weight", "saved as codes", "with the checkpoint's library"):
        engine.load_checkpoint(tmp_path)
    engine.destroy()


def _loaded(kind: str, file: str) -> tuple[list[float], list[float], list[float]]:
    """Returns the losses of a model, and of another one that loads its state dict, at stages 0 and 3."""
    engine = _initialized(Model(kind, ""), 3, "SGD")
    state = engine.consolidated_state_dict()
    if state is not None:
        torch.save(state, file)
    torch.distributed.barrier()
    state = torch.load(file, weights_only=False)
    losses = [train_steps(engine, _inputs())]
    engine.destroy()
    for stage in (0, 3):
        model = Model(kind, "")
        _replace_base(model, kind)
        engine = _initialized(model, stage, "SGD")
        engine.load_state_dict(state)
        losses.append(train_steps(engine, _inputs()))
        engine.destroy()
        weight = model.blocks[0].base.weight
        assert not any(isinstance(getattr(owner, name), nn.Parameter) for _, owner, name in inner_tensors(weight))
    return losses[0], losses[1], losses[2]


@pytest.mark.parametrize("kind", ["wrapper", *WRAPPERS[:3]])
def test_a_live_model_loads_wrapped_weights(ranks: Ranks, tmp_path: Path, kind: str) -> None:
    _require(kind)
    for losses, *loaded in ranks(2).run(_loaded, kind, str(tmp_path / "state")):
        assert loaded == [losses, losses]


def test_codes_that_the_first_forward_replaces_are_refused_by_name() -> None:
    """compressed_tensors' first forward replaces the codes by whole weights, on every rank."""
    model = nn.Sequential(nn.Linear(4, 4))
    model[0].quantization_status = "compressed"  # type: ignore[assignment]
    with refused(UsageError, "module 0:", "codes of compressed_tensors", "frozen_weights"):
        check_model(model, torch.device("cpu"))


class CodesInBuffers(nn.Module):
    """Has the buffers of GPTQ's and AWQ's layers: codes in int32, and scales in 16 bits."""

    qweight: Tensor
    scales: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("qweight", torch.randint(-8, 8, (WIDTH, WIDTH), dtype=torch.int32))
        self.register_buffer("scales", torch.rand(WIDTH, 1).half())

    def forward(self, inputs: Tensor) -> Tensor:
        return inputs @ (self.qweight * self.scales.float()).to(inputs.dtype).t() / WIDTH


@pytest.mark.parametrize("library", ["awq.modules.linear.gemm", "auto_gptq.nn_modules", "gptqmodel.nn_modules"])
def test_codes_in_buffers_are_refused_at_stage_3_and_keep_their_bits_at_stage_2(
    monkeypatch: pytest.MonkeyPatch, library: str
) -> None:
    monkeypatch.setattr(CodesInBuffers, "__module__", library)
    base = CodesInBuffers()
    model = nn.Sequential(base, nn.Linear(WIDTH, 1))
    name = library.partition(".")[0]
    with refused(UsageError, "module 0", "codes in parameters", f"CodesInBuffers of {name}", '{"stage": 2}', "nf4"):
        _initialized(model, 3, "SGD")
    before = _bits(base.qweight), _bits(base.scales)
    config = {"train_micro_batch_size_per_gpu": 2, "bf16": {"enabled": True}, "zero_optimization": {"stage": 2}}
    engine = zeroaccel.initialize(model, _optimizer(model, "SGD"), config=config)[0]
    losses = [train_step(engine, engine(inputs.bfloat16()).float().square().mean()) for inputs in _inputs()]
    engine.destroy()
    assert losses[0] != losses[-1]
    assert base.scales.dtype == torch.float16
    assert (_bits(base.qweight), _bits(base.scales)) == before


def test_a_wrapper_that_cannot_be_carried_is_refused_by_name() -> None:
    model = nn.Sequential(nn.Linear(4, 4))
    columns = TwoTensor(torch.ones(4, 8)[:, ::2], torch.ones(4, 8)[:, ::2])
    model[0].weight = nn.Parameter(columns, requires_grad=False)
    with refused(UsageError, "parameter 0.weight", "TwoTensor of torch", "whose a is a Tensor", "frozen_weights"):
        check_model(model, torch.device("cpu"))
    model[0].weight = nn.Parameter(_wrapped(torch.ones(4, 4)).data, requires_grad=False)
    with refused(UsageError, "parameter 0.weight", "Wrapper of tests on cpu", 'model.to("meta")'):
        check_model(model, torch.device("meta"))
    model[0].weight = nn.Parameter(_wrapped(torch.ones(4, 4)).data)
    with refused(UsageError, "parameter 0.weight", "cannot be trained", "(Wrapper) with requires_grad=True"):
        check_model(model, torch.device("cpu"))


def test_a_base_is_quantized_by_a_library_or_by_the_engine() -> None:
    words = ("parameter blocks.0.down.weight: zero_optimization.frozen_weights", "no library", "remove the key")
    with refused(UsageError, *words):
        _initialized(Model("stand-in", ""), 3, "SGD", frozen_weights="nf4")


def test_a_quantized_weight_that_cannot_be_carried_is_named() -> None:
    layer = StandIn(WIDTH)
    layer.weight.quant_state.packing_format_for_cpu = True
    with refused(UsageError, "parameter weight", "packed for its CPU kernel", "before the first forward"):
        check_model(layer, torch.device("cpu"))
    layer.weight.quant_state = None
    with refused(UsageError, "parameter weight", "the codes of a quantized weight", 'model.to("cpu")'):
        check_model(layer, torch.device("cpu"))
    layer.weight = Params4bit(torch.zeros(4, dtype=torch.bfloat16), requires_grad=True)
    with refused(UsageError, "parameter weight", "cannot be trained", "requires_grad_(False)"):
        check_model(layer, torch.device("cpu"))
