"""Consolidation: the exact bytes that the ranks saved, streamed, and never from a damaged checkpoint.

The checkpoints are written by hand from docs/checkpoint_format.md, so that reader and writer cannot share a mistake.
"""

from __future__ import annotations

import errno
import json
import os
import resource
import shutil
import subprocess
import sys
import tracemalloc
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file
from torch import nn

from tests.support.commands import typed
from tests.support.environment import outside_any_job
from tests.unit.checkpoint.checkpoint_by_hand import Entry, make_checkpoint, rewrite_manifest
from zeroaccel.checkpoint import zero_to_fp32
from zeroaccel.checkpoint.consolidate import (
    convert_zero_checkpoint_to_fp32_state_dict,
    drop_script,
    get_fp32_state_dict_from_zero_checkpoint,
    load_state_dict_from_zero_checkpoint,
)
from zeroaccel.checkpoint.find import find_checkpoint
from zeroaccel.checkpoint.zero_to_fp32 import ConversionError, run
from zeroaccel.errors import CheckpointError, UsageError
from zeroaccel.zero import module_names

RNG = np.random.default_rng(0)


def _f32(*shape: int) -> Entry:
    return Entry("F32", RNG.standard_normal(shape).astype("<f4"))


def _frozen_bf16(*shape: int) -> Entry:
    return Entry("BF16", (RNG.standard_normal(shape).astype("<f4").view("<u4") >> 16).astype("<u2"), trainable=False)


def _parameters() -> dict[str, Entry]:
    """Returns parameters with odd sizes, one element, no elements, a scalar, and a frozen one in bf16."""
    return {
        "embed.weight": _f32(17, 5),
        "layer.weight": _f32(700, 301),
        "layer.bias": _f32(1),
        "empty": _f32(0, 3),
        "scale": _f32(),
        "frozen.weight": _frozen_bf16(33, 7),
        "lora_a": _f32(3, 7),
    }


BUFFERS = {
    "count": Entry("I64", np.array(7, "<i8")),
    "mean": Entry("F64", RNG.standard_normal(5)),
}
TIES = {"head.weight": "embed.weight"}


@pytest.fixture
def parameters() -> dict[str, Entry]:
    return _parameters()


@pytest.fixture
def root(tmp_path: Path, parameters: dict[str, Entry]) -> Path:
    make_checkpoint(tmp_path / "ckpt", parameters, buffers=BUFFERS, ties=TIES)
    return tmp_path / "ckpt"


def _in_fp32(entry: Entry) -> torch.Tensor:
    data = torch.from_numpy(entry.data.view("<i2") if entry.dtype == "BF16" else entry.data)
    tensor = data.view(torch.bfloat16) if entry.dtype == "BF16" else data
    return tensor.float() if tensor.is_floating_point() else tensor


def _expected(parameters: dict[str, Entry]) -> dict[str, torch.Tensor]:
    return {name: _in_fp32(entry) for name, entry in {**parameters, **BUFFERS}.items()}


