"""kvloom: large language models inside NVIDIA Triton Inference Server, on a paged KV cache."""
