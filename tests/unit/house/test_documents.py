"""Documents mention existing files, symbols, flags and figures; docstrings do not deny existing axes of the mesh."""

from __future__ import annotations

import ast
import re

import pytest

from tests.support.scripts import load_script
from tests.unit.house.documents import ROOT, Document, absent, denials, documents, unsourced
from tests.unit.house.house_rules import sources


@pytest.mark.parametrize("document", documents(), ids=lambda document: document.path)
def test_documents_mention_existing_things_only(document: Document) -> None:
    assert list(dict.fromkeys(absent(document))) == []


@pytest.mark.parametrize("document", documents(), ids=lambda document: document.path)
def test_measured_figures_have_a_results_file(document: Document) -> None:
    assert list(unsourced(document)) == []


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        ("See `zero/engine_bass.py`.", "zero/engine_bass.py: no such file"),
        ("See `zeroaccel/engine.py:Motor`.", "zeroaccel/engine.py: has no Motor"),
        ("Folders `tests/{unit,unity}`.", "{unit,unity}: no such file"),
        ("Read [this](docs/nowhere.md).", "docs/nowhere.md: no such file"),
        ("Call `zeroaccel.initialyze`.", "zeroaccel.initialyze: cannot be imported"),
        ("Call `zero.GatheredParams`.", "zeroaccel.zero.GatheredParams: cannot be imported"),
        ("The `ShardSplendour` shards.", "nothing is called ShardSplendour"),
        ("Call `engine.save_everything()`.", "nothing is called save_everything"),
        ("Pass `--no_such_flag`.", "--no_such_flag: no such flag"),
        ("```sh\nzeroaccel lunch train.py\n```", "zeroaccel lunch: no such command"),
        ("```sh\nzeroaccel launch --num_prozesses 2 train.py --lr 1\n```", "--num_prozesses: no such flag"),
        ("Set `ZEROACCEL_NO_SUCH_NAME`.", "ZEROACCEL_NO_SUCH_NAME: no such variable"),
    ],
)
def test_a_false_mention_is_found(text: str, complaint: str) -> None:
    (found,) = absent(Document("page.md", text))
    assert complaint in found


@pytest.mark.parametrize(
    "text",
    [
        "See `zeroaccel/engine.py:Engine`, `tests/{unit,multi}` and [this](docs/design.md).",
        "Call `zeroaccel.initialize(model)`, `zero.Init`, `engine.save_checkpoint()` or `torch.optim.Anything`.",
        "```sh\nZEROACCEL_NUM_PROCESSES=2 zeroaccel launch --num_processes 2 train.py --lr 1\n```",
        "Set `ZEROACCEL_NUM_PROCESSES` and `zero_optimization.stage`.",
    ],
)
def test_a_true_mention_passes(text: str) -> None:
    assert list(absent(Document("page.md", text))) == []


def test_a_figure_is_in_a_results_file_of_its_section() -> None:
    results = "`benchmarks/results/pipeline_link.md`"
    figure = next(word for word in (ROOT / results.strip("`")).read_text().split() if word.isdigit())
    assert not list(unsourced(Document("page.md", f"# Speed\n\nIt takes {figure} ms ({results}).")))
    assert list(unsourced(Document("page.md", f"# Speed\n\nIt takes 987654 ms ({results}).")))
    assert list(unsourced(Document("page.md", f"# Speed\n\nIt takes {figure} ms.\n\n# Files\n\n{results}")))
    assert not list(unsourced(Document("page.md", 'Set `"limit": "30 s"`.')))


def test_no_docstring_denies_an_axis_of_the_mesh() -> None:
    found = []
    for source in sources("zeroaccel").values():
        for node in source.nodes:
            if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
                found += [source.at(node, denial) for denial in denials(ast.get_docstring(node) or "")]
    assert found == []
    assert list(denials("The loader as it is: sequences are not\nsplit over processes."))
    assert list(denials("0: every process has all layers."))
    assert not list(denials("Layers are split among the ranks of the tensor-parallel group."))


def test_each_cell_of_the_comparison_has_its_test_or_source() -> None:
    page = (ROOT / "docs" / "comparison.md").read_text()
    features, reports = ([line for line in part.splitlines() if line.startswith("| ")] for part in page.split("\n## "))
    held = re.compile(r"`tests/[\w/]+\.py:test_\w+`")  # `absent` checks that these exist
    linked = re.compile(r"\]\(https://[^)]+\)")
    for line in features[1:]:
        _, ours, *theirs = (cell.strip() for cell in line.strip("|").split("|"))
        assert held.search(ours), ours
        assert all(cell == "-" or linked.search(cell) for cell in theirs), line
    for line in reports[1:]:
        report, *_, test = (cell.strip() for cell in line.strip("|").split("|"))
        assert linked.search(report), line
        assert held.fullmatch(test), line
    assert len(features) > 10 < len(reports)
    assert re.search(r"read on \d{4}-\d\d-\d\d", page)


_CLAIM = re.compile(
    r"bit-identical|\b(?:same|equal) (?:bits|losses)|(?:losses|bits) of (?:one process|DDP)|DDP's losses"
    r"|without (?:DeepSpeed|a compiler|executing)|(?:run|accelerate) unchanged|not change the results",
    re.IGNORECASE,
)
_ITS_OWN = ("claims", "comparison", "design")  # the tables of claims themselves, and the decisions


def _claims(text: str) -> list[str]:
    """Returns the sentences of a page that claim something about bits, losses or unchanged programs."""
    sentences = load_script(".ci/prose.py").sentences(text)
    return [sentence for sentence in sentences if _CLAIM.search(sentence) and not sentence.endswith("?")]


def test_each_claim_of_a_page_has_its_test_or_results() -> None:
    table = (ROOT / "docs" / "claims.md").read_text()
    rows = [[cell.strip() for cell in line.strip("|").split(" | ")] for line in table.splitlines() if line[:3] == "| ["]
    held = {(re.sub(r"\[(.*?)\].*", r"\1", page), words): by for page, words, by in rows}
    pages = [path for path in (ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))) if path.stem not in _ITS_OWN]
    found = [(path.stem, sentence) for path in pages for sentence in _claims(path.read_text())]
    unheld = [claim for claim in found if not any(page == claim[0] and words in claim[1] for page, words in held)]
    assert unheld == [], "add the claim with its test to docs/claims.md"
    assert [row for row in held if not any(row[0] == page and row[1] in said for page, said in found)] == [], "no page"
    for by in held.values():  # `absent` checks that these exist
        assert re.fullmatch(
            r"(`(tests/[\w/]+\.py:test_\w+|(benchmarks|tests/interop/results)/[\w/]+\.\w+)`(, )?)+", by
        ), by
    assert len(held) > 30


def test_a_claim_is_found() -> None:
    assert _claims("# Speed\n\nWe like it. Every program runs faster with bit-identical results.") == [
        "Every program runs faster with bit-identical results."
    ]
    assert not _claims("Does it give the same bits? It depends on the order of the sums.")


def test_quoted_code_is_as_in_the_tree() -> None:
    quoted = load_script("docs/site/quoted_code.py")
    pages = [document for document in documents() if "<!-- code: " in document.text]
    assert pages
    assert [page.path for page in pages if quoted.with_quotations(page.text) != page.text] == [], (
        "run python docs/site/quoted_code.py"
    )
    assert quoted.quotation("zeroaccel/initialization.py", "start").startswith("@names_ranks\ndef start(")
    assert "Raises:" not in quoted.quotation("zeroaccel/initialization.py", "start")
