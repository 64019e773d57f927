"""Converted checkpoints in whole runs: training on from one on four ranks, and back out of their
layout."""

from __future__ import annotations

import pytest
import torch

from megatron.addons.convert.tests.hf_models import POSITIONS, VOCAB, make
from megatron.inference.load_model import open_trained_model
from tests.load_tool import load_tool
from tests.runs import train

transformers = pytest.importorskip("transformers")
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
