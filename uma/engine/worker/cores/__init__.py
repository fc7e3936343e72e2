"""Other programs on the compute cores: the kernel's counters, and the watches that act on them."""
