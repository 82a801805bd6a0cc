"""How often a cache holds the rows a batch asks for, by policy: "lru", "lfu", and the best fixed choice of rows.

    python benchmarks/bench_cache_policy.py [--half-life 1 4 8 16 64] [--cases zipf drift ...]

The hot tier itself runs, over a store that has every row; only which rows are asked for is made up or read:

    zipf        ids by Zipf's law (1.05), the same law for ever
    drift       Zipf's law; every id's popularity goes to another one within 2,000 batches
    fast drift  the same within 400 batches, in which a cache of 20 % takes in its own size some 7 times
    scan        Zipf's law, and in 50 of every 300 batches ids never seen before or after
    kuairand    the click log of the examples, event after event, all 65 fields; only where the data is

Caches hold 1, 5 and 20 % of the rows there are. `--half-life` tries "lfu" with other half-lives, in multiples of the
cache's slots; 8 is built in. Printed are hit rates after the cache has filled, and one JSON line a case.

"best fixed" is the share of uses that go to the most used rows, as many as there are slots: what a cache whose rows are
chosen with hindsight, once and for all, would hold.
"""

import argparse
import json
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
from _machine import machine, table

from oneemb.kernels.host_backend import HostBackend
from oneemb.kernels.threads import Threads
from oneemb.storage.tiers import hot_tier

_ROWS, _BATCH = 300_000, 2048
_SHARES = (0.01, 0.05, 0.2)


class AllRows:
    """A store below that has every row, with nothing in it."""

    row_width = 4

    def __len__(self) -> int:
        return _ROWS

    def get(
        self, table_U: np.ndarray, id_U: np.ndarray, out_XW: np.ndarray, to_U: np.ndarray | None = None
    ) -> np.ndarray:
        return np.zeros(len(id_U), np.bool_)

    def put(self, table_U: np.ndarray, id_U: np.ndarray, row_UW: np.ndarray) -> None:
        pass

    def contains(self, table_U: np.ndarray, id_U: np.ndarray) -> np.ndarray:
        return np.ones(len(id_U), np.bool_)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--half-life", type=float, nargs="*", default=[hot_tier.HALF_LIFE])
    parser.add_argument("--cases", nargs="*", default=list(CASES), choices=list(CASES))
    parser.add_argument("--batches", type=int, default=1600)
    options = parser.parse_args()
    print(json.dumps(machine()), flush=True)
    policies: dict[str, tuple[str, float]] = {"lru": ("lru", 1)}
    for half_life in options.half_life:
        policies["lfu" if len(options.half_life) == 1 else f"lfu {half_life:g}"] = ("lfu", half_life)
    rows = []
    for case in options.cases:
        batches = [id_U.astype(np.int64) for id_U in CASES[case](options.batches)]
        if not batches:
            print(f"{case}: no data here", file=sys.stderr)
            continue
        known = len(np.unique(np.concatenate(batches))) if case == "kuairand" else _ROWS
        largest = max(map(len, batches))
        for share in _SHARES:
            slots = int(known * share)
            if slots < 1.5 * largest:
                continue
            rate = {name: hit_rate(batches, slots, *policy) for name, policy in policies.items()}
            rate["best fixed"] = best_fixed(batches[len(batches) // 2 :], slots)
            print(json.dumps({"case": case, "cache_share": share, "slots": slots, "hit_rate": rate}), flush=True)
            rows.append([case, f"{share:.0%}", *(f"{100 * one:.1f}" for one in rate.values())])
    print(table(["ids", "cache", *policies, "best fixed"], rows))


def hit_rate(batches: list[np.ndarray], slots: int, policy: str, half_life: float) -> float:
    hot_tier.HALF_LIFE = half_life
    tier = hot_tier.HotTier(
        "cache", row_width=4, slots=slots, below=AllRows(), resident=False, policy=policy, init=lambda *_: None,
        threads=Threads(1),
    )  # fmt: skip
    backend = HostBackend(Threads(1))
    for n, id_U in enumerate(batches):
        if n == len(batches) // 2:
            before = tier.stats()
        tier.release(tier.acquire(backend.distinct_keys(np.zeros(len(id_U), np.int32), id_U))[0])
    hits, misses = (tier.stats()[name] - before[name] for name in ("hits", "misses"))
    return round(hits / (hits + misses), 4)


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


CASES: dict[str, Callable[[int], Iterator[np.ndarray]]] = {
    "zipf": zipf,
    "drift": drift,
    "fast drift": lambda batches: drift(batches, 400),
    "scan": scan,
    "kuairand": kuairand,
}


if __name__ == "__main__":
    main()
