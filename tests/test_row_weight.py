"""The weight of an embedding stands for rows: what would give it values says so, what tools do to it goes through."""

import copy
import inspect
import io
import pickle

import pytest
import torch

import oneemb
from oneemb.embeddings import internals
from tests.support.models import make_embedding

INITIALIZERS = {
    name: function
    for name, function in vars(torch.nn.init).items()
    if name.endswith("_") and not name.startswith("_") and inspect.isfunction(function) and name != "dirac_"
}
MORE = {"constant_": (1.0,), "sparse_": (0.1,)}

VECTORS = torch.ones(3, 4)

WRITES = {
    "data = vectors": lambda e: setattr(e.weight, "data", VECTORS),
    "data.uniform_": lambda e: e.weight.data.uniform_(-0.1, 0.1),
    "data.copy_ of one vector": lambda e: e.weight.data.copy_(VECTORS[0]),
    "copy_ of one vector": lambda e: e.weight.copy_(VECTORS[:1]),
    "data[...] = number": lambda e: e.weight.data.__setitem__(slice(None), 1.0),
    "data[0] = vector": lambda e: e.weight.data.__setitem__(0, VECTORS[0]),
    "data.mul_": lambda e: e.weight.data.mul_(0.02),
    "data.clamp_": lambda e: e.weight.data.clamp_(-1, 1),
    "fill_": lambda e: e.weight.fill_(0.0),
    "data[0:1].fill_": lambda e: e.weight.data[0:1].fill_(1.0),
    "data.view(-1).fill_": lambda e: e.weight.data.view(-1).fill_(1.0),
    "data.T.fill_": lambda e: e.weight.data.T.fill_(1.0),
    "data.chunk.fill_": lambda e: e.weight.data.chunk(2, 1)[1].fill_(1.0),
    "zero_ of data": lambda e: torch.zero_(e.weight.data),
    "fill_ of data": lambda e: torch.fill_(e.weight.data, 1.0),
    "normal, out=data": lambda e: torch.normal(0.0, 1.0, (0, 4), out=e.weight.data),
    "detach().normal_": lambda e: e.weight.detach().normal_(),
    "detach()[...].zero_": lambda e: e.weight.detach()[:3].zero_(),
    "detach().copy_ of one vector": lambda e: e.weight.detach().copy_(VECTORS[0]),
    "initializer of a view": lambda e: torch.nn.init.normal_(e.weight.data[0:1]),
    "data.index_copy_": lambda e: e.weight.data.index_copy_(0, torch.empty(0, dtype=torch.long), torch.empty(0, 4)),
    "state dict": lambda e: e.load_state_dict({**e.state_dict(), "weight": VECTORS}),
    "state dict, not strict": lambda e: e.load_state_dict({"weight": VECTORS}, strict=False, assign=True),
    "weight = parameter": lambda e: setattr(e, "weight", torch.nn.Parameter(VECTORS, requires_grad=False)),
}


@pytest.fixture(scope="module")
def embedding(tmp_path_factory):
    return make_embedding(tmp_path_factory.mktemp("rows"))


@pytest.mark.parametrize("name", INITIALIZERS)
@pytest.mark.parametrize("of", ["weight", "data", "detached"])
def test_an_initializer_of_torch_on_the_weight_is_an_error(embedding, name, of):
    weight = embedding.weight
    tensor = {"weight": lambda: weight, "data": lambda: weight.data, "detached": weight.detach}[of]()
    with pytest.raises(RuntimeError, match="would change no row of embedding 'items'.*make_table.*import_rows"):
        INITIALIZERS[name](tensor, *MORE.get(name, ()))


@pytest.mark.parametrize("write", WRITES)
def test_values_for_the_weight_are_an_error(embedding, write):
    with pytest.raises(RuntimeError, match="would change no row of embedding 'items'.*make_table.*import_rows"):
        with torch.no_grad():
            WRITES[write](embedding)
    assert embedding.weight.shape == (0, 4)


IDS, HIDDEN = torch.tensor([3, 5]), torch.ones(2, 4)


def tied(kind, weight):
    layer = torch.nn.Linear(4, 3, bias=False) if kind == "linear" else torch.nn.Embedding(3, 4)
    layer.weight = weight
    return layer(HIDDEN if kind == "linear" else IDS)


