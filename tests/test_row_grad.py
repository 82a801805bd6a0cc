"""Row gradients in autograd: what torch's own tools do to the table of an `nn.Embedding` they do to rows."""

import math

import pytest
import torch
from torch.nn.utils import clip_grad_norm_, clip_grad_value_, get_total_norm

import oneemb
from oneemb.graph.ops.grads import Summed
from oneemb.graph.ops.row_grad import RowGrad
from tests.support.models import make_embedding
from tests.support.pairwise import diagonal

IDS, DIM, STEPS = 20, 4, 6
STORES = ["device", "ssd"]


class Pair:
    """The same model twice: with rows of oneemb and with nn.Embedding, each with an optimizer of torch's own."""

    def __init__(self, path, make=lambda parameters: torch.optim.SGD(parameters, lr=0.5), store="device", joined=False):
        torch.manual_seed(0)
        self.rows = make_embedding(path / "rows", dim=DIM, store=store)
        self.table = torch.nn.Embedding(IDS, DIM)
        with torch.no_grad():
            self.table.weight.copy_(self.rows.eval()(torch.arange(IDS)))
        self.rows.train()
        self.heads = [torch.nn.Linear(DIM, 1), torch.nn.Linear(DIM, 1)]
        self.heads[1].load_state_dict(self.heads[0].state_dict())
        self.models = list(zip((self.rows, self.table), self.heads, strict=True))
        self.optimizers = [make(self.parameters(i)) for i in (0, 1)]
        if joined:
            self.optimizers[0] = oneemb.Optimizer(self.optimizers[0])

    def parameters(self, i):
        embedding, head = self.models[i]
        return [embedding.weight, *head.parameters()]

    def loss(self, i, ids, scale=1.0):
        embedding, head = self.models[i]
        return head(embedding(ids)).square().mean() * scale

    def check(self):
        with torch.no_grad():
            rows = self.rows.eval()(torch.arange(IDS))
        self.rows.train()
        torch.testing.assert_close(rows, self.table.weight.detach(), rtol=1e-5, atol=1e-6)
        for mine, its in zip(*(head.parameters() for head in self.heads), strict=True):
            torch.testing.assert_close(mine, its, rtol=1e-5, atol=1e-6)


def batches(seed=1, size=7):
    generator = torch.Generator().manual_seed(seed)
    return [torch.randint(0, IDS, (size,), generator=generator) for _ in range(STEPS)]


def plain(pair, i, optimizer, ids):
    optimizer.zero_grad()
    pair.loss(i, ids).backward()
    optimizer.step()


def clipped(pair, i, optimizer, ids):
    optimizer.zero_grad()
    pair.loss(i, ids, 100.0).backward()
    pair.norms[i].append(clip_grad_norm_(pair.parameters(i), 0.3))
    optimizer.step()


def clipped_without_foreach(pair, i, optimizer, ids):
    optimizer.zero_grad()
    pair.loss(i, ids, 100.0).backward()
    pair.norms[i].append(clip_grad_norm_(pair.parameters(i), 0.3, foreach=False))
    optimizer.step()


def clipped_by_value(pair, i, optimizer, ids):
    optimizer.zero_grad()
    pair.loss(i, ids, 100.0).backward()
    clip_grad_value_(pair.parameters(i), 0.01)
    optimizer.step()


def clipped_by_the_largest(pair, i, optimizer, ids):
    optimizer.zero_grad()
    pair.loss(i, ids, 100.0).backward()
    pair.norms[i].append(get_total_norm([p.grad for p in pair.parameters(i)], float("inf")))
    clip_grad_norm_(pair.parameters(i), 0.3, norm_type=float("inf"))
    optimizer.step()


def accumulated(pair, i, optimizer, ids):
    optimizer.zero_grad()
    for part in ids.split(2):
        pair.loss(i, part, 0.25).backward()
    optimizer.step()


def never_zeroed(pair, i, optimizer, ids):
    pair.loss(i, ids, 0.1).backward()
    optimizer.step()


def stepped_twice(pair, i, optimizer, ids):
    optimizer.zero_grad()
    pair.loss(i, ids).backward()
    optimizer.step()
    optimizer.step()


def zeroed_by_the_model(pair, i, optimizer, ids):
    for module in pair.models[i]:
        module.zero_grad()
    pair.loss(i, ids).backward()
    optimizer.step()


def zeroed_in_place(pair, i, optimizer, ids):
    pair.loss(i, ids).backward()
    optimizer.zero_grad(set_to_none=False)
    pair.loss(i, ids).backward()
    optimizer.step()
    optimizer.zero_grad(set_to_none=False)


def looked_at_by_autograd_grad(pair, i, optimizer, ids):
    optimizer.zero_grad()
    loss = pair.loss(i, ids)
    seen = torch.autograd.grad(loss, pair.parameters(i), retain_graph=True)
    pair.norms[i].append(get_total_norm(seen))
    loss.backward()
    optimizer.step()


