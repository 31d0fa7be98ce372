"""Copies files and functions of the tree into pages: `python docs/site/quoted_code.py` updates the pages.

A page has a marker `<!-- code: path/of/file.py:Name.of.function -->` and a block after it: the function from the file,
with its docstring cut to the first paragraph. Without a name the block is the whole file without its docstring.
tests/unit/house/test_documents.py compares the two.
"""

from __future__ import annotations

import ast
import re
import textwrap
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
# The fence has attributes, so that tests/e2e does not run a quotation as an example.
_QUOTED = re.compile(r"(<!-- code: ([\w/.]+)(?::([\w.]+))? -->\n)```.*?\n```\n", re.DOTALL)


def with_quotations(text: str) -> str:
    """Returns the page with every quotation updated from the tree."""

    def block(match: re.Match[str]) -> str:
        language = Path(match[2]).suffix.lstrip(".")
        return f"{match[1]}``` {language}\n{quotation(match[2], match[3]) if match[3] else whole(match[2])}```\n"

    return _QUOTED.sub(block, text)


def whole(path: str) -> str:
    """Returns a file; of a Python file, the lines after its docstring."""
    source = (ROOT / path).read_text()
    if path.endswith(".py") and ast.get_docstring(tree := ast.parse(source)) is not None:
        source = "".join(source.splitlines(keepends=True)[tree.body[0].end_lineno :]).lstrip("\n")
    return source


def quotation(path: str, name: str) -> str:
    """Returns the source of a function or method, dedented, with the first paragraph of its docstring."""
    source = (ROOT / path).read_text()
    node: ast.AST = ast.parse(source)
    for part in name.split("."):
        kinds = (ast.ClassDef, ast.FunctionDef)
        node = next(child for child in ast.iter_child_nodes(node) if isinstance(child, kinds) and child.name == part)
    assert isinstance(node, ast.FunctionDef), name
    lines = source.splitlines(keepends=True)
    first = min([node.lineno, *(decorator.lineno for decorator in node.decorator_list)]) - 1
    docstring = node.body[0]
    if ast.get_docstring(node) is None:
        return textwrap.dedent("".join(lines[first : node.end_lineno]))
    paragraph, _, rest = (ast.get_docstring(node) or "").partition("\n\n")
    head = "".join(lines[first : docstring.lineno - 1])
    body = "".join(lines[docstring.end_lineno : node.end_lineno])
    if not rest:
        return textwrap.dedent("".join(lines[first : node.end_lineno]))
    short = textwrap.indent(f'"""{paragraph}"""\n', " " * docstring.col_offset)
    return textwrap.dedent(head + short + body)


def main() -> None:
    """Writes every page that quotes code."""
    for page in (ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))):
        text = page.read_text()
        if (new := with_quotations(text)) != text:
            page.write_text(new)
            print(f"written: {page.relative_to(ROOT)}")


if __name__ == "__main__":
    main()
