"""The persistent table: rows on disk as a log of chunks, with snapshots. FORMAT.md says every byte."""
