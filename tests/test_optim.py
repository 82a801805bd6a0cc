"""The classes of oneemb.optim on dense parameters: formulas in float64, arguments, state dicts."""

import copy
import io

import numpy as np
import pytest
import torch
import torch.distributed.checkpoint as dcp

from oneemb.optim import Ftrl, Lamb, Lars, PartialRowWiseAdam, RowWiseAdagrad, SmartDecayAdam

STEPS = 50


def row_wise_adagrad(w, state, g, step):
    lr, eps, weight_decay = 0.1, 1e-3, 0.05
    g = g + weight_decay * w
    acc = state.get("acc", 0.2) + (g**2).reshape(len(g), -1).mean(axis=1)
    state["acc"] = acc
    return w - lr * g / (np.sqrt(acc).reshape((-1,) + (1,) * (g.ndim - 1)) + eps)


def ftrl(w, state, g, step):
    lr, power, lambda1, lambda2, beta, weight_decay = 0.5, 0.6, 0.3, 0.1, 1.0, 0.05
    g = g + weight_decay * w
    n, z = state.get("n", 0.1), state.get("z", 0.0)
    n_new = n + g**2
    z = z + g - (n_new**power - n**power) / lr * w
    state["n"], state["z"] = n_new, z
    return np.where(np.abs(z) > lambda1, (np.sign(z) * lambda1 - z) / ((beta + n_new**power) / lr + lambda2), 0)


def smart_decay_adam(w, state, g, step):
    lr, beta1, beta2, eps, weight_decay = 0.01, 0.8, 0.95, 1e-3, 0.05
    g = g + weight_decay * w
    m, v, k = state.get("m", 0.0), state.get("v", 0.0), step - state.get("last", 0)
    owed = sum(m * beta1**i for i in range(1, k))  # the momenta of the steps without a gradient
    state["m"] = beta1**k * m + (1 - beta1) * g
    state["v"] = beta2**k * v + (1 - beta2) * g**2
    state["last"] = step
    return w - lr * (state["m"] + owed) / (np.sqrt(state["v"]) + eps)


def of_rows(function, x):
    """A number of each index of dimension 0, shaped so that it broadcasts over the others."""
    return function(x.reshape(len(x), -1)).reshape((-1,) + (1,) * (x.ndim - 1))


def norms(x):
    return of_rows(lambda rows: np.linalg.norm(rows, axis=1), x)


def partial_row_wise_adam(w, state, g, step):
    lr, beta1, beta2, eps, weight_decay = 0.05, 0.8, 0.95, 1e-3, 0.05
    t = state["t"] = state.get("t", 0) + 1
    state["m"] = beta1 * state.get("m", 0.0) + (1 - beta1) * g
    mean = of_rows(lambda rows: np.mean(rows**2, axis=1), g)
    state["v"] = beta2 * state.get("v", 0.0) + (1 - beta2) * mean
    m_hat, v_hat = state["m"] / (1 - beta1**t), state["v"] / (1 - beta2**t)
    return w - lr * (m_hat / (np.sqrt(v_hat) + eps) + weight_decay * w)


def lamb(w, state, g, step):
    lr, beta1, beta2, eps, weight_decay = 0.05, 0.8, 0.95, 1e-3, 0.05
    t = state["t"] = state.get("t", 0) + 1
    state["m"] = beta1 * state.get("m", 0.0) + (1 - beta1) * g
    state["v"] = beta2 * state.get("v", 0.0) + (1 - beta2) * g**2
    r = state["m"] / (1 - beta1**t) / (np.sqrt(state["v"] / (1 - beta2**t)) + eps) + weight_decay * w
    return w - lr * norms(w) / norms(r) * r


def lars(w, state, g, step):
    lr, momentum, eta, weight_decay = 0.5, 0.8, 0.1, 0.05
    rate = lr * eta * norms(w) / (norms(g) + weight_decay * norms(w))
    state["buf"] = momentum * state.get("buf", 0.0) + rate * (g + weight_decay * w)
    return w - state["buf"]


