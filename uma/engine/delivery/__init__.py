"""Tokens on their way from the decode thread to their readers."""
