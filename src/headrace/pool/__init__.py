"""Layer 2: the experience pool between samplers and learner."""
