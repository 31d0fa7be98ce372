"""Measures the tree: its size, its modules, its documentation, and the modules that a call passes through.

    python benchmarks/tree_measures.py            # this tree
    python benchmarks/tree_measures.py ../older   # another checkout of it

Code lines contain a token; docstrings, comments and blank lines count separately. A separate process traces two paths,
at world size 1 and stage 3: the modules that get the model, the optimizer or the loader between `Accelerator.prepare`
and the engine, and the modules with a function that one training step calls (the third step: the first two record the
prefetch trace).
"""

from __future__ import annotations

import ast
import io
import json
import re
import subprocess
import sys
import tokenize
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import click

PACKAGE_FOLDERS = ("zeroaccel", "cli")
SMALL_MODULE_LINES = 60
_CODE_BLOCK = re.compile(r"^ *```.*?^ *```", re.DOTALL | re.MULTILINE)
SKIPPED_TOKENS = {
    tokenize.COMMENT,
    tokenize.NL,
    tokenize.NEWLINE,
    tokenize.INDENT,
    tokenize.DEDENT,
    tokenize.ENDMARKER,
}


@dataclass(frozen=True)
class Module:
    """Counts of one file.

    Attributes:
        code, docstring, comments: number of lines of each.
        imports: code lines of import statements and of `__all__`.
        functions: code lines of every function, including methods and nested functions.
        classes: names of the classes at the top of the module.
        imported: modules of the tree that it imports.
    """

    code: int
    docstring: int
    comments: int
    imports: int
    functions: tuple[int, ...]
    classes: tuple[str, ...]
    imported: frozenset[str]


def module_name(path: Path) -> str:
    parts = path.with_suffix("").parts
    parts = parts[:-1] if parts[-1] == "__init__" else parts
    return ".".join(parts if parts[0] == "zeroaccel" else ("zeroaccel", *parts))


def count(text: str, name: str, is_package: bool, names: set[str]) -> Module:
    tree = ast.parse(text)
    tokens = list(tokenize.generate_tokens(io.StringIO(text).readline))
    bearing: set[int] = set()
    for token in tokens:
        if token.type not in SKIPPED_TOKENS:
            bearing.update(range(token.start[0], token.end[0] + 1))
    docstrings: set[int] = set()
    imports: set[int] = set()
    targets: set[str] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str):
            docstrings.update(range(node.lineno, (node.end_lineno or 0) + 1))  # docstrings of fields, too
        if isinstance(node, (ast.Import, ast.ImportFrom)) or (isinstance(node, ast.Assign) and _assigns_all(node)):
            imports.update(range(node.lineno, (node.end_lineno or 0) + 1))
            targets.update(_targets(node, name, is_package, names))
    code = bearing - docstrings
    functions = tuple(
        len(code & set(range(node.lineno, (node.end_lineno or 0) + 1)))
        for node in ast.walk(tree)
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef))
    )
    return Module(
        code=len(code),
        docstring=len(docstrings),
        comments=sum(token.type == tokenize.COMMENT for token in tokens),
        imports=len(imports & code),
        functions=functions,
        classes=tuple(node.name for node in tree.body if isinstance(node, ast.ClassDef)),
        imported=frozenset(targets & names) - {name},
    )


def _assigns_all(node: ast.Assign) -> bool:
    return any(isinstance(to, ast.Name) and to.id == "__all__" for to in node.targets)


def _targets(node: ast.AST, name: str, is_package: bool, names: set[str]) -> Iterator[str]:
    if isinstance(node, ast.Import):
        yield from (alias.name for alias in node.names)
    elif isinstance(node, ast.ImportFrom):
        package = name if is_package else name.rpartition(".")[0]
        base = node.module or ""
        if node.level:
            parent = package.split(".")[: len(package.split(".")) - node.level + 1]
            base = ".".join([*parent, base] if base else parent)
        for alias in node.names:
            yield f"{base}.{alias.name}" if f"{base}.{alias.name}" in names else base


def modules_of(root: Path) -> dict[Path, Module]:
    paths = [path.relative_to(root) for folder in PACKAGE_FOLDERS for path in sorted((root / folder).rglob("*.py"))]
    names = {module_name(path) for path in paths}
    return {path: count((root / path).read_text(), module_name(path), path.stem == "__init__", names) for path in paths}


# Runs in a separate process, in the measured tree.
TRACED = """
import json, os, socket, sys
import torch
from torch import nn
from zeroaccel import Accelerator, ZeroPlugin
torch.manual_seed(0)
blocks = [nn.Sequential(nn.Linear(32, 32), nn.GELU()) for _ in range(4)]
model = nn.Sequential(*blocks, nn.Linear(32, 1))
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
inputs = torch.randn(64, 32)
loader = torch.utils.data.DataLoader(torch.utils.data.TensorDataset(inputs, inputs.sum(1, keepdim=True)), batch_size=8)
accelerator = Accelerator(zero_plugin=ZeroPlugin(zero_stage=3))
subjects = [model, optimizer, loader]
handed, called, engine_made = set(), set(), []

def holds(value):
    if any(value is subject for subject in subjects):
        return True
    inner = value if type(value) in (list, tuple) else vars(value).values() if hasattr(value, "__dict__") else ()
    return any(item is subject for item in inner for subject in subjects)

def module_of(frame):
    name = frame.f_globals.get("__name__", "")
    return name if name == "zeroaccel" or name.startswith("zeroaccel.") else None

def on_prepare(frame, event, _):
    name = module_of(frame)
    if event != "call" or name is None or engine_made:
        return
    code = frame.f_code
    values = [frame.f_locals[each] for each in code.co_varnames[:code.co_argcount + code.co_kwonlyargcount]]
    if any(holds(value) for value in values):
        handed.add(name)
    if code.co_name == "__init__" and type(frame.f_locals.get("self")).__mro__[-2:] and any(
        base.__name__ == "Engine" for base in type(frame.f_locals["self"]).__mro__
    ):
        engine_made.append(name)

def on_step(frame, event, _):
    if event == "call" and (name := module_of(frame)) is not None:
        called.add(name)

sys.setprofile(on_prepare)
model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
sys.setprofile(None)
batches = iter(loader)
for step in range(3):
    features, targets = next(batches)
    if step == 2:
        sys.setprofile(on_step)
    loss = nn.functional.mse_loss(model(features), targets)
    accelerator.backward(loss)
    optimizer.step()
    optimizer.zero_grad()
sys.setprofile(None)
print(json.dumps({"prepare": sorted(handed), "step": sorted(called)}))
"""


