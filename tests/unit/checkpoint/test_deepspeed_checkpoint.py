"""Checkpoints that DeepSpeed wrote: read back value by value, converted, resumed, and damaged."""

from __future__ import annotations

import collections
import io
import os
import pickle
import shutil
import tarfile
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.support.commands import typed
from zeroaccel.checkpoint.formats.deepspeed_checkpoint import (
    DeepSpeedCheckpoint,
    is_deepspeed_checkpoint,
    open_deepspeed_checkpoint,
    open_source,
)
from zeroaccel.checkpoint.formats.deepspeed_resume import manifest_of, open_to_resume
from zeroaccel.checkpoint.formats.torch_file import TorchFile
from zeroaccel.checkpoint.formats.torch_pickle import load_pickle
from zeroaccel.checkpoint.plain_codec import decode
from zeroaccel.checkpoint.tensor_store import TorchStore
from zeroaccel.checkpoint.zero_to_fp32 import ConversionError, Options, read_tensors, select
from zeroaccel.errors import CheckpointError

DATA = Path(__file__).parents[2] / "data" / "deepspeed"
ALL = sorted(path.name.removesuffix(".tar.xz") for path in DATA.glob("*.tar.xz"))
MUON = [name for name in ALL if "muon" in name]
CASES = [name for name in ALL if name not in MUON]
MATRICES = ["embed.weight", "up.weight", "down.weight"]
VECTORS = ["scale", "norm.weight", "norm.bias", "up.bias", "down.bias"]
GROUP_OF = {**dict.fromkeys(MATRICES, 0), **dict.fromkeys(VECTORS, 1)}

Unpack = Callable[[str], Path]


@pytest.fixture
def unpack(tmp_path: Path) -> Unpack:
    def unpacked(name: str) -> Path:
        with tarfile.open(DATA / f"{name}.tar.xz") as archive:
            archive.extractall(tmp_path, filter="data")
        return tmp_path / name

    return unpacked


def truth_of(folder: Path) -> dict[str, Tensor]:
    found: dict[str, Tensor] = torch.load(folder / "truth.pt", weights_only=True)
    return found


def store_of(checkpoint: DeepSpeedCheckpoint) -> TorchStore:
    return TorchStore(checkpoint.folder, manifest_of(checkpoint), checkpoint.files)


def value(checkpoint: DeepSpeedCheckpoint, key: str) -> Tensor:
    return store_of(checkpoint).fetch(key).float()


def likeness(one: Tensor, other: Tensor) -> float:
    return torch.nn.functional.cosine_similarity(one.flatten().double(), other.flatten().double(), 0).item()


def steps_of(name: str) -> float:
    """Returns the step count of a checkpoint: at stage 0, 16-bit optimizers make one more step when created."""
    return 4.0 if name in ("stage0_bf16_w1", "stage0_fp16_w2") else 3.0


def tag_folder(root: Path) -> Path:
    return root / (root / "latest").read_text()


def test_there_are_checkpoints_of_all_kinds() -> None:
    assert (len(CASES), len(MUON)) == (17, 5)
    assert sum(path.stat().st_size for path in DATA.iterdir()) < 250_000


@pytest.mark.parametrize("name", CASES)
def test_weights_are_those_in_memory(name: str, unpack: Unpack) -> None:
    folder = unpack(name)
    truth = truth_of(folder)
    checkpoint = open_deepspeed_checkpoint(folder)
    weights = {weight.name: weight for weight in checkpoint.weights() if not weight.is_buffer}
    assert {f"module/{fqn}" for fqn in weights} == {key for key in truth if key.startswith("module/")}
    for fqn, weight in weights.items():
        key = checkpoint.weight_key(fqn)
        assert key is not None
        read, held = value(checkpoint, key), truth[f"module/{fqn}"]
        assert torch.equal(read.to(held.dtype), held), fqn
        assert tuple(held.shape) == weight.shape
        assert torch.equal(read, truth.get(f"fp32/{fqn}", read)), fqn
        frozen = fqn in ("held.weight", "held.bias", "empty")
        if fqn in (*MATRICES, *VECTORS) and "fp32" not in name:  # the fp32 masters, not the 16-bit copies
            assert key == f"master/{fqn}"
            assert weight.dtype == "F32"
        if not name.startswith("stage0_fp32"):
            assert weight.excludable is frozen
        assert (read - truth[f"plain/fp32/{fqn}"]).abs().max().item() < 0.03 if read.numel() else True
    assert checkpoint.left_out == []
    assert dict(checkpoint.ties) == {"head.weight": "embed.weight"}
    assert {weight.name for weight in checkpoint.weights() if weight.is_buffer} == {"offset", "seen"}
    store = store_of(checkpoint)
    assert torch.equal(store.fetch("buffer/offset"), torch.linspace(0.1, 0.3, 3))
    assert torch.equal(store.fetch("buffer/seen"), torch.tensor(41))


