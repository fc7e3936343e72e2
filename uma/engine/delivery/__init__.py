"""Delivery of tokens from the decode thread to their readers."""