def _assert_same(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> None:
    assert found.keys() == expected.keys()
    for name, tensor in expected.items():
        assert found[name].dtype == tensor.dtype, name
        assert found[name].shape == tensor.shape, name
        assert torch.equal(found[name], tensor), name


@pytest.mark.parametrize("world_size", [1, 2, 5])
def test_a_folder_of_safetensors_has_every_value(world_size: int, tmp_path: Path) -> None:
    parameters = _parameters()
    make_checkpoint(tmp_path / "ckpt", parameters, buffers=BUFFERS, ties=TIES, world_size=world_size)
    run([str(tmp_path / "ckpt"), str(tmp_path / "out")], "program")
    assert [path.name for path in (tmp_path / "out").iterdir()] == ["model.safetensors"]
    _assert_same(load_file(tmp_path / "out" / "model.safetensors"), _expected(parameters))
    with safe_open(tmp_path / "out" / "model.safetensors", "np") as file:
        assert file.metadata() == {"format": "pt", "head.weight": "embed.weight"}


def test_the_command_prints_its_progress(root: Path, tmp_path: Path) -> None:
    out = tmp_path / "model.safetensors"
    said = typed("zero-to-fp32", root, out)
    numel = sum(entry.data.size for entry in _parameters().values())
    assert said.out.splitlines()[:3] == [
        "Processing zero checkpoint at global_step1",
        "Detected checkpoint of type zero stage 3, world_size: 2",
        f"Saving fp32 state dict to {out} (total_numel={numel})",
    ]
    assert said.out.splitlines()[3].endswith("; verified")
    assert "/s" in said.err.splitlines()[-1]
    assert "#" * 30 in said.err


@pytest.mark.parametrize("stage", [0, 1, 2])
def test_the_stage_is_named(stage: int, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    make_checkpoint(tmp_path, {"w": _f32(3)}, stage=stage, world_size=1)
    run([str(tmp_path), str(tmp_path / "w.safetensors")], "program")
    assert f"type zero stage {stage}, world_size: 1" in capsys.readouterr().out


def test_shards_keep_their_size_and_an_index_names_them(
    root: Path, parameters: dict[str, Entry], tmp_path: Path
) -> None:
    run([str(root), str(tmp_path / "out"), "--max_shard_size", "1KB"], "program")
    index = json.loads((tmp_path / "out" / "model.safetensors.index.json").read_text())
    found: dict[str, torch.Tensor] = {}
    for path in sorted((tmp_path / "out").glob("model-*.safetensors")):
        shard = load_file(path)
        assert all(index["weight_map"][name] == path.name for name in shard)
        nbytes = sum(tensor.nbytes for tensor in shard.values())
        assert nbytes <= 1000 or len(shard) == 1
        found.update(shard)
    _assert_same(found, _expected(parameters))
    assert index["weight_map"].keys() == found.keys()
    assert index["metadata"]["total_size"] == sum(tensor.nbytes for tensor in found.values())
    assert len(list((tmp_path / "out").iterdir())) == len(set(index["weight_map"].values())) + 1


@pytest.mark.parametrize("limit", ["5GB", "1KB"])
def test_bin_files_have_ties_as_one_tensor(
    limit: str, root: Path, parameters: dict[str, Entry], tmp_path: Path
) -> None:
    run([str(root), str(tmp_path / "out"), "--format", "bin", "--max_shard_size", limit], "program")
    found: dict[str, torch.Tensor] = {}
    for path in sorted((tmp_path / "out").glob("pytorch_model*.bin")):
        found.update(torch.load(path, weights_only=True))
    expected = _expected(parameters)
    _assert_same(found, {**expected, "head.weight": expected["embed.weight"]})
    assert found["head.weight"].data_ptr() == found["embed.weight"].data_ptr()
    index = tmp_path / "out" / "pytorch_model.bin.index.json"
    assert index.exists() is (limit == "1KB")
    if limit == "1KB":
        assert json.loads(index.read_text())["weight_map"].keys() == found.keys()


def test_a_name_ending_in_bin_is_one_file(root: Path, tmp_path: Path) -> None:
    run([str(root), str(tmp_path / "pytorch_model.bin")], "program")
    state = torch.load(tmp_path / "pytorch_model.bin", weights_only=True)
    assert torch.equal(state["scale"], get_fp32_state_dict_from_zero_checkpoint(root)["scale"])


@pytest.mark.parametrize(("name", "dtype"), [("bf16", torch.bfloat16), ("fp16", torch.float16)])
def test_sixteen_bits_round_as_torch_does(name: str, dtype: torch.dtype, tmp_path: Path) -> None:
    bits = RNG.integers(0, 2**32, 60_000, dtype=np.uint32)
    values = bits.view("<f4")
    values = values[np.abs(np.nan_to_num(values, nan=0, posinf=0, neginf=0)) < (3e38 if name == "bf16" else 6.5e4)]
    ties = (np.arange(256, dtype="<u4") << 16 | 0x8000 | 0x3F00_0000).view("<f4")
    special = np.array([np.nan, np.inf, -np.inf, 0.0, -0.0, 1e-45, 6e-8, 3.0e-8], "<f4")
    snan = np.array([0x7F80_0001, 0xFFFF_FFFF], "<u4").view("<f4")
    entry = Entry("F32", np.concatenate([values, ties, special, snan]))
    make_checkpoint(tmp_path, {"w": entry})
    run([str(tmp_path), str(tmp_path / "w.safetensors"), "--dtype", name], "program")
    found = load_file(tmp_path / "w.safetensors")["w"]
    expected = torch.from_numpy(entry.data).to(dtype)
    assert torch.equal(found.isnan(), expected.isnan())
    numbers = ~expected.isnan()
    assert torch.equal(found[numbers].view(torch.int16), expected[numbers].view(torch.int16))


def test_values_that_half_precision_cannot_hold_are_refused_by_name(tmp_path: Path) -> None:
    make_checkpoint(tmp_path, {"fine": _f32(3), "large": Entry("F32", np.array([1.0, 70000.0], "<f4"))})
    with pytest.raises(ConversionError, match=r"has values that F16 cannot represent; choose --dtype bf16 or fp32"):
        run([str(tmp_path), str(tmp_path / "out"), "--dtype", "fp16"], "program")
    assert list((tmp_path / "out").iterdir()) == []


def test_nan_in_the_source_is_kept_and_reported(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    make_checkpoint(tmp_path, {"w": Entry("F32", np.array([1.0, np.nan], "<f4"))})
    run([str(tmp_path), str(tmp_path / "w.safetensors")], "program")
    assert "w has 1 NaNs in the checkpoint" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("options", "names"),
    [
        (["--exclude_frozen_parameters", "--only", "*.weight"], {"embed.weight", "layer.weight"}),
        (["--only", "lora_*", "--only", "scale"], {"lora_a", "scale"}),
        (["--only", "head.*"], {"head.weight"}),
    ],
)
def test_a_part_can_be_chosen(options: list[str], names: set[str], root: Path, tmp_path: Path) -> None:
    run([str(root), str(tmp_path / "part.safetensors"), *options], "program")
    assert load_file(tmp_path / "part.safetensors").keys() == names


def test_a_dry_run_shows_bytes_and_shards_and_writes_nothing(
    root: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run([str(root), str(tmp_path / "out"), "--max_shard_size", "1KB", "--dry-run"], "program")
    dry = capsys.readouterr().out
    assert not (tmp_path / "out").exists()
    run([str(root), str(tmp_path / "out"), "--max_shard_size", "1KB"], "program")
    for path in (tmp_path / "out").glob("*.safetensors"):
        nbytes = sum(tensor.nbytes for tensor in load_file(path).values())
        assert f"{path.name}: " in dry
        assert f"{nbytes} bytes" in dry


def test_an_interrupted_run_is_taken_up(
    root: Path, parameters: dict[str, Entry], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    arguments = [str(root), str(tmp_path / "out"), "--max_shard_size", "1KB"]
    written: list[str] = []
    replace = os.replace

    def interrupted(source: Path, target: Path) -> None:
        if target.suffix == ".safetensors":
            if len(written) == 2:
                raise KeyboardInterrupt
            written.append(target.name)
        replace(source, target)

    with monkeypatch.context() as patched:
        patched.setattr(os, "replace", interrupted)
        with pytest.raises(KeyboardInterrupt):
            run(arguments, "program")
    before = {path.name: path.stat().st_mtime_ns for path in (tmp_path / "out").glob("*.safetensors")}
    assert sorted(before) == sorted(written)
    run(arguments, "program")
    found: dict[str, torch.Tensor] = {}
    for path in (tmp_path / "out").glob("*.safetensors"):
        assert before.get(path.name, path.stat().st_mtime_ns) == path.stat().st_mtime_ns
        found.update(load_file(path))
    _assert_same(found, _expected(parameters))
    assert not list((tmp_path / "out").glob("*progress*"))


@pytest.mark.parametrize("at", [9, 40])
def test_a_damaged_header_of_a_written_file_is_found(
    at: int, root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    verify = zero_to_fp32._verify

    def damaged_before(path: Path, *arguments: Any) -> None:
        _flip(path, at)
        verify(path, *arguments)

    monkeypatch.setattr(zero_to_fp32, "_verify", damaged_before)
    with pytest.raises(ConversionError, match=r"model.safetensors: .*; remove it and run again"):
        run([str(root), str(tmp_path / "out")], "program")


def test_a_written_file_with_a_gap_is_found(root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    verify = zero_to_fp32._verify

    def lengthened_before(path: Path, *arguments: Any) -> None:
        with path.open("ab") as file:
            file.write(b"12345678")
        verify(path, *arguments)

    monkeypatch.setattr(zero_to_fp32, "_verify", lengthened_before)
    with pytest.raises(ConversionError, match="its tensors do not fill it; remove it and run again"):
        run([str(root), str(tmp_path / "out")], "program")


def test_a_bin_without_torch_is_refused_before_a_folder_is_made(
    root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "torch", None)
    with pytest.raises(ConversionError, match="requires torch"):
        run([str(root), str(tmp_path / "out"), "--format", "bin"], "program")
    assert not (tmp_path / "out").exists()


def test_an_output_folder_of_trainer_lists_its_checkpoints(root: Path, tmp_path: Path) -> None:
    for step in (100, 20):
        shutil.copytree(root, tmp_path / "run" / f"checkpoint-{step}")
    (tmp_path / "run" / "logs").mkdir()
    folder = tmp_path / "run"
    with pytest.raises(ConversionError) as raised:
        run([str(folder), str(tmp_path / "out")], "program")
    with pytest.raises(CheckpointError) as loaded:
        find_checkpoint(folder)
    for message in (str(raised.value), str(loaded.value)):
        assert "checkpoint-20, checkpoint-100; " in message
        assert message.endswith(f"such as {folder / 'checkpoint-100'}")
    assert find_checkpoint(folder / "checkpoint-20")[0].parent.name == "checkpoint-20"


def test_a_file_that_changed_since_the_interruption_is_found(
    root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    arguments = [str(root), str(tmp_path / "out"), "--max_shard_size", "1KB"]
    with monkeypatch.context() as patched:
        patched.setattr(zero_to_fp32, "_verify", lambda *_: (_ for _ in ()).throw(KeyboardInterrupt))
        with pytest.raises(KeyboardInterrupt):
            run(arguments, "program")
    path = next((tmp_path / "out").glob("model-00002*"))
    _flip(path, path.stat().st_size - 1)
    with pytest.raises(ConversionError, match=rf"{path.name}: differs from the written data in \w"):
        run(arguments, "program")


def test_files_of_another_checkpoint_are_not_resumed(root: Path, tmp_path: Path) -> None:
    other = {"w": _f32(4)}
    make_checkpoint(tmp_path / "other", other)
    run([str(root), str(tmp_path / "out"), "--max_shard_size", "1KB"], "program")
    with pytest.raises(ConversionError, match=r"has other weights: model-00001-of-.*; remove them"):
        run([str(tmp_path / "other"), str(tmp_path / "out")], "program")


def test_the_dropped_script_needs_neither_torch_nor_safetensors(
    root: Path, parameters: dict[str, Entry], tmp_path: Path
) -> None:
    drop_script(root)
    script = root / "zero_to_fp32.py"
    assert os.access(script, os.X_OK)
    code = (
        "import runpy, sys\nsys.modules['torch'] = sys.modules['safetensors'] = sys.modules['zeroaccel'] = None\n"
        "runpy.run_path(sys.argv[1], run_name='__main__')"
    )
    # `sys.argv` begins with the script's name, as if the interpreter had started the script itself.
    code = code.replace("runpy.run_path", "sys.argv = sys.argv[1:]\nrunpy.run_path").replace(
        "argv[1], run", "argv[0], run"
    )
    command = [sys.executable, "-c", code, str(script), ".", str(tmp_path / "out")]
    done = subprocess.run(command, cwd=root, capture_output=True, text=True, env=outside_any_job())
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("Processing zero checkpoint at global_step1\n")
    _assert_same(load_file(tmp_path / "out" / "model.safetensors"), _expected(parameters))
    done = subprocess.run([*command[:-1], "out.bin"], cwd=root, capture_output=True, text=True, env=outside_any_job())
    assert done.returncode == 1
    assert done.stderr.splitlines()[-1].endswith(
        "writing .bin requires torch; write safetensors instead, or install torch"
    )


def test_memory_is_a_few_chunks_for_any_size(tmp_path: Path) -> None:
    parameters = {f"layer{index}": Entry("F32", np.full(2_500_000, index, "<f4")) for index in range(16)}
    make_checkpoint(tmp_path, parameters, states=False)
    source = zero_to_fp32.read_source(tmp_path)
    tracemalloc.start()
    try:
        zero_to_fp32.convert(source, tmp_path / "model.safetensors", zero_to_fp32.Options(workers=2))
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert peak < 50 << 20  # the checkpoint has 160 MB
    assert torch.equal(load_file(tmp_path / "model.safetensors")["layer15"], torch.full((2_500_000,), 15.0))


# ---- refused checkpoints ----


def _flip(path: Path, offset: int) -> None:
    data = bytearray(path.read_bytes())
    data[offset] ^= 1
    path.write_bytes(data)


def _rank_file(folder: Path, rank: int) -> Path:
    return next(folder.glob(f"rank{rank:05d}-*"))


def _truncate(folder: Path) -> None:
    os.truncate(_rank_file(folder, 1), 1000)


def _escape(folder: Path) -> None:
    outside = folder.parent / "outside.safetensors"
    _rank_file(folder, 0).rename(outside)
    rewrite_manifest(folder, lambda body: body["files"][0].update(name="../outside.safetensors"))


def _overlap(body: dict[str, Any]) -> None:
    body["tensors"]["master/layer.weight"]["pieces"][1][1] -= 1


DAMAGE: list[tuple[Callable[[Path], object], str]] = [
    (lambda folder: (folder.parent / "latest").unlink(), r"latest: missing.*here: global_step1"),
    (
        lambda folder: (folder.parent / "latest").write_text("../ckpt"),
        r"latest: expected the name of a folder .* got '\.\./ckpt'; here: global_step1",
    ),
    (lambda folder: (folder.parent / "latest").write_text("gone"), r"gone: no such checkpoint; here: global_step1"),
    (lambda folder: (folder / "manifest.json").unlink(), r"manifest\.json: missing"),
    (lambda folder: _flip(folder / "manifest.json", 300), r"manifest\.json: damaged"),
    (lambda folder: (folder / "manifest.json").write_text("[1]"), r"manifest\.json: damaged"),
    (lambda folder: rewrite_manifest(folder, lambda body: body.update(version=3)), r"version 2 at most, got 3"),
    (lambda folder: rewrite_manifest(folder, lambda body: body["files"].pop()), r"1 files, expected|IndexError"),
    (lambda folder: rewrite_manifest(folder, lambda body: body["files"].append(body["files"][0])), r"3 files, "),
    (lambda folder: rewrite_manifest(folder, _overlap), r"master/layer\.weight: a misplaced piece at element"),
    (lambda folder: _rank_file(folder, 1).unlink(), r"rank00001-.*: missing, but the manifest names it"),
    (_truncate, r"rank00001-.*: expected \d+ bytes, got 1000"),
    (_escape, r"'\.\./outside\.safetensors' is not a plain name"),
    (lambda folder: _flip(_rank_file(folder, 0), 200_000), r"rank00000-.*: damaged between bytes 196608 and 262144"),
    (lambda folder: _flip(_rank_file(folder, 0), -1), r"rank00000-.*: damaged: its table"),
]


@pytest.mark.parametrize(("damage", "words"), DAMAGE, ids=[words for _, words in DAMAGE])
def test_damage_is_named_and_nothing_is_written(
    damage: Callable[[Path], object], words: str, root: Path, tmp_path: Path
) -> None:
    damage(root / "global_step1")
    with pytest.raises(ConversionError, match=words):
        run([str(root), str(tmp_path / "out")], "program")
    assert not (tmp_path / "out").exists() or list((tmp_path / "out").iterdir()) == []
    with pytest.raises(CheckpointError, match=words):
        get_fp32_state_dict_from_zero_checkpoint(root)


def test_a_disk_that_fails_while_it_is_read_is_named(
    root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def failing(*_: object) -> int:
        raise OSError(5, "Input/output error")

    source = zero_to_fp32.read_source(root)
    monkeypatch.setattr(os, "preadv", failing)
    with pytest.raises(ConversionError, match=r"rank0000\d-.*safetensors: cannot be read \(Input/output error\)"):
        zero_to_fp32.convert(source, tmp_path / "out", zero_to_fp32.Options())


def test_a_full_disk_is_named_and_leaves_nothing(root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object) -> int:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    source = zero_to_fp32.read_source(root)
    with monkeypatch.context() as patched:
        patched.setattr(os, "pwrite", full)
        with pytest.raises(ConversionError, match="No space left on device; output is incomplete"):
            zero_to_fp32.convert(source, tmp_path / "out", zero_to_fp32.Options())
    assert list((tmp_path / "out").iterdir()) == []


def test_a_full_disk_is_named_for_pickled_files_too(root: Path, tmp_path: Path) -> None:
    source = zero_to_fp32.read_source(root)
    limit = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1000, limit[1]))
    try:
        with pytest.raises(ConversionError, match="File too large; output is incomplete"):
            zero_to_fp32.convert(source, tmp_path / "out.bin", zero_to_fp32.Options())
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limit)
    assert not list(tmp_path.glob("out.bin*"))


def test_a_file_that_the_manifest_does_not_name_is_ignored(
    root: Path, parameters: dict[str, Entry], tmp_path: Path
) -> None:
    folder = root / "global_step1"
    (folder / "rank00002-of-00003-ffffffff.safetensors").write_bytes(_rank_file(folder, 0).read_bytes())
    run([str(root), str(tmp_path / "out")], "program")
    _assert_same(load_file(tmp_path / "out" / "model.safetensors"), _expected(parameters))


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ("--dtype int8", "--dtype: invalid choice: 'int8'"),
        ("--max_shard_size big", "expected a size such as 5GB or 500MiB, got 'big'"),
        ("--workers 0", "expected a number above 0, got '0'"),
        ("--onyl x", "unrecognized arguments: --onyl"),
        ("--safe_serialization --format bin", "contradict each other"),
    ],
)
def test_a_wrong_option_is_one_message_and_exit_code_2(options: str, words: str, root: Path, tmp_path: Path) -> None:
    said = typed("zero-to-fp32", root, tmp_path / "out", *options.split(), code=2)
    assert said.err.startswith("zeroaccel: ")
    assert said.err.count("\n") == 1
    assert words in said.err


def test_a_pattern_without_a_match_lists_the_tensors(root: Path, tmp_path: Path) -> None:
    with pytest.raises(ConversionError, match=r"the options select no tensor; the checkpoint has embed\.weight, "):
        run([str(root), str(tmp_path / "out"), "--only", "lorra_*"], "program")


# ---- Python functions ----


class _Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(17, 5)
        self.body = nn.Linear(5, 5)
        self.head = nn.Linear(5, 17, bias=False)
        self.head.weight = self.embed.weight
        self.register_buffer("count", torch.tensor(0))


def _of_model(model: nn.Module) -> dict[str, Entry]:
    return {name: Entry("F32", param.detach().numpy().copy()) for name, param in model.named_parameters()}


def test_a_model_is_filled_and_stays_tied(tmp_path: Path) -> None:
    source, target = _Tied(), _Tied().to(torch.bfloat16)
    buffers = {"count": Entry("I64", np.array(9, "<i8"))}
    make_checkpoint(tmp_path, _of_model(source), buffers=buffers, ties={"head.weight": "embed.weight"})
    assert load_state_dict_from_zero_checkpoint(target, tmp_path) is target
    assert target.head.weight is target.embed.weight
    assert target.count == 9
    for name, param in target.named_parameters():
        assert torch.equal(param, source.get_parameter(name).to(torch.bfloat16)), name


def test_every_difference_from_the_model_is_named_and_nothing_copied(tmp_path: Path) -> None:
    model = _Tied()
    entries = _of_model(model)
    entries["other"] = entries.pop("body.bias")
    entries["body.weight"] = _f32(4, 5)
    make_checkpoint(tmp_path, entries, ties={"head.weight": "embed.weight"})
    before = model.embed.weight.detach().clone()
    with torch.no_grad():
        model.embed.weight.add_(1)
    with pytest.raises(CheckpointError) as caught:
        load_state_dict_from_zero_checkpoint(model, tmp_path)
    for words in (
        "body.weight is [4, 5] in the checkpoint and [5, 5] in the model",
        "body.bias is not in the checkpoint",
        "count is not in the checkpoint",
        "other is not in the model",
    ):
        assert words in str(caught.value)
    assert torch.equal(model.embed.weight, before + 1)


def test_parameters_that_were_left_out_are_not_missed(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    model = nn.Linear(3, 2)
    bias = Entry("F32", np.zeros(2, "<f4"), trainable=False, saved=False)
    make_checkpoint(tmp_path, {"weight": _f32(2, 3), "bias": bias})
    kept = model.bias.detach().clone()
    load_state_dict_from_zero_checkpoint(model, tmp_path)
    assert torch.equal(model.bias, kept)
    convert_zero_checkpoint_to_fp32_state_dict(tmp_path, tmp_path / "out")
    assert "saved without them: 1 frozen parameters" in capsys.readouterr().out


def test_conversion_by_call_has_the_options_of_the_command(root: Path, tmp_path: Path) -> None:
    made = convert_zero_checkpoint_to_fp32_state_dict(
        root, tmp_path / "out", max_shard_size="1KB", safe_serialization=False, tag="global_step1", dtype="bf16"
    )
    assert all(path.name.startswith("pytorch_model-0000") for path in made)
    found = {name: tensor for path in made for name, tensor in torch.load(path, weights_only=True).items()}
    assert found["layer.weight"].dtype == torch.bfloat16
    assert found["count"].dtype == torch.int64
    with pytest.raises(UsageError, match="expected a size"):
        convert_zero_checkpoint_to_fp32_state_dict(root, tmp_path / "other", max_shard_size="")


# ---- `zeroaccel checkpoint` ----


def test_inspect_shows_checkpoints_files_and_latest(root: Path) -> None:
    make_checkpoint(root, {"w": _f32(3)}, tag="broken")
    (root / "broken" / "manifest.json").unlink()
    shown = typed("checkpoint inspect", root).out
    assert "global_step1: zero stage 3, world_size 2, step 1" in shown
    assert "7 parameters (1 frozen, 1 ties)" in shown
    assert f"rank 1: {_rank_file(root / 'global_step1', 1).name}" in shown
    assert "broken: not valid: " in shown
    assert shown.endswith("latest: broken\n")


def test_verify_finds_a_flipped_byte(root: Path) -> None:
    assert "global_step1: valid" in typed("checkpoint verify", root).out
    _flip(_rank_file(root / "global_step1", 1), 100_000)
    said = typed("checkpoint verify", root, code=1)
    assert "damaged between bytes 65536 and 131072" in said.out
    assert "damaged or incomplete: global_step1" in said.err


@pytest.mark.parametrize("world_size", [1, 3])
def test_a_resharded_checkpoint_has_the_same_values(
    world_size: int, root: Path, parameters: dict[str, Entry], tmp_path: Path
) -> None:
    typed("checkpoint reshard", root, tmp_path / "new", "--world_size", world_size)
    typed("checkpoint verify", tmp_path / "new")
    body = json.loads((tmp_path / "new" / "global_step1" / "manifest.json").read_text())["manifest"]
    assert body["world_size"] == world_size == len(body["files"])
    assert "state/exp_avg/layer.weight" in body["tensors"]
    state = get_fp32_state_dict_from_zero_checkpoint(tmp_path / "new")
    expected = _expected(parameters)
    _assert_same(state, {**expected, "head.weight": expected["embed.weight"]})


def test_resharding_a_damaged_checkpoint_leaves_none(root: Path, tmp_path: Path) -> None:
    _flip(_rank_file(root / "global_step1", 0), 100_000)
    typed("checkpoint reshard", root, tmp_path / "new", "--world_size", 3, code=1)
    assert not list((tmp_path / "new").glob("*/manifest.json"))


def test_the_program_knows_the_wrappers_that_the_engine_knows() -> None:
    """It stands alone, so it has its own list."""
    assert set(zero_to_fp32.WRAPPERS) == module_names._SEGMENTS
