"""Computes the cost of a training job before it runs."""
