"""Exported models at every stage: state dicts, safetensors shards with an index, files that transformers loads."""

from __future__ import annotations

import json
import weakref
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file
from torch import Tensor, nn

from tests.support.mesh_training import small_llama
from tests.support.mixtures import small_mixture
from tests.support.pool import Ranks
from tests.support.training import Toy, batches
from zeroaccel import Accelerator, ZeroPlugin
from zeroaccel.accelerate import pretrained_saving
from zeroaccel.checkpoint import weights
from zeroaccel.errors import CheckpointError, EngineStateError, UsageError
from zeroaccel.zero.param_unit import ShardState


def _trained(stage: int, precision: str = "bf16") -> tuple[Accelerator, Any]:
    tree = {"zero_optimization": {"stage": stage, "stage3_param_persistence_threshold": 0}}
    accelerator = Accelerator(zero_plugin=ZeroPlugin(tree), mixed_precision=precision)
    torch.manual_seed(7)
    model: Any = Toy()
    optimizer: Any = torch.optim.SGD([param for param in model.parameters() if param.requires_grad], lr=0.1)
    model, optimizer = accelerator.prepare(model, optimizer)
    accelerator.backward(model(batches(accelerator.process_index, 1)[0]))
    optimizer.step()
    return accelerator, model


def _save(stage: int, folder: Path, pickled: bool) -> tuple[list[str], dict[str, Tensor], dict[str, Tensor]]:
    """Saves a model; returns the file names, this rank's state dict, and the model's own after `free_memory()`."""
    accelerator, model = _trained(stage)
    names = accelerator.save_model(model, folder, max_shard_size="3KB", safe_serialization=not pickled)
    state = accelerator.get_state_dict(model)
    inner = accelerator.unwrap_model(model)
    accelerator.free_memory()
    return names, state, {name: value.detach().clone() for name, value in inner.state_dict().items()}


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_state_dict_and_shards_are_the_model(ranks: Ranks, tmp_path: Path, stage: int) -> None:
    (tmp_path / "model-00001-of-00099.safetensors").write_bytes(b"of an earlier save")
    (names, state, whole), (_, other, _) = ranks(2).run(_save, stage, tmp_path, False)
    assert other == {}
    assert list(state) == list(whole)
    assert all(torch.equal(state[name], value) for name, value in whole.items())
    assert state["head.weight"].data_ptr() == state["embed.weight"].data_ptr()  # torch's tracer triggers it
    assert sorted(path.name for path in tmp_path.iterdir()) == sorted(names)
    index = json.loads((tmp_path / "model.safetensors.index.json").read_text())
    found: dict[str, Tensor] = {}
    for file in names[:-1]:
        tensors = load_file(tmp_path / file)
        assert tensors
        assert sum(value.nbytes for value in tensors.values()) <= 3000 or len(tensors) == 1
        assert all(index["weight_map"][name] == file for name in tensors)
        found |= tensors
    assert set(index["weight_map"]) == set(found) == set(whole) - {"head.weight"}
    assert index["metadata"]["total_size"] == sum(value.nbytes for value in found.values())
    assert all(torch.equal(found[name], value) for name, value in whole.items() if name in found)
    assert [name for name, value in found.items() if not value.numel()] == ["nothing"]  # a tensor without elements


def test_pickled_files_hold_every_name(ranks: Ranks, tmp_path: Path) -> None:
    names, _, whole = ranks(2).run(_save, 3, tmp_path, True)[0]
    found: dict[str, Tensor] = {}
    for file in names[:-1]:
        found |= torch.load(tmp_path / file, weights_only=True)
    weight_map = json.loads((tmp_path / "pytorch_model.bin.index.json").read_text())["weight_map"]
    assert set(found) == set(whole) == set(weight_map)
    assert all(torch.equal(found[name], value) for name, value in whole.items())


def _alone(folder: Path) -> list[str]:
    accelerator, model = _trained(3)
    names = accelerator.save_model(model, folder)
    inner = accelerator.unwrap_model(model)
    accelerator.save({"a": torch.ones(2)}, folder / "extra.safetensors", safe_serialization=True)
    accelerator.save([1, 2], folder / "extra.pt")
    with pytest.raises(UsageError, match="expected a transformers model"):
        accelerator.save_pretrained(model, folder)
    with pytest.raises(UsageError, match="max_shard_size: expected a size such as 5GB or 500MiB, got 'big'"):
        accelerator.save_model(model, folder, max_shard_size="big")
    with pytest.raises(UsageError, match=r"save_model\(Linear\): expected a model that prepare"):
        accelerator.save_model(nn.Linear(2, 2), folder)
    accelerator.wait_for_everyone()
    with pytest.raises(CheckpointError, match=r"extra.pt/below: cannot be written \(Not a directory\)"):
        accelerator.save_model(model, folder / "extra.pt" / "below")
    if accelerator.is_main_process:
        for safe in (False, True):
            with pytest.raises(CheckpointError, match=r"extra.pt/below: cannot be written"):
                accelerator.save({"a": torch.ones(2)}, folder / "extra.pt" / "below", safe_serialization=safe)
    assert accelerator.unwrap_model(model) is inner
    accelerator.free_memory()
    return names


