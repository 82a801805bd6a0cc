"""The ids of a lookup: checks of ids, tables and offsets, and the unique keys.

N ids, U unique keys, P bags, B samples, T tables, C columns.
"""

import functools
import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple, cast

import numpy as np
import torch

from oneemb.graph.ops.op import PREPARE, Op
from oneemb.kernels import backend as kernels
from oneemb.kernels.arrays import Array, Bags
from oneemb.kernels.backend import Backend
from oneemb.kernels.host_backend import OPENMP_MIN, HostBackend, backend_of
from oneemb.kernels.threads import Threads

DTYPES = {"float32": torch.float32, "float16": torch.float16, "bfloat16": torch.bfloat16}

_ONE_THREAD = Threads(1)
_NO_BACKEND = HostBackend(_ONE_THREAD)


@dataclass(eq=False)  # A frozen one takes longer to make.
class BatchKeys:
    """The unique keys of a batch of ids, and the shape of the ids. Attributes are not set again."""

    shape: torch.Size
    """Shape of the ids; with bags, [B, T] or [P]."""
    unique: kernels.Keys
    bags: Bags | None
    backend: Backend
    """Backend of the device of the ids."""
    uses_U: np.ndarray | None = None
    """int64: number of ids that each key has in the batches of all ranks, for policies; None = count them in
    `unique`."""


def measure_unique_keys(args: object, keys: Any) -> tuple[int, int]:
    """(ids, bytes) of a call. Any: the keys are `BatchKeys` or, from another file, `MergedKeys`."""
    ids, unique = len(keys.unique.inverse_N), len(keys.unique.id_U)
    return ids, ids * (8 + 8 + 8) + unique * (4 + 8 + 8)


@Op(PREPARE, gives="keys", measure=measure_unique_keys)
def unique_keys(
    ids: torch.Tensor,
    table_ids: torch.Tensor | None,
    num_tables: int,
    key_type: torch.dtype,
    padding_idx: int | None,
    offsets: torch.Tensor | None = None,
    columns: Sequence[int] | None = None,
    *,
    threads: Threads = _ONE_THREAD,
) -> BatchKeys:
    """The unique (table, id) pairs of a batch, in order of first occurrence, padding left out.

    On the CPU, the keys of bags without `table_ids` come table by table.

    Args:
        ids: [B, T] of `key_type`: column t is looked up in table t. With one table, or with `table_ids`, any shape.
        table_ids: integers from 0 to T-1 of a shape that broadcasts to that of `ids`: the table of each id.
        offsets: integers [P + 1] from 0 to N, none below the one before: `ids` is [N] and bag p holds the ids from
            offsets[p] to offsets[p + 1] - 1. `table_ids` is then the table of each bag, [P], or one table for all;
            without `table_ids`, P = B * T and bag p belongs to sample p // T and table p % T.
        columns: the table of each of C columns, none below the one before. Then P = C * B, bag p belongs to column
            p // B and sample p % B, and the lookup returns rows of shape [B, C, D].
        threads: runs the loops on the CPU.

    Raises:
        TypeError, ValueError: dtype, device, shape or range is not as above.
    """
    if offsets is None:
        if columns is not None:
            check_no_columns(columns)
        check_ids(ids, table_ids, num_tables, key_type)
        backend = backend_of(ids, threads)
        table_N, id_N, check = tables_and_ids(ids, table_ids, num_tables, backend)
        unique = backend.unique_keys(table_N, id_N, tables=num_tables, padding_id=padding_idx, check=check)
        return BatchKeys(ids.shape, unique, None, backend)
    backend = backend_of(ids, threads) if isinstance(ids, torch.Tensor) else _NO_BACKEND  # other ids are refused below
    shape, offset_P1, table_P, check_bags = bags_of_ids(ids, table_ids, num_tables, key_type, offsets, columns, backend)
    id_N = backend.array(ids.detach().contiguous())
    unique, bags = backend.unique_keys_of_bags(
        id_N, backend.array(offset_P1), None if table_P is None else backend.array(table_P), tables=num_tables,
        columns=columns, padding_id=padding_idx, check=check_bags,
    )  # fmt: skip
    return BatchKeys(shape, unique, bags, backend)


