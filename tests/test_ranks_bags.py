"""Bags of which owners sum parts: as one process, with fewer bytes between ranks."""

import numpy as np
import pytest
import torch

import oneemb
from oneemb.graph.ops import lookup_ahead, requests
from oneemb.graph.ops.lookup_ahead import AnnouncedLookup
from oneemb.graph.ops.requests import Parts, Requested, cut_if_fewer_bytes, keys_by_rank
from oneemb.kernels.host_backend import HostBackend
from oneemb.kernels.owner import owner_of
from oneemb.storage.embedding_store import EmbeddingStore

DIM, IDS, SAMPLES = 32, 3000, 8
WAYS = ["sum", "mean", "tables", "padded", "with keys", "twice", "clipped"]


def batch_of(step, rank, ranks, *, longest=60):
    """Bags of a rank's samples: the share of rank `rank` of a batch for all."""
    generator = torch.Generator().manual_seed(step)
    size_P = torch.randint(0, longest, (SAMPLES * 12, 2), generator=generator)
    ids = torch.randint(-IDS, IDS, (int(size_P.sum()),), generator=generator) * (2**50)
    label = torch.rand(len(size_P), generator=generator)
    offsets = torch.cat([torch.zeros(1, dtype=torch.int64), size_P.flatten().cumsum(0)])
    first, end = rank * len(label) // ranks, (rank + 1) * len(label) // ranks
    return (
        ids[offsets[2 * first] : offsets[2 * end]],
        offsets[2 * first : 2 * end + 1] - offsets[2 * first],
        label[first:end],
    )


class Model(oneemb.TrainGraph):
    def __init__(self, path, way, group, store="device", comm_dtype=torch.float32, optimizer="adagrad"):
        super().__init__()
        torch.manual_seed(0)
        self.way = way
        options = {
            "device": lambda: oneemb.make_device_mem_store_options(path),
            "ssd": lambda: oneemb.make_cached_ssd_store_options(2, path),
        }[store]()
        self.items = oneemb.MultiTableEmbedding(
            "items", DIM, torch.float32, torch.int64, [oneemb.make_table()] * 2, options, num_threads=1,
            process_group=group, padding_idx=0 if way == "padded" else None, comm_dtype=comm_dtype,
        )  # fmt: skip
        self.optimizer = {
            "adagrad": lambda: torch.optim.Adagrad(self.parameters(), lr=0.01),
            "adam": lambda: torch.optim.Adam(self.parameters(), lr=0.01),
        }[optimizer]()

    def pooled(self, ids, offsets):
        if self.way == "padded":
            ids = torch.where(ids % (7 * 2**50) == 0, 0, ids)
        pooling = "mean" if self.way in ("mean", "padded", "clipped") else "sum"
        if self.way == "tables":
            table_ids = torch.arange(1, len(offsets)) % 2
            return self.items(ids, table_ids, offsets).view(-1, 2, DIM)
        return self.items(ids, offsets=offsets, pooling=pooling)

    def loss(self, ids, offsets, label):
        rows = self.pooled(ids, offsets).sum(1)
        if self.way == "with keys":
            rows = rows + self.items((label * IDS).long()[:, None].expand(-1, 2) * 2**50).sum(1)
        if self.way == "twice":
            rows = rows + self.pooled(-ids, offsets).mean(1)
        return torch.nn.functional.mse_loss(rows.tanh().mean(1), label)

    def build(self, ids, offsets, label):
        loss = self.loss(ids, offsets, label)
        loss.backward()
        return loss.detach()


def weights_of(embedding):
    ids = torch.arange(-IDS, IDS) * (2**50)
    with torch.no_grad():
        return embedding.eval()(ids[:, None].expand(-1, 2)).numpy()


def trains(group, path, way, steps=6, drive="eager", **options):
    rank, ranks = (0, 1) if group is None else (group.rank(), group.size())
    graph = Model(path, way, group, **options)
    batches = [batch_of(step, rank, ranks) for step in range(steps)]
    losses = []
    if drive == "eager":
        for batch in batches:
            graph.optimizer.zero_grad()
            loss = graph.loss(*batch)
            loss.backward()
            if way == "clipped":
                torch.nn.utils.clip_grad_norm_(graph.parameters(), 0.05)
            graph.optimizer.step()
            losses.append(loss.item())
    else:
        graph.add_optimizer(graph.optimizer)
        made = graph.run(batches) if drive == "run" else map(lambda batch: graph(*batch), batches)
        losses += [loss.item() for loss in made]
    sent = graph.items.ranks.traffic.sent_bytes if group else 0
    result = losses, weights_of(graph.items), graph.items.stats()["rows"], sent
    assert graph.items.stats()["device"]["pinned"] == 0
    graph.items.close()
    return result


