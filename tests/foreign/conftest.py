"""Scripts that make fixtures import libraries that tests do not need."""

collect_ignore = ["make_tfra.py"]