def hooked(pair, i, optimizer, ids):
    optimizer.zero_grad()
    handle = pair.parameters(i)[0].register_hook(lambda grad: grad * 3)
    pair.loss(i, ids).backward()
    handle.remove()
    optimizer.step()


def checkpointed(pair, i, optimizer, ids):
    optimizer.zero_grad()
    torch.utils.checkpoint.checkpoint(pair.loss, i, ids, use_reentrant=False).backward()
    optimizer.step()


def closure(pair, i, optimizer, ids):
    def compute():
        optimizer.zero_grad()
        loss = pair.loss(i, ids)
        loss.backward()
        return loss

    pair.norms[i].append(optimizer.step(compute))


def averaged_by_hand(pair, i, optimizer, ids):
    optimizer.zero_grad()
    pair.loss(i, ids).backward()
    for parameter in pair.parameters(i):
        parameter.grad /= 4
        parameter.grad.mul_(torch.tensor(2.0))
    optimizer.step()


def retained(pair, i, optimizer, ids):
    optimizer.zero_grad()
    loss = pair.loss(i, ids)
    loss.backward(retain_graph=True)
    loss.backward()
    optimizer.step()


LOOPS = [
    plain, clipped, clipped_without_foreach, clipped_by_value, clipped_by_the_largest, accumulated, never_zeroed,
    stepped_twice, zeroed_by_the_model, zeroed_in_place, looked_at_by_autograd_grad, hooked, checkpointed, closure,
    averaged_by_hand, retained,
]  # fmt: skip


@pytest.mark.parametrize(
    ("loop", "store", "joined"),
    diagonal(LOOPS, STORES, [False, True]),
    ids=lambda value: getattr(value, "__name__", str(value)),
)
def test_a_loop_of_torch_trains_rows_as_a_table(tmp_path, loop, store, joined):
    pair = Pair(tmp_path, store=store, joined=joined)
    pair.norms = [], []
    for ids in batches():
        for i, optimizer in enumerate(pair.optimizers):
            loop(pair, i, optimizer, ids)
        pair.check()
    for mine, its in zip(*pair.norms, strict=True):
        torch.testing.assert_close(mine.detach(), its.detach(), rtol=1e-5, atol=1e-6)
    assert pair.rows.stats()["step"] == STEPS * (2 if loop is stepped_twice else 1)
    pair.optimizers[0].zero_grad()
    assert pair.rows.weight.grad is None or not pair.rows.weight.grad.passes
    assert pair.rows.stats()["device"]["pinned"] == 0


@pytest.mark.parametrize("joined", [False, True], ids=["torch's own", "oneemb.Optimizer"])
def test_a_grad_scaler_unscales_rows_and_skips_what_overflows(tmp_path, joined):
    pair = Pair(tmp_path, joined=joined)
    scalers = [torch.amp.GradScaler("cpu", init_scale=2.0**8, growth_interval=2) for _ in pair.models]
    for step, ids in enumerate(batches()):
        for i, (optimizer, scaler) in enumerate(zip(pair.optimizers, scalers, strict=True)):
            optimizer.zero_grad()
            loss = pair.loss(i, ids, float("inf") if step == 3 else 1.0)
            scaler.scale(loss).backward()
            if step % 2:
                scaler.unscale_(optimizer)
                clip_grad_norm_(pair.parameters(i), 0.1)
            scaler.step(optimizer)
            scaler.update()
        pair.check()
        assert scalers[0].get_scale() == scalers[1].get_scale()
    assert pair.rows.stats()["step"] == STEPS - 1


def test_rows_are_trained_in_eval_mode_too_and_inserted_by_the_step(tmp_path):
    pair = Pair(tmp_path)
    pair.rows.eval()
    for ids in batches():
        for i, optimizer in enumerate(pair.optimizers):
            optimizer.zero_grad()
            loss = pair.loss(i, ids)
            known = pair.rows.stats()["rows"]
            loss.backward()
            assert pair.rows.stats()["rows"] == known
            optimizer.step()
    pair.check()
    assert pair.rows.stats()["rows"] == len({id for ids in batches() for id in ids.tolist()})


@pytest.mark.parametrize(
    "make",
    [
        lambda optimizer: torch.optim.lr_scheduler.StepLR(optimizer, 2, 0.5),
        lambda optimizer: torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.5, total_steps=STEPS),
    ],
    ids=["StepLR", "OneCycleLR"],
)
def test_a_scheduler_takes_the_joined_optimizer(tmp_path, make):
    pair = Pair(tmp_path, lambda parameters: torch.optim.SGD(parameters, lr=0.5, momentum=0.9), joined=True)
    schedulers = [make(optimizer) for optimizer in pair.optimizers]
    for _ in range(STEPS):
        for i, (optimizer, scheduler) in enumerate(zip(pair.optimizers, schedulers, strict=True)):
            plain(pair, i, optimizer, torch.arange(IDS))
            scheduler.step()
    pair.check()
    assert isinstance(pair.optimizers[0], torch.optim.Optimizer)


