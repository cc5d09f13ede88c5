"""trinfer: fast and right inference of Hugging Face models with Triton kernels and Python."""

__version__ = "0.1.0"
