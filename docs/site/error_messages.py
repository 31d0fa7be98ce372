"""The reference of errors, generated from the code: the message and the remedy of each place that raises an error."""

from __future__ import annotations

import ast
import re
from collections import defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from zeroaccel import errors

__all__ = ["Message", "errors_page", "messages"]

_PARTS = {
    "accelerate": "Accelerator",
    "cli": "Commands",
    "config": "Config and launch files",
    "checkpoint": "Checkpoints",
    "comm": "Ranks and collectives",
    "pipeline": "Pipelines",
    "parallel": "Sequence parallelism and tiling",
    "zero/tensor_parallel.py": "Tensor parallelism",
    "offload": "Offload",
    "zero": "Engine and parameters",
    "optim": "Optimizers and schedules",
    "ops": "Optimizers and schedules",
    "estimate": "Memory estimates",
    "data": "Data",
    "compat": "Under DeepSpeed's names",
    "": "initialize and the rest of the package",
}
_UNSAID = re.compile(r"^(\{\w+\}[:, ]*)+$")


@dataclass(frozen=True)
class Message:
    """A place in the code that raises an error. Values of a run are names in braces.

    Attributes:
        cause: from the docstring of the function that raises the error, or from its handler; empty if the message says
            it.
    """

    error: str
    part: str
    where: str
    expected: str
    fix: str
    cause: str

    @property
    def text(self) -> str:
        """The message as it is printed, up to the value that it got."""
        return f"{self.where}: expected {self.expected}" if self.expected else self.where


@cache
def messages(root: Path) -> tuple[Message, ...]:
    """Returns all messages, in the order of the files under `root` (the tree)."""
    return tuple(_messages(root))


def _messages(root: Path) -> Iterator[Message]:
    names = [name for name in errors.__all__ if name.endswith("Error")]
    for folder in (root / "zeroaccel", root / "cli"):
        for path in sorted(folder.rglob("*.py")):
            tree = ast.parse(path.read_text())
            constants = {
                node.targets[0].id: node.value
                for node in tree.body
                if isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name)
            }
            callers = _callers(tree)
            for node, around in _with_surroundings(tree, ()):
                if isinstance(node, ast.Call) and _name(node.func) in names and node.args:
                    words = {keyword.arg: keyword.value for keyword in node.keywords if keyword.arg}
                    yield Message(
                        _name(node.func),
                        _part(path.relative_to(root).as_posix().removeprefix("zeroaccel/")),
                        _text(node.args[0], constants),
                        *(_text(words[key], constants) if key in words else "" for key in ("expected", "fix")),
                        _cause(_name(node.func), around, callers),
                    )


def _with_surroundings(node: ast.AST, around: tuple[ast.AST, ...]) -> Iterator[tuple[ast.AST, tuple[ast.AST, ...]]]:
    """Yields each node below one, with the functions and handlers around it, innermost first."""
    yield node, around
    if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ExceptHandler)):
        around = (node, *around)
    for child in ast.iter_child_nodes(node):
        yield from _with_surroundings(child, around)


_Function = ast.FunctionDef | ast.AsyncFunctionDef


def _callers(tree: ast.Module) -> Mapping[str, list[_Function]]:
    """Returns name -> the functions of a module that call the function or method of this name."""
    callers: dict[str, list[_Function]] = defaultdict(list)
    functions = [node for node in ast.walk(tree) if isinstance(node, _Function)]
    defined = {function.name for function in functions}
    for function in functions:
        called = {_name(call.func) for call in ast.walk(function) if isinstance(call, ast.Call)}
        for name in (called & defined) - {function.name}:
            callers[name].append(function)
    return callers


def _cause(error: str, around: tuple[ast.AST, ...], callers: Mapping[str, list[_Function]]) -> str:
    """Returns the cause of an error by the `Raises:` of the function around it or of one that calls it.

    Without such an entry it is the exception that the error replaces.
    """
    level = [node for node in around if isinstance(node, _Function)]
    for _ in range(4):
        for function in level:
            docstring = ast.get_docstring(function) or ""
            raises = re.search(r"^Raises:\n(.*?)(?=^\S|\Z)", docstring, re.DOTALL | re.MULTILINE)
            of_error = rf"^ +{error}: (.*?)(?=^ {{4}}\w+: |\Z)"
            if raises and (entry := re.search(of_error, raises[1], re.DOTALL | re.MULTILINE)):
                return " ".join(entry[1].split()).removeprefix("if ").rstrip(".")
        level = list(dict.fromkeys(caller for function in level for caller in callers[function.name]))
    caught = next((node.type for node in around if isinstance(node, ast.ExceptHandler) and node.type), None)
    names = [_name(one) for one in (caught.elts if isinstance(caught, ast.Tuple) else [caught])] if caught else []
    foreign = [f"`{name}`" for name in names if name not in errors.__all__]
    return f"the operation raised {' or '.join(foreign)}" if foreign else ""


def errors_page(root: Path) -> list[str]:
    """Returns the page as lines of Markdown."""
    parts: dict[str, list[Message]] = defaultdict(list)
    for message in messages(root):
        # Leaves out places that only pass on the message of another one.
        if not _UNSAID.match(message.where) or message.expected.strip("{}") != message.expected or message.fix:
            parts[message.part].append(message)
    lines = ["# Errors", "", *_INTRODUCTION, "", "| class | exit code | means |", "|---|---|---|"]
    for name in errors.__all__:
        kind = getattr(errors, name)
        if isinstance(kind, type) and issubclass(kind, errors.ZeroAccelError) and kind is not errors.ZeroAccelError:
            meaning = (kind.__doc__ or "").strip().splitlines()[0]
            lines.append(f"| `{name}` | {kind.exit_code} | {meaning} |")
    lines += ["", "## Messages of other programs", "", "| message | usual cause | remedy |", "|---|---|---|"]
    lines += [f"| `{message}` | {cause} | [{title}](../{page}) |" for message, cause, page, title in FOREIGN]
    for part in dict.fromkeys(_PARTS.values()):
        rows = sorted({(m.text, m.cause, m.fix) for m in parts[part]})
        lines += ["", f"## {part}", "", "| message | cause | what to do |", "|---|---|---|"]
        lines += [f"| {_cell(words)} | {_plain(cause)} | {_cell(fix)} |" for words, cause, fix in rows]
    return lines


