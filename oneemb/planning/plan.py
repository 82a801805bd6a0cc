"""Cost of a training job before it runs: bytes between ranks, memory, disk reads, time, and the part that limits it.

    print(oneemb.plan(rows=10**9, embedding_dim=64, ids=26, unique=0.4, batch=4096, ranks=64, ranks_per_machine=8))

Bytes are those of the messages that ranks send (rank_traffic.py), if every rank owns an equal share of a batch's keys.
Memory is what the tiers allocate. Time is the sum of separately measured parts, from the figures of a `Machine`.
"""

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from oneemb.embeddings.rank_traffic import KeyCounts, PartCounts, messages_of
from oneemb.graph.ops.requests import parts_move_fewer_bytes
from oneemb.graph.shown import html_of_text
from oneemb.planning.machine import Machine, StepCost
from oneemb.planning.planned_embedding import PlannedEmbedding, check_count

# Bytes of a key in the index of a tier; see storage/hash_index.py.
_INDEX_BYTES = 24
# Bytes for each row besides its words, in a tier that holds all rows.
_MARK_BYTES = 1
# Bytes for each slot of a cache besides the row's words, see storage/tiers/hot_tier.py.
_SLOT_OVERHEAD_BYTES = 40
# Arrays of this size or larger get new memory pages whenever they are made: the maximum of glibc's M_MMAP_THRESHOLD.
_KEPT_BYTES = 32 << 20


@dataclass(frozen=True)
class MessageCost:
    """Cost of one collective call of a step."""

    name: str
    bytes: int
    """Bytes that a rank sends to others."""
    bytes_off_machine: int
    """The part of `bytes` that goes to ranks of other machines."""
    ms: float
    ahead: bool
    """Whether the message is sent while the previous step computes."""


