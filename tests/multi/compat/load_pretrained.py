"""Ranks that load small models with `from_pretrained` at stage 3, beside transformers' own load on one process.

    load_pretrained.py FOLDER [FORMAT/]KIND:CLASS ...

With a format the files have codes and scales, which transformers dequantizes; with `base/` those of the base model.
The classes are those of `tests/multi/zero/zoo.py`. Rank 0 prints one JSON line per class: whether weights, buffers and
the record of names are equal, how many bytes the ranks have read of how many, and how the names in files of
`save_pretrained` differ from those in the source's files. RANKS_PER_NODE simulates several nodes, and ZERO3 adds
settings of stage 3.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[3]))

from zeroaccel import compat

compat.install()

import deepspeed  # type: ignore[import-not-found]  # noqa: E402
import torch  # noqa: E402
import transformers  # noqa: E402
from safetensors import safe_open  # noqa: E402
from safetensors.torch import load_file, save_file  # noqa: E402
from torch import Tensor  # noqa: E402
from transformers.integrations import HfDeepSpeedConfig  # noqa: E402

from tests.multi.zero.zoo import models  # noqa: E402
from zeroaccel.comm.topology import init_process_group  # noqa: E402
from zeroaccel.zero.access.lazy_tensors import Stored  # noqa: E402
from zeroaccel.zero.access.load_safetensors import SafetensorsFolder  # noqa: E402

transformers.logging.set_verbosity_error()
transformers.logging.disable_progress_bar()

ZERO3: dict[str, Any] = {"train_micro_batch_size_per_gpu": 1}
ZERO3 |= {"zero_optimization": {"stage": 3, **json.loads(os.environ.get("ZERO3", "{}"))}}


@contextmanager
def counted() -> Iterator[list[int]]:
    """Yields a list that gets the bytes that each load reads from safetensors files."""
    counts: list[int] = []
    close = SafetensorsFolder.close

    def counting(folder: SafetensorsFolder) -> None:
        counts.append(folder.read_nbytes)
        close(folder)

    SafetensorsFolder.close = counting  # type: ignore[method-assign]
    try:
        yield counts
    finally:
        SafetensorsFolder.close = close  # type: ignore[method-assign]


def values(model: Any) -> dict[str, Tensor]:
    """Returns copies of parameters and persistent buffers under all their names."""
    named = {}
    for name, param in model.named_parameters(remove_duplicate=False):
        with deepspeed.zero.GatheredParameters([param]):
            named[name] = param.detach().clone()
    persistent = model.state_dict().keys()
    return named | {name: each.clone() for name, each in model.named_buffers() if name in persistent}


def names_of(folder: Path) -> dict[str, list[int]]:
    """Returns names and shapes in a folder's files."""
    shapes = {}
    for file in sorted(folder.glob("*.safetensors")):
        with safe_open(file, "pt") as opened:
            shapes |= {name: opened.get_slice(name).get_shape() for name in opened.keys()}  # noqa: SIM118 - not a dict
    return shapes


def same(one: Tensor, other: Tensor) -> bool:
    return one.dtype is other.dtype and one.shape == other.shape and torch.equal(one.nan_to_num(), other.nan_to_num())


def source(name: str, folder: Path) -> str:
    """Writes the files of a class on rank 0; returns the reason if it cannot be built."""
    reason = [""]
    if not torch.distributed.get_rank():
        kind, _, cls = name.rpartition("/")[2].partition(":")
        try:
            model: Any = next(models(kind, cls, 0))
            quantized = name.rpartition("/")[0]
            if quantized == "base":  # files without the head's prefix, as of gpt2
                model.base_model.save_pretrained(folder)
                model.config.architectures = [cls]
                model.config.save_pretrained(folder)
            else:
                model = model.bfloat16() if quantized and "bin" not in quantized else model
                model.save_pretrained(folder, max_shard_size="20KB" if quantized == "bin" else "200KB")
            if "bin" in quantized:
                pickle(folder, quantized)
            elif quantized not in ("", "base"):
                quantize(folder, quantized)
        except Exception as error:
            reason = [f"{type(error).__name__}: {error}".partition("\n")[0]]
    torch.distributed.broadcast_object_list(reason)
    return reason[0]


def pickle(folder: Path, how: str) -> None:
    """Replaces a folder's files by pickles."""
    state, index = {}, folder / "model.safetensors.index.json"
    for file in folder.glob("*.safetensors"):
        tensors = load_file(file)
        state |= tensors
        file.unlink()
        if how == "bin":
            torch.save(tensors, file.with_suffix(".bin"))
    if how == "bin":
        text = index.read_text().replace(".safetensors", ".bin")
        index.rename(folder / "pytorch_model.bin.index.json").write_text(text)
    else:
        index.unlink(missing_ok=True)
        torch.save(state, folder / "pytorch_model.bin", _use_new_zipfile_serialization=how != "old-bin")


