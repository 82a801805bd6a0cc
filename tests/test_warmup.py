"""Compiled loops: what is said when there are none, and `oneemb warmup`, against the files of compiled code."""

import os
import subprocess
import sys

import pytest

from oneemb.training.warm_up import compile_loops

SAID = "oneemb compiles its loops for this processor"
JOB = """
import torch, oneemb
embedding = oneemb.MultiTableEmbedding(
    "items", 12, torch.float32, torch.int64, [oneemb.make_table()], oneemb.make_device_mem_store_options())
optimizer = torch.optim.SGD(embedding.parameters(), lr=0.1)
for _ in range(2):
    embedding(torch.arange(100)).sum().backward()
    optimizer.step()
    optimizer.zero_grad()
"""
GRAPH = """
import torch, oneemb
class Train(oneemb.TrainGraph):
    def __init__(self):
        super().__init__()
        self.items = oneemb.MultiTableEmbedding(
            "items", 12, torch.float32, torch.int64, [oneemb.make_table()], oneemb.make_device_mem_store_options())
        self.add_optimizer(torch.optim.SGD(self.items.parameters(), lr=0.1))
    def build(self, ids):
        self.items(ids).sum().backward()
for _ in Train().run([torch.arange(100)] * 4): pass
"""
LAUNCHES = "from oneemb.kernels.cuda_driver import compile_launches; compile_launches()"


def run(cache, *command):
    environment = {**os.environ, "XDG_CACHE_HOME": str(cache)}
    return subprocess.run([sys.executable, *command], capture_output=True, text=True, env=environment, check=True)


def compiled_files(cache):
    return {path.name for path in cache.rglob("*.nbc")}


@pytest.mark.slow
def test_the_first_job_says_that_it_compiles_and_the_next_is_silent(tmp_path):
    first = run(tmp_path, "-c", JOB)
    assert first.stderr.count(SAID) == 1 and first.stderr.count("oneemb has compiled loops (") == 1
    files = compiled_files(tmp_path)
    assert files and run(tmp_path, "-c", JOB).stderr == "" and compiled_files(tmp_path) == files


@pytest.mark.slow
def test_a_job_after_warmup_compiles_nothing(tmp_path):
    warmed = run(tmp_path, "-m", "oneemb", "warmup", "--optimizer", "SGD")
    assert "loops compiled in" in warmed.stdout and SAID not in warmed.stderr
    files = compiled_files(tmp_path)
    for job in (JOB, GRAPH, LAUNCHES):
        assert run(tmp_path, "-c", job).stderr == "" and compiled_files(tmp_path) == files
    assert '"loops": 0' in run(tmp_path, "-m", "oneemb", "warmup", "--optimizer", "SGD", "--json").stdout


def test_what_is_no_optimizer_or_dtype_is_refused():
    for optimizers, dtypes, words in ((["Adamm"], [], "optimizer must be a class of torch.optim"),
                                      ([], ["float64"], "dtype must be float32")):  # fmt: skip
        with pytest.raises(ValueError, match=words):
            compile_loops(optimizers, dtypes)
