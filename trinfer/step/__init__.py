"""Prefill and decode step of a whole model as launches, on buffers with fixed addresses."""

from trinfer.step.decoder import Decoder
from trinfer.step.workspace import Workspace

__all__ = ["Decoder", "Workspace"]
