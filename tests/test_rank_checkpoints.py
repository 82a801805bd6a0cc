"""Checkpoints of ranks that own rows together: any number of ranks goes on with what any other has saved, as one
process does on all batches together; they are whole or not there, whatever fails."""

import errno
import os
import random
import shutil
import threading
import types
import warnings

import numpy as np
import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.nn.parallel import DistributedDataParallel

import oneemb
from oneemb.checkpoints import checkpoint
from oneemb.checkpoints.named_snapshot import encode
from oneemb.graph.ranks import RankError
from oneemb.storage.errors import BrokenStoreError
from tests.support.inside import train_state_of
from tests.support.optimizers import OPTIMIZERS
from tests.support.rank_jobs import killed
from tests.support.thread_ranks import FaultyCalls, ThreadRanks, Torn, restored_job, run_ranks
from tests.test_rank_snapshots import FEW, STEP, assert_nothing_is_unneeded, content, expected, fill, make, together
from tests.test_ranks import Graph, Model, batch_of, relative, weights_of

FIRST, MORE = 2, 2
"""Steps before the save and after it."""

pytestmark = pytest.mark.filterwarnings(
    "ignore:embedding 'items' starts empty", "ignore:torch.distributed is disabled:UserWarning"
)


# ---- any number of ranks goes on with what any other has saved -------------------------------------------------------


def save_to(graph, group, path, way):
    if way == "file":
        graph.save(path)
    else:
        dcp.save({"graph": graph.state()}, checkpoint_id=path, process_group=group, no_dist=group is None)


def load_from(graph, group, path, way):
    if way == "file":
        graph.load(path)
    else:
        dcp.load({"graph": graph.state()}, checkpoint_id=path, process_group=group, no_dist=group is None)


def trained(group, root, way, loads, first, last, saves):
    """Losses of some steps, and the weights after them; from a checkpoint, if it is to load one."""
    rank, ranks = (0, 1) if group is None else (group.rank(), group.size())
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model = Model(f"{root}/rows", "weighted", "device", group)
        optimizer = OPTIMIZERS["adam"](model.parameters())
        graph = Graph(model, optimizer, 1, None, None)
        if loads:
            load_from(graph, group, f"{root}/checkpoint", way)
            assert graph.steps == first
        losses = [graph(*batch_of(step, rank, ranks)).item() for step in range(first, last)]
        if saves:
            save_to(graph, group, f"{root}/checkpoint", way)
    dense = torch.cat([parameter.detach().flatten() for parameter in model.dense.parameters()]).numpy()
    result = losses, weights_of(model.embedding), dense, graph.steps
    model.embedding.close()
    return result


def on_sizes(group, root, way, loads, first, last, saves):
    """By 1 to 4 processes, one number after another: on what each number has saved, and `loads`, what others have."""
    from torch import distributed

    rank, found = distributed.get_rank(group), {}
    for size in range(1, 5):
        own = distributed.new_group(list(range(size)))
        for saved in loads or [size]:
            if rank < size:
                found[saved, size] = trained(own, f"{root}/{saved}", way, bool(loads), first, last, saves)
            distributed.barrier(group)
    return found


@pytest.mark.parametrize(
    ("way", "numbers"),
    [("file", [0, 2]), ("dcp", [3])]
    + [pytest.param(*case, marks=pytest.mark.slow) for case in [("file", [0, 1, 2, 3, 4]), ("dcp", [0, 3])]],
)
def test_any_number_of_ranks_goes_on_as_if_nothing_had_happened(rank_pool, tmp_path, way, numbers):
    """0 = a graph without process_group."""
    losses, weights, dense, steps = trained(None, tmp_path / "one", way, False, 0, FIRST + MORE, False)
    for size in range(5):
        os.makedirs(tmp_path / str(size))
    rank_pool(4, on_sizes, str(tmp_path), way, [], 0, FIRST, True)
    trained(None, f"{tmp_path}/0", way, False, 0, FIRST, True)
    of_all = rank_pool(4, on_sizes, str(tmp_path), way, numbers, FIRST, FIRST + MORE, False)
    for saved in numbers:
        alone = trained(None, f"{tmp_path}/{saved}", way, True, FIRST, FIRST + MORE, False)
        for size in range(5):
            results = [found[saved, size] for found in of_all[:size]] or [alone]
            np.testing.assert_allclose(np.mean([result[0] for result in results], axis=0), losses[FIRST:], rtol=1e-6)
            for _, its_weights, its_dense, its_steps in results:
                assert relative(its_weights, weights) < 5e-6 and relative(its_dense, dense) < 5e-6, (saved, size)
                assert its_steps == steps


