"""config.json as the installed transformers reads it: rotary bases, windows, heads, dropouts; and
hf-import's own check.

The oracle is transformers' configuration object of the same table, so that our reading and its
cannot drift apart.
"""

from __future__ import annotations

import itertools
import json
import sys
from dataclasses import replace

import pytest

from megatron import host
from megatron.addons.convert import huggingface
from megatron.addons.convert.config_keys import Keys
from megatron.addons.convert.families import read_config
from megatron.addons.convert.links import ConversionError
from megatron.addons.convert.tests.hf_models import edit_config, make, rewrite_on_ranks
from megatron.inference.load_model import open_trained_model
from tests.load_tool import load_tool

transformers = pytest.importorskip("transformers")
pytestmark = pytest.mark.peers
LLAMA_LIKE = ("llama", "mistral", "qwen2", "qwen3")
SIZES = dict(
    hidden_size=64,
    num_attention_heads=32,
    num_hidden_layers=4,
    intermediate_size=96,
    vocab_size=61,
    max_position_embeddings=32,
    head_dim=16,
)
ABSENT = object()


@pytest.fixture(scope="module")
def tool():
    """The tool as a module."""
    return load_tool("convert_checkpoint")


def table_of(family: str, **changes) -> dict:
    """A small config.json; ABSENT removes a key. Windows are off unless `changes` say otherwise."""
    window = {} if family == "llama" else {"sliding_window": None}
    table = {"model_type": family, **SIZES, **window, **changes}
    return {key: value for key, value in table.items() if value is not ABSENT}


def ours(table: dict):
    """Our architecture of a config.json."""
    return read_config(Keys(dict(table), "config.json"))[1]


def theirs(table: dict):
    """transformers' configuration of it."""
    kind = transformers.CONFIG_MAPPING[table["model_type"]]
    return kind.from_dict(json.loads(json.dumps(table)))


# --- rotary positions

SCALINGS = (
    ABSENT,
    None,
    {"rope_theta": 111.0},
    {"type": "linear", "factor": 2.0, "rope_theta": 111.0},
    {"rope_type": "linear", "factor": 2.0},
)
PARAMETERS = (
    ABSENT,
    None,
    {"rope_theta": 222.0, "rope_type": "default"},
    {"rope_type": "default"},
    {"rope_type": "linear", "factor": 4.0, "rope_theta": 222.0},
)


@pytest.mark.parametrize("family", LLAMA_LIKE)
def test_the_rotary_base_and_its_scaling_are_those_of_transformers(family):
    for scaling, parameters, base in itertools.product(SCALINGS, PARAMETERS, (ABSENT, 333.0)):
        table = table_of(family, rope_scaling=scaling, rope_parameters=parameters, rope_theta=base)
        expected = theirs(table).rope_parameters
        model = ours(table)
        assert model.rotary_base == expected["rope_theta"], table
        assert (model.rotary_seq_len_interpolation_factor or 1) == expected.get("factor", 1), table


OWN_KEYS = {
    "gpt_neox": ({}, {"rotary_emb_base": 555.0}, {"rotary_emb_base": 333.0, "rotary_pct": 0.5}),
    "apertus": ({}, {"rope_theta": 12000000.0}),
    "olmo3": ({"sliding_window": 4096}, {"sliding_window": 4096, "rope_theta": 500000.0}),
}


@pytest.mark.parametrize(("family", "own"), [(f, own) for f in OWN_KEYS for own in OWN_KEYS[f]])
def test_families_that_read_rotary_keys_of_their_own_do_here_or_are_refused(family, own):
    base = {key: value for key, value in SIZES.items() if family != "gpt_neox" or key != "head_dim"}
    equal = 0
    for scaling, parameters, theta, partial in itertools.product(
        SCALINGS, (*PARAMETERS, {}), (ABSENT, 333.0), (ABSENT, 0.5)
    ):
        more = {"rope_scaling": scaling, "rope_parameters": parameters}
        more |= {"rope_theta": theta, "partial_rotary_factor": partial} | own
        table = {"model_type": family, **base, **more}
        table = {key: value for key, value in table.items() if value is not ABSENT}
        try:
            model = ours(table)
        except ConversionError:
            continue
        expected = theirs(table).rope_parameters
        windows = expected.get("sliding_attention")
        expected = expected.get("full_attention", expected)
        if windows is not None:
            assert model.window_base == (None if windows == expected else windows["rope_theta"])
        assert model.rotary_base == expected["rope_theta"], table
        assert model.rotary_percent == (expected.get("partial_rotary_factor") or 1), table
        assert model.use_rope_scaling == (expected["rope_type"] == "llama3"), table
        equal += 1
    assert equal >= 5


