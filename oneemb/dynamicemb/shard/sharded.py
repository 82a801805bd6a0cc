"""Bases of the sharders and of the sharded collections of `oneemb.dynamicemb.shard`."""

import functools
import logging
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, cast

import torch
from torchrec.distributed.embedding_sharding import KJTListSplitsAwaitable
from torchrec.distributed.embedding_types import BaseEmbeddingSharder, KJTList
from torchrec.distributed.types import (
    Awaitable,
    LazyAwaitable,
    ParameterSharding,
    QuantizedCommCodecs,
    ShardedModule,
    ShardingEnv,
)
from torchrec.modules.embedding_configs import BaseEmbeddingConfig
from torchrec.optim.fused import FusedOptimizerModule
from torchrec.optim.keyed import CombinedOptimizer, KeyedOptimizer
from torchrec.sparse.jagged_tensor import JaggedTensor, KeyedJaggedTensor, KeyedTensor
from torchrec.streamable import Multistreamable

from oneemb.adapters.tables import holder_of, in_backward_optimizers
from oneemb.dynamicemb.batched_dynamicemb_tables import BatchedDynamicEmbeddingTablesV2
from oneemb.dynamicemb.dynamicemb_config import (
    DynamicEmbPoolingMode,
    DynamicEmbTableOptions,
    data_type_to_dtype,
    policy_of,
)
from oneemb.dynamicemb.planner import DynamicEmbParameterSharding
from oneemb.dynamicemb.tables import DynamicTables, NamedTable
from oneemb.dynamicemb.types import initializer_of
from oneemb.torchrec.configs import columns_of
from oneemb.torchrec.optimizers import row_stepper
from oneemb.torchrec.sharded import LookupContext, ShardedCollection
from oneemb.torchrec.sharder import collection_on_ranks, comm_dtype_of, configs_of, rows_of
from oneemb.torchrec.tables import TableRows

__all__ = ["DynamicSharder", "ShardedDynamic"]

_log = logging.getLogger("oneemb")


@dataclass
class _Context(Multistreamable):
    """Contexts of one call: for the dynamic tables, and for the other tables."""

    dynamic: LookupContext = field(default_factory=LookupContext)
    static: Any = None

    def record_stream(self, stream: torch.Stream) -> None:
        self.dynamic.record_stream(stream)
        if self.static is not None:
            self.static.record_stream(stream)


class _Merged(LazyAwaitable[Any]):
    """Result of a call, joined from the result of the dynamic tables and that of the other tables.

    Args:
        parts: both results.
        names_of: for each part, {name of an embedding in the part: its name in the joined result}. The names differ for
            features that both parts have.
        names: names in the joined result, in their order.
    """

    def __init__(
        self, parts: Sequence[LazyAwaitable[Any]], names_of: Sequence[Mapping[str, str]], names: Sequence[str]
    ):
        super().__init__()
        self._parts, self._names_of, self._names = parts, names_of, names

    def _wait_impl(self) -> Any:
        found = [part.wait() for part in self._parts]
        if isinstance(found[0], KeyedTensor):
            pooled: dict[str, torch.Tensor] = {}
            for part, names in zip(found, self._names_of, strict=True):
                pooled |= {names[name]: tensor for name, tensor in part.to_dict().items()}
            lengths = [pooled[name].shape[1] for name in self._names]
            return KeyedTensor(list(self._names), lengths, torch.cat([pooled[name] for name in self._names], 1))
        embeddings: dict[str, JaggedTensor] = {}
        for part, names in zip(found, self._names_of, strict=True):
            embeddings |= {names[name]: tensor for name, tensor in part.items()}
        return {name: embeddings[name] for name in self._names}


@dataclass
class _RowDist:
    """{feature: `dist_type`}, in the attribute that dynamicemb's tools read."""

    _dist_type_per_feature: dict[str, str]


