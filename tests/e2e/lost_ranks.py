"""A training whose ranks are lost: `zeroaccel launch --max_restarts N` runs it on each rank.

    lost_ranks.py FOLDER STEPS INTERVAL SEED [FAULT,...]

States are saved in memory every INTERVAL steps; with "off" there are no states, and with "disk" every second step saves
one in the folder. The Nth attempt of the launcher suffers the Nth fault; later attempts suffer none. A fault is
KIND:STEP:RANK+...: `kill` and `stop` send SIGKILL and SIGSTOP before the micro-step, `save` kills the rank while it
writes a state in memory (at the first file, or a few milliseconds later), `copy` while a state arrives from another
machine, `load` directly after the run has resumed, `machine` kills the launcher and the rank before the micro-step,
`cut` waits there for the file `cut`, and `later` waits as well before it kills the launcher and the last of its ranks.
Rank 0 writes `resumed.N` (time and step of each attempt's first update) and, at the end, `digest` of the final weights.
`memory` is a link to the launcher's folder of states in memory.
"""

from __future__ import annotations

import hashlib
import os
import signal
import sys
import threading
import time
from contextlib import suppress
from pathlib import Path

import torch
from torch import nn
from torch.utils.data import DataLoader

from zeroaccel import Accelerator, Engine, ProjectConfiguration, ZeroPlugin, set_seed
from zeroaccel.accelerate import peer_copies, run_state


def suffer(kind: str) -> None:
    """Injects the fault `kind` into this process."""
    Path(f"fault.{os.environ['TORCHELASTIC_RESTART_COUNT']}").write_text(f"{time.time()}\n")
    if kind == "machine":
        os.kill(os.getppid(), signal.SIGKILL)
    os.kill(os.getpid(), signal.SIGSTOP if kind == "stop" else signal.SIGKILL)


def suffer_at_next_state(kind: str, seed: int) -> None:
    """Kills this process during the next write or copy of a state."""
    if kind == "copy":
        peer_copies._write = lambda *_: suffer("kill")  # type: ignore[assignment]
    elif seed % 2:
        threading.Timer(0.001 * (seed % 7), suffer, ["kill"]).start()
    else:
        run_state.write_durably = lambda *_: suffer("kill")  # type: ignore[assignment]


def digest_of(model: Engine) -> str:
    """Returns a digest of the weights. (all ranks)"""
    digest = hashlib.sha256()
    for _, weight in model.iter_named_full_params():
        digest.update(weight.detach().contiguous().view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()


def main(folder: str, steps: str, interval: str, seed: str, faults: str = "") -> None:
    os.chdir(folder)
    with suppress(FileExistsError):
        Path("memory").symlink_to(os.environ.get("ZEROACCEL_MEMORY_FOLDER", "none"))
    attempt = int(os.environ["TORCHELASTIC_RESTART_COUNT"])
    kind, at, who = ([*faults.split(","), *[""] * (attempt + 1)][attempt] or ":-1:").split(":")
    project = ProjectConfiguration(
        ".", automatic_checkpoint_naming=True, memory_interval=int(interval) if interval.isdecimal() else None
    )
    accelerator = Accelerator(cpu=True, zero_plugin=ZeroPlugin(zero_stage=int(seed) % 4), project_config=project)
    set_seed(int(seed))
    width = 64
    model = nn.Sequential(nn.Linear(width, width), nn.Dropout(0.1), nn.GELU(), nn.Linear(width, 1))
    count = 24 * int(steps)  # enough samples for any number of ranks
    loader = DataLoader(torch.randn(count, width, generator=torch.Generator().manual_seed(0)), 4, shuffle=True)
    model, optimizer, loader = accelerator.prepare(model, torch.optim.AdamW(model.parameters(), lr=1e-3), loader)
    is_hit = str(accelerator.process_index) in who.split("+")
    accelerator.resume()
    if kind == "load" and is_hit:
        suffer(kind)
    begin = model.global_steps
    for x in loader:
        step = model.global_steps
        if step == int(steps):
            break
        if is_hit and step == int(at) and kind in ("kill", "stop", "machine"):
            suffer(kind)
        if is_hit and step == int(at) and kind in ("cut", "later") and not Path("cut").exists():
            Path(f"fault.{attempt}").touch()
            while not Path("cut").exists():
                time.sleep(0.01)
            if kind == "later" and str(accelerator.process_index) == who.split("+")[-1]:
                suffer("machine")
        if is_hit and step == int(at) and kind in ("save", "copy"):
            suffer_at_next_state(kind, int(seed))
        accelerator.backward(model(x).square().mean())
        optimizer.step()
        optimizer.zero_grad()
        if interval == "disk" and step % 2:
            accelerator.save_state()
        if step == begin and accelerator.is_main_process:
            Path(f"resumed.{attempt}").write_text(f"{time.time()} {begin}\n")
    digest = digest_of(model)
    if accelerator.is_main_process:
        Path("digest").write_text(digest)
    accelerator.end_training()


if __name__ == "__main__":
    main(*sys.argv[1:])
