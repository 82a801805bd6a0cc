"""Two revisions of a small tree compared from end to end, with cases whose cost is known."""

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from _checkout import link_packages

ROOT = Path(__file__).parents[2]

pytestmark = pytest.mark.skipif(shutil.which("git") is None, reason="there is no git")

CASES = """
import time

from _case import Measured

import oneemb
from oneemb import kernels


def wait(calls):
    time.sleep(0.02)
    return 1.0


COMPARED = {
    "cost": lambda: Measured(lambda calls: oneemb.COST, lambda: None),
    "inner": lambda: Measured(lambda calls: kernels.COST, lambda: None),
    "later": lambda: Measured(lambda calls: oneemb.LATER, lambda: None),
    "wait": lambda: Measured(wait, lambda: None),
}
"""

SETUP = "[options]\npackage_dir =\n    oneemb = {outer}\n    oneemb.kernels = {inner}\n"


def git(root, *arguments):
    names = ["-c", "user.name=a", "-c", "user.email=a@b"]
    return subprocess.run(["git", "-C", root, *names, *arguments], check=True, capture_output=True, text=True).stdout


def commit(root, outer, inner, text, inner_text):
    """A revision whose packages lie in these folders."""
    for folder, its in ((outer, text), (inner, inner_text)):
        (root / folder).mkdir(parents=True, exist_ok=True)
        (root / folder / "__init__.py").write_text(its)
    (root / "setup.cfg").write_text(SETUP.format(outer=outer, inner=inner))
    git(root, "add", ".")
    git(root, "commit", "-q", "-m", "a revision")


@pytest.fixture
def tree(tmp_path):
    """Two commits, `base` and the second of which has another layout, and costs of its own."""
    root = tmp_path / "repository"
    root.mkdir()
    git(root, "init", "-q")
    commit(root, "oneemb", "kernels", "COST = 1.0\n", "COST = 2.0\n")
    git(root, "tag", "base")
    git(root, "rm", "-rq", "oneemb", "kernels")
    commit(root, "src/oneemb", "src/loops", "COST = 1.2\nLATER = 1.0\n", "COST = 2.0\n")
    return root


def command(tree, base, *arguments):
    (tree.parent / "cases.py").write_text(CASES)
    return [
        sys.executable, ROOT / "benchmarks" / "compare.py", base, "--root", tree,
        "--case-file", tree.parent / "cases.py", *arguments,
    ]  # fmt: skip


def run(tree, base, *arguments):
    (tree.parent / "tmp").mkdir(exist_ok=True)
    environment = os.environ | {"TMPDIR": str(tree.parent / "tmp")}
    done = subprocess.run(command(tree, base, *arguments), capture_output=True, text=True, env=environment)
    assert not list((tree.parent / "tmp").iterdir()), "a folder was left behind"
    assert len(git(tree, "worktree", "list").splitlines()) == 1, "a worktree was left behind"
    return done


def test_a_slower_case_is_found_across_layouts_and_what_the_base_cannot_run_is_new(tree, tmp_path):
    out = tmp_path / "results" / "compare.json"
    done = run(tree, "base", "--cases", "cost", "inner", "later", "--out", out)
    assert done.returncode == 1, done.stderr
    assert "later: new, since the base cannot run it: AttributeError: module 'oneemb' has no" in done.stdout
    assert "not run: cost\n" in done.stdout
    saved = json.loads(out.read_text())
    assert saved["about"]["base"] == git(tree, "rev-parse", "--short=10", "base").strip()
    assert saved["about"]["new"] == git(tree, "rev-parse", "--short=10", "HEAD").strip() and saved["about"]["cpu"]
    cost, inner, later = saved["cases"]
    assert (
        cost["samples"] == [[1.0] * 12, [1.2] * 12]
        and [its["samples"] for its in cost["again"]] == [cost["samples"]] * 2
    )
    assert cost["comparison"]["ratio"] == 1.2 and cost["slower"]
    assert inner["comparison"]["ratio"] == 1.0 and not inner["slower"] and "again" not in inner
    assert later["base_cannot"]


def test_a_revision_is_not_slower_than_itself_and_changes_of_the_tree_count(tree):
    same = run(tree, "HEAD", "--cases", "cost", "--out", "")
    assert same.returncode == 0, same.stderr
    (tree / "src" / "oneemb" / "__init__.py").write_text("COST = 1.4\n")
    changed = run(tree, "HEAD", "--cases", "cost", "--out", "")
    assert changed.returncode == 1 and "-changed" in changed.stdout, changed.stderr
    back = run(tree, "base", "--new", "base", "--cases", "cost", "--out", "")
    assert back.returncode == 0, back.stderr


def test_what_this_tree_cannot_run_fails_and_what_does_not_exist_is_told(tree):
    lost = run(tree, "HEAD", "--new", "base", "--cases", "later", "inner", "--out", "")
    assert lost.returncode == 1 and "later: this revision cannot run it: AttributeError" in lost.stdout, lost.stderr
    unknown = run(tree, "no-such-revision", "--out", "", "--cases", "cost")
    assert unknown.returncode == 2 and "git knows no revision 'no-such-revision'" in unknown.stderr
    nothing = run(tree, "base", "--cases", "later", "--out", "")
    assert nothing.returncode == 2 and "nothing was compared" in nothing.stdout, nothing.stderr
    unnamed = run(tree, "base", "--cases", "no/*")
    assert unnamed.returncode == 2 and "no case is named like no/*" in unnamed.stderr


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_comparison_that_is_told_to_end_leaves_no_checkout(tree, tmp_path, number):
    (tmp_path / "tmp").mkdir()
    long = command(tree, "base", "--cases", "wait", "--rounds-min", "100000", "--rounds-max", "100000", "--out", "")
    process = subprocess.Popen(
        long, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, env=os.environ | {"TMPDIR": str(tmp_path / "tmp")}
    )
    while len(git(tree, "worktree", "list").splitlines()) == 1:
        assert process.poll() is None, process.stderr.read()
        time.sleep(0.05)
    process.send_signal(number)
    _, error = process.communicate(timeout=600)
    assert process.returncode in (130, 128 + signal.SIGTERM), error
    assert len(git(tree, "worktree", "list").splitlines()) == 1
    assert not list((tmp_path / "tmp").iterdir())


def test_every_layout_is_linked_as_the_packages_it_is_installed_as(tmp_path):
    (tmp_path / "flat" / "oneemb" / "graph").mkdir(parents=True)
    (tmp_path / "below" / "src" / "oneemb").mkdir(parents=True)
    for layout in ("flat/oneemb", "flat/oneemb/graph", "below/src/oneemb"):
        (tmp_path / layout / "__init__.py").write_text("")
    assert (link_packages(tmp_path / "flat", tmp_path / "1") / "oneemb/graph/__init__.py").exists()
    assert (link_packages(tmp_path / "below", tmp_path / "2") / "oneemb/__init__.py").exists()
    own = link_packages(ROOT, tmp_path / "3") / "oneemb"
    assert all((own / name / "__init__.py").exists() for name in ("graph", "storage", "kernels", "torchrec"))
