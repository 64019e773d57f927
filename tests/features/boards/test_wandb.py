"""Weights & Biases: an offline run read back, and what stops a run from being started."""

import json
import os
import struct
import subprocess
import sys
from collections.abc import Iterator

import pytest

from megatron.config.logging import LoggingConfig
from megatron.features.boards.feature import BoardsConfig
from megatron.features.boards.points import Boards
from megatron.features.boards.wandb import WandB
from tests.forkrun import ROOT
from tests.problems import assert_problem, code_of
from tests.runs import SMALL, train

BLOCK = 32768
HEADER = 7  # bytes of a block's and of the file's header


def records(path) -> Iterator[bytes]:
    """The records of a .wandb file: LevelDB's log format behind 7 bytes."""
    data = path.read_bytes()
    place = HEADER
    record = b""
    while place < len(data):
        if place % BLOCK > BLOCK - HEADER:
            place += BLOCK - place % BLOCK
            continue
        length, kind = struct.unpack_from("<HB", data, place + 4)
        record += data[place + HEADER : place + HEADER + length]
        place += HEADER + length
        if kind in (1, 4):  # whole, last
            yield record
            record = b""


def stored(folder) -> tuple[dict[int, dict[str, float]], dict[str, str]]:
    """Rows by step and the configuration of the only run below a directory."""
    import wandb
    from wandb.proto import wandb_internal_pb2

    wandb.teardown()  # its process has then written all
    wandb_files = list(folder.rglob("run-*.wandb"))
    assert len(wandb_files) == 1

    rows = {}
    config = {}
    for data in records(wandb_files[0]):
        record = wandb_internal_pb2.Record()
        record.ParseFromString(data)
        items = {
            "/".join(item.nested_key) or item.key: json.loads(item.value_json)
            for item in record.history.item
        }
        if items:
            rows.setdefault(int(items.pop("_step")), {}).update(
                {key: value for key, value in items.items() if not key.startswith("_")}
            )
        for change in (record.run.config, record.config):
            config |= {
                "/".join(item.nested_key) or item.key: json.loads(item.value_json)
                for item in change.update
            }
    return rows, config


@pytest.mark.peers
def test_an_offline_run_has_the_tags_of_tensorboard(monkeypatch, tmp_path):
    pytest.importorskip("wandb")
    monkeypatch.setenv("WANDB_MODE", "offline")
    for grouped, tags in ((False, ("lm loss", "lm loss validation ppl")), (True, ("loss/train",))):
        folder = tmp_path / str(grouped)
        boards = Boards(
            [WandB("p", "", "", str(folder))],
            BoardsConfig(log_validation_ppl_to_tensorboard=True),
            LoggingConfig(log_format="short" if grouped else "megatron"),
        )
        boards.arguments(lambda: {"lr": 0.5, "data_path": ("a", "b"), "load": None})
        for iteration in (1, 2):
            boards.scalar("lm loss", 3.0 / iteration, iteration, 8 * iteration)
            boards.scalar("grad-norm", 1.5, iteration, 8 * iteration)
        boards.evaluation("lm loss", "validation", 2, 16, {"loss": 2.5, "perplexity": 12.0})
        boards.flush()
        boards.close()
        rows, config = stored(folder)
        assert rows[1][tags[0]] == 3.0 and rows[2][tags[0]] == 1.5
        assert set(tags) <= rows[2].keys() and len(rows[1]) == 2 and len(rows[2]) == 4
        assert config["lr"] == 0.5 and config["load"] is None


@pytest.mark.peers
@pytest.mark.campaign
def test_an_offline_run_has_loss_and_acceptance_of_later_tokens(monkeypatch, tmp_path):
    pytest.importorskip("wandb")
    monkeypatch.setenv("WANDB_MODE", "offline")
    words = "--train-iters 5 --mock-data --position-embedding-type rope --mtp-num-layers 1"
    board = ["--wandb-project", "p", "--wandb-save-dir", str(tmp_path / "board")]
    done = train(tmp_path / "run", [*SMALL, *words.split(), *board])
    rows, _ = stored(tmp_path / "board")
    for row in (row for row in done.rows if "split" not in row):
        for name in ("mtp_1 loss", "mtp_1 acceptance"):
            values = [v for tag, v in rows[row["iteration"]].items() if tag.endswith(name)]
            assert values == [pytest.approx(row[name])]


def test_a_missing_package_is_an_error(monkeypatch, tmp_path):
    monkeypatch.setitem(sys.modules, "wandb", None)
    with pytest.raises(ValueError) as error:
        WandB("p", "", "", str(tmp_path))
    assert code_of(str(error.value)) == "package-missing"


PROGRAM = """
import sys
from megatron.features.boards.wandb import WandB
try:
    WandB("p", "", "", sys.argv[1])
except ValueError as error:
    print(error)
"""


@pytest.mark.peers
def test_a_run_without_an_account_is_an_error(tmp_path):
    """In a process of its own, because wandb keeps the mode of the first run."""
    pytest.importorskip("wandb")
    names = ("WANDB_MODE", "WANDB_API_KEY")
    environment = {name: value for name, value in os.environ.items() if name not in names}
    environment |= {"HOME": str(tmp_path), "NETRC": str(tmp_path / "netrc")}
    words = [sys.executable, "-c", PROGRAM, str(tmp_path)]
    done = subprocess.run(
        words, cwd=ROOT, env=environment, capture_output=True, text=True, check=True
    )
    assert_problem(done.stdout.strip(), "wandb-failed", "--wandb-project p", "WANDB_MODE=offline")
