"""Exported programs against the graph that they are of, and the graph after an export."""

import json
import os
import shutil
import threading
import warnings
from typing import NamedTuple

import pytest
import torch

import oneemb
from oneemb.serving import export
from oneemb.storage.errors import StorageError
from oneemb.storage.fs import LocalFileSystem
from tests.support.export_models import LOOKUPS, Click, Score, embedding_at, run_alone, train_rows, trained_click
from tests.support.forks import fork_context, run_code
from tests.support.pairwise import covering, diagonal
from tests.support.waits import ended

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning")
FORMATS = ["export", "torchscript"]


class Pair(NamedTuple):
    first: torch.Tensor
    second: torch.Tensor


def some_ids(samples=33, seed=5):
    return torch.randint(-70, 70, (samples, 3), generator=torch.Generator().manual_seed(seed))


def load(path, format="export"):
    extra = {"oneemb.json": ""}
    if format == "export":
        program = torch.export.load(path, extra_files=extra).module()
    else:
        program = torch.jit.load(path, _extra_files=extra)
    return program, json.loads(extra["oneemb.json"])


@pytest.fixture(scope="module")
def click(tmp_path_factory):
    return trained_click(tmp_path_factory.mktemp("click"))


@pytest.mark.parametrize(("lookup", "format"), covering(["aten", "op"], FORMATS, strength=1))
def test_a_program_gives_the_numbers_of_its_graph_for_any_number_of_examples(tmp_path, click, format, lookup):
    graph = Score(click)
    graph.export(tmp_path / "score", some_ids(64), format=format, lookup=lookup)
    program, _ = load(tmp_path / "score", format)
    for samples in (33, 64, 1, 0):
        want, got = graph(some_ids(samples)), program(some_ids(samples))
        assert torch.equal(got, want) and not got.requires_grad


@pytest.mark.parametrize("format", FORMATS)
def test_a_training_graph_is_exported_without_its_backward_pass(tmp_path, click, format):
    ids, label = some_ids(), torch.ones(33)
    click.export(tmp_path / "click", some_ids(16, 1), torch.zeros(16), format=format)
    program, said = load(tmp_path / "click", format)
    click.eval()
    want = click(ids, label)
    click.train()
    assert all(torch.equal(a, b) for a, b in zip(program(ids, label), want, strict=True))
    assert said["steps"] == 3 and said["embeddings"]["embedding"]["step"] == 3


def test_inputs_that_are_named_stay_named(tmp_path, click):
    click.export(tmp_path / "click", some_ids(16), kwargs={"label": torch.zeros(16)})
    program, _ = load(tmp_path / "click")
    click.eval()
    want = click(some_ids(), torch.ones(33))
    click.train()
    assert torch.equal(program(some_ids(), label=torch.ones(33))[1], want[1])


@pytest.mark.parametrize(
    ("name", "dtype"),
    [(name, torch.float32) for name in LOOKUPS]
    + [(name, torch.float16) for name in ("ids", "max", "mean")]
    + [pytest.param("weighted", torch.float16, marks=pytest.mark.slow)],
)
def test_every_kind_of_lookup_gives_the_bits_of_eval_mode(tmp_path, name, dtype):
    embedding = embedding_at(tmp_path, dtype=dtype)
    train_rows(embedding)
    make, batch = LOOKUPS[name]
    graph = make(embedding)
    graph.export(tmp_path / "one", *batch(20, 1))
    program, _ = load(tmp_path / "one")
    for samples in (20, 7, 2, 1, 0):
        inputs = batch(samples, samples)
        want, got = graph(*inputs), program(*inputs)
        assert want.dtype == got.dtype == dtype and torch.equal(want, got)


