"""The site builds without a warning, its links are valid, and its pages load nothing from other sites."""

from __future__ import annotations

import json
import os
import re
import shutil
import sys
from html.parser import HTMLParser
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlsplit

import pytest
import yaml

from tests.e2e.browser_pages import THEMES, browser, missing
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
    """Links, loaded resources and anchors of a page."""

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


def _text(path: Path) -> str:
    return path.read_text().replace("<wbr>", "")  # a name may wrap there


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
    assert "unpkg" not in (site / "index.html").read_text()
    loaded = {url for path in site.rglob("*.html") for url in Page(path.read_text()).loads}
    assert loaded
    assert [url for url in loaded if urlsplit(url).netloc] == []


def test_the_reference_is_complete(site: Path) -> None:
    commands = _text(site / "reference" / "commands.html")
    assert all(f"zeroaccel {name}" in commands for name in SUB_COMMANDS)
    keys = _text(site / "reference" / "config_keys.html")
    missing = [name for path in field_paths(Config) if (name := ".".join(path)) not in keys]
    assert missing == []
    api = Page((site / "reference" / "api.html").read_text())
    import zeroaccel

    public = [name for name in zeroaccel.__all__ if not name.startswith("_")]
    assert [name for name in public if f"zeroaccel.{name}" not in api.anchors] == []
    facade = _text(site / "reference" / "deepspeed.html")
    names = [*SURFACE, *ABSENT, *QUESTIONS, *(f"engine.{name}" for name in ABSENT_MEMBERS)]
    assert [name for name in names if f"<code>{name}</code>" not in facade and SURFACE.get(name) != {}] == []


def test_errors_can_be_looked_up_by_their_words(site: Path) -> None:
    page = _text(site / "reference" / "errors.html")
    names = [name for name in errors.__all__ if name.endswith("Error") and name != "ZeroAccelError"]
    assert [name for name in names if f"<code>{name}</code>" not in page] == []
    assert "create the optimizer from the same model object" in page  # the remedy
    assert "the machines differ in {fact}" in page  # values known only at run time are names in braces
    assert page.count("<tr>") > 500
    assert page.count("<th>cause</th>") == page.count("<h2") - 1  # each part of the package; not other programs
    assert 'CUDA out of memory</code></td>\n<td>the device is full</td>\n<td><a href="../does_not_fit.html">' in page


def test_each_parameter_of_the_reference_has_a_line(site: Path) -> None:
    page = _text(site / "reference" / "api.html")
    assert "torch_tp_plugin, megatron_lm_plugin" not in page
    assert page.count("<code>megatron_lm_plugin</code>") == 1


SEARCHES = {
    "OOM": "does_not_fit",
    "CUDA out of memory": "does_not_fit",
    "resume other number of ranks": "resume checkpoints",
    "resume on more GPUs": "resume checkpoints",
    "zero_to_fp32": "consolidate",
    "gradient accumulation stage": "training faq",
    "multi-GPU": "launch index",
    "QLoRA 70B": "qlora models",
    "NCCL timeout": "hangs",
    "DeepSpeed config": "config coming_from",
    "accelerate config": "configure coming_from",
    "Trainer": "huggingface index",
    "GRPO vLLM": "rollout",
    "long context": "sequence_parallel",
    "mixture of experts": "mixture_of_experts",
    "SLURM": "clusters",
    "offload optimizer to CPU": "offload",
    "how much memory do I need": "estimate models",
    "training is slow": "slow",
    "convert checkpoint to safetensors": "consolidate hand_over",
    "error message": "errors",
    "CUDA_HOME does not exist": "errors install",
    "has been marked as ready twice": "errors activations",
    "Watchdog caught collective operation timeout": "errors hangs",
    "upgrade": "releases",
}
"""Words in the search of the site -> the pages that answer them; one of these is the first or second result."""


def test_results_and_the_changelog_come_last_in_searches(site: Path) -> None:
    entries = json.loads((site / "search" / "search_index.json").read_text())["docs"]
    places = {entry["location"].partition("#")[0]: entry for entry in reversed(entries)}
    assert all(entry.get("boost", 1) < 0.1 for place, entry in places.items() if place.startswith("benchmarks/"))
    assert places["changelog.html"]["boost"] < 0.1
    for question, answers in SEARCHES.items():
        found = [places.get(f"{answer}.html") or places[f"reference/{answer}.html"] for answer in answers.split()]
        assert all(entry["boost"] > 0.5 for entry in found), question
        words = [" ".join([entry["title"], *entry.get("tags", ())]).lower() for entry in found]
        assert any(question.lower().split()[0] in text for text in words), question


