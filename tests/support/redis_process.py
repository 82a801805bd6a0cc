"""Redis servers that a test starts on a free port and stops, and a way to one that breaks when it is told to."""

import contextlib
import shutil
import signal
import socket
import subprocess
import threading

import pytest
import redis

PATIENCE_S = 20


def need_redis():
    """Skip where there is no redis-server."""
    if shutil.which("redis-server") is None:
        pytest.skip("there is no redis-server: apt-get install redis-server")


def free_port():
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return listener.getsockname()[1]


class RedisProcess:
    """A redis-server on loopback whose files are in a folder.

    Args:
        options: what its command line has besides, as `maxmemory=2mb`.
        tls: whether `port` takes TLS only.
    """

    def __init__(self, folder, port=None, tls=False, password=None, **options):
        need_redis()
        self.folder, self.tls, self.password, self._process = folder, tls, password, None
        self._options = {
            "appendonly": "yes",
            "appendfsync": "always",
            "save": "",
            "repl_diskless_sync_delay": 0,
            **options,
        }
        if password is not None:
            self._options["requirepass"] = password
        folder.mkdir(exist_ok=True)
        for _ in range(5):  # another process may take the port between
            self.port = port or free_port()
            if self.start():
                return
        raise RuntimeError(f"redis-server does not start: {self.said}")

    @property
    def pid(self):
        return self._process.pid

    @property
    def host(self):
        return f"127.0.0.1:{self.port}"

    def start(self):
        """Whether it takes connections now."""
        ports = {"port": 0, "tls-port": self.port} if self.tls else {"port": self.port}
        options = {"bind": "127.0.0.1", "dir": self.folder, **ports, **self._options}
        words = [word for key, value in options.items() for word in (f"--{key.replace('_', '-')}", str(value))]
        self._process = subprocess.Popen(
            ["redis-server", *words], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
        )
        self.said = ""
        for line in self._process.stdout:
            self.said += line
            if "Ready to accept connections" in line:
                threading.Thread(target=self._process.stdout.read, daemon=True).start()
                return True
        self._process.wait()
        self._process.stdout.close()
        return False

    def kill(self):
        """As a loss of power, but for what is in the system's cache."""
        self._process.kill()
        self._process.wait()

    def pause(self):
        self._process.send_signal(signal.SIGSTOP)

    def resume(self):
        self._process.send_signal(signal.SIGCONT)

    def stop(self):
        if self._process.poll() is None:
            self.resume()
            self.kill()

    def admin(self):
        """A client of the test's own."""
        return redis.Redis(port=self.port, password=self.password, socket_timeout=PATIENCE_S)


@contextlib.contextmanager
def redis_process(folder, **options):
    server = RedisProcess(folder, **options)
    try:
        yield server
    finally:
        server.stop()


class Proxy:
    """Passes connections on to a port, and cuts one after some bytes of the server's answers when told to.

    `cut_after` bytes, counted over all connections from when it is set, come through, and not the next one: the
    connection that has it ends. With `stall_after` as many bytes come through of what is read at a time, and the rest
    never does. Requests wait while `let_through` is not set, even if who has sent them has given up since.
    """

    def __init__(self, port):
        self.cut_after = self.stall_after = None
        self.cuts = self.connections = 0
        self.let_through = threading.Event()
        self.let_through.set()
        self._port, self._open, self._lock = port, [], threading.Lock()
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port = self._listener.getsockname()[1]
        self._threads = [threading.Thread(target=self._accept)]
        self._threads[0].start()

    def close(self):
        _end(self._listener)
        self._threads[0].join()
        for end in self._open:
            _end(end)
        for thread in self._threads:
            thread.join()
        for end in [self._listener, *self._open]:  # not before: a number that is free may be another socket's soon
            end.close()

    def _accept(self):
        while True:
            try:
                near, _ = self._listener.accept()
            except OSError:
                return
            self.connections += 1
            self._open.append(near)
            try:
                far = socket.create_connection(("127.0.0.1", self._port))
            except OSError:
                _end(near)
                continue
            self._open.append(far)
            for end in (near, far):
                end.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            for ends in ((near, far, False), (far, near, True)):
                self._threads.append(threading.Thread(target=self._pass_on, args=ends))
                self._threads[-1].start()

    def _pass_on(self, source, target, answers):
        with contextlib.suppress(OSError):
            while data := source.recv(4096):
                if not answers:
                    self.let_through.wait(PATIENCE_S)
                passed = self._passed(data) if answers else data
                target.sendall(passed)
                if len(passed) < len(data):
                    break
        if self.stall_after is None:
            _end(source)
            _end(target)

    def _passed(self, data):
        """How much of an answer goes on."""
        with self._lock:
            if self.stall_after is not None:
                return data[: self.stall_after]
            if self.cut_after is None:
                return data
            self.cut_after -= len(data)
            if self.cut_after >= 0:
                return data
            size, self.cut_after = len(data) + self.cut_after, None
            self.cuts += 1
            return data[:size]


def _end(end):
    with contextlib.suppress(OSError):
        end.shutdown(socket.SHUT_RDWR)
