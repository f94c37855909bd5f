"""The ops. Each has a signature and a form in torch here; the C++ and Triton forms are in cpu/ and gpu/."""
