"""Packages of extras that are not installed: who needs one says so at once, with the extra to install."""

import json
import subprocess
import sys

import pytest

from tests.support.once import made_once

_SCRIPT = """
import json, subprocess, sys, tempfile, torch, oneemb

class Absent:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in absent:
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)

class Unfit:
    def find_spec(self, name, path=None, target=None):
        if name == "fbgemm_gpu":  # As it fails if its library was built for another torch.
            raise OSError("Could not load this library: fbgemm_gpu_py.so")

sys.meta_path.insert(0, Absent())
absent, said, folder = {"fbgemm_gpu"}, {}, tempfile.mkdtemp()

def make(options):
    return oneemb.MultiTableEmbedding("e", 4, torch.float32, torch.int64, [oneemb.make_table()], options)

embedding = make(oneemb.make_device_mem_store_options(folder))

class Graph(oneemb.TrainGraph):
    def __init__(self):
        super().__init__()
        self.embedding = embedding
        self.add_optimizer(torch.optim.SGD(embedding.parameters(), lr=0.1))

    def build(self, ids):
        loss = self.embedding(ids).sum()
        loss.backward()
        return loss

graph = Graph()
graph(torch.arange(3))

def module(name):
    __import__(name)

def compat():
    from oneemb.compat import install
    install("dynamicemb")
    import dynamicemb

def server():
    from oneemb.storage.remote.servers import open_server
    open_server("redis://127.0.0.1:1")

def remote(scheme):
    make(oneemb.make_cached_remote_store_options(f"{scheme}://127.0.0.1:1", 1, tempfile.mkdtemp()))

class Series:
    __module__ = "polars"

def hashed_by_pandas():
    import pandas
    strings = ["a", "b", "a"]
    dtypes = [object, "category", "string", pandas.StringDtype("python"), None]
    columns = [pandas.Series(strings, dtype=dtype) for dtype in dtypes]
    right = oneemb.hash_ids(strings).tolist()
    raise ImportError("equal" if all(oneemb.hash_ids(c).tolist() == right for c in columns) else "other ids")

def unfit(name):
    sys.meta_path.insert(0, Unfit())
    try:
        module(name)
    finally:
        del sys.meta_path[0]

for n, (name, call) in enumerate({
    "fbgemm_gpu": lambda: module("oneemb.torchrec"),
    "unfit": lambda: unfit("oneemb.torchrec"),
    "unfit tde": lambda: unfit("oneemb.tde"),
    "unfit dynamicemb": lambda: unfit("oneemb.dynamicemb"),
    "torchrec": lambda: module("oneemb.torchrec"),
    "torchrec.modules": lambda: module("oneemb.torchrec.modules"),
    "dynamicemb": lambda: module("oneemb.dynamicemb"),
    "dynamicemb.planner": lambda: module("oneemb.dynamicemb.planner"),
    "compat": compat,
    "tde": lambda: module("oneemb.tde"),
    "tde.ps": lambda: module("oneemb.tde.ps"),
    "redis": lambda: remote("redis"),
    "rediss": lambda: remote("rediss"),
    "server": server,
    "draw": lambda: graph.draw(f"{folder}/graph.png"),
    "export parquet": lambda: oneemb.export_rows(embedding, f"{folder}/rows.parquet"),
    "files": lambda: oneemb.data.Files("*"),
    "stream": lambda: oneemb.data.RedisStream("redis://127.0.0.1:1", "s", {"n": "int64"}),
    "topic": lambda: oneemb.data.KafkaTopic("t", {}, {"n": "int64"}),
    "hash polars": lambda: oneemb.hash_ids(Series()),
    "hash pandas": hashed_by_pandas,
    "import safetensors": lambda: oneemb.import_rows(embedding, "/dev/null.safetensors"),
}.items()):
    try:
        call()
        said[name] = "nothing"
    except Exception as error:
        said[name] = f"{type(error).__name__}: {error}"
    graph(torch.arange(3))  # The embedding is as it was.
    absent = {"redis", "hiredis", "pyarrow", "safetensors", "torchrec", "matplotlib", "confluent_kafka"}
print(json.dumps(said))
"""


@pytest.fixture(scope="module")
def said(tmp_path_factory):
    """What each door says where packages are missing, in a process of its own."""

    def ask(folder):
        done = subprocess.run([sys.executable, "-c", _SCRIPT], capture_output=True, text=True, timeout=600)
        assert done.returncode == 0, done.stderr
        (folder / "said").write_text(done.stdout.splitlines()[-1])

    return json.loads((made_once(tmp_path_factory, "extras", ask) / "said").read_text())


@pytest.mark.parametrize(
    ("door", "text"),
    [
        (
            "fbgemm_gpu",
            "oneemb.torchrec needs fbgemm_gpu: pip install 'oneemb[torchrec]'; on a machine without a GPU, pip",
        ),
        ("torchrec", "oneemb.torchrec needs torchrec: pip install 'oneemb[torchrec]'; on a machine without a GPU, pip"),
        (
            "unfit",
            "oneemb.torchrec: Could not load this library: fbgemm_gpu_py.so; releases of torchrec, fbgemm-gpu and",
        ),
        ("unfit tde", "oneemb.tde: Could not load this library"),
        ("unfit dynamicemb", "oneemb.dynamicemb: Could not load this library"),
        ("torchrec.modules", "oneemb.torchrec needs torchrec: pip"),
        ("dynamicemb", "oneemb.dynamicemb needs torchrec: pip install 'oneemb[torchrec]'; on"),
        ("dynamicemb.planner", "oneemb.dynamicemb needs torchrec: pip"),
        ("compat", "oneemb.dynamicemb needs torchrec: pip"),
        ("tde", "oneemb.tde needs torchrec: pip install 'oneemb[torchrec]'; on"),
        ("tde.ps", "oneemb.tde needs torchrec: pip"),
        ("redis", "redis:// needs redis: pip install 'oneemb[redis]'"),
        ("rediss", "rediss:// needs redis: pip install 'oneemb[redis]'"),
        ("server", "redis:// needs redis: pip install 'oneemb[redis]'"),
        ("draw", "draw needs matplotlib: pip install 'oneemb[draw]'"),
        ("export parquet", "a file of rows in Parquet needs pyarrow: pip install 'oneemb[parquet]'"),
        ("files", "Files needs pyarrow: pip install 'oneemb[parquet]'"),
        ("stream", "RedisStream needs redis: pip install 'oneemb[redis]'"),
        ("topic", "KafkaTopic needs confluent_kafka: pip install 'oneemb[kafka]'"),
        ("hash polars", "hash_ids of a polars Series needs pyarrow: pip install 'oneemb[parquet]'"),
        ("hash pandas", "equal"),
        ("import safetensors", "a file of rows in safetensors needs safetensors: pip install 'oneemb[safetensors]'"),
    ],
)
def test_who_needs_a_missing_package_says_which_extra_brings_it(said, door, text):
    assert said[door].startswith(f"ImportError: {text}")
