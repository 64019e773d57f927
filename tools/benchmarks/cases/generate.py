"""Generating text, beside transformers' generate."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from cases.programs import program
from harness import Case, Setup, benchmark, each
from sizes import Size, command_line
from subject import Command, Subject

PROMPT = 16


def make_run(folder: Path, size: Size, dtype: str = "fp32", device: str = "cpu") -> str:
    """A run directory of a model that was trained for one step."""
    run = str(folder / "run")
    if not Path(run).exists():
        words = command_line(size, dtype, device, ["--save", run, "--no-save-optim"], iterations=1)
        Command(program("pretrain_gpt.py", *words)).work()
    return run


def export(folder: Path, run: str) -> str:
    """The same as a directory of transformers."""
    hf = str(folder / "hf")
    if not Path(hf).exists():
        words = ("tools/convert_checkpoint.py", "hf-export", run, hf, "--no-verify")
        Command(program(*words)).work()
    return hf


def prompts(batch: int, vocab: int) -> list[list[int]]:
    """The same random prompts on both sides."""
    return [[(7919 * (row + 1) * (i + 3)) % vocab for i in range(PROMPT)] for row in range(batch)]


class Ours(Subject):
    """Greedy decoding with the cache, of the model that tools/generate.py loads."""

    def __init__(self, model: str, batch: int, new: int, device: str = "cpu", dtype: str = "auto"):
        from megatron.inference.engine import Engine, Request
        from megatron.inference.sampling import Sampling
        from tools.generate import Options

        options = Options(checkpoint=model, device=device, dtype=dtype)  # type: ignore[arg-type]  # a name of torch
        trained = options.open()
        self._engine = Engine(trained.model, batch, PROMPT + new)
        ids = prompts(batch, trained.tokenizer.vocab_size)
        self._requests = [Request(prompt, new, Sampling(temperature=0.0)) for prompt in ids]

    def work(self) -> list[int]:
        """The new tokens of the first prompt."""
        tokens = self._engine.run(self._requests)
        return [token.id for number, _, token in tokens if number == 0 and token]

    def warm_up(self) -> str:
        return str(self.work())


class Transformers(Ours):
    """transformers' generate. compiled: with a static cache, with which it compiles on CUDA."""

    def __init__(
        self, model: str, batch: int, new: int, device: str = "cpu", *, compiled: bool = False
    ):
        import torch
        import transformers

        load = transformers.AutoModelForCausalLM.from_pretrained
        dtype = torch.float32 if device == "cpu" else torch.bfloat16
        self._model = load(model, dtype=dtype).to(device).eval()
        ids = prompts(batch, self._model.config.vocab_size)
        self._ids = torch.tensor(ids, device=device)
        self._options = {
            "attention_mask": torch.ones_like(self._ids),
            "max_new_tokens": new,
            "do_sample": False,
            "pad_token_id": 0,
            "eos_token_id": None,
            "cache_implementation": "static" if compiled else None,
        }

    def work(self) -> list[int]:
        return self._model.generate(self._ids, **self._options)[0, PROMPT:].tolist()


@benchmark
def generate(
    setup: Setup, batch: int = each(1, 8), new: int = 256, model: str = "", hf: str = ""
) -> Iterator[Case]:
    """Greedy decoding with the cache in fp32 on the CPU; peer: transformers' generate, which must
    give the same tokens. model: a run directory, hf: its export (default: a model of SmolLM2-135M's
    width with random weights)."""
    size = Size("run", 12, 576, 9, 512, 1, 49152, "llama", 1536)
    if setup.small:
        new = 8
        size = Size("run", 1, 32, 2, 64, 1, 512, "llama", 48)
    model = model or make_run(setup.folder, size)
    options: dict[str, Any] = {"batch": batch, "new": new}
    sides = setup.ours("cases.generate:Ours", lambda tree: {**options, "model": model})
    if setup.peers is None or "transformers" in setup.peers:
        options["model"] = hf or export(setup.folder, model)
    sides += setup.peer("transformers", "transformers", "cases.generate:Transformers", options)
    yield Case(f"batch {batch}", sides, batch * new, "tokens")
