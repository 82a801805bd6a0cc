"""Arguments of a wrong type: the error names the argument, and errors that users see are importable from oneemb."""

import ast
import importlib
from pathlib import Path

import numpy as np
import pytest
import torch

import oneemb

ROOT = Path(__file__).parent.parent

WRONG = [None, "x", 3, 2.5, object(), [1], {}, True, torch.float32]


def embedding(folder, **more):
    return oneemb.MultiTableEmbedding(**{
        "name": "items", "embedding_dim": 4, "dtype": torch.float32, "key_type": torch.int64,
        "tables": [oneemb.make_table()], "store_options": oneemb.make_device_mem_store_options(folder), **more,
    })  # fmt: skip


def table_file(make):
    return lambda folder, **more: make(**{
        "paths": str(folder), "snapshot_name": "s", "key_type": np.int64, "value_type": np.float32, "storage_dim": 4,
        **more,
    })  # fmt: skip


# What makes an object in a folder, and for each argument the wrong values that are right for it.
CALLS = {
    "embedding": (embedding, {
        "name": ("x",), "embedding_dim": (3,), "dtype": (torch.float32,), "key_type": (), "tables": (),
        "store_options": (), "default_initializer": (None,), "padding_idx": (None, 3), "seed": (3,),
        "num_threads": (None, 3),
        "process_group": (None,), "gradients_of_ranks": (), "comm_dtype": (torch.float32,), "policy": (None,),
    }),
    "options": (lambda folder, **more: oneemb.make_cached_ssd_store_options(
        **{"cache_budget_mb": 1, "persistent_path": folder, **more}
    ), {
        "cache_budget_mb": (3,), "persistent_path": ("x", None), "capacity": (None, 3), "size_factor": (None, 3),
        "storage_dim": (None, 3), "physical_block_size": (), "host_cache_budget_mb": (3,), "cache_policy": (),
    }),
    "table": (lambda folder, **more: oneemb.make_table(**more), {"param": (None,), "replicate": (True,)}),
    "normal": (lambda folder, **more: oneemb.make_normal_initializer(**more), {"mean": (2.5, 3), "std": (2.5, 3)}),
    "optimizer": (lambda folder, **more: oneemb.Optimizer(
        **{"optimizer": torch.optim.SGD(embedding(folder).parameters()), **more}
    ), {"optimizer": (), "embeddings": (None, {})}),
    "average": (lambda folder, **more: oneemb.AveragedEmbedding(
        **{"embedding": embedding(folder / "rows"), "persistent_path": folder / "averages", **more}
    ), {"embedding": (), "decay": (None, True)}),
    "copy": (lambda folder, **more: embedding(folder).copy_to(**more), {"persistent_path": ("x",)}),
    "release": (lambda folder, **more: oneemb.release(**more), {"path": ("x",)}),
    "mlp": (lambda folder, **more: oneemb.nn.FusedMLP(
        **{"in_features": 4, "hidden_features": [8], "out_features": 1, **more}
    ), {
        "in_features": (3,), "hidden_features": (None, [1]), "out_features": (3,), "out_dropout_rate": (2.5, 3, True),
        "hidden_dropout_rates": (None, 2.5, 3, True, [1]),
    }),
    "import": (lambda folder, **more: oneemb.import_rows(
        **{"target": embedding(folder), "source": (torch.arange(2), torch.ones(2, 4)), **more}
    ), {"target": ("x", [1]), "table": (True, 3), "keys": ("x",),
        "values": ("x", [1]), "tables": (None, "x"), "state": ("x",), "with_state": (True,), "allow_nonfinite": (True,),
        "batch_size": (3,), "progress": (None,), "snapshot": (None,), "dtype": (None,),
    }),
    "export": (lambda folder, **more: oneemb.export_rows(
        **{"source": embedding(folder), "target": folder / "rows.npz", **more}
    ), {
        "source": ("x",), "target": (), "table": (None, 3), "with_state": (True,), "overwrite": (True,),
        "batch_size": (3,), "progress": (None,), "snapshot": (None,),
    }),
    "plan": (lambda folder, **more: oneemb.plan(**{"rows": 10, "embedding_dim": 4, "batch": 3, **more}), {
        "rows": (3,), "embedding_dim": (3,), "batch": (3,), "ids": (3,), "bags": (None, 3), "dtype": (),
        "comm_dtype": (), "unique": (True,), "optimizer": (3,), "ranks": (3,), "physical_block_size": (),
    }),
    "admit by chance": (lambda folder, **more: oneemb.policies.AdmitChance(**{"probability": 0.5, **more}), {
        "probability": (), "seed": (3,),
    }),
    "policy": (lambda folder, **more: oneemb.policies.RowPolicy(**more), {
        "evict": (None,), "admit": (None,), "absent": (), "refused": (None,), "when_full": (), "capacity": (None, 3),
    }),
    "reader": (table_file(oneemb.make_persistent_table_reader), {
        "paths": ("x",), "snapshot_name": ("x",), "key_type": (None, {}), "value_type": (None, {}, torch.float32),
    }),
    "writer": (table_file(oneemb.make_persistent_table_writer), {
        "paths": ("x",), "snapshot_name": ("x",), "storage_dim": (True, 3), "key_type": (None, {}),
        "value_type": (None, {}, torch.float32),
    }),
}  # fmt: skip

