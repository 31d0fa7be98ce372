"""The readers of foreign files, each as a function of bytes, with valid files as seeds and edits of them.

In `tests/unit/checkpoint/test_hostile_files.py` hypothesis makes the edits, in `benchmarks/fuzz_readers.py` a random
generator. A reader reads a file completely, as its user would, including the values in it, and may raise only the
exceptions in `ALLOWED`.
"""

from __future__ import annotations

import contextlib
import copy
import hashlib
import io
import json
import pickle
import random
import tarfile
import tempfile
import warnings
import zipfile
from collections import Counter, OrderedDict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np
import torch

from tests.unit.checkpoint.checkpoint_by_hand import Entry, make_checkpoint, seal
from zeroaccel.checkpoint import zero_to_fp32
from zeroaccel.checkpoint.find import find_checkpoint
from zeroaccel.checkpoint.formats.dcp_import import open_dcp
from zeroaccel.checkpoint.formats.deepspeed_checkpoint import open_deepspeed_checkpoint
from zeroaccel.checkpoint.formats.torch_file import TorchFile
from zeroaccel.checkpoint.formats.torch_pickle import StoredTensor
from zeroaccel.checkpoint.plain_codec import decode
from zeroaccel.checkpoint.rank_file import block_sums
from zeroaccel.checkpoint.tensor_store import TensorStore
from zeroaccel.cli.launch.hostfile import read_hostfile
from zeroaccel.config.launch.launch_file import parse_launch_file
from zeroaccel.config.load_config_file import load_config
from zeroaccel.errors import ZeroAccelError
from zeroaccel.zero.access.load_safetensors import SafetensorsFolder

ALLOWED = (ZeroAccelError, zero_to_fp32.ConversionError)
DATA = Path(__file__).parent.parent / "data" / "deepspeed"

Edit = tuple[int, int, bytes]
"""(position, number of bytes removed, inserted bytes); both numbers are taken modulo their valid range."""


@dataclass(frozen=True)
class Reader:
    """One kind of file.

    Attributes:
        read: takes the content and an empty folder for files.
        seeds: returns valid contents, made in a folder.
        tokens: byte strings with a meaning in the format.
    """

    read: Callable[[bytes, Path], object]
    seeds: Callable[[Path], Sequence[bytes]]
    tokens: Sequence[bytes]


def apply_edits(content: bytes, edits: Sequence[Edit]) -> bytes:
    """Returns the content after edits, each of up to 8 removed bytes, or of more if `length` is a multiple of 5."""
    for where, length, instead in edits:
        at = where % (len(content) + 1)
        gone = length % 9 if length % 5 else length % (len(content) + 1)
        content = content[:at] + instead + content[at + gone :]
    return content


ODD_VALUES: Sequence[Any] = (
    *(
        None,
        True,
        -1,
        0,
        1,
        1.5,
        1e300,
        10**12,
        1 << 63,
        10**60,
        "",
        "x",
        "\ud800",
        [],
        {},
        [[]],
        {"": 1},
        "F32",
        "BOOL",
    ),
    *({"$": "tensor", "key": "master/w"}, {"$": "tensor", "key": []}, {"$": "scalar", "dtype": "I8", "value": 1e9}),
    *({"$": "set", "items": [[]]}, {"$": "Counter", "items": [[1, "x"]]}, {"$": "bytes", "base64": "x"}, {"$": "dict"}),
)


def edited_tree(content: bytes, chance: random.Random) -> bytes:
    """Returns JSON in which one to three values are replaced by others, removed, or copied to another place."""
    tree = json.loads(content)
    for _ in range(chance.randint(1, 3)):
        places = list(_places(tree))
        if not places:
            break
        owner, key = chance.choice(places)
        kind = chance.random()
        if kind < 0.1:
            del owner[key]
        else:
            other, at = chance.choice(places)
            owner[key] = copy.deepcopy(other[at] if kind < 0.3 else chance.choice(ODD_VALUES))
    return json.dumps(tree).encode()


def _places(tree: Any) -> Iterator[tuple[Any, Any]]:
    for key in list(tree) if isinstance(tree, dict) else range(len(tree)) if isinstance(tree, list) else ():
        yield tree, key
        yield from _places(tree[key])


# -- torch's pickles and archives


def _plain_objects() -> list[Any]:
    return [
        {"a": [1, 2.5, None, True, b"bytes", "text", (1, (2, 3)), {4, 5}, frozenset("x"), 1 << 70, complex(1, 2)]},
        OrderedDict(weight=1, bias=Counter("aab"), nested={"x": {"y": [[], {}, ()]}}),
        {(1, 2): "tuple", 1.5: "fraction", None: "none"},
    ]


