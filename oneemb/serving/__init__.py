"""Read-only embeddings that serve snapshots of training jobs, and exported programs."""
