"""Trackers: logs the same numbers to TensorBoard, Weights & Biases, or your own tracker.

    zeroaccel launch --num_processes 2 examples/by_feature/tracking.py \\
        --with_tracking --report_to tensorboard --project_dir runs/disc
    tensorboard --logdir runs/disc
"""

import argparse
import json
from pathlib import Path

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from zeroaccel import Accelerator, GeneralTracker, set_seed


def points(count=256):
    """Returns points of the plane, and for each 1 if it lies in a disc."""
    x = torch.randn(count, 2, generator=torch.Generator().manual_seed(0))
    return TensorDataset(x, (x.norm(dim=1) < 1.2).long())


class JsonLines(GeneralTracker):
    """Writes one line of JSON per call of `log`. A tracker is an instance of a class with these methods."""

    name = "jsonl"

    def __init__(self, path):
        self.path = Path(path)

    def store_init_configuration(self, values):
        self.path.parent.mkdir(parents=True, exist_ok=True)
        self.path.write_text(json.dumps(values) + "\n")

    def log(self, values, step=None, **kwargs):
        with self.path.open("a") as file:
            file.write(json.dumps({"step": step, **values}) + "\n")


def main(argv=None):
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--with_tracking", action="store_true")
    parser.add_argument("--report_to", default="all", help="all, tensorboard, wandb or jsonl")
    parser.add_argument("--project_dir", default="runs", help="folder of the trackers")
    parser.add_argument("--num_epochs", type=int, default=3)
    parser.add_argument("--batch_size", type=int, default=8, help="per process")
    parser.add_argument("--lr", type=float, default=1e-2)
    parser.add_argument("--seed", type=int, default=42)
    args = parser.parse_args(argv)

    report_to = JsonLines(Path(args.project_dir, "log.jsonl")) if args.report_to == "jsonl" else args.report_to
    accelerator = Accelerator(log_with=report_to if args.with_tracking else None, project_dir=args.project_dir)
    set_seed(args.seed)

    dataloader = DataLoader(points(), args.batch_size, shuffle=True)
    model = nn.Sequential(nn.Linear(2, 32), nn.Tanh(), nn.Linear(32, 2))
    optimizer = torch.optim.AdamW(model.parameters(), lr=args.lr)
    model, optimizer, dataloader = accelerator.prepare(model, optimizer, dataloader)

    # All processes may call it: trackers of other processes than the main one do nothing.
    accelerator.init_trackers("disc", config=vars(args))
    step = 0
    for epoch in range(args.num_epochs):
        total = torch.zeros((), device=accelerator.device)
        for x, y in dataloader:
            loss = nn.functional.cross_entropy(model(x), y)
            accelerator.backward(loss)
            optimizer.step()
            optimizer.zero_grad()
            total += loss.detach()
            step += 1
            accelerator.log({"lr": optimizer.param_groups[0]["lr"]}, step=step)
        mean = accelerator.reduce(total, "mean").item() / len(dataloader)
        accelerator.log({"train_loss": mean, "epoch": epoch}, step=step)
        accelerator.print(f"epoch {epoch}: loss {mean:.6f}")
    accelerator.end_training()  # also closes the trackers


if __name__ == "__main__":
    main()