@dataclass(frozen=True)
class Plan:
    """Cost of a step of a job on one rank. `print` shows a table."""

    ranks: int
    ranks_per_machine: int
    batch: int
    """Number of samples in a step of one rank."""
    embeddings: tuple[PlannedEmbedding, ...]
    machine: Machine = field(repr=False)
    messages: tuple[MessageCost, ...] = field(repr=False)
    bytes_sent: int
    """Bytes that a rank sends to other ranks in a step: headers, keys, rows and gradients of rows."""
    bytes_sent_without_deduplication: int
    """`bytes_sent` if a key, a row and a gradient were sent for every id, not only for unique ids."""
    dense_bytes_sent: int
    """Bytes that a rank sends in a step for DistributedDataParallel's all-reduce, in a ring."""
    memory_bytes: dict[str, int]
    """{use: bytes} of a rank."""
    disk_reads_per_s: float
    """Disk reads of a rank in a second, at this step time."""
    step_ms: float
    parts_ms: dict[str, float]
    """{part: milliseconds of the step}. Work that other work hides is left out."""
    samples_per_s: float
    """Samples that all ranks together train in a second."""
    binds: str
    """Name of the part that takes longest; "memory" if the job does not fit in memory."""
    advice: tuple[str, ...]

    def to_dict(self) -> dict[str, Any]:
        """The plan as dicts, lists, strings and numbers, for JSON."""
        return asdict(self)

    def _repr_html_(self) -> str:
        return html_of_text(str(self))

    def __str__(self) -> str:
        total = sum(self.memory_bytes.values())
        machines = -(-self.ranks // self.ranks_per_machine)
        on = "one process" if self.ranks == 1 else f"{self.ranks:,} ranks on {machines:,} machine{'s' * (machines > 1)}"
        rows = [
            ("step", f"{self.step_ms:.2f} ms", f"{self.samples_per_s:,.0f} samples/s on {on}"),
            *((f"  {name}", f"{ms:.2f} ms", f"{ms / self.step_ms:.0%}") for name, ms in self.parts_ms.items()),
            ("sent a step and rank", _size(self.bytes_sent), self._sent_text()),
            *(
                (f"  {one.name}", _size(one.bytes), f"{one.ms:.2f} ms{', ahead' if one.ahead else ''}")
                for one in self.messages
            ),
            (
                "memory of a rank",
                _size(total),
                f"of {_size(self.machine.memory_gib * 2**30 / self.ranks_per_machine)} there is",
            ),
            *((f"  {name}", _size(size), self._a_key(name)) for name, size in self.memory_bytes.items()),
        ]
        if self.disk_reads_per_s:
            rows.append(("reads from disk", f"{self.disk_reads_per_s:,.0f}/s", "a rank"))
        first, second = (max(len(row[c]) for row in rows) for c in (0, 1))
        lines = [f"{name:{first}}  {value:>{second}}  {more}".rstrip() for name, value, more in rows]
        return "\n".join([*lines, f"binds: {self.binds}", *(f"- {one}" for one in self.advice)])

    def _a_key(self, name: str) -> str:
        """Text of the bytes a key of an index."""
        if name == "index":
            return f"{_INDEX_BYTES} bytes a key"
        if name != "index of the table on disk":
            return ""
        texts = []
        for one in self.embeddings:
            rows = -(-one.rows // self.ranks)
            size, on_disk = one.index_bytes(rows)
            if one.cache_mb is not None:
                texts.append(f"{size / rows:.3g} bytes a key{f', {on_disk:.0%} of keys on the SSD' if on_disk else ''}")
        return "; ".join(dict.fromkeys(texts))

    def _sent_text(self) -> str:
        if not self.bytes_sent:
            return ""
        ratio = self.bytes_sent_without_deduplication / self.bytes_sent
        dense = f"; dense all-reduce {_size(self.dense_bytes_sent)}" if self.dense_bytes_sent else ""
        return f"{ratio:.1f} times as much without deduplication{dense}"


def plan(
    *embeddings: PlannedEmbedding,
    batch: int,
    ranks: int = 1,
    ranks_per_machine: int | None = None,
    dense_parameters: int = 0,
    dense_ms: float = 0.0,
    machine: Machine | None = None,
    **embedding: Any,
) -> Plan:
    """Cost of a step of a training job, computed from a model of it.

    Args:
        embeddings: embeddings that a step looks up. For a single embedding, pass the arguments of `PlannedEmbedding`
            instead: `plan(rows=10**9, embedding_dim=64, ids=26, batch=4096)`.
        batch: number of samples in a step of one rank.
        ranks: number of processes that share the rows; 1 = one process without `process_group`.
        ranks_per_machine: number of ranks on one machine; None = all.
        dense_parameters: number of float32 values whose gradients DistributedDataParallel averages.
        dense_ms: milliseconds of forward and backward of the dense modules, if a rank has the machine to itself.
        machine: figures of the machines: `Machine()` is a server, `oneemb.measure_machine()` measures this machine.

    Raises:
        ValueError, TypeError: an argument is not as above, or a cache is too small for a step.

    Example:
        >>> import oneemb
        >>> plan = oneemb.plan(rows=10**9, embedding_dim=64, ids=26, unique=0.5, batch=4096, ranks=64)
        >>> plan.bytes_sent, plan.bytes_sent_without_deduplication
        (28122192, 56217168)
    """
    if bool(embeddings) == bool(embedding):
        raise TypeError(
            "plan takes PlannedEmbedding(...) objects, or the arguments of one by name (rows=, embedding_dim=, ids=,"
            f" ...), and not both; got {len(embeddings)} objects and {', '.join(embedding) or 'no such arguments'}"
        )
    if embedding:
        embeddings = (PlannedEmbedding(**embedding),)
    if not all(isinstance(one, PlannedEmbedding) for one in embeddings):
        raise TypeError(f"plan takes PlannedEmbedding(...) objects, got {embeddings!r}")
    check_count("batch", batch)
    check_count("ranks", ranks)
    per_machine = ranks if ranks_per_machine is None else ranks_per_machine
    check_count("ranks_per_machine", per_machine)
    if per_machine > ranks:
        raise ValueError(f"ranks_per_machine must be at most ranks, {ranks}, got {per_machine}")
    for name, value in (("dense_parameters", dense_parameters), ("dense_ms", dense_ms)):
        if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value < math.inf:
            raise ValueError(f"{name} must be a number from 0 up, got {value!r}")
    if machine is None:
        machine = Machine()
    elif not isinstance(machine, Machine):
        raise TypeError(f"machine must be a Machine, such as measure_machine() gives, got {machine!r}")
    return _Job(embeddings, batch, ranks, per_machine, dense_parameters, dense_ms, machine).plan()


@dataclass(frozen=True)
class _Job:
    """Arguments of `plan`, and the computation of the plan."""

    embeddings: tuple[PlannedEmbedding, ...]
    batch: int
    ranks: int
    per_machine: int
    dense_parameters: int
    dense_ms: float
    machine: Machine

    def plan(self) -> Plan:
        messages = self._messages([self._key_counts(one) for one in self.embeddings])
        everything = self._messages([self._even_keys(one, self.batch * one.ids) for one in self.embeddings])
        memory = self._memory()
        parts = self._parts(messages)
        hidden = sum(one.ms for one in messages if one.ahead)
        step_ms = max(sum(parts.values()), hidden)
        reads = sum(self._misses(one) + self._index_reads(one) for one in self.embeddings) / step_ms * 1e3
        binds, advice = self._judge(parts, memory)
        return Plan(
            self.ranks, self.per_machine, self.batch, self.embeddings, self.machine, tuple(messages),
            bytes_sent=sum(one.bytes for one in messages),
            bytes_sent_without_deduplication=sum(one.bytes for one in everything),
            dense_bytes_sent=self._dense_bytes(),
            memory_bytes=memory,
            disk_reads_per_s=reads,
            step_ms=step_ms,
            parts_ms=parts,
            samples_per_s=self.ranks * self.batch / step_ms * 1e3,
            binds=binds,
            advice=advice,
        )  # fmt: skip

    def _keys(self, one: PlannedEmbedding) -> int:
        """Number of unique keys in a rank's batch, which is also the number of keys that others ask a rank for. At most
        the number of rows."""
        return max(1, min(one.rows, round(self.batch * one.ids * one.unique)))

    def _misses(self, one: PlannedEmbedding) -> float:
        return 0.0 if one.hit_rate is None else self._keys(one) * (1 - one.hit_rate)

    # ---- between ranks ----------------------------------------------------------------------------------------------

    def _even_keys(self, one: PlannedEmbedding, keys: int, parts: PartCounts | None = None) -> KeyCounts:
        """Counts of `keys` keys of a lookup, spread evenly over the ranks that own them."""
        # Entry 0 is this rank. Its part is not sent, so it gets the smaller share.
        share, more = divmod(keys, self.ranks)
        each = [share + (0 < r <= more) for r in range(self.ranks)]
        return one.keys(each, each, parts)

    def _key_counts(self, one: PlannedEmbedding) -> KeyCounts:
        """Counts of the keys of a lookup. If owners send pooled parts of bags instead of rows, also counts of these
        parts."""
        keys, bags = self._keys(one), self.batch * (one.bags or 0)
        if one.bags is None or one.dtype != "float32" or one.comm_dtype == "float16" or bags >= keys:
            return self._even_keys(one, keys)
        # Each id of a bag has a random owner; a rank sends a part of each bag in which it owns an id.
        parts = round(bags * (1 - (1 - 1 / self.ranks) ** (one.ids / one.bags)))
        ids = self.batch * one.ids // self.ranks
        others, row_bytes = self.ranks - 1, one.embedding_dim * one.comm_bytes
        if not parts_move_fewer_bytes(others * keys // self.ranks, others * parts, others * ids, row_bytes, row_bytes):
            return self._even_keys(one, keys)
        parts_R, ids_R = [parts] * self.ranks, [ids] * self.ranks
        return self._even_keys(one, keys, PartCounts(parts_R, ids_R, parts_R))

    def _messages(self, lookups: Sequence[KeyCounts]) -> list[MessageCost]:
        if self.ranks == 1:
            return []
        costs = []
        for message in messages_of(lookups):
            local = sum(message.sent_R[1 : self.per_machine])
            remote = sum(message.sent_R[self.per_machine :])
            ms = self.machine.message_ms(self.ranks, self.per_machine, local, remote)
            costs.append(MessageCost(message.name, local + remote, remote, ms, message.ahead))
        return costs

    def _dense_bytes(self) -> int:
        return round(2 * (self.ranks - 1) / self.ranks * 4 * self.dense_parameters)

    # ---- time -------------------------------------------------------------------------------------------------------

    def _parts(self, messages: Sequence[MessageCost]) -> dict[str, float]:
        """{part: milliseconds of a step}."""
        alone, machine = self.ranks == 1, self.machine
        contention = machine.contention(self.per_machine)
        cost: StepCost = machine.alone if alone else machine.on_ranks
        rows_ms = sum(
            cost.rows_ms(self.batch * one.ids, self._keys(one), one.embedding_dim, one.row_words)
            for one in self.embeddings
        )
        calls_ms = cost.call_us / 1e3 + len(self.embeddings) * cost.lookup_us / 1e3
        parts = {
            "calls": calls_ms * contention,
            "rows": rows_ms * contention,
            "dense": self.dense_ms * contention,
            "fresh memory": sum(self._fresh_bytes(one) for one in self.embeddings)
            / machine.fresh_gb_s
            / 1e6
            * contention,
        }
        if not alone:
            now = [one for one in messages if not one.ahead]
            latency_ms = machine.latency_ms(self.ranks, self.per_machine)
            parts["latency"] = len(now) * latency_ms
            parts["transfer"] = sum(one.ms for one in now) - parts["latency"]
            if self.dense_parameters:
                # In a ring each rank sends to the next one, so one rank of each machine sends to another machine.
                local = self.ranks == self.per_machine
                gb_s = machine.local_gb_s / contention if local else machine.network_gb_s
                parts["dense all-reduce"] = self._dense_bytes() / gb_s / 1e6 + 2 * latency_ms
        if any(one.cache_mb is not None for one in self.embeddings):
            # A thread of `graph.run` reads the rows of the next batch while a step computes, on ranks at the rows'
            # owners.
            parts["disk"] = max(0.0, self._disk_ms() - sum(parts.values()))
        return {name: ms for name, ms in parts.items() if ms > 0}

    def _index_reads(self, one: PlannedEmbedding) -> float:
        """Number of blocks of the index that a step reads from the disk."""
        return self._misses(one) * one.index_bytes(-(-one.rows // self.ranks))[1]

    def _fresh_bytes(self, one: PlannedEmbedding) -> int:
        """Bytes of a lookup's result and gradient if they get new memory pages in each step, else 0."""
        size = self.batch * one.rows_given * one.embedding_dim * one.weight_bytes
        return 2 * size if size >= _KEPT_BYTES else 0

    def _disk_ms(self) -> float:
        """Milliseconds of disk access of a step. Each row that is read evicts a changed row, which is written."""
        figures, total = self.machine, 0.0
        for one in self.embeddings:
            misses = self._misses(one) * self.per_machine
            row_bytes = one.row_words * 4
            block = -(-row_bytes // one.physical_block_size) * one.physical_block_size
            index_reads = self._index_reads(one) * self.per_machine
            read_bytes = misses * block + index_reads * 4096
            read_s = max((misses + index_reads) / figures.disk_reads_per_s, read_bytes / figures.disk_gb_s / 1e9)
            total += read_s + misses * row_bytes / figures.disk_gb_s / 1e9
        return total * 1e3

    # ---- memory -----------------------------------------------------------------------------------------------------

    def _memory(self) -> dict[str, int]:
        """{use: bytes} of memory of a rank."""
        held = dict.fromkeys(("rows", "index", "cache", "index of the table on disk", "a step"), 0)
        for one in self.embeddings:
            rows, row_bytes, keys = -(-one.rows // self.ranks), one.row_words * 4, self._keys(one)
            if one.cache_mb is None:
                held["rows"] += rows * (row_bytes + _MARK_BYTES)
                held["index"] += rows * _INDEX_BYTES
            else:
                slots = one.cache_mb * 2**20 // (row_bytes + _SLOT_OVERHEAD_BYTES)
                if slots < min(keys, rows):
                    raise ValueError(
                        f"cache_mb must hold the {keys:,} rows of a step,"
                        f" {-(-keys * (row_bytes + _SLOT_OVERHEAD_BYTES) // 2**20)} MiB, got {one.cache_mb}; give more"
                        " memory, or a smaller batch"
                    )
                held["cache"] += min(one.cache_mb * 2**20, rows * (row_bytes + _SLOT_OVERHEAD_BYTES))
                held["index of the table on disk"] += one.index_bytes(rows)[0]
            # Ids, results of lookups and their gradients; with ranks, also keys, rows and gradients in messages.
            given = self.batch * one.rows_given
            held["a step"] += self.batch * one.ids * 8 + given * 2 * one.embedding_dim * one.weight_bytes
            if self.ranks > 1:
                held["a step"] += 2 * keys * (12 + one.embedding_dim * (2 * one.weight_bytes + 4))
        return {name: size for name, size in held.items() if size}

    # ---- limit ------------------------------------------------------------------------------------------------------

    def _judge(self, parts: dict[str, float], memory: dict[str, int]) -> tuple[str, tuple[str, ...]]:
        """Name of the part that limits the job, and advice."""
        need, there = sum(memory.values()), self.machine.memory_gib * 2**30 / self.per_machine
        if need > there:
            fit = self.ranks * need / there
            return "memory", (
                f"a rank needs {_size(need)} and has {_size(there)}: take {fit:,.0f} ranks or more with as many on a"
                " machine, keep rows on an SSD behind a cache (cache_mb), or an optimizer with less state",
            )
        binds = max(parts, key=lambda name: parts[name])
        return binds, tuple(_ADVICE[binds])


_ADVICE = {
    "calls": ["the time of Python's own calls does not grow with the batch: a larger batch a rank uses it better"],
    "rows": [
        "finding, reading and updating rows takes most: give a rank more threads, or a machine fewer ranks",
        "an optimizer with less state, such as RowWiseAdagrad, moves fewer bytes",
    ],
    "dense": ["the dense modules take most: neither more bandwidth nor a larger cache helps"],
    "fresh memory": [
        "arrays of 32 MiB or more are given anew by the system at every step: a batch whose rows take less saves that"
    ],
    "latency": [
        "messages take most that hold next to nothing: a larger batch a rank uses them better",
        "one embedding with many tables has one lookup, several embeddings have one each",
    ],
    "transfer": [
        "bytes of rows and gradients take most: comm_dtype=torch.bfloat16 sends half as many",
        "fewer ranks with larger batches send a key that many samples share less often",
    ],
    "dense all-reduce": ["gradients of dense modules take most: a larger batch a rank uses them better"],
    "disk": ["reads from disk take most: a larger cache, more machines, each with a disk, or a faster disk"],
}


def _size(size: float) -> str:
    for unit in ("B", "KiB", "MiB", "GiB"):
        if size < 1024:
            return f"{size:.0f} B" if unit == "B" else f"{size:.1f} {unit}"
        size /= 1024
    return f"{size:.1f} TiB"