def test_an_optimizer_that_comes_with_the_first_step_gives_rows_their_state(tmp_path):
    pair = Pair(tmp_path, lambda parameters: torch.optim.Adagrad(parameters, lr=0.1), store="ssd")
    for ids in batches():
        for i, optimizer in enumerate(pair.optimizers):
            plain(pair, i, optimizer, ids)
    pair.check()
    assert pair.rows.store.format.optimizer == "adagrad" and pair.rows.optimizer is pair.optimizers[0]


def clips(optimizer, args, kwargs):
    clip_grad_norm_([parameter for group in optimizer.param_groups for parameter in group["params"]], 0.01)


def drops(optimizer, args, kwargs):
    optimizer.zero_grad()


@pytest.mark.parametrize("joined", [False, True])
@pytest.mark.parametrize("hook", [clips, drops])
def test_a_hook_before_the_step_sees_the_gradients_of_rows(tmp_path, joined, hook):
    pair = Pair(tmp_path)
    for optimizer in pair.optimizers:
        optimizer.register_step_pre_hook(hook)
    if joined:
        pair.optimizers[0] = oneemb.Optimizer(pair.optimizers[0])
    for ids in batches():
        for i, optimizer in enumerate(pair.optimizers):
            optimizer.zero_grad()
            pair.loss(i, ids).backward()
            optimizer.step()
    pair.check()


def test_a_gradient_that_is_zeroed_after_a_step_that_raised_is_not_used_by_the_next(tmp_path):
    pair = Pair(tmp_path)
    (ids, *_) = batches()

    def fail(*args):
        raise RuntimeError("of a hook")

    for i, optimizer in enumerate(pair.optimizers):
        pair.loss(i, ids).backward()
        handle = optimizer.register_step_post_hook(fail) if i == 0 else optimizer.register_step_pre_hook(fail)
        before = [parameter.detach().clone() for parameter in pair.parameters(i)[1:]]
        with pytest.raises(RuntimeError, match="of a hook"):
            optimizer.step()
        handle.remove()
        for parameter, value in zip(pair.parameters(i)[1:], before, strict=True):
            parameter.data.copy_(value)
        optimizer.zero_grad()
        pair.heads[i](torch.ones(1, DIM)).sum().backward()
        optimizer.step()
    pair.check()


def test_gradients_of_a_step_that_raised_are_dropped_with_a_warning_while_its_error_is_kept(tmp_path):
    pair = Pair(tmp_path)
    (ids, *_) = batches()
    optimizer = pair.optimizers[0]

    def fail(*args):
        raise RuntimeError("of a hook")

    pair.loss(0, ids).backward()
    handle = optimizer.register_step_post_hook(fail)
    with pytest.raises(RuntimeError, match="of a hook") as kept:
        optimizer.step()
    handle.remove()
    with pytest.warns(UserWarning, match=r"last step of SGD has raised, .* the gradients .* of 'items', are"):
        optimizer.step()
    assert kept.value.args and pair.rows.stats()["step"] == 0 and pair.rows.stats()["device"]["pinned"] == 0


@pytest.mark.parametrize("overflows", [False, True])
@pytest.mark.parametrize("kind", [torch.optim.SGD, torch.optim.Adagrad])
def test_a_fused_optimizer_unscales_rows_too(tmp_path, kind, overflows):
    pair = Pair(tmp_path, lambda parameters: kind(parameters, lr=0.1, fused=True))
    for ids in batches():
        for i, optimizer in enumerate(pair.optimizers):
            scaler = torch.amp.GradScaler("cpu", init_scale=2.0**16)
            optimizer.zero_grad()
            scaler.scale(pair.loss(i, ids, 1e38 if overflows else 1.0)).backward()
            scaler.step(optimizer)
            scaler.update()
            assert scaler.get_scale() == 2.0 ** (15 if overflows else 16)
    pair.check()


def test_a_state_dict_that_is_assigned_leaves_the_weight_what_it_is(tmp_path):
    pair = Pair(tmp_path)
    model = torch.nn.Sequential(pair.rows, pair.heads[0])
    weight = pair.rows.weight
    model.load_state_dict(model.state_dict(), assign=True)
    assert pair.rows.weight is weight and dict(model.named_parameters())["0.weight"] is weight


def test_norms_of_what_is_not_pinned_any_more(tmp_path):
    pair = Pair(tmp_path)
    first, second, *_ = batches()
    norms = []
    for i, optimizer in enumerate(pair.optimizers):
        pair.loss(i, first).backward()
        pair.loss(i, second).backward()
        optimizer.step()
        norms.append(pair.models[i][0].weight.grad.norm())
    torch.testing.assert_close(*norms)


