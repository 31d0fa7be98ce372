"""Releases have one version everywhere, contain the tracked files, and report their mistakes."""

from __future__ import annotations

import re
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path
from typing import Any

import pytest

import zeroaccel
from tests.support.environment import ROOT
from tests.support.job import run_command
from tests.support.scripts import load_script
from zeroaccel.config.schema import Config
from zeroaccel.config.section import field_paths, nested_section, spellings

CITATION = 'cff-version: 1.2.0\nversion: 1.2.3\ndate-released: "2026-01-31"\n'


release, versions = load_script(".ci/release.py"), load_script(".ci/versions.py")


def test_the_version_is_the_same_everywhere() -> None:
    assert release.version_of(ROOT) == zeroaccel.__version__
    assert f"\nversion: {zeroaccel.__version__}\n" in (ROOT / "CITATION.cff").read_text()
    headings = [line for line in (ROOT / "CHANGELOG.md").read_text().splitlines() if line.startswith("## ")]
    numbered = [heading for heading in headings if heading != "## Unreleased"]
    assert re.fullmatch(rf"## {re.escape(zeroaccel.__version__)} \(\d{{4}}-\d\d-\d\d\)", numbered[0])


@pytest.mark.parametrize(
    ("changelog", "citation", "message"),
    [
        ("# Changelog\n\n## Unreleased\n", CITATION, r"CHANGELOG.md:3: expected '## 1.2.3 \(YYYY-MM-DD\)'.*Unreleased"),
        ("## Unreleased\n\n- More.\n\n## 1.2.3 (2026-01-31)\n", CITATION, r"CHANGELOG.md:1: .*got '## Unreleased'"),
        ("# Changelog\n## 1.2.2 (2026-01-31)\n", CITATION, r"CHANGELOG.md:2: .*got '## 1.2.2"),
        ("# Changelog\n", CITATION, "no heading"),
        (
            "## 1.2.3 (2026-02-01)\n",
            CITATION,
            r'CITATION.cff: expected .date-released: "2026-02-01"., as in CHANGELOG.md:1',
        ),
        ("## 1.2.3 (2026-01-31)\n", CITATION.replace("1.2.3", "1.2"), "CITATION.cff: expected 'version: 1.2.3'"),
    ],
)
def test_words_of_another_version_are_refused(tmp_path: Path, changelog: str, citation: str, message: str) -> None:
    (tmp_path / "CHANGELOG.md").write_text(changelog)
    (tmp_path / "CITATION.cff").write_text(citation)
    with pytest.raises(release.ReleaseError, match=message):
        release.check_words(tmp_path, "1.2.3")


@pytest.mark.parametrize("before", ["", "## Unreleased\n\n"])
def test_words_of_this_version_pass(tmp_path: Path, before: str) -> None:
    text = f"# Changelog\n\n{before}## 1.2.3 (2026-01-31)\n\n## 1.2.2 (2025-01-31)\n"
    (tmp_path / "CHANGELOG.md").write_text(text)
    (tmp_path / "CITATION.cff").write_text(CITATION)
    release.check_words(tmp_path, "1.2.3")


@pytest.mark.parametrize("repository", ["", "https://example.org/it"])
def test_no_link_of_the_staged_readme_needs_the_tree(tmp_path: Path, repository: str) -> None:
    if subprocess.run(["git", "rev-parse"], cwd=ROOT, capture_output=True, check=False).returncode != 0:
        pytest.skip("a release is made of a git checkout")
    release.stage(ROOT, tmp_path, repository)
    targets = re.findall(r"\]\(([^)\s]+)\)", (tmp_path / "README.md").read_text())
    assert all(target.startswith("https://") for target in targets)
    assert (f"{repository}/blob/main/docs/design.md" in targets) == bool(repository)
    assert (f"    Changelog = {repository}/blob/main/CHANGELOG.md\n" in (tmp_path / "setup.cfg").read_text()) == bool(
        repository
    )
    assert (tmp_path / "tests/conftest.py").is_file()
    assert not (tmp_path / ".venv").exists()


def _archives(folder: Path, in_wheel: list[str], in_sdist: list[str]) -> tuple[Path, Path]:
    wheel, sdist = folder / "it.whl", folder / "it.tar.gz"
    with zipfile.ZipFile(wheel, "w") as archive:
        for name in in_wheel:
            archive.writestr(name, "")
    (folder / "empty").touch()
    with tarfile.open(sdist, "w:gz") as tar:
        for name in in_sdist:
            tar.add(folder / "empty", f"it-1.2.3/{name}")
    return wheel, sdist


