"""Layer 2: rollouts, the worker that hosts them, and the recipe's Python."""
