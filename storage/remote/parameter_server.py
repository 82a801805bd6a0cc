"""The contract of a parameter server: what keeps rows of tables beyond this process.

A row is one or more *parts*: its weights, then each part of its optimizer state, float32. A part of a row is one value
of the server, which gives it back bit for bit.

Invariants, for every implementation:
- ids are int64, every one legal, and unique within one call; two ids never share a value;
- a call that returns has been carried out as a whole; a `push` that raises may have kept some values, each whole;
- a value is never taken for another one's, nor part of one for the whole: what has another length than was asked for is
  a `ServerError` that names it;
- no call waits for ever: what takes longer than the server's timeout is a `ServerTimeoutError`;
- one thread at a time calls a server.
"""

from collections.abc import Sequence
from typing import Protocol, runtime_checkable

import numpy as np

from oneemb.storage.errors import StorageError


class ServerError(StorageError):
    """A parameter server, or the way to it, failed. The message says which, what was asked of it, and what to do."""


class ServerTimeoutError(ServerError):
    """A parameter server gave no answer in time. What was asked of it may have been done."""


class LostRowsError(ServerError):
    """A parameter server no longer has the rows that were pushed to it last. No other row was taken for them."""


def wrong_length(server: str, table: str, id: object, part: int, found: int, wanted: int) -> ServerError:
    """The error for a value that has another number of bytes than was asked for."""
    return ServerError(
        f"{server}: part {part} of row {id} of table {table!r} is {found} bytes long, and not {wanted}; ask for the"
        " width it was kept with"
    )


class ParameterServer(Protocol):
    """Rows of tables by id."""

    @property
    def name(self) -> str:
        """Name of the server in errors: its URL, without passwords."""

    def pull(self, table: str, id_N: np.ndarray, widths: Sequence[int]) -> tuple[list[np.ndarray], np.ndarray]:
        """Read rows of P parts.

        Args:
            table: any name.
            id_N: int64 [N], distinct.
            widths: float32 numbers of each part.

        Returns:
            Of each part its values, float32 [N, width], undefined where there is none; and where there is one, bool [N,
            P].

        Raises:
            ServerError: the server cannot be reached, refuses, or has a value of another length.
        """

    def push(self, table: str, id_N: np.ndarray, parts: Sequence[np.ndarray]) -> None:
        """Keep rows, in place of those the ids had. Returns when the server has confirmed it.

        Args:
            id_N: int64 [N], distinct.
            parts: float32 [N, width] of each.

        Raises:
            ServerError: the server cannot be reached or refuses; some values may have been kept.
        """

    def close(self) -> None:
        """End connections and threads. Closing twice is fine."""


@runtime_checkable
class Erases(Protocol):
    """A parameter server that can forget rows."""

    def erase(self, table: str, id_N: np.ndarray, parts: int) -> None:
        """Forget the rows of these ids, of which each has that many parts; ids without a row are fine."""
