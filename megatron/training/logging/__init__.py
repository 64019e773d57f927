"""What a run prints and stores of its iterations."""
