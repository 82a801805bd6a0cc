"""A stream of clicks in Parquet files with string ids: a trainer that saves deltas, a server that follows it, and an
index of items that follows it.

    python examples/stream.py write              # 20 files of 25,000 clicks, as a log collector would leave them
    python examples/stream.py train              # trains on each file once; kill it, and begin it again
    python examples/stream.py serve              # beside it
    python examples/stream.py publish            # beside both; --redis 'redis://localhost?prefix=clicks': to Redis too
    curl 'localhost:8000/score?user=u7&item=i3&device=tv&hour=9'
    python examples/stream.py nearest --item i3

docs/tutorials/stream.md explains the steps. What must stay true: a trainer that was killed and begun again prints the
losses that it would have printed, to the last digit; an answer has weights and rows of one checkpoint; the index has
the items of one save.
"""

import argparse
import json
import threading
import urllib.parse
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow
import pyarrow.parquet
import torch

import oneemb

ITEMS = 1
"""Number of the table of items."""
NAMES = [f"i{n}" for n in range(2000)]
"""Names of all items."""

# ---- the stream ------------------------------------------------------------------------------------------------------


def write(folder: Path, files: int, clicks: int, seed: int = 0) -> None:
    """Add files to a stream. Users like some items more than others, and more at some hours."""
    folder.mkdir(parents=True, exist_ok=True)
    first = len(list(folder.glob("*.parquet")))
    for number in range(first, first + files):
        rng = np.random.default_rng([seed, number])
        user, item = rng.zipf(1.3, clicks) % 5000, rng.zipf(1.2, clicks) % len(NAMES)
        device, hour = rng.integers(0, 3, clicks), rng.integers(0, 24, clicks)
        logit = 2.0 * np.sin(user * 7.1 + item % 10) + np.cos(hour / 4 + device) - 0.5
        table = pyarrow.table({
            "user": [f"u{n}" for n in user],
            "item": [NAMES[n] for n in item],
            "device": pyarrow.array(np.array(["phone", "tv", "web"])[device]).dictionary_encode(),
            "hour": hour,
            "click": rng.random(clicks) < 1 / (1 + np.exp(-logit)),
        })  # fmt: skip
        temporary = folder / f"{number:06}.tmp"
        pyarrow.parquet.write_table(table, temporary)
        temporary.rename(folder / f"{number:06}.parquet")  # A reader never sees half a file.


def loader_of(folder: Path, size: int) -> oneemb.data.Loader:
    """Batches of a stream, up to the end of what is there."""
    source, ids = oneemb.data.GrowingFolder(folder / "*.parquet"), oneemb.data.Ids("user", "item", ("device", "hour"))
    return oneemb.data.Loader(source, size, {"ids": ids, "label": "click"}, end_after_s=0)


def ids_of(user: list[str], item: list[str], device: list[str], hour: list[int]) -> torch.Tensor:
    """int64 [B, 3]: the ids of a batch, for requests to a server."""
    return torch.stack([oneemb.hash_ids(user), oneemb.hash_ids(item), oneemb.hash_ids(device, hour)], 1)


# ---- the trainer -----------------------------------------------------------------------------------------------------


class ClickModel(torch.nn.Module):
    """The logit of a click.

    Args:
        folder: folder of the rows.
    """

    def __init__(self, folder: Path):
        super().__init__()
        self.rows = oneemb.MultiTableEmbedding(
            "clicks", 8, torch.float32, torch.int64, [oneemb.make_table()] * 3,
            oneemb.make_cached_ssd_store_options(16, str(folder)),
        )  # fmt: skip
        self.mlp = oneemb.nn.FusedMLP(3 * 8, [32], 1, skip_final_activation=True)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return self.mlp(self.rows(ids).flatten(1)).squeeze(1)


class ClickGraph(oneemb.TrainGraph):
    """The training step of a `ClickModel`."""

    def __init__(self, folder: Path):
        super().__init__()
        self.model = ClickModel(folder)
        self.add_optimizer(torch.optim.Adagrad(self.parameters(), lr=0.05))

    def build(self, ids: torch.Tensor, label: torch.Tensor) -> torch.Tensor:
        loss = torch.nn.functional.binary_cross_entropy_with_logits(self.model(ids), label)
        loss.backward()
        return loss.detach()


