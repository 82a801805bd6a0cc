"""The ids of a KeyedJaggedTensor, table by table, and the same tensor with cache ids in their place."""

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torchrec import KeyedJaggedTensor

from oneemb.kernels.threads import Threads
from oneemb.kernels.unique_keys import unique_keys

_ONE_THREAD = Threads(1)


class JaggedIds:
    """The distinct ids of each table.

    Args:
        features: what is looked up.
        names_T: of each table its features.

    Raises:
        ValueError: a feature is not there, or ids are no integers.
    """

    def __init__(self, features: KeyedJaggedTensor, names_T: Sequence[Sequence[str]]):
        values = features.values()
        if values.dtype not in (torch.int64, torch.int32):
            raise ValueError(f"ids must be int64 or int32, got {values.dtype}")
        self._features = features
        value_N = values.detach().to("cpu", torch.int64).numpy()
        begin_F1 = features.offset_per_key()
        index = {name: f for f, name in enumerate(features.keys())}
        self._slices_T: list[list[slice]] = []
        self._inverse_T: list[np.ndarray] = []
        self.id_TU: list[np.ndarray] = []
        """int64 [U] of each table, in the order in which they first occur."""
        self.count_TU: list[np.ndarray] = []
        """int64 [U] of each table, how often each occurs."""
        for names in names_T:
            missing = [name for name in names if name not in index]
            if missing:
                raise ValueError(f"the KeyedJaggedTensor lacks the features {missing}, it has {list(index)}")
            slices = [slice(begin_F1[index[name]], begin_F1[index[name] + 1]) for name in names]
            id_N = np.concatenate([value_N[its] for its in slices])
            keys = unique_keys(np.zeros(len(id_N), np.int32), id_N, threads=_ONE_THREAD)
            self._slices_T.append(slices)
            self._inverse_T.append(keys.inverse_N)
            self.id_TU.append(keys.id_U)
            self.count_TU.append(np.bincount(keys.inverse_N, minlength=len(keys.id_U)).astype(np.int64))

    def with_cache_ids(self, cache_TU: Sequence[np.ndarray]) -> KeyedJaggedTensor:
        """The features with a cache id for each id; those of no table stay as they are.

        Args:
            cache_TU: int64 [U] of each table, for `id_TU`.
        """
        features = self._features
        values = features.values().detach().to("cpu", copy=True)
        for slices, inverse_N, cache_U in zip(self._slices_T, self._inverse_T, cache_TU, strict=True):
            cache_N, begin = torch.from_numpy(cache_U.take(inverse_N)), 0
            for its in slices:
                size = its.stop - its.start
                values[its] = cache_N[begin : begin + size].to(values.dtype)
                begin += size
        shape: dict[str, Any] = {"stride": features.stride()}
        if features.variable_stride_per_key():
            shape = {"stride_per_key_per_rank": features.stride_per_key_per_rank()}
        return KeyedJaggedTensor(
            keys=features.keys(), values=values.to(features.values().device), weights=features.weights_or_none(),
            lengths=features.lengths(), inverse_indices=features.inverse_indices_or_none(), **shape,
        )  # fmt: skip
