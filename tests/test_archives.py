"""Archives for a package index: tests of the source archive run, the wheel works, links of its page lead to files."""

import os
import re
import sys
import tarfile
import zipfile
from email.parser import BytesParser
from pathlib import Path

import pytest

from tests.support.archives import ROOT, TRAINS, built, named_by_git, run
from tests.support.once import made_once

IS_IN = "import pathlib, oneemb; print(pathlib.Path(oneemb.__file__).parent.parent)"
HELD = ("benchmarks", "constraints", "docs", "examples", "tests")

pytestmark = pytest.mark.skipif(not (ROOT / ".git").exists(), reason="the list of files is git's")


@pytest.fixture(scope="module")
def wheel(tmp_path_factory):
    folder = made_once(tmp_path_factory, "wheel", lambda folder: built(folder, "wheel"))
    return next(folder.glob("*.whl"))


def test_the_source_archive_holds_what_the_repository_has_and_its_tests_run(tmp_path):
    archive = built(tmp_path, "sdist")
    with tarfile.open(archive) as file:
        file.extractall(tmp_path, filter="data")
    tree = tmp_path / archive.name.removesuffix(".tar.gz")
    assert [name for name in named_by_git() if name.startswith(HELD) and not (tree / name).exists()] == []
    shown = run(
        tree, sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "tests/examples/test_quickstart.py",
        "tests/test_hashing.py", env={**os.environ, "PYTHONPATH": ""},
    )  # fmt: skip
    assert "passed" in shown


def test_an_installed_wheel_trains_in_any_folder_and_in_the_clone(wheel, tmp_path):
    installed = tmp_path / "installed"
    with zipfile.ZipFile(wheel) as file:
        file.extractall(installed)
    environment = {**os.environ, "PYTHONPATH": str(installed)}
    assert run(tmp_path, sys.executable, "-c", TRAINS, env=environment).split() == ["2", str(installed)]
    # A program in the clone takes the clone's package, a script elsewhere the installed one.
    assert run(ROOT, sys.executable, "-c", IS_IN, env=environment).strip() == str(ROOT)
    script = tmp_path / "script.py"
    script.write_text(IS_IN)
    assert run(ROOT, sys.executable, script, env=environment).strip() == str(installed)


def test_an_index_names_author_and_keywords_and_every_link_leads_to_a_file_of_the_tree(wheel):
    with zipfile.ZipFile(wheel) as file:
        name = next(name for name in file.namelist() if name.endswith(".dist-info/METADATA"))
        metadata = BytesParser().parsebytes(file.read(name))
    assert metadata["Author"] and "pytorch" in metadata["Keywords"].split(",")
    urls = dict(url.split(", ") for url in metadata.get_all("Project-URL"))
    assert urls.keys() == {"Documentation", "Source", "Changelog", "Issues"}
    text = metadata.get_payload()
    links = [a or b for a, b in re.findall(r'\]\(([^)\s]+)\)|\bsrc(?:set)?="([^"]+)"', text)]
    readme = (ROOT / "README.md").read_text()
    assert len(links) == readme.count("](") + readme.count('src="') + readme.count('srcset="') > 15
    for link in [*links, urls["Documentation"], urls["Changelog"]]:
        place = re.fullmatch(rf"{re.escape(urls['Source'])}/(?:blob|raw)/main/([^#]+)(?:#.+)?", link)
        assert place and Path(ROOT, place[1]).is_file(), link