FOREIGN = (
    ("torch.OutOfMemoryError: CUDA out of memory", "the device is full", "does_not_fit.md", "Out of memory"),
    ("Watchdog caught collective operation timeout", "ranks wait for each other", "hangs.md", "Debugging hangs"),
    ("Signals.SIGKILL: 9", "often the host's memory is full", "does_not_fit.md", "Out of memory"),
    ("size mismatch for ... torch.Size([0])", "a shard was saved or loaded as a weight", "parameters.md", "Parameters"),
    (
        "CheckpointError: Recomputed values ... have different metadata",
        "a weight was sharded when recomputed",
        "activations.md",
        "Activation checkpointing",
    ),
    ("NCCL error: unhandled system error", "the network or the devices", "doctor.md", "Machine check"),
    ("Address already in use", "another job has the port", "launch.md", "Launching"),
    ("Some NCCL operations have failed or timed out", "ranks wait for each other", "hangs.md", "Debugging hangs"),
    ("exitcode: -9", "the kernel ended a rank: the host's memory is full", "does_not_fit.md", "Out of memory"),
    ("mat2 must be a matrix, got 1-D tensor", "a shard was used as a weight", "parameters.md", "Parameters"),
    ("The size of tensor a (0) must match the size of tensor b", "the same", "parameters.md", "Parameters"),
    (
        "has been marked as ready twice",
        "reentrant recomputation, or a parameter used again in backward",
        "activations.md",
        "Activation checkpointing",
    ),
    ("no_sync is incompatible with gradient partitioning", "DeepSpeed at stages 2 and 3", "training.md", "Engine"),
    ("No module named 'deepspeed'", "a script runs without our launcher", "deepspeed_names.md", "DeepSpeed's names"),
    ("CUDA_HOME does not exist", "DeepSpeed compiles operations; zeroaccel does not", "install.md", "Install"),
    ("Error building extension 'cpu_adam'", "the same", "install.md", "Install"),
    ("Current loss scale already at minimum", "fp16 gradients overflow in every step", "training.md", "Engine"),
    ("Default process group has not been initialized", "the script runs without a launcher", "launch.md", "Launching"),
    ("Cannot re-initialize CUDA in forked subprocess", "CUDA was used before the ranks", "launch.md", "Launching"),
    ("Bus error (core dumped)", "`/dev/shm` of a container is too small", "clusters.md", "SLURM and Kubernetes"),
    ("No space left on device", "checkpoints or offloaded states fill the disk", "checkpoints.md", "Checkpoints"),
)
"""(message of another program, its usual cause, the page with its remedy, title)."""

_INTRODUCTION = (
    "A message of zeroaccel reads `where: expected X, got Y; what to do`. This page lists all messages of the code,",
    "with values of a run as names in braces. Search for the words outside the braces. If a mistake concerns all",
    "ranks, all of them raise the error. [Debugging hangs](../hangs.md) explains hangs, and [the FAQ](../faq.md)",
    "answers frequent questions.",
)


def _part(path: str) -> str:
    return next(title for prefix, title in _PARTS.items() if path.startswith(prefix))


def _name(node: ast.expr) -> str:
    return node.id if isinstance(node, ast.Name) else node.attr if isinstance(node, ast.Attribute) else ""


def _text(node: ast.expr, constants: Mapping[str, ast.expr]) -> str:
    """Returns the text of a message expression, as far as the code determines it."""
    if isinstance(node, ast.Constant):
        return str(node.value)
    if isinstance(node, ast.JoinedStr):
        return "".join(_text(part, constants) for part in node.values)
    if isinstance(node, ast.FormattedValue):
        known = constants.get(_name(node.value))
        return known.value if isinstance(known, ast.Constant) and isinstance(known.value, str) else _unknown(node.value)
    if isinstance(node, ast.IfExp):
        either = [_text(part, constants) for part in (node.body, node.orelse)]
        return " / ".join(dict.fromkeys(part for part in either if part))
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Add):
        return _text(node.left, constants) + _text(node.right, constants)
    if isinstance(node, ast.Name) and node.id in constants:
        return _text(constants[node.id], {})
    return _unknown(node)


def _unknown(node: ast.expr) -> str:
    """Returns a name for a value of a run: {model} for `type(model).__name__`."""
    names = [part.id if isinstance(part, ast.Name) else part.attr for part in ast.walk(node) if _name_like(part)]
    said = [
        name.strip("_") for name in names if name not in ("type", "__name__", "str", "join", "listed", "sorted", "self")
    ]
    return f"{{{said[0] if said else 'value'}}}"


def _name_like(node: ast.AST) -> bool:
    return isinstance(node, (ast.Name, ast.Attribute))


def _cell(text: str) -> str:
    """Returns text for a cell of a table, without Markdown syntax."""
    if not text:
        return ""
    if _UNSAID.match(text):
        return "said in the message"
    return "`" + " ".join(text.split()).replace("`", "'").replace("|", "\\|") + "`"


def _plain(text: str) -> str:
    """Returns a cause for a cell of a table; a message without one has its own words."""
    return (text or "in the message, with the value that it got").replace("|", "\\|").replace("<", "&lt;")