@pytest.mark.parametrize("name", CASES)
def test_optimizer_states_are_those_in_memory(name: str, unpack: Unpack) -> None:
    folder = unpack(name)
    truth = truth_of(folder)
    checkpoint = open_deepspeed_checkpoint(folder)
    checkpoint.name_positions([MATRICES, VECTORS])
    assert set(checkpoint.states.tensors) == {
        f"state/{kind}/{n}" for kind in ("exp_avg", "exp_avg_sq") for n in GROUP_OF
    }
    for key in checkpoint.states.tensors:
        _, kind, fqn = key.split("/", 2)
        read = value(checkpoint, key)
        assert torch.equal(read, truth.get(f"{kind}/{fqn}", read)), key
        assert likeness(read, truth[f"plain/{kind}/{fqn}"]) > 0.98, key
    for fqn, scalars in checkpoint.states.scalars.items():
        assert list(scalars) == ["step"], fqn
        record = checkpoint.record(scalars["step"])
        dtype, shape, data = record.dtype, record.shape, checkpoint.read(record)
        assert (dtype, shape, data.view("<f4").tolist()) == ("F32", (), [steps_of(name)])
    assert [sorted(group.names) for group in checkpoint.groups] == [sorted(MATRICES), sorted(VECTORS)]
    if name == "stage1_elastic_w2":
        return  # the file has no hyperparameters
    assert [group.options["weight_decay"] for group in checkpoint.groups] == [0.1, 0.0]
    assert [group.options["lr"] for group in checkpoint.groups] == [0.01, 0.02]


@pytest.mark.parametrize("name", MUON)
def test_momentum_of_muon(name: str, unpack: Unpack) -> None:
    """At stages 1 and 2, a rank has the momentum of all matrices with elements in its partition, as a whole."""
    folder = unpack(name)
    checkpoint = open_deepspeed_checkpoint(folder)
    truth, manifest = truth_of(folder), manifest_of(checkpoint)
    assert manifest.optimizer is not None
    assert manifest.optimizer["type"] == "Muon"
    momenta = {f"state/momentum_buffer/{matrix}" for matrix in ("up.weight", "down.weight")}
    vectors = {f"state/{kind}/{n}" for kind in ("exp_avg", "exp_avg_sq") for n in ("embed.weight", *VECTORS)}
    assert set(checkpoint.states.tensors) == momenta | vectors
    for key in checkpoint.states.tensors:
        read = value(checkpoint, key)
        assert likeness(read, truth[f"plain/{key.removeprefix('state/')}"]) > (0.98 if "bf16" in name else 1 - 1e-6), (
            key
        )
    assert [group.options["use_muon"] for group in checkpoint.groups] == [True, False]


@pytest.mark.parametrize("name", ["stage1_fp32_w2", "stage2_fp16_w3", "stage3_sub_groups_w3"])
def test_intervals_are_slices_of_the_full_tensor(name: str, unpack: Unpack) -> None:
    checkpoint = open_deepspeed_checkpoint(unpack(name))
    whole, store = value(checkpoint, "master/up.weight").flatten(), store_of(checkpoint)
    for start in range(whole.numel() + 1):
        for length in range(whole.numel() - start + 1):
            part = torch.full((length,), -1.0)
            store.fill("master/up.weight", start, part)
            store.read()
            assert torch.equal(part, whole[start : start + length])
    with pytest.raises(CheckpointError, match=r"master/up.weight.*elements up to 16"):
        store.fill("master/up.weight", 10, torch.empty(6))


