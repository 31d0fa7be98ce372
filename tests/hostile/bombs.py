"""Files that once exhausted a reader's time or memory, passed its checks wrongly, or made it fail accidentally."""

from __future__ import annotations

import json
import zipfile
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from tests.hostile.readers import READERS, zip_around

_START = b"\x80\x02"
_PRIME = (1 << 61) - 1
_PAIRS = b"K\x01" + b"2\x86" * 60  # each pair contains the previous one twice: 2**60 numbers when written out


def _number(value: int) -> bytes:
    size = value.bit_length() // 8 + 1
    return b"\x8a" + bytes([size]) + value.to_bytes(size, "little", signed=True)


def _tensor(offset: int, shape: bytes, strides: bytes, numel: int = 12) -> bytes:
    pid = b"(X\x07\0\0\0storagectorch\nFloatStorage\nX\x01\0\0\x000X\x03\0\0\0cpu" + _number(numel) + b"tQ"
    return _START + b"ctorch._utils\n_rebuild_tensor_v2\n(" + pid + _number(offset) + shape + strides + b"\x89}tR."


_PICKLES: Mapping[str, Callable[[], bytes]] = {
    "a memo of 32 GB": lambda: _START + b"Nr\xf0\xff\xff\xff0Nr\xf1\xff\xff\xff.",
    "a text of 2 GB": lambda: _START + b"X\xff\xff\xff\x7f.",
    "a text of a terabyte": lambda: b"\x80\x04\x8d" + (1 << 40).to_bytes(8, "little") + b".",
    "bytes of a terabyte": lambda: b"\x80\x04\x8e" + (1 << 40).to_bytes(8, "little") + b".",
    "a frame of an exabyte": lambda: b"\x80\x04\x95" + (1 << 60).to_bytes(8, "little") + b"N.",
    "an integer of 2 GB": lambda: _START + b"\x8b\xff\xff\xff\x7f.",
    "an integer of a megabyte": lambda: _START + b"\x8b" + (1 << 20).to_bytes(4, "little") + b"\x7f" * (1 << 20) + b".",
    "marks": lambda: _START + b"(" * 1_000_000 + b".",
    "dicts": lambda: _START + b"(" + b"}" * 100_000 + b"t.",
    "a dict for each byte": lambda: _START + b"(" + b"}" * 4_000_000 + b"t.",
    "nested lists": lambda: _START + b"]" * 100_000 + b"a" * 99_999 + b".",
    "nested tuples": lambda: _START + b")" + b"\x85" * 100_000 + b".",
    "pairs of pairs": lambda: _START + _PAIRS + b".",
    "pairs of pairs as a key": lambda: _START + b"}" + _PAIRS + b"Ns.",
    "pairs of pairs in a set": lambda: b"\x80\x04\x8f(" + _PAIRS + b"\x90.",
    "pairs of pairs as a text": lambda: _START + b"cbuiltins\nstr\n" + _PAIRS + b"\x85R.",
    "pairs of pairs as a device": lambda: _START + b"ctorch\ndevice\n" + _PAIRS + b"\x85R.",
    "lists of a long text": lambda: (
        _START
        + (
            b"X"
            + (1 << 20).to_bytes(4, "little")
            + b"x" * (1 << 20)
            + b"q\x000("
            + b"cbuiltins\nlist\nh\x00\x85R" * 1000
            + b"t."
        )
    ),
    "lists of a long list": lambda: (
        _START + (b"](" + b"N" * 500_000 + b"eq\x000(" + b"cbuiltins\nlist\nh\x00\x85R" * 1000 + b"t.")
    ),
    "a long text many times": lambda: (
        _START + (b"(X" + (1 << 20).to_bytes(4, "little") + b"x" * (1 << 20) + b"q\x00" + b"h\x00" * 500_000 + b"t.")
    ),
    "bytes of a long text": lambda: (
        _START
        + (b"X" + (1 << 20).to_bytes(4, "little") + b"x" * (1 << 20) + b"q\x000X\x06\0\0\0latin1q\x010(")
        + (b"c_codecs\nencode\nh\x00h\x01\x86R" * 1000 + b"t.")
    ),
    "a number of a million digits": lambda: (
        _START + (b"cbuiltins\nint\nX" + (1_000_000).to_bytes(4, "little") + b"9" * 1_000_000 + b"\x85R.")
    ),
    "integers with one hash": lambda: (
        _START + b"}(" + b"".join(_number(k * _PRIME) + b"N" for k in range(50_000)) + b"u."
    ),
    "fractions as keys": lambda: (
        _START + b"}(" + b"".join(b"G" + k.to_bytes(8, "big") + b"N" for k in range(30_000)) + b"u."
    ),
    "tuples as keys": lambda: _START + b"}(" + b"".join(_number(k) + b"K\x01\x86N" for k in range(30_000)) + b"u.",
    "a list in itself": lambda: _START + b"]q\x00h\x00a.",
    "a dict in itself": lambda: _START + b"}q\x00X\x01\0\0\0ah\x00s.",
    "attributes of a class": lambda: _START + b"ccollections\nCounter\n}X\x06\0\0\0updateNsb.",
    "attributes of a stand-in's class": lambda: (
        _START + b"cdeepspeed.runtime.fp16.loss_scaler\nLossScaler\n}X\x01\0\0\0aNsb."
    ),
    "attributes of a tensor": lambda: _tensor(0, b"K\x02\x85", b"K\x01\x85")[:-1] + b"}X\x05\0\0\0shapeK\x01\x85sb.",
    "attributes of a list": lambda: _START + b"]}X\x01\0\0\0aNsb.",
    "a tensor of a trillion elements": lambda: _tensor(0, _number(10**12) + b"\x85", b"K\x00\x85"),
    "a tensor of 100000 dims": lambda: _tensor(
        0, b"(" + _number(1 << 60) * 100_000 + b"t", b"(" + b"K\x00" * 100_000 + b"t"
    ),
    "a tensor of huge numbers": lambda: _tensor(0, _number(1 << 1000) + b"\x85", _number(1 << 1000) + b"\x85"),
    "a size of huge numbers": lambda: _START + b"ctorch\nSize\n(" + _number(1 << 1000) * 1000 + b"t\x85R.",
    "a name without an end": lambda: _START + b"c" + b"x" * 1_000_000 + b".",
    "an unhashable key": lambda: _START + b"}]Ns.",
    "a call of nothing": lambda: _START + b"N)R.",
    "nothing on the stack": lambda: _START + b".",
    "os.system": lambda: _START + b"cos\nsystem\nX\x01\0\0\0a\x85R.",
}