def test_a_step_that_raises_keeps_the_gradients(tmp_path):
    pair = Pair(tmp_path)
    (ids, *_) = batches()
    for i, optimizer in enumerate(pair.optimizers):
        optimizer.zero_grad()
        pair.loss(i, ids).backward()

        def fail(*args):
            raise RuntimeError("of a hook")

        handle = optimizer.register_step_pre_hook(fail)
        with pytest.raises(RuntimeError, match="of a hook"):
            optimizer.step()
        handle.remove()
    assert pair.rows.stats()["step"] == 0
    for optimizer in pair.optimizers:
        optimizer.step()
    pair.check()


def test_the_gradient_is_given_as_plain_tensors(tmp_path):
    pair = Pair(tmp_path)
    ids = torch.tensor([3, 5, 3])
    for i in (0, 1):
        pair.loss(i, ids).backward()
    grad = pair.rows.weight.grad
    assert isinstance(grad, RowGrad) and grad.shape == pair.rows.weight.shape
    tables, found = grad.row_keys()
    assert tables.tolist() == [0, 0] and found.tolist() == [3, 5]
    torch.testing.assert_close(grad.row_values(), pair.table.weight.grad[[3, 5]])
    torch.testing.assert_close(grad.abs().max(), pair.table.weight.grad.abs().max())
    assert torch.isfinite(grad).all() and "1 backward passes" in repr(grad)


def regularised(embedding):
    return embedding.weight.square().sum()


def with_a_second_derivative(embedding):
    return embedding(torch.tensor([1])).square().sum()


@pytest.mark.parametrize(
    ("use", "match"),
    [
        (lambda e: e.weight.square().sum().backward(), "must not get a dense gradient.*compute a"),
        (lambda e: (e(torch.tensor([1])).sum() + e.weight.sum()).backward(), "must not get a dense gradient"),
        (lambda e: e(torch.tensor([1])).square().sum().backward(create_graph=True), "leave out create_graph=True"),
        (lambda e: e(torch.tensor([1])).sum().backward() or e.weight.grad.copy_(torch.zeros(0, DIM)), "is not known"),
        (lambda e: e(torch.tensor([1])).sum().backward() or e.weight.grad * torch.ones(DIM), "by a number"),
        (lambda e: e(torch.tensor([1])).sum().backward() or e.weight.grad.norm(-math.inf), "must be above 0, got -inf"),
    ],
    ids=["regulariser", "regulariser beside a lookup", "create_graph", "copy_", "times a tensor", "least of all"],
)
def test_what_rows_cannot_do_is_refused_with_what_to_do(tmp_path, use, match):
    with pytest.raises((RuntimeError, NotImplementedError), match=match):
        use(make_embedding(tmp_path / "rows", dim=DIM))


def test_rows_of_one_embedding_are_trained_by_one_optimizer(tmp_path):
    embedding = make_embedding(tmp_path / "rows", dim=DIM)
    first, second = (torch.optim.SGD([embedding.weight], lr=0.1) for _ in range(2))
    embedding(torch.tensor([1])).sum().backward()
    first.step()
    with pytest.raises(ValueError, match="is trained by another SGD"):
        second.step()
    embedding.detach_optimizer()
    second.step()
    assert embedding.stats()["step"] == 2


# ---- an optimizer leaves, another comes -----------------------------------------------------------------------------


def trained_with_adam(path, store="device", make=torch.optim.Adam):
    pair = Pair(path, lambda parameters: make(parameters, lr=0.1), store=store)
    for _ in range(STEPS):
        for i, optimizer in enumerate(pair.optimizers):
            plain(pair, i, optimizer, torch.arange(IDS))
    return pair


@pytest.mark.parametrize("store", STORES)
def test_an_optimizer_of_the_same_class_goes_on_with_the_state(tmp_path, store):
    pair = trained_with_adam(tmp_path, store)
    pair.rows.detach_optimizer()
    states = [optimizer.state_dict() for optimizer in pair.optimizers]
    pair.optimizers = [torch.optim.Adam(pair.parameters(i), lr=0.1) for i in (0, 1)]
    for optimizer, state in zip(pair.optimizers, states, strict=True):
        optimizer.load_state_dict(state)
    for i, optimizer in enumerate(pair.optimizers):
        plain(pair, i, optimizer, torch.arange(IDS))
    pair.check()
    assert pair.rows.stats()["step"] == STEPS + 1


@pytest.mark.parametrize("store", STORES)
def test_state_that_is_dropped_begins_anew_with_any_optimizer(tmp_path, store):
    pair = trained_with_adam(tmp_path, store)
    with pytest.raises(ValueError, match="is trained by another Adam"):
        plain(pair, 0, torch.optim.Adagrad(pair.parameters(0), lr=0.1), torch.arange(IDS))
    pair.rows.detach_optimizer(state="drop")
    assert pair.rows.store.format.state_width == 0 and pair.rows.stats()["step"] == 0
    pair.optimizers = [torch.optim.Adagrad(pair.parameters(i), lr=0.1) for i in (0, 1)]
    for ids in batches():
        for i, optimizer in enumerate(pair.optimizers):
            plain(pair, i, optimizer, ids)
    pair.check()


