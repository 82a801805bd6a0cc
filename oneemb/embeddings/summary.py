"""Embeddings at a glance: rows, bytes, optimizer, policy and path, as text and for notebooks."""

import dataclasses
from collections.abc import Sequence
from typing import Any

import torch

from oneemb.embeddings.stats import EmbeddingStats, memory_of
from oneemb.graph.modules import embeddings_in
from oneemb.graph.shown import ShownText, aligned, escaped
from oneemb.storage.errors import StorageError


def facts_of(embedding: Any) -> dict[str, str]:
    """{name of a fact: text} of an embedding. A closed or broken embedding has only its arguments and the error.

    Args:
        embedding: a `TableEmbedding`. Any: the module of this class imports this one.
    """
    options = embedding.store_options
    facts = {
        "tables": str(embedding.num_tables),
        "dim": str(embedding.embedding_dim),
        "dtype": str(embedding.dtype).removeprefix("torch."),
        "store": type(options).__name__.removesuffix("StoreOptions"),
        "path": ", ".join(options.persistent_path),
    }
    try:
        stats: EmbeddingStats = embedding.stats()
    except StorageError as error:
        return {**facts, "rows": f"none: {error}"}
    facts |= {"rows": f"{stats['rows']:,}", "memory": _in_mib(memory_of(stats))}
    if disk := stats.get("persistent", {}).get("disk_bytes", 0):
        facts["disk"] = _in_mib(disk)
    facts["optimizer"] = _optimizer(embedding, stats)
    if embedding.policies is not None:
        facts["policy"] = "; ".join(dict.fromkeys(map(_brief, embedding.policies)))
    hot = stats.get("device")
    if hot is not None and hot["hits"] + hot["misses"]:
        facts["hit rate"] = f"{stats['hit_rate']:.1%}"
    return facts


def rows_line(embedding: Any) -> str:
    """Text of an embedding's number of rows, and of the weights of one; "closed" if it is closed or broken."""
    try:
        return f"{embedding.num_rows:,} rows of {embedding.embedding_dim}"
    except StorageError:
        return "closed"


def _optimizer(embedding: Any, stats: EmbeddingStats) -> str:
    optimizer = embedding.optimizer
    of_rows = embedding.store.format.optimizer if optimizer is None else type(optimizer).__name__
    return "none yet" if of_rows is None else f"{of_rows}, step {stats['step']:,}"


def _brief(value: Any) -> str:
    """Text of a dataclass, with only the fields that differ from their defaults."""
    if not dataclasses.is_dataclass(value):
        return repr(value)
    fields = [(field.name, getattr(value, field.name), field.default) for field in dataclasses.fields(value)]
    given = ", ".join(f"{name}={_brief(found)}" for name, found, default in fields if found != default)
    return f"{type(value).__name__}({given})"


def _in_mib(size: int) -> str:
    return f"{size / 2**20:,.1f} MiB"


def summary(model: torch.nn.Module) -> str:
    """Text of a table with one line for each embedding of a model (numbers of rows and weights, memory, optimizer), and
    a line with the number of other parameters. The error of a closed or broken embedding is a line below the table.

    Args:
        model: any module, also an embedding.

    Raises:
        TypeError: `model` is no module.

    Example:
        >>> import torch, oneemb
        >>> model = torch.nn.Sequential(
        ...     oneemb.MultiTableEmbedding.from_pretrained(torch.eye(4)), torch.nn.Linear(4, 1))
        >>> print(oneemb.summary(model))  # doctest: +NORMALIZE_WHITESPACE
        embedding  tables  rows  dim  weights   memory  optimizer
        0               1     4    4       16  0.0 MiB   none yet
        5 other parameters, all trainable
    """
    if not isinstance(model, torch.nn.Module):
        raise TypeError(f"model must be a torch.nn.Module, got {type(model).__name__}")
    lines: list[Sequence[str]] = [("embedding", "tables", "rows", "dim", "weights", "memory", "optimizer")]
    stand_for_rows: set[int] = set()
    unknown = []
    for name, embedding in embeddings_in(model).items():
        name, tables, dim = name or embedding.name, str(embedding.num_tables), embedding.embedding_dim
        try:
            stats = embedding.stats()
        except StorageError as error:
            lines.append((name, tables, "-", str(dim), "-", "-", "-"))
            unknown.append(f"{name}: {error}")
        else:
            rows = stats["rows"]
            sizes = f"{rows:,}", str(dim), f"{rows * dim:,}", _in_mib(memory_of(stats))
            lines.append((name, tables, *sizes, _optimizer(embedding, stats)))
        stand_for_rows.update(map(id, embedding.weights))
    dense = [parameter for parameter in model.parameters() if id(parameter) not in stand_for_rows]
    counted = sum(parameter.numel() for parameter in dense)
    trained = sum(parameter.numel() for parameter in dense if parameter.requires_grad)
    which = "all" if trained == counted else f"{trained:,}"
    others = f"{counted:,} other parameters, {which} trainable" if counted else "no other parameters"
    return ShownText("\n".join([aligned(lines), *unknown, others]))


def text_of(facts: dict[str, str]) -> str:
    """Text of a table of facts, one a line."""
    return ShownText(aligned(list(facts.items()), left=2))


def html_of(title: str, facts: dict[str, str]) -> str:
    """HTML of a table of facts, for notebooks."""
    left = 'style="text-align:left"'
    rows = [f"<tr><th {left}>{escaped(name)}</th><td {left}>{escaped(fact)}</td></tr>" for name, fact in facts.items()]
    return f"<table><caption>{escaped(title)}</caption>{''.join(rows)}</table>"
