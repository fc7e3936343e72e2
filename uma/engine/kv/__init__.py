"""KV memory: sequence ids and cells, the radix tree of shared prefixes, and the tiers behind it."""
