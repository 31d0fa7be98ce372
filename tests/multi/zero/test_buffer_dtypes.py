"""Models with floating-point buffers: those that plain torch runs in 16 bits have the same bits in the engine."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import zeroaccel
from tests.multi.zero import zoo
from tests.multi.zero.awkward_models import BATCH_NORMS, MODELS, WIDTH
from tests.support.libraries import TRANSFORMERS_4
from tests.support.pool import Ranks
from tests.support.refusals import message
from tests.support.training import SGD, config, train_step
from zeroaccel import zero
from zeroaccel.errors import EngineStateError

DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16}


def _made(name: str) -> nn.Module:
    torch.manual_seed(0)
    return MODELS[name]()


def _inputs(rank: int, dtype: torch.dtype, count: int = 1) -> list[Tensor]:
    generator = torch.Generator().manual_seed(rank)
    return [torch.randn(8, WIDTH, generator=generator).to(dtype) for _ in range(count)]


def _loss(model: nn.Module, x: Tensor) -> Tensor:
    return (model(x).float() - x.float().sum(1, keepdim=True)).square().mean()


def _buffers(model: nn.Module) -> dict[str, Tensor]:
    return {name: buffer.clone() for name, buffer in model.named_buffers()}


def _equal(one: dict[str, Tensor], other: dict[str, Tensor]) -> list[str]:
    """Returns the names of buffers that differ in dtype or bits."""
    assert one.keys() == other.keys()
    return [n for n, value in one.items() if value.dtype != other[n].dtype or not torch.equal(value, other[n])]


def _against_plain(stage: int, precision: str) -> dict[str, str]:
    """Returns the differences between the engine and the same model after `model.to(dtype)`, by name of the model."""
    found, dtype = {}, DTYPES[precision]
    for name in MODELS:
        plain = _made(name).to(dtype)
        engine, *_ = zeroaccel.initialize(_made(name), config=config(stage, precision))
        for mode in (True, False):
            plain.train(mode)
            engine.train(mode)
            for x in _inputs(engine.collectives.rank, dtype, 2):
                with torch.set_grad_enabled(mode):
                    if not torch.equal(plain(x), engine(x)):
                        found[name] = f"the output, train={mode}"
        if different := _equal(_buffers(plain), _buffers(engine.module)):
            found[name] = found.get(name, "") + f" {different}"
        engine.reset()
        engine.destroy()
    return found


@pytest.mark.parametrize(("stage", "precision"), [(0, "fp16"), (3, "bf16")])
def test_models_compute_as_plain_ones_do(ranks: Ranks, stage: int, precision: str) -> None:
    for found in ranks(2).run(_against_plain, stage, precision):
        assert found.keys() == {"rotary"}  # its frequencies are more exact than in the plain model
        assert found["rotary"].endswith("['1.inv_freq']")


def _trained(name: str, settings: dict[str, Any], steps: int = 3) -> tuple[list[float], dict[str, Tensor]]:
    dtype = torch.bfloat16 if "bf16" in settings else torch.float16
    engine, *_ = zeroaccel.initialize(_made(name), config=settings)
    losses = [train_step(engine, _loss(engine, x)) for x in _inputs(engine.collectives.rank, dtype, steps)]
    found = _buffers(engine.module)
    engine.destroy()
    found |= {name: param.detach().clone() for name, param in engine.module.named_parameters()}
    return losses, found


def _stages(precision: str) -> list[str]:
    """Returns the models on which a stage differs from stage 0 in a loss, a weight or a buffer."""
    found = []
    for name in MODELS:
        losses, values = _trained(name, config(0, precision))
        for stage in (1, 2, 3):
            other, those = _trained(name, config(stage, precision))
            if losses != other or _equal(values, those):
                found.append(f"{name}, stage {stage}")
    return found


@pytest.mark.parametrize("precision", ["bf16", pytest.param("fp16", marks=pytest.mark.slow)])
def test_stages_agree_on_buffers_too(ranks: Ranks, precision: str) -> None:
    assert ranks(2).run(_stages, precision) == [[], []]


def _curves(name: str) -> tuple[list[float], list[float]]:
    """Returns losses of an engine, and of a plain bf16 model with fp32 masters that torch's AdamW updates."""
    adamw = {"type": "AdamW", "params": {"lr": 3e-3, "weight_decay": 0.1}}
    engine, *_ = zeroaccel.initialize(_made(name), config=config(3, "bf16", optimizer=adamw))
    plain, masters = _made(name).bfloat16(), _made(name)
    optimizer = torch.optim.AdamW(masters.parameters(), **adamw["params"])
    curves: tuple[list[float], list[float]] = ([], [])
    for x in _inputs(0, torch.bfloat16) * 30:  # the same on all ranks
        loss, other = _loss(engine, x), _loss(plain, x)
        train_step(engine, loss)
        other.backward()
        for param, master in zip(plain.parameters(), masters.parameters(), strict=True):
            assert param.grad is not None
            master.grad, param.grad = param.grad.float(), None
        optimizer.step()
        for param, master in zip(plain.parameters(), masters.parameters(), strict=True):
            param.data.copy_(master.data)
        curves[0].append(loss.item())
        curves[1].append(other.item())
    engine.destroy()
    return curves


