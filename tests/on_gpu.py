"""Run all that a GPU machine is for, each part within its limit of time: tests, benchmarks, compute-sanitizer.

    python -m tests.on_gpu [--out build/gpu]        or: make gpu-all RUN=python3

A part that fails or takes too long does not keep the others from running. The folder then has the output of each part,
the benchmarks' gpu.json and summary.json; the exit code is 1 if a part did not end well.
"""

import argparse
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

ROOT = Path(__file__).parents[1]
RESULTS = ROOT / "benchmarks" / "results" / "gpu.json"

PARTS = {"gpu-test": 210, "gpu-bench": 150, "gpu-sanitize-quick": 110}
"""{target of make: seconds that it may take}; together less than eight minutes."""


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=ROOT / "build" / "gpu", help="folder of the results")
    parser.add_argument("--parts", nargs="+", default=list(PARTS), choices=list(PARTS), help="default: all")
    options = parser.parse_args(arguments)
    options.out.mkdir(parents=True, exist_ok=True)
    summary = {}
    for part in options.parts:
        code, seconds = run(["make", part, f"RUN={sys.executable}"], options.out / f"{part}.log", PARTS[part])
        summary[part] = {"exit_code": code, "seconds": round(seconds, 1)}
        print(f"{part}: {'in time' if code is not None else 'too slow'}, exit code {code}, {seconds:.0f} s", flush=True)
        (options.out / "summary.json").write_text(json.dumps(summary, indent=1) + "\n")
        if part == "gpu-bench" and RESULTS.exists():
            shutil.copy(RESULTS, options.out)
    return int(any(one["exit_code"] != 0 for one in summary.values()))


def run(command: list[str], log: Path, limit_s: float) -> tuple[int | None, float]:
    """Run a command with its output in a file. Returns its exit code, None if it was stopped at the limit, and seconds.
    With it end all processes that it has started."""
    start = time.monotonic()
    with log.open("w") as output:
        process = subprocess.Popen(command, cwd=ROOT, stdout=output, stderr=output, start_new_session=True)
        try:
            code: int | None = process.wait(limit_s)
        except subprocess.TimeoutExpired:
            code = None
        finally:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGTERM)
                process.wait()
    return code, time.monotonic() - start


if __name__ == "__main__":
    sys.exit(main())
