"""Sharders: TorchRec's `DistributedModelParallel` over tables that grow.

    model = DistributedModelParallel(model, sharders=get_default_sharders())

A plan decides only which modules are sharded. Every table is spread over all ranks by key, whatever sharding type,
kernel or place the plan has for it: no table is too large for one rank, and none needs balancing.
"""

import os
import warnings
from collections.abc import Mapping, Sequence
from typing import Any, Literal

import torch
import torchrec
from torchrec.distributed import model_parallel
from torchrec.distributed.comm_ops import get_gradient_division
from torchrec.distributed.embedding_types import BaseEmbeddingSharder, EmbeddingComputeKernel
from torchrec.distributed.types import ModuleSharder, ParameterSharding, QuantizedCommCodecs, ShardingEnv, ShardingType
from torchrec.modules.embedding_configs import BaseEmbeddingConfig

from oneemb.graph.ranks import Ranks
from oneemb.options import StoreOptions
from oneemb.torchrec.collection import Collection, ShardOptions
from oneemb.torchrec.modules import EmbeddingBagCollection, EmbeddingCollection
from oneemb.torchrec.optimizers import from_classes, from_fused_params
from oneemb.torchrec.sharded import ShardedEmbeddingBagCollection, ShardedEmbeddingCollection
from oneemb.torchrec.tables import TableRows, at_paths
from oneemb.torchrec.wrapped import managed_collision_sharders, pass_over_collections, refuse_behind_managed_collisions

_PLANNED_ROWS = 1 << 14
"""Largest number of rows that a planner is told of. It would refuse or fail with tables of unlimited size."""

_KERNELS = (EmbeddingComputeKernel.FUSED, EmbeddingComputeKernel.DENSE)
_KERNELS_OF_GPU = (
    EmbeddingComputeKernel.FUSED_UVM, EmbeddingComputeKernel.FUSED_UVM_CACHING, EmbeddingComputeKernel.KEY_VALUE,
)  # fmt: skip
"""Compute kernels for which TorchRec's planner has costs, besides `_KERNELS`, on a GPU."""


pass_over_collections()