def test_the_menu_has_the_groups_of_the_readme() -> None:
    rows = re.findall(r"^\| (\w[\w ]+) \| (\[.*) \|$", (ROOT / "README.md").read_text(), re.MULTILINE)
    in_readme = {group: re.findall(r"\]\((?:docs/)?([\w]+)\.md\)", links) for group, links in rows}
    menu = re.sub(r"!!\S+", "", (ROOT / ".mkdocs.yml").read_text())
    groups = {group: pages for entry in yaml.safe_load(menu)["nav"] for group, pages in entry.items()}
    in_menu = {
        group: [Path(place).stem for page in pages for place in page.values()]
        for group, pages in groups.items()
        if group != "Reference"
    }
    in_menu["Start"].remove("index")
    assert {group: [page.lower() for page in pages] for group, pages in in_readme.items()} == in_menu


_CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
# Loads every page in a frame of 1280 pixels, and lists tables that are wider than their column.
_MEASURE = """<body><pre id="wide">running</pre><script>(async () => {
  const wide = [];
  for (const page of PAGES) {
    const frame = document.createElement("iframe");
    frame.style = "width:1280px;height:800px";
    frame.src = page;
    await new Promise((done) => { frame.onload = done; document.body.append(frame); });
    const tables = frame.contentDocument.querySelectorAll("table");
    if (page === "reference/config_keys.html" && !tables.length) wide.push(page + ": no table");
    for (const table of tables) {
      const around = table.closest("article") ?? frame.contentDocument.body;
      if (table.scrollWidth > around.clientWidth) wide.push(page + ": " + table.innerText);
    }
    frame.remove();
  }
  document.getElementById("wide").textContent = "[" + wide.join("; ") + "]";
})();</script></body>"""


def _dom(page: str, *flags: str) -> str:
    """Returns the document after its scripts have run, in a browser without network access."""
    assert _CHROMIUM is not None
    words = [_CHROMIUM, "--headless", "--no-sandbox", "--disable-gpu", "--host-resolver-rules=MAP * ~NOTFOUND", *flags]
    result = run_command([*words, "--virtual-time-budget=100000", "--dump-dom", page], timeout=60)
    assert result.returncode == 0, result.stderr
    return result.stdout


@pytest.mark.skipif(_CHROMIUM is None, reason="no Chromium is installed")
def test_search_works_from_a_folder(site: Path) -> None:
    found = _dom(f"{(site / 'index.html').as_uri()}?q=mics_shard_size")
    assert re.search(r">\d+ matching documents", found)
    assert f'href="{(site / "zeropp.html").as_uri()}" class="md-search-result__link"' in found


@pytest.mark.skipif(_CHROMIUM is None, reason="no Chromium is installed")
def test_the_filter_of_models_does_not_scroll_with_the_table(site: Path) -> None:
    found = _dom((site / "models.html").as_uri())
    assert re.search(r'</form>\s*<p role="status">.*?</p>\s*<div class="md-typeset__scrollwrap">', found, re.DOTALL)


@pytest.mark.slow
@pytest.mark.skipif(bool(missing()), reason=missing())
def test_the_search_answers_questions(site: Path) -> None:
    wrong = {}
    with browser() as launched:
        shown = launched.new_page()
        shown.goto((site / "index.html").as_uri())
        for question, answers in SEARCHES.items():
            found = _searched(shown, question)
            if not set(answers.split()) & set(found[:2]):
                wrong[question] = found
    assert wrong == {}


def _searched(shown: Any, question: str) -> list[str]:
    """Returns the pages that the search of a page finds, best first."""
    shown.fill(".md-search__input", "")
    shown.wait_for_timeout(200)
    shown.fill(".md-search__input", question)
    shown.dispatch_event(".md-search__input", "keyup")
    shown.wait_for_timeout(1000)
    links = ".md-search-result__item > a.md-search-result__link"
    return [Path(urlsplit(link).path).stem for link in shown.eval_on_selector_all(links, "all => all.map(a => a.href)")]


@pytest.mark.slow
@pytest.mark.skipif(bool(missing()), reason=missing())
@pytest.mark.parametrize("width", [390, 768, 1280])
def test_no_page_is_wider_than_its_screen(site: Path, width: int) -> None:
    with browser() as launched:
        shown = launched.new_page(viewport={"width": width, "height": 900})
        wide = []
        for path in sorted([*site.glob("*.html"), *site.glob("shown/*.html"), *site.glob("reference/*.html")]):
            shown.goto(path.as_uri())
            if shown.evaluate("document.documentElement.scrollWidth") > width:
                wide.append(path.name)
    assert wide == []


