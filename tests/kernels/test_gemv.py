"""gemv against its reference, and the laws of a product."""

from hypothesis import given
from hypothesis import strategies as st

from tests.strategies import assert_close, dtypes, layouts, make, seeds, sizes, truth
from trinfer.kernels import OPS, count_launches, gemv, gemv_ref

OP = next(op for op in OPS if op.name == "gemv")
# few classes of K: its power of two is the block of the kernel
inputs_K = st.sampled_from([1, 7, 13, 34, 63, 64, 71, 100, 576, 1000])


@given(dtypes, sizes(1, 16), sizes(1, 200), inputs_K, layouts, layouts, st.booleans(), seeds)
def test_gemv_matches_ref(dtype, M, N, K, x_layout, w_layout, is_plain, seed):
    x = make((1, M, K), dtype, seed, x_layout)
    w = make((N, K), dtype, seed + 1, w_layout if w_layout != "expanded" else "sliced", scale=K**-0.5)
    options = {} if is_plain else {"bias": make((N,), dtype, seed + 2), "act": "silu"}
    if not is_plain:
        options["residual"] = make((1, M, N), dtype, seed + 3, x_layout)
    with count_launches() as launches:
        y = gemv(x, w, **options)
    assert launches == {"gemv": 1}
    assert_close(y, truth(gemv_ref, x, w, **options), dtype)