class Own(torch.nn.Module):
    """Dense layers that have a buffer, extra state and random numbers of their own on each rank."""

    def __init__(self, group):
        super().__init__()
        self.norm, self.dropout = torch.nn.BatchNorm1d(8), torch.nn.Dropout(0.3)
        self.linear = torch.nn.Linear(8, 1)
        if group is not None:
            self.norm = DistributedDataParallel(
                self.norm, process_group=group, broadcast_buffers=False, find_unused_parameters=True
            )
            self.linear = DistributedDataParallel(self.linear, process_group=group, find_unused_parameters=True)
        self.seen = 0

    def forward(self, x, ids):
        self.seen += int(ids[0, 0])
        factor = 1 + random.random() + np.random.rand() + self.seen * 1e-3
        return self.linear(self.dropout(self.norm(x))) * factor

    def get_extra_state(self):
        return {"seen": self.seen}

    def set_extra_state(self, state):
        self.seen = state["seen"]


class OwnGraph(oneemb.TrainGraph):
    """Two embeddings, a scheduler, a scaler."""

    def __init__(self, path, group):
        super().__init__()
        torch.manual_seed(0)
        for name in "ab":
            options = oneemb.make_cached_ssd_store_options(1, f"{path}/{name}")
            tables = [oneemb.make_table()]
            embedding = oneemb.MultiTableEmbedding(
                name, 4, torch.float32, torch.int64, tables, options, num_threads=1, process_group=group
            )
            setattr(self, name, embedding)
        self.own = Own(group)
        optimizer = torch.optim.Adam(self.parameters(), lr=0.01)
        self.add_optimizer(optimizer, torch.optim.lr_scheduler.StepLR(optimizer, 2, 0.5))
        self.set_grad_scaler(torch.amp.GradScaler("cpu", init_scale=4.0, growth_interval=3))

    def build(self, ids):
        loss = self.own(torch.cat([self.a(ids), self.b(ids)], 1), ids[:, None]).square().mean()
        loss.backward()
        return loss.detach()

    def run_steps(self, rank, steps):
        """Losses, everything there is afterwards, and what is drawn next."""
        losses = [self(torch.arange(6) + 3 * rank + step).item() for step in range(steps)]
        rows = [sorted_rows(embedding) for embedding in (self.a, self.b)]
        scaler = self._train_state.scaler.state_dict()
        dense = {name: value.tolist() for name, value in self.state_dict().items() if name.startswith("own.norm")
                 or name.startswith("own.linear")}  # fmt: skip
        return losses, rows, dense, self.own.seen, self.steps, scaler, self.optimizers[0].param_groups[0]["lr"], draws()

    def close(self):
        self.a.close()
        self.b.close()


def sorted_rows(embedding):
    return sorted(content(embedding)[0].items()), embedding.store.step


def draws():
    return random.random(), np.random.rand(), torch.rand(()).item()


def seed(rank):
    torch.manual_seed(rank)
    random.seed(rank + 10)
    np.random.seed(5)  # the same on all ranks


def own_graph(root, group, load=None):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        graph = OwnGraph(f"{root}/rows", group)
        if load is not None:
            torch.manual_seed(99)
            load_from(graph, group, f"{root}/checkpoint", load)
    return graph


def goes_on_with_its_own(group, root, way):
    graph = own_graph(root, group)
    seed(group.rank())
    graph.run_steps(group.rank(), 3)
    save_to(graph, group, f"{root}/checkpoint", way)
    before = graph.run_steps(group.rank(), 4)
    graph.close()
    again = own_graph(root, group, load=way)
    after = again.run_steps(group.rank(), 4)
    again.close()
    return before, after


