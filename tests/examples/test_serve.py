"""The example server: its answers against the job's own, reloads under load, limits, hostile clients, signals."""

import contextlib
import dataclasses
import http.client
import json
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
import types

import kuairand_dlrm as script
import numpy as np
import pytest
import serve
import served_model
import torch
import uvicorn
from hypothesis import given, strategies as st
from prometheus_client.parser import text_string_to_metric_families
from uvicorn.protocols.http.h11_impl import H11Protocol

from tests.support.served_job import EXAMPLES, Client, body_of, first_examples, noted

ARGUMENTS = ["--generate", "2000", "--batch-size", "64", "--epochs", "1", "--store", "device", "--save-every", "7"]


@dataclasses.dataclass
class Version:
    name: str
    checkpoint: bytes
    answers: list


@dataclasses.dataclass
class Job:
    folder: object
    probes: list
    versions: list

    @property
    def bodies(self):
        return [body_of(probe) for probe in self.probes]


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    """A job that is done, and what its versions whose snapshots are there must answer."""
    folder = tmp_path_factory.mktemp("job")
    arguments = script.parse([*ARGUMENTS, "--workdir", str(folder)])
    log = script.load(arguments)
    probes, answers, checkpoints = first_examples(log, arguments, 3, 8), {}, {}
    real = script.save_checkpoint

    def keep(path, state):
        real(path, state)
        checkpoints[next(reversed(answers))] = path.read_bytes()

    script.save_checkpoint = keep
    try:
        with noted(probes, log.fields, answers.__setitem__):
            script.run(arguments, log)
    finally:
        script.save_checkpoint = real
    there = [name.removesuffix(".snapshot") for name in os.listdir(folder / script.TABLES / "snapshots")]
    versions = [Version(name, checkpoints[name], answers[name]) for name in answers if name in there]
    assert len(versions) == script.KEPT + 1
    return Job(folder, probes, versions)


@pytest.fixture
def job(finished, tmp_path):
    """A copy of it whose checkpoint is the oldest one."""
    folder = shutil.copytree(finished.folder, tmp_path / "job", ignore=shutil.ignore_patterns("serving"))
    copy = Job(folder, finished.probes, finished.versions)
    put(copy, 0)
    return copy


def put(job, version, change=lambda path: None):
    """Make this version's checkpoint the job's, as the job does."""
    temporary = job.folder / "checkpoint.tmp"
    temporary.write_bytes(job.versions[version].checkpoint)
    change(temporary)
    os.replace(temporary, job.folder / "checkpoint.pt")


@contextlib.contextmanager
def serving(job, dtype="float32", follow=None, **limits):
    """(port, server) of a server in a thread."""
    metrics = serve.Metrics()
    its = serve.Limits(**{"seconds": 20.0, **limits})
    model = served_model.load(job.folder, dtype, num_threads=1, missing_ok=True, on_change=metrics.note)
    server = serve.ScoreServer(model, dtype, metrics, its, follow)
    listening = socket.create_server(("127.0.0.1", 0))
    its = uvicorn.Server(uvicorn.Config(server.app, log_level="warning", timeout_graceful_shutdown=5, lifespan="on"))
    thread = threading.Thread(target=its.run, kwargs={"sockets": [listening]})
    thread.start()
    try:
        wait_until(lambda: its.started)
        yield listening.getsockname()[1], server
    finally:
        its.should_exit = True
        thread.join()
        model.close()


@contextlib.contextmanager
def client_of(port):
    client = Client(port)
    try:
        yield client
    finally:
        client.close()


def wait_until(said, seconds=60):
    """What `said()` gives as soon as it is true."""
    end = time.monotonic() + seconds
    while not (found := said()):
        assert time.monotonic() < end, "it never came"
        time.sleep(0.01)
    return found


def figures(client):
    """{(name, labels): value} of /metrics, by Prometheus' own parser."""
    status, headers, content = client.ask("GET", "/metrics")
    assert status == 200 and headers["content-type"].startswith("text/plain")
    found = {}
    for family in text_string_to_metric_families(content.decode()):
        for sample in family.samples:
            found[(sample.name, *sorted(sample.labels.values()))] = sample.value
    return found