@pytest.mark.parametrize("way", WAYS)
def test_ranks_equal_one_process(tmp_path, rank_pool, way):
    results = rank_pool(3, trains, str(tmp_path / "ranks"), way)
    losses, weights, rows, _ = trains(None, str(tmp_path / "one"), way)
    np.testing.assert_allclose(np.mean([result[0] for result in results], axis=0), losses, rtol=1e-5)
    for _, its_weights, *_ in results:
        assert np.abs(its_weights - weights).max() < 5e-6 * np.abs(weights).max()
    assert sum(result[2] for result in results) == rows


def trains_with_rows(*arguments, **options):
    """As `trains`, where no bag is cut."""
    real = requests.parts_move_fewer_bytes
    requests.parts_move_fewer_bytes = lambda *_: False
    try:
        return trains(*arguments, **options)
    finally:
        requests.parts_move_fewer_bytes = real


def test_sums_of_parts_are_fewer_bytes_than_rows(tmp_path, rank_pool):
    summed = rank_pool(2, trains, str(tmp_path / "parts"), "mean")
    rows = rank_pool(2, trains_with_rows, str(tmp_path / "rows"), "mean")
    for (losses, weights, *_, sent), (its_losses, its_weights, *_, its_sent) in zip(summed, rows, strict=True):
        np.testing.assert_allclose(losses, its_losses, rtol=1e-5)
        assert np.abs(weights - its_weights).max() < 5e-6 * np.abs(weights).max()
        assert sent < its_sent / 3


@pytest.mark.parametrize("way", ["sum", "twice"])
def test_stores_prefetch_and_runs_change_no_bit(tmp_path, rank_pool, way):
    (losses, weights, *_), *others = [
        rank_pool(2, drives, str(tmp_path / str(i)), way, drive, store)[1]
        for i, (drive, store) in enumerate([("eager", "device"), ("call", "ssd"), ("run", "device"), ("run", "ssd")])
    ]
    for its_losses, its_weights, *_ in others:
        assert its_losses == losses
        np.testing.assert_array_equal(its_weights, weights)


def drives(group, path, way, drive, store):
    return trains(group, path, way, drive=drive, store=store, optimizer="adam")


class Changing(Model):
    """Looks up other than it is expected to: on some ranks, in some steps."""

    def build(self, ids, offsets, label):
        weights, pooling = None, "sum"
        match (self.steps, self.rank):
            case (5, 0) | (13, 1):
                ids = ids.flip(0)
            case (8, 0) | (8, 2):
                pooling = "max"
            case (11, 1) | (13, 2):
                weights = torch.ones(len(ids))
        rows = self.items(ids, None, offsets, weights, pooling).sum(1)
        loss = torch.nn.functional.mse_loss(rows.tanh().mean(1), label)
        loss.backward()
        return loss.detach()


def changes_its_mind(group, path, drive):
    graph, took, acquire = Changing(path, "sum", group), [], AnnouncedLookup.acquire
    graph.rank = group.rank()
    graph.add_optimizer(graph.optimizer)
    batches = [batch_of(step, group.rank(), 3, longest=[60, 60, 3][group.rank()]) for step in range(18)]
    AnnouncedLookup.acquire = lambda self: took.append(acquire(self)) or took[-1]
    try:
        losses = [loss.item() for loss in (graph.run(batches) if drive == "run" else (graph(*one) for one in batches))]
    finally:
        AnnouncedLookup.acquire = acquire
    result = losses, weights_of(graph.items), sum(lease is not None for lease in took)
    assert graph.items.stats()["device"]["pinned"] == 0
    graph.items.close()
    return result


def test_what_was_announced_of_bags_may_turn_out_otherwise(tmp_path, rank_pool):
    """Ranks that cut bags and ranks that do not, poolings and ids that nobody expected."""
    called, ran = (rank_pool(3, changes_its_mind, str(tmp_path / drive), drive) for drive in ("call", "run"))
    for (losses, weights, _), (its_losses, its_weights, announced) in zip(called, ran, strict=True):
        assert its_losses == losses and announced >= 5
        np.testing.assert_array_equal(its_weights, weights)


