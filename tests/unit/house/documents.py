"""Checks the mentions in documents against the tree: files, symbols, flags, variables and measured figures.

A document is README.md, CONTRIBUTING.md or a page of docs/. This module reads code spans and shell commands; tests/e2e
runs the Python blocks.
"""

from __future__ import annotations

import ast
import builtins
import re
from collections.abc import Collection, Iterator
from dataclasses import dataclass
from functools import cache
from importlib import import_module
from pathlib import Path
from typing import Any

import click
import torch

from zeroaccel.cli.main import SUB_COMMANDS
from zeroaccel.cli.main import main as main_command
from zeroaccel.config.launch.launch_sources import OTHER_VARIABLES
from zeroaccel.config.launch.setting_table import SETTINGS
from zeroaccel.parallel.axes import AXES

ROOT = Path(__file__).resolve().parents[3]
FOLDERS = ("zeroaccel", "cli", "templates", "docs", "tests", "benchmarks", "examples", ".ci")

# Owner -> names that documents mention and the tree lacks.
_FOREIGN = {
    "the reader": "ds_config.json zero3.json train.py zeroaccel.yaml trace.json finished/",
    "transformers": "config.json generation_config.json TrainingArguments base_model_tp_plan load_best_model_at_end "
    "save_only_model",
    "PEFT": "merge_and_unload",
    "accelerate": "cpu_ram_efficient_loading state_dict_type --fsdp_ --fp8_ --parallelism_config_ --tpu",
    "SLURM and Kubernetes": "--signal terminationGracePeriodSeconds",
    "torch": "FSDPParamGroup RegisterPostBackwardFunction foreach_reduce full_tensor device_id spectral_norm "
    "set_modules_to_forward_prefetch summon_full_params",
    "DeepSpeed": "DeepSpeedZeRoOffload PartitionedParameterCoordinator scaled_global_norm swap_tensor/",
    "other libraries": "hparams.yml load_model MALLOC_MMAP_THRESHOLD_",
    "a checkpoint or a saved model": "manifest.json master/ value/ state/ requantized.json",
    "a saved state": "run_state.json run_state_rank00000.safetensors pytorch_model/ pytorch_model_1/ _1",
}
FOREIGN = frozenset(name for names in _FOREIGN.values() for name in names.split())

_FILE = re.compile(
    r"(?:[\w.{},*-]+/)*[\w{},*-]+\.(?:py|md|cu|yml|yaml|toml|cfg|txt|sh|json|svg|h)(?::([\w.]+))?|[\w./-]+/(?:\{[\w,]+\})?"
)
_NAME = re.compile(r"[A-Za-z_][\w.]*")
_UNIT = r"(?:ms|µs|s|seconds|minutes|[GMk]B/s|[GM]bit/s|[GM]iB|[GMK]B|kB|%|times|x)"
_FIGURE = re.compile(rf"(?<![\w.])(\d[\d.,]*) ?{_UNIT}(?!\w)")
_RESULTS = re.compile(r"benchmarks/results/[\w.-]+\.(?:md|json)")


@dataclass(frozen=True)
class Document:
    """A page: its path in the tree and its text."""

    path: str
    text: str

    def spans(self) -> Iterator[str]:
        """Yields code spans outside of blocks."""
        yield from re.findall(r"(?<!`)`([^`\n]+)`(?!`)", re.sub(r"```.*?```", "", self.text, flags=re.DOTALL))

    def commands(self) -> Iterator[str]:
        """Yields lines of shell blocks without comments, and code spans that are commands."""
        for block in re.findall(r"```sh\n(.*?)```", self.text, flags=re.DOTALL):
            for line in block.replace("\\\n", " ").splitlines():
                yield line.partition(" #")[0]
        yield from (span for span in self.spans() if span.startswith("zeroaccel "))

    def sections(self) -> Iterator[str]:
        """Yields the text from each heading to the next, without code blocks."""
        text = re.sub(r"```.*?```", "", self.text, flags=re.DOTALL)
        yield from re.split(r"^#+ ", text, flags=re.MULTILINE)


def documents() -> list[Document]:
    """Returns every document of the tree."""
    paths = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").glob("*.md"))]
    return [Document(path.relative_to(ROOT).as_posix(), path.read_text()) for path in paths]


