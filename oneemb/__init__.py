"""Embedding tables for recommenders: keyed by any 64-bit id, larger than memory, trained inside a PyTorch graph.

A name is loaded when it is first used: `import oneemb` itself loads neither torch nor numba.
"""

import importlib
import os

__version__ = "0.1.0"

if os.path.isdir(__path__[0]) and not os.path.isdir(os.path.join(__path__[0], "kernels")):
    raise ImportError(
        f"{__path__[0]} must hold graph, storage and kernels, as folders or as links to the folders beside it; this"
        " copy of the source tree has no links, as those of some archives. Clone it with git, or run in its root:"
        " rm -f oneemb/graph oneemb/storage oneemb/kernels && ln -s ../graph ../storage ../kernels oneemb/"
    )

_MODULES = {
    "embeddings.averaged": ("AveragedEmbedding",),
    "embeddings.metrics_log": ("log_metrics",),
    "embeddings.summary": ("summary",),
    "embeddings.embedding": ("MultiTableEmbedding", "MultiTableMultiColumnEmbedding"),
    "training.eager": ("Optimizer",),
    "options": (
        "make_cached_host_mem_store_options",
        "make_cached_remote_store_options",
        "make_cached_ssd_store_options",
        "make_column_options",
        "make_constant_initializer",
        "make_device_mem_store_options",
        "make_normal_initializer",
        "make_table",
        "make_table_options",
        "make_trunc_normal_initializer",
        "make_uniform_initializer",
    ),
    "hashing": ("expected_collisions", "hash_ids"),
    "checkpoints.named_snapshot": ("snapshot_name",),
    "planning.machine": ("Machine", "StepCost", "measure_machine"),
    "planning.plan": ("Plan", "plan"),
    "planning.planned_embedding": ("PlannedEmbedding", "unique_share"),
    "rows.reader": ("changed_ids", "make_persistent_table_reader"),
    "rows.writer": ("make_persistent_table_writer",),
    "rows.export_rows": ("export_rows",),
    "rows.foreign": ("ForeignReport", "export_foreign", "import_foreign"),
    "rows.import_rows": ("import_rows",),
    "sinks.publisher": ("publish",),
    "training.compiled_graph": ("EvalGraph", "GraphConfig"),
    "checkpoints.folders": ("release",),
    "serving.inference": ("InferenceEmbedding",),
    "serving.model": ("ModelVersion", "ServedModel", "serve_model"),
    "training.save_every": ("SaveEvery",),
    "training.train_graph": ("TrainGraph",),
}
_WHERE = {name: f"oneemb.{module}" for module, names in _MODULES.items() for name in names}
_WHERE |= {
    **{
        name: "oneemb.storage.errors"
        for name in (
            "BrokenStoreError",
            "CorruptTableError",
            "ForkedProcessError",
            "FormatVersionError",
            "IndexMemoryError",
            "LockedError",
            "OtherSnapshotError",
            "OtherTableError",
            "RowWidthError",
            "SnapshotExistsError",
            "SnapshotNeededError",
            "SnapshotNotFoundError",
            "StorageError",
            "StoreFullError",
            "UnsavedRowsWarning",
        )  # fmt: skip
    },
    "BadRowError": "oneemb.data.source",
    "BuildError": "oneemb.graph.build_error",
    "ChangedSourceError": "oneemb.data.source",
    "pull": "oneemb.storage.objects.pull",
    "push": "oneemb.storage.objects.push",
    "DriverError": "oneemb.kernels.cuda_driver",
    "LostRowsError": "oneemb.storage.remote.parameter_server",
    "NonFiniteGradientError": "oneemb.graph.ops",
    "PublishError": "oneemb.sinks.version",
    "RankError": "oneemb.graph.ranks",
    "RenameUncertainError": "oneemb.storage.table.snapshot_file",
    "ServerError": "oneemb.storage.remote.parameter_server",
    "ServerTimeoutError": "oneemb.storage.remote.parameter_server",
}
_SUBMODULES = ("data", "nn", "optim", "options", "policies", "sinks")

__all__ = [*_WHERE, *_SUBMODULES]  # noqa: PLE0604 - all of them are strings


def __getattr__(name: str) -> object:
    if name in _WHERE:
        return getattr(importlib.import_module(_WHERE[name]), name)
    if name in _SUBMODULES:
        return importlib.import_module(f"oneemb.{name}")
    if name == "make_id_initializer":  # deprecated; it warns
        return importlib.import_module("oneemb.options").make_id_initializer
    raise AttributeError(f"module 'oneemb' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted([*globals(), *__all__])
