"""What an idiom of `build` is, and the judge: ordinary Python against a graph that is called, and one that is run.

An idiom is a class with `setup` and `build`, as a user writes them. It is made three times, from the same seeds: as a
plain module that an eager loop trains with `oneemb.Optimizer`, as a `TrainGraph` that is called for each batch, and as
one whose `run` is given all batches. What `build` returns, every weight and row at the end, what it printed and what it
did beside (`seen`) must be the same, bit for bit.
"""

import contextlib
import enum
import io
import random
from collections.abc import Mapping, Sequence
from dataclasses import fields, is_dataclass
from typing import Any

import numpy as np
import torch
from torch.nn.functional import binary_cross_entropy_with_logits

import oneemb
from oneemb.training.compiled_graph import GraphConfig
from tests.support.graph_models import make_embedding, rows_of

__all__ = ["CRASH", "EQUAL", "REFUSED", "WAYS", "WRONG", "Idiom", "Outcome", "judge"]

SIZES = (4, 3, 6, 4, 2, 4, 5, 4, 3, 6, 4, 2)


class Outcome(enum.Enum):
    """What becomes of an idiom. The later ones are worse."""

    EQUAL = "gives what ordinary Python gives"
    REFUSED = "a BuildError names the line, before a wrong step"
    CRASH = "an error that does not tell the user what to do"
    WRONG = "numbers or effects differ, and nobody says so"


EQUAL, REFUSED, CRASH, WRONG = Outcome


class Idiom:
    """A model with one embedding of two tables, and batches of several sizes; idioms change what they are about."""

    refused = ""
    """What the error says, where an idiom is refused; "" = it is EQUAL."""
    raises: tuple[type[Exception], ...] = ()
    """What `build` raises in some steps, after which the user goes on."""
    refused_outside = False
    """Whether what is refused is no line of `build`, so that the error names something else."""
    tolerance = 0.0
    """Above 0: `oracle` is plain torch, whose sums have another order."""

    def setup(self) -> None:
        """Make modules and state."""
        self.embedding = make_embedding()
        self.mlp = oneemb.nn.FusedMLP(8, [8], 1, skip_final_activation=True)

    def build(self, *batch: Any) -> Any:
        """The step, as a user writes it."""
        raise NotImplementedError

    def between(self, step: int) -> None:
        """What the user does before a step, the first one too."""

    def batches(self) -> list[Any]:
        """Batches of ids [B, 2] and labels [B]."""
        return [(torch.randint(0, 20, (size, 2)), torch.rand(size).round()) for size in SIZES]

    def seen(self) -> Any:
        """What `build` did beside computing."""

    def trained_by(self) -> list[Any]:
        """What trains the model: optimizers, or tuples of one and its scheduler."""
        return [torch.optim.Adam(self.parameters(), lr=0.01)]  # type: ignore[attr-defined]

    def oracle(self) -> list[Any] | None:
        """What `build` returns at each step, by plain torch; None = the eager loop says."""

    # ---- what most idioms do ----------------------------------------------------------------------------------------

    def logit(self, ids: torch.Tensor) -> torch.Tensor:
        """[B, 2] -> [B]"""
        return self.mlp(self.embedding(ids).flatten(1)).squeeze(1)

    def loss(self, ids: torch.Tensor, label: torch.Tensor) -> torch.Tensor:
        """The usual loss."""
        return binary_cross_entropy_with_logits(self.logit(ids), label)


class EagerModel(torch.nn.Module):
    """Trains `build` as ordinary Python."""

    def __init__(self) -> None:
        super().__init__()
        self.config, self.joined, self.schedulers, self.calls = GraphConfig(), [], [], 0

    def add_optimizer(self, optimizer: torch.optim.Optimizer, scheduler: Any = None) -> None:
        """Join an optimizer with the embeddings it trains."""
        held = {id(p) for group in optimizer.param_groups for p in group["params"]}
        mine = [one for one in embeddings_of(self) if id(one.weight) in held]
        self.joined.append(oneemb.Optimizer(optimizer, mine))
        self.schedulers += [] if scheduler is None else [scheduler]

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """One step."""
        if not self.training:
            with torch.no_grad():
                return self.build(*args, **kwargs)
        try:
            result = self.build(*args, **kwargs)
        except Exception:
            self.drop_gradients()
            raise
        self.calls += 1
        if self.calls >= self.config.accumulation_steps:
            for stepper in (*self.joined, *self.schedulers):
                stepper.step()
            self.drop_gradients()
        return result

    def drop_gradients(self) -> None:
        """Begin a step."""
        self.calls = 0
        for optimizer in self.joined:
            optimizer.zero_grad()


WAYS = ("call", "run")


def judge(
    idiom: type[Idiom], graph: type[torch.nn.Module] = oneemb.TrainGraph, ways: Sequence[str] = WAYS
) -> tuple[Outcome, str]:
    """(outcome, what was found); the worst one of these ways: calling a graph, and running it."""
    eager = _record(idiom, EagerModel, called=True)
    if eager.error is not None:
        raise eager.error
    found = [(how, *_compare(idiom, eager, _record(idiom, graph, called=how == "call"))) for how in ways]
    how, outcome, said = max(found, key=lambda one: list(Outcome).index(one[1]))
    return outcome, f"{how}: {said}" if said else ""


