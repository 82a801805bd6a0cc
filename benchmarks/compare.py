"""Whether this tree is slower than another revision: exit code 1 if a case takes more than 1.05 of its time.

    make bench-compare BASE=main                                   the usual cases
    python benchmarks/compare.py main --cases 'small/*' 'eval/*'   some of them, by pattern
    python benchmarks/compare.py main --list                       what cases there are
    python benchmarks/compare.py v1 --new v2                       two revisions, neither of which is this tree

Both revisions run the benchmarks of this tree, each in a process of its own with a folder of compiled loops of its own.
The processes are alive side by side and take turns: while one makes the calls of a round, the other waits in a read of
a pipe, and no thread of it runs. A round's ratio, new over base, is of two samples that lie side by side in time.

Printed are medians of the samples, the median of the ratios and its 95 % interval. Rounds go on until the interval is
narrow (--width), --rounds-max at most. A case whose whole interval lies above 1.05 is measured again, in new processes
each time; if two of at most three of these ratios lie above 1.05 too, it is slower. A case that the base cannot run is
new: it is passed over, with the reason. All samples, the machine and both revisions go to --out.

Exit codes: 0 no case is slower; 1 one is, or this tree cannot run a case; 2 nothing was found.
"""

import argparse
import dataclasses
import datetime
import fnmatch
import json
import os
import signal
import sys
import tempfile
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

from _checkout import checked_out, copied, describe, link_packages
from _compare_side import all_cases
from _machine import machine, table
from _paired import SLOWER, Comparison, compare, enough, order, slower
from _turns import Side, SideError

ROOT = Path(__file__).resolve().parent.parent
USUAL = ("headline/*", "small/*", "eval/*", "dlrm/*", "batch/16/*", "batch/256/*")
"""Patterns of the cases that run unless others are asked for: a quarter of an hour where nothing disturbs."""


def main(arguments: list[str] | None = None) -> int:
    options = _options(arguments)
    cases = _chosen(options)
    if options.list:
        print("\n".join(cases))
        return 0
    if not cases:
        print(f"no case is named like {' or '.join(options.cases)}; --list shows them all", file=sys.stderr)
        return 2
    # A job that is told to end leaves no checkout behind, as Ctrl-C leaves none.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="oneemb-compare-")))
        try:
            revisions = [
                stack.enter_context(_revision(options.root, revision, folder / name))
                for name, revision in (("base", options.base), ("new", options.new))
            ]
        except ValueError as error:
            print(error, file=sys.stderr)
            return 2
        about = {"date": datetime.date.today().isoformat(), **machine()}
        about |= {"base": revisions[0].name, "new": revisions[1].name}
        print(json.dumps(about), flush=True)
        results = _run(cases, revisions, about, options)
    return _report(results)