@pytest.mark.parametrize(
    ("family", "changes", "key"),
    [
        ("gpt_neox", {"rope_theta": 777.0}, "rope_theta"),
        ("gpt_neox", {"rope_theta": 777.0, "rope_scaling": SCALINGS[4]}, "rope_theta"),
        ("gpt_neox", {"partial_rotary_factor": 0.5}, "partial_rotary_factor"),
        ("gpt_neox", {"rotary_emb_base": 5, "rope_theta": 777}, "rope_theta"),
        ("apertus", {"rope_theta": 777.0}, "rope_theta"),
        ("olmo3", {"rope_parameters": PARAMETERS[2]}, "rope_parameters"),
        ("olmo3", {"rope_parameters": {"sliding_attention": SCALINGS[4]}}, "rope_parameters"),
        ("olmo3", {"rope_parameters": {"full_attention": [1]}}, "rope_parameters"),
        ("qwen3_moe", {"num_experts": 4, "num_local_experts": 8}, "num_experts"),
    ],
)
def test_a_key_that_transformers_reads_under_another_name_is_refused(family, changes, key):
    with pytest.raises(ConversionError, match=f"{key} .*cannot be represented"):
        ours({"model_type": family, **SIZES} | changes)


@pytest.mark.parametrize("family", LLAMA_LIKE)
@pytest.mark.parametrize(
    "changes",
    [
        {"partial_rotary_factor": 0.5},
        {"rope_parameters": {"rope_type": "default", "partial_rotary_factor": 0.5}},
        {"rope_scaling": {"type": "linear", "factor": 2.0, "partial_rotary_factor": 0.5}},
    ],
)
def test_heads_that_rotate_in_part_are_refused_where_transformers_has_none(family, changes):
    with pytest.raises(ConversionError, match=rf"partial_rotary_factor 0\.5.*{family} "):
        ours(table_of(family, **changes))
    assert ours(table_of(family, partial_rotary_factor=1.0)).rotary_percent == 1.0


def test_a_model_that_rotates_in_part_is_no_model_of_families_that_do_not(tool, tmp_path, capsys):
    make(transformers, "llama", tmp_path / "hf")
    assert (
        tool.main(["hf-import", str(tmp_path / "hf"), str(tmp_path / "ours"), "--no-verify"]) == 0
    )
    rewrite_on_ranks(tmp_path / "ours", tmp_path / "part", tp=1, pp=1, rotary_percent=0.5)
    for family in ("gpt2", "llama", "mistral", "qwen2", "qwen3"):
        words = ["--family", family]
        capsys.readouterr()
        assert (
            tool.main(["hf-export", str(tmp_path / "part"), str(tmp_path / "back"), *words]) == 1
        ), words
        assert "rotary_percent" in capsys.readouterr().err, words
        assert not (tmp_path / "back").exists()


# --- windows and heads


def window_of(config) -> int | None:
    """The window that some layer has by transformers' configuration."""
    if config.model_type == "mistral":
        return config.sliding_window
    return config.sliding_window if "sliding_attention" in config.layer_types else None


@pytest.mark.parametrize("family", ["mistral", "ministral", "qwen2", "qwen3"])
def test_the_window_of_each_layer_is_transformers(family):
    """... which counts the token itself; a window as long as the context is none."""
    some = 0
    for window, positions, use, first in itertools.product(
        (ABSENT, None, 8, 8192), (4096, 8192), (ABSENT, True, False), (ABSENT, 0, 3, 4)
    ):
        table = table_of(family, sliding_window=window, max_position_embeddings=positions)
        if "qwen" in family:
            table |= {"use_sliding_window": use, "max_window_layers": first}
            table = {key: value for key, value in table.items() if value is not ABSENT}
        config = theirs(table)
        types = getattr(config, "layer_types", None) or ["sliding_attention"] * 4
        model = ours(table)
        found = window_of(config)
        short = found is not None and found < positions
        assert model.window_size == ((found - 1, 0) if short else None)
        assert [model.window_of(layer) for layer in range(4)] == [
            found if short and kind == "sliding_attention" else None for kind in types
        ]
        some += short
    assert some >= 3


