"""Read-only embeddings: snapshots of training jobs, served."""
