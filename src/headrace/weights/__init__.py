"""Layer 2: how new weights reach the samplers."""
