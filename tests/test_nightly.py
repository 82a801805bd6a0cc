"""Tests that draw say their seed, and the nightly script replays it."""

import subprocess
from pathlib import Path

import pytest

from tests import nightly
from tests.support.forks import run_code

ROOT = Path(__file__).parent.parent

DRAWS = """
from hypothesis import given, strategies

def test_draws(seed):
    with open({out!r}, "a") as file:
        print("seed", seed, file=file)
    assert seed % 2 == {odd}

@given(strategies.integers(0, 2**60))
def test_examples(number):
    with open({out!r}, "a") as file:
        print("example", number, file=file)

def test_draws_nothing():
    with open({out!r}, "a") as file:
        print("other", file=file)
"""


@pytest.fixture
def draws(tmp_path):
    """Writes a test file, and returns a function that runs it with a seed and gives the lines that its tests wrote."""
    file, out = tmp_path / "test_draws.py", tmp_path / "out"

    def run(*arguments, odd="seed % 2"):
        file.write_text(DRAWS.format(out=str(out), odd=odd))
        out.write_text("")
        options = ["-q", "-p", "tests.conftest", "-p", "no:cacheprovider"]
        done = run_code("import pytest, sys; sys.exit(pytest.main(sys.argv[1:]))", *options, *arguments, file, cwd=ROOT)
        return done, out.read_text().splitlines()

    return run


@pytest.mark.slow
def test_a_seed_gives_the_same_numbers_and_another_gives_others(draws):
    own, again = draws()[1], draws()[1]
    assert own == again and len(own) > 10
    one, replayed, two = (draws(f"--seed={seed}")[1] for seed in (1, 1, 2))
    assert one == replayed
    for kind in ("seed", "example"):
        drawn = [[line for line in lines if line.startswith(kind)] for lines in (own, one, two)]
        assert all(drawn) and drawn[0] != drawn[1] != drawn[2] != drawn[0]


def test_a_failure_says_its_seed(draws):
    done, _ = draws("--seed=3", odd="2")
    assert "replayed by --seed 3" in done.stdout and done.returncode == 1


def test_rounds_have_seeds_of_their_own_and_a_failure_is_logged_with_its_replay(tmp_path, monkeypatch, capsys):
    rounds = []

    def run(command, **options):
        rounds.append(command[command.index("-m", 7) + 1 :])
        failed = "FAILED tests/test_a.py::test_b[run 1] - assert 1 - 2\n1 failed" if len(rounds) == 2 else "3 passed"
        return subprocess.CompletedProcess(command, int(len(rounds) == 2), failed, "")

    monkeypatch.setattr(nightly.subprocess, "run", run)
    monkeypatch.setattr(nightly.time, "monotonic", lambda: 20.0 * len(rounds))
    log = tmp_path / "log"
    assert nightly.main(["--minutes", "1", "--seed", "7", "--log", str(log), "--", "-n", "2"]) == 1
    assert [command[-3:] for command in rounds] == [[f"--seed={seed}", "-n", "2"] for seed in (7, 8, 9, 10)]
    lines = log.read_text().splitlines()
    assert lines[:3] == [
        "seed 7: 3 passed", "seed 8: 1 failed",
        "    python -m pytest -m 'drawn or hypothesis' --seed=8 'tests/test_a.py::test_b[run 1]'",
    ]  # fmt: skip
    assert "seed 9: 3 passed" in lines and "seed 8: 1 failed" in capsys.readouterr().out


@pytest.mark.parametrize(("failed", "code"), [("", 0), ("FAILED tests/test_a.py::test_b - assert 1", 1)])
def test_a_round_is_cut_when_the_minutes_are_over(tmp_path, monkeypatch, failed, code):
    rounds, now = [], iter([0.0, 45.0, 61.0])

    def run(command, **options):
        rounds.append(command)
        return subprocess.CompletedProcess(command, 124, f"{failed}\n3 passed", "")

    monkeypatch.setattr(nightly.subprocess, "run", run)
    monkeypatch.setattr(nightly.time, "monotonic", lambda: next(now))
    assert nightly.main(["--minutes", "1", "--log", str(tmp_path / "log")]) == code
    assert [command[:4] for command in rounds] == [["timeout", "--signal=INT", "--kill-after=120", "15"]]


@pytest.mark.parametrize("code", [2, 3, 4, -9])
def test_a_round_that_could_not_run_its_tests_fails_and_only_a_killed_one_has_a_next(tmp_path, monkeypatch, code):
    rounds = []

    def run(command, **options):
        rounds.append(command)
        return subprocess.CompletedProcess(command, code, "no tests ran", "")

    monkeypatch.setattr(nightly.subprocess, "run", run)
    monkeypatch.setattr(nightly.time, "monotonic", lambda: 20.0 * len(rounds))
    assert nightly.main(["--minutes", "1", "--log", str(tmp_path / "log")]) == 1
    assert len(rounds) == (4 if code == -9 else 1)
