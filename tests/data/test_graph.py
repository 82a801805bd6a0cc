"""A graph over a loader: a checkpoint has the position behind the batch trained last, for any number of ranks."""

import signal
import subprocess
import sys
import threading
import time
import warnings

import pytest
import torch

import oneemb
from oneemb.data import Files, GrowingFile, Ids, Loader
from tests.support.rank_jobs import RankJob

pa = pytest.importorskip("pyarrow")
pq = pytest.importorskip("pyarrow.parquet")

ROWS, STEPS = 90, 5


class Graph(oneemb.TrainGraph):
    def __init__(self, folder, group=None):
        super().__init__()
        torch.manual_seed(0)
        store = oneemb.make_device_mem_store_options(f"{folder}/rows")
        self.rows = oneemb.MultiTableEmbedding(
            "rows", 4, torch.float32, torch.int64, [oneemb.make_table()], store, process_group=group
        )
        self.add_optimizer(torch.optim.Adagrad(self.parameters(), lr=0.1))
        self.seen = []

    def build(self, ids, n):
        loss = self.rows(ids).square().sum()
        loss.backward()
        return n, loss.detach()


def loader_of(folder, rank=0, world_size=1, **options):
    columns = {"ids": Ids("user"), "n": "n"}
    return Loader(
        Files(f"{folder}/*.parquet"), 4, columns, shuffle=30, rank=rank, world_size=world_size, **options
    )  # fmt: skip


def write(folder):
    table = pa.table({"user": [f"u{n % 11}" for n in range(ROWS)], "n": range(ROWS)})
    pq.write_table(table, folder / "0.parquet", row_group_size=13)


def train(folder, group, steps, loads):
    """(numbers of the rows trained, losses) of one rank."""
    rank, world_size = (0, 1) if group is None else (group.rank(), group.size())
    graph, loader, seen, losses = Graph(folder, group), loader_of(folder, rank, world_size), [], []
    if loads:
        graph.load(f"{folder}/checkpoint")
        loader.load_state_dict(graph.loader_state or graph.loader_states)
    for n, loss in graph.run(loader, prefetch_depth=2):
        seen += n.tolist()
        losses.append(loss.item())
        if len(losses) == steps:
            graph.save(f"{folder}/checkpoint")
            break
    graph.rows.close()
    return seen, losses


def trains(group, folder, steps, loads):
    return train(folder, group, steps, loads)


def test_a_resumed_job_trains_the_batches_of_one_that_was_not_stopped(tmp_path):
    (tmp_path / "other").mkdir()
    write(tmp_path)
    write(tmp_path / "other")
    whole = train(tmp_path / "other", None, None, False)
    first, second = train(tmp_path, None, STEPS, False), train(tmp_path, None, None, True)
    assert [a + b for a, b in zip(first, second, strict=True)] == list(whole)
    assert sorted(whole[0]) == list(range(ROWS))


@pytest.mark.parametrize(("before", "after"), [(2, 3), (3, 1), (1, 2)])
def test_another_number_of_ranks_trains_the_rows_that_are_left(rank_pool, tmp_path, before, after):
    write(tmp_path)
    first = rank_pool(before, trains, tmp_path, 4, False)
    second = rank_pool(after, trains, tmp_path, None, True)
    seen = [n for part in (first, second) for rows, _ in part for n in rows]
    assert sorted(seen) == list(range(ROWS))


@pytest.mark.parametrize("ends", ["break", "error"])
def test_leaving_a_loop_ends_a_loader_that_waits(tmp_path, ends):
    path = tmp_path / "log"
    path.write_text("".join(f'{{"user": "u{n}", "n": {n}}}\n' for n in range(4)))
    source = GrowingFile(path, {"user": "string", "n": "int64"})
    loader = Loader(source, 4, {"ids": Ids("user"), "n": "n"})
    graph = Graph(tmp_path)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        try:
            for _ in graph.run(loader):
                if ends == "error":
                    raise ZeroDivisionError
                break
        except ZeroDivisionError:
            pass
        assert not [thread for thread in threading.enumerate() if thread.name == "oneemb-prefetch"]
    graph.rows.clear()
    graph.rows.close()


def waits(group, report, folder, depth):
    log = GrowingFile(f"{folder}/log", {"user": "string", "n": "int64"})
    loader = Loader(log, 4, {"ids": Ids("user"), "n": "n"})
    try:
        for _ in Graph(folder).run(loader, prefetch_depth=depth):
            report("trained")
    except KeyboardInterrupt:
        report(("left", loader.state_dict()["next"][0][0][0]))


@pytest.mark.parametrize("depth", [0, 1])
def test_ctrl_c_ends_a_loop_that_waits_for_rows(tmp_path, depth):
    (tmp_path / "log").write_text("".join(f'{{"user": "u{n}", "n": {n}}}\n' for n in range(4)))
    job = RankJob(0, waits, str(tmp_path), depth)
    job.wait_for("trained")
    time.sleep(0.2)
    job.kill(0, signal.SIGINT)
    assert job.end() == [(0, ["trained", ("left", (tmp_path / "log").stat().st_size)])]


def test_importing_the_package_loads_no_reader():
    code = "import sys, oneemb; a = [m for m in ('torch', 'pyarrow') if m in sys.modules]; import oneemb.data;"
    code += "print(a, [m for m in ('pyarrow', 'redis', 'confluent_kafka') if m in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "[] []\n"
