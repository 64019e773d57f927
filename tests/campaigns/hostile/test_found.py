"""Small inputs of the large campaign that once ended in a traceback or took all memory, and proof
that the forged ones would do harm."""

import io
import json
import pickle

import pytest
import torch

from megatron import args_file, arguments
from megatron.analysis import log_reader
from megatron.checkpoint import lock, skip_log
from megatron.checkpoint.filesystem import CheckpointError
from megatron.config.checks import batch
from megatron.config.checks.facts import Facts
from megatron.data.tokenizers import bpe
from tests.campaigns.hostile import forged
from tests.campaigns.hostile.kinds import read_checkpoint
from tests.core.training.built_runs import config_of
from tests.problems import raises


@pytest.mark.parametrize("text", ["[]", "0", "1e5", '"eos_token"', "true", "null"])
@pytest.mark.parametrize("name", ["special_tokens_map.json", "tokenizer_config.json"])
def test_special_tokens_that_are_no_object(tmp_path, name, text):
    (tmp_path / name).write_text(text)
    with pytest.raises(ValueError, match=name):
        bpe._special_names(tmp_path)


@pytest.mark.parametrize("pid", ["\ud800", "\0", "1", 1.5, None, [1]])
def test_a_lock_whose_process_is_no_number(tmp_path, pid):
    """It is one of an unknown job."""
    held = lock.acquire(tmp_path)
    [path] = lock._locks(tmp_path)
    path.write_text(json.dumps({**json.loads(path.read_text()), "pid": pid}))
    assert lock._owner(path) is None
    held.release()


def test_a_skip_of_more_iterations_than_can_be_counted():
    line = skip_log.SkipRecord(f"1-{10**30}", 0, 10**31, 1, "user", "", "").line()
    with raises(CheckpointError, "skip-record-malformed", "line 1"):
        skip_log.parse([line], "skips.jsonl")


@pytest.mark.parametrize(
    "changed", [{"lm_loss": None}, {"lm_loss": [1]}, {"iteration": "x"}, {"split": []}]
)
def test_an_evaluation_without_its_values_is_omitted(changed):
    row = {"split": "valid", "iteration": 5, "lm_loss": 2.0}
    lines = [json.dumps(row | changed), json.dumps(row)]
    assert [one.loss for one in log_reader.read_metrics(lines, "m.jsonl").evaluations] == [2.0]
    del row["lm_loss"]
    assert not log_reader.read_metrics([json.dumps(row)], "m.jsonl").evaluations


def test_sizes_near_a_very_large_number_of_ranks():
    facts = Facts(config_of("--decrease-batch-size-if-needed"), 10**15 + 1, frozenset())
    assert batch.sizes_that_fit(facts, 10) == [10**15, 10**15 + 10]


def test_a_word_longer_than_a_command_line_can_hold(tmp_path):
    (tmp_path / "args").write_text("--lr 1\n--data-path '" + "[" * 200_000 + "'\n")
    with pytest.raises(arguments.Problems, match="line 2"):
        args_file.read_words(tmp_path / "args")


def test_an_unrestricted_unpickler_would_run_the_payload(tmp_path, monkeypatch):
    """The gadgets work: what loads pickles runs them."""
    monkeypatch.setenv("CANARY", str(tmp_path / "canary"))
    for data in (forged.gadget(), forged.gadget(0)):
        pickle.loads(data)
        (tmp_path / "canary").unlink()
    torch.load(io.BytesIO(forged.torch_file()), weights_only=False)
    (tmp_path / "canary").unlink()


def test_a_forged_manifest_that_changes_nothing_is_read(memory_path):
    """Forging itself is no reason to be refused."""
    forged.manifest(lambda table: None)(memory_path)
    read_checkpoint(memory_path)
    forged.small("state.json", lambda data: data)(memory_path / "small")
    read_checkpoint(memory_path / "small")
    forged.weights(lambda table: None)(memory_path / "weights")
    read_checkpoint(memory_path / "weights")
