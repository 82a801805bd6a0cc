"""Text for people: tables in columns, and text that a notebook shows in lines."""

import html
from collections.abc import Sequence


class ShownText(str):
    """Text that a notebook shows in lines and a monospaced font when it is the result of a cell."""

    __slots__ = ()

    def _repr_html_(self) -> str:
        return html_of_text(self)


def html_of_text(text: str) -> str:
    """HTML of lines of text in a monospaced font, which notebooks do not give `<pre>` by themselves."""
    return f'<pre style="font-family:monospace;line-height:1.2">{escaped(text)}</pre>'


def escaped(text: str) -> str:
    """HTML of text."""
    return html.escape(printable(text))


def printable(text: str) -> str:
    """Text in which codes, such as `\\x01`, stand for the characters that cannot be printed; ends of lines stay."""
    return "".join(
        one if one == "\n" or one.isprintable() else one.encode("unicode_escape").decode("ascii") for one in text
    )


def aligned(table: Sequence[Sequence[str]], left: int = 1) -> str:
    """Text of a table: the first `left` columns aligned left, the others right."""
    widths = [max(map(len, column)) for column in zip(*table, strict=True)]
    return "\n".join(
        "  ".join(
            cell.ljust(w) if i < left else cell.rjust(w) for i, (cell, w) in enumerate(zip(row, widths, strict=True))
        ).rstrip()
        for row in table
    )