class _Sharder(BaseEmbeddingSharder[torch.nn.Module]):
    """Base of `EmbeddingBagCollectionSharder` and `EmbeddingCollectionSharder`."""

    _own: type[Collection]

    def __init__(
        self,
        fused_params: Mapping[str, Any] | None = None,
        qcomm_codecs_registry: Mapping[str, QuantizedCommCodecs] | None = None,
        *,
        module_type: type[torch.nn.Module] | None = None,
        store_options: StoreOptions | Mapping[str, StoreOptions] | None = None,
        seed: int = 0,
        num_threads: int | None = None,
        comm_dtype: torch.dtype | None = None,
    ):
        super().__init__(fused_params=dict(fused_params or {}))
        self._module_type = module_type or self._own
        self._store_options, self._seed, self._num_threads = store_options, seed, num_threads
        self._comm_dtype = comm_dtype or comm_dtype_of(qcomm_codecs_registry or {})
        from_fused_params(self._fused_params or {})

    @property
    def module_type(self) -> type[torch.nn.Module]:
        """Class of the modules that this sharder shards."""
        return self._module_type

    def sharding_types(self, compute_device_type: str) -> list[str]:
        """All sharding types."""
        return [kind.value for kind in ShardingType]

    def compute_kernels(self, sharding_type: str, compute_device_type: str) -> list[str]:
        """Compute kernels that a plan may have."""
        kernels = _KERNELS + _KERNELS_OF_GPU if compute_device_type == "cuda" else _KERNELS
        return [kernel.value for kernel in kernels]

    def shardable_parameters(self, module: torch.nn.Module) -> dict[str, torch.nn.Parameter]:
        """For each table, a meta parameter [at most 16384 rows, D], from which a planner plans."""
        return {
            config.name: torch.nn.Parameter(
                torch.empty(
                    min(config.num_embeddings, _PLANNED_ROWS), config.embedding_dim, device="meta", dtype=torch.float32
                )
            )
            for config in configs_of(module)
        }

    def shard(
        self,
        module: torch.nn.Module,
        params: dict[str, ParameterSharding],
        env: ShardingEnv,
        device: torch.device | None = None,
        module_fqn: str | None = None,
    ) -> Any:
        """The module with its rows spread over the ranks of `env`. Every rank makes the call.

        Args:
            params: the plan for the module's tables.
            env: must have a process group.
            device: where lookups run; None = torch's default device.
            module_fqn: path of the module, for messages and as the name of a subfolder.

        Raises:
            ValueError: `env` has no process group, an optimizer is not supported for rows, or the module is inside a
                module of managed collisions that has no sharder.
            RuntimeError: the module has rows that cannot be taken over.
        """
        refuse_behind_managed_collisions(module, module_fqn or "")
        return self.shard_inside(module, params, env, device, module_fqn)

    def shard_inside(
        self,
        module: torch.nn.Module,
        params: dict[str, ParameterSharding],
        env: ShardingEnv,
        device: torch.device | None = None,
        module_fqn: str | None = None,
    ) -> Any:
        """Shard a module as `shard` does, also if another sharder shards the module around it."""
        if env.process_group is None:
            raise ValueError(
                f"env must have a process group, between whose ranks module {module_fqn!r} is sharded, got none"
            )
        self._check_plan(params, env, module_fqn or type(module).__name__)
        options, seed = self._options_of(module, module_fqn or "")
        configs = configs_of(module)
        collection, for_keys = collection_on_ranks(
            self._own, module, configs, env.process_group, device, self._comm_dtype, self._fused_params or {},
            rows_of(module), store_options=options, seed=seed, num_threads=self._num_threads,
        )  # fmt: skip
        bags = self._own is EmbeddingBagCollection
        sharded = ShardedEmbeddingBagCollection if bags else ShardedEmbeddingCollection
        return sharded(collection, type(module), for_keys)

    def _check_plan(self, params: Mapping[str, ParameterSharding], env: ShardingEnv, name: str) -> None:
        others = {
            table: sharding.sharding_type
            for table, sharding in params.items()
            if sharding.sharding_type != ShardingType.ROW_WISE.value
        }
        if others and env.rank == 0 and env.world_size > 1:
            planned = ", ".join(f"{kind} of {table!r}" for table, kind in others.items())
            warnings.warn(
                f"{name}: rows are spread over all ranks by key, so what the plan says ({planned:.300}) has no effect",
                stacklevel=3,
            )

    def _options_of(self, module: torch.nn.Module, name: str) -> tuple[Any, int]:
        if not isinstance(module, Collection):
            return _in_subfolder(self._store_options, name), self._seed
        if self._store_options is not None:
            raise ValueError(
                "store_options of the sharder must be None for these modules, which have store_options of their own;"
                " leave the sharder's out"
            )
        return module.store_options, module.seed


class EmbeddingBagCollectionSharder(_Sharder):
    """Shards `EmbeddingBagCollection`s: the key of a row decides on which rank the row lives.

    Rows are updated in the backward pass, by the optimizer of `apply_optimizer_in_backward`, else by `fused_params`,
    else, as in TorchRec, by SGD at a rate of 0.01. Gradients are divided by the number of ranks, or summed after
    `torchrec.distributed.comm_ops.set_gradient_division(False)`.

    Rows of a module on the meta device are initialized at their first lookup, by `init_fn`. If `init_fn` can only fill
    a whole table, it fills a table of `num_embeddings` rows. A module with weights keeps them: row r becomes id r.

    Args:
        fused_params: the optimizer and its options, by FBGEMM's names. Options for where FBGEMM keeps rows, or how it
            computes, have no effect; other unsupported options are refused.
        qcomm_codecs_registry: result of `get_qcomm_codecs_registry`, from which `comm_dtype` follows if that is None:
            float32 if any codec is float32, else bfloat16 if any is bfloat16, else float16. Rows and gradients travel
            in the same dtype.
        module_type: class of the modules to shard: `oneemb.torchrec.EmbeddingBagCollection`, or TorchRec's own class,
            so that a model need not be changed. None = the former.
        store_options, seed: for modules of TorchRec's own class, same as for `oneemb.torchrec.EmbeddingBagCollection`.
            `persistent_path` is a folder that all ranks see, or a list with one folder for each rank; each module has a
            subfolder of its name.
        num_threads: threads that run the kernels; None = one for each core. No result depends on it.
        comm_dtype: dtype in which rows and gradients travel between ranks, same as for `oneemb.MultiTableEmbedding`;
            None = float32.

    Raises:
        ValueError: an option of `fused_params`, or a codec, is not supported; the message names it.

    Example:
        >>> from torchrec.distributed.types import ShardingType
        >>> ShardingType.ROW_WISE.value in EmbeddingBagCollectionSharder().sharding_types("cpu")
        True

    Reference: torchrec.distributed.embeddingbag.EmbeddingBagCollectionSharder.
    """

    _own = EmbeddingBagCollection


