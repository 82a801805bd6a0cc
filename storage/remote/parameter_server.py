"""The contract of a parameter server, which keeps rows of tables outside of this process.

A row is one or more *parts*, float32: its weights, then each part of its optimizer state. A part of a row is one value
of the server. The server returns a value bit for bit.

Invariants, for every implementation:
- ids are int64, every int64 is legal, and the ids of one call are distinct; two ids never share a value;
- a call that returns has done all its work; a `push` that raises may have stored some of the values, each completely;
- a value is never returned for another key, nor a part of a value: a value that has another length than was asked for
  is a `ServerError` that names the value;
- no call waits for ever: a call that takes longer than the server's timeout raises `ServerTimeoutError`;
- one thread at a time calls a server.
"""

from collections.abc import Sequence
from typing import Protocol, runtime_checkable

import numpy as np

from oneemb.storage.errors import StorageError


class ServerError(StorageError):
    """A parameter server, or the connection to it, failed. The message names the server and the call, and says what to
    do."""


class ServerTimeoutError(ServerError):
    """A parameter server gave no answer in time. It may have done the call or not."""


class LostRowsError(ServerError):
    """A parameter server has lost the rows that were pushed last. No wrong rows were returned for them."""


def wrong_length(server: str, table: str, id: object, part: int, found: int, wanted: int) -> ServerError:
    """The error for a value of `found` bytes where `wanted` bytes were asked for."""
    return ServerError(
        f"{server}: part {part} of row {id} of table {table!r} must have {wanted} bytes, has {found}; ask for the width"
        " with which the row was pushed"
    )


class ParameterServer(Protocol):
    """A store of rows outside of this process, by table and id."""

    @property
    def name(self) -> str:
        """Name of the server in errors: its URL, without passwords."""

    def pull(self, table: str, id_N: np.ndarray, widths: Sequence[int]) -> tuple[list[np.ndarray], np.ndarray]:
        """Read rows of P parts.

        Args:
            table: any name.
            id_N: int64 [N], distinct.
            widths: width of each part, in float32 numbers.

        Returns:
            Values of each part, float32 [N, width], undefined for a part that the server does not have; and found_NP,
            bool [N, P], whether the server has each part.

        Raises:
            ServerError: the server cannot be reached, refuses, or has a value of another length.
        """

    def push(self, table: str, id_N: np.ndarray, parts: Sequence[np.ndarray]) -> None:
        """Store rows, in place of the old rows of these ids. Returns after the server has confirmed it.

        Args:
            id_N: int64 [N], distinct.
            parts: values of each part, float32 [N, width].

        Raises:
            ServerError: the server cannot be reached or refuses; some values may have been stored.
        """

    def close(self) -> None:
        """End connections and threads. A second call does nothing."""


@runtime_checkable
class Erases(Protocol):
    """A parameter server that can erase rows."""

    def erase(self, table: str, id_N: np.ndarray, parts: int) -> None:
        """Erase the rows of these ids, all their `parts` parts. Ids without a row are ignored."""
