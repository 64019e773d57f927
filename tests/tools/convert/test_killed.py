"""A conversion that is killed (SIGKILL) leaves nothing that looks whole, and the same command again
ends as if nothing had been."""

from __future__ import annotations

import itertools
import os
import shutil
import signal

import pytest

from megatron.checkpoint import store
from megatron.checkpoint.filesystem import Disk
from tests.forkrun import RanksFailed, run_ranks
from tests.load_tool import load_tool
from tests.tools.convert.megatron_files import LLAMA, stacked_tensors, write_torch_dist
from tests.tools.in_process import use_it
from tools.benchmarks.convert import make_model


def convert_on_a_rank(rank, world, words, action, number):
    """Run the tool in this process, which dies before the disk's `number`-th `action`."""
    count = itertools.count(1)

    def step(self, name, path):
        if name == action and next(count) == number:
            os.kill(os.getpid(), signal.SIGKILL)

    Disk.step = step
    return load_tool("convert_checkpoint").main([str(word) for word in words])


def killed(words, action, number) -> None:
    with pytest.raises(RanksFailed, match="exit code -9"):
        run_ranks(1, convert_on_a_rank, words, action, number)


HF_IMPORT = ["hf-import", "hf", "new", "--no-verify"]
HF_EXPORT = ["hf-export", "ours", "new", "--no-verify"]
TORCH_DIST = ["megatron-export", "ours", "new", "--ckpt-format", "torch_dist"]
MORE = (
    (HF_IMPORT, "write", 1),
    (HF_IMPORT, "rename", 1),
    (HF_IMPORT, "rename", 2),
    (HF_EXPORT, "write", 2),
    (["megatron-import", "theirs", "new"], "write", 2),
    (["megatron-import", "theirs", "new"], "rename", 3),
    (["megatron-export", "ours", "new"], "write", 1),
)


@pytest.fixture
def sources(tmp_path):
    """A Hugging Face folder, a torch_dist checkpoint and a run directory of ours."""
    make_model(tmp_path / "hf", 1e6, width=64, vocab=64)
    write_torch_dist(tmp_path / "theirs", LLAMA, stacked_tensors(LLAMA), {"iteration": 7})
    tool = load_tool("convert_checkpoint")
    words = ["megatron-import", str(tmp_path / "theirs"), str(tmp_path / "ours")]
    assert tool.main(words) == 0
    return tmp_path


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
@pytest.mark.parametrize(
    ("command", "action", "number"),
    [
        # renames: of the checkpoint, of its tracker, of the run directory
        pytest.param(HF_IMPORT, "rename", 3, marks=pytest.mark.campaign),
        pytest.param(HF_EXPORT, "rename", 1, marks=pytest.mark.campaign),
        pytest.param(TORCH_DIST, "rename", 1, marks=pytest.mark.campaign),
        *(pytest.param(*one, marks=pytest.mark.sweep) for one in MORE),
    ],
)
def test_the_same_command_again(command, action, number, sources, monkeypatch, capfd):
    use_it(monkeypatch)
    monkeypatch.chdir(sources)
    before = sorted(path.name for path in sources.iterdir())
    killed(command, action, number)
    assert not (sources / "new").exists()
    left = [path.name for path in sources.iterdir() if path.name not in before]
    assert left and all(name.startswith(".new.") for name in left), "it was not killed in the work"
    assert load_tool("convert_checkpoint").main(command) == 0
    assert sorted(path.name for path in sources.iterdir()) == sorted([*before, "new"])
    if command[0].endswith("import"):
        assert store.load(sources / "new").iteration == 0
    else:
        back = command[0].replace("export", "import")
        words = [back, "new", "again", *(["--no-verify"] if back == "hf-import" else [])]
        assert load_tool("convert_checkpoint").main(words) == 0
        shutil.rmtree(sources / "again")
