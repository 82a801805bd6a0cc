"""Rows in and out, as arrays and as files."""
