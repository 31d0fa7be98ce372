"""Ranks that train adapters on a frozen base in the codes of its checkpoint, beside transformers on one process.

    train_codes.py FOLDER [life/]FORMAT/KIND:CLASS ...

Rank 0 prints one JSON line per class: the losses of the decoded model on one process and of each stage, and the bytes
of codes on all ranks by bytes in the files; with `life/`, what saves, resumes, tiers and reads yield at stage 3.
"""

from __future__ import annotations

import copy
import json
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[3]))

from tests.multi.compat.load_pretrained import source  # isort: skip - installs the facade
import deepspeed  # type: ignore[import-not-found]
import torch
import transformers
from peft import LoraConfig, get_peft_model
from torch import Tensor
from transformers.integrations import HfDeepSpeedConfig

from zeroaccel.errors import ZeroAccelError
from zeroaccel.zero.access.coded_weights import CodedWeight
from zeroaccel.zero.access.param_registry import handle_of

LR = 0.1
EXPERTS = ("mlp.experts.gate_up_proj", "mlp.experts.down_proj")


def batches() -> Iterator[Tensor]:
    draws = torch.Generator().manual_seed(1)
    for _ in range(3):
        yield torch.randint(0, 90, (4, 12), generator=draws)


def adapted(name: str, folder: Path) -> Any:
    model = getattr(transformers, name.partition(":")[2]).from_pretrained(folder, dtype=torch.float32)
    torch.manual_seed(0)
    experts = EXPERTS if "moe" in name or "gpt_oss" in name else None
    kind: dict[str, Any] = {"target_modules": ["q_proj", "o_proj"], "target_parameters": experts}
    return get_peft_model(model, LoraConfig(r=4, init_lora_weights=False, **kind))


def on_one_process(name: str, folder: Path) -> list[float]:
    model = adapted(name, folder).float()
    model.train()
    optimizer = torch.optim.SGD([each for each in model.parameters() if each.requires_grad], lr=LR, momentum=0.9)
    losses = []
    for batch in batches():
        loss = model(input_ids=batch, labels=batch).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def config_of(stage: int, **zero: Any) -> dict[str, Any]:
    return {
        "train_micro_batch_size_per_gpu": 2,
        "zero_optimization": {
            "stage": stage,
            "frozen_weights": "codes",
            "stage3_param_persistence_threshold": 0,
            **zero,
        },
        "optimizer": {"type": "SGD", "params": {"lr": LR, "momentum": 0.9}},
        "gradient_clipping": 0.0,
    }


@contextmanager
def engine_of(name: str, folder: Path, config: dict[str, Any]) -> Iterator[Any]:
    known = HfDeepSpeedConfig(config)
    engine, *_ = deepspeed.initialize(model=adapted(name, folder), config=config)
    try:
        yield engine
    finally:
        engine.destroy()
        del known


def train(engine: Any) -> list[float]:
    rank, losses = torch.distributed.get_rank(), []
    for batch in batches():
        own = batch[2 * rank : 2 * rank + 2]
        loss = engine(input_ids=own, labels=own).loss
        engine.backward(loss)
        engine.step()
        total = loss.detach().clone()
        torch.distributed.all_reduce(total)
        losses.append(total.item() / 2)
    return losses


def coded(engine: Any) -> dict[str, CodedWeight]:
    return {name: param for name, param in engine.module.named_parameters() if isinstance(param, CodedWeight)}


def shard_numel(weight: CodedWeight) -> int:
    handle = handle_of(weight.codes)
    assert handle is not None
    return (
        handle.slot.numel
        if handle.buffer.shard.range.numel > handle.buffer.own.numel
        else handle.reach(handle.buffer.rank).numel
    )


def said(call: Callable[[], object]) -> str:
    try:
        call()
    except ZeroAccelError as error:
        return str(error)
    return ""


def life(name: str, folder: Path) -> dict[str, Any]:
    """Saves, resumes, offloads and reads codes at stage 3."""
    row: dict[str, Any] = {"name": f"life/{name}"}
    config, values = config_of(3), adapted(name, folder).state_dict()
    with engine_of(name, folder, config) as engine:
        row["first"] = train(engine)
        weights = coded(engine)
        key, weight = next(iter(weights.items()))
        engine.save_checkpoint(str(folder / "run"))
        state = engine._consolidated_16bit_state_dict() or {}
        first = not torch.distributed.get_rank()  # others have names and shapes
        row["decoded"] = [key for key in weights if first and not torch.equal(state[key], values[key].float())]
        with deepspeed.zero.GatheredParameters([weight]):
            row["gathered"] = torch.equal(weight.float(), values[key].float())
        row["outside"], row["write"] = said(weight.sum), said(lambda: weight.data.add_(1))
        row["more"] = train(engine)
    with engine_of(name, folder, config) as engine:
        engine.load_checkpoint(str(folder / "run"))
        row["resumed"] = train(engine)
    for tier in ("cpu", "nvme"):
        place = {"device": tier, "nvme_path": str(folder / "tier")}
        with engine_of(name, folder, config_of(3, offload_param=place)) as engine:
            row[tier] = train(engine)
    known = HfDeepSpeedConfig(config)
    model = adapted(name, folder)  # before there is an engine, a read gathers the codes
    weight = next(each for each in model.parameters() if isinstance(each, CodedWeight))
    row["before"] = torch.equal(weight.float(), values[key].float()) and torch.equal(
        copy.deepcopy(weight) * 1, weight * 1
    )
    del known
    return row


def main() -> None:
    """Trains the classes of the command line."""
    deepspeed.init_distributed("gloo")
    for case in sys.argv[2:]:
        name = case.removeprefix("life/")
        folder = Path(sys.argv[1]) / name.replace(":", "-").replace("/", "-")
        reason = source(name, folder)
        if case != name:
            row = life(name, folder)
            if not torch.distributed.get_rank():
                print(json.dumps(row), flush=True)
            continue
        row = {"name": name, "not built": reason, "plain": on_one_process(name, folder)}
        for stage in (0, 2, 3):
            with engine_of(name, folder, config_of(stage)) as engine:
                row[f"stage {stage}"] = train(engine)
                weights = coded(engine).values()
                own = torch.tensor(sum(map(shard_numel, weights)))
                torch.distributed.all_reduce(own)
                row[f"shards {stage}"] = own.item() / sum(weight.codes.numel() for weight in weights)
        row["bytes"] = sum(weight.codes.numel() for weight in weights) / sum(weight.numel() for weight in weights)
        if not torch.distributed.get_rank():
            print(json.dumps(row), flush=True)


if __name__ == "__main__":
    main()
