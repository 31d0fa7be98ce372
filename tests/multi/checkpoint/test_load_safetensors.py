"""Files loaded into shards: only the needed bytes are read, on the meta device, in zero.Init, and unsharded."""

from __future__ import annotations

import functools
import gc
import json
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor, nn

import zeroaccel
from tests.multi.zero.test_zero_init import train
from tests.support.pool import Ranks
from tests.support.refusals import message
from tests.support.training import SGD, WIDTH, Run, Toy, config, differences
from zeroaccel import zero
from zeroaccel.errors import UsageError, ZeroAccelError
from zeroaccel.zero.access.deferred_init import values_from_files
from zeroaccel.zero.access.lazy_tensors import OpenFile
from zeroaccel.zero.access.param_registry import handle_of

SIDE = 3072  # malloc returns freed tensors of this size to the system


class Seen(Toy):
    """A Toy with a buffer that is not saved, like that of rotary embeddings."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("inverse", torch.arange(4.0), persistent=False)


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    """The files of a `Seen`: two with an index, and the tied weight once."""
    torch.manual_seed(11)
    model = Seen()
    with torch.no_grad():
        model.offset.fill_(0.5)
    state = {name: value for name, value in model.state_dict().items() if name != "head.weight"}
    names = sorted(state)
    files = {"a.safetensors": names[::2], "b.safetensors": names[1::2]}
    for file, held in files.items():
        save_file({name: state[name].contiguous() for name in held}, tmp_path / file)
    index = {"weight_map": {name: file for file, held in files.items() for name in held}}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    return tmp_path


def _initialize(module: nn.Module) -> None:
    if isinstance(module, Seen):
        module.inverse = torch.arange(4.0)


def _loaded(how: str, folder: str, settings: dict[str, Any]) -> tuple[Run, int]:
    rank = torch.distributed.get_rank()
    torch.manual_seed(100 + rank)
    if how == "meta":
        with torch.device("meta"):
            model = Seen()
    elif how == "init":
        with zero.Init():
            model = Seen()
    else:
        model = Seen()
    read = zero.load_safetensors(model, folder, initialize_missing=_initialize if how == "meta" else None)
    assert model.head.weight is model.embed.weight
    assert float(model.offset[0]) == 0.5
    assert how != "meta" or model.inverse.tolist() == [0.0, 1.0, 2.0, 3.0]
    assert (handle_of(model.layers[0].up.weight) is None) == (how == "whole")
    engine, *_ = zeroaccel.initialize(model, config=settings)
    return train(engine), read


@pytest.mark.parametrize("stage", [3, 2])
def test_loaded_meta_and_init_give_the_same(ranks: Ranks, saved: Path, stage: int) -> None:
    settings = config(stage, "bf16", optimizer=SGD)
    whole = ranks(2).run(_loaded, "whole", str(saved), settings)
    nbytes = whole[0][1]
    assert nbytes > 4 * sum(param.numel() for param in Seen().parameters())
    for how in ("meta", "init"):
        found = ranks(2).run(_loaded, how, str(saved), settings)
        assert [differences(a[0], b[0]) for a, b in zip(whole, found, strict=True)] == [[], []]
        buffers = 2 * 4 * WIDTH
        assert sum(read for _, read in found) <= nbytes + buffers  # one rank reads each byte
        assert max(read for _, read in found) < 0.75 * nbytes


def _mistakes(folder: str) -> list[str]:
    found = []

    def attempt(action: Callable[[], object]) -> None:
        found.append(message(ZeroAccelError, action))

    with torch.device("meta"):
        model = Seen()
    attempt(lambda: zero.load_safetensors(model, folder))  # fails: nothing sets the buffer
    attempt(lambda: zeroaccel.initialize(model, config=config(3)))
    half = Path(folder, "half.safetensors")
    attempt(lambda: zero.load_safetensors(model, half))
    assert model.layers[0].up.weight.is_meta  # the model is unchanged
    attempt(lambda: zero.load_safetensors(nn.Linear(3, 3), folder))
    wide = Toy(width=WIDTH + 1)
    attempt(lambda: zero.load_safetensors(wide, folder, strict=False))
    attempt(lambda: zero.load_safetensors(model, Path(folder, "nowhere")))
    attempt(lambda: zero.load_safetensors(model, Path(folder, "cut.safetensors")))
    attempt(lambda: zero.load_safetensors(model, Path(folder, "outside.index.json")))
    attempt(lambda: zero.load_safetensors(model, Path(folder, "gone.index.json")))
    return found


def test_files_that_do_not_match_are_reported_on_every_rank(ranks: Ranks, saved: Path) -> None:
    whole = (saved / "a.safetensors").read_bytes()
    (saved / "cut.safetensors").write_bytes(whole[: len(whole) // 2])
    half = {name: value for name, value in Seen().state_dict().items() if name.startswith("layers.0")}
    save_file(half, saved / "half.safetensors")
    (saved / "outside.index.json").write_text(json.dumps({"weight_map": {"x": "../a.safetensors"}}))
    (saved / "gone.index.json").write_text(json.dumps({"weight_map": {"x": "c.safetensors"}}))
    for found in ranks(2).run(_mistakes, str(saved)):
        unset, meta, half_there, other, wide, nowhere, cut, outside, gone = found
        assert "non-persistent buffers on the meta device, which no file stores: inverse" in unset
        assert "the meta device'; load it with zero.load_safetensors" in meta
        assert "nor initialized" in half_there
        assert "layers.1.up.weight" in half_there
        assert "layers.0" not in half_there
        assert "neither in the files nor initialized: weight, bias" in other
        assert "not in the model: embed.weight" in other
        assert wide.count("in the file, ") == len(Seen().state_dict()) - 4  # not unused, nothing, temperature; head
        assert "no such file or folder" in nowhere
        assert "not a valid safetensors file" in cut
        assert "'../a.safetensors'" in outside
        assert "c.safetensors: missing" in gone


def _partly(folder: str) -> list[Tensor]:
    """Initializes a head that is in no file, translates other names, and casts dtypes while loading."""
    with torch.device("meta"):
        model = nn.ModuleDict({"body": nn.Linear(6, 6), "head": nn.Linear(6, 2)})

    def fill(module: nn.Module) -> None:
        nn.init.constant_(module.weight, 3.0)  # type: ignore[arg-type]
        nn.init.constant_(module.bias, 4.0)  # type: ignore[arg-type]

    zero.load_safetensors(
        model,
        Path(folder, "body.safetensors"),
        dtype=torch.bfloat16,
        rename=lambda name: name.replace("body", "encoder"),
        initialize_missing=fill,
    )
    return [zero.safe_get_full_fp32_param(param) if handle_of(param) else param.float() for param in model.parameters()]  # type: ignore[misc]


@pytest.mark.parametrize("world_size", [1, 2])
def test_missing_modules_are_initialized(ranks: Ranks, tmp_path: Path, world_size: int) -> None:
    state = {"encoder.weight": torch.randn(6, 6), "encoder.bias": torch.randn(6)}
    save_file(state, tmp_path / "body.safetensors")
    for weight, bias, head, head_bias in ranks(world_size).run(_partly, str(tmp_path)):
        assert torch.equal(weight, state["encoder.weight"].bfloat16().float())
        assert torch.equal(bias, state["encoder.bias"].bfloat16().float())
        assert head.unique().tolist() == [3.0]
        assert head_bias.unique().tolist() == [4.0]


class Unwritten(nn.Module):
    """A layer whose values come from a file: its constructor writes none."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(SIDE, SIDE))
        self.scale = nn.Parameter(torch.arange(3.0))


