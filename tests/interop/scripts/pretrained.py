"""transformers' classes from files: each loads, trains one step and saves under DDP and at stages 2 and 3.

    python tests/interop/scripts/pretrained.py --work DIR [--only 'Bert*,Esm*'] [--heads 'masked LM,CTC'] [--table FILE]

The classes are those of `tests/multi/zero/zoo.py`, which makes a small model of each; its files are written here. A row
is "equal" if stage 3 saves the files of stage 2 to the last bit, DDP saves them within rounding, and plain transformers
loads the files of stage 3 without a missing name. The models are in evaluation mode, since layers that drop at random
differ between ranks.
"""

from __future__ import annotations

import argparse
import os
import shutil
import sys
import warnings
from collections.abc import Mapping
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[3]))

from tests.interop.scripts import beside_ddp  # before transformers
from tests.interop.scripts.beside_ddp import MODES, Outcome, zero_config

# isort: split
import accelerate
import torch
import transformers
from accelerate.utils import DeepSpeedPlugin

from tests.multi.zero.zoo import build, classes, loss_of, varied

_HEADS = "masked LM,CTC,audio classification,speech seq2seq,seq2seq"


def _write(kind: str, name: str, source: Path) -> str:
    """Writes a small model and a batch in a fork, since forks of a process that has computed may hang.

    Returns:
        The reason, if the class cannot be made small; otherwise "".
    """
    source.mkdir(parents=True, exist_ok=True)
    child = os.fork()
    if child == 0:
        reason = ""
        try:
            model, batch = build(kind, name, 0)
            model.save_pretrained(source)
            torch.save(batch, source / "batch.pt")
        except BaseException as error:
            reason = str(error).partition("\n")[0] or type(error).__name__
        (source / "reason").write_text(reason)
        os._exit(0)
    os.waitpid(child, 0)
    return (source / "reason").read_text()


def _case(name: str, source: Path) -> beside_ddp.Case:
    def case(mode: str, folder: Path) -> Mapping[str, Any]:
        batch = torch.load(source / "batch.pt")
        rank = int(os.environ["RANK"])
        if mode == "ddp":
            unused = accelerate.DistributedDataParallelKwargs(find_unused_parameters=True)
            accelerator = accelerate.Accelerator(cpu=True, kwargs_handlers=[unused])
        else:
            config = {
                **(zero_config(mode) or {}),
                "train_micro_batch_size_per_gpu": 2,
                "gradient_accumulation_steps": 1,
            }
            config = {key: value for key, value in config.items() if value != "auto"}
            accelerator = accelerate.Accelerator(deepspeed_plugin=DeepSpeedPlugin(hf_ds_config=config))
        model = getattr(transformers, name).from_pretrained(source).eval()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
        model, optimizer = accelerator.prepare(model, optimizer)
        loss = loss_of(model(**varied(dict(batch), rank)))
        accelerator.backward(loss)
        optimizer.step()
        state = accelerator.get_state_dict(model)
        accelerator.unwrap_model(model).save_pretrained(
            folder / "final", is_main_process=accelerator.is_main_process, state_dict=state
        )
        accelerator.wait_for_everyone()
        return {"loss": float(loss)}

    return case


def _verdict(name: str, outcomes: Mapping[str, Outcome]) -> str:
    said = beside_ddp.verdict(outcomes)
    if said != "equal":
        return said
    _, info = getattr(transformers, name).from_pretrained(outcomes["3"].folder / "final", output_loading_info=True)
    return f"missing in the files: {sorted(info['missing_keys'])[:3]}" if info["missing_keys"] else said


def main() -> None:
    """Runs the chosen classes and prints the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--work", type=Path, required=True)
    parser.add_argument("--only", default="*")
    parser.add_argument("--heads", default=_HEADS)
    parser.add_argument("--table", type=Path)
    options = parser.parse_args()
    warnings.simplefilter("ignore")
    transformers.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()
    rows = []
    for head, kind, name in classes():
        if head not in options.heads.split(",") or not any(fnmatch(name, each) for each in options.only.split(",")):
            continue
        work = options.work.absolute()
        if reason := _write(kind, name, work / "sources" / name):
            print(name, "not built:", reason, flush=True)
            continue
        outcomes = beside_ddp.run(_case(name, work / "sources" / name), name, work / "runs")
        rows.append((f"{head}: {name}", _verdict(name, outcomes)))
        print(*rows[-1], sep=": ", flush=True)
        for mode in MODES:
            shutil.rmtree(work / "runs" / name / mode / "final", ignore_errors=True)
    beside_ddp.table(rows, ("class", "result"), options.table)


if __name__ == "__main__":
    main()
