"""Save, load and resume a run's checkpoints."""
