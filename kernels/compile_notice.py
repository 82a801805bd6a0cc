"""Tells the user that loops are being compiled, once a process, and afterwards how long that took.

The messages are warnings of the logger "oneemb", so Python prints them to the standard error unless a program says
otherwise: `logging.getLogger("oneemb").setLevel(logging.ERROR)`.
"""

import logging
import time

_log = logging.getLogger("oneemb")


class CompileNotice:
    """Counts the loops that this process compiles, and their time. A loop that is compiled because another calls it is
    not counted separately. Callers hold the compiler's lock, except for `report`."""

    def __init__(self) -> None:
        self.loops = 0
        self.seconds = 0.0
        self.unreported = False
        """Whether a message with the time is still to come."""
        self.silent = False
        """Whether no message is to come."""
        self._depth = 0
        self._begun = 0.0

    def begin(self) -> None:
        """A loop is in no folder of compiled code, so it is compiled now."""
        if self._depth == 0:
            self._begun = time.perf_counter()
            if self.loops == 0 and not self.silent:
                self.unreported = True
                _log.warning(
                    "oneemb compiles its loops for this processor, so the first steps take longer; later processes"
                    " find them compiled. The command `oneemb warmup` compiles them ahead"
                )
        self._depth += 1

    def end(self) -> None:
        """The loop is compiled."""
        if self._depth == 1:
            self.loops += 1
            self.seconds += time.perf_counter() - self._begun
        self._depth = max(0, self._depth - 1)

    def give_up(self) -> None:
        """The loops that were begun have failed to compile, or none was begun."""
        self._depth = 0

    def report(self) -> None:
        """Write the message with the time, at the end of a step."""
        if self.unreported:
            self.unreported = False
            _log.warning("oneemb has compiled loops (%d) in %.1f s", self.loops, self.seconds)


compile_notice = CompileNotice()
"""The notice of this process."""