class Everything(oneemb.EvalGraph):
    """Ids and bags, and layers that ask their inputs for their shapes."""

    def __init__(self, folder):
        super().__init__()
        torch.manual_seed(2)
        self.embedding, self.alone = embedding_at(folder), embedding_at(folder, "alone", 1)
        self.attention = torch.nn.TransformerEncoderLayer(6, 2, 8, batch_first=True)
        self.memory = torch.nn.GRU(6, 2, batch_first=True)
        for embedding in (self.embedding, self.alone):
            train_rows(embedding)
        self.eval()

    def build(self, ids, label, bag_ids, offsets, weights, lengths):
        rows, bags = self.embedding(ids), self.embedding(bag_ids, offsets=offsets)
        one = torch.cat([torch.zeros(1, dtype=torch.int64), lengths.cumsum(0)])
        return {
            "rows": rows, "bags": bags, "attention": self.attention(bags), "memory": self.memory(bags)[0],
            "labelled": (rows * bags).sum((1, 2)) * label, "turned": bags.transpose(0, 1).contiguous(),
            "weighted": self.embedding(bag_ids, offsets=offsets, per_sample_weights=weights).flatten(1),
            "mean": self.embedding(bag_ids, offsets=offsets, pooling="mean") + label[:, None, None],
            "columns": self.embedding(bag_ids, offsets=offsets, columns=[0, 1, 1], pooling="max"),
            "one": self.alone(bag_ids, offsets=one, pooling="max"),
            "table": self.embedding(bag_ids, torch.tensor(1), offsets[::3]),
        }  # fmt: skip


def batch_of_everything(samples, seed, bag_ids=None):
    (ids,), (found, offsets, weights) = LOOKUPS["ids"][1](samples, seed), LOOKUPS["weighted"][1](samples, seed)
    if bag_ids is not None:  # so many in the first bag, all others are empty
        found, weights, offsets = found[:bag_ids], weights[:bag_ids], offsets.clamp(max=bag_ids)
    return ids, torch.rand(samples), found, offsets, weights, offsets.diff().reshape(-1, 3).sum(1)


@pytest.mark.parametrize("format", [
    "export", "torchscript",
    pytest.param("aot_inductor", marks=[
        pytest.mark.slow, pytest.mark.skipif(shutil.which("g++") is None, reason="there is no g++")
    ]),
])  # fmt: skip
def test_every_format_takes_none_and_one_and_any_number_of_examples_and_ids(tmp_path, format):
    graph, path = Everything(tmp_path), tmp_path / "all.pt2"
    graph.export(path, *batch_of_everything(20, 1), format=format)
    program = torch._inductor.aoti_load_package(path) if format == "aot_inductor" else load(path, format)[0]
    for samples in (0, 1, 2, 7):
        for bag_ids in (None, 0, 1):
            inputs = batch_of_everything(samples, 4, bag_ids)
            want, got = graph(*inputs), program(*inputs)
            for name in want:
                assert got[name].shape == want[name].shape, name
                torch.testing.assert_close(got[name], want[name], rtol=1e-5, atol=1e-6)
    for wrong in (inputs[3][:-1], inputs[3][:-2]):  # bags of no whole example
        with pytest.raises((RuntimeError, AssertionError)):
            program(*inputs[:3], wrong, *inputs[4:])


def test_one_example_of_bags_is_refused_as_the_example_batch(tmp_path):
    make, batch = LOOKUPS["sum"]
    with pytest.raises(
        oneemb.BuildError, match="2 examples or more.*its offsets have 3 bags, 3 of each example; give more"
    ):
        make(embedding_at(tmp_path)).export(tmp_path / "one", *batch(1, 1))


@pytest.mark.parametrize("kinds", [("ids", "weighted"), pytest.param(("mean", "max"), marks=pytest.mark.slow)])
def test_programs_run_where_there_is_no_oneemb(tmp_path, kinds):
    programs, wanted = [], []
    for name in kinds:
        embedding = embedding_at(tmp_path, name, drawn=name == "ids")
        train_rows(embedding)
        make, batch = LOOKUPS[name]
        graph = make(embedding)
        for format in FORMATS:
            path, inputs = tmp_path / f"{name}.{format}", batch(11, 2)
            graph.export(path, *batch(20, 1), format=format)
            programs.append((path, format, inputs))
            wanted.append(graph(*inputs))
    for (path, *_), want, got in zip(programs, wanted, run_alone(tmp_path, *programs), strict=True):
        assert torch.equal(want, got), path


