"""Which tokens of which sequence run in a step, and what those keep who do not run. No tensors."""
