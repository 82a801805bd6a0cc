"""How embeddings, graphs, profiles and plans show themselves, in text and in notebooks."""

import re

import pytest
import torch

import oneemb
from oneemb.policies import LFU, RowPolicy
from tests.support.models import STORES, make_embedding


@pytest.mark.parametrize("kind", STORES)
def test_an_embedding_shows_what_it_is(tmp_path, kind):
    embedding = make_embedding(tmp_path, store=kind, tables=2, policy=RowPolicy(evict=LFU(), capacity=5000))
    assert "rows=0" in repr(embedding) and "optimizer=none yet" in repr(embedding)
    embedding(torch.arange(2000).reshape(1000, 2)).sum().backward()
    optimizer = torch.optim.Adam(embedding.parameters(), lr=0.1)
    optimizer.step()
    text = repr(embedding)
    for part in (
        "'items'",
        "tables=2",
        "dim=4",
        "rows=2,000",
        "optimizer=Adam, step 1",
        str(tmp_path),
        "LFU",
        "MiB",
    ):
        assert part in text, (part, text)
    shown = embedding._repr_html_()
    assert shown.count("<tr>") == shown.count("</tr>") > 8 and "2,000" in shown and "<table>" in shown
    embedding.close()
    assert f"rows=none: the embedding on {tmp_path} is closed; make it again" in repr(embedding)


def test_a_broken_embedding_shows_its_error(tmp_path):
    embedding = make_embedding(tmp_path)
    embedding(torch.arange(3))
    embedding.store.store_lock.cut_short(ZeroDivisionError())
    shown = repr(embedding)
    assert "is closed" not in shown and "load_snapshot" in shown
    lines = oneemb.summary(embedding).splitlines()
    assert lines[1].split()[:3] == ["items", "1", "-"]
    assert lines[2].startswith("items: ") and "load_snapshot" in lines[2]
    embedding.close()


def test_names_are_escaped(tmp_path):
    embedding = make_embedding(tmp_path, name="<b>&")
    assert "&lt;b&gt;&amp;" in embedding._repr_html_() and "<b>" not in embedding._repr_html_()
    embedding.close()


def error_of(embedding):
    with pytest.raises(oneemb.StorageError) as caught:
        embedding.stats()
    return str(caught.value)


@pytest.mark.parametrize("kind", STORES)
def test_a_summary_has_the_memory_of_the_metrics(tmp_path, kind):
    embedding = make_embedding(tmp_path, store=kind)
    embedding(torch.arange(3000))
    memory = f"{embedding.metrics()['memory_bytes'] / 2**20:,.1f} MiB"
    assert memory in oneemb.summary(embedding) and f"memory={memory}" in repr(embedding)
    embedding.close()


def test_a_closed_embedding_counts_no_rows(tmp_path):
    embedding = make_embedding(tmp_path)
    embedding(torch.arange(3))
    embedding.close()
    for ask in (len, lambda it: it.num_rows, lambda it: it.stats(), lambda it: it.metrics()):
        with pytest.raises(oneemb.StorageError, match="is closed; make it again"):
            ask(embedding)


def test_a_summary_counts_rows_and_other_parameters(tmp_path):
    one, two = make_embedding(tmp_path / "one", tables=2), make_embedding(tmp_path / "two", dim=8)
    one(torch.tensor([[1, 2], [3, 2]]))
    frozen = torch.nn.Linear(3, 2).requires_grad_(False)
    model = torch.nn.ModuleDict({"one": one, "deep": torch.nn.Sequential(two, torch.nn.Linear(8, 1)), "frozen": frozen})
    lines = oneemb.summary(model).splitlines()
    assert [line.split()[:5] for line in lines[1:3]] == [["one", "2", "3", "4", "12"], ["deep.0", "1", "0", "8", "0"]]
    assert lines[3] == "17 other parameters, 9 trainable"
    assert oneemb.summary(torch.nn.Linear(2, 1)).splitlines()[1:] == ["3 other parameters, all trainable"]
    assert oneemb.summary(one).splitlines()[1].startswith("items")
    one.close()
    two.close()
    closed = oneemb.summary(model).splitlines()
    assert closed[1].split() == ["one", "2", "-", "4", "-", "-", "-"]
    assert closed[3:5] == [f"one: {error_of(one)}", f"deep.0: {error_of(two)}"] and "is closed" in closed[3]
    with pytest.raises(TypeError, match="model must be a torch.nn.Module, got int"):
        oneemb.summary(3)


def test_a_model_without_other_parameters_trains_none_of_them(tmp_path):
    embedding = make_embedding(tmp_path)
    assert oneemb.summary(embedding).splitlines()[-1] == "no other parameters"
    assert oneemb.summary(torch.nn.Identity()).splitlines()[1:] == ["no other parameters"]


def test_explain_of_an_embedding_has_a_fact_in_each_line(tmp_path):
    embedding = make_embedding(tmp_path, tables=2)
    embedding(torch.tensor([[1, 2]]))
    facts = dict(line.split(None, 1) for line in embedding.explain().splitlines())
    assert facts["tables"] == "2" and facts["rows"] == "2" and facts["path"] == str(tmp_path)
    embedding.close()
    assert "is closed; make it again" in embedding.explain()


def test_a_profile_without_steps_says_what_to_do(tmp_path):
    graph = Graph(make_embedding(tmp_path))
    profile = graph.profile(3)
    assert str(profile) == (
        "0 of 3 steps noted: call the graph, or loop over graph.run(loader), after graph.profile(3), and print then"
    )
    assert "0 of 3 steps noted" in profile._repr_html_()
    graph(torch.arange(3))
    assert str(profile).startswith("1 of 3 steps noted\nhalf")


def test_one_op_is_not_several(tmp_path):
    graph = Graph(make_embedding(tmp_path))
    for _ in range(2):
        graph(torch.arange(3))
    assert str(graph).startswith("Graph: 1 op recorded, ")


class Graph(oneemb.TrainGraph):
    def __init__(self, embedding):
        super().__init__()
        self.embedding = embedding
        self.add_optimizer(torch.optim.SGD(embedding.parameters(), lr=0.1))

    def build(self, ids):
        self.embedding(ids).sum().backward()


def test_graphs_profiles_and_plans_show_their_text(tmp_path):
    graph = Graph(make_embedding(tmp_path))
    assert graph._repr_html_().startswith("<pre")
    graph(torch.arange(3))
    profile = graph.profile(1)
    graph(torch.arange(3))
    plan = oneemb.plan(rows=10**6, embedding_dim=16, ids=3, unique=0.5, batch=128, ranks=1)
    for shown in (graph, profile, plan, graph.explain(), oneemb.summary(graph)):
        found = shown._repr_html_()
        assert found.count("<pre") == 1 and "font-family:monospace" in found, "notebooks give <pre> other fonts"
        text = re.sub("<[^>]*>", "", found[found.index("<pre") :])
        assert text == str(shown).replace("&", "&amp;").replace("<", "&lt;").replace(">", "&gt;").replace(
            "'", "&#x27;"
        ).replace('"', "&quot;")
    names, counts = graph.explain().splitlines()[-2:]
    assert names.endswith("  evicted  written down") and len(names) == len(counts), "numbers end where names end"
    graph.embedding.close()
    assert "is closed; make it again" in graph.explain()