@pytest.mark.parametrize("name", ["BatchNorm2d", "spectral_norm, parametrized", "codebook", "positions"])
def test_the_training_curve_is_that_of_torch(ranks: Ranks, name: str) -> None:
    for one, other in ranks(2).run(_curves, name):
        # Approximately: torch's AdamW uses square roots that some CPUs do not round to the nearest float.
        assert one == pytest.approx(other, rel=2e-3)
        assert one[-1] < 0.9 * one[0]


def _kept_in_fp32(name: str) -> tuple[set[str], set[str], float]:
    """Returns the dtypes of a BatchNorm in keep_in_fp32_modules and of the other tensors, and a loss."""
    types = {"keep_in_fp32_modules": ["2" if name.endswith("d") and "1d" not in name else "1"]}
    settings = config(3, "bf16", data_types=types)
    model = _made(name)
    engine, *_ = zeroaccel.initialize(model, config=settings)
    x = _inputs(0, torch.bfloat16)[0]
    train_step(engine, _loss(engine, x))
    loss = _loss(engine, x).item()
    norms = [module for module in model.modules() if isinstance(module, nn.modules.batchnorm._BatchNorm)]
    own = [t for norm in norms for t in (*norm.parameters(), *norm.buffers()) if t.is_floating_point()]
    rest = [p for p in model.parameters() if all(p is not t for t in own)]
    engine.reset()
    engine.destroy()
    return {str(t.dtype) for t in own}, {str(p.dtype) for p in rest}, loss


@pytest.mark.parametrize("name", list(BATCH_NORMS))
def test_a_batch_norm_may_stay_in_fp32(ranks: Ranks, name: str) -> None:
    for own, rest, loss in ranks(2).run(_kept_in_fp32, name):
        assert (own, rest) == ({"torch.float32"}, {"torch.bfloat16"})
        assert 0 < loss < 100


def _built_by_init(name: str) -> list[str]:
    """Returns, after a forward, the buffers that differ from those of a model built without `zero.Init`."""
    settings, found = config(3, "bf16"), []
    for init in (False, True):
        torch.manual_seed(0)
        with zero.Init(config_dict_or_path=settings, enabled=init):
            model = MODELS[name]()
        engine, *_ = zeroaccel.initialize(model, config=settings)
        engine(_inputs(engine.collectives.rank, torch.bfloat16)[0])
        found.append(_buffers(model))
        engine.reset()
        engine.destroy()
    return _equal(*found)


@pytest.mark.parametrize("size", [1, 2])
@pytest.mark.parametrize("name", ["BatchNorm2d", "weight_norm, parametrized", "codebook", "rotary"])
def test_a_model_of_init_has_the_same_buffers(ranks: Ranks, name: str, size: int) -> None:
    assert ranks(size).run(_built_by_init, name) == [[]] * size


