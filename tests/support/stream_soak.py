"""A soak of a whole stream, as processes that are killed at random times and begun again: a trainer that saves deltas,
two servers that follow it, a publisher to a FAISS index, Redis and SQLite, and the Redis server itself.

    python -m tests.support.stream_soak --minutes 60 --seed 7

The oracle is a second trainer, on the same stream, that nobody kills: losses of all steps, rows and scores of all saved
steps must be the same, bit for bit. Ids of the stream come and vanish: their rows expire, are erased, or are evicted
since a table is full.
"""

import argparse
import hashlib
import json
import multiprocessing
import os
import re
import sqlite3
import tempfile
import time
from pathlib import Path

import numpy as np
import pyarrow
import pyarrow.parquet
import redis
import torch

import oneemb
from tests.support.published import read_index
from tests.support.redis_process import RedisProcess

DIM, ROWS, STEPS, PREFIX = 4, 32, 50, "sink"
KEPT = 20
"""Saves whose deltas stay: a publisher that is begun again within so many saves gets each version."""
AHEAD = 3
"""Files that are written before the trainer has saved the steps of the first of them."""
PATIENCE_S = 300
PRELOADED = [
    "faiss", "pyarrow.parquet", "redis", "oneemb.data.loader", "oneemb.embeddings.embedding", "oneemb.policies",
    "oneemb.serving.model", "oneemb.sinks", "oneemb.training.save_every", "tests.support.published",
]  # fmt: skip
"""Modules that a process has from its begin, so that it begins fast."""
RAM_KB_MAX, DISK_KB_MAX = 64 * 1024, 32 * 1024
"""Bounds of what a process's own memory grows by in one life, and of all folders of the job."""


# ---- the stream and the model ----------------------------------------------------------------------------------------


def write(stream, number):
    """Add a file of 50 batches. Each file has some ids that no file before it had, and lacks some old ones."""
    rng, count = np.random.default_rng([3, number]), ROWS * STEPS
    user, item = 20 * number + rng.integers(0, 400, count), 10 * number + rng.zipf(1.3, count) % 300
    columns = {"user": user, "item": item, "label": (rng.random(count) < 0.3 + 0.4 * np.sin(user)).astype(np.float32)}
    temporary = stream / f"{number:08}.tmp"
    pyarrow.parquet.write_table(pyarrow.table(columns), temporary)
    temporary.rename(stream / f"{number:08}.parquet")


def asked(step):
    """int64 [N, 2]: ids around those of the stream at a step: with a row, with a row no more, and not yet."""
    number = step // STEPS - 1
    shift = torch.arange(-600, 600)
    return torch.stack([20 * number + shift, 10 * number + shift], 1)


class Model(torch.nn.Module):
    def __init__(self, folder):
        super().__init__()
        policies = [
            oneemb.policies.RowPolicy(expire_after_steps=2 * STEPS, sweep_steps=STEPS),
            oneemb.policies.RowPolicy(evict=oneemb.policies.LFU(), capacity=400),
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
    def __init__(self, folder):
        super().__init__()
        self.model = Model(folder)
        self.add_optimizer(torch.optim.Adagrad(self.parameters(), lr=0.05))

    def build(self, ids, label):
        loss = torch.nn.functional.binary_cross_entropy_with_logits(self.model(ids), label)
        loss.backward()
        return loss.detach()


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


class Log:
    """Lines of JSON in a file; a kill cuts none off."""

    def __init__(self, path):
        self._file = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT)

    def __call__(self, *fields):
        os.write(self._file, json.dumps(fields).encode() + b"\n")


def read_log(path):
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


# ---- processes -------------------------------------------------------------------------------------------------------