READS = {
    "product with weight.T": lambda w: HIDDEN @ w.T,
    "product with weight.t()": lambda w: HIDDEN @ w.t(),
    "product with weight.mT": lambda w: HIDDEN @ w.mT,
    "product of weight": lambda w: w @ HIDDEN.T,
    "weight[3]": lambda w: w[3],
    "weight[ids]": lambda w: w[IDS],
    "rows of weight": list,
    "index_select": lambda w: w.index_select(0, IDS),
    "F.embedding": lambda w: torch.nn.functional.embedding(IDS, w),
    "F.embedding_bag": lambda w: torch.nn.functional.embedding_bag(IDS, w, torch.tensor([0])),
    "F.linear": lambda w: torch.nn.functional.linear(HIDDEN, w),
    "einsum": lambda w: torch.einsum("bd,vd->bv", HIDDEN, w),
    "cdist": lambda w: torch.cdist(HIDDEN, w),
    "norm": lambda w: w.norm(),
    "linalg.norm": lambda w: torch.linalg.norm(w),
    "normalize": lambda w: torch.nn.functional.normalize(w),
    "tied output layer": lambda w: tied("linear", w),
    "tied nn.Embedding": lambda w: tied("embedding", w),
    "product with weight.data.T": lambda w: HIDDEN @ w.data.T,
    "F.linear of detach()": lambda w: torch.nn.functional.linear(HIDDEN, w.detach()),
    "F.embedding of data": lambda w: torch.nn.functional.embedding(IDS, w.data),
    "einsum of data": lambda w: torch.einsum("bd,vd->bv", HIDDEN, w.data),
}


@pytest.mark.parametrize("read", READS)
@pytest.mark.parametrize("mode", [torch.enable_grad, torch.no_grad, torch.inference_mode])
def test_a_use_of_the_weight_as_a_matrix_of_rows_is_an_error(embedding, read, mode):
    with mode(), pytest.raises(RuntimeError, match="would use no row of embedding 'items'.*Look rows up: embedding"):
        READS[read](embedding.weight)


def test_a_compiled_use_of_the_weight_is_an_error_too(embedding):
    compiled = torch.compile(lambda hidden: hidden @ embedding.weight.T, backend="aot_eager", fullgraph=True)
    with pytest.raises(RuntimeError, match="would use no row of embedding 'items'"):
        compiled(HIDDEN)


def test_scores_of_all_rows_come_as_the_error_says(tmp_path):
    embedding = make_embedding(tmp_path)
    rows = embedding(torch.tensor([3, -5, 8])).detach()
    scores = HIDDEN @ embedding.read(embedding.ids()).T
    torch.testing.assert_close(scores, HIDDEN @ rows[[1, 0, 2]].T)


def test_figures_of_all_parameters_and_texts_go_through(tmp_path):
    embedding = make_embedding(tmp_path)
    model = torch.nn.Sequential(embedding, torch.nn.Linear(4, 1))
    embedding(IDS).sum().backward()
    assert torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0) > 0
    internals.drop_grads(embedding)
    for parameter in model.parameters():
        assert parameter.sum().isfinite() and parameter.isfinite().all() and parameter.square().sum() >= 0
    weight = embedding.weight
    assert repr(weight) == repr(torch.nn.Parameter(torch.empty(0, 4)))
    assert weight.tolist() == [] and weight.detach().norm() == 0 == len(weight) and weight.numel() == 0
    with pytest.raises(RuntimeError, match="requires grad"):
        weight.numpy()
    assert weight.requires_grad_(False).numpy().shape == (0, 4)
    assert embedding.to("cpu").weight is weight and weight.cpu() is weight and weight.double().dtype == torch.float64


def test_pretrained_vectors_come_in_as_the_error_says(tmp_path):
    embedding = make_embedding(tmp_path)
    oneemb.import_rows(embedding, (torch.arange(3).numpy(), VECTORS.numpy()))
    embedding.weight.requires_grad_(False)
    assert torch.equal(embedding(torch.arange(3)[:, None]).squeeze(1), VECTORS)


def test_what_tools_do_to_every_parameter_goes_through(tmp_path):
    model = torch.nn.Sequential(make_embedding(tmp_path), torch.nn.Linear(4, 1))
    weight = model[0].weight
    torch.nn.utils.vector_to_parameters(torch.nn.utils.parameters_to_vector(model.parameters()), model.parameters())
    with torch.no_grad():
        torch._foreach_mul_(list(model.parameters()), 0.5)
        weight.mul_(0.5)
    weight.data = weight.data.to("cpu")
    weight.data.copy_(torch.empty(0, 4))
    assert sum(parameter.numel() for parameter in model.parameters()) == 5 and weight.shape == (0, 4)
    optimizer = torch.optim.AdamW(model.parameters())
    for parameter in model.parameters():  # as torch.distributed.checkpoint has an optimizer make its state
        parameter.grad = torch.zeros_like(parameter)
    with torch.no_grad():
        model(torch.zeros(1, 1, dtype=torch.int64))
    internals.drop_grads(model[0])
    optimizer.step()
    state = model.state_dict()
    model.load_state_dict(state)
    model.load_state_dict(state, assign=True)
    model.double().float().to("cpu").requires_grad_(False).requires_grad_(True)
    assert model[0].weight is weight and isinstance(weight, torch.nn.Parameter)
    with pytest.raises(TypeError, match="cannot be pickled"):
        pickle.dumps(weight)
    assert copy.deepcopy(weight).shape == (0, 4)


