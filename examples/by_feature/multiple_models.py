"""Several models: a frozen teacher under ZeRO-3, for inference only, and a student that is trained under ZeRO-2.

    zeroaccel launch --num_processes 2 examples/by_feature/multiple_models.py

Each model has a plugin, which sets its stage and offload. `accelerator.backward` finds the right engine.
"""

import argparse

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from zeroaccel import Accelerator, ZeroPlugin, set_seed


class Teacher(nn.Module):
    """Exact scores of the two classes: outside and inside a disc."""

    def __init__(self):
        super().__init__()
        self.radius = nn.Parameter(torch.tensor([1.2]))

    def forward(self, x):
        inside = 8 * (self.radius - x.norm(dim=1))
        return torch.stack([-inside, inside], dim=1)


def main(argv=None):
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--num_epochs", type=int, default=5)
    parser.add_argument("--batch_size", type=int, default=8, help="per process")
    parser.add_argument("--lr", type=float, default=1e-2)
    parser.add_argument("--seed", type=int, default=42)
    args = parser.parse_args(argv)

    plugins = {"student": ZeroPlugin(zero_stage=2), "teacher": ZeroPlugin(zero_stage=3)}
    accelerator = Accelerator(deepspeed_plugins=plugins)
    set_seed(args.seed)

    points = torch.randn(256, 2)
    dataloader = DataLoader(TensorDataset(points), args.batch_size, shuffle=True)
    student = nn.Sequential(nn.Linear(2, 32), nn.Tanh(), nn.Linear(32, 2))
    optimizer = torch.optim.AdamW(student.parameters(), lr=args.lr)
    student, optimizer, dataloader = accelerator.prepare(student, optimizer, dataloader)
    # From here on, `prepare` uses the other plugin; a model without an optimizer is for inference.
    accelerator.state.select_deepspeed_plugin("teacher")
    teacher = accelerator.prepare(Teacher().requires_grad_(False))

    curve = []
    for epoch in range(args.num_epochs):
        for (x,) in dataloader:
            with torch.no_grad():
                target = teacher(x).softmax(dim=-1)
            loss = nn.functional.cross_entropy(student(x), target)
            accelerator.backward(loss)
            optimizer.step()
            optimizer.zero_grad()
        curve.append(accelerator.reduce(loss.detach(), "mean").item())
        accelerator.print(f"epoch {epoch}: loss {curve[-1]:.6f}")
    accelerator.end_training()
    return curve


if __name__ == "__main__":
    main()
