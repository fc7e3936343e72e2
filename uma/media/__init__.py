"""Pictures as strangers send them: told apart, bounded, and decoded in a child process."""