def health(client):
    status, _, content = client.ask("GET", "/health")
    return status, json.loads(content)


# ---- answers and versions --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", ["float32", "int8"])
def test_answers_are_those_of_the_job_itself(job, dtype):
    put(job, -1)
    version = job.versions[-1]
    with serving(job, dtype) as (port, _), client_of(port) as client:
        for body, want in zip(job.bodies, version.answers, strict=True):
            status, answer = client.score(body)
            assert status == 200 and answer["version"]["name"] == version.name
            if dtype == "float32":
                assert answer["scores"] == want["float32"]  # bit for bit
            else:
                assert answer["scores"] == pytest.approx(want["int8"], abs=1e-6) != want["float32"]
        status, its = health(client)
        assert status == 200 and its["status"] == "ok" and its["dtype"] == dtype and its["error"] is None
        assert its["version"] == answer["version"] and 0 <= its["age_seconds"] < 600
        assert sum(width for _, width in its["fields"]) == job.probes[0][1].shape[1]


def test_versions_are_taken_over_under_load_and_each_answer_is_of_the_one_it_announces(job):
    want = {version.name: version.answers for version in job.versions}
    ends, wrong, seen = threading.Event(), [], set()

    def load(port, first):
        sequence, count = 0, first
        with client_of(port) as client:
            while not (ends.is_set() or len(wrong) > 3):
                probe, count = count % len(job.probes), count + 1
                status, answer = client.score(job.bodies[probe])
                right = status == 200 and answer["scores"] == want[answer["version"]["name"]][probe]["float32"]
                if not right or answer["version"]["sequence"] < sequence:
                    wrong.append((status, answer))
                else:
                    sequence = answer["version"]["sequence"]
                    seen.add(answer["version"]["name"])

    with serving(job, follow=0.01) as (port, _), client_of(port) as client:
        threads = [threading.Thread(target=load, args=(port, n)) for n in range(3)]
        for thread in threads:
            thread.start()
        for v, version in enumerate(job.versions):
            if v:  # the first one serves already
                put(job, v)
            wait_until(lambda name=version.name: name in seen or wrong)
        ends.set()
        for thread in threads:
            thread.join()
        assert not wrong and seen == set(want)
        found = figures(client)
        assert found["oneemb_versions_taken_total",] == len(job.versions)
        answered = found["oneemb_requests_total", "/score", "200"]
        assert found["oneemb_request_seconds_count", "/score"] == answered
        assert found["oneemb_examples_total",] == 8 * answered
        assert found["oneemb_ids_total",] == 8 * answered * job.probes[0][1].shape[1]
        assert found["oneemb_version",] == health(client)[1]["version"]["sequence"]
        assert found["oneemb_errors_total", "version"] == found["oneemb_errors_total", "score"] == 0


def damage_snapshot(job, version):
    path = job.folder / script.TABLES / "snapshots" / f"{job.versions[version].name}.snapshot"
    good = path.read_bytes()
    path.write_bytes(good[:100] + bytes([good[100] ^ 1]) + good[101:])
    put(job, version)
    return lambda: path.write_bytes(good)


def remove_snapshot(job, version):
    path = job.folder / script.TABLES / "snapshots" / f"{job.versions[version].name}.snapshot"
    away = path.rename(job.folder / "away")
    put(job, version)
    return lambda: away.rename(path)


def cut_checkpoint(job, version):
    put(job, version, lambda path: path.write_bytes(path.read_bytes()[:3000]))
    return lambda: put(job, version)


def flip_weights(job, version):
    def change(path):
        weights = torch.load(path)["model"]["top.layers.0.weight"].numpy().tobytes()
        data = bytearray(path.read_bytes())
        data[data.index(weights) + 3] ^= 1
        path.write_bytes(bytes(data))

    put(job, version, change)
    return lambda: put(job, version)


