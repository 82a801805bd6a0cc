"""Serve the demo's click model over HTTP while its training job goes on: JSON in, scores out.

    python examples/kuairand_dlrm.py --save-every 500 &    # the job
    python examples/serve.py --dtype int8 --port 8000      # follows it; --workers 4 share one map of the rows
    curl -d '{"numbers": [[...]], "ids": [[...]]}' localhost:8000/score

`POST /score` gives the scores and the version that made them, `GET /health` the version served, its age and what keeps
the server from a newer one, `GET /metrics` figures for Prometheus. SIGHUP takes over what the checkpoint names, older
or newer; SIGTERM answers the requests that are there and ends.

`oneemb.serve_model` makes the model, follows the job and keeps a call to one version; this file is what HTTP needs.
What must stay true: whatever a client sends costs bounded memory, threads and time, and gives no status of 500.
"""

import argparse
import asyncio
import contextlib
import json
import logging
import math
import os
import signal
import socket
import sys
import threading
import time
from collections.abc import AsyncIterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import uvicorn
from prometheus_client import CONTENT_TYPE_LATEST, CollectorRegistry, Counter, Gauge, Histogram, generate_latest
from prometheus_client.multiprocess import MultiProcessCollector
from serve_workers import WORKER_FOLDER, end_with_parent, run_workers
from served_model import DTYPES, Refused, load, parse, scorer_of
from starlette.applications import Starlette
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.routing import Route
from starlette.types import ASGIApp, Message, Receive, Scope, Send
from uvicorn.protocols.http.h11_impl import H11Protocol

import oneemb
from oneemb.serving.served import Version

__all__ = ["Limits", "Metrics", "ScoreServer", "main"]

logger = logging.getLogger("serve")
REPOSITORY = Path(__file__).resolve().parent.parent


@dataclass(frozen=True)
class Limits:
    """What a client may ask for."""

    body_bytes: int = 1 << 20
    examples: int = 1024
    ids: int = 200_000
    seconds: float = 2.0
    """For a body to come, and from then on for its answer."""
    running: int = 2
    """Requests that are scored at once, a thread each."""
    waiting: int = 32
    """Requests that wait for one of these, or whose body is still to come."""


class Metrics:
    """Figures in Prometheus' format; of all workers where there are several."""

    def __init__(self) -> None:
        self.registry = registry = CollectorRegistry()
        self.requests = Counter("oneemb_requests", "Requests answered.", ["path", "status"], registry=registry)
        self.seconds = Histogram(
            "oneemb_request_seconds", "From a request's head to the end of its answer.", ["path"], registry=registry,
            buckets=[0.0005 * 2**k for k in range(14)],
        )  # fmt: skip
        self.examples = Counter("oneemb_examples", "Examples scored.", registry=registry)
        self.ids = Counter("oneemb_ids", "Ids looked up.", registry=registry)
        self.taken = Counter("oneemb_versions_taken", "Versions taken over.", registry=registry)
        self.errors = Counter("oneemb_errors", "What went wrong, by where.", ["where"], registry=registry)
        for where in ("version", "score"):
            self.errors.labels(where)
        mode: Any = "livemin"  # the oldest that a worker serves
        self.sequence = Gauge(
            "oneemb_version", "Sequence of the snapshot served.", registry=registry, multiprocess_mode=mode
        )
        self.saved_at = Gauge(
            "oneemb_version_saved_seconds", "When the version served was saved, since 1970.", registry=registry,
            multiprocess_mode=mode,
        )  # fmt: skip

    def note(self, model: oneemb.ServedModel) -> None:
        """Count a version that a model has taken over, or has not."""
        if model.error is not None:
            self.errors.labels("version").inc()
            return
        self.taken.inc()
        self.sequence.set(snapshot_of(model.current).sequence)
        self.saved_at.set(model.current.saved_at)

    def text(self) -> bytes:
        if WORKER_FOLDER not in os.environ:
            return generate_latest(self.registry)
        every = CollectorRegistry()
        MultiProcessCollector(every)
        return generate_latest(every)


