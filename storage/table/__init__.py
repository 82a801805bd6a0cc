"""The persistent table: rows on disk as a log of chunks, with snapshots. FORMAT.md describes every byte."""
