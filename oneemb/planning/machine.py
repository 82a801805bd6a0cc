"""Figures of a machine, such as bandwidths and times, for `oneemb.plan`; and how to measure those of this machine."""

import functools
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, fields, replace
from typing import Any

import numpy as np
import torch
from torch import distributed

import oneemb
from oneemb.embeddings.rank_traffic import KeyCounts, messages_of
from oneemb.graph.ranks import Ranks
from oneemb.kernels.threads import Threads
from oneemb.storage.table.persistent_table import PersistentTable
from oneemb.storage.tiers.memory_limit import memory_limit


@dataclass(frozen=True)
class StepCost:
    """Formula for the time of a step on the cores of a rank, without messages: `call_us + lookups * lookup_us + ids *
    id_ns + ids * D * id_weight_ns + keys * key_ns + keys * words * key_word_ns`. ids counts the ids of a batch, keys
    its unique ids, and words the 32-bit words of a row, with optimizer state, and of its gradient."""

    call_us: float
    lookup_us: float
    id_ns: float
    id_weight_ns: float
    key_ns: float
    key_word_ns: float

    def rows_ms(self, ids: int, keys: int, dim: int, row_words: int) -> float:
        """Milliseconds that a step spends on the rows of one lookup."""
        of_ids = ids * (self.id_ns + dim * self.id_weight_ns)
        return (of_ids + keys * (self.key_ns + (row_words + dim) * self.key_word_ns)) / 1e6


@dataclass(frozen=True)
class Machine:
    """Figures of a machine.

    The defaults stand for a server with 32 cores, a network of 100 Gb/s and an NVMe disk. Only the step costs among
    them were measured: on an AMD EPYC (Zen 4), one thread a rank, on two cores with other users. `peer_us` is an
    assumption.

    Args:
        cores: number of cores, which all ranks of the machine share.
        threads: threads of each rank, with which `alone` and `on_ranks` were measured.
        memory_gib: memory of the machine.
        network_gb_s: bandwidth from all ranks of a machine together to other machines, each way, in 10^9 bytes a
            second.
        network_us: time of a nearly empty collective call between two ranks on different machines.
        local_gb_s: bandwidth from one rank to other ranks of its machine.
        local_us: time of a nearly empty collective call between two ranks on one machine.
        peer_us: time that each further rank adds to a collective call.
        fresh_gb_s: rate of the first write to memory that the operating system has just given.
        disk_reads_per_s: number of blocks at random places that the machine reads from disk in a second.
        disk_gb_s: bandwidth of the machine's disk.
        alone: cost of a step if one process has all rows.
        on_ranks: cost of a step if ranks share the rows.

    Raises:
        ValueError: a figure is not above 0.
    """

    cores: int = 32
    threads: int = 1
    memory_gib: float = 256.0
    network_gb_s: float = 12.5
    network_us: float = 100.0
    local_gb_s: float = 1.0
    local_us: float = 100.0
    peer_us: float = 8.0
    fresh_gb_s: float = 2.0
    disk_reads_per_s: float = 500_000.0
    disk_gb_s: float = 3.0
    alone: StepCost = StepCost(400.0, 250.0, 30.0, 0.75, 45.0, 0.3)
    on_ranks: StepCost = StepCost(1500.0, 1200.0, 80.0, 0.6, 200.0, 2.0)

    def __post_init__(self) -> None:
        for one in fields(self):
            value = getattr(self, one.name)
            if one.name in ("alone", "on_ranks"):
                if not isinstance(value, StepCost):
                    raise ValueError(f"{one.name} must be a StepCost(...), got {value!r}")
            elif isinstance(value, bool) or not isinstance(value, int | float) or not value > 0:
                raise ValueError(f"{one.name} must be above 0, got {value!r}")

    def contention(self, ranks: int) -> float:
        """Factor by which the ranks of a machine slow each other, because they share its cores."""
        return max(1.0, ranks * self.threads / self.cores)

    def latency_ms(self, ranks: int, ranks_per_machine: int) -> float:
        """Milliseconds of a nearly empty collective call."""
        local = ranks == ranks_per_machine
        first = self.local_us * self.contention(ranks) if local else self.network_us
        return (first + (ranks - 2) * self.peer_us) / 1e3

    def message_ms(self, ranks: int, ranks_per_machine: int, local: float, remote: float) -> float:
        """Milliseconds of a collective call in which each rank sends `local` bytes to ranks of its machine and `remote`
        bytes to others. The ranks of a machine share its network, and the cores that copy between them."""
        copied = local * self.contention(ranks_per_machine) / self.local_gb_s
        sent = remote * ranks_per_machine / self.network_gb_s
        return self.latency_ms(ranks, ranks_per_machine) + 1e-6 * max(copied, sent)

    def to_json(self) -> str:
        """All figures as JSON, which `from_json` reads."""
        return json.dumps(asdict(self), indent=1)

    @staticmethod
    def from_json(text: str) -> "Machine":
        """Machine with the figures in `text`, and defaults for the others; ValueError unless it is a JSON object of
        figures."""
        given = json.loads(text)
        known = {one.name for one in fields(Machine)}
        if not isinstance(given, dict) or (unknown := given.keys() - known):
            what = ", ".join(sorted(unknown)) if isinstance(given, dict) else type(given).__name__
            raise ValueError(f"a machine must be a JSON object of {', '.join(sorted(known))}; got {what}")
        steps = {name: StepCost(**given[name]) for name in ("alone", "on_ranks") if name in given}
        return Machine(**(given | steps))


