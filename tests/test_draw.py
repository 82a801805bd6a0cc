"""Pictures of graphs: the boxes of a model, SVG that tests and notebooks can use, errors."""

import functools
import re
from xml.etree import ElementTree

import pytest
import torch

import oneemb
from tests.support.models import make_embedding

pytest.importorskip("matplotlib")

BATCH = torch.tensor([[1, 2], [3, 4]]), torch.tensor([5, 6, 7]), torch.tensor([0, 1, 3]), torch.rand(2)
"""Ids, words, offsets of the words, labels."""


class Model(oneemb.TrainGraph):
    """Ids and bags of words, through a concat and an MLP, to a loss."""

    def __init__(self, folder, **config):
        super().__init__()
        self.items = make_embedding(folder / "items", tables=2)
        self.words = make_embedding(folder / "words", name="words")
        self.mlp = oneemb.nn.FusedMLP(12, [8], 1, skip_final_activation=True)
        for name, value in config.items():
            setattr(self.config, name, value)
        self.add_optimizer(torch.optim.SGD(self.parameters(), lr=0.1))

    def build(self, ids, words, offsets, label):
        bags = self.words(words, offsets=offsets, pooling="mean")
        hidden = torch.cat([self.items(ids % 100).flatten(1), bags], 1)
        unused = hidden.exp().sum()
        loss = torch.nn.functional.mse_loss(self.mlp(hidden).squeeze(1).sigmoid(), label)
        loss.backward()
        return loss, unused


def boxes_of(graph):
    """[(kind, label, shape, labels of the boxes that it reads)] of the boxes of a graph's picture."""
    boxes = graph.draw().boxes
    return [(box.kind, box.label, box.shape, [boxes[i].label for i in box.inputs]) for box in boxes]


def words_in(svg):
    return [word.strip() for word in re.findall(r"<text[^>]*>([^<]*)</text>", svg)]


MODEL = [
    ("input", "ids", "[2, 2]", []),
    ("input", "words", "[3]", []),
    ("input", "offsets", "[3]", []),
    ("input", "label", "[2]", []),
    ("table", "words", "[3, 4]", ["words", "offsets"]),
    ("pooling", "mean of each bag", "[2, 4]", ["words"]),
    ("op", "remainder", "[2, 2]", ["ids"]),
    ("table", "items", "[2, 2, 4]", ["remainder"]),
    ("op", "concat", "[2, 12]", ["mean of each bag", "items"]),
    ("module", "mlp: FusedMLP", "[2, 1]", ["concat"]),
    ("op", "sigmoid", "[2]", ["mlp: FusedMLP"]),
    ("loss", "mse_loss", "[]", ["label", "sigmoid"]),
]


def test_a_picture_leads_from_ids_to_the_loss(tmp_path):
    graph = Model(tmp_path)
    for _ in range(3):
        graph(*BATCH)
    assert boxes_of(graph) == MODEL
    words = words_in(graph.draw().svg)
    for word in ("ids", "concat", "mlp: FusedMLP", "loss: mse loss", "[2, 12]", "4 rows of 4", "3 rows of 4"):
        assert word in words, (word, words)
    shares = [int(word.split()[1][:-1]) for word in words if re.fullmatch(r"(lookup|dense|update|wait) \d+%", word)]
    assert len(shares) == 4 and 98 <= sum(shares) <= 102
    assert "exp" not in words


def test_equal_graphs_give_equal_bytes_and_no_hook_stays(tmp_path):
    graph = Model(tmp_path)
    graph(*BATCH)
    assert not graph.mlp._forward_hooks
    shown = graph.draw(tmp_path / "model.svg")
    assert (tmp_path / "model.svg").read_text().endswith(shown.svg) and graph.draw().svg == shown.svg
    assert shown._repr_svg_() == shown.svg and shown.svg.startswith("<svg")
    assert shown.svg in graph._repr_html_()


def test_compiled_dense_modules_are_boxes_too(tmp_path, monkeypatch):
    monkeypatch.setattr(torch, "compile", functools.partial(torch.compile, backend="eager"))  # C++ takes seconds.
    graph = Model(tmp_path, compile_dense=True)
    graph(*BATCH)
    assert boxes_of(graph) == MODEL


class Dots(oneemb.EvalGraph):
    """Scores without a loss, equal branches, and an op on many values."""

    def __init__(self, folder):
        super().__init__()
        self.items = make_embedding(folder)
        self.layers = torch.nn.ModuleList([torch.nn.Linear(4, 4) for _ in range(2)])

    def build(self, ids):
        rows = [self.items(ids[:, i]) for i in range(3)]
        stacked = torch.stack(rows)
        hidden = [layer(stacked).exp().neg() for layer in self.layers]
        return hidden[0] + hidden[1]


