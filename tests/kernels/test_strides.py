"""Norms, activations and products of views whose rows and entries are not side by side in memory."""

import pytest
import torch

from tests.strategies import make
from trinfer import kernels
from trinfer.kernels import Norm

K = 34
VIEWS = {
    "dimensions swapped": lambda dtype: make((3, 4, K), dtype, 0).transpose(0, 1),
    "every other row": lambda dtype: make((2, 8, K), dtype, 0)[:, ::2],
    "every other entry": lambda dtype: make((2, 4, 2 * K), dtype, 0)[..., ::2],
    "middle part": lambda dtype: make((2, 4, 3 * K), dtype, 0).split(K, -1)[1],
    "expanded": lambda dtype: make((1, 4, K), dtype, 0).expand(3, 4, K),
    "one row of many": lambda dtype: make((1, K), dtype, 0).expand(5, K),
    "no rows": lambda dtype: make((2, 4, K), dtype, 0)[:, 4:],
}
WEIGHT, BIAS = make((9, K), torch.float32, 1), make((2 * K,), torch.float32, 2)[::2]
NORM = Norm(BIAS, BIAS, 1e-5, "layer")
OPS = {
    "rms_norm": lambda x: kernels.rms_norm(x, BIAS, 1e-6),
    "rms_norm of a sum": lambda x: kernels.rms_norm(x, BIAS, 1e-6, residual=x)[0],
    "layer_norm": lambda x: kernels.layer_norm(x, BIAS, BIAS, 1e-6),
    "gemv": lambda x: kernels.gemv(x, WEIGHT, BIAS[:9], residual=x[..., :9]),
    "gemv after a norm": lambda x: kernels.gemv(x, WEIGHT, norm=NORM),
    "matmul": lambda x: kernels.matmul(x, WEIGHT, BIAS[:9], residual=x[..., :9]),
    "matmul after a norm": lambda x: kernels.matmul(x, WEIGHT, norm=NORM),
    "lm_head": lambda x: kernels.lm_head(x, WEIGHT, BIAS[:9], norm=NORM)[0],
    "softmax": kernels.softmax,
    "activation": kernels.relu,
    "gated_activation": lambda x: kernels.silu_mul(x, x),
}


@pytest.mark.parametrize("op", OPS)
def test_u031_views_give_what_their_copies_give(op):
    for name, view in VIEWS.items():
        x = view(torch.float32)
        before = x.clone()
        y = OPS[op](x)
        assert y.shape[:-1] == x.shape[:-1], name
        assert torch.equal(y, OPS[op](x.contiguous())), name
        assert torch.equal(x, before), name


def test_u031_a_bias_with_gaps_is_read_with_its_gaps():
    x = make((3, K), torch.float32, 3)
    for op in (kernels.gemv, kernels.matmul):
        expected = op(x, WEIGHT, BIAS[:9].contiguous(), norm=NORM._replace(weight=BIAS.contiguous()))
        assert torch.equal(op(x, WEIGHT, BIAS[:9], norm=NORM), expected)
    one = torch.ones(1).expand(K)
    assert torch.equal(kernels.rms_norm(x, one, 1e-6), kernels.rms_norm(x, torch.ones(K), 1e-6))
