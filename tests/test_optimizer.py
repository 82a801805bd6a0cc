"""oneemb.Optimizer: the same steps as the torch class on nn.Embedding; what is not finite changes nothing.

The reference is torch's own class on a dense nn.Embedding. Ids are drawn from a few, so they repeat; where torch steps
rows that had no gradient (momentum, Adam's moments), those are put back: rows of a lookup are what oneemb updates.
"""

import copy
import gc
import math
import os
import signal
import threading
import tracemalloc

import pytest
import torch

import oneemb
from oneemb.training import row_step
from tests.support.models import STORES, make_embedding, rows_of
from tests.support.optimizers import MORE, OPTIMIZERS
from tests.support.pairwise import diagonal

IDS = 30
DIM = 5


@pytest.fixture
def made(tmp_path):
    every = []

    def make(path="rows", **options):
        every.append(make_embedding(tmp_path / path, **{"dim": DIM, **options}))
        return every[-1]

    yield make
    for embedding in every:
        embedding.close()


ALL = {**OPTIMIZERS, **MORE}
# It counts the steps that a row sat out, where a dense parameter has one count for all its rows: here every row takes
# part in every step.
EVERY_ROW = {"smart decay adam"}


class Reference:
    """torch's class on an nn.Embedding; rows without a gradient are as they were before the step."""

    def __init__(self, weight, make):
        self.embedding = torch.nn.Embedding.from_pretrained(weight.clone(), freeze=False, sparse=False)
        self.optimizer = make([self.embedding.weight])
        self.sparse = isinstance(self.optimizer, torch.optim.SparseAdam)

    def __call__(self, ids):
        return self.embedding(ids)

    def step(self, ids):
        parameter = self.embedding.weight
        touched = torch.zeros(len(parameter), dtype=torch.bool)
        touched[ids.reshape(-1)] = True
        if self.sparse:
            rows = touched.nonzero().T
            parameter.grad = torch.sparse_coo_tensor(
                rows, parameter.grad[touched], parameter.shape, check_invariants=True
            )
        state = self.optimizer.state[parameter]
        before = {
            "weight": parameter.detach().clone(),
            **{k: v.clone() for k, v in state.items() if _is_per_row(v, parameter)},
        }
        self.optimizer.step()
        self.optimizer.zero_grad()
        parameter.data[~touched] = before.pop("weight")[~touched]
        for key, value in state.items():
            if _is_per_row(value, parameter):
                value[~touched] = before[key][~touched] if key in before else _begin_of(key, self.optimizer)


def _is_per_row(value, parameter):
    return torch.is_tensor(value) and value.dim() > 0 and len(value) == len(parameter)


def _begin_of(key, optimizer):
    begin = optimizer.defaults.get("initial_accumulator_value", 0.0)
    return begin if key in ("sum", "acc", "n") else 0.0


def batches(steps=50, seed=0, every_row=False):
    generator = torch.Generator().manual_seed(seed)
    for _ in range(steps):
        ids = torch.randint(0, IDS, (8, 4), generator=generator)
        if every_row:
            ids = torch.cat([ids.reshape(-1), torch.arange(IDS)])
        yield ids, torch.randn(*ids.shape, DIM, generator=generator)


def close(found, expected, tolerance=1e-6):
    scale = expected.abs().clamp(min=1.0)
    return float(((found - expected).abs() / scale).max()) <= tolerance


@pytest.mark.parametrize(("name", "store"), diagonal([*ALL], ["device", "ssd, host cache"]))
def test_fifty_steps_equal_the_torch_class_on_nn_embedding(made, name, store):
    embedding = made(store=store)
    reference = Reference(rows_of(embedding, range(IDS)), ALL[name])
    optimizer = oneemb.Optimizer(ALL[name](embedding.parameters()), [embedding])
    for step, (ids, c) in enumerate(batches(every_row=name in EVERY_ROW)):
        losses = []
        for model in (embedding, reference):
            loss = (model(ids) * c).sum() + model(ids).square().sum() / 2
            loss.backward()
            losses.append(loss.item())
        optimizer.step()
        optimizer.zero_grad()
        reference.step(ids)
        assert math.isclose(*losses, rel_tol=2e-5, abs_tol=1e-4), f"step {step}"
        assert close(rows_of(embedding, range(IDS)), reference.embedding.weight.detach()), f"step {step}"
    assert embedding.stats()["step"] == 50