CASES = [(call, argument) for call, (_, arguments) in CALLS.items() for argument in arguments]


@pytest.mark.parametrize("call, argument", CASES)
def test_an_argument_of_a_wrong_type_is_named(tmp_path, call, argument):
    make, arguments = CALLS[call]
    for n, wrong in enumerate(WRONG):
        if not any(wrong is right or wrong == right and type(wrong) is type(right) for right in arguments[argument]):
            with pytest.raises((TypeError, ValueError), match=argument):
                make(tmp_path / str(n), **{argument: wrong})


@pytest.mark.parametrize(
    "make, said",
    [
        (lambda folder: embedding(folder, tables=2), r"tables must be a list.*got int 2; .*make_table\(\)\] \* 2"),
        (lambda folder: embedding(folder, embedding_dim="4"), "embedding_dim must be an int .*got str '4'"),
        (lambda folder: embedding(folder, dtype="float32"), "dtype must be torch.float32.*got str 'float32'"),
        (
            lambda folder: embedding(
                folder, tables=oneemb.make_device_mem_store_options(folder), store_options=[oneemb.make_table()]
            ),
            "store_options come after tables",
        ),
        (
            lambda folder: oneemb.import_rows((torch.arange(2), torch.ones(2, 4)), embedding(folder)),
            "target must be an embedding.*got tuple; pass the target first and the source second",
        ),
    ],
)
def test_a_common_mistake_is_told_with_its_remedy(tmp_path, make, said):
    with pytest.raises(TypeError, match=said):
        make(tmp_path)


@pytest.mark.parametrize("name", ["keys", "values", "tables", "state"])
def test_names_of_columns_of_a_source_without_any_are_an_error(tmp_path, name):
    target, arrays = embedding(tmp_path / "rows"), (np.arange(2), np.ones((2, 4), np.float32))
    paths = [tmp_path / "keys.npy", tmp_path / "values.npy"]
    for path, array in zip(paths, arrays, strict=True):
        np.save(path, array)
    for source in (arrays, paths, [arrays], iter([arrays]), paths[1]):
        with pytest.raises(ValueError, match=f"^{name} must only be given for a file .*; leave {name} out"):
            oneemb.import_rows(target, source, **{name: "other"})
    assert oneemb.import_rows(target, paths[1], keys=None) == 2


def test_a_folder_for_served_files_that_is_the_tables_own_is_an_error(tmp_path):
    trained = embedding(tmp_path)
    trained(torch.arange(3))
    trained.save_snapshot("first")
    with pytest.raises(ValueError, match="folder must be for served files alone"):
        oneemb.InferenceEmbedding.open(tmp_path, folder=tmp_path / ".")


def test_an_empty_folder_for_served_files_is_an_error_and_not_the_current_one(tmp_path, monkeypatch):
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    trained = embedding(tmp_path / "rows")
    trained(torch.arange(3))
    torch.save(trained.state_dict(), tmp_path / "model.pt")
    for serve in (
        lambda: oneemb.InferenceEmbedding.open(tmp_path / "rows", folder=""),
        lambda: oneemb.serve_model(tmp_path / "model.pt", trained, folder=""),
    ):
        with pytest.raises(ValueError, match="folder must name a folder for served files, got ''; leave it out"):
            serve()
    assert not list((tmp_path / "here").iterdir())


def test_columns_that_are_no_list_are_told_by_every_lookup(tmp_path):
    trained, ids, offsets = embedding(tmp_path), torch.arange(3), torch.tensor([0, 3])
    trained(ids)
    trained.save_snapshot("first")
    for look_up in (trained, trained.eval(), oneemb.InferenceEmbedding.open(tmp_path)):
        with pytest.raises(TypeError, match="columns must be a list of ints, the table of each column, got 3"):
            look_up(ids, offsets=offsets, columns=3)
        assert look_up(ids, offsets=offsets, columns=range(1)).shape == (1, 1, 4)


def test_a_plan_for_one_machine_says_so():
    plan = oneemb.plan(rows=1000, embedding_dim=4, batch=10, ranks=64)
    assert "64 ranks on 1 machine\n" in str(plan)


# Raised and caught by oneemb itself; and that of oneemb.tde, which needs torchrec.
NOT_SEEN = {"DamagedBlock", "DuplicateKeyError", "NoRoomError", "PullStoppedError", "RoomFullError", "StoppedError"}


def test_errors_that_users_see_are_importable_from_oneemb():
    errors = {}
    for package in ("kernels", "storage", "graph", "oneemb"):
        for path in sorted((ROOT / package).rglob("*.py")):
            for node in ast.walk(ast.parse(path.read_text())):
                if isinstance(node, ast.ClassDef) and any(
                    ast.unparse(base).split(".")[-1].endswith(("Error", "Exception")) for base in node.bases
                ):
                    errors[node.name] = path.relative_to(ROOT).with_suffix("")
    seen = {name: path for name, path in errors.items() if not name.startswith("_") and name not in NOT_SEEN}
    assert len(seen) >= 18
    for name, path in seen.items():
        module = ".".join(path.parts if path.parts[0] == "oneemb" else ("oneemb", *path.parts))
        assert name in oneemb.__all__, f"{name} of {module} is not importable from oneemb"
        assert getattr(oneemb, name) is getattr(importlib.import_module(module), name)
