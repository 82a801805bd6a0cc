"""Training graphs, and the step of optimizers."""
