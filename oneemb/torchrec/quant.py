"""Quantized collections: the rows of a trained collection, read-only, in TorchRec's quantized formats.

    quantized = EmbeddingBagCollection.from_float(collection)           called by `quantize_embeddings`
    quantized(keyed_jaggedtensor)                                       a KeyedTensor

A call on values makes the same checks as the float modules. A traced, scripted or exported model contains only buffers
and ops of torch and TorchRec, so the program runs without oneemb. F features, B samples, N ids, D weights of a row.

Invariants:
- a row has the bytes that FBGEMM makes of its weights, and reads the same on every device and rank;
- rows and outputs come in the order of the float module's tables.

Reference: torchrec.quant.embedding_modules.
"""

from collections.abc import Mapping, Sequence
from typing import Any, Self, cast

import torch
from torchrec.modules.embedding_configs import EmbeddingBagConfig, EmbeddingConfig
from torchrec.modules.embedding_modules import EmbeddingBagCollectionInterface, EmbeddingCollectionInterface
from torchrec.sparse.jagged_tensor import JaggedTensor, KeyedJaggedTensor, KeyedTensor
from torchrec.sparse.tensor_dict import maybe_td_to_kjt

from oneemb.torchrec.jagged import (
    Jagged,
    check_jagged,
    checked_bags,
    ends_of_features,
    expand_samples,
    jagged_tensors,
    select_features,
)
from oneemb.torchrec.modules import jagged_by_name, jagged_of
from oneemb.torchrec.quant_collection import QuantCollection, TablesByName
from oneemb.torchrec.quant_index import pooled_while_read
from oneemb.torchrec.quant_rows import RowsOfTable
from oneemb.torchrec.quant_shards import Place

# A trace keeps calls of these, and of the functions marked below: it knows them by the calling module.
torch.fx.wrap("jagged_of")
torch.fx.wrap("jagged_by_name")


