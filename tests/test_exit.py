"""Programs that leave their objects in global variables end without a word."""

import subprocess
import sys

import pytest

from tests.support.pairwise import diagonal

SCRIPT = """
import torch
import oneemb

folder = {folder!r}
store = {store}
rows = oneemb.MultiTableEmbedding("rows", 4, torch.float32, torch.int64, [oneemb.make_table()], store)


class Graph(oneemb.TrainGraph):
    def __init__(self):
        super().__init__()
        self.rows = rows
        self.add_optimizer(torch.optim.Adagrad(self.parameters(), lr=0.1))

    def build(self, ids):
        loss = self.rows(ids).square().sum()
        loss.backward()
        return loss


graph = Graph()
batches = [torch.arange(n, n + 8).view(-1, 1) for n in range(4)]
for loss in graph.run(batches):
    pass
{end}
also = [rows, graph, store]
also.append(also)  # a cycle, which the interpreter frees last
"""
STORES = {
    "memory": "oneemb.make_device_mem_store_options()",
    "device": "oneemb.make_device_mem_store_options(folder)",
    "ssd": "oneemb.make_cached_ssd_store_options(1, folder)",
}
ENDS = {
    "saved": "graph.save(folder + '/graph.pt')",
    "closed": "graph.save(folder + '/graph.pt'); rows.close()",
    "loop": "graph.save(folder + '/graph.pt'); loop = graph.run(batches); next(iter(loop))",
}


@pytest.mark.parametrize(("store", "end"), [("memory", ""), *diagonal(("device", "ssd"), list(ENDS))])
def test_a_program_that_ends_with_objects_in_its_globals_prints_nothing(store, end, tmp_path):
    script = tmp_path / "script.py"
    script.write_text(SCRIPT.format(folder=str(tmp_path / "job"), store=STORES[store], end=ENDS.get(end, "")))
    (tmp_path / "job").mkdir()
    done = subprocess.run([sys.executable, str(script)], capture_output=True, text=True, timeout=300)
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")


EAGER = """
import torch
import oneemb

store = oneemb.make_device_mem_store_options({folder!r})
rows = oneemb.MultiTableEmbedding("rows", 4, torch.float32, torch.int64, [oneemb.make_table()], store)
optimizer = torch.optim.SGD(rows.parameters(), lr=1.0)
rows(torch.arange(100))
rows.save_snapshot("a")
"""


def test_a_program_that_saves_a_snapshot_and_closes_nothing_prints_nothing(tmp_path):
    script = tmp_path / "script.py"
    script.write_text(EAGER.format(folder=str(tmp_path / "job")))
    done = subprocess.run([sys.executable, str(script)], capture_output=True, text=True, timeout=300)
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")