def _peak(how: str, folder: str) -> float:
    """Returns the peak of additional bytes while building and loading."""
    build = Unwritten if how == "unwritten" else functools.partial(nn.Linear, SIDE, SIDE, bias=False)
    with torch.device("meta") if how == "load" else zero.Init():
        model = nn.Sequential(*(build() for _ in range(4)))
    process = psutil.Process()
    if how != "load":
        del model
    gc.collect()
    Path("/proc/self/clear_refs").write_text("5")  # resets the peak
    before = process.memory_info().rss
    if how == "load":
        zero.load_safetensors(model, Path(folder, "model.safetensors"))
    else:
        with values_from_files() if how == "unwritten" else nullcontext(), zero.Init():
            model = nn.Sequential(*(build() for _ in range(4)))
    peak = next(line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith("VmHWM"))
    assert handle_of(model[3].weight) is not None
    if how == "unwritten":
        assert zero.safe_get_full_fp32_param(model[3].scale).tolist() == [0.0, 1.0, 2.0]  # for names in no file
    return int(peak.split()[1]) * 1024 - before


@pytest.mark.parametrize("how", ["init", "load", "unwritten"])
def test_a_rank_never_has_more_than_its_part_and_a_tensor(ranks: Ranks, tmp_path: Path, how: str) -> None:
    tensor = 4 * SIDE * SIDE
    if how == "load":
        save_file({f"{n}.weight": torch.zeros(SIDE, SIDE) for n in range(4)}, tmp_path / "model.safetensors")
    more = {"init": 2.1 * tensor, "load": 24e6, "unwritten": 24e6 - 4 * tensor / 2}  # nothing touches unwritten memory
    for peak in ranks(2).run(_peak, how, str(tmp_path)):
        assert peak < 4 * tensor / 2 + more[how]