@pytest.mark.parametrize("change", [dict(lr=0.0500001), dict(betas=(0.9, 0.99)), dict(eps=1e-6)], ids=str)
def test_the_comparison_notices_a_small_change(made, change):
    embedding = made()
    reference = Reference(
        rows_of(embedding, range(IDS)), lambda params: torch.optim.Adam(params, **{"lr": 0.05, **change})
    )
    optimizer = oneemb.Optimizer(torch.optim.Adam(embedding.parameters(), lr=0.05), [embedding])
    for ids, c in batches():
        for model in (embedding, reference):
            (model(ids) * c * 1e-3).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
        reference.step(ids)
    assert not close(rows_of(embedding, range(IDS)), reference.embedding.weight.detach())


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_half_width_rows_train_as_their_float32_selves_rounded(made, dtype):
    embedding = made(dtype=dtype)
    weight = rows_of(embedding, range(IDS)).float()
    optimizer = oneemb.Optimizer(torch.optim.SGD(embedding.parameters(), lr=0.5), [embedding])
    for ids, _ in batches(20):
        rows = embedding(ids)
        assert rows.dtype == dtype
        rows.sum().backward()
        count = torch.bincount(ids.reshape(-1), minlength=IDS)[:, None]
        weight = (weight - 0.5 * count).to(dtype).float()
        optimizer.step()
        optimizer.zero_grad()
    assert torch.equal(rows_of(embedding, range(IDS)).float(), weight)


# ---- schedulers and groups -------------------------------------------------------------------------------------------

SCHEDULERS = {
    "step": lambda optimizer: torch.optim.lr_scheduler.StepLR(optimizer, 5, 0.5),
    "cosine": lambda optimizer: torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 20),
    "warm-up": lambda optimizer: torch.optim.lr_scheduler.LinearLR(optimizer, 0.1, 1.0, 10),
    "one cycle": lambda optimizer: torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.2, total_steps=60),
}


@pytest.mark.parametrize("name", SCHEDULERS)
def test_schedulers_change_the_rate_of_the_next_step(made, name):
    embedding = made()
    reference = Reference(rows_of(embedding, range(IDS)), ALL["sgd, momentum"])
    optimizer = oneemb.Optimizer(ALL["sgd, momentum"](embedding.parameters()), [embedding])
    schedulers = [SCHEDULERS[name](one) for one in (optimizer.optimizer, reference.optimizer)]
    rates = set()
    for ids, c in batches():
        for model in (embedding, reference):
            (model(ids) * c).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
        reference.step(ids)
        for scheduler in schedulers:
            scheduler.step()
        rates.add(optimizer.param_groups[0]["lr"])
        assert close(rows_of(embedding, range(IDS)), reference.embedding.weight.detach())
    assert len(rates) > 3


def test_options_of_the_group_that_holds_the_weight_count(made):
    one, two = made("one"), made("two")
    groups = [{"params": one.parameters(), "lr": 0.5}, {"params": two.parameters()}]
    optimizer = oneemb.Optimizer(torch.optim.SGD(groups, lr=0.25), [one, two])
    before = rows_of(one, [1]), rows_of(two, [1])
    (one(torch.tensor([1])).sum() + two(torch.tensor([1])).sum()).backward()
    optimizer.step()
    optimizer.zero_grad()
    assert torch.equal(rows_of(one, [1]), before[0] - 0.5) and torch.equal(rows_of(two, [1]), before[1] - 0.25)


# ---- several lookups, embeddings, parameters -------------------------------------------------------------------------


def test_lookups_of_one_embedding_in_a_step_are_one_update(made):
    embedding = made(tables=2)
    weights = [rows_of(embedding, range(IDS), t) for t in range(2)]
    reference = Reference(torch.cat(weights), OPTIMIZERS["adam"])
    optimizer = oneemb.Optimizer(OPTIMIZERS["adam"](embedding.parameters()), [embedding])
    shift = torch.tensor([0, IDS])
    for ids, c in batches(20):
        first, second, third = ids[:, :2], ids[:4, 2:], ids[:, 3]
        loss = (embedding(first) * c[:, :2]).sum() + embedding(second).square().sum()
        (loss + (embedding(third, torch.tensor(1)) * c[:, 0]).sum()).backward()
        loss = (reference(first + shift) * c[:, :2]).sum() + reference(second + shift).square().sum()
        (loss + (reference(third + IDS) * c[:, 0]).sum()).backward()
        optimizer.step()
        optimizer.zero_grad()
        reference.step(torch.cat([(first + shift).reshape(-1), (second + shift).reshape(-1), third + IDS]))
        found = torch.cat([rows_of(embedding, range(IDS), t) for t in range(2)])
        assert close(found, reference.embedding.weight.detach())
    assert embedding.stats()["step"] == 20 and embedding.stats()["device"]["pinned"] == 0


def test_lookups_are_summed_in_the_order_they_were_made(made):
    # 2^24 + 1 = 2^24 in float32: in the order of gradients, which is the other way, the sum would be 1.
    embedding = made(tables=[oneemb.make_table(oneemb.make_constant_initializer(0))])
    optimizer = oneemb.Optimizer(torch.optim.SGD(embedding.parameters(), lr=1.0), [embedding])
    rows = [embedding(torch.tensor([1])) for _ in range(3)]
    sum((one * c).sum() for one, c in zip(rows, (2.0**24, 1.0, -(2.0**24)), strict=True)).backward()
    optimizer.step()
    optimizer.zero_grad()
    assert torch.equal(rows_of(embedding, [1]), torch.zeros(1, DIM))


