"""Memory that an engine takes beside the model: no second copy of a weight, at no time."""

import gc
import subprocess
import sys
import textwrap
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from tests.models import engine_of, make, token_ids
from trinfer import backend

ROOT = Path(__file__).parent.parent
# about 150 MB in float32
LARGE = {
    "hidden_size": 576,
    "intermediate_size": 1536,
    "num_hidden_layers": 10,
    "num_attention_heads": 9,
    "num_key_value_heads": 3,
    "vocab_size": 8192,
}


def alive(least: int) -> dict[int, int]:
    """Bytes by address of every storage of at least `least` bytes that Python can still reach."""
    found = {}
    for thing in gc.get_objects():
        # by its type: a weak reference to something gone raises when it is asked for its class
        if issubclass(type(thing), torch.Tensor) and thing.device.type != "meta":
            storage = thing.untyped_storage()
            if storage.nbytes() >= least:
                found[storage.data_ptr()] = storage.nbytes()
    return found


def weights(model: nn.Module) -> int:
    return sum(p.numel() * p.element_size() for p in model.parameters())


def tensors(value: Any) -> list[torch.Tensor]:
    """Those in nested tuples and dicts."""
    if isinstance(value, torch.Tensor):
        return [value]
    parts = value.values() if isinstance(value, dict) else value if isinstance(value, tuple) else ()
    return [tensor for part in parts for tensor in tensors(part)]


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_u143_weights_exist_once(dtype: torch.dtype) -> None:
    gc.collect()
    before = alive(1)
    engine = engine_of(make("llama_tied", num_hidden_layers=4, hidden_size=144), dtype)
    gc.collect()
    new = {address: size for address, size in alive(1).items() if address not in before}
    assert weights(engine.module) <= sum(new.values()) <= 1.05 * weights(engine.module)
    engine.generate(token_ids(1, 5), max_new_tokens=3, do_sample=False)
    gc.collect()
    decoder = engine.module._trinfer_decoder
    buffers = tensors(tuple(vars(decoder.workspace).values()))
    own = decoder.store.nbytes + sum(part.numel() * part.element_size() for part in buffers)
    later = sum(size for address, size in alive(1).items() if address not in before | new)
    # a call adds its cache and buffers, but no weight in another layout
    assert own <= later <= own + 0.05 * weights(engine.module)


@pytest.mark.skipif(backend.kind() != "cpu", reason="reads the memory of a process")
@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
def test_u142_an_engine_takes_no_second_model(dtype: str) -> None:
    """The peak of resident memory, from before the model exists until after a call, in sizes of the model."""
    program = textwrap.dedent(
        f"""
        import re, torch, transformers, trinfer
        from transformers import AutoConfig, AutoModelForCausalLM

        def resident(field):
            with open("/proc/self/status") as status:
                return int(re.search(field + r":\\s+(\\d+) kB", status.read())[1]) * 1024

        def run(**sizes):
            config = AutoConfig.for_model("llama", **({LARGE!r} | sizes))
            model = AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
            size = sum(p.numel() * p.element_size() for p in model.parameters())
            engine = trinfer.init_inference(model, dtype="{dtype}", replace_with_kernel_inject=True,
                                            enable_cuda_graph=True, max_out_tokens=64)
            engine.generate(torch.full((1, 20), 7), max_new_tokens=4, do_sample=False)
            return size

        run(num_hidden_layers=1)
        before = resident("VmRSS")
        with open("/proc/self/clear_refs", "w") as refs:
            refs.write("5")
        size = run()
        print((resident("VmHWM") - before) / size)
        """
    )
    done = subprocess.run(
        [sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, check=False, timeout=300
    )
    assert done.returncode == 0, done.stderr
    assert float(done.stdout.split()[-1]) <= 1.15
