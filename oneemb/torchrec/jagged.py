"""Bags of ids of a KeyedJaggedTensor, feature by feature, without a copy where possible.

F features, B samples, N ids, K keys of the KeyedJaggedTensor. The bag of sample b of feature f has number f * B + b.
"""

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple, cast

import numpy as np
import torch
from torchrec.sparse.jagged_tensor import JaggedTensor, KeyedJaggedTensor
from torchrec.sparse.tensor_dict import maybe_td_to_kjt

from oneemb.graph.tracers import is_exported_by_compiler, tracer_of


class Jagged(NamedTuple):
    """Bags of ids of several features, feature by feature."""

    values: torch.Tensor
    """Ids, int64 [N]."""
    offsets: torch.Tensor
    """Bag p has the ids from `offsets[p]` to `offsets[p + 1]`; int64 [bags + 1]."""
    weights: torch.Tensor | None
    """Weights of the ids, float32 [N]; None = the sum of a bag is not weighted."""
    samples: list[int]
    """Number of samples of each feature. They differ only in batches of variable size (`stride_per_key`)."""

    @property
    def is_even(self) -> bool:
        """Whether all features have the same number of samples."""
        return all(samples == self.samples[0] for samples in self.samples)


def is_call_on_values(features: KeyedJaggedTensor) -> bool:
    """Whether `features` has values: False while this thread traces or exports a model."""
    if torch.compiler.is_dynamo_compiling():  # of this frame, while the compiler traces it
        return not is_exported_by_compiler()
    if not isinstance(features, KeyedJaggedTensor):
        return tracer_of(features) is None
    return tracer_of(features.values(), features.lengths_or_none(), features.offsets_or_none()) is None


def check_jagged(features: KeyedJaggedTensor) -> Jagged:
    """Bags of all features of a KeyedJaggedTensor. TypeError or ValueError if its keys, values, lengths, offsets or
    weights contradict each other."""
    if not isinstance(features, KeyedJaggedTensor):
        raise TypeError(f"features must be a KeyedJaggedTensor, got {type(features).__name__}")
    keys, values, weights = features.keys(), features.values(), features.weights_or_none()
    if len(set(keys)) < len(keys):
        twice = sorted({key for key in keys if keys.count(key) > 1})
        raise ValueError(f"keys of a KeyedJaggedTensor must be unique, got {twice} more often")
    if values.dtype not in (torch.int64, torch.int32) or values.dim() != 1:
        raise TypeError(
            f"values of a KeyedJaggedTensor must be ids, int64 or int32 [N], got {_dtype_and_shape(values)}"
        )
    if weights is not None and (weights.shape != values.shape or weights.dtype.is_complex):
        raise ValueError(
            f"weights must be numbers, one for each of {len(values)} values, got {_dtype_and_shape(weights)}"
        )
    offsets, lengths = features.offsets_or_none(), features.lengths_or_none()
    if offsets is None and lengths is None:
        raise ValueError("a KeyedJaggedTensor needs lengths or offsets, got neither")
    bags = len(offsets) - 1 if offsets is not None else len(lengths)
    samples = features.stride_per_key() if features.variable_stride_per_key() else _even(features, bags)
    if len(samples) != len(keys) or sum(samples) != bags:
        raise ValueError(
            f"lengths must be one for each sample of each key, got {bags} lengths for {len(keys)} keys with {samples}"
            " samples"
        )
    if lengths is not None:
        _check_lengths(lengths, len(values))
    if offsets is None:
        offsets = torch.nn.functional.pad(lengths.long().cumsum(0), (1, 0))
    else:
        _check_offsets(offsets, len(values))
        if lengths is not None and not np.array_equal(np.diff(_array(offsets)), _array(lengths)):
            raise ValueError("lengths and offsets of a KeyedJaggedTensor must agree, but differ")
    return Jagged(values.long(), offsets.long(), None if weights is None else weights.float(), samples)


def checked_bags(features: KeyedJaggedTensor, is_weighted: bool) -> tuple[KeyedJaggedTensor, Jagged]:
    """A batch (KeyedJaggedTensor or TensorDict) as a KeyedJaggedTensor and as its bags. The bags keep their weights
    only if `is_weighted`. Raises the errors of `check_jagged` and `check_weighted`."""
    features = maybe_td_to_kjt(features, None)
    jagged = check_jagged(features)
    if not is_weighted:
        return features, jagged._replace(weights=None)
    check_weighted(jagged.weights)
    return features, jagged


def check_weighted(weights: torch.Tensor | None) -> None:
    """Raise ValueError if `weights`, of a batch for a weighted collection, is None."""
    if weights is None:
        raise ValueError(
            "the KeyedJaggedTensor must have weights for a weighted collection (is_weighted=True), got none"
        )


