"""Embedding modules."""
