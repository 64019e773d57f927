"""A conversion that is killed (SIGKILL) leaves nothing that looks whole, and the same command again
ends as if nothing had been."""

from __future__ import annotations

import itertools
import os
import shutil
import signal

import pytest

from megatron.addons.convert.stores.kept_shards import NAME
from megatron.addons.convert.tests.llama_files import make_model
from megatron.addons.convert.tests.megatron_files import LLAMA, stacked_tensors, write_torch_dist
from megatron.checkpoint import reading
from megatron.checkpoint.filesystem import Disk
from tests.forkrun import RanksFailed, run_ranks
from tests.load_tool import load_tool


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
    (["megatron-export", "ours", "new"], "rename", 1),
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
    monkeypatch.chdir(sources)
    before = sorted(path.name for path in sources.iterdir())
    killed(command, action, number)
    assert not (sources / "new").exists()
    left = [path.name for path in sources.iterdir() if path.name not in before]
    assert left and all(name.startswith(".new.") for name in left), "it was not killed in the work"
    assert load_tool("convert_checkpoint").main(command) == 0
    assert sorted(path.name for path in sources.iterdir()) == sorted([*before, "new"])
    if command[0].endswith("import"):
        assert reading.load(sources / "new").iteration == 0
    else:
        back = command[0].replace("export", "import")
        words = [back, "new", "again", *(["--no-verify"] if back == "hf-import" else [])]
        assert load_tool("convert_checkpoint").main(words) == 0
        shutil.rmtree(sources / "again")


SHARDS = [*HF_EXPORT, "--max-shard-size", "200KB"]


def shards_of(folder) -> dict[str, tuple[int, bytes]]:
    """When each was written, and its bytes."""
    return {
        path.name: (path.stat().st_mtime_ns, path.read_bytes())
        for path in sorted(folder.glob("*.safetensors"))
    }


@pytest.mark.parametrize(
    "change",
    [
        pytest.param("damage", marks=pytest.mark.campaign),
        *(
            pytest.param(one, marks=pytest.mark.sweep)
            for one in ("nothing", "notes", "source", "size")
        ),
    ],
)
def test_an_export_keeps_the_whole_shards_of_a_killed_one(change, tmp_path, monkeypatch):
    """Unless they are damaged, or are those of something else."""
    sources = tmp_path
    for name in ("hf", "hf2"):
        make_model(sources / name, 1e6, width=64, vocab=64)
    monkeypatch.chdir(sources)
    main = load_tool("convert_checkpoint").main
    assert main(["hf-import", "hf", "model", "--no-verify"]) == 0
    words = [*SHARDS]
    words[1] = "model"
    killed(words, "rename", 3)  # before the third shard is noted
    first = shards_of(sources / ".new.partial")
    assert len(first) == 3
    whole = sorted(first)[:2]
    if change == "damage":
        damaged = sources / ".new.partial" / whole[0]
        data = bytearray(damaged.read_bytes())
        data[-1] ^= 1
        kept = damaged.stat()
        damaged.write_bytes(data)
        os.utime(damaged, ns=(kept.st_atime_ns, kept.st_mtime_ns))
        whole = whole[1:]
    elif change == "notes":
        notes = sources / ".new.partial" / NAME
        notes.write_text(notes.read_text().replace('"sums"', '"sum"'))
        whole = []
    elif change == "source":
        shutil.rmtree(sources / "model")
        assert main(["hf-import", "hf2", "model", "--no-verify"]) == 0
        whole = []
    elif change == "size":
        words[-1] = "150KB"
        whole = []
    assert main(words) == 0
    found = shards_of(sources / "new")
    assert [name for name in found if found[name][0] == first.get(name, (0,))[0]] == whole
    words[2] = "plain"
    assert main(words) == 0
    plain = shards_of(sources / "plain")
    assert {name: data for name, (_, data) in found.items()} == {
        name: data for name, (_, data) in plain.items()
    }
    assert sorted(p.name for p in (sources / "new").iterdir()) == sorted(
        p.name for p in (sources / "plain").iterdir()
    )