def counts_finds(group, path, way, drive):
    """How often ids of this rank, and keys that ranks ask it for, are made unique, and rows found, in one step."""
    graph, counts, batch = (
        Model(path, way, group),
        dict.fromkeys(["ids", "asked", "rows"], 0),
        batch_of(0, group.rank(), 2),
    )
    graph.add_optimizer(graph.optimizer)

    def counted(name, function):
        def call(*args, **kwargs):
            counts[name] += 1
            return function(*args, **kwargs)

        return call

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(HostBackend, "unique_keys_of_bags", counted("ids", HostBackend.unique_keys_of_bags))
        patch.setattr(requests, "keys_of_ranks", counted("asked", requests.keys_of_ranks))
        patch.setattr(EmbeddingStore, "acquire_locked", counted("rows", EmbeddingStore.acquire_locked))
        for _ in range(3):
            counts.update(dict.fromkeys(counts, 0))
            graph(*batch) if drive == "call" else list(graph.run([batch]))
    graph.items.close()
    return counts


@pytest.mark.parametrize("way, drive, finds", [("sum", "call", 1), ("mean", "run", 1), ("twice", "call", 2)], ids=str)
def test_a_step_finds_ids_keys_and_rows_once(tmp_path, rank_pool, way, drive, finds):
    """But for gradients of several lookups, whose keys come together anew."""
    found = {"ids": finds, "asked": finds + (finds > 1), "rows": finds + (finds > 1)}
    assert rank_pool(2, counts_finds, str(tmp_path), way, drive) == [found] * 2


def looks_at_gradients(group, path):
    graph = Model(path, "sum", group)
    graph.loss(*batch_of(0, group.rank(), 2)).backward()
    grad = graph.items.weight.grad
    before = [part.clone() for part in (*grad.row_keys(), grad.row_values())]
    norm = float(grad.norm())
    after = [*grad.row_keys(), grad.row_values()]
    graph.items.close()
    return before, after, norm


def test_gradients_can_be_looked_at_before_and_after_they_are_with_the_owners(tmp_path, rank_pool):
    results = rank_pool(2, looks_at_gradients, str(tmp_path))
    total, owned = {}, {}
    for (tables, ids, values), after, _ in results:
        for table, id, value in zip(tables.tolist(), ids.tolist(), values, strict=True):
            total[table, id] = total.get((table, id), 0) + value / 2
        owned |= {
            (table, id): value for table, id, value in zip(after[0].tolist(), after[1].tolist(), after[2], strict=True)
        }
    assert owned.keys() == total.keys()
    for key, value in total.items():
        torch.testing.assert_close(owned[key], value, rtol=1e-5, atol=1e-9)
    norm = torch.stack(list(total.values())).norm().item()
    assert all(abs(its - norm) < 1e-5 * norm for *_, its in results)


def looks_up_once(group, path, options, forward):
    """How often bags were cut, and what they gave."""
    cut, real = [], lookup_ahead.cut_if_fewer_bytes
    lookup_ahead.cut_if_fewer_bytes = lambda *args, **kwargs: cut.append(real(*args, **kwargs)) or cut[-1]
    dtype = options.pop("dtype", torch.float32)
    embedding = oneemb.MultiTableEmbedding(
        "items", DIM, dtype, torch.int64, [oneemb.make_table(**options.pop("table", {})), oneemb.make_table()],
        oneemb.make_device_mem_store_options(path), num_threads=1, process_group=group, **options,
    )  # fmt: skip
    try:
        ids, offsets, _ = batch_of(0, 0 if group is None else group.rank(), 2)
        rows = embedding(ids, offsets=offsets, **forward(ids))
        rows.float().sum().backward()
        return sum(one is not None for one in cut), rows.detach().float()
    finally:
        lookup_ahead.cut_if_fewer_bytes = real
        embedding.close()


def plainly(ids):
    return {}


def weighted(ids):
    return {"per_sample_weights": torch.ones(len(ids))}


def maxima(ids):
    return {"pooling": "max"}


