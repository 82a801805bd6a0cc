"""A graph that only evaluates."""

from typing import Any

import torch

from oneemb.graph.prefetch import Prepared
from oneemb.storage.locking.undisturbed import undisturbed
from oneemb.training.compiled_graph import CompiledGraph
from oneemb.training.loader_loops import OnAcquired
from oneemb.training.plan_cache import Batch


class EvalGraph(CompiledGraph):
    """A graph that only evaluates: subclass it, assign modules, define `build`, and call the object.

    A call runs all modules in eval mode, whatever mode they are in, makes no gradient and inserts no id: an unknown id
    reads as its initial value. So a `TrainGraph` and an `EvalGraph` may share modules. If two threads call graphs that
    share an embedding, each waits for the step of the other. Other modules have no such lock, and their mode is the
    same for all threads: an `EvalGraph` may not run while another thread trains its modules eagerly, or calls a graph
    that shares modules with it but no embedding; give it copies of those modules.

    Example:
        >>> import tempfile, torch, oneemb
        >>> class Score(oneemb.EvalGraph):
        ...     def __init__(self):
        ...         super().__init__()
        ...         self.embedding = oneemb.MultiTableEmbedding(
        ...             "words", 4, torch.float32, torch.int64, [oneemb.make_table()],
        ...             oneemb.make_device_mem_store_options(tempfile.mkdtemp()))
        ...     def build(self, ids):
        ...         return self.embedding(ids).sum(-1)
        >>> graph = Score()
        >>> graph(torch.tensor([7, 8])).shape, graph.embedding.stats()["rows"]
        (torch.Size([2]), 0)
    """

    def _step(self, batch: Batch, prepared: Prepared, on_acquired: OnAcquired | None) -> Any:
        in_training_mode = [module for module in self.modules() if module.training]
        try:
            for module in in_training_mode:
                module.training = False
            with torch.no_grad():
                return super()._step(batch, prepared, on_acquired)
        finally:
            with undisturbed:
                for module in in_training_mode:
                    module.training = True