@pytest.mark.parametrize(("ranks", "way"), [(1, "file"), (2, "file"), (2, "dcp"), (4, "file")])
def test_as_many_ranks_as_before_go_on_bit_for_bit(rank_pool, tmp_path, ranks, way):
    of_all = rank_pool(ranks, goes_on_with_its_own, str(tmp_path), way)
    for before, after in of_all:
        assert before == after
    if ranks > 1:
        first, second = (after for _, after in of_all[:2])
        assert first[3] != second[3] and first[2]["own.norm.module.running_mean"] != second[2][
            "own.norm.module.running_mean"], "each has its own"  # fmt: skip


def saves_its_own(group, root):
    graph = own_graph(root, group)
    seed(group.rank())
    graph.run_steps(group.rank(), 2)
    graph.save(f"{root}/checkpoint")
    drawn, seen = draws(), graph.own.seen
    graph.close()
    return drawn, seen


def draws_after_a_load(group, root):
    graph = own_graph(root, group, load="file")
    drawn, seen = draws(), graph.own.seen
    graph.close()
    return drawn, seen


def test_another_number_of_ranks_draws_numbers_of_its_own_and_has_what_the_first_had(rank_pool, tmp_path):
    saved = rank_pool(2, saves_its_own, str(tmp_path))
    more = rank_pool(4, draws_after_a_load, str(tmp_path))
    assert more == rank_pool(4, draws_after_a_load, str(tmp_path)), "the same each time"
    assert [drawn for drawn, _ in more[:2]] == [drawn for drawn, _ in saved]
    for kind in (0, 2):
        assert len({drawn[kind] for drawn, _ in more}) == 4
    assert {drawn[1] for drawn, _ in more} == {saved[0][0][1]}, "the same on all, as before"
    assert {seen for _, seen in more} == {saved[0][1]}
    fewer = rank_pool(1, draws_after_a_load, str(tmp_path)) + [draws_after_a_load(None, str(tmp_path))]
    assert fewer == [saved[0]] * 2


# ---- ranks that are threads: rows are put where they belong, and nothing is looked up -------------------------------


class Filled(oneemb.TrainGraph):
    """A graph whose state is that of a version."""

    def __init__(self, ranks, root, optimizers=1):
        super().__init__()
        self.embedding = make(ranks, root if isinstance(root, list) else f"{root}/rows", state=False)
        self.dense = torch.nn.Linear(3, 2)
        torch.nn.init.zeros_(self.dense.weight), torch.nn.init.zeros_(self.dense.bias)
        self.add_optimizer(torch.optim.Adagrad([self.embedding.weight, *self.dense.parameters()], lr=0.1))
        for _ in range(optimizers - 1):
            self.add_optimizer(torch.optim.SGD(self.dense.parameters(), lr=0.1))

    def have(self, version):
        fill(self.embedding, version, FEW)
        self.steps = version
        with torch.no_grad():
            for parameter in self.dense.parameters():
                parameter.fill_(version)
        return self

    def what(self):
        """Version of the dense parameters and the steps, and this rank's rows."""
        (dense,) = {number for parameter in self.dense.parameters() for number in parameter.flatten().tolist()}
        assert dense == self.steps
        return self.steps, content(self.embedding)


def run(size, function, *args, patch):
    """What the function gives on so many ranks; 0 = on none."""
    return [function(None, *args)] if size == 0 else run_ranks(size, function, *args, patch=patch)


def save(ranks, root, *versions, keep=1, name="c"):
    graph = Filled(ranks, root)
    for version in versions:
        graph.have(version).save(f"{root}/{name}", keep=keep)
    graph.embedding.close()


def version_at(root, size, patch, name="c"):
    """The version that so many ranks load; it has to be whole."""

    def load(ranks):
        graph = Filled(ranks, root)
        try:
            graph.load(f"{root}/{name}")
            return graph.what()
        finally:
            graph.embedding.close()

    found = run(size, load, patch=patch)
    (version,) = {version for version, _ in found}
    assert together([rows for _, rows in found]) == (expected(version, FEW), STEP + version)
    return version


