"""Pictures and sounds from untrusted clients: recognised, bounded, and decoded in a child process."""