def test_several_embeddings_and_one_that_is_shared_are_one_program(tmp_path):
    class Both(oneemb.EvalGraph):
        def __init__(self):
            super().__init__()
            self.first, self.second = embedding_at(tmp_path, "first"), embedding_at(tmp_path, "second", 1, dim=2)
            self.towers = torch.nn.ModuleList([Tower(self.first), Tower(self.first)])

        def build(self, batch):
            rows = [tower(batch["ids"]) for tower in self.towers]
            return {"rows": torch.cat([*rows, self.second(batch["more"])], 1)}

    class Tower(torch.nn.Module):
        def __init__(self, embedding):
            super().__init__()
            self.embedding = embedding

        def forward(self, ids):
            return self.embedding(ids).flatten(1)

    graph = Both()
    batch = {"ids": some_ids(), "more": some_ids()[:, 0]}
    graph.export(tmp_path / "both", {"ids": some_ids(9), "more": some_ids(9)[:, 1]})
    program, said = load(tmp_path / "both")
    assert torch.equal(program(batch)["rows"], graph(batch)["rows"]) and len(said["embeddings"]) == 2
    assert len({one.data_ptr() for name, one in program.named_buffers(remove_duplicate=False) if "key_S" in name}) == 2


@pytest.mark.parametrize("format", FORMATS)
def test_a_method_that_a_module_keeps_and_recurrent_weights_are_of_the_copy(tmp_path, click, format):
    class Keeps(Score):
        def __init__(self, click):
            super().__init__(click)
            self.gru = torch.nn.GRU(6, 2, batch_first=True)
            self.read = self.embedding.read

        def build(self, ids):
            return self.gru(self.read(ids))[0]

    graph = Keeps(click)
    graph.export(tmp_path / "keeps", some_ids(), format=format)
    program, _ = load(tmp_path / "keeps", format)
    torch.testing.assert_close(program(some_ids(7)), graph(some_ids(7)))  # torch exports a GRU as other ops
    weights = [one for name, one in program.named_parameters() if "gru" in name]
    with torch.no_grad():
        for weight in weights:
            weight.zero_()
        assert len(weights) == 4 and not program(some_ids(7)).any()


@pytest.mark.parametrize(("dtype", "bound"), [("float16", 1e-3), ("int8", 8e-3), ("int4", 0.14)])
def test_rounded_rows_are_within_their_bound_and_the_program_says_so(tmp_path, dtype, bound):
    embedding = embedding_at(tmp_path)
    train_rows(embedding)
    graph = LOOKUPS["ids"][0](embedding)
    graph.export(tmp_path / "one", some_ids(), dtype=dtype)
    program, said = load(tmp_path / "one")
    error = (program(some_ids()) - graph(some_ids())).abs().max().item()
    assert 0 < error < bound and error <= said["embeddings"]["embedding"]["error_max"] * 1.0001
    assert said["dtype"] == dtype


@pytest.mark.parametrize(("dtype", "trained"), diagonal(["float16", "int8", "int4"], [torch.float16, torch.bfloat16]))
def test_lookups_keep_their_dtype_whatever_rows_are_rounded_to(tmp_path, trained, dtype):
    embedding = embedding_at(tmp_path, dtype=trained)
    train_rows(embedding)

    class Dense(oneemb.EvalGraph):
        def __init__(self):
            super().__init__()
            self.embedding, self.dense = embedding, torch.nn.Linear(6, 2, dtype=trained)

        def build(self, ids):
            rows = self.embedding(ids).sum(1)
            return rows, self.dense(rows)

    graph = Dense()
    graph.export(tmp_path / "program", some_ids(), dtype=dtype)
    for want, got in zip(graph(some_ids(4)), load(tmp_path / "program")[0](some_ids(4)), strict=True):
        assert got.dtype == trained and torch.allclose(want.float(), got.float(), atol=0.5)


@pytest.mark.parametrize("lookup", ["aten", "op"])
@pytest.mark.parametrize("absent", ["zeros", oneemb.make_constant_initializer(0.75)])
def test_ids_without_a_row_read_as_their_policy_says(tmp_path, lookup, absent):
    embedding = embedding_at(tmp_path, policy=oneemb.policies.RowPolicy(absent=absent), drawn=True)
    train_rows(embedding)
    graph = LOOKUPS["ids"][0](embedding)
    graph.export(tmp_path / "one", some_ids(), lookup=lookup)
    assert torch.equal(load(tmp_path / "one")[0](some_ids(9)), graph(some_ids(9)))


