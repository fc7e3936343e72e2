"""UMA as the engine of other systems: each bridge speaks one system's contract, over `types.Source`."""
