"""Whether a script takes --local_rank, found by reading its source: it is parsed, never run.

The `deepspeed` command and torch's older launcher hand every process its number on the machine as an argument, and
scripts of that time declare it. Looked at are the script and the modules beside it that it imports, for calls that
declare the option with argparse or click, and for functions that fire makes a command line of.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

__all__ = ["local_rank_option"]

_SPELLINGS = ("--local_rank", "--local-rank")
_DECLARING = ("add_argument", "option")
_MAX_FILES = 60  # of a script's own modules; a declaration lies near it
_MAX_NBYTES = 2_000_000


def local_rank_option(script: Path) -> str | None:
    """The option as the script spells it, "--local_rank" or "--local-rank"; None if it declares none.

    Args:
        script: a file of Python source; one that cannot be parsed declares nothing.
    """
    folder = script.resolve().parent
    waiting, seen = [script.resolve()], set[Path]()
    while waiting and len(seen) < _MAX_FILES:
        path = waiting.pop(0)
        if path in seen:
            continue
        seen.add(path)
        tree = _parsed(path)
        if tree is None:
            continue
        if spelled := _declared(tree):
            return spelled
        waiting += _imported(tree, path, folder)
    return None


def _parsed(path: Path) -> ast.Module | None:
    try:
        if path.stat().st_size > _MAX_NBYTES:
            return None
        return ast.parse(path.read_bytes())
    except (OSError, SyntaxError, ValueError, RecursionError, MemoryError):
        return None


def _declared(tree: ast.Module) -> str | None:
    functions = {one.name: one for one in ast.walk(tree) if isinstance(one, ast.FunctionDef)}
    for call in ast.walk(tree):
        if not isinstance(call, ast.Call):
            continue
        name = call.func.attr if isinstance(call.func, ast.Attribute) else getattr(call.func, "id", "")
        if name in _DECLARING:
            for argument in call.args:
                if isinstance(argument, ast.Constant) and argument.value in _SPELLINGS:
                    return str(argument.value)
        if name == "Fire" and call.args and isinstance(call.args[0], ast.Name):
            function = functions.get(call.args[0].id)
            if function is not None and _takes_local_rank(function):
                return _SPELLINGS[0]
    return None


def _takes_local_rank(function: ast.FunctionDef) -> bool:
    arguments = function.args
    return any(one.arg == "local_rank" for one in (*arguments.args, *arguments.kwonlyargs))


def _imported(tree: ast.Module, path: Path, folder: Path) -> Iterator[Path]:
    """The files beside the script that a module imports."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield from _files(folder, alias.name)
        elif isinstance(node, ast.ImportFrom):
            base = folder if not node.level else path.parents[min(node.level, len(path.parents)) - 1]
            yield from _files(base, node.module or "")
            for alias in node.names:
                yield from _files(base, f"{node.module}.{alias.name}" if node.module else alias.name)


def _files(folder: Path, name: str) -> Iterator[Path]:
    if not name or name.startswith("."):
        return
    place = folder.joinpath(*name.split("."))
    for path in (place.with_name(f"{place.name}.py"), place / "__init__.py"):
        if path.is_file():
            yield path