def quantize(folder: Path, how: str) -> None:
    """Replaces matrices in a folder's files by codes and scales: random ones for MXFP4."""
    config = json.loads((folder / "config.json").read_text())
    config["quantization_config"] = {"quant_method": how.partition("-")[0]}
    if how.startswith(("fp8", "mxfp8")):
        block = {"fp8-blocks": [8, 8], "fp8-ue8m0": [8, 8], "mxfp8": [1, 32]}.get(how)
        config["quantization_config"] |= {"weight_block_size": block, "activation_scheme": "dynamic"}
    (folder / "config.json").write_text(json.dumps(config))
    for file in folder.glob("*.safetensors"):
        tensors = load_file(file)
        for name in list(tensors):
            if how == "mxfp4" and name.endswith(("gate_up_proj", "down_proj")):
                experts, width, rows = tensors.pop(name).shape
                shape = (experts, rows, width // 32, 16)
                tensors[f"{name}_blocks"] = torch.randint(0, 256, shape, dtype=torch.uint8)
                tensors[f"{name}_scales"] = torch.randint(110, 130, shape[:3], dtype=torch.uint8)
            elif how != "mxfp4" and name.endswith("proj.weight"):
                rows, columns = tensors[name].shape
                lines = {"fp8-channels": (rows, 1), "fp8-tensors": (1, 1), "mxfp8": (rows, columns // 32)}
                grid = lines.get(how, (rows // 8, columns // 8))
                tensors[name] = (tensors[name].float() * 100).to(torch.float8_e4m3fn)
                scales = torch.rand(grid) / 100
                if how in ("fp8-ue8m0", "mxfp8"):
                    scales = torch.randint(115, 125, grid, dtype=torch.uint8)
                tensors[f"{name}_scale_inv"] = scales
        save_file(tensors, file, {"format": "pt"})
    index = folder / "model.safetensors.index.json"
    if index.exists():
        weights = {name: file.name for file in folder.glob("*.safetensors") for name in load_file(file)}
        index.write_text(json.dumps({"metadata": {}, "weight_map": weights}))


def compared(name: str, folder: Path) -> dict[str, Any]:
    cls = getattr(transformers, name.partition(":")[2])
    plain, expected = cls.from_pretrained(folder, output_loading_info=True)
    zero3 = HfDeepSpeedConfig(ZERO3)
    with counted() as counts:
        model, record = cls.from_pretrained(folder, output_loading_info=True)
    sharded = all(hasattr(param, "ds_id") for param in model.parameters())
    ours, theirs = values(model), values(plain)
    nbytes = sum(file.stat().st_size for file in folder.iterdir() if file.suffix in (".safetensors", ".bin"))
    read: list[Any] = [None] * torch.distributed.get_world_size()
    torch.distributed.all_gather_object(read, sum(counts))
    bf16 = {"bf16": {"enabled": next(model.parameters()).dtype is torch.bfloat16}}
    engine, *_ = deepspeed.initialize(model=model, config={**ZERO3, **bf16, "optimizer": {"type": "Adam"}})
    state = engine._consolidated_16bit_state_dict() or {}
    saved = folder.parent / f"{folder.name}-saved"
    model.save_pretrained(saved, state_dict=state, is_main_process=not torch.distributed.get_rank())
    torch.distributed.barrier()
    engine.destroy()
    del zero3
    before, after = names_of(folder), names_of(saved)
    before = before or after  # pickles have the same names
    said = {key: sorted(map(str, value)) for key, value in record.items()}
    again = values(cls.from_pretrained(saved))
    return {
        "name": name,
        "differs": sorted(n for n in ours.keys() | theirs.keys() if n not in ours or not same(ours[n], theirs[n])),
        "record": {key: names for key, names in said.items() if names != sorted(map(str, expected[key]))},
        "sharded": sharded,
        "read": sum(read) / nbytes,
        "nodes": len(init_process_group().nodes),
        "files": sorted(n for n in before.keys() | after.keys() if before.get(n) != after.get(n)),
        "again": sorted(n for n in again.keys() | theirs.keys() if n not in again or not same(again[n], theirs[n])),
    }


def main() -> None:
    """Loads the classes of the command line."""
    if per_node := int(os.environ.get("RANKS_PER_NODE", 0)):
        os.environ |= {"LOCAL_RANK": str(int(os.environ["RANK"]) % per_node), "LOCAL_WORLD_SIZE": str(per_node)}
    deepspeed.init_distributed("gloo")
    Stored.seek_nbytes = 0  # read no byte twice, although the matrices are small
    for name in sys.argv[2:]:
        folder = Path(sys.argv[1]) / name.replace(":", "-").replace("/", "-")
        reason = source(name, folder)
        try:
            row = {"name": name, "not built": reason} if reason else compared(name, folder)
        except Exception as error:
            if len(sys.argv) == 3:
                raise
            row = {"name": name, "error": f"{type(error).__name__}: {error}"[:300]}
        if not int(os.environ["RANK"]):
            print(json.dumps(row), flush=True)


if __name__ == "__main__":
    main()
