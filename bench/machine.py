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
    """The processor's own name for itself, where the system tells it, and which design it is."""
    facts = _cpu_facts()
    name = facts.get("model name", platform.processor())
    return f"{name}, {_design(facts)}" if _design(facts) else name


def results_path(folder: Path) -> Path:
    """Where the numbers of this machine belong: processors of one feature set differ by their design."""
    device = backend.default_device()
    design = "" if device.type == "cuda" else _design(_cpu_facts())
    return folder / f"{'_'.join([backend.device_slug(device), *design.split()])}.json"


def _design(facts: dict[str, str]) -> str:
    names = {"family": "cpu family", "model": "model"}
    known = all(name in facts for name in names.values())
    return " ".join(f"{short} {facts[name]}" for short, name in names.items()) if known else ""


def _cpu_facts() -> dict[str, str]:
    """What the system tells of the first processor."""
    info = Path("/proc/cpuinfo")
    lines = info.read_text().partition("\n\n")[0].splitlines() if info.exists() else []
    return {name.strip(): value.strip() for name, _, value in (line.partition(":") for line in lines)}
