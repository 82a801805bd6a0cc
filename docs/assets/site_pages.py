"""Hook of MkDocs: documents outside docs/ that are pages of the site, and links to files that are not."""

import posixpath
import re
from pathlib import Path
from typing import Any

import click
from mkdocs.structure.files import File, Files

from oneemb.cli import commands

ROOT = Path(__file__).resolve().parents[2]

PAGES = {
    "ARCHITECTURE.md": "source/architecture.md",
    "CONTRIBUTING.md": "source/contributing.md",
    "CHANGELOG.md": "source/changelog.md",
    "examples/README.md": "source/examples.md",
    "storage/table/FORMAT.md": "reference/table-format.md",
    "storage/serving/FORMAT.md": "reference/serving-format.md",
}
"""Where a document of the tree stands in the site."""

_PICTURE = re.compile(
    r'<picture>\s*<source[^>]*srcset="(?P<dark>[^"]+)">\s*<img src="(?P<light>[^"]+)" alt="(?P<alt>[^"]*)">'
    r"\s*</picture>"
)
_LINK = re.compile(r"(?<!!)\[([^\]\n]+)\]\(([^)\s#:]+)(#[^)\s]*)?\)")


def on_files(files: Files, config: Any) -> Files:
    for source, page in PAGES.items():
        files.append(File.generated(config, page, abs_src_path=str(ROOT / source)))
    files.append(File.generated(config, "reference/cli.md", content=_command_line()))
    return files


def _command_line() -> str:
    """Page of the commands, from their own help."""
    lines = ["# Command line", "", "`pip install oneemb` installs the command `oneemb`, also `python -m oneemb`.", ""]
    for name, command in sorted(commands.oneemb.commands.items()):
        parts = {f"{name} {sub}": one for sub, one in getattr(command, "commands", {}).items()} or {name: command}
        for title, one in parts.items():
            context = click.Context(one, info_name=f"oneemb {title}", max_content_width=100)
            lines += [f"## oneemb {title}", "", "```text", one.get_help(context), "```", ""]
    return "\n".join(lines)


def on_page_markdown(markdown: str, page: Any, config: Any, files: Files) -> str:
    """The page with each link to a file that is no page of the site as text, and pictures that follow the site's theme.

    Before:  [a server](../examples/serve.py), [the format](../storage/table/FORMAT.md)
    After:   a server (`examples/serve.py`), [the format](reference/table-format.md)
    """
    uri = page.file.src_uri
    origin = next((source for source, target in PAGES.items() if target == uri), f"docs/{uri}")

    def linked(found: re.Match[str]) -> str:
        text, target, anchor = found[1], found[2], found[3] or ""
        path = posixpath.normpath(posixpath.join(posixpath.dirname(origin), target))
        site = PAGES.get(path, path.removeprefix("docs/") if path.startswith("docs/") else None)
        if site is not None:
            return f"[{text}]({posixpath.relpath(site, posixpath.dirname(uri) or '.')}{anchor})"
        if not (ROOT / path).exists():
            return found[0]  # MkDocs says what is missing
        return text if text.strip("`").rstrip("/") in path else f"{text} (`{path}`)"

    markdown = _PICTURE.sub(r"![\g<alt>](\g<light>#only-light)\n![\g<alt>](\g<dark>#only-dark)", markdown)
    return _LINK.sub(linked, markdown)
