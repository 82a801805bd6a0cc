"""Two models with equal first rows, one with dynamic tables and one with TorchRec's own, for users' tests."""

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torchrec
from fbgemm_gpu.split_embedding_configs import EmbOptimType, SparseType
from torch import distributed
from torchrec import KeyedJaggedTensor
from torchrec.distributed.fbgemm_qcomm_codec import CommType, QCommsConfig, get_qcomm_codecs_registry
from torchrec.distributed.model_parallel import DistributedModelParallel

from oneemb.dynamicemb.dump_load import get_dynamic_emb_module
from oneemb.dynamicemb.dynamicemb_config import DynamicEmbTableOptions
from oneemb.dynamicemb.get_planner import get_planner
from oneemb.dynamicemb.shard import DynamicEmbeddingBagCollectionSharder, DynamicEmbeddingCollectionSharder
from oneemb.dynamicemb.types import absent

__all__ = ["ConstructTwinModule", "generate_sparse_feature"]

__getattr__ = absent(
    __name__,
    {"Platform": "plans reckon with no GPU's memory or bandwidth; give the planner a torchrec Topology, or None"},
)


def _init_fn(weights: torch.Tensor) -> None:
    with torch.no_grad():
        weights.uniform_(0, 1)


def generate_sparse_feature(
    feature_names: Sequence[str], num_embeddings_list: Sequence[int], local_batch_size: int, lookup_iter: int = 0
) -> KeyedJaggedTensor:
    """Batch number `lookup_iter` of a series in which each id of each table occurs once, one id in a sample.

    Args:
        feature_names, num_embeddings_list: name of each feature, and number of rows of its table.
        local_batch_size: number of samples, B.
        lookup_iter: number of the batch, from 0. The batch has ids lookup_iter * B to (lookup_iter + 1) * B - 1;
            samples for ids beyond a table's rows are empty.
    """
    begin = lookup_iter * local_batch_size
    sizes = [min(max(size - begin, 0), local_batch_size) for size in num_embeddings_list]
    device = torch.device("cuda", torch.cuda.current_device()) if torch.cuda.is_available() else torch.device("cpu")
    values = torch.cat([torch.arange(begin, begin + size, device=device) for size in sizes])
    lengths = torch.cat([(torch.arange(local_batch_size, device=device) < size).long() for size in sizes])
    return KeyedJaggedTensor(keys=list(feature_names), values=values, lengths=lengths)


