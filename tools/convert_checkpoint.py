#!/usr/bin/env python
"""Bring checkpoints in from other formats and out to them: tools/convert_checkpoint.py COMMAND --help. See docs/convert.md.

    hf-import HF_FOLDER DIR        a Hugging Face model becomes a run directory that --load and tools/generate.py read
    hf-export DIR HF_FOLDER        a checkpoint, whatever layout wrote it, becomes a Hugging Face folder
    megatron-import SOURCE DIR     Megatron-LM's mp_rank_XX folders, any TP x PP, both of its models
    megatron-export DIR TARGET     ... and back
    internlm-import SOURCE DIR     a step of InternLM's or InternEvo's training (model_tp*_pp*.pt)
    inspect PATH                   what is in it
    diff A B                       tensor by tensor, ours or Hugging Face on either side
    verify DIR HF_FOLDER           the same numbers out of both models? block by block

Nothing is downloaded, nothing is overwritten, one tensor is in memory at a time, and each is used exactly once.
"""
from __future__ import annotations

import argparse
import ctypes
import os
import re
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

sys.path.insert(0, os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
os.environ.setdefault("OMP_WAIT_POLICY", "passive")
from megatron.checkpoint.disk import CheckpointError  # noqa: E402
from tools.convert.families import FAMILIES  # noqa: E402
from tools.convert.huggingface import hf_export, hf_import  # noqa: E402
from tools.convert.inspection import diff, inspect  # noqa: E402
from tools.convert.internlm import MLP_ORDERS, internlm_import  # noqa: E402
from tools.convert.megatron_layout import megatron_export, megatron_import  # noqa: E402
from tools.convert.verification import verified, verify  # noqa: E402

M_MMAP_THRESHOLD = -3      # of glibc's malloc.h

_UNITS = {"": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9}


def size(word: str) -> int:
    """Bytes of 5GB, 200MB or 1000."""
    match = re.fullmatch(r"(\d+)(KB|MB|GB)?", word)
    if not match or not int(match[1]):
        raise argparse.ArgumentTypeError(f"{word!r} is not a size; write 5GB, 200MB or a number of bytes")
    return int(match[1]) * _UNITS[match[2] or ""]


def build_parser() -> argparse.ArgumentParser:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter,
                                     allow_abbrev=False)
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")

    def command(name: str, text: str, *paths: str) -> argparse.ArgumentParser:
        one = commands.add_parser(name, help=text, description=text, allow_abbrev=False)
        for path in paths:
            one.add_argument(path.lower(), metavar=path, type=Path)
        return one

    _hugging_face(command)
    _other_suites(command)
    _readers(command)
    return parser


Command = Callable[..., argparse.ArgumentParser]


def _hugging_face(command: Command) -> None:
    one = command("hf-import", "make a run directory of a Hugging Face folder", "SOURCE", "TARGET")
    one.add_argument("--ignore-config-key", nargs="+", default=[], metavar="KEY",
                     help="keys of config.json that change nothing")
    one.add_argument("--max-position-embeddings", type=int, metavar="N", help="a shorter context than config.json's")
    one.add_argument("--no-tokenizer", action="store_true", help="leave the tokenizer's files behind (NullTokenizer)")
    _no_verify(one)
    one.set_defaults(run=_import)

    one = command("hf-export", "write a Hugging Face folder of a checkpoint", "SOURCE", "TARGET")
    one.add_argument("--family", choices=sorted(FAMILIES), help="default: the imported model's, else the first that fits")
    _step(one)
    one.add_argument("--vocab-size", type=int, metavar="N", help="rows of the vocabulary (default: the tokenizer's)")
    one.add_argument("--max-shard-size", type=size, default=5 * 10**9, metavar="SIZE", help="5GB, 200MB ... (default: 5GB)")
    _no_verify(one)
    one.set_defaults(run=_export)


def _no_verify(one: argparse.ArgumentParser) -> None:
    one.add_argument("--no-verify", action="store_true",
                     help="skip the comparison with transformers, which loads both models into memory in float32 and "
                     "removes what was written if they differ")


def _import(o: argparse.Namespace) -> str:
    report = hf_import(o.source, o.target, ignored=tuple(o.ignore_config_key), tokenizer=not o.no_tokenizer,
                       max_positions=o.max_position_embeddings)
    return report if o.no_verify else verified(report, o.target, o.source, o.target)


def _export(o: argparse.Namespace) -> str:
    report = hf_export(o.source, o.target, step=o.ckpt_step, family=o.family, vocab_size=o.vocab_size,
                       shard_bytes=o.max_shard_size)
    return report if o.no_verify else verified(report, o.source, o.target, o.target, o.ckpt_step)


