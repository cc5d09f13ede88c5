"""A model as remote code writes it: InternLM, laid out and named as Llama is, in classes of its own."""

from typing import Any

import torch
from torch import Tensor, nn
from transformers import GenerationMixin, PreTrainedConfig, PreTrainedModel
from transformers.activations import ACT2FN
from transformers.cache_utils import DynamicCache
from transformers.masking_utils import create_causal_mask
from transformers.modeling_outputs import CausalLMOutputWithPast

from tests.models import DEVICE, VOCABULARY, shake
from trinfer.compat import cache_argument, cache_key


class InternLMConfig(PreTrainedConfig):
    """The sizes of a tiny model."""

    model_type = "internlm"

    def __init__(self, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.vocab_size, self.hidden_size, self.intermediate_size = VOCABULARY, 48, 100
        self.num_hidden_layers, self.num_attention_heads, self.head_dim = 2, 3, 16


class InternLMRMSNorm(nn.Module):
    """RMS norm, rounded before the weight."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))
        self.variance_epsilon = 1e-6

    def forward(self, hidden_states: Tensor) -> Tensor:
        wide = hidden_states.float()
        rows = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + self.variance_epsilon)
        return self.weight * rows.to(hidden_states.dtype)


class InternLMMLP(nn.Module):
    """A gated MLP."""

    def __init__(self, config: InternLMConfig) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(config.hidden_size, config.intermediate_size, bias=False)
        self.up_proj = nn.Linear(config.hidden_size, config.intermediate_size, bias=False)
        self.down_proj = nn.Linear(config.intermediate_size, config.hidden_size, bias=False)
        self.act_fn = ACT2FN["silu"]

    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(self.act_fn(self.gate_proj(x)) * self.up_proj(x))


class InternLMAttention(nn.Module):
    """Attention with biases on all four linears."""

    def __init__(self, config: InternLMConfig, layer_idx: int) -> None:
        super().__init__()
        self.config, self.layer_idx, self.head_dim = config, layer_idx, config.head_dim
        width = config.hidden_size
        self.q_proj, self.k_proj, self.v_proj, self.o_proj = (nn.Linear(width, width) for _ in range(4))

    def forward(
        self,
        hidden_states: Tensor,
        position_embeddings: tuple[Tensor, Tensor],
        attention_mask: Tensor | None = None,
        **kwargs: Any,
    ) -> tuple[Tensor, Tensor | None]:
        q, k, v = (
            linear(hidden_states).unflatten(-1, (-1, self.head_dim)).transpose(1, 2)
            for linear in (self.q_proj, self.k_proj, self.v_proj)
        )
        cos, sin = (x.unsqueeze(1) for x in position_embeddings)
        q, k = (x * cos + rotated(x) * sin for x in (q, k))
        cache = cache_argument(kwargs)
        if cache is not None:
            k, v = cache.update(k, v, self.layer_idx)
        scores = q @ k.transpose(-1, -2) * self.head_dim**-0.5 + attention_mask
        return self.o_proj((scores.softmax(-1) @ v).transpose(1, 2).flatten(2)), None


class OlderAttention(InternLMAttention):
    """As code for older versions has it: the rotary table is made inside."""

    def forward(
        self, hidden_states: Tensor, attention_mask: Tensor | None = None, **kwargs: Any
    ) -> tuple[Tensor, Tensor | None]:
        table = rotary_table(self.config, kwargs.pop("position_ids"), hidden_states)
        kwargs.pop("position_embeddings", None)
        return super().forward(hidden_states, table, attention_mask, **kwargs)


# remote code keeps the name when it changes the class
OlderAttention.__name__ = "InternLMAttention"


class InternLMDecoderLayer(nn.Module):
    """Norms before both halves."""

    def __init__(self, config: InternLMConfig, layer_idx: int, attention: type[InternLMAttention]) -> None:
        super().__init__()
        self.self_attn = attention(config, layer_idx)
        self.mlp = InternLMMLP(config)
        self.input_layernorm = InternLMRMSNorm(config.hidden_size)
        self.post_attention_layernorm = InternLMRMSNorm(config.hidden_size)

    def forward(self, hidden_states: Tensor, **kwargs: Any) -> Tensor:
        hidden_states = hidden_states + self.self_attn(self.input_layernorm(hidden_states), **kwargs)[0]
        return hidden_states + self.mlp(self.post_attention_layernorm(hidden_states))


class InternLMModel(nn.Module):
    """Table, layers, norm."""

    def __init__(self, config: InternLMConfig, attention: type[InternLMAttention]) -> None:
        super().__init__()
        self.embed_tokens = nn.Embedding(config.vocab_size, config.hidden_size)
        self.layers = nn.ModuleList(InternLMDecoderLayer(config, i, attention) for i in range(2))
        self.norm = InternLMRMSNorm(config.hidden_size)


class InternLMForCausalLM(PreTrainedModel, GenerationMixin):
    """With a head, and generation."""

    config_class = InternLMConfig

    def __init__(
        self, config: InternLMConfig, attention: type[InternLMAttention] = InternLMAttention
    ) -> None:
        super().__init__(config)
        self.model = InternLMModel(config, attention)
        self.lm_head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)
        self.post_init()

    def get_input_embeddings(self) -> nn.Module:
        return self.model.embed_tokens

    def forward(
        self,
        input_ids: Tensor,
        attention_mask: Tensor | None = None,
        position_ids: Tensor | None = None,
        cache: Any = None,
        past_key_values: Any = None,
        use_cache: bool = True,
        **kwargs: Any,
    ) -> CausalLMOutputWithPast:
        x, key = self.model.embed_tokens(input_ids), cache_key()
        held = cache if key == "cache" else past_key_values
        if held is None and use_cache:
            held = DynamicCache(config=self.config)
        if position_ids is None:
            first = held.get_seq_length() if held is not None else 0
            position_ids = torch.arange(first, first + x.shape[1], device=x.device)[None]
        given = {"config": self.config, "inputs_embeds": x, "attention_mask": attention_mask, key: held}
        mask = create_causal_mask(**given, position_ids=position_ids)
        table = rotary_table(self.config, position_ids, x)
        options = {"position_embeddings": table, "attention_mask": mask, "position_ids": position_ids}
        for layer in self.model.layers:
            x = layer(x, **options, **{key: held})
        return CausalLMOutputWithPast(logits=self.lm_head(self.model.norm(x)), **{key: held})


def rotated(x: Tensor) -> Tensor:
    first, second = x.chunk(2, -1)
    return torch.cat((-second, first), -1)


def rotary_table(config: InternLMConfig, positions: Tensor, x: Tensor) -> tuple[Tensor, Tensor]:
    half = config.head_dim // 2
    frequencies = 10000.0 ** -(torch.arange(half, device=x.device) / half)
    angles = (positions[..., None] * frequencies).repeat(1, 1, 2)
    return angles.cos().to(x.dtype), angles.sin().to(x.dtype)


def internlm(attention: type[InternLMAttention] = InternLMAttention) -> InternLMForCausalLM:
    """A tiny model in eval mode."""
    torch.manual_seed(0)
    config = InternLMConfig(pad_token_id=0)
    config._attn_implementation = "eager"
    model = InternLMForCausalLM(config, attention).eval()
    shake(model)
    return model.to(DEVICE)