def _already_in_16_bits(stage: int) -> dict[str, str]:
    """Returns the buffers' dtypes if the program itself cast all of the model, or all but some buffers."""
    found = {}
    half = _made("BatchNorm1d").bfloat16()
    engine, *_ = zeroaccel.initialize(half, config=config(stage, "bf16"))
    found["all"] = str(half[1].running_mean.dtype)
    engine.destroy()
    mixed = _made("codebook").bfloat16()
    mixed[1].total = mixed[1].total.float()
    engine, *_ = zeroaccel.initialize(mixed, config=config(stage, "bf16"))
    found["one"] = str(mixed[1].total.dtype)
    engine.destroy()
    whole = _made("BatchNorm1d").half()
    engine, *_ = zeroaccel.initialize(whole, config=config(stage))
    found["up"] = str(whole[1].running_mean.dtype)
    engine(_inputs(0, torch.float32)[0])
    engine.reset()
    engine.destroy()
    return found


def test_a_mixture_that_the_program_made_stays(ranks: Ranks) -> None:
    expected = {"all": "torch.bfloat16", "one": "torch.float32", "up": "torch.float32"}
    assert ranks(2).run(_already_in_16_bits, 3) == [expected, expected]


def _resumed(name: str, folder: str) -> tuple[list[str], list[str], bool]:
    """Returns the buffers of rank 0 that differ after resuming, the same for eval, and whether the ranks agree."""
    settings = config(3, "bf16")
    engine, *_ = zeroaccel.initialize(_made(name), config=settings)
    rank = engine.collectives.rank
    for x in _inputs(rank, torch.bfloat16, 3):
        train_step(engine, _loss(engine, x))
    engine.save_checkpoint(folder, tag="here")
    saved = engine.collectives.gather_objects(_buffers(engine.module), "buffers")[0]
    engine.destroy()
    other, *_ = zeroaccel.initialize(MODELS[name](), config=settings)
    other.load_checkpoint(folder, tag="here")
    resumed = _equal(saved, _buffers(other.module))
    everyone = other.collectives.gather_objects(_buffers(other.module), "buffers")
    other.destroy()
    wide, *_ = zeroaccel.initialize(MODELS[name](), config=config(1))  # fp32, read from bf16
    wide.load_checkpoint(folder, tag="here")
    widened = _equal({n: b.float() if b.is_floating_point() else b for n, b in saved.items()}, _buffers(wide.module))
    wide.destroy()
    return resumed, widened, not _equal(everyone[0], everyone[1])


@pytest.mark.parametrize("name", ["BatchNorm1d", "spectral_norm, parametrized", "codebook"])
def test_buffers_are_saved_and_resumed(ranks: Ranks, name: str, tmp_path: Path) -> None:
    assert ranks(2).run(_resumed, name, str(tmp_path)) == [([], [], True)] * 2


def _tables(settings: dict[str, Any]) -> dict[str, str]:
    model = copy.deepcopy(_made("rotary"))
    engine, *_ = zeroaccel.initialize(model, config=settings)
    found = {name: str(buffer.dtype) for name, buffer in model.named_buffers()}
    engine.destroy()
    return found


def test_all_buffers_may_be_cast(ranks: Ranks) -> None:
    asked = config(2, "bf16", data_types={"buffer_dtype": "bf16"})
    both = {"1.inv_freq", "1.cos_cached"}
    assert ranks(2).run(_tables, asked) == [dict.fromkeys(both, "torch.bfloat16")] * 2
    asked = config(2, "bf16", data_types={"buffer_dtype": "fp32"})
    assert ranks(2).run(_tables, asked) == [dict.fromkeys(both, "torch.float32")] * 2


# -- models of transformers


def _of_transformers(name: str) -> tuple[nn.Module, dict[str, Tensor]]:
    """Makes a small model, and a batch for it in fp32."""
    import transformers as hf

    torch.manual_seed(0)
    images = {"pixel_values": torch.randn(2, 3, 64, 64), "labels": torch.tensor([0, 1])}
    if name == "ResNet":
        resnet = hf.ResNetConfig(
            embedding_size=8, hidden_sizes=[8, 16], depths=[1, 1], layer_type="basic", num_labels=3
        )
        return hf.ResNetForImageClassification(resnet), images
    if name == "MobileViT":
        sizes = {"hidden_sizes": [16] * 3, "neck_hidden_sizes": [8] * 6 + [16], "image_size": 64}
        return hf.MobileViTForImageClassification(hf.MobileViTConfig(**sizes, num_labels=3)), images
    widths = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 32}
    if name == "Wav2Vec2":
        kernels = {"conv_dim": (8, 8), "conv_kernel": (10, 3), "conv_stride": (5, 2), "num_conv_pos_embeddings": 8}
        rest = {"num_conv_pos_embedding_groups": 2, "classifier_proj_size": 8, "apply_spec_augment": False}
        wav2vec2 = hf.Wav2Vec2ForSequenceClassification(hf.Wav2Vec2Config(**widths, **kernels, **rest, num_labels=3))
        return wav2vec2, {"input_values": torch.randn(2, 400), "labels": torch.tensor([0, 1])}
    tokens = {"input_ids": torch.arange(24).view(2, 12), "labels": torch.arange(24).view(2, 12)}
    return hf.LlamaForCausalLM(hf.LlamaConfig(**widths, num_key_value_heads=2, vocab_size=64)), tokens


