"""Stands in for torchvision where there is none: the names that the example scripts import, on made-up pictures."""

from torchvision import datasets, transforms

__all__ = ["datasets", "transforms"]
