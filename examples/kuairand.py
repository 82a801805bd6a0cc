"""KuaiRand-Pure as a click log: which short video was shown to whom, and was it clicked.

A log is four tables: events, users, videos, history. `read_tables` reads them from a folder of csv.gz files,
`generated_log.generate_tables` draws them, and `encode` makes ids and numbers of either.

What must stay true: the one label is `is_click`. The other columns that are known only after the impression
(`long_view`, `is_like`) are never read, and no feature is computed from a label, so none can leak.

Data: Gao et al. KuaiRand: An Unbiased Sequential Recommendation Dataset with Randomly Exposed Videos. CIKM 2022.

Shape letters: E events, B events of a batch, L ids of an event, X numbers of an event.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pandas as pd
import torch

__all__ = ["PADDING", "VALIDATION_DATE", "ClickLog", "Field", "Side", "Tables", "encode", "read_tables"]

VALIDATION_DATE = 20220430
"""Events of this day validate, those of earlier days train."""
PADDING = -1
"""Fills the places of a multi-hot field that an event does not use."""

_EVENT_COLUMNS = ["is_click", "user_id", "video_id", "tab", "date", "hourmin", "duration_ms"]
_INTEGERS = {"user_id": "int64", "video_id": "int64", "author_id": "int64", "music_id": "int64", "register_days": float}
_HISTORY = ["watch_seq", "long_watch_seq", "like_seq"]
_TAGS = ["tag"]
# Read as numbers, or not at all: video_duration is the duration_ms of the events once more.
_NOT_ONE_HOT = {"register_days", "video_duration", *_HISTORY, *_TAGS}


@dataclass(frozen=True)
class Tables:
    """The four tables as they are in the files."""

    events: pd.DataFrame
    users: pd.DataFrame
    videos: pd.DataFrame
    history: pd.DataFrame
    probability_E: np.ndarray | None = None
    """What each click was drawn with; None where only the world knows."""


@dataclass(frozen=True)
class Field:
    """A feature with an embedding table of its own: `width` ids an event, which are averaged. One-hot: width 1."""

    name: str
    width: int


@dataclass(frozen=True)
class Side:
    """Ids that many events share, kept once: those of event e are `id_RK[row_E[e]]`."""

    fields: tuple[Field, ...]
    id_RK: np.ndarray
    row_E: np.ndarray


@dataclass(frozen=True)
class ClickLog:
    """Events in the order of time, as ids and numbers."""

    sides: tuple[Side, ...]
    numeric_EX: np.ndarray
    label_E: np.ndarray
    train_days: tuple[np.ndarray, ...]
    """Indexes of the events to train on, day after day."""
    validation: np.ndarray
    """Indexes of the events of the day after those."""
    probability_E: np.ndarray | None

    @property
    def train(self) -> np.ndarray:
        """Indexes of the events to train on."""
        return np.concatenate(self.train_days)

    @property
    def fields(self) -> tuple[Field, ...]:
        """In the order of the ids of an event; one-hot fields come first."""
        return tuple(field for side in self.sides for field in side.fields)

    def each_field(self) -> Iterator[tuple[Field, np.ndarray, np.ndarray]]:
        """(field, id_RK, row_E) of each field, as in `Side`."""
        for side in self.sides:
            ends = np.cumsum([field.width for field in side.fields])
            for field, id_RK in zip(side.fields, np.split(side.id_RK, ends[:-1], axis=1), strict=True):
                yield field, id_RK, side.row_E

    def batch(self, events: np.ndarray) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """(numeric_BX, id_BL, label_B) of the events with these indexes."""
        id_BL = np.concatenate([side.id_RK[side.row_E[events]] for side in self.sides], 1)
        return (
            torch.from_numpy(self.numeric_EX[events]),
            torch.from_numpy(id_BL),
            torch.from_numpy(self.label_E[events]),
        )


def read_tables(folder: Path) -> Tables:
    """The four tables of a folder of csv.gz files. Codes and ranges stay text, ids are int64.

    Raises:
        FileNotFoundError: a file is not there.
    """

    def read(name: str, columns: Sequence[str] | None = None) -> pd.DataFrame:
        text = pd.read_csv(folder / f"{name}.csv.gz", dtype=str, keep_default_na=False, usecols=columns)
        integers = _EVENT_COLUMNS if columns else [name for name in _INTEGERS if name in text]
        return text.astype({name: _INTEGERS.get(name, "int64") for name in integers})

    return Tables(
        read("events_0425_0430", _EVENT_COLUMNS), read("users"), read("videos"), read("history_to_0424"),
    )  # fmt: skip


def encode(tables: Tables) -> ClickLog:
    """Ids and numbers of every event.

    One-hot: every column of users and videos, the tab, the hour, the duration in steps of a third of an octave, and
    how long the user's histories are. Multi-hot: the histories and the tags. Integers are ids as they are and text is
    hashed, so no vocabulary is made. Numbers are standardised with the training events' mean and deviation.
    """
    events = tables.events
    users = _join(_join(events[["user_id"]].drop_duplicates(), tables.users), tables.history)
    videos = _join(events[["video_id"]].drop_duplicates(), tables.videos)
    user_E = pd.Index(users["user_id"]).get_indexer(events["user_id"])
    video_E = pd.Index(videos["video_id"]).get_indexer(events["video_id"])

    history_length = users[_HISTORY].apply(lambda text: text.fillna("").str.split().str.len())
    context = pd.DataFrame(
        {
            "tab": events["tab"],
            "hour": events["hourmin"] // 100,
            "duration": (3 * np.log2(events["duration_ms"].clip(lower=1))).astype("int64"),
        }
    )
    age_days = (_day(events["date"]) - _day(videos["upload_dt"].iloc[video_E]).set_axis(events.index)).dt.days
    numeric_EX = np.column_stack(
        [
            np.log1p(events["duration_ms"]),
            np.log1p(users["register_days"].iloc[user_E]),
            np.log1p(history_length.iloc[user_E]),
            age_days.clip(0, 60),
        ]
    )
    date_E = events["date"].to_numpy()
    train_days = tuple(np.flatnonzero(date_E == date) for date in np.unique(date_E[date_E < VALIDATION_DATE]))
    return ClickLog(
        sides=(
            _one_hot(pd.concat([users, history_length.add_suffix("_length")], axis=1), user_E),
            _one_hot(videos, video_E),
            _one_hot(context, np.arange(len(events))),
            *(_multi_hot(users[name], user_E) for name in _HISTORY),
            *(_multi_hot(videos[name], video_E) for name in _TAGS),
        ),
        numeric_EX=_standardised(numeric_EX, np.concatenate(train_days)),
        label_E=events["is_click"].to_numpy(np.float32),
        train_days=train_days,
        validation=np.flatnonzero(date_E == VALIDATION_DATE),
        probability_E=tables.probability_E,
    )


def _join(left: pd.DataFrame, right: pd.DataFrame) -> pd.DataFrame:
    """`left` with the columns of `right`, whose integers read as PADDING where it has no row."""
    joined = left.merge(right, how="left")
    integers = right.select_dtypes("int64").columns
    return joined.fillna({name: PADDING for name in integers}).astype({name: "int64" for name in integers})


def _day(text_or_number: pd.Series) -> pd.Series:
    """Days, as in 2022-04-30 or 20220430; no day where there is none."""
    return pd.to_datetime(text_or_number.astype(str).str.replace("-", ""), format="%Y%m%d", errors="coerce")


def _one_hot(table: pd.DataFrame, row_E: np.ndarray) -> Side:
    """A field of each column."""
    columns = [name for name in table if name not in _NOT_ONE_HOT]
    id_RK = np.column_stack([_ids(table[name]) for name in columns])
    return Side(tuple(Field(name, 1) for name in columns), id_RK, row_E)


def _ids(column: pd.Series) -> np.ndarray:
    if pd.api.types.is_integer_dtype(column):
        return column.to_numpy("int64")
    return pd.util.hash_array(column.astype(str).to_numpy(object)).view("int64")


def _multi_hot(text: pd.Series, row_E: np.ndarray) -> Side:
    """One field of blank-separated ids."""
    words = text.fillna("").str.split()
    length_R = words.str.len().to_numpy()
    id_RK = np.full((len(text), max(1, length_R.max())), PADDING)
    id_RK[np.arange(id_RK.shape[1]) < length_R[:, None]] = words.explode().dropna().astype("int64")
    return Side((Field(str(text.name), id_RK.shape[1]),), id_RK, row_E)


def _standardised(numeric_EX: np.ndarray, train: np.ndarray) -> np.ndarray:
    """Mean 0 and deviation 1 over the training events; what is missing becomes their mean, 0."""
    mean_X, std_X = np.nanmean(numeric_EX[train], 0), np.nanstd(numeric_EX[train], 0)
    return np.nan_to_num((numeric_EX - mean_X) / np.maximum(std_X, 1e-6)).astype(np.float32)
