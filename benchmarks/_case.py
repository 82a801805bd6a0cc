"""A case of a benchmark that `compare.py` can run: made in a process, sampled once a turn."""

import dataclasses
import statistics
import sys
import threading
import time
from collections.abc import Callable
from types import FrameType
from typing import Any

__all__ = ["Measured", "Timed", "count_calls"]

# Seconds of calls a turn, and the fewest and most calls in them.
_TURN_S = 0.2
_CALLS_MIN, _CALLS_MAX = 3, 2000


class Measured:
    """A case that has been made.

    Args:
        sample: one number of a turn, less is better; called with how many calls to make.
        close: ends what was made.
        unit: of the number.
        calls: how many calls a turn makes; both revisions make as many.
    """

    def __init__(self, sample: Callable[[int], float], close: Callable[[], Any], unit: str = "ms", calls: int = 1):
        self.sample, self.close, self.unit, self.calls = sample, close, unit, calls


class Timed(Measured):
    """A call that is timed: milliseconds of the lower quartile of a turn's calls, the first of which are not counted
    since they fill the processor's caches.

    Other programs only ever lengthen a call, so the quartile differs less from turn to turn than the median. Long calls
    among short ones have cases of their own.

    Calls come from four depths of Python's stack in turn. Python allots frames in chunks of 16 KiB: where a step begins
    just below the end of one, calls in it allot and free the next, which doubles the time of a small step.

    Args:
        call: called with the number of the call, which says which batch to take.
    """

    def __init__(self, call: Callable[[int], Any], close: Callable[[], Any]):
        self._call, self._at = call, 0
        for _ in range(3):  # compiles loops, and grows what grows
            self._seconds()
        calls = round(_TURN_S / statistics.median(self._seconds() for _ in range(_CALLS_MIN)))
        super().__init__(self._quartile_ms, close, calls=min(max(calls, _CALLS_MIN), _CALLS_MAX))

    def _quartile_ms(self, calls: int) -> float:
        for _ in range(1 + calls // 20):
            self._seconds()
        return statistics.quantiles((self._seconds() for _ in range(calls)), n=4, method="inclusive")[0] * 1e3

    def _seconds(self) -> float:
        self._at += 1
        return self._seconds_below(10 * (self._at % 4))

    def _seconds_below(self, frames: int) -> float:
        if frames:
            return self._seconds_below(frames - 1)
        begin = time.perf_counter()
        result = self._call(self._at - 1)
        spent = time.perf_counter() - begin
        del result
        return spent


@dataclasses.dataclass(frozen=True)
class Calls:
    """How often Python has entered functions: its own, and those of C."""

    python: int
    c: int


def count_calls(call: Callable[[], Any]) -> Calls:
    """Calls of functions within one call: those of this thread, and of threads that begin meanwhile."""
    counts = {"call": 0, "c_call": 0}

    def watch(frame: FrameType, event: str, argument: object) -> None:
        if event in counts:
            counts[event] += 1

    before = sys.getprofile()
    threading.setprofile(watch)
    sys.setprofile(watch)
    try:
        call()
    finally:
        sys.setprofile(before)
        threading.setprofile(None)  # type: ignore[arg-type]
    # The call itself, and the one that ends the count.
    return Calls(counts["call"] - 1, counts["c_call"] - 1)
