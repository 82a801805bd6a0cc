"""The click model as a server has it: dense weights of a checkpoint, and rows of the snapshot that it names.

What must stay true: weights and rows are of one version, or there is none. A version never changes, so who has one
answers wholly from it while another takes its place.

Shape letters: B batch, L ids of an example, X numbers of an example.
"""

import json
import math
import pickle
import zipfile
import zlib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, NoReturn

import numpy as np
import torch
from dlrm import DLRM, TABLES, OneEmbLookup
from kuairand import Field

import oneemb
from oneemb.checkpoints.named_snapshot import decode
from oneemb.serving.inference import Version

__all__ = ["CHECKPOINT", "DTYPES", "Dtype", "ModelError", "Refused", "ServedModel", "load", "parse"]

CHECKPOINT = "checkpoint.pt"
Dtype = Literal["float32", "float16", "int8", "int4"]
_DAMAGE = (ValueError, KeyError, TypeError, NotImplementedError, zipfile.BadZipFile, zlib.error)
DTYPES: tuple[Dtype, ...] = ("float32", "float16", "int8", "int4")


class ModelError(Exception):
    """A checkpoint cannot be served; the message says why."""


class Refused(Exception):
    """A request is not as it must be. The message says what must hold and what came.

    Args:
        status: of HTTP.
    """

    def __init__(self, status: int, message: str):
        super().__init__(message)
        self.status = status


@dataclass(frozen=True)
class ServedModel:
    """One version."""

    model: DLRM
    version: Version
    """The snapshot's."""
    fields: tuple[Field, ...]
    numbers: int
    """X"""
    saved_at: float
    """When the checkpoint was written, seconds since 1970."""

    @property
    def ids(self) -> int:
        """L"""
        return sum(field.width for field in self.fields)

    def score(self, numeric_BX: np.ndarray, id_BL: np.ndarray) -> list[float]:
        """The probability of a click of each example."""
        with torch.inference_mode():
            logit_B = self.model(torch.from_numpy(numeric_BX), torch.from_numpy(id_BL))
            return torch.sigmoid(logit_B.double()).tolist()


def load(workdir: Path, dtype: Dtype, num_threads: int | None = None) -> ServedModel:
    """The version that the checkpoint of a training job names now.

    Args:
        workdir: of `kuairand_dlrm.py`.
        dtype: of the rows.
        num_threads: of one lookup; None = the cores there are.

    Raises:
        ModelError: there is no checkpoint, it is damaged, or the snapshot that it names is not there, is another one of
            that name by now, or is damaged.
    """
    path = workdir / CHECKPOINT
    try:
        with open(path, "rb") as file:
            saved_at = path.stat().st_mtime
            with zipfile.ZipFile(file) as parts:
                wrong = parts.testzip()  # torch compares no checksums
            if wrong is not None:
                raise ValueError(f"its part {wrong} is not as it was written")
            file.seek(0)
            state = torch.load(file, weights_only=True)
        fields = tuple(Field(str(name), int(width)) for name, width in state["fields"])
        weights: dict[str, torch.Tensor] = state["model"]
        named = decode(weights["lookup.embedding._extra_state"])
        numbers, dim = int(state["numbers"]), int(state["settings"]["dim"])
    except FileNotFoundError:
        raise ModelError(f"{path} is not there; train with kuairand_dlrm.py, which writes it") from None
    except (OSError, EOFError, RuntimeError, pickle.UnpicklingError, *_DAMAGE) as error:
        raise ModelError(f"{path} is no checkpoint of kuairand_dlrm.py, or damaged: {_line(error)}") from error
    name, identity = named["oneemb_snapshot"], named.get("oneemb_identity")
    try:
        embedding = oneemb.InferenceEmbedding.open(str(workdir / TABLES), name, dtype, num_threads=num_threads)
    except (oneemb.StorageError, ValueError) as error:
        raise ModelError(f"snapshot {name!r}, which {path} names, cannot be served: {_line(error)}") from error
    if embedding.version.identity != identity:
        raise ModelError(
            f"{path} names snapshot {name!r} with identity {identity}, there is {embedding.version.identity}: the job"
            " has replaced it and will replace the checkpoint"
        )
    try:
        model = DLRM(OneEmbLookup(embedding, fields), len(fields), numbers, dim)
        for its, part in ("bottom", model.bottom), ("top", model.top):
            part.load_state_dict({k.removeprefix(f"{its}."): v for k, v in weights.items() if k.startswith(f"{its}.")})
    except (RuntimeError, ValueError) as error:
        raise ModelError(f"the weights in {path} are not those of the model: {_line(error)}") from error
    served = ServedModel(model.eval(), embedding.version, fields, numbers, saved_at)
    try:  # It is tried before it serves, and loads what the first request would wait for.
        (score,) = served.score(np.zeros((1, numbers), np.float32), np.zeros((1, served.ids), np.int64))
    except (oneemb.StorageError, RuntimeError) as error:
        raise ModelError(f"snapshot {name!r}, which {path} names, cannot be served: {_line(error)}") from error
    if not math.isfinite(score):
        raise ModelError(f"the weights in {path}, or the rows of snapshot {name!r}, give no finite score")
    return served


def _line(error: BaseException) -> str:
    return " ".join(str(error).split())[:300] or type(error).__name__


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
        raise Refused(400, f"the body must be JSON: {_line(error)}") from None
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