def _other_suites(command: Command) -> None:
    one = command("megatron-import", "make a run directory of a Megatron-LM checkpoint (mp_rank_XX)", "SOURCE", "TARGET")
    one.add_argument("--args", type=Path, metavar="FILE", help="flags that count more than the checkpoint's arguments")
    one.add_argument("--no-tokenizer", action="store_true", help="leave the tokenizer behind (NullTokenizer)")
    one.add_argument("--vocab-size", type=int, metavar="N", help="with --no-tokenizer: rows that are no padding")
    one.set_defaults(run=lambda o: megatron_import(o.source, o.target, args_file=o.args, tokenizer=not o.no_tokenizer,
                                                   vocab_size=o.vocab_size))

    one = command("megatron-export", "write a Megatron-LM checkpoint (mp_rank_XX, release)", "SOURCE", "TARGET")
    one.add_argument("--tensor-model-parallel-size", type=int, default=1, metavar="N", help="default: 1")
    one.add_argument("--pipeline-model-parallel-size", type=int, default=1, metavar="N", help="default: 1")
    one.add_argument("--model", choices=("core", "legacy"), default="core",
                     help="megatron-core's GPTModel, or the older one (default: core)")
    _step(one)
    one.set_defaults(run=lambda o: megatron_export(o.source, o.target, tp=o.tensor_model_parallel_size, kind=o.model,
                                                   pp=o.pipeline_model_parallel_size, step=o.ckpt_step))

    one = command("internlm-import", "make a run directory of a step of InternLM's training (model_tp*_pp*.pt)", "SOURCE",
                  "TARGET")
    one.add_argument("--mlp-weights", choices=sorted(MLP_ORDERS), required=True, help="w2-up: w2 is the up and w3 the down "
                     "matrix, as before February 2024; w2-down: the other way round, as since then and in InternEvo")
    one.add_argument("--max-position-embeddings", type=int, metavar="N", help="default: what the file says, or 2048")
    one.add_argument("--tokenizer-model", type=Path, metavar="FILE",
                     help="its SentencePiece model (default: ids are numbers)")
    one.set_defaults(run=lambda o: internlm_import(o.source, o.target, order=o.mlp_weights, tokenizer=o.tokenizer_model,
                                                   positions=o.max_position_embeddings))


def _readers(command: Command) -> None:
    one = command("inspect", "say what a checkpoint or a Hugging Face folder holds", "PATH")
    _step(one)
    one.add_argument("--tensors", action="store_true", help="name every tensor")
    one.set_defaults(run=lambda o: inspect(o.path, o.ckpt_step, o.tensors))

    one = command("diff", "compare two of them tensor by tensor; exit code 1 where they differ", "A", "B")
    _step(one)
    one.set_defaults(run=lambda o: diff(o.a, o.b, o.ckpt_step))

    one = command("verify", "compare what a checkpoint and a Hugging Face model compute, block by block (needs "
                  "transformers); exit code 1 where they differ", "CHECKPOINT", "HF_FOLDER")
    _step(one)
    one.add_argument("--tolerance", type=float, default=1e-4, metavar="X",
                     help="largest difference, as a share of the largest value (default: 1e-4)")
    one.add_argument("--length", type=int, default=64, metavar="N", help="tokens of each of two samples (default: 64)")
    one.set_defaults(run=lambda o: verify(o.checkpoint, o.hf_folder, o.ckpt_step, o.tolerance, o.length))


def _step(one: argparse.ArgumentParser) -> None:
    one.add_argument("--ckpt-step", type=int, metavar="N", help="this iteration instead of the newest")


def _give_memory_back() -> None:
    """Have glibc return each block of 1 MB or more when it is freed; else tensors of the past stay in its heap."""
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None) if sys.platform == "linux" else None
    if mallopt:
        mallopt(M_MMAP_THRESHOLD, 1 << 20)


def main(argv: Sequence[str]) -> int:
    """Exit codes: 0 done, 1 it could not be done (diff, verify: they differ), 2 a wrong command line, 130 Ctrl-C."""
    options = build_parser().parse_args(argv)
    try:
        done = options.run(options)
        text, good = done if isinstance(done, tuple) else (done, True)
        print(text)
        return 0 if good else 1
    except (ValueError, OSError, CheckpointError) as error:
        print("\n".join(f"error: {line}" for line in str(error).splitlines()), file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        return 130


if __name__ == "__main__":
    _give_memory_back()
    sys.exit(main(sys.argv[1:]))
