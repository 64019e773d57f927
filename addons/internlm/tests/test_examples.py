"""examples/internlm as it stands, at 1/64 of the width: the arguments of each demo, and one demo by
its script, give the numbers of one process."""

from __future__ import annotations

import gzip
import json
import re
import shlex
import subprocess
import sys
import urllib.request
from pathlib import Path

import numpy as np
import pytest

from megatron.addons.internlm.config import main
from megatron.addons.internlm.tests.configs import SIZES, demo, written
from megatron.args_file import read_words
from tests.campaigns.e2e.programs import spawn_program
from tests.core.data.vocabularies import write_sentencepiece
from tests.forkrun import ROOT
from tests.runs import train, with_flags

EXAMPLES = ROOT / "examples/internlm"
RANKS = {"7b": 4, "20b": 8, "30b": 4}


@pytest.mark.parametrize("name", SIZES)
def test_the_files_are_what_the_tool_makes(name, tmp_path, capsys):
    assert main([str(written(tmp_path, demo(name))), "--world-size", str(SIZES[name][5])]) == 0
    made = capsys.readouterr().out.splitlines()[1:]
    assert (EXAMPLES / f"{name}.args").read_text().splitlines()[1:] == made


def small(name: str) -> list[str]:
    """What makes a demo small: 1/64 of width and vocabulary, few layers, short samples."""
    width = SIZES[name][0] // 64
    return [
        "--num-layers",
        "4",
        "--hidden-size",
        str(width),
        "--num-attention-heads",
        "4",
        "--ffn-multiple-of",
        "4",
        "--vocab-size",
        "1612",
        "--seq-length",
        "32",
        "--max-position-embeddings",
        "32",
        "--global-batch-size",
        "16",
        "--train-iters",
        "20",
        "--lr-decay-iters",
        "20",
        "--lr-warmup-iters",
        "5",
        "--lr",
        "0.003",
        "--device",
        "cpu",
        "--num-workers",
        "0",
    ]


def by_script(python: str, name: str, folder: Path) -> tuple[list[dict], str]:
    """The demo whose arguments lie in `folder`, run by the example's script: its metrics and its
    log."""
    metrics = folder / "metrics.jsonl"
    run = spawn_program(
        ["sh", str(EXAMPLES / "torchrun.sh"), name, *small(name), "--metrics-file", str(metrics)],
        folder / "log",
        {"PYTHON": python, "ARGS": str(folder), "NPROC": str(RANKS[name])},
        cwd=ROOT,
        program=(),
    )
    assert run.end(400.0) == 0, run.err[-3000:]
    return [json.loads(line) for line in metrics.read_text().splitlines()], run.out


def by_forks(name: str, folder: Path, words: list[str]) -> tuple[list[dict], str]:
    """The same on forked ranks, which need not load torch."""
    run = train(folder / "ranks", words, world=RANKS[name])
    return run.rows, run.first_rank_log + run.log


@pytest.mark.parametrize(
    "name",
    [
        pytest.param("7b", marks=pytest.mark.campaign),
        pytest.param("20b", marks=pytest.mark.sweep),
        pytest.param("30b", marks=pytest.mark.sweep),  # the 20B demo's layout
    ],
)
def test_a_demo_on_several_ranks_is_the_same_run_as_in_one_process(name, tmp_path, warm_python):
    """In float64 instead of float16, so that the difference says something."""
    lines = (EXAMPLES / f"{name}.args").read_text().splitlines()
    kept = [line for line in lines if not line.startswith(("--fp16", "--initial-loss-scale"))]
    (tmp_path / f"{name}.args").write_text("\n".join([*kept, "--fp64"]))
    words = with_flags(read_words(tmp_path / f"{name}.args"), *small(name))
    rows, log = (
        by_script(warm_python, name, tmp_path) if name == "7b" else by_forks(name, tmp_path, words)
    )
    one = train(tmp_path / "one", with_flags(words, "--tensor-model-parallel-size", "1"))
    assert len(rows) == len(one.rows) == 20
    worst = max(
        abs(row[key] - other[key]) / abs(other[key])
        for row, other in zip(rows, one.rows, strict=True)
        for key in ("lm_loss", "grad_norm")
    )
    print(f"{name}: {worst:.1e}, loss {rows[0]['lm_loss']:.3f} to {rows[-1]['lm_loss']:.3f}")
    assert worst <= 1e-10
    for row, other in zip(rows, one.rows, strict=True):
        for key in ("learning_rate", "tokens/en", "acc"):
            assert row[key] == other[key]
    assert rows[-1]["lm_loss"] < rows[0]["lm_loss"] - 0.2
    assert log.count(" tgs/tgs_all=") == 20