def snapshot_of(version: oneemb.ModelVersion) -> Version:
    """The snapshot of the model's only embedding."""
    (snapshot,) = version.snapshots.values()
    return snapshot


class ScoreServer:
    """The application: routes, limits, following.

    Args:
        follow_seconds: between two looks at the checkpoint; None = only `SIGHUP` and `reload` take over another.
    """

    def __init__(
        self, model: oneemb.ServedModel, dtype: str, metrics: Metrics, limits: Limits, follow_seconds: float | None
    ):
        self.model, self.dtype, self.metrics, self.limits = model, dtype, metrics, limits
        self._follow_seconds = follow_seconds
        # Each thread sets it for itself: a thread whose first op is a matrix product would use all cores otherwise.
        self._pool = ThreadPoolExecutor(
            limits.running, thread_name_prefix="score", initializer=torch.set_num_threads, initargs=(1,)
        )
        self._loader = ThreadPoolExecutor(1, thread_name_prefix="load")  # of its own: a load waits for no request
        self._places = threading.BoundedSemaphore(limits.running + limits.waiting)
        routes = [
            Route("/score", self.score, methods=["POST"]),
            Route("/health", self.health),
            Route("/metrics", self.figures),
        ]
        self.app: ASGIApp = Counted(Starlette(routes=routes, lifespan=self._lifespan), metrics)

    @contextlib.asynccontextmanager
    async def _lifespan(self, _: Starlette) -> AsyncIterator[None]:
        if threading.current_thread() is threading.main_thread():
            asyncio.get_running_loop().add_signal_handler(signal.SIGHUP, lambda: self._loader.submit(self.reload))
        if self._follow_seconds is not None:
            self.model.follow(self._follow_seconds)
        yield
        self.model.unfollow()
        self._loader.shutdown(wait=False, cancel_futures=True)
        self._pool.shutdown(wait=False, cancel_futures=True)

    def reload(self) -> bool:
        """Take over what the checkpoint names, older or newer."""
        try:
            return self.model.refresh(older=True)
        except Exception as error:  # What serves goes on.
            logger.warning("%s", error)
            return False

    # ---- requests ---------------------------------------------------------------------------------------------------

    async def score(self, request: Request) -> Response:
        if not self._places.acquire(blocking=False):
            return _answer(503, {"error": "too many requests wait; try again"}, retry=True)
        with contextlib.ExitStack() as place:  # given back here, or by the job that takes it over
            place.callback(self._places.release)
            try:
                async with asyncio.timeout(self.limits.seconds):
                    body = await self._body(request)
            except TimeoutError:
                what = f"the body must be here within {self.limits.seconds} s"
                return _answer(408, {"error": what})
            except Refused as refused:
                return _answer(refused.status, {"error": str(refused)})
            except ClientDisconnect:
                return Response(status_code=499)  # to nobody: for the figures
            job: Future[tuple[int, bytes]] = self._pool.submit(self._score, body)
            kept = place.pop_all()
            job.add_done_callback(lambda _: kept.close())  # A job that is late has its place until it ends.
        try:
            async with asyncio.timeout(self.limits.seconds):
                status, content = await asyncio.wrap_future(job)
        except TimeoutError:
            if job.cancel():
                return _answer(503, {"error": f"no thread was free for {self.limits.seconds} s"}, retry=True)
            return _answer(504, {"error": f"there are no scores after {self.limits.seconds} s"})
        return Response(content, status, media_type="application/json", headers=_retry(status == 503))

    async def _body(self, request: Request) -> bytes:
        most = self.limits.body_bytes
        told = request.headers.get("content-length", "")
        body = bytearray()
        if told.isdecimal() and int(told[:19]) > most:
            raise Refused(413, f"a body may have {most} bytes, this one is said to have {told[:19]}")
        async for part in request.stream():
            body += part
            if len(body) > most:
                raise Refused(413, f"a body may have {most} bytes, this one has more")
        return bytes(body)

    def _score(self, body: bytes) -> tuple[int, bytes]:
        """Status and content of the answer. Runs in a thread of the pool."""
        limits = self.limits
        try:
            version = self.model.current
        except oneemb.StorageError as error:
            return 503, _json({"error": str(error)})
        try:
            scorer = scorer_of(version)
            numeric_BX, id_BL = parse(
                body, scorer.numbers, scorer.ids, examples_max=limits.examples, ids_max=limits.ids
            )  # fmt: skip
            scores = scorer.score(numeric_BX, id_BL)
            if not all(map(math.isfinite, scores)):
                raise Refused(422, "numbers must be of a size that the model knows: scores are not finite")
        except Refused as refused:
            return refused.status, _json({"error": str(refused)})
        except oneemb.StorageError as error:  # A block of rows is damaged.
            logger.error("%s", error)
            self.metrics.errors.labels("score").inc()
            return 503, _json({"error": "rows of this version are damaged"})
        self.metrics.examples.inc(len(scores))
        self.metrics.ids.inc(id_BL.size)
        return 200, _json({"version": snapshot_of(version)._asdict(), "scores": scores})

    async def health(self, _: Request) -> Response:
        error = None if self.model.error is None else str(self.model.error)
        try:
            version = self.model.current
        except oneemb.StorageError:
            return _answer(503, {"status": "starting", "error": error}, retry=True)
        scorer = scorer_of(version)
        found = {
            "status": "ok" if error is None else "stale",
            "version": snapshot_of(version)._asdict(),
            "age_seconds": max(0.0, time.time() - version.saved_at),
            "dtype": self.dtype,
            "numbers": scorer.numbers,
            "fields": [[field.name, field.width] for field in scorer.fields],
            "error": error,
        }
        return _answer(200, found)

    async def figures(self, _: Request) -> Response:
        return Response(self.metrics.text(), headers={"content-type": CONTENT_TYPE_LATEST})


