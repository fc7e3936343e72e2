"""Speculation: drafters guess the next tokens of decoding sequences, and the speculator says how many to verify."""
