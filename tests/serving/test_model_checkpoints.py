"""Checkpoints and functions of serve_model: refreshes of threads, torch's wrappers, damaged files, rows in `make`."""

import io
import os
import random
import threading
import zipfile

import pytest
import torch

import oneemb
from oneemb.checkpoints.graph_state import load_state
from oneemb.storage.errors import StorageError
from tests.serving.test_following import PATIENCE_S, child, ended_well
from tests.serving.test_model import IDS, Scorer, Stamped, answers, job, serve, stamp, stamped

__all__ = ["job", "stamped"]  # fixtures

# ---- refreshes of threads --------------------------------------------------------------------------------------------


class Held:
    """A check of versions that waits, at version 2 and in this process, until `go` is set."""

    def __init__(self):
        self.begun, self.go, self.process, self.checked = threading.Event(), threading.Event(), os.getpid(), []

    def __call__(self, version):
        self.checked.append(stamp(version))
        if self.checked[-1] == 2 and os.getpid() == self.process:
            self.begun.set()
            assert self.go.wait(PATIENCE_S)


def refreshing(served, ends, **options):
    """Thread of a refresh that appends its result, or its error, and the version that then serves."""

    def refresh():
        try:
            ends.append((served.refresh(**options), stamp(served)))
        except Exception as error:
            ends.append(error)

    thread = threading.Thread(target=refresh)
    thread.start()
    return thread


@pytest.mark.parametrize("older", [False, True])
@pytest.mark.parametrize("newer", [False, True])
def test_refreshes_of_threads_load_each_version_once_and_go_forward(stamped, newer, older):
    held, ends = Held(), []
    with serve(stamped, check=held) as served:
        stamped.save()
        first = refreshing(served, ends, older=older)
        assert held.begun.wait(PATIENCE_S)
        if newer:
            stamped.save()
        second = refreshing(served, ends)
        second.join(0.5)  # Time to go wrong; a refresh that waits its turn goes on below.
        held.go.set()
        first.join(PATIENCE_S)
        second.join(PATIENCE_S)
        assert len(ends) == 2 and (True, stamped.saves) in ends and all(end[0] is True for end in ends)
        assert held.checked == ([1, 2, 3] if newer else [1, 2])
        assert stamp(served) == stamped.saves and served.error is None


def test_who_stops_following_or_forks_waits_for_no_refresh_of_another_thread(stamped):
    held, ends = Held(), []
    with serve(stamped, check=held) as served:
        stamped.save()
        thread = refreshing(served, ends)
        assert held.begun.wait(PATIENCE_S)
        served.follow(0.001)
        assert ended_well(child(lambda: served.refresh() and stamp(served) == 2))
        stopping = threading.Thread(target=served.unfollow)
        stopping.start()
        stopping.join(PATIENCE_S)
        assert not stopping.is_alive() and not ends
        held.go.set()
        thread.join(PATIENCE_S)
        assert ends == [(True, 2)]


def test_a_function_that_is_told_of_versions_may_refresh(stamped):
    told = []

    def on_change(served):
        told.append((stamp(served), served.refresh()))

    with serve(stamped, on_change=on_change) as served:
        stamped.save()
        assert served.refresh()
    assert told == [(1, False), (2, False)]


# ---- torch's wrappers ------------------------------------------------------------------------------------------------


def compiled(module):
    """The module with `torch.compile` around it and around parts of it; nothing is called, so nothing compiles."""
    module.score, module.pairs = torch.compile(module.score), torch.compile(module.pairs)
    return torch.compile(module)


def save_compiled_state(job, path):
    state = compiled(job.model).state_dict()
    assert {"_orig_mod.score._orig_mod.weight", "_orig_mod.pairs._orig_mod._extra_state"} <= state.keys()
    torch.save(state, path)


def save_compiled_graph(job, path):
    job.model = compiled(job.model)
    job.save(path)


def save_data_parallel(job, path):
    """Names of DistributedDataParallel around the whole and around parts of a compiled module."""
    names = {"score.": "score.module.", "norm.": "norm._orig_mod.module.", "pairs.": "pairs.module."}
    state = job.model.state_dict()
    for plain, wrapped in names.items():
        state = {name.replace(plain, wrapped): value for name, value in state.items()}
    torch.save({"epoch": 1, "model": {f"module.{name}": value for name, value in state.items()}}, path)


@pytest.mark.parametrize("save", [save_compiled_state, save_compiled_graph, save_data_parallel])
@pytest.mark.parametrize("make", [Scorer, lambda folder: compiled(Scorer(folder))], ids=["plain", "compiled"])
def test_a_checkpoint_of_wrapped_modules_is_served(job, tmp_path, save, make):
    want = answers(job.model)
    pairs, bags = job.model.pairs, job.model.bags
    save(job, tmp_path / "model.pt")
    with oneemb.serve_model(tmp_path / "model.pt", lambda: make(tmp_path)) as served:
        assert torch.equal(served(IDS), want)
        assert served.current.snapshots.keys() == {"pairs", "bags"}
    pairs.close()
    bags.close()


