"""Snapshots that several tables hold together, and the rows that they hold."""
