"""Runs the tests that draw with new seeds, round after round, until some minutes are over.

    python -m tests.nightly [--minutes 60] [--seed S] [--log nightly.log] [-- arguments of pytest]

A round is one run of pytest over the tests that draw from `seed` or by Hypothesis, slow ones included, with a seed of
its own. The log has a line a round: the seed, pytest's closing line, and each test that failed with the command that
replays it. The exit code is 1 if a test has failed in any round, else 0.
"""

import argparse
import random
import re
import subprocess
import sys
import time
from pathlib import Path

__all__ = ["main"]

ROOT = Path(__file__).parent.parent
DRAWN = "drawn or hypothesis"
FAILED = re.compile(r"^(?:FAILED|ERROR) (\S+)", re.MULTILINE)


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=60, help="the last round begins before they are over")
    parser.add_argument("--seed", type=int, help="of the first round; the next has the number after it")
    parser.add_argument("--log", type=Path, default=ROOT / "nightly.log")
    parser.add_argument("pytest", nargs="*", help="arguments of pytest, after --")
    options = parser.parse_args(arguments)
    seed = random.SystemRandom().randrange(10**6) if options.seed is None else options.seed
    end, failures = time.monotonic() + 60 * options.minutes, 0
    with open(options.log, "a") as log:
        while True:
            failures += round_of(seed, options.pytest, log)
            seed += 1
            if time.monotonic() > end:
                return int(failures > 0)


def round_of(seed, arguments, log) -> int:
    command = ["pytest", "-q", "-m", DRAWN, f"--seed={seed}", *arguments]
    done = subprocess.run([sys.executable, "-m", *command], cwd=ROOT, capture_output=True, text=True)
    failed = FAILED.findall(done.stdout)
    lines = [f"seed {seed}: {done.stdout.strip().rpartition(chr(10))[2]}"]
    lines += [f"    python -m pytest -m '{DRAWN}' --seed={seed} '{name}'" for name in failed]
    if done.returncode not in (0, 5):
        lines.append(done.stdout[-20_000:] + done.stderr[-2_000:])
    print(*lines[: 1 + len(failed)], sep="\n", flush=True)
    print(*lines, sep="\n", file=log, flush=True)
    return done.returncode not in (0, 5)


if __name__ == "__main__":
    sys.exit(main())