def spoil_weights(job, version):
    def change(path):
        state = torch.load(path)
        state["model"]["top.layers.0.weight"].fill_(torch.nan)
        torch.save(state, path)

    put(job, version, change)
    return lambda: put(job, version)


def replace_snapshot(job, version):
    """By that of another run: its name is the same."""

    def change(path):
        state, name = torch.load(path), "lookup.embedding._extra_state"
        other = bytes(state["model"][name].tolist()).replace(b'identity": "', b'identity": "0')[:1024]
        state["model"][name] = torch.frombuffer(bytearray(other), dtype=torch.uint8)
        torch.save(state, path)

    put(job, version, change)
    return lambda: put(job, version)


@pytest.mark.parametrize(
    ("harm", "says"),
    [
        (remove_snapshot, "no snapshot named"),
        (damage_snapshot, "checksum"),
        (cut_checkpoint, "damaged"),
        (flip_weights, "is damaged: the checksum of .* is wrong"),
        (spoil_weights, "(step|epoch)-[0-9]+.*, give no finite score"),
        (replace_snapshot, "it was replaced, or is of another run"),
    ],
)
def test_what_cannot_be_taken_over_leaves_the_version_that_serves_and_is_told(job, harm, says):
    with serving(job, follow=0.01) as (port, _), client_of(port) as client:
        mend = harm(job, 1)
        told = wait_until(lambda: (its := health(client)[1])["status"] == "stale" and its)
        assert re.search(says, told["error"]) and told["version"]["name"] == job.versions[0].name
        status, answer = client.score(job.bodies[0])
        assert status == 200 and answer["scores"] == job.versions[0].answers[0]["float32"]
        assert figures(client)["oneemb_errors_total", "version"] >= 1
        mend()
        wait_until(lambda: health(client)[1]["version"]["name"] == job.versions[1].name)
        assert client.score(job.bodies[0])[1]["scores"] == job.versions[1].answers[0]["float32"]
        assert health(client)[1]["status"] == "ok"


def test_following_goes_forward_alone_and_a_reload_takes_what_is_there(job):
    put(job, 1)
    with serving(job, follow=0.01) as (port, server), client_of(port) as client:
        put(job, 0)
        told = wait_until(lambda: (its := health(client)[1])["status"] == "stale" and its)
        assert "older than" in told["error"] and told["version"]["name"] == job.versions[1].name
        assert server.reload()
        status, its = health(client)
        assert its["status"] == "ok" and its["version"]["name"] == job.versions[0].name


def test_a_server_waits_for_the_first_checkpoint(job):
    (job.folder / "checkpoint.pt").rename(job.folder / "later")
    with serving(job, follow=0.01) as (port, _), client_of(port) as client:
        status, its = health(client)
        assert status == 503 and its["status"] == "starting" and "No such file" in its["error"]
        status, headers, content = client.ask("POST", "/score", job.bodies[0])
        assert status == 503 and headers["retry-after"] and b"no version serves yet" in content
        put(job, 0)
        wait_until(lambda: health(client)[0] == 200)
        assert client.score(job.bodies[0])[0] == 200


# ---- what clients may not do -----------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def small(finished):
    """(port, job) of a server with low limits."""
    with serving(finished, body_bytes=20_000, examples=10, ids=900) as (port, _):
        yield port, finished


def example(job, numbers=None, ids=None, count=1):
    """A request's object, with a value here and there."""
    numeric_BX, id_BL = job.probes[0]
    found = {"numbers": numeric_BX[:count].tolist(), "ids": id_BL[:count].tolist()}
    if numbers is not None:
        found["numbers"][0][2] = numbers
    if ids is not None:
        found["ids"][0][2] = ids
    return found