@pytest.mark.parametrize("name", ["stage2_fp16_w3", "stage0_fp16_w2"])
def test_progress_is_read(name: str, unpack: Unpack) -> None:
    checkpoint = open_deepspeed_checkpoint(unpack(name))
    assert checkpoint.counters == {
        "global_steps": 3,
        "global_samples": 3 * checkpoint.world_size,
        "skipped_steps": 0,
    }
    assert checkpoint.lr_scheduler == {"last_batch_iteration": 2}
    assert checkpoint.client_state["epoch"] == 7
    assert checkpoint.loss_scaler is not None
    assert checkpoint.loss_scaler["cur_scale"] == {"stage2_fp16_w3": 16, "stage0_fp16_w2": 8}[name]
    assert checkpoint.version == "0.19.8"


@pytest.mark.parametrize("name", CASES)
def test_a_manifest_of_it_reads_like_ours(name: str, unpack: Unpack) -> None:
    folder = unpack(name)
    truth = truth_of(folder)
    _, store = open_to_resume(folder, scheduler_type="WarmupLR", group_of=GROUP_OF)
    manifest = store.manifest
    assert manifest.optimizer is not None
    assert manifest.optimizer["type"] == "AdamW"
    with store:
        into = torch.full((7,), torch.nan)
        store.fill(
            "master/up.weight" if manifest.weight_key("up.weight") == "master/up.weight" else "value/up.weight", 4, into
        )
        store.read()
        assert torch.equal(into.to(truth["module/up.weight"].dtype), truth["module/up.weight"].flatten()[4:11])
        step = decode(manifest.optimizer["scalars"]["up.bias"], store.fetch)
        client_state = decode(manifest.client_state, store.fetch)
        scheduler = decode(manifest.lr_scheduler, store.fetch)
    assert step == {"step": torch.tensor(steps_of(name))}
    assert client_state["epoch"] == 7
    assert client_state["history"][0] == 0.5
    assert client_state["history"][1].tolist() == [0, 1, 2]
    assert scheduler == {"type": "WarmupLR", "state": {"last_batch_iteration": 2}}
    assert manifest.counters["micro_steps"] == 3
    assert all(parameter.group == GROUP_OF.get(fqn) for fqn, parameter in manifest.parameters.items())


def test_a_dynamic_loss_scale_goes_on(unpack: Unpack) -> None:
    manifest = manifest_of(open_deepspeed_checkpoint(unpack("stage2_fp16_w3")))
    assert manifest.loss_scale["type"] == "DynamicLossScale"
    assert manifest.loss_scale["state"] == {"value": 16.0, "steps": 3, "last_overflow": -1, "tolerance": 2}


def test_states_without_names_must_fit_the_groups(unpack: Unpack) -> None:
    checkpoint = open_deepspeed_checkpoint(unpack("stage0_fp32_w1"))
    with pytest.raises(CheckpointError, match=r"\[8\].*\[3, 5\]"):
        checkpoint.name_positions([MATRICES + VECTORS])
    with pytest.raises(CheckpointError, match=r"exp_avg of up.weight: expected shape \(5, 3\), got \(7, 3\)"):
        checkpoint.name_positions([["up.weight", "embed.weight", "down.weight"], VECTORS])


@pytest.mark.parametrize("name", ["stage1_bf16_optimizer_w3", "stage2_round_robin_w2", "stage3_bf16_w2_universal"])
def test_conversion_works_as_for_our_checkpoints(name: str, unpack: Unpack) -> None:
    folder = unpack(name)
    checkpoint = open_deepspeed_checkpoint(folder)
    source = open_source(folder)
    state = read_tensors(source, select(source, Options())).state_dict()
    assert {"head.weight", "embed.weight", "held.weight", "offset", "seen"} <= set(state)
    for weight in checkpoint.weights():
        if not weight.is_buffer:
            key = checkpoint.weight_key(weight.name)
            assert key is not None
            assert torch.equal(state[weight.name], value(checkpoint, key)), weight.name
    assert torch.equal(state["head.weight"], state["embed.weight"])
    assert "held.weight" not in read_tensors(source, select(source, Options(exclude_frozen=True))).state_dict()


# -- refused checkpoints


class Bomb:
    def __init__(self, marker: Path) -> None:
        self.marker = marker

    def __reduce__(self) -> Any:
        return os.mkdir, (str(self.marker),)


