"""The click model as a server has it, made for the checkpoint of a training job, and what a request must be.

Shape letters: B batch, L ids of an example, X numbers of an example.
"""

import functools
import json
import math
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, NoReturn, cast

import numpy as np
import torch
from dlrm import DLRM, TABLES, OneEmbLookup
from kuairand import PADDING, Field

import oneemb

__all__ = ["CHECKPOINT", "DTYPES", "Dtype", "Refused", "Scorer", "load", "parse", "scorer_of"]

CHECKPOINT = "checkpoint.pt"
Dtype = Literal["float32", "float16", "int8", "int4"]
DTYPES: tuple[Dtype, ...] = ("float32", "float16", "int8", "int4")


class Refused(Exception):
    """A request is not as it must be. The message says what must hold and what came.

    Args:
        status: of HTTP.
    """

    def __init__(self, status: int, message: str):
        super().__init__(message)
        self.status = status


class Scorer(DLRM):
    """The model of a checkpoint of `kuairand_dlrm.py`.

    Args:
        workdir: of that script.
        checkpoint: content of the checkpoint, which has the fields and sizes of the model.
    """

    def __init__(self, workdir: Path, checkpoint: Mapping[str, Any]):
        try:
            fields = tuple(Field(str(name), int(width)) for name, width in checkpoint["fields"])
            numbers, dim = int(checkpoint["numbers"]), int(checkpoint["settings"]["dim"])
        except (KeyError, TypeError, ValueError) as error:
            raise ValueError(f"{workdir / CHECKPOINT} is no checkpoint of kuairand_dlrm.py: {error!r}") from error
        rows = oneemb.MultiTableEmbedding(
            "kuairand", dim, torch.float32, torch.int64, [oneemb.make_table()] * len(fields),
            oneemb.make_device_mem_store_options(str(workdir / TABLES)), padding_idx=PADDING,
        )  # fmt: skip
        super().__init__(OneEmbLookup(rows, fields), len(fields), numbers, dim)
        self.fields, self.numbers, self.ids = fields, numbers, sum(field.width for field in fields)

    def score(self, numeric_BX: np.ndarray, id_BL: np.ndarray) -> list[float]:
        """The probability of a click of each example."""
        with torch.inference_mode():
            logit_B = self(torch.from_numpy(numeric_BX), torch.from_numpy(id_BL))
            return torch.sigmoid(logit_B.double()).tolist()


def scorer_of(version: oneemb.ModelVersion) -> Scorer:
    return cast(Scorer, version.module)


def load(
    workdir: Path, dtype: Dtype, num_threads: int | None = None, *, missing_ok: bool = False,
    on_change: Callable[[oneemb.ServedModel], Any] | None = None,
) -> oneemb.ServedModel:  # fmt: skip
    """The model of the checkpoint in a training job's work folder; arguments and errors are those of
    `oneemb.serve_model`."""
    return oneemb.serve_model(
        workdir / CHECKPOINT, functools.partial(Scorer, workdir), dtype=dtype, num_threads=num_threads, check=_try,
        missing_ok=missing_ok, on_change=on_change,
    )  # fmt: skip


def _try(version: oneemb.ModelVersion) -> None:
    """A version is tried before it serves, which also loads what the first request would wait for."""
    scorer = scorer_of(version)
    (score,) = scorer.score(np.zeros((1, scorer.numbers), np.float32), np.zeros((1, scorer.ids), np.int64))
    if not math.isfinite(score):
        raise ValueError(f"the weights, or the rows of {version.snapshots}, give no finite score")


# ---- requests -------------------------------------------------------------------------------------------------------