class ShardedDynamic(ShardedModule[KJTList, list[Any], Any, _Context], FusedOptimizerModule):
    """Base of both sharded collections: joins a sharded collection of the dynamic tables and one of the other tables.

    Args:
        dynamic: collection of the dynamic tables.
        static: TorchRec's sharded collection of the other tables; None = all tables are dynamic.
        configs: configs of all tables, in their order.
        tables: dynamic tables, an entry for each embedding.
        unsharded: class of the module that is sharded.
    """

    def __init__(
        self, dynamic: ShardedCollection, static: Any, configs: Sequence[BaseEmbeddingConfig],
        tables: Sequence[DynamicTables], unsharded: type[torch.nn.Module],
    ):  # fmt: skip
        super().__init__()
        self._unsharded = unsharded
        holders = dynamic.collection.holders
        self._dynamic, self.rows = (dynamic,), dynamic.rows
        holder = holder_of(dict(getattr(dynamic, holders).items()))
        mine = {config.name for config in dynamic.collection.configs}
        others = [config for config in configs if config.name not in mine]
        self._static = (static,)
        whole = {(configs[column.table].name, column.feature): column.name for column in columns_of(configs)}
        self._names = list(whole.values())
        self._names_of = [
            {column.name: whole[part[column.table].name, column.feature] for column in columns_of(part)}
            for part in (dynamic.collection.configs, others)
        ]
        self._static_features = list(dict.fromkeys(feature for config in others for feature in config.feature_names))
        if static is not None:
            for name, module in getattr(static, holders).items():
                holder[name] = module
        setattr(self, holders, holder)
        self._tables = list(tables)
        pooling = DynamicEmbPoolingMode.NONE if holders == "embeddings" else DynamicEmbPoolingMode.SUM
        self._emb_modules = torch.nn.ModuleList(
            BatchedDynamicEmbeddingTablesV2(
                [table.options for table in embedding.tables], embedding.names, pooling_mode=pooling, tables=embedding
            )
            for embedding in tables
        )
        features = {config.name: config.feature_names for config in configs}
        all_tables = [table for embedding in tables for table in embedding.tables]
        dist = {feature: table.options.dist_type for table in all_tables for feature in features[table.name]}
        self._sharding_type_to_sharding = {"row_wise": _RowDist(dist)}
        self._input_dists = [_RowDist(dist)]
        optimizers: list[tuple[str, KeyedOptimizer]] = [("", dynamic.fused_optimizer)]
        if static is not None:
            optimizers.append(("", static.fused_optimizer))
        self._fused_optimizer = CombinedOptimizer(cast(Any, optimizers))

    @property
    def fused_optimizer(self) -> KeyedOptimizer:
        """Optimizer that steps the rows in the backward pass."""
        return self._fused_optimizer

    def create_context(self) -> _Context:
        """New context for one call."""
        static = self._static[0]
        return _Context(self._dynamic[0].create_context(), None if static is None else static.create_context())

    def input_dist(self, ctx: _Context, features: Any) -> Awaitable[Awaitable[KJTList]]:
        """Send the keys of a batch to their owners; see `ShardedCollection.input_dist` of `oneemb.torchrec`."""
        if isinstance(features, LazyAwaitable):
            features = features.wait()
        sent = cast(Any, self._dynamic[0].input_dist(ctx.dynamic, features)).awaitables
        if self._static[0] is None:
            return KJTListSplitsAwaitable(sent, ctx)
        static_features = _select(features, self._static_features)
        return KJTListSplitsAwaitable([*sent, self._static[0].input_dist(ctx.static, static_features)], ctx)

    def compute(self, ctx: _Context, dist_input: Sequence[Any]) -> list[Any]:
        """Rows of the batch."""
        dynamic = self._tables
        if self.training:
            for tables in dynamic:
                tables.before_lookup()
        found: list[Any] = list(self._dynamic[0].compute(ctx.dynamic, list(dist_input)[: len(dynamic)]))
        if self.training:
            for tables in dynamic:
                tables.after_lookup()
        if self._static[0] is not None:
            found.append(self._static[0].compute(ctx.static, list(dist_input)[len(dynamic)]))
        return found

    def output_dist(self, ctx: _Context, output: list[Any]) -> LazyAwaitable[Any]:
        """Result of the collection."""
        static = self._static[0]
        if static is None:
            return self._dynamic[0].output_dist(ctx.dynamic, output)
        parts = [self._dynamic[0].output_dist(ctx.dynamic, output[:-1]), static.output_dist(ctx.static, output[-1])]
        return _Merged(parts, self._names_of, self._names)

    @property
    def unsharded_module_type(self) -> type[torch.nn.Module]:
        """Class of the module that was sharded."""
        return self._unsharded

    @property
    def device(self) -> torch.device:
        """Device on which lookups run."""
        return self._dynamic[0].device

    def close(self) -> None:
        """Free memory and files of dynamic tables, and release the locks on their paths."""
        self._dynamic[0].close()


