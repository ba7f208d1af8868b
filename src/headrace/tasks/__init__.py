"""Layer 2: where tasks come from."""
