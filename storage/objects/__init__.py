"""Snapshots in an object store. README.md has the layout."""