def absent(document: Document) -> Iterator[str]:
    """Yields the mentions in a document that the tree lacks."""
    for span in document.spans():
        if (file := _FILE.fullmatch(span)) is not None:
            yield from _absent_file(span, file[1])
        elif span.startswith("--"):
            yield from (f"{flag}: no such flag" for flag in _flags_in(span) if flag not in {*known_flags(), *FOREIGN})
        elif re.fullmatch(r"[A-Z]+_[A-Z_]+", span) and span.startswith("ZEROACCEL_"):
            if span.rstrip("_") != "ZEROACCEL" and span not in known_variables():
                yield f"{span}: no such variable"
        else:
            yield from _absent_symbol(span)
    for command in document.commands():
        yield from _absent_command(command)
    for target in re.findall(r"\]\((?!https?:)([^)#\s]+)", document.text):
        if not (ROOT / document.path).parent.joinpath(target).exists() and target not in GENERATED:
            yield f"{target}: no such file"


_PAGES = "api parallel zero estimate commands config_keys launch_keys environment errors deepspeed"
GENERATED = frozenset(f"reference/{page}.md" for page in _PAGES.split())
"""Pages that docs/site generates."""


def unsourced(document: Document) -> Iterator[str]:
    """Yields measured figures (a number and a unit, outside code spans) that no results file of their section has."""
    for section in document.sections():
        results = " ".join((ROOT / path).read_text() for path in _RESULTS.findall(section))
        for match in _FIGURE.finditer(re.sub(r"`[^`]*`|\]\([^)]*\)", "CODE", section)):
            figure = match[0].replace("\n", " ")
            if match[1].rstrip(".,") not in results:
                yield f"{figure}: of {section.splitlines()[0]!r}: no results file of this section has it"


def denials(text: str) -> Iterator[str]:
    """Yields statements in a docstring that deny an axis of the mesh that the table of axes has."""
    words = {"tensor": "layers", "pipeline": "stages", "sequence": "sequences"}
    axes = [word for word in words if any(word in axis.__name__.lower() for axis in AXES)]
    kinds = "|".join([*axes, *(words[axis] for axis in axes)])
    patterns = (
        rf"\b(?:no|not|without any|never) (?:{kinds})[ -]parallel",
        rf"\b(?:{kinds}) (?:are|is) (?:not|never) (?:split|cut|shared|divided)",
        r"\bevery process has all layers|\bby ZeRO alone",
    )
    for pattern in patterns:
        yield from (match[0] for match in re.finditer(pattern, " ".join(text.split()), re.IGNORECASE))


# -- files


@cache
def tree_files() -> frozenset[str]:
    """Returns every file and folder by its path from the root; folders end in a slash."""
    found = {path.name for path in ROOT.iterdir() if path.is_file()}
    for folder in FOLDERS:
        found.add(f"{folder}/")
        for path in (ROOT / folder).rglob("*"):
            if "__pycache__" not in path.parts:
                found.add(path.relative_to(ROOT).as_posix() + "/" * path.is_dir())
    return frozenset(found)


def _absent_file(span: str, symbol: str | None) -> Iterator[str]:
    path = span.partition(":")[0]
    if path in FOREIGN or path.partition("/")[0] in ("build", "trained", "dist"):
        return
    patterns = [re.escape(path)]
    if braces := re.fullmatch(r"(.*)\{(.*)\}(.*)", path):
        patterns = [re.escape(f"{braces[1]}{name}{braces[3]}") for name in braces[2].split(",")]
    for pattern in (pattern.replace(r"\*", "[^/]*") for pattern in patterns):
        matches = [file for file in tree_files() if re.search(rf"(?:^|/){pattern}/?$", file)]
        if not matches:
            yield f"{path}: no such file"
        elif symbol is not None and not any(symbol.split(".")[-1] in words_of(ROOT / file) for file in matches):
            yield f"{path}: has no {symbol}"


# -- symbols


@cache
def words_of(path: Path) -> frozenset[str]:
    """Returns the identifiers of a Python file, including string literals, without docstrings and comments."""
    tree = ast.parse(path.read_text())
    words: set[str] = set()
    for node in ast.walk(tree):
        for child in getattr(node, "body", []) if not isinstance(node, ast.Lambda | ast.IfExp) else []:
            if isinstance(child, ast.Expr) and isinstance(child.value, ast.Constant):
                child.value.value = ""  # a docstring
    for node in ast.walk(tree):
        for name in ("id", "name", "attr", "arg", "module"):
            words.update(re.findall(r"\w+", value) if isinstance(value := getattr(node, name, None), str) else [])
        if isinstance(node, ast.Constant) and isinstance(node.value, str):
            words.update(re.findall(r"\w+", node.value))
    return frozenset(words)