def train(stream: Path, job: Path, size: int, save_every: int) -> None:
    """Train on what is new in the stream, and print the loss of each batch."""
    torch.manual_seed(0)
    torch.set_num_threads(1)  # A sum's bits depend on how many threads share it.
    graph, loader, checkpoint = ClickGraph(job / "rows"), loader_of(stream, size), job / "model.pt"
    if checkpoint.exists():
        graph.load(checkpoint)  # loads the delta that it names, with the snapshots before it
        loader.load_state_dict(graph.loader_state)
    save = oneemb.SaveEvery(graph, checkpoint, steps=save_every)  # and at the end of the loader
    for loss in graph.run(loader, save=save):
        print(f"batch {graph.steps}: loss {loss.item()!r}", flush=True)
    graph.model.rows.close()


# ---- the server ------------------------------------------------------------------------------------------------------


class Server(ThreadingHTTPServer):
    """Answers from the newest checkpoint, whatever happens to the trainer.

    Args:
        port: 0 = a free one.
    """

    daemon_threads = True

    def __init__(self, job: Path, port: int, dtype: Any = "int8"):
        super().__init__(("127.0.0.1", port), Handler)
        self.model = oneemb.serve_model(job / "model.pt", lambda: ClickModel(job / "rows"), dtype=dtype)
        self.model.follow(0.2)

    def server_close(self) -> None:
        super().server_close()
        self.model.close()


class Handler(BaseHTTPRequestHandler):
    server: Server

    def do_GET(self) -> None:
        asked = dict(urllib.parse.parse_qsl(urllib.parse.urlsplit(self.path).query))
        try:
            ids = ids_of([asked["user"]], [asked["item"]], [asked["device"]], [int(asked["hour"])])
        except (KeyError, ValueError, OverflowError) as error:
            return self.answer(400, {"error": f"ask for user, item, device and a whole hour: {error!r}"})
        version = self.server.model.current  # one version for the score and its name
        score = version(ids).sigmoid().item()
        self.answer(200, {"score": score, "version": version.snapshots["rows"].name})

    def answer(self, status: int, content: dict[str, Any]) -> None:
        body = json.dumps(content).encode()
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_: Any) -> None:
        """Requests are not printed."""


# ---- the index -------------------------------------------------------------------------------------------------------


def publisher_of(job: Path, redis_url: str | None) -> oneemb.sinks.Publisher:
    """Publisher of what a job saves, to an index of the items, and to Redis if there is a URL."""
    sinks: list[oneemb.sinks.Sink] = [oneemb.sinks.Faiss(job / "index", "HNSW32", table=ITEMS)]
    if redis_url is not None:
        sinks.append(oneemb.sinks.Redis(redis_url))
    return oneemb.publish(job / "rows", sinks, seconds=0.2)


def nearest(job: Path, item: str, count: int = 5) -> list[str]:
    """Names of the items in the index whose rows are nearest to that of an item."""
    index = oneemb.sinks.Faiss(job / "index", table=ITEMS)
    version = index.refresh()
    if version is None:
        raise SystemExit("there is no index yet: run `python examples/stream.py publish` beside the trainer")
    with oneemb.InferenceEmbedding.open(str(job / "rows"), version.name) as rows:
        vector = rows(oneemb.hash_ids([item]), torch.tensor(ITEMS))
    names = dict(zip(oneemb.hash_ids(NAMES).tolist(), NAMES, strict=True))
    return [names[id] for id in index.search(vector.numpy(), count)[1][0].tolist() if id in names]


def main(argv: list[str] | None = None) -> None:
    """Run the script."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("what", choices=["write", "train", "serve", "publish", "nearest"])
    parser.add_argument("--workdir", type=Path, default=Path(__file__).resolve().parent.parent / "build/stream")
    parser.add_argument("--files", type=int, default=20, help="to write")
    parser.add_argument("--clicks", type=int, default=25_000, help="of a file")
    parser.add_argument("--batch-size", type=int, default=500)
    parser.add_argument("--save-every", type=int, default=20, metavar="BATCHES")
    parser.add_argument("--port", type=int, default=8000)
    parser.add_argument("--redis", metavar="URL", help="Redis server to which rows are published too")
    parser.add_argument("--item", default="i3", help="whose nearest items are printed")
    arguments = parser.parse_args(argv)
    stream, job = arguments.workdir / "stream", arguments.workdir / "job"
    if arguments.what == "write":
        return write(stream, arguments.files, arguments.clicks)
    job.mkdir(parents=True, exist_ok=True)
    if arguments.what == "train":
        return train(stream, job, arguments.batch_size, arguments.save_every)
    if arguments.what == "nearest":
        return print(*nearest(job, arguments.item))
    if arguments.what == "publish":
        with publisher_of(job, arguments.redis):
            threading.Event().wait()  # until Ctrl-C
    with Server(job, arguments.port) as server:
        print(f"serves http://127.0.0.1:{server.server_port}", flush=True)
        server.serve_forever()


if __name__ == "__main__":
    main()
