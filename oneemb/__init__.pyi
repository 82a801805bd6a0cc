"""Public names for editors and type checkers; the package itself loads each name when it is first used."""

from oneemb import data as data, nn as nn, optim as optim, options as options, policies as policies, sinks as sinks
from oneemb.checkpoints.folders import release as release
from oneemb.checkpoints.named_snapshot import snapshot_name as snapshot_name
from oneemb.data.source import BadRowError as BadRowError, ChangedSourceError as ChangedSourceError
from oneemb.embeddings.averaged import AveragedEmbedding as AveragedEmbedding
from oneemb.embeddings.embedding import (
    MultiTableEmbedding as MultiTableEmbedding,
    MultiTableMultiColumnEmbedding as MultiTableMultiColumnEmbedding,
)
from oneemb.embeddings.metrics_log import log_metrics as log_metrics
from oneemb.embeddings.summary import summary as summary
from oneemb.graph.build_error import BuildError as BuildError
from oneemb.graph.ops import NonFiniteGradientError as NonFiniteGradientError
from oneemb.graph.ranks import RankError as RankError
from oneemb.hashing import expected_collisions as expected_collisions, hash_ids as hash_ids
from oneemb.kernels.cuda_driver import DriverError as DriverError
from oneemb.options import (
    make_cached_host_mem_store_options as make_cached_host_mem_store_options,
    make_cached_remote_store_options as make_cached_remote_store_options,
    make_cached_ssd_store_options as make_cached_ssd_store_options,
    make_column_options as make_column_options,
    make_constant_initializer as make_constant_initializer,
    make_device_mem_store_options as make_device_mem_store_options,
    make_normal_initializer as make_normal_initializer,
    make_table as make_table,
    make_table_options as make_table_options,
    make_trunc_normal_initializer as make_trunc_normal_initializer,
    make_uniform_initializer as make_uniform_initializer,
)
from oneemb.planning.machine import (
    Machine as Machine,
    StepCost as StepCost,
    measure_machine as measure_machine,
)
from oneemb.planning.plan import (
    Plan as Plan,
    plan as plan,
)
from oneemb.planning.planned_embedding import (
    PlannedEmbedding as PlannedEmbedding,
    unique_share as unique_share,
)
from oneemb.rows.export_rows import export_rows as export_rows
from oneemb.rows.foreign import (
    ForeignReport as ForeignReport,
    export_foreign as export_foreign,
    import_foreign as import_foreign,
)
from oneemb.rows.import_rows import import_rows as import_rows
from oneemb.rows.reader import changed_ids as changed_ids, make_persistent_table_reader as make_persistent_table_reader
from oneemb.rows.writer import make_persistent_table_writer as make_persistent_table_writer
from oneemb.serving.inference import InferenceEmbedding as InferenceEmbedding
from oneemb.serving.model import (
    ModelVersion as ModelVersion,
    ServedModel as ServedModel,
    serve_model as serve_model,
)
from oneemb.sinks.publisher import publish as publish
from oneemb.sinks.version import PublishError as PublishError
from oneemb.storage.errors import (
    BrokenStoreError as BrokenStoreError,
    CorruptTableError as CorruptTableError,
    ForkedProcessError as ForkedProcessError,
    FormatVersionError as FormatVersionError,
    IndexMemoryError as IndexMemoryError,
    LockedError as LockedError,
    OtherSnapshotError as OtherSnapshotError,
    OtherTableError as OtherTableError,
    RowWidthError as RowWidthError,
    SnapshotExistsError as SnapshotExistsError,
    SnapshotNeededError as SnapshotNeededError,
    SnapshotNotFoundError as SnapshotNotFoundError,
    StorageError as StorageError,
    StoreFullError as StoreFullError,
    UnsavedRowsWarning as UnsavedRowsWarning,
)
from oneemb.storage.objects.pull import pull as pull
from oneemb.storage.objects.push import push as push
from oneemb.storage.remote.parameter_server import (
    LostRowsError as LostRowsError,
    ServerError as ServerError,
    ServerTimeoutError as ServerTimeoutError,
)
from oneemb.storage.table.snapshot_file import RenameUncertainError as RenameUncertainError
from oneemb.training.compiled_graph import EvalGraph as EvalGraph, GraphConfig as GraphConfig
from oneemb.training.eager import Optimizer as Optimizer
from oneemb.training.save_every import SaveEvery as SaveEvery
from oneemb.training.train_graph import TrainGraph as TrainGraph

__version__: str
