"""Private parts of the product that tests look into, each named in this one place."""

import mmap
import resource
import threading
from contextlib import contextmanager

import numpy as np

from oneemb.storage.tiers import growing_array, reservation

# ---- a graph ---------------------------------------------------------------------------------------------------------


def known_of(graph):
    """Lookups of `build` for each structure of inputs that a graph has seen, the structure used last at the end."""
    return list(graph._plans.known.values())


def train_state_of(graph):
    """Optimizers, schedulers and scaler of a graph."""
    return graph._train_state


def merged_stores_of(graph):
    """Stores of a graph's embeddings that are looked up together."""
    return graph._plans.merged


# ---- the persistent table --------------------------------------------------------------------------------------------


def chunk_files_of(table):
    """Chunk files of a persistent table."""
    return table._files


def snapshots_of(table):
    """Snapshot files of a persistent table, and the chunks they hold."""
    return table._store


def snapshot_path(table, name):
    """Path of a snapshot's file."""
    return snapshots_of(table).files.path(name)


def check_chunk_totals(table):
    """Compare what a persistent table has counted of its chunks with a recount of all snapshots and current rows."""
    with table._store_lock:
        store, files, current = table._store, table._files, set(table._contents.live.chunks())
        kept = {chunk for _, chunks in [*store._held.values(), *store._removed, *store._saving] for chunk in chunks}
        runs = [chunk.blocks * chunk.geometry.block_bytes + chunk.keys_bytes - 128 for chunk in current | kept]
        assert files.needed_bytes == sum(runs)
        assert set(files.loose) == current - kept
        assert {chunk for chunk in files.chunks.values() if chunk.needed} == current | kept


def check_choices(table, name):
    """Compare the chunks that compaction would move next, for a put and for a save of the snapshot `name`, with those
    that the formulas of compaction.py choose when each chunk is looked at by itself. Returns why the save moves it."""
    with table._store_lock:
        table._contents.compactor.put_pending()
        live, writer, compactor, store = (
            table._contents.live, table._contents.writer, table._contents.compactor, table._store
        )  # fmt: skip
        per_row, a = live.geometry.disk_bytes_per_row, compactor._max_space_amplification

        def nbytes(chunks):
            runs = sum(chunk.blocks * chunk.geometry.block_bytes + chunk.keys_bytes - 128 for chunk in chunks)
            return runs + writer.bytes_to_write(set(chunks))

        def fill(chunk):
            extents, size = live._extents[chunk], live.geometry.rows_per_extent // 8
            live_rows = int(np.unpackbits(live.bit_N[extents.start * size : extents.stop * size]).sum(dtype=np.int64))
            return live_rows * per_row / max(1, nbytes([chunk]))

        def least(chunks, full):
            chunk = min(chunks, key=lambda chunk: (fill(chunk), chunk.number), default=None)
            return chunk if chunk is not None and fill(chunk) < full else None

        kept = [held for other, held in store._held.items() if other != name] + store._removed + store._saving
        kept_bytes = sum(int(record.info.rows * record.geometry.disk_bytes_per_row) for record, _ in kept)
        kept = {chunk for _, chunks in kept for chunk in chunks}
        own = [chunk for chunk in live.chunks() if chunk not in compactor._damaged]
        sealed = [chunk for chunk in own if not writer.writes_to(chunk)]
        loose = [chunk for chunk in sealed if not chunk.snapshots]
        assert compactor._least_loose() is least(loose, compactor._full)

        garbage = min(0.3, a - 1)
        s = 0.2 * garbage
        rows = len(live.index) * per_row
        most, spare = (1 + garbage - s) * int(rows), (a - 1 - s) * int(rows)
        fresh, full = [chunk for chunk in sealed if chunk not in kept], 1 / (1 + s)
        chosen, reason = None, ""
        if compactor._excess() > 0:
            chosen, reason = least(loose, full), "loose"
        if chosen is None and nbytes({*own, *kept}) > max(spare, most + kept_bytes):
            chosen, reason = least(fresh, full), "held"
        if chosen is None and nbytes(own) > max(spare, most):
            chosen, reason = least(sealed, full), "own"
        if chosen is None:
            chosen, reason = least(fresh, 0.98), "beyond need"
            many = compactor._rows_since_save - len(live.index) / 2
            if chosen is not None and live.live_of(chosen) > 0.4 * many:
                chosen = None
        assert compactor._next_for_save(name, 0) is chosen
        return reason if chosen is not None else "none"


@contextmanager
def in_the_middle_of_a_move(table, job):
    """Within the block, a table's compaction has a chunk that it moves; its thread runs the job."""
    with table._store_lock:
        table._contents.compactor._moving = object()
        table._contents.compactions.start(job)
    yield
    with table._store_lock:
        table._contents.compactor._moving = None
        table._store_lock.lock.notify_all()


@contextmanager
def meanwhile(table, compactor_class, method, call):
    """Within the block, the first call of a method of a table's compactor first waits, without the lock, until another
    thread has made a call."""
    before, calls = getattr(compactor_class, method), [call]

    def waits(compactor, *args):
        if calls:
            thread = threading.Thread(target=calls.pop())
            with table._store_lock.others_allowed():
                thread.start()
                thread.join(600)
        return before(compactor, *args)

    setattr(compactor_class, method, waits)
    try:
        yield
        assert not calls
    finally:
        setattr(compactor_class, method, before)


# ---- memory and threads ----------------------------------------------------------------------------------------------


def reservations():
    """Memory reservations of this process, of tiers that are open."""
    return list(reservation._book)


def reserved_bytes():
    """Bytes that all tiers of this process have reserved."""
    return sum(one.bytes for one in reservations())


@contextmanager
def page_behind(array):
    """Within the block, another mapping has the addresses behind a GrowingArray."""
    begin, page = array._span.begin + array._span.mapped, resource.getpagesize()
    access, kind = mmap.PROT_READ, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | growing_array._MAP_FIXED_NOREPLACE
    assert growing_array._map(begin, page, access, kind, -1, 0) == begin
    try:
        yield
    finally:
        growing_array._unmap(begin, page)


def forget_addresses(array):
    """Let the addresses of a GrowingArray be those of memory that no GrowingArray knows."""
    growing_array._spans.discard(array._span)


def refuse_growth(monkeypatch):
    """Let the system refuse to map more memory behind an array."""
    monkeypatch.setattr(growing_array, "_remap", lambda *arguments: growing_array._FAILED)


def dirty_keys_of(tier):
    """Tables, ids and slots of the rows of a host tier that the store below lacks."""
    return tier._dirty_keys()


def team_of(threads):
    """Helper threads of `Threads`, None before the first loop that needs them."""
    return threads._team


# ---- what serves -----------------------------------------------------------------------------------------------------


def follower_of(served):
    """Follower of an InferenceEmbedding or a ServedModel."""
    return served._follower


def file_of(served):
    """Path of the file that an InferenceEmbedding reads."""
    return served._served.file.path