# ---- measuring ------------------------------------------------------------------------------------------------------

# Measured cases: (samples, tables, distinct ids of a table, weights of a row, embeddings). In the first ones calls take
# most of a step, in the last ones rows.
CASES = [
    (16, 4, 1_000, 8, 1), (16, 4, 1_000, 8, 3), (512, 8, 20_000, 16, 1), (2048, 8, 200_000, 8, 1),
    (2048, 8, 1_000, 64, 1), (2048, 8, 200_000, 64, 1), (4096, 8, 200_000, 32, 1), (2048, 8, 200_000, 16, 2),
]  # fmt: skip
_BATCHES, _ROUNDS = 8, 8
# Weight of a figure's default in the fit; a measured step has weight 1.
_NEAR_DEFAULTS = 0.03
# Quantile of repeated measurements that is taken: a low one, since other programs only slow a measurement.
QUIET = 0.2
_TINY_BYTES, _LARGE_BYTES, _CALLS, _LARGE_CALLS = 8, 4 << 20, 300, 12
_FRESH_BYTES = 64 << 20
_DISK_ROWS, _DISK_WORDS, _DISK_BATCH = 16_384, 1024, 2048


def measure_machine(path: str | None = None, *, threads: int = 1, **figures: Any) -> Machine:
    """Measure the figures of this machine, in about a minute: steps on one core, messages between two processes, and a
    disk.

    Figures that one machine cannot measure, such as those of the network, are `figures`, or the defaults of `Machine`.

    Args:
        path: a folder on the disk to measure; 64 MiB are written there and removed. None = the disk is not measured.
        threads: threads of a rank.
        figures: figures of `Machine`, by name, to use instead of measured ones.

    Raises:
        ValueError: a figure is not above 0.
        RuntimeError: a measuring process has failed; the message is the end of its error output.
    """
    cores = len(os.sched_getaffinity(0))
    memory = memory_limit().bytes / 2**30
    measured: dict[str, Any] = {"cores": cores, "memory_gib": round(memory, 1), "threads": threads}
    measured["fresh_gb_s"] = _in_processes(1, "_measure_fresh")
    measured["local_us"], measured["local_gb_s"] = _in_processes(2, "_measure_messages")
    machine = Machine(**measured)
    for ranks, name in ((1, "alone"), (2, "on_ranks")):
        measured[name] = fitted(_in_processes(ranks, "_measure_steps", threads), machine, ranks)
    if path is not None:
        measured["disk_reads_per_s"], measured["disk_gb_s"] = _in_processes(1, "_measure_disk", os.path.abspath(path))
    return replace(Machine(), **(measured | figures))


def _in_processes(count: int, name: str, *args: Any) -> Any:
    """Result of a function of this module, run in `count` new processes of a gloo group; that of the first process is
    returned. In new processes the threads and memory of this one have no influence."""
    with tempfile.TemporaryDirectory(prefix="oneemb-measure-") as folder:
        code = "import sys; from oneemb.planning.machine import run_measurement; run_measurement(*sys.argv[1:])"
        processes = [
            subprocess.Popen(
                [sys.executable, "-c", code, folder, str(rank), str(count), name, json.dumps(args)],
                stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
                env=os.environ | {"PYTHONPATH": os.pathsep.join(part for part in sys.path if part)},
            )
            for rank in range(count)
        ]  # fmt: skip
        try:
            outputs = [process.communicate() for process in processes]
        finally:
            for process in processes:
                process.kill()
                process.wait()
    for process, (_, error) in zip(processes, outputs, strict=True):
        if process.returncode:
            raise RuntimeError(f"{name} has failed: {error.strip()[-2000:]}")
    return json.loads(outputs[0][0].splitlines()[-1])