def test_a_module_whose_own_name_is_that_of_a_wrapper_is_served(stamped):
    class Holder(torch.nn.Module):
        def __init__(self, folder):
            super().__init__()
            self.module = Stamped(folder)

        def forward(self, ids):
            return self.module(ids)

    state = {f"module.{name}": value for name, value in stamped.model.state_dict().items()}
    for before in "", "net.", "net.module.", "net._orig_mod.":
        stamped.put({before + name: value for name, value in state.items()})
        for made in Holder, Stamped:
            with oneemb.serve_model(stamped.path, lambda made=made: made(stamped.path.parent)) as served:
                assert stamp(served) == 1


# ---- the function that makes the module ------------------------------------------------------------------------------


def train(module, state):
    module(IDS)


def load(module, state):
    module.load_state_dict(state)


def optimize(module, state):
    oneemb.Optimizer(torch.optim.Adam(module.parameters()), [module.rows])


@pytest.mark.parametrize("use", [train, load, optimize])
@pytest.mark.parametrize("after", [False, True])
def test_rows_of_a_module_that_is_made_to_be_served_are_an_error(stamped, use, after):
    made = []

    def make(checkpoint):
        made.append(Stamped(stamped.path.parent))
        if not after:
            use(made[0], checkpoint)
        return made[0]

    names = sorted(os.listdir(stamped.path.parent / "rows"))
    with pytest.raises(StorageError, match="was made for serve_model.* the function must return the module without"):
        with oneemb.serve_model(stamped.path, make, folder=stamped.path.parent / "served") as served:
            assert stamp(served) == 1
            use(made[0], torch.load(stamped.path))
    assert sorted(os.listdir(stamped.path.parent / "rows")) == names
    stamped.save()  # The job goes on.


def test_a_module_that_is_made_to_be_served_may_look_up_in_eval_mode(stamped):
    def make():
        module = Stamped(stamped.path.parent).eval()
        assert module(IDS)[0].eq(0).all()  # initial rows
        return module

    with oneemb.serve_model(stamped.path, make) as served:
        assert stamp(served) == 1
    stamped.save()


def test_a_module_that_is_made_to_be_served_makes_no_folder(stamped):
    folder = stamped.path.parent / "none"
    with pytest.raises(StorageError, match="model.pt names snapshot .* for embedding 'rows', .*no table of oneemb"):
        oneemb.serve_model(stamped.path, lambda: Stamped(folder))
    assert not folder.exists()


class Net(torch.nn.Module):
    """Rows, tied weights, a list of parameters, and buffers."""

    def __init__(self, folder, scale=None):
        super().__init__()
        self.rows = oneemb.MultiTableEmbedding(
            "rows", 4, torch.float32, torch.int64, [oneemb.make_table()],
            oneemb.make_device_mem_store_options(f"{folder}/rows"),
        )  # fmt: skip
        self.gru, self.norm = torch.nn.GRU(4, 4, batch_first=True), torch.nn.BatchNorm1d(4)
        self.first, self.second = torch.nn.Linear(4, 4), torch.nn.Linear(4, 4)
        self.second.weight = self.first.weight
        self.register_buffer("scale", torch.ones(4) if scale is None else scale, persistent=False)

    def forward(self, ids):
        rows = self.norm(self.gru(self.rows(ids))[0][:, 0])
        return self.second(self.first(rows)) * self.scale


def test_a_module_is_made_on_the_meta_device(tmp_path):
    trained = Net(tmp_path)
    trained(IDS)
    torch.save(trained.state_dict(), tmp_path / "model.pt")
    scale = torch.ones(4)

    def make():
        with torch.device("meta"):
            return Net(tmp_path, scale)

    with oneemb.serve_model(tmp_path / "model.pt", make) as served:
        assert torch.equal(served(IDS), answers(trained))
        tensors = [*served.current.module.parameters(), *served.current.module.buffers()]
        assert not any(tensor.is_meta for tensor in tensors)
    scale = None
    with pytest.raises(TypeError, match="scale is on the meta device, and no checkpoint holds it"):
        oneemb.serve_model(tmp_path / "model.pt", make, missing_ok=True)
    trained.rows.close()


# ---- damaged and hostile files ---------------------------------------------------------------------------------------


def entry(text):
    return torch.frombuffer(bytearray(text.encode()), dtype=torch.uint8)


def of_graph(**entries):
    return {"format": 2, "embeddings": {}, "tensors": {}, "extra": {}} | entries


