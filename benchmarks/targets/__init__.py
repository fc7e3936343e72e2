"""Those who are measured, each behind the same small interface: start, ask, stop."""
