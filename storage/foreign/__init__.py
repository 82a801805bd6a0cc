"""Formats of other systems."""
