"""Faults that `stream_soak` must find, planted into its processes one at a time."""

import numpy as np
import torch

import oneemb

PLANTS = {
    "skipped_example": "examples were skipped",
    "example_twice": "examples were trained twice",
    "kept_tombstone": "sqlite shows step",
    "kept_tombstone_redis": "redis shows step",
    "bit": "server 1 shows step",
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
    def __init__(self, sink):
        self.name, self._sink, self.version, self.close = sink.name, sink, sink.version, sink.close

    wants_whole = False

    def apply(self, changes):
        if not changes.is_whole:
            changes.gone = lambda **_: (np.empty(0, np.int32), np.empty(0, np.int64))
        self._sink.apply(changes)


def planted_sinks(sinks, plant):
    """The sinks of the publisher: the index, SQLite, Redis."""
    number = {"kept_tombstone": 1, "kept_tombstone_redis": 2}.get(plant)
    return [_PlantedSink(sink) if at == number else sink for at, sink in enumerate(sinks)]
