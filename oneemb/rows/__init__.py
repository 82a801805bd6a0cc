"""Import and export of rows, as arrays and as files."""
