"""A parameter server in a file, which processes share: what tests on ranks use where no real one is at hand."""

import sqlite3

import numpy as np

__all__ = ["SharedServer"]


class SharedServer:
    """See `ParameterServer`; the path is that of a file that need not be there."""

    def __init__(self, path):
        self.name = f"shared://{path}"
        # Pulls are made by another thread than pushes, one at a time.
        self._base = sqlite3.connect(path, timeout=60, isolation_level=None, check_same_thread=False)
        self._base.execute(
            "create table if not exists part (name text, id integer, part integer, value blob, unique (name, id, part))"
        )

    def pull(self, table, id_N, widths):
        parts = [np.zeros((len(id_N), width), np.float32) for width in widths]
        found_NP = np.zeros((len(id_N), len(widths)), np.bool_)
        for n, id in enumerate(id_N.tolist()):
            rows = self._base.execute("select part, value from part where name = ? and id = ?", (table, id))
            for p, value in rows.fetchall():
                parts[p][n] = np.frombuffer(value, np.float32)
                found_NP[n, p] = True
        return parts, found_NP

    def push(self, table, id_N, parts):
        values = [(table, id, p, its[n].tobytes()) for n, id in enumerate(id_N.tolist()) for p, its in enumerate(parts)]
        self._base.execute("begin immediate")
        self._base.executemany("insert or replace into part values (?, ?, ?, ?)", values)
        self._base.execute("commit")

    def close(self):
        pass
