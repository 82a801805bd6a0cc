"""A whole model served from a checkpoint: the bits of training, one version a call, and what cannot be taken over."""

import functools
import gc
import json
import logging
import os
import random
import re
import threading
import time
import types

import pytest
import torch

import oneemb
from oneemb.serving import build, model as serving_model
from oneemb.storage.errors import OtherSnapshotError, StorageError
from tests.serving.test_following import PATIENCE_S, Building, child, ended_well, wait_for
from tests.support.forks import fork_context
from tests.support.inside import follower_of
from tests.support.waits import ended

IDS = torch.arange(300).reshape(-1, 2)


class Offset(torch.nn.Module):
    """A number that is neither parameter nor buffer."""

    by = 0.0

    def get_extra_state(self):
        return torch.tensor(self.by)

    def set_extra_state(self, state):
        self.by = state.item()

    def forward(self, scores):
        return scores + self.by


class Scorer(torch.nn.Module):
    """Two tables of one embedding, another embedding, dense weights, buffers and extra state."""

    def __init__(self, folder, dim=4):
        super().__init__()
        one = oneemb.make_table(oneemb.make_normal_initializer(0.0, 0.1))
        store = oneemb.make_cached_ssd_store_options(8, f"{folder}/pairs")
        self.pairs = oneemb.MultiTableEmbedding("pairs", dim, torch.float32, torch.int64, [one, one], store, seed=3)
        store = oneemb.make_device_mem_store_options(f"{folder}/bags")
        self.bags = oneemb.MultiTableEmbedding("bags", 3, torch.bfloat16, torch.int64, [one], store, padding_idx=0)
        self.norm = torch.nn.BatchNorm1d(2 * dim + 3)
        self.drop, self.score = torch.nn.Dropout(0.5), torch.nn.Linear(2 * dim + 3, 1)
        self.offset = Offset()

    def forward(self, ids):
        bags = self.bags(ids, pooling="mean")
        rows = self.norm(torch.cat([self.pairs(ids).flatten(1), bags.float()], 1))
        return self.offset(self.score(self.drop(rows)).squeeze(1))

    def close(self):
        self.pairs.close()
        self.bags.close()


class Training(oneemb.TrainGraph):
    def __init__(self, model):
        super().__init__()
        self.model = model
        self.add_optimizer(torch.optim.Adam(model.parameters(), lr=0.05))

    def build(self, ids):
        loss = (self.model(ids) - ids.sum(1) % 3).square().mean()
        loss.backward()
        return loss


@pytest.fixture
def job(tmp_path):
    """A graph that has trained a little, in another folder than a server's file names would suggest."""
    torch.manual_seed(0)
    graph = Training(Scorer(tmp_path))
    for _ in range(3):
        graph(IDS)
    graph.model.offset.by = 0.5
    yield graph
    graph.model.close()


def answers(module, ids=IDS):
    """Scores of a trained module in eval mode, the oracle."""
    module.eval()
    with torch.no_grad():
        scores = module(ids)
    module.train()
    return scores


def save_state(job, path):
    torch.save(job.model.state_dict(), path)


def save_nested(job, path):
    state = {f"module.net.{name}": value for name, value in job.model.state_dict().items()}
    torch.save({"step": 3, "optimizer": {"state": {}}, "weights": state}, path)


def save_graph(job, path):
    job.save(path)


SAVES = [save_graph, save_state, save_nested]


@pytest.mark.parametrize("save", SAVES)
@pytest.mark.parametrize("given", ["function", "module"])
def test_a_served_model_has_the_bits_of_the_trained_one(job, tmp_path, save, given):
    save(job, tmp_path / "model.pt")
    new = torch.arange(10**15, 10**15 + 40).reshape(-1, 2)  # ids without a row
    want, want_new = answers(job.model), answers(job.model, new)
    model = job.model if given == "module" else lambda: Scorer(tmp_path)
    with oneemb.serve_model(tmp_path / "model.pt", model) as served:
        job(IDS)  # Training goes on.
        assert torch.equal(served(IDS), want) and torch.equal(served(new), want_new)
        assert not served(IDS).requires_grad and not served.current.module.training and served.error is None
        assert served.current.snapshots.keys() == {"pairs", "bags"}
        assert time.time() - 600 < served.current.saved_at <= time.time()
    assert not torch.equal(answers(job.model), want)


