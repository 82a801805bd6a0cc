"""Histograms for `inspect --histogram`: scores, ages and norms of a snapshot's rows, table by table."""

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np

from oneemb.cli.output import table_lines

if TYPE_CHECKING:
    from oneemb.storage.snapshots.linked_rows import LinkedRows
    from oneemb.storage.table.snapshot_manifest import SnapshotInfo
    from oneemb.storage.table.snapshot_reader import SnapshotReader

_BINS = 10
_BAR = 40
"""Number of letters of the longest bar."""


def histograms(
    parts: Sequence[tuple["SnapshotInfo", "SnapshotReader | LinkedRows"]],
) -> dict[str, dict[str, dict[str, Sequence[float]]]]:
    """{table: {column: {"edges": edges of the bins, "rows": number of rows in each bin}}} for a snapshot. Column "norm"
    is the L2 norm of a row's weights; if a policy has recorded uses, "score" is the row's score and "age" the number of
    steps since its last use. StorageError if a file is damaged, or no embedding has saved the snapshot.

    Args:
        parts: description and reader of each part of the snapshot.
    """
    from oneemb.kernels.score_rows import DECAYED
    from oneemb.rows.values import weights_of
    from oneemb.storage.policies.usage_index import USAGE_WORDS, UsageClock
    from oneemb.storage.snapshots.snapshot_rows import SnapshotRows

    found: dict[int, dict[str, list[np.ndarray]]] = {}
    for info, reader in parts:
        saved, clock = SnapshotRows.of_meta(info.meta, info.name), UsageClock.of_meta(info.meta, info.name)
        rules = enumerate(info.meta.get("score_rules", []))
        decayed = {t for t, rule in rules if isinstance(rule, list) and len(rule) == 2 and rule[0] == DECAYED}
        for table_N, _, row_NW in reader.scan():
            columns = {"norm": np.sqrt(np.square(weights_of(saved.format, row_NW).astype(np.float64)).sum(1))}
            if clock is not None and saved.format.usage_words == USAGE_WORDS:
                words = slice(saved.format.usage_begin, saved.format.state_begin)
                usage_N4 = np.ascontiguousarray(row_NW[:, words]).view(np.uint32)
                columns["age"] = clock.steps + saved.step - usage_N4[:, 2].astype(np.int64)
                columns["score"] = usage_N4.view(np.uint64)[:, 0]
            for t in np.unique(table_N).tolist():
                of_table = found.setdefault(t, {})
                for name, column_N in columns.items():
                    numbers = column_N[table_N == t]
                    if name == "score" and t in decayed:
                        numbers = numbers.copy().view(np.float64)
                    of_table.setdefault(name, []).append(numbers)
    return {
        str(t): {name: _histogram(np.concatenate(parts)) for name, parts in sorted(of_table.items())}
        for t, of_table in sorted(found.items())
    }


def _histogram(numbers: np.ndarray) -> dict[str, Sequence[float]]:
    finite = numbers[np.isfinite(numbers)].astype(np.float64)
    rows, edges = np.empty(0, np.int64), np.empty(0)
    if len(finite):
        low, high = finite.min(), finite.max()
        rows, edges = np.array([len(finite)]), np.array([low, high])
        least = 4 * np.spacing(max(abs(low), abs(high)))  # float64 has too few numbers between them for 10 bins.
        if ((high - low) or 1.0) / _BINS > least:
            rows, edges = np.histogram(finite, _BINS)
    found: dict[str, Sequence[float]] = {"edges": edges.tolist(), "rows": rows.tolist()}
    if len(finite) < len(numbers):
        found["not finite"] = [len(numbers) - len(finite)]
    return found


def histogram_lines(found: dict[str, dict[str, dict[str, Sequence[float]]]]) -> list[str]:
    """The histograms as lines of text."""
    lines = []
    for table, of_table in found.items():
        for name, histogram in of_table.items():
            most = max(histogram["rows"], default=0) or 1
            rows = [
                (f"{low:.6g}", f"{high:.6g}", f"{int(count):,}", "#" * round(_BAR * count / most))
                for low, high, count in zip(
                    histogram["edges"][:-1], histogram["edges"][1:], histogram["rows"], strict=True
                )
            ]
            lines += [f"table {table}, {name}:", *table_lines(("from", "to", "rows", ""), rows, "no rows")]
            lines += [f"  not finite  {int(count):,}" for count in histogram.get("not finite", [])]
    return lines
