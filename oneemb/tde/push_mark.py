"""How often a table was pushed to, kept on the server beside it: one that has lost rows is noticed by that number.

Invariant: the number on the server is the one here, or one more while a push that raised may have been carried out. A
server that restarts empty, or from an older copy, has none or a lower one.
"""

import numpy as np

from oneemb.storage.remote.parameter_server import LostRowsError, ParameterServer

# Values are float32, which has whole numbers below 2^24.
_DIGIT = 1 << 16
_DIGITS = 4


class PushMark:
    """The number of pushes of one rank to one table.

    Args:
        server: that has the table.
        table: its name there.
        rank: whose pushes are counted.
    """

    def __init__(self, server: ParameterServer, table: str, rank: int):
        self._server, self._table, self._of = server, table, f"{table}#pushes"
        self._id = np.array([rank], np.int64)
        self._count: int | None = None  # None = the server was not asked yet
        self._pushed = False

    def advance(self) -> None:
        """Note a push that the server has carried out."""
        if self._count is None:
            self._count = self._read()
        digits = [float((self._count + 1) // _DIGIT**d % _DIGIT) for d in range(_DIGITS)]
        self._server.push(self._of, self._id, [np.array([digits], np.float32)])
        self._count += 1
        self._pushed = True

    def check(self) -> None:
        """Raise LostRowsError if the server has not what this process has pushed, or found when it first asked."""
        found = self._read()
        if self._count is None or (found > self._count and not self._pushed):
            self._count = found  # A job that only reads may be beside one that pushes.
        elif found not in (self._count, self._count + 1):
            raise LostRowsError(
                f"{self._server.name}: table {self._table!r} was pushed to {self._count} times, but the server says"
                f" {found}: it has restarted empty or from an older copy, or another job pushes to the same table. Rows"
                " would begin anew that were trained: restore the server, or begin the job anew"
            )

    def _read(self) -> int:
        """0 = the server has no number."""
        (digits,), found = self._server.pull(self._of, self._id, [_DIGITS])
        return sum(int(digits[0, d]) * _DIGIT**d for d in range(_DIGITS)) if found.all() else 0
