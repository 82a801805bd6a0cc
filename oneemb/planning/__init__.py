"""Cost of a job before it runs."""