def test_a_small_model_is_one_file(ranks: Ranks, tmp_path: Path) -> None:
    assert ranks(2).run(_alone, tmp_path) == [["model.safetensors"]] * 2
    assert sorted(path.name for path in tmp_path.iterdir()) == ["extra.pt", "extra.safetensors", "model.safetensors"]
    with safe_open(tmp_path / "model.safetensors", "pt") as file:
        assert file.metadata() == {"format": "pt", "head.weight": "embed.weight"}


def _peak(folder: Path) -> tuple[int, int]:
    """Returns the peak number of unsharded elements while saving, and the elements of the largest unit."""
    accelerator, model = _trained(3)
    seen = []
    original = weights.StreamedWeights.add

    def watch(self: Any, name: str, value: Tensor) -> None:
        seen.append(sum(b.full.untyped_storage().nbytes() // b.dtype.itemsize for u in model.units for b in u.buffers))
        original(self, name, value)

    weights.StreamedWeights.add = watch  # type: ignore[method-assign]
    try:
        accelerator.save_model(model, folder)
    finally:
        weights.StreamedWeights.add = original  # type: ignore[method-assign]
    largest = max(unit.numel for unit in model.units)
    accelerator.free_memory()
    return max(seen, default=0), largest


def test_one_unit_at_a_time_is_unsharded(ranks: Ranks, tmp_path: Path) -> None:
    (most, largest), (elsewhere, _) = ranks(2).run(_peak, tmp_path)
    assert 0 < most <= largest
    assert elsewhere == 0  # only rank 0 writes


def _sharded_llama(layers: int) -> tuple[Any, Accelerator]:
    sizes = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": layers, "num_attention_heads": 2}
    model = small_llama(**sizes, tie_word_embeddings=True)
    tree = {"zero_optimization": {"stage": 3, "stage3_param_persistence_threshold": 0}}
    return model, Accelerator(zero_plugin=ZeroPlugin(tree), mixed_precision="bf16")


def _hugging_face(folder: Path) -> None:
    transformers = pytest.importorskip("transformers")
    model, accelerator = _sharded_llama(2)
    model, optimizer = accelerator.prepare(model, torch.optim.AdamW(model.parameters(), lr=1e-2))
    tokens = torch.randint(0, 64, (2, 8))
    accelerator.backward(model(input_ids=tokens, labels=tokens).loss)
    optimizer.step()
    assert model.config.hidden_size == 16
    accelerator.save_pretrained(model, folder / "streamed", max_shard_size="4KB")
    state = accelerator.get_state_dict(model)
    accelerator.unwrap_model(model).save_pretrained(
        folder / "own", is_main_process=accelerator.is_main_process, save_function=accelerator.save, state_dict=state
    )
    inner = accelerator.unwrap_model(model)
    accelerator.free_memory()
    weights = inner.state_dict()  # on all ranks: the weights are sharded until they are used
    if accelerator.is_main_process:
        for way in ("streamed", "own"):
            loaded = transformers.LlamaForCausalLM.from_pretrained(folder / way, dtype=torch.bfloat16)
            for name, other in loaded.named_parameters():
                weight = weights[name]
                assert torch.equal(weight, other), (way, name)
            assert loaded.generation_config is not None


def _no_state_dict(folder: Path, kind: str) -> dict[str, Any]:
    """Saves with and without a state dict; measures the peak host memory that the latter's tensors take."""
    model, accelerator = _sharded_llama(6)
    if kind != "Llama":
        model = small_mixture(kind, num_hidden_layers=6)
    engine = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))[0]
    main = accelerator.is_main_process
    arguments = {"is_main_process": main, "max_shard_size": "8KB"}
    model.save_pretrained(folder / "with", state_dict=accelerator.get_state_dict(engine), **arguments)
    alive, most, gathers = [0], [0], [0]
    original, unshard = pretrained_saving.materialized, type(engine.units[0]).unshard

    def materialized(lazy: Any) -> Tensor:
        value = original(lazy)
        memory = np.empty(value.nbytes, np.uint8)  # a finalizer can watch numpy memory, but not a torch storage
        watched = torch.from_numpy(memory).view(value.dtype).view(value.shape)
        watched.copy_(value)
        alive[0] += value.nbytes
        most[0] = max(most[0], alive[0])
        weakref.finalize(memory, freed, value.nbytes)
        return watched

    def freed(nbytes: int) -> None:
        alive[0] -= nbytes

    def count(self: Any) -> None:
        gathers[0] += 1
        unshard(self)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(pretrained_saving, "materialized", materialized)
        patch.setattr(type(engine.units[0]), "unshard", count)
        model.save_pretrained(folder / "without", **arguments)
    with pytest.raises(Exception, match="unwritable") as refused:
        model.save_pretrained(folder / "with" / "config.json" / "unwritable", **arguments)
    assert "unwritable" in str(refused.value)  # both ranks raise, and neither hangs
    if main:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(pretrained_saving, "_MEETING_SECONDS", 0.1)
            with pytest.raises(
                EngineStateError, match=r"not called it within 0\.1 s; pass state_dict=accelerator\.get"
            ):
                model.save_pretrained(folder / "alone")
    accelerator.wait_for_everyone()
    model.save_pretrained(folder / "plainly", max_shard_size="8KB")  # all ranks, after the refusal of rank 0's call
    still_sharded = all(unit.state is ShardState.SHARDED for unit in engine.units)
    accelerator.free_memory()
    total = sum(param.nbytes for param in model.parameters())
    return {"most": most[0], "left": alive[0], "gathers": gathers[0], "total": total, "sharded": still_sharded}