HOSTILE = {
    "number": 7, "list": [1, [2]], "tensor": torch.zeros(3), "nothing": None, "empty": {}, "numbers": {1: {2: {3: 4}}},
    "module": torch.nn.Linear(2, 2), "class": {"model": {"rows._extra_state": complex, "bytes": bytearray}},
    "entry": {"rows._extra_state": 7, "dense": torch.zeros(())},
    "text": {"rows._extra_state": entry("no JSON"), "dense": torch.zeros(())},
    "nesting": {"rows._extra_state": entry("[" * 100_000), "dense": torch.zeros(())},
    "sparse": {"rows._extra_state": torch.zeros(1024).to_sparse(), "dense": torch.zeros(())},
    "embeddings": of_graph(embeddings=[1]), "snapshot": of_graph(embeddings={"rows": 3}),
    "name": of_graph(embeddings={"rows": {"oneemb_snapshot": 3}}), "no name": of_graph(embeddings={"rows": {}}),
    "identity": of_graph(embeddings={"rows": {"oneemb_snapshot": "a", "oneemb_identity": [1]}}),
    "tensors": of_graph(tensors=[torch.zeros(2)]), "values": of_graph(tensors={"dense": 7}),
    "keys": of_graph(tensors={1: torch.zeros(2)}), "extra": of_graph(extra=7),
}  # fmt: skip


@pytest.mark.parametrize("name", HOSTILE)
def test_a_file_of_something_else_is_an_error_that_names_the_file_and_says_what_to_do(stamped, name):
    with serve(stamped) as served:
        stamped.put(HOSTILE[name])
        with pytest.raises(ValueError, match=r"model\.pt .*(save|take) "):
            served.refresh()
        assert stamp(served) == 1
    with pytest.raises(ValueError, match=r"model\.pt .*(take|load|save) "):
        load_state(str(stamped.path), str(stamped.path))


def test_state_that_a_part_of_the_module_does_not_take_is_an_error_that_names_the_part(job, tmp_path):
    state = job.model.state_dict()
    for value in "three", torch.zeros(2), None:
        torch.save({**state, "offset._extra_state": value}, tmp_path / "model.pt")
        with pytest.raises(ValueError, match=r"model\.pt does not fit the module: 'offset' does not take its state"):
            oneemb.serve_model(tmp_path / "model.pt", lambda: Scorer(tmp_path))


def changed(content, draw):
    """A file of torch with some bytes of its pickle changed, and right checksums."""
    out = io.BytesIO()
    with zipfile.ZipFile(io.BytesIO(content)) as archive, zipfile.ZipFile(out, "w") as copy:
        for one in archive.namelist():
            data = bytearray(archive.read(one))
            if one.endswith("data.pkl"):
                for _ in range(draw.choice([1, 1, 2, 8])):
                    data[draw.randrange(len(data))] = draw.choice([0, 1, 40, 46, 48, 75, 82, 98, 104, 113, 128, 255])
            copy.writestr(one, bytes(data))
    return out.getvalue()


def check_changed(served, stamped, content, draw):
    stamped.put(content)
    try:
        served.refresh(older=True)
    except (ValueError, StorageError) as error:
        assert str(stamped.path) in str(error) or isinstance(error, StorageError)
    try:
        load_state(str(stamped.path), "the file")
    except ValueError as error:
        assert str(error).startswith("the file ")


def test_a_file_that_is_cut_or_changed_anywhere_raises_no_other_error(stamped, job, tmp_path, seed):
    draw = random.Random(seed)
    job.save(tmp_path / "graph.pt")
    with serve(stamped) as served:
        for content in stamped.path.read_bytes(), (tmp_path / "graph.pt").read_bytes():
            for _ in range(100):
                check_changed(served, stamped, changed(content, draw), draw)
            for _ in range(20):
                check_changed(served, stamped, content[: draw.randrange(len(content))], draw)


WRONG = [7, None, "text", [3], {"a": 3}, {3: "a"}, [[3]], [{"state": 3}], {"torch": 3}, torch.zeros(2)]


def test_a_graph_refuses_a_checkpoint_with_a_wrong_entry_and_changes_nothing(job, tmp_path):
    path = tmp_path / "graph.pt"
    job.save(path)
    state, before = torch.load(path), answers(job.model)
    job(IDS)
    later = answers(job.model)
    assert not torch.equal(later, before)
    optional = {"own_grad_scalers", "optimizer_names", "earlier"}
    for name in sorted(state.keys() - {"path"}):
        for wrong in WRONG:
            if (name, str(wrong)) in (("skipped", "[3]"), ("steps", "7")):
                continue  # as `save` writes them
            damaged = {**state, name: wrong}
            if wrong is None and name not in optional:
                del damaged[name]
            torch.save(damaged, path)
            try:
                job.load(path)
            except ValueError as error:
                assert str(path) in str(error)
                assert torch.equal(answers(job.model), later), name
            else:
                raise AssertionError((name, wrong))
    torch.save(state, path)
    job.load(path)
    assert torch.equal(answers(job.model), before)