def test_a_pickle_that_runs_code_is_refused_by_name(unpack: Unpack, tmp_path: Path) -> None:
    folder, marker = unpack("stage2_fp16_w3"), tmp_path / "exploded"
    target = tag_folder(folder) / "zero_pp_rank_1_mp_rank_00_optim_states.pt"
    torch.save({"optimizer_state_dict": Bomb(marker)}, target)
    with pytest.raises(CheckpointError, match=rf"{target.name}: its pickle refers to (posix|nt).mkdir"):
        open_deepspeed_checkpoint(folder)
    with pytest.raises(ConversionError, match="mkdir"):
        open_source(folder)
    assert not marker.exists()
    torch.load(target, weights_only=False)  # shows that the pickle does run code
    assert marker.exists()


@pytest.mark.parametrize(
    ("module", "name"),
    [
        *(("builtins", name) for name in ("eval", "exec", "getattr", "__import__", "open")),
        *(("deepspeed.runtime.zero.config", "DeepSpeedZeroConfig"), ("torch", "load"), ("os", "system")),
        *(("torch.storage", "_load_from_bytes"), ("torch._utils", "_rebuild_device_tensor_from_numpy")),
        *(("functools", "partial"), ("numpy.core.multiarray", "_reconstruct"), ("collections", "abc")),
    ],
)
def test_nothing_else_is_admitted(module: str, name: str) -> None:
    content = b"\x80\x02c" + f"{module}\n{name}\n".encode() + b"."
    with pytest.raises(CheckpointError, match=rf"refers to {module}.{name}"):
        load_pickle(content, "a.pt")


def test_a_nested_name_does_not_bypass_the_check() -> None:
    content = b"\x80\x04\x8c\x0bcollections\x8c\x15OrderedDict.__class__\x93."
    with pytest.raises(CheckpointError, match=r"refers to collections.OrderedDict.__class__"):
        load_pickle(content, "a.pt")


def test_plain_types_are_admitted_as_they_are() -> None:
    plain = {
        "a": [1, 2.5, None, True, "text", b"bytes", (1, 2), {3}, frozenset({4}), 1j],
        "ordered": collections.OrderedDict(x=1),
        "counted": collections.Counter("aab"),
        "default": dict(collections.defaultdict(int, {5: 6})),
    }
    for protocol in (2, 3, 4, 5):
        assert load_pickle(pickle.dumps(plain, protocol), "a.pt") == plain


@pytest.mark.parametrize("shape", [(3, 4), (), (0, 3), (1, 5, 2)])
@pytest.mark.parametrize("how", ["whole", "transposed", "strided", "expanded"])
def test_tensors_of_any_layout_are_found(shape: tuple[int, ...], how: str, tmp_path: Path) -> None:
    numel = torch.Size(shape).numel()
    base = torch.arange(2 * numel + 3, dtype=torch.float32)
    tensor = base[3 : 3 + numel].view(shape)
    if how == "transposed":
        tensor = tensor.permute(tuple(range(len(shape) - 1, -1, -1)))
    elif how == "strided":
        tensor = base[3 : 3 + 2 * numel : 2].view(*shape) if numel and len(shape) == 1 else base[3 : 3 + 2 * numel : 2]
    elif how == "expanded":
        tensor = tensor.expand(2, *shape)
    torch.save({"t": tensor}, tmp_path / "t.pt")
    file = TorchFile(tmp_path / "t.pt")
    stored = file.content["t"]
    assert stored.shape == tuple(tensor.shape)
    runs = list(file.runs(stored))
    parts = [torch.frombuffer(file.read(offset, 4 * length), dtype=torch.float32) for _, length, offset in runs]
    assert (torch.cat(parts) if parts else torch.empty(0)).tolist() == tensor.flatten().tolist()
    ends = [start + length for start, length, _ in runs]
    assert [start for start, _, _ in runs] == [0, *ends][: len(runs)]


# -- damage


@pytest.mark.parametrize(
    ("name", "gone"),
    [
        ("stage2_fp16_w3", "zero_pp_rank_1_mp_rank_00_optim_states.pt"),
        ("stage2_fp16_w3", "mp_rank_00_model_states.pt"),
        ("stage1_bf16_optimizer_w3", "bf16_zero_pp_rank_2_mp_rank_00_optim_states.pt"),
        ("stage3_fp32_w3", "zero_pp_rank_0_mp_rank_00_model_states.pt"),
        ("stage3_fp32_w3", "zero_pp_rank_2_mp_rank_00_optim_states.pt"),
    ],
)
def test_a_missing_file_is_named(name: str, gone: str, unpack: Unpack) -> None:
    folder = unpack(name)
    (tag_folder(folder) / gone).unlink()
    with pytest.raises(CheckpointError, match=rf"incomplete.*{gone}"):
        open_deepspeed_checkpoint(folder)


