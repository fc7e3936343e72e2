"""What both ends of a socket need."""
