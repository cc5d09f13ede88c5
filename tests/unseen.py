"""A causal model whose architecture nobody listed: odd names, and every part written in a way of its own."""

import math
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedConfig, PreTrainedModel
from transformers.masking_utils import create_causal_mask
from transformers.modeling_outputs import CausalLMOutput
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from tests.models import DEVICE, VOCABULARY, shake


class OddConfig(PreTrainedConfig):
    """Names that no other configuration uses."""

    model_type = "odd"

    def __init__(self, breadth: int = 48, depth: int = 2, eyes: int = 4, **kwargs: Any) -> None:
        self.breadth, self.depth, self.eyes = breadth, depth, eyes
        self.vocab_size, self.num_hidden_layers = VOCABULARY, depth
        super().__init__(**kwargs)


class Quiet(nn.Module):
    """RMS norm with a weight that is added to one, through the root of a mean."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.gain = nn.Parameter(torch.zeros(width))
        self.tiny = 3e-5

    def forward(self, signal: Tensor) -> Tensor:
        wide = signal.float()
        calm = wide / (wide.square().mean(-1, keepdim=True) + self.tiny).sqrt()
        return (calm * (1.0 + self.gain.float())).to(signal.dtype)


class Level(nn.Module):
    """RMS norm by the length of the row, rounded before the weight."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(width))

    def forward(self, signal: Tensor) -> Tensor:
        length = torch.linalg.vector_norm(signal.float(), dim=-1, keepdim=True)
        factor = torch.rsqrt(length**2 / signal.shape[-1] + 1e-6)
        return self.scale * (signal.float() * factor).to(signal.dtype)


class Flat(nn.Module):
    """RMS norm as one call of torch."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.ones(width))

    def forward(self, signal: Tensor) -> Tensor:
        return nn.functional.rms_norm(signal, (signal.shape[-1],), self.w, 1e-5)


class Gaze(nn.Module):
    """Attention through transformers' interface, with one linear for queries, keys and values."""

    is_causal = True

    def __init__(self, config: OddConfig) -> None:
        super().__init__()
        self.config = config
        self.eyes = config.eyes
        self.look = nn.Linear(config.breadth, 3 * config.breadth)
        self.blink = nn.Linear(config.breadth, config.breadth, bias=False)

    def forward(self, signal: Tensor, veil: Tensor | None) -> Tensor:
        rows, tokens, width = signal.shape
        parts = self.look(signal).view(rows, tokens, 3, self.eyes, -1).permute(2, 0, 3, 1, 4)
        attend = ALL_ATTENTION_FUNCTIONS.get_interface(self.config._attn_implementation, eager)
        seen, _ = attend(self, *parts, veil, scaling=1.0 / math.sqrt(width // self.eyes), dropout=0.0)
        return self.blink(seen.reshape(rows, tokens, width))


def eager(
    module: nn.Module, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, scaling: float,
    **kwargs: Any,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Attention in torch."""
    scores = query @ key.transpose(-1, -2) * scaling
    weights = (scores if mask is None else scores + mask).softmax(-1)
    return (weights @ value).transpose(1, 2).contiguous(), weights


class Strange(nn.Module):
    """An activation that no kernel knows."""

    def forward(self, x: Tensor) -> Tensor:
        return nn.functional.softplus(x) * torch.cos(x)


class Fold(nn.Module):
    """A gated MLP with a strange activation."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.left, self.right = nn.Linear(width, 70), nn.Linear(width, 70)
        self.bend = Strange()
        self.close = nn.Linear(70, width)

    def forward(self, signal: Tensor) -> Tensor:
        return self.close(self.right(signal) * self.bend(self.left(signal)))


class Pleat(nn.Module):
    """A gated MLP with one linear for both, the gate in its second half, and quick GELU written out."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.both = nn.Linear(width, 2 * 54)
        self.close = nn.Linear(54, width, bias=False)

    def forward(self, signal: Tensor) -> Tensor:
        value, gate = self.both(signal).split(54, dim=-1)
        return self.close(value * (gate * torch.sigmoid(1.702 * gate)))


class Stage(nn.Module):
    """A layer: attention, a gated MLP, and a plain MLP that lives in the layer itself."""

    def __init__(self, config: OddConfig, mlp: nn.Module) -> None:
        super().__init__()
        width = config.breadth
        self.before, self.between, self.behind = Quiet(width), Level(width), Flat(width)
        self.gaze, self.mlp = Gaze(config), mlp
        self.widen, self.curve, self.narrow = nn.Linear(width, 90), nn.GELU(), nn.Linear(90, width)

    def forward(self, signal: Tensor, veil: Tensor | None) -> Tensor:
        signal = signal + self.gaze(self.before(signal), veil)
        signal = signal + self.mlp(self.between(signal))
        return signal + self.narrow(self.curve(self.widen(self.behind(signal))))


class Odd(PreTrainedModel):
    """The whole model."""

    config_class = OddConfig
    _supports_sdpa = True

    def __init__(self, config: OddConfig) -> None:
        super().__init__(config)
        self.letters = nn.Embedding(VOCABULARY, config.breadth)
        mlps = (Fold, Pleat)
        self.stages = nn.ModuleList(Stage(config, mlps[i % 2](config.breadth)) for i in range(config.depth))
        self.last = Quiet(config.breadth)
        self.voice = nn.Linear(config.breadth, VOCABULARY, bias=False)
        self.post_init()

    def forward(
        self, input_ids: Tensor, attention_mask: Tensor | None = None, **kwargs: Any
    ) -> CausalLMOutput:
        signal = self.letters(input_ids)
        veil = create_causal_mask(self.config, signal, attention_mask, None)
        for stage in self.stages:
            signal = stage(signal, veil)
        return CausalLMOutput(logits=self.voice(self.last(signal)))


def odd_model() -> Odd:
    """The model with random weights that are large enough to show a wrong part."""
    torch.manual_seed(0)
    model = Odd(OddConfig(attn_implementation="eager")).eval()
    shake(model)
    return model.to(DEVICE)
