"""Processes of a job on a stream, which `stream_soak` kills and begins again: a trainer that saves deltas, servers that
follow the job, a publisher to a FAISS index, Redis and SQLite, and a reader of what Redis and the index show.

Each process writes what it has trained or shown, with digests of the rows, to a file of its own.
"""

import contextlib
import hashlib
import json
import os
import re
import sqlite3
import time

import numpy as np
import pyarrow
import pyarrow.parquet
import redis
import torch

import oneemb
from tests.support import stream_plants
from tests.support.published import PREFIX, read_index, read_redis_at_once

DIM, ROWS, STEPS = 4, 32, 50
ITEMS, EXPIRE, AWAY = 1000, 8, 12
"""Rows of the table of items; saves after which a user's row expires; saves after which some users return."""
KEPT = 20
"""Saves whose deltas stay: a publisher that is begun again within so many saves gets each version."""


# ---- the stream and the model ----------------------------------------------------------------------------------------


def write(stream, number):
    """Add a file of 50 batches. It has few ids of the 1100 that have a row, so that chains of deltas are long.

    Users of positive ids come, return some times and vanish; those of negative ids return once their row has expired.
    The first file has as many items as have room; later ones are new, or return after an eviction.
    """
    rng, count = np.random.default_rng([3, number]), ROWS * STEPS
    comes, returns = 4 * number + 5 * rng.integers(0, 16, count), -1 - number % AWAY * 10 - rng.integers(0, 4, count)
    user = np.where(rng.random(count) < 0.8, comes, returns)
    items = np.append(rng.integers(2 * number, ITEMS + 2 * number, 6), ITEMS + 2 * number + np.arange(2))
    item = rng.choice(items, count) if number else np.arange(count) % ITEMS
    columns = {"step": 1 + np.arange(count) // ROWS + number * STEPS, "user": user, "item": item}
    columns["label"] = (rng.random(count) < 0.3 + 0.4 * np.sin(user)).astype(np.float32)
    temporary = stream / f"{number:08}.tmp"
    pyarrow.parquet.write_table(pyarrow.table(columns), temporary)
    temporary.rename(stream / f"{number:08}.parquet")


def asked(step):
    """int64 [1350, 2]: ids around those of the stream at a step: with a row, with a row no more, and not yet."""
    number = step // STEPS - 1
    users = torch.cat([torch.arange(-150, 0), 4 * number + torch.arange(-600, 600)])
    return torch.stack([users, 2 * number + torch.arange(-100, 1250)], 1)


class Model(torch.nn.Module):
    def __init__(self, folder):
        super().__init__()
        policies = [
            oneemb.policies.RowPolicy(expire_after_steps=EXPIRE * STEPS, sweep_steps=STEPS),
            oneemb.policies.RowPolicy(evict=oneemb.policies.LFU(), capacity=ITEMS),
        ]
        self.rows = oneemb.MultiTableEmbedding(
            "items", DIM, torch.float32, torch.int64, [oneemb.make_table()] * 2,
            oneemb.make_cached_ssd_store_options(16, str(folder / "rows")), oneemb.make_uniform_initializer(-0.1, 0.1),
            policy=policies,
        )  # fmt: skip
        self.head = torch.nn.Linear(2 * DIM, 1)

    def forward(self, ids):
        return self.score(self.rows(ids))

    def score(self, rows):
        return self.head(rows.flatten(1)).squeeze(1)


class Graph(oneemb.TrainGraph):
    def __init__(self, folder, noted):
        super().__init__()
        self.model, self._noted = Model(folder), noted
        self.add_optimizer(torch.optim.Adagrad(self.parameters(), lr=0.05))

    def build(self, ids, label, step):
        loss = torch.nn.functional.binary_cross_entropy_with_logits(self.model(ids), label)
        loss.backward()
        return loss.detach(), step

    def save(self, path, **how):
        super().save(path, **how)
        self.note_save(path)

    def note_save(self, path):
        """Note the snapshot that a checkpoint names, and whether it is whole."""
        saved = torch.load(path, mmap=True)["embeddings"]["model.rows"]
        self._noted(saved["oneemb_snapshot"], "oneemb_since" not in saved, time.monotonic(), os.getpid())


def digest(*parts):
    found = hashlib.sha256()
    for part in parts:
        found.update(part if isinstance(part, bytes) else part.contiguous().numpy().tobytes())
    return found.hexdigest()


def digest_of_rows(rows):
    """Digest of {(table, id): bytes of weights}."""
    return digest(*(b"%d %d " % key + rows[key] for key in sorted(rows)))


def rows_of(embedding):
    return {
        (table, id): row.numpy().tobytes()
        for table in range(2)
        for ids in [embedding.ids(table=table)]
        for id, row in zip(ids.tolist(), embedding.read(ids, torch.tensor(table)), strict=True)
    }


def of_table(rows, table):
    return {key: row for key, row in rows.items() if key[0] == table}


class Log:
    """Lines of JSON in a file; a kill cuts none off."""

    def __init__(self, path):
        self._file = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT)

    def __call__(self, *fields):
        os.write(self._file, json.dumps(fields).encode() + b"\n")


# ---- processes -------------------------------------------------------------------------------------------------------


