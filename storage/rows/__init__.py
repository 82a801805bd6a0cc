"""Format of rows, and their first values."""