def traced(root: Path) -> Mapping[str, list[str]]:
    environment = {"PATH": "/usr/bin:/bin", "HOME": str(Path.home()), "PYTHONPATH": str(root), "OMP_NUM_THREADS": "1"}
    run = subprocess.run(
        [sys.executable, "-c", TRACED], cwd=root, env=environment, capture_output=True, text=True, check=False
    )
    if run.returncode:
        raise SystemExit(run.stderr)
    result: dict[str, list[str]] = json.loads(run.stdout.splitlines()[-1])
    return result


@click.command()
@click.argument("root", type=click.Path(exists=True, file_okay=False, path_type=Path), default=".")
@click.option("--paths/--no-paths", default=True, help="Also trace `prepare` and a training step.")
def main(root: Path, paths: bool) -> None:
    """Prints the measures of a tree."""
    root = root.resolve()
    modules = modules_of(root)
    folders: dict[str, list[Module]] = defaultdict(list)
    for path, module in modules.items():
        top = path.parts[1] if path.parts[0] == "zeroaccel" and len(path.parts) > 2 else ""
        folders["cli" if path.parts[0] == "cli" else f"zeroaccel/{top}" if top else "zeroaccel/*.py"].append(module)

    click.echo("| folder | files | code | docstring | comment lines per 100 code | code per file |")
    click.echo("|---|---|---|---|---|---|")
    for folder, parts in sorted(folders.items(), key=lambda item: -sum(module.code for module in item[1])):
        click.echo(_row(folder, parts))
    click.echo(_row("total", list(modules.values())))

    importers = Counter(target for module in modules.values() for target in module.imported)
    single = [
        path.as_posix()
        for path, module in modules.items()
        if path.stem not in ("__init__", "__main__")
        and importers[module_name(path)] == 1
        and module.code < SMALL_MODULE_LINES
    ]
    code = sum(module.code for module in modules.values())
    functions = [lines for module in modules.values() for lines in module.functions]
    loose = [path.name for path in modules if path.parent == Path("zeroaccel") and path.stem != "__init__"]
    classes = Counter(name for module in modules.values() for name in module.classes)
    files = Counter(path.name for path in modules if not path.stem.startswith("__"))
    imports = sum(module.imports for module in modules.values())
    click.echo("")
    click.echo(_words(root))
    click.echo(f"imports and __all__: {100 * imports / code:.1f} % of the code")
    click.echo(f"functions: {len(functions)}, {code / len(functions):.1f} code lines each; > 60: ", nl=False)
    click.echo(f"{sum(lines > 60 for lines in functions)}, > 100: {sum(lines > 100 for lines in functions)}")
    click.echo(f"modules directly in zeroaccel/: {len(loose)} ({', '.join(sorted(loose))})")
    click.echo(f"class names used twice: {_twice(classes)}")
    click.echo(f"file names used twice: {_twice(files)}")
    click.echo(f"modules with one importer and under {SMALL_MODULE_LINES} code lines: {len(single)} {' '.join(single)}")
    if paths:
        found = traced(root)
        click.echo(f"Accelerator.prepare, modules on the way: {len(found['prepare'])}: {' '.join(found['prepare'])}")
        click.echo(f"training step, modules: {len(found['step'])}: {' '.join(found['step'])}")


def _row(folder: str, parts: list[Module]) -> str:
    code = sum(module.code for module in parts)
    comments = sum(module.comments for module in parts)
    docstrings = sum(module.docstring for module in parts)
    density = 100 * comments / max(code, 1)
    return f"| {folder} | {len(parts)} | {code:,} | {docstrings:,} | {density:.1f} | {code // len(parts)} |"


def _words(root: Path) -> str:
    pages = [root / "README.md", root / "CONTRIBUTING.md", *sorted((root / "docs").rglob("*.md"))]
    texts = [page.read_text() for page in pages if page.exists()]
    every = sum(len(text.split()) for text in texts)
    words = sum(any(map(str.isalnum, token)) for text in texts for token in text.split())  # without the bars of tables
    prose = sum(len(_CODE_BLOCK.sub("", text).split()) for text in texts)
    return (
        f"documents: {len(texts)} pages, {every:,} tokens between blanks, {prose:,} without code blocks; "
        f"{words:,} have a letter or digit"
    )


def _twice(names: Counter[str]) -> str:
    return " ".join(sorted(name for name, uses in names.items() if uses > 1)) or "none"


if __name__ == "__main__":
    main()
