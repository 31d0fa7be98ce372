"""Saving and resuming: an interrupted and resumed run gives the same bits as an uninterrupted one.

    zeroaccel launch --num_processes 2 --zero_stage 3 examples/by_feature/checkpointing.py \\
        --project_dir runs/disc --checkpointing_steps 5
    ... the same with --resume_from_checkpoint latest

`save_state` saves weights, optimizer, schedule, the position in the shuffled data, random states, and registered
objects.
"""

import argparse

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from zeroaccel import Accelerator, ProjectConfiguration, set_seed


def points(count=256):
    """Returns points of the plane, and for each 1 if it lies in a disc."""
    x = torch.randn(count, 2, generator=torch.Generator().manual_seed(0))
    return TensorDataset(x, (x.norm(dim=1) < 1.2).long())


class Curve:
    """The losses so far; any object with these two methods can be part of a state."""

    def __init__(self):
        self.losses = []

    def state_dict(self):
        return {"losses": self.losses}

    def load_state_dict(self, state):
        self.losses = state["losses"]


def main(argv=None):
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--project_dir", required=True, help="states are saved in its folder checkpoints")
    parser.add_argument("--checkpointing_steps", type=int, default=5, help="updates between two states")
    parser.add_argument("--total_limit", type=int, default=3, help="number of states to keep")
    parser.add_argument("--resume_from_checkpoint", help='a state\'s folder, or "latest"')
    parser.add_argument("--max_train_steps", type=int, help="stop after this many updates, as if interrupted")
    parser.add_argument("--gradient_accumulation_steps", type=int, default=2)
    parser.add_argument("--num_epochs", type=int, default=3)
    parser.add_argument("--batch_size", type=int, default=8, help="per process and micro-batch")
    parser.add_argument("--lr", type=float, default=1e-2)
    parser.add_argument("--seed", type=int, default=42)
    args = parser.parse_args(argv)

    accelerator = Accelerator(
        gradient_accumulation_steps=args.gradient_accumulation_steps,
        project_config=ProjectConfiguration(
            args.project_dir, automatic_checkpoint_naming=True, total_limit=args.total_limit
        ),
    )
    set_seed(args.seed)

    dataloader = DataLoader(points(), args.batch_size, shuffle=True)
    model = nn.Sequential(nn.Linear(2, 32), nn.Dropout(0.1), nn.Tanh(), nn.Linear(32, 2))
    optimizer = torch.optim.AdamW(model.parameters(), lr=args.lr)
    scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.99)
    model, optimizer, scheduler, dataloader = accelerator.prepare(model, optimizer, scheduler, dataloader)
    curve = Curve()
    accelerator.register_for_checkpointing(curve)

    if args.resume_from_checkpoint:
        folder = None if args.resume_from_checkpoint == "latest" else args.resume_from_checkpoint
        accelerator.print(f"resumed from {accelerator.load_state(folder)}, after {len(curve.losses)} updates")

    # After a resume the loader has the epoch of the state, and continues after the last trained batch.
    for epoch in range(dataloader.epoch, args.num_epochs):
        for x, y in dataloader:
            with accelerator.accumulate(model):
                loss = nn.functional.cross_entropy(model(x), y)
                accelerator.backward(loss)
                optimizer.step()
                scheduler.step()
                optimizer.zero_grad()
            if not accelerator.sync_gradients:
                continue
            curve.losses.append(loss.item())
            if len(curve.losses) % args.checkpointing_steps == 0:
                accelerator.save_state()
            if len(curve.losses) == args.max_train_steps:
                accelerator.end_training()
                return curve.losses
        accelerator.print(f"epoch {epoch}: loss {curve.losses[-1]:.6f}")
    accelerator.end_training()
    return curve.losses


if __name__ == "__main__":
    main()
