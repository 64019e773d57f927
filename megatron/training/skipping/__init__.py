"""Which iterations a run leaves out, and the record of them."""