class Counted:
    """An application whose requests are counted and timed. Who has sent a body that was not read has to go: nothing
    reads on for the sake of the next request."""

    def __init__(self, app: ASGIApp, metrics: Metrics):
        self._app, self._metrics = app, metrics

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return await self._app(scope, receive, send)
        path = scope["path"] if scope["path"] in ("/score", "/health", "/metrics") else "other"
        begin, status = time.perf_counter(), "none"  # as it stays where the server ends first
        heads = dict(scope["headers"])
        unread = b"transfer-encoding" in heads or heads.get(b"content-length", b"0") != b"0"

        async def received() -> Message:
            nonlocal unread
            message = await receive()
            unread = unread and message.get("more_body", False)
            return message

        async def counted(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = str(message["status"])
                if unread:
                    message["headers"] = [*message["headers"], (b"connection", b"close")]
            await send(message)

        try:
            await self._app(scope, received, counted)
        finally:
            self._metrics.requests.labels(path, status).inc()
            self._metrics.seconds.labels(path).observe(time.perf_counter() - begin)


class Connection(H11Protocol):
    """A connection whose client may close its half when it has sent its requests: those that are whole are answered.

    The head is read by h11 whatever else is installed: httptools takes heads of any length.
    """

    ended = False

    def eof_received(self) -> bool:  # type: ignore[override]  # asyncio asks whether the connection stays
        self.ended = True
        return self._owes_answer()

    def on_response_complete(self) -> None:
        super().on_response_complete()  # which begins with the next request, if it is there
        if self.ended and not self._owes_answer():
            self.transport.close()

    def _owes_answer(self) -> bool:
        cycle = self.cycle
        return cycle is not None and not cycle.more_body and not cycle.response_complete


def _json(found: object) -> bytes:
    return json.dumps(found).encode()  # ASCII: half a surrogate that a client sent would not be UTF-8


def _answer(status: int, found: object, *, retry: bool = False) -> Response:
    return Response(_json(found), status, media_type="application/json", headers=_retry(retry))


def _retry(retry: bool) -> dict[str, str]:
    return {"retry-after": "1"} if retry else {}


# ---- processes ------------------------------------------------------------------------------------------------------


def main(argv: list[str] | None = None) -> None:
    """Run the script."""
    arguments = parse_arguments(argv)
    signal.signal(signal.SIGHUP, signal.SIG_IGN)  # until there is a version to leave
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(process)d %(name)s: %(message)s")
    if arguments.fd is not None:
        end_with_parent(arguments.parent)
        return serve(arguments, socket.socket(fileno=arguments.fd))
    listening = socket.create_server((arguments.host, arguments.port), backlog=128)
    # Connections have it from here: a body that waits for the acknowledgement of its head is 40 ms late.
    listening.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    host, port = listening.getsockname()[:2]
    print(f"serves http://{host}:{port}", flush=True)
    if arguments.workers == 1:
        return serve(arguments, listening)
    given = [__file__, *(argv if argv is not None else sys.argv[1:])]
    run_workers(given, listening, arguments.workers, patience=2 * arguments.seconds + 5)


def serve(arguments: argparse.Namespace, listening: socket.socket) -> None:
    """Serve in this process until SIGTERM."""
    torch.set_num_threads(1)  # as the job: a sum's bits depend on how many share it
    limits = Limits(
        arguments.body_bytes, arguments.examples, arguments.ids, arguments.seconds, arguments.running, arguments.waiting
    )
    metrics = Metrics()
    model = load(arguments.workdir, arguments.dtype, num_threads=1, missing_ok=True, on_change=metrics.note)
    server = ScoreServer(model, arguments.dtype, metrics, limits, arguments.follow or None)
    config = uvicorn.Config(
        server.app, log_level="warning", access_log=False, limit_concurrency=arguments.connections, backlog=128,
        timeout_graceful_shutdown=math.ceil(2 * arguments.seconds) + 1, timeout_keep_alive=30, lifespan="on",
        server_header=False,
        http=Connection, ws="none",
    )  # fmt: skip
    # uvicorn raises it again when all is answered. A load that is under way is not waited for: it leaves nothing that
    # the next one minds.
    signal.signal(signal.SIGTERM, lambda *_: os._exit(0))
    uvicorn.Server(config).run(sockets=[listening])


def parse_arguments(argv: list[str] | None) -> argparse.Namespace:
    its = Limits()
    parser = argparse.ArgumentParser(description="Serve the demo's click model over HTTP.")
    parser.add_argument("--workdir", type=Path, default=REPOSITORY / "build/kuairand", help="of kuairand_dlrm.py")
    parser.add_argument("--dtype", choices=DTYPES, default="float32", help="of the rows")
    parser.add_argument("--host", default="127.0.0.1")
    parser.add_argument("--port", type=int, default=8000, help="0 = any that is free; it is printed")
    parser.add_argument("--workers", type=int, default=1, help="processes, which share one map of the rows")
    parser.add_argument(
        "--follow", type=float, default=1.0, metavar="SECONDS", help="between looks; 0 = on SIGHUP only"
    )
    parser.add_argument("--body-bytes", type=int, default=its.body_bytes, help="of a request at most")
    parser.add_argument("--examples", type=int, default=its.examples, help="of a request at most")
    parser.add_argument("--ids", type=int, default=its.ids, help="of a request at most")
    parser.add_argument("--seconds", type=float, default=its.seconds, help="for a body, and for its answer")
    parser.add_argument("--running", type=int, default=its.running, help="requests scored at once, by a worker")
    parser.add_argument("--waiting", type=int, default=its.waiting, help="requests that wait, of a worker")
    parser.add_argument("--connections", type=int, default=512, help="open at once, of a worker")
    parser.add_argument("--fd", type=int, help=argparse.SUPPRESS)  # the socket, where this is a worker
    parser.add_argument("--parent", type=int, help=argparse.SUPPRESS)
    return parser.parse_args(argv)


if __name__ == "__main__":
    main()
