"""Files of rows that are only read."""
