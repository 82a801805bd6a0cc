"""Weights of torch modules with the state of torch's optimizers, against torch itself."""

import pickle

import numpy as np
import pytest
import safetensors.torch
import torch

import oneemb
from tests.support.foreign import assert_same, make_embedding, rows_in, rows_of

IDS = torch.tensor([7, -1, 2**60, 11, 5])
DIM = 3
OPTIMIZERS = {
    "sgd": lambda parameters: torch.optim.SGD(parameters, lr=0.1),
    "momentum": lambda parameters: torch.optim.SGD(parameters, lr=0.1, momentum=0.9),
    "adagrad": lambda parameters: torch.optim.Adagrad(parameters, lr=0.1),
    "adam": lambda parameters: torch.optim.Adam(parameters, lr=0.1),
    "amsgrad": lambda parameters: torch.optim.AdamW(parameters, lr=0.1, amsgrad=True),
    "sparse": lambda parameters: torch.optim.SparseAdam(list(parameters), lr=0.1),
    "radam": lambda parameters: torch.optim.RAdam(parameters, lr=0.1),
    "adamax": lambda parameters: torch.optim.Adamax(parameters, lr=0.1),
    "adadelta": lambda parameters: torch.optim.Adadelta(parameters, lr=0.1),
    "rmsprop": lambda parameters: torch.optim.RMSprop(parameters, lr=0.01, centered=True, momentum=0.9),
    "row_wise": lambda parameters: oneemb.optim.RowWiseAdagrad(parameters, lr=0.1),
    "ftrl": lambda parameters: oneemb.optim.Ftrl(parameters, lr=0.1),
    "partial": lambda parameters: oneemb.optim.PartialRowWiseAdam(parameters, lr=0.1),
}


def train(module, optimizer, steps=3):
    for step in range(steps):
        optimizer.zero_grad()
        rows = module(torch.arange(5)) if isinstance(module, torch.nn.Embedding) else module(IDS, 0)
        (torch.sin(rows) * torch.arange(1.0, 1 + rows.numel()).view_as(rows) * (step + 1)).sum().backward()
        optimizer.step()


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_training_goes_on_to_the_same_numbers_and_state_goes_out_again(tmp_path, name):
    torch.manual_seed(0)
    old = torch.nn.Embedding(5, DIM, sparse=name == "sparse")
    optimizer = OPTIMIZERS[name](old.parameters())
    train(old, optimizer)
    embedding = make_embedding(tmp_path / "e", DIM)
    trainer = oneemb.Optimizer(OPTIMIZERS[name](embedding.parameters()), [embedding])
    state = optimizer.state[old.weight]
    report = oneemb.import_foreign(
        embedding, old.state_dict(), "torch", ids=IDS, state=state or None, with_state=name != "sgd"
    )
    assert report.rows == 5
    assert torch.equal(embedding(IDS, 0), old.weight)
    if name != "sgd":
        report = oneemb.export_foreign(embedding, tmp_path / "w.safetensors", "torch", name="emb", with_state=True)
        out = safetensors.torch.load_file(tmp_path / "w.safetensors")
        order = [out["emb.ids"].tolist().index(one) for one in IDS.tolist()]
        assert torch.equal(out["emb"][order], old.weight)
        tensors = {key: value for key, value in state.items() if torch.is_tensor(value) and value.dim()}
        assert {key.removeprefix("emb.state.") for key in out if ".state." in key} == {*tensors, "step"}
        for key, value in tensors.items():
            assert torch.equal(out[f"emb.state.{key}"][order], value)
        assert_same(again(tmp_path, name), rows_of(embedding))
    train(old, optimizer, 2)
    train(embedding, trainer, 2)
    torch.testing.assert_close(embedding(IDS, 0).detach(), old.weight.detach(), rtol=2e-5, atol=2e-6)
    embedding.close()


