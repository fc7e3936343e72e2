"""What a model's text means: thinking, tool calls, and the rest. Pure: text in, parts out, cut anywhere."""
