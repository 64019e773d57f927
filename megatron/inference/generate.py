"""Text from a trained model in three lines of Python:

    from megatron.inference.generate import load_model
    model = load_model("runs/gpt")
    print(model.generate("Once upon a time", max_new_tokens=20))

Imports no torch before a model is loaded.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from megatron.config.run_directory import (
    MANIFEST,
)
from megatron.config.script import NO_SCRIPT, Script
from megatron.inference.sampling import Sampling
from megatron.inference.text import TextStream

if TYPE_CHECKING:
    from megatron.inference.engine import Engine, Request
    from megatron.inference.load_model import TrainedModel


def load_model(
    path: str | Path,
    step: int | None = None,
    tokenizer_files: Mapping[str, str] | None = None,
    device: str = "auto",
    tensor_parallel: int = 1,
    script: Script = NO_SCRIPT,
    dtype: str = "auto",
    drafts: int = 0,
) -> LanguageModel:
    """The model of a run directory or an iter_XXXXXXX in it, with its tokenizer. What is said on
    the way goes to stderr. Arguments and errors are those of `open_trained_model`."""
    if problem := checkpoint_problem(path, step):
        raise ValueError(problem)
    from megatron.inference.load_model import open_trained_model

    with contextlib.redirect_stdout(sys.stderr):
        trained = open_trained_model(
            str(path), step, tokenizer_files, device, tensor_parallel, script, dtype, drafts
        )
    return LanguageModel(trained)


def checkpoint_problem(path: str | Path, step: int | None = None) -> str | None:
    """Why no model can be loaded from there, as far as names of files show it."""
    path = Path(path)
    run = "give the directory that --save named, or an iter_XXXXXXX in it"
    if not path.exists():
        return f"{path}: no such directory; {run} [checkpoint-directory-missing]"
    names = ("latest_checkpointed_iteration.txt", MANIFEST)
    if step is not None or path.name.startswith("iter_") or any((path / n).exists() for n in names):
        return None
    if (path / "config.json").exists():
        return (
            f"{path}: a Hugging Face model, not a checkpoint; import it "
            f"(tools/convert_checkpoint.py hf-import {path} DIRECTORY) and give that DIRECTORY "
            "[checkpoint-of-another-suite]"
        )
    return f"{path}: no checkpoint there ({names[0]} is missing); {run} [checkpoint-missing]"


@dataclass
class Result:
    """What was generated after one prompt, so far: its text, its tokens (with what `logprobs` asks
    for), and once it is complete why it ended: "stop" or "length"."""

    text: str = ""
    tokens: list[dict[str, Any]] = field(default_factory=list)
    finish_reason: str | None = None


@dataclass(frozen=True)
class LanguageModel:
    """A trained model that continues texts. Generating takes its layers over: `trained.model`
    cannot be trained any more."""

    trained: TrainedModel

    def generate(
        self,
        prompt: str | Sequence[str],
        max_new_tokens: int = 100,
        *,
        temperature: float = 1.0,
        top_k: int = 0,
        top_p: float = 1.0,
        repetition_penalty: float = 1.0,
        seed: int = 1234,
        stop: str | Sequence[str] = (),
        batch_size: int = 8,
        num_speculative_tokens: int = 0,
    ) -> str | list[str]:
        """The text after a prompt, or the list of those after several, `batch_size` at a time.

        `temperature` 0 is greedy; `top_k` to `seed` are those of `Sampling`. A text ends at the
        end-of-document token, before a string of `stop` or after `max_new_tokens`. The heads
        of the model draft `num_speculative_tokens`. Raises ValueError for a wrong argument.
        """
        sampling = Sampling(temperature, top_p, seed, top_k, repetition_penalty)
        wrong = sampling.problems()
        for name, value in (("max_new_tokens", max_new_tokens), ("batch_size", batch_size)):
            if value < 1:
                wrong.append(f"{name} {value}: must be at least 1")
        if wrong:
            raise ValueError("; ".join(wrong))
        prompts = [prompt] if isinstance(prompt, str) else prompt
        stops = [stop] if isinstance(stop, str) else stop
        stream = self.stream(
            prompts,
            max_new_tokens,
            sampling,
            stops,
            batch_size,
            num_speculative_tokens=num_speculative_tokens,
        )
        results = {number: result for number, _, result in stream}
        texts = [results[number].text for number in range(len(prompts))]
        return texts[0] if isinstance(prompt, str) else texts

    def stream(
        self,
        prompts: Sequence[str],
        max_new_tokens: int,
        sampling: Sampling,
        stop: Sequence[str] = (),
        batch_size: int = 8,
        logprobs: int | None = None,
        note: Callable[[str], object] = bool,
        num_speculative_tokens: int = 0,
    ) -> Iterator[tuple[int, str, Result]]:
        """As `stream` below, after each of these texts; an empty one starts a document. `note` is
        called with the engine's size, and at the end with the acceptance of drafts. Raises
        ValueError for a text that has no tokens, or more drafts than the model has heads."""
        from megatron.inference.engine import Engine, Request

        tokenizer = self.trained.tokenizer
        ids = [[int(token) for token in tokenizer.tokenize(text)] for text in prompts]
        ends = () if tokenizer.eod is None else (tokenizer.eod,)
        if not ends and not all(ids):
            raise ValueError(
                "PROMPT is empty, and this tokenizer has no token that starts a document "
                "[flag-not-with-tokenizer]"
            )
        requests = [
            Request(prompt or [*ends], max_new_tokens, sampling, ends, logprobs) for prompt in ids
        ]
        longest = max((len(request.prompt) for request in requests), default=1) + max_new_tokens
        rows = max(1, min(batch_size, len(requests)))
        engine = Engine(self.trained.model, rows, longest, num_speculative_tokens)
        note(engine.size)
        return stream(engine, requests, tokenizer.detokenize, stop, note)


def stream(
    engine: Engine,
    requests: Sequence[Request],
    detokenize: Callable[..., str],
    stop: Sequence[str],
    note: Callable[[str], object] = bool,
) -> Iterator[tuple[int, str, Result]]:
    """(number of the request, new piece of text, all of its result so far), as they come; a result
    is complete when it has a finish_reason. `note` is called with the acceptance of drafts."""
    streams = [TextStream(request.prompt, detokenize, stop) for request in requests]
    results = [Result() for _ in requests]
    for number, generation, token in engine.run(requests):
        text, result = streams[number], results[number]
        chunk = text.push(token.id) if token else ""
        if token:
            result.tokens.append(
                {"id": token.id}
                if token.logprob is None
                else {
                    "id": token.id,
                    "logprob": token.logprob,
                    "top_logprobs": {str(k): v for k, v in token.alternatives},
                }
            )
        if text.stopped:
            engine.stop(generation)
        if generation.finish_reason:
            chunk += text.finish()
            result.finish_reason = "stop" if text.stopped else generation.finish_reason
        result.text += chunk
        yield number, chunk, result
    if engine.drafted:
        note(engine.acceptance)
