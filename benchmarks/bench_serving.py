"""Lookups of a served snapshot beside LMDB, RocksDB, nn.EmbeddingBag and torch's quantized bags, in one run.

    python benchmarks/bench_serving.py --rows 1000000

All have the same rows, one of 26 tables each, and answer the same uniform ids, one a table. LMDB and RocksDB are keyed
by (table, id) and copy into one array; nn.EmbeddingBag and the quantized bag have row numbers as ids, looked up in one
table. Times are p50 and p99 of a batch, in ms.
"""

import argparse
import json
import statistics
import tempfile
import time

import numpy as np
import torch
from _machine import interleaved, machine, table

import oneemb

TABLES, DIM = 26, 16


def write(folder, rows):
    """Rows with scattered ids; returns those of each row."""
    rng = np.random.default_rng(0)
    id_S, weight_SD = rng.permutation(rows) * 7_919_777, rng.standard_normal((rows, DIM)).astype(np.float32)
    table_S = (np.arange(rows) % TABLES).astype(np.int32)
    with oneemb.make_persistent_table_writer(folder, "rows", torch.int64, torch.float32, DIM) as writer:
        for n in range(0, rows, 65536):
            its = slice(n, n + 65536)
            writer.write(id_S[its], weight_SD[its], table_S[its])
    return table_S, id_S, weight_SD


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


def calls_of(served, stores, plain, packed, ids, keys, numbers):
    """What is measured: functions of the number of a batch."""
    offsets, byte_bag = torch.arange(numbers.shape[1]), torch.ops.quantized.embedding_bag_byte_rowwise_offsets
    calls = {f"oneemb {name}": lambda i, its=its: its(ids[i % 16]) for name, its in served.items()}
    calls |= {
        name: lambda i, look=look: np.frombuffer(b"".join(look(keys[i % 16])), np.float32)
        for name, look in stores.items()
    }
    calls["nn.EmbeddingBag"] = lambda i: plain(numbers[i % 16], offsets)
    calls["torch int8 bag"] = lambda i: byte_bag(packed, numbers[i % 16], offsets, mode=0)
    return calls


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rows", type=int, default=1_000_000)
    parser.add_argument("--runs", type=int, default=100)
    parser.add_argument("--batches", type=int, nargs="+", default=[1, 64, 1024])
    options = parser.parse_args()
    print(json.dumps(machine()))
    with tempfile.TemporaryDirectory() as folder:
        table_S, id_S, weight_SD = write(folder, options.rows)
        served = {
            name: oneemb.InferenceEmbedding.open(folder, dtype=name, absent="zeros")
            for name in ("float32", "float16", "int8", "int4")
        }
        begin = time.perf_counter()
        oneemb.InferenceEmbedding.open(folder, dtype="float32", absent="zeros").close()
        print(json.dumps({"open_s": round(time.perf_counter() - begin, 4), "rows": options.rows}))
        weights = torch.from_numpy(weight_SD)
        plain = torch.nn.EmbeddingBag.from_pretrained(weights, mode="sum")
        packed = torch.ops.quantized.embedding_bag_byte_prepack(weights)
        stores = key_value_stores(folder, table_S, id_S, weight_SD)
        rng, rows = np.random.default_rng(1), []
        per_table = options.rows // TABLES
        for batch in options.batches:
            pick_BT = rng.integers(0, per_table, (16, batch, TABLES)) * TABLES + np.arange(TABLES)
            ids, numbers = torch.from_numpy(id_S[pick_BT]), torch.from_numpy(pick_BT.reshape(16, -1))
            keys = [
                [np.array([table_S[s], id_S[s]], np.int64).tobytes() for s in pick] for pick in numbers.numpy()
            ]  # fmt: skip
            calls = calls_of(served, stores, plain, packed, ids, keys, numbers)
            assert torch.equal(calls["oneemb float32"](0).view(-1, DIM), calls["nn.EmbeddingBag"](0))
            with torch.no_grad():
                seconds = interleaved(calls, options.runs, warm=5)
            for name, its in seconds.items():
                p50, p99 = statistics.median(its), float(np.quantile(its, 0.99))
                line = {"system": name, "batch": batch, "p50_ms": p50 * 1e3, "p99_ms": p99 * 1e3,
                        "lookups_per_s": batch * TABLES / p50}  # fmt: skip
                print(json.dumps(line))
                rows.append([name, f"{batch}", f"{p50 * 1e3:.3f}", f"{p99 * 1e3:.3f}", f"{line['lookups_per_s']:,.0f}"])
        print(table(["system", "batch", "p50 ms", "p99 ms", "lookups/s"], rows))
        for its in served.values():
            its.close()


if __name__ == "__main__":
    main()