def test_adamw_goes_on_with_the_moments_of_adam(tmp_path):
    pair = trained_with_adam(tmp_path)
    with pytest.raises(ValueError, match="state must be 'keep', 'drop' or"):
        pair.rows.detach_optimizer(state="adagrad")
    pair.rows.detach_optimizer(state="adamw")
    after = [torch.optim.AdamW(pair.parameters(i), lr=0.1) for i in (0, 1)]
    state = pair.optimizers[1].state_dict()
    after[1].load_state_dict({"state": state["state"], "param_groups": after[1].state_dict()["param_groups"]})
    before = pair.optimizers[0].state_dict()
    after[0].load_state_dict({"state": before["state"], "param_groups": after[0].state_dict()["param_groups"]})
    for i, optimizer in enumerate(after):
        plain(pair, i, optimizer, torch.arange(IDS))
    pair.check()


@pytest.mark.parametrize("store", STORES)
@pytest.mark.parametrize("attached", [False, True])
def test_weights_alone_are_loaded_from_a_snapshot_of_any_optimizer(tmp_path, store, attached):
    pair = trained_with_adam(tmp_path / "trained", store)
    pair.rows.save_snapshot("s")
    expected = pair.rows(torch.arange(IDS)).detach().clone()
    pair.rows.close()
    other = Pair(tmp_path / "trained", lambda parameters: torch.optim.Adagrad(parameters, lr=0.1), store=store)
    if attached:
        plain(other, 0, other.optimizers[0], torch.arange(3))
        with pytest.raises(oneemb.StorageError, match="holds the state of 'adam'"):
            other.rows.load_snapshot("s")
    other.rows.load_snapshot("s", weights_only=True)
    assert torch.equal(other.rows(torch.arange(IDS)), expected) and other.rows.stats()["step"] == 0
    plain(other, 0, other.optimizers[0], torch.arange(3))
    assert other.rows.store.format.optimizer == "adagrad" and other.rows.stats()["step"] == 1


def test_a_state_dict_holds_no_weight_and_may_be_mapped(tmp_path):
    pair = Pair(tmp_path)
    plain(pair, 0, pair.optimizers[0], torch.arange(IDS))
    model = torch.nn.Sequential(pair.rows, pair.heads[0])
    state = {name: value.clone() for name, value in model.state_dict().items()}
    assert "0.weight" not in state
    expected = pair.rows(torch.arange(IDS)).detach().clone()
    plain(pair, 0, pair.optimizers[0], torch.arange(IDS))
    model.load_state_dict({**state, "0.weight": torch.zeros(0, DIM)})  # as a tool has it that lists all parameters
    assert torch.equal(pair.rows(torch.arange(IDS)), expected)
    assert sum(parameter.numel() for parameter in model.parameters()) == DIM + 1 and pair.rows.weight.ndim == 2


# ---- a step in the backward pass ------------------------------------------------------------------------------------


@pytest.mark.parametrize("store", STORES)
def test_fused_rows_are_updated_in_backward_with_the_bits_of_a_step(tmp_path, store):
    embeddings = [make_embedding(tmp_path / name, dim=DIM, store=store) for name in "ab"]
    optimizers = [
        oneemb.Optimizer(torch.optim.Adam(embedding.parameters(), lr=0.1), [embedding], fused=fused)
        for embedding, fused in zip(embeddings, (False, True), strict=True)
    ]
    for ids in batches():
        for embedding in embeddings:
            embedding(ids).square().sum().backward()
        optimizers[0].step()
        optimizers[0].zero_grad()
    rows = [embedding.eval()(torch.arange(IDS)) for embedding in embeddings]
    assert torch.equal(*rows) and embeddings[1].stats()["step"] == STEPS == optimizers[1].taken
    assert embeddings[1].stats()["device"]["pinned"] == 0
    optimizers[1].step()  # There is nothing left to step.
    assert embeddings[1].stats()["step"] == STEPS


@pytest.mark.parametrize("rows_first", [True, False])
def test_a_gradient_that_another_parameter_has_too_is_never_wrong(tmp_path, rows_first):
    """It is not copied for a step in the backward pass: a hook that changes it before that is found out."""
    embedding = make_embedding(tmp_path / "rows", dim=DIM)
    positions = torch.nn.Parameter(torch.zeros(3, DIM))

    def grow(parameter):
        parameter.grad.mul_(100.0)

    positions.register_post_accumulate_grad_hook(grow)
    optimizer = oneemb.Optimizer(torch.optim.SGD(embedding.parameters(), lr=0.5), [embedding], fused=True)
    rows = embedding(torch.arange(3))
    before = rows.detach().clone()
    parts = [rows[None], positions[None]]
    total = sum(parts if rows_first else parts[::-1]).sum()
    try:
        total.backward()
    except RuntimeError as error:
        assert "was changed in place since its backward pass" in str(error)
    else:
        assert torch.equal(embedding.eval()(torch.arange(3)), before - 0.5)
    assert optimizer is not None