class Written(nn.Module):
    """Layers whose constructor writes values in different ways."""

    def __init__(self) -> None:
        super().__init__()
        self.filled = nn.Parameter(torch.empty(40).fill_(1.0))
        self.data = nn.Parameter(torch.empty(40))
        self.data.data.fill_(2.0)
        self.by_numpy = nn.Parameter(torch.empty(40))
        self.by_numpy.detach().numpy()[:] = 3.0
        self.part = nn.Parameter(torch.empty(80)[40:])
        nn.init.constant_(self.part, 4.0)
        self.operator = nn.Parameter(torch.empty(40))
        torch.ops.aten.fill_(self.operator.data, 5.0)
        self.by_name = nn.Parameter(torch.empty(40), requires_grad=False)
        self.by_name[:] = 6.0
        self.ones = nn.Parameter(torch.ones(40) * 7.0)


def _constructed() -> list[Tensor]:
    with values_from_files(), zero.Init():
        model = nn.Sequential(Written())
    values = [zero.safe_get_full_fp32_param(param) for param in model.parameters()]
    assert all(value is not None for value in values)
    return [value for value in values if value is not None]


def test_values_that_a_constructor_wrote_stay(ranks: Ranks) -> None:
    for values in ranks(2).run(_constructed):
        assert [value.unique().tolist() for value in values] == [[float(number)] for number in range(1, 8)]


def _failing(folder: str) -> tuple[str, bool]:
    with torch.device("meta"):
        model = nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 64))
    original, rank = OpenFile.read, torch.distributed.get_rank()

    def read(file: OpenFile, offset: int, into: memoryview, name: str) -> None:
        if rank == 1 and name == "1.bias":
            raise UsageError("the disk failed")
        original(file, offset, into, name)

    setattr(OpenFile, "read", read)  # noqa: B010  # mypy forbids the assignment
    try:
        found = message(ZeroAccelError, lambda: zero.load_safetensors(model, folder))
    finally:
        setattr(OpenFile, "read", original)  # noqa: B010
    handles = [handle for param in model.parameters() if (handle := handle_of(param)) is not None]
    shards = [handle.buffer.shard.read(handle.reach(rank)) for handle in handles]
    return found, len(handles) == 4 and bool(torch.cat(shards).isnan().all())


def test_a_failed_load_leaves_no_arbitrary_values(ranks: Ranks, tmp_path: Path) -> None:
    save_file(nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 64)).state_dict(), tmp_path / "model.safetensors")
    for text, is_absent in ranks(2).run(_failing, str(tmp_path)):
        assert "the disk failed" in text
        assert is_absent
