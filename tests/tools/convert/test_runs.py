"""Converted checkpoints in whole runs: training on from one on four ranks, back out of their
layout, and within memory."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest
import torch

from megatron.inference.load_model import open_trained_model
from tests.forkrun import ROOT
from tests.load_tool import load_tool
from tests.runs import train
from tests.tools.convert.hf_models import POSITIONS, VOCAB, make

transformers = pytest.importorskip("transformers")
safetensors = pytest.importorskip("safetensors.torch")
pytestmark = [pytest.mark.peers, pytest.mark.campaign]
IDS = torch.randint(0, VOCAB, (2, POSITIONS), generator=torch.Generator().manual_seed(1))


@pytest.mark.parametrize(
    ("name", "layout"),
    [
        (
            "qwen3",
            "--tensor-model-parallel-size 2 --pipeline-model-parallel-size 2 "
            "--use-distributed-optimizer",
        ),
        (
            "llama tied",
            "--tensor-model-parallel-size 2 --sequence-parallel --use-distributed-optimizer --bf16",
        ),
    ],
)
def test_four_ranks_train_on_and_one_process_reads_what_they_write(name, layout, tmp_path):
    """Under bf16 with two data-parallel ranks the exact weights are the optimizer's; what is
    exported is the model's."""
    tool = load_tool("convert_checkpoint")
    model = make(transformers, name, tmp_path / "hf")
    assert tool.main(["hf-import", str(tmp_path / "hf"), str(tmp_path / "ours")]) == 0
    argv = (
        f"--load {tmp_path}/ours --use-checkpoint-args --mock-data --micro-batch-size 2 "
        "--global-batch-size 4 --train-iters 2 --lr 1e-3 --eval-iters 0 --log-interval 1 --device "
        f"cpu --num-workers 0 --save {tmp_path}/run/save --save-interval 2 {layout}"
    ).split()
    done = train(tmp_path / "run", argv, world=4)
    assert "checkpoint was written by 1 ranks" in done.first_rank_log
    assert len(done.rows) == 2
    trained = open_trained_model(str(done.save), device="cpu")
    with torch.no_grad():
        logits = trained.model(IDS)
        before = model(IDS).logits
    assert (logits - before).abs().max() > 1e-3, "nothing was learnt"
    assert (
        load_tool("generate").main(
            [str(done.save), "1 2 3", "--max-new-tokens", "3", "--device", "cpu"]
        )
        == 0
    )
    assert tool.main(["hf-export", str(done.save), str(tmp_path / "back")]) == 0
    back = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "back").eval()
    assert back.config.model_type == model.config.model_type
    weights = done.tensors()
    assert torch.equal(
        back.state_dict()["model.embed_tokens.weight"],
        weights["embedding.word_embeddings.weight"][:VOCAB],
    )
    if "--bf16" not in layout:
        with torch.no_grad():
            torch.testing.assert_close(logits, back(IDS).logits, rtol=0, atol=1e-5)


# ru_maxrss will not do: it begins with what this process had when it forked.
MEASURED = """
import runpy, sys
sys.argv = sys.argv[1:]
try:
    runpy.run_path(sys.argv[0], run_name="__main__")
except SystemExit as end:
    assert not end.code, end.code
print(next(line.split()[1] for line in open("/proc/self/status") if line.startswith("VmHWM")))
"""


def peak_rss(*words: object) -> int:
    """Bytes of memory that a run of the tool took at most; it must succeed."""
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    tool = str(ROOT / "tools" / "convert_checkpoint.py")
    done = subprocess.run(
        [sys.executable, "-c", MEASURED, tool, *map(str, words)],
        env=environment,
        capture_output=True,
        text=True,
        check=True,
    )
    return int(done.stdout.split()[-1]) * 1024


def test_memory_is_that_of_a_shard_and_not_of_the_model(tmp_path):
    """780 MB of weights in shards of 40 MB: at most 1.3 x the largest shard + 500 MB, both ways."""
    width = 1024
    ffn = 2816
    layers = 14
    vocab = 4096
    shapes = {
        "model.embed_tokens.weight": (vocab, width),
        "lm_head.weight": (vocab, width),
        "model.norm.weight": (width,),
    }
    for i in range(layers):
        at = f"model.layers.{i}."
        shapes |= {f"{at}self_attn.{x}_proj.weight": (width, width) for x in "qkvo"}
        shapes |= {f"{at}mlp.{x}_proj.weight": (ffn, width) for x in ("gate", "up")}
        shapes |= {
            f"{at}mlp.down_proj.weight": (width, ffn),
            f"{at}input_layernorm.weight": (width,),
            f"{at}post_attention_layernorm.weight": (width,),
        }
    folder = tmp_path / "hf"
    weight_map = {}
    shard = {}
    number = 0
    folder.mkdir()
    for name, shape in shapes.items():
        shard[name] = torch.randn(shape)
        if sum(one.nbytes for one in shard.values()) > 28e6 or name == list(shapes)[-1]:
            number += 1
            file = f"model-{number}.safetensors"
            safetensors.save_file(shard, folder / file)
            weight_map = weight_map | dict.fromkeys(shard, file)
            shard = {}
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    (folder / "config.json").write_text(
        json.dumps(
            dict(
                model_type="llama",
                hidden_size=width,
                intermediate_size=ffn,
                num_hidden_layers=layers,
                num_attention_heads=16,
                num_key_value_heads=16,
                max_position_embeddings=128,
                vocab_size=vocab,
                rms_norm_eps=1e-5,
            )
        )
    )
    sizes = [file.stat().st_size for file in folder.glob("*.safetensors")]
    limit = 1.3 * max(sizes) + 500e6
    assert sum(sizes) > limit + 150e6, (sum(sizes), limit)
    taken = [
        peak_rss("hf-import", folder, tmp_path / "ours", "--no-verify"),
        peak_rss(
            "hf-export",
            tmp_path / "ours",
            tmp_path / "back",
            "--max-shard-size",
            "40MB",
            "--no-verify",
        ),
    ]
    assert max(taken) < limit, (taken, limit)