@torch.fx.wrap
def pooled_by_feature(
    rows: torch.Tensor, offsets: torch.Tensor, weights: torch.Tensor | None, means: bool, features: int
) -> torch.Tensor:
    """Sums, or means, of bags: [F, B, D]. `rows` has the rows of all bags in turn; `offsets` says where each bag
    begins."""
    order = torch.arange(rows.size(0), device=rows.device)
    if weights is not None:
        weights = weights.to(rows.dtype)
    pooled = torch.nn.functional.embedding_bag(
        order, rows, offsets, mode="mean" if means else "sum", per_sample_weights=weights, include_last_offset=True
    )
    return pooled.view(features, (offsets.size(0) - 1) // features, rows.size(1))


@torch.fx.wrap
def side_by_side(pooled: list[torch.Tensor], order: list[int], dtype: torch.dtype) -> torch.Tensor:
    """Embeddings of each sample, [B, sum of D], from those of each group, [F, B, D].

    Args:
        pooled: pooled embeddings of each group.
        order: for each column of the output, its index among the features of all groups.
        dtype: dtype of the result.
    """
    if len(pooled) == 1 and order == list(range(len(order))):
        return pooled[0].transpose(0, 1).flatten(1).to(dtype)
    parts: list[torch.Tensor] = []
    for group in pooled:
        parts.extend(group.unbind(0))
    return torch.cat([parts[i] for i in order], dim=1).to(dtype)


class EmbeddingBagCollection(QuantCollection, EmbeddingBagCollectionInterface):
    """Pooled embeddings of the features of a KeyedJaggedTensor, from quantized rows: TorchRec's class, for any int64
    id.

    Made by `from_float`, which `quantize_embeddings` and `quantize_inference_model` call; or from configs alone,
    without rows, for `load_state_dict`. An id without a row reads as in eval mode of the float module: as its initial
    row, not rounded, or as zeros if the table's policy says so.

    Args:
        tables: TorchRec's configs, whose `data_type` is the format of rows: FP32, FP16, INT8, INT4 or INT2.
        is_weighted: whether ids are multiplied by the weights of the KeyedJaggedTensor before they are summed.
        device: device of loaded rows; None = torch's default device.
        output_dtype: dtype of results; sums are computed in float32.
        rows, place: given by `from_float` and by sharders; without rows every id reads as zeros.

    Raises:
        ValueError: rows of the width cannot have the data type; the message names the table.

    Reference: torchrec.quant.embedding_modules.EmbeddingBagCollection.
    """

    def __init__(
        self,
        tables: list[EmbeddingBagConfig],
        is_weighted: bool,
        device: torch.device | str | None = None,
        output_dtype: torch.dtype = torch.float32,
        *,
        rows: Sequence[RowsOfTable] | None = None,
        place: Place | None = None,
    ):
        super().__init__(tables, device, output_dtype, rows, place, named="embedding_bags")
        self._is_weighted = is_weighted
        self._lengths_per_embedding: list[int] = [tables[column.table].embedding_dim for column in self._columns]

    @classmethod
    def made_like(
        cls, like: Any, configs: list[Any], output_dtype: torch.dtype, rows: Sequence[RowsOfTable] | None,
        place: Place | None,
    ) -> Self:  # fmt: skip
        return cls(configs, like.is_weighted(), like.device, output_dtype, rows=rows, place=place)

    def forward(self, features: KeyedJaggedTensor) -> KeyedTensor:
        """Pooled embeddings, of `output_dtype`. Those of one sample lie side by side, table by table and feature by
        feature. Arguments and errors are those of the float module."""
        if not torch.jit.is_scripting():
            if self._is_called(features):
                return self._pooled(features)
        pooled: list[torch.Tensor] = []
        for group in self.groups:
            wanted: list[str] = group.features  # type: ignore[assignment]
            means: bool = group.means  # type: ignore[assignment]
            values, offsets, weights = jagged_of(features, wanted)
            weights = weights if self._is_weighted else None
            row_ND = group(values, offsets)
            pooled.append(pooled_by_feature(row_ND, offsets, weights, means, len(wanted)))
        values = side_by_side(pooled, self._order, self._output_dtype)
        return KeyedTensor(self._embedding_names, self._lengths_per_embedding, values)

    @torch.jit.unused
    def _pooled(self, features: KeyedJaggedTensor) -> KeyedTensor:
        jagged_G = self._place.together(lambda: self._checked(features))
        values = pooled_while_read(cast(Any, self.groups), jagged_G, sum(self._lengths_per_embedding))
        if values is None:
            pooled = []
            for group, bags in zip(cast(Any, self.groups), jagged_G, strict=True):
                row_ND = group(bags.values, bags.offsets)
                pooled.append(pooled_by_feature(row_ND, bags.offsets, bags.weights, group.means, len(group.features)))
            values = side_by_side(pooled, self._order, self._output_dtype)
        return KeyedTensor(self._embedding_names, self._lengths_per_embedding, values.to(self._output_dtype))

    @torch.jit.unused
    def _checked(self, features: KeyedJaggedTensor) -> list[Jagged]:
        """Bags of each group's features; all features have the same number of samples."""
        self._check_rows()
        features, jagged = checked_bags(features, self._is_weighted)
        keys, inverse = features.keys(), features.inverse_indices_or_none()
        if inverse is not None or not jagged.is_even:
            jagged, keys = expand_samples(jagged, keys, inverse, self._feature_names)
        return [select_features(jagged, keys, group.features) for group in cast(Any, self.groups)]

    def _get_name(self) -> str:
        return "QuantizedEmbeddingBagCollection"

    def embedding_bag_configs(self) -> list[EmbeddingBagConfig]:
        """Configs of the tables; `data_type` is the format of rows."""
        return self.configs

    def is_weighted(self) -> bool:
        """Whether ids are weighted."""
        return self._is_weighted

    @property
    def embedding_bags(self) -> Mapping[str, RowsOfTable]:
        """{table's name: its rows}; each access returns copies."""
        return TablesByName(self)


class EmbeddingCollection(QuantCollection, EmbeddingCollectionInterface):
    """Embedding of each id of a KeyedJaggedTensor, from quantized rows; see `EmbeddingBagCollection`.

    Args:
        tables, device, output_dtype, rows, place: same as for `EmbeddingBagCollection`; all tables have the same
            `embedding_dim`.
        need_indices: whether the JaggedTensors of the output have the ids as their weights.

    Raises:
        ValueError: same as `EmbeddingBagCollection`.

    Reference: torchrec.quant.embedding_modules.EmbeddingCollection.
    """

    def __init__(
        self,
        tables: list[EmbeddingConfig],
        device: torch.device | str | None = None,
        need_indices: bool = False,
        output_dtype: torch.dtype = torch.float32,
        *,
        rows: Sequence[RowsOfTable] | None = None,
        place: Place | None = None,
    ):
        super().__init__(tables, device, output_dtype, rows, place, named="embeddings")
        self._embedding_dim: int = tables[0].embedding_dim if tables else -1
        self._need_indices: bool = need_indices

    @classmethod
    def made_like(
        cls, like: Any, configs: list[Any], output_dtype: torch.dtype, rows: Sequence[RowsOfTable] | None,
        place: Place | None,
    ) -> Self:  # fmt: skip
        return cls(configs, like.device, like.need_indices(), output_dtype, rows=rows, place=place)

    def forward(self, features: KeyedJaggedTensor) -> dict[str, JaggedTensor]:
        """{feature's name: JaggedTensor of the embeddings of its ids, `output_dtype` [ids, D]}, with the lengths of the
        feature. Arguments and errors are those of the float module."""
        if not torch.jit.is_scripting():
            if self._is_called(features):
                return self._by_name(features)
        found: dict[str, JaggedTensor] = {}
        for group in self.groups:
            wanted: list[str] = group.features  # type: ignore[assignment]
            names: list[str] = group.names  # type: ignore[assignment]
            values, offsets, _ = jagged_of(features, wanted)
            row_ND = group(values, offsets).to(self._output_dtype)
            by_name = jagged_by_name(features, row_ND, wanted, names, self._need_indices)
            for name in names:
                found[name] = by_name[name]
        return found

    @torch.jit.unused
    def _by_name(self, features: KeyedJaggedTensor) -> dict[str, JaggedTensor]:
        features, jagged_G = self._place.together(lambda: self._checked(features))
        found: dict[str, JaggedTensor] = {}
        for group, bags in zip(cast(Any, self.groups), jagged_G, strict=True):
            ids_F = ends_of_features(bags).diff()
            row_ND = group.rows(group.table_F.repeat_interleave(ids_F), bags.values).to(self._output_dtype)
            found |= jagged_tensors(features, bags, ids_F.tolist(), row_ND, group.names, self._need_indices)
        return {name: found[name] for name in self._embedding_names}

    @torch.jit.unused
    def _checked(self, features: KeyedJaggedTensor) -> tuple[KeyedJaggedTensor, list[Jagged]]:
        self._check_rows()
        features = maybe_td_to_kjt(features, None)
        jagged, keys = check_jagged(features), features.keys()
        return features, [select_features(jagged, keys, group.features) for group in cast(Any, self.groups)]

    def _get_name(self) -> str:
        return "QuantizedEmbeddingCollection"

    def embedding_configs(self) -> list[EmbeddingConfig]:
        """Configs of the tables; `data_type` is the format of rows."""
        return self.configs

    def embedding_dim(self) -> int:
        """Number of weights of a row."""
        return self._embedding_dim

    def embedding_names_by_table(self) -> list[list[str]]:
        """For each table, the names of its features in the output."""
        return [[column.name for column in self._columns if column.table == t] for t in range(len(self.configs))]

    def need_indices(self) -> bool:
        """Whether the output has the ids as weights."""
        return self._need_indices

    @property
    def embeddings(self) -> Mapping[str, RowsOfTable]:
        """{table's name: its rows}; each access returns copies."""
        return TablesByName(self)


class ShardedEmbeddingBagCollection(EmbeddingBagCollection):
    """Collection that `QuantEmbeddingBagCollectionSharder` has sharded, with rows on several devices or ranks."""


class ShardedEmbeddingCollection(EmbeddingCollection):
    """Collection that `QuantEmbeddingCollectionSharder` has sharded; see `ShardedEmbeddingBagCollection`."""
