"""The screen of a terminal, from the bytes that a program printed: enough for prompts that redraw themselves."""

from __future__ import annotations

import re

_PIECE = re.compile(r"\x1b\[([?0-9;]*)([a-zA-Z])|([\r\n\b])|([^\x1b\r\n\b]+)")


def lines_of(output: str, columns: int) -> list[str]:
    """Returns the lines on the screen after this output, without blanks at their ends.

    Example:
        >>> lines_of("choose\\r\\n> a\\r\\n  b\\x1b[1A\\r\\x1b[Jchosen: a\\r\\n", 40)
        ['choose', 'chosen: a']
    """
    rows: list[list[str]] = [[]]
    row = column = 0
    for numbers, command, control, words in _PIECE.findall(output):
        count = int(numbers) if numbers.isdigit() else 1
        if control == "\r" or control == "\b":
            column = 0 if control == "\r" else max(0, column - 1)
        elif control == "\n":
            row += 1
        elif command in "AB" and command:
            row = max(0, row - count) if command == "A" else row + count
        elif command in "CD" and command:
            column = min(columns - 1, column + count) if command == "C" else max(0, column - count)
        elif command in "JK" and command:
            del rows[row][column:]
            if command == "J":
                del rows[row + 1 :]
        for letter in words:
            if column == columns:
                row, column = row + 1, 0
            rows += [[] for _ in range(row + 1 - len(rows))]
            rows[row] += [" "] * (column + 1 - len(rows[row]))
            rows[row][column] = letter
            column += 1
        rows += [[] for _ in range(row + 1 - len(rows))]
    texts = ["".join(line).rstrip() for line in rows]
    while texts and not texts[-1]:
        texts.pop()
    return texts
