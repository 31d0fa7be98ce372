"""The receiver: accepted and refused packets, and weights that stay unchanged until a version is complete."""

from __future__ import annotations

import errno
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from zeroaccel.ops import changed
from zeroaccel.ops.changed import mark_changed
from zeroaccel.rollout import receiver as receiver_module
from zeroaccel.rollout.receiver import (
    Packet,
    WeightReceiver,
    WeightsRefusedError,
    encode_high_bytes,
    encode_positions,
    receive_files,
    refusal_file,
    write_packet,
)
from zeroaccel.zero.changed_bits import ChangedBits
from zeroaccel.zero.layout import FlatRange


def packet(values: Tensor, version: int = 1, since: int | None = None, name: str = "w", **changes: Any) -> Packet:
    shape = changes.pop("shape", list(values.shape))
    entry = {"name": name, "shape": shape, "dtype": str(values.dtype)[6:], "offset": 0, "numel": values.numel()}
    entry |= {"start": changes.pop("start", 0), "cut": [values.numel(), 1, 0], "positions": 0}
    head = {"version": version, "since": since, "sender": 0, "senders": 1, "index": 0, "last": True, "ties": {}}
    return Packet({**head, "tensors": [entry], **changes}, values.reshape(-1).view(torch.uint8))


@pytest.mark.parametrize("numel", [1, 7, 300, 70000])
def test_positions_come_back(numel: int) -> None:
    generator = torch.Generator().manual_seed(numel)
    for density in (0.0, 0.001, 0.02, 1.0):
        before = torch.zeros(numel, dtype=torch.bfloat16)
        after = torch.where(torch.rand(numel, generator=generator) < density, 1.0, 0.0).bfloat16()
        bits = torch.zeros(-(-numel // 8), dtype=torch.uint8)
        mark_changed(before, after, bits)
        on_device = torch.zeros_like(bits)
        _by_operations(before, after, on_device)
        assert torch.equal(bits, on_device)
        marks = ChangedBits(FlatRange(64, 64 + numel), torch.device("cpu"), has_bits=True)
        marks.compare(before, after)
        found = marks.positions()
        assert found is not None
        assert torch.equal(found, after.nonzero().view(-1))
        encoded = encode_positions(found)
        assert torch.equal(receiver_module._decode_positions(encoded), found)
        assert encoded.numel() <= found.numel() + numel / 255 + 1
        if numel > 2:
            marks.add(FlatRange(0, 66))
            marks.add(FlatRange(64 + numel - 1, 10**9))
            expected = sorted({0, 1, numel - 1, *after.nonzero().view(-1).tolist()})
            more = marks.positions()
            assert more is not None
            assert more.tolist() == expected
        marks.clear()
        assert marks.bits is None


@pytest.mark.parametrize("numel", [1, 2, 31, 5000])
@pytest.mark.parametrize("kinds", [1, 15, 16, 256])
def test_high_bytes_come_back(numel: int, kinds: int) -> None:
    high = torch.randint(0, kinds, (numel,), generator=torch.Generator().manual_seed(numel)).to(torch.uint8) * 7
    coded = encode_high_bytes(high)
    assert torch.equal(receiver_module._decode_high_bytes(coded, numel), high)
    if kinds <= 15:
        assert coded.numel() == 15 + (numel + 1) // 2


def _by_operations(before: Tensor, after: Tensor, bits: Tensor) -> None:
    """Marks changes by torch operations, the path for devices."""
    changed._mark_in_torch(before.view(torch.int16), after.view(torch.int16), bits)


REFUSED = [
    (packet(torch.ones(3), name="v"), "this receiver has no tensor 'v'"),
    (packet(torch.ones(4)), r"w: expected float32 \[3\], got float32 \[4\]"),
    (packet(torch.ones(3).bfloat16()), r"w: expected float32 \[3\], got bfloat16 \[3\]"),
    (
        packet(torch.ones(3), since=4),
        "version 1 is a delta to version 4: expected version 4 here, got None; send all weights",
    ),
    (packet(torch.ones(3), index=1), "version 1, sender 0: expected packet 0, got 1"),
    (Packet(packet(torch.ones(3)).manifest, None), "expected a packet with a payload"),
]


@pytest.mark.parametrize(("refused", "said"), REFUSED)
def test_a_version_that_does_not_fit_changes_nothing(refused: Packet, said: str) -> None:
    weights = {"w": torch.zeros(3)}
    receiver = WeightReceiver(weights)
    with pytest.raises(WeightsRefusedError, match=said):
        receiver.take(refused)
    assert receiver.take(packet(torch.ones(3))) is False  # another packet of the same version
    assert receiver.version is None
    assert not weights["w"].any()
    assert receiver.take(packet(torch.ones(3), version=2))
    assert weights["w"].all()


def test_senders_and_versions_that_are_not_complete_change_nothing() -> None:
    weights = {"a": torch.zeros(2), "b": torch.zeros(2), "tied": torch.zeros(2)}
    receiver = WeightReceiver(weights, rename=lambda name: None if name == "left out" else name)
    one, two = torch.ones(2), torch.full((2,), 2.0)
    assert not receiver.take(packet(one, name="a", senders=2, last=False))
    assert not receiver.take(packet(one, name="left out", senders=2, index=1))
    assert not receiver.take(packet(two, version=2, name="a", senders=2))  # version 1 stays incomplete
    assert not any(value.any() for value in weights.values())
    assert receiver.take(packet(two, version=2, name="b", senders=2, sender=1, ties={"tied": "b"}))
    assert [value.tolist() for value in weights.values()] == [[2.0, 2.0]] * 3
    assert receiver.missing == set()


def test_files_are_taken_once_all_senders_have_written(tmp_path: Path) -> None:
    weights = {"w": torch.zeros(3), "v": torch.zeros(3)}
    receiver = WeightReceiver(weights)
    write_packet(packet(torch.ones(3), senders=2), tmp_path)
    assert not receive_files(receiver, tmp_path, "gen")
    write_packet(packet(torch.ones(3), senders=2, sender=1, name="v"), tmp_path)
    assert receive_files(receiver, tmp_path, "gen")
    assert all(value.all() for value in weights.values())
    write_packet(packet(torch.zeros(3), version=3, since=2), tmp_path)  # version 2 is missing
    assert not receive_files(receiver, tmp_path, "gen")
    assert "expected version 2 here, got 1; send all weights" in refusal_file(tmp_path, "gen").read_text()
    write_packet(packet(torch.zeros(4), version=4), tmp_path)
    with pytest.raises(WeightsRefusedError, match="version 4, w: expected float32"):
        receive_files(receiver, tmp_path, "gen")
    assert receiver.version == 1


def test_a_folder_without_room_is_an_error_and_leaves_no_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuses(*args: int) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "posix_fallocate", refuses)
    with pytest.raises(OSError, match=r"no room for a packet of [0-9]+ bytes") as raised:
        write_packet(packet(torch.ones(3)), tmp_path)
    assert raised.value.errno == errno.ENOSPC
    assert list(tmp_path.iterdir()) == []


def test_the_receiver_is_a_file_that_needs_torch_only(tmp_path: Path) -> None:
    copy = tmp_path / "receiver.py"
    copy.write_text(Path(receiver_module.__file__).read_text())
    program = "import receiver, sys; assert not any(name.startswith('zeroaccel') for name in sys.modules)"
    subprocess.run([sys.executable, "-c", program], cwd=tmp_path, check=True, env={"PYTHONPATH": str(tmp_path)})


def small_versions() -> list[Packet]:
    """Returns versions of the tensors of `weights_of_versions`: all values, and a coded delta to them."""
    values = torch.arange(40.0).bfloat16()
    high = encode_high_bytes(torch.full((20,), 64, dtype=torch.uint8))
    places = encode_positions(torch.arange(0, 40, 2))
    entries: list[dict[str, Any]] = [
        {"name": name, "shape": [40], "dtype": "bfloat16", "offset": offset, "numel": 20, "start": start}
        | {"positions": 0, "cut": [2, 2, part]}
        for name, offset, start, part in (("a", 0, 0, 0), ("a", 48, 0, 1), ("b", 96, 0, 1), ("b", 144, 0, 0))
    ]
    payload = torch.cat([values.view(torch.uint8), torch.zeros(112, dtype=torch.uint8)])
    delta = {"name": "a", "shape": [40], "dtype": "bfloat16", "offset": 0, "numel": 20, "start": 0, "cut": [40, 1, 0]}
    delta |= {"positions": places.numel(), "high": high.numel()}
    head = {"run": "r", "sender": 0, "senders": 1, "index": 0, "last": True}
    coded = torch.cat([torch.arange(20, dtype=torch.uint8), high, places])
    return [
        Packet({**head, "version": 1, "since": None, "ties": {"c": "a"}, "tensors": entries}, payload),
        Packet({**head, "version": 2, "since": 1, "ties": {}, "tensors": [delta]}, coded),
    ]


@pytest.mark.parametrize("number", [0, 1])
def test_every_damaged_file_is_refused_or_a_whole_version(tmp_path: Path, number: int) -> None:
    whole, folder = small_versions(), tmp_path / "files"
    folder.mkdir()
    path = write_packet(whole[number], folder)
    content = path.read_bytes()
    flips = [content[:at] + bytes([content[at] ^ 1 << at % 8]) + content[at + 1 :] for at in range(len(content))]
    outcomes = set()
    for damaged in [content, *flips, *(content[:size] for size in range(0, len(content), 7))]:
        weights = {name: torch.full((40,), 7.0).bfloat16() for name in "abc"}
        receiver = WeightReceiver(weights)
        if number:
            receiver.take(whole[0])
        before = {name: value.clone() for name, value in weights.items()}
        path.write_bytes(damaged)
        try:
            taken = receive_files(receiver, folder, "gen")
        except WeightsRefusedError:
            taken = False
        outcomes.add(taken)
        if not taken:
            assert receiver.version == (1 if number else None)
            assert all(
                torch.equal(value.view(torch.int16), before[name].view(torch.int16)) for name, value in weights.items()
            )
        elif number == 0:
            assert receiver.missing in (set(), {"c"})
    assert outcomes == {True, False}


REFUSED_TOGETHER = [
    ([("w", [0, 2]), ("w", [1, 1])], "expected each element once"),
    ([("w", [0, 2])], "expected 3 elements, got 2: a part is missing"),
    ([], "expected all weights, got no tensor of this receiver"),
]


@pytest.mark.parametrize(("parts", "said"), REFUSED_TOGETHER)
def test_the_parts_of_a_version_are_checked_together(parts: list[tuple[str, list[int]]], said: str) -> None:
    head = packet(torch.ones(3)).manifest
    entries = [{**head["tensors"][0], "start": start, "numel": numel} for _, (start, numel) in parts]
    weights = {"w": torch.zeros(3)}
    with pytest.raises(WeightsRefusedError, match=said):
        WeightReceiver(weights).take(Packet({**head, "tensors": entries}, torch.ones(3).view(torch.uint8)))
    assert not weights["w"].any()


def test_versions_belong_to_a_run_of_the_trainer(tmp_path: Path) -> None:
    weights = {"w": torch.zeros(3)}
    receiver = WeightReceiver(weights)
    assert receiver.take(packet(torch.ones(3), version=4, run="first"))
    with pytest.raises(WeightsRefusedError, match="got 4 of another run of the trainer; send all weights"):
        receiver.take(packet(torch.zeros(3), version=5, since=4, run="second"))
    write_packet(packet(torch.full((3,), 2.0), version=1, run="second"), tmp_path)
    assert receive_files(receiver, tmp_path, "gen")
    assert (receiver.run, receiver.version, weights["w"].tolist()) == ("second", 1, [2.0] * 3)
    assert not receive_files(receiver, tmp_path, "gen")


def test_files_of_others_are_not_followed(tmp_path: Path) -> None:
    (tmp_path / "folder").mkdir(mode=0o700)
    path = write_packet(packet(torch.ones(3)), tmp_path / "folder")
    assert path.stat().st_mode & 0o777 == 0o600
    path.rename(tmp_path / "elsewhere")
    for make in (lambda: path.symlink_to(tmp_path / "elsewhere"), lambda: os.mkfifo(path)):
        make()
        with pytest.raises(WeightsRefusedError):
            receive_files(WeightReceiver({"w": torch.zeros(3)}), tmp_path / "folder", "gen")
        path.unlink()
    target = tmp_path / "target"
    refusal_file(tmp_path / "folder", "gen").unlink()
    refusal_file(tmp_path / "folder", "gen").symlink_to(target)
    write_packet(packet(torch.ones(4)), tmp_path / "folder")
    with pytest.raises(WeightsRefusedError):
        receive_files(WeightReceiver({"w": torch.zeros(3)}), tmp_path / "folder", "gen")
    assert not target.exists()
    (tmp_path / "folder").chmod(0o777)
    with pytest.raises(WeightsRefusedError, match="others cannot write to"):
        receive_files(WeightReceiver({"w": torch.zeros(3)}), tmp_path / "folder", "gen")
    with pytest.raises(ValueError, match="name of a receiver"):
        receive_files(WeightReceiver({}), tmp_path, "../gen")
