"""Checks the English of pages, docstrings, comments and messages: `python .ci/prose.py [PAGE OR FOLDER ...]`.

It finds five habits that make documentation hard to read: passives without an agent, free relatives as subjects, chains
of "of", phrases from a list, and lines that are too long. It matches patterns; it does not parse grammar.
"""

from __future__ import annotations

import ast
import inspect
import io
import re
import sys
import tokenize
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
SOURCES = ("zeroaccel", "cli", "templates", "benchmarks", "docs", "examples", "tests", ".ci")
"""The folders whose docstrings, comments and messages the rules apply to."""
QUOTING = ("tests", ".ci")
"""The folders whose strings quote other texts: the rules apply to their docstrings and comments only."""
MIN_MESSAGE_WORDS = 4
"""Shorter strings in code are names, keys or labels, which the rules do not cover."""
MAX_COLUMNS = 130
MAX_ROW_COLUMNS = 126
"""Longest row of a table in a page of results; other pages have links in their cells."""
MAX_PASSIVE_SHARE = 0.2
"""Largest share of the sentences of a page with a passive without an agent."""

_PARTICIPLES = "broken|built|chosen|cut|done|drawn|found|given|held|kept|known|laid|left|lost|made|meant|put|read|said"
_PARTICIPLES += "|seen|sent|set|shown|spread|taken|thrown|told|understood|written"
# Participles that describe a state rather than an action, and need no agent.
_STATES = "allowed|based|called|deprecated|enabled|disabled|fixed|installed|limited|named|needed|overlapped|related"
_STATES += "|replicated|required|sharded|supported|tied|unsharded|unsupported|used"
_PASSIVE = re.compile(
    rf"\b(?:is|are|was|were|be|been|being)\s+(?:(?:not|never|always|only|then|also|still|\w+ly)\s+)*"
    rf"(?!(?:{_STATES})\b)(?:\w{{3,}}ed|{_PARTICIPLES})\b(?![^,;:]*\bby\s+\w)",
    re.IGNORECASE,
)
_FREE_RELATIVE = re.compile(
    r"^(?:What|Whatever)\b(?!.*\?$)"
    r"|\b(?:and|but|or|that|since|because|while|is|are|than|as|of|from|for|to|by|with|on|about|;|:)\s+what\b(?!\s+\w*\s*to\b)"
)
_CHAIN = re.compile(r"\bof(?:\s+[^\s,.;:()]+){1,3}\s+of(?:\s+[^\s,.;:()]+){1,3}\s+of\b", re.IGNORECASE)
_PHRASES = {
    "alike": "both, or in the same way",
    "and the like": "name them, or say which kind",
    "as ever": "leave it out",
    "as it stands": "unchanged",
    "as they stand": "unchanged",
    "at hand": "available",
    "but for": "except",
    "came about": "say what caused it",
    "comes about": "say what causes it",
    "for ever": "say how long",
    "in the manner of": "like",
    "is told": "say who tells it",
    "is to be": "should be, or will be",
    "are to be": "should be, or will be",
    "likewise": "in the same way",
    "no less": "say it positively",
    "none of": "does not",
    "of one's own": "your own",
    "once more": "again",
    "otherwise than": "differently from",
    "to and fro": "in both directions",
}
_PHRASE = re.compile(rf"\b(?:{'|'.join(map(re.escape, _PHRASES))})\b", re.IGNORECASE)


@dataclass(frozen=True)
class Finding:
    """A place in a text that breaks a rule."""

    place: str
    rule: str
    text: str

    def __str__(self) -> str:
        return f"{self.place}: {self.rule}: {self.text}"


def main(paths: Sequence[str] = ()) -> int:
    """Prints the findings in pages and sources below `paths`, by default the whole tree; returns 1 if there are any.

    Raises:
        SystemExit: no page or source is below a path.
    """
    every = [*pages(), *sources()]
    files: list[Path] = []
    for path in map(Path, paths or [ROOT]):
        below = [file for file in every if file.is_relative_to(path.resolve())]
        if not below:
            raise SystemExit(f"{path}: no page or source of the project; expected a file or folder of it")
        files += below
    findings: list[Finding] = []
    for file in files:
        place = file.relative_to(ROOT).as_posix()
        if file.suffix == ".md":
            findings += page_findings(file.read_text(), place)
        else:
            findings += source_findings(file.read_text(), place, messages=not place.startswith(QUOTING))
    for finding in findings:
        print(finding)
    return 1 if findings else 0


def pages() -> list[Path]:
    """Returns the pages that must follow the rules."""
    return [
        *sorted(ROOT.glob("*.md")),
        *sorted((ROOT / "docs").rglob("*.md")),
        *sorted((ROOT / "tests").glob("**/README.md")),
        *sorted((ROOT / "tests" / "interop" / "results").glob("*.md")),
        *sorted((ROOT / "benchmarks").rglob("*.md")),
    ]


def sources() -> list[Path]:
    """Returns the modules that must follow the rules."""
    return [path for folder in SOURCES for path in sorted((ROOT / folder).rglob("*.py"))]


