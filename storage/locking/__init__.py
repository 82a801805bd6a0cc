"""Locks, deferred signals, forks and pins."""
