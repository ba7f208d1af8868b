"""Layer 6: the commands."""
