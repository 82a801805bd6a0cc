"""Pages of docs/ that repeat what the code says: options, errors, messages and commands."""

import ast
import dataclasses
import inspect
import re
from pathlib import Path

import click
import pytest

import oneemb
from oneemb.cli.commands import oneemb as command_line

ROOT = Path(__file__).resolve().parents[2]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]


def table_rows(page):
    """Cells of each line of the tables of a page."""
    lines = [line for line in page.read_text().splitlines() if line.startswith("| ")]
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]


# ---- options ---------------------------------------------------------------------------------------------------------


def options_page():
    """{argument: default} of docs/reference/options.md."""
    found = {}
    for name, default, *_ in (row for row in table_rows(ROOT / "docs/reference/options.md") if len(row) > 2):
        for one in re.findall(r"`(\w+)`", name):
            found.setdefault(one, set()).add(default.strip("`"))
    return found


def defaults_of(function):
    its = inspect.signature(function).parameters.values()
    return {
        one.name: "" if one.default is one.empty else str(one.default) if "torch" in str(one.default) else
        repr(one.default) for one in its if one.name != "self"
    }  # fmt: skip


@pytest.mark.parametrize(
    "function",
    [
        oneemb.MultiTableEmbedding,
        oneemb.make_table,
        oneemb.make_device_mem_store_options,
        oneemb.make_cached_host_mem_store_options,
        oneemb.make_cached_ssd_store_options,
        oneemb.make_cached_remote_store_options,
    ],
    ids=lambda function: function.__name__,
)
def test_the_page_of_options_has_each_argument_with_its_default(function):
    page = options_page()
    missing = {name: value for name, value in defaults_of(function).items() if value not in page.get(name, ())}
    assert not missing


def test_the_page_of_options_has_initializers_and_the_options_of_graphs():
    page = options_page()
    for field in dataclasses.fields(oneemb.GraphConfig):
        assert repr(field.default) in page[field.name]
    text = (ROOT / "docs/reference/options.md").read_text()
    for name in ("constant", "uniform", "normal", "trunc_normal"):
        its = defaults_of(getattr(oneemb, f"make_{name}_initializer"))
        arguments = ", ".join(f"`{one}={default}`" if default else f"`{one}`" for one, default in its.items())
        assert f"| `make_{name}_initializer` | {arguments} |" in text


# ---- errors ----------------------------------------------------------------------------------------------------------


def test_each_public_error_has_a_cause_and_a_cure():
    rows = [row for row in table_rows(ROOT / "docs/reference/errors.md") if len(row) == 3]
    named = {name for row in rows if row[1] and row[2] for name in re.findall(r"`(\w+Error)`", row[0])}
    public = {name for name in oneemb.__all__ if name.endswith("Error")}
    assert public - named == {"StorageError"}, "StorageError is their base"
    assert named <= public


def texts_of_the_code():
    """All text literals of the product, with a line break for each value in an f-string."""
    texts = []
    for folder in ("oneemb", "graph", "storage", "kernels"):
        for path in (ROOT / folder).rglob("*.py"):
            for node in ast.walk(ast.parse(path.read_text())):
                if isinstance(node, ast.JoinedStr):
                    texts.append("".join(p.value if isinstance(p, ast.Constant) else "\n" for p in node.values))
                elif isinstance(node, ast.Constant) and isinstance(node.value, str):
                    texts.append(node.value)
    return "\n\n".join(texts)


def test_the_messages_of_troubleshooting_are_those_of_the_code():
    code, unknown = texts_of_the_code(), []
    for symptom, *_ in table_rows(ROOT / "docs/troubleshooting.md"):
        for quoted in re.findall(r"`([^`]+ [^`]+)`", symptom):
            unknown += [quoted for part in quoted.split("...") if not is_written(part, code)]
    assert not unknown


def is_written(part, code):
    """Whether the code has these words, between the values of a message."""
    part = re.sub(r"^(\w+Error: )", "", part).strip()
    return part == "No space left on device" or part in code


# ---- commands --------------------------------------------------------------------------------------------------------


def commands_of(text):
    """Lines of blocks that are no Python, and pieces in backticks, that call `oneemb`, make, or a script."""
    blocks = re.findall(r"^```(?:sh|console|text)?\n(.*?)^```", text, re.DOTALL | re.MULTILINE)
    lines = "\n".join(blocks).replace("\\\n", " ").splitlines() + re.findall(r"`([^`\n]+)`", text)
    return [line.strip() for line in lines if re.match(r"\s*(oneemb [a-z]|make [a-z]|(\S+/)?python\S* \w+/)", line)]


def problem_of(line):
    """Text that says why a command line cannot run, or None."""
    words = re.sub(r"\s#.*|&$", "", line).split()
    if words[0] == "make":
        targets = re.findall(r"^([\w-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE)
        return None if words[1] in targets else f"no target {words[1]}"
    if words[0] != "oneemb":
        return None if (ROOT / words[1]).is_file() else f"no file {words[1]}"
    command, rest = command_line, words[1:]
    while isinstance(command, click.Group) and rest:
        name = rest.pop(0)
        if any(not name.strip("|").replace("|", "").replace("-", "").isalpha() for _ in name):
            return f"no command {name}"
        chosen = [command.commands.get(one) for one in name.split("|")]
        if None in chosen:
            return f"no command {name}"
        command = chosen[0]
    known = {option for its in command.params for option in its.opts}
    return next((f"no option {word}" for word in rest if word.startswith("--") and word.partition("=")[0] not in known),
                None)  # fmt: skip


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_the_commands_of_a_page_exist(page):
    problems = {line: problem for line in commands_of(page.read_text()) if (problem := problem_of(line))}
    assert not problems


def test_a_command_that_is_gone_is_found():
    text = "```\noneemb gone PATH\nmake gone\npython examples/gone.py\n```\n`oneemb check --gone PATH`"
    assert [problem_of(line) for line in commands_of(text)] == [
        "no command gone", "no target gone", "no file examples/gone.py", "no option --gone",
    ]  # fmt: skip
    assert commands_of("`oneemb snapshot list items`\n```python\nmake = 1\n```\n") == ["oneemb snapshot list items"]
    assert problem_of("oneemb snapshot list items") is None
