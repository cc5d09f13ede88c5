"""Triton kernels, one op a file: `_op_kernel`, launcher `op`, PyTorch truth `op_ref`, record `OP`.

Shape letters: B batch, H query heads, G kv heads, M query length, N key length, D head_dim;
for products M rows, N outputs, K inputs, V vocabulary; R rotated entries of a head;
E experts, P pairs (token, expert).
A norm in front of a product needs no launch of its own: `norm=Norm(...)` of gemv, matmul and lm_head.
"""

from trinfer.kernels.activation import OP as ACTIVATION
from trinfer.kernels.activation import activation, activation_ref, gelu, relu
from trinfer.kernels.advance import OP as ADVANCE
from trinfer.kernels.advance import advance, advance_ref
from trinfer.kernels.attention import OP as ATTENTION
from trinfer.kernels.attention import attention, attention_ref
from trinfer.kernels.combine_experts import OP as COMBINE_EXPERTS
from trinfer.kernels.combine_experts import combine_experts, combine_experts_ref
from trinfer.kernels.decode_attention import OP as DECODE_ATTENTION
from trinfer.kernels.decode_attention import decode_attention, decode_attention_ref
from trinfer.kernels.embedding import OP as EMBEDDING
from trinfer.kernels.embedding import Table, embedding, embedding_ref
from trinfer.kernels.gated_activation import OP as GATED_ACTIVATION
from trinfer.kernels.gated_activation import gated_activation, gated_activation_ref, silu_mul
from trinfer.kernels.gemv import OP as GEMV
from trinfer.kernels.gemv import gemv, gemv_ref
from trinfer.kernels.grouped_gemv import OP as GROUPED_GEMV
from trinfer.kernels.grouped_gemv import grouped_gemv, grouped_gemv_ref
from trinfer.kernels.grouped_matmul import OP as GROUPED_MATMUL
from trinfer.kernels.grouped_matmul import grouped_matmul, grouped_matmul_ref
from trinfer.kernels.gumbel import OP as GUMBEL
from trinfer.kernels.gumbel import gumbel, gumbel_ref
from trinfer.kernels.heads import Prologue
from trinfer.kernels.launch import count_launches, list_launches
from trinfer.kernels.layer_norm import OP as LAYER_NORM
from trinfer.kernels.layer_norm import layer_norm, layer_norm_ref
from trinfer.kernels.lm_head import OP as LM_HEAD
from trinfer.kernels.lm_head import lm_head, lm_head_ref
from trinfer.kernels.matmul import OP as MATMUL
from trinfer.kernels.matmul import matmul, matmul_ref
from trinfer.kernels.norm_elements import Norm
from trinfer.kernels.op import Op
from trinfer.kernels.qkv_post import OP as QKV_POST
from trinfer.kernels.qkv_post import qkv_post, qkv_post_ref
from trinfer.kernels.quant_elements import dequantize
from trinfer.kernels.quant_gemv import OP as QUANT_GEMV
from trinfer.kernels.quant_gemv import quant_gemv, quant_gemv_ref
from trinfer.kernels.quant_matmul import OP as QUANT_MATMUL
from trinfer.kernels.quant_matmul import quant_matmul, quant_matmul_ref
from trinfer.kernels.quantize import OP as QUANTIZE
from trinfer.kernels.quantize import quantize, quantize_ref
from trinfer.kernels.rms_norm import OP as RMS_NORM
from trinfer.kernels.rms_norm import rms_norm, rms_norm_ref
from trinfer.kernels.rotary import OP as ROTARY
from trinfer.kernels.rotary import rotary, rotary_ref
from trinfer.kernels.router import OP as ROUTER
from trinfer.kernels.router import router, router_ref
from trinfer.kernels.routing import OP as ROUTING
from trinfer.kernels.routing import routing, routing_ref
from trinfer.kernels.scores import alibi_slopes
from trinfer.kernels.softmax import OP as SOFTMAX
from trinfer.kernels.softmax import softmax, softmax_ref
from trinfer.kernels.sort_by_expert import OP as SORT_BY_EXPERT
from trinfer.kernels.sort_by_expert import sort_by_expert, sort_by_expert_ref
from trinfer.kernels.splits import split_scratch

OPS: tuple[Op, ...] = (
    ACTIVATION,
    ADVANCE,
    ATTENTION,
    COMBINE_EXPERTS,
    DECODE_ATTENTION,
    EMBEDDING,
    GATED_ACTIVATION,
    GEMV,
    GROUPED_GEMV,
    GROUPED_MATMUL,
    GUMBEL,
    LAYER_NORM,
    LM_HEAD,
    MATMUL,
    QKV_POST,
    QUANTIZE,
    QUANT_GEMV,
    QUANT_MATMUL,
    RMS_NORM,
    ROTARY,
    ROUTER,
    ROUTING,
    SOFTMAX,
    SORT_BY_EXPERT,
)

__all__ = [
    "OPS",
    "Norm",
    "Op",
    "Prologue",
    "Table",
    "activation",
    "activation_ref",
    "advance",
    "advance_ref",
    "alibi_slopes",
    "attention",
    "attention_ref",
    "combine_experts",
    "combine_experts_ref",
    "count_launches",
    "decode_attention",
    "decode_attention_ref",
    "dequantize",
    "embedding",
    "embedding_ref",
    "gated_activation",
    "gated_activation_ref",
    "gelu",
    "gemv",
    "gemv_ref",
    "grouped_gemv",
    "grouped_gemv_ref",
    "grouped_matmul",
    "grouped_matmul_ref",
    "gumbel",
    "gumbel_ref",
    "layer_norm",
    "layer_norm_ref",
    "list_launches",
    "lm_head",
    "lm_head_ref",
    "matmul",
    "matmul_ref",
    "qkv_post",
    "qkv_post_ref",
    "quant_gemv",
    "quant_gemv_ref",
    "quant_matmul",
    "quant_matmul_ref",
    "quantize",
    "quantize_ref",
    "relu",
    "rms_norm",
    "rms_norm_ref",
    "rotary",
    "rotary_ref",
    "router",
    "router_ref",
    "routing",
    "routing_ref",
    "silu_mul",
    "softmax",
    "softmax_ref",
    "sort_by_expert",
    "sort_by_expert_ref",
    "split_scratch",
]
