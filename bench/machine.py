"""What has to be known of a machine to read numbers measured on it."""

import os
import platform
from pathlib import Path
from typing import Any

import torch
import transformers

import trinfer
from trinfer import backend


def machine(device: torch.device) -> dict[str, Any]:
    """Hardware and versions."""
    if device.type == "cuda":
        processor, memory = (
            torch.cuda.get_device_name(device),
            torch.cuda.get_device_properties(device).total_memory,
        )
    else:
        processor, memory = cpu_name(), os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    return {
        "device": processor,
        "memory_gib": round(memory / 2**30, 1),
        "backend": backend.kind(),
        "threads": torch.get_num_threads(),
        "cores": os.cpu_count(),
        "system": platform.platform(),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "triton": backend.triton_version(),
        "transformers": transformers.__version__,
        "trinfer": trinfer.__version__,
    }


def cpu_name() -> str:
    """The processor's own name for itself, where the system tells it."""
    info = Path("/proc/cpuinfo")
    names = (
        [line for line in info.read_text().splitlines() if line.startswith("model name")]
        if info.exists()
        else []
    )
    return names[0].partition(":")[2].strip() if names else platform.processor()
