"""The KV cache: blocks, who uses them, and the memory behind them."""
