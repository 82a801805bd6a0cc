"""Rows of a model's dynamic tables that have changed since a score, or since a time.

since = get_score(model)
...                                                     steps
rows, since = incremental_dump(model, since, pg)        {path: {table: (ids, weights)}}, and the next threshold
"""

import warnings
from collections.abc import Mapping
from typing import Any

import torch
from torch import distributed

from oneemb.dynamicemb.dump_load import dynamic_tables, named_for

__all__ = ["get_score", "incremental_dump", "is_valid_score_threshold", "set_score"]

Scores = Mapping[str, Mapping[str, int]]
"""{path of a collection, or the last name of the path: {table: score}}."""


def is_valid_score_threshold(score_threshold: Any) -> bool:
    """Whether `score_threshold` has the form {name: {name: int}}."""
    return isinstance(score_threshold, dict) and all(
        isinstance(path, str)
        and isinstance(scores, dict)
        and all(isinstance(name, str) and isinstance(score, int) for name, score in scores.items())
        for path, scores in score_threshold.items()
    )


def get_score(model: torch.nn.Module) -> dict[str, dict[str, int]] | None:
    """{collection's path: {table: current score}}. Pass it to a later `incremental_dump` to get the rows that have
    changed since this call. The score is this machine's time in nanoseconds for TIMESTAMP, else the score that the next
    lookup gives. None = the model has no dynamic tables."""
    found = dynamic_tables(model)
    if not found:
        warnings.warn("the model has no sharded collection with dynamic tables, and no scores", stacklevel=2)
        return None
    return {
        path: {name: score for tables in embeddings for name, score in tables.get_score().items()}
        for path, _, embeddings in found
    }


def set_score(model: torch.nn.Module, table_score: int | Scores) -> None:
    """Set the score that later lookups give the rows of tables of strategy CUSTOMIZED.

    Args:
        table_score: one score for all tables; or {collection's path, or its last name: {table: score}}.

    Raises:
        TypeError, ValueError: it has neither form, a table's strategy is not CUSTOMIZED, or a score is not above 0.
    """
    for _, embeddings, asked in _asked(model, table_score, "table_score"):
        for tables in embeddings:
            tables.set_score({name: score for name, score in asked.items() if name in tables.names})


def incremental_dump(
    model: torch.nn.Module, score_threshold: int | Scores, pg: "distributed.ProcessGroup | None" = None
) -> tuple[dict[str, dict[str, tuple[torch.Tensor, torch.Tensor]]], dict[str, dict[str, int]]] | None:
    """Rows whose score (or time of last use, if their score is a time) is at least a threshold.

    Args:
        score_threshold: one threshold for all tables; or {collection's path, or its last name: {table: threshold}}, for
            these tables only.
        pg: ranks whose rows each rank gets; every rank makes the call. None = only the rows of this rank.

    Returns:
        {collection's path: {table: (ids int64 [N], weights float32 [N, D])}}, on the CPU; and the thresholds for the
        next
        call. None if the model has no dynamic tables.

    Raises:
        TypeError: `score_threshold` has neither form.
    """
    asked_of = _asked(model, score_threshold, "score_threshold")
    if not asked_of:
        return None
    found: dict[str, Any] = {}
    scores: dict[str, Any] = {}
    for path, embeddings, asked in asked_of:
        found[path], scores[path] = {}, {}
        for tables in embeddings:
            named = {name: score for name, score in asked.items() if name in tables.names}
            rows, next_scores = tables.incremental_dump(named, gather=pg is not None)
            found[path] |= rows
            scores[path] |= next_scores
    return found, scores


def _asked(model: torch.nn.Module, given: Any, what: str) -> list[tuple[str, Any, dict[str, int]]]:
    """Collections that are named, each as (path, tables, {table: score}); `what` names the argument `given` in
    messages."""
    for_all = isinstance(given, int) and not isinstance(given, bool)
    if not for_all and not is_valid_score_threshold(given):
        raise TypeError(
            f"{what} must be an int, or ints by collection and table, {{collection: {{table: int}}}}, got {given!r}"
        )
    found = dynamic_tables(model)
    if not found:
        warnings.warn("the model has no sharded collection with dynamic tables: there is nothing to do", stacklevel=3)
    asked_of, used = [], set()
    for path, name, embeddings in found:
        names = [table for tables in embeddings for table in tables.names]
        asked = dict.fromkeys(names, given) if for_all else named_for(given, path, name)
        used |= {path, name}
        if asked is not None:
            if unknown := sorted(set(asked) - set(names)):
                warnings.warn(f"collection {path!r} has no dynamic tables {unknown}, it has {names}", stacklevel=3)
            asked_of.append((path, embeddings, {name: score for name, score in asked.items() if name in names}))
    if not for_all and (strange := sorted(set(given) - used)):
        warnings.warn(
            f"the model has no collections {strange} with dynamic tables, it has {sorted(used)}", stacklevel=3
        )
    return asked_of