def snapshots_at(root, patch):
    embedding = make(None, f"{root}/rows")
    found = embedding.snapshots()
    embedding.close()
    return found


def assert_only(root, patch, names=("c", "rows"), snapshots=1):
    """Nothing is there but these files and so many snapshots."""
    assert sorted(os.listdir(root)) == sorted(names)
    assert len(snapshots_at(root, patch)) == snapshots
    assert_nothing_is_unneeded(root / "rows")


def act(ranks, root, calls):
    """Save a second version. Returns what it raised."""
    graph, error = Filled(ranks, root).have(2), None
    with calls.counted():
        try:
            graph.save(f"{root}/c", keep=1)
        except Exception as raised:
            error = raised
    graph.embedding.close()
    return error


def acted(size, root, calls, patch, dies=()):
    if size == 0:
        return run_ranks(1, lambda _: act(None, root, calls), dies=dies)
    return run_ranks(size, act, root, calls, patch=patch, dies=dies)


def names_of_calls(tmp_path, patch, size):
    """The names of the file calls of each rank in a save that nobody stops."""
    with patch.context() as inner:
        calls = FaultyCalls(inner)
        acted(size, restored_job(tmp_path), calls, inner)
        return [calls.of(rank) for rank in range(max(1, size))]


ENDS = ("create", "rename", "remove")


@pytest.mark.parametrize(
    ("before", "size", "every"),
    [(2, 2, False)] + [pytest.param(*case, True, marks=pytest.mark.slow) for case in [(2, 2), (3, 2), (0, 2), (2, 0)]],
)
def test_a_kill_at_any_file_call_leaves_a_whole_checkpoint(tmp_path, monkeypatch, before, size, every):
    """At every file call, or at some that follow a change of names."""
    run(before, save, tmp_path / "job", 1, patch=monkeypatch)
    versions = set()
    for rank, names in enumerate(names_of_calls(tmp_path, monkeypatch, size)):
        after = [at + 1 for at, name in enumerate(names[:-1]) if name in ENDS]
        for at in range(len(names)) if every else sorted({*after[:: 13 if rank == 0 else 19], *after[-1:]}):
            root = restored_job(tmp_path)
            with monkeypatch.context() as patch:
                calls = FaultyCalls(patch, rank=rank, at=at)
                acted(size, root, calls, patch, dies=[rank])
                assert calls.reached
                calls.free_locks()
            # The next job loads what is there, saves, and nothing is left of the killed one.
            other = 3 if at % 2 else max(1, size)
            versions.add(version_at(root, other, monkeypatch))
            run(other, save, root, 3, patch=monkeypatch)
            assert version_at(root, size, monkeypatch) == 3
            assert_only(root, monkeypatch)
    assert versions == {1, 2}, "it was killed before the moment that counts, and after it"


@pytest.mark.parametrize(
    ("unheard", "stride"),
    [(0, 29), pytest.param(0, 1, marks=pytest.mark.slow), pytest.param(1, 1, marks=pytest.mark.slow)],
)
def test_a_rank_that_dies_in_an_exchange_of_which_some_have_heard_leaves_a_whole_checkpoint(
    tmp_path, monkeypatch, unheard, stride
):
    """Of three ranks the last dies; one of the others takes the exchange for done, and the other one for failed."""
    run(3, save, tmp_path / "job", 1, patch=monkeypatch)
    versions, at, reached = set(), 0, True
    while reached:
        root = restored_job(tmp_path)
        with monkeypatch.context() as patch:
            calls = FaultyCalls(patch)
            torn = Torn(at, 2, frozenset([unheard]), calls)
            announced = None in run_ranks(3, act, root, calls, patch=patch, dies=[2], torn=torn)[:2]
            reached = calls.reached
            calls.free_locks()  # What the dead rank has raised holds its table no more.
        version = version_at(root, 3 if at % 2 else 2, monkeypatch)
        assert version == 2 or not announced
        versions.add(version)
        run(2, save, root, 3, patch=monkeypatch)
        assert version_at(root, 0, monkeypatch) == 3
        assert_only(root, monkeypatch)
        at += stride
    assert versions == {1, 2}


