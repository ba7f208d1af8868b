"""Measures, predicts, chooses: profiles of what a run's parts take, closed forms over them, and what follows for a plan."""