def test_what_tools_do_to_detached_parameters_goes_through(tmp_path):
    model = torch.nn.Sequential(make_embedding(tmp_path), torch.nn.Linear(4, 1))
    averages = [parameter.detach().clone() for parameter in model.parameters()]
    with torch.no_grad():
        torch._foreach_lerp_(averages, [parameter.data for parameter in model.parameters()], 0.5)
        torch._foreach_copy_([parameter.detach() for parameter in model.parameters()], averages)
        for average, parameter in zip(averages, model.parameters(), strict=True):
            average.lerp_(parameter.detach(), 0.5)
            parameter.detach().copy_(average)
            parameter.data.copy_(average)
    weight = model[0].weight
    flat = torch.cat([parameter.detach().view(-1) for parameter in model.parameters()])
    results = (flat, weight.detach().clone(), weight.data + 1, torch.zeros_like(weight.detach()), weight.data.cpu() * 2)
    assert flat.shape == (5,) and all(type(one) is torch.Tensor for one in results)
    assert weight.detach().norm().item() == 0.0 and weight.detach().requires_grad is False
    assert weight.detach().untyped_storage().data_ptr() == weight.untyped_storage().data_ptr()
    assert weight.detach().numpy().shape == (0, 4) and weight.data[0:1].tolist() == []
    safetensors = pytest.importorskip("safetensors.torch")
    file = safetensors.save({"weight": weight.detach(), "data": weight.data})
    assert {name: its.shape for name, its in safetensors.load(file).items()} == dict.fromkeys(
        ("weight", "data"), (0, 4)
    )


def test_what_the_weight_gives_is_copied_and_saved_as_any_tensor(tmp_path):
    weight = make_embedding(tmp_path).weight
    file = io.BytesIO()
    torch.save({"data": weight.data, "detached": weight.detach()}, file)
    file.seek(0)
    for its in (*torch.load(file).values(), copy.deepcopy(weight.data), pickle.loads(pickle.dumps(weight.data))):
        assert type(its) is torch.Tensor and its.shape == (0, 4)
    assert repr(weight.data) == repr(torch.empty(0, 4))
    for parameter in (copy.copy(weight), torch.nn.Parameter(weight.data), type(weight)(weight.data)):
        assert isinstance(parameter, torch.nn.Parameter) and parameter.shape == (0, 4) and parameter.requires_grad


def test_a_compiled_function_of_all_parameters_sees_the_weight_as_any_parameter(tmp_path):
    model = torch.nn.Sequential(make_embedding(tmp_path), torch.nn.Linear(4, 1))
    averages = [torch.zeros_like(parameter) for parameter in model.parameters()]

    @torch.compile(backend="eager", fullgraph=True)
    def average():
        shapes, numbers = [], 0
        for one, parameter in zip(averages, model.parameters(), strict=True):
            one.lerp_(parameter.data, 0.5)
            shapes.append(parameter.shape)
            numbers += parameter.numel()
        return shapes, numbers

    shapes, numbers = average()
    assert shapes[0] == (0, 4) and numbers == 5
    torch.testing.assert_close(averages[1], model[1].weight.detach() / 2)


# ---- rows that no optimizer trains -----------------------------------------------------------------------------------


def test_an_embedding_that_the_optimizer_lacks_warns_once(tmp_path):
    embedding, dense = make_embedding(tmp_path), torch.nn.Linear(4, 1)
    optimizer = torch.optim.SGD(dense.parameters(), lr=0.1)
    said = "'items' has had gradients in 5 steps of optimizers, none of which has trained it so far"
    with pytest.warns(UserWarning, match=said) as warned:
        for _ in range(20):
            dense(embedding(torch.arange(3))).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
    assert [one.filename for one in warned] == [__file__]


def test_accumulation_frozen_rows_and_optimizers_in_turn_do_not_warn(tmp_path, recwarn):
    embedding, dense = make_embedding(tmp_path / "trained"), torch.nn.Linear(4, 1)
    frozen = make_embedding(tmp_path / "frozen", name="frozen").requires_grad_(False)
    optimizers = [torch.optim.SGD(one.parameters(), lr=0.1) for one in (dense, embedding)]
    for _ in range(3):
        for _ in range(10):
            dense(embedding(torch.arange(3)) + frozen(torch.arange(3))).sum().backward()
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    assert not [one for one in recwarn if "none of which" in str(one.message)]