def test_every_exchange_of_a_save_or_a_load_says_what_call_it_is_part_of(tmp_path, monkeypatch):
    """It is what the other ranks say of one that was killed."""
    said_R, agree = ([], []), ThreadRanks.agree

    def note(ranks, what, check=lambda: None):
        said_R[ranks.rank].append(what)
        return agree(ranks, what, check)

    monkeypatch.setattr(ThreadRanks, "agree", note)
    path = f"{tmp_path}/c"

    def said(call, ranks):
        said_R[ranks.rank].clear()
        call()
        return set(said_R[ranks.rank])

    def saves(ranks):
        graph = Filled(ranks, tmp_path)
        for version in (1, 2):
            graph.have(version)
            found = said(lambda: graph.save(path, keep=1), ranks)
            assert found and all(what.startswith(f"save {path!r}, keep=1") for what in found), found
        found = said(lambda: graph.load(path), ranks)
        assert found and all(what.startswith(f"load {path!r}") for what in found), found
        found = said(lambda: graph.state().load_state_dict(graph.state().state_dict()), ranks)
        assert all("state_dict of a graph" in what for what in found), found
        assert said(graph.embedding.snapshots, ranks) == {"list snapshots of embedding 'items'"}
        graph.embedding.close()

    run_ranks(2, saves, patch=monkeypatch)


@pytest.mark.parametrize("failing", [0, 1])
@pytest.mark.parametrize("stride", [41, pytest.param(1, marks=pytest.mark.slow)])
def test_a_disk_that_is_full_on_one_rank_is_an_error_on_all_and_leaves_the_checkpoint_before(
    tmp_path, monkeypatch, failing, stride
):
    run(2, save, tmp_path / "job", 1, patch=monkeypatch)
    at, failed, reached = stride // 3, 0, True
    while reached:
        root = restored_job(tmp_path)
        with monkeypatch.context() as patch:
            full = OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            calls = FaultyCalls(patch, rank=failing, at=at, error=full, once=True)
            errors = acted(2, root, calls, patch)
            reached = calls.reached
        if errors == [None, None]:
            assert version_at(root, 2, monkeypatch) == 2
        else:
            failed += 1
            assert isinstance(errors[1 - failing], RankError) and f"rank {failing} has failed" in str(
                errors[1 - failing]
            )
            assert isinstance(errors[failing], oneemb.StorageError | OSError) and "No space" in str(errors[failing])
            version = version_at(root, 2, monkeypatch)
            if version == 1:
                assert_only(root, monkeypatch)
        run(2, save, root, 3, patch=monkeypatch)
        assert version_at(root, 2, monkeypatch) == 3
        assert_only(root, monkeypatch)
        at += stride
    assert failed > 0


def caught(call):
    try:
        call()
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return ""


WRONG = {
    "keep": "ValueError: keep must be",
    "micro-batches": "RuntimeError: no micro-batch may wait for its update in a save, but 1 of 1 do",
    "another path": "RankError: the ranks do different things",
    "another keep": "RankError: the ranks do different things",
    "in a step": "RuntimeError: save was called in the middle of a step",
}


@pytest.mark.parametrize("wrong", WRONG)
def test_what_is_wrong_with_a_save_on_one_rank_is_an_error_on_all_and_nothing_is_saved(tmp_path, monkeypatch, wrong):
    def saves(ranks):
        graph, bad = Filled(ranks, tmp_path).have(1), ranks.rank == 1
        path, keep = f"{tmp_path}/c", 1
        match wrong if bad else "":
            case "micro-batches":
                train_state_of(graph).micro_batches = 1
            case "another path":
                path = f"{tmp_path}/d"
            case "another keep":
                keep = 2
        keep = 0 if wrong == "keep" else keep

        def call():
            if wrong == "in a step" and bad:
                with graph.embedding.store.step_lock.lock:
                    graph.embedding.store.step_lock.stepping = True
                    graph.save(path, keep=keep)
            else:
                graph.save(path, keep=keep)

        found = caught(call)
        graph.embedding.store.step_lock.stepping = False
        train_state_of(graph).micro_batches = 0
        assert graph.embedding.snapshots() == []
        graph.save(f"{tmp_path}/c")
        graph.embedding.close()
        return found

    first, second = run_ranks(2, saves, patch=monkeypatch)
    assert second.startswith(WRONG[wrong])
    alike = wrong in ("keep", "another path", "another keep")
    assert first.startswith(WRONG[wrong] if alike else "RankError: rank 1 has failed")
    assert version_at(tmp_path, 3, monkeypatch) == 1