DEEP = "[" * 9000 + "]" * 9000
BODIES = {
    "nothing": (b"", 400, "JSON"),
    "no JSON": (b"{'numbers'}", 400, "JSON"),
    "two values": (b"{} {}", 400, "JSON"),
    "UTF-8": (b'{"numbers": "\xff"}', 400, "UTF-8; byte 13"),
    "UTF-16": ('{"numbers": [], "ids": []}'.encode("utf-16"), 400, "UTF-8"),
    "deep": (DEEP.encode(), 400, "deeper"),
    "deep inside": (b'{"numbers": ' + DEEP.encode() + b', "ids": []}', 400, "deeper"),
    "digits": (b'{"numbers": [[' + b"9" * 9000 + b"]]}", 400, "digits"),
    "a list": ([1], 422, "object"),
    "a name more": ({"numbers": [[1]], "ids": [[1]], "\ud800": 1}, 422, "and no more"),
    "a name less": ({"numbers": [[1]]}, 422, "and no more"),
    "no lists": ({"numbers": 5, "ids": None}, 422, "numbers must be a list"),
    "no examples": ({"numbers": [], "ids": []}, 422, "must be a list"),
    "flat": ({"numbers": [1.0], "ids": [1]}, 422, "lists of 6"),
    "a number less": (lambda job: example(job) | {"numbers": [[1.0] * 5]}, 422, "lists of 6 finite numbers each"),
    "an id more": (lambda job: example(job) | {"ids": [[1] * 999]}, 422, "a list of 999"),
    "lengths": (lambda job: example(job) | {"ids": example(job, count=2)["ids"]}, 422, "got 1 and 2"),
    "text": (lambda job: example(job, "1.5"), 422, r'got "1.5" at [0][2]'),
    "half a surrogate": (lambda job: example(job, "\ud800"), 422, r"\ud800"),
    "true": (lambda job: example(job, ids=True), 422, "integers, got true"),
    "null": (lambda job: example(job, ids=[None]), 422, "a list of 1"),
    "a fraction as an id": (lambda job: example(job, ids=1.0), 422, "got 1.0 at [0][2]"),
    "NaN": (lambda job: example(job, float("nan")), 422, "got NaN"),
    "infinity": (lambda job: example(job, float("-inf")), 422, "got -Infinity"),
    "beyond float64": (
        lambda job: json.dumps(example(job, 0.7734)).replace("0.7734", "1e999").encode(),
        422,
        "got inf at [0]",
    ),
    "beyond float32": (lambda job: example(job, 1e39), 422, "float32, got 1e+39"),
    "beyond all floats": (lambda job: example(job, 10**400), 422, "far beyond"),
    "beyond the model": (lambda job: {**example(job), "numbers": [[3e38] * 6]}, 422, "scores are not finite"),
    "2^63": (lambda job: example(job, ids=2**63), 422, "int64, from -2^63 to 2^63 - 1, got 9223372036854775808"),
    "-2^63 - 1": (lambda job: example(job, ids=-(2**63) - 1), 422, "int64"),
    "a vast id": (lambda job: example(job, ids=10**2000), 422, "an integer of 6644 bits"),
    "examples": ({"numbers": [[]] * 11, "ids": [[]] * 11}, 413, "10 examples"),
    "ids": (lambda job: {"numbers": [[]] * 10, "ids": [[]] * 10}, 413, "900 ids"),
}


@pytest.mark.parametrize("name", BODIES)
def test_a_wrong_body_is_refused_with_what_must_hold(small, name):
    port, job = small
    body, status, says = BODIES[name]
    body = body(job) if callable(body) else body
    with client_of(port) as client:
        got, answer = client.score(body if isinstance(body, bytes) else json.dumps(body).encode())
        assert got == status and says in answer["error"] and len(answer["error"]) < 400, answer
        assert client.score(job.bodies[0])[0] == 200


SHAPES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=3),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.sampled_from(["numbers", "ids"]), inner),
    max_leaves=12,
)
NEARLY = st.fixed_dictionaries({
    "numbers": st.lists(st.lists(st.floats() | st.integers(-(10**40), 10**40), min_size=1, max_size=2), max_size=3),
    "ids": st.lists(st.lists(st.integers(-(2**64), 2**64), min_size=2, max_size=2), max_size=3),
})  # fmt: skip


