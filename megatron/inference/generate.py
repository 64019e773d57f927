"""New tokens from a trained model, one at a time."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch

from megatron.inference.sampling import Sampling
from megatron.model.gpt import GPTModel


def choose(logits: torch.Tensor, sampling: Sampling, generator: torch.Generator) -> int:
    """The next token by `sampling`, from logits [vocab] on any device; of equal ones, greedy takes
    the first."""
    if sampling.temperature == 0.0:
        return int(logits.argmax())
    probabilities = torch.softmax(logits.detach().double().cpu() / sampling.temperature, dim=-1)
    ordered, ids = probabilities.sort(descending=True, stable=True)
    kept = ordered.cumsum(0) - ordered < sampling.top_p  # the likeliest token always stays
    return int(ids[torch.multinomial(ordered * kept, 1, generator=generator)])


@torch.inference_mode()
def generate(
    model: GPTModel,
    prompt: Sequence[int],
    max_new_tokens: int,
    sampling: Sampling,
    stop_at: int | None = None,
) -> Iterator[int]:
    """Yield up to `max_new_tokens` tokens that continue `prompt` (one token at least); `stop_at`
    ends it, unyielded.

    The model sees the last `model.max_positions` tokens. Each step reads them all again: right for
    a look at a checkpoint, too slow for serving.
    """
    assert prompt, "give the end-of-document token where there is no prompt"
    device = next(model.parameters()).device
    generator = torch.Generator().manual_seed(sampling.seed)
    tokens = list(prompt)
    for _ in range(max_new_tokens):
        window = torch.tensor([tokens[-model.max_positions :]], device=device)
        token = choose(model(window)[0, -1], sampling, generator)
        if token == stop_at:
            return
        tokens.append(token)
        yield token