def _trained_of_transformers(name: str, stage: int, precision: str) -> tuple[bool, list[str], list[float]]:
    """Returns whether the first output equals the plain model's, the buffers that stay in fp32, and the losses."""
    dtype = DTYPES[precision]
    model, batch = _of_transformers(name)
    batch = {key: value.to(dtype) if value.is_floating_point() else value for key, value in batch.items()}
    plain = _of_transformers(name)[0].to(dtype).eval()
    engine, *_ = zeroaccel.initialize(model.eval(), config=config(stage, precision))
    with torch.no_grad():
        same = torch.equal(plain(**batch).logits, engine(**batch).logits)
    kept = [n for n, b in model.named_buffers() if b.dtype is torch.float32]
    engine.train()
    losses = []
    for step in range(4):
        torch.manual_seed(step)  # for dropout
        losses.append(train_step(engine, engine(**batch).loss))
    engine.destroy()
    return same, kept, losses


@pytest.mark.slow
@pytest.mark.parametrize("precision", ["bf16", "fp16"])
@pytest.mark.parametrize("name", ["ResNet", "MobileViT", "Wav2Vec2", "Llama"])
def test_models_of_transformers(ranks: Ranks, name: str, precision: str) -> None:
    pytest.importorskip("transformers")
    runs = [ranks(2).run(_trained_of_transformers, name, stage, precision)[0] for stage in (0, 1, 2, 3)]
    rotary = ["model.rotary_emb.inv_freq", "model.rotary_emb.original_inv_freq"]
    for same, kept, losses in runs:
        assert kept == (rotary if name == "Llama" else [])
        assert same or name == "Llama"
        assert losses == runs[0][2]
    assert all(0 < loss < 10 for loss in runs[0][2])


def _own_lists() -> dict[str, Any]:
    """Returns a model's losses with both fp32 module lists, by stage, and the error of a router that casts itself."""
    found: dict[str, Any] = {}

    def losses(kind: str, name: str, stage: int, **data_types: Any) -> list[float]:
        model, batch = zoo.build(kind, name, 3)
        settings = config(stage, "bf16", optimizer=SGD, **({"data_types": data_types} if data_types else {}))
        engine, *_ = zeroaccel.initialize(model, config=settings)
        try:
            return [train_step(engine, engine(**batch).loss) for _ in range(3)]
        finally:
            engine.reset()
            engine.destroy()

    switch = "switch_transformers", "SwitchTransformersForConditionalGeneration"
    for stage in (0, 3):
        found[f"DeepSeek, {stage}"] = losses("deepseek_v4", "DeepseekV4ForCausalLM", stage)
        found[f"Switch, {stage}"] = losses(*switch, stage, keep_in_fp32_modules=["classifier"])
    found["said"] = message(EngineStateError, losses, *switch, 0)  # at stage 3 the next gather undoes the cast
    return found


@pytest.mark.skipif(TRANSFORMERS_4, reason="transformers 4 has no DeepSeek-V4")
def test_modules_in_fp32_by_the_models_own_lists(ranks: Ranks) -> None:
    for found in ranks(2).run(_own_lists):
        for name in ("DeepSeek", "Switch"):
            assert found[f"{name}, 0"] == found[f"{name}, 3"]
            assert all(0 < loss < 100 for loss in found[f"{name}, 0"])
        assert "router.classifier.weight: expected torch.bfloat16 on cpu" in found["said"]
        assert 'data_types.keep_in_fp32_modules to ["classifier"]' in found["said"]
