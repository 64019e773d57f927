"""More kinds of files: of generate.py, and flags with a small language of their own. Judges nothing."""

from pathlib import Path
from typing import Any

from megatron.args_file import read_words
from megatron.arguments import Problems
from megatron.config import command_line
from tests.campaigns.hostile.campaign import Kind, Refused
from tests.load_tool import load_tool

GENERATE = load_tool("generate")


def make_prompts(folder: Path) -> None:
    (folder / "p.jsonl").write_text('{"prompt": "a b"}\n{"prompt": "\\u00fc", "n": 1}\n')
    (folder / "p.txt").write_text("one\ntwo\n")


LAYOUT_FLAGS = (
    "--num-layers 6 --hidden-size 64 --num-attention-heads 4 --seq-length 32 --train-iters 10\n"
    "--max-position-embeddings 32 --micro-batch-size 2 --global-batch-size 4 --lr 1e-3\n"
    "--mock-data --vocab-size 100 --tokenizer-type NullTokenizer\n"
)


def make_layouts(folder: Path) -> None:
    (folder / "pipeline").write_text(
        f"{LAYOUT_FLAGS}--pipeline-model-parallel-size 2\n"
        "--pipeline-model-parallel-layout Et*2|(t)*2|t*2|L\n"
    )
    (folder / "experts").write_text(
        f"{LAYOUT_FLAGS}--num-experts 4 --moe-layer-freq ([0]*1+[1]*2)*2\n"
    )


def read_layouts(folder: Path) -> Any:
    return [command_line.judge([*read_words(folder / name)], 2) for name in ("pipeline", "experts")]


KINDS = [
    Kind(
        "prompt file",
        make_prompts,
        lambda folder: [
            GENERATE.read_prompts(str(folder / f"p.{end}")) for end in ("jsonl", "txt")
        ],
        ("p.jsonl", "p.txt"),
        cost=2,
    ),
    Kind(
        "pipeline layout, expert layers",
        make_layouts,
        read_layouts,
        ("pipeline", "experts"),
        (Problems, OSError, Refused),
        cost=4,
    ),
]
