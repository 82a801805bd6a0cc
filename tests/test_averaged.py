"""Averages of an embedding's rows: those that AveragedModel makes of the table of an nn.Embedding, lazily."""

import gc
import math

import pytest
import torch
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

import oneemb
import oneemb.embeddings.averaged
from oneemb.graph import ops
from oneemb.storage.errors import BrokenStoreError, StoreFullError
from tests.support.interrupts import WAYS, interrupted
from tests.support.models import STORES, make_embedding, rows_of, zipf_ids
from tests.support.pairwise import covering

IDS, DIM, STEPS = 20, 4, 9


def batches(steps=STEPS):
    """Few ids a step: most averages move without their rows."""
    generator = torch.Generator().manual_seed(1)
    return [torch.randint(0, IDS, (4,), generator=generator) for _ in range(steps)]


def adagrad(parameters):
    return torch.optim.Adagrad(parameters, lr=0.3)


class Pair:
    """Averaged rows of oneemb, and the table of an nn.Embedding under AveragedModel, with a linear layer each."""

    def __init__(self, path, decay=0.9, store="device", joined=False, make=adagrad, **options):
        torch.manual_seed(0)
        self.rows = make_embedding(path / "rows", dim=DIM, store=store, **options)
        self.averaged = oneemb.AveragedEmbedding(self.rows, path / "averages", decay)
        self.table = torch.nn.Embedding(IDS, DIM)
        with torch.no_grad():
            self.table.weight.copy_(rows_of(self.rows, range(IDS)))
        multi_avg_fn = None if decay is None else get_ema_multi_avg_fn(decay)
        self.reference = AveragedModel(self.table, multi_avg_fn=multi_avg_fn)
        self.optimizers = [make([self.rows.weight]), make([self.table.weight])]
        if joined:
            self.optimizers[0] = oneemb.Optimizer(self.optimizers[0], [self.rows])

    def step(self, ids):
        for embedding, optimizer in zip((self.rows, self.table), self.optimizers, strict=True):
            optimizer.zero_grad()
            embedding(ids).square().sum().backward()
            optimizer.step()

    def update(self):
        self.averaged.update_rows()
        self.reference.update_parameters(self.table)

    def averages(self):
        return self.averaged(torch.arange(IDS))

    def check(self):
        torch.testing.assert_close(rows_of(self.rows, range(IDS)), self.table.weight.detach(), rtol=1e-5, atol=1e-6)
        torch.testing.assert_close(self.averages(), self.reference.module.weight.detach(), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(("decay", "store", "joined"), covering([0.9, 0.999, 0.0, 1.0, None], STORES, [False, True]))
def test_averages_are_those_of_averaged_model(tmp_path, decay, store, joined):
    pair = Pair(tmp_path, decay, store, joined)
    for n, ids in enumerate(batches()):
        pair.step(ids)
        if n >= 2:  # The first steps come before the first averaging.
            pair.update()
            pair.check()
        assert pair.averaged.n_averaged == max(0, n - 1) == int(pair.reference.n_averaged)
    for _ in range(5):
        pair.update()
    pair.check()
    for stats in (pair.rows.stats(), pair.averaged.rows.stats()):
        assert stats["device"]["pinned"] == 0
    trained = {id for ids in batches()[3:] for id in ids.tolist()}
    assert pair.averaged.rows.stats()["rows"] == len(trained) < IDS


def test_before_the_first_averaging_averages_are_the_rows(tmp_path):
    pair = Pair(tmp_path)
    for ids in batches():
        pair.step(ids)
        assert torch.equal(pair.averages(), rows_of(pair.rows, range(IDS)))
    assert pair.averaged.rows.stats()["rows"] == 0


@pytest.mark.parametrize("decay", [0.9, None])
def test_averages_of_every_third_step_are_those_of_averaged_model(tmp_path, decay):
    pair = Pair(tmp_path, decay)
    for n, ids in enumerate(batches(20)):
        pair.step(ids)
        if n % 3 == 0:
            pair.update()
    pair.check()


def test_steps_between_two_averagings_leave_averages_with_their_bits(tmp_path):
    pair = Pair(tmp_path)
    for _ in range(3):
        pair.step(torch.arange(IDS))
        pair.update()
    pair.step(torch.arange(IDS))  # brings them up to date
    averages = pair.averages()
    for _ in range(5):
        pair.step(torch.arange(IDS))
        assert torch.equal(pair.averages(), averages)


def test_a_row_that_rests_for_long_has_the_average_of_the_formula(tmp_path):
    pair = Pair(tmp_path, 0.9999)
    pair.step(torch.arange(IDS))
    pair.update()
    first = rows_of(pair.rows, range(IDS)).double()
    pair.step(torch.arange(IDS))
    row = rows_of(pair.rows, range(IDS)).double()
    for _ in range(30_000):
        pair.averaged.update_rows()
    expected = row + 0.9999**30_000 * (first - row)
    torch.testing.assert_close(pair.averages(), expected.float(), rtol=1e-6, atol=1e-7)


def test_an_optimizers_hook_may_update_the_averages(tmp_path):
    pair = Pair(tmp_path)
    pair.optimizers[0].register_step_post_hook(lambda *_: pair.averaged.update_rows())
    for ids in batches():
        pair.step(ids)
        pair.reference.update_parameters(pair.table)
        pair.check()


def test_in_the_middle_of_a_step_of_the_joined_optimizer_an_update_is_refused(tmp_path):
    pair = Pair(tmp_path, joined=True)
    pair.optimizers[0].optimizer.register_step_post_hook(lambda *_: pair.averaged.update_rows())
    with pytest.raises(RuntimeError, match="update_rows was called in the middle of a step"):
        pair.step(torch.arange(3))
    assert pair.averaged.n_averaged == 0


def test_fused_steps_keep_averages(tmp_path):
    pair = Pair(tmp_path)
    pair.optimizers[0] = oneemb.Optimizer(adagrad([pair.rows.weight]), [pair.rows], fused=True)
    for ids in batches():
        pair.step(ids)
        pair.update()
        pair.check()


def test_a_step_that_is_left_out_moves_no_row_and_averages_go_on(tmp_path):
    pair = Pair(tmp_path)
    pair.optimizers[0] = oneemb.Optimizer(pair.optimizers[0], [pair.rows], skip_nonfinite=True)
    pair.step(torch.arange(IDS))
    pair.update()
    pair.step(torch.arange(IDS))
    (pair.rows(torch.arange(3)).sum() * math.inf).backward()
    pair.optimizers[0].step()
    pair.update()
    pair.check()


def test_rows_that_are_imported_move_averages_as_a_table_that_is_written(tmp_path):
    pair = Pair(tmp_path)
    pair.step(torch.arange(IDS))
    pair.update()
    values = torch.arange(2.0 * DIM).view(2, DIM)
    oneemb.import_rows(pair.rows, (torch.tensor([3, 5]), values))
    with torch.no_grad():
        pair.table.weight[[3, 5]] = values
    pair.update()
    pair.check()


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_averages_of_narrow_rows_are_kept_in_float32(tmp_path, dtype):
    embedding = make_embedding(tmp_path / "rows", dim=3, dtype=dtype)
    averaged = oneemb.AveragedEmbedding(embedding, tmp_path / "averages", 0.99)
    optimizer = adagrad(embedding.parameters())
    expected = None
    for ids in batches(30):
        optimizer.zero_grad()
        embedding(ids).float().square().sum().backward()
        optimizer.step()
        averaged.update_rows()
        rows = rows_of(embedding, range(IDS)).float()
        expected = rows if expected is None else 0.99 * expected + 0.01 * rows
    given = averaged(torch.arange(IDS))
    assert given.dtype == dtype and torch.equal(given, expected.to(dtype))


def test_lookups_of_every_shape_read_averages(tmp_path):
    embedding = make_embedding(tmp_path / "rows", dim=DIM, tables=2, padding_idx=0)
    averaged = oneemb.AveragedEmbedding(embedding, tmp_path / "averages", 0.5)
    optimizer = adagrad(embedding.parameters())
    table = torch.arange(8).view(4, 2)
    for _ in range(3):
        optimizer.zero_grad()
        embedding(table).square().sum().backward()
        optimizer.step()
        averaged.update_rows()
    copy = averaged.copy_to(tmp_path / "copy").eval()
    scale_N = torch.rand(6)
    for arguments in (
        dict(ids=table),
        dict(ids=torch.arange(9), table_ids=torch.tensor(1)),
        dict(ids=torch.arange(6), offsets=torch.tensor([0, 2, 2, 5, 6])),
        dict(ids=torch.arange(6), offsets=torch.tensor([0, 2, 2, 5, 6]), pooling="mean"),
        dict(ids=torch.arange(6), offsets=torch.tensor([0, 2, 2, 5, 6]), pooling="max"),
        dict(ids=torch.arange(6), offsets=torch.tensor([0, 6, 6]), per_sample_weights=scale_N),
    ):
        torch.testing.assert_close(averaged(**arguments), copy(**arguments), rtol=0, atol=0)
    assert not averaged(table).requires_grad and averaged(torch.zeros(1, 2, dtype=torch.int64)).abs().sum() == 0
    with pytest.raises(TypeError, match="ids must be"):
        averaged([1, 2])
    with pytest.raises(ValueError, match="decay must be from 0 to 1"):
        oneemb.AveragedEmbedding(embedding, tmp_path / "others", 2.0)


@pytest.mark.parametrize("store", STORES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_copy_of_averages_has_them_as_its_rows(tmp_path, store, dtype):
    embedding = make_embedding(tmp_path / "rows", dim=DIM, store=store, dtype=dtype)
    averaged = oneemb.AveragedEmbedding(embedding, tmp_path / "averages", 0.9)
    optimizer = torch.optim.Adam(embedding.parameters(), lr=0.1)
    for ids in batches():
        optimizer.zero_grad()
        embedding(ids).square().sum().backward()
        optimizer.step()
        averaged.update_rows()
    copy = averaged.copy_to(tmp_path / "copy")
    assert torch.equal(rows_of(copy, range(IDS)), averaged(torch.arange(IDS)))
    assert copy.stats()["rows"] == embedding.stats()["rows"] and copy.stats()["step"] == 0
    assert not torch.equal(rows_of(copy, range(IDS)), rows_of(embedding, range(IDS)))


def test_a_step_whose_averages_do_not_fit_at_once_brings_them_up_to_date_in_parts(tmp_path, monkeypatch):
    pair, parts, of_keys = Pair(tmp_path), [], ops.Lease.of_keys

    def narrow(store, table_U, id_U):
        if store is pair.averaged.rows.store:
            if len(id_U) > 3:
                raise StoreFullError("no more than 3")
            parts.append(len(id_U))
        return of_keys(store, table_U, id_U)

    monkeypatch.setattr(ops.Lease, "of_keys", narrow)
    for _ in range(3):
        pair.step(torch.arange(IDS))
        pair.update()
        pair.check()
    assert sum(parts) == 2 * IDS and max(parts) == 3


def test_a_step_whose_averages_have_no_room_at_all_changes_nothing(tmp_path, monkeypatch):
    pair, of_keys = Pair(tmp_path, joined=True), ops.Lease.of_keys
    pair.step(torch.arange(IDS))
    pair.update()
    rows, averages = rows_of(pair.rows, range(IDS)), pair.averages()

    def full(store, table_U, id_U):
        raise StoreFullError("no room")

    monkeypatch.setattr(ops.Lease, "of_keys", full)
    with pytest.raises(StoreFullError):
        pair.step(torch.arange(IDS))
    monkeypatch.setattr(ops.Lease, "of_keys", of_keys)
    assert torch.equal(rows_of(pair.rows, range(IDS)), rows) and torch.equal(pair.averages(), averages)
    assert pair.rows.stats()["step"] == 1


def test_averages_that_were_cut_short_say_so_and_begin_anew_after_clear(tmp_path):
    pair = Pair(tmp_path)
    pair.step(torch.arange(IDS))
    pair.update()
    pair.averaged.rows.store.store_lock.cut_short(RuntimeError())
    pair.rows(torch.arange(IDS)).sum().backward()
    for use in (pair.averages, pair.optimizers[0].step, pair.averaged.update_rows):
        with pytest.raises(BrokenStoreError):
            use()
    pair.averaged.rows.clear()
    assert pair.averaged.n_averaged == 0
    pair.reference.n_averaged.zero_()
    for ids in batches():
        pair.step(ids)
        pair.update()
        pair.check()


@pytest.mark.parametrize("way", WAYS)
def test_an_interrupt_at_any_line_of_bringing_averages_up_to_date_moves_none_or_says_so(tmp_path, way):
    stopped = 0
    for at in range(1, 100):
        pair = Pair(tmp_path / str(at), decay=0.75, joined=True)
        for _ in range(3):
            pair.step(torch.tensor([7]))
            pair.update()
        pair.update()
        pair.rows(torch.tensor([7])).sum().backward()
        files, functions = [oneemb.embeddings.averaged.__file__], {"_catch_up"}
        _, place = interrupted(pair.optimizers[0].step, at, way, files=files, functions=functions)
        if place is None:
            break
        try:
            pair.check()
        except BrokenStoreError:
            stopped += 1
    assert at > 6 and (stopped > 0) == (way == "raise")


def test_averages_that_are_closed_are_kept_no_more(tmp_path):
    pair = Pair(tmp_path)
    pair.update()
    pair.averaged.close()
    pair.step(torch.arange(IDS))
    with pytest.raises(oneemb.StorageError, match="closed"):
        pair.averages()


def test_averages_that_a_hook_may_not_close_are_kept_further(tmp_path):
    pair = Pair(tmp_path, joined=True)
    pair.step(torch.arange(IDS))
    pair.update()
    handle = pair.optimizers[0].optimizer.register_step_pre_hook(lambda *_: pair.averaged.close())
    with pytest.raises(RuntimeError, match="close was called in the middle of a step"):
        pair.step(torch.arange(IDS))
    handle.remove()
    for _ in range(2):
        pair.step(torch.arange(IDS))
        pair.update()
    pair.check()


def test_an_embedding_forgets_averages_that_are_dropped_or_closed(tmp_path):
    """A GPU checks gradients without a wait only if no averages are brought up to date."""
    embedding = make_embedding(tmp_path / "rows", dim=DIM)
    dropped, closed = (oneemb.AveragedEmbedding(embedding, tmp_path / name) for name in ("dropped", "closed"))
    assert len(embedding.store.watchers) == 2
    closed.close()
    assert len(embedding.store.watchers) == 1
    del dropped
    gc.collect()
    assert not embedding.store.watchers


def test_a_snapshot_of_averages_with_another_decay_is_refused(tmp_path):
    pair = Pair(tmp_path, 0.9)
    with pytest.raises(AttributeError, match="decay"):
        pair.averaged.decay = 0.99
    for ids in batches():
        pair.step(ids)
        pair.update()
    pair.averaged.rows.save_snapshot("s")
    pair.averaged.close()
    other = oneemb.AveragedEmbedding(pair.rows, tmp_path / "averages", 0.99)
    with pytest.raises(oneemb.StorageError, match=r"decay 0\.9.*decay 0\.99"):
        other.rows.load_snapshot("s")


@pytest.mark.parametrize("joined", [False, True], ids=["torch's own", "oneemb.Optimizer"])
def test_an_optimizer_of_all_parameters_leaves_averages_alone(tmp_path, joined):
    embedding = make_embedding(tmp_path / "rows", dim=DIM)
    model = torch.nn.ModuleDict({"rows": embedding})
    model["averaged"] = oneemb.AveragedEmbedding(embedding, tmp_path / "averages", 0.5)
    optimizer = adagrad(model.parameters())
    if joined:
        optimizer = oneemb.Optimizer(optimizer)
    rows = []
    for _ in range(2):
        optimizer.zero_grad()
        embedding(torch.arange(3)).square().sum().backward()
        optimizer.step()
        model["averaged"].update_rows()
        rows.append(rows_of(embedding, range(3)))
    torch.testing.assert_close(model["averaged"](torch.arange(3)), (rows[0] + rows[1]) / 2)
    assert len(list(model.parameters())) == 1


# ---- models, graphs and checkpoints ---------------------------------------------------------------------------------


@pytest.mark.parametrize("store", ["device", "ssd"])
def test_a_state_dict_of_rows_and_averages_goes_on_with_the_same_bits(tmp_path, store):
    def model(name):
        pair = Pair(tmp_path / name, store=store)
        return pair, torch.nn.ModuleDict({"rows": pair.rows, "averaged": pair.averaged})

    whole, _ = model("whole")
    pair, modules = model("rows")
    for n, ids in enumerate(batches()):
        for one in (whole, pair):
            if n < 5 or one is whole:
                one.step(ids)
                one.update()
        if n == 4:
            state = modules.state_dict()
            middle = pair.averages()
    for ids in batches(2):
        pair.step(ids)
        pair.update()
    pair.rows.close(), pair.averaged.rows.close()
    pair, modules = model("rows")
    modules.load_state_dict(state)
    assert torch.equal(pair.averages(), middle) and pair.averaged.n_averaged == 5
    for ids in batches()[5:]:
        pair.step(ids)
        pair.update()
    assert torch.equal(pair.averages(), whole.averages())


class Graph(oneemb.TrainGraph):
    def __init__(self, path, names="ab"):
        super().__init__()
        torch.manual_seed(0)
        rows = {name: make_embedding(path / name, dim=DIM, name=name, seed=ord(name)) for name in names}
        self.rows = torch.nn.ModuleDict(rows)
        self.head = torch.nn.Linear(len(names) * DIM, 1)
        self.averaged = torch.nn.ModuleDict(
            {name: oneemb.AveragedEmbedding(rows[name], path / f"averages of {name}", 0.9) for name in names}
        )
        self.torch_optimizer = adagrad(self.parameters())

    def build(self, ids):
        rows = torch.cat([embedding(ids) for embedding in self.rows.values()], dim=1)
        loss = self.head(rows).square().mean()
        loss.backward()
        return loss

    def eager(self, ids):
        self.torch_optimizer.zero_grad()
        self.build(ids)
        self.torch_optimizer.step()

    def update(self):
        for averaged in self.averaged.values():
            averaged.update_rows()

    def numbers(self):
        return torch.cat([averaged(torch.arange(IDS)) for averaged in self.averaged.values()])


def test_a_graph_with_merged_embeddings_keeps_the_averages_of_an_eager_loop(tmp_path):
    graph, eager = Graph(tmp_path / "graph"), Graph(tmp_path / "eager")
    graph.add_optimizer(graph.torch_optimizer)
    for ids in batches():
        graph(ids)
        eager.eager(ids)
        for one in (graph, eager):
            one.update()
        assert torch.equal(graph.numbers(), eager.numbers())
    assert "merged" in str(graph) and graph.averaged["a"].rows.stats()["rows"] > 0


def test_a_checkpoint_of_a_graph_holds_its_averages(tmp_path):
    graph = Graph(tmp_path / "graph")
    graph.add_optimizer(graph.torch_optimizer)
    for n, ids in enumerate(batches()):
        graph(ids)
        graph.update()
        if n == 4:
            graph.save(tmp_path / "c", keep=1)
    expected = graph.numbers()
    graph.load(tmp_path / "c")
    assert not torch.equal(graph.numbers(), expected)
    for ids in batches()[5:]:
        graph(ids)
        graph.update()
    assert torch.equal(graph.numbers(), expected)


def test_the_dense_part_of_a_model_is_averaged_by_averaged_model(tmp_path):
    model = torch.nn.ModuleDict({
        "rows": make_embedding(tmp_path / "rows", dim=DIM), "head": torch.nn.Linear(DIM, 1),
    })  # fmt: skip
    rows = oneemb.AveragedEmbedding(model["rows"], tmp_path / "averages", 0.9)
    head = AveragedModel(model["head"], multi_avg_fn=get_ema_multi_avg_fn(0.9))
    optimizer = adagrad(model.parameters())
    expected = None
    for ids in batches():
        optimizer.zero_grad()
        model["head"](model["rows"](ids)).square().mean().backward()
        optimizer.step()
        rows.update_rows()
        head.update_parameters(model["head"])
        now = [rows_of(model["rows"], range(IDS)), *(p.detach().clone() for p in model["head"].parameters())]
        expected = now if expected is None else [0.9 * a + 0.1 * b for a, b in zip(expected, now, strict=True)]
    score = torch.nn.functional.linear(expected[0], *expected[1:])
    torch.testing.assert_close(head(rows(torch.arange(IDS))), score)


def test_averages_are_the_same_bits_on_every_store(tmp_path):
    ids_SB = zipf_ids(2000, 1, 10, ids=20_000).squeeze(2)
    averages = {}
    for store in STORES:
        embedding = make_embedding(tmp_path / store / "rows", dim=128, store=store)
        averaged = oneemb.AveragedEmbedding(embedding, tmp_path / store / "averages", 0.9)
        optimizer = torch.optim.SGD(embedding.parameters(), lr=0.1)
        for ids in ids_SB:
            optimizer.zero_grad()
            embedding(ids).square().sum().backward()
            optimizer.step()
            averaged.update_rows()
        averages[store] = averaged(ids_SB.unique())
        if store != "device":
            assert averaged.rows.stats()["device"]["evicted"] > 0
        assert torch.equal(averages[store], averages["device"])