def jagged_tensors(
    features: KeyedJaggedTensor, jagged: Jagged, ids_F: list[int], row_ND: torch.Tensor, names: Sequence[str],
    need_indices: bool,
) -> dict[str, JaggedTensor]:  # fmt: skip
    """{name in the output: JaggedTensor of the rows of one feature}.

    Args:
        features: the batch as the user gave it; the lengths and ids of the result have its dtypes.
        jagged: bags of the features.
        ids_F: number of ids of each feature.
        row_ND: rows of all ids, feature by feature.
        names: name of each feature in the output.
        need_indices: whether the JaggedTensors have the ids as their weights.
    """
    # Split, not sliced: the gradient of each slice would be as large as the gradient of all rows.
    rows_F, id_F = row_ND.split(ids_F), jagged.values.split(ids_F)
    lengths_F = jagged.offsets.diff().to(features.lengths().dtype).split(jagged.samples)
    found = {}
    for name, rows, lengths, ids in zip(names, rows_F, lengths_F, id_F, strict=True):
        weights = ids.to(features.values().dtype) if need_indices else None
        found[name] = JaggedTensor(values=rows, lengths=lengths, weights=cast(Any, weights))
    return found


def _even(features: KeyedJaggedTensor, bags: int) -> list[int]:
    keys = len(features.keys())
    if keys == 0 or bags % keys:
        raise ValueError(f"lengths must be one for each sample of each key, got {bags} lengths for {keys} keys")
    if features.stride() * keys != bags:
        raise ValueError(
            f"lengths must be {features.stride()} (the stride) for each of {keys} keys, got {bags} for all keys"
        )
    return [bags // keys] * keys


def _check_lengths(lengths: torch.Tensor, ids: int) -> None:
    if lengths.dtype.is_floating_point or lengths.dim() != 1:
        raise TypeError(f"lengths must be integers [keys * samples], got {_dtype_and_shape(lengths)}")
    length_P = _array(lengths)
    if len(length_P) and not 0 <= int(length_P.min()) <= int(length_P.max()) <= ids:
        raise ValueError(f"lengths must be from 0 to {ids}, got {int(length_P.min())} to {int(length_P.max())}")
    if int(length_P.sum()) != ids:
        raise ValueError(f"lengths must add up to the number of values, {ids}, got {int(length_P.sum())}")


def _check_offsets(offsets: torch.Tensor, ids: int) -> None:
    if offsets.dtype.is_floating_point or offsets.dim() != 1 or not len(offsets):
        raise TypeError(f"offsets must be integers [keys * samples + 1], got {_dtype_and_shape(offsets)}")
    offset_P1 = _array(offsets)
    if offset_P1[0] != 0 or offset_P1[-1] != ids or (offset_P1[1:] < offset_P1[:-1]).any():
        raise ValueError(
            f"offsets must begin with 0, never fall and end with the number of values, {ids}, got"
            f" {offset_P1[:3].tolist()} ... {offset_P1[-1:].tolist()}"
        )


def order_of_inverse(
    jagged: Jagged, keys: Sequence[str], inverse: tuple[list[str], torch.Tensor] | None, wanted: Sequence[str]
) -> tuple[dict[str, int], torch.Tensor]:
    """Row of each feature in the inverse indices of a KeyedJaggedTensor, and the indices [K, B].

    Args:
        jagged, keys: bags of the KeyedJaggedTensor, and the feature of each.
        inverse: the features, and for each of them the number of its sample for each sample of the batch.
        wanted: features that must have inverse indices.

    Raises:
        TypeError, ValueError: a wanted feature is missing, or an index is not a sample of its feature.
    """
    if inverse is None:
        raise ValueError(
            "inverse_indices must be given if features have different numbers of samples (stride_per_key_per_rank),"
            " got none; give each feature the number of its sample for each sample of the batch"
        )
    names, index_KB = inverse
    order = {key: k for k, key in enumerate(names)}
    missing = [feature for feature in wanted if feature not in order]
    if missing:
        raise ValueError(f"inverse_indices must have the features {missing}, they have {names}")
    _check_inverse(names, index_KB, dict(zip(keys, jagged.samples, strict=True)))
    return order, index_KB


def _check_inverse(names: Sequence[str], index_KB: torch.Tensor, samples: Mapping[str, int]) -> None:
    """Raise TypeError or ValueError unless row k of `index_KB` has numbers of samples of feature `names[k]`; `samples`
    has the number of samples of each feature."""
    if index_KB.dtype not in (torch.int64, torch.int32) or index_KB.dim() != 2 or len(index_KB) != len(names):
        raise TypeError(
            f"inverse_indices must be integers, a row for each of {len(names)} features, got"
            f" {_dtype_and_shape(index_KB)}"
        )
    for name, index_B in zip(names, _array(index_KB), strict=True):
        most = samples.get(name, 0) - 1
        if name in samples and len(index_B) and not 0 <= int(index_B.min()) <= int(index_B.max()) <= most:
            raise ValueError(
                f"inverse_indices of feature {name!r} must be from 0 to {most}, its last sample, got"
                f" {int(index_B.min())} to {int(index_B.max())}"
            )


def _array(tensor: torch.Tensor) -> np.ndarray:
    return tensor.detach().cpu().numpy()  # NumPy, since torch's CPU threads would go on spinning


def _dtype_and_shape(tensor: torch.Tensor) -> str:
    return f"{tensor.dtype} {list(tensor.shape)}"


def select_features(jagged: Jagged, keys: Sequence[str], wanted: Sequence[str]) -> Jagged:
    """Bags of the wanted features, in their order, from the bags of `keys`. A feature may be wanted several times.
    ValueError if a feature is missing."""
    if keys == wanted:
        return jagged
    place = {key: k for k, key in enumerate(keys)}
    missing = [feature for feature in wanted if feature not in place]
    if missing:
        raise ValueError(f"the KeyedJaggedTensor lacks the features {missing} of the tables, it has {list(keys)}")
    at = [place[feature] for feature in wanted]
    begin = np.cumsum([0, *jagged.samples]).tolist()  # the first bag of each key
    # Split at tensors, not at Python integers, so that a TrainGraph can record which ids a lookup takes from the batch.
    if at == list(range(at[0], at[-1] + 1)):
        offsets = jagged.offsets[begin[at[0]] : begin[at[-1] + 1] + 1]
        _, values, _ = _split(jagged.values, offsets[[0, -1]])
        weights = None if jagged.weights is None else _split(jagged.weights, offsets[[0, -1]])[1]
        return Jagged(values, offsets - offsets[:1], weights, [jagged.samples[k] for k in at])
    ends = jagged.offsets[begin[1:-1]]
    lengths = torch.cat([jagged.offsets[begin[k] : begin[k + 1] + 1].diff() for k in at])
    values_K = _split(jagged.values, ends)
    weights_K = None if jagged.weights is None else _split(jagged.weights, ends)
    return Jagged(
        torch.cat([values_K[k] for k in at]),
        torch.nn.functional.pad(lengths.cumsum(0), (1, 0)),
        None if weights_K is None else torch.cat([weights_K[k] for k in at]),
        [jagged.samples[k] for k in at],
    )


def ends_of_features(jagged: Jagged) -> torch.Tensor:
    """Bounds of the ids of each feature, int64 [F + 1]: feature f has the ids from entry f to entry f + 1."""
    first_bags = torch.nn.functional.pad(torch.tensor(jagged.samples, device="cpu").cumsum(0), (1, 0))
    return jagged.offsets[first_bags.to(jagged.offsets.device)]


def expand_samples(
    jagged: Jagged, keys: Sequence[str], inverse: tuple[list[str], torch.Tensor] | None, wanted: Sequence[str]
) -> tuple[Jagged, list[str]]:
    """Bags of the wanted features, one for each sample of the batch, and these features without repetition. `inverse`
    says which sample of a feature a sample of the batch takes. Arguments and errors are those of `order_of_inverse`."""
    order, index_KB = order_of_inverse(jagged, keys, inverse, wanted)
    wanted = list(dict.fromkeys(wanted))
    bags = select_features(jagged, keys, wanted)
    first_F = torch.tensor([0, *bags.samples[:-1]], device="cpu").cumsum(0).to(bags.offsets.device)
    bag_P = (index_KB[[order[feature] for feature in wanted]].long() + first_F[:, None]).flatten()
    begin_P, length_P = bags.offsets[bag_P], bags.offsets.diff()[bag_P]
    offsets = torch.nn.functional.pad(length_P.cumsum(0), (1, 0))
    # The ids of a bag are contiguous, from its entry of `begin_P`.
    place_N = (begin_P - offsets[:-1]).repeat_interleave(length_P) + torch.arange(
        int(offsets[-1]), device=offsets.device
    )
    weights = None if bags.weights is None else bags.weights[place_N]
    return Jagged(bags.values[place_N], offsets, weights, [index_KB.shape[1]] * len(wanted)), wanted


def _split(tensor: torch.Tensor, at: torch.Tensor) -> tuple[torch.Tensor, ...]:
    return torch.tensor_split(tensor, at.cpu())
