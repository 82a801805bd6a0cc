"""Faults that `stream_soak` must find, planted into its processes one at a time."""

import functools

import numpy as np
import redis
import torch

import oneemb

PLANTS = {
    "skipped_example": "examples were skipped",
    "example_twice": "examples were trained twice",
    "lost_delta": "a delta was lost",
    "delta_twice": "a delta was applied twice",
    "added_delta_redis": "redis shows step",
    "lost_row_redis": "redis shows step",
    "wrong_row_redis": "redis shows step",
    "lost_delta_redis": "redis shows step",
    "lost_delta_index": "index shows step",
    "kept_tombstone": "sqlite shows step",
    "kept_tombstone_redis": "redis shows step",
    "kept_tombstone_index": "index shows step",
    "bit": "server 1 shows step",
    "stale": "server 1 shows step",
    "order": "server 1 went back",
}
"""{fault: words of the error that names it}. The sink of a fault is SQLite if no other is named."""
_OF_SINKS = ["lost_delta", "delta_twice", "added_delta", "lost_row", "wrong_row", "kept_tombstone"]
_AT = 4
"""Version that a server sees, or batch, that the fault is planted at."""


class _PlantedLoader:
    def __init__(self, loader, plant):
        self._loader, self._plant = loader, plant
        self.state_dict, self.load_state_dict = loader.state_dict, loader.load_state_dict

    def __iter__(self):
        for number, batch in enumerate(self._loader):
            if number != _AT or self._plant != "skipped_example":
                yield batch
            if number == _AT and self._plant == "example_twice":
                yield batch


def planted_batches(loader, plant):
    return _PlantedLoader(loader, plant) if plant in ("skipped_example", "example_twice") else loader


class _Stale:
    """A version that answers with the rows of another."""

    def __init__(self, version, other):
        self.snapshots, self.module, self._other = version.snapshots, other.module, other

    def __call__(self, ids):
        return self._other(ids)


def planted_answers(plant):
    """Function of a server's current version that returns the version which the server answers with."""
    seen = []

    def answers(version):
        if not seen or seen[-1] is not version:
            seen.append(version)
        elif plant == "order" and len(seen) == _AT:  # The server has answered with it, and does with the one before.
            seen.append(version)
            return seen[-3]
        if plant == "stale" and len(seen) >= _AT:
            return _Stale(seen[-1], seen[-2])
        return version

    if plant == "bit":
        lookup = oneemb.InferenceEmbedding.forward

        def forward(self, *arguments):
            rows = lookup(self, *arguments)
            if len(seen) >= _AT:
                rows.view(torch.int32)[0, 0, 0] ^= 1
            return rows

        oneemb.InferenceEmbedding.forward = forward
    return answers


class _PlantedSink:
    wants_whole = False

    def __init__(self, sink, plant, port):
        self.name, self._sink, self._plant, self._port = sink.name, sink, plant, port
        self._deltas, self._passed_over = 0, None

    def version(self):
        return self._passed_over or self._sink.version()

    def apply(self, changes):
        if changes.is_whole:
            self._passed_over = None
            return self._sink.apply(changes)
        self._deltas += 1
        if self._plant == "lost_delta" and self._deltas == 2:
            self._passed_over = changes.version
            return
        if self._plant == "kept_tombstone":
            changes.gone = lambda **_: (np.empty(0, np.int32), np.empty(0, np.int64))
        if self._plant in ("lost_row", "added_delta"):
            changes.batches = functools.partial(_other_rows, changes.batches, self._plant)
        self._sink.apply(changes)
        if self._plant == "delta_twice" and self._deltas == 2:
            self._sink.apply(changes)
        if self._plant == "wrong_row":
            client = redis.Redis(port=self._port)
            client.set(next(client.scan_iter("*_osid_0")), bytes(16))
        self._passed_over = None

    def close(self):
        self._sink.close()


def _other_rows(batches, plant, *arguments, **options):
    for batch in batches(*arguments, **options):
        if plant == "added_delta":
            yield batch._replace(weight_ND=2 * batch.weight_ND)
        else:
            yield batch._replace(**{name: its[1:] for name, its in batch._asdict().items() if its is not None})


def planted_sinks(sinks, plant, port):
    """The sinks of the publisher: the index, SQLite, Redis."""
    place, fault = 1, plant
    for number, end in ((0, "_index"), (2, "_redis")):
        if plant is not None and plant.endswith(end):
            place, fault = number, plant.removesuffix(end)
    if fault not in _OF_SINKS:
        return sinks
    return [_PlantedSink(sink, fault, port) if at == place else sink for at, sink in enumerate(sinks)]
