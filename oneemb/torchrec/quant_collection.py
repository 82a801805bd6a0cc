"""Base of both quantized collections: quantized rows, from a trained collection or a state dict, in groups of tables.

F features, N ids, D weights of a row.

Invariants:
- tables of one format that one embedding held in training are one group, which looks them up together;
- a state dict has the rows table by table, however tables are grouped and wherever rows live.
"""

import copy
import itertools
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Self, cast

import torch
from torchrec.modules.embedding_configs import BaseEmbeddingConfig, EmbeddingBagConfig, PoolingType, dtype_to_data_type
from torchrec.quant.embedding_modules import MODULE_ATTR_EMB_CONFIG_NAME_TO_NUM_ROWS_POST_PRUNING_DICT
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from oneemb.storage.errors import StorageError
from oneemb.torchrec.collection import Collection
from oneemb.torchrec.configs import Column, columns_of
from oneemb.torchrec.jagged import is_call_on_values
from oneemb.torchrec.quant_rows import DATA_TYPES, PARTS, RowsOfTable, quantized_tables
from oneemb.torchrec.quant_shards import OnDevices, OnRanks, Place, stored_rows
from oneemb.torchrec.sharded import ShardedCollection


@torch.fx.wrap
def tables_of_ids(offsets: torch.Tensor, table_F: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
    """Table of each id, int64 [N], for ids that lie feature by feature. All features have the same number of samples.

    Args:
        offsets: first id of each bag, and the number of ids.
        table_F: table of each feature.
        values: ids [N].
    """
    features = table_F.size(0)
    ends = torch.arange(features + 1, device=offsets.device) * ((offsets.size(0) - 1) // features)
    return table_F.to(values.device).repeat_interleave(offsets[ends].diff(), output_size=values.size(0))


class GroupOfTables(torch.nn.Module):
    """Tables that are looked up together: equal width, data type and pooling, and one embedding in training.

    Args:
        rows: module that looks up their rows.
        tables: index of each table's config.
        table_F: for each feature, the number of its table in `rows`.
        features: features of the tables, in the order of the collection's columns.
        names: name of each feature in the output.
        begins: for each feature, its first column in the output of a sample.
        means: whether bags are averaged, not summed.
    """

    table_F: torch.Tensor

    def __init__(
        self, rows: torch.nn.Module, tables: Sequence[int], table_F: torch.Tensor, features: list[str],
        names: list[str], begins: list[int], means: bool,
    ):  # fmt: skip
        super().__init__()
        self.rows = rows
        self.tables: list[int] = list(tables)
        self.features: list[str] = features
        self.names: list[str] = names
        self.begins: list[int] = begins
        self.means = means
        self.register_buffer("table_F", table_F)
        for module in self.modules():  # State dicts are written table by table.
            for name, buffer in list(module.named_buffers(recurse=False)):
                module.register_buffer(name, buffer, persistent=False)

    def forward(self, values: torch.Tensor, offsets: torch.Tensor) -> torch.Tensor:
        """Rows of ids that lie feature by feature, float32 [N, D]. All features have the same number of samples."""
        return self.rows(tables_of_ids(offsets, self.table_F, values), values)


class QuantCollection(torch.nn.Module):
    """Base of both quantized collections.

    Args:
        tables: TorchRec's configs, whose `data_type` is the format of rows.
        device: device of rows that are loaded later; on meta rows cannot be loaded until the module is moved.
        output_dtype: dtype of results, a floating-point dtype.
        rows: rows of each table; None = no rows yet, every id reads as zeros.
        place: where rows live; None = all on one device.
        named: name of the attribute that holds the tables by name.
    """

    # Attributes that TorchScript leaves out.
    __jit_unused_properties__ = ["device", "embedding_bags", "embeddings"]
    __jit_ignored_attributes__ = ["configs", "_absent", "_columns", "_place"]

    def __init__(
        self,
        tables: Sequence[BaseEmbeddingConfig],
        device: torch.device | str | None,
        output_dtype: torch.dtype,
        rows: Sequence[RowsOfTable] | None,
        place: Place | None,
        *,
        named: str,
    ):
        super().__init__()
        check_quantized(tables, output_dtype)
        self.configs = list(tables)
        self._device = torch.empty(0, device=device, dtype=torch.float32).device
        self._output_dtype: torch.dtype = output_dtype
        self.holders = named
        self._columns: list[Column] = columns_of(tables)
        self._feature_names: list[str] = [column.feature for column in self._columns]
        self._embedding_names: list[str] = [column.name for column in self._columns]
        self._place = place or OnDevices()
        if rows is None:
            rows = [RowsOfTable.none(config, t) for t, config in enumerate(tables)]
        self._take_rows(rows)

    def _take_rows(self, rows: Sequence[RowsOfTable]) -> None:
        """Take these rows, one entry for each table. Tables of one format that one embedding held in training become
        one group."""
        alike: dict[tuple[object, ...], list[int]] = {}
        for t, (config, table) in enumerate(zip(self.configs, rows, strict=True)):
            kind = config.embedding_dim, config.data_type, _pooling(config), *table.origin
            alike.setdefault(kind, []).append(t)
        end_C = [*itertools.accumulate(self.configs[column.table].embedding_dim for column in self._columns)]
        groups, order = torch.nn.ModuleList(), []  # An error below leaves `self.groups` unchanged.
        for tables in alike.values():
            first = self.configs[tables[0]]
            columns = [c for c, column in enumerate(self._columns) if column.table in tables]
            group = GroupOfTables(
                self._place([rows[t] for t in tables], first.embedding_dim, first.data_type),
                tables,
                torch.tensor([rows[self._columns[c].table].number for c in columns], device=self._device),
                [self._columns[c].feature for c in columns],
                [self._columns[c].name for c in columns],
                [end_C[c] - first.embedding_dim for c in columns],
                _pooling(first) == PoolingType.MEAN,
            )
            groups.append(group.to("meta") if self._device.type == "meta" else group)
            order += columns
        self._absent = [table.absent for table in rows]
        self.groups = groups
        self._order: list[int] = [order.index(c) for c in range(len(order))]
        """For each column of the output, its index among the features of all groups."""

    # ---- lookups ----------------------------------------------------------------------------------------------------

    @torch.jit.unused
    def _is_called(self, features: KeyedJaggedTensor) -> bool:
        """Whether the call has values: False while a model is traced or exported."""
        return is_call_on_values(features)

    @torch.jit.unused
    def _check_rows(self) -> None:
        if self._device.type == "meta":
            raise RuntimeError(
                "the rows are on the meta device, where no lookup is possible; move the module by"
                " to_empty(device='cpu'), and load a state dict"
            )

    # ---- construction -----------------------------------------------------------------------------------------------

    @classmethod
    def made_like(
        cls, like: Any, configs: list[Any], output_dtype: torch.dtype, rows: Sequence[RowsOfTable] | None,
        place: Place | None,
    ) -> Self:  # fmt: skip
        """Collection with these configs and rows, and all other arguments from the collection `like`."""
        raise NotImplementedError

    @classmethod
    def quantized(
        cls, module: Any, dtype: torch.dtype, output_dtype: torch.dtype = torch.float32,
        by_table: Mapping[str, torch.dtype] | None = None,
    ) -> Self:  # fmt: skip
        """Quantized collection with the current rows of a trained collection. If the trained one is sharded, rows stay
        with their ranks, and every rank makes the call.

        Args:
            module: the trained collection.
            dtype: dtype of rows.
            output_dtype: dtype of results.
            by_table: {table's name: dtype of its rows}, in place of `dtype`.

        Raises:
            TypeError: `module` is no collection of oneemb.torchrec.
            ValueError, StorageError: same as `quantize_embeddings`.
        """
        collection = module.collection if isinstance(module, ShardedCollection) else module
        if not isinstance(collection, Collection):
            raise TypeError(f"module must be a collection of oneemb.torchrec, got {type(module).__name__}")
        if getattr(module, MODULE_ATTR_EMB_CONFIG_NAME_TO_NUM_ROWS_POST_PRUNING_DICT, None):
            raise ValueError(
                "set_pruning_data is not supported, since rows are found by id and not pruned; leave these modules out"
            )
        configs = _quantized_configs(collection, dtype, by_table)
        check_quantized(configs, output_dtype)
        group = collection.process_group
        place = None if group is None else OnRanks(group)
        return cls.made_like(collection, configs, output_dtype, _rows_of_collection(collection, configs), place)

    @classmethod
    def from_float(cls, module: Any, use_precomputed_fake_quant: bool = False) -> Self:
        """Quantized form of a trained collection, with the dtypes of its `qconfig`; torch and TorchRec call this
        function.

        Args:
            module: the trained collection.
            use_precomputed_fake_quant: has no effect.

        Raises:
            ValueError: the module has no `qconfig`; or same as `quantized`.
            TypeError, StorageError: same as `quantized`.
        """
        config = getattr(module, "qconfig", None)
        if config is None:
            raise ValueError(
                "the module must have a qconfig, which gives the dtype of rows, got none; call quantize_embeddings"
            )
        by_table = getattr(config, "per_table_weight_dtype", None)
        return cls.quantized(module, config.weight().dtype, config.activation().dtype, by_table)

    def placed(self, kind: "type[QuantCollection]", place: Place) -> "QuantCollection":
        """Collection of class `kind` with the same rows, which live at `place`."""
        rows = None if self._device.type == "meta" else [*self._rows_of_tables().values()]
        return kind.made_like(self, self.configs, self._output_dtype, rows, place).train(self.training)

    def sizes(self) -> dict[str, tuple[int, int]]:
        """{table's name: (number of rows, bytes of one row)}."""
        return {name: (len(table.ids), table.weight.shape[1]) for name, table in self._rows_of_tables().items()}

    # ---- rows -------------------------------------------------------------------------------------------------------

    def rows_of_table(self, table: int) -> RowsOfTable:
        """Copies of the rows of table number `table` that this rank has."""
        for group in cast(Any, self.groups):
            if table in group.tables:
                return stored_rows(group.rows, self._absent[table])
        raise IndexError(f"table must be from 0 to {len(self.configs) - 1}, got {table}")

    def _rows_of_tables(self) -> dict[str, RowsOfTable]:
        return {config.name: self.rows_of_table(t) for t, config in enumerate(self.configs)}

    def _apply(self, fn: Callable[[torch.Tensor], torch.Tensor], recurse: bool = True) -> Self:
        def placed(tensor: torch.Tensor) -> torch.Tensor:  # module.half() must not change the bytes of rows.
            made = fn(tensor)
            return made if made.dtype == tensor.dtype else tensor.to(made.device)

        moved: Self = super()._apply(placed, recurse)
        was = self._device
        for group in self.groups:
            self._device = cast(GroupOfTables, group).table_F.device
        if was.type == "meta" and self._device.type != "meta":  # to_empty() left the keys uninitialized.
            self._take_rows([RowsOfTable.none(config, t) for t, config in enumerate(self.configs)])
        return moved

    def _save_to_state_dict(self, destination: dict[str, Any], prefix: str, keep_vars: bool) -> None:
        for name, table in self._rows_of_tables().items():
            for part, tensor in zip(PARTS, table, strict=True):
                destination[f"{prefix}{self.holders}.{name}.{part}"] = tensor

    def _load_from_state_dict(
        self, state_dict: Mapping[str, Any], prefix: str, local_metadata: object, strict: bool,
        missing_keys: list[str], unexpected_keys: list[str], error_msgs: list[str],
    ) -> None:  # fmt: skip
        parts = {config.name: dict[str, torch.Tensor]() for config in self.configs}
        for key in (key for key in state_dict if key.startswith(prefix)):
            holders, _, rest = key.removeprefix(prefix).partition(".")
            name, _, part = rest.rpartition(".")
            if holders == self.holders and name in parts and part in PARTS:
                parts[name][part] = state_dict[key]
            else:
                unexpected_keys.append(key)
        for name, given in parts.items():
            missing_keys += [f"{prefix}{self.holders}.{name}.{part}" for part in PARTS if part not in given]
        if all(len(given) == len(PARTS) for given in parts.values()):
            tables = [RowsOfTable(**parts[config.name]) for config in self.configs]
            try:
                for config, table in zip(self.configs, tables, strict=True):
                    table.check(config)
            except (TypeError, ValueError) as error:
                error_msgs.append(f"{prefix}{self.holders}.{config.name}: {error}")
            else:
                if self._device.type == "meta":
                    warnings.warn(
                        f"the quantized tables {list(parts)} are on the meta device, so a load into them has no effect;"
                        " move the collection first, by to_empty(device='cpu')",
                        stacklevel=2,
                    )
                    return
                try:
                    self._take_rows([table.to(self._device) for table in tables])
                except (ValueError, StorageError) as error:  # each table is right, but not all together
                    error_msgs.append(f"{prefix}{self.holders}: {error}")

    # ---- interface of TorchRec --------------------------------------------------------------------------------------

    def output_dtype(self) -> torch.dtype:
        """Dtype of results."""
        return self._output_dtype

    @property
    def device(self) -> torch.device:
        """Device of the rows."""
        return self._device


class TablesByName(Mapping[str, RowsOfTable]):
    """{table's name: its rows}, read from the collection on each access."""

    def __init__(self, collection: QuantCollection):
        self._collection = collection
        self._places = {config.name: t for t, config in enumerate(collection.configs)}

    def __getitem__(self, name: str) -> RowsOfTable:
        return self._collection.rows_of_table(self._places[name])

    def __iter__(self) -> Iterator[str]:
        return iter(self._places)

    def __len__(self) -> int:
        return len(self._places)


def _pooling(config: BaseEmbeddingConfig) -> PoolingType:
    return config.pooling if isinstance(config, EmbeddingBagConfig) else PoolingType.NONE


def check_quantized(tables: Sequence[BaseEmbeddingConfig], output_dtype: torch.dtype) -> None:
    """Raise TypeError or ValueError unless tables with these configs can be quantized."""
    if not output_dtype.is_floating_point or output_dtype.itemsize < 2:
        raise ValueError(f"output_dtype must be torch.float32, float16, bfloat16 or float64, got {output_dtype}")
    for config in tables:
        bits = DATA_TYPES.get(config.data_type)
        if bits is None:
            known = ", ".join(data_type.name for data_type in DATA_TYPES)
            raise ValueError(
                f"table {config.name!r}: the data type of rows must be one of {known}, got {config.data_type}"
            )
        if config.embedding_dim * bits % 16:
            raise ValueError(
                f"table {config.name!r}: embedding_dim must be a multiple of {16 // bits}, since weights of {bits} bits"
                f" must fill pairs of bytes, got {config.embedding_dim}"
            )
        if config.num_embeddings_post_pruning is not None:
            raise ValueError(
                f"table {config.name!r}: num_embeddings_post_pruning must be None, since rows are found by id and not"
                " pruned"
            )


def _quantized_configs(collection: Any, dtype: torch.dtype, by_table: Mapping[str, torch.dtype] | None) -> list[Any]:
    """Configs of a collection's tables, with the data type that `by_table` or `dtype` asks for."""
    configs = copy.deepcopy(collection.configs)
    for config in configs:
        asked = (by_table or {}).get(config.name, dtype)
        try:
            config.data_type = dtype_to_data_type(asked)
        except Exception as error:  # TorchRec raises plain Exceptions.
            raise ValueError(f"table {config.name!r}: rows cannot be quantized to {asked}") from error
    return configs


def _rows_of_collection(collection: Collection, configs: Sequence[BaseEmbeddingConfig]) -> list[RowsOfTable] | None:
    """Quantized rows of each table that this rank has; None = the collection is on the meta device."""
    if collection.device.type == "meta":
        return None
    found: dict[int, RowsOfTable] = {}
    for group in collection.ready():
        tables = quantized_tables(group.rows, [configs[t] for t in group.tables])
        found |= dict(zip(group.tables, tables, strict=True))
    return [found[t] for t in range(len(configs))]
