"""A job whose versions have known rows, and readers of sinks that know nothing of the code that writes them.

The oracle of a version is a dict {(table, id): bytes of the float32 weights}, taken from the embedding as it is saved.
"""

import functools
import json
import zlib

import numpy as np
import redis
import torch

import oneemb
from oneemb.kernels.threads import Threads
from oneemb.storage.serving.served_file import ServedFile
from oneemb.storage.table.snapshot_reader import read_snapshot_info

DIM, PREFIX = 4, "sink"
KINDS = ["function", "redis", "redis in pieces", "parquet", "safetensors", "served", "table", "faiss", "usearch"]

INDEXES = {
    "faiss": lambda folder, **options: oneemb.sinks.Faiss(folder, "Flat", **options),
    "usearch": lambda folder, **options: oneemb.sinks.Usearch(folder, expansion_search=512, **options),
}
"""{kind: function that makes a sink whose searches find all rows of a small job}."""


class Job:
    """An embedding of two tables whose ids come and vanish. `rows`: {name of a version: its rows}."""

    def __init__(self, folder, group=None, name="items", save_rows=True):
        self.folder, self.rows, self._drawn = str(folder), {}, np.random.default_rng(1)
        self._saves_rows = save_rows
        self.embedding = oneemb.MultiTableEmbedding(
            name, DIM, torch.float32, torch.int64, [oneemb.make_table()] * 2,
            oneemb.make_device_mem_store_options(self.folder, physical_block_size=512),
            oneemb.make_uniform_initializer(-1.0, 1.0), process_group=group,
        )  # fmt: skip
        self._optimizer = torch.optim.Adagrad(self.embedding.parameters(), lr=0.1)

    def train(self, count=12, ids=60):
        """Train some rows of both tables, and erase some."""
        its = torch.as_tensor(self._drawn.integers(-ids // 2, ids // 2, (count, 2)))
        self._optimizer.zero_grad()
        (self.embedding(its) * torch.arange(its.numel() * DIM).view(-1, 2, DIM).sin()).sum().backward()
        self._optimizer.step()
        self.embedding.erase(torch.as_tensor(self._drawn.integers(-ids // 2, ids // 2, 3)), 1)

    def save(self, name, *, whole=False, **training):
        """Train, and save a delta, or a whole snapshot."""
        self.train(**training)
        since = self.embedding.last_snapshot
        if whole or since is None:
            self.embedding.save_snapshot(name)
        else:
            self.embedding.save_delta(name, since)
        if self._saves_rows:
            self.rows[name] = rows_of(self.embedding)

    def close(self):
        self.embedding.close()


def rows_of(embedding):
    return {
        (table, id): row.float().numpy().tobytes()
        for table in range(embedding.num_tables)
        for ids in [embedding.ids(table=table)]
        for id, row in zip(ids.tolist(), embedding.read(ids, torch.tensor(table)), strict=True)
    }


# ---- sinks --------------------------------------------------------------------------------------------------------


def publishing(job, *sinks, **options):
    return oneemb.publish(job.folder, sinks, **{"seconds": 1000.0} | options)


class Place:
    """A sink's place: `make` opens a sink on it, `read` gives (version, rows) as a user reads them."""

    def __init__(self, kind, folder, redis_server):
        self.kind = kind
        if kind == "function":
            items = {"version": None, "rows": {}}
            self.make = functools.partial(oneemb.sinks.Function, functools.partial(take, items), folder / "position")
            self.read = functools.partial(read_function, items)
        elif kind.startswith("redis"):
            client = redis.Redis(port=redis_server.port)
            client.flushall()
            url = f"redis://127.0.0.1:{redis_server.port}?prefix={PREFIX}"
            self.make = functools.partial(oneemb.sinks.Redis, url, atomic_bytes=0 if "pieces" in kind else 1 << 20)
            self.read = functools.partial(read_redis, client)
        elif kind in ("parquet", "safetensors"):
            self.make = functools.partial(oneemb.sinks.Files, folder / kind, kind, merge_share=100.0)
            self.read = functools.partial(read_files, folder / kind, kind)
        elif kind == "served":
            self.make = functools.partial(oneemb.sinks.ServedFile, folder / "served" / "file")
            self.read = functools.partial(read_served, folder / "served" / "file")
        elif kind == "table":
            self.make = functools.partial(oneemb.sinks.Table, folder / "table")
            self.read = functools.partial(read_table, folder / "table")
        else:
            make = functools.partial(INDEXES[kind], folder / kind, table=1, inner_product=False)
            self.make = make
            self.read = lambda: read_index(make(), 1)

    def check(self, job, name):
        """Whether the sink shows the rows of a version of a job."""
        rows = job.rows[name]
        if self.kind in INDEXES:
            rows = {key: row for key, row in rows.items() if key[0] == 1}
        shown = self.read()
        assert shown[0] == name
        assert shown[1] == rows


def take(items, changes):
    """A function for `oneemb.publish` that holds the rows in a dict."""
    rows = {} if changes.is_whole else dict(items["rows"])
    table_N, id_N = changes.gone()
    for key in zip(table_N.tolist(), id_N.tolist(), strict=True):
        rows.pop(key, None)
    for batch in changes.batches(7):
        for table, id, row in zip(batch.table_N.tolist(), batch.id_N.tolist(), batch.weight_ND, strict=True):
            rows[table, id] = row.tobytes()
    items.update(version=changes.version.name, rows=rows)


# ---- sinks as their users read them ----------------------------------------------------------------------------------


def read_function(items):
    return items["version"], items["rows"]


def read_redis(client):
    """(name of the version, or None; rows). Reads keys as a program without oneemb would."""
    found = client.get(f"{PREFIX}_version")
    version = None if found is None else json.loads(found)["version"]
    rows = {}
    for key in client.scan_iter(f"{PREFIX}_table_*_osid_0", count=1000):
        name, _, rest = key.decode().removeprefix(f"{PREFIX}_table_items.").partition("_gid_")
        rows[int(name), int(rest.partition("_cid_")[0])] = client.get(key)
    return version and version["name"], rows


def read_redis_at_once(client):
    """The same by one transaction, beside a publisher."""
    script = """
    local out = {redis.call('GET', KEYS[1])}
    for _, key in ipairs(redis.call('KEYS', ARGV[1])) do
        table.insert(out, key)
        table.insert(out, redis.call('GET', key))
    end
    return out"""
    version, *pairs = client.eval(script, 1, f"{PREFIX}_version", f"{PREFIX}_table_*_osid_0")
    rows = {}
    for key, value in zip(pairs[::2], pairs[1::2], strict=True):
        name, _, rest = key.decode().removeprefix(f"{PREFIX}_table_items.").partition("_gid_")
        rows[int(name), int(rest.partition("_cid_")[0])] = value
    return json.loads(version)["version"]["name"], rows


def read_files(folder, format):
    """Rows of a folder of files, by its manifest and the library of the format."""
    try:
        manifest = json.loads((folder / "MANIFEST.json").read_text())
    except FileNotFoundError:
        return None, {}
    expected = manifest.pop("crc32")
    check_sum("MANIFEST.json", json.dumps(manifest).encode(), expected)
    rows = {}
    for number, one in enumerate(manifest["versions"]):
        assert one["whole"] == (number == 0)
        for kind in ("gone", "rows") if one["gone"] else ("rows",):
            check_sum(one[kind], (folder / one[kind]).read_bytes(), one[f"{kind}_sum"])
        if one["gone"]:
            columns = _columns(folder / one["gone"], format)
            for key in zip(columns["tables"].tolist(), columns["keys"].tolist(), strict=True):
                rows.pop(key, None)
        columns = _columns(folder / one["rows"], format)
        assert len(columns["keys"]) == one["num_rows"]
        for table, id, row in zip(columns["tables"].tolist(), columns["keys"].tolist(), columns["values"], strict=True):
            rows[table, id] = np.asarray(row, np.float32).tobytes()
    return manifest["versions"][-1]["version"]["name"], rows


def check_sum(name, data, expected):
    if zlib.crc32(data) != expected:
        raise ValueError(f"{name} is damaged")


def _columns(path, format):
    if format == "parquet":
        import pyarrow.parquet

        table = pyarrow.parquet.read_table(path)
        columns = {name: table[name].to_numpy() for name in ("keys", "tables")}
        if "values" in table.column_names:
            columns["values"] = table["values"].to_pylist()
        return columns
    import safetensors.numpy

    return safetensors.numpy.load_file(path)


def read_served(path):
    if not path.exists():
        return None, {}
    file = ServedFile(path, threads=Threads(1))
    file.verify()
    table_N, id_N, _ = file.keys()
    with oneemb.InferenceEmbedding.open(path) as served:
        values = served(torch.as_tensor(id_N), torch.as_tensor(table_N)).numpy()
        rows = {
            (table, id): row.tobytes() for table, id, row in zip(table_N.tolist(), id_N.tolist(), values, strict=True)
        }
        return served.version.name, rows


def read_table(folder):
    try:
        newest = read_snapshot_info(folder)[-1].name
    except (oneemb.StorageError, IndexError):
        return None, {}
    with oneemb.make_persistent_table_reader(folder, newest, "int64", "float32", with_tables=True) as reader:
        rows = {}
        for table_N, id_N, value_NV in reader:
            for table, id, value in zip(table_N.tolist(), id_N.tolist(), value_NV, strict=True):
                assert (table, id) not in rows
                rows[table, id] = value[:DIM].tobytes()
    return newest, rows


def read_index(sink, table):
    """Rows of one table that an exact index finds, each by its own vector."""
    view = sink.view
    everything = np.zeros((1, DIM), np.float32)
    score, ids, version = sink.search(everything, max(1, len(view.live_P)))
    found = ids[0][np.isfinite(score[0]) & (score[0] < 3e38)].tolist()
    assert len(found) == len(set(found))
    places = {int(view.id_P[place]): place for place in np.flatnonzero(view.live_P)}
    get = view.index.get if hasattr(view.index, "get") else view.index.reconstruct
    return version.name, {(table, id): get(int(places[id])).tobytes() for id in found}
