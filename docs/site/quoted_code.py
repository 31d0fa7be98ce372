"""Copies functions of the tree into pages that quote them: `python docs/site/quoted_code.py` updates the pages.

A page has a marker `<!-- code: path/of/file.py:Name.of.function -->` and a block after it: the function from the file,
with its docstring cut to the first paragraph. tests/unit/house/test_documents.py compares the two.
"""

from __future__ import annotations

import ast
import re
import textwrap
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
# The fence has attributes, so that tests/e2e does not run a quotation as an example.
_QUOTED = re.compile(r"(<!-- code: ([\w/.]+):([\w.]+) -->\n)```.*?\n```\n", re.DOTALL)


def with_quotations(text: str) -> str:
    """Returns the page with every quotation updated from the tree."""
    return _QUOTED.sub(lambda match: f"{match[1]}``` py\n{quotation(match[2], match[3])}```\n", text)


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
    for page in sorted((ROOT / "docs").glob("*.md")):
        text = page.read_text()
        if (new := with_quotations(text)) != text:
            page.write_text(new)
            print(f"written: {page.relative_to(ROOT)}")


if __name__ == "__main__":
    main()