def test_averages_are_exported_from_a_copy_and_the_error_says_so(tmp_path):
    embedding = embedding_at(tmp_path)
    averaged = oneemb.AveragedEmbedding(embedding, tmp_path / "averages")
    averaged.update_rows()
    train_rows(embedding)
    averaged.update_rows()
    with pytest.raises(ValueError, match=r"averaged.copy_to\(path\) in its place"):
        LOOKUPS["ids"][0](averaged).export(tmp_path / "one", some_ids())
    LOOKUPS["ids"][0](averaged.copy_to(tmp_path / "copy")).export(tmp_path / "one", some_ids())
    assert torch.equal(load(tmp_path / "one")[0](some_ids(9)), averaged(some_ids(9)))


def test_unknown_ids_read_as_zeros_where_that_is_asked_for(tmp_path):
    embedding = embedding_at(tmp_path)
    graph = LOOKUPS["ids"][0](embedding)
    graph.export(tmp_path / "one", some_ids(), absent="zeros")
    assert not load(tmp_path / "one")[0](some_ids()).any()  # There are no rows at all.


def test_a_snapshot_is_exported_by_name_and_the_program_says_which(tmp_path):
    click = trained_click(tmp_path)
    graph, ids = LOOKUPS["ids"][0](click.embedding), some_ids()
    click.embedding.save_snapshot("early")
    graph.export(tmp_path / "now", ids)
    early = graph(ids)
    click(some_ids(32), torch.ones(32))
    graph.export(tmp_path / "early", ids, snapshot="early")
    graph.export(tmp_path / "late", ids)
    programs = {name: load(tmp_path / name) for name in ("now", "early", "late")}
    assert torch.equal(programs["early"][0](ids), early) and torch.equal(programs["now"][0](ids), early)
    late = programs["late"][0](ids)
    assert torch.equal(late, graph(ids)) and not torch.equal(late, early)
    said = {name: its["embeddings"]["embedding"] for name, (_, its) in programs.items()}
    assert [said[name]["snapshot"] for name in ("now", "early", "late")] == ["early", "early", None]
    assert [said[name]["step"] for name in ("now", "early", "late")] == [3, 3, 4] and said["now"]["identity"]
    with pytest.raises(StorageError, match="absent"):
        graph.export(tmp_path / "none", ids, snapshot="absent")
    assert not (tmp_path / "none").exists()


@pytest.mark.parametrize("named", [False, True])
def test_steps_do_not_wait_for_what_is_made_of_the_copies_and_do_not_change_it(tmp_path, monkeypatch, named):
    click, ids = trained_click(tmp_path), some_ids()
    graph, steps = Score(click), []
    want, make_file = graph(ids), export.make_file
    if named:
        click.embedding.save_snapshot("now")

    def make_while_training(*args, **kwargs):
        step = threading.Thread(target=lambda: steps.append(click(some_ids(32), torch.ones(32))))
        step.start()
        step.join(600)
        assert len(steps) == 1, "it waits for the export"
        return make_file(*args, **kwargs)

    monkeypatch.setattr(export, "make_file", make_while_training)
    graph.export(tmp_path / "score", ids, snapshot="now" if named else None)
    assert torch.equal(load(tmp_path / "score")[0](ids), want) and not torch.equal(graph(ids), want)


# ---- what is left as it was ------------------------------------------------------------------------------------------


def everything(graph):
    modules = {name: (id(module), module.training, list(vars(module))) for name, module in graph.named_modules()}
    tensors = {name: (id(one), one.requires_grad, one._version) for name, one in graph.named_parameters()}
    buffers = {name: (id(one), one.clone()) for name, one in graph.named_buffers()}
    return modules, tensors, {name: (place, one.tolist()) for name, (place, one) in buffers.items()}


