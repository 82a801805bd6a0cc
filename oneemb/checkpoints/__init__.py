"""Checkpoints, and snapshots of ranks."""
