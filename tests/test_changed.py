"""The tests nearest to a change are found by imports."""

import subprocess
from pathlib import Path

import pytest

from tests import changed

ROOT = Path(__file__).parent.parent


def test_names_that_the_package_loads_lazily_are_imports_of_their_modules():
    found = changed.imports(ROOT / "tests" / "test_step_cost.py")
    assert {"benchmarks/_case.py", "benchmarks/_small.py", "kernels/threads.py"} <= found
    found = changed.imports(ROOT / "tests" / "test_train_graph.py")
    assert {"oneemb/training/train_graph.py", "graph/build_error.py"} <= found


def test_a_file_is_as_far_as_imports_lead():
    imports_of = {"a": {"b"}, "b": {"c", "a"}, "c": set(), "d": {"a", "c"}, "e": {"f"}, "f": set()}
    assert changed.distances(["c", "gone"], imports_of) == {"c": 0, "b": 1, "d": 1, "a": 2}


def test_the_nearest_come_first_as_many_as_fit_and_changed_ones_always():
    tests, seconds = {"own": 0, "far": 3, "near": 1, "long": 1}, {"own": 50.0, "near": 2.0, "long": 90.0, "far": 1.0}
    assert changed.nearest(tests, seconds, 53.0) == ["own", "near", "far"]
    assert changed.nearest(tests, seconds, 0.0) == ["own"]
    assert changed.nearest(tests, {}, 100.0) == ["own", "long", "near", "far"]


def test_tests_that_need_a_process_of_their_own_get_one():
    names = ["tests/test_cli.py", "tests/cuda/test_pool.py", "tests/cuda_compile/test_compile.py"]
    groups = [(group, set(environment)) for group, environment in changed.grouped(names)]
    assert groups == [
        (["tests/cuda/test_pool.py"], {"NUMBA_ENABLE_CUDASIM"}),
        (["tests/cuda_compile/test_compile.py"], {"ONEEMB_TEST_COMPILE"}),
        (["tests/test_cli.py"], set()),
    ]


def test_seconds_are_those_of_reports(tmp_path, monkeypatch):
    case = '<testcase file="tests/test_a.py" classname="tests.test_a" name="x" time="{}" />'
    (tmp_path / "one.xml").write_text(
        f"<testsuites><testsuite>{case.format(1.25)}{case.format(2)}</testsuite></testsuites>"
    )
    monkeypatch.setattr(changed, "SECONDS", tmp_path / "seconds.json")
    assert changed.main(["--record", str(tmp_path / "one.xml")]) == 0
    assert (tmp_path / "seconds.json").read_text() == '{\n"tests/test_a.py": 3.2\n}\n'


@pytest.mark.parametrize("name", ["kernels/hash_index.py", "oneemb/optim.py"])
def test_every_source_file_has_tests_near_it(name):
    far = changed.distances([name], {one: changed.imports(ROOT / one) for one in changed.source_files()})
    assert min(distance for one, distance in far.items() if changed.is_test(one)) == 1


def test_a_test_file_imports_each_conftest_above_it():
    found = changed.imports(ROOT / "tests" / "cuda" / "test_pool.py")
    assert {"tests/conftest.py", "tests/cuda/conftest.py"} <= found
    assert "tests/conftest.py" in changed.imports(ROOT / "tests" / "cuda" / "conftest.py")
    assert not any("conftest" in name for name in changed.imports(ROOT / "kernels" / "hash_index.py"))


@pytest.fixture
def repository(tmp_path, monkeypatch):
    """A git repository with a commit on the branch `main`; `changed` reads it."""
    monkeypatch.setattr(changed, "ROOT", tmp_path)
    for name in ("GIT_AUTHOR", "GIT_COMMITTER"):
        monkeypatch.setenv(f"{name}_NAME", "a")
        monkeypatch.setenv(f"{name}_EMAIL", "a@b")
    for name in ("kept", "moved", "deleted"):
        (tmp_path / f"{name}.py").write_text(f"{name} = {list(range(99))}\n")
    for command in (["init", "-q", "-b", "main"], ["add", "."], ["commit", "-qm", "first"]):
        subprocess.run(["git", *command], cwd=tmp_path, check=True)
    return tmp_path


def test_changed_files_are_those_of_commits_of_the_tree_and_new_ones(repository):
    changed.git("checkout", "-q", "--detach")
    changed.git("mv", "moved.py", "moved_to.py")
    changed.git("commit", "-qam", "second")
    (repository / "deleted.py").unlink()
    (repository / "new.py").touch()
    assert changed.changed_files("main") == ["deleted.py", "moved_to.py", "new.py"]


@pytest.mark.parametrize("base", ["not_fetched", "unrelated"])
def test_without_a_common_commit_the_error_says_what_to_do(repository, base):
    changed.git("checkout", "-q", "--orphan", "unrelated")
    changed.git("commit", "-qm", "another first")
    changed.git("checkout", "-q", "--detach", "main")
    with pytest.raises(SystemExit, match=f"no common commit with '{base}' is here: fetch it, or give --base"):
        changed.changed_files(base)


@pytest.mark.parametrize(("codes", "code"), [([0, -9, 0], -9), ([0, 1, 0], 1), ([0, 0, 0], 0)])
def test_a_process_of_tests_that_was_killed_is_a_failure(monkeypatch, codes, code):
    ended = iter(codes)
    names = ["tests/cuda/test_pool.py", "tests/cuda_compile/test_compile.py", "tests/test_cli.py"]
    monkeypatch.setattr(changed, "changed_files", lambda base: names)
    monkeypatch.setattr(changed, "source_files", lambda: names)
    monkeypatch.setattr(changed, "run", lambda *its: next(ended))
    assert changed.main([]) == code


def test_changed_files_that_no_test_imports_are_named(monkeypatch, capsys):
    monkeypatch.setattr(changed, "changed_files", lambda base: ["Makefile", "tests/test_cli.py", "kernels/gone.py"])
    monkeypatch.setattr(changed, "source_files", lambda: ["tests/test_cli.py", "tests/test_nightly.py"])
    assert changed.main(["--list"]) == 0
    said = capsys.readouterr().out
    assert "no test imports Makefile" in said and "no test imports kernels/gone.py" in said
    assert "no test imports tests/test_cli.py" not in said