def train(folder, stream, is_oracle):
    """Train on a stream: the oracle until its end, and notes rows and scores of each saved step; others for ever."""
    torch.set_num_threads(1)
    torch.manual_seed(0)
    columns = {"ids": oneemb.data.Ids("user", "item"), "label": "label"}
    source = oneemb.data.GrowingFolder(stream / "*.parquet")
    loader = oneemb.data.Loader(source, ROWS, columns, end_after_s=0 if is_oracle else None)
    graph, log, path = Graph(folder), Log(folder.parent / f"{folder.name}.log"), folder / "model.pt"
    if path.exists():
        graph.load(path)
        loader.load_state_dict(graph.loader_state)
    rows = graph.model.rows
    for loss in graph.run(loader, save=oneemb.SaveEvery(graph, path, steps=STEPS, keep=KEPT)):
        step = graph.steps
        if step % STEPS == STEPS // 2:
            rows.erase(20 * (step // STEPS) + torch.arange(5), 0)
        notes = []
        if is_oracle and step % STEPS == 0:
            read = rows.read(asked(step))
            with torch.no_grad():
                notes = [digest_of_rows(rows_of(rows)), digest(read, graph.model.score(read))]
        log(step, loss.item().hex(), time.monotonic(), *notes)
    rows.close()


def step_of(name):
    """Step of a snapshot, by the name that `graph.save` gives it."""
    return int(re.search(r"\d+", name)[0])


def serve(folder, path):
    """Follow the checkpoint, and note what each version answers."""
    torch.set_num_threads(1)
    model, log = oneemb.serve_model(folder / "model.pt", lambda: Model(folder), missing_ok=True), Log(path)
    model.follow(0.1)
    last, life = None, os.getpid()
    while True:
        time.sleep(0.01)
        try:
            version = model.current
        except oneemb.StorageError:
            continue  # before the first checkpoint
        step = step_of(version.snapshots["rows"].name)
        with torch.no_grad():
            rows = version.module.rows(asked(step))
        if step != last:
            log(step, time.monotonic(), life, digest(rows, version(asked(step))))
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


def publish(folder, port):
    torch.set_num_threads(1)
    sinks = [
        index_of(folder), Sqlite(folder / "rows.db"), oneemb.sinks.Redis(f"redis://127.0.0.1:{port}?prefix={PREFIX}")
    ]  # fmt: skip
    with oneemb.publish(folder / "rows", sinks, seconds=0.1):
        time.sleep(1e6)


# ---- the soak --------------------------------------------------------------------------------------------------------


class Part:
    """A process that is killed at random times, and begun again at once.

    Args:
        life_s: mean time from a begin to a kill: the process's own CPU time for a trainer, so that it trains on a busy
            machine too.
    """

    def __init__(self, name, seed, life_s, begin, kill):
        self.name, self._rng, self._life_s, self._begin, self._kill = (
            name,
            np.random.default_rng(seed),
            life_s,
            begin,
            kill,
        )
        self.kills, self.grown_kb = 0, 0
        self.begin()

    def begin(self):
        self.process, self.born, self._first_kb = self._begin(), time.monotonic(), None
        self._life = min(self._rng.exponential(self._life_s), 6 * self._life_s)

    def age(self):
        if self.name != "trainer":
            return time.monotonic() - self.born
        words = Path(f"/proc/{self.process.pid}/stat").read_text().rpartition(") ")[2].split()
        return (int(words[11]) + int(words[12])) / os.sysconf("SC_CLK_TCK")

    def live(self, kills):
        """Kill the process if its time is over; one that has ended by itself is an error."""
        assert not hasattr(self.process, "exitcode") or self.process.exitcode is None, f"{self.name} ended by itself"
        if kills and self.age() > self._life:
            self.kill()
            self.begin()

    def kill(self):
        self.kills += 1
        self._kill(self.process)

    def look(self):
        """Note how much memory of its own the process has come to have since it was 10 s old."""
        pid = getattr(self.process, "pid", None)
        if pid is None or self.age() < 10:
            return
        kb = int(re.search(r"RssAnon:\s+(\d+)", Path(f"/proc/{pid}/status").read_text())[1])
        self._first_kb = kb if self._first_kb is None else self._first_kb
        self.grown_kb = max(self.grown_kb, kb - self._first_kb)


def kill_process(process):
    process.kill()
    process.join()


def disk_kb(folder):
    total = 0
    for place, _, files in os.walk(folder):
        for file in files:
            try:
                total += os.stat(os.path.join(place, file)).st_blocks // 2
            except FileNotFoundError:
                pass
    return total


def run(folder, seed, seconds, kills, life_s):
    """Let the stream run for so long, and until each process has been killed so often; returns figures.

    Args:
        life_s: mean time from the begin of a process to its kill.
    """
    folder = Path(folder)
    job, stream = folder / "job", folder / "stream"
    job.mkdir(parents=True)
    stream.mkdir()
    server = RedisProcess(folder / "redis")
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(PRELOADED)

    def part(name, function, *arguments):
        def begin():
            process = context.Process(target=function, args=arguments, daemon=True)
            process.start()
            return process

        return Part(name, [seed, len(parts)], life_s / 2 if name == "trainer" else life_s, begin, kill_process)

    def begin_redis():
        assert server.start(), server.said

    server.kill()  # The part begins it.
    parts = []
    try:
        parts.append(part("trainer", train, job, stream, False))
        for name in ("server 1", "server 2"):
            parts.append(part(name, serve, job, folder / f"{name}.log"))
        parts.append(part("publisher", publish, job, server.port))
        parts.append(Part("redis", [seed, len(parts)], life_s, begin_redis, lambda _: server.kill()))
        return _soaked(folder, seconds, kills, parts, server)
    finally:
        for one in parts:
            one.kill()
        server.stop()


def saved_steps(job):
    path = job / "model.pt"
    return torch.load(path, mmap=True)["steps"] if path.exists() else 0


def shown(folder, server):
    """Steps of the versions that servers and sinks show."""
    steps = [max([line[0] for line in read_log(folder / f"server {n}.log")], default=0) for n in (1, 2)]
    with sqlite3.connect(folder / "job" / "rows.db") as db:
        found = db.execute("SELECT version FROM versions ORDER BY rowid DESC LIMIT 1").fetchone()
    index = index_of(folder / "job").refresh()
    state = json.loads(redis.Redis(port=server.port).get(f"{PREFIX}_version"))["version"]
    names = [found and json.loads(found[0])[0], index and index.name, state and state["name"]]
    return steps + [step_of(name) if name else 0 for name in names]


def _soaked(folder, seconds, kills, parts, server):
    job, stream = folder / "job", folder / "stream"
    begin, looked, files, saved, disk = time.monotonic(), 0.0, 0, 0, []
    while (kills_go_on := time.monotonic() < begin + seconds or min(one.kills for one in parts) < kills) or (
        saved < files * STEPS
    ):
        for one in parts:
            one.live(kills_go_on)
        assert time.monotonic() < begin + seconds + PATIENCE_S, f"{saved} of {files * STEPS} steps are saved"
        if time.monotonic() > looked + 0.5:
            looked, saved = time.monotonic(), saved_steps(job)
            disk.append(disk_kb(job))
            for one in parts:
                one.look()
            for old in sorted(stream.glob("*.parquet"))[: -AHEAD - 2]:
                if int(old.stem) < saved // STEPS:
                    old.unlink()  # Each checkpoint that may be loaded is behind the file.
        if kills_go_on and files < saved // STEPS + AHEAD:
            write(stream, files)
            files += 1
        time.sleep(0.02)
    for _ in range(PATIENCE_S):
        steps = shown(folder, server)
        if set(steps) == {saved}:
            break
        time.sleep(1)
    assert set(steps) == {saved}, f"two servers, SQLite, index, Redis show steps {steps}, not {saved}"
    for one in parts[:-1]:  # Redis answers the check.
        one.kill()
    rows = checked(folder, files, server)
    growth = {one.name: one.grown_kb for one in parts}
    assert max(growth.values()) <= RAM_KB_MAX, growth
    assert max(disk) <= DISK_KB_MAX, disk
    return {
        "seconds": round(time.monotonic() - begin), "steps": saved, "rows": rows,
        "kills": {one.name: one.kills for one in parts}, **lags(folder), "grown_kb": growth, "disk_kb_max": max(disk),
    }  # fmt: skip


# ---- the check -------------------------------------------------------------------------------------------------------


def checked(folder, files, server):
    """Compare everything with a run that nobody killed. Returns the number of rows at the end."""
    oracle, stream, job = folder / "oracle", folder / "whole stream", folder / "job"
    oracle.mkdir()
    stream.mkdir()
    for number in range(files):
        write(stream, number)
    train(oracle, stream, True)
    noted = read_log(folder / "oracle.log")
    losses, saved = {line[0]: line[1] for line in noted}, {line[0]: line[3:] for line in noted if line[3:]}
    trained = read_log(folder / "job.log")
    assert [step for step, *_ in noted] == list(range(1, files * STEPS + 1)) and len(saved) == files
    for step, loss, _ in trained:
        assert loss == losses[step], f"step {step} was trained otherwise"
    assert {step for step, *_ in trained} == losses.keys()
    for n in (1, 2):
        last = {}
        for step, _, life, answer in read_log(folder / f"server {n}.log"):
            assert answer == saved[step][1], f"server {n} answers step {step} otherwise"
            assert step >= last.get(life, 0), f"server {n} went back from step {last[life]} to {step}"
            last[life] = step
    with sqlite3.connect(job / "rows.db") as db:
        versions = db.execute("SELECT version, whole, digest FROM versions ORDER BY rowid").fetchall()
        rows = {(table, id): row for table, id, row in db.execute("SELECT * FROM rows")}
    before, skipped = 0, 0
    for version, whole, its in versions:
        step = step_of(json.loads(version)[0])
        assert its == saved[step][0], f"SQLite shows step {step} otherwise"
        assert step == before + STEPS or whole and step > before, f"a delta was lost between {before} and {step}"
        skipped += step - before - STEPS
        before = step
    print(f"{len(versions)} versions in SQLite, {sum(whole for _, whole, _ in versions)} whole, {skipped} steps passed")
    assert before == files * STEPS and digest_of_rows(rows) == saved[before][0]
    assert read_redis(server) == rows
    name, found = read_index(index_of(job), 0)
    assert step_of(name) == before and found == {key: row for key, row in rows.items() if key[0] == 0}
    ever = torch.arange(20 * files + 800)
    with oneemb.InferenceEmbedding.open(job / "rows") as served:
        for table in (0, 1):
            present = [id for id in ever.tolist() if (table, id) in rows]
            read = served(ever, torch.full_like(ever, table))
            assert {id: read[id].numpy().tobytes() for id in present} == {id: rows[table, id] for id in present}
    return len(rows)


def read_redis(server):
    client = redis.Redis(port=server.port)
    keys = list(client.scan_iter(f"{PREFIX}_table_*_osid_0", count=1000))
    of_key = re.compile(rf"{PREFIX}_table_items\.(\d)_gid_(-?\d+)_cid_0_osid_0")
    names = [tuple(map(int, of_key.fullmatch(key.decode()).groups())) for key in keys]
    return dict(zip(names, client.mget(keys), strict=True))


def lags(folder):
    """Seconds from the end of the step that a save follows to the first answer with its rows, of each server, and to
    the commit of SQLite; kills included."""
    ended = {}
    for step, _, at, *_ in read_log(folder / "job.log"):
        ended.setdefault(step, at)
    answers = [[line[:2] for line in read_log(folder / f"server {n}.log")] for n in (1, 2)]
    served = [at - ended[step] for noted in answers for step, at in _first(noted)]
    with sqlite3.connect(folder / "job" / "rows.db") as db:
        found = db.execute("SELECT version, time FROM versions ORDER BY rowid").fetchall()
    published = [at - ended[step] for step, at in _first((step_of(json.loads(one)[0]), at) for one, at in found)]
    return {
        f"{name}_{quantile}": round(float(np.quantile(seconds, at)), 3)
        for name, seconds in (("served_s", served), ("published_s", published))
        for quantile, at in (("p50", 0.5), ("p99", 0.99))
    }


def _first(noted):
    """(step, first time) of each saved step up to the last: the time at which it, or a later one, was seen."""
    latest, found = 0, {}
    for step, at in noted:
        for one in range(latest + STEPS, step + 1, STEPS):
            found[one] = at
        latest = max(latest, step)
    return found.items()


def main():
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--minutes", type=float, default=60)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--life", type=float, default=8, metavar="SECONDS", help="mean time between kills of a process")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        print(json.dumps(run(folder, options.seed, 60 * options.minutes, 1, options.life), indent=1))


if __name__ == "__main__":
    main()