def test_gradients_of_several_backward_passes_add_up(made):
    embedding = made()
    before = rows_of(embedding, range(IDS))
    optimizer = oneemb.Optimizer(torch.optim.SGD(embedding.parameters(), lr=1.0), [embedding])
    rows = embedding(torch.tensor([1, 2, 1]))
    loss = rows.sum()
    loss.backward(retain_graph=True)
    loss.backward()
    embedding(torch.tensor([2])).sum().backward()
    optimizer.step()
    optimizer.zero_grad()
    expected = before.clone()
    expected[1] -= 4
    expected[2] -= 3
    assert torch.equal(rows_of(embedding, range(IDS)), expected)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_several_backward_passes_of_half_width_rows_are_summed_in_float32(made, dtype):
    """SGD at rate 1 on rows that begin as zeros: what they then hold is minus the sum, rounded once."""
    embedding = made(dtype=dtype, tables=[oneemb.make_table(oneemb.make_constant_initializer(0))])
    optimizer = oneemb.Optimizer(torch.optim.SGD(embedding.parameters(), lr=1.0), [embedding])
    generator = torch.Generator().manual_seed(2)
    ids = torch.tensor([1, 2, 1, 3, 1])
    grads = torch.randn(9, 5, DIM, generator=generator).to(dtype)
    grads[4] *= 100
    rows = embedding(ids)
    for i, grad in enumerate(grads):
        rows.backward(grad, retain_graph=i < len(grads) - 1)
    optimizer.step()
    optimizer.zero_grad()
    exact = torch.zeros(4, DIM, dtype=torch.float64).index_add_(0, ids, -grads.double().sum(0))
    got = rows_of(embedding, [1, 2, 3])
    # float32 sums differ from exact ones by far less than half a step of the rows' format, but may round to its other
    # side.
    step = torch.finfo(dtype).eps * exact[1:].abs()
    assert ((got.double() - exact[1:]).abs() <= 0.51 * step).all()


def test_embeddings_and_dense_parameters_share_an_optimizer(made):
    embeddings = [made("one"), made("two", dim=3)]
    mlps = [torch.nn.Linear(8, 1) for _ in range(2)]
    mlps[1].load_state_dict(mlps[0].state_dict())
    tables = [torch.nn.Embedding.from_pretrained(rows_of(one, range(IDS)), freeze=False) for one in embeddings]
    optimizer = oneemb.Optimizer(
        torch.optim.Adagrad([*embeddings[0].parameters(), *mlps[0].parameters(), *embeddings[1].parameters()], lr=0.1),
        embeddings,
    )
    reference = torch.optim.Adagrad([*mlps[1].parameters(), *(table.weight for table in tables)], lr=0.1)
    for ids, c in batches(30):
        for rows, mlp in zip((embeddings, tables), mlps, strict=True):
            x = torch.cat([rows[0](ids[:, 0]), rows[1](ids[:, 1])], dim=1)
            (mlp(x).squeeze(1) - c[:, 0, 0]).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        reference.step()
        reference.zero_grad()
    assert close(mlps[0].weight.detach(), mlps[1].weight.detach())
    for embedding, table in zip(embeddings, tables, strict=True):
        assert close(rows_of(embedding, range(IDS)), table.weight.detach())


def test_the_weight_holds_no_row_and_no_state(made):
    embedding = made()
    optimizer = oneemb.Optimizer(torch.optim.Adam(embedding.parameters(), weight_decay=0.1), [embedding])
    for _ in range(3):
        embedding(torch.tensor([1])).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
        assert embedding.weight.grad is None
    assert embedding.weight.shape == (0, embedding.embedding_dim) and not optimizer.state


def test_padding_is_never_updated(made):
    embedding = made(padding_idx=0)
    optimizer = oneemb.Optimizer(torch.optim.SGD(embedding.parameters(), lr=1.0), [embedding])
    embedding(torch.tensor([0, 1, 0])).sum().backward()
    optimizer.step()
    optimizer.zero_grad()
    assert not embedding(torch.tensor([0])).any() and embedding.stats()["rows"] == 1


def test_a_step_without_gradients_does_nothing(made):
    embedding = made()
    optimizer = oneemb.Optimizer(torch.optim.SGD(embedding.parameters(), lr=1.0, momentum=0.9), [embedding])
    optimizer.step()
    optimizer.zero_grad()
    embedding(torch.tensor([1]))
    optimizer.step()
    optimizer.zero_grad()
    assert embedding.stats()["step"] == 0


def test_a_large_step_equals_torch_on_every_thread_count(made):
    # Enough unique keys for several threads to share each loop, and a cache that the table does not fit in.
    results = []
    for threads in (1, 2, 3):
        embedding = made(f"threads-{threads}", store="ssd", dim=16, num_threads=threads)
        optimizer = oneemb.Optimizer(torch.optim.Adam(embedding.parameters(), lr=0.1), [embedding])
        generator = torch.Generator().manual_seed(3)
        for _ in range(5):
            ids = torch.randint(0, 9000, (6000,), generator=generator)
            (embedding(ids) * torch.randn(6000, 16, generator=generator)).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
        assert embedding.stats()["device"]["evicted"] > 0
        results.append(rows_of(embedding, torch.arange(9000)))
    assert torch.equal(results[0], results[1]) and torch.equal(results[0], results[2])