_FOR_EACH = ("pairs of pairs", "pairs of pairs as a key", "attributes of a class", "nested lists", "os.system")
"""Bombs for every reader of pickles, although all of them share one unpickler."""


def _archive(folder: Path, content: bytes, compression: int) -> bytes:
    return zip_around(content, READERS["torch archive"].seeds(folder)[0], compression)


_ARCHIVES: Mapping[str, Callable[[Path], bytes]] = {
    "a pickle of 64 MB in 64 kB": lambda folder: _archive(folder, b"\0" * (64 << 20), zipfile.ZIP_DEFLATED),
    "a pickle packed with bzip2": lambda folder: _archive(folder, b"\0" * (64 << 20), zipfile.ZIP_BZIP2),
    "no archive": lambda _: b"x" * 100_000,
    "only the end of an archive": lambda _: b"PK\x05\x06" + b"\xff" * 18,
}


def _body(folder: Path, change: Callable[[dict[str, Any]], object]) -> bytes:
    body = json.loads(READERS["checkpoint"].seeds(folder)[0])
    change(body)
    return json.dumps(body).encode()


def _put(*path: str | int, value: Any) -> Callable[[Path], bytes]:
    def change(body: dict[str, Any]) -> None:
        at: Any = body
        for part in path[:-1]:
            at = at[part]
        at[path[-1]] = value

    return lambda folder: _body(folder, change)


def _nested(levels: int) -> Any:
    value: Any = 1
    for _ in range(levels):
        value = [value]
    return value


def _relabelled(folder: Path) -> bytes:
    """Declares every element of the master as a byte in its first quarter."""

    def change(body: dict[str, Any]) -> None:
        body["tensors"]["master/w"]["dtype"] = "BOOL"
        body["parameters"]["w"]["dtype"] = "BOOL"

    return _body(folder, change)