def _state() -> dict[str, Any]:
    base = torch.arange(12.0).view(3, 4)
    return {"w": base, "t": base.t(), "p": torch.nn.Parameter(torch.ones(2)), "n": torch.zeros(0), "s": base[1:, ::2]}


def _torch_content(value: Any) -> bytes:
    content = io.BytesIO()
    torch.save(value, content)
    return content.getvalue()


def _pickle_of(archive: bytes) -> bytes:
    with zipfile.ZipFile(io.BytesIO(archive)) as opened:
        return opened.read(next(name for name in opened.namelist() if name.endswith("data.pkl")))


def zip_around(content: bytes, archive: bytes, compression: int = zipfile.ZIP_STORED) -> bytes:
    """Returns a torch archive with another pickle in it and a matching checksum."""
    made = io.BytesIO()
    with zipfile.ZipFile(io.BytesIO(archive)) as opened, zipfile.ZipFile(made, "w", compression) as target:
        for name in opened.namelist():
            target.writestr(name, content if name.endswith("data.pkl") else opened.read(name))
    return made.getvalue()


def _pickle_seeds(_: Path) -> list[bytes]:
    plain = [pickle.dumps(value, protocol) for value in _plain_objects() for protocol in (2, 4)]
    return [*plain, _pickle_of(_torch_content(_state()))]


@lru_cache(maxsize=1)
def _whole_archive() -> bytes:
    return _torch_content(_state())


def _read_pickle(content: bytes, folder: Path) -> None:
    _read_archive(zip_around(content, _whole_archive()), folder)


def _read_archive(content: bytes, folder: Path) -> None:
    path = folder / "file.pt"
    path.write_bytes(content)
    file = TorchFile(path)
    todo = [file.content]
    while todo:
        value = todo.pop()
        if isinstance(value, StoredTensor):
            for _, length, offset in file.runs(value):
                file.read(offset, length * (8 if value.dtype == "F64" else 1))
        elif isinstance(value, dict):
            todo += [*value.values()]
        elif isinstance(value, (list, tuple)):
            todo += [*value]
    file.verify()


@lru_cache(maxsize=1)
def _deepspeed() -> tuple[dict[str, bytes], str]:
    """Returns (content by path in the folder, path of the model's file)."""
    with tarfile.open(DATA / "stage1_fp32_w2.tar.xz") as archive:
        files = {
            entry.name.partition("/")[2]: found.read()
            for entry in archive.getmembers()
            if (found := archive.extractfile(entry)) is not None
        }
    return files, next(name for name in files if name.endswith("mp_rank_00_model_states.pt"))


def _deepspeed_seeds(_: Path) -> list[bytes]:
    files, model = _deepspeed()
    return [_pickle_of(files[model]), _pickle_of(files[_first_optimizer(files)])]


def _first_optimizer(files: Mapping[str, bytes]) -> str:
    return min(name for name in files if name.endswith("optim_states.pt"))


def _read_deepspeed(content: bytes, folder: Path) -> None:
    """Reads the checkpoint with the content in place of the model's pickle, or of an optimizer's."""
    files, name = _deepspeed()
    if b"single_partition_of_fp32_groups" in content:
        name = _first_optimizer(files)
    for path, held in files.items():
        (folder / path).parent.mkdir(parents=True, exist_ok=True)
        (folder / path).write_bytes(zip_around(content, held) if path == name else held)
    checkpoint = open_deepspeed_checkpoint(folder)
    list(checkpoint.weights())
    assert checkpoint.tensors is not None


@lru_cache(maxsize=1)
def _dcp() -> dict[str, bytes]:
    import torch.distributed.checkpoint as dcp

    state = {"model": {"w": torch.ones(4, 3), "b": torch.zeros(3)}, "step": 3}
    with tempfile.TemporaryDirectory() as folder, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        dcp.save(state, checkpoint_id=folder)
        return {path.name: path.read_bytes() for path in Path(folder).iterdir()}


def _read_dcp(content: bytes, folder: Path) -> None:
    for name, held in _dcp().items():
        (folder / name).write_bytes(content if name == ".metadata" else held)
    with open_dcp(folder, ties={}) as store:
        for key in store.manifest.tensors:
            store.fetch(key)


# -- zeroaccel's checkpoints


