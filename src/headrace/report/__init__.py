"""Layer 5: what a run did, read from its events only (during and after it, real or simulated)."""