def test_what_does_not_fit_one_rank_is_refused_on_all_and_changes_nothing(tmp_path, monkeypatch):
    save(None, tmp_path, 1)

    def refuse(ranks):
        graph = Filled(ranks, tmp_path, optimizers=1 + ranks.rank).have(2)
        found = [caught(lambda: graph.load(f"{tmp_path}/c")), caught(lambda: graph.load(f"{tmp_path}/none"))]
        assert graph.what()[0] == 2
        graph.embedding.save_snapshot("it is not broken", overwrite=True)
        mine = graph.what()[1]
        graph.embedding.close()
        return found, mine

    (first, rows), (second, others) = run_ranks(2, refuse, patch=monkeypatch)
    assert "c does not fit: optimizers are ['Adagrad'] there, ['Adagrad', 'SGD'] in the graph" in second[0]
    assert first[0].startswith("RankError: rank 1 has failed (") and first[1].startswith("FileNotFoundError")
    assert second[1].startswith("RankError: rank 0 has failed (")
    assert together([rows, others]) == (expected(2, FEW), STEP + 2)


def test_other_snapshots_are_refused_on_all_ranks_and_change_nothing(tmp_path, monkeypatch):
    run(2, save, tmp_path / "a", 1, patch=monkeypatch)
    run(2, save, tmp_path / "b", 2, patch=monkeypatch)

    def refuse(ranks):
        graph = Filled(ranks, tmp_path / "b").have(3)
        found = caught(lambda: graph.load(f"{tmp_path}/a/c"))
        assert graph.what()[0] == 3
        graph.embedding.close()
        return found

    for size in (0, 2, 3):
        for found in run(size, refuse, patch=monkeypatch):
            assert "SnapshotNotFoundError" in found and "for embedding 'embedding'" in found


def test_after_a_load_that_one_rank_has_stopped_half_way_all_say_so_until_another(tmp_path, monkeypatch):
    run(2, save, tmp_path, 1, patch=monkeypatch)

    def half(ranks):
        graph = Filled(ranks, tmp_path).have(2)
        real = torch.optim.Adagrad.load_state_dict
        if ranks.rank == 1:
            optimizer = graph.optimizers[0].optimizer
            optimizer.load_state_dict = types.MethodType(fails, optimizer)
        with pytest.raises((MemoryError, RankError), match="no memory"):
            graph.load(f"{tmp_path}/c")
        for call in (lambda: graph.save(f"{tmp_path}/c"), graph.embedding.store.stats):
            with pytest.raises((BrokenStoreError, RankError)):
                call()
        if ranks.rank == 1:
            optimizer.load_state_dict = types.MethodType(real, optimizer)
        graph.load(f"{tmp_path}/c")
        found = graph.what()
        graph.embedding.close()
        return found

    def fails(optimizer, state):
        raise MemoryError("no memory")

    found = run_ranks(2, half, patch=monkeypatch)
    assert [version for version, _ in found] == [1, 1]
    assert together([rows for _, rows in found]) == (expected(1, FEW), STEP + 1)