@pytest.mark.parametrize(("dtype", "error"), [("float16", 0.01), ("int8", 0.05), ("int4", 0.5)])
def test_rows_are_served_in_the_dtype_that_is_asked_for(job, tmp_path, dtype, error):
    job.save(tmp_path / "model.pt")
    with oneemb.serve_model(tmp_path / "model.pt", job.model, dtype=dtype, folder=tmp_path / "files") as served:
        scores = served(IDS)
        assert 0 < (scores - answers(job.model)).abs().max() < error
    names = sorted(
        str(path.relative_to(tmp_path / "files")) for path in (tmp_path / "files").rglob(f"*{dtype}.serving")
    )
    assert [name.split("/")[0] for name in names] == ["bags", "pairs"]
    assert not list(tmp_path.glob("*/serving"))


def test_each_embedding_has_no_more_served_rows_than_the_cap(job, tmp_path):
    job.save(tmp_path / "model.pt")
    for wrong in (0, True, 2.0):
        with pytest.raises(ValueError, match="max_rows must be a number of rows"):
            oneemb.serve_model(tmp_path / "model.pt", lambda: Scorer(tmp_path), max_rows=wrong)
    options = {"absent": "zeros", "max_rows": 5}
    with oneemb.serve_model(tmp_path / "model.pt", lambda: Scorer(tmp_path), **options) as served:
        for _ in range(2):
            for name in ("pairs", "bags"):
                trained, module = getattr(job.model, name), getattr(served.current.module, name)
                count = 0
                for table in range(trained.num_tables):
                    ids = trained.ids(table=table)
                    rows, want = (one.read(ids, torch.tensor(table)).float() for one in (module, trained))
                    there = rows.any(1)
                    assert torch.equal(rows[there], want[there]) and len(ids) > 5
                    count += int(there.sum())
                assert count == 5
            job(IDS)
            job.save(tmp_path / "model.pt", delta=True)
            assert served.refresh()


def test_an_eval_graph_is_served_by_its_build(job, tmp_path):
    class Scores(oneemb.EvalGraph):
        def __init__(self, model):
            super().__init__()
            self.net = model

        def build(self, ids, scale=1.0):
            return {"score": self.net(ids) * scale}

    job.save(tmp_path / "model.pt")
    renamed = torch.load(tmp_path / "model.pt")
    for part in "tensors", "embeddings", "extra":
        renamed[part] = {name.replace("model.", "net."): value for name, value in renamed[part].items()}
    torch.save(renamed, tmp_path / "net.pt")
    with oneemb.serve_model(tmp_path / "net.pt", Scores(job.model)) as served:
        assert torch.equal(served(IDS, scale=2.0)["score"], answers(job.model) * 2)


def test_a_checkpoint_of_lightning_is_served(tmp_path):
    lightning = pytest.importorskip("pytorch_lightning")

    class Module(lightning.LightningModule):
        def __init__(self, folder):
            super().__init__()
            self.save_hyperparameters()
            self.net = Scorer(folder)

        def training_step(self, ids, _):
            return self.net(ids[0]).square().mean()

        def configure_optimizers(self):
            return torch.optim.Adam(self.parameters(), lr=0.05)

    module = Module(str(tmp_path))
    trainer = lightning.Trainer(
        max_epochs=1, logger=False, enable_progress_bar=False, enable_model_summary=False, accelerator="cpu",
        default_root_dir=tmp_path, enable_checkpointing=False,
    )  # fmt: skip
    trainer.fit(module, torch.utils.data.DataLoader(torch.utils.data.TensorDataset(IDS), batch_size=50))
    trainer.save_checkpoint(tmp_path / "model.ckpt")
    with oneemb.serve_model(tmp_path / "model.ckpt", lambda: Scorer(tmp_path)) as served:
        assert torch.equal(served(IDS), answers(module.net))

    def make(checkpoint):
        return Scorer(checkpoint["hyper_parameters"]["folder"])

    with oneemb.serve_model(tmp_path / "model.ckpt", make, prefix="net") as served:
        assert torch.equal(served(IDS), answers(module.net))
    module.net.close()