def test_missing_parts_of_a_universal_checkpoint_are_named(unpack: Unpack) -> None:
    folder = unpack("stage3_bf16_w2_universal")
    path = folder / (folder / "latest_universal").read_text() / "zero" / "up.bias" / "fp32.pt"
    path.unlink()
    with pytest.raises(CheckpointError, match=r"up.bias"):
        open_deepspeed_checkpoint(folder)


def test_all_optimizer_files_missing_is_no_checkpoint_of_stage_0(unpack: Unpack) -> None:
    folder = unpack("stage2_fp16_w3")
    for path in tag_folder(folder).glob("*optim*"):
        path.unlink()
    with pytest.raises(CheckpointError, match=r"missing: zero_pp_rank_0.*, zero_pp_rank_1.*, zero_pp_rank_2"):
        open_deepspeed_checkpoint(folder)


def test_files_of_other_saves_are_named(unpack: Unpack) -> None:
    folder = tag_folder(unpack("stage2_fp16_w3"))
    shutil.copy(
        folder / "zero_pp_rank_0_mp_rank_00_optim_states.pt", folder / "zero_pp_rank_3_mp_rank_00_optim_states.pt"
    )
    with pytest.raises(CheckpointError, match="saved by 3 ranks; has files of another save: zero_pp_rank_3"):
        open_deepspeed_checkpoint(folder)


@pytest.mark.parametrize("kept", [0, 10, 1000, -1, -30])
def test_a_file_that_is_cut_off_is_named(kept: int, unpack: Unpack) -> None:
    folder = unpack("stage3_fp32_w3")
    path = tag_folder(folder) / "zero_pp_rank_1_mp_rank_00_optim_states.pt"
    path.write_bytes(path.read_bytes()[:kept])
    with pytest.raises(CheckpointError, match=r"zero_pp_rank_1_mp_rank_00_optim_states.pt: cut off"):
        open_deepspeed_checkpoint(folder)


def test_the_command_looks_into_it_and_checks_it(unpack: Unpack) -> None:
    folder = unpack("stage3_fp32_w3")
    shown = typed("checkpoint inspect", folder).out
    assert shown.startswith("global_step3: DeepSpeed 0.")
    assert "zero stage 3, world_size 3, step 3\n" in shown
    assert shown.count("  zero_pp_rank_1_mp_rank_00_") == 2
    assert typed("checkpoint verify", folder, "--tag", "global_step3").out.startswith("global_step3: valid, ")
    path = tag_folder(folder) / "zero_pp_rank_1_mp_rank_00_optim_states.pt"
    content = bytearray(path.read_bytes())
    piece = next(p for p in open_deepspeed_checkpoint(folder).tensors["master/up.weight"].pieces if p[0] == 1)
    content[piece[3]] ^= 1
    path.write_bytes(content)
    said = typed("checkpoint verify", folder, code=1)
    assert "zero_pp_rank_1_mp_rank_00_optim_states.pt: damaged" in said.err
    assert "valid" not in said.out


def test_a_flipped_byte_is_never_read(unpack: Unpack) -> None:
    folder = unpack("stage3_fp32_w3")
    path = tag_folder(folder) / "zero_pp_rank_1_mp_rank_00_optim_states.pt"
    _, _, length, offset = next(
        piece for piece in open_deepspeed_checkpoint(folder).tensors["master/up.weight"].pieces if piece[0] == 1
    )
    content = bytearray(path.read_bytes())
    content[offset + 4 * length - 1] ^= 1
    path.write_bytes(content)
    checkpoint = open_deepspeed_checkpoint(folder)
    store = store_of(checkpoint)
    for read in (lambda: store.fetch("master/up.weight"), checkpoint.verify):
        with pytest.raises(CheckpointError, match=r"zero_pp_rank_1_mp_rank_00_optim_states.pt: damaged"):
            read()
    assert store.fetch("state/exp_avg/up.weight").shape == (5, 3)  # other records are intact


