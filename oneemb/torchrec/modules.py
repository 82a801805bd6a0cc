"""TorchRec's EmbeddingBagCollection and EmbeddingCollection, over tables that grow.

F features, B samples, N ids, D weights of a row, C columns of the output (one for each feature of each table).
"""

import copy
from collections.abc import Mapping, Sequence
from typing import Any, Self, cast

import torch
from torchrec.modules.embedding_configs import EmbeddingBagConfig, EmbeddingConfig, PoolingType
from torchrec.modules.embedding_modules import EmbeddingBagCollectionInterface, EmbeddingCollectionInterface
from torchrec.sparse.jagged_tensor import JaggedTensor, KeyedJaggedTensor, KeyedTensor
from torchrec.sparse.tensor_dict import maybe_td_to_kjt

from oneemb.options import StoreOptions
from oneemb.torchrec.collection import Collection, Group, Lookups, ShardOptions
from oneemb.torchrec.jagged import (
    Jagged,
    check_jagged,
    check_weighted,
    checked_bags,
    ends_of_features,
    jagged_tensors,
    order_of_inverse,
    select_features,
)


@torch.fx.wrap
def jagged_of(features: KeyedJaggedTensor, wanted: list[str]) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]:
    """Values, offsets and weights of the wanted features, in their order, by calls that TorchScript can compile."""
    if features.inverse_indices_or_none() is not None or features.variable_stride_per_key():
        raise RuntimeError(
            "a batch for a traced or scripted collection must have one number of samples for all features, and no"
            " inverse_indices; call the collection itself for other batches"
        )
    place = {key: k for k, key in enumerate(features.keys())}
    selected = features.permute([place[feature] for feature in wanted])
    return selected.values().long(), selected.offsets(), selected.weights_or_none()


@torch.fx.wrap
def jagged_by_name(
    features: KeyedJaggedTensor, rows: torch.Tensor, wanted: list[str], names: list[str], need_indices: bool
) -> dict[str, JaggedTensor]:
    """{name in the output: JaggedTensor of the rows of one feature}; `rows` has the rows of all wanted features in
    turn."""
    jagged, found = features.to_dict(), torch.jit.annotate(dict[str, JaggedTensor], {})
    # Split, not sliced: the gradient of each slice would be as large as the gradient of all rows.
    rows_of = rows.split([jagged[feature].values().numel() for feature in wanted])
    for i, name in enumerate(names):
        tensor = jagged[wanted[i]]
        found[name] = JaggedTensor(
            values=rows_of[i], lengths=tensor.lengths(), weights=tensor.values() if need_indices else None
        )
    return found


def _arguments(group: Group, bags: Jagged) -> dict[str, Any]:
    """Arguments of a group's lookup of bags, without the argument that says which table each bag belongs to."""
    return {
        "ids": bags.values, "offsets": bags.offsets, "per_sample_weights": bags.weights, "pooling": group.pooling,
    }  # fmt: skip


