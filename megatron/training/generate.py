"""New tokens from a trained model, one at a time. Knows a model and token ids; no text, no file, no optimizer."""
from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch

from megatron.model.gpt import GPTModel


@dataclass(frozen=True)
class Sampling:
    """How the next token is chosen: `temperature` 0 takes the likeliest, `top_p` keeps the likeliest that hold that
    share of the probability (Holtzman et al. 2020), `seed` makes the draws repeatable."""
    temperature: float = 1.0
    top_p: float = 1.0
    seed: int = 1234

    def problems(self) -> list[str]:
        """Everything that is wrong with these settings, one line each."""
        found = []
        if not 0.0 <= self.temperature < float("inf"):
            found.append(f"--temperature {self.temperature}: must be a number from 0 (greedy) on")
        if not 0.0 < self.top_p <= 1.0:
            found.append(f"--top-p {self.top_p}: must be above 0 and at most 1 (1 keeps every token)")
        if not 0 <= self.seed < 2**63:
            found.append(f"--seed {self.seed}: must be 0 or more, and below 2^63")
        return found


def choose(logits: torch.Tensor, sampling: Sampling, generator: torch.Generator) -> int:
    """The next token by `sampling`, from logits [vocab] on any device; of equal ones, greedy takes the first."""
    if sampling.temperature == 0.0:
        return int(logits.argmax())
    probabilities = torch.softmax(logits.detach().double().cpu() / sampling.temperature, dim=-1)
    ordered, ids = probabilities.sort(descending=True, stable=True)
    kept = ordered.cumsum(0) - ordered < sampling.top_p  # the likeliest token always stays
    return int(ids[torch.multinomial(ordered * kept, 1, generator=generator)])


@torch.inference_mode()
def generate(model: GPTModel, prompt: Sequence[int], max_new_tokens: int, sampling: Sampling,
             stop_at: int | None = None) -> Iterator[int]:
    """Yield up to `max_new_tokens` tokens that continue `prompt` (one token at least); `stop_at` ends it, unyielded.

    The model sees the last `model.max_positions` tokens. Each step reads them all again: right for a look at a
    checkpoint, too slow for serving.
    """
    assert prompt, "give the end-of-document token where there is no prompt"
    device = next(model.parameters()).device
    generator = torch.Generator().manual_seed(sampling.seed)
    tokens = list(prompt)
    for _ in range(max_new_tokens):
        window = torch.tensor([tokens[-model.max_positions:]], device=device)
        token = choose(model(window)[0, -1], sampling, generator)
        if token == stop_at:
            return
        tokens.append(token)
        yield token
