"""The site is built without a warning, its links lead somewhere, and nothing of it comes from elsewhere."""

from __future__ import annotations

import os
import sys
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import unquote, urlsplit

import pytest

from tests.support.environment import ROOT
from tests.support.job import run_command
from zeroaccel import errors
from zeroaccel.cli.main import SUB_COMMANDS
from zeroaccel.compat.surface import ABSENT, ABSENT_MEMBERS, QUESTIONS, SURFACE
from zeroaccel.config.schema import Config
from zeroaccel.config.section import field_paths

pytest.importorskip("mkdocs")

pytestmark = pytest.mark.timeout(240)


class Page(HTMLParser):
    """What a page leads to, what it loads, and the anchors it has."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.links: list[str] = []
        self.loads: list[str] = []
        self.anchors: set[str] = set()
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        values = {name: value or "" for name, value in attrs}
        self.anchors |= {values[name] for name in ("id", "name") if name in values}
        if tag == "a" and "href" in values:
            self.links.append(values["href"])
        if tag in ("script", "img", "iframe") and "src" in values:
            self.loads.append(values["src"])
        if tag == "link" and values.get("rel") in ("stylesheet", "icon", "preconnect", "preload"):
            self.loads.append(values["href"])


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("site")
    words = [sys.executable, "-m", "mkdocs", "build", "--strict", "--config-file", ROOT / ".mkdocs.yml", "-d", folder]
    result = run_command(words, timeout=200, cwd=ROOT, env={**os.environ, "NO_MKDOCS_2_WARNING": "1"})
    assert result.returncode == 0, result.stderr
    return folder


def test_every_link_leads_somewhere(site: Path) -> None:
    pages = {path: Page(path.read_text()) for path in site.rglob("*.html") if path.name != "404.html"}
    assert len(pages) > 35
    broken = []
    for path, page in pages.items():
        for link in page.links:
            parts = urlsplit(link)
            if parts.scheme in ("http", "https", "mailto"):
                continue
            there = (path.parent / unquote(parts.path)).resolve() if parts.path else path
            there = there / "index.html" if there.is_dir() else there
            if not there.exists():
                broken.append(f"{path.relative_to(site)}: {link}")
            elif parts.fragment and there in pages and unquote(parts.fragment) not in pages[there].anchors:
                broken.append(f"{path.relative_to(site)}: {link} (no such anchor)")
    assert broken == []


def test_nothing_is_loaded_from_elsewhere(site: Path) -> None:
    loaded = {url for path in site.rglob("*.html") for url in Page(path.read_text()).loads}
    assert loaded
    assert [url for url in loaded if urlsplit(url).netloc] == []


def test_the_reference_is_complete(site: Path) -> None:
    commands = (site / "reference" / "commands.html").read_text()
    assert all(f"zeroaccel {name}" in commands for name in SUB_COMMANDS)
    keys = (site / "reference" / "config_keys.html").read_text()
    missing = [name for path in field_paths(Config) if (name := ".".join(path)) not in keys]
    assert missing == []
    api = Page((site / "reference" / "api.html").read_text())
    import zeroaccel

    public = [name for name in zeroaccel.__all__ if not name.startswith("_")]
    assert [name for name in public if f"zeroaccel.{name}" not in api.anchors] == []
    facade = (site / "reference" / "deepspeed.html").read_text()
    names = [*SURFACE, *ABSENT, *QUESTIONS, *(f"engine.{name}" for name in ABSENT_MEMBERS)]
    assert [name for name in names if f"<code>{name}</code>" not in facade and SURFACE.get(name) != {}] == []


def test_errors_can_be_looked_up_by_their_words(site: Path) -> None:
    page = (site / "reference" / "errors.html").read_text()
    names = [name for name in errors.__all__ if name.endswith("Error") and name != "ZeroAccelError"]
    assert [name for name in names if f"<code>{name}</code>" not in page] == []
    assert "create the optimizer from the same model object" in page  # what to do
    assert "the machines differ in {name}" in page  # what only a run knows is a name in braces
    assert page.count("<tr>") > 500