class _Record:
    """What a model has done."""

    def __init__(self) -> None:
        self.results: list[Any] = []
        self.error: Exception | None = None
        self.state: Any = None
        self.printed = ""


def _record(idiom: type[Idiom], base: type[torch.nn.Module], called: bool) -> _Record:
    record, out = _Record(), io.StringIO()
    _seed()
    with contextlib.redirect_stdout(out):
        model = _make(idiom, base)
        batches = model.batches()
        _seed()
        try:
            while len(record.results) < len(batches):
                try:
                    (_call if called else _run)(model, batches, record.results)
                except model.raises as error:
                    record.results.append(f"{type(error).__name__}: {error}")
        except Exception as error:
            record.error = error
        record.state = None if record.error else (_weights(model), model.seen())
    record.printed = out.getvalue()
    if base is EagerModel and (plain := model.oracle()) is not None:
        record.results = plain
    for embedding in embeddings_of(model):
        embedding.close()
    return record


def _call(model: Any, batches: list[Any], results: list[Any]) -> None:
    """Call a model for the batches that there is no result for yet."""
    for step in range(len(results), len(batches)):
        model.between(step)
        args, kwargs = ((), batches[step]) if type(batches[step]) is dict else (batches[step], {})
        results.append(model(*args, **kwargs))


def _run(model: Any, batches: list[Any], results: list[Any]) -> None:
    """Run a graph over them."""
    model.between(len(results))
    for result in model.run(batches[len(results) :]):
        results.append(result)
        if len(results) < len(batches):
            model.between(len(results))


def _seed() -> None:
    torch.manual_seed(1)
    random.seed(1)
    np.random.seed(1)


def _make(idiom: type[Idiom], base: type[torch.nn.Module]) -> Any:
    model: Any = type(idiom.__name__, (idiom, base), {})()
    model.setup()
    for trainer in model.trained_by():
        model.add_optimizer(*(trainer if isinstance(trainer, tuple) else (trainer,)))
    return model


def embeddings_of(model: torch.nn.Module) -> list[Any]:
    """The embeddings of a model."""
    return [one for one in model.modules() if isinstance(one, oneemb.MultiTableEmbedding)]


def _weights(model: torch.nn.Module) -> dict[str, Any]:
    found: dict[str, Any] = {f"rows of {one.name}": dict(sorted(rows_of(one).items())) for one in embeddings_of(model)}
    found |= {name: p.detach().clone() for name, p in model.named_parameters()}
    return found | {name: buffer.clone() for name, buffer in model.named_buffers()}


def _compare(idiom: type[Idiom], eager: _Record, graph: _Record) -> tuple[Outcome, str]:
    count = len(graph.results) if graph.error else len(eager.results)
    if said := _difference(eager.results[:count], graph.results, "result", idiom.tolerance):
        return WRONG, said
    if graph.error is not None:
        notes = " ".join(getattr(graph.error, "__notes__", ()))
        said = f"{type(graph.error).__name__}: {graph.error} {notes}"
        named = idiom.refused_outside or "build_corpus" in str(graph.error)
        refused = isinstance(graph.error, oneemb.BuildError) and named and idiom.refused in said
        return (REFUSED if refused else CRASH), said
    if idiom.tolerance == 0.0:
        said = _difference(eager.state, graph.state, "state") or _difference(eager.printed, graph.printed, "printed")
    return (WRONG, said) if said else (EQUAL, "")


def _difference(a: Any, b: Any, where: str, tolerance: float = 0.0) -> str:
    """Where two nested values first differ; "" if they do not."""
    if type(a) is not type(b):
        return f"{where}: {type(a).__name__} and {type(b).__name__}"
    if isinstance(a, torch.Tensor):
        same = torch.allclose(a, b, rtol=tolerance) if tolerance else torch.equal(a, b) and a.dtype == b.dtype
        return "" if same else f"{where}: {_short(a)} and {_short(b)}"
    if is_dataclass(a):
        a, b = ({field.name: getattr(one, field.name) for field in fields(one)} for one in (a, b))
    if isinstance(a, Mapping):
        if list(a) != list(b):
            return f"{where}: keys {list(a)[:4]} and {list(b)[:4]}"
        return next(filter(None, (_difference(a[k], b[k], f"{where}[{k!r}]", tolerance) for k in a)), "")
    if isinstance(a, list | tuple):
        if len(a) != len(b):
            return f"{where}: {len(a)} and {len(b)} of them"
        pairs = enumerate(zip(a, b, strict=True))
        return next(filter(None, (_difference(x, y, f"{where}[{i}]", tolerance) for i, (x, y) in pairs)), "")
    return "" if a == b else f"{where}: {_short(a)} and {_short(b)}"


def _short(value: Any) -> str:
    text = repr(value.tolist() if isinstance(value, torch.Tensor) else value)
    return text if len(text) < 60 else text[:57] + "..."
