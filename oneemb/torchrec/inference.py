"""TorchRec's functions for inference, for models with oneemb's collections, TorchRec's collections, or both.

    model = quantize_inference_model(model)                   rows become integers, read-only
    model, plan = shard_quant_model(model, world_size=2, compute_device="cpu")
    torch.jit.script(torch.fx.GraphModule(model, torchrec.fx.Tracer().trace(model)))

TorchRec's own functions do the same if `DEFAULT_QUANT_MAPPING` and `DEFAULT_SHARDERS`, which list the classes of both
libraries, are passed to them.

Reference: torchrec.inference.modules.
"""

import copy
from collections.abc import Callable, Mapping
from typing import Any, cast

import torch
import torchrec.inference.modules as theirs
from torchrec.distributed.embedding_types import BaseQuantEmbeddingSharder
from torchrec.distributed.planner import ParameterConstraints
from torchrec.distributed.types import ModuleSharder, ParameterSharding, ShardingEnv, ShardingPlan
from torchrec.modules.fp_embedding_modules import FeatureProcessedEmbeddingBagCollection as FloatFeatureProcessed
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor, KeyedTensor

import oneemb.torchrec.quant as quant
from oneemb.torchrec.modules import EmbeddingBagCollection, EmbeddingCollection
from oneemb.torchrec.quant_collection import QuantCollection
from oneemb.torchrec.quant_shards import OnDevices, OnRanks, Place
from oneemb.torchrec.sharded import ShardedEmbeddingBagCollection, ShardedEmbeddingCollection

_QUANTIZED: dict[type[torch.nn.Module], Any] = {
    EmbeddingBagCollection: quant.EmbeddingBagCollection,
    EmbeddingCollection: quant.EmbeddingCollection,
    ShardedEmbeddingBagCollection: quant.ShardedEmbeddingBagCollection,
    ShardedEmbeddingCollection: quant.ShardedEmbeddingCollection,
}

DEFAULT_QUANT_MAPPING: dict[str, type[torch.nn.Module]] = {
    **theirs.DEFAULT_QUANT_MAPPING,
    **{torch.typename(float_class): quantized for float_class, quantized in _QUANTIZED.items()},
}
"""Classes of TorchRec and of oneemb, for the argument `quantization_mapping` of TorchRec's
`quantize_inference_model`."""


class FeatureProcessedEmbeddingBagCollection(torch.nn.Module):
    """Feature processors in front of a quantized collection. They return a KeyedJaggedTensor with weights."""

    def __init__(self, feature_processor: torch.nn.Module, bags: quant.EmbeddingBagCollection):
        super().__init__()
        self.feature_processor = feature_processor
        self.bags = bags

    def forward(self, features: KeyedJaggedTensor) -> KeyedTensor:
        """Pooled embeddings of the processed features."""
        return self.bags(self.feature_processor(features))


def quantize_embeddings(
    module: torch.nn.Module,
    dtype: torch.dtype,
    inplace: bool,
    additional_qconfig_spec_keys: list[type[torch.nn.Module]] | None = None,
    additional_mapping: dict[type[torch.nn.Module], type[torch.nn.Module]] | None = None,
    output_dtype: torch.dtype = torch.float,
    per_table_weight_dtype: dict[str, torch.dtype] | None = None,
) -> torch.nn.Module:
    """Return the model, or a copy, with quantized collections, in eval mode.

    Args:
        module: the model, or a collection. All collections of oneemb.torchrec are quantized; for sharded collections
            every rank makes the call. TorchRec's function quantizes those of TorchRec.
        dtype: dtype of rows: float32, float16, int8, quint4x2 (4 bits) or quint2x4 (2 bits).
        inplace: True = change `module`; False = return a copy, which shares the rows of collections with `module`.
        additional_qconfig_spec_keys, additional_mapping: same as in TorchRec's function.
        output_dtype: dtype of the results of lookups.
        per_table_weight_dtype: {table name: dtype of its rows}, in place of `dtype`.

    Raises:
        ValueError: rows cannot be quantized to the dtype; the message names the table.
        StorageError: a row has a NaN, an infinity, or weights that do not fit; the message names the row.

    Reference: torchrec.inference.modules.quantize_embeddings.
    """
    quantized = _swap(module, _quantize(dtype, output_dtype, per_table_weight_dtype, additional_mapping or {}), inplace)
    return theirs.quantize_embeddings(
        quantized, dtype, True, additional_qconfig_spec_keys, additional_mapping, output_dtype, per_table_weight_dtype
    )


