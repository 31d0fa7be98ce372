"""Builds a release into dist/ and checks it: metadata, contents, and an installation from the wheel and from the sdist.

    make release                                            # without project URLs
    make release RELEASE_ARGS="--repository https://..."    # with project URLs, and a README whose links lead there
    make release RELEASE_ARGS=--draft                       # between two releases: without the check of the changelog

The version is `zeroaccel.__version__`; CHANGELOG.md and CITATION.cff must have the same one. An empty "Unreleased" may
come before it. The archives contain the files that git tracks. The program uploads nothing and makes no tag.
"""

from __future__ import annotations

import argparse
import ast
import re
import shutil
import subprocess
import sys
import tarfile
import tempfile
import zipfile
from collections.abc import Iterable, Sequence
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
_LINK = re.compile(r"(?<!!)\[([^\]]*)\]\((?!https?://|#|mailto:)([^)\s]+)\)")
_IN_SDIST = (
    ".ci/run",
    ".mkdocs.yml",
    "CHANGELOG.md",
    "CITATION.cff",
    "LICENSE",
    "Makefile",
    "cli/main.py",
    "constraints.txt",
    "docs/design.md",
    "docs/site/pages.py",
    "examples/train_gpt.py",
    "templates/slurm.sbatch",
    "tests/conftest.py",
    "tests/multi/zero/test_promise.py",
    "zeroaccel/__init__.py",
)
_IN_WHEEL = (
    "zeroaccel/cli/main.py",
    "zeroaccel/ops/device_kernels.cu",
    "zeroaccel/py.typed",
    "zeroaccel/templates/slurm.sbatch",
    "zeroaccel/templates/zero_stage3_bf16.json",
)
_TRAINS = """
import torch, zeroaccel
model = torch.nn.Linear(4, 1)
config = {"train_micro_batch_size_per_gpu": 2, "zero_optimization": {"stage": 3}, "optimizer": {"type": "Adam"}}
engine, *_ = zeroaccel.initialize(model=model, config=config)
loss = engine(torch.ones(2, 4)).square().mean()
engine.backward(loss)
engine.step()
assert engine.global_steps == 1 and zeroaccel.__file__.startswith(__import__("sys").prefix), zeroaccel.__file__
"""


class ReleaseError(Exception):
    """Raised if the tree, or an archive built from it, is not fit for a release."""


def version_of(tree: Path) -> str:
    """Returns `zeroaccel.__version__`, read from the source without an import."""
    for node in ast.parse((tree / "zeroaccel" / "__init__.py").read_text()).body:
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "__version__":
            return str(ast.literal_eval(node.value))
    raise ReleaseError("zeroaccel/__init__.py: no __version__")


def check_words(tree: Path, version: str) -> None:
    """Checks that the newest section of the changelog and the citation have this version and the same date.

    Raises:
        ReleaseError: if one of them differs; names the file, the line and the expected text.
    """
    lines = (tree / "CHANGELOG.md").read_text().splitlines()
    written = [(n, line) for n, line in enumerate(lines, 1) if line.strip()]
    headings = [n for n, (_, line) in enumerate(written) if line.startswith("## ")]
    if len(headings) > 1 and written[headings[0]][1] == "## Unreleased" and headings[1] == headings[0] + 1:
        headings = headings[1:]  # the empty section of the next version
    at, heading = written[headings[0]] if headings else (0, "no heading")
    said = re.fullmatch(r"## (\S+) \((\d{4}-\d\d-\d\d)\)", heading)
    if said is None or said[1] != version:
        raise ReleaseError(f"CHANGELOG.md:{at}: expected '## {version} (YYYY-MM-DD)' before any other, got {heading!r}")
    citation = (tree / "CITATION.cff").read_text()
    for key, value in (("version", version), ("date-released", f'"{said[2]}"')):
        if f"\n{key}: {value}\n" not in citation:
            raise ReleaseError(f"CITATION.cff: expected '{key}: {value}', as in CHANGELOG.md:{at}")


