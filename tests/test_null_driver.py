"""Counts of calls that the host makes for launches on a GPU, on a driver that does nothing (null_driver.c)."""

import importlib.util
import json
import subprocess
import sys
from pathlib import Path

import pytest

SUPPORT = Path(__file__).parent / "support"
ROOT = SUPPORT.parent.parent

pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("numba_cuda") is None, reason="numba-cuda is not installed: pip install 'oneemb[cuda]'"
)


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """Runs null_steps.py; returns what it has counted."""
    from null_gpu import build, compiler

    if compiler() is None:
        pytest.skip("there is no C compiler for the driver that does nothing")
    variables = build(tmp_path_factory.mktemp("driver"))
    variables["PYTHONPATH"] = f"{ROOT}:{SUPPORT}"

    def run():
        rows = tmp_path_factory.mktemp("rows")
        command = [sys.executable, str(SUPPORT / "null_steps.py"), str(rows)]
        done = subprocess.run(command, capture_output=True, text=True, env=variables)
        assert done.returncode == 0, done.stderr
        return json.loads(done.stdout.splitlines()[-1])

    return run


@pytest.fixture(scope="module")
def counted(run):
    return run()


@pytest.mark.parametrize(("name", "launches"), [("step", 12), ("step of many ids", 13), ("eval", 2)])
def test_a_lookup_launches_few_loops_and_each_is_one_call_of_the_driver(counted, name, launches):
    found = counted[name]
    assert 0 < found["launches"] <= launches and found["waits"] == 0
    assert found["launches of the driver"] == found["launches"] == len(found["loops"])


# Loops that follow each other are launched together.
@pytest.mark.parametrize(("name", "together"), [("step", 7), ("step of many ids", 7), ("eval", 2)])
def test_launches_are_four_calls_of_python_and_ask_the_driver_for_the_context_once(counted, name, together):
    found = counted[name]
    assert found["calls of the driver"] - found["launches of the driver"] <= together
    assert found["Python calls of launches"] <= 4 * together


@pytest.mark.parametrize("name", ["step", "step of many ids", "eval"])
def test_a_repeated_step_writes_no_address_of_a_tensor_with_words(counted, name):
    assert counted[name]["words are others"] == []


@pytest.mark.parametrize("name", ["step", "step of many ids", "eval"])
def test_arguments_are_packed_as_numba_packs_them(counted, name):
    assert counted[name]["loops"] and counted[name]["packed otherwise"] == []


def test_launches_of_shapes_in_turn_are_repeated_and_packed_as_numba_packs_them(counted):
    found = counted["repeated"]
    assert found["packed otherwise"] == [] and found["repeats"] > found["loops"] / 4


def test_a_repeated_launch_takes_tensors_that_are_kept_and_others(counted):
    assert counted["kept in turn"] == {"same": True, "repeats": 5}


def test_a_second_process_compiles_nothing(counted, run):
    assert run()["compiled"] == []


def test_errors_name_the_loop(counted):
    errors = counted["errors"]
    assert errors["launch"].startswith("DriverError: cannot launch slots_cuda.release_loop on 1 x (256, 1) threads")
    assert "(700)" in errors["launch"] and errors["launch after it"] == ""
    assert errors["context"].startswith("DriverError: cannot set back the CUDA context of the thread after a launch: ")
    assert errors["no memory"].startswith("DriverError: cannot load slots_cuda.release_loop on the GPU: ")
    for name in ("gaps", "dtype"):
        assert errors[name].startswith("TypeError: cannot launch slots_cuda.release_loop: a loop takes no tensor of")


def test_an_error_among_loops_that_are_launched_together_names_its_loop_and_stops_the_rest(counted):
    for text, launched, context in counted["an error among three"]:
        assert text.startswith("cannot launch slots_cuda.count_pinned_loop on 1 x (256, 1) threads") and "(700)" in text
        assert (launched, context) == (2, None)


def test_a_call_that_fails_for_want_of_memory_has_launched_nothing(counted):
    assert counted["launches without memory"] == [1, 0, 1, 1]


def test_a_driver_that_takes_no_cubin_gets_ptx(counted):
    assert counted["errors"]["code of another driver"] == "" and counted["errors"]["loads"] == 2


def test_a_launch_leaves_the_context_of_its_thread(counted):
    assert counted["threads"] == {
        "none": [None, None, None], "own": [True, None, True], "other": [None, True], "buffers": 2,
        "buffers of repeated launches": 2,
    }  # fmt: skip


def test_a_launch_within_a_launch_leaves_its_arguments(counted):
    assert counted["nested"] == [True, True]


def test_launches_within_a_launch_at_any_call_leave_its_arguments(counted):
    same, launches = counted["nested anywhere"]
    assert same and launches > 500
