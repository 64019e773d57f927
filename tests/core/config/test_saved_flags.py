"""The args file of a checkpoint: all values, whichever defaults and flags the reader has."""

import dataclasses
import json
from pathlib import Path

import pytest

from megatron import arguments
from megatron.arguments import config_from, flags_of, to_args_text, values_of
from megatron.config import args_text, saved_flags
from megatron.config.tree import Config, with_features
from megatron.problems import Problems
from tests.core.config.checks.checked_flags import BASE, PARSER

TYPED = arguments.parse_typed(
    PARSER, [*BASE.split(), "--lr", "1e-4", "--swiglu", "--adam-eps", "1e-9"]
)
CONFIG = config_from(Config, TYPED)


def written(folder: Path, config: Config = CONFIG, more: str = "") -> Path:
    (folder / "args").write_text(more + args_text.to_text(config))
    return folder / "args"


def test_a_configuration_reads_back(tmp_path):
    saved = saved_flags.read(written(tmp_path))
    assert saved.config == CONFIG and saved.notes == []


def test_every_flag_with_a_value_of_its_own_reads_back(tmp_path):
    values = {}
    for name, flag in flags_of(Config).items():
        if flag.kind in ("switch", "off"):
            values[name] = flag.kind == "switch"
        elif flag.choices is not None:  # all values may be those of features
            last = flag.choices[-1:]
            values[name] = last if flag.kind == "list" else last[0] if last else flag.default
        else:
            one = {int: 3, float: 1 / 3}.get(flag.type, "x y")
            count = flag.nargs if isinstance(flag.nargs, int) else 2
            values[name] = (one,) * count if flag.kind == "list" else one
    values["device_memory"] = 80.5  # a number with a unit
    config = config_from(Config, values)
    assert saved_flags.read(written(tmp_path, config)).config == config


@pytest.mark.parametrize("name", ["norm_epsilon", "adam_beta2", "hidden_dropout", "swiglu", "seed"])
@pytest.mark.parametrize("form", ["with values", "older"])
def test_another_default_of_a_later_release_is_no_other_model(tmp_path, monkeypatch, name, form):
    """Planted: the default of a field changes between the save and the load."""
    config = config_from(Config, {k: v for k, v in TYPED.items() if k != name})
    path = written(tmp_path, config)
    before = values_of(config)[name]
    if form == "older":
        path.write_text(to_args_text(config))
        monkeypatch.setitem(saved_flags.OLD_DEFAULTS, name, before)
    later = {"norm_epsilon": 1e-3, "adam_beta2": 0.5, "hidden_dropout": 0.5, "swiglu": True}.get(
        name, 9
    )
    read = arguments.config_from
    monkeypatch.setattr(
        saved_flags, "config_from", lambda tree, values: read(tree, {name: later, **values})
    )
    assert values_of(saved_flags.config_from(Config, {}))[name] == later
    assert saved_flags.read(path).config == config


@pytest.mark.parametrize("form", ["with values", "older"])
def test_a_value_that_a_feature_added_is_passed_over_without_it(tmp_path, form):
    """But not one that changes weights."""
    text = args_text.to_text(CONFIG).replace('"log_format": "short"', '"log_format": "waves"')
    text = "--log-format waves\n" + text
    path = tmp_path / "args"
    path.write_text(text if form == "with values" else text.partition("# all")[0])
    assert saved_flags.read(path) == saved_flags.SavedFlags(CONFIG, [])
    path.write_text("--lr-decay-style waves\n" + text)
    with pytest.raises(Problems):
        saved_flags.read(path)


def test_flags_that_this_program_does_not_have_are_one_note(tmp_path):
    text = "--of-a-script 3 --removed-switch --lr 1e-4\n"
    saved = saved_flags.read(written(tmp_path, more=text))
    assert saved.unknown == ["--of-a-script", "--removed-switch"] and len(saved.notes) == 1
    assert saved.config == CONFIG
    path = tmp_path / "args"
    table = values_of(CONFIG) | {"removed_feature": False}
    path.write_text(f"{to_args_text(CONFIG)}# all values: {json.dumps(table)}\n")
    assert saved_flags.read(path) == saved_flags.SavedFlags(CONFIG, [])


@dataclasses.dataclass(frozen=True)
class Bells:
    """Bells."""

    bells: int = arguments.arg(0, help="number of bells")
    loud: bool = arguments.arg(False, help="louder bells")


def test_a_feature_may_be_unknown_to_the_reader(tmp_path):
    tree = with_features([Bells])
    config = config_from(tree, {**TYPED, "bells": -3, "loud": True})
    path = written(tmp_path, config)
    assert saved_flags.read(path, tree).config == config
    assert saved_flags.read(path) == saved_flags.SavedFlags(CONFIG, [])
    path.write_text("--missing-switch\n" + path.read_text())
    assert saved_flags.read(path).unknown == ["--missing-switch"]


@pytest.mark.parametrize(
    "values",
    [
        "[1]",
        '{"num_layers": "x"}',
        '{"swiglu": 3}',
        '{"lr_decay_style": "none"}',
        '{"a":',
        "3",
        '{"lr": [1, 2]}',
        '{"seed": null}',
        '{"num_layers": {"a": 1}}',
        "[" * 100_000,
    ],
)
def test_damaged_values_are_a_named_problem(tmp_path, values):
    path = tmp_path / "args"
    path.write_text(f"--num-layers 2\n# all values: {values}\n")
    with pytest.raises(Problems, match=str(path)):
        saved_flags.read(path)


def test_fields_are_those_of_the_tree():
    assert {f.name for f in dataclasses.fields(Config)} >= {"model", "training"}


def test_a_flag_that_had_no_default_has_the_one_of_now(tmp_path):
    """2eb27ecc wrote null for --muon-momentum of a run with Adam."""
    path = written(tmp_path)
    text = path.read_text()
    assert '"muon_momentum": 0.9' in text
    path.write_text(text.replace('"muon_momentum": 0.9', '"muon_momentum": null'))
    assert saved_flags.read(path).config == CONFIG
