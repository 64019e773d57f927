"""tools/convert_checkpoint.py diff: two checkpoints of the same weights, one with an optimizer, one
without."""

from __future__ import annotations

from pathlib import Path

import torch

from megatron.arguments import config_from, to_args_text
from megatron.checkpoint import store
from megatron.checkpoint.sharded import TensorSlice
from megatron.checkpoint.state import RunState
from megatron.checkpoint.tensor_slices import whole
from megatron.config.tree import Config
from tests.load_tool import exit_code, load_tool
from tools.shared import progress

NAME = "embedding.word_embeddings.weight"


def write(folder: Path, tensors: dict[str, torch.Tensor]) -> str:
    folder.mkdir()
    shape = {
        "num_layers": 1,
        "hidden_size": 4,
        "num_attention_heads": 1,
        "seq_length": 4,
        "max_position_embeddings": 4,
    }
    config = config_from(Config, {**shape, "tokenizer_type": "NullTokenizer", "vocab_size": 8})
    slices = [
        TensorSlice(name, tuple(one.shape), one.dtype, whole(one.shape), one)
        for name, one in tensors.items()
    ]
    layout = dict.fromkeys(("world_size", "tp", "pp", "cp", "dp"), 1)
    store.save(
        folder, 1, slices, RunState(iteration=1, data={}, layout=layout), to_args_text(config)
    )
    return str(folder)


def test_weights_only_leaves_the_optimizer_out(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(progress, "SECONDS", 0.0)
    main = load_tool("convert_checkpoint").main
    weights = torch.arange(32.0).view(8, 4)
    one = write(tmp_path / "one", {NAME: weights, f"optimizer.exp_avg.{NAME}": weights})
    other = write(tmp_path / "other", {NAME: weights, f"optimizer.exp_avg.{NAME}": -weights})
    without = write(tmp_path / "without", {NAME: weights})
    for second in (other, without):
        assert exit_code(main, "diff", one, second) == 1
        assert "1 of 2 tensors differ" in capsys.readouterr().out
        assert exit_code(main, "diff", one, second, "--weights-only") == 0
        out, error = capsys.readouterr()
        assert "same: 1 tensors" in out and "\n100.0%, " in error
    changed = write(tmp_path / "changed", {NAME: weights + 1})
    assert exit_code(main, "diff", one, changed, "--weights-only") == 1