CASES = {
    "row_wise_adagrad": (
        lambda params: RowWiseAdagrad(params, lr=0.1, eps=1e-3, weight_decay=0.05, initial_accumulator_value=0.2),
        row_wise_adagrad,
    ),
    "ftrl": (
        lambda params: Ftrl(
            params, lr=0.5, lr_power=-0.6, lambda1=0.3, lambda2=0.1, beta=1.0, weight_decay=0.05
        ),
        ftrl,
    ),
    "smart_decay_adam": (
        lambda params: SmartDecayAdam(params, lr=0.01, betas=(0.8, 0.95), eps=1e-3, weight_decay=0.05),
        smart_decay_adam,
    ),
    "partial_row_wise_adam": (
        lambda params: PartialRowWiseAdam(params, lr=0.05, betas=(0.8, 0.95), eps=1e-3, weight_decay=0.05),
        partial_row_wise_adam,
    ),
    "lamb": (lambda params: Lamb(params, lr=0.05, betas=(0.8, 0.95), eps=1e-3, weight_decay=0.05), lamb),
    "lars": (lambda params: Lars(params, lr=0.5, momentum=0.8, eta=0.1, weight_decay=0.05), lars),
}  # fmt: skip


@pytest.fixture(params=CASES, ids=str)
def case(request):
    return CASES[request.param]


def gradients(shape, seed=0):
    """STEPS gradients, None at some steps: the parameter took no part in them."""
    print(f"seed {seed}")
    rng = np.random.default_rng(seed)
    return [None if step % 7 in (2, 3) else rng.normal(0, 1, shape) for step in range(1, STEPS + 1)]


def train(param, optimizer, grads):
    for grad in grads:
        param.grad = None if grad is None else torch.from_numpy(np.asarray(grad)).to(param.dtype)
        optimizer.step()


@pytest.mark.parametrize("shape", [(5, 3), (4,), (3, 2, 2), (1, 1)], ids=str)
def test_a_dense_parameter_follows_the_formula(case, shape):
    make, rule = case
    w = np.random.default_rng(1).normal(0, 1, shape)
    param = torch.nn.Parameter(torch.from_numpy(w.copy()))
    train(param, make([param]), gradients(shape))
    state = {}
    for step, grad in enumerate(gradients(shape), start=1):
        if grad is not None:
            w = rule(w, state, grad, step)
    np.testing.assert_allclose(param.detach().numpy(), w, rtol=1e-9, atol=1e-12)


def test_a_scalar_parameter_is_a_row_of_its_own(case):
    make, _ = case
    scalar, one = (torch.nn.Parameter(torch.full(shape, 2.0)) for shape in ((), (1,)))
    for param in (scalar, one):
        train(param, make([param]), [np.full(param.shape, g) for g in (1.0, -0.5, 3.0)])
    assert scalar.item() == one.item()


def test_row_wise_adagrad_of_a_vector_is_torch_adagrad():
    ours, theirs = (torch.nn.Parameter(torch.ones(6, dtype=torch.float64)) for _ in range(2))
    train(ours, RowWiseAdagrad([ours], lr=0.1, weight_decay=0.1), gradients(6))
    train(theirs, torch.optim.Adagrad([theirs], lr=0.1, weight_decay=0.1), gradients(6))
    np.testing.assert_allclose(ours.detach().numpy(), theirs.detach().numpy(), rtol=1e-12)


@pytest.mark.parametrize("cls", [Lamb, Lars])
def test_a_row_whose_rate_would_be_0_by_0_stays_as_it_is(cls):
    param = torch.nn.Parameter(torch.tensor([[1.0, 2.0], [0.0, 0.0]]))
    train(param, cls([param], lr=0.1), [np.zeros((2, 2))])
    assert param.tolist() == [[1.0, 2.0], [0.0, 0.0]]