@pytest.mark.parametrize(("error", "format"), diagonal([None, RuntimeError, KeyboardInterrupt], FORMATS))
def test_the_graph_and_the_folder_are_as_before_however_an_export_ends(tmp_path, format, error):
    class Ends(Click):
        def build(self, ids, label):
            self.seen = label  # on the copy
            self.norm.running_mean.add_(1)
            found = super().build(ids, label * torch.rand_like(label))
            self.scaler.scale(found[0])
            if error is not None and self.ends:
                raise error
            return found

    graph = Ends(tmp_path)
    graph.ends, graph.scaler = False, torch.amp.GradScaler("cpu")
    graph(some_ids(), torch.ones(33))
    graph.ends, scaler = True, torch.amp.GradScaler("cpu")  # which has scaled nothing, and has no scale
    graph.scaler = scaler
    (tmp_path / "program").write_text("former")
    graph.embedding.description()  # keeps what it has made of the tables
    before, rows, scales = everything(graph), graph.embedding.stats()["rows"], dict(vars(scaler))
    files, random = sorted(str(path) for path in tmp_path.rglob("*.snapshot")), torch.random.get_rng_state()
    if error is None:
        graph.export(tmp_path / "program", some_ids(), torch.ones(33), format=format)
    else:
        with pytest.raises(error):
            graph.export(tmp_path / "program", some_ids(), torch.ones(33), format=format)
        assert (tmp_path / "program").read_text() == "former"
    assert everything(graph) == before and graph.embedding.stats()["rows"] == rows
    assert graph.scaler is scaler and vars(scaler) == scales and "seen" not in {*vars(graph)} - {"seen"}
    assert sorted(path.name for path in tmp_path.iterdir()) == ["clicks", "program"]
    assert graph.embedding.snapshots() == [] and files == sorted(str(path) for path in tmp_path.rglob("*.snapshot"))
    assert torch.equal(random, torch.random.get_rng_state())
    graph.ends = False
    graph(some_ids(), torch.ones(33))  # and it trains on


class Keeps(oneemb.EvalGraph):
    """Keeps what it computes in attributes that torch does not know of."""

    def __init__(self, click):
        super().__init__()
        self.embedding, self.seen, self.by_name = click.embedding, [], {"parts": [torch.ones(2)]}
        self.calls, self.layers = torch.zeros(1), [torch.nn.BatchNorm1d(6, affine=False)]
        self.embeddings = [self.embedding]

    def build(self, ids):
        rows = self.layers[0](self.embeddings[0](ids).sum(1))
        self.seen.append(rows)
        self.by_name["parts"][0].add_(1)
        self.by_name["rows"] = rows
        return rows + self.calls.add_(1)


def _is_at_work(path, pipe):
    """Hold a folder of an export's work until the other end says to end."""
    fs = LocalFileSystem()
    work, _lock = export.work_folder(fs, path)
    open(os.path.join(work, "rows"), "w").close()
    pipe.send("at work")
    pipe.recv()


def test_what_a_killed_export_leaves_goes_with_the_next_and_what_another_is_at_stays(tmp_path, click):
    path, parts, context = tmp_path / "score.pt2", [], fork_context()
    for _ in range(2):
        pipe, theirs = context.Pipe()
        parts.append((context.Process(target=_is_at_work, args=(str(path), theirs), daemon=True), pipe))
        parts[-1][0].start()
        assert pipe.poll(600) and pipe.recv() == "at work"
    at_work = set(tmp_path.glob(".score.pt2.*.tmp"))
    (tmp_path / ".other.pt2.01234567.tmp").mkdir()
    assert len(at_work) == 2
    parts[0][0].kill()
    ended(parts[0][0])
    Score(click).export(path, some_ids(8))
    (left,) = tmp_path.glob(".score.pt2.*.tmp")
    assert left in at_work and (left / "rows").exists() and (tmp_path / ".other.pt2.01234567.tmp").exists()
    parts[1][1].send("end")
    ended(parts[1][0])
    Score(click).export(path, some_ids(8))
    assert not list(tmp_path.glob(".score.pt2.*.tmp"))


@pytest.mark.parametrize("format", FORMATS)
def test_tensors_and_lists_that_torch_does_not_know_of_are_as_before(tmp_path, click, format):
    graph = Keeps(click)
    graph.export(tmp_path / "program.pt2", some_ids(), format=format)
    assert graph.seen == [] and list(graph.by_name) == ["parts"] and graph.calls.item() == 0
    assert graph.by_name["parts"][0].tolist() == [1, 1] and graph.layers[0].num_batches_tracked.item() == 0
    assert graph.embeddings[0] is click.embedding


