"""How often a cache holds the rows of a batch, by policy: "lru", "lfu", "lfu" that knows the next batches, and the best
fixed choice of rows.

    python benchmarks/bench_cache_policy.py [--half-life 1 4 8 16 64] [--lookahead 16] [--cases zipf drift ...]
                                            [--traces FOLDER]

The hot tier itself runs, over a store that has every row; only which rows are asked for is made up or read:

    zipf        ids by Zipf's law (1.05), the same law for ever
    drift       Zipf's law; every id's popularity goes to another one within 2,000 batches
    fast drift  the same within 400 batches, in which a cache of 20 % takes in its own size some 7 times
    scan        Zipf's law, and in 50 of every 300 batches ids never seen before or after
    kuairand    the click log of the examples, event after event, all 65 fields; only where the data is
    orm, web    traces of a shop's database in a busy hour, and of the pages of a shop: orm-busy.trace.xz and
                web12.trace.xz in FOLDER

Caches hold 1, 5, 10 and 20 % of the rows there are. `--lookahead` is the number of batches that a loop reads ahead.
`--half-life` tries "lfu" with other half-lives, in multiples of the cache's slots; 8 is built in. `--block-rows` is the
number of rows in a block of the disk: 16 of 256 bytes fill 4096. Printed are, after the cache has filled, hit rates;
the rows read a batch, which are the misses without first uses; the blocks with these rows, if evicted rows are written
in the order in which they lay on disk, as caches do, and if they are written shard by shard of the index; and one JSON
line a case.

"best fixed" is the share of uses that go to the most used rows, as many as there are slots: what a cache whose rows are
chosen with hindsight, once and for all, would hold.
"""

import argparse
import functools
import json
import lzma
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
from _machine import machine, table

from oneemb.kernels.host_backend import HostBackend
from oneemb.kernels.threads import Threads
from oneemb.storage.tiers import hot_tier

_ROWS, _BATCH = 300_000, 2048
_SHARES = (0.01, 0.05, 0.1, 0.2)