@pytest.mark.parametrize("family", LLAMA_LIKE)
@pytest.mark.parametrize("key", ["num_key_value_heads", "head_dim"])
@pytest.mark.parametrize("value", [ABSENT, None])
def test_null_and_missing_heads(family, key, value):
    table = table_of(family, **{key: value})
    try:
        config = theirs(table)
    # a null that this family of transformers refuses: num_attention_heads, as elsewhere
    except Exception:
        assert value is None
        expected = {"num_key_value_heads": 32, "head_dim": 2}[key]
    else:
        expected = getattr(config, key, None) or 2
    model = ours(table)
    assert {"num_key_value_heads": model.query_groups, "head_dim": model.head_dim}[key] == expected


# --- dropouts


def test_dropout_goes_both_ways_or_is_noted(tool, tmp_path, capsys):
    make(transformers, "llama", tmp_path / "hf")
    edit_config(tmp_path / "hf", attention_dropout=0.25, resid_pdrop=0.125)
    assert tool.main(["hf-import", str(tmp_path / "hf"), str(tmp_path / "ours")]) == 0
    said = capsys.readouterr().out
    assert "resid_pdrop 0.125" in said and "attention_dropout" not in said
    assert (
        open_trained_model(str(tmp_path / "ours"), device="cpu").config.model.attention_dropout
        == 0.25
    )
    rewrite_on_ranks(
        tmp_path / "ours",
        tmp_path / "more",
        tp=1,
        pp=1,
        attention_dropout=0.5,
        hidden_dropout=0.375,
    )
    assert tool.main(["hf-export", str(tmp_path / "more"), str(tmp_path / "back")]) == 0
    assert "--hidden-dropout 0.375" in capsys.readouterr().out
    assert json.loads((tmp_path / "back" / "config.json").read_text())["attention_dropout"] == 0.5


def test_gpt2s_own_dropout_of_the_embedding_is_noted(tool, tmp_path, capsys):
    make(transformers, "gpt2", tmp_path / "hf")
    assert tool.main(["hf-import", str(tmp_path / "hf"), str(tmp_path / "same")]) == 0
    assert "embd_pdrop" not in capsys.readouterr().out
    edit_config(tmp_path / "hf", embd_pdrop=0.3)
    assert tool.main(["hf-import", str(tmp_path / "hf"), str(tmp_path / "other")]) == 0
    assert "embd_pdrop 0.3" in capsys.readouterr().out


# --- the comparison after a conversion


def test_a_conversion_that_computes_something_else_is_removed(tool, tmp_path, capsys, monkeypatch):
    make(transformers, "llama", tmp_path / "hf")
    source = str(tmp_path / "hf")
    target = tmp_path / "ours"

    def wrong(keys, max_positions=None):
        family, model, rows = read_config(keys, max_positions)
        return family, replace(model, rotary_base=500), rows

    with monkeypatch.context() as patch:
        patch.setattr(huggingface, "read_config", wrong)
        assert tool.main(["hf-import", source, str(target)]) == 1
        assert "TOO LARGE" in capsys.readouterr().err and not target.exists()
        assert tool.main(["hf-import", source, str(target), "--no-verify"]) == 0
    wrong_export = tmp_path / "wrong"
    with monkeypatch.context() as patch:
        patch.setattr(
            huggingface,
            "config_for",
            lambda *given: json.loads((tmp_path / "hf" / "config.json").read_text()),
        )
        assert tool.main(["hf-export", str(target), str(wrong_export)]) == 1
        assert not wrong_export.exists() and target.exists()
    assert tool.main(["hf-export", str(target), str(tmp_path / "right")]) == 0
    assert "not verified" not in capsys.readouterr().out


@pytest.mark.parametrize("why", ["missing", "memory"])
def test_without_transformers_or_memory_a_line_says_so(why, tool, tmp_path, capsys, monkeypatch):
    make(transformers, "llama", tmp_path / "hf")
    if why == "missing":
        monkeypatch.setitem(sys.modules, "transformers", None)
    else:
        monkeypatch.setattr(host, "available_memory", lambda: 1 << 20)
    assert tool.main(["hf-import", str(tmp_path / "hf"), str(tmp_path / "ours")]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert (
        len(lines) == 2
        and lines[1].startswith("not verified")
        and "verify" in lines[1].partition(";")[2]
    )
    assert host.available_memory() > 0
