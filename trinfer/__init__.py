"""trinfer: fast and right inference of Hugging Face models with Triton kernels and Python."""

from trinfer.architectures import ARCHITECTURES, Arch
from trinfer.config import (
    ActivationQuantConfig,
    CheckpointConfig,
    GroupQuantConfig,
    InferenceConfig,
    KVCacheConfig,
    MoEConfig,
    OffloadParamConfig,
    QKVQuantConfig,
    QuantConfig,
    TensorParallelConfig,
    WeightQuantConfig,
    ZeroConfig,
)
from trinfer.engine import InferenceEngine, init_inference, make_plan

__version__ = "0.1.0"

__all__ = [
    "ARCHITECTURES",
    "ActivationQuantConfig",
    "Arch",
    "CheckpointConfig",
    "GroupQuantConfig",
    "InferenceConfig",
    "InferenceEngine",
    "KVCacheConfig",
    "MoEConfig",
    "OffloadParamConfig",
    "QKVQuantConfig",
    "QuantConfig",
    "TensorParallelConfig",
    "WeightQuantConfig",
    "ZeroConfig",
    "init_inference",
    "make_plan",
]