_INTEGERS = (torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64)

POOLINGS = ("sum", "mean", "max")
"""Poolings of a bag."""

# Up to this many ids, a copy by one thread takes less time than waiting for the cores on which torch's threads spin.
_NUMPY_MAX = 1 << 20


@Op(PREPARE)
def keep(value: Any) -> Any:
    """Copy of a value of a batch, if it is a tensor, an array or a list; any other value is returned as it is."""
    if isinstance(value, torch.Tensor):
        value = value.detach()
        return torch.from_numpy(value.numpy().copy()) if _on_one_thread(value) else value.clone()
    return value.copy() if isinstance(value, np.ndarray | list) else value


def equal(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Whether two tensors of the same dtype on the same device are equal, as `torch.equal`."""
    if _on_one_thread(one) and _on_one_thread(other):
        return np.array_equal(one.numpy(), other.numpy())
    return torch.equal(one, other)


def _on_one_thread(ids: torch.Tensor) -> bool:
    """Whether to copy and compare these ids with NumPy. torch would use OpenMP threads, which then spin for some
    milliseconds on the cores that the lookup's own threads need."""
    is_host = ids.device.type == "cpu" and ids.dtype in (torch.int64, torch.int32) and ids.is_contiguous()
    return is_host and OPENMP_MIN <= ids.numel() <= _NUMPY_MAX and type(ids) is torch.Tensor


def pooling_of(pooling: str | None, offsets: object) -> Literal["sum", "mean", "max"]:
    """Pooling of bags; None means "sum". Raise ValueError if `pooling` is unknown, or is given without `offsets`."""
    if pooling is None:
        return "sum"
    if not isinstance(pooling, str) or pooling not in POOLINGS:
        raise ValueError(f'pooling must be "sum", "mean" or "max", got {pooling!r}')
    if offsets is None:
        raise ValueError(
            f"pooling={pooling!r} is for bags: ids must be [B, L] (with T tables [B, T, L]), whose last dimension is a"
            " bag, or [N] with offsets=offsets; got no offsets"
        )
    return cast(Literal["sum", "mean", "max"], pooling)


class BagArguments(NamedTuple):
    """Arguments of a lookup. Bags have `offsets`, in whatever form the caller gave them."""

    ids: torch.Tensor
    table_ids: torch.Tensor | None
    offsets: torch.Tensor | None
    scales: torch.Tensor | None
    shape: torch.Size | None
    """ids.shape[:-1], if bags were the last dimension of ids; None = the caller gave offsets, or there are no bags."""

    def shaped(self, rows: torch.Tensor) -> torch.Tensor:
        """`rows` of the lookup, with the dimensions of `shape` if that is not None."""
        return rows if self.shape is None else rows.reshape(*self.shape, rows.shape[-1])


def bags_of(
    ids: torch.Tensor, table_ids: torch.Tensor | None, offsets: torch.Tensor | None, scales: torch.Tensor | None,
    pooling: str | None, columns: Any, num_tables: int, include_last_offset: bool,
) -> BagArguments:  # fmt: skip
    """Arguments of `embedding(...)`, with offsets [P + 1] for bags that are the last dimension of ids, and for bags
    whose last offset is left out. Any: a user's value; the lookup refuses a wrong one.

    Raises:
        TypeError, ValueError: ids are no dense tensor, or shapes do not fit.
    """
    if not isinstance(include_last_offset, bool | np.bool_):
        raise TypeError(
            f"include_last_offset must be True or False, got {type(include_last_offset).__name__}"
            f" {include_last_offset!r:.100}; nn.EmbeddingBag's default is False: its offsets leave out the last one"
        )
    if not isinstance(ids, torch.Tensor) or ids.layout is not torch.strided or ids.is_nested:
        raise _no_dense_tensor(ids, "integers")
    if not include_last_offset and isinstance(offsets, torch.Tensor) and offsets.dim() == 1:
        end = torch.full((1,), ids.numel(), dtype=offsets.dtype, device=offsets.device)
        offsets = torch.cat([offsets, end])
    if pooling is None or offsets is not None or columns is not None:
        return BagArguments(ids, table_ids, offsets, scales, None)
    if ids.dim() < 2 or pooling not in POOLINGS:
        return BagArguments(ids, table_ids, offsets, scales, None)
    shape = ids.shape[:-1]
    if table_ids is None and num_tables > 1 and (ids.dim() != 3 or ids.shape[1] != num_tables):
        raise ValueError(
            f"ids of bags must be of shape [B, {num_tables}, L], a bag for each table, got {list(ids.shape)}; pass"
            " table_ids, the table of each bag, or pass offsets"
        )
    if isinstance(table_ids, torch.Tensor) and table_ids.dim() > 0:
        try:
            table_ids = table_ids.expand(shape).reshape(-1)
        except RuntimeError as error:
            raise ValueError(
                f"table_ids must be of shape {list(shape)}, one for each bag, or of a shape that broadcasts to it, got"
                f" {list(table_ids.shape)}"
            ) from error
    if isinstance(scales, torch.Tensor):
        if scales.shape != ids.shape:
            raise ValueError(
                f"per_sample_weights must have the shape of ids, {list(ids.shape)}, got {list(scales.shape)}"
            )
        scales = scales.reshape(-1)
    offsets = torch.arange(math.prod(shape) + 1, dtype=torch.int64, device=ids.device) * ids.shape[-1]
    return BagArguments(ids.reshape(-1), table_ids, offsets, scales, shape)


def one_table(
    table_ids: Any, num_tables: int, ids: Any, known: dict[tuple[int, torch.device], torch.Tensor] | None = None
) -> torch.Tensor | None:  # fmt: skip
    """Tensor of shape [] for `table_ids` that is the number of the table of all `ids`. Any other value is returned as
    it is, and the lookup refuses it if it is wrong. Any: a user's values.

    Args:
        known: tensors of earlier lookups. The plan of a graph knows a table by its tensor.

    Raises:
        ValueError: there is no such table.
    """
    is_number = isinstance(table_ids, int | np.integer) and not isinstance(table_ids, bool)
    if not is_number or not isinstance(ids, torch.Tensor):
        given: torch.Tensor | None = table_ids
        return given
    table, known = int(table_ids), {} if known is None else known
    if not 0 <= table < num_tables:
        raise ValueError(f"table_ids must be from 0 to {num_tables - 1}, got {table}")
    if (table, ids.device) not in known:
        # Later lookups use the tensor again, so neither a recording of `build` nor inference mode may mark it.
        with torch._C.DisableTorchFunction(), torch.inference_mode(False):
            known[table, ids.device] = torch.tensor(table, dtype=torch.int64, device=ids.device)
    return known[table, ids.device]


def columns_of(columns: Any) -> Any:
    """`columns` as a tuple. A value that is not iterable is returned as it is, and the lookup refuses it."""
    return tuple(columns) if isinstance(columns, Iterable) else columns


_OFFSETS_BY_NAME = "; pass offsets of bags by name: embedding(ids, offsets=offsets)"


def check_ids(ids: torch.Tensor, table_ids: torch.Tensor | None, num_tables: int, key_type: torch.dtype) -> None:
    """Raise TypeError or ValueError unless dtype, device and shape fit a lookup of ids."""
    check_dtype(ids, key_type, num_tables if table_ids is None else 1)
    if table_ids is None:
        if num_tables > 1 and (ids.dim() != 2 or ids.shape[1] != num_tables):
            raise ValueError(
                f"ids must be {key_type} of shape [B, {num_tables}], one column a table, got {list(ids.shape)};"
                " pass table_ids, the table of each id, or one int for all"
            )
        return
    if not isinstance(table_ids, torch.Tensor) or table_ids.dtype not in _INTEGERS:
        got = table_ids.dtype if isinstance(table_ids, torch.Tensor) else type(table_ids).__name__
        cure = "pass the number of a table, or torch.tensor(numbers)"
        if isinstance(table_ids, torch.Tensor):
            cure = "call table_ids.long()"
        raise TypeError(f"table_ids must be a tensor of integers, or one int for all ids, got {got}; {cure}")
    if table_ids.device != ids.device:
        raise ValueError(f"table_ids must be on {ids.device}, where the ids are, got {table_ids.device}")
    try:
        fits = torch.broadcast_shapes(table_ids.shape, ids.shape) == ids.shape
    except RuntimeError:
        fits = False
    if not fits:
        raise ValueError(
            f"table_ids must have the shape of ids, {list(ids.shape)}, or one that broadcasts to it, got"
            f" {list(table_ids.shape)}{_OFFSETS_BY_NAME}"
        )


def check_dtype(ids: torch.Tensor, key_type: torch.dtype, columns: int = 1) -> None:
    """Raise TypeError or ValueError unless `ids` is a dense tensor of dtype `key_type` on a CPU or GPU. `columns` is
    only for the error text."""
    # Texts and device objects are made after a check has failed: a lookup of few rows takes little longer than this.
    if not isinstance(ids, torch.Tensor) or ids.layout is not torch.strided or ids.is_nested:
        raise _no_dense_tensor(ids, f"{key_type} of {_shape(columns)}")
    if ids.dtype != key_type:
        raise TypeError(
            f"ids must be {key_type} of {_shape(columns)}, got {ids.dtype} {list(ids.shape)};"
            f"{_cure_of_dtype(ids.dtype, key_type)}"
        )
    if not (ids.is_cpu or ids.is_cuda):
        raise ValueError(f"ids must be on the CPU, where the embedding is, got {ids.device}; call ids.cpu()")


def _cure_of_dtype(got: torch.dtype, key_type: torch.dtype) -> str:
    """Text on how to turn ids of another dtype into ids of `key_type`."""
    if got.is_floating_point:
        digits = 1 - round(math.log2(torch.finfo(got).eps))
        return (
            f" call ids.to({key_type}) where ids are small, but {got} has no room for ids above 2^{digits}, and such"
            " ids have lost bits already: make ids integers where they are read"
        )
    if got == torch.int64:
        return f" make the embedding with key_type=torch.int64, or call ids.to({key_type}) if all ids fit"
    return f" call ids.to({key_type}), or make the embedding with another key_type"


def _no_dense_tensor(ids: object, wanted: str) -> TypeError:
    """The error about ids that are no tensor, or one that is nested or sparse."""
    if not isinstance(ids, torch.Tensor):
        cure = "pass torch.tensor(ids); for strings, oneemb.hash_ids(ids)"
        return TypeError(f"ids must be a tensor of {wanted}, got {type(ids).__name__}; {cure}")
    if ids.layout is torch.jagged:
        cure = "as bags, pass ids.values() with offsets=ids.offsets(); or call ids.to_padded_tensor(padding_idx)"
    elif ids.is_nested:
        cure = "call ids.to_padded_tensor(padding_idx), or pass torch.cat(ids.unbind()) with the offsets of bags"
    else:
        cure = "call ids.to_dense()"
    kind = "nested" if ids.is_nested else "sparse"
    return TypeError(f"ids must be a tensor of {wanted}, neither nested nor sparse, got a {kind} tensor; {cure}")


def _shape(columns: int) -> str:
    return f"shape [B, {columns}]" if columns > 1 else "any shape"


def check_tables(table_ids: torch.Tensor, num_tables: int) -> None:
    """Raise ValueError unless all `table_ids` are from 0 to T-1."""
    low = high = 0
    if table_ids.numel():
        values = _values(table_ids)
        low, high = int(values.min()), int(values.max())
    if low < 0 or high >= num_tables:
        raise ValueError(f"table_ids must be from 0 to {num_tables - 1}, got {low} to {high}{_OFFSETS_BY_NAME}")


def tables_and_ids(
    ids: torch.Tensor, table_ids: torch.Tensor | None, num_tables: int, backend: Backend
) -> tuple[Array, Array, Callable[[], None] | None]:
    """(table_N, id_N, function that checks the values of `table_ids`, or None) of ids that have passed `check_ids`."""
    # Integers have no gradient from which to detach them.
    flat_N = ids if ids.is_contiguous() else ids.contiguous()
    id_N = backend.array(flat_N if ids.dim() == 1 else flat_N.view(-1))
    if table_ids is None:
        return backend.tables_of_columns(ids.numel(), num_tables), id_N, None
    looked_up = table_ids if ids.numel() else table_ids.reshape(-1)[:0]
    table_N = backend.tables(table_ids, num_tables).expand(ids.shape).reshape(-1).contiguous()
    return backend.array(table_N), id_N, functools.partial(check_tables, looked_up, num_tables)


def bags_of_ids(
    ids: torch.Tensor,
    table_ids: torch.Tensor | None,
    num_tables: int,
    key_type: torch.dtype,
    offsets: torch.Tensor,
    columns: Sequence[int] | None,
    backend: Backend,
) -> tuple[torch.Size, torch.Tensor, torch.Tensor | None, Callable[[], None]]:
    """(shape of the bags, offset_P1, table_P or None, function that checks the values of offsets and tables).

    Args:
        columns: the table of each column; see `unique_keys`.
        backend: backend of the device of the ids.

    Raises:
        TypeError, ValueError: dtype, device or shape does not fit a lookup of bags.
    """
    check_dtype(ids, key_type, 1)
    if ids.dim() != 1:
        raise ValueError(f"ids of bags must be {key_type} [N], got {list(ids.shape)}; call ids.reshape(-1)")
    _check_offsets_kind(offsets, ids.device)
    bags = len(offsets) - 1
    # A copy: a backward pass must read the offsets that were checked.
    offset_P1 = offsets.detach().to(torch.int64, copy=True, memory_format=torch.contiguous_format)
    if columns is not None:
        _check_columns(columns, num_tables, bags, table_ids)
        shape = torch.Size([bags // len(columns), len(columns)])
    elif table_ids is not None:
        _check_tables_of_bags(table_ids, bags, ids.device)
        table_ids = table_ids.expand(bags)
        shape = torch.Size([bags])
    elif bags % num_tables:
        raise ValueError(
            f"offsets must be of B * {num_tables} bags, one for each sample and table, got {bags} bags; pass table_ids,"
            " the table of each bag; or, if offsets leave out the end of the last bag, as those of nn.EmbeddingBag do"
            " by default, pass include_last_offset=False"
        )
    else:
        shape = torch.Size([bags]) if num_tables == 1 else torch.Size([bags // num_tables, num_tables])
    table_P = None if table_ids is None else backend.tables(table_ids, num_tables).contiguous()

    def check() -> None:
        _check_offsets(offset_P1, len(ids))
        if table_ids is not None:
            check_tables(table_ids, num_tables)

    return shape, offset_P1, table_P, check


def check_scales(scales: torch.Tensor, in_bags: bool, pooling: str, ids: int, device: torch.device) -> None:
    """Raise TypeError or ValueError unless the `per_sample_weights` given as `scales` fit a lookup.

    Args:
        in_bags: whether the ids are in bags.
        ids: number of ids.
        device: device of the ids.
    """
    if not in_bags or pooling != "sum":
        raise ValueError('per_sample_weights are only for bags that are summed; pass offsets, and pooling="sum"')
    is_tensor = isinstance(scales, torch.Tensor)
    if not is_tensor or scales.dtype != torch.float32 or scales.shape != (ids,):
        got = (scales.dtype, list(scales.shape)) if is_tensor else type(scales)
        raise TypeError(f"per_sample_weights must be float32, one for each of {ids} ids, got {got}")
    if scales.device != device:
        raise ValueError(f"per_sample_weights must be on {device}, where ids are, got {scales.device}")


def check_no_columns(columns: object) -> None:
    """Raise ValueError if `columns` is not None, for a lookup without bags."""
    if columns is not None:
        raise ValueError(
            "columns are the tables of bags, and need offsets; pass offsets, or leave columns out: column t of ids"
            " [B, T] belongs to table t"
        )


def _check_columns(columns: Sequence[int], num_tables: int, bags: int, table_ids: object) -> None:
    if not isinstance(columns, list | tuple) or not columns or not all(type(table) is int for table in columns):
        raise TypeError(f"columns must be a list of ints, the table of each column, got {columns!r}")
    in_order = all(before <= table for before, table in zip(columns, columns[1:], strict=False))
    if columns[0] < 0 or columns[-1] >= num_tables or not in_order:
        raise ValueError(f"columns must be tables from 0 to {num_tables - 1} in ascending order, got {columns}")
    if bags % len(columns):
        raise ValueError(
            f"offsets must be of the same number of bags for each of {len(columns)} columns, got {bags} bags"
        )
    if table_ids is not None:
        raise ValueError("columns and table_ids both give the table of each bag; pass only one of them")


def _check_tables_of_bags(table_ids: torch.Tensor, bags: int, device: torch.device) -> None:
    is_tensor = isinstance(table_ids, torch.Tensor)
    if (
        not is_tensor
        or table_ids.dtype not in _INTEGERS
        or table_ids.shape not in ((), (1,), (bags,))
        or table_ids.device != device
    ):
        got = (table_ids.dtype, list(table_ids.shape), str(table_ids.device)) if is_tensor else type(table_ids)
        raise ValueError(
            f"table_ids must be integers on the device of ids, one for each of {bags} bags or one for all, got {got};"
            " pass an int, or a tensor"
        )


def _check_offsets_kind(offsets: torch.Tensor, device: torch.device) -> None:
    is_tensor = isinstance(offsets, torch.Tensor)
    if not is_tensor or offsets.dtype not in (torch.int64, torch.int32) or offsets.dim() != 1 or len(offsets) == 0:
        got = (offsets.dtype, list(offsets.shape)) if is_tensor else type(offsets).__name__
        raise TypeError(f"offsets must be an int64 tensor of shape [bags + 1], got {got}")
    if offsets.device != device:
        raise ValueError(f"offsets must be on {device}, where the ids are, got {offsets.device}")


def _check_offsets(offset_P1: torch.Tensor, ids: int) -> None:
    values_P1 = _values(offset_P1)
    ordered = bool((values_P1[1:] >= values_P1[:-1]).all())
    if not ordered or values_P1[0] != 0 or values_P1[-1] != ids:
        raise ValueError(
            f"offsets must begin with 0, never fall, and end with the number of ids, {ids}; got"
            f" {offset_P1[:3].tolist()} ... {offset_P1[-1:].tolist()}; if offsets leave out the end of the last bag, as"
            " those of nn.EmbeddingBag do by default, pass include_last_offset=False"
        )


def _values(tensor: torch.Tensor) -> np.ndarray | torch.Tensor:
    """Values to compute on, on the CPU as an array: torch's threads would spin on the cores that kernels need."""
    return tensor.numpy() if tensor.device.type == "cpu" else tensor
