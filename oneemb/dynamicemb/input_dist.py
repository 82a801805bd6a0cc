"""Distribution of a batch's ids to ranks by `dist_type`, as in dynamicemb. Lookups of oneemb do not use it: they send
each key to its owner.

N ids, F features, P bags of all features, R ranks, M ids of one feature.
"""

from collections.abc import Mapping, Sequence

import numpy as np
import torch
from torch import distributed
from torchrec.distributed.dist_data import KJTAllToAll
from torchrec.distributed.embedding_sharding import BaseSparseFeaturesDist
from torchrec.distributed.types import Awaitable
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from oneemb.foreign.dynamicemb_files import DIST_TYPES, numbers_in_file, owner_of_key

__all__ = ["RwSparseFeaturesDist", "bucketize_kjt_before_all2all"]


def bucketize_kjt_before_all2all(
    kjt: KeyedJaggedTensor,
    num_buckets: int,
    block_sizes: torch.Tensor,
    output_permute: bool = False,
    bucketize_pos: bool = False,
    block_bucketize_row_pos: Sequence[torch.Tensor] | None = None,
    dist_type_per_feature: Mapping[str, str] | None = None,
) -> tuple[KeyedJaggedTensor, torch.Tensor | None]:
    """Split a batch by the rank that gets each id. The result has R parts, each with all features.

    Args:
        kjt: the batch.
        num_buckets: number of ranks, R.
        block_sizes: int64 [F], number of ids on each rank for "continuous", which turns ids into indices in such a
            block.
        output_permute: whether to return the new position of each id.
        bucketize_pos: whether the position of each id in its bag becomes its weight, if the batch has no weights.
        block_bucketize_row_pos: must be None, since `dist_type` says where ids go.
        dist_type_per_feature: {feature: "continuous", "roundrobin" or "hash_roundrobin"}.

    Returns:
        The split batch, and the new position of each id, int64 [N], or None.

    Raises:
        ValueError: an argument is not as above; the message names it.
    """
    features, dists = kjt.keys(), dict(dist_type_per_feature or {})
    if len(block_sizes) != len(features):
        raise ValueError(f"block_sizes must be one for each of {len(features)} features, got {len(block_sizes)}")
    wrong = {feature: dists.get(feature) for feature in features if dists.get(feature) not in DIST_TYPES}
    if wrong:
        raise ValueError(f"dist_type_per_feature must be one of {list(DIST_TYPES)} for each feature, got {wrong}")
    if block_bucketize_row_pos is not None:
        raise ValueError("block_bucketize_row_pos must be None, since dist_type says where ids go; leave it out")
    values, device = kjt.values(), kjt.values().device
    length_P = kjt.lengths().view(-1).cpu().numpy()
    bag_N = np.repeat(np.arange(len(length_P)), length_P)
    ends_F = np.cumsum(kjt.length_per_key())
    bucket_N, key_N = [np.empty(0, np.int64)], [np.empty(0, np.int64)]
    for feature, id_M, block in zip(
        features, np.split(values.cpu().numpy(), ends_F[:-1]), block_sizes.tolist(), strict=True
    ):
        arguments = dists[feature], id_M.astype(np.int64), num_buckets, block * num_buckets
        bucket_N.append(owner_of_key(*arguments))
        key_N.append(numbers_in_file(*arguments))
    place_N = np.concatenate(bucket_N) * len(length_P) + bag_N
    order_N = np.argsort(place_N, kind="stable")
    order = torch.from_numpy(order_N).to(device)
    weights = kjt.weights_or_none()
    if weights is not None:
        weights = weights[order]
    elif bucketize_pos:
        begin_P = np.cumsum(length_P) - length_P
        weights = torch.from_numpy((np.arange(len(bag_N)) - begin_P[bag_N])[order_N]).to(values)
    lengths = torch.from_numpy(np.bincount(place_N, minlength=num_buckets * len(length_P))).to(kjt.lengths())
    varies = kjt.variable_stride_per_key()
    dealt = KeyedJaggedTensor(
        keys=features * num_buckets,
        values=torch.from_numpy(np.concatenate(key_N)[order_N]).to(values),
        weights=weights,
        lengths=lengths,
        stride=None if varies else kjt.stride(),
        stride_per_key_per_rank=kjt.stride_per_key_per_rank() * num_buckets if varies else None,
    )
    return dealt, torch.from_numpy(np.argsort(order_N)).to(device) if output_permute else None


class RwSparseFeaturesDist(BaseSparseFeaturesDist[KeyedJaggedTensor]):
    """Sends the ids of a batch to the ranks that `dist_type` says.

    Args:
        pg: the ranks; every rank makes the calls.
        num_features: number of features, F.
        feature_hash_sizes: `num_embeddings` of each feature's table.
        device: device of the buffers.
        is_sequence: whether each call sets `unbucketize_permute_tensor` to the new positions of the ids.
        has_feature_processor: whether positions in bags become weights, in batches without weights.
        need_pos: has no effect: batches with weights keep them.
        dist_type_per_feature: same as for `bucketize_kjt_before_all2all`.
    """

    _feature_block_sizes_tensor: torch.Tensor

    def __init__(
        self,
        pg: distributed.ProcessGroup,
        num_features: int,
        feature_hash_sizes: list[int],
        device: torch.device | None = None,
        is_sequence: bool = False,
        has_feature_processor: bool = False,
        need_pos: bool = False,
        dist_type_per_feature: Mapping[str, str] | None = None,
    ):
        super().__init__()
        self._world_size = pg.size()
        blocks = [-(-size // self._world_size) for size in feature_hash_sizes]
        self.register_buffer("_feature_block_sizes_tensor", torch.tensor(blocks, device=device, dtype=torch.int64))
        self._dist = KJTAllToAll(pg, [num_features] * self._world_size)
        self._is_sequence, self._has_feature_processor = is_sequence, has_feature_processor
        self._dist_type_per_feature = dict(dist_type_per_feature or {})
        self.unbucketize_permute_tensor: torch.Tensor | None = None

    def forward(self, sparse_features: KeyedJaggedTensor) -> Awaitable[Awaitable[KeyedJaggedTensor]]:
        """Awaitable of an awaitable of the ids that all ranks send to this rank. Errors are those of
        `bucketize_kjt_before_all2all`."""
        dealt, self.unbucketize_permute_tensor = bucketize_kjt_before_all2all(
            sparse_features, self._world_size, self._feature_block_sizes_tensor, output_permute=self._is_sequence,
            bucketize_pos=self._has_feature_processor, dist_type_per_feature=self._dist_type_per_feature,
        )  # fmt: skip
        return self._dist(dealt)
