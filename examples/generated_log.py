"""A click log drawn from a known model, in the same tables as the real one, for machines that do not have it.

Ids are Zipf-distributed 64-bit integers. A user has a taste, which the history shows and a profile column hints at;
a video has tags; whether a video is clicked depends on the tab, on the user's activity, on the video, and most of all
on how well taste and tag go together, which no sum of single features can tell. The probability of each click is
kept, so the best AUC that any model can reach is known.
"""

import numpy as np
import pandas as pd
from kuairand import VALIDATION_DATE, Tables

__all__ = ["generate_tables"]

_USERS, _VIDEOS, _TASTES, _TAGS = 6_000, 3_000, 6, 20
_ACTIVITIES = np.array(["low_active", "middle_active", "high_active", "full_active"])
_DAYS = pd.date_range(end=str(VALIDATION_DATE), periods=6)
# The exponent of Zipf's law and the rank that it is counted from: the first ids lead, and no id is all.
_ZIPF, _HEAD = 1.1, 10


def generate_tables(events: int, seed: int) -> Tables:
    """Draw a log of so many events, six days that end on 30 April. Equal arguments draw an equal log."""
    rng = np.random.default_rng([seed, events])
    user_id_U, video_id_V = _distinct_ids(rng, _USERS), _distinct_ids(rng, _VIDEOS)
    taste_U, activity_U = rng.integers(_TASTES, size=_USERS), rng.integers(len(_ACTIVITIES), size=_USERS)
    tags_V2 = rng.integers(_TAGS, size=(_VIDEOS, 2))
    like_TV = rng.normal(0, 1.6, (_TASTES, _TAGS))[:, tags_V2].mean(2)
    quality_V = rng.normal(0, 0.5, _VIDEOS)

    user_E, video_E = rng.choice(_USERS, events, p=_zipf(_USERS)), rng.choice(_VIDEOS, events, p=_zipf(_VIDEOS))
    tab_E = rng.choice(4, events, p=[0.7, 0.15, 0.1, 0.05])
    logit_E = like_TV[taste_U[user_E], video_E] + quality_V[video_E] + 0.4 * (activity_U[user_E] - 1.5)
    probability_E = 1 / (1 + np.exp(-(logit_E + np.array([0.2, -1.2, 0.5, -2.0])[tab_E])))
    duration_V = np.exp(rng.normal(10.5, 0.8, _VIDEOS)).astype("int64")
    return Tables(
        events=pd.DataFrame(
            {
                "is_click": (rng.random(events) < probability_E).astype("int64"),
                "user_id": user_id_U[user_E],
                "video_id": video_id_V[video_E],
                "tab": tab_E,
                "date": np.sort(rng.choice(_DAYS.strftime("%Y%m%d").astype("int64"), events)),
                "hourmin": 100 * rng.integers(24, size=events),
                "duration_ms": duration_V[video_E],
            }
        ),
        users=pd.DataFrame(
            {
                "user_id": user_id_U,
                "user_active_degree": _ACTIVITIES[activity_U],
                "register_days": rng.integers(1, 2000, _USERS).astype(float),
                "onehot_feat1": np.where(rng.random(_USERS) < 0.8, taste_U, rng.integers(_TASTES, size=_USERS)),
            }
        ),
        videos=pd.DataFrame(
            {
                "video_id": video_id_V,
                "author_id": _distinct_ids(rng, _VIDEOS // 3)[rng.integers(_VIDEOS // 3, size=_VIDEOS)],
                "upload_dt": rng.choice(_DAYS.strftime("%Y-%m-%d"), _VIDEOS),
                "tag": [" ".join(map(str, sorted(set(tags)))) for tags in tags_V2],
            }
        ),
        history=_history(rng, user_id_U, video_id_V, taste_U, like_TV),
        probability_E=probability_E,
    )


def _history(
    rng: np.random.Generator, user_id_U: np.ndarray, video_id_V: np.ndarray, taste_U: np.ndarray, like_TV: np.ndarray
) -> pd.DataFrame:
    """Videos watched before the log begins, drawn by popularity and taste; half were watched long, a few liked."""
    weight_TV = _zipf(_VIDEOS) * np.exp(like_TV)
    watched = []
    for taste in taste_U:
        chance_V = weight_TV[taste] / weight_TV[taste].sum()
        watched.append(video_id_V[rng.choice(_VIDEOS, rng.integers(5, 51), p=chance_V)])
    shares = {"watch_seq": 1, "long_watch_seq": 2, "like_seq": 20}
    text = {name: [" ".join(map(str, ids[::every])) for ids in watched] for name, every in shares.items()}
    return pd.DataFrame({"user_id": user_id_U, **text})


def _distinct_ids(rng: np.random.Generator, count: int) -> np.ndarray:
    return rng.permutation(np.unique(rng.integers(2**62, size=2 * count)))[:count]


def _zipf(count: int) -> np.ndarray:
    weight = 1 / np.arange(_HEAD, _HEAD + count) ** _ZIPF
    return weight / weight.sum()
