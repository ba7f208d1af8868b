"""Layer 2: losses, corrections, batches, ranks, checkpoints."""
