"""`config.cuda_graph` on a GPU: dense modules replayed as CUDA graphs, beside lookups and updates that are launched."""

import numpy as np
import pytest
import torch

from tests.cuda.conftest import SIMULATED
from tests.cuda.test_train import Graph, batches, on_gpu, rows_in

pytestmark = pytest.mark.skipif(SIMULATED, reason="the simulator captures no CUDA graph")


@pytest.mark.parametrize("store", ["device", "host"])
def test_replayed_modules_train_to_the_same_losses_and_rows(gpu, store, tmp_path, monkeypatch):
    captured, make = [], torch.cuda.make_graphed_callables
    monkeypatch.setattr(torch.cuda, "make_graphed_callables", lambda *args: captured.append(args) or make(*args))
    results = []
    for replays in (False, True):
        graph = Graph(tmp_path / str(replays), store, "adam")
        graph.config.cuda_graph = replays
        with on_gpu(gpu, graph):
            losses = [graph(*batch).item() for batch in batches(gpu) * 2]
            losses += [loss.item() for loss in graph.run(batches(gpu), prefetch_depth=2)]
            results.append((losses, rows_in(graph)))
        graph.embedding.close()
        assert bool(captured) is replays
    (expected, expected_rows), (found, rows) = results
    np.testing.assert_allclose(found, expected, rtol=1e-5, atol=1e-5)
    assert rows.keys() == expected_rows.keys()
    for key, row in expected_rows.items():
        np.testing.assert_allclose(rows[key], row, rtol=1e-4, atol=1e-5)
