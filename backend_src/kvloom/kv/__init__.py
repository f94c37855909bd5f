"""The KV cache: block pools, block tables, the prefix cache and the memory of blocks."""
