"""Lookups of a served snapshot beside LMDB, RocksDB, nn.EmbeddingBag and torch's quantized bags, in one run.

    python benchmarks/bench_serving.py --rows 1000000

All have the same rows, one of 26 tables each, and answer the same ids, uniform over the rows and never the same ones
soon again. Each number of threads is that of all systems which have threads.

    lookup    [B, 26] ids, one a table
    bags      [B, 26] bags of 8 ids

LMDB and RocksDB are keyed by (table, id) and copy into one array. nn.EmbeddingBag and torch's quantized bags look row
numbers up: no search for an id, no table, nothing is compared with a checksum. `nn.EmbeddingBag, ids` finds the row
numbers of ids by torch.searchsorted, as a model would that has no other index. Where TorchRec is installed, its
quantized collection has row numbers of a table as ids, and that of this library the ids.

Each system makes some calls in a row, the first of which are not counted, and then the next one has its turn: what is
measured is a server that has requests, not one that waits for them. Times are p50 and p99 of a call, in ms.
"""

import argparse
import dataclasses
import gc
import json
import statistics
import tempfile
import time

import numpy as np
import torch
from _machine import keep_freed_memory, machine, table

import oneemb

TABLES, DIM, IDS = 26, 16, 8
OPEN = """
import sys, time, oneemb, torch
for _ in range(2):
    begin = time.perf_counter()
    served = oneemb.InferenceEmbedding.open(sys.argv[1], absent="zeros")
    opened = time.perf_counter()
    served(torch.zeros(1, 26, dtype=torch.int64))
    print(opened - begin, time.perf_counter() - opened)
    served.close()
"""


def write(folder, rows):
    """Rows with scattered ids; returns those of each row."""
    rng = np.random.default_rng(0)
    id_S, weight_SD = rng.permutation(rows) * 7_919_777, rng.standard_normal((rows, DIM)).astype(np.float32)
    table_S = (np.arange(rows) % TABLES).astype(np.int32)
    with oneemb.make_persistent_table_writer(folder, "rows", torch.int64, torch.float32, DIM) as writer:
        for n in range(0, rows, 65536):
            piece = slice(n, n + 65536)
            writer.write(id_S[piece], weight_SD[piece], table_S[piece])
    return table_S, id_S, weight_SD


def cold_open(folder):
    """Seconds of an open and of a lookup, the first in a process, and the second: of one that has imported torch and
    finds the loops compiled. The file is there, and as a rule in the system's cache."""
    import subprocess
    import sys

    out = subprocess.run([sys.executable, "-c", OPEN, folder], check=True, capture_output=True, text=True).stdout
    first, second = ([float(number) for number in line.split()] for line in out.splitlines())
    return {"open_first_s": first[0], "lookup_first_s": first[1], "open_s": second[0], "lookup_s": second[1]}


def key_value_stores(folder, table_S, id_S, weight_SD):
    """Functions from bytes of many keys to values: LMDB's and RocksDB's, as far as they are installed."""
    key_S = np.stack([table_S.astype(np.int64), id_S], 1)
    found = {}
    try:
        import lmdb

        lmdb_env = lmdb.open(f"{folder}/lmdb", map_size=1 << 36, subdir=True)
        with lmdb_env.begin(write=True) as txn:
            for key, row in zip(key_S, weight_SD, strict=True):
                txn.put(key.tobytes(), row.tobytes())

        def look(keys):
            with lmdb_env.begin(buffers=True) as txn:
                return [row for _, row in txn.cursor().getmulti(keys)]

        found["lmdb"] = look
    except ImportError:
        pass
    try:
        import rocksdict

        rocks = rocksdict.Rdict(f"{folder}/rocks", rocksdict.Options(raw_mode=True))
        batch = rocksdict.WriteBatch(raw_mode=True)
        for key, row in zip(key_S, weight_SD, strict=True):
            batch.put(key.tobytes(), row.tobytes())
        rocks.write(batch)
        found["rocksdict"] = lambda keys: rocks[keys]
    except ImportError:
        pass
    return found