# ---- versions --------------------------------------------------------------------------------------------------------


class Stamped(torch.nn.Module):
    """Every weight of every row, and the dense weight, are the number of the save."""

    def __init__(self, folder):
        super().__init__()
        self.rows = oneemb.MultiTableEmbedding(
            "stamped", 3, torch.float32, torch.int64, [oneemb.make_table(oneemb.make_constant_initializer(0.0))],
            oneemb.make_device_mem_store_options(f"{folder}/rows"),
        )  # fmt: skip
        self.dense = torch.nn.Parameter(torch.zeros(()))

    def forward(self, ids):
        return self.rows(ids), self.dense


class StampedJob:
    def __init__(self, folder):
        self.path, self.model, self.saves = folder / "model.pt", Stamped(folder), 0
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=1.0)

    def save(self):
        rows, dense = self.model(IDS)
        (-(rows.sum() + dense)).backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        self.saves += 1
        self.put(self.model.state_dict())
        return self.path.read_bytes()

    def put(self, content):
        """Replace the checkpoint, as a job does."""
        temporary = self.path.with_suffix(".tmp")
        temporary.write_bytes(content) if isinstance(content, bytes) else torch.save(content, temporary)
        os.replace(temporary, self.path)


@pytest.fixture
def stamped(tmp_path):
    job = StampedJob(tmp_path)
    job.save()
    yield job
    job.model.rows.close()


def serve(job, **options):
    return oneemb.serve_model(job.path, lambda: Stamped(job.path.parent), **options)


def stamp(served):
    """Number of the save that answers; rows and weights of two are an error."""
    rows, dense = served(IDS)
    assert rows.min() == rows.max() == dense
    return int(dense)


def test_answers_of_threads_are_each_of_one_version_while_versions_are_taken_over(stamped):
    seen, wrong, ends = [set() for _ in range(3)], [], threading.Event()

    def read(mine):
        last = 0
        while not ends.is_set():
            try:
                now = stamp(served)
                assert now >= last
                mine.add(now)
                last = now
            except Exception as error:
                wrong.append(error)
                return

    with serve(stamped) as served:
        served.follow(0.002)
        threads = [threading.Thread(target=read, args=(mine,)) for mine in seen]
        for thread in threads:
            thread.start()
        for _ in range(12):
            stamped.save()
            assert wait_for(lambda: wrong or all(stamped.saves in mine for mine in seen))
        ends.set()
        ended(*threads)
    assert not wrong and served.error is None


def test_calls_do_not_wait_for_a_version_that_is_being_loaded(stamped, monkeypatch):
    with serve(stamped) as served:
        held = served.current
        building = Building(monkeypatch)
        stamped.save()
        served.follow(0.001)
        assert building.begun.wait(PATIENCE_S)
        assert stamp(served) == 1
        building.go.set()
        assert wait_for(lambda: stamp(served) == 2)
        assert stamp(held) == 1, "a version that a caller holds stays"


