"""Keys as stores and tiers take them."""

import dataclasses

import numpy as np

from oneemb.kernels.host_backend import HostBackend
from oneemb.kernels.threads import Threads

HOST = HostBackend(Threads(1))


def distinct(table_U, id_U):
    """Distinct keys of the host, as lookups give them."""
    return HOST.distinct_keys(np.asarray(table_U, np.int32), np.asarray(id_U, np.int64))


def read_rows(store, table_U, id_U):
    """The rows of these keys in a store on the host: float32 [U, W]."""
    return store.read(distinct(table_U, id_U))[0]


def limit_rows(store, rows):
    """Let a store's hot tier know no more rows than these."""
    hot = store.hot
    hot._limits = dataclasses.replace(hot._limits, row_limit=rows)
