"""examples/gpt2_345m is the walk-through's command line, and what it plans is what the
walk-through's log printed."""

import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[3]
TRAIN = ROOT / "examples" / "gpt2_345m" / "train.sh"

# The walk-through's own words, with --flag value pairs as it wrote them; only the script, the
# backend and --log-format, which keeps Megatron's output, are ours.
LAUNCHER = (
    "-m torch.distributed.launch --nproc_per_node 1 --nnodes 1 --node_rank 0 --master_addr "
    "localhost"
)
FLAGS = """
--tensor-model-parallel-size 1 --pipeline-model-parallel-size 1 --num-layers 24 --hidden-size 1024
--num-attention-heads 16 --micro-batch-size 4 --global-batch-size 8 --seq-length 1024 --max-position-embeddings 1024
--train-iters 1000 --lr-decay-iters 320000 --save ./checkpoints/gpt-2 --load ./checkpoints/gpt-2
--data-path ./data/meg-gpt2_text_document --vocab-file ./data/gpt2-vocab.json --merge-file ./data/gpt2-merges.txt
--split 949,50,1 --distributed-backend nccl --lr 0.00015 --lr-decay-style cosine --min-lr 1.0e-5 --weight-decay 1e-2
--clip-grad 1.0 --lr-warmup-fraction .01 --recompute-activations --log-interval 10 --save-interval 1 --eval-interval 1
--eval-iters 10 --fp16
"""


def started(tmp_path: Path, *extra: str, **environ: str) -> list[str]:
    """The words that train.sh starts Python with, and two variables it must have set, from a Python
    that only notes."""
    note = tmp_path / "python"
    note.write_text(
        '#!/bin/sh\nprintf "%s\\n" "$CUDA_DEVICE_MAX_CONNECTIONS" "$LOCAL_RANK" "$@" > "$0.words"\n'
    )
    note.chmod(0o755)
    environ = {**os.environ, "PYTHON": str(note), "WORK": str(tmp_path), **environ}
    subprocess.run(["sh", str(TRAIN), *extra], env=environ, check=True)
    return (tmp_path / "python.words").read_text().splitlines()


def test_train_sh_is_the_walk_through_word_for_word(tmp_path):
    words = started(tmp_path, DISTRIBUTED_BACKEND="nccl", MASTER_PORT="6000")
    assert words[:2] == ["1", "0"]
    assert words[2:] == [
        *LAUNCHER.split(),
        "--master_port",
        "6000",
        str(ROOT / "pretrain_gpt.py"),
        *FLAGS.split(),
        "--log-format",
        "megatron",
    ]


def test_extra_words_come_last_and_the_backend_follows_the_variable(tmp_path):
    words = started(tmp_path, "--train-iters", "2", DISTRIBUTED_BACKEND="gloo", MASTER_PORT="")
    # a free port, of torchrun's own choice
    assert "--standalone" in words and "--master_port" not in words
    assert words[-2:] == ["--train-iters", "2"]
    assert words[words.index("--distributed-backend") + 1] == "gloo"


def test_what_it_plans_is_what_the_walk_through_printed(tmp_path):
    command = [sys.executable, str(ROOT / "pretrain_gpt.py"), *FLAGS.split(), "--dry-run"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    for figure in ("354871296", "50304", "8000", "80080"):
        assert figure in done.stdout.replace(",", ""), figure