def test_closing_stops_a_load_and_releases_maps_and_threads(stamped, monkeypatch):
    def mapped():
        gc.collect()
        with open("/proc/self/maps") as maps:
            return sum(str(stamped.path.parent) in line and ".serving" in line for line in maps)

    served = serve(stamped)
    assert mapped()
    building = Building(monkeypatch)
    stamped.save()
    served.follow(0.001)
    assert building.begun.wait(PATIENCE_S)
    served.close()
    assert not mapped() and not any(one.name == "oneemb-follow" for one in threading.enumerate())
    for call in (lambda: served(IDS), served.refresh, served.follow):
        with pytest.raises(StorageError, match="closed"):
            call()
    served.close()


def test_a_replaced_version_is_unmapped(stamped):
    with serve(stamped) as served:
        for _ in range(4):
            stamped.save()
            assert served.refresh() and stamp(served) == stamped.saves
        gc.collect()
        with open("/proc/self/maps") as maps:
            files = {line.split()[-1] for line in maps if line.rstrip().endswith(".serving")}
        assert sum(str(stamped.path.parent) in path for path in files) == 1


def test_a_model_that_nobody_refers_to_follows_no_more(stamped):
    served = serve(stamped)
    served.follow(0.001)
    thread = follower_of(served).thread
    del served
    gc.collect()
    thread.join(PATIENCE_S)
    assert not thread.is_alive()


def test_a_child_of_fork_answers_and_follows(stamped):
    with serve(stamped) as served:
        served.follow(0.005)
        go = stamped.path.with_suffix(".go")

        def work():
            assert stamp(served) <= 2
            go.touch()
            return wait_for(lambda: stamp(served) == 2)

        pid = child(work)
        assert wait_for(go.exists)
        stamped.save()
        assert ended_well(pid) and wait_for(lambda: stamp(served) == 2)


def damaged(job, content):
    at = content.index(torch.tensor(2.0).numpy().tobytes())
    job.put(content[:at] + bytes([content[at] ^ 1]) + content[at + 1 :])


def missing(job, content):
    job.path.unlink()