class EmbeddingCollectionSharder(_Sharder):
    """Shards `EmbeddingCollection`s; arguments and behaviour are those of `EmbeddingBagCollectionSharder`.

    Reference: torchrec.distributed.embedding.EmbeddingCollectionSharder.
    """

    _own = EmbeddingCollection


def get_default_sharders(
    fused_params: Mapping[str, Any] | None = None,
    qcomm_codecs_registry: Mapping[str, QuantizedCommCodecs] | None = None,
    *,
    store_options: StoreOptions | None = None,
    seed: int = 0,
    num_threads: int | None = None,
    comm_dtype: torch.dtype | None = None,
) -> list[ModuleSharder[torch.nn.Module]]:
    """Sharders for oneemb's and TorchRec's collections; arguments are those of `EmbeddingBagCollectionSharder`.

    A FeatureProcessedEmbeddingBagCollection needs no sharder: the collection inside is sharded, and its processors are
    dense modules. Modules of managed collisions are sharded on one rank, and refused on several.

    Reference: torchrec.distributed.sharding_plan.get_default_sharders.
    """
    sharders: list[Any] = []
    for sharder, theirs in [
        (EmbeddingBagCollectionSharder, torchrec.EmbeddingBagCollection),
        (EmbeddingCollectionSharder, torchrec.EmbeddingCollection),
    ]:
        shared: dict[str, Any] = {"num_threads": num_threads, "comm_dtype": comm_dtype}
        sharders.append(sharder(fused_params, qcomm_codecs_registry, **shared))
        shared |= {"module_type": theirs, "store_options": store_options, "seed": seed}
        sharders.append(sharder(fused_params, qcomm_codecs_registry, **shared))
    return sharders + managed_collision_sharders(sharders)


def collection_on_ranks(
    own: type[Any], module: torch.nn.Module, configs: Sequence[BaseEmbeddingConfig],
    process_group: "torch.distributed.ProcessGroup", device: torch.device | None, comm_dtype: torch.dtype,
    fused_params: Mapping[str, Any], begin: Sequence[torch.Tensor | None], *, tables: Sequence[TableRows] | None = None,
    **options: Any,
) -> tuple[Any, Ranks | None]:  # fmt: skip
    """Collection of some of a module's tables, with rows spread over ranks, and connections between the ranks for keys
    (None = this process has all rows). Every rank makes the call.

    Args:
        own: class to make, `EmbeddingBagCollection` or `EmbeddingCollection`.
        module: module that is sharded; its class may be TorchRec's.
        configs: configs of the tables to take.
        process_group, device, comm_dtype: ranks that share the rows; where lookups run; dtype of rows between ranks.
        fused_params: optimizer of tables that have no optimizer.
        begin: first rows of each table; None = the table starts empty.
        tables: same as in `ShardOptions`.
        options: other arguments of `own`.

    Raises:
        ValueError: an optimizer is not supported for rows.
    """
    ranks = Ranks(process_group)
    # Rows and keys have separate connections: DistributedDataParallel sends gradients at the same time, and keys may
    # go ahead of rows. One rank that has all rows sends no request.
    for_rows = for_keys = None
    if ranks.size > 1 or torch.distributed.get_world_size() > 1:
        for_rows, for_keys = ranks.again(), ranks.again()
    weights = [_weight_of(module, config.name) for config in configs]
    division: Literal["mean", "sum"] = "mean" if get_gradient_division() else "sum"
    steppers = []
    for weight in weights:
        classes, of_classes = (getattr(weight, name, ()) for name in ("_optimizer_classes", "_optimizer_kwargs"))
        steppers.append(from_classes(classes, of_classes) if classes else from_fused_params(fused_params))
    on_ranks = ShardOptions(None if for_rows is None else for_rows.group, division, comm_dtype, steppers, begin, tables)
    collection = own(list(configs), **_arguments_of(module), device=device, on_ranks=on_ranks, **options)
    collection.train(module.training)
    for parameter, weight in zip(collection.parameters(), weights, strict=True):
        parameter.requires_grad_(weight.requires_grad)
    return collection, for_keys