# ---- gradients that are not finite -----------------------------------------------------------------------------------


def trained(made, skip_nonfinite=False, store="device"):
    embedding, mlp = made(store=store), torch.nn.Linear(DIM, 1)
    params = [*embedding.parameters(), *mlp.parameters()]
    optimizer = oneemb.Optimizer(torch.optim.Adam(params, lr=0.1), [embedding], skip_nonfinite=skip_nonfinite)
    mlp(embedding(torch.tensor([7, 8, 9]))).sum().backward()
    optimizer.step()
    optimizer.zero_grad()
    return embedding, mlp, optimizer


def everything(embedding, mlp, optimizer):
    moments = [state["exp_avg"].clone() for state in optimizer.optimizer.state.values()]
    steps = [float(state["step"]) for state in optimizer.optimizer.state.values()]
    params = [parameter.detach().clone() for parameter in mlp.parameters()]
    embedding.save_snapshot("look", overwrite=True)
    reader = oneemb.make_persistent_table_reader(
        embedding.store_options.persistent_path, "look", torch.int64, torch.float32
    )
    with reader:
        state = {int(key): values.tobytes() for keys, some in reader for key, values in zip(keys, some, strict=True)}
    return [*moments, *params], (steps, state, embedding.stats()["step"])


def same(one, two):
    return one[1] == two[1] and all(torch.equal(a, b) for a, b in zip(one[0], two[0], strict=True))


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("store", ["device", "ssd"])
def test_a_gradient_that_is_not_finite_names_the_id_and_changes_nothing(made, value, store):
    embedding, mlp, optimizer = trained(made, store=store)
    before = everything(embedding, mlp, optimizer)
    rows = embedding(torch.tensor([7, 8, 7, 9]))
    (rows * torch.tensor([1.0, value, 1.0, 1.0])[:, None]).sum().backward()
    mlp(torch.ones(DIM)).sum().backward()
    message = (
        "the gradients of 1 of 3 rows are not finite, the first of them that of id 8 in table 0; nothing was updated"
    )
    with pytest.raises(oneemb.NonFiniteGradientError, match=message):
        optimizer.step()
    assert same(everything(embedding, mlp, optimizer), before)
    optimizer.zero_grad()
    assert embedding.stats()["device"]["pinned"] == 0
    embedding(torch.tensor([8])).sum().backward()
    optimizer.step()
    optimizer.zero_grad()
    assert not same(everything(embedding, mlp, optimizer), before)


def test_a_dense_gradient_that_is_not_finite_names_the_parameter_and_changes_nothing(made):
    embedding, mlp, optimizer = trained(made)
    before = everything(embedding, mlp, optimizer)
    embedding(torch.tensor([7])).sum().backward()
    (mlp(torch.ones(DIM)) * math.inf).sum().backward()
    with pytest.raises(
        oneemb.NonFiniteGradientError, match=r"gradient of parameter 1 \[1, 5\] of group 0 is not finite"
    ):
        optimizer.step()
        optimizer.zero_grad()
    assert same(everything(embedding, mlp, optimizer), before)