def cut(job, content):
    job.put(content[: len(content) // 2])


def other_weights(job, content):
    state = job.model.state_dict()
    job.put({**state, "dense": torch.zeros(2)})


def fewer_weights(job, content):
    state = job.model.state_dict()
    del state["dense"]
    job.put(state)


def no_snapshot(job, content):
    state = job.model.state_dict()
    name = oneemb.snapshot_name(state["rows._extra_state"])
    job.put(state)
    job.model.rows.delete_snapshot(name)


def another_run(job, content):
    state = job.model.state_dict()
    entry = json.loads(bytes(state["rows._extra_state"].tolist()))
    entry["oneemb_identity"] = "0" * len(entry["oneemb_identity"])
    state["rows._extra_state"] = torch.frombuffer(bytearray(json.dumps(entry).encode().ljust(1024)), dtype=torch.uint8)
    job.put(state)


def no_rows(job, content):
    state = job.model.state_dict()
    entry = json.dumps({"oneemb_snapshot": None}).encode().ljust(1024)
    job.put({**state, "rows._extra_state": torch.frombuffer(bytearray(entry), dtype=torch.uint8)})


def not_served(job, content):
    job.put({"anything": torch.zeros(3)})


HARMS = {
    missing: (FileNotFoundError, "No such file"), cut: (ValueError, "is damaged"),
    damaged: (ValueError, "damaged: the checksum"),
    other_weights: (ValueError, r"dense is \(2,\) there, \(\) in the module"),
    fewer_weights: (ValueError, "it has no dense"), no_snapshot: (StorageError, "no snapshot named"),
    another_run: (OtherSnapshotError, "another run"), no_rows: (StorageError, "before embedding 'rows' had a row"),
    not_served: (ValueError, "names snapshots; save it by graph.save"),
}  # fmt: skip


@pytest.mark.parametrize("harm", HARMS, ids=lambda harm: harm.__name__)
def test_what_cannot_be_taken_over_leaves_the_version_that_serves_and_is_told(stamped, harm, caplog):
    kind, says = HARMS[harm]
    attempts = []
    with serve(stamped, on_change=lambda served: attempts.append(served.error)) as served:
        harm(stamped, stamped.save())
        with pytest.raises(kind, match=says):
            served.refresh()
        assert stamp(served) == 1 and isinstance(served.error, kind)
        with pytest.raises(kind, match=says):
            serve(stamped)
        served.error = None
        attempts.clear()
        with caplog.at_level(logging.INFO, "oneemb"):
            served.follow(0.001)
            assert wait_for(lambda: len(attempts) >= 4)
            assert stamp(served) == 1 and all(re.search(says, str(error)) for error in attempts[:4])
            stamped.save()
            assert wait_for(lambda: stamp(served) == 3)
            served.unfollow()
        told = [one.getMessage() for one in caplog.records if one.levelno >= logging.WARNING]
        assert len(set(told)) == len(told)  # An error that lists the snapshots has another text after a save.
        assert told and all(re.search(says, one) for one in told)
        assert served.error is None


def test_a_checkpoint_that_fails_is_tried_more_and_more_rarely(stamped, monkeypatch):
    now, looks, attempts = [0.0], [], []

    def clock():
        looks.append(now[0])
        return now[0]

    with serve(stamped, on_change=lambda served: attempts.append(now[0])) as served:
        no_snapshot(stamped, stamped.save())
        attempts.clear()
        monkeypatch.setattr(serving_model, "time", types.SimpleNamespace(monotonic=clock))
        served.follow(0.004)
        # The follower reads the clock after its attempt, too: the time goes on only when it has.
        assert wait_for(lambda: attempts and len(looks) >= 3)
        for doublings in range(20):
            wait = min(0.004 * 2**doublings, 60.0)
            for end, made in ((0.99 * wait, 0), (1.01 * wait, 1)):
                begin, before = attempts[-1], len(attempts)
                now[0] = begin + end
                assert wait_for(lambda made=made, before=before: len(attempts) == before + made)
                seen = len(looks)
                assert wait_for(lambda seen=seen: len(looks) >= seen + 3)  # turns of the follower
                assert len(attempts) == before + made


def test_following_goes_forward_alone(stamped):
    first = stamped.path.read_bytes()
    stamped.save()
    with serve(stamped) as served:
        assert not served.refresh(), "the checkpoint serves already"
        stamped.put(first)
        with pytest.raises(StorageError, match=r"older than .*; refresh\(older=True\) takes it"):
            served.refresh()
        assert stamp(served) == 2
        assert served.refresh(older=True) and stamp(served) == 1 and served.error is None


def test_a_version_is_checked_before_it_serves(stamped):
    checked = []

    def check(version):
        checked.append(stamp(version))
        if checked[-1] == 2:
            raise ArithmeticError("not this one")

    with serve(stamped, check=check) as served:
        stamped.save()
        with pytest.raises(ArithmeticError):
            served.refresh()
        assert stamp(served) == 1
        stamped.save()
        assert served.refresh() and stamp(served) == 3 and checked == [1, 2, 3]


def test_a_server_may_be_there_before_the_first_checkpoint(stamped):
    content = stamped.path.read_bytes()
    stamped.path.unlink()
    with serve(stamped, missing_ok=True) as served:
        assert isinstance(served.error, FileNotFoundError)
        with pytest.raises(StorageError, match="no version serves yet: .*No such file"):
            served(IDS)
        served.follow(0.001)
        stamped.put(content)
        assert wait_for(lambda: served.error is None) and stamp(served) == 1


def test_a_snapshot_that_a_job_deletes_while_it_is_read_gives_way_to_the_next_checkpoint(stamped, monkeypatch):
    with serve(stamped) as served:
        find = build.find_snapshot

        def find_late(looks, name):
            if stamped.saves == 2:
                stamped.save()
                stamped.model.rows.delete_snapshot(name)
            return find(looks, name)

        monkeypatch.setattr(build, "find_snapshot", find_late)
        stamped.save()
        assert served.refresh() and stamp(served) == 3


# ---- modules ---------------------------------------------------------------------------------------------------------


def test_a_model_that_cannot_be_served_is_an_error(job, tmp_path):
    job.save(tmp_path / "model.pt")
    for model, says in (
        (None, "must be a module, or a function"), (lambda: None, "must return a module"),
        (job, "is a graph that trains"), (torch.nn.Linear(2, 2), "has no oneemb embedding"),
    ):  # fmt: skip
        with pytest.raises(TypeError, match=says):
            oneemb.serve_model(tmp_path / "model.pt", model, missing_ok=True)
    with pytest.raises(ValueError, match="dtype must be one of"):
        oneemb.serve_model(tmp_path / "model.pt", job.model, dtype="int2")
    with pytest.raises(ValueError, match="folder must be for served files alone"):
        oneemb.serve_model(tmp_path / "model.pt", job.model.pairs, prefix="model.pairs", folder=tmp_path / "pairs")
    with pytest.raises(ValueError, match="must have the width and tables of snapshot .*, 2 tables of 4 weights"):
        oneemb.serve_model(tmp_path / "model.pt", Scorer(tmp_path, dim=6).pairs, prefix="model.pairs")
    with pytest.raises(ValueError, match=r"under 'model', norm.weight is \(11,\) there, \(15,\) in the module"):
        oneemb.serve_model(tmp_path / "model.pt", lambda: Scorer(tmp_path, dim=6))


def test_a_module_that_fits_in_several_places_needs_a_prefix(tmp_path):
    both = torch.nn.ModuleDict({"old": Stamped(tmp_path / "old"), "new": Stamped(tmp_path / "new")})
    with torch.no_grad():
        both["new"].dense.fill_(7)
    for one in both.values():
        one(IDS)
    torch.save(both.state_dict(), tmp_path / "both.pt")
    with pytest.raises(ValueError, match=r"several modules that fit, \['old', 'new'\]; give one of these"):
        oneemb.serve_model(tmp_path / "both.pt", both["new"])
    with oneemb.serve_model(tmp_path / "both.pt", both["new"], prefix="new") as served:
        assert served(IDS)[1] == 7
    for one in both.values():
        one.rows.close()


# ---- kills -----------------------------------------------------------------------------------------------------------


def train_for_ever(folder):
    job = StampedJob(folder)
    if job.path.exists():
        state = torch.load(job.path)
        job.model.load_state_dict(state)
        job.saves = int(state["dense"])
    while True:
        job.save()
        for name in job.model.rows.snapshots()[:-2]:
            job.model.rows.delete_snapshot(name)


def goes_on(served, last, trainer):
    return trainer.exitcode is not None or served.error is None and stamp(served) > last


def kill_and_follow(folder, kills, seed):
    """Kill a trainer at random moments while a model follows it."""
    draw, path = random.Random(seed), folder / "model.pt"
    with oneemb.serve_model(path, lambda: Stamped(folder), missing_ok=True) as served:
        served.follow(0.002)
        last = 0
        for _ in range(kills):
            trainer = fork_context().Process(target=train_for_ever, args=(folder,), daemon=True)
            trainer.start()
            try:
                assert wait_for(functools.partial(goes_on, served, last, trainer)) and trainer.exitcode is None
                end = time.monotonic() + draw.uniform(0.0, 0.4)
                while True:
                    now = stamp(served)
                    assert now >= last
                    last = now
                    if time.monotonic() >= end:
                        break
            finally:
                trainer.kill()
                trainer.join(60)
        served.unfollow()
        served.refresh()
        assert stamp(served) >= last >= kills


def test_a_job_that_is_killed_is_followed_on(tmp_path, seed):
    kill_and_follow(tmp_path, 2, seed)


@pytest.mark.slow
def test_a_job_that_is_killed_often_is_followed_on(tmp_path, seed):
    kill_and_follow(tmp_path, 25, seed)