class DynamicSharder(BaseEmbeddingSharder[torch.nn.Module]):
    """Base of both sharders; see `DynamicEmbeddingCollectionSharder`."""

    _stock: type[Any]
    _of: type[torch.nn.Module]
    _own: type[Any]
    _own_sharder: type[Any]
    _sharded: type[ShardedDynamic]

    def __init__(
        self, fused_params: Mapping[str, Any] | None, qcomm_codecs_registry: Mapping[str, QuantizedCommCodecs] | None,
        seed: int, num_threads: int | None, **stock: Any,
    ):  # fmt: skip
        super().__init__(fused_params=dict(fused_params or {}))
        self._codecs, self._seed, self._num_threads = qcomm_codecs_registry, seed, num_threads
        static = {name: value for name, value in (fused_params or {}).items() if name != "initial_accumulator_value"}
        self._static = self._stock(
            static, None if qcomm_codecs_registry is None else dict(qcomm_codecs_registry), **stock
        )

    @property
    def module_type(self) -> type[torch.nn.Module]:
        """TorchRec's class, whose modules this sharder shards."""
        return self._of

    def sharding_types(self, compute_device_type: str) -> list[str]:
        """Sharding types that a plan may have: those of TorchRec's sharder, and row-wise for dynamic tables."""
        kinds = list(self._static.sharding_types(compute_device_type))
        return kinds if "row_wise" in kinds else [*kinds, "row_wise"]

    def compute_kernels(self, sharding_type: str, compute_device_type: str) -> list[str]:
        """Compute kernels that a plan may have."""
        return list(self._static.compute_kernels(sharding_type, compute_device_type))

    def shardable_parameters(self, module: torch.nn.Module) -> dict[str, torch.nn.Parameter]:
        """Parameters for a planner."""
        return dict(self._static.shardable_parameters(module))

    def shard(
        self,
        module: torch.nn.Module,
        params: dict[str, ParameterSharding],
        env: ShardingEnv,
        device: torch.device | None = None,
        module_fqn: str | None = None,
    ) -> Any:
        """The module, sharded as the plan `params` says. Every rank of `env` makes the call. ValueError if an optimizer
        or an option is not supported for dynamic tables."""
        plans = {name: plan for name, plan in params.items() if isinstance(plan, DynamicEmbParameterSharding)}
        if not plans:
            return self._static_sharder(module, device).shard(module, params, env, device, module_fqn)
        configs = configs_of(module)
        dynamic = [config for config in configs if config.name in plans]
        others = [config for config in configs if config.name not in plans]
        if env.process_group is None:
            raise ValueError(
                f"env must have a process group, between whose ranks module {module_fqn!r} is sharded, got none"
            )
        device = device or torch.device("cpu")
        options = [plans[config.name].dynamicemb_options for config in dynamic]
        size = env.process_group.size()
        tables = [_table_rows(option, config, device, size) for option, config in zip(options, dynamic, strict=True)]
        rows = dict(zip([config.name for config in configs], rows_of(module), strict=True))
        collection, for_keys = collection_on_ranks(
            self._own, module, dynamic, env.process_group, device, comm_dtype_of(self._codecs or {}),
            self.fused_params or {}, [rows[config.name] for config in dynamic], tables=tables,
            store_options={config.name: one.external_storage for config, one in zip(dynamic, options, strict=True)},
            seed=self._seed, num_threads=self._num_threads,
        )  # fmt: skip
        sharded = ShardedCollection(collection, type(module), for_keys)
        static = None
        if others:
            stock: Any = _static_part(module, others)
            static = self._static_sharder(stock, device).shard(
                stock, {config.name: params[config.name] for config in others}, env, device, module_fqn
            )
        return self._sharded(
            sharded, static, configs, list(_dynamic_tables(collection, dynamic, options)), type(module)
        )

    def _static_sharder(self, module: torch.nn.Module, device: torch.device | None) -> Any:
        """Sharder of tables that are not dynamic: TorchRec's; or that of `oneemb.torchrec`, on a CPU with an optimizer
        that FBGEMM has only on GPUs."""
        if device is not None and device.type == "cuda" or _has_on_cpu(module, self.fused_params or {}):
            return self._static
        _log_once(
            "FBGEMM does not have the optimizer of tables that are not dynamic on the CPU: they are those of"
            " oneemb.torchrec"
        )
        return self._own_sharder(
            self.fused_params, self._codecs, module_type=self._of, seed=self._seed, num_threads=self._num_threads
        )