@pytest.mark.parametrize(("kind", "num_units"), [("Llama", 8), ("Qwen3Moe", 20)])  # embedding, layers, experts, norm
def test_a_sharded_model_is_saved_file_by_file(kind: str, num_units: int, ranks: Ranks, tmp_path: Path) -> None:
    first, second = ranks(2).run(_no_state_dict, tmp_path, kind, timeout=120)
    assert first["sharded"]
    assert second["sharded"]
    with_values, without, plainly = (
        {name: value for file in (tmp_path / way).glob("*-of-*") for name, value in load_file(file).items()}
        for way in ("with", "without", "plainly")
    )
    assert len(list((tmp_path / "with").glob("*-of-*"))) > 4
    assert with_values.keys() == without.keys() == plainly.keys()
    assert not (tmp_path / "alone").exists()
    assert all(torch.equal(value, plainly[name]) for name, value in with_values.items())
    assert [name for name, value in with_values.items() if not torch.equal(value, without[name])] == []
    assert 0 < first["most"] <= 2 * 8000 < first["total"] / 2  # the file being written and the one before it
    assert first["left"] == 0
    assert second["most"] == 0
    # Few are gathered twice; a mixture's layer is, for its norms follow its experts.
    assert first["gathers"] == second["gathers"] <= 3 * num_units / 2


def test_transformers_loads_what_was_saved(ranks: Ranks, tmp_path: Path) -> None:
    ranks(2).run(_hugging_face, tmp_path, timeout=120)
    assert (tmp_path / "streamed" / "model.safetensors.index.json").exists()
    assert json.loads((tmp_path / "streamed" / "config.json").read_text())["architectures"] == ["LlamaForCausalLM"]


def _between_forward_and_backward(_: None = None) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """Returns the weights from `get_state_dict` and `save_pretrained`, read between a forward and its backward."""
    zero = {"stage": 3, "stage3_param_persistence_threshold": 0, "zero_quantized_weights": True}
    accelerator = Accelerator(zero_plugin=ZeroPlugin({"zero_optimization": zero}))
    torch.manual_seed(7)
    model: Any = nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 8))
    optimizer: Any = torch.optim.SGD(model.parameters(), lr=0.1)
    model, optimizer = accelerator.prepare(model, optimizer)
    on_demand = {}
    for step in range(2):  # the first step records the first unit of backward, which forward then leaves gathered
        loss = model(torch.ones(2, 64)).sum()
        if step:
            assert any(unit.state is ShardState.UNSHARDED for unit in model.units)
            with pretrained_saving.state_dict_on_demand(model.checkpointer.state()) as state:
                on_demand = {name: value.clone() for name, value in state.items()}
        accelerator.backward(loss)
    whole = accelerator.get_state_dict(model)
    accelerator.free_memory()
    return on_demand, whole


def test_save_pretrained_between_forward_and_backward_has_exact_weights(ranks: Ranks) -> None:
    (on_demand, whole), _ = ranks(2).run(_between_forward_and_backward, None)
    assert {name: torch.equal(value, whole[name]) for name, value in on_demand.items()} == dict.fromkeys(whole, True)
