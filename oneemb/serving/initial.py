"""Values of ids without a row in a file of rows: their initial rows in training.

M ids, D weights.
"""

import json
from collections.abc import Sequence
from typing import cast

import numpy as np
import torch

from oneemb.embeddings.embedding_arguments import initial_rows
from oneemb.graph.ops.lookup import DTYPES as TRAINED
from oneemb.kernels.init_rows import InitialRows, init_rows
from oneemb.kernels.threads import Threads
from oneemb.options import Initializer, TableOptions, from_json
from oneemb.storage.errors import CorruptTableError, StorageError
from oneemb.storage.policies.row_policy import Absent, RowPolicy, reads_as, rows_instead
from oneemb.storage.rows.row_format import RowFormat
from oneemb.storage.serving.served_file import ServedFile


def initial_of(file: ServedFile, absent: str, policies: Sequence[RowPolicy] | None = None) -> InitialRows | None:
    """Initial rows, which ids without a row read as; None = zeros.

    Args:
        absent: "initial", or as the policies of tables say; or "zeros".
        policies: of the tables; None = those in the file.

    Raises:
        StorageError: the file does not describe initial rows, or its description is wrong.
    """
    if absent not in ("initial", "zeros"):
        raise ValueError(f'absent must be "initial" or "zeros", got {absent!r}')
    if absent == "zeros":
        return None
    its = file.info.embedding
    if not {"seed", "tables", "column_dims", "default_initializer"} <= its.keys():
        raise StorageError(
            f"snapshot {file.info.name!r} does not say how rows begin: a writer or an earlier release saved it; pass"
            ' absent="zeros", or save it again'
        )
    try:
        tables = cast(list[TableOptions], from_json(json.dumps(its["tables"])))
        default = cast(Initializer, from_json(json.dumps(its["default_initializer"])))
        if type(its["seed"]) is not int or not all(type(dim) is int for dim in its["column_dims"]):
            raise ValueError(f"seed {its['seed']!r} and column_dims must be integers")
        initial = initial_rows(its["seed"], its["column_dims"], tables, default)
        if len(tables) != file.info.num_tables or sum(its["column_dims"]) != file.info.dim:
            raise ValueError("tables or columns are not those of the rows")
        said_T = [_absent_of(said) for said in its.get("absent", ())]
        if len(said_T) not in (0, len(tables)):
            raise ValueError(f"absent is said of {len(said_T)} tables, there are {len(tables)}")
        return reads_as(said_T, initial) if policies is None else rows_instead(policies, initial, "absent")
    except (ValueError, TypeError, KeyError, AttributeError, OverflowError, RecursionError) as error:
        raise CorruptTableError(f"{file.path}: what it says of the embedding is wrong: {str(error)[:200]}") from error


def _absent_of(said: object) -> Absent:
    found = said if isinstance(said, str) else from_json(json.dumps(said))
    if found not in ("initial", "zeros") and not isinstance(found, Initializer):
        raise ValueError(f"absent is {str(said)[:100]}")
    return cast(Absent, found)


def first_weights(
    initial: InitialRows, format: RowFormat, gives: str, table_M: np.ndarray, id_M: np.ndarray, *, threads: Threads
) -> np.ndarray:
    """Initial weights of keys, [M, D]: their bits in this format if `gives` is its dtype, else float32."""
    row_MW = np.zeros((len(id_M), format.row_width), np.float32)
    weight_MX = format.weights(row_MW)
    init_rows(
        weight_MX, row_MW, np.arange(len(id_M)), table_M, id_M.astype(np.int64), initial, np.empty(0, np.float32),
        state_begin=format.state_begin, threads=threads,
    )  # fmt: skip
    weight_MD = np.ascontiguousarray(weight_MX[:, : format.dim])
    return (
        weight_MD if gives == format.dtype else torch.from_numpy(weight_MD).view(TRAINED[format.dtype]).float().numpy()
    )