def _table_rows(
    options: DynamicEmbTableOptions, config: BaseEmbeddingConfig, device: torch.device, ranks: int
) -> TableRows:
    budget = None
    if options.caching and device.type == "cuda":
        budget = max(1, options.local_hbm_for_values >> 20)
    elif device.type != "cuda":
        _log_once(
            "lookups run on the CPU: rows of dynamic tables are in memory; caching and global_hbm_for_values have no"
            " effect"
        )
    if options.embedding_dtype not in (None, data_type_to_dtype(config.data_type)):
        raise ValueError(
            f"embedding_dtype of table {config.name!r} must be the data_type of its config, {config.data_type}, got"
            f" {options.embedding_dtype}; set data_type, or leave embedding_dtype out"
        )
    begins = initializer_of(options.initializer_args, config.num_embeddings)
    return TableRows(begins, policy_of(options, config.num_embeddings, ranks), budget)


_ON_CPU = {"sgd", "exact_sgd", "exact_adagrad", "exact_row_wise_adagrad"}
"""Optimizers that FBGEMM has on the CPU, as values of its EmbOptimType."""


def _has_on_cpu(module: Any, fused_params: Mapping[str, Any]) -> bool:
    asked = fused_params.get("optimizer", "exact_sgd")
    for parameter in module.parameters():
        classes = getattr(parameter, "_optimizer_classes", ())
        if classes and not classes[0].__name__.lower().endswith(("sgd", "adagrad")):
            return False
        if not classes and getattr(asked, "value", asked) not in _ON_CPU:
            return False
    return True


@functools.cache
def _log_once(words: str) -> None:
    _log.info(words)


def _static_part(module: Any, configs: list[Any]) -> Any:
    """TorchRec's collection of some of a module's tables, with their weights."""
    holders = "embedding_bags" if hasattr(module, "embedding_bags") else "embeddings"
    own: dict[str, Any] = {"is_weighted": module.is_weighted()} if hasattr(module, "is_weighted") else {}
    if hasattr(module, "need_indices"):
        own["need_indices"] = module.need_indices()
    part = type(module)(tables=configs, device=torch.device("meta"), **own)
    for config in configs:
        getattr(part, holders)[config.name] = getattr(module, holders)[config.name]
    return part.train(module.training)


def _dynamic_tables(
    collection: Any, configs: Sequence[BaseEmbeddingConfig], options: Sequence[DynamicEmbTableOptions]
) -> Iterator[DynamicTables]:
    parameters = list(collection.parameters())
    for group in collection.ready():
        infos = [NamedTable(configs[t].name, options[t], configs[t].num_embeddings) for t in group.tables]
        steppers = [in_backward_optimizers(parameters[t])[0] for t in group.tables]
        yield DynamicTables(
            group.rows, infos, [one if hasattr(one, "param_groups") else row_stepper(one) for one in steppers]
        )


def _select(features: KeyedJaggedTensor, names: Sequence[str]) -> KeyedJaggedTensor:
    """The named features, in this order."""
    keys = features.keys()
    missing = [name for name in names if name not in keys]
    if missing:
        raise ValueError(f"the KeyedJaggedTensor lacks the features {missing}, it has {keys}")
    return features if list(names) == keys else features.permute([keys.index(name) for name in names])
