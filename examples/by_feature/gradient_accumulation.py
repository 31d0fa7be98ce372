"""Gradient accumulation: `accelerator.accumulate` decides which micro-batches end with an update.

    zeroaccel launch --num_processes 2 --zero_stage 3 examples/by_feature/gradient_accumulation.py \\
        --gradient_accumulation_steps 4

The losses have the same bits at stages that sum gradients in the same order: 0 and 1, and 2 and 3; without
accumulation, at all stages.
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
    parser.add_argument("--gradient_accumulation_steps", type=int, default=1)
    parser.add_argument("--num_epochs", type=int, default=3)
    parser.add_argument("--batch_size", type=int, default=8, help="per process and micro-batch")
    parser.add_argument("--lr", type=float, default=1e-2)
    parser.add_argument("--seed", type=int, default=42)
    args = parser.parse_args(argv)

    accelerator = Accelerator(gradient_accumulation_steps=args.gradient_accumulation_steps)
    set_seed(args.seed)

    dataloader = DataLoader(points(), args.batch_size, shuffle=True)
    model = nn.Sequential(nn.Linear(2, 32), nn.Tanh(), nn.Linear(32, 32), nn.Tanh(), nn.Linear(32, 2))
    optimizer = torch.optim.AdamW(model.parameters(), lr=args.lr)
    model, optimizer, dataloader = accelerator.prepare(model, optimizer, dataloader)

    curve, window = [], []
    for epoch in range(args.num_epochs):
        for x, y in dataloader:
            with accelerator.accumulate(model):
                loss = nn.functional.cross_entropy(model(x), y)
                accelerator.backward(loss)
                optimizer.step()  # acts only at the end of an accumulation, like zero_grad
                optimizer.zero_grad()
            window.append(loss.detach())
            if accelerator.sync_gradients:  # there was an update
                curve.append(accelerator.gather(torch.stack(window)).mean().item())
                window.clear()
        accelerator.print(f"epoch {epoch}: loss {curve[-1]:.6f} after {len(curve)} updates")
    accelerator.end_training()
    return curve


if __name__ == "__main__":
    main()
