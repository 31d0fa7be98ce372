"""Image classification: a small convolutional network distinguishes squares, discs, triangles and crosses in noise.

    zeroaccel launch --num_processes 2 --zero_stage 2 examples/cv_example.py

The data set draws each image from its number on access; the example downloads nothing.
"""

import argparse

import torch
from torch import nn
from torch.optim.lr_scheduler import OneCycleLR
from torch.utils.data import DataLoader, Dataset

from zeroaccel import Accelerator, set_seed

SIZE = 24


class Shapes(Dataset):
    """`length` images of (1, SIZE, SIZE) with the index of their shape; `first` is the number of the first image."""

    def __init__(self, length, first=0):
        self.length, self.first = length, first

    def __len__(self):
        return self.length

    def __getitem__(self, index):
        random = torch.Generator().manual_seed(self.first + index)
        x0, y0 = (torch.rand(2, generator=random) * 8 + SIZE / 2 - 4).tolist()
        radius = 4 + 4 * torch.rand((), generator=random).item()
        label = int(torch.randint(4, (), generator=random))
        y, x = torch.meshgrid(torch.arange(SIZE) - y0, torch.arange(SIZE) - x0, indexing="ij")
        square = (x.abs() < radius) & (y.abs() < radius)
        shape = (
            square,
            x**2 + y**2 < radius**2,
            square & (y > 2 * x.abs() - radius),
            square & ((x.abs() < radius / 3) | (y.abs() < radius / 3)),
        )[label]
        return shape.float()[None] + 0.3 * torch.randn(1, SIZE, SIZE, generator=random), label


def network(width=16, classes=4):
    def block(inputs, outputs):
        return nn.Sequential(
            nn.Conv2d(inputs, outputs, 3, padding=1), nn.GroupNorm(4, outputs), nn.ReLU(), nn.MaxPool2d(2)
        )

    return nn.Sequential(
        block(1, width), block(width, 2 * width), nn.AdaptiveAvgPool2d(3), nn.Flatten(), nn.Linear(18 * width, classes)
    )


def main(argv=None):
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--mixed_precision", choices=["no", "fp16", "bf16"], help="default: as set by the launcher")
    parser.add_argument("--num_epochs", type=int, default=5)
    parser.add_argument("--images", type=int, default=2000, help="training images; a quarter as many for evaluation")
    parser.add_argument("--batch_size", type=int, default=32, help="per process")
    parser.add_argument("--lr", type=float, default=1e-2)
    parser.add_argument("--seed", type=int, default=42)
    args = parser.parse_args(argv)

    accelerator = Accelerator(mixed_precision=args.mixed_precision)
    set_seed(args.seed)

    train_dataloader = DataLoader(Shapes(args.images), args.batch_size, shuffle=True)
    eval_dataloader = DataLoader(Shapes(args.images // 4, first=10**9), args.batch_size)
    model = network()
    optimizer = torch.optim.Adam(model.parameters(), lr=args.lr / 25)
    model, optimizer, train_dataloader, eval_dataloader = accelerator.prepare(
        model, optimizer, train_dataloader, eval_dataloader
    )
    schedule = OneCycleLR(optimizer, max_lr=args.lr, epochs=args.num_epochs, steps_per_epoch=len(train_dataloader))
    schedule = accelerator.prepare(schedule)

    accuracies = []
    for epoch in range(args.num_epochs):
        model.train()
        for images, labels in train_dataloader:
            loss = nn.functional.cross_entropy(model(images), labels)
            accelerator.backward(loss)
            optimizer.step()
            schedule.step()
            optimizer.zero_grad()

        model.eval()
        correct = total = 0
        for images, labels in eval_dataloader:
            with torch.no_grad():
                predicted = model(images).argmax(dim=-1)
            right = accelerator.gather_for_metrics(predicted == labels)
            correct, total = correct + right.sum().item(), total + len(right)
        accuracies.append(correct / total)
        accelerator.print(f"epoch {epoch}: accuracy {accuracies[-1]:.3f} over {total} images")
    accelerator.end_training()
    return accuracies


if __name__ == "__main__":
    main()
