"""kvloom serves large language models inside NVIDIA Triton Inference Server, with a paged KV cache."""
