"""The documents for developers: their length, the files and tests that they name, and how docstrings begin."""

import ast
import re
from pathlib import Path

import pytest

from tests.support.trees import forget_trees, nodes_of, text_of

ROOT = Path(__file__).parent.parent
FOLDERS = ["kernels", "storage", "graph", "oneemb"]
READMES = sorted(path for folder in FOLDERS for path in (ROOT / folder).rglob("README.md"))
DECISIONS = sorted((ROOT / "docs" / "decisions").glob("*.md"))
DOCUMENTS = [*map(ROOT.joinpath, ["ARCHITECTURE.md", "CONTRIBUTING.md", "tests/README.md"]), *DECISIONS, *READMES]


@pytest.fixture(scope="module", autouse=True)
def no_trees_stay():
    yield
    forget_trees()


def named_files(text):
    """Files that a text names in backticks or as a link; a pattern with `*` too, none with a `<name>` to fill in."""
    quoted = re.findall(r"`([\w./*-]+(?:\.(?:py|pyi|md|json|c|cpp)|/))(?:::[\w.\[\]-]+)?`", text)
    return quoted + re.findall(r"\]\(([\w./-]+)\)", text)


def is_there(name, document):
    """Whether a file of this name lies in the folder of the document, the root, or a folder that need not be named."""
    bases = [document.parent, *(ROOT / base for base in ("", "oneemb", "benchmarks", "tests"))]
    bases += (ROOT / "tests").iterdir() if document.parent.name == "tests" else ()
    return any(any(base.glob(name.rstrip("/"))) for base in bases if base.is_dir())


def named_tests(text):
    """(file, function) of each test that a text names."""
    return re.findall(r"`([\w/]+\.py)::(test_\w+)", text)


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: str(path.relative_to(ROOT)))
def test_files_and_tests_that_a_document_names_are_there(document):
    text = text_of(document)
    missing = [name for name in named_files(text) if not is_there(name, document)]
    for name, function in named_tests(text):
        path = next((base / name for base in (ROOT, ROOT / "tests") if (base / name).is_file()), None)
        shortened = function.endswith("_")  # `test_a_kill_at_any_file_call_...` in tests/README.md
        if path is None or not re.search(rf"def {function}{'' if shortened else chr(92) + '('}", text_of(path)):
            missing.append(f"{name}::{function}")
    assert not missing


def test_a_name_that_is_missing_is_found():
    text = "`a.py`, [b](c/d.md), `tests/e.py::test_f`, `kernels/update_*.py`, `kernels/update_<name>.py`, `word`"
    assert named_files(text) == ["a.py", "tests/e.py", "kernels/update_*.py", "c/d.md"]
    assert named_tests(text) == [("tests/e.py", "test_f")]
    assert is_there("kernels/update_*.py", ROOT / "a.md") and not is_there("kernels/gone_*.py", ROOT / "a.md")


def test_documents_are_read_at_one_go():
    lines = {str(path.relative_to(ROOT)): text_of(path).count("\n") for path in [DOCUMENTS[0], *READMES]}
    assert not {name: n for name, n in lines.items() if n > (220 if name == "ARCHITECTURE.md" else 80)}


def invariants(text):
    """Paragraphs that begin with **Invariant:**."""
    return [one for one in text.split("\n\n") if one.startswith("**Invariant:**")]


def test_an_invariant_stands_beside_its_test():
    found = [one for path in [DOCUMENTS[0], *READMES] for one in invariants(text_of(path))]
    assert len(found) > 80
    assert not [one for one in found if "Held by `tests/" not in one.replace("\n", " ")]


# ---- docstrings ------------------------------------------------------------------------------------------------------

# A docstring begins with its subject or its verb, not with a pronoun or with a clause that stands for a noun.
PRONOUN = re.compile(
    r"\W*(What|Which|Who|Whose|Whom|Whoever|Whatever|Where|Wherever|How|Why|That|Those|These|This|It|Its|They|Their|Them"
    r"|There|Such|Of|(By|In|With|As|For|On|To|From) (what|which|whom)|(All|One|Some|Each|Any|None) (of|that|there))\b"
)
PRONOUNS_MAX = 20


def docstrings_with_pronouns(text):
    """First lines of the docstrings that begin with a pronoun or a relative clause, as `line: text`."""
    for node in nodes_of(text):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            body = node.body and node.body[0]
            if PRONOUN.match(ast.get_docstring(node, clean=False) or ""):
                yield f"{body.lineno}: {ast.get_docstring(node).splitlines()[0]}"


def test_few_docstrings_begin_with_a_pronoun_or_a_relative_clause():
    found = [
        f"{path.relative_to(ROOT)}:{line}"
        for folder in FOLDERS
        for path in sorted((ROOT / folder).rglob("*.py"))
        for line in docstrings_with_pronouns(text_of(path))
    ]
    assert len(found) <= PRONOUNS_MAX, "\n".join(found)


def test_a_docstring_that_begins_with_a_pronoun_is_found():
    text = '"""Rows of a table."""\ndef f():\n    """\n    Which rows."""\nclass A:\n    """One of several."""\n'
    assert list(docstrings_with_pronouns(text)) == ["3: Which rows.", "6: One of several."]
    assert not list(docstrings_with_pronouns('"""Whether it is."""\ndef f():\n    """One weight."""\n'))


# ---- words -----------------------------------------------------------------------------------------------------------

# Words of earlier versions, in names and sentences: ARCHITECTURE.md has the words of the field that took their place.
OLD_WORDS = re.compile(r"\b(lent|ledger|asking|lies? still|gives? way|undisturbed)\b", re.IGNORECASE)
KEPT = re.compile(r'"ledger"|::test_\w+')  # A serialized key; names of tests in documents.


def old_words(text):
    """Lines with an old word, as `line: word`; names are read as their words."""
    for number, line in enumerate(text.splitlines(), 1):
        words = re.sub(r"(?<=[a-z])(?=[A-Z])", " ", KEPT.sub("", line).replace("_", " "))
        yield from (f"{number}: {word}" for word in OLD_WORDS.findall(words))


def test_no_old_word_stands_in_names_or_sentences():
    paths = [path for folder in FOLDERS for path in sorted((ROOT / folder).rglob("*.py"))]
    found = {str(path.relative_to(ROOT)): list(old_words(text_of(path))) for path in [*paths, *DOCUMENTS]}
    assert not any(found.values()), {path: words for path, words in found.items() if words}


def test_an_old_word_is_found():
    assert list(old_words('class LentRows:\n    lies_still = 1\n\n\nmeta["ledger"]  # The Ledger\n')) == [
        "1: Lent", "2: lies still", "5: Ledger",
    ]  # fmt: skip
    assert not list(old_words("silently = still = ways  # the lies that give ways"))