def _options(arguments: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("base", help="revision to compare with")
    parser.add_argument("--new", help="revision that is compared; default: this tree as it is")
    parser.add_argument("--cases", nargs="+", default=USUAL, help="patterns of their names")
    parser.add_argument("--list", action="store_true", help="name all cases, and run none")
    parser.add_argument("--rounds-min", type=int, default=12)
    parser.add_argument("--rounds-max", type=int, default=80)
    parser.add_argument("--width", type=float, default=0.04, help="of an interval that needs no more rounds")
    parser.add_argument("--out", default=str(ROOT / "benchmarks" / "results" / "compare.json"), help="'' = none")
    parser.add_argument("--case-file", help="file that defines COMPARED, in place of the benchmarks' own cases")
    parser.add_argument("--root", type=Path, default=ROOT, help="the tree whose packages are compared")
    return parser.parse_args(arguments)


def _chosen(options: argparse.Namespace) -> list[str]:
    names = all_cases(options.case_file)
    patterns = ["*"] if options.list else options.cases
    return [name for name in names if any(fnmatch.fnmatch(name, pattern) for pattern in patterns)]


@dataclasses.dataclass(frozen=True)
class Revision:
    """A revision that is ready to be run.

    Args:
        name: its commit.
        packages: folder from which Python imports its packages.
        cache: folder of its compiled loops, kept for the next comparison.
    """

    name: str
    packages: Path
    cache: Path

    def side(self, options: argparse.Namespace) -> Side:
        environment = os.environ | {
            "PYTHONPATH": os.pathsep.join([str(self.packages), os.environ.get("PYTHONPATH", "")]),
            "XDG_CACHE_HOME": str(self.cache),
            "PYTHONHASHSEED": "0",  # dicts of both lie alike
        }
        command = [sys.executable, str(ROOT / "benchmarks" / "_compare_side.py"), str(self.packages)]
        return Side(self.name, command + ([options.case_file] if options.case_file else []), environment)


@contextmanager
def _revision(root: Path, revision: str | None, folder: Path) -> Iterator[Revision]:
    folder.mkdir()
    tree = copied(root, folder) if revision is None else checked_out(root, revision, folder)
    with tree as path:
        yield Revision(
            describe(root if revision is None else path),
            link_packages(path, folder / "packages"),
            ROOT / "build" / "compare" / folder.name,
        )


def _run(
    cases: list[str], revisions: list[Revision], about: dict[str, Any], options: argparse.Namespace
) -> list[dict[str, Any]]:
    results: list[dict[str, Any]] = []
    with ExitStack() as stack:
        sides: list[Side] = []
        for case in cases:
            if not sides:
                sides = [stack.enter_context(revision.side(options)) for revision in revisions]
            result = _measure(case, sides, options)

            def again(case: str = case, result: dict[str, Any] = result) -> Comparison:
                print(f"{case}: ratio {result['comparison'].ratio:.3f}; again, in new processes", flush=True)
                with ExitStack() as others:
                    fresh = [others.enter_context(revision.side(options)) for revision in revisions]
                    result.setdefault("again", []).append(_measure(case, fresh, options))
                return result["again"][-1]["comparison"]

            if "comparison" in result:
                result["slower"] = slower(result["comparison"], again)
            results.append(result)
            print(_line(result), flush=True)
            if options.out:  # after each case: a comparison may be stopped
                _save(options.out, about, results)
    return results


def _measure(case: str, sides: list[Side], options: argparse.Namespace) -> dict[str, Any]:
    """Samples of one case on both sides, and their comparison; or why a side cannot run it."""
    base, new = sides
    result: dict[str, Any] = {"case": case}
    made = new.ask(make=case, calls=None)
    if "missing" in made:
        return result | {"new_cannot": made["missing"]}
    answered = base.ask(make=case, calls=made["calls"])
    if "missing" in answered:
        new.ask(close=case)
        return result | {"base_cannot": answered["missing"]}
    samples: tuple[list[float], list[float]] = [], []
    unrested, comparison = 0, None
    while comparison is None or not enough(comparison, options.rounds_min, options.rounds_max, options.width):
        for which in order(len(samples[0])):
            answer = sides[which].ask(sample=made["calls"])
            samples[which].append(answer["sample"])
            unrested += not answer["rested"]
        comparison = compare(*samples)
    for side in sides:
        side.ask(close=case)
    return result | {
        "unit": made["unit"], "calls": made["calls"], "comparison": comparison, "turns_without_rest": unrested,
        "samples": samples,
    }  # fmt: skip


def _line(result: dict[str, Any]) -> str:
    if "new_cannot" in result:
        return f"{result['case']}: this revision cannot run it: {result['new_cannot']}"
    if "base_cannot" in result:
        return f"{result['case']}: new, since the base cannot run it: {result['base_cannot']}"
    found = result["comparison"]
    return (
        f"{result['case']}: {found.base:.4g} -> {found.new:.4g} {result['unit']}, ratio {found.ratio:.3f}"
        f" ({found.low:.3f} to {found.high:.3f}, {found.rounds} rounds)"
    )


def _report(results: list[dict[str, Any]]) -> int:
    rows = []
    for result in results:
        for one in [result, *result.get("again", [])] if "comparison" in result else []:
            found = one["comparison"]
            verdict = "SLOWER" if result["slower"] else "faster" if found.high < 1 else ""
            rows.append(
                [
                    result["case"], f"{found.base:.4g}", f"{found.new:.4g}", result["unit"], f"{found.ratio:.3f}",
                    f"{found.low:.3f} to {found.high:.3f}", str(found.rounds), verdict,
                ]
            )  # fmt: skip
    print(table(["case", "base", "new", "unit", "ratio", "95 % interval", "rounds", ""], rows))
    passed_over = [result for result in results if "base_cannot" in result]
    failed = [result for result in results if "new_cannot" in result or result.get("slower")]
    print("\n".join(_line(result) for result in results if "comparison" not in result))
    if len(passed_over) == len(results):
        print("nothing was compared: the base can run none of these cases")
        return 2
    print(f"slower than {SLOWER} of the base, or not run: {', '.join(result['case'] for result in failed) or 'none'}")
    return 1 if failed else 0


def _save(path: str, about: dict[str, Any], results: list[dict[str, Any]]) -> None:
    def plain(value: Any) -> Any:
        if dataclasses.is_dataclass(value) and not isinstance(value, type):
            value = dataclasses.asdict(value)
        if isinstance(value, dict):
            return {key: plain(one) for key, one in value.items()}
        if isinstance(value, list | tuple):
            return [plain(one) for one in value]
        return float(f"{value:.4g}") if isinstance(value, float) else value

    lines = ",\n".join(json.dumps(plain(result)) for result in results)
    Path(path).parent.mkdir(parents=True, exist_ok=True)
    Path(path).write_text(f'{{"about": {json.dumps(about)},\n"cases": [\n{lines}\n]}}\n')


if __name__ == "__main__":
    try:
        sys.exit(main())
    except SideError as error:
        print(error, file=sys.stderr)
        sys.exit(2)
    except KeyboardInterrupt:
        sys.exit(130)
