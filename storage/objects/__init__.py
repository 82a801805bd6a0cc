"""Snapshots in an object store.  README.md says how they lie there."""
