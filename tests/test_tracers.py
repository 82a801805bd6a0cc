"""Lookups that torch records, exports or transforms are refused where rows would be constants, not beside that."""

import io

import pytest
import torch
from torch.fx.experimental.proxy_tensor import make_fx

import oneemb
from oneemb.graph.tracers import tracer_of
from tests.support.graph_models import make_embedding
from tests.support.tracing_threads import KINDS, another_thread

IDS = torch.tensor([[1, 2], [3, 4]])


class Model(torch.nn.Module):
    def __init__(self, look_up):
        super().__init__()
        self.look_up, self.embedding = look_up, getattr(look_up, "__self__", look_up)  # fx asks for a child

    def forward(self, ids):
        return self.look_up(ids) * 2


TRACERS = {
    "torch.export": lambda model: torch.export.export(model, (IDS,), strict=False),
    "torch.jit.trace": lambda model: torch.jit.trace(model, (IDS,), check_trace=False),
    "torch.onnx": lambda model: torch.onnx.export(model, (IDS,), io.BytesIO(), dynamo=False),
    "torch.fx": torch.fx.symbolic_trace,
    "make_fx of values": lambda model: make_fx(model)(IDS),
    "make_fx of stand-ins": lambda model: make_fx(model, tracing_mode="symbolic")(IDS),
    "make_fx before dispatch": lambda model: make_fx(model, pre_dispatch=True)(IDS),
}
TRANSFORMS = {
    "vmap": lambda model: torch.vmap(model)(IDS.expand(3, 2, 2)),
    "vmap of a factor": lambda model: torch.vmap(lambda factor: model(IDS) * factor)(torch.ones(3)),
    "grad": lambda model: torch.func.grad(lambda factor: (model(IDS) * factor).sum())(torch.ones(())),
    "jvp": lambda model: torch.func.jvp(lambda factor: model(IDS) * factor, (torch.ones(()),), (torch.ones(()),)),
    "functionalize": lambda model: torch.func.functionalize(model)(IDS),
}


def doors(tmp_path):
    """What looks ids up, by name."""
    embedding = make_embedding(store="host")
    embedding(IDS)
    embedding.save_snapshot("one")
    served = oneemb.InferenceEmbedding.open(embedding.store_options.persistent_path)
    averaged = oneemb.AveragedEmbedding(embedding, tmp_path / "averages")
    return embedding, {
        "lookup": embedding, "read": embedding.read, "averages": averaged, "served rows": served,
        "served rows, read": served.read,
    }  # fmt: skip


@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning")
@pytest.mark.parametrize("training", [True, False])
def test_what_would_keep_rows_as_constants_is_refused_and_says_what_to_do(tmp_path, training):
    embedding, lookups = doors(tmp_path)
    embedding.train(training).requires_grad_(training)
    rows = embedding.stats()["rows"]
    for door, look_up in lookups.items():
        for name, trace in TRACERS.items():
            with pytest.raises(RuntimeError, match=r"graph\.export\(path, example_ids\)"):
                trace(Model(look_up))
                pytest.fail(f"{door} under {name}")
        for name, transform in TRANSFORMS.items():
            with pytest.raises(RuntimeError, match="look ids up outside, and pass the rows to the function"):
                transform(Model(look_up))
                pytest.fail(f"{door} under {name}")
    assert embedding.stats()["rows"] == rows


@pytest.mark.parametrize("kind", KINDS)
def test_what_another_thread_traces_is_no_matter_of_this_one(tmp_path, kind):
    _, lookups = doors(tmp_path)
    with another_thread(kind):
        assert torch.compiler.is_compiling()  # of the process
        assert tracer_of(IDS) is None
        for look_up in lookups.values():
            assert look_up(IDS).shape == (2, 2, 4)
