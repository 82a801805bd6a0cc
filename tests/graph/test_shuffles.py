"""Two ranks over gloo: keys reach their owners, rows come back, gradients are summed where rows live."""

import itertools
import tempfile

import numpy as np
import pytest
import torch
from torch import distributed

import oneemb
from oneemb.graph import ops
from oneemb.graph.ops.shuffle import shuffle_grads, shuffle_keys, shuffle_rows
from oneemb.kernels.owner import owner_of
from tests.support.graph_models import make_embedding, rows_of

RANKS = 2


def ids_of(rank, step=0):
    rng = np.random.default_rng(10 * step + rank)
    return torch.from_numpy(rng.integers(-20, 20, ((0, 5, 9)[(rank + step) % 3], 2)))


def bags_of(rank, step=0):
    ids = ids_of(rank, step).reshape(-1)
    return ids, torch.tensor([0, len(ids) // 3, len(ids) // 3, len(ids)])


def value_of(table, ids):
    """What the row of a key holds in these tests."""
    return torch.stack([ids * 1.0, torch.as_tensor(table).expand(ids.shape) * 100.0 + ids], -1)


def run_ops(rank):
    for step in range(3):
        ids = ids_of(rank, step)
        keys = ops.unique_keys(ids, None, 2, torch.int64, 3)
        routed = shuffle_keys(keys, RANKS)
        unique = routed.unique
        assert (owner_of(unique.table_U, unique.id_U, RANKS) == rank).all()
        assert len(set(zip(unique.table_U.tolist(), unique.id_U.tolist(), strict=True))) == len(unique.id_U)
        table_N, id_N = (torch.from_numpy(one[unique.inverse_N]) for one in (unique.table_U, unique.id_U))
        owned = value_of(table_N, id_N).requires_grad_()
        rows = shuffle_rows(routed, owned)
        wanted = value_of(torch.arange(2), ids) * (ids != 3).unsqueeze(-1)
        assert torch.equal(rows, wanted)
        # Each id's gradient is 1 + its rank: an owner finds, for each asked key, how often that rank holds it.
        (rows * (1 + rank)).sum().backward()
        n = 0
        for asker in range(RANKS):
            theirs = ids_of(asker, step)
            for _ in range(routed.route.asked_R[asker]):
                times = int((theirs[:, int(table_N[n])] == id_N[n]).sum())
                assert times > 0 and owned.grad[n].tolist() == [times * (1 + asker)] * 2
                n += 1
        assert n == len(id_N)
        mine = value_of(torch.from_numpy(keys.unique.table_U), torch.from_numpy(keys.unique.id_U))
        assert torch.equal(shuffle_grads(routed, mine), owned.detach())


def run_bags(rank):
    ids, offsets = bags_of(rank)
    scales = torch.rand(len(ids), generator=torch.Generator().manual_seed(rank))
    routed = shuffle_keys(ops.unique_keys(ids, None, 1, torch.int64, None, offsets), RANKS)
    owned = value_of(0, torch.from_numpy(routed.unique.id_U[routed.unique.inverse_N])).requires_grad_()
    sums, means = shuffle_rows(routed, owned, scales), shuffle_rows(routed, owned, None, "mean")
    maxima = shuffle_rows(routed, owned, None, "max")
    for p in range(3):
        some = slice(int(offsets[p]), int(offsets[p + 1]))
        value = value_of(0, ids[some])
        torch.testing.assert_close(sums[p], (value * scales[some, None]).sum(0))
        torch.testing.assert_close(means[p], value.mean(0) if len(value) else torch.zeros(2))
        assert torch.equal(maxima[p], value.amax(0) if len(value) else torch.zeros(2))
    (grad,) = torch.autograd.grad(maxima.sum(), owned)
    # The row of the greatest id is the maximum: an owner finds, for each asked key, how many bags of that rank it won.
    n = 0
    for asker in range(RANKS):
        theirs, cuts = bags_of(asker)
        greatest = [int(theirs[a:b].max()) for a, b in itertools.pairwise(cuts.tolist()) if b > a]
        for _ in range(routed.route.asked_R[asker]):
            id = int(routed.unique.id_U[routed.unique.inverse_N[n]])
            assert grad[n].tolist() == [greatest.count(id)] * 2
            n += 1
    assert n == len(grad)
    (sums.sum() + means.sum()).backward()
    with pytest.raises(RuntimeError, match="among 3 ranks, the process group has 2"):
        shuffle_keys(routed.route.keys, 3)


def loss_of(rows):
    return (rows * torch.arange(8.0).reshape(2, 4)).sum() + rows.square().sum()


def trained():
    embedding = make_embedding("a", 4, 2)
    return embedding, oneemb.Optimizer(torch.optim.Adagrad(embedding.parameters()), [embedding])


def look_up(embedding, ids):
    """The rows of ids, each from its owner."""
    routed = shuffle_keys(ops.unique_keys(ids, None, 2, torch.int64, None), RANKS)
    lease = ops.acquire(embedding.store, routed)
    return shuffle_rows(routed, ops.with_grad(ops.gather(lease), lease, embedding.weight))


def run_steps(rank):
    """Each rank trains its own ids; together their stores hold what one rank makes of all ids."""
    (embedding, optimizer), (alone, its_optimizer) = trained(), trained()
    for step in range(4):
        rows = look_up(embedding, ids_of(rank, step))
        loss_of(rows).backward()
        optimizer.step()
        optimizer.zero_grad()
        parts = [ids_of(one, step) for one in range(RANKS)]
        wanted = alone(torch.cat(parts))
        loss_of(wanted).backward()
        its_optimizer.step()
        its_optimizer.zero_grad()
        begin = sum(len(part) for part in parts[:rank])
        torch.testing.assert_close(rows, wanted[begin : begin + len(parts[rank])])
    mine, all_rows = rows_of(embedding), rows_of(alone)
    assert embedding.stats()["device"]["pinned"] == 0
    count = torch.tensor([len(mine)])
    distributed.all_reduce(count)
    assert int(count) == len(all_rows) and 0 < len(mine) < len(all_rows)
    for (table, id), row in mine.items():
        assert int(owner_of(np.array([table], np.int32), np.array([id]), RANKS)[0]) == rank
        row, wanted = (np.frombuffer(one, np.float32) for one in (row, all_rows[table, id]))
        np.testing.assert_allclose(row, wanted, rtol=1e-5, atol=1e-6)


def in_a_rank(rank, what, folder):
    distributed.init_process_group("gloo", init_method=f"file://{folder}/meet", rank=rank, world_size=RANKS)
    torch.set_num_threads(1)
    try:
        what(rank)
    finally:
        distributed.destroy_process_group()


@pytest.mark.skipif(not distributed.is_available(), reason="this torch has no distributed")
@pytest.mark.parametrize("what", [run_ops, run_bags, run_steps], ids=["ops", "bags", "steps"])
def test_two_ranks(what):
    with tempfile.TemporaryDirectory() as folder:
        torch.multiprocessing.spawn(in_a_rank, (what, folder), nprocs=RANKS)
