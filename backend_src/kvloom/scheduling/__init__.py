"""Chooses the tokens of each step, admits and preempts sequences, offloads idle KV states. No tensors."""
