"""Layer 2: decode engines."""