def run_measurement(folder: str, rank: str, ranks: str, name: str, args: str) -> None:
    """Run one of the measurements below, in a process that `_in_processes` has started."""
    torch.set_num_threads(1)
    distributed.init_process_group("gloo", init_method=f"file://{folder}/meet", rank=int(rank), world_size=int(ranks))
    functions: tuple[Callable[..., Any], ...] = (_measure_steps, _measure_messages, _measure_fresh, _measure_disk)
    measure = {function.__name__: function for function in functions}
    found = measure[name](*json.loads(args))
    distributed.barrier()
    print(json.dumps(found), flush=True)
    distributed.destroy_process_group()


def _measure_steps(threads: int) -> list[dict[str, Any]]:
    """For each case its sizes, and the milliseconds of a step."""
    group = distributed.group.WORLD if distributed.get_world_size() > 1 else None
    with tempfile.TemporaryDirectory(prefix="oneemb-measure-") as folder:
        cases = [_Case(f"{folder}/{c}", group, threads, *case) for c, case in enumerate(CASES)]
        # Several steps of one case, then of the next, so that the processor's caches are as warm as in training.
        ms_RC = np.array([[case.stretch_ms(r) for case in cases] for r in range(_ROUNDS)])
        for case in cases:
            case.close()
    return [case.sizes | {"ms": ms} for case, ms in zip(cases, np.quantile(ms_RC, QUIET, 0).tolist(), strict=True)]


def fitted(cases: list[dict[str, Any]], machine: Machine, ranks: int) -> StepCost:
    """Step cost that best explains the measured steps, after the time of messages is subtracted. Figures that the cases
    do not determine stay near the defaults.

    Args:
        cases: sizes and milliseconds of each case.
        machine: figures for the time of messages.
        ranks: number of ranks in the measurement.
    """
    defaults = np.array(list(asdict(machine.alone if ranks == 1 else machine.on_ranks).values()))
    terms, target = [], []
    for one in cases:
        count, dim = one["embeddings"], one["dim"]
        ids, keys, words = one["ids"], one["keys"], 3 * dim  # weights, Adagrad's state, gradient
        row = [1e-3, count * 1e-3, ids / 1e6, ids * dim / 1e6, keys / 1e6, keys * words / 1e6]
        ms = one["ms"]
        if ranks > 1:
            each = [round(keys / count / ranks)] * ranks
            for message in messages_of([KeyCounts(dim, 4, each, each)] * count, in_run=False):
                ms -= machine.message_ms(ranks, ranks, sum(message.sent_R[1:]), 0)
        terms.append(np.array(row) * machine.contention(ranks) / one["ms"])
        target.append(max(ms, 0) / one["ms"])
    terms += list(_NEAR_DEFAULTS * np.diag(1 / defaults))
    target += [_NEAR_DEFAULTS] * len(defaults)
    return StepCost(*_nonnegative(np.array(terms), np.array(target)).tolist())


class _Case:
    """Embeddings of one size, in a graph that only looks up and trains rows."""

    def __init__(
        self, path: str, group: Any, threads: int, samples: int, tables: int, vocabulary: int, dim: int, embeddings: int
    ):
        made = [
            oneemb.MultiTableEmbedding(
                f"e{e}", dim, torch.float32, torch.int64, [oneemb.make_table()] * tables,
                oneemb.make_device_mem_store_options(f"{path}-{e}"), num_threads=threads, process_group=group,
            )
            for e in range(embeddings)
        ]  # fmt: skip

        class Graph(oneemb.TrainGraph):
            def __init__(self) -> None:
                super().__init__()
                self.embeddings = torch.nn.ModuleList(made)
                self.add_optimizer(torch.optim.Adagrad(self.parameters(), lr=0.01))

            def build(self, *ids: torch.Tensor) -> None:
                sums = [embedding(one).sum() for embedding, one in zip(self.embeddings, ids, strict=True)]
                torch.stack(sums).sum().backward()

        self._graph, self._embeddings = Graph(), made
        rng = np.random.default_rng(0)
        self._batches = [
            [torch.from_numpy(zipf_ids(rng, vocabulary, (samples, tables))) for _ in made] for _ in range(_BATCHES)
        ]
        keys = sum(len(column.unique()) for batch in self._batches for ids in batch for column in ids.T) / _BATCHES
        self.sizes = {"embeddings": embeddings, "dim": dim, "ids": samples * tables * embeddings, "keys": keys}

    def stretch_ms(self, round: int) -> float:
        """Milliseconds of a step, measured over several steps in a row. Round 0 first initializes the rows."""
        steps = [functools.partial(self._graph, *batch) for batch in self._batches]
        spent = _seconds(steps * 2)[len(steps) :] if round == 0 else _seconds(steps)[2:]
        return float(np.quantile(spent, QUIET)) * 1e3

    def close(self) -> None:
        for embedding in self._embeddings:
            embedding.close()


