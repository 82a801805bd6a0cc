"""Rows in the memory of this process, by name: `memory://name`. For tests and trials."""

from collections.abc import Sequence

import numpy as np

from oneemb.storage.remote.parameter_server import ServerError


class MemoryServer:
    """A dictionary as a parameter server.

    Args:
        values: what it keeps, by table, id and part; servers that are given the same one share their rows.
    """

    def __init__(self, values: dict[tuple[str, int, int], bytes], name: str = "memory://"):
        self.name = name
        self._values = values

    def pull(self, table: str, id_N: np.ndarray, widths: Sequence[int]) -> tuple[list[np.ndarray], np.ndarray]:
        """See `ParameterServer`."""
        parts = [np.empty((len(id_N), width), np.float32) for width in widths]
        found_NP = np.zeros((len(id_N), len(widths)), np.bool_)
        for n, id in enumerate(id_N.tolist()):
            for p, part in enumerate(parts):
                value = self._values.get((table, id, p))
                if value is None:
                    continue
                if len(value) != part[n].nbytes:
                    raise ServerError(
                        f"{self.name}: part {p} of row {id} of table {table!r} is {len(value)} bytes long, and not"
                        f" {part[n].nbytes}; ask for the width it was kept with"
                    )
                part[n] = np.frombuffer(value, np.float32)
                found_NP[n, p] = True
        return parts, found_NP

    def push(self, table: str, id_N: np.ndarray, parts: Sequence[np.ndarray]) -> None:
        """See `ParameterServer`."""
        for n, id in enumerate(id_N.tolist()):
            for p, part in enumerate(parts):
                self._values[table, id, p] = part[n].tobytes()

    def erase(self, table: str, id_N: np.ndarray, parts: int) -> None:
        """See `Erases`."""
        for id in id_N.tolist():
            for p in range(parts):
                self._values.pop((table, id, p), None)

    def close(self) -> None:
        """See `ParameterServer`."""
