"""Any model: a compiled graph, in one piece or prefetched, gives what the eager loop gives, bit for bit."""

import random

import pytest
import torch
from hypothesis import HealthCheck, given, settings, strategies as st

import oneemb
from tests.support.graph_models import make_eager, make_embedding, make_graph, rows_of, weights_of
from tests.support.optimizers import OPTIMIZERS

# SparseAdam steps no dense parameters.
NAMES = sorted(OPTIMIZERS.keys() - {"sparse adam"})


@st.composite
def models(draw):
    """What a model is made of, in words."""
    lookups = draw(
        st.lists(
            st.tuples(st.integers(0, 2), st.integers(0, 1), st.booleans()), min_size=1, max_size=4
        )  # (embedding, ids, whether its rows are used)
    )
    return {
        "embeddings": draw(
            st.lists(
                st.tuples(st.sampled_from([1, 3, 4, 8]), st.sampled_from(["device", "host", "ssd"]), st.booleans()),
                min_size=3,
                max_size=3,
            )
        ),
        # Embeddings of one table each, all alike: they are merged.
        "fields": draw(
            st.lists(st.tuples(st.sampled_from(["device", "host", "ssd"]), st.booleans()), min_size=0, max_size=4)
        ),
        "field_dim": draw(st.sampled_from([1, 4, 8])),
        # Lookups of bags: (embedding or field, whether its ids are scaled, pooling, ids)
        "bags": draw(
            st.lists(
                st.tuples(st.integers(0, 6), st.booleans(), st.sampled_from(["sum", "mean", "max"]), st.integers(0, 1)),
                min_size=0,
                max_size=3,
            )
        ),
        "tables": draw(st.integers(1, 3)),
        "lookups": lookups,
        "optimizers": draw(st.lists(st.sampled_from(NAMES), min_size=1, max_size=2)),
        "losses": draw(st.integers(1, 3)),
        "transform": draw(st.booleans()),
        "scheduler": draw(st.booleans()),
        "dropout": draw(st.booleans()),
        "seed": draw(st.integers(0, 1000)),
    }


def assemble(model, make):
    """The modules, and the step that `make` gives of them."""
    torch.manual_seed(model["seed"])
    tables = model["tables"]
    modules = {}
    for e, (dim, store, frozen) in enumerate(model["embeddings"]):
        modules[f"embedding_{e}"] = make_embedding(f"e{e}", dim, tables, store, seed=e)
        modules[f"embedding_{e}"].weight.requires_grad_(not frozen or e == 0)
    for f, (store, frozen) in enumerate(model["fields"]):
        modules[f"field_{f}"] = make_embedding(f"f{f}", model["field_dim"], 1, store, seed=9 + f)
        modules[f"field_{f}"].weight.requires_grad_(not frozen)
    names = [name for name in modules]
    bags = [(names[which % len(names)], *how) for which, *how in model["bags"]]
    width = sum(model["embeddings"][e][0] * tables for e, _, used in model["lookups"] if used)
    width += model["field_dim"] * len(model["fields"]) + sum(modules[name].embedding_dim for name, *_ in bags)
    width = width or 1
    modules["mlp"] = oneemb.nn.FusedMLP(
        width, [5], 1, hidden_dropout_rates=0.3 if model["dropout"] else 0.0, skip_final_activation=True
    )

    def build(self, ids, more, label, offsets):
        rows = []
        if model["transform"]:
            more = (more + 1).remainder(50)
        for e, which, used in model["lookups"]:
            got = getattr(self, f"embedding_{e}")((ids, more)[which])
            if used:
                rows.append(got.flatten(1))
        for f in range(len(model["fields"])):
            rows.append(getattr(self, f"field_{f}")((ids, more)[f % 2][:, f % tables]))
        for name, scaled, pooling, which in bags:
            id_N = (ids, more)[which].reshape(-1)
            scale_N = self.mlp.layers[0].bias[0] * id_N if scaled and pooling == "sum" else None
            table_P = None if getattr(self, name).num_tables == 1 else offsets[1:] % tables
            rows.append(getattr(self, name)(id_N, table_P, offsets, scale_N, pooling))
        x = torch.cat(rows, 1) if rows else label.reshape(-1, 1)
        logit = self.mlp(x).squeeze(1)
        total = 0
        for i in range(model["losses"]):
            loss = torch.nn.functional.mse_loss(logit * (i + 1), label)
            loss.backward(retain_graph=i + 1 < model["losses"])
            total = total + loss.detach()
        return total

    def optimizers(owner):
        groups = [[], []]
        for i, (name, parameter) in enumerate(owner.named_parameters()):
            if parameter.requires_grad or "embedding" in name:
                groups[i % len(model["optimizers"])].append(parameter)
        made = []
        for name, group in zip(model["optimizers"], groups, strict=False):
            if group:
                optimizer = OPTIMIZERS[name](group)
                scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 2, 0.5) if model["scheduler"] else None
                made.append((optimizer, scheduler))
        return made

    return modules, make(modules, build, optimizers)


