"""Run the tests that draw, with new seeds, round after round, until some minutes are over.

    python -m tests.nightly [--minutes 60] [--seed S] [--log nightly.log] [-- arguments of pytest]

A round is one run of pytest over the tests that draw from `seed` or by Hypothesis, slow ones included, with a seed of
its own. The log has the seed and pytest's closing line of each round, and for each test that failed the command that
replays it. When the minutes are over the round that runs is cut. The script stops after a round in which pytest itself
failed. The exit code is 1 if any test or round has failed, else 0.
"""

import argparse
import random
import re
import shlex
import subprocess
import sys
import time
from pathlib import Path

import pytest

__all__ = ["main"]

ROOT = Path(__file__).parent.parent
DRAWN = "drawn or hypothesis"
FAILED = re.compile(r"^(?:FAILED|ERROR) (.+?)(?: - .*)?$", re.MULTILINE)
PASSED = (pytest.ExitCode.OK, pytest.ExitCode.NO_TESTS_COLLECTED)
CUT = 124
NOT_RUN = (pytest.ExitCode.INTERRUPTED, pytest.ExitCode.INTERNAL_ERROR, pytest.ExitCode.USAGE_ERROR)


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=60, help="a round that is not over then is cut")
    parser.add_argument("--seed", type=int, help="of the first round; the next has the number after it")
    parser.add_argument("--log", type=Path, default=ROOT / "nightly.log")
    parser.add_argument("pytest", nargs="*", help="arguments of pytest, after --")
    options = parser.parse_args(arguments)
    seed = random.SystemRandom().randrange(10**6) if options.seed is None else options.seed
    end, failed = time.monotonic() + 60 * options.minutes, False
    with open(options.log, "a") as log:
        while True:
            code = run_round(seed, options.pytest, log, max(1, round(end - time.monotonic())))
            failed |= code not in PASSED
            seed += 1
            if time.monotonic() > end or code in NOT_RUN:
                return int(failed)


def run_round(seed, arguments, log, seconds) -> int:
    """Run the tests with a seed for some seconds, write the result to the log, and return pytest's exit code."""
    command = ["pytest", "-q", "-m", DRAWN, f"--seed={seed}", *arguments]
    cut = ["timeout", "--signal=INT", "--kill-after=120", str(seconds)]  # pytest then says what has failed so far
    done = subprocess.run([*cut, sys.executable, "-m", *command], cwd=ROOT, capture_output=True, text=True)
    failed = FAILED.findall(done.stdout)
    if done.returncode == CUT and not failed:
        done.returncode = pytest.ExitCode.OK
    lines = [f"seed {seed}: {done.stdout.strip().rpartition(chr(10))[2]}"]
    lines += [f"    python -m pytest -m '{DRAWN}' --seed={seed} {shlex.quote(name)}" for name in failed]
    if done.returncode not in PASSED:
        lines.append(done.stdout[-20_000:] + done.stderr[-2_000:])
    print(*lines[: 1 + len(failed)], sep="\n", flush=True)
    print(*lines, sep="\n", file=log, flush=True)
    return done.returncode


if __name__ == "__main__":
    sys.exit(main())