def _checkpoint(folder: Path) -> None:
    values = np.arange(12, dtype="<f4").reshape(3, 4)
    make_checkpoint(
        folder,
        {"w": Entry("F32", values), "b": Entry("F16", np.ones(4, "<f2"), trainable=False)},
        buffers={"seen": Entry("I64", np.array([3], "<i8"))},
        ties={"head": "w"},
    )


def _checkpoint_seeds(folder: Path) -> list[bytes]:
    """Returns the manifest's body, and the header of the first rank's file."""
    _checkpoint(folder / "made")
    made = folder / "made" / "global_step1"
    body = json.loads((made / "manifest.json").read_text())["manifest"]
    body["client_state"] = {"$": "dict", "items": [[{"$": "float", "value": "nan"}, [1, {"$": "bytes", "base64": ""}]]]}
    body["loss_scale"] = {"$": "scalar", "dtype": "F32", "value": 1.5}
    body["optimizer"] = {"type": "AdamW", "param_groups": [{"lr": 0.1, "params": ["w"]}], "scalars": {"w": {"step": 1}}}
    return [json.dumps(body).encode(), _header_of(min(made.glob("rank*")).read_bytes())]


def _header_of(content: bytes) -> bytes:
    return content[8 : 8 + int.from_bytes(content[:8], "little")]


def resealed(content: bytes, folder: Path) -> None:
    """Writes a checkpoint in which the content replaces a part of it, with matching checksums.

    If the content is JSON of a manifest's body, it replaces the body, otherwise the header of the first rank's file.
    """
    _checkpoint(folder)
    tag = folder / "global_step1"
    try:
        body = json.loads(content)
        json.dumps(body, allow_nan=False)
    except (ValueError, RecursionError):
        body = None
    if isinstance(body, dict) and "__checksums__" not in body:
        (tag / "manifest.json").unlink()
        with contextlib.suppress(ValueError, RecursionError):
            seal(tag, body)
        return
    if b"manifest" in content or b"format" in content[:12]:
        (tag / "manifest.json").write_bytes(content)
        return
    path = min(tag.glob("rank*"))
    held = path.read_bytes()
    made = len(content).to_bytes(8, "little") + content + held[8 + len(_header_of(held)) : -8]
    table = block_sums(np.frombuffer(made, np.uint8)).astype("<u8").tobytes()
    path.write_bytes(made + table)
    body = json.loads((tag / "manifest.json").read_text())["manifest"]
    body["files"][0] |= {"nbytes": len(made) + len(table), "table_sha256": hashlib.sha256(table).hexdigest()}
    seal(tag, body)


def _read_checkpoint(content: bytes, folder: Path) -> None:
    resealed(content, folder)
    with contextlib.suppress(zero_to_fp32.ConversionError):
        source = zero_to_fp32.read_source(folder)
        zero_to_fp32.read_tensors(source, zero_to_fp32.select(source, zero_to_fp32.Options()), workers=1).state_dict()
    found, manifest = find_checkpoint(folder)
    with TensorStore(found, manifest) as store:
        for key in manifest.tensors:
            store.fetch(key)
        for plain in (manifest.client_state, manifest.loss_scale, manifest.optimizer, manifest.lr_scheduler):
            decode(plain, store.fetch)


def _safetensors_seeds(folder: Path) -> list[bytes]:
    from safetensors.torch import save

    return [save({"w": torch.ones(3, 4), "b": torch.zeros(2, dtype=torch.bfloat16)}, metadata={"format": "pt"})]


def _read_safetensors(content: bytes, folder: Path) -> None:
    (folder / "model.safetensors").write_bytes(content)
    SafetensorsFolder(folder / "model.safetensors")


# -- files that people write


_LAUNCH = b"""# a launch file
compute_environment: LOCAL_MACHINE
distributed_type: DEEPSPEED
deepspeed_config: {zero_stage: 3, gradient_accumulation_steps: auto, offload_optimizer_device: none}
mixed_precision: "bf16"
num_machines: 1
num_processes: 2
main_process_ip:
dynamo_config: &d
  dynamo_backend: NO
"""
_CONFIG = b"""{
  "train_micro_batch_size_per_gpu": "auto",
  "gradient_accumulation_steps": 2,
  "bf16": {"enabled": true},
  "optimizer": {"type": "AdamW", "params": {"lr": 1e-3, "betas": [0.9, 0.999]}},
  "zero_optimization": {"stage": 3, "reduce_bucket_size": 5e8, "offload_param": {"device": "cpu"}}
}"""
_CONFIG5 = b"{// comments\n train_batch_size: 0x10, 'zero_optimization': {stage: +2,}, /* more */ }"