def source_findings(text: str, place: str, *, messages: bool = True) -> Iterator[Finding]:
    """Checks the docstrings and comments of a module, and its messages unless they quote other texts."""
    for line, prose in [*_docstrings_and_messages(text, messages), *_comments(text)]:
        yield from sentence_findings(prose, f"{place}:{line}")


def _docstrings_and_messages(text: str, messages: bool) -> Iterator[tuple[int, str]]:
    tree = ast.parse(text)
    pieces = {id(piece) for node in ast.walk(tree) if isinstance(node, ast.JoinedStr) for piece in node.values}
    documentation = {id(node.value) for node in ast.walk(tree) if isinstance(node, ast.Expr)}
    for node in ast.walk(tree):
        if isinstance(node, ast.JoinedStr):
            parts = [piece.value if isinstance(piece, ast.Constant) else "CODE" for piece in node.values]
            prose = "".join(map(str, parts))
        elif isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in pieces:
            prose = inspect.cleandoc(node.value) if id(node) in documentation else node.value
        else:
            continue
        if id(node) in documentation or (messages and len(prose.split()) >= MIN_MESSAGE_WORDS):
            yield node.lineno, prose


def _comments(text: str) -> Iterator[tuple[int, str]]:
    """Yields comments: consecutive comment lines as one text, and comments behind code."""
    first, last, column, block = 0, 0, 0, ""
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        if token.type != tokenize.COMMENT:
            continue
        words = token.string.lstrip("#: ").strip()
        if block and token.start == (last + 1, column):
            block = f"{block}\n{words}"
        else:
            if block:
                yield first, block
            first, block = token.start[0], words
        last, column = token.start
    if block:
        yield first, block


def page_findings(text: str, place: str) -> Iterator[Finding]:
    """Yields the findings of a page."""
    in_code = False
    for number, line in enumerate(text.splitlines(), 1):
        in_code ^= line.lstrip().startswith("```")
        if len(line) > MAX_COLUMNS and not in_code and not line.startswith(("|", "![")):
            yield Finding(f"{place}:{number}", f"line above {MAX_COLUMNS} columns", line[:60])
        if len(line) > MAX_ROW_COLUMNS and not in_code and line.startswith("|") and "/results/" in place:
            yield Finding(f"{place}:{number}", f"row of a table above {MAX_ROW_COLUMNS} columns", line[:60])
    yield from sentence_findings(text, place)
    prose = list(sentences(text))
    passive = [sentence for sentence in prose if _PASSIVE.search(sentence)]
    if len(passive) > max(2, MAX_PASSIVE_SHARE * len(prose)):
        share = f"{len(passive)} of {len(prose)} sentences"
        yield Finding(place, f"passives without an agent, at most {MAX_PASSIVE_SHARE:.0%}", f"{share}: {passive}")


def sentence_findings(text: str, place: str) -> Iterator[Finding]:
    """Yields the findings of a text, sentence by sentence."""
    for sentence in sentences(text):
        if any(len(_PASSIVE.findall(clause)) > 1 for clause in sentence.split(";")):
            yield Finding(place, "two passives without an agent in a sentence", sentence)
        if _FREE_RELATIVE.search(sentence):
            yield Finding(place, "a clause with `what` in place of a noun", sentence)
        if _CHAIN.search(sentence):
            yield Finding(place, "a chain of `of`", sentence)
        for phrase in _PHRASE.findall(sentence):
            yield Finding(place, f"{phrase!r}: write {_PHRASES[phrase.lower()]}", sentence)


def sentences(text: str) -> Iterator[str]:
    """Yields the sentences, headings and cells of a page or a docstring, without code, markup and link targets."""
    text = re.sub(r"^ *```.*?^ *```", "", text, flags=re.DOTALL | re.MULTILINE)
    text = re.sub(r"^(Example|Examples):\n(?:(?: +.*)?\n)*", "", text + "\n", flags=re.MULTILINE)
    text = re.sub(r"!?\[([^\]]*)\]\([^)]*\)", r"\1", text)
    text = re.sub(r"``[^`]+``|`[^`]*`", "CODE", text)
    for block in _blocks(text.splitlines()):
        for sentence in re.split(r"(?<=[.!?])[)\"*]*\s+(?=[A-Z\"(*])", block):
            if len(sentence.split()) > 1:
                yield sentence.strip("#*_ ")


def _blocks(lines: Iterable[str]) -> Iterator[str]:
    """Yields paragraphs, list items, table cells and entries of `Args:`, each in one line."""
    block = ""
    for line in [*lines, ""]:
        text = line.strip()
        starts = re.match(r"([-*>] |\d+\. |#+ |\||[\w*, ]+: )", text)
        if not text or starts:
            if block:
                yield block
            block = ""
        if text.startswith("|"):
            yield from (cell.strip() for cell in text.strip("|").split("|") if cell.strip(" -:"))
        elif text.startswith("#"):
            yield text
        else:
            block = f"{block} {re.sub(r'^([-*>]|[0-9]+[.]) ', '', text)}".strip()


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