def zipf_ids(rng: Any, vocabulary: int, shape: tuple[int, ...]) -> Any:
    """Ids with frequencies by Zipf's law (exponent 1.05), spread over all integers: int64 of this shape."""
    weight_V = np.arange(1, vocabulary + 1) ** -1.05
    cumulated_V = np.cumsum(weight_V / weight_V.sum())
    return np.searchsorted(cumulated_V, rng.random(shape)).clip(max=vocabulary - 1) * np.int64(0x9E3779B97F4A7C1)


def _seconds(calls: Sequence[Callable[[], object]]) -> list[float]:
    spent = []
    for call in calls:
        begin = time.perf_counter()
        call()
        spent.append(time.perf_counter() - begin)
    return spent


def _nonnegative(terms: Any, target: Any) -> Any:
    """Least-squares solution of `terms @ figures = target` with no figure below 0. While a figure is negative, the
    lowest is set to 0."""
    kept = list(range(terms.shape[1]))
    while True:
        found = np.linalg.lstsq(terms[:, kept], target, rcond=None)[0]
        if found.min() >= 0:
            figures = np.zeros(terms.shape[1])
            figures[kept] = found
            return figures
        del kept[int(found.argmin())]


def _measure_fresh() -> float:
    """GB/s of filling a newly allocated large array. The operating system's clearing of its pages is included."""
    spent = _seconds([lambda: torch.zeros(_FRESH_BYTES, dtype=torch.uint8, device="cpu").fill_(1)] * 10)
    return _FRESH_BYTES / float(np.quantile(spent, QUIET)) / 1e9


def _measure_messages() -> list[float]:
    """Microseconds of a small exchange between the ranks, and GB/s that each rank sends in a large one."""
    assert distributed.group.WORLD is not None
    ranks = Ranks(distributed.group.WORLD)

    def exchange(size: int) -> None:
        like, sent_R = torch.empty(0, 1, dtype=torch.uint8, device="cpu"), [size] * ranks.size
        sent = torch.zeros((size + ranks.heads(like)) * ranks.size, 1, dtype=torch.uint8, device="cpu")
        ranks.answer("measure", lambda: sent, like, sent_R, sent_R)

    def seconds(size: int, calls: int) -> float:
        return float(np.quantile(_seconds([lambda: exchange(size)] * calls), QUIET))

    tiny_s, large_s = seconds(_TINY_BYTES, _CALLS), seconds(_LARGE_BYTES, _LARGE_CALLS)
    return [tiny_s * 1e6, _LARGE_BYTES * (ranks.size - 1) / (large_s - tiny_s) / 1e9]


def _measure_disk(path: str) -> list[float]:
    """Random reads of 4,096-byte blocks in a second, and GB/s of sequential writes."""
    rng = np.random.default_rng(0)
    # One row fills a block, with its checksum.
    words = _DISK_WORDS - 16
    with (
        tempfile.TemporaryDirectory(prefix="oneemb-measure-", dir=path) as folder,
        PersistentTable.open(f"{folder}/table", row_width=words, threads=Threads(1)) as table,
    ):
        id_N = np.arange(_DISK_ROWS)
        table_N = np.zeros(_DISK_ROWS, np.int32)
        row_NW = rng.random((_DISK_ROWS, words), np.float32)
        written_s = sum(_seconds([lambda: table.put(table_N, id_N, row_NW), lambda: table.save_snapshot("all", {})]))
        some = np.empty((_DISK_BATCH, words), np.float32)

        def get() -> None:
            id_U = rng.choice(id_N, _DISK_BATCH, replace=False)
            table.get(table_N[:_DISK_BATCH], id_U, some)

        before = table.stats()["read_requests"]
        spent = _seconds([get] * 8)
        reads = (table.stats()["read_requests"] - before) / len(spent)
    return [reads / float(np.quantile(spent, QUIET)), row_NW.nbytes / written_s / 1e9]