def _text(content: bytes) -> str:
    return content.decode("utf-8", "replace")


def _read_hostfile(content: bytes, folder: Path) -> None:
    (folder / "hosts").write_bytes(content)
    read_hostfile(str(folder / "hosts"))


_PICKLE_TOKENS = (
    *(
        b"\x80\x02",
        b"]",
        b"}",
        b")",
        b"(",
        b".",
        b"0",
        b"2",
        b"R",
        b"b",
        b"\x81",
        b"\x85",
        b"\x86",
        b"\x87",
        b"t",
        b"Q",
    ),
    *(
        b"e",
        b"a",
        b"s",
        b"u",
        b"N",
        b"K\x05",
        b"h\x00",
        b"h\x01",
        b"q\x00",
        b"\x94",
        b"\x93",
        b"\x8f",
        b"\x90",
        b"\x91",
    ),
    *(
        b"j\xff\xff\xff\x7f",
        b"r\xff\xff\xff\xff",
        b"X\xff\xff\xff\x7f",
        b"\x8a\x80" + b"\xff" * 128,
        b"G" + b"\xff" * 8,
    ),
    *(b"ccollections\nCounter\n", b"ccollections\nOrderedDict\n", b"c__builtin__\nset\n", b"cos\nsystem\n"),
    *(b"c__builtin__\nlist\n", b"c__builtin__\nstr\n", b"ctorch\nFloatStorage\n", b"c_codecs\nencode\n"),
    *(b"ctorch._utils\n_rebuild_tensor_v2\n", b"cdeepspeed.runtime.fp16.loss_scaler\nLossScaler\n"),
)
_JSON_TOKENS = (
    *(b"null", b"true", b"-1", b"0", b"1e999", b"NaN", b'""', b'"x"', b"[]", b"{}", b"[[", b"]]", b'{"a":', b"}", b","),
    *(b"9" * 60, b"9223372036854775808", b"1.5", b'"\\ud800"', b'{"$": "tensor", "key": [1]}', b'{"$": []}', b'"F32"'),
    *(b'"BOOL"', b'"I64"', b"4294967296", b"9" * 4301, b'{"$": "scalar", "dtype": "I8", "value": 1e9}', b"[" * 101),
)
_TEXT_TOKENS = (
    *(
        b"\n",
        b"  ",
        b": ",
        b"- ",
        b"&a ",
        b"*a",
        b"<<: *a",
        b"!!int ''",
        b"!!bool x",
        b"? ",
        b"| ",
        b"> ",
        b"{",
        b"}",
        b"[",
    ),
    *(
        b"]",
        b'"',
        b"'",
        b"#",
        b"\xe2\x80\xa8",
        b"\r",
        b"\t",
        b"0x" + b"f" * 99,
        b"1:1:1",
        b"2001-99-99",
        b"~",
        b"%YAML 1.1\n",
    ),
    *(
        b"auto",
        b"---\n",
        b"...\n",
        b"\xc2\x85",
        b"!!binary x",
        b"!!set {[a]}",
        b"\\x",
        b"//",
        b"/*",
        b"*/",
        b",",
        b"Infinity",
    ),
)

READERS: Mapping[str, Reader] = {
    "pickle": Reader(_read_pickle, _pickle_seeds, _PICKLE_TOKENS),
    "torch archive": Reader(
        _read_archive, lambda _: [_whole_archive()], (b"PK\x01\x02", b"PK\x03\x04", b"\xff\xff", b"/")
    ),
    "deepspeed": Reader(_read_deepspeed, _deepspeed_seeds, _PICKLE_TOKENS),
    "dcp": Reader(_read_dcp, lambda _: [_dcp()[".metadata"]], _PICKLE_TOKENS),
    "checkpoint": Reader(_read_checkpoint, _checkpoint_seeds, _JSON_TOKENS),
    "safetensors": Reader(_read_safetensors, _safetensors_seeds, _JSON_TOKENS),
    "yaml": Reader(
        lambda content, _: parse_launch_file(_text(content), "launch.yaml"), lambda _: [_LAUNCH], _TEXT_TOKENS
    ),
    "json": Reader(
        lambda content, _: load_config(_text(content), unknown_keys="strict"),
        lambda _: [_CONFIG, _CONFIG5],
        _JSON_TOKENS + _TEXT_TOKENS,
    ),
    "hostfile": Reader(
        _read_hostfile, lambda _: [b"node1 slots=8\nuser@node2 slots=8 # last\n"], (b"slots=", b"#", b"9" * 9)
    ),
}
