"""Tiers: rows in the memory of the host or of a GPU."""
