"""Generating and serving text, beside transformers' generate and one client."""

from __future__ import annotations

import http.client
import json
import re
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from cases.subject import Command, Subject
from harness import Case, Setup, Side, benchmark, each
from processes import ROOT
from sizes import Size, command_line

PROMPT = 16
PROMPTS = [f"{number} {number % 7} {number // 2}" for number in range(16)]


def make_run(folder: Path, small: bool) -> str:
    """A run directory of a Llama of SmolLM2-135M's width that was trained for one step."""
    run = folder / "run"
    if not run.exists():
        size = Size("run", 12, 576, 9, 512, 1, 49152, "llama", 1536)
        if small:
            size = Size("run", 1, 32, 2, 64, 1, 512, "llama", 48)
        words = command_line(size, "fp32", "cpu", ["--save", str(run), "--save-interval", "1"])
        words[words.index("--train-iters") + 1] = "1"
        Command([sys.executable, str(ROOT / "pretrain_gpt.py"), *words]).turn()
    return str(run)


def export(folder: Path, run: str) -> str:
    """The same as a directory of transformers."""
    if not (folder / "hf").exists():
        tool = [sys.executable, str(ROOT / "tools" / "convert_checkpoint.py")]
        Command([*tool, "hf-export", run, str(folder / "hf"), "--no-verify"]).turn()
    return str(folder / "hf")


def prompts(batch: int, vocab: int) -> list[list[int]]:
    """The same random prompts on both sides."""
    return [[(7919 * (row + 1) * (i + 3)) % vocab for i in range(PROMPT)] for row in range(batch)]


class Ours(Subject):
    """Greedy decoding with the cache."""

    def __init__(self, model: str, batch: int, new: int):
        from megatron.inference.engine import Engine, Request
        from megatron.inference.load_model import open_trained_model
        from megatron.inference.sampling import Sampling

        trained = open_trained_model(model, device="cpu")
        self._engine = Engine(trained.model, batch, PROMPT + new)
        ids = prompts(batch, trained.tokenizer.vocab_size)
        self._requests = [Request(one, new, Sampling(temperature=0.0)) for one in ids]

    def _first(self) -> list[int]:
        tokens = self._engine.run(self._requests)
        return [token.id for number, _, token in tokens if number == 0 and token]

    def warm_up(self) -> str:
        """The new tokens of the first prompt."""
        return str(self._first())

    def turn(self) -> float:
        """Seconds of all prompts."""
        start = time.perf_counter()
        self._first()
        return time.perf_counter() - start


class Transformers(Ours):
    """transformers' generate."""

    def __init__(self, model: str, batch: int, new: int):
        import torch
        import transformers

        load = transformers.AutoModelForCausalLM.from_pretrained
        self._model = load(model, dtype=torch.float32).eval()
        self._ids = torch.tensor(prompts(batch, self._model.config.vocab_size))
        self._options = {
            "attention_mask": torch.ones_like(self._ids),
            "max_new_tokens": new,
            "do_sample": False,
            "pad_token_id": 0,
            "eos_token_id": None,
        }

    def _first(self) -> list[int]:
        return self._model.generate(self._ids, **self._options)[0, PROMPT:].tolist()


@benchmark
def generate(
    setup: Setup, batch: int = each(1, 8), new: int = 256, model: str = "", hf: str = ""
) -> Iterator[Case]:
    """Greedy decoding with the cache in fp32 on the CPU; peer: transformers' generate, which must
    give the same tokens. model: a run directory, hf: its export (default: a model of SmolLM2-135M's
    width with random weights)."""
    new = 8 if setup.small else new
    model = model or make_run(setup.folder, setup.small)
    given = {"batch": batch, "new": new}
    sides = setup.ours("ours", "cases.serving:Ours", {**given, "model": model})
    if setup.peers is None or "transformers" in setup.peers:
        other = {**given, "model": hf or export(setup.folder, model)}
        sides += setup.peer("transformers", "transformers", "cases.serving:Transformers", other)
    yield Case(f"batch {batch}", sides, batch * new, "tokens")


class Server(Subject):
    """tools/serve.py on a free port, and so many clients that ask it at once."""

    def __init__(self, tool: str, model: str, clients: int, requests: int, tokens: int):
        words = ["--port", "0", "--batch-size", "64", "--queue-size", "64"]
        self._process = subprocess.Popen(
            [sys.executable, tool, model, *words],
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            text=True,
        )
        said = ""
        for line in self._process.stderr or ():
            said += line
            if found := re.search(r"at http://([\d.]+):(\d+)", line):
                self._address = found[1], int(found[2])
                break
        else:
            raise RuntimeError(f"the server did not start: {said.strip()}")
        self._clients = clients
        self._requests = requests
        self._tokens = tokens

    def _ask(self, connection: http.client.HTTPConnection, prompt: str) -> str:
        body = {"prompt": prompt, "max_tokens": self._tokens, "temperature": 0}
        headers = {"Content-Type": "application/json"}
        connection.request("POST", "/v1/completions", json.dumps(body), headers)
        answer = connection.getresponse()
        content = answer.read()
        if answer.status != 200:
            self._process.kill()
            raise RuntimeError(content)
        return json.loads(content)["choices"][0]["text"]

    def _client(self, number: int) -> None:
        connection = http.client.HTTPConnection(*self._address, timeout=600)
        for place in range(number, self._requests, self._clients):
            prompt = PROMPTS[place % len(PROMPTS)]
            if (text := self._ask(connection, prompt)) != self._right[prompt]:
                raise RuntimeError(f"{prompt!r}: {text!r}, alone {self._right[prompt]!r}")
        connection.close()

    def warm_up(self) -> str:
        """The answer to each prompt alone, which every later one must equal."""
        connection = http.client.HTTPConnection(*self._address, timeout=600)
        self._right = {prompt: self._ask(connection, prompt) for prompt in PROMPTS}
        connection.close()
        return str(self._right)

    def turn(self) -> float:
        """Seconds of all requests. Raises RuntimeError for a wrong answer."""
        start = time.perf_counter()
        with ThreadPoolExecutor(self._clients) as pool:
            list(pool.map(self._client, range(self._clients)))
        return time.perf_counter() - start

    def facts(self) -> dict[str, Any]:
        """Ends the server; its resident memory."""
        status = Path(f"/proc/{self._process.pid}/status").read_text()
        self._process.terminate()
        self._process.wait(60)
        [kilobytes] = re.findall(r"VmRSS:\s+(\d+)", status)
        return {"server GB": int(kilobytes) * 1024 / 1e9}


@benchmark
def serve(
    setup: Setup, clients: int = 64, requests: int = 256, tokens: int = 32, model: str = ""
) -> Iterator[Case]:
    """Requests answered by tools/serve.py for so many clients at once, beside one client; every
    answer must be that of the request alone. Needs the extra `serve`."""
    if setup.small:
        clients, requests, tokens = 4, 8, 4
    tool = str(ROOT / "tools" / "serve.py")
    model = model or make_run(setup.folder, setup.small)
    given = {"tool": tool, "model": model, "requests": requests, "tokens": tokens}
    sides = [
        Side(f"{count} clients", "cases.serving:Server", {**given, "clients": count})
        for count in (clients, 1)
    ]
    yield Case(f"{clients} clients", sides, requests * tokens, "tokens")
