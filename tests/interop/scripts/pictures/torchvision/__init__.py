"""Replaces torchvision if it is missing: the names that the example scripts import, with generated pictures."""

from torchvision import datasets, transforms

__all__ = ["datasets", "transforms"]