# The texts of a page whose contrast with their background is below 4.5, or 3 if they are large (WCAG 2.2, 1.4.3).
_FAINT = """() => {
  const parse = (text) => { const [r, g, b, a = 1] = text.match(/[\\d.]+/g).map(Number); return [r, g, b, a]; };
  const over = (top, below) => [0, 1, 2].map((i) => top[i] * top[3] + below[i] * (1 - top[3])).concat(1);
  const light = (colour) => colour.slice(0, 3).map((value) => value / 255)
    .map((value) => value <= 0.03928 ? value / 12.92 : ((value + 0.055) / 1.055) ** 2.4)
    .reduce((sum, value, i) => sum + value * [0.2126, 0.7152, 0.0722][i], 0);
  const found = new Set();
  for (const one of document.querySelectorAll("article *, .md-tabs a, .md-footer a, .md-sidebar a")) {
    const hasText = [...one.childNodes].some((node) => node.nodeType === 3 && node.textContent.trim());
    if (!hasText || !one.checkVisibility({ checkOpacity: true, checkVisibilityCSS: true })) continue;
    const style = getComputedStyle(one), around = [];
    let opacity = 1;
    for (let each = one; each; each = each.parentElement) {
      around.unshift(parse(getComputedStyle(each).backgroundColor));
      opacity *= Number(getComputedStyle(each).opacity);
    }
    const paper = around.reduce((below, top) => over(top, below), [255, 255, 255, 1]);
    const ink = parse(style.color);
    ink[3] *= opacity;
    const [low, high] = [light(over(ink, paper)), light(paper)].sort((a, b) => a - b);
    const size = parseFloat(style.fontSize), isLarge = size >= 24 || (size >= 18.66 && style.fontWeight >= 700);
    if ((high + 0.05) / (low + 0.05) < (isLarge ? 3 : 4.5))
      found.add(`${one.tagName}.${one.className}: ${one.textContent.trim().slice(0, 20)}, ${style.color}`);
  }
  return [...found];
}"""


@pytest.mark.slow
@pytest.mark.skipif(bool(missing()), reason=missing())
@pytest.mark.parametrize("scheme", THEMES)
def test_texts_are_readable_and_the_keyboard_reaches_them(site: Path, scheme: str) -> None:
    with browser() as launched:
        shown = launched.new_page(color_scheme=scheme, viewport={"width": 1280, "height": 900})
        faint = {}
        for name in ("index", "models", "recipes", "configure", "reference/api", "reference/errors"):
            shown.goto((site / f"{name}.html").as_uri())
            faint[name] = shown.evaluate(_FAINT)
        assert [page for page, texts in faint.items() if texts] == [], faint
        shown.add_style_tag(content="article p { color: #888 !important; background: #999 !important }")
        assert shown.evaluate(_FAINT), "the check finds nothing"
        shown.goto((site / "configure.html").as_uri())
        stops = []
        for _ in range(30):
            shown.keyboard.press("Tab")
            stops.append(shown.evaluate("document.activeElement.textContent.trim() || document.activeElement.tagName"))
    assert stops[0] == "Skip to content"
    assert {"INPUT", "Memory", "Launch files", "Without questions", "BUTTON"} <= set(stops)  # search, menu, copy


@pytest.mark.slow
@pytest.mark.skipif(bool(missing()), reason=missing())
def test_the_copy_button_of_a_phone_covers_no_code(site: Path) -> None:
    with browser() as launched:
        shown = launched.new_page(viewport={"width": 390, "height": 900})
        shown.goto((site / "index.html").as_uri())
        places = shown.evaluate("""[...document.querySelectorAll("pre > nav button")].map((button) => {
          const range = document.createRange();
          range.selectNodeContents(button.closest("pre").querySelector("code"));
          return [button.getBoundingClientRect().bottom, range.getBoundingClientRect().top];
        })""")
    assert len(places) > 5
    assert [pair for pair in places if pair[0] > pair[1]] == []


@pytest.mark.skipif(_CHROMIUM is None, reason="no Chromium is installed")
def test_no_table_is_wider_than_a_page_of_1280_pixels(site: Path) -> None:
    pages = sorted(str(path.relative_to(site)) for path in site.rglob("*.html") if path.name != "404.html")
    probe = site / "probe.html"
    probe.write_text(_MEASURE.replace("PAGES", json.dumps(pages)))
    found = _dom(probe.as_uri(), "--allow-file-access-from-files", "--disable-web-security", "--window-size=1280,900")
    probe.unlink()
    assert '<pre id="wide">[]</pre>' in found