def test_missing_and_superfluous_files_of_an_archive_are_named(tmp_path: Path) -> None:
    wheel, sdist = [*release._IN_WHEEL, "it-1.2.3.dist-info/licenses/LICENSE"], list(release._IN_SDIST)
    release.check_contents(*_archives(tmp_path, wheel, sdist))
    with pytest.raises(release.ReleaseError, match=r"it.tar.gz: constraints.txt not in it; see MANIFEST.in"):
        release.check_contents(*_archives(tmp_path, wheel, [name for name in sdist if name != "constraints.txt"]))
    with pytest.raises(release.ReleaseError, match=r"it.whl: zeroaccel/py.typed not in it"):
        release.check_contents(*_archives(tmp_path, [name for name in wheel if name != "zeroaccel/py.typed"], sdist))
    with pytest.raises(release.ReleaseError, match=r"it\.whl: no LICENSE in it; see license_files"):
        release.check_contents(*_archives(tmp_path, wheel[:-1], sdist))
    with pytest.raises(
        release.ReleaseError, match=r"expected the package zeroaccel alone, got \['tests', 'zeroaccel'\]"
    ):
        release.check_contents(*_archives(tmp_path, [*wheel, "tests/x.py"], sdist))


def test_a_module_for_a_newer_python_is_found(tmp_path: Path) -> None:
    pytest.importorskip("vermin")
    for name in ("zeroaccel", "cli", "templates"):
        (tmp_path / name).mkdir()
    (tmp_path / "setup.cfg").write_text("[options]\npython_requires = >=3.10\n")
    (tmp_path / "cli" / "settings.py").write_text("import json\n")
    release.check_python(tmp_path)
    (tmp_path / "cli" / "settings.py").write_text("import tomllib\n")
    with pytest.raises(release.ReleaseError, match=r"(?s)settings.py.*tomllib"):
        release.check_python(tmp_path)


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_a_release_is_built_and_installed(tmp_path: Path) -> None:
    pytest.importorskip("build")
    pytest.importorskip("twine")
    words = [sys.executable, ROOT / ".ci" / "release.py", "--allow-dirty", "--draft", "--borrow", "--out", tmp_path]
    result = run_command(words, timeout=500, cwd=ROOT)
    assert result.returncode == 0, result.stderr
    assert len(list(tmp_path.iterdir())) == 2


def test_rows_are_the_bounds_of_the_supported_versions() -> None:
    """The oldest row has the lower bounds of setup.cfg, and the pinned row the versions of `make test`."""
    settings = (ROOT / "setup.cfg").read_text()
    rows = {row.name: row for row in versions.rows()}
    assert f"torch>={rows['oldest'].torch.removesuffix('.0')}\n" in settings
    assert f"python_requires = >={rows['oldest'].python}\n" in settings
    for library in ("transformers", "accelerate"):
        bound = re.search(rf"{library}>=([\d.]+)", settings)
        assert bound is not None
        assert f"{library}=={bound[1]}" in rows["oldest"].libraries
    pythons = {row.python for row in rows.values()}
    assert pythons == set(re.findall(r"Python :: (3\.\d+)", settings))
    assert {(row.torch, row.libraries) for row in rows.values()} == {
        (torch, libraries)
        for torch in {row.torch for row in rows.values()}
        for libraries in (versions.OLDEST, versions.NEWEST)
    }


def test_the_quick_tests_exist() -> None:
    assert [path for path in versions.QUICK if not (ROOT / path).exists()] == []


def test_a_row_that_cannot_be_tested_says_why() -> None:
    with pytest.raises(versions.RowError, match=r"no Python 3\.99 on this machine"):
        versions.interpreter("3.99")


def test_the_page_of_versions_has_the_bounds_and_the_deprecated_names() -> None:
    page, settings = (ROOT / "docs" / "releases.md").read_text(), (ROOT / "setup.cfg").read_text()
    rows = {row.split("|")[1].strip(): row.split("|")[2] for row in page.splitlines() if row.startswith("| ")}
    bounds = dict(re.findall(r"^    (torch|transformers|accelerate|peft|trl)>=([\d.]+)", settings, re.MULTILINE))
    for name, bound in bounds.items():
        assert next(cell for row, cell in rows.items() if row.lower() == name).split()[0] == bound
    assert rows["Python"].split()[0] == re.search(r"python_requires = >=([\d.]+)", settings)[1]  # type: ignore[index]
    deprecated = {}
    for path in field_paths(Config):
        section: Any = Config
        for part in path[:-1]:
            section = nested_section(section.model_fields[part])
        deprecated |= {one.name: path[-1] for one in spellings(section.model_fields[path[-1]]) if one.deprecated}
    shown = dict(re.findall(r"^\| `(\w+)` \| `(\w+)` \|$", page.partition("## Deprecated names")[2], re.MULTILINE))
    assert shown.keys() == deprecated.keys()
    assert all(shown[name].endswith(field) for name, field in deprecated.items())  # with the prefix of the section
