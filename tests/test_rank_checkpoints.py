"""Checkpoints of ranks that own rows together: any number of ranks goes on with what any other has saved, as one
process does on all batches together; they are whole or not there, whatever fails."""

import errno
import os
import random
import shutil
import threading
import warnings

import numpy as np
import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.nn.parallel import DistributedDataParallel

import oneemb
from oneemb import checkpoint
from oneemb.graph.ranks import RankError
from oneemb.storage.errors import BrokenStoreError
from tests.support.thread_ranks import FaultyCalls, Killed, files_in, run_ranks
from tests.test_rank_snapshots import (
    FEW,
    STEP,
    as_dict,
    assert_nothing_is_unneeded,
    content,
    expected,
    fill,
    make,
    together,
)
from tests.test_ranks import OPTIMIZERS, Graph, Model, batch_of, relative, weights_of

FIRST, MORE = 4, 4
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


@pytest.mark.parametrize("way", ["file", "dcp"])
def test_any_number_of_ranks_goes_on_as_if_nothing_had_happened(rank_pool, tmp_path, way):
    losses, weights, dense, steps = trained(None, tmp_path / "one", way, False, 0, FIRST + MORE, False)
    for size in range(5):
        os.makedirs(tmp_path / str(size))
    rank_pool(4, on_sizes, str(tmp_path), way, [], 0, FIRST, True)
    trained(None, f"{tmp_path}/0", way, False, 0, FIRST, True)
    of_all = rank_pool(4, on_sizes, str(tmp_path), way, [0, 1, 2, 3, 4], FIRST, FIRST + MORE, False)
    for saved in range(5):
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
            self.norm = DistributedDataParallel(self.norm, process_group=group, broadcast_buffers=False, find_unused_parameters=True)
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


@pytest.mark.parametrize(("ranks", "way"), [(1, "file"), (2, "file"), (2, "dcp"), (3, "file"), (4, "file")])
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