def again(tmp_path, name):
    """Rows and state from the file that was written."""
    embedding = make_embedding(tmp_path / "again", DIM, OPTIMIZERS[name])
    oneemb.import_foreign(
        embedding, tmp_path / "w.safetensors", "torch", name="emb", ids="emb.ids", state="emb.state", with_state=True
    )
    found = rows_of(embedding)
    embedding.close()
    return found


def test_a_checkpoint_file_of_a_model_and_its_optimizer(tmp_path):
    model = torch.nn.ModuleDict({"words": torch.nn.EmbeddingBag(5, DIM), "out": torch.nn.Linear(DIM, 1)})
    optimizer = torch.optim.Adam(model.parameters())
    model["out"](model["words"](torch.arange(5).view(1, 5))).sum().backward()
    optimizer.step()
    path = tmp_path / "checkpoint.pt"
    torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict(), "epoch": 3}, path)
    oneemb.import_foreign(
        tmp_path / "t", path, "torch", name="model/words.weight", state="optimizer/state/0", with_state=True,
        snapshot="s",
    )  # fmt: skip
    moments = optimizer.state[model["words"].weight]
    wanted = torch.cat([model["words"].weight.detach(), moments["exp_avg"], moments["exp_avg_sq"]], 1).numpy()
    assert_same(rows_in(tmp_path / "t", "s"), dict(enumerate(wanted)))
    for name, text in [("words.weight", "has no 'words.weight', only model, optimizer, epoch"), (None, "one matrix")]:
        with pytest.raises(oneemb.StorageError, match=text):
            oneemb.import_foreign(tmp_path / "t", path, "torch", name=name, snapshot="t")
    data = path.read_bytes()
    for size in (0, 10, len(data) // 2, len(data) - 30):
        path.write_bytes(data[:size])
        with pytest.raises(ValueError, match=r"checkpoint.pt is not a file of torch.save, or it is cut short"):
            oneemb.import_foreign(tmp_path / "t", path, "torch", name="model/words.weight", snapshot="t")


def test_a_file_that_would_run_code_is_refused(tmp_path):
    class Evil:
        def __reduce__(self):
            return (open, (str(tmp_path / "ran"), "w"))

    torch.save({"weight": torch.zeros(2, 2), "more": Evil()}, tmp_path / "evil.pt")
    (tmp_path / "evil.pkl").write_bytes(pickle.dumps({"weight": Evil()}, 2))
    torch.save({"weight": Evil()}, tmp_path / "old.pt", _use_new_zipfile_serialization=False)
    for path in tmp_path.glob("*.p*"):
        with pytest.raises(ValueError, match="is not a file of torch.save.*save module.state_dict") as raised:
            oneemb.import_foreign(tmp_path / "t", path, "torch", name="weight", snapshot="s")
        assert "weights_only" not in str(raised.value), "no advice to load the file without a check"
    assert not (tmp_path / "ran").exists()


def test_a_file_of_torch_before_1_6_is_read(tmp_path):
    # Torch 1.6 was the first to write zip archives.
    weight = torch.randn(5, DIM)
    torch.save({"w": weight}, tmp_path / "old.pt", _use_new_zipfile_serialization=False)
    oneemb.import_foreign(tmp_path / "t", tmp_path / "old.pt", "torch", snapshot="s")
    assert_same(rows_in(tmp_path / "t", "s"), dict(enumerate(weight.numpy())))


UNFIT = {
    "sparse": lambda x: x.to_sparse(),
    "rows of sparse": lambda x: x.to_sparse_csr(),
    "meta": lambda x: x.to("meta"),
    "8 bits": lambda x: x.to(torch.float8_e5m2),
    "complex": lambda x: x.to(torch.complex64),
    "integers": lambda x: x.to(torch.int32),
    "no columns": lambda x: x[:, :0],
    "a list": lambda x: x.tolist(),
    "none": lambda x: None,
}


@pytest.mark.filterwarnings("ignore:Sparse CSR")
@pytest.mark.parametrize("kind", UNFIT)
def test_tensors_that_rows_cannot_have_are_named(tmp_path, kind):
    weight = torch.rand(5, DIM)
    unfit = UNFIT[kind](weight)
    with pytest.raises(ValueError, match="'w' must be a dense matrix of weights"):
        oneemb.import_foreign(tmp_path / "t", {"w": unfit}, "torch", name="w", snapshot="s")
    state = {"exp_avg": weight, "exp_avg_sq": unfit, "step": 1}
    options = {"state": state, "with_state": True, "optimizer": "adam", "snapshot": "s"}
    with pytest.raises(ValueError, match="must have the optimizer's state of 'adam', exp_avg, exp_avg_sq"):
        oneemb.import_foreign(tmp_path / "t", {"w": weight}, "torch", **options)
    assert not (tmp_path / "t").exists()


@pytest.mark.parametrize("step", [None, "x", -1, 2.5, float("nan"), torch.ones(5), 2**70])
def test_a_count_of_steps_is_a_whole_number(tmp_path, step):
    weight = torch.rand(5, DIM)
    state = {"exp_avg": weight, "exp_avg_sq": weight, "step": step}
    with pytest.raises(ValueError, match="step of the optimizer's state must be a whole number from 0 on"):
        oneemb.import_foreign(tmp_path / "t", {"w": weight}, "torch", state=state, with_state=True, snapshot="s")


@pytest.mark.parametrize("number", [-1, 2.5, "3", True, 2**70])
def test_numbers_of_arguments_are_whole_and_in_range(tmp_path, number):
    source, target = {"w": torch.zeros(5, DIM)}, tmp_path / "w.safetensors"
    for argument, call in {
        "step": lambda: oneemb.import_foreign(tmp_path, source, "torch", step=number, snapshot="s"),
        "embedding_dim": lambda: oneemb.import_foreign(tmp_path, tmp_path, "tfra", embedding_dim=number, snapshot="s"),
        "num_embeddings": lambda: oneemb.export_foreign(tmp_path, target, "torch", num_embeddings=number),
    }.items():
        with pytest.raises(ValueError, match=f"{argument} must be None or an int from [01] to"):
            call()


def test_weights_of_either_byte_order_and_of_no_rows(tmp_path):
    weight = np.arange(15.0).reshape(5, DIM)
    oneemb.import_foreign(tmp_path / "t", {"w": weight.astype(">f4")}, "torch", snapshot="s")
    assert_same(rows_in(tmp_path / "t", "s"), dict(enumerate(weight)))
    for rows in (0, 1):
        oneemb.import_foreign(tmp_path / "t", {"w": weight[:rows]}, "torch", snapshot=f"s{rows}")
        assert_same(rows_in(tmp_path / "t", f"s{rows}"), dict(enumerate(weight[:rows])))
    oneemb.export_foreign(tmp_path / "t", tmp_path / "w.safetensors", "torch", snapshot="s1")
    assert safetensors.torch.load_file(tmp_path / "w.safetensors")["weight"].tolist() == weight[:1].tolist()


@pytest.mark.parametrize(
    ("format", "name"),
    [("torch", ""), ("torch", "\ud800"), ("torchrec", "a.b"), ("tfra", "a\0b"), ("tfra", "a\nb"), ("tfra", "")],
)
def test_names_that_the_other_library_cannot_have_are_refused(tmp_path, format, name):
    target = tmp_path if format == "tfra" else tmp_path / "w.safetensors"
    with pytest.raises(ValueError, match="name must be the name of a table for"):
        oneemb.export_foreign(
            tmp_path / "t", target, format, name=name, snapshot="s",
            **({"num_embeddings": 5} if format == "torchrec" else {}),
        )  # fmt: skip


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64])
def test_weights_of_other_dtypes(tmp_path, dtype):
    weight = torch.randn(5, DIM, dtype=torch.float64).to(dtype)
    report = oneemb.import_foreign(tmp_path / "t", {"w": weight}, "torch", ids=IDS, snapshot="s")
    assert_same(rows_in(tmp_path / "t", "s"), dict(zip(IDS.tolist(), weight.float().numpy(), strict=True)))
    assert any("float64" in one for one in report.not_carried) == (dtype is torch.float64)
    oneemb.export_foreign(tmp_path / "t", tmp_path / "w.safetensors", "torch", snapshot="s")
    out = safetensors.torch.load_file(tmp_path / "w.safetensors")
    wanted = weight.float() if dtype is torch.float64 else weight
    assert out["weight"].dtype == wanted.dtype
    assert {int(one): row.tolist() for one, row in zip(out["weight.ids"], out["weight"], strict=True)} == {
        int(one): row.tolist() for one, row in zip(IDS, wanted, strict=True)
    }


