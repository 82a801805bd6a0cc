"""Embeddings that only read: what a training job has saved, served."""