_CHECKPOINTS: Mapping[str, Callable[[Path], bytes]] = {
    "F32 taken for BOOL": _relabelled,
    "F32 taken for I32": _put("tensors", "master/w", "dtype", value="I32"),
    "an unknown dtype": _put("tensors", "master/w", "dtype", value=["F32"]),
    "a piece of another tensor": _put("tensors", "master/w", "pieces", 0, 3, value=16384),
    "a shape of 100000 dims": _put("tensors", "master/w", "shape", value=[1 << 62] * 100_000),
    "a shape of large dims without elements": _put("tensors", "master/w", "shape", value=[0, 1 << 62, 1 << 62]),
    "a trillion ranks": _put("world_size", value=10**12),
    "files of a name elsewhere": _put("files", 0, "name", value="../" * 10 + "etc/passwd.safetensors"),
    "a file name of a megabyte": _put("files", 0, "name", value="a" * 1_000_000 + ".safetensors"),
    "a tag of a megabyte": _put("tag", value="a" * 1_000_000),
    "state nested 900 deep": _put("client_state", value=_nested(900)),
    "a number that is none": _put("loss_scale", value={"$": "scalar", "dtype": "I8", "value": 10**30}),
    "kinds that are lists": _put("client_state", value={"$": [1]}),
    "a time that is a text": _put("saved_at", value="now"),
    "an optimizer that is a text": _put("optimizer", value="AdamW"),
    "files that are numbers": _put("files", value=[1, 2]),
    "a size of 4000 digits": _put("files", 0, "nbytes", value=10**4000),
    "not of this format": lambda _: b'{"manifest": [], "format": 1}',
    "a manifest nested 100000 deep": lambda _: b'{"manifest": ' + b"[" * 100_000,
    "a manifest nested 980 deep": lambda _: b'{"manifest": ' + b"[" * 980 + b"]" * 980 + b"}",
    "an infinite number": lambda _: b'{"manifest": {"format": "zeroaccel", "version": 1, "x": 1e999}, "checksum": ""}',
    "an integer of 5000 digits": lambda _: b'{"manifest": ' + b"9" * 5000 + b"}",
    "a header that is a list": lambda _: b"[1, 2]",
    "a header nested 100000 deep": lambda _: b"[" * 100_000,
    "an empty header": lambda _: b"",
}