def test_ftrl_sets_weights_to_exactly_zero():
    param = torch.nn.Parameter(torch.zeros(3))
    train(param, Ftrl([param], lr=0.1, lambda1=1.0), [np.array([0.5, 2.0, -1.0])])
    assert (param != 0).tolist() == [False, True, False]


def test_a_restored_optimizer_goes_on_as_if_never_stopped(case):
    make, _ = case
    grads = gradients((4, 3))
    through = torch.nn.Parameter(torch.ones(4, 3))
    train(through, make([through]), grads)

    stopped = torch.nn.Parameter(torch.ones(4, 3))
    optimizer = make([stopped])
    train(stopped, optimizer, grads[:23])
    file = io.BytesIO()
    torch.save(optimizer.state_dict(), file)
    file.seek(0)
    resumed = torch.nn.Parameter(stopped.detach().clone())
    optimizer = make([resumed])
    optimizer.load_state_dict(torch.load(file, weights_only=True))
    train(resumed, optimizer, grads[23:])
    assert torch.equal(resumed, through)


def test_an_optimizer_can_be_copied(case):
    make, _ = case
    param = torch.nn.Parameter(torch.ones(2, 2))
    optimizer = make([param])
    train(param, optimizer, gradients((2, 2))[:5])
    clone = copy.deepcopy(optimizer)
    assert str(clone.state_dict()) == str(optimizer.state_dict())


def test_step_returns_the_loss_of_its_closure(case):
    make, _ = case
    param = torch.nn.Parameter(torch.ones(2, 2))
    optimizer = make([param])

    def closure():
        optimizer.zero_grad()
        loss = (param**2).sum()
        loss.backward()
        return loss

    first, second = optimizer.step(closure), optimizer.step(closure)
    assert first.item() == 4 and second < first


def test_a_scheduler_changes_the_next_steps_rate():
    param = torch.nn.Parameter(torch.zeros(1))
    optimizer = RowWiseAdagrad([param], lr=1.0, initial_accumulator_value=1e12)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, step_size=1, gamma=0.5)
    moves = []
    for _ in range(3):
        before = param.item()
        train(param, optimizer, [np.ones(1)])
        moves.append(before - param.item())
        scheduler.step()
    np.testing.assert_allclose(moves, [1e-6, 0.5e-6, 0.25e-6], rtol=1e-4)


def test_a_sparse_gradient_is_refused(case):
    make, _ = case
    param = torch.nn.Parameter(torch.ones(2, 2))
    optimizer = make([param])
    param.grad = torch.ones(2, 2).to_sparse()
    with pytest.raises(RuntimeError, match="sparse=False"):
        optimizer.step()
    assert torch.equal(param, torch.ones(2, 2))


@pytest.mark.parametrize(
    "cls, options",
    [
        (RowWiseAdagrad, dict(lr=-0.1)),
        (RowWiseAdagrad, dict(eps=-1e-8)),
        (RowWiseAdagrad, dict(weight_decay=float("nan"))),
        (RowWiseAdagrad, dict(initial_accumulator_value=-1.0)),
        (Ftrl, dict(lr=0.0)),
        (Ftrl, dict(lr=float("inf"))),
        (Ftrl, dict(lr_power=0.5)),
        (Ftrl, dict(lambda1=-0.1)),
        (Ftrl, dict(lambda2=-0.1)),
        (Ftrl, dict(beta=-0.1)),
        (Ftrl, dict(initial_accumulator_value=-0.1)),
        (SmartDecayAdam, dict(lr=-0.1)),
        (SmartDecayAdam, dict(eps=float("inf"))),
        (SmartDecayAdam, dict(betas=(1.0, 0.9))),
        (SmartDecayAdam, dict(betas=(0.9, -0.1))),
        (SmartDecayAdam, dict(weight_decay=-0.1)),
        (PartialRowWiseAdam, dict(lr=-0.1)),
        (PartialRowWiseAdam, dict(betas=(0.9, 1.0))),
        (Lamb, dict(eps=-0.1)),
        (Lamb, dict(betas=(-0.1, 0.9))),
        (Lars, dict(eta=-0.1)),
        (Lars, dict(momentum=float("nan"))),
    ],
    ids=str,
)
def test_an_argument_out_of_range_is_an_error_that_names_it(cls, options):
    (name,) = options
    with pytest.raises(ValueError, match=rf"{cls.__name__}: {name}"):
        cls([torch.nn.Parameter(torch.ones(1))], **options)


