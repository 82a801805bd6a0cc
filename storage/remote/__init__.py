"""Rows that are kept beyond this process: parameter servers."""
