"""One row per architecture: what its parts are called and which variant of the mathematics they use."""

from trinfer.architectures import encoders, gpt, llama, moe, seq2seq
from trinfer.architectures.arch import Arch, Variant

ARCHITECTURES: dict[str, Arch] = {
    row.model_type: row for row in (*llama.ROWS, *gpt.ROWS, *moe.ROWS, *encoders.ROWS, *seq2seq.ROWS)
}

__all__ = ["ARCHITECTURES", "Arch", "Variant"]