@given(st.binary() | (SHAPES | NEARLY).map(lambda found: json.dumps(found).encode()))
def test_any_body_is_taken_whole_or_refused(body):
    try:
        numeric_BX, id_BL = served_model.parse(body, 2, 2, examples_max=2, ids_max=8)
    except served_model.Refused as refused:
        assert refused.status in (400, 413, 422) and str(refused).isascii()
    else:
        found = json.loads(body)
        assert id_BL.tolist() == found["ids"] and numeric_BX.shape == (len(id_BL), 2)
        assert numeric_BX.tolist() == np.array(found["numbers"], np.float32).tolist()


def test_the_smallest_and_the_largest_id_are_ids(small):
    port, job = small
    with client_of(port) as client:
        for id in (-(2**63), 2**63 - 1, 0, -1):
            status, answer = client.score(json.dumps(example(job, ids=id)).encode())
            assert status == 200 and len(answer["scores"]) == 1


def test_other_paths_and_methods_are_refused(small):
    port, _ = small
    with client_of(port) as client:
        assert client.ask("GET", "/score")[0] == 405
        assert client.ask("POST", "/health", b"")[0] == 405
        assert client.ask("GET", "/" + "x" * 500)[0] == 404
        assert figures(client)["oneemb_requests_total", "404", "other"] == 1


def raw(port, head, *parts):
    """(status, bytes) of the answer to what is sent as it is; the connection ends then."""
    with socket.create_connection(("127.0.0.1", port), timeout=30) as connection:
        for part in (head, *parts):
            connection.sendall(part)
        answer = http.client.HTTPResponse(connection)
        answer.begin()
        return answer.status, answer.read(), connection.recv(1)


def test_no_more_of_a_body_is_read_than_is_allowed(small):
    port, _ = small
    # What is said to be too long is refused before it comes, and before the client is told to go on.
    head = b"POST /score HTTP/1.1\r\nHost: a\r\nExpect: 100-continue\r\nContent-Length: 20001\r\n\r\n"
    assert raw(port, head)[::2] == (413, b"")
    head = b"POST /score HTTP/1.1\r\nHost: a\r\nContent-Length: " + b"9" * 30 + b"\r\n\r\n"
    assert raw(port, head)[0] in (400, 413)
    # And what does not say so, as soon as it is: the last part is never sent.
    head = b"POST /score HTTP/1.1\r\nHost: a\r\nTransfer-Encoding: chunked\r\n\r\n"
    status, content, rest = raw(port, head, *[b"3e8\r\n" + b" " * 1000 + b"\r\n"] * 21)
    assert status == 413 and b"has more" in content and rest == b""
    # Nor is one that nobody asked for.
    for line in (b"POST /nowhere", b"GET /health", b"GET /score"):
        head = line + b" HTTP/1.1\r\nHost: a\r\nContent-Length: 99\r\n\r\n"
        assert raw(port, head)[2] == b""


def test_heads_are_read_by_what_bounds_them_whatever_is_installed(job, monkeypatch):
    configs = []

    class Server(uvicorn.Server):
        def run(self, sockets):
            configs.append(self.config)

    monkeypatch.setattr(uvicorn, "Server", Server)
    monkeypatch.setitem(sys.modules, "httptools", types.ModuleType("httptools"))
    before = signal.getsignal(signal.SIGTERM)
    try:
        with socket.create_server(("127.0.0.1", 0)) as listening:
            serve.serve(serve.parse_arguments(["--workdir", str(job.folder)]), listening)
    finally:
        signal.signal(signal.SIGTERM, before)
    configs[0].load()
    assert issubclass(configs[0].http_protocol_class, H11Protocol) and configs[0].ws_protocol_class is None


def test_a_body_that_does_not_come_is_waited_for_so_long_alone(job):
    with serving(job, seconds=0.2, running=1, waiting=0) as (port, _), client_of(port) as client:
        status, content, rest = raw(port, b"POST /score HTTP/1.1\r\nHost: a\r\nContent-Length: 100\r\n\r\n{")
        assert status == 408 and b"0.2 s" in content and rest == b""
        wait_until(lambda: client.score(job.bodies[0])[0] == 200)  # its place is free