def test_files_that_do_not_belong_together_are_noticed(unpack: Unpack) -> None:
    folder, other = tag_folder(unpack("stage3_fp32_w3")), tag_folder(unpack("stage3_sub_groups_w3"))
    for path in other.glob("bf16_*"):
        shutil.copy(path, folder / path.name.removeprefix("bf16_"))
    with pytest.raises(CheckpointError, match="sub-groups: expected of"):
        open_deepspeed_checkpoint(folder)


@pytest.mark.parametrize(
    ("name", "what"),
    [
        ("layer_00-model_states.pt", r"layer_00-model_states\.pt: cut off"),
        ("expp_rank_0_mp_rank_00_optim_states.pt", "mp_rank_00_model_states.pt or .* is missing"),
        ("layer_0_expert_1_mp_rank_00_model_states.pt", "layer_0_expert_0_mp_rank_00_model_states.pt is missing"),
        ("mp_rank_01_model_states.pt", r"optimizer files of mp_rank_01: expected those of ranks \[0, 1\]"),
    ],
)
def test_incomplete_files_of_other_parallelism_are_named(name: str, what: str, unpack: Unpack) -> None:
    folder = unpack("stage1_fp32_w2")
    (tag_folder(folder) / name).write_bytes(b"")
    if name.startswith("expp"):
        (tag_folder(folder) / "mp_rank_00_model_states.pt").unlink()
    with pytest.raises(CheckpointError, match=what):
        open_deepspeed_checkpoint(folder)
    with pytest.raises(ConversionError, match=what):
        open_source(folder)


def test_compressed_and_legacy_files_are_refused(tmp_path: Path) -> None:
    torch.save({"a": torch.ones(3)}, tmp_path / "old.pt", _use_new_zipfile_serialization=False)
    with pytest.raises(CheckpointError, match=r"old.pt: .*not a file of torch.save's zip format"):
        TorchFile(tmp_path / "old.pt")
    buffer = io.BytesIO()
    torch.save({"a": torch.ones(300)}, buffer)
    with (
        zipfile.ZipFile(buffer) as source,
        zipfile.ZipFile(tmp_path / "packed.pt", "w", zipfile.ZIP_DEFLATED) as target,
    ):
        for record in source.infolist():
            target.writestr(record.filename, source.read(record))
    with pytest.raises(CheckpointError, match="is compressed"):
        TorchFile(tmp_path / "packed.pt")


def test_folders_are_distinguished(unpack: Unpack, tmp_path: Path) -> None:
    folder = unpack("stage1_fp32_w2")
    assert is_deepspeed_checkpoint(folder)
    assert is_deepspeed_checkpoint(folder, "global_step3")
    assert is_deepspeed_checkpoint(tag_folder(folder))
    assert not is_deepspeed_checkpoint(folder, "global_step4")
    (tag_folder(folder) / "manifest.json").write_text("{}")
    assert not is_deepspeed_checkpoint(folder)
    with pytest.raises(CheckpointError, match=r"no such checkpoint.*global_step3"):
        open_deepspeed_checkpoint(folder, "global_step4")
    (folder / "latest").unlink()
    with pytest.raises(CheckpointError, match=r"latest: cannot be read.*global_step3.*pass a tag"):
        open_deepspeed_checkpoint(folder)
    with pytest.raises(CheckpointError, match="checkpoint tag"):
        open_deepspeed_checkpoint(folder, "../elsewhere")


def test_a_scrambled_universal_checkpoint_is_refused(unpack: Unpack) -> None:
    folder = unpack("stage1_fp32_w2_universal")
    path = next(folder.rglob("mp_rank_00_model_states.pt"))
    model = torch.load(path, weights_only=True)
    model["ds_config"]["zero_optimization"]["round_robin_gradients"] = True
    torch.save(model, path)
    with pytest.raises(CheckpointError, match="mixed up the values"):
        open_deepspeed_checkpoint(folder)


def test_the_store_reports_unreadable_files(unpack: Unpack) -> None:
    checkpoint = open_deepspeed_checkpoint(unpack("stage2_aligned_w2"))
    store = store_of(checkpoint)
    store.fill("master/embed.weight", 0, torch.empty(21))
    shutil.rmtree(checkpoint.folder)
    with pytest.raises(CheckpointError, match="cannot be read"):
        store.read()
