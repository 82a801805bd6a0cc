"""A soak of a whole stream, as processes that are killed at random times and begun again: a trainer that saves deltas,
two servers that follow it, a publisher to a FAISS index, Redis and SQLite, a reader of both, and the Redis server.

    python -m tests.support.stream_soak --minutes 60 --seed 7

The oracle is a second trainer, on the same stream, that nobody kills: losses and examples of all steps, rows and scores
of all saved steps must be the same, bit for bit. Ids of the stream come and vanish: their rows expire, are erased, or
are evicted since a table is full. With `--plant`, one of the processes has a fault that the check must find.
"""

import argparse
import contextlib
import json
import multiprocessing
import os
import re
import shutil
import sqlite3
import tempfile
import time
from pathlib import Path

import numpy as np
import redis
import torch

import oneemb
from tests.support.published import PREFIX, read_index, read_redis
from tests.support.redis_process import RedisProcess
from tests.support.stream_job import (
    STEPS,
    digest_of_rows,
    index_of,
    of_table,
    publish,
    read,
    serve,
    step_of,
    train,
    write,
)  # fmt: skip
from tests.support.stream_plants import PLANTS

AHEAD = 3
"""Files that are written before the trainer has saved, and the oracle trained, the steps of the first of them."""
SAVES_MIN, PATIENCE_S = 12, 300
PRELOADED = [
    "faiss", "pyarrow.parquet", "redis", "oneemb.data.loader", "oneemb.embeddings.embedding", "oneemb.policies",
    "oneemb.serving.model", "oneemb.sinks", "oneemb.training.save_every", "tests.support.published",
]  # fmt: skip
"""Modules that a process has from its begin, so that it begins fast."""
KEPT_IN = "/var/tmp" if os.path.isdir("/var/tmp") else None
"""Folder of the folders that stay after a failure, which no run of tests removes."""
GROWTH_KB_MAX = 32 * 1024
"""Bound of what a process's own memory, and the disk, may grow by from the first third of the steps to the last."""
COUNT_MAX = 80
"""Bound of the snapshots, of files of the index too: those of `KEPT` saves, and a chain before them."""


# ---- the soak --------------------------------------------------------------------------------------------------------


def read_log(path):
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


class Part:
    """A process that is killed at random times, and begun again at once.

    Args:
        life_s: mean time from a begin to a kill: the process's own CPU time for a trainer, so that it trains on a busy
            machine too. None = the process is not killed.
    """

    def __init__(self, name, seed, life_s, begin, kill):
        self.name, self.life_s, self._begin, self._kill = name, life_s, begin, kill
        self._rng = np.random.default_rng(seed)
        self.kills, self.used = 0, []
        self.begin()

    def begin(self):
        self.process, self.born = self._begin(), time.monotonic()
        self._life = np.inf if self.life_s is None else min(self._rng.exponential(self.life_s), 6 * self.life_s)

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

    def look(self, done):
        """Note the memory of its own that the process has when so many steps are done."""
        kb = re.search(r"RssAnon:\s+(\d+)", Path(f"/proc/{self.process.pid}/status").read_text())
        if kb is not None:  # A process that has just ended has none.
            self.used.append((done, int(kb[1])))


def _with_stderr(path, function, *arguments):
    """Call a function in a new process whose errors and warnings come to the end of a file."""
    file = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT)
    os.dup2(file, 2)
    os.close(file)
    function(*arguments)


@contextlib.contextmanager
def kept_if_it_fails():
    """A folder that is removed at the end, unless an error ends the block; then its path is printed."""
    folder = Path(tempfile.mkdtemp(prefix="oneemb-soak-", dir=KEPT_IN))
    try:
        yield folder
    except BaseException:
        for path in sorted(folder.glob("**/*.stderr")):
            if path.stat().st_size:
                print(f"---- {path}", path.read_text()[-2000:], sep="\n")
        print(f"logs, rows and errors of all processes are in {folder}")
        raise
    shutil.rmtree(folder)


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


def run(folder, seed, seconds, kills, life_s, plant=None):
    """Let the stream run for so long, and until each process has been killed so often; returns figures.

    Args:
        life_s: mean time from the begin of a process to its kill; None = no process is killed.
        plant: fault of a process, of `PLANTS`.
    """
    folder = Path(folder)
    job, stream = folder / "job", folder / "stream"
    job.mkdir(parents=True)
    stream.mkdir()
    (folder / "oracle").mkdir()
    server = RedisProcess(folder / "redis", auto_aof_rewrite_min_size="4mb")
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(PRELOADED)

    def part(name, life_s, function, *arguments):
        def begin():
            said = folder / f"{name}.stderr"
            process = context.Process(target=_with_stderr, args=(said, function, *arguments), daemon=True)
            process.start()
            return process

        parts.append(Part(name, [seed, len(parts)], life_s, begin, kill_process))

    def begin_redis():
        assert server.start(), server.said
        return server

    server.kill()  # The part begins it.
    parts = []
    try:
        part("trainer", life_s and life_s / 2, train, job, stream, False, plant)
        part("server 1", life_s, serve, job, folder / "server 1.log", plant)
        part("server 2", life_s, serve, job, folder / "server 2.log")
        part("publisher", life_s, publish, job, server.port, plant)
        part("reader", life_s, read, job, server.port, folder / "reader.log")
        part("oracle", None, train, folder / "oracle", stream, True)
        parts.append(Part("redis", [seed, len(parts)], life_s, begin_redis, lambda _: server.kill()))
        return _soaked(folder, seconds, kills, parts, server)
    finally:
        for one in parts:
            one.kill()
        server.stop()


