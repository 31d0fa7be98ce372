"""Checkpoints of DeepSpeed's tensor, pipeline and expert parallelism: its own files, and its values in memory."""

from __future__ import annotations

import hashlib
import json
import tarfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from zeroaccel.checkpoint.consolidate import get_fp32_state_dict_from_zero_checkpoint
from zeroaccel.checkpoint.formats.deepspeed_checkpoint import open_deepspeed_checkpoint
from zeroaccel.checkpoint.formats.deepspeed_parallel import SliceRules, Slices, joined
from zeroaccel.checkpoint.formats.deepspeed_resume import manifest_of
from zeroaccel.checkpoint.manifest import TensorRecord
from zeroaccel.errors import CheckpointError

DATA = Path(__file__).parents[2] / "data" / "deepspeed" / "parallel"
CASES = sorted(path.name.removesuffix(".tar.xz") for path in DATA.glob("*.tar.xz"))


def _unpack(case: str, folder: Path) -> Path:
    with tarfile.open(DATA / f"{case}.tar.xz") as archive:
        archive.extractall(folder, filter="data")
    return folder / case


@pytest.mark.parametrize("case", CASES)
def test_weights_and_states_are_those_in_memory(case: str, tmp_path: Path) -> None:
    folder = _unpack(case, tmp_path)
    truth: dict[str, Tensor] = torch.load(folder / "truth.pt")
    checkpoint, state = open_deepspeed_checkpoint(folder), get_fp32_state_dict_from_zero_checkpoint(folder)
    names = {key.rpartition("/")[2] for key in truth}
    assert state.keys() - set(checkpoint.buffers) - checkpoint.ties.keys() == names
    for key, expected in truth.items():
        kind, name = key.rpartition("/")[::2]
        found = state[name]
        if kind.startswith("state"):
            record = checkpoint.states.tensors[key]
            found = torch.from_numpy(checkpoint.read(record)).view(torch.float32).view(record.shape)
        assert torch.equal(found.to(expected.dtype), expected), key
    path = folder / "states.json"
    assert path.exists() is not case.endswith("stage0")
    for key, digest in json.loads(path.read_text()).items() if path.exists() else ():
        assert hashlib.sha1(checkpoint.read(checkpoint.states.tensors[key]).tobytes()).hexdigest() == digest, key
    manifest = manifest_of(checkpoint)
    assert manifest.counters["global_steps"] == 2
    assert all(manifest.parameters[name].shape == tuple(state[name].shape) for name in names)
    for key, record in checkpoint.states.tensors.items():
        assert record.shape == tuple(state[key.split("/", 2)[2]].shape)


def test_a_shared_module_has_the_name_of_its_first_layer(tmp_path: Path) -> None:
    checkpoint = open_deepspeed_checkpoint(_unpack("pipe_stage1_tied", tmp_path))
    assert checkpoint.ties == {"5.module.weight": "0.module.weight"}
    assert checkpoint.buffers == ["2.offset", "3.offset"]
    assert checkpoint.order[:3] == ["0.module.weight", "1.weight", "1.bias"]
    assert checkpoint.client_state == {"epoch": 3}


def test_states_without_names_are_refused_but_not_the_weights(tmp_path: Path) -> None:
    checkpoint = open_deepspeed_checkpoint(_unpack("moe_stage0", tmp_path))
    assert manifest_of(checkpoint).parameters
    with pytest.raises(CheckpointError, match=r"expp_rank_0_mp_rank_00_optim_states.pt: .*load_optimizer_states=False"):
        manifest_of(checkpoint, group_of=dict.fromkeys(checkpoint.order, 0))


@pytest.mark.parametrize(
    ("case", "file", "message"),
    [
        ("pipe_stage1", "layer_02-model_states.pt", r"no file of a layer has 2\."),
        ("pipe_stage1", "mp_rank_00_model_states.pt", "mp_rank_00_model_states.pt is missing"),
        ("pipe_stage1", "zero_pp_rank_1_mp_rank_01_optim_states.pt", r"mp_rank_01: expected those of ranks \[0, 1\]"),
        ("moe_stage2_bf16", "layer_0_expert_2_mp_rank_00_model_states.pt", "expert_2_.* is missing"),
        ("tp_stage3", "zero_pp_rank_1_mp_rank_01_model_states.pt", "incomplete: each of the 2 ranks needs a file"),
    ],
)
def test_missing_files_are_named(case: str, file: str, message: str, tmp_path: Path) -> None:
    folder = _unpack(case, tmp_path)
    next(folder.glob(f"*/*{file}")).unlink()
    with pytest.raises(CheckpointError, match=message):
        open_deepspeed_checkpoint(folder)


def _records(parts: list[np.ndarray[Any, Any]]) -> list[TensorRecord]:
    """Returns a record per part; part i is file i, whose "byte offsets" are 4 times its element numbers."""
    return [TensorRecord("F32", part.shape, ((i, 0, part.size, 0),)) for i, part in enumerate(parts)]


@pytest.mark.parametrize(
    ("dim", "blocks"), [(0, ()), (1, ()), (0, (4, 4)), (0, (4, 2, 2)), (1, (2, 4)), (2, (2, 2, 4))]
)
def test_slices_of_blocks_join(dim: int, blocks: tuple[int, ...]) -> None:
    shape = [3, 5, 6]
    shape[dim] = sum(blocks) or 8
    whole = np.arange(np.prod(shape)).reshape(shape)
    cuts = np.split(whole, np.cumsum(blocks)[:-1], axis=dim) if blocks else [whole]
    parts = [np.concatenate([np.split(cut, 2, axis=dim)[rank] for cut in cuts], axis=dim) for rank in range(2)]
    record = joined("w", _records(parts), Slices(dim, blocks), "here")
    found = [parts[file].ravel()[at // 4 : at // 4 + length] for file, _, length, at in record.pieces]
    assert record.shape == whole.shape
    assert np.array_equal(np.concatenate(found), whole.ravel())
    assert [start for _, start, *_ in record.pieces] == [0, *np.cumsum([len(run) for run in found])[:-1]]


def test_rules_come_from_the_checkpoint() -> None:
    info = {
        "tp_replicated_parameter_patterns": ["norm"],
        "parameter_with_row_parallelism_patterns": [r".*down\.weight"],
        "vocabulary_parameter_patterns": ["embed"],
        "original_vocab_size": 7,
        "parameter_with_sub_params": [{"patterns": ["qkv"], "shape": [[4, 2, 2], 3], "partition_dim": 0}],
    }
    rules, shapes = SliceRules(info, 2, "here"), [(4, 3), (4, 3)]
    names = ["norm", "mlp.down.weight", "embed", "qkv", "up.weight"]
    assert [rules.of(name, shapes) for name in names] == [
        *(Slices(None), Slices(1), Slices(0, most=7), Slices(0, (4, 2, 2)), Slices(0))
    ]
    assert joined("embed", _records([np.zeros((4, 3))] * 2), rules.of("embed", shapes), "here").shape == (7, 3)
    with pytest.raises(
        CheckpointError, match=r"the tensor-parallel parts of w: .*dimension 1 only.*got \[\(4, 3\), \(5, 3\)"
    ):
        joined("w", _records([np.zeros((4, 3)), np.zeros((5, 3))]), Slices(1), "here")
    with pytest.raises(CheckpointError, match="universal_checkpoint_info: expected patterns that say how the 2"):
        SliceRules({}, 2, "here").of("w", shapes)
