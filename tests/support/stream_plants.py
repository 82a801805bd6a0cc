"""Faults that `stream_soak` must find, planted into its processes one at a time."""

import numpy as np
import torch

import oneemb

PLANTS = {
    "skipped_example": "examples were skipped",
    "example_twice": "examples were trained twice",
    "lost_delta": "a delta was lost",
    "lost_delta_redis": "redis shows step",
    "lost_delta_index": "index shows step",
    "kept_tombstone": "sqlite shows step",
    "kept_tombstone_redis": "redis shows step",
    "kept_tombstone_index": "index shows step",
    "bit": "server 1 shows step",
    "order": "server 1 went back",
}
"""{fault: words of the error that names it}. The sink of a fault is SQLite if no other is named."""
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


def planted_answers(plant):
    """Function of a server's current version that returns the version which the server answers with."""
    seen = []

    def answers(version):
        if not seen or seen[-1] is not version:
            seen.append(version)
        elif plant == "order" and len(seen) == _AT:  # The server has answered with it, and does with the one before.
            seen.append(version)
            return seen[-3]
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
    def __init__(self, sink, plant):
        self.name, self._sink, self._plant = sink.name, sink, plant
        self._deltas, self._passed_over = 0, None

    wants_whole = False

    def version(self):
        return self._passed_over or self._sink.version()

    def apply(self, changes):
        if not changes.is_whole:
            self._deltas += 1
            if self._plant == "lost_delta" and self._deltas == 2:
                self._passed_over = changes.version
                return
            if self._plant == "kept_tombstone":
                changes.gone = lambda **_: (np.empty(0, np.int32), np.empty(0, np.int64))
        self._sink.apply(changes)
        self._passed_over = None

    def close(self):
        self._sink.close()


def planted_sinks(sinks, plant):
    """The sinks of the publisher: the index, SQLite, Redis."""
    fault, _, place = (plant or "").rpartition("_") if (plant or "").endswith(("_redis", "_index")) else (plant, "", "")
    if fault not in ("lost_delta", "kept_tombstone"):
        return sinks
    number = {"index": 0, "": 1, "redis": 2}[place]
    return [_PlantedSink(sink, fault) if at == number else sink for at, sink in enumerate(sinks)]
