"""Layer 4: where roles run."""
