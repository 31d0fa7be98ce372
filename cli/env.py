"""`zeroaccel env`: versions, the machine and the settings in force, for reports of problems."""

from __future__ import annotations

import json
import os
import platform
from importlib import metadata
from pathlib import Path

import click

import zeroaccel
from zeroaccel.config.launch.launch_file import find_launch_file

from .machine import look

__all__ = ["env"]

_PACKAGES = ("torch", "numba", "numpy", "pydantic", "safetensors", "transformers", "accelerate", "peft", "trl", "cupy")
_SETTINGS = ("ZEROACCEL_", "ACCELERATE_", "NCCL_", "GLOO_", "OMP_", "CUDA_VISIBLE", "TORCH_")
_SECRET = ("KEY", "TOKEN", "SECRET", "PASSWORD")


@click.command(short_help="Versions, machine and settings, for reports of problems.")
@click.option("--json", "as_json", is_flag=True, help="For programs.")
def env(as_json: bool) -> None:
    """Print the versions of what zeroaccel works with, what this machine has, and the settings that are in force."""
    facts = {
        "zeroaccel": zeroaccel.__version__,
        "Python": platform.python_version(),
        "system": platform.platform(),
        **{name: version for name in _PACKAGES if (version := _version(name))},
    }
    for heading, content in look(os.environ).lines():
        if heading != "torch":
            facts[heading] = f"{facts[heading]}; {content}" if heading in facts else content
    found = find_launch_file(None, os.environ, Path.cwd())
    facts["launch file"] = "none" if found is None else f"{found[0]} ({found[1]})"
    if found is not None and not found[0].is_file():
        facts["launch file"] += ", which is no file"
    facts |= {
        name: "(set)" if any(word in name for word in _SECRET) else value
        for name, value in sorted(os.environ.items())
        if name.startswith(_SETTINGS)
    }
    if as_json:
        click.echo(json.dumps(facts, indent=2))
        return
    width = max(map(len, facts))
    for name, value in facts.items():
        click.echo(f"{name:<{width}}  {value}")


def _version(package: str) -> str:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return ""