def test_ranks_keep_as_many_snapshots_of_a_path_as_asked_for_whoever_has_saved_them(tmp_path, monkeypatch):
    run(2, save, tmp_path, 1, 2, patch=monkeypatch)
    assert_only(tmp_path, monkeypatch)
    shutil.copy(tmp_path / "c", tmp_path / "copy")
    for size, version, snapshots in [(3, 3, 2), (0, 4, 3), (2, 5, 3)]:
        run(size, lambda ranks, version: save(ranks, tmp_path, version, keep=3), version, patch=monkeypatch)
        assert len(snapshots_at(tmp_path, monkeypatch)) == snapshots
    assert {version_at(tmp_path, size, monkeypatch) for size in (0, 2, 3)} == {5}
    with pytest.raises(oneemb.StorageError, match="not there"):
        version_at(tmp_path, 2, monkeypatch, "copy")
    # The copy was not saved here: what it names is the other path's.
    run(2, lambda ranks: save(ranks, tmp_path, 6, name="copy"), patch=monkeypatch)
    assert len(snapshots_at(tmp_path, monkeypatch)) == 4
    run(2, lambda ranks: save(ranks, tmp_path, 7), patch=monkeypatch)
    assert_only(tmp_path, monkeypatch, ("c", "copy", "rows"), 2)
    assert [version_at(tmp_path, 3, monkeypatch, name) for name in ("c", "copy")] == [7, 6]


def test_an_empty_graph_is_saved_and_loaded_and_something_else_at_the_path_is_not_written_over(tmp_path, monkeypatch):
    def saves(ranks):
        graph = Filled(ranks, tmp_path)
        graph.save(f"{tmp_path}/c")
        assert graph.embedding.snapshots() == []
        (tmp_path / "text").write_text("notes")
        for call in (graph.save, graph.load):
            assert "text is not a checkpoint" in caught(lambda call=call: call(f"{tmp_path}/text"))
        graph.have(1).load(f"{tmp_path}/c")
        found = content(graph.embedding), graph.steps
        graph.embedding.close()
        return found

    assert run_ranks(2, saves, patch=monkeypatch) == [(({}, 0), 0)] * 2
    assert (tmp_path / "text").read_text() == "notes"


def test_where_each_rank_has_a_disk_of_its_own_the_first_one_has_the_file(tmp_path, monkeypatch):
    folders = [tmp_path / "0", tmp_path / "1"]

    def own(ranks):
        graph = Filled(ranks, [f"{folder}/rows" for folder in folders])
        graph.have(1).save(f"{tmp_path}/0/c")
        graph.have(2).load(f"{tmp_path}/0/c")
        found = graph.what()
        graph.embedding.close()
        return found

    seen = {}
    real = checkpoint.__dict__.get("open", open)

    def note(path, mode):
        seen.setdefault(threading.current_thread().name, []).append(path)
        return real(path, mode)

    monkeypatch.setattr(checkpoint, "open", note, raising=False)
    found = run_ranks(2, own, patch=monkeypatch)
    assert together([rows for _, rows in found]) == (expected(1, FEW), STEP + 1)
    assert seen.keys() == {"rank-0"}


def test_dense_parameters_that_are_not_the_same_on_all_ranks_are_told_of_once(tmp_path, monkeypatch):
    said = []
    monkeypatch.setattr(warnings, "warn", lambda text, **how: said.append(text))

    def saves(ranks):
        graph = Filled(ranks, tmp_path).have(1)
        graph.save(f"{tmp_path}/c")
        with torch.no_grad():
            graph.dense.bias.fill_(ranks.rank)
        graph.save(f"{tmp_path}/c")
        with torch.no_grad():
            graph.dense.bias.fill_(7)
        graph.load(f"{tmp_path}/c")
        found = graph.dense.bias.tolist()
        graph.embedding.close()
        return found

    assert run_ranks(2, saves, patch=monkeypatch) == [[0.0, 0.0]] * 2
    assert len(said) == 1 and "not the same on all ranks: dense.bias." in said[0]


def test_embeddings_of_other_ranks_in_one_graph_are_refused(tmp_path, monkeypatch):
    def refuse(ranks):
        graph = Filled(ranks, tmp_path)
        graph.other = make(None, tmp_path / str(ranks.rank))
        for call in (lambda: graph.save(f"{tmp_path}/c"), lambda: graph.load(f"{tmp_path}/c"), graph.state):
            with pytest.raises(ValueError, match="'items' of this process alone; give all the same process_group"):
                call()
        graph.embedding.close(), graph.other.close()

    run_ranks(2, refuse, patch=monkeypatch)