@pytest.fixture
def held(monkeypatch):
    """(begun, goes_on): a semaphore that tells of each scoring that has begun, an event that lets them go on."""
    begun, goes_on = threading.Semaphore(0), threading.Event()
    real = served_model.Scorer.score

    def score(scorer, *arguments):
        begun.release()
        goes_on.wait()
        return real(scorer, *arguments)

    # Not before a server has tried its version.
    yield begun, goes_on, lambda: monkeypatch.setattr(served_model.Scorer, "score", score)
    goes_on.set()


@contextlib.contextmanager
def waiting_for_its_body(port, body):
    """A connection whose request is in the server; what is yielded sends the body and gives the status."""
    with socket.create_connection(("127.0.0.1", port), timeout=30) as connection:
        head = f"POST /score HTTP/1.1\r\nHost: a\r\nExpect: 100-continue\r\nContent-Length: {len(body)}\r\n\r\n"
        connection.sendall(head.encode())
        assert connection.recv(100).startswith(b"HTTP/1.1 100")

        def go_on():
            connection.sendall(body)
            answer = http.client.HTTPResponse(connection)
            answer.begin()
            return answer.status, answer.read()

        yield go_on


def test_more_requests_than_may_wait_are_sent_away_and_the_others_are_answered(job, held):
    begun, goes_on, hold = held
    found = []
    with serving(job, running=1, waiting=1) as (port, _), client_of(port) as client:
        hold()

        def ask():
            with client_of(port) as its:
                found.append(its.score(job.bodies[0])[0])

        first = threading.Thread(target=ask)
        first.start()
        begun.acquire()  # the only thread is at work, ...
        with waiting_for_its_body(port, job.bodies[0]) as go_on:  # ... and one waits
            status, headers, content = client.ask("POST", "/score", job.bodies[0])
            assert status == 503 and headers["retry-after"] == "1" and b"too many" in content
            assert health(client)[0] == 200  # nobody waits for the pool here
            goes_on.set()
            assert go_on()[0] == 200
        first.join()
        assert found == [200]


def test_late_answers_are_told_and_give_their_places_back(job, held):
    begun, goes_on, hold = held
    with serving(job, seconds=3.0, running=1, waiting=1) as (port, _), client_of(port) as client:
        hold()
        assert client.score(job.bodies[0])[0] == 504
        begun.acquire()  # and it still has its thread and its place
        status, headers, content = client.ask("POST", "/score", job.bodies[0])
        assert status == 503 and headers["retry-after"] == "1" and b"no thread was free" in content
        assert not begun.acquire(blocking=False)  # it was never begun, and its place is free:
        assert b"no thread was free" in client.ask("POST", "/score", job.bodies[0])[2]
        goes_on.set()
        wait_until(lambda: client.score(job.bodies[0])[0] == 200)
        assert figures(client)["oneemb_requests_total", "/score", "504"] >= 1


def test_a_client_that_leaves_is_no_error(job):
    with serving(job, running=1, waiting=0) as (port, _), client_of(port) as client:
        with waiting_for_its_body(port, job.bodies[0]):
            pass
        wait_until(lambda: figures(client).get(("oneemb_requests_total", "/score", "499")))
        assert client.score(job.bodies[0])[0] == 200


# ---- processes -------------------------------------------------------------------------------------------------------


@contextlib.contextmanager
def process(job, *arguments):
    """(child, port) of a server of its own, which answers."""
    command = [sys.executable, EXAMPLES / "serve.py", "--port", "0", "--workdir", job.folder, "--follow", "0.05"]
    child = subprocess.Popen([*command, *arguments], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    try:
        port = int(child.stdout.readline().rsplit(":", 1)[1])
        with client_of(port) as client:
            assert health(client)[0] == 200
        yield child, port
    finally:
        child.kill()
        child.communicate()


def test_connections_send_what_they_have_without_waiting_for_acknowledgements(job, monkeypatch):
    found = []

    def accept(server, sockets):
        with socket.create_connection(sockets[0].getsockname()), sockets[0].accept()[0] as accepted:
            found.append(accepted.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY))
        sockets[0].close()

    monkeypatch.setattr(uvicorn.Server, "run", accept)
    before = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGHUP)}
    try:
        serve.main(["--port", "0", "--workdir", str(job.folder)])
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
    assert found and found[0] != 0