def comm_dtype_of(codecs: Mapping[str, QuantizedCommCodecs]) -> torch.dtype:
    """Dtype of rows and gradients between ranks for the codecs of `get_qcomm_codecs_registry`. ValueError if a codec is
    not float32, float16 or bfloat16."""
    dtypes = {codec.quantized_dtype for both in codecs.values() for codec in (both.forward, both.backward)}
    if dtypes - {torch.float32, torch.float16, torch.bfloat16}:
        raise ValueError(f"qcomm_codecs_registry: codecs must be FP32, FP16 or BF16, got {dtypes}")
    if not dtypes or torch.float32 in dtypes:  # Rows and gradients travel in one dtype.
        return torch.float32
    return torch.bfloat16 if torch.bfloat16 in dtypes else torch.float16


def _in_subfolder(options: Any, name: str) -> Any:
    if isinstance(options, Mapping):
        return {table: _in_subfolder(option, name) for table, option in options.items()}
    return options and at_paths(options, [os.path.join(path, name) for path in options.persistent_path])


def configs_of(module: Any) -> list[BaseEmbeddingConfig]:
    """Configs of the tables of a collection, of TorchRec or oneemb."""
    configs = module.embedding_bag_configs if hasattr(module, "embedding_bag_configs") else module.embedding_configs
    return list(configs())


def _arguments_of(module: Any) -> dict[str, Any]:
    """Arguments with which the module was made and which oneemb's class has too."""
    if hasattr(module, "is_weighted"):
        return {"is_weighted": module.is_weighted()}
    return {"need_indices": module.need_indices()}


def _weight_of(module: Any, table: str) -> torch.Tensor:
    holders = module.embedding_bags if hasattr(module, "embedding_bags") else module.embeddings
    return holders[table].weight


def rows_of(module: torch.nn.Module) -> list[torch.Tensor | None]:
    """Rows of each table of a collection, of TorchRec or oneemb; None = the table has no rows yet."""
    if isinstance(module, Collection):
        return module.rows_to_shard()
    weights = [_weight_of(module, config.name) for config in configs_of(module)]
    return [None if weight.device.type == "meta" else weight.data for weight in weights]


class DistributedModelParallel(model_parallel.DistributedModelParallel):
    """TorchRec's class, whose default sharders are those of `get_default_sharders`: they spread the rows of oneemb's
    and of TorchRec's collections over all ranks by key.

    Args:
        module: the model.
        sharders: None = `get_default_sharders()`.
        arguments: TorchRec's other arguments, such as `env`, `device` and `plan`.

    Reference: torchrec.distributed.model_parallel.DistributedModelParallel.
    """

    def __init__(
        self,
        module: torch.nn.Module,
        *positional: Any,
        sharders: list[ModuleSharder[torch.nn.Module]] | None = None,
        **arguments: Any,
    ):
        by_position = positional[3:4]  # env, device, plan, sharders, ...
        if by_position == (None,):
            positional = (*positional[:3], get_default_sharders() if sharders is None else sharders, *positional[4:])
        elif sharders is not None or not by_position:
            arguments["sharders"] = get_default_sharders() if sharders is None else sharders
        super().__init__(module, *positional, **arguments)
