"""`run_code` gives what `subprocess.run` of `python -c` gives."""

import multiprocessing
import subprocess
import sys

import pytest

from tests.support.forks import run_code

PRINTS = """
import os, sys
print(sys.argv[1:], __name__, os.getcwd(), os.environ.get("OF_TEST"), os.environ.get("GIVEN"))
print("to stderr", file=sys.stderr)
"""


def test_output_arguments_folder_and_variables_are_those_of_a_new_interpreter(tmp_path, monkeypatch):
    assert run_code("").returncode == 0  # The server runs already when the variable below is set.
    monkeypatch.setenv("OF_TEST", "1")
    found = run_code(PRINTS, "a", 2, cwd=tmp_path, environment={"GIVEN": "2"})
    monkeypatch.setenv("GIVEN", "2")
    command = [sys.executable, "-c", PRINTS, "a", "2"]
    expected = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True)
    assert "1 2" in expected.stdout
    assert (found.returncode, found.stdout, found.stderr) == (0, expected.stdout, expected.stderr)


@pytest.mark.parametrize(
    ("code", "status", "text"),
    [("import sys; sys.exit(3)", 3, ""), ("1 / 0", 1, "ZeroDivisionError"), ("import os; os.abort()", -6, "")],
)
def test_exit_codes_are_those_of_a_process(code, status, text):
    done = run_code(code)
    assert done.returncode == status and text in done.stderr


def test_code_that_does_not_end_is_killed():
    before = set(multiprocessing.active_children())
    with pytest.raises(subprocess.TimeoutExpired):
        run_code("import time; time.sleep(600)", seconds=0.1)
    assert set(multiprocessing.active_children()) <= before


def test_code_is_killed_when_the_test_is_interrupted(monkeypatch):
    def interrupt(process, seconds=None):
        monkeypatch.undo()
        raise KeyboardInterrupt

    before = set(multiprocessing.active_children())
    monkeypatch.setattr(multiprocessing.process.BaseProcess, "join", interrupt)
    with pytest.raises(KeyboardInterrupt):
        run_code("import time; time.sleep(600)")
    assert set(multiprocessing.active_children()) <= before
