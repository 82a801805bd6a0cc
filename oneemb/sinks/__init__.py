"""Sinks: where `oneemb.publish` brings the rows of a table.

    with oneemb.publish("job/rows", [oneemb.sinks.Redis("redis://localhost?prefix=items")]) as publisher:
        train()

README.md explains versions, positions and faults.
"""

from oneemb.sinks.changes import Changes
from oneemb.sinks.delivery import SinkStats
from oneemb.sinks.faiss_index import faiss_sink as Faiss
from oneemb.sinks.file_sink import FileSink as Files
from oneemb.sinks.index_library import IndexView
from oneemb.sinks.index_sink import IndexSink
from oneemb.sinks.publisher import Publisher
from oneemb.sinks.redis_sink import RedisSink as Redis
from oneemb.sinks.served_sink import ServedFileSink as ServedFile
from oneemb.sinks.sink import FunctionSink as Function, Sink
from oneemb.sinks.table_sink import TableSink as Table
from oneemb.sinks.usearch_index import usearch_sink as Usearch
from oneemb.sinks.version import TableVersion

FaissView = IndexView
"""Former name of `IndexView`."""

__all__ = [
    "Changes",
    "Faiss",
    "FaissView",
    "Files",
    "Function",
    "IndexSink",
    "IndexView",
    "Publisher",
    "Redis",
    "ServedFile",
    "Sink",
    "SinkStats",
    "Table",
    "TableVersion",
    "Usearch",
]
