"""Batches for training from files and live queues, with a position that a checkpoint holds.

    source = oneemb.data.Files("clicks/*.parquet")
    columns = {"ids": oneemb.data.Ids("user", "item"), "label": "click"}
    loader = oneemb.data.Loader(source, batch_size=4096, columns=columns, shuffle=100_000)
    for loss in graph.run(loader): ...

README.md explains windows, positions and ranks.
"""

from oneemb.data.columns import Ids, Lists, Numbers
from oneemb.data.files import Files
from oneemb.data.growing_file import GrowingFile
from oneemb.data.growing_folder import GrowingFolder
from oneemb.data.kafka_topic import KafkaTopic
from oneemb.data.loader import Loader
from oneemb.data.redis_stream import RedisStream
from oneemb.data.source import BadRowError, ChangedSourceError, DataSource, Piece

__all__ = [
    "BadRowError",
    "ChangedSourceError",
    "DataSource",
    "Files",
    "GrowingFile",
    "GrowingFolder",
    "Ids",
    "KafkaTopic",
    "Lists",
    "Loader",
    "Numbers",
    "Piece",
    "RedisStream",
]
