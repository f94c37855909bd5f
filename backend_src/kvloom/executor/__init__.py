"""A step's tensors, and how they are computed: on a CPU, on a GPU, recorded and replayed."""
