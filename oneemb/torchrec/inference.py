"""TorchRec's way to inference, for models with oneemb's collections, and its own beside them.

    model = quantize_inference_model(model)                   rows become integers, read-only
    model, plan = shard_quant_model(model, world_size=2, compute_device="cpu")
    torch.jit.script(torch.fx.GraphModule(model, torchrec.fx.Tracer().trace(model)))

TorchRec's own functions do the same where they are told of these classes: `DEFAULT_QUANT_MAPPING` and
`DEFAULT_SHARDERS` have them beside TorchRec's.

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
    **{torch.typename(float_class): its for float_class, its in _QUANTIZED.items()},
}
"""Argument `quantization_mapping` of TorchRec's `quantize_inference_model`, with TorchRec's classes and ours."""


class FeatureProcessedEmbeddingBagCollection(torch.nn.Module):
    """Feature processors, which give a KeyedJaggedTensor with weights, before a quantized collection."""

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
    """A model whose collections are quantized, in eval mode.

    Args:
        module: the model, or a collection; of oneemb.torchrec all are quantized, sharded ones too (every rank makes the
            call), of TorchRec's those that its function quantizes.
        dtype: of rows: float32, float16, int8, quint4x2 (4 bits) or quint2x4 (2 bits).
        inplace: change the model; off, all but the rows is copied, which stay where they are.
        additional_qconfig_spec_keys, additional_mapping: as of TorchRec's function.
        output_dtype: of what lookups give.
        per_table_weight_dtype: dtypes of rows by the table's name, in place of `dtype`.

    Raises:
        ValueError: rows cannot be of such a dtype; the message names the table.
        StorageError: a row has a NaN, an infinity, or weights that do not fit; the message names it.

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
    """A model whose collections are quantized in place, in eval mode.

    Args:
        model, per_table_weight_dtype, output_dtype: as of `quantize_embeddings`.
        quantization_mapping: as of TorchRec's function, for its modules; oneemb's are quantized with and without.
        fp_weight_dtype: of the rows of collections behind feature processors.
        quantization_dtype: of other rows.

    Raises:
        As `quantize_embeddings`.

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
    """Function that returns the quantized collection of a module; None = it is none of oneemb's, or the mapping has
    another class for it."""

    def swap(module: torch.nn.Module) -> torch.nn.Module | None:
        kinds = [its for kind, its in _QUANTIZED.items() if isinstance(module, kind)]
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
    """The model with other modules in place of some."""
    found = {}
    for module in model.modules():
        made = swap(module)
        if made is not None:
            found[id(module)] = made
    if id(model) in found:
        return found[id(model)]
    if not inplace:
        return copy.deepcopy(model, cast(Any, found))  # Modules that are found there are not copied.
    for module in list(model.modules()):
        children = vars(module)["_modules"]
        children.update({name: found[id(child)] for name, child in children.items() if id(child) in found})
    return model


class _Sharder(BaseQuantEmbeddingSharder[torch.nn.Module]):
    """Base of both sharders; see `QuantEmbeddingBagCollectionSharder`."""

    _unsharded: type[QuantCollection]
    sharded_type: type[QuantCollection]

    @property
    def module_type(self) -> type[torch.nn.Module]:
        """Class whose modules are sharded."""
        return self._unsharded

    def shardable_parameters(self, module: torch.nn.Module) -> dict[str, torch.nn.Parameter]:
        """Parameters for a planner: each has the bytes of a table's rows."""
        return {
            # A planner divides by the rows.
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
        """The module with its rows on the devices, or with the ranks, that own them.

        Args:
            params: the plan for the module's tables; says on what kind of device rows are, where `device` is on meta.
            env: with a process group, whose ranks each keep their own rows; or of so many devices of this process.
            device: of the rows; None, or on meta, = as the plan says.
            module_fqn: has no effect.
        """
        its = cast(QuantCollection, module)
        place: Place
        if env.process_group is not None:
            place = OnRanks(env.process_group)
        else:
            place = OnDevices(_devices(params, env.world_size, device))
        return its.placed(self.sharded_type, place)


def _devices(params: Mapping[str, ParameterSharding], count: int, device: torch.device | None) -> list[torch.device]:
    kind = None if device is None or device.type == "meta" else device.type
    for its in params.values():
        if kind is None and its.sharding_spec is not None:
            kind = cast(Any, its.sharding_spec).shards[0].placement.device().type
    if kind in (None, "cpu"):
        return [torch.device("cpu")] * count
    return [torch.device(kind, d) for d in range(count)]


class QuantEmbeddingBagCollectionSharder(_Sharder):
    """Shards quantized `EmbeddingBagCollection`s: each row is on one device, or with one rank, by its key.

    A plan is read for which modules are sharded: its tables' entries change no number.

    Args:
        fused_params, shardable_params: as of TorchRec's class; they have no effect.

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
"""Argument `sharders` of TorchRec's `shard_quant_model`: TorchRec's and ours."""


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
    """A quantized model whose rows are spread over devices, or over processes.

    Rows of oneemb's collections come along, whatever `sharding_device` is; TorchRec's modules have theirs assigned
    afterwards. What lookups give does not depend on `world_size`, bit for bit.

    Args:
        model: the model; collections of oneemb.torchrec and TorchRec's own are sharded, one that is the model itself
            too.
        world_size: devices of this process.
        compute_device: "cuda" or "cpu", where they may be one.
        sharding_device, device_memory_size, constraints, ddr_cap, sharding_plan: as of TorchRec's function.
        sharders: None = `DEFAULT_SHARDERS`.
        process_group: ranks that each keep the rows that they own, in place of `world_size` devices. Every one makes
            the call, and each lookup with a batch of its own. TorchRec's modules stay whole then.

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
