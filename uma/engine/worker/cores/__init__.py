"""Other programs on the cores that compute: what the kernel counts of them, and the watches that act on it."""
