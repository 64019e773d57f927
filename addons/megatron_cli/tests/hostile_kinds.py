"""What of Megatron's command line the campaign of tests/campaigns/hostile damages."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from megatron.addons.megatron_cli import check_script
from megatron.addons.megatron_cli.deepspeed import read_deepspeed
from tests.campaigns.hostile.campaign import Kind, Refused, run_tool

SCRIPT = (
    'GPUS=4\nARGS=(\n    --num-layers 4 --hidden-size 64\n)\nMORE="--lr 1e-4 --global-batch-size '
    '$((GPUS * 2))"\nif [ 1 = 1 ]; then\n    MORE="$MORE --bf16"\nfi\ntorchrun --nproc_per_node '
    '$GPUS pretrain_gpt.py "${ARGS[@]}" $MORE ${FP8:+--fp8-format hybrid} --num-attention-heads 4 '
    "--seq-length 32 --max-position-embeddings 32 --micro-batch-size 2 --train-iters 9 "
    "--mock-data --vocab-size 100 2>&1 | tee log\n"
)
RECIPE = (
    "ENV_VARS:\n  CUDA_DEVICE_MAX_CONNECTIONS: 1\nMODEL_ARGS:\n  --num-layers: 4\n"
    "  --hidden-size: 64\n  --num-attention-heads: 4\n  --seq-length: 32\n  --bf16: true\n"
    "  --lr: 1.5e-4\n  --data-path: ${DATA}/text_document\n  --split: 949,50,1\n"
)


def make_config(folder: Path) -> None:
    config = {
        "train_batch_size": 8,
        "gradient_clipping": 1.0,
        "bf16": {"enabled": True},
        "fp16": {"enabled": False, "loss_scale_window": 500, "hysteresis": 2},
        "zero_optimization": {"stage": 1},
    }
    (folder / "ds.json").write_text(json.dumps(config))


def read_config(folder: Path) -> Any:
    words, problems = read_deepspeed(str(folder / "ds.json"))
    if problems:
        raise Refused("; ".join(problems))
    return words


def make_scripts(folder: Path) -> None:
    (folder / "run.sh").write_text(SCRIPT)
    (folder / "recipe.yaml").write_text(RECIPE)


def read_scripts(folder: Path) -> list[str]:
    found = []
    for name in ("run.sh", "recipe.yaml"):
        found.append(run_tool(check_script.main, folder / name, good=(0, 1)))
        if not found[-1]:
            raise ValueError("refused")
    return found


KINDS = [
    Kind("DeepSpeed config", make_config, read_config, ("ds.json",), (Refused, OSError)),
    Kind("launch script, recipe", make_scripts, read_scripts, ("run.sh", "recipe.yaml"), cost=8),
]