@pytest.mark.parametrize("format", FORMATS)
def test_lists_of_modules_beside_the_modules_are_those_of_the_program(tmp_path, click, format):
    class Listed(oneemb.EvalGraph):
        def __init__(self):
            super().__init__()
            self.first, self.lookups = click.embedding, [click.embedding]
            self.layers = {"last": torch.nn.Linear(6, 2)}

        def build(self, ids):
            return self.layers["last"](self.lookups[0](ids).sum(1))

    graph = Listed()
    graph.export(tmp_path / "program.pt2", some_ids(), format=format)
    assert torch.equal(load(tmp_path / "program.pt2", format)[0](some_ids(7)), graph(some_ids(7)))


@pytest.mark.parametrize("format", FORMATS)
def test_a_disk_that_is_full_is_an_error_and_no_end_of_the_process(tmp_path, click, format):
    code = f"""
import resource, signal, sys
import torch
from tests.serving.test_export import some_ids
from tests.support.export_models import LOOKUPS, embedding_at
from oneemb.storage.errors import StorageError
from pathlib import Path
graph = LOOKUPS["ids"][0](embedding_at(Path({str(tmp_path)!r})))
graph.register_buffer("large", torch.ones(300_000))
look_up, graph.look_up = graph.look_up, lambda e, ids: look_up(e, ids).sum() * graph.large
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
resource.setrlimit(resource.RLIMIT_FSIZE, (1_000_000, 1_000_000))
try:
    graph.export({str(tmp_path / "program.pt2")!r}, some_ids(), format={format!r})
except StorageError as error:
    print(error)
"""
    (tmp_path / "program.pt2").write_text("former")
    done = run_code(code)
    assert done.returncode == 0, done.stderr
    assert "could not write" in done.stdout and "EFBIG" in done.stdout
    assert (tmp_path / "program.pt2").read_text() == "former"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["clicks", "program.pt2"]


# ---- hostile use -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("build", "says"),
    [
        (lambda self, ids: self.embedding(ids).sum() if ids.sum() > 0 else ids, "branches on values"),
        (lambda self, ids: self.embedding(ids)[: int(ids[0, 0])], "branches on values"),
        (lambda self, ids: self.embedding(ids).view(33, -1), "fixes the number of examples"),
        (lambda self, ids: self.embedding(ids.int()), "TypeError: ids must be torch.int64"),
        (lambda self, ids: self.embedding.stats(), "AttributeError.*stats"),
        (lambda self, ids: (self.embedding(ids), "text"), "it returns 'text'"),
        (lambda self, ids: Pair(self.embedding(ids), ids), "Pair"),
        (lambda self, ids: torch.from_numpy(self.embedding(ids).numpy() + 1), "RuntimeError.*numpy"),
    ],
)
def test_a_build_that_no_program_can_hold_is_an_error_that_says_why(tmp_path, click, build, says):
    graph = type("Hostile", (Score,), {"build": build})(click)
    with pytest.raises(oneemb.BuildError, match=f"(?s)build cannot be exported.*{says}"):
        graph.export(tmp_path / "program", some_ids())
    assert not list(tmp_path.iterdir())


def test_torchscript_does_not_fix_what_tracing_would(tmp_path, click):
    class Fixes(Score):
        def build(self, ids):
            return self.embedding(ids).repeat_interleave(torch.sym_int(ids.shape[0] * 1.0), 1)

    graph = Fixes(click)
    with pytest.raises(oneemb.BuildError, match="which a trace would fix"):
        graph.export(tmp_path / "program", some_ids(), format="torchscript")
    graph.export(tmp_path / "program", some_ids())
    assert load(tmp_path / "program")[0](some_ids(4)).shape == (4, 12, 6)


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"format": "onnx"}, "format must be one of 'export', 'aot_inductor', 'torchscript'"),
        ({"dtype": "int2"}, "dtype must be"),
        ({"lookup": "hash"}, "lookup must be"),
        ({"absent": "error"}, "absent must be"),
        ({"lookup": "op", "format": "aot_inductor"}, "runs without Python"),
    ],
)
def test_an_option_that_there_is_not_is_named(tmp_path, click, options, says):
    with pytest.raises(ValueError, match=says):
        Score(click).export(tmp_path / "program", some_ids(), **options)


