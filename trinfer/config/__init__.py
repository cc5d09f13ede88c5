"""What a caller may ask for: fields, aliases, defaults, and every rule between fields."""

from trinfer.config.fields import (
    DEPRECATED,
    DTYPES,
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
from trinfer.config.rules import UNBUILT, check_combinations, refuse_unbuilt

__all__ = [
    "DEPRECATED",
    "DTYPES",
    "UNBUILT",
    "ActivationQuantConfig",
    "CheckpointConfig",
    "GroupQuantConfig",
    "InferenceConfig",
    "KVCacheConfig",
    "MoEConfig",
    "OffloadParamConfig",
    "QKVQuantConfig",
    "QuantConfig",
    "TensorParallelConfig",
    "WeightQuantConfig",
    "ZeroConfig",
    "check_combinations",
    "refuse_unbuilt",
]