def test_what_needs_a_gradient_after_a_fused_step_is_refused(tmp_path):
    embedding = make_embedding(tmp_path / "rows", dim=DIM)
    optimizer = oneemb.Optimizer(torch.optim.SGD(embedding.parameters(), lr=0.1), [embedding], fused=True)
    embedding(torch.tensor([1])).sum().backward()
    with pytest.raises(RuntimeError, match=r"updated in the backward pass \(fused=True\)"):
        clip_grad_norm_(embedding.parameters(), 1.0)
    with pytest.raises(RuntimeError, match="fused=True"):
        scaler = torch.amp.GradScaler("cpu")
        scaler.scale(torch.ones(1))
        scaler.unscale_(optimizer)
    embedding(torch.tensor([1])).sum().backward()
    optimizer.zero_grad()
    assert embedding.stats()["step"] == 2 and embedding.weight.grad is None


def test_an_embedding_inside_or_before_ddp_of_one_process_gets_its_gradient(tmp_path):
    torch.distributed.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    try:
        model = torch.nn.Sequential(make_embedding(tmp_path / "rows", dim=DIM), torch.nn.Linear(DIM, 1))
        ddp, head = (torch.nn.parallel.DistributedDataParallel(module) for module in (model, model[1]))
        for outputs in (ddp(torch.tensor([1, 2])), head(model[0](torch.tensor([1, 2])))):
            model[0].weight.grad = None
            outputs.sum().backward()
            assert isinstance(model[0].weight.grad, RowGrad)
    finally:
        torch.distributed.destroy_process_group()


def test_a_gradient_that_a_hook_keeps_and_changes_before_the_step_is_an_error(tmp_path):
    embedding = make_embedding(tmp_path, dim=DIM)
    optimizer = torch.optim.SGD(embedding.parameters(), lr=0.5)
    rows, kept = embedding(torch.tensor([3, 5])), []
    rows.register_hook(kept.append)
    rows.square().sum().backward()
    weights = rows.detach().clone()
    kept[0].fill_(100.0)
    before = embedding.stats()["step"]
    if torch.__version__.startswith("2.9."):  # It hands over gradients in a way that has them copied.
        optimizer.step()
        assert torch.equal(embedding(torch.tensor([3, 5])).detach(), weights - 0.5 * 2 * weights)
        return
    with pytest.raises(RuntimeError, match=r"changed in place since its backward pass.*clone"):
        optimizer.step()
    optimizer.zero_grad()
    assert embedding.stats()["step"] == before


def beside(rows, positions):
    return torch.cat([rows, positions], 1)


def above(rows, positions):
    return torch.cat([positions, rows])


def stacked(rows, positions):
    return torch.stack([rows, positions], 1)


def added(rows, positions):
    return rows[None] + positions[None]


def added_twice(rows, positions):
    return (positions + rows) + rows


@pytest.mark.parametrize("join", [beside, above, stacked, added, added_twice])
@pytest.mark.parametrize("change", ["clip", "accumulate", "data", "numpy", "given"])
def test_what_is_done_to_the_gradient_of_another_parameter_is_not_done_to_rows(tmp_path, join, change):
    """torch may give a parameter a view of the memory that the gradient of rows is in."""
    pair = Pair(tmp_path)
    (ids, *_) = batches()
    for embedding, optimizer in zip((pair.rows, pair.table), pair.optimizers, strict=True):
        torch.manual_seed(1)
        positions = torch.nn.Parameter(torch.randn(len(ids), DIM))
        given = None
        for _ in range(1 + (change == "accumulate")):
            joined = join(embedding(ids), positions)
            given = torch.randn_like(joined)
            joined.backward(given) if change == "given" else (joined * given).sum().backward()
        if change == "clip":
            clip_grad_norm_([positions], 1e-3)
        elif change == "data":
            positions.grad.data.clamp_(-1e-4, 1e-4)
        elif change == "numpy":
            positions.grad.numpy()[:] *= 1e-3
        else:
            given.zero_()
        optimizer.step()
    pair.check()


def test_rows_beside_other_values_do_not_keep_the_gradient_of_all(tmp_path):
    embedding, width = make_embedding(tmp_path, dim=DIM), 60
    rows, values = embedding(torch.tensor([3, 5, 3])), torch.ones(3, width)
    scale = torch.rand(3, width + DIM)
    (torch.cat([values, rows], 1) * scale).sum().backward()
    (one,) = embedding.weight.grad.passes
    assert one.grad.untyped_storage().nbytes() == one.grad.nbytes
    assert torch.equal(one.grad, scale[:, width:])
    expected = torch.stack([scale[0, width:] + scale[2, width:], scale[1, width:]])
    assert torch.equal(embedding.weight.grad.row_values(), expected)