def stage(tree: Path, to: Path, repository: str) -> None:
    """Copies the files that git tracks; README links point to `repository`, or become plain words without one."""
    names = subprocess.run(["git", "ls-files", "-z"], cwd=tree, capture_output=True, text=True, check=True).stdout
    for name in filter(None, names.split("\0")):
        (to / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy2(tree / name, to / name)
    readme = to / "README.md"
    readme.write_text(outside_the_tree(readme.read_text(), repository))
    if repository:
        urls = {
            "Source": "",
            "Documentation": "/tree/main/docs",
            "Changelog": "/blob/main/CHANGELOG.md",
            "Issues": "/issues",
        }
        lines = "".join(f"    {name} = {repository}{path}\n" for name, path in urls.items())
        settings = to / "setup.cfg"
        text = settings.read_text()
        settings.write_text(text.replace("[metadata]\n", f"[metadata]\nurl = {repository}\nproject_urls =\n{lines}", 1))


def outside_the_tree(markdown: str, repository: str) -> str:
    """Adapts a page for use outside the tree: relative links point to `repository`, or become words without one.

    Example:
        >>> outside_the_tree("[How](docs/how.md)", "https://example.org/it")
        '[How](https://example.org/it/blob/main/docs/how.md)'
        >>> outside_the_tree("[How](docs/how.md)", "")
        'How (docs/how.md)'
    """
    if repository:
        return _LINK.sub(rf"[\1]({repository}/blob/main/\2)", markdown)
    return _LINK.sub(lambda match: match[1] if match[1] == match[2] else f"{match[1]} ({match[2]})", markdown)


def build(tree: Path, to: Path) -> tuple[Path, Path]:
    """Builds the wheel and the sdist of a tree, the wheel from the sdist, like pip."""
    run([sys.executable, "-m", "build", "--outdir", to, tree])
    (wheel,), (sdist,) = to.glob("*.whl"), to.glob("*.tar.gz")
    return wheel, sdist


def check_contents(wheel: Path, sdist: Path) -> None:
    """Checks that the sdist contains the tree, and the wheel only the packages.

    Raises:
        ReleaseError: names the missing or superfluous files.
    """
    with tarfile.open(sdist) as archive:
        there = {name.partition("/")[2] for name in archive.getnames()}
    _expect(sdist, there, _IN_SDIST)
    with zipfile.ZipFile(wheel) as archive:
        there = set(archive.namelist())
    _expect(wheel, there, _IN_WHEEL)
    tops = {name.split("/")[0] for name in there if ".dist-info/" not in name}
    if not any(name.endswith(".dist-info/licenses/LICENSE") for name in there):
        raise ReleaseError(f"{wheel.name}: no LICENSE in it; see license_files in setup.cfg")
    if tops != {"zeroaccel"}:
        raise ReleaseError(f"{wheel.name}: expected the package zeroaccel alone, got {sorted(tops)}")


def _expect(archive: Path, there: set[str], names: Iterable[str]) -> None:
    if missing := [name for name in names if name not in there]:
        raise ReleaseError(f"{archive.name}: {', '.join(missing)} not in it; see MANIFEST.in and setup.cfg")


def check_python(tree: Path) -> None:
    """Checks that no module uses syntax or library features newer than the oldest Python of setup.cfg."""
    oldest = re.search(r"python_requires = >=([\d.]+)", (tree / "setup.cfg").read_text())
    assert oldest, "setup.cfg says which Pythons there are"
    vermin = Path(sys.executable).with_name("vermin")
    words = [vermin, f"--target={oldest[1]}-", "--no-tips", "--violations", "--eval-annotations"]
    run([*words, *(tree / name for name in ("zeroaccel", "cli", "templates"))])


def check_installation(archive: Path, version: str, borrow: bool) -> None:
    """Installs the archive into an empty environment, and uses it from an empty folder.

    Args:
        borrow: use the dependencies of this environment instead of installing them (seconds, not minutes).
    """
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        run([sys.executable, "-m", "venv", *(["--without-pip"] if borrow else []), folder / "venv"])
        python, pip = folder / "venv/bin/python", [sys.executable, "-m", "pip", "--python", folder / "venv/bin/python"]
        install = [*pip, "install", "--quiet", "--disable-pip-version-check"]
        if borrow:
            site = subprocess.run(
                [python, "-c", "import site; print(site.getsitepackages()[0])"],
                capture_output=True,
                text=True,
                check=True,
            )
            behind = [path for path in sys.path if path.endswith("site-packages")]
            # An editable installation has a .pth file, which Python does not run in a folder named by another .pth.
            (Path(site.stdout.strip()) / "behind.pth").write_text("\n".join(behind))
            run([*install, "--no-deps", archive])
        else:
            pins = ["-c", ROOT / "constraints.txt"]
            torch = (ROOT / "constraints.txt").read_text().split("torch==")[1].split()[0]
            run([*install, *pins, f"torch=={torch}"])
            run([*install, *pins, archive])
        program = folder / "venv/bin/zeroaccel"
        said = run([program, "--version"], cwd=folder)
        if version not in said:
            raise ReleaseError(f"{archive.name}: `zeroaccel --version` said {said!r}")
        listed = run([program, "--help"], cwd=folder)
        if missing := [name for name in ("config", "estimate", "launch", "test") if f" {name} " not in listed]:
            raise ReleaseError(f"{archive.name}: `zeroaccel --help` lists no {' and no '.join(missing)}")
        (folder / "train.py").write_text(_TRAINS)
        run([program, "launch", "--cpu", "--num_processes", "2", "train.py"], cwd=folder)


def run(words: Sequence[object], cwd: Path | None = None) -> str:
    """Runs a command, and returns what it printed.

    Raises:
        ReleaseError: if the command fails; includes its last lines.
    """
    result = subprocess.run([str(word) for word in words], cwd=cwd, capture_output=True, text=True, check=False)
    if result.returncode != 0:
        last = "\n".join((result.stdout + result.stderr).strip().splitlines()[-15:])
        raise ReleaseError(f"{' '.join(map(str, words))} ended with {result.returncode}:\n{last}")
    return result.stdout


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--repository", default="", metavar="URL", help="URL of the published tree, for links and project URLs"
    )
    parser.add_argument("--borrow", action="store_true", help="test installations with this environment's dependencies")
    parser.add_argument("--draft", action="store_true", help="build although the changelog has no such version yet")
    parser.add_argument("--allow-dirty", action="store_true", help="build a tree with changes that are not committed")
    parser.add_argument("--out", type=Path, default=ROOT / "dist", help="folder for the archives (%(default)s)")
    arguments = parser.parse_args()
    try:
        changed = run(["git", "status", "--porcelain"], cwd=ROOT)
        if changed and not arguments.allow_dirty:
            raise ReleaseError(f"the tree has changes that are not committed:\n{changed.rstrip()}")
        version = version_of(ROOT)
        if not arguments.draft:
            check_words(ROOT, version)
        with tempfile.TemporaryDirectory() as name:
            stage(ROOT, Path(name) / "tree", arguments.repository.rstrip("/"))
            wheel, sdist = build(Path(name) / "tree", Path(name) / "dist")
            run([sys.executable, "-m", "twine", "check", "--strict", wheel, sdist])
            check_contents(wheel, sdist)
            check_python(Path(name) / "tree")
            for archive in (wheel, sdist):
                check_installation(archive, version, arguments.borrow)
            arguments.out.mkdir(parents=True, exist_ok=True)
            for archive in (wheel, sdist):
                shutil.copy2(archive, arguments.out)
                print(f"{arguments.out / archive.name}: {archive.stat().st_size / 1024:.0f} KiB")
    except ReleaseError as error:
        print(f"release: {error}", file=sys.stderr)
        return 1
    if not arguments.repository:
        print("No --repository was named: the archives have no project URLs, and the links of their README are words.")
    return 0


if __name__ == "__main__":
    sys.exit(main())