def saved_steps(job):
    path = job / "model.pt"
    return torch.load(path, mmap=True)["steps"] if path.exists() else 0


def last_step(path):
    """Step of the last line of a trainer's log, whose examples must be those of the step."""
    if not path.exists():
        return 0
    with open(path, "rb") as file:
        file.seek(max(0, path.stat().st_size - 4096))
        lines = file.read().splitlines()
    if not lines:
        return 0
    step, _, _, of_steps, *_ = json.loads(lines[-1])
    check_examples(step, of_steps)
    return step


def check_examples(step, of_steps):
    """AssertionError if a step has trained examples of other steps."""
    assert max(of_steps) <= step, f"examples were skipped: step {step} has trained those of step {max(of_steps)}"
    assert min(of_steps) >= step, f"examples were trained twice: those of step {min(of_steps)} in step {step} again"


def thirds(used):
    """Most kilobytes in each third of the steps, of [(steps, kilobytes)]."""
    last = used[-1][0]
    return [max((kb for done, kb in used if n * last <= 3 * done <= (n + 1) * last), default=None) for n in range(3)]


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
    killed = [one for one in parts if one.life_s is not None]
    begin, looked, files, done, disk = time.monotonic(), 0.0, 0, 0, {"job": [], "redis": []}
    client, memory, counts = redis.Redis(port=server.port), [], {"snapshots": [], "files of the index": []}
    while True:
        now = time.monotonic()
        kills_go_on = now < begin + seconds or any(one.kills < kills for one in killed)
        goes_on = kills_go_on or done < SAVES_MIN * STEPS
        if not goes_on and done == files * STEPS:
            break
        for one in parts:
            one.live(kills_go_on)
        assert now < begin + seconds + PATIENCE_S, f"{done} of {files * STEPS} steps are saved"
        if now > looked + 0.5:
            last_step(folder / "job.log")
            looked, done = now, min(saved_steps(job), last_step(folder / "oracle.log"))
            for place, used in disk.items():
                used.append((done, disk_kb(folder / place)))
            counts["snapshots"].append((done, len(list((job / "rows").glob("**/snapshots/*")))))
            counts["files of the index"].append((done, len(list((job / "index").glob("*")))))
            with contextlib.suppress(redis.RedisError):
                memory.append((done, client.info("memory")["used_memory"] // 1024))
            for one in parts:
                one.look(done)
            for old in sorted(stream.glob("*.parquet"))[: -AHEAD - 2]:
                if int(old.stem) < done // STEPS:
                    old.unlink()  # Each checkpoint that may be loaded is behind the file.
        if goes_on and files < done // STEPS + AHEAD:
            write(stream, files)
            files += 1
        time.sleep(0.02)
    for _ in range(PATIENCE_S):
        steps = shown(folder, server)
        if set(steps) == {done}:
            break
        time.sleep(1)
    assert set(steps) == {done}, f"two servers, SQLite, index, Redis show steps {steps}, not {done}"
    for one in parts[:-1]:  # Redis answers the check.
        one.kill()
    rows = checked(folder, files, server)
    used = {one.name: one.used for one in parts} | {f"disk of {place}": used for place, used in disk.items()}
    used["rows in Redis"] = memory
    kilobytes = {name: thirds(its) for name, its in used.items()}
    for name, (first, _, last) in kilobytes.items():
        assert last is None or last - first <= GROWTH_KB_MAX, f"{name} grows, in thirds of the steps: {kilobytes[name]}"
    numbers = {name: thirds(its) for name, its in counts.items()}
    for name, its in numbers.items():
        assert max(its) <= COUNT_MAX, f"the number of {name} grows, in thirds of the steps: {its}"
    return {
        "seconds": round(time.monotonic() - begin), "steps": done, "rows": rows,
        "kills": {one.name: one.kills - 1 for one in killed}, **saves_of(folder), **lags(folder),
        "kB in thirds of the steps": kilobytes, "numbers in thirds of the steps": numbers,
    }  # fmt: skip


# ---- the check -------------------------------------------------------------------------------------------------------


def checked(folder, files, server):
    """Compare everything with the oracle. Returns the number of rows at the end."""
    job, noted = folder / "job", read_log(folder / "oracle.log")
    losses, saved = {line[0]: line[1] for line in noted}, {line[0]: line[4:] for line in noted if line[4:]}
    trained = read_log(folder / "job.log")
    assert [step for step, *_ in noted] == list(range(1, files * STEPS + 1)) and len(saved) == files
    for step, loss, _, of_steps, *_ in noted + trained:
        check_examples(step, of_steps)
        assert loss == losses[step], f"step {step} was trained otherwise"
    assert {step for step, *_ in trained} == losses.keys()
    committed = {name: whole for name, whole, *_ in read_log(folder / "job saves.log")}
    for n in (1, 2):
        notes = read_log(folder / f"server {n}.log")
        _check_shown(f"server {n}", notes, {step: its[1] for step, its in saved.items()}, committed)
    for name, place in (("redis", 0), ("index", 2)):
        notes = [line[1:] for line in read_log(folder / "reader.log") if line[0] == name]
        _check_shown(name, notes, {step: its[place] for step, its in saved.items()}, committed)
    with sqlite3.connect(job / "rows.db") as db:
        versions = db.execute("SELECT version, digest FROM versions ORDER BY rowid").fetchall()
        rows = {(table, id): row for table, id, row in db.execute("SELECT * FROM rows")}
    before, last = 0, None
    for version, its in versions:
        name = json.loads(version)[0]
        step = step_of(name)
        check_order("sqlite", last, name, committed)
        assert its == saved[step][0], f"sqlite shows step {step} with other rows"
        before, last = step, name
    assert before == files * STEPS and digest_of_rows(rows) == saved[before][0]
    assert read_redis(redis.Redis(port=server.port))[1] == rows
    name, found = read_index(index_of(job), 0)
    assert step_of(name) == before and found == of_table(rows, 0)
    ever = torch.arange(-150, 4 * files + 1250)
    with oneemb.InferenceEmbedding.open(job / "rows") as served:
        for table in (0, 1):
            present = [id for id in ever.tolist() if (table, id) in rows]
            read = served(ever, torch.full_like(ever, table))
            assert {id: read[id + 150].numpy().tobytes() for id in present} == {id: rows[table, id] for id in present}
    return len(rows)


def check_order(name, last, version, committed):
    """AssertionError if a sink, which is told each version, must not go from version `last` to `version`.

    It may pass over a version only if a snapshot without a parent came since the last one, and may go back only from
    the snapshot of a killed save.

    Args:
        committed: {name of a snapshot that a checkpoint has named: whether it has no parent}.
    """
    before, step = 0 if last is None else step_of(last), step_of(version)
    assert version != last, f"a delta was applied twice: {name} has got step {step} again"
    if last is None or last not in committed or step == before + STEPS:
        return
    assert step > before, f"{name} went back from step {before} to {step}"
    began = any(whole and before < step_of(one) <= step for one, whole in (committed | {version: False}).items())
    assert began or committed.get(version, True), f"a delta was lost: {name} went from step {before} to {step}"


def _check_shown(name, notes, expected, committed):
    """Compare notes of versions, (step, snapshot, time, process, digest), with the digests of an oracle. A version goes
    back only from the snapshot of a killed save."""
    before, last = 0, None
    for step, version, _, _, found in notes:
        assert step >= before or last not in committed, f"{name} went back from step {before} to {step}"
        assert found == expected[step], f"{name} shows step {step} with other rows"
        before, last = step, version
    assert notes, f"{name} has shown no version"


def saves_of(folder):
    """Numbers of saves, and of those that are whole."""
    saves = {name: whole for name, whole, *_ in read_log(folder / "job saves.log")}
    longest = chain = 0
    for name in sorted(saves):
        chain = 0 if saves[name] else chain + 1
        longest = max(longest, chain)
    with sqlite3.connect(folder / "job" / "rows.db") as db:
        versions, all_rows = db.execute("SELECT COUNT(*), SUM(whole) FROM versions").fetchone()
    return {
        "saves": len(saves), "whole saves": sum(saves.values()), "longest chain": longest,
        "versions in SQLite": versions, "given as all rows": all_rows,
    }  # fmt: skip


def lags(folder):
    """Seconds from the end of the step that a save follows to the first answer with its rows, of each server, and to
    the commit of SQLite; kills included."""
    ended = {}
    for step, _, at, *_ in read_log(folder / "job.log"):
        ended.setdefault(step, at)
    answers = [[(step, at) for step, _, at, *_ in read_log(folder / f"server {n}.log")] for n in (1, 2)]
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
    parser.add_argument("--plant", choices=PLANTS, help="fault that the soak must find; no process is killed")
    options = parser.parse_args()
    kills, life_s = (1, options.life) if options.plant is None else (0, None)
    with kept_if_it_fails() as folder:
        found = run(folder / "soak", options.seed, 60 * options.minutes, kills, life_s, options.plant)
        print(json.dumps(found, indent=1))


if __name__ == "__main__":
    main()