class Batches:
    """The same ids as each system takes them, for a number of batches that go round."""

    def __init__(self, batch, count, table_S, id_S, *, with_keys):
        rng = np.random.default_rng(1)
        pick = rng.integers(0, len(id_S) // TABLES, (count, batch, TABLES, IDS)) * TABLES
        pick += np.arange(TABLES)[:, None]
        self.count, first = count, np.ascontiguousarray(pick[..., 0])
        self.ids, self.numbers = torch.from_numpy(id_S[first]), torch.from_numpy(first.reshape(count, -1))
        self.bag_ids = torch.from_numpy(id_S[pick].reshape(count, -1))
        self.bag_numbers = torch.from_numpy(pick.reshape(count, -1))
        bags = batch * TABLES
        self.each, self.offsets = torch.arange(bags), torch.arange(bags + 1) * IDS
        self.keys = [
            [np.array([table_S[s], id_S[s]], np.int64).tobytes() for s in row] for row in first.reshape(count, -1)
        ] if with_keys else []  # fmt: skip


def quantized_collections(folder, table_S, id_S, weight_SD):
    """Functions from ids, or numbers, [B, T], to embeddings [B, T * D]: TorchRec's and this library's INT8."""
    try:
        import torchrec
        import torchrec.inference.modules

        from oneemb.torchrec import EmbeddingBagCollection, quantize_embeddings
    except ImportError:
        return {}
    tables = [
        torchrec.EmbeddingBagConfig(-(-len(id_S) // TABLES), DIM, f"t{t}", feature_names=[f"f{t}"])
        for t in range(TABLES)
    ]  # fmt: skip
    theirs = torchrec.EmbeddingBagCollection(tables)
    theirs.load_state_dict({
        f"embedding_bags.t{t}.weight": torch.from_numpy(np.resize(weight_SD[table_S == t], (table.num_embeddings, DIM)))
        for t, table in enumerate(tables)
    })  # fmt: skip
    ours = EmbeddingBagCollection(
        [dataclasses.replace(table, init_fn=torch.nn.init.zeros_) for table in tables],
        store_options=oneemb.make_device_mem_store_options(f"{folder}/collection"),
    )
    oneemb.import_rows(ours.rows[0], [id_S, weight_SD, table_S])
    keys, found = [f"f{t}" for t in range(TABLES)], {}
    for name, quantize, module in [
        ("torchrec int8", torchrec.inference.modules.quantize_embeddings, theirs),
        ("oneemb.torchrec int8", quantize_embeddings, ours),
    ]:
        collection = quantize(torch.nn.ModuleList([module]), torch.int8, True)[0]

        def look(ids, collection=collection):
            lengths = torch.ones(ids.numel(), dtype=torch.int32)
            return collection(torchrec.KeyedJaggedTensor(keys, ids.t().flatten(), lengths=lengths)).values()

        found[name] = look
    return found


def sorted_index(table_S, id_S):
    """A function from ids [B, 26] to the numbers of their rows."""
    key_S = torch.from_numpy(id_S * TABLES + table_S)
    sorted_S, number_S = key_S.sort()
    columns = torch.arange(TABLES)
    return lambda ids: number_S[torch.searchsorted(sorted_S, (ids * TABLES + columns).reshape(-1))]


def lookups(served, stores, plain, packed, collections, row_of, batches):
    """What is measured of lookups: functions of the number of a batch."""
    byte_bag = torch.ops.quantized.embedding_bag_byte_rowwise_offsets
    calls = {f"oneemb {name}": lambda i, one=one: one(batches.ids[i % batches.count]) for name, one in served.items()}
    calls |= {
        name: lambda i, look=look: np.frombuffer(b"".join(look(batches.keys[i % batches.count])), np.float32)
        for name, look in stores.items()
    }
    calls["nn.EmbeddingBag"] = lambda i: plain(batches.numbers[i % batches.count], batches.each)
    calls["nn.EmbeddingBag, ids"] = lambda i: plain(row_of(batches.ids[i % batches.count]), batches.each)
    calls["torch int8 bag"] = lambda i: byte_bag(packed, batches.numbers[i % batches.count], batches.each, mode=0)
    for name, look in collections.items():
        given = batches.ids if name.startswith("oneemb") else batches.numbers.view(batches.ids.shape) // TABLES
        calls[name] = lambda i, look=look, given=given: look(given[i % batches.count])
    return calls


def bags(served, plain, packed, batches):
    """What is measured of bags."""
    byte_bag, begin = torch.ops.quantized.embedding_bag_byte_rowwise_offsets, batches.offsets[:-1]
    calls = {
        f"oneemb {name}": lambda i, one=one: one(batches.bag_ids[i % batches.count], offsets=batches.offsets)
        for name, one in served.items()
    }
    calls["nn.EmbeddingBag"] = lambda i: plain(batches.bag_numbers[i % batches.count], begin)
    calls["torch int8 bag"] = lambda i: byte_bag(packed, batches.bag_numbers[i % batches.count], begin, mode=0)
    return calls


def in_turn(calls, rounds, calls_of_round, warm=3):
    """Seconds of each call: each system makes some in a row, then the next one."""
    seconds = {name: [] for name in calls}
    number = 0
    gc.freeze()  # Else Python's collector walks all keys of the benchmark for each thousand values that LMDB gives.
    for _ in range(rounds):
        for name, call in calls.items():
            for n in range(-warm, calls_of_round):
                begin = time.perf_counter()
                result = call(number + n)
                spent = time.perf_counter() - begin
                del result  # Freed outside the measured time, for every system alike.
                if n >= 0:
                    seconds[name].append(spent)
        number += calls_of_round
    return seconds


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rows", type=int, default=1_000_000)
    parser.add_argument("--rounds", type=int, default=12)
    parser.add_argument("--batches", type=int, nargs="+", default=[1, 64, 1024])
    parser.add_argument("--threads", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--open-only", action="store_true", help="measure how long an open takes, and nothing else")
    options = parser.parse_args()
    keep_freed_memory()
    print(json.dumps(machine()))
    with tempfile.TemporaryDirectory() as folder:
        table_S, id_S, weight_SD = write(folder, options.rows)
        oneemb.InferenceEmbedding.open(folder, absent="zeros").close()
        print(json.dumps({"rows": options.rows, **cold_open(folder)}))
        if options.open_only:
            return
        weights = torch.from_numpy(weight_SD)
        plain = torch.nn.EmbeddingBag.from_pretrained(weights, mode="sum")
        packed = torch.ops.quantized.embedding_bag_byte_prepack(weights)
        stores, row_of = key_value_stores(folder, table_S, id_S, weight_SD), sorted_index(table_S, id_S)
        collections, rows = quantized_collections(folder, table_S, id_S, weight_SD), []
        for threads in options.threads:
            torch.set_num_threads(threads)
            served = {
                name: oneemb.InferenceEmbedding.open(
                    folder, dtype=name, absent="zeros", verify=True, num_threads=threads
                )
                for name in ("float32", "float16", "int8", "int4")
            }
            for batch in options.batches:
                batches = Batches(batch, max(16, 16384 // batch), table_S, id_S, with_keys=bool(stores))
                kinds = {
                    "lookup": lookups(served, stores, plain, packed, collections, row_of, batches),
                    "bags": bags(served, plain, packed, batches),
                }
                calls = kinds["lookup"]
                want = calls["nn.EmbeddingBag"](0)
                assert torch.equal(calls["oneemb float32"](0).view(-1, DIM), want)
                assert torch.equal(calls["nn.EmbeddingBag, ids"](0), want)
                if collections:
                    assert torch.equal(calls["torchrec int8"](0), calls["oneemb.torchrec int8"](0))
                for kind, its_calls in kinds.items():
                    with torch.no_grad():
                        seconds = in_turn(its_calls, options.rounds, max(4, 64 // batch))
                    base = statistics.median(seconds["nn.EmbeddingBag"])
                    for name, spent in seconds.items():
                        p50, p99 = statistics.median(spent), float(np.quantile(spent, 0.99))
                        ids = batch * TABLES * (IDS if kind == "bags" else 1)
                        line = {"threads": threads, "kind": kind, "batch": batch, "system": name}
                        line |= {"p50_ms": p50 * 1e3, "p99_ms": p99 * 1e3, "ids_per_s": ids / p50}
                        print(json.dumps({**line, "of_embedding_bag": p50 / base}))
                        rows.append([
                            f"{threads}", kind, f"{batch}", name, f"{p50 * 1e3:.3f}", f"{p99 * 1e3:.3f}",
                            f"{ids / p50:,.0f}", f"{p50 / base:.2f}",
                        ])  # fmt: skip
            for one in served.values():
                one.close()
        print(table(["threads", "kind", "batch", "system", "p50 ms", "p99 ms", "ids/s", "x EmbeddingBag"], rows))


if __name__ == "__main__":
    main()
