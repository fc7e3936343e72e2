"""UMA as the engine of other systems. Each bridge translates between one system's protocol and `types.Source`."""