def parse(body: bytes, numbers: int, ids: int, *, examples_max: int, ids_max: int) -> tuple[np.ndarray, np.ndarray]:
    """(numeric_BX float32, id_BL int64) of the body of a request: {"numbers": [B lists of X], "ids": [B lists of L]}.

    Raises:
        Refused: 400, the body is no JSON; 413, it has more examples or ids than are allowed; 422, it is not as above.
    """
    try:
        found = json.loads(body.decode(), parse_constant=_no_constant)
    except UnicodeDecodeError as error:
        raise Refused(400, f"the body must be JSON in UTF-8; byte {error.start} is not") from None
    except RecursionError:
        raise Refused(400, "the body must be an object with two lists of lists, it is nested deeper") from None
    except ValueError as error:  # JSONDecodeError too; and a number with too many digits
        raise Refused(400, f"the body must be JSON: {error}") from None
    if type(found) is not dict or found.keys() != {"numbers", "ids"}:
        raise Refused(422, f'the body must be an object with "numbers" and "ids" and no more, got {_shown(found)}')
    number_lists, id_lists = found["numbers"], found["ids"]
    for name, rows in ("numbers", number_lists), ("ids", id_lists):
        if type(rows) is not list or not rows:
            raise Refused(422, f"{name} must be a list of one list an example, got {_shown(rows)}")
        if len(rows) > examples_max:
            raise Refused(413, f"a request may have {examples_max} examples, {name} has {len(rows)}")
    if len(number_lists) != len(id_lists):
        raise Refused(
            422, f"numbers and ids must have a list an example each, got {len(number_lists)} and {len(id_lists)}"
        )
    if (count := ids * len(id_lists)) > ids_max:
        raise Refused(413, f"a request may have {ids_max} ids, {len(id_lists)} examples have {count}")
    _check_rows("numbers", number_lists, numbers, {int, float}, "finite numbers")
    _check_rows("ids", id_lists, ids, {int}, "integers")
    try:
        numeric_BX = np.array(number_lists, np.float64).reshape(-1, numbers)
        with np.errstate(over="ignore"):
            single_BX = numeric_BX.astype(np.float32)
    except OverflowError:
        raise Refused(422, "numbers must be finite and fit in float32, one is an integer far beyond") from None
    wrong = np.argwhere(~np.isfinite(single_BX))
    if len(wrong):
        b, x = wrong[0]
        raise Refused(422, f"numbers must be finite and fit in float32, got {numeric_BX[b, x]} at [{b}][{x}]")
    try:
        return single_BX, np.array(id_lists, np.int64).reshape(-1, ids)
    except OverflowError:
        b, x = next((b, x) for b, row in enumerate(id_lists) for x, id in enumerate(row) if not -(2**63) <= id < 2**63)
        came = _shown(id_lists[b][x])
        raise Refused(422, f"ids must be int64, from -2^63 to 2^63 - 1, got {came} at [{b}][{x}]") from None


def _no_constant(text: str) -> NoReturn:
    raise Refused(422, f"numbers must be finite and ids integers, got {text}")


def _check_rows(name: str, rows: Sequence[Any], width: int, types: set[type], what: str) -> None:
    """Each row is a list of so many values of these very types: no text, no bool, no null."""
    for b, row in enumerate(rows):
        if type(row) is not list or len(row) != width:
            raise Refused(422, f"{name} must be lists of {width} {what} each, got {_shown(row)} at [{b}]")
        if not types.issuperset(map(type, row)):
            x, value = next((x, value) for x, value in enumerate(row) if type(value) not in types)
            raise Refused(422, f"{name} must be {what}, got {_shown(value)} at [{b}][{x}]")


def _shown(value: object) -> str:
    """A few characters of what came."""
    if isinstance(value, list):
        return f"a list of {len(value)}"
    if isinstance(value, dict):
        return f"an object with {_cut(ascii(list(value)[:5]))}"
    if isinstance(value, int) and not isinstance(value, bool) and value.bit_length() > 128:
        return f"an integer of {value.bit_length()} bits"
    return _cut(json.dumps(value))


def _cut(text: str) -> str:
    return text if len(text) <= 60 else text[:57] + "..."