class EmbeddingBagCollection(Collection, EmbeddingBagCollectionInterface):
    """Pooled embeddings of the features of a KeyedJaggedTensor: TorchRec's class, whose tables grow with their ids.

    Any int64 is an id, whatever `num_embeddings` is. In training mode unknown ids are inserted, in eval mode they read
    as their initial rows.

    Args:
        tables: TorchRec's configs. With `store_options`, `init_fn` is one of torch.nn.init's functions, with options by
            functools.partial.
        is_weighted: whether ids are multiplied by the weights of the KeyedJaggedTensor before they are summed.
        device: where lookups run; None = torch's default device. On "meta" there are no rows until the module is moved.
        store_options: where rows live, made by one of `oneemb.make_*_store_options`; a dict has them by table. Each
            embedding has a subfolder of `persistent_path`, `init_fn` initializes each row at its first lookup, and
            state dicts name snapshots. None = rows live in memory and in state dicts: a table starts as TorchRec's
            does, with `num_embeddings` rows that `init_fn` fills, and grows from there.
        seed: a row that is initialized at its first lookup is a pure function of (seed, its table and the tables of the
            same embedding, id).
        num_threads: threads that run the kernels; None = one for each core. No result depends on it.
        on_ranks: given by `EmbeddingBagCollectionSharder`, which shards a collection between ranks; None = not sharded.

    Raises:
        TypeError, ValueError: a config is not as above, or is not supported; the message names the config.

    Example:
        >>> import torch
        >>> from torchrec import EmbeddingBagConfig, KeyedJaggedTensor
        >>> from oneemb.torchrec import EmbeddingBagCollection
        >>> ebc = EmbeddingBagCollection([EmbeddingBagConfig(100, 4, "t", feature_names=["f", "g"])])
        >>> ids, lengths = torch.tensor([3, -1, 2**60]), torch.tensor([2, 0, 0, 1])
        >>> kjt = KeyedJaggedTensor.from_lengths_sync(["f", "g"], ids, lengths)
        >>> ebc(kjt).keys(), ebc(kjt).values().shape
        (['f', 'g'], torch.Size([2, 8]))

    Reference: torchrec.modules.embedding_modules.EmbeddingBagCollection.
    """

    def __init__(
        self,
        tables: list[EmbeddingBagConfig],
        is_weighted: bool = False,
        device: torch.device | str | None = None,
        *,
        store_options: StoreOptions | Mapping[str, StoreOptions] | None = None,
        seed: int = 0,
        num_threads: int | None = None,
        on_ranks: ShardOptions | None = None,
    ):
        super().__init__(tables, device, store_options, seed, num_threads, on_ranks, pools=True, named="embedding_bags")
        if is_weighted and (means := [config.name for config in tables if config.pooling == PoolingType.MEAN]):
            raise ValueError(
                f"pooling must be SUM with is_weighted=True, got MEAN for tables {means}; use PoolingType.SUM"
            )
        self._is_weighted = is_weighted
        self._lengths_per_embedding: list[int] = [tables[column.table].embedding_dim for column in self._columns]
        self._dim: int = sum(self._lengths_per_embedding)

    def forward(self, features: KeyedJaggedTensor) -> KeyedTensor:
        """Pooled embeddings, float32. Those of one sample lie side by side, table by table and feature by feature.

        Args:
            features: a KeyedJaggedTensor with the features of the tables, in any order, and possibly others; or a
                TensorDict of nested tensors. If features have different numbers of samples it needs `inverse_indices`.

        Raises:
            TypeError, ValueError: lengths, values, keys and weights contradict each other, or a feature is missing; no
                row was inserted.
            StoreFullError: the rows do not fit; no row of the full table was inserted.
        """
        if not torch.jit.is_scripting():
            if self._is_called(features):
                return self._keyed(self._pooled(features))
        values, offsets, weights = jagged_of(features, self._feature_names)
        parameters = [table.weight for table in self.embedding_bags.values()]  # type: ignore[operator]
        pooled = torch.ops.oneemb.embedding_bags(
            values, offsets, weights if self._is_weighted else None, parameters, len(self._feature_names), self._dim
        )
        return self._keyed(pooled)

    def _keyed(self, pooled: torch.Tensor) -> KeyedTensor:
        return KeyedTensor(self._embedding_names, self._lengths_per_embedding, pooled)

    @torch.jit.unused
    def _pooled(self, features: KeyedJaggedTensor) -> torch.Tensor:
        return self._lookups_of(features).look_up()

    @torch.jit.unused
    def lookups_of(self, features: KeyedJaggedTensor) -> Lookups:
        """Lookups of a call with these features; the result of `look_up` is a KeyedTensor. Raises the errors of
        `forward`."""
        lookups = self._lookups_of(features)
        return lookups._replace(output=lambda rows: self._keyed(lookups.output(rows)))

    @torch.jit.unused
    def _lookups_of(self, features: KeyedJaggedTensor) -> Lookups:
        features, jagged = checked_bags(features, self._is_weighted)
        keys, inverse = features.keys(), features.inverse_indices_or_none()
        if inverse is None and jagged.is_even:
            groups = self.ready()
            wanted_of = [[self._feature_names[c] for c in group.columns] for group in groups]
            return self._even(groups, [select_features(jagged, keys, wanted) for wanted in wanted_of], jagged)
        return self._uneven(keys, jagged, inverse)

    @torch.jit.unused
    def look_up(
        self, values: torch.Tensor, offsets: torch.Tensor, per_sample_weights: torch.Tensor | None
    ) -> torch.Tensor:
        """Pooled embeddings of bags that lie column by column: float32 [B, sum of the tables' D]. For the registered
        ops."""
        features = len(self._columns)
        if (len(offsets) - 1) % features:
            raise ValueError(
                f"offsets must have the same number of bags for each of {features} features, got {len(offsets) - 1}"
                " bags"
            )
        jagged = Jagged(values, offsets, per_sample_weights, [(len(offsets) - 1) // features] * features)
        if self._is_weighted:
            check_weighted(per_sample_weights)
        # Several tables may have one feature, so columns are named by their index.
        names = [str(c) for c in range(features)]
        groups = self.ready()
        selected = [select_features(jagged, names, [str(c) for c in group.columns]) for group in groups]
        return self._even(groups, selected, jagged).look_up()

    @torch.jit.unused
    def _even(self, groups: Sequence[Group], selected_of: Sequence[Jagged], jagged: Jagged) -> Lookups:
        """Lookups of a batch in which all features have the same number of samples. `selected_of` has the bags of each
        group, selected before the first lookup, so that a missing feature raises before any table has new rows."""

        def output(pooled: Sequence[torch.Tensor]) -> torch.Tensor:
            if not groups:
                return torch.empty(
                    jagged.samples[0] if jagged.samples else 0, 0, device=jagged.values.device, dtype=torch.float32
                )
            if len(groups) == 1:
                return pooled[0].float().flatten(1)
            parts: list[torch.Tensor | None] = [None] * len(self._columns)
            for group, rows in zip(groups, pooled, strict=True):
                for c, part in zip(group.columns, rows.float().unbind(1), strict=True):
                    parts[c] = part
            return torch.cat(cast(Any, parts), dim=1)

        arguments = [
            _arguments(group, selected) | {"columns": group.tables_of_columns}
            for group, selected in zip(groups, selected_of, strict=True)
        ]
        return Lookups(groups, arguments, output)

    @torch.jit.unused
    def _uneven(self, keys: Sequence[str], jagged: Jagged, inverse: tuple[list[str], torch.Tensor] | None) -> Lookups:
        """Lookups of a batch whose features have different numbers of samples. `inverse` gives, for each sample of the
        output, the number of its sample of each feature."""
        order, index_KB = order_of_inverse(jagged, keys, inverse, self._feature_names)
        groups = self.ready()
        wanted_of = [[self._feature_names[c] for c in group.columns] for group in groups]
        selected_of = [select_features(jagged, keys, wanted) for wanted in wanted_of]
        arguments = []
        for group, selected in zip(groups, selected_of, strict=True):
            samples = torch.tensor(selected.samples, device="cpu")
            table_P = torch.tensor(group.tables_of_columns, device="cpu").repeat_interleave(samples)
            arguments.append(_arguments(group, selected) | {"table_ids": table_P.to(selected.values.device)})

        def output(pooled: Sequence[torch.Tensor]) -> torch.Tensor:
            parts: list[torch.Tensor | None] = [None] * len(self._columns)
            for group, wanted, selected, rows in zip(groups, wanted_of, selected_of, pooled, strict=True):
                for c, feature, part in zip(group.columns, wanted, rows.float().split(selected.samples), strict=True):
                    parts[c] = part.index_select(0, index_KB[order[feature]].long())
            return torch.cat(cast(Any, parts), dim=1)

        return Lookups(groups, arguments, output)

    def empty_copy(self) -> Self:
        return type(self)(
            copy.deepcopy(self.configs), self._is_weighted, "meta", seed=self.seed, num_threads=self._num_threads
        )

    def embedding_bag_configs(self) -> list[EmbeddingBagConfig]:
        """Configs of the tables."""
        return self.configs

    def embedding_configs(self) -> list[EmbeddingBagConfig]:
        """Configs of the tables, under the name by which TorchRec's managed collisions ask for them."""
        return self.configs

    def is_weighted(self) -> bool:
        """Whether ids are weighted."""
        return self._is_weighted


class EmbeddingCollection(Collection, EmbeddingCollectionInterface):
    """Embedding of each id of a KeyedJaggedTensor: TorchRec's class, whose tables grow with their ids.

    Args:
        tables: TorchRec's configs, all with the same `embedding_dim`.
        device: same as for `EmbeddingBagCollection`.
        need_indices: whether the JaggedTensors of the output have the ids as their weights.
        use_gather_select, use_gather_select_per_sharding: for TorchRec's sharding; they change no lookup.
        store_options, seed, num_threads, on_ranks: same as for `EmbeddingBagCollection`.

    Raises:
        TypeError, ValueError: same as `EmbeddingBagCollection`; or tables differ in `embedding_dim`.

    Reference: torchrec.modules.embedding_modules.EmbeddingCollection.
    """

    def __init__(
        self,
        tables: list[EmbeddingConfig],
        device: torch.device | str | None = None,
        need_indices: bool = False,
        use_gather_select: bool = False,
        use_gather_select_per_sharding: dict[str, bool] | None = None,
        *,
        store_options: StoreOptions | Mapping[str, StoreOptions] | None = None,
        seed: int = 0,
        num_threads: int | None = None,
        on_ranks: ShardOptions | None = None,
    ):
        super().__init__(tables, device, store_options, seed, num_threads, on_ranks, pools=False, named="embeddings")
        self._embedding_dim: int = tables[0].embedding_dim if tables else -1
        for config in tables:
            if config.embedding_dim != self._embedding_dim:
                raise ValueError(
                    f"tables of an EmbeddingCollection must have one embedding_dim, got {config.embedding_dim} for"
                    f" {config.name} and {self._embedding_dim} for {tables[0].name}"
                )
        self._need_indices: bool = need_indices
        self._use_gather_select = use_gather_select
        self._use_gather_select_per_sharding = use_gather_select_per_sharding
        self._use_sorted_select = False

    def forward(self, features: KeyedJaggedTensor) -> dict[str, JaggedTensor]:
        """{feature's name: JaggedTensor of the embeddings of its ids, float32 [ids, D]}, with the lengths of the
        feature. Arguments and errors are those of `EmbeddingBagCollection`."""
        if not torch.jit.is_scripting():
            if self._is_called(features):
                return self._by_name(features)
        values, offsets, _ = jagged_of(features, self._feature_names)
        parameters = [table.weight for table in self.embeddings.values()]  # type: ignore[operator]
        rows = torch.ops.oneemb.embeddings(values, offsets, parameters, len(self._feature_names), self._embedding_dim)
        return jagged_by_name(features, rows, self._feature_names, self._embedding_names, self._need_indices)

    @torch.jit.unused
    def _by_name(self, features: KeyedJaggedTensor) -> dict[str, JaggedTensor]:
        return self.lookups_of(features).look_up()

    @torch.jit.unused
    def lookups_of(self, features: KeyedJaggedTensor) -> Lookups:
        """Lookups of a call with these features; the result of `look_up` is {name: JaggedTensor}. Raises the errors of
        `forward`."""
        features = maybe_td_to_kjt(features, None)
        selected = select_features(check_jagged(features), features.keys(), self._feature_names)
        ids_C = ends_of_features(selected).diff()
        counts, lookups = ids_C.tolist(), self._rows_of(selected.values, ids_C)

        def output(rows_of: Sequence[torch.Tensor]) -> dict[str, JaggedTensor]:
            rows = lookups.output(rows_of)
            return jagged_tensors(features, selected, counts, rows, self._embedding_names, self._need_indices)

        return lookups._replace(output=output)

    @torch.jit.unused
    def look_up(
        self, values: torch.Tensor, offsets: torch.Tensor, per_sample_weights: torch.Tensor | None
    ) -> torch.Tensor:
        """Rows of ids that lie column by column: float32 [N, D]. For the registered ops."""
        features = len(self._columns)
        samples = (len(offsets) - 1) // features
        ends = offsets[torch.arange(features + 1, device=offsets.device) * samples]
        return self._rows_of(values, ends.diff()).look_up()

    @torch.jit.unused
    def _rows_of(self, values: torch.Tensor, ids_C: torch.Tensor) -> Lookups:
        """Lookups of ids that lie column by column; `ids_C` has the number of ids of each column."""
        groups = self.ready()
        column_N = torch.arange(len(ids_C), device=values.device).repeat_interleave(ids_C)
        arguments, own_of = [], []
        for group in groups:
            table_C = torch.full((len(ids_C),), -1, device=values.device, dtype=torch.int64)
            table_C[list(group.columns)] = torch.tensor(group.tables_of_columns, device=values.device)
            table_N = table_C[column_N]
            if len(groups) == 1:
                arguments.append({"ids": values, "table_ids": table_N})
                break
            own_of.append((table_N >= 0).nonzero().view(-1))
            arguments.append({"ids": values[own_of[-1]], "table_ids": table_N[own_of[-1]]})

        def output(rows_of: Sequence[torch.Tensor]) -> torch.Tensor:
            if len(groups) == 1:
                return rows_of[0].float()
            return torch.cat([rows.float() for rows in rows_of])[torch.cat(own_of).argsort()]

        return Lookups(groups, arguments, output)

    def empty_copy(self) -> Self:
        return type(self)(
            copy.deepcopy(self.configs), "meta", self._need_indices, self._use_gather_select,
            self._use_gather_select_per_sharding, seed=self.seed, num_threads=self._num_threads,
        )  # fmt: skip

    def embedding_configs(self) -> list[EmbeddingConfig]:
        """Configs of the tables."""
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

    def use_gather_select(self) -> bool:
        """Argument for TorchRec's sharding, which has no effect here."""
        return self._use_gather_select

    def use_gather_select_per_sharding(self) -> dict[str, bool] | None:
        """Argument for TorchRec's sharding, which has no effect here."""
        return self._use_gather_select_per_sharding

    def use_sorted_select(self) -> bool:
        """The last value given to `set_use_sorted_select`, False before."""
        return self._use_sorted_select

    def set_use_sorted_select(self, use_sorted_select: bool) -> None:
        """Choose a kernel of TorchRec's backward pass, from TorchRec 1.9 on; without effect here."""
        self._use_sorted_select = use_sorted_select