@pytest.mark.parametrize(
    ("pooling", "dtype"), diagonal([None, "sum", "mean"], [torch.float32, torch.bfloat16]), ids=str
)
def test_a_gradient_that_somebody_has_is_summed_as_it_comes_to_the_bits_of_its_copy(tmp_path, dtype, pooling):
    at_once, kept = (make_embedding(tmp_path / name, dim=DIM, dtype=dtype) for name in ("at_once", "kept"))
    ids = torch.tensor([3, 5, 3, 3, 8, 5])
    how = {} if pooling is None else {"offsets": torch.tensor([0, 2, 2, 5, 6]), "pooling": pooling}
    given = torch.randn(4 if how else 6, DIM, generator=torch.Generator().manual_seed(0)).to(dtype)
    before = given.clone()
    optimizers = [torch.optim.Adagrad(embedding.parameters(), lr=0.5) for embedding in (at_once, kept)]
    at_once(ids, **how).backward(given)
    given.zero_()
    kept(ids, **how).backward(before, retain_graph=True)
    (summed,), (copied,) = (embedding.weight.grad.passes for embedding in (at_once, kept))
    assert isinstance(summed.grad, Summed) and torch.equal(copied.grad, before)
    assert at_once.weight.grad.row_values().numpy().tobytes() == kept.weight.grad.row_values().numpy().tobytes()
    for optimizer in optimizers:
        optimizer.step()
    assert torch.equal(*(embedding.eval()(torch.arange(IDS)) for embedding in (at_once, kept)))


def test_a_second_pass_is_added_before_the_first_is_summed(tmp_path):
    embedding, given = make_embedding(tmp_path, dim=DIM), torch.rand(3, DIM)
    rows = embedding(torch.tensor([3, 5, 3]))
    rows.backward(given, retain_graph=True)
    rows.backward(given * 1e-3)
    assert not any(isinstance(one.grad, Summed) for one in embedding.weight.grad.passes)
    total = given + given * 1e-3
    assert torch.equal(embedding.weight.grad.row_values(), torch.stack([total[0] + total[2], total[1]]))


def test_sums_of_one_pass_that_are_added_to_themselves_are_doubled(tmp_path):
    embedding, given = make_embedding(tmp_path, dim=DIM), torch.rand(3, DIM)
    embedding(torch.tensor([3, 5, 3])).backward(given)
    (one,) = embedding.weight.grad.passes
    assert isinstance(one.grad, Summed)
    doubled = embedding.weight.grad + embedding.weight.grad
    assert torch.equal(doubled.row_values(), 2 * embedding.weight.grad.row_values())


@pytest.mark.parametrize("bad", [math.inf, math.nan])
def test_a_summed_gradient_that_is_not_finite_is_refused(tmp_path, bad):
    embedding, given = make_embedding(tmp_path, dim=DIM), torch.zeros(3, DIM)
    optimizer = torch.optim.SGD(embedding.parameters(), lr=0.5)
    given[2, 1] = bad
    embedding(torch.tensor([3, 5, 8])).backward(given)
    assert isinstance(embedding.weight.grad.passes[0].grad, Summed)
    with pytest.raises(oneemb.NonFiniteGradientError, match="gradients of 1 of 3 rows are not finite.*id 8"):
        optimizer.step()


def test_a_sum_and_a_later_pass_of_one_lookup_find_its_rows_where_they_are_now(tmp_path):
    embedding = oneemb.MultiTableEmbedding(
        "e", 2, torch.float32, torch.int64, [oneemb.make_table(oneemb.make_constant_initializer(1.0))],
        oneemb.make_cached_host_mem_store_options(1, str(tmp_path), cache_policy="lru"),
    )  # fmt: skip
    optimizer = oneemb.Optimizer(torch.optim.SGD(embedding.parameters(), lr=1.0))
    ids, others = torch.tensor([1, 2, 3]), torch.arange(1_000_000, 1_180_000).reshape(60, -1)
    embedding(others[0, :8])
    loss = embedding(ids).sum()
    loss.backward(retain_graph=True)
    clip_grad_value_(embedding.parameters(), 0.5)
    slots = embedding.weight.grad.summed.slot_U.tolist()
    optimizer.step()
    with torch.no_grad():
        for few in others:  # The rows leave the cache, and come back into other slots.
            embedding(few)
        embedding(ids)
    loss.backward()
    optimizer.step()
    assert embedding.weight.grad.acquire().slot_U.tolist() != slots
    embedding.eval()
    # 1 - 0.5, and then minus the same once more with the gradient of the second pass.
    assert torch.equal(embedding(ids), torch.full((3, 2), -1.0))
    assert all(torch.equal(embedding(few), torch.ones(3000, 2)) for few in others)


