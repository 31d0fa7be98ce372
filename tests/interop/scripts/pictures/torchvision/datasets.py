"""`torchvision.datasets.CIFAR10` with generated pictures, whose mean colour encodes their class."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
from PIL import Image
from torch.utils.data import Dataset

_CLASSES = 10


class CIFAR10(Dataset[tuple[Any, int]]):
    """160 pictures of 32 x 32 for training, 40 for testing; the arguments are torchvision's."""

    def __init__(
        self,
        root: str,
        train: bool = True,
        transform: Callable[[Any], Any] | None = None,
        target_transform: Callable[[Any], Any] | None = None,
        download: bool = False,
    ) -> None:
        generator = np.random.default_rng(int(train))
        count = 160 if train else 40
        self.targets = [index % _CLASSES for index in range(count)]
        noise = generator.integers(0, 64, size=(count, 32, 32, 3))
        colours = generator.permutation(_CLASSES)[self.targets] * 19
        self.data = (noise + colours[:, None, None, None]).astype(np.uint8)
        self.transform, self.target_transform = transform, target_transform

    def __len__(self) -> int:
        return len(self.targets)

    def __getitem__(self, index: int) -> tuple[Any, int]:
        image: Any = Image.fromarray(self.data[index])
        target = self.targets[index]
        return (
            self.transform(image) if self.transform else image,
            self.target_transform(target) if self.target_transform else target,
        )
