"""The next token of a sequence from its logits, and log-probabilities."""

from collections.abc import Sequence

import torch

from megatron.inference.sampling import Sampling

FIRST_LOOK = 1024  # most likely tokens that nearly always hold top_p; the rest need not be sorted


def choose(
    logits: torch.Tensor,
    sampling: Sampling,
    generator: torch.Generator,
    previous: Sequence[int] = (),
) -> int:
    """The next token by `sampling`, from logits [vocab] on any device; of equal ones, greedy takes
    the first. `previous`: the tokens that the repetition penalty is for."""
    if sampling.repetition_penalty != 1.0 and previous:
        repeated = torch.tensor(sorted(set(previous)), device=logits.device)
        some = logits[repeated]
        penalty = sampling.repetition_penalty
        logits = logits.clone()
        logits[repeated] = torch.where(some > 0, some / penalty, some * penalty)
    if sampling.temperature == 0.0:
        return int(logits.argmax())
    # Of the largest logit 0 is left: no temperature makes the others overflow.
    logits = logits.detach().double().cpu()
    probabilities = torch.softmax((logits - logits.max()) / sampling.temperature, dim=-1)
    ids = None
    if 0 < sampling.top_k < len(probabilities):
        probabilities, ids = probabilities.topk(sampling.top_k)
    if sampling.top_p < 1.0:
        probabilities, order = _most_likely(probabilities, sampling.top_p)
        ids = order if ids is None else ids[order]
    sums = probabilities.cumsum(0)
    draw = torch.rand((), generator=generator, dtype=torch.float64) * sums[-1]
    index = min(int(torch.searchsorted(sums, draw, right=True)), len(sums) - 1)
    return index if ids is None else int(ids[index])


def _most_likely(probabilities: torch.Tensor, top_p: float) -> tuple[torch.Tensor, torch.Tensor]:
    """The smallest set that holds the share `top_p` of them, in descending order, and where they
    are; the most likely token always stays."""
    limit = top_p * float(probabilities.sum())
    ordered, ids = probabilities.topk(min(FIRST_LOOK, len(probabilities)))
    if float(ordered.sum()) < limit:
        ordered, ids = probabilities.sort(descending=True, stable=True)
    within = ordered.cumsum(0) - ordered < limit
    return ordered[within], ids[within]


def log_probabilities(
    logits: torch.Tensor, token: int, alternatives: int
) -> tuple[float, tuple[tuple[int, float], ...]]:
    """The log-probability of `token` before temperature and filters, and the most likely tokens
    with theirs; logits [vocab]."""
    values = torch.log_softmax(logits.double(), dim=-1)
    top = values.topk(min(alternatives, len(values))) if alternatives else None
    best = () if top is None else tuple(zip(top.indices.tolist(), top.values.tolist(), strict=True))
    return float(values[token]), best
