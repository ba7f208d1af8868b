"""Layer 5: reads events only."""