class AllRows:
    """A store below that has every row, with nothing in it. Rows are appended, as in a persistent table."""

    row_width = 4

    def __init__(self, ids: int, block_rows: int):
        self._place_I, self._end, self._block_rows = np.full(ids, -1, np.int64), 0, block_rows
        self.blocks = 0
        """Number of blocks read."""

    def __len__(self) -> int:
        return len(self._place_I)

    def get(
        self, table_U: np.ndarray, id_U: np.ndarray, out_XW: np.ndarray, to_U: np.ndarray | None = None
    ) -> np.ndarray:
        place_U = self._place_I[id_U]
        self.blocks += len(np.unique(place_U[place_U >= 0] // self._block_rows))
        return np.zeros(len(id_U), np.bool_)

    def put(self, table_U: np.ndarray, id_U: np.ndarray, row_UW: np.ndarray) -> None:
        self._place_I[id_U] = np.arange(self._end, self._end + len(id_U))
        self._end += len(id_U)

    def contains(self, table_U: np.ndarray, id_U: np.ndarray) -> np.ndarray:
        return np.ones(len(id_U), np.bool_)


class OrderedRows(AllRows):
    """A store that says in which order rows should be written."""

    def write_order(self, table_N: np.ndarray, id_N: np.ndarray) -> np.ndarray:
        return np.lexsort((id_N, self._place_I[id_N]))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--half-life", type=float, nargs="*", default=[hot_tier.HALF_LIFE])
    parser.add_argument("--lookahead", type=int, nargs="*", default=[16])
    parser.add_argument("--cases", nargs="*", default=[*CASES, *TRACES], choices=[*CASES, *TRACES])
    parser.add_argument("--batches", type=int, default=1600)
    parser.add_argument("--block-rows", type=int, default=16)
    parser.add_argument("--traces", type=Path, metavar="FOLDER")
    options = parser.parse_args()
    print(json.dumps(machine()), flush=True)
    policies: dict[str, tuple[str, float, int]] = {"lru": ("lru", 1, 0)}
    for half_life in options.half_life:
        name = "lfu" if len(options.half_life) == 1 else f"lfu {half_life:g}"
        for ahead in [0, *options.lookahead]:
            policies[f"{name}, {ahead} ahead" if ahead else name] = ("lfu", half_life, ahead)
    rate_rows, read_rows, block_rows = list[list[str]](), list[list[str]](), list[list[str]]()
    for case in options.cases:
        make = functools.partial(trace, options.traces, *TRACES[case]) if case in TRACES else CASES[case]
        batches = [id_U.astype(np.int64) for id_U in make(options.batches)]
        if not batches:
            print(f"{case}: no data here", file=sys.stderr)
            continue
        used = np.unique(np.concatenate(batches))
        batches = [np.searchsorted(used, id_U) for id_U in batches]
        known = len(used) if case in ("kuairand", *TRACES) else _ROWS
        largest = max(map(len, batches))
        for share in _SHARES:
            slots = int(known * share)
            if slots < 1.5 * largest:
                continue
            stores = {"": OrderedRows, ", by shard": AllRows}
            made = {
                (name, order): simulate(batches, slots, *policy, store(len(used), options.block_rows))
                for name, policy in policies.items() for order, store in stores.items()
            }  # fmt: skip
            rate, read = ({name: made[name, ""][i] for name in policies} for i in range(2))
            blocks = {name + order: one[2] for (name, order), one in made.items()}
            rate["best fixed"] = best_fixed(batches[len(batches) // 2 :], slots)
            result = {
                "case": case, "cache_share": share, "slots": slots, "hit_rate": rate, "rows_read_a_batch": read,
                "blocks_read_a_batch": blocks,
            }  # fmt: skip
            print(json.dumps(result), flush=True)
            rate_rows.append([case, f"{share:.0%}", *(f"{100 * one:.1f}" for one in rate.values())])
            read_rows.append([case, f"{share:.0%}", *(f"{one:.0f}" for one in read.values())])
            block_rows.append([case, f"{share:.0%}", *(f"{one:.0f}" for one in blocks.values())])
    print(table(["hit rate, %", "cache", *policies, "best fixed"], rate_rows))
    print(table(["rows read a batch", "cache", *policies], read_rows))
    names = [name + order for name in policies for order in ("", ", by shard")]
    print(table(["blocks read a batch", "cache", *names], block_rows))


def simulate(
    batches: list[np.ndarray], slots: int, policy: str, half_life: float, lookahead: int, below: AllRows
) -> tuple[float, float, float]:
    """(hit rate, rows and blocks read a batch) of the second half of the batches."""
    hot_tier.HALF_LIFE = half_life
    tier = hot_tier.HotTier(
        "cache", row_width=4, slots=slots, below=below, resident=False, policy=policy, init=lambda *_: None,
        threads=Threads(1),
    )  # fmt: skip
    backend = HostBackend(Threads(1))
    half, known = len(batches) // 2, 0
    for n, id_U in enumerate(batches):
        if n == half:
            before = tier.stats() | {"blocks": below.blocks}
        while lookahead and known < min(len(batches), n + 1 + lookahead):
            tier.victims.add_batch(np.zeros(len(batches[known]), np.int32), batches[known])
            known += 1
        slot_U = tier.acquire(backend.distinct_keys(np.zeros(len(id_U), np.int32), id_U))[0]
        tier.victims.reach_batch(n + 1)
        tier.mark_dirty(slot_U)
        tier.release(slot_U)
    hits, misses = (tier.stats()[name] - before[name] for name in ("hits", "misses"))
    first_uses = len(np.unique(np.concatenate(batches))) - len(np.unique(np.concatenate(batches[:half])))
    many = len(batches) - half
    blocks = (below.blocks - before["blocks"]) / many
    return round(hits / (hits + misses), 4), round((misses - first_uses) / many, 1), round(blocks, 1)


def best_fixed(batches: list[np.ndarray], slots: int) -> float:
    count_V = np.unique(np.concatenate(batches), return_counts=True)[1]
    return round(float(np.sort(count_V)[-slots:].sum() / count_V.sum()), 4)


# ---- which rows are asked for: the distinct ids of each batch --------------------------------------------------------


class _Zipf:
    """Draws ranks, 0 the most popular."""

    def __init__(self) -> None:
        weight_V = np.arange(1, _ROWS + 1) ** -1.05
        self._cumulated_V = np.cumsum(weight_V / weight_V.sum())
        self.rng = np.random.default_rng(0)

    def draw(self) -> np.ndarray:
        return np.searchsorted(self._cumulated_V, self.rng.random(_BATCH)).clip(max=_ROWS - 1)


def zipf(batches: int) -> Iterator[np.ndarray]:
    law = _Zipf()
    for _ in range(batches):
        yield np.unique(law.draw())


def drift(batches: int, period: int = 2000) -> Iterator[np.ndarray]:
    law = _Zipf()
    phase_V = law.rng.integers(0, period, _ROWS)
    for n in range(batches):
        rank_B = law.draw()
        moved_B = (n + phase_V[rank_B]) // period
        yield np.unique((rank_B + moved_B * 100_003) % _ROWS)


def scan(batches: int) -> Iterator[np.ndarray]:
    law = _Zipf()
    for n in range(batches):
        once = _ROWS + n * _BATCH
        yield np.arange(once, once + _BATCH) if n % 300 >= 250 else np.unique(law.draw())


def kuairand(batches: int, size: int = 32) -> Iterator[np.ndarray]:
    root = Path(__file__).resolve().parent.parent
    folder = root.parent / "shared/data/kuairand"
    if not folder.is_dir():
        return
    sys.path.insert(0, str(root / "examples"))
    from kuairand import PADDING, encode, read_tables

    log = encode(read_tables(folder))
    places, begin = [], 0
    for _, id_RK, row_E in log.each_field():
        value_V, place_RK = np.unique(id_RK, return_inverse=True)
        place_RK = np.where(id_RK == PADDING, -1, place_RK.reshape(id_RK.shape) + begin)
        places.append((place_RK, row_E))
        begin += len(value_V)
    for first in range(0, min(len(log.train), batches * size), size):
        events = log.train[first : first + size]
        id_U = np.unique(np.concatenate([place_RK[row_E[events]].ravel() for place_RK, row_E in places]))
        yield id_U[id_U >= 0]


def trace(folder: Path | None, name: str, dtype: str, size: int, batches: int) -> Iterator[np.ndarray]:
    if folder is not None:
        id_N = np.frombuffer(lzma.open(folder / name).read(), dtype)
        for first in range(0, min(len(id_N), batches * size), size):
            yield np.unique(id_N[first : first + size])


CASES: dict[str, Callable[[int], Iterator[np.ndarray]]] = {
    "zipf": zipf,
    "drift": drift,
    "fast drift": lambda batches: drift(batches, 400),
    "scan": scan,
    "kuairand": kuairand,
}
# Each trace: its file, the dtype of ids there, and the size of a batch.
TRACES = {"orm": ("orm-busy.trace.xz", "<i4", 2048), "web": ("web12.trace.xz", ">i4", 256)}


if __name__ == "__main__":
    main()
