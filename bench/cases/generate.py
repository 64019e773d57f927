"""Generating text, beside transformers' generate."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from cases.programs import program
from harness import Case, Setup, Side, benchmark, each
from sizes import Size, command_line
from subject import Command, Subject

PROMPT = 16


def make_run(
    folder: Path,
    size: Size,
    dtype: str = "fp32",
    device: str = "cpu",
    more: Sequence[str] = (),
    iterations: int = 1,
) -> str:
    """A run directory of a model that was trained for so many steps, with `more` flags."""
    run = str(folder / size.name)
    if not Path(run).exists():
        extra = [*more, "--save", run, "--no-save-optim"]
        words = command_line(size, dtype, device, extra, iterations)
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

    def __init__(
        self,
        model: str,
        batch: int,
        new: int,
        device: str = "cpu",
        dtype: str = "auto",
        drafts: int = 0,
    ):
        from megatron.inference.engine import Engine, Request
        from megatron.inference.sampling import Sampling
        from tools.generate import Options

        options = Options(checkpoint=model, device=device, dtype=dtype)  # type: ignore[arg-type]  # a name of torch
        trained = options.open()
        more = {"drafts": drafts} if drafts else {}  # which another checkout may not know
        self._engine = Engine(trained.model, batch, PROMPT + new, **more)
        ids = prompts(batch, trained.tokenizer.vocab_size)
        self._requests = [Request(prompt, new, Sampling(temperature=0.0)) for prompt in ids]

    def work(self) -> list[int]:
        """The new tokens of the first prompt."""
        tokens = self._engine.run(self._requests)
        return [token.id for number, _, token in tokens if number == 0 and token]

    def warm_up(self) -> str:
        return str(self.work())


class Drafting(Ours):
    """The same with drafts of the heads, and their acceptance."""

    def facts(self) -> dict[str, Any]:
        counts = zip(self._engine.accepted, self._engine.drafted, strict=True)
        return super().facts() | {"accepted": " ".join(f"{yes / of:.3f}" for yes, of in counts)}


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


class Decode(Subject):
    """A token of one sequence whose first `s` are in the cache. absorbed: as this suite decodes;
    else with the keys and values of all latents, made anew."""

    def __init__(self, model: str, s: int, *, absorbed: bool):
        from megatron.inference.cached_model import CachedModel
        from tools.generate import Options

        trained = Options(checkpoint=model).open()
        if not absorbed:
            for layer in trained.model.decoder.layers.values():
                layer.self_attention.absorbs = lambda count: False
        self._cached = CachedModel(trained.model, 1, s + 1)
        self._s = s
        vocab = trained.tokenizer.vocab_size
        self._cached.forward([[(7919 * (i + 3)) % vocab for i in range(s)]], [0])

    def work(self) -> list[float]:
        """Some of the logits."""
        return self._cached.forward([[1]], [self._s])[0, :8].tolist()

    def warm_up(self) -> list[float]:
        return self.work()

    def turn(self) -> float:
        """Seconds, the median of some."""
        from torch.utils import benchmark as timing

        calls = timing.Timer("work()", globals={"work": self.work})
        return calls.blocked_autorange(min_run_time=0.5).median


@benchmark
def absorbed(setup: Setup, s: int = 1024) -> Iterator[Case]:
    """A token more of a sequence of `s`, by latent attention whose weights are multiplied with
    queries and results (absorbed), beside keys and values made of all latents; logits are
    compared."""
    size = Size("run", 6, 512, 8, 2 * s, 1, 4096, "deepseek", 1376)
    if setup.small:
        s = 16
        size = Size("run", 1, 32, 2, 64, 1, 512, "deepseek", 48)
    model = make_run(setup.folder, size)
    decode = "cases.generate:Decode"
    sides = setup.ours(decode, lambda tree: {"model": model, "s": s, "absorbed": True}, "absorbed")
    made_anew = {"model": model, "s": s, "absorbed": False}
    sides.append(Side("keys and values", decode, made_anew, waiting=True))
    yield Case(f"a token after {s}", sides, 1, "tokens", 1e-4)


@benchmark
def speculative(
    setup: Setup,
    batch: int = each(1, 8),
    drafts: int = 1,
    new: int = 256,
    steps: int = 150,
    model: str = "",
    threads: int = 0,
) -> Iterator[Case]:
    """Greedy decoding with drafts of the heads, beside a token at a time, which must give the same
    tokens. model: a run directory (default: one that `steps` steps have taught to count).
    threads: of each side (0: one for each core)."""
    size = Size(f"counts{drafts}", 8, 256, 4, PROMPT + new, 1, 128, "llama", 688)
    if setup.small:
        new, steps = 8, 5
        size = Size(f"counts{drafts}", 1, 32, 2, 64, 1, 512, "llama", 48)
    learning = ["--mtp-num-layers", str(drafts), "--lr", "2e-3"]
    model = model or make_run(setup.folder, size, more=learning, iterations=steps)
    options: dict[str, Any] = {"batch": batch, "new": new, "model": model}
    subject = "cases.generate:Drafting"
    drafting = options | {"drafts": drafts}
    sides = setup.ours(subject, lambda tree: drafting, "drafting", threads=threads)
    plain = Side("a token at a time", "cases.generate:Ours", options, waiting=True, threads=threads)
    sides.append(plain)
    yield Case(f"batch {batch}, drafts {drafts}", sides, batch * new, "tokens")