def quantize_inference_model(
    model: torch.nn.Module,
    quantization_mapping: dict[str, type[torch.nn.Module]] | None = None,
    per_table_weight_dtype: dict[str, torch.dtype] | None = None,
    fp_weight_dtype: torch.dtype = theirs.DEFAULT_QUANTIZATION_DTYPE,
    quantization_dtype: torch.dtype = theirs.DEFAULT_QUANTIZATION_DTYPE,
    output_dtype: torch.dtype = torch.float,
) -> torch.nn.Module:
    """Return the model with its collections quantized in place, in eval mode.

    Args:
        model, per_table_weight_dtype, output_dtype: same as for `quantize_embeddings`.
        quantization_mapping: same as in TorchRec's function, for TorchRec's modules; oneemb's are always quantized.
        fp_weight_dtype: dtype of rows in collections behind feature processors.
        quantization_dtype: dtype of other rows.

    Raises:
        TypeError, ValueError, StorageError: same as `quantize_embeddings`.

    Reference: torchrec.inference.modules.quantize_inference_model.
    """
    of_processed = _quantize(fp_weight_dtype, output_dtype, per_table_weight_dtype, {})

    def processed(module: torch.nn.Module) -> torch.nn.Module | None:
        if not isinstance(module, FloatFeatureProcessed):
            return None
        feature_processor, bags = module.split()
        quantized = of_processed(bags)
        if quantized is None:
            return None
        return FeatureProcessedEmbeddingBagCollection(feature_processor, cast(Any, quantized))

    model = _swap(model, processed, inplace=True)
    model = _swap(model, _quantize(quantization_dtype, output_dtype, per_table_weight_dtype, {}), inplace=True)
    return theirs.quantize_inference_model(
        model, quantization_mapping, per_table_weight_dtype, fp_weight_dtype, quantization_dtype, output_dtype
    )


_Swap = Callable[[torch.nn.Module], torch.nn.Module | None]


def _quantize(
    dtype: torch.dtype, output_dtype: torch.dtype, by_table: Mapping[str, torch.dtype] | None,
    mapping: Mapping[type[torch.nn.Module], type[torch.nn.Module]],
) -> _Swap:  # fmt: skip
    """Function that returns the quantized form of a module; it returns None for a module that is no collection of
    oneemb, or whose class has an entry in `mapping`."""

    def swap(module: torch.nn.Module) -> torch.nn.Module | None:
        kinds = [quantized for kind, quantized in _QUANTIZED.items() if isinstance(module, kind)]
        if not kinds or type(module) in mapping:
            return None
        made: torch.nn.Module = kinds[0].quantized(module, dtype, output_dtype, by_table)
        for before in vars(module)["_forward_pre_hooks"].values():
            made.register_forward_pre_hook(before)
        for after in vars(module)["_forward_hooks"].values():
            made.register_forward_hook(after)
        return made.eval()

    return swap


def _swap(model: torch.nn.Module, swap: _Swap, inplace: bool) -> torch.nn.Module:
    """Return the model with each module m replaced by swap(m), except where swap(m) is None."""
    found = {}
    for module in model.modules():
        made = swap(module)
        if made is not None:
            found[id(module)] = made
    if id(model) in found:
        return found[id(model)]
    if not inplace:
        return copy.deepcopy(model, cast(Any, found))  # deepcopy takes these modules from its memo.
    for module in list(model.modules()):
        children = vars(module)["_modules"]
        children.update({name: found[id(child)] for name, child in children.items() if id(child) in found})
    return model


class _Sharder(BaseQuantEmbeddingSharder[torch.nn.Module]):
    """Base of `QuantEmbeddingBagCollectionSharder` and `QuantEmbeddingCollectionSharder`."""

    _unsharded: type[QuantCollection]
    sharded_type: type[QuantCollection]

    @property
    def module_type(self) -> type[torch.nn.Module]:
        """Class of the modules that this sharder shards."""
        return self._unsharded

    def shardable_parameters(self, module: torch.nn.Module) -> dict[str, torch.nn.Parameter]:
        """For each table, a meta parameter with the size of the table's rows in bytes, from which a planner plans."""
        return {
            # A planner divides by the number of rows.
            name: torch.nn.Parameter(torch.empty(max(1, rows), size, dtype=torch.uint8, device="meta"), False)
            for name, (rows, size) in cast(QuantCollection, module).sizes().items()
        }

    def shard(
        self,
        module: torch.nn.Module,
        params: dict[str, ParameterSharding],
        env: ShardingEnv,
        device: torch.device | None = None,
        module_fqn: str | None = None,
    ) -> torch.nn.Module:
        """The module with its rows moved to the devices, or ranks, that own them.

        Args:
            params: the plan for the module's tables; gives the kind of device if `device` is None or on meta.
            env: with a process group, each rank keeps the rows that it owns; else rows go to `env.world_size` devices
                of this process.
            device: device of the rows; None, or on meta, = as the plan says.
            module_fqn: has no effect.
        """
        collection = cast(QuantCollection, module)
        place: Place
        if env.process_group is not None:
            place = OnRanks(env.process_group)
        else:
            place = OnDevices(_devices(params, env.world_size, device))
        return collection.placed(self.sharded_type, place)