def test_a_dense_weight_has_row_r_for_id_r_and_zeros_for_others(tmp_path):
    ids, weight = torch.tensor([6, 0, 3]), torch.randn(3, DIM)
    oneemb.import_foreign(tmp_path / "t", {"w": weight}, "torch", ids=ids, snapshot="s")
    oneemb.export_foreign(tmp_path / "t", tmp_path / "w.safetensors", "torch", snapshot="s", num_embeddings=8)
    module = torch.nn.Embedding(8, DIM)
    module.load_state_dict(safetensors.torch.load_file(tmp_path / "w.safetensors"))
    wanted = torch.zeros(8, DIM)
    wanted[ids] = weight
    assert torch.equal(module.weight, wanted)
    with pytest.raises(ValueError, match="ids must be from 0 to 5"):
        oneemb.export_foreign(tmp_path / "t", tmp_path / "v.safetensors", "torch", snapshot="s", num_embeddings=6)
    assert not (tmp_path / "v.safetensors").exists()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["t", "w.safetensors"]


def test_arguments_that_do_not_fit_are_named(tmp_path):
    weights = {"w": torch.zeros(5, DIM)}
    for options, text in [
        ({"ids": torch.arange(4)}, r"ids must be integers \[5\]"),
        ({"ids": torch.arange(5.0)}, r"ids must be integers \[5\]"),
        ({"state": {"exp_avg": torch.zeros(5, DIM)}, "with_state": True}, "must have the optimizer's state"),
        ({"state": {"exp_avg": torch.zeros(4, DIM)}, "with_state": True, "optimizer": "adam"}, "exp_avg_sq"),
        ({"key_type": "int32"}, "key_type must only be given for tfra or hugectr"),
        ({"embedding_dim": 3}, "embedding_dim must only be given for"),
    ]:
        with pytest.raises(ValueError, match=text):
            oneemb.import_foreign(tmp_path / "t", weights, "torch", snapshot="s", **options)
    with pytest.raises(ValueError, match="format must be 'tfra', 'torchrec', 'torch', 'hugectr', got 'onnx'"):
        oneemb.import_foreign(tmp_path / "t", weights, "onnx", snapshot="s")
    with pytest.raises(oneemb.StorageError, match="id 3 of row 4 comes a second time"):
        oneemb.import_foreign(tmp_path / "t", weights, "torch", ids=np.array([1, 2, 3, 4, 3]), snapshot="s")
    for target, format, options, text in [
        ("out", "torch", {}, "target must be a file .safetensors"),
        ("w.safetensors", "tfra", {"name": "a"}, "target must be a folder"),
        ("out", "tfra", {}, "name must be given"),
        ("w.safetensors", "torchrec", {"name": "t"}, "num_embeddings must be given for 'torchrec'"),
        ("w.safetensors", "torch", {"managed_collisions": True}, "managed_collisions=True must only"),
    ]:
        with pytest.raises(ValueError, match=text):
            oneemb.export_foreign(tmp_path / "t", tmp_path / target, format, snapshot="s", **options)