class ConstructTwinModule:
    """Makes both models, with tables t_0, t_1 and so on, and features f_0, f_1 and so on. Every rank makes the calls.

    Args:
        table_num, dims, num_embeddings: number of tables, width of each, number of first rows of each.
        pooling_mode: TorchRec's PoolingType, for pooled tables.
        is_pooled: whether the models have EmbeddingBagCollections.
        batch_size: number of rows that are copied at a time.
        output_dtype, optimizer_kwargs: FBGEMM's options; "optimizer" is a value of EmbOptimType.
        fwd_a2a_precision, bwd_a2a_precision: precision of rows, and of gradients, between ranks.
        use_index_dedup: same as for `DynamicEmbeddingCollectionSharder`.
        init_fn: function that fills the rows.
        scale_factor: capacity of a dynamic table, as a multiple of its first rows.
        multi_hot_sizes, rank, world_size: have no effect.
    """

    def __init__(
        self,
        table_num: int,
        dims: list[int],
        num_embeddings: list[int],
        pooling_mode: Any,
        is_pooled: bool,
        multi_hot_sizes: list[int],
        batch_size: int = 65536,
        output_dtype: SparseType = SparseType.FP32,
        fwd_a2a_precision: CommType = CommType.FP32,
        bwd_a2a_precision: CommType = CommType.FP32,
        optimizer_kwargs: dict[str, Any] | None = None,
        use_index_dedup: bool = False,
        init_fn: Callable[[torch.Tensor], torch.Tensor | None] | None = _init_fn,
        rank: int = 0,
        world_size: int = 1,
        scale_factor: int = 2,
    ):
        self._dims, self._sizes, self._pools, self._pooling = dims, num_embeddings, is_pooled, pooling_mode
        self._batch_size, self._init_fn, self._scale, self._dedup = batch_size, init_fn, scale_factor, use_index_dedup
        self._codecs = get_qcomm_codecs_registry(
            QCommsConfig(forward_precision=fwd_a2a_precision, backward_precision=bwd_a2a_precision)
        )
        options = dict(optimizer_kwargs or {"optimizer": "exact_sgd"})
        # FBGEMM calls plain SGD "exact_sgd".
        kind = {"sgd": "exact_sgd"}.get(options["optimizer"], options["optimizer"])
        self._fused = options | {"optimizer": EmbOptimType(kind), "output_dtype": output_dtype}
        on_gpu = torch.cuda.is_available()
        self._device = torch.device("cuda", torch.cuda.current_device()) if on_gpu else torch.device("cpu")
        self._features = [f"f_{t}" for t in range(table_num)]
        self._models: list[DistributedModelParallel] = []

    @property
    def dynamicemb_model(self) -> DistributedModelParallel:
        """Model with dynamic tables."""
        return self._models[0]

    @property
    def torchrec_model(self) -> DistributedModelParallel:
        """Model with TorchRec's own tables."""
        return self._models[1]

    def init_twin_embedding_model(self) -> None:
        """Make both models, and copy the rows of TorchRec's tables into the dynamic tables."""
        self._models = [self._made(dynamic=True), self._made(dynamic=False)]
        places = {name: (tables, t) for tables in get_dynamic_emb_module(self.dynamicemb_model)
               for t, name in enumerate(tables.table_names)}  # fmt: skip
        for begin in range(0, max(self._sizes), self._batch_size):
            ids_F = [
                torch.arange(min(begin, size), min(begin + self._batch_size, size), device="cpu")
                for size in self._sizes
            ]
            rows_F = self._rows_of(ids_F)
            for f, (ids, rows) in enumerate(zip(ids_F, rows_F, strict=True)):
                tables, t = places[f"t_{f}"]
                state = torch.full(
                    (len(ids), tables.tables.value_dim(t) - rows.shape[1]), 0.0, dtype=torch.float32, device="cpu"
                )
                state += tables.tables.init_optimizer_state()
                table_ids = torch.full((len(ids),), t, dtype=torch.int64, device="cpu")
                for few in torch.arange(len(ids), device="cpu").split(1 << 14):
                    tables.tables.insert(ids[few], table_ids[few], torch.cat([rows[few], state[few]], 1))
        optimizer: Any = self.torchrec_model.fused_optimizer
        if hasattr(optimizer, "set_optimizer_step"):  # TorchRec's tables count lookups as steps.
            optimizer.set_optimizer_step(0)

    def _made(self, *, dynamic: bool) -> DistributedModelParallel:
        config = torchrec.EmbeddingBagConfig if self._pools else torchrec.EmbeddingConfig
        more: dict[str, Any] = {"pooling": self._pooling} if self._pools else {}
        if not dynamic:
            more["init_fn"] = self._init_fn
        configs: list[Any] = [
            config(name=f"t_{t}", embedding_dim=dim, num_embeddings=size * (self._scale if dynamic else 1),
                   feature_names=[feature], **more)
            for t, (dim, size, feature) in enumerate(zip(self._dims, self._sizes, self._features, strict=True))
        ]  # fmt: skip
        meta = torch.device("meta")
        module: Any = (torchrec.EmbeddingBagCollection if self._pools else torchrec.EmbeddingCollection)(
            tables=configs, device=meta
        )
        sharder: Any = DynamicEmbeddingCollectionSharder(self._fused, self._codecs, self._dedup)
        if self._pools:
            sharder = DynamicEmbeddingBagCollectionSharder(self._fused, self._codecs)
        options = {one.name: DynamicEmbTableOptions(global_hbm_for_values=1 << 30) for one in configs if dynamic}
        planner = get_planner(configs, set(), options, self._device)
        plan = planner.collective_plan(module, [sharder], distributed.group.WORLD)
        return DistributedModelParallel(module=module, device=self._device, sharders=[sharder], plan=plan)

    def _rows_of(self, ids_F: list[torch.Tensor]) -> list[torch.Tensor]:
        """For each feature, the weights that its TorchRec table has for these ids: float32 [N, D] on the CPU."""
        # In bags of one id pooled tables return rows, too. Features are padded to one number of samples, with id 0.
        samples = max(len(ids) for ids in ids_F)
        values = torch.cat([torch.nn.functional.pad(ids, (0, samples - len(ids))) for ids in ids_F])
        batch = KeyedJaggedTensor(
            self._features, values, lengths=torch.ones(len(values), dtype=torch.int64, device="cpu")
        )
        with torch.no_grad():
            found = self.torchrec_model(batch.to(self._device))
            if self._pools:
                rows_F = found.values().split(self._dims, 1)
            else:
                rows_F = [found[feature].values() for feature in self._features]
        return [rows[: len(ids)].float().cpu() for rows, ids in zip(rows_F, ids_F, strict=True)]