def _devices(params: Mapping[str, ParameterSharding], count: int, device: torch.device | None) -> list[torch.device]:
    kind = None if device is None or device.type == "meta" else device.type
    for sharding in params.values():
        if kind is None and sharding.sharding_spec is not None:
            kind = cast(Any, sharding.sharding_spec).shards[0].placement.device().type
    if kind in (None, "cpu"):
        return [torch.device("cpu")] * count
    return [torch.device(kind, d) for d in range(count)]


class QuantEmbeddingBagCollectionSharder(_Sharder):
    """Shards quantized `EmbeddingBagCollection`s: the key of a row decides on which device, or rank, the row lives.

    A plan decides only which modules are sharded. Its entries for tables have no effect.

    Args:
        fused_params, shardable_params: accepted as in TorchRec's class; they have no effect.

    Reference: torchrec.distributed.quant_embeddingbag.QuantEmbeddingBagCollectionSharder.
    """

    _unsharded, sharded_type = quant.EmbeddingBagCollection, quant.ShardedEmbeddingBagCollection


class QuantEmbeddingCollectionSharder(_Sharder):
    """Shards quantized `EmbeddingCollection`s; see `QuantEmbeddingBagCollectionSharder`.

    Reference: torchrec.distributed.quant_embedding.QuantEmbeddingCollectionSharder.
    """

    _unsharded, sharded_type = quant.EmbeddingCollection, quant.ShardedEmbeddingCollection


DEFAULT_SHARDERS: list[ModuleSharder[torch.nn.Module]] = [
    *theirs.DEFAULT_SHARDERS, QuantEmbeddingBagCollectionSharder(), QuantEmbeddingCollectionSharder(),
]  # fmt: skip
"""Sharders of TorchRec and of oneemb, for the argument `sharders` of TorchRec's `shard_quant_model`."""


def shard_quant_model(
    model: torch.nn.Module,
    world_size: int = 1,
    compute_device: str = "cuda",
    sharding_device: str = "meta",
    sharders: list[ModuleSharder[torch.nn.Module]] | None = None,
    device_memory_size: int | None = None,
    constraints: dict[str, ParameterConstraints] | None = None,
    ddr_cap: int | None = None,
    sharding_plan: ShardingPlan | None = None,
    *,
    process_group: "torch.distributed.ProcessGroup | None" = None,
) -> tuple[torch.nn.Module, ShardingPlan]:
    """Spread the rows of a quantized model over devices or processes; returns the model and the plan.

    Rows of oneemb's collections are moved by the call, whatever `sharding_device` is. Rows of TorchRec's modules are
    assigned by the caller afterwards, as in TorchRec. Results of lookups are the same bits for each `world_size`.

    Args:
        model: a model with collections of oneemb.torchrec or TorchRec, or such a collection itself.
        world_size: number of devices of this process.
        compute_device: kind of these devices, "cuda" or "cpu".
        sharding_device, device_memory_size, constraints, ddr_cap, sharding_plan: same as in TorchRec's function.
        sharders: None = `DEFAULT_SHARDERS`.
        process_group: ranks that each keep the rows that they own, in place of `world_size` devices. Every rank makes
            this call, and makes each lookup with its own batch. TorchRec's modules are not sharded then.

    Returns:
        The model, and the plan.

    Reference: torchrec.inference.modules.shard_quant_model.
    """
    sharders = DEFAULT_SHARDERS if sharders is None else sharders
    if process_group is None:
        return theirs.shard_quant_model(
            model, world_size, compute_device, sharding_device, sharders, device_memory_size, constraints, ddr_cap,
            sharding_plan,
        )  # fmt: skip
    place = OnRanks(process_group)

    def swap(module: torch.nn.Module) -> torch.nn.Module | None:
        for sharder in sharders:
            if isinstance(sharder, _Sharder) and type(module) is sharder.module_type:
                return cast(QuantCollection, module).placed(sharder.sharded_type, place)
        return None

    return _swap(model, swap, inplace=True), ShardingPlan({})
