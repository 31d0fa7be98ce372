"""Early stopping: one process decides to stop, and all processes stop at the same step.

    zeroaccel launch --num_processes 2 examples/by_feature/early_stopping.py --target_loss 0.3

If only one process left the loop, the others would wait for it. `set_trigger` on one process makes `check_trigger` true
on all.
"""

import argparse

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from zeroaccel import Accelerator, set_seed


def points(count=256):
    """Returns points of the plane, and for each 1 if it lies in a disc."""
    x = torch.randn(count, 2, generator=torch.Generator().manual_seed(0))
    return TensorDataset(x, (x.norm(dim=1) < 1.2).long())


def main(argv=None):
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--target_loss", type=float, default=0.3, help="stop when a process has a smaller loss")
    parser.add_argument("--num_epochs", type=int, default=20)
    parser.add_argument("--batch_size", type=int, default=8, help="per process")
    parser.add_argument("--lr", type=float, default=1e-2)
    parser.add_argument("--seed", type=int, default=42)
    args = parser.parse_args(argv)

    accelerator = Accelerator()
    set_seed(args.seed)

    dataloader = DataLoader(points(), args.batch_size, shuffle=True)
    model = nn.Sequential(nn.Linear(2, 32), nn.Tanh(), nn.Linear(32, 2))
    optimizer = torch.optim.AdamW(model.parameters(), lr=args.lr)
    model, optimizer, dataloader = accelerator.prepare(model, optimizer, dataloader)

    steps, stopped, saw_it = 0, False, False
    for _ in range(args.num_epochs):
        for x, y in dataloader:
            loss = nn.functional.cross_entropy(model(x), y)
            accelerator.backward(loss)
            optimizer.step()
            optimizer.zero_grad()
            steps += 1
            if loss.item() < args.target_loss:
                saw_it = True
                accelerator.set_trigger()
            if stopped := accelerator.check_trigger():
                break
        if stopped:
            break
    accelerator.print(f"{'stopped' if stopped else 'ended'} after {steps} steps")
    accelerator.end_training()
    return steps, stopped, saw_it


if __name__ == "__main__":
    main()
