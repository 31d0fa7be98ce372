"""setup.cfg and constraints.txt agree with the tree; otherwise an installation would lack a package."""

from __future__ import annotations

import configparser
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[3]


@pytest.fixture(scope="module")
def setup_cfg() -> configparser.ConfigParser:
    parser = configparser.ConfigParser()
    parser.read(ROOT / "setup.cfg")
    return parser


def _words(value: str) -> list[str]:
    return [line.strip() for line in value.splitlines() if line.strip() and not line.strip().startswith("#")]


def _project(requirement: str) -> str:
    return re.split(r"[<>=!~;\[ ]", requirement)[0].lower().replace("_", "-")


def test_every_folder_with_python_files_is_a_listed_package(setup_cfg: configparser.ConfigParser) -> None:
    folders = {
        path.parent.relative_to(ROOT).parts
        for top in ("zeroaccel", "cli", "templates")
        for path in (ROOT / top).rglob("*.py")
    }
    found = {".".join(parts if parts[0] == "zeroaccel" else ("zeroaccel", *parts)) for parts in folders}
    assert sorted(found) == _words(setup_cfg["options"]["packages"])


def test_every_listed_package_has_an_init_file(setup_cfg: configparser.ConfigParser) -> None:
    homes = dict(line.split(" = ") for line in _words(setup_cfg["options"]["package_dir"]))
    for package in _words(setup_cfg["options"]["packages"]):
        home = max((name for name in homes if f"{package}.".startswith(f"{name}.")), key=len)
        folder = ROOT / homes[home] / package[len(home) :].replace(".", "/").lstrip("/")
        assert (folder / "__init__.py").is_file(), package


def test_templates_of_every_kind_are_package_data(setup_cfg: configparser.ConfigParser) -> None:
    patterns = _words(setup_cfg["options.package_data"]["zeroaccel.templates"])
    data = [path for path in (ROOT / "templates").rglob("*") if path.is_file() and path.suffix not in (".py", ".pyc")]
    assert [path.name for path in data if not any(path.match(pattern) for pattern in patterns)] == []


def test_sources_of_kernels_are_package_data(setup_cfg: configparser.ConfigParser) -> None:
    assert _words(setup_cfg["options.package_data"]["zeroaccel.ops"]) == ["*.cu"]
    assert [path.name for path in (ROOT / "zeroaccel").rglob("*.cu")] == ["device_kernels.cu"]


def test_packages_of_make_test_are_pinned_with_torch_first(setup_cfg: configparser.ConfigParser) -> None:
    pins = _words((ROOT / "constraints.txt").read_text())
    assert pins[0] == "torch==2.13.0"
    assert all(re.fullmatch(r"[\w.-]+==[\w.]+", pin) for pin in pins)
    extras = setup_cfg["options.extras_require"]
    required = _words(setup_cfg["options"]["install_requires"])
    required += [line for extra in ("hf", "test", "dev", "release") for line in _words(extras[extra])]
    assert "zeroaccel[test]" in required
    assert {_project(line) for line in required} - {_project(pin) for pin in pins} == {"zeroaccel"}


def test_metadata_is_in_one_file_and_the_settings_of_tools_in_the_other(setup_cfg: configparser.ConfigParser) -> None:
    assert {section.partition(".")[0] for section in setup_cfg.sections()} == {"metadata", "options"}
    tables = re.findall(r"^\[+([\w-]+)", (ROOT / "pyproject.toml").read_text(), flags=re.MULTILINE)
    assert set(tables) == {"build-system", "tool"}