@pytest.mark.parametrize(
    "options, forward, cuts",
    [
        ({}, plainly, True), ({"comm_dtype": torch.bfloat16}, plainly, True), ({}, weighted, False),
        ({}, maxima, False), ({"comm_dtype": torch.float16}, plainly, False),
        ({"dtype": torch.bfloat16}, plainly, False), ({"table": {"replicate": True}}, plainly, False),
    ],
)  # fmt: skip
def test_which_bags_are_cut(tmp_path, rank_pool, options, forward, cuts):
    for cut, rows in rank_pool(2, looks_up_once, str(tmp_path), options, forward):
        assert cut == cuts and torch.isfinite(rows).all()


def cut_of(bags, owners, **options):
    """Cut bags of keys that these ranks own; of one row of 1 MB nothing else matters."""
    keys = torch.arange(len(owners))
    sent, sizes = keys_by_rank(keys.int(), keys, np.array(owners), 2), [len(bag) for bag in bags]
    return cut_if_fewer_bytes(
        sent, np.array([key for bag in bags for key in bag], np.int32),
        np.concatenate([[0], np.cumsum(sizes)]), None,
        **{"rank": 1, "row_bytes": 1 << 20, "grad_bytes": 1 << 20, **options},
    )  # fmt: skip


def test_bags_are_cut_by_owner():
    cut = cut_of([[0, 1, 0, 2, -1], [], [2, 3], [-1]], [0, 1, 0, 0])
    assert cut.count_R == [2, 1] and cut.bag_S.tolist() == [0, 2, 0] and cut.ids_P.tolist() == [4, 0, 2, 0]
    first, second = cut.parts_R
    assert first.key_N.tolist() == [0, 0, 1, 1, 2] and first.size_S.tolist() == [3, 2], "keys 0, 2, 3 are its 0, 1, 2"
    assert second.key_N.tolist() == [0] and second.size_S.tolist() == [1]
    order, offsets = cut.of_bags()
    assert order.tolist() == [0, 2, 1] and offsets.tolist() == [0, 2, 2, 3, 3]
    assert cut.scale_S.tolist() == [0.25, 0.5, 0.25]


def test_bags_are_cut_where_that_moves_fewer_bytes():
    bags = [[0, 1, 2, 3], [0, 1, 2, 3]]
    assert cut_of(bags, [0, 0, 0, 1]) is not None, "2 parts in place of 3 keys"
    assert cut_of(bags, [0, 0, 1, 1]) is None, "2 parts in place of 2 keys"
    assert cut_of(bags, [0, 0, 0, 1], rank=0) is None, "what this rank asks itself for moves nowhere"
    assert cut_of(bags, [0, 0, 0, 1], row_bytes=4, grad_bytes=4) is None, "places of ids take more than a row"
    assert cut_of([[0], [1], [2], [3]], [0, 0, 0, 1]) is None


def test_keys_of_one_rank_and_parts_of_another_are_not_the_other_way_round():
    def asked(*parts_R):
        return Requested(None, None, torch.zeros(4, dtype=torch.int32), torch.arange(4), [2, 2], parts_R)

    parts = Parts(torch.tensor([0, 1], dtype=torch.int32), torch.tensor([1, 1], dtype=torch.int32))
    assert asked(parts, None).is_as(asked(parts, None)) and asked(None, None).is_as(asked(None, None))
    assert not asked(parts, None).is_as(asked(None, parts))
    assert not asked(parts, None).is_as(asked(None, None))


def steps_where_numpy_raises(group, folder):
    """Steps on ids that rank 1 owns and rank 0 looks up, one with a gradient that the mean makes subnormal."""
    np.seterr(under="raise")
    embedding = oneemb.MultiTableEmbedding(
        "items", 4, torch.float32, torch.int64, [oneemb.make_table()], oneemb.make_device_mem_store_options(folder),
        num_threads=1, process_group=group,
    )  # fmt: skip
    id_N = np.arange(100)
    ids = torch.from_numpy(id_N[owner_of(np.zeros(100, np.int32), id_N, 2) == 1])
    optimizer, done = torch.optim.SGD([embedding.weight], lr=1.0), []
    for factor in (1.0, 1.3337e-38, 1.0):
        optimizer.zero_grad()
        (embedding(ids if group.rank() == 0 else ids[:0]) * factor).sum().backward()
        optimizer.step()
        done.append(embedding.stats()["step"])
    return done


def test_no_rank_obeys_a_switch_of_numpy_alone(tmp_path, rank_pool):
    assert rank_pool(2, steps_where_numpy_raises, str(tmp_path)) == [[1, 2, 3]] * 2
