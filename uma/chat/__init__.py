"""Parses a model's text into thinking, tool calls and answer, and builds grammars for it. Pure; text can be cut
anywhere.
"""