def test_a_state_dict_that_is_wrong_on_one_rank_is_refused_on_all(tmp_path, monkeypatch):
    def refuse(ranks):
        embedding = make(ranks, tmp_path)
        fill(embedding, 1, FEW)
        state = embedding.state_dict()
        fill(embedding, 2, FEW)
        embedding.store.changes += 1
        other = embedding.state_dict()
        another_runs = encode(
            {"oneemb_snapshot": oneemb.snapshot_name(state["_extra_state"]), "oneemb_identity": "f" * 32}
        )
        wrong = [{"_extra_state": torch.zeros(4, dtype=torch.uint8)}, other, {"_extra_state": another_runs}]
        found = [caught(lambda one=one: embedding.load_state_dict(one if ranks.rank == 1 else state)) for one in wrong]
        assert content(embedding)[1] == STEP + 2
        embedding.load_state_dict(state)
        rows = content(embedding)
        embedding.close()
        return found, rows

    (first, rows), (second, others) = run_ranks(2, refuse, patch=monkeypatch)
    assert first[0].startswith("RankError: rank 1 has failed") and "copy entries unchanged" in second[0]
    assert all(said.startswith("RankError: the ranks do different things") for said in first[1:] + second[1:])
    assert together([rows, others]) == (expected(1, FEW), STEP + 1)


# ---- ranks that are processes are killed -----------------------------------------------------------------------------


def saves_until_it_is_killed(group, report, root):
    """Goes on from the checkpoint that is there, and reports each that it has saved."""
    graph = Filled(group, root)
    if os.path.exists(f"{root}/c"):
        graph.load(f"{root}/c")
        assert content(graph.embedding)[0].items() <= expected(graph.steps, FEW).items()
    report(("begins", graph.steps))
    while True:
        graph.have(graph.steps + 1).save(f"{root}/c", keep=1 + graph.steps % 2)
        report(("saved", graph.steps))


@pytest.mark.parametrize("times", [1, pytest.param(60, marks=pytest.mark.slow)])
def test_killed_ranks_lose_no_checkpoint_that_they_have_announced(tmp_path, times, seed):
    rng, last, root = random.Random(seed), 0, tmp_path / "job"
    for n in range(times):
        # On a machine that is busy a first save may take seconds.
        size, waits = rng.choice([2, 2, 3, 0]), n % 4 != 1
        begun, announced = killed(size, saves_until_it_is_killed, str(root), rng=rng, waits=waits)
        assert begun == last
        last = version_at(root, 0, None) if (root / "c").exists() else 0
        assert last >= announced, f"version {announced} was announced, {last} was found"
    assert last
    save(None, root, last + 1)
    assert_only(root, None)


def partly_loaded(group, path, wider):
    options = oneemb.make_device_mem_store_options(f"{path}/rows", capacity=10_000)
    embedding = oneemb.MultiTableEmbedding(
        "rows", 4, torch.float32, torch.int64, [oneemb.make_table()], options, process_group=group
    )

    class Graph(oneemb.TrainGraph):
        def __init__(self):
            super().__init__()
            torch.manual_seed(0)
            self.embedding, self.dense = embedding, torch.nn.Linear(4, 1)
            self.added = torch.nn.Linear(4, 4) if wider else torch.nn.Identity()
            self.add_optimizer(torch.optim.Adam(self.parameters(), lr=0.1))

        def build(self, ids):
            loss = self.dense(self.added(self.embedding(ids))).square().sum()
            loss.backward()
            return loss.detach()

    graph, found = Graph(), None
    if wider:
        found = tuple(graph.load(f"{path}/checkpoint", strict=False))
    else:
        graph(torch.arange(6) + group.rank())
        graph.save(f"{path}/checkpoint")
    weights = graph.dense.weight.tolist(), embedding.eval()(torch.arange(8)).tolist()
    graph(torch.arange(6))
    embedding.close()
    return found, weights


def test_ranks_load_together_what_fits(tmp_path, rank_pool):
    before = rank_pool(2, partly_loaded, str(tmp_path), False)
    for ranks in (2, 3):
        after = rank_pool(ranks, partly_loaded, str(tmp_path), True)
        assert all(found == (["added.bias", "added.weight"], []) for found, _ in after)
        assert [weights for _, weights in after] == [before[0][1]] * ranks