def all_of(port, *parts):
    """The statuses that come until the server closes, where the client has closed its half before."""
    with socket.create_connection(("127.0.0.1", port), timeout=30) as connection:
        for part in parts:
            connection.sendall(part)
        connection.shutdown(socket.SHUT_WR)
        said = b"".join(iter(lambda: connection.recv(1 << 16), b""))
    return re.findall(rb"HTTP/1.1 (\d+)", said)


def test_a_client_that_closes_its_half_has_answers_to_what_it_has_asked(job):
    body = job.bodies[0]
    request = b"POST /score HTTP/1.1\r\nHost: a\r\nContent-Length: %d\r\n\r\n" % len(body) + body
    with process(job) as (child, port):
        assert all_of(port, request) == [b"200"]
        assert all_of(port, request, b"GET /health HTTP/1.1\r\nHost: a\r\n\r\n", request) == [b"200"] * 3
        assert all_of(port, request, request[:-1]) == [b"200"]  # what can never be whole is not waited for
        assert all_of(port, request[:-1]) == all_of(port, request[:20]) == all_of(port) == []
        child.terminate()
        assert child.wait(600) == 0 and "Traceback" not in child.stderr.read()


def test_signals_reload_and_end_a_server_that_answers_what_it_has_begun(job):
    put(job, 1)
    body = job.bodies[0]
    with process(job, "--follow", "0") as (child, port), client_of(port) as client:
        put(job, 0)
        child.send_signal(signal.SIGHUP)
        wait_until(lambda: health(client)[1]["version"]["name"] == job.versions[0].name)
        with waiting_for_its_body(port, body) as go_on:  # the request is in the server
            child.send_signal(signal.SIGTERM)
            wait_until(lambda: refuses(port))
            status, content = go_on()
            assert status == 200
            assert json.loads(content)["scores"] == job.versions[0].answers[0]["float32"]
        assert child.wait(600) == 0
        assert "Traceback" not in child.stderr.read()


def refuses(port):
    try:
        socket.create_connection(("127.0.0.1", port)).close()
    except OSError:
        return True
    return False


def children_of(child):
    with open(f"/proc/{child.pid}/task/{child.pid}/children") as file:
        return [int(pid) for pid in file.read().split()]


def test_workers_share_a_port_and_figures_and_a_killed_one_is_replaced(job):
    with process(job, "--workers", "2") as (child, port):
        workers = children_of(child)
        assert len(workers) == 2

        def ask():  # a connection each: any worker may take it
            with client_of(port) as client:
                return client.score(job.bodies[0])

        assert all(ask()[1]["scores"] == job.versions[0].answers[0]["float32"] for _ in range(20))
        with client_of(port) as client:
            assert figures(client)["oneemb_requests_total", "/score", "200"] == 20
            both_serve = ("oneemb_versions_taken_total",)
            wait_until(lambda: figures(client)[both_serve] == 2)
        os.kill(workers[0], signal.SIGKILL)
        replaced = wait_until(lambda: len(its := children_of(child)) == 2 and workers[0] not in its and its)
        put(job, 1)
        child.send_signal(signal.SIGHUP)

        def serves():
            with client_of(port) as client:
                return figures(client)[("oneemb_version",)]

        wait_until(
            lambda: ask()[1]["version"]["name"] == job.versions[1].name and serves() == ask()[1]["version"]["sequence"]
        )
        child.kill()
        child.wait()
        wait_until(lambda: not any(os.path.exists(f"/proc/{pid}") for pid in replaced))
