"""One side of compare.py: a process that makes cases of this tree's benchmarks on the oneemb that its path has first.

    python benchmarks/_compare_side.py FOLDER [CASES]

FOLDER is where oneemb must come from. CASES is a file that defines COMPARED, in place of the benchmarks' own.
"""

import gc
import importlib
import importlib.util
import sys
import traceback
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from _case import Measured
from _machine import keep_freed_memory
from _turns import serve

import oneemb

__all__ = ["all_cases"]

_BENCHMARKS = (
    "bench_small_step", "bench_lookup_threads", "bench_embedding_step", "bench_dense_share", "bench_longest_steps",
)  # fmt: skip


def all_cases(file: str | None = None) -> Mapping[str, Callable[[], Measured]]:
    """The maker of each case, by its name."""
    if file is None:
        modules = [importlib.import_module(name) for name in _BENCHMARKS]
    else:
        spec = importlib.util.spec_from_file_location("compared_cases", file)
        assert spec is not None and spec.loader is not None
        modules = [importlib.util.module_from_spec(spec)]
        spec.loader.exec_module(modules[0])
    return {name: make for module in modules for name, make in module.COMPARED.items()}


class Cases:
    """Answers to requests: one case at a time is made, sampled, and closed.

    A request is {"make": case, "calls": of a turn, null where this side chooses}, {"sample": calls} or {"close": case}.
    """

    def __init__(self, makers: Mapping[str, Callable[[], Measured]]):
        self._makers = makers
        self._made: Measured | None = None

    def answer(self, request: dict[str, Any]) -> dict[str, Any]:
        if "make" in request:
            return self._make(request["make"], request["calls"])
        assert self._made is not None
        if "sample" in request:
            return {"sample": self._made.sample(request["sample"])}
        self._made.close()
        self._made = None
        gc.collect()
        return {}

    def _make(self, case: str, calls: int | None) -> dict[str, Any]:
        try:
            made = self._makers[case]()
            calls = calls or made.calls
            made.sample(calls)  # what a first sample has to compile, import or grow
        except Exception as error:  # of a revision that lacks what the case uses: reported, with the line
            where = traceback.extract_tb(error.__traceback__)[-1]
            # What the case had begun goes with the frames that hold it.
            error.__traceback__ = None
            gc.collect()
            first_line = (str(error).splitlines() or [""])[0]
            return {"missing": f"{type(error).__name__}: {first_line} ({Path(where.filename).name}:{where.lineno})"}
        self._made = made
        return {"unit": made.unit, "calls": calls}


def main() -> None:
    folder, *file = sys.argv[1:]
    keep_freed_memory()
    if not Path(oneemb.__file__).is_relative_to(folder):
        raise SystemExit(f"oneemb must come from {folder}, but {oneemb.__file__} comes first on the path")
    cases = all_cases(*file)
    if "torch" in sys.modules:
        sys.modules["torch"].set_num_threads(2)
    serve(Cases(cases).answer)


if __name__ == "__main__":
    main()
