"""A training step as a graph: traced once, compiled, then called for each batch."""

from typing import Any

import torch
from torch import fx

from oneemb.graph.pipeline import compile_graph
from oneemb.graph.tracer import embeddings_in
from oneemb.optimizer import Optimizer

__all__ = ["TrainGraph"]


class TrainGraph(torch.nn.Module):
    """Subclass it, assign modules, add optimizers, write `build` with `loss.backward()` in it, and call the object.

    `build` is traced with torch.fx at the first call. Submodules that hold no embedding may contain any Python. The
    update of embedding rows is part of the graph: a table's gradient is never made. Parameters and rows are updated
    once a call, after all of `build`. In eval mode (`graph.eval()`) a call runs forward only and inserts no ids.

    Example:
        >>> import tempfile, torch, oneemb
        >>> embedding = oneemb.MultiTableEmbedding(
        ...     "items", 8, torch.float32, torch.int64, [oneemb.make_table(), oneemb.make_table()],
        ...     oneemb.make_device_mem_store_options(tempfile.mkdtemp()))
        >>> class Graph(oneemb.TrainGraph):
        ...     def __init__(self):
        ...         super().__init__()
        ...         self.embedding = embedding
        ...         self.mlp = oneemb.nn.FusedMLP(16, [8], 1, skip_final_activation=True)
        ...         self.add_optimizer(torch.optim.Adam(self.parameters(), lr=0.01))
        ...     def build(self, ids, label):
        ...         logit = self.mlp(self.embedding(ids).flatten(1)).squeeze(1)
        ...         loss = torch.nn.functional.binary_cross_entropy_with_logits(logit, label)
        ...         loss.backward()
        ...         return loss
        >>> loss = Graph()(torch.tensor([[1, 2], [3, 4]]), torch.tensor([0.0, 1.0]))
        >>> embedding.stats()["rows"]
        4

    Reference: OneFlow's nn.Graph.
    """

    def __init__(self) -> None:
        super().__init__()
        self.optimizers: list[Optimizer] = []
        """What `add_optimizer` was given, joined with the embeddings each trains; `.optimizer` is the torch object."""
        self._lr_schedulers: list[Any] = []
        self._compiled: dict[tuple[bool, ...], fx.GraphModule] = {}

    def add_optimizer(
        self, optimizer: torch.optim.Optimizer, lr_scheduler: Any = None, *, skip_nonfinite: bool = False
    ) -> None:
        """Let an optimizer train those of the graph's parameters and embeddings that its groups hold.

        Args:
            optimizer: a torch optimizer. Groups that hold an embedding's weight train its rows.
            lr_scheduler: a torch.optim.lr_scheduler of this optimizer; it is stepped after each call.
            skip_nonfinite: leave out steps in which a gradient is NaN or infinite, in place of raising.

        Raises:
            ValueError: its groups hold nothing of this graph; the optimizer's class or an option of it is not
                supported for rows; or the scheduler is another optimizer's, or one that needs a metric.
            StorageError: rows hold another optimizer's state, or a path is in use.
        """
        held = {id(parameter) for group in optimizer.param_groups for parameter in group["params"]}
        if not any(id(parameter) in held for parameter in self.parameters()):
            raise ValueError(
                f"{type(optimizer).__name__} holds no parameter of this graph; assign the modules before add_optimizer"
            )
        if isinstance(lr_scheduler, torch.optim.lr_scheduler.ReduceLROnPlateau):
            raise ValueError("ReduceLROnPlateau needs a metric; step it yourself after each evaluation")
        if lr_scheduler is not None and getattr(lr_scheduler, "optimizer", optimizer) is not optimizer:
            raise ValueError("lr_scheduler must be made on the optimizer it is added with")
        embeddings = [one for one in embeddings_in(self).values() if id(one.weight) in held]
        self.optimizers.append(Optimizer(optimizer, embeddings, skip_nonfinite=skip_nonfinite))
        self._lr_schedulers.append(lr_scheduler)
        self._compiled.clear()

    def build(self, *args: Any, **kwargs: Any) -> Any:
        """One training step: forward, `loss.backward()`, and what to return. Users write it."""
        raise NotImplementedError(f"{type(self).__name__} must define build(self, ...)")

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Run one step on a batch, compiling `build` if this is the first.

        Args:
            args, kwargs: those of `build`.

        Returns:
            What `build` returns.

        Raises:
            BuildError: `build` cannot be compiled.
            NonFiniteGradientError: a gradient is NaN or infinite; nothing has changed.
        """
        compiled = self.compiled()
        if self.training:
            return compiled(*args, **kwargs)
        with torch.no_grad():
            return compiled(*args, **kwargs)

    def compiled(self) -> fx.GraphModule:
        """The graph that a call runs now; `.code` and `.graph` show it.

        Compiled anew where modules have changed between training and eval mode, or between frozen and trained.
        """
        modes = [(one.training, one.weight.requires_grad) for one in embeddings_in(self).values()]
        key = (self.training, *(flag for mode in modes for flag in mode))
        if key not in self._compiled:
            self._compiled[key] = compile_graph(self, list(zip(self.optimizers, self._lr_schedulers, strict=True)))
        return self._compiled[key]