@cache
def known_words() -> frozenset[str]:
    """Returns the identifiers of the tree, of torch and of Python."""
    folders = (
        "zeroaccel",
        "cli",
        "benchmarks",
        "examples",
        ".ci",
        "docs/site",
        "tests/cuda_model",
        "tests/multi",
        "tests/support",
    )
    words = {word for folder in folders for path in (ROOT / folder).rglob("*.py") for word in words_of(path)}
    for text in [*(ROOT / "templates").iterdir(), ROOT / "setup.cfg", ROOT / "Makefile", ROOT / "pyproject.toml"]:
        words.update(re.findall(r"\w+", text.read_text()) if text.is_file() else [])
    for file in tree_files():
        words.update(re.split(r"[./]", file))
    modules = (
        "nn optim distributed optim.lr_scheduler utils.data profiler cuda distributed.fsdp distributed.tensor.parallel"
    )
    words.update(dir(builtins), dir(torch), dir(torch.Tensor), dir(torch.nn.Module), dir(torch.optim.Optimizer))
    for module in modules.split():
        words.update(dir(import_module(f"torch.{module}")))
    return frozenset(words)


def _absent_symbol(span: str) -> Iterator[str]:
    """Yields identifiers that look like code (an underscore, a dot, a call, camel case) but do not exist."""
    name = re.split(r"[(\[={ ]", span, maxsplit=1)[0].rstrip(":").removeprefix("@")
    if _NAME.fullmatch(name) is None or name in FOREIGN:
        return
    parts = name.strip(".").split(".")
    if parts[0] == "zeroaccel" and len(parts) > 1:
        if not _resolves(name):
            yield f"{name}: cannot be imported"
    elif parts[0] == "zero" and len(parts) > 1 and parts[1][:1].isupper():
        if not _resolves(f"zeroaccel.{name}"):
            yield f"zeroaccel.{name}: cannot be imported"
    elif "_" in name or "." in name or "(" in span or re.search(r"[a-z][A-Z]", name):
        if parts[0] in ("torch", "transformers", "deepspeed", "accelerate"):
            return
        for part in parts:
            if len(part) > 1 and part not in known_words() and not part.isdigit() and part not in FOREIGN:
                yield f"{span}: nothing is called {part}"


@cache
def _resolves(name: str) -> bool:
    parts = name.split(".")
    for count in range(len(parts), 0, -1):
        try:
            value: Any = import_module(".".join(parts[:count]))
        except ImportError:
            continue
        for part in parts[count:]:
            if part not in getattr(value, "__annotations__", ()) and not hasattr(value, part):
                return False
            value = getattr(value, part, None)
        return True
    return False


# -- commands


@cache
def known_flags() -> frozenset[str]:
    """Returns the flags of the command line and of programs and examples in the tree."""
    flags = {flag for name in SUB_COMMANDS for flag in _flags_of(_command(name))} | set(_flags_of(main_command))
    for folder in ("cli", "zeroaccel", "benchmarks", "examples", "tests/interop", ".ci"):
        for path in (ROOT / folder).rglob("*.py"):
            flags.update(re.findall(r"--[a-z][\w-]+", path.read_text()))
    return frozenset(flags) | {f"--{name}" for name in SETTINGS}


def _command(name: str) -> click.Command:
    command = main_command.get_command(click.Context(main_command), name)
    assert command is not None, name
    return command


def _flags_of(command: click.Command) -> Iterator[str]:
    for parameter in command.params:
        yield from (*parameter.opts, *parameter.secondary_opts)
    for below in getattr(command, "commands", {}).values():
        yield from _flags_of(below)


def _flags_in(text: str) -> list[str]:
    return re.findall(r"(?<!\S)--[a-z][\w-]*", text)


def _absent_command(line: str) -> Iterator[str]:
    words = line.split()
    while words and re.fullmatch(r"[A-Z_]+=\S*", words[0]):
        words.pop(0)
    if not words or words[0] != "zeroaccel" or len(words) < 2 or words[1].startswith("-"):
        return
    if words[1] not in SUB_COMMANDS:
        yield f"zeroaccel {words[1]}: no such command"
        return
    own = line.split(words[1], 1)[1]
    own = re.split(r"\s\S+\.py\b|\s-m\s", own)[0]  # flags after a script belong to the script
    for flag in _flags_in(own):
        if flag not in known_flags() and flag not in FOREIGN:
            yield f"zeroaccel {words[1]} {flag}: no such flag"


@cache
def known_variables() -> Collection[str]:
    """Returns the environment variables of this package."""
    return {*OTHER_VARIABLES, *(variable for row in SETTINGS.values() for variable in row.read_variables)}
