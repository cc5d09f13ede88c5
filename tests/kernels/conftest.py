"""Outputs of kernels are poisoned: memory from torch.empty holds nan until a kernel writes it."""

from collections.abc import Iterator

import pytest
import torch


@pytest.fixture(autouse=True)
def poisoned_and_serial() -> Iterator[None]:
    torch.use_deterministic_algorithms(True, warn_only=True)
    # small shapes: threads that wait for each other cost more than they compute
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)
    torch.use_deterministic_algorithms(False)