def batches_of(model, count):
    rng = random.Random(model["seed"])
    batches = []
    for _ in range(count):
        size = rng.randint(1, 40)
        ids, more = (
            torch.tensor([[rng.randint(-30, 30) for _ in range(model["tables"])] for _ in range(size)]) for _ in "ab"
        )
        cuts = sorted(rng.randint(0, ids.numel()) for _ in range(size - 1))
        offsets = torch.tensor([0, *cuts, ids.numel()])
        batches.append((ids, more, torch.tensor([rng.random() for _ in range(size)]), offsets))
    return batches


def check(model, steps):
    batches = batches_of(model, steps)
    results = []
    for make, run in (
        (make_eager, lambda step: [step(*batch) for batch in batches]),
        (make_graph, lambda graph: [graph(*batch) for batch in batches]),
        (make_graph, lambda graph: list(graph.run(batches))),
        (make_graph, lambda graph: list(graph.run(batches, prefetch_depth=3))),
    ):
        modules, step = assemble(model, make)
        torch.manual_seed(1)
        losses = run(step)
        embeddings = [one for name, one in modules.items() if name != "mlp"]
        results.append((losses, [rows_of(one) for one in embeddings], weights_of(modules["mlp"])))
        if make is make_graph:
            assert all(one.store.stats().get("device", {"pinned": 0})["pinned"] == 0 for one in embeddings)
        for one in embeddings:
            one.close()
    for losses, rows, weights in results[1:]:
        assert all(torch.equal(a, b) for a, b in zip(losses, results[0][0], strict=True))
        assert rows == results[0][1]
        assert all(torch.equal(a, b) for a, b in zip(weights, results[0][2], strict=True))


@settings(max_examples=3, deadline=None, suppress_health_check=list(HealthCheck), print_blob=True)
@given(models())
def test_any_model_compiled_or_prefetched_equals_eager(model):
    check(model, steps=4)


def test_gradients_of_scales_are_summed_in_the_order_of_eager_mode():
    # Two lookups that would be merged, both scaled by one dense parameter, which gets a third gradient elsewhere.
    fields = [("device", False)] * 4
    bags = [(0, True, "sum", 0), (2, True, "sum", 0)]
    model = dict(
        embeddings=[(4, "device", False), (1, "device", False), (4, "device", False)], fields=fields, bags=bags
    )
    model |= dict(field_dim=8, tables=1, lookups=[(0, 0, False)], optimizers=["adagrad"], losses=1)
    check(model | dict(transform=False, scheduler=False, dropout=False, seed=0), steps=10)


@pytest.mark.slow
@settings(max_examples=500, deadline=None, suppress_health_check=list(HealthCheck), print_blob=True)
@given(models())
def test_many_models_compiled_or_prefetched_equal_eager(model):
    check(model, steps=10)
