"""Options that all commands have, and their output as text, as JSON and as a progress bar."""

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager

import click
from tqdm import tqdm

FOLDER = click.Path(exists=True, file_okay=False)
"""Type of an argument that must be an existing folder."""


def json_option(command: Callable[..., None]) -> Callable[..., None]:
    """Decorator that adds the flag `--json` to a command, as its argument `as_json`."""
    return click.option("--json", "as_json", is_flag=True, help="Write one JSON object to the standard output.")(
        command
    )


def tell(as_json: bool, result: Mapping[str, object], *lines: str) -> None:
    """Print the result as JSON, or the lines if `as_json` is False."""
    click.echo(json.dumps(result) if as_json else "\n".join(lines))


@contextmanager
def progress_bar(as_json: bool, what: str, unit: str) -> Iterator[Callable[[int, int | None], None]]:
    """Context of a progress bar, which is moved by calling (done, total). It shows nothing with JSON, or without a
    terminal."""
    in_bytes = unit == "B"
    with tqdm(
        desc=what, unit=unit if in_bytes else f" {unit}", unit_scale=in_bytes, unit_divisor=1024,
        disable=True if as_json else None, leave=False,
    ) as bar:  # fmt: skip

        def move(done: int, total: int | None) -> None:
            bar.total = total
            bar.update(done - bar.n)

        yield move


def size_text(size: float) -> str:
    """Number of bytes as text, such as "1.5 MiB"."""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if abs(size) < 1024:
            return f"{size:.0f} B" if unit == "B" else f"{size:.1f} {unit}"
        size /= 1024
    return f"{size:.1f} TiB"


def table_lines(columns: tuple[str, ...], rows: Sequence[tuple[str, ...]], none: str) -> list[str]:
    """Lines of an aligned text table; only the line `none` if there are no rows."""
    if not rows:
        return [none]
    width = [max(len(row[c]) for row in (columns, *rows)) for c in range(len(columns))]
    return [
        "  " + "  ".join(cell.ljust(w) for cell, w in zip(row, width, strict=True)).rstrip() for row in (columns, *rows)
    ]
