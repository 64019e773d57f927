"""How the ranks of a run start, hear signals, and end."""
