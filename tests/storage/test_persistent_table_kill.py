"""A process that trains and saves is killed at random moments: what it reported saved is there, whole."""

import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest

from oneemb.kernels.threads import Threads
from oneemb.storage.table.persistent_table import PersistentTable

WIDTH, KEYS = 16, 4000


def rows_of(step):
    """Every row of a step is a function of the step and the key: (table, id, row)."""
    id_N = np.arange(KEYS, dtype=np.int64)
    row_NW = np.repeat((id_N * 1000 + step).astype(np.uint32)[:, None], WIDTH, axis=1)
    return np.zeros(KEYS, np.int32), id_N, row_NW.view(np.float32)


def open_table(path):
    return PersistentTable.open(
        path, row_width=WIDTH, physical_block_size=512, chunk_bytes=256 << 10, threads=Threads(1),
        max_space_amplification=1.5,
    )  # fmt: skip


def train(path):
    """Runs until it is killed; prints the step of each finished save."""
    with open_table(path) as table:
        names = [info.name for info in table.snapshots()]
        step = 0
        if "last" in names:
            step = table.load_snapshot("last")["step"]
        table.put(*rows_of(step))  # Compiled loops are loaded before the clock starts.
        table.flush()
        print("ready", flush=True)
        while True:
            step += 1
            table.put(*rows_of(step))
            table.save_snapshot("last", {"step": step}, overwrite=True)
            if step % 3 == 0:
                table.save_snapshot(f"s{step % 4}", {"step": step}, overwrite=True)
            if step % 5 == 0:
                name = f"s{random.randrange(4)}"
                if name in [info.name for info in table.snapshots()]:
                    table.delete_snapshot(name)
            table.compact()
            print(step, flush=True)


def kill_and_check(path, rng, least):
    child = subprocess.Popen(
        [sys.executable, "-c", f"from tests.storage.test_persistent_table_kill import train; train({str(path)!r})"],
        stdout=subprocess.PIPE, text=True, cwd=Path(__file__).parents[2],
    )  # fmt: skip
    assert child.stdout is not None and child.stdout.readline() == "ready\n"
    time.sleep(rng.uniform(0, 0.4))
    os.kill(child.pid, signal.SIGKILL)
    reported = [int(line) for line in child.stdout.read().splitlines()]
    child.wait()
    least = max([least, *reported])
    with open_table(path) as table:
        assert f"process {child.pid} " in table.recovery.stale_lock and not table.recovery.damaged
        infos = {info.name: info for info in table.snapshots()}
        for name in infos:
            step = table.load_snapshot(name)["step"]
            table_N, id_N, expected = rows_of(step)
            out = np.zeros_like(expected)
            assert len(table) == KEYS and not table.get(table_N, id_N, out).any()
            assert out.tobytes() == expected.tobytes(), f"{name} of step {step}"
        last = infos["last"].meta["step"] if "last" in infos else 0
        assert last >= least, f"step {least} was reported saved, {last} was found"
    return last


@pytest.mark.parametrize("times", [3, pytest.param(200, marks=pytest.mark.slow)])
def test_a_killed_process_loses_nothing_that_it_saved(tmp_path, times, seed):
    rng, last = random.Random(seed), 0
    for _ in range(times):
        last = kill_and_check(tmp_path, rng, last)
    assert last >= times // 4, "the process never got to work"