def train(folder, stream, is_oracle, plant=None):
    """Train on a stream for ever, and save; the oracle saves nothing, and notes rows and scores of each 50th step."""
    torch.set_num_threads(1)
    torch.manual_seed(0)
    columns = {"ids": oneemb.data.Ids("user", "item"), "label": "label", "step": "step"}
    loader = oneemb.data.Loader(oneemb.data.GrowingFolder(stream / "*.parquet"), ROWS, columns, end_after_s=None)
    log, path = Log(folder.parent / f"{folder.name}.log"), folder / "model.pt"
    graph = Graph(folder, Log(folder.parent / f"{folder.name} saves.log"))
    if path.exists():
        graph.load(path)
        graph.note_save(path)  # The process before may have been killed before it did.
        loader.load_state_dict(graph.loader_state)
    rows, save = graph.model.rows, None if is_oracle else oneemb.SaveEvery(graph, path, steps=STEPS, keep=KEPT)
    for loss, trained in graph.run(stream_plants.planted_batches(loader, plant), save=save):
        step = graph.steps
        if step % STEPS == STEPS // 2:
            rows.erase(4 * (step // STEPS) + torch.arange(5), 0)
        notes = []
        if is_oracle and step % STEPS == 0:
            read, all_rows = rows.read(asked(step)), rows_of(rows)
            with torch.no_grad():
                answer = digest(read, graph.model.score(read))
            notes = [digest_of_rows(all_rows), answer, digest_of_rows(of_table(all_rows, 0))]
        log(step, loss.item().hex(), time.monotonic(), trained.unique().tolist(), *notes)


def step_of(name):
    """Step of a snapshot, by the name that `graph.save` gives it."""
    return int(re.search(r"\d+", name)[0])


def serve(folder, path, plant=None):
    """Follow the checkpoint, and note what each version answers."""
    torch.set_num_threads(1)
    model, log = oneemb.serve_model(folder / "model.pt", lambda: Model(folder), missing_ok=True), Log(path)
    model.follow(0.1)
    last, life = None, os.getpid()
    answers = stream_plants.planted_answers(plant)
    while True:
        time.sleep(0.01)
        try:
            version = answers(model.current)
        except oneemb.StorageError:
            continue  # before the first checkpoint
        step = step_of(version.snapshots["rows"].name)
        with torch.no_grad():
            rows = version.module.rows(asked(step))
        if step != last:
            log(step, version.snapshots["rows"].name, time.monotonic(), life, digest(rows, version(asked(step))))
            last = step


class Sqlite:
    """A sink that a dozen lines make: rows, version and a note of each version in one transaction."""

    name, wants_whole = "sqlite", False

    def __init__(self, path):
        self._db = sqlite3.connect(path, check_same_thread=False, isolation_level=None)
        self._db.execute("PRAGMA synchronous=OFF")
        self._db.execute("CREATE TABLE IF NOT EXISTS rows(t, id, row, PRIMARY KEY (t, id))")
        self._db.execute("CREATE TABLE IF NOT EXISTS versions(version, whole, digest, time)")

    def version(self):
        found = self._db.execute("SELECT version FROM versions ORDER BY rowid DESC LIMIT 1").fetchone()
        return None if found is None else oneemb.sinks.TableVersion(*json.loads(found[0]))

    def apply(self, changes):
        db = self._db
        db.execute("BEGIN")
        try:
            if changes.is_whole:
                db.execute("DELETE FROM rows")
            gone = zip(*(one.tolist() for one in changes.gone()), strict=True)
            db.executemany("DELETE FROM rows WHERE t = ? AND id = ?", gone)
            for batch in changes.batches():
                its = batch.table_N.tolist(), batch.id_N.tolist(), [row.tobytes() for row in batch.weight_ND]
                db.executemany("INSERT OR REPLACE INTO rows VALUES (?, ?, ?)", zip(*its, strict=True))
            rows = {(table, id): row for table, id, row in db.execute("SELECT * FROM rows")}
            note = json.dumps(changes.version), changes.is_whole, digest_of_rows(rows), time.monotonic()
            db.execute("INSERT INTO versions VALUES (?, ?, ?, ?)", note)
            db.execute("COMMIT")
        except BaseException:
            db.execute("ROLLBACK")
            raise

    def close(self):
        self._db.close()


def index_of(folder):
    return oneemb.sinks.Faiss(folder / "index", "Flat", inner_product=False)


def publish(folder, port, plant=None):
    torch.set_num_threads(1)
    sinks = [
        index_of(folder), Sqlite(folder / "rows.db"), oneemb.sinks.Redis(f"redis://127.0.0.1:{port}?prefix={PREFIX}")
    ]  # fmt: skip
    with oneemb.publish(folder / "rows", stream_plants.planted_sinks(sinks, plant, port), seconds=0.1):
        time.sleep(1e6)


def read(folder, port, path):
    """Note each version that Redis and the index show, as another process finds them."""
    client, log, index, life = redis.Redis(port=port), Log(path), index_of(folder), os.getpid()
    last = {}
    while True:
        time.sleep(0.05)
        found = []
        with contextlib.suppress(redis.RedisError):
            if client.exists(f"{PREFIX}_version"):
                found.append(("redis", *read_redis_at_once(client)))
        if index.refresh():
            found.append(("index", *read_index(index, 0)))
        for name, version, rows in found:
            if version != last.get(name):
                log(name, step_of(version), version, time.monotonic(), life, digest_of_rows(rows))
                last[name] = version