@pytest.mark.campaign
def test_the_pages_recipe_makes_internlms_files_of_text_and_a_run_of_them(tmp_path, capsys):
    """The commands of addons/internlm/internlm.md as they stand there, where this checkout's tools are."""
    for name in ("tools", "megatron"):
        (tmp_path / name).symlink_to(ROOT / name)
    model = Path(write_sentencepiece(tmp_path))
    model.rename(tmp_path / "V7_sft.model")
    texts = {
        "raw/en/web.jsonl": ["the cat"] * 40,
        "raw/cn/books.jsonl.gz": ["the other cat", "a cat"] * 20,
    }
    for name, documents in texts.items():
        path = tmp_path / name
        path.parent.mkdir(parents=True)
        data = "".join(json.dumps({"text": text}) + "\n" for text in documents).encode()
        path.write_bytes(gzip.compress(data) if name.endswith(".gz") else data)
    page = (ROOT / "addons/internlm/internlm.md").read_text(encoding="utf-8")
    block = next(
        body
        for body in re.findall(r"^```sh\n(.*?)^```", page, re.M | re.S)
        if "to-internlm" in body
    )
    script = f'python() {{ "{sys.executable}" "$@"; }}\n{block}'
    done = subprocess.run(["sh", "-eu", "-c", script], cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    library = pytest.importorskip("sentencepiece").SentencePieceProcessor(
        model_file=str(tmp_path / "V7_sft.model")
    )
    for name, documents in (
        ("en/web", texts["raw/en/web.jsonl"]),
        ("cn/books", texts["raw/cn/books.jsonl.gz"]),
    ):
        file = tmp_path / "internlm" / f"{name}_text_document.bin"
        samples = [json.loads(line)["tokens"] for line in file.read_text().splitlines()]
        assert samples == [
            [library.bos_id(), *library.encode(text), library.eos_id()] for text in documents
        ]
        meta = np.load(f"{file}.meta")
        assert [row[-1] for row in meta] == [len(sample) for sample in samples]
    text = demo("7b").replace('skip_batches="", ', f'train_folder="{tmp_path}/internlm", ')
    text = text.replace("min_length=50", "min_length=1").replace("torch.float16", "torch.float32")
    assert main([str(written(tmp_path, text)), "--world-size", "1"]) == 0
    (tmp_path / "run.args").write_text(capsys.readouterr().out)
    words = with_flags(
        read_words(tmp_path / "run.args"),
        *small("7b"),
        "--global-batch-size",
        "2",
        "--seq-length",
        "16",
    )
    rows = train(
        tmp_path / "run",
        with_flags(
            words,
            *("--max-position-embeddings", "16", "--train-iters", "2"),
            *("--save", str(tmp_path / "llm_ckpts")),
        ),
    ).rows
    assert len(rows) == 2 and sum(row["tokens/en"] + row["tokens/cn"] for row in rows) > 0
    talk(page, tmp_path)


def talk(page: str, folder: Path) -> None:
    """The page's other commands on the run in `folder`: prompted, evaluated, exported, served."""
    (folder / "book.txt").write_text("the other cat")
    block = next(
        body for body in re.findall(r"^```sh\n(.*?)^```", page, re.M | re.S) if "--chat" in body
    )
    *commands, serve = block.splitlines()
    script = "\n".join([f'python() {{ "{sys.executable}" "$@"; }}', *commands])
    done = subprocess.run(
        ["sh", "-eu", "-c", script], cwd=folder, capture_output=True, text=True, input="a cat\n"
    )
    assert done.returncode == 0, done.stderr
    assert "Shall I" in done.stdout and "bits per byte" in done.stdout
    assert "NullTokenizer" not in done.stdout  # the export's ids are compared with the one named
    config = json.loads((folder / "exported/config.json").read_text())
    assert [config[f"{name}_token_id"] for name in ("bos", "eos")] == [1, 2]
    transformers = pytest.importorskip("transformers")
    model = transformers.AutoModelForCausalLM.from_pretrained(folder / "exported")
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder / "exported")
    ids = tokenizer("the cat", return_tensors="pt").input_ids
    assert model.generate(ids, max_new_tokens=2, do_sample=False).shape[1] > ids.shape[1]
    pytest.importorskip("fastapi")
    words = [*shlex.split(serve.replace("$TOKENIZER", commands[0].split('"')[1]))[2:]]
    tool = [sys.executable, str(ROOT / "tools/serve.py"), *words, "--port", "0", "--device", "cpu"]
    with subprocess.Popen(
        tool, cwd=folder, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    ) as server:
        assert server.stdout is not None
        try:
            address = next(
                found[0] for line in server.stdout if (found := re.search(r"http://[\d.:]+", line))
            )
            with urllib.request.urlopen(f"{address}/v1/models", timeout=60) as answer:
                name = json.load(answer)["data"][0]["id"]
            request = urllib.request.Request(
                f"{address}/v1/completions",
                json.dumps({"model": name, "prompt": "the cat", "max_tokens": 2}).encode(),
                {"Content-Type": "application/json"},
            )
            with urllib.request.urlopen(request, timeout=60) as answer:
                assert isinstance(json.load(answer)["choices"][0]["text"], str)
        finally:
            server.terminate()