def test_a_group_is_checked_as_the_constructor_is():
    params = [torch.nn.Parameter(torch.ones(1)) for _ in range(2)]
    with pytest.raises(ValueError, match="Ftrl: lambda1"):
        Ftrl([{"params": [params[0]], "lambda1": -1.0}])
    optimizer = Ftrl([params[0]])
    with pytest.raises(ValueError, match="Ftrl: beta"):
        optimizer.add_param_group({"params": [params[1]], "beta": -1.0})


def test_ftrl_refuses_a_rate_of_zero_at_the_step():
    param = torch.nn.Parameter(torch.ones(1))
    optimizer = Ftrl([param])
    optimizer.param_groups[0]["lr"] = 0.0
    param.grad = torch.ones(1)
    with pytest.raises(ValueError, match="lr must be above 0"):
        optimizer.step()
    param.grad = torch.zeros(1)  # as tools make an optimizer's state
    optimizer.step()
    assert param.item() == 1 and optimizer.state[param]["z"].item() == 0


COUNTING = [PartialRowWiseAdam, Lamb, SmartDecayAdam]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("cls", COUNTING)
def test_a_load_in_place_brings_counts_of_steps_back(cls, dtype, tmp_path):
    def made():
        torch.manual_seed(0)
        param = torch.nn.Parameter(torch.randn(3, 2, dtype=dtype))
        return param, cls([param], lr=0.1)

    grads = [np.full((3, 2), 0.5) if step % 5 else None for step in range(STEPS)]
    (expected, optimizer), (param, saved) = made(), made()
    train(expected, optimizer, grads)
    train(param, saved, grads[:26])  # the last of them has no gradient
    dcp.save({"param": param.detach(), "optimizer": saved.state_dict()}, checkpoint_id=tmp_path, no_dist=True)
    train(param, saved, grads[26:30])
    held = {"param": param.detach(), "optimizer": saved.state_dict()}
    dcp.load(held, checkpoint_id=tmp_path, no_dist=True)
    train(param, saved, grads[26:])
    assert torch.equal(param, expected)
    (other, loaded) = made()
    train(other, loaded, grads[:1])
    dcp.load(held, checkpoint_id=tmp_path, no_dist=True)
    loaded.load_state_dict(held["optimizer"])
    with torch.no_grad():
        other.copy_(held["param"])
    train(other, loaded, grads[26:])
    assert torch.equal(other, expected)


@pytest.mark.parametrize("cls", COUNTING)
def test_a_state_whose_counts_are_ints_is_loaded_as_before(cls):
    grads = gradients((3, 2))
    param = torch.nn.Parameter(torch.ones(3, 2))
    optimizer = cls([param], lr=0.1)
    train(param, optimizer, grads[:24])  # the last two without a gradient
    older = copy.deepcopy(optimizer.state_dict())
    its, steps = older["state"][0], sum(grad is not None for grad in grads[:24])
    assert its.pop("step") == (2 if cls is SmartDecayAdam else steps)
    if cls is SmartDecayAdam:
        its["last_step"], older["param_groups"][0]["step"] = 22, 24
    else:
        its["step"] = steps
    other = torch.nn.Parameter(param.detach().clone())
    loaded = cls([other], lr=0.1)
    loaded.load_state_dict(older)
    assert isinstance(loaded.state[other]["step"], torch.Tensor), "a load in place could not reach an int"
    for each, its in ((param, optimizer), (other, loaded)):
        train(each, its, grads[24:])
    assert torch.equal(other, param) and loaded.state_dict()["param_groups"] == optimizer.state_dict()["param_groups"]