@pytest.mark.parametrize("where", ["rows", "dense"])
def test_skip_nonfinite_leaves_out_the_whole_step_and_counts_it(made, where):
    embedding, mlp, optimizer = trained(made, skip_nonfinite=True)
    before = everything(embedding, mlp, optimizer)
    for n in range(2):
        rows = embedding(torch.tensor([7, 100 + n]))
        (rows * (math.nan if where == "rows" else 1.0)).sum().backward()
        (mlp(torch.ones(DIM)) * (math.nan if where == "dense" else 1.0)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    assert optimizer.skipped == 2
    after = everything(embedding, mlp, optimizer)
    for n in range(2):
        after[1][1].pop(100 + n)  # The ids are known now, with their initial values.
    assert same(after, before)
    mlp(embedding(torch.tensor([7]))).sum().backward()
    optimizer.step()
    optimizer.zero_grad()
    assert optimizer.skipped == 2 and embedding.stats()["step"] == before[1][2] + 1


def test_large_dense_gradients_whose_sum_overflows_are_finite(made):
    embedding, mlp, optimizer = trained(made)
    for parameter in mlp.parameters():
        parameter.grad = torch.full_like(parameter, 3e38)
    optimizer.step()
    optimizer.zero_grad()
    assert optimizer.skipped == 0


# ---- what is dropped, frozen, refused --------------------------------------------------------------------------------


def test_zero_grad_drops_rows_and_pins(made):
    embedding = made()
    before = rows_of(embedding, [1])
    mlp = torch.nn.Linear(DIM, 1)
    optimizer = oneemb.Optimizer(torch.optim.SGD([*embedding.parameters(), *mlp.parameters()], lr=1.0), [embedding])
    mlp(embedding(torch.tensor([1]))).sum().backward()
    assert embedding.stats()["device"]["pinned"] == 1
    optimizer.zero_grad()
    assert embedding.stats()["device"]["pinned"] == 0 and mlp.weight.grad is None
    optimizer.step()
    optimizer.zero_grad()
    assert torch.equal(rows_of(embedding, [1]), before) and embedding.stats()["step"] == 0


@pytest.mark.parametrize("store", STORES)
def test_lookups_without_backward_leak_no_pins(made, store):
    embedding = made(store=store, dim=64)
    optimizer = oneemb.Optimizer(torch.optim.SGD(embedding.parameters(), lr=0.1), [embedding])
    for step in range(8):  # A cache of 1 MiB holds 3,542 of these rows.
        used, unused = embedding(torch.arange(1000)), embedding(torch.arange(1000 * step, 1000 * step + 1000))
        used.sum().backward()
        optimizer.step()
        optimizer.zero_grad()
        del used, unused
    gc.collect()
    embedding(torch.tensor([1])).sum().backward()
    optimizer.step()
    optimizer.zero_grad()
    assert embedding.stats()["device"]["pinned"] == 0


def test_a_frozen_embedding_reads_and_is_not_updated(made):
    embedding, mlp = made(), torch.nn.Linear(DIM, 1)
    optimizer = oneemb.Optimizer(torch.optim.SGD([*embedding.parameters(), *mlp.parameters()], lr=1.0), [embedding])
    embedding.requires_grad_(False)
    before = rows_of(embedding, [1]), mlp.weight.detach().clone()
    mlp(embedding(torch.tensor([1]))).sum().backward()
    assert embedding.stats()["device"]["pinned"] == 0
    optimizer.step()
    optimizer.zero_grad()
    assert torch.equal(rows_of(embedding, [1]), before[0]) and not torch.equal(mlp.weight, before[1])
    embedding.requires_grad_(True)
    mlp(embedding(torch.tensor([1]))).sum().backward()
    optimizer.step()
    optimizer.zero_grad()
    assert not torch.equal(rows_of(embedding, [1]), before[0])


def test_an_optimizer_that_does_not_hold_the_weight_is_refused(made):
    embedding = made()
    with pytest.raises(ValueError, match="no group of SGD holds the weight of embedding 'items'"):
        oneemb.Optimizer(torch.optim.SGD(torch.nn.Linear(1, 1).parameters(), lr=0.1), [embedding])
    assert embedding.row_optimizer is None


def test_an_embedding_that_is_given_twice_is_refused(made):
    embedding, other = made("one"), made("two")
    torch_optimizer = torch.optim.SGD([*embedding.parameters(), *other.parameters()], lr=1.0)
    with pytest.raises(ValueError, match="is given twice"):
        oneemb.Optimizer(torch_optimizer, [embedding, other, embedding])
    optimizer = oneemb.Optimizer(torch_optimizer, [embedding, other])
    before = rows_of(embedding, [1])
    embedding(torch.tensor([1])).sum().backward()
    optimizer.step()
    optimizer.zero_grad()
    assert torch.equal(rows_of(embedding, [1]), before - 1)


def test_a_second_optimizer_is_refused(made):
    embedding = made()
    first = oneemb.Optimizer(torch.optim.SGD(embedding.parameters(), lr=0.1), [embedding])
    with pytest.raises(ValueError, match="embedding 'items' has an optimizer already"):
        oneemb.Optimizer(torch.optim.SGD(embedding.parameters(), lr=0.1), [embedding])
    del first  # Nobody can step it any more.
    oneemb.Optimizer(torch.optim.SGD(embedding.parameters(), lr=0.1), [embedding])


def test_one_embedding_refused_leaves_the_others_without_an_optimizer(made):
    one, two = made("one"), made("two")
    first = oneemb.Optimizer(torch.optim.SGD(two.parameters(), lr=0.1), [two])
    with pytest.raises(ValueError, match="already"):
        oneemb.Optimizer(torch.optim.Adam([*one.parameters(), *two.parameters()]), [one, two])
    assert one.row_optimizer is None and first.embeddings == (two,)
    oneemb.Optimizer(torch.optim.Adam(one.parameters()), [one])


def test_an_optimizer_that_one_row_is_too_narrow_for_can_be_made_again(made):
    one, two = made("one"), made("two", options=dict(size_factor=1))
    with pytest.raises(ValueError, match="size_factor=1 is too small for 'adam'"):
        oneemb.Optimizer(torch.optim.Adam([*one.parameters(), *two.parameters()]), [one, two])
    assert one.row_optimizer is None and two.row_optimizer is None
    oneemb.Optimizer(torch.optim.Adagrad(one.parameters()), [one])
    one(torch.tensor([1])).sum().backward()


@pytest.mark.parametrize(
    ("make", "option"),
    [
        (lambda params: torch.optim.SGD(params, lr=0.1, differentiable=True), "differentiable=True"),
        (lambda params: torch.optim.Adam([{"params": params, "differentiable": True}]), "differentiable=True"),
    ],
)
def test_options_that_rows_cannot_follow_are_refused_by_name(made, make, option):
    embedding = made()
    with pytest.raises(ValueError, match=f"{option}\\) is not supported on embedding rows"):
        oneemb.Optimizer(make(list(embedding.parameters())), [embedding])
    assert embedding.row_optimizer is None and not embedding.store.built


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("pooled", [False, True])
def test_rows_that_are_maximized_go_up_what_others_go_down(made, dtype, pooled):
    up, down = made("up", dtype=dtype), made("down", dtype=dtype)
    makes = [lambda params: torch.optim.SGD(params, lr=0.1), lambda params: torch.optim.SGD(params, 0.1, maximize=True)]
    offsets = dict(offsets=torch.tensor([0, 3, 5])) if pooled else {}
    ids = torch.tensor([1, 2, 1, 3, 1])
    for embedding, make, sign in zip((down, up), makes, (1, -1), strict=True):
        optimizer = oneemb.Optimizer(make(embedding.parameters()), [embedding])
        for _ in range(3):
            rows = embedding(ids, **offsets)
            (sign * rows * torch.arange(1, 1 + DIM)).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
    assert torch.equal(rows_of(up, range(4)), rows_of(down, range(4)))


@pytest.mark.parametrize("held", [False, True])
def test_gradients_are_summed_before_they_are_negated(made, held):
    """The order is torch's: -0.0 - 0.1 * -(1 - 1) is 0.0, and -0.0 - 0.1 * (-1 + 1) is -0.0."""
    embedding = made(tables=[oneemb.make_table(oneemb.make_constant_initializer(-0.0))])
    optimizer = oneemb.Optimizer(torch.optim.SGD(embedding.parameters(), 0.1, maximize=True), [embedding])
    grad = torch.tensor([[1.0], [-1.0]]).repeat(1, DIM)
    rows = embedding(torch.tensor([1, 1]))
    rows.backward(grad if held else grad.clone())
    optimizer.step()
    assert not rows_of(embedding, [1]).signbit().any()


@pytest.mark.parametrize(
    "make, change, message",
    [
        (torch.optim.Adam, dict(amsgrad=True), "amsgrad must stay off, .*, got True"),
        (torch.optim.SGD, dict(momentum=0.9), "momentum must stay off, .*, got 0.9"),
    ],
)
def test_a_change_that_rows_cannot_follow_is_refused_before_anything_changes(made, make, change, message):
    embedding, dense = made(), torch.nn.Linear(DIM, 1)
    optimizer = oneemb.Optimizer(make([*embedding.parameters(), *dense.parameters()], lr=0.1), [embedding])
    before = rows_of(embedding, [1]), dense.weight.detach().clone()
    dense(embedding(torch.tensor([1]))).sum().backward()
    optimizer.param_groups[0].update(change)
    with pytest.raises(ValueError, match=message):
        optimizer.step()
    assert torch.equal(rows_of(embedding, [1]), before[0]) and torch.equal(dense.weight, before[1])
    assert embedding.stats()["step"] == 0


def test_classes_that_rows_cannot_follow_are_refused_by_name(made):
    class MyAdam(torch.optim.Adam):
        pass

    embedding = made()
    for cls in (torch.optim.Rprop, MyAdam):
        with pytest.raises(TypeError, match=f"cannot be stepped by .*{cls.__name__}"):
            oneemb.Optimizer(cls(embedding.parameters()), [embedding])


# ---- snapshots between forward and step ------------------------------------------------------------------------------


@pytest.mark.parametrize("store", ["device", "host", "ssd"])
@pytest.mark.parametrize("end", ["step", "zero_grad"])
def test_a_retained_graph_gives_its_rows_a_gradient_wherever_they_are_by_then(tmp_path, store, end):
    make_store = {
        "device": oneemb.make_device_mem_store_options,
        "host": lambda path: oneemb.make_cached_host_mem_store_options(1, path),
        "ssd": lambda path: oneemb.make_cached_ssd_store_options(1, path),
    }[store]
    embedding = oneemb.MultiTableEmbedding(
        "rows", 256, torch.float32, torch.int64, [oneemb.make_table(oneemb.make_constant_initializer(1.0))],
        make_store(str(tmp_path / "rows")),
    )  # fmt: skip
    optimizer = oneemb.Optimizer(torch.optim.SGD(embedding.parameters(), lr=0.5), [embedding])
    rows = embedding(torch.arange(10)[:, None])
    first, second = rows.sum(), 100 * rows.sum()
    first.backward(retain_graph=True)
    optimizer.step() if end == "step" else optimizer.zero_grad()
    for begin in range(10, 4000, 500):  # other rows take the slots of a cache of a thousand
        embedding(torch.arange(begin, begin + 500)[:, None])
    second.backward()
    optimizer.step()
    optimizer.zero_grad()
    expected = torch.ones(4010, 256)
    expected[:10] -= 0.5 * (102 if end == "step" else 100)  # as torch's, gradients stay until zero_grad
    assert torch.equal(embedding.eval()(torch.arange(4010)[:, None]).reshape(4010, 256), expected)
    with pytest.raises(RuntimeError, match="second time"):
        second.backward()


def test_weights_of_bags_get_no_gradient_from_rows_that_were_replaced(made):
    embedding = made()
    embedding(torch.tensor([1, 2]))
    embedding.save_snapshot("s")
    embedding.requires_grad_(False)
    weights = torch.ones(2, requires_grad=True)
    bag = embedding(torch.tensor([1, 2]), offsets=torch.tensor([0, 2]), per_sample_weights=weights)
    embedding.clear()
    with pytest.raises(oneemb.StorageError, match="were replaced since"):
        bag.sum().backward()
    assert weights.grad is None


def test_a_kept_loss_keeps_none_of_a_steps_arrays(made):
    embedding = made()
    optimizer = oneemb.Optimizer(torch.optim.SGD(embedding.parameters(), lr=1.0), [embedding])
    ids = torch.arange(500_000)
    kept = []
    tracemalloc.start()
    try:
        for step in range(6):
            loss = embedding(ids).sum()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            kept.append(loss)
            if step == 1:
                before = tracemalloc.get_traced_memory()[0]
        grown = tracemalloc.get_traced_memory()[0] - before
    finally:
        tracemalloc.stop()
    assert grown < 10_000_000  # slots and places of the four steps alone take 24 MB


def test_a_load_between_forward_and_backward_is_an_error_and_training_goes_on(made):
    embedding = made()
    optimizer = oneemb.Optimizer(torch.optim.SGD(embedding.parameters(), lr=1.0), [embedding])
    before = rows_of(embedding, [1, 2])
    embedding(torch.tensor([1]))
    embedding.save_snapshot("s")
    rows = embedding(torch.tensor([1, 2]))
    embedding.load_snapshot("s")
    with pytest.raises(oneemb.StorageError, match="were replaced since .*; look the ids up again"):
        rows.sum().backward()
    assert torch.equal(rows_of(embedding, [1, 2]), before) and embedding.stats()["rows"] == 1
    optimizer.zero_grad()
    embedding(torch.tensor([1])).sum().backward()
    optimizer.step()
    optimizer.zero_grad()
    assert torch.equal(rows_of(embedding, [1]), before[:1] - 1) and embedding.stats()["device"]["pinned"] == 0


def test_a_load_between_backward_and_step_drops_the_gradients(made):
    embedding = made()
    optimizer = oneemb.Optimizer(torch.optim.SGD(embedding.parameters(), lr=1.0), [embedding])
    embedding(torch.tensor([1]))
    embedding.save_snapshot("s")
    before = rows_of(embedding, [1])
    embedding(torch.tensor([1])).sum().backward()
    embedding.load_snapshot("s")
    optimizer.step()
    optimizer.zero_grad()
    assert torch.equal(rows_of(embedding, [1]), before) and embedding.stats()["device"]["pinned"] == 0


@pytest.mark.parametrize("clipped", [False, True])
@pytest.mark.parametrize("by", ["hook", "thread"])
def test_rows_that_are_replaced_within_torchs_own_step_are_not_trained_by_it(made, by, clipped):
    embedding = made()
    optimizer = torch.optim.SGD(embedding.parameters(), lr=1.0)
    ids = torch.arange(8)
    embedding(ids.flip(0))
    embedding.save_snapshot("in another order")
    embedding.clear()
    embedding(ids[:2]).sum().backward()
    if clipped:
        torch.nn.utils.clip_grad_norm_(embedding.parameters(), 0.1)

    def load(*_):
        if by == "hook":
            embedding.load_snapshot("in another order")
        else:
            thread = threading.Thread(target=embedding.load_snapshot, args=("in another order",))
            thread.start()
            thread.join()

    handle = optimizer.register_step_post_hook(load)
    before = rows_of(embedding, ids)
    with pytest.raises(oneemb.StorageError, match="were replaced since") as caught:
        optimizer.step()
    assert caught.value.__notes__ == ["SGD.step() has stepped the dense parameters, but not all rows"]
    assert torch.equal(rows_of(embedding, ids), before) and embedding.stats()["device"]["pinned"] == 0
    handle.remove()
    optimizer.zero_grad()
    embedding(ids[:1]).sum().backward()
    optimizer.step()
    assert torch.equal(rows_of(embedding, ids[:1]), before[:1] - 1)


def test_a_snapshot_between_forward_and_step_holds_the_rows_before_it(made):
    embedding = made()
    optimizer = oneemb.Optimizer(torch.optim.SGD(embedding.parameters(), lr=1.0), [embedding])
    before = rows_of(embedding, [1])
    rows = embedding(torch.tensor([1]))
    embedding.save_snapshot("s")
    rows.sum().backward()
    optimizer.step()
    optimizer.zero_grad()
    assert torch.equal(rows_of(embedding, [1]), before - 1)
    embedding.load_snapshot("s")
    assert torch.equal(rows_of(embedding, [1]), before)


@pytest.mark.parametrize("late", [False, True])
def test_a_hook_of_a_subclass_with_a_step_of_its_own_is_called_once_a_step(made, late):
    class WithClosure(oneemb.Optimizer):
        def step(self, closure=None):
            return super().step(closure)

    _, _, base = trained(made)
    base.step()  # Torch has seen the class itself too.
    embedding = made("more")
    optimizer = WithClosure(torch.optim.SGD(embedding.parameters(), lr=0.5), [embedding])
    if late:
        optimizer.step()
    calls = []
    optimizer.register_step_pre_hook(lambda *_: calls.append("before"))
    optimizer.register_step_post_hook(lambda *_: calls.append("after"))
    optimizer.step()
    assert calls == ["before", "after"]


def test_a_hook_that_a_closure_registers_is_called_after_the_same_step_as_in_torch(made):
    weight, embedding = torch.nn.Parameter(torch.ones(1)), made()
    called = []
    for optimizer in (
        torch.optim.SGD([weight], lr=0.5), oneemb.Optimizer(torch.optim.SGD(embedding.parameters(), lr=0.5)),
    ):  # fmt: skip
        calls = []

        def closure(optimizer=optimizer, calls=calls):
            if not calls:
                optimizer.register_step_pre_hook(lambda *_: calls.append("before"))
                optimizer.register_step_post_hook(lambda *_: calls.append("after"))
            calls.append("closure")

        for _ in range(2):
            optimizer.step(closure)
        called.append(calls)
    assert called[0] == called[1] == ["closure", "after", "before", "closure", "after"]


def test_the_optimizers_own_state_dict_is_torchs(made):
    embedding, mlp, optimizer = trained(made)
    state = copy.deepcopy(optimizer.state_dict())
    assert state["param_groups"] == optimizer.optimizer.state_dict()["param_groups"]
    mlp(embedding(torch.tensor([7]))).sum().backward()
    optimizer.step()
    optimizer.zero_grad()
    optimizer.load_state_dict(state)
    assert all(float(one["step"]) == 1 for one in optimizer.optimizer.state.values())


def test_a_rate_that_rows_cannot_follow_stops_the_step_before_any_row_moves(made):
    first, second = made("first"), made("second")
    groups = [{"params": first.parameters()}, {"params": second.parameters()}]
    optimizer = oneemb.Optimizer(oneemb.optim.Ftrl(groups, lr=0.1), [first, second])
    ids = torch.arange(4)
    (first(ids).sum() + second(ids).sum()).backward()
    before = rows_of(first, ids)
    optimizer.param_groups[1]["lr"] = 0.0
    with pytest.raises(ValueError, match="lr must be above 0, got 0.0"):
        optimizer.step()
    assert torch.equal(rows_of(first, ids), before) and first.stats()["step"] == 0


@pytest.mark.parametrize("attach_first", [True, False])
def test_state_that_names_no_optimizer_is_taken_by_one_of_its_width(made, tmp_path, attach_first):
    values = torch.arange(4 * 2 * DIM, dtype=torch.float32).reshape(4, 2 * DIM)
    with oneemb.make_persistent_table_writer(
        tmp_path / "rows", "old", torch.int64, torch.float32, 2 * DIM, embedding_dim=DIM
    ) as writer:
        writer.write(torch.arange(4).numpy(), values.numpy())
    embedding = made()
    adagrad = torch.optim.Adagrad(embedding.parameters(), lr=0.1)
    if attach_first:
        optimizer = oneemb.Optimizer(adagrad, [embedding])
        embedding.load_snapshot("old")
    else:
        embedding.load_snapshot("old")
        optimizer = oneemb.Optimizer(adagrad, [embedding])
    embedding(torch.arange(4)).sum().backward()
    optimizer.step()
    optimizer.zero_grad()
    expected = values[:, :DIM] - 0.1 / ((values[:, DIM:] + 1).sqrt() + 1e-10)
    torch.testing.assert_close(rows_of(embedding, torch.arange(4)), expected, rtol=1e-6, atol=0)


def test_an_interrupt_at_the_end_of_attaching_leaves_an_embedding_that_can_be_attached(made, monkeypatch):
    embedding = made()
    attach_rows = row_step.attach_rows

    def attach_and_interrupt(*arguments):
        attach_rows(*arguments)
        os.kill(os.getpid(), signal.SIGINT)

    with monkeypatch.context() as patched:
        patched.setattr(row_step, "attach_rows", attach_and_interrupt)
        with pytest.raises(KeyboardInterrupt):
            oneemb.Optimizer(torch.optim.Adam(embedding.parameters()), [embedding])
    optimizer = oneemb.Optimizer(torch.optim.Adam(embedding.parameters()), [embedding])
    embedding(torch.arange(3)).sum().backward()
    optimizer.step()
    assert embedding.stats()["step"] == 1