def test_inputs_that_a_program_cannot_take_are_named(tmp_path, click):
    graph = Score(click)
    with pytest.raises(ValueError, match=r"2 examples or more.*input 0 has shape \[1, 3\]"):
        graph.export(tmp_path / "program", some_ids(1))
    graph.export(tmp_path / "program", some_ids(1), dynamic_shapes=(None,))
    assert torch.equal(load(tmp_path / "program")[0](some_ids(1, 3)), graph(some_ids(1, 3)))
    with pytest.raises(ValueError, match="input 0 must be on the CPU, .* got meta"):
        graph.export(tmp_path / "program", some_ids().to("meta"))
    with pytest.raises(FileNotFoundError, match="make it first"):
        graph.export(tmp_path / "none" / "program", some_ids())


def test_an_input_of_one_number_is_exported_where_its_dimension_is_said_to_be_fixed(tmp_path, click):
    class Cooled(Score):
        def build(self, ids, temperature):
            return super().build(ids) / temperature

    graph, temperature = Cooled(click), torch.full((1,), 2.0)
    with pytest.raises(ValueError, match="dynamic_shapes= if its first dimension is fixed"):
        graph.export(tmp_path / "program", some_ids(), temperature)
    shapes = {"ids": {0: torch.export.Dim.DYNAMIC}, "temperature": None}
    graph.export(tmp_path / "program", some_ids(), temperature, dynamic_shapes=shapes)
    assert torch.equal(load(tmp_path / "program")[0](some_ids(7), temperature), graph(some_ids(7), temperature))


def test_embeddings_that_are_not_in_the_graph_are_named(tmp_path, click):
    class Hidden(oneemb.EvalGraph):
        def __init__(self):
            super().__init__()
            self.all = [click.embedding]

        def build(self, ids):
            return self.all[0](ids)

    with pytest.raises(ValueError, match=r"all\[0\].*ModuleList"):
        Hidden().export(tmp_path / "program", some_ids())


@pytest.mark.parametrize("format", FORMATS)
def test_a_program_refuses_ids_of_another_dtype_and_offsets_and_tables_out_of_range(tmp_path, format):
    embedding = embedding_at(tmp_path)

    def program(name):
        make, batch = LOOKUPS[name]
        make(embedding).export(tmp_path / name, *batch(20, 1), format=format)
        return load(tmp_path / name, format)[0], batch(6, 2)

    found, (ids,) = program("ids")
    assert torch.equal(found(ids.int()), found(ids))  # which loses nothing
    for other in (ids.float(), ids[:, :2]):
        with pytest.raises((RuntimeError, AssertionError)):
            found(other)
    found, (ids, tables) = program("tables of ids")
    for wrong in (3, -1):
        with pytest.raises((RuntimeError, IndexError)):
            found(ids, torch.where(tables == 1, wrong, tables))
    found, (ids, offsets) = program("sum")
    for wrong in (offsets + 1, torch.cat([offsets[:-1], offsets[-1:] - 1]), offsets.flip(0), offsets * 2):
        with pytest.raises((RuntimeError, IndexError)):
            found(ids, wrong)


def test_ids_of_32_bits_are_looked_up_as_they_are(tmp_path):
    store = oneemb.make_device_mem_store_options(str(tmp_path / "narrow"))
    embedding = oneemb.MultiTableEmbedding("narrow", 3, torch.float32, torch.int32, [oneemb.make_table()], store)
    graph = LOOKUPS["ids"][0](embedding)
    ids = torch.tensor([-(2**31), -1, 0, 2**31 - 1], dtype=torch.int32)
    for format in FORMATS:
        graph.export(tmp_path / "program", ids, format=format)
        program, _ = load(tmp_path / "program", format)
        assert torch.equal(program(ids[:3]), graph(ids[:3]))
        with pytest.raises((RuntimeError, AssertionError)):
            program(ids.float())


def test_an_export_says_nothing_of_torchs_own(tmp_path, click):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        warnings.filterwarnings("ignore", category=DeprecationWarning)
        for format in FORMATS:
            Score(click).export(tmp_path / "program", some_ids(), format=format)
