"""The tests nearest to a change are found by imports."""

from pathlib import Path

import pytest

from tests import changed

ROOT = Path(__file__).parent.parent


def test_names_that_the_package_loads_lazily_are_imports_of_their_modules():
    found = changed.imports(ROOT / "tests" / "test_step_cost.py")
    assert {"benchmarks/_case.py", "benchmarks/_small.py", "kernels/threads.py"} <= found
    found = changed.imports(ROOT / "tests" / "test_train_graph.py")
    assert {"oneemb/train_graph.py", "graph/build_error.py"} <= found


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