@pytest.mark.parametrize("policy", [None, oneemb.policies.RowPolicy(capacity=950, evict=oneemb.policies.LRU())])
@pytest.mark.parametrize(("calls", "waiting"), [("step", 10), ("clip step", 10), ("", 9), ("forward", None)])
def test_a_full_cache_says_how_many_lookups_wait_for_zero_grad(tmp_path, calls, waiting, policy):
    embedding = make_embedding(str(tmp_path), store="host", dim=256, policy=policy)  # 985 rows fit in its cache
    optimizer, losses = torch.optim.SGD(embedding.parameters(), lr=0.1), []
    with pytest.raises(oneemb.StoreFullError, match="or use fewer ids a step") as error:
        for i in range(11):
            losses.append(embedding(torch.arange(100) + 100 * i).sum())
            if calls != "forward":
                losses.pop().backward()
            if "clip" in calls:
                torch.nn.utils.clip_grad_norm_(embedding.parameters(), 1.0)
            if "step" in calls:
                optimizer.step()
    said = str(error.value)
    assert (f"{waiting} lookups wait for zero_grad()" in said) == (waiting is not None), said
    assert ("wait" in said) == (waiting is not None), said
    optimizer.zero_grad()
    losses.clear()
    embedding(torch.arange(500)).sum().backward()
    optimizer.step()


@pytest.mark.parametrize("steps", [True, False])
def test_a_full_store_says_nothing_of_lookups_that_hold_no_rows_it_could_do_without(tmp_path, steps):
    embedding = make_embedding(str(tmp_path), options={"capacity": 8})
    optimizer = torch.optim.SGD(embedding.parameters(), lr=0.1)
    with pytest.raises(oneemb.StoreFullError, match="^capacity is 8 rows"):
        for i in range(3):
            embedding(torch.arange(4) + 4 * i).sum().backward()
            if steps:
                optimizer.step()


def test_a_lookup_of_too_many_ids_with_a_policy_pins_none_of_those_that_are_there(tmp_path):
    policy = oneemb.policies.RowPolicy(capacity=3000, evict=oneemb.policies.LRU())
    embedding = make_embedding(str(tmp_path), store="host", dim=256, policy=policy)  # 970 rows fit in its cache
    with torch.no_grad():
        embedding(torch.arange(100))
        with pytest.raises(oneemb.StoreFullError, match="970 slots"):
            embedding(torch.arange(1000))
        assert embedding.stats()["device"]["pinned"] == 0
        embedding(torch.arange(2000, 2970))


class _Raises(torch.autograd.Function):
    @staticmethod
    def forward(ctx, value):
        return value.clone()

    @staticmethod
    def backward(ctx, grad):
        raise ZeroDivisionError("in a backward pass")


def _raise(grad):
    raise ZeroDivisionError("in a hook")


def _failing(embedding, ids, where):
    """A backward pass that raises."""
    other = torch.ones((), requires_grad=True)
    if where == "hook of another parameter":
        other.register_hook(_raise)
    elif where == "hook of the weight":
        embedding.weight.register_hook(_raise)
    rows = embedding(ids)
    if where == "function":
        rows = _Raises.apply(rows)
    with torch.autograd.set_detect_anomaly(where == "anomaly", check_nan=True):
        loss = (rows * other).sum() * (math.nan if where == "anomaly" else 1.0)
        loss.backward()


@pytest.mark.parametrize("where", ["hook of another parameter", "hook of the weight", "function", "anomaly"])
@pytest.mark.parametrize("policy", [None, oneemb.policies.RowPolicy(capacity=950, evict=oneemb.policies.LRU())])
@pytest.mark.filterwarnings("ignore:Anomaly Detection", "ignore:Error detected")
def test_a_lookup_gets_the_room_of_one_whose_backward_pass_has_raised(tmp_path, where, policy):
    embedding = make_embedding(str(tmp_path), store="host", dim=256, policy=policy)  # 985 rows fit in its cache
    for i in range(3):
        with pytest.raises((ZeroDivisionError, RuntimeError)):
            _failing(embedding, torch.arange(900) + 1000 * i, where)
        embedding.weight._backward_hooks = None
        for inference in (False, True):
            with torch.inference_mode(inference):
                embedding(torch.arange(900) + 1000 * i + 100_000 * (1 + inference))
    assert embedding.weight.grad is None and embedding.stats()["device"]["pinned"] == 0


def test_rows_of_a_backward_pass_that_has_raised_can_be_erased(tmp_path):
    embedding = make_embedding(str(tmp_path))
    with pytest.raises(ZeroDivisionError):
        _failing(embedding, torch.arange(10), "hook of another parameter")
    rows = embedding(torch.arange(5, 8))
    with pytest.raises(oneemb.StorageError, match="3 of the rows to erase are in use"):
        embedding.erase(torch.arange(10))
    del rows
    assert embedding.erase(torch.arange(10)) == 10