def test_equal_branches_are_one_box_and_ops_in_a_row_too(tmp_path):
    graph = Dots(tmp_path)
    graph(torch.tensor([[1, 2, 3], [4, 5, 6]]))
    assert boxes_of(graph) == [
        ("input", "ids", "[2, 3]", []),
        ("table", "items", "[2, 4]", ["ids"]),
        ("op", "stack", "[3, 2, 4]", ["items"]),
        ("module", "layers.0: Linear", "[3, 2, 4]", ["stack"]),
        ("op", "exp, neg", "[3, 2, 4]", ["layers.0: Linear"]),
        ("module", "layers.1: Linear", "[3, 2, 4]", ["stack"]),
        ("op", "exp, neg", "[3, 2, 4]", ["layers.1: Linear"]),
        ("result", "add", "[3, 2, 4]", ["exp, neg", "exp, neg"]),
    ]
    assert "3 x items" in words_in(graph.draw().svg)


class Hidden(oneemb.TrainGraph):
    def __init__(self, folder):
        super().__init__()
        self.items = make_embedding(folder)
        self.add_optimizer(torch.optim.SGD(self.parameters(), lr=0.1))

    def build(self, ids):
        rows = self.items(ids)
        with torch._C.DisableTorchFunction():  # as the code of a compiled function
            rows = rows * rows
        rows.sum().backward()


def test_code_that_torch_does_not_see_is_a_box(tmp_path):
    graph = Hidden(tmp_path)
    graph(torch.arange(3))
    assert boxes_of(graph)[1:] == [
        ("table", "items", "[3, 4]", ["ids"]),
        ("op", "other code", "", ["items"]),
        ("loss", "sum", "[]", ["other code"]),
    ]


class Masked(oneemb.TrainGraph):
    def __init__(self, folder):
        super().__init__()
        self.items = make_embedding(folder)
        self.share = torch.nn.Parameter(torch.rand(9))
        self.add_optimizer(torch.optim.SGD(self.parameters(), lr=0.1))

    def build(self, mask, ids):
        rows = self.items(ids)[mask]
        loss = (rows.sum(1) * self.share[ids][mask]).sum()
        loss.backward()
        return loss


def test_rows_that_a_mask_chooses_are_rows_and_not_the_mask(tmp_path):
    graph = Masked(tmp_path)
    graph(torch.tensor([True, False, True]), torch.tensor([3, 4, 5]))
    assert boxes_of(graph) == [
        ("input", "ids", "[3]", []),
        ("table", "items", "[3, 4]", ["ids"]),
        ("op", "sum", "[2]", ["items"]),
        ("op", "getitem", "[3]", ["ids"]),
        ("op", "mul", "[2]", ["sum", "getitem"]),
        ("loss", "sum", "[]", ["mul"]),
    ]


def test_a_path_that_cannot_be_written_is_an_error_that_says_what_can(tmp_path):
    graph = Model(tmp_path)
    with pytest.raises(RuntimeError, match="nothing to draw yet: call the graph with a batch first"):
        graph.draw()
    graph(*BATCH)
    for name in ("model", "model.bmp", "model.svg.txt"):
        with pytest.raises(
            ValueError, match=r"path must end in \.svg, \.png or \.pdf \(matplotlib also writes .*\.jpg"
        ):
            graph.draw(tmp_path / name)
    with pytest.raises(FileNotFoundError, match="the folder of path must exist"):
        graph.draw(tmp_path / "none" / "model.svg")
    with pytest.raises(TypeError, match="passes must be True or False, got 'yes'"):
        graph.draw(passes="yes")
    with pytest.raises(TypeError, match="got int"):
        graph.draw(3)
    for suffix in ("SVG", "png", "pdf", "jpg"):
        graph.draw(tmp_path / f"model.{suffix}")
        graph.draw(tmp_path / f"passes.{suffix}", passes=True)
        assert (tmp_path / f"model.{suffix}").stat().st_size > 2000


def test_names_with_control_characters_are_shown_as_codes(tmp_path):
    class Named(Dots):
        def __init__(self, folder):
            super().__init__(folder)
            self.layers = torch.nn.ModuleDict({"a\x01b<": torch.nn.Linear(4, 4), "c": torch.nn.Linear(4, 4)})

        def build(self, ids):
            return sum(layer(self.items(ids)) for layer in self.layers.values())

    graph = Named(tmp_path)
    graph(torch.tensor([1, 2]))
    page = graph._repr_html_()
    picture = ElementTree.fromstring(graph.draw().svg)  # raises for a character that XML does not have
    assert "layers.a\\x01b<: Linear" in "".join(picture.itertext())
    assert not re.search("[\x00-\x08\x0b-\x1f\x7f]", page) and "a\\x01b&lt;" in page
    embedding = make_embedding(tmp_path / "named", name="a\x01\ud800")
    assert "\x01" not in embedding._repr_html_() and "\ud800" not in embedding._repr_html_()


def test_a_picture_of_many_tables_computes_no_limits_of_axes(tmp_path, monkeypatch):
    from matplotlib.axes import Axes

    def refuse(*args):
        raise AssertionError("limits of axes are computed for every shape")

    monkeypatch.setattr(Axes, "_update_patch_limits", refuse)
    graph = Model(tmp_path)
    graph(*BATCH)
    assert len(graph.draw().svg) > 1000 and len(graph.draw(passes=True).svg) > 1000


def test_a_closed_embedding_is_drawn_as_closed(tmp_path):
    graph = Model(tmp_path)
    graph(*BATCH)
    graph.words.close()
    assert "closed" in words_in(graph.draw().svg)
