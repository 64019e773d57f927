"""How the next token is chosen, and what is wrong with such settings. Imports no torch: tools check
them before it loads."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Sampling:
    """How the next token is chosen.

    `temperature` 0 takes the most likely token. `top_k` (0: all) keeps the k most likely tokens,
    then `top_p` the most likely that hold that share of the probability (Holtzman et al. 2020).
    `repetition_penalty` divides positive logits of tokens that have occurred, in the prompt too,
    and multiplies negative ones (Keskar et al. 2019). `seed` makes the draws repeatable.
    """

    temperature: float = 1.0
    top_p: float = 1.0
    seed: int = 1234
    top_k: int = 0
    repetition_penalty: float = 1.0

    @property
    def takes_largest(self) -> bool:
        """Whether the next token is that of the largest logit."""
        return self.temperature == 0.0 and self.repetition_penalty == 1.0

    def problems(self) -> list[str]:
        """Everything that is wrong with these settings, one line each."""
        problems = []
        if not 0.0 <= self.temperature < float("inf"):
            problems.append(
                f"--temperature {self.temperature}: must be a number from 0 (greedy) on "
                "[value-out-of-range]"
            )
        if self.top_k < 0:
            problems.append(
                f"--top-k {self.top_k}: must be 0 (every token) or more [value-out-of-range]"
            )
        if not 0.0 < self.top_p <= 1.0:
            problems.append(
                f"--top-p {self.top_p}: must be above 0 and at most 1 (1 keeps every token) "
                "[value-out-of-range]"
            )
        if not 0.0 < self.repetition_penalty < float("inf"):
            problems.append(
                f"--repetition-penalty {self.repetition_penalty}: must be above 0 (1: no penalty) "
                "[value-out-of-range]"
            )
        if not 0 <= self.seed < 2**63:
            problems.append(
                f"--seed {self.seed}: must be 0 or more, and below 2^63 [value-out-of-range]"
            )
        return problems
