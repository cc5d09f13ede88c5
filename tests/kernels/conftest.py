"""Outputs of kernels are poisoned: memory from torch.empty holds nan until a kernel writes it."""

from collections.abc import Iterator

import pytest
import torch


@pytest.fixture(autouse=True)
def nan_filled_empty() -> Iterator[None]:
    torch.use_deterministic_algorithms(True, warn_only=True)
    yield
    torch.use_deterministic_algorithms(False)
