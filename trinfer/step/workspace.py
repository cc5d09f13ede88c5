"""The buffers of a decode step."""

from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True)
class Workspace:
    """Every buffer of a step with a fixed address, for a bucket of rows R and sequences of up to S tokens.

    token: [R] int64, the choice of the last step; a caller may overwrite it between steps.
    finished: [R] uint8, rows that have met an end token. kv_range: [R, 2] int32, first and one past the last
    key. sequences: [R, S] int64, prompts and choices; column: [R] int64, where the next one goes.
    eos: [E] int64, end tokens, padded with -1. logits: [R, V]. hidden: [R, K]. partials, tickets, argmax:
    where the programs of a launch meet. tables: cosines and sines [S, R'], a row a position, for each kind of
    layer that the rotary module tells apart.
    """

    token: Tensor
    finished: Tensor
    kv_range: Tensor
    sequences: Tensor
    column: Tensor
    eos: Tensor
    hidden: Tensor
    logits: Tensor
    partials: Tensor | None
    tickets: Tensor | None
    argmax: Tensor
    tables: dict[str, tuple[Tensor, Tensor]]