_LAUGHS = "\n".join(
    ["a0: &a0 [x, x, x, x, x, x, x, x, x]"] + [f"a{k}: &a{k} [{', '.join([f'*a{k - 1}'] * 9)}]" for k in range(1, 10)]
)
_YAML: Mapping[str, Callable[[], str]] = {
    "a billion laughs": lambda: _LAUGHS,
    "a billion laughs in merges": lambda: (
        "a0: &a0 {x: 1}\n" + "\n".join(f"a{k}: &a{k} {{<<: [{', '.join([f'*a{k - 1}'] * 9)}]}}" for k in range(1, 10))
    ),
    "a chain of aliases": lambda: "a0: &a0 [x]\n" + "\n".join(f"a{k}: &a{k} [*a{k - 1}]" for k in range(1, 2000)),
    "an alias in itself": lambda: "a: &a [*a]",
    "nested lists": lambda: "[" * 30_000,
    "nested mappings": lambda: "{a: " * 1000,
    "nested dashes": lambda: "- " * 5000 + "a",
    "nested keys": lambda: "? " * 5000 + "a",
    "5000 digits": lambda: "num_processes: " + "9" * 5000,
    "50000 hexadecimal digits": lambda: "num_processes: 0x" + "f" * 50_000,
    "a sexagesimal number": lambda: "num_processes: " + "1:" * 20_000 + "1",
    "an integer that is none": lambda: "num_processes: !!int ''",
    "a switch that is none": lambda: "use_cpu: !!bool x",
    "a fraction that is none": lambda: "a: !!float ''",
    "a time that is none": lambda: "a: !!timestamp x",
    "a day that is none": lambda: "a: 2001-99-99",
    "a null that is a text": lambda: "!!null '[[[': 1",
    "keys that are lists": lambda: "? [a]\n: 1",
    "keys that are times": lambda: "2001-01-01: 1\n1.5: 2\n~: 3\ntrue: 4",
    "keys that are bytes": lambda: "? !!binary YQ==\n: 1",
    "other line breaks": lambda: "a: 1\r\u2028\u2029b: [",
    "a megabyte": lambda: "a: 1\n" * 200_000,
    "10000 keys": lambda: "".join(f"key{k}: 1\n" for k in range(5000)),
    "a list": lambda: "- 1\n- 2",
    "sections that are lists": lambda: "deepspeed_config: [1]\ndynamo_config: 3\nfsdp_config: x",
}
_JSON: Mapping[str, Callable[[], str]] = {
    "nested 1000 deep": lambda: '{"a":' * 1000 + "1" + "}" * 1000,
    "nested 100000 deep": lambda: '{"a":' + "[" * 100_000,
    "nested 60 deep with comments": lambda: "{a:" * 60 + "1" + "}" * 60,
    "5000 digits": lambda: '{"train_batch_size": ' + "9" * 5000 + "}",
    "4000 digits": lambda: '{"train_batch_size": ' + "9" * 4000 + "}",
    "20000 hexadecimal digits": lambda: "{train_batch_size: 0x" + "f" * 20_000 + "}",
    "an infinite number": lambda: '{"train_batch_size": 1e999, "gradient_clipping": NaN}',
    "quotes without an end": lambda: '{"' + '\\"' * 200_000,
    "comments without an end": lambda: "{" + "/*" * 200_000,
    "20000 keys": lambda: "{" + ",\n".join(f'"k{k}": 1' for k in range(20_000)) + "}",
    "100000 times one key": lambda: "{" + ",".join('"k": 1' for k in range(100_000)) + "}",
    "100000 keys with a comment": lambda: "{//\n" + ",\n".join(f'"k{k}": 1' for k in range(60_000)) + "}",
    "a list of 16000 with a comment": lambda: "{a: [" + "1," * 16_000 + "]}",
    "four megabytes": lambda: '{"a": "' + "x" * (4 << 20) + '"}',
    "base64 of no config": lambda: "eyJhIjogW1tbW1tbW1tbW1tbW1tb",
    "a lone surrogate": lambda: '{"\\ud800": 1}',
    "a lone surrogate among choices": lambda: '{"zero_optimization": {"offload_param": {"device": "\\ud800"}}}',
    "a list": lambda: "[1, 2]",
}


def _all() -> Iterator[tuple[str, str, Callable[[Path], bytes]]]:
    for reader in ("pickle", "deepspeed", "dcp"):
        for name, make in _PICKLES.items():
            if reader == "pickle" or name in _FOR_EACH:
                yield reader, name, lambda _, make=make: make()  # type: ignore[misc]
    for name, build in _ARCHIVES.items():
        yield "torch archive", name, build
    for name, build in _CHECKPOINTS.items():
        yield "checkpoint", name, build
    yield "safetensors", "a header of an exabyte", lambda _: (1 << 60).to_bytes(8, "little") + b"{}"
    yield "safetensors", "a header nested 100000 deep", lambda _: (100_000).to_bytes(8, "little") + b"[" * 100_000
    for reader, texts in (("yaml", _YAML), ("json", _JSON)):
        for name, text in texts.items():
            yield reader, name, lambda _, text=text: text().encode("utf-8", "surrogatepass")  # type: ignore[misc]
    yield "hostfile", "a billion slots", lambda _: b"node1 slots=999999999999"
    yield "hostfile", "no slots", lambda _: b"node1 slots=00"
    yield "hostfile", "100000 machines", lambda _: b"".join(b"node%d slots=8\n" % k for k in range(100_000))
    yield "hostfile", "a long line", lambda _: b"n" * 1_000_000 + b" slots=8 x"


BOMBS: Mapping[tuple[str, str], Callable[[Path], bytes]] = {(reader, name): make for reader, name, make in _all()}


def bomb(reader: str, name: str, folder: Path) -> bytes:
    """Returns the content of one bomb; `folder` is an empty folder for intermediate files."""
    return BOMBS[reader, name](folder)
