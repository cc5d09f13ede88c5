"""Tests of the CPU backend run where it is what runs kernels: no GPU, a C compiler, Triton installed."""

import importlib.util

import pytest

from trinfer import backend

collect_ignore_glob = ["test_*.py"] if importlib.util.find_spec("triton") is None else []


@pytest.fixture(autouse=True)
def compiled() -> None:
    if backend.kind() != "cpu":
        pytest.skip(f"kernels run as {backend.kind()} here, not through the CPU backend")
