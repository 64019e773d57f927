"""tools/coord_check.py: flat with muP, and what it says where a multiplier is wrong."""

from __future__ import annotations

import pytest

from megatron.config.mup import Multipliers
from megatron.training import build
from tests.forkrun import ROOT
from tests.load_tool import exit_code, load_tool
from tests.problems import assert_problem

TEXT = ("--text", str(ROOT / "LICENSE"))
SMALL = "--widths 32 64 128 --base-width 32 --steps 3 --seeds 1 --lr 0.005".split()


@pytest.fixture(scope="module")
def tool():
    """The tool as a module."""
    return load_tool("coord_check")


@pytest.fixture
def check(tool, capsys):
    """Call the tool as its command line would; returns (exit code, stdout, stderr)."""

    def call(*words: str) -> tuple[int, str, str]:
        code = exit_code(tool.main, *TEXT, *words)
        return code, *capsys.readouterr()

    return call


def last_slopes(out: str) -> dict[str, list[float]]:
    """By type, without and with muP."""
    found: dict[str, list[float]] = {}
    for line in out.splitlines():
        if ", step " in line and " slope " in line:
            found.setdefault(line.split(",")[0], []).append(float(line.split()[-1]))
    return found


def test_what_a_step_changes_grows_with_the_width_but_for_mup(check, tmp_path):
    pytest.importorskip("matplotlib")
    code, out, err = check(*SMALL, "--output", str(tmp_path / "coordinates.png"))
    assert (code, err) == (0, "")
    assert (tmp_path / "coordinates.png").stat().st_size > 10000
    slopes = last_slopes(out)
    assert list(slopes) == ["embedding", "attention", "MLP", "residual", "logits"]
    assert all(abs(mup) <= 0.3 for _, mup in slopes.values())
    assert all(slopes[name][0] > 0.5 for name in ("attention", "MLP", "residual"))


def test_a_learning_rate_that_is_not_scaled_shows(check, monkeypatch):
    monkeypatch.setattr(build, "multipliers", lambda *_: lambda *_: Multipliers())
    code, out, err = check(*SMALL)
    assert code == 1
    assert_problem(err.rstrip(), "mup-not-flat", "attention", "MLP", "residual")
    assert last_slopes(out)["MLP"][1] > 0.5


def test_logits_that_are_not_divided_show(check):
    code, out, err = check(*SMALL, "--", "--mup-output-mult", "1.001")
    assert code == 1
    assert_problem(err.rstrip(), "mup-not-flat", "logits")
    assert last_slopes(out)["logits"][1] > 0.5


def test_an_untied_output_layer_is_scaled_twice_unless_its_rate_is_decoupled(check):
    untied = ["--", "--untie-embeddings-and-output-weights"]
    code, out, err = check(*SMALL, *untied)
    assert code == 1
    assert_problem(err.rstrip(), "mup-not-flat", "logits")
    assert last_slopes(out)["logits"][1] < -0.4
    code, out, _ = check(*SMALL, *untied, "--decoupled-lr", "0.005")
    assert code == 0 and abs(last_slopes(out)["logits"][1]) < 0.3


def test_the_best_rate_is_looked_for_around_the_last_one_and_each_run_made_once(
    check, tool, monkeypatch, tmp_path
):
    trained = []

    def final_loss(options, width, mup, lr, seed):
        trained.append((width, mup, lr, seed))
        best = 2**-7 if mup else 2**-7 * 64 / width
        return abs(tool.math.log2(lr / best)) + seed / 10

    monkeypatch.setattr(tool, "final_loss", final_loss)
    words = ["--transfer", "--widths", "64", "128", "--runs", str(tmp_path / "runs.jsonl")]
    code, out, err = check(*words)
    assert (code, err) == (0, "")
    assert [row.split()[2:] for row in out.splitlines() if row.startswith("grid steps")] == [
        ["+0", "-2"],
        ["+0", "+0"],
    ]
    # from the middle, 2^-8, two steps further than the five about it; without muP so again
    assert len(trained) == len(set(trained)) == 2 * (7 + 7 + 7 + 5)
    count = each = len(trained)
    assert check(*words)[1] == out and len(trained) == count
    check(*words, "--decoupled")
    assert {mup for _, mup, _, _ in trained[count:]} == {True}, "without muP the model is the same"
    count = len(trained)
    other = tmp_path / "text"
    other.write_text("another text, " * 10)
    check(*words, "--text", str(other))
    assert len(trained) == count + each


def test_the_exponent_of_a_power(tool):
    assert tool.slope((4, 8, 64), [3 * width**0.7 for width in (4, 8, 64)]) == pytest.approx(0.7)


def test_the_best_learning_rates(check, tool):
    grid = "--transfer --lr-min 0.03125 --lr-max 0.0625".split()
    code, out, err = check(*SMALL[:4], "--base-width", "32", "--seeds", "1", "--steps", "4", *grid)
    assert (code, err) == (0, "")
    rows = [line.split() for line in out.splitlines()]
    numbers = [row for row in rows if row and row[0].startswith("0.0")]
    assert len(numbers) == 2 * 3 and numbers[0][1] == numbers[3][1], "the base is one model"
    assert [row[:2] for row in rows if row and row[0] == "grid"] == 2 * [["grid", "steps"]]


@pytest.mark.parametrize(
    "words, named",
    [
        (["--widths", "64"], "--widths"),
        (["--widths", "64", "100"], "100"),
        (["--transfer", "--lr-min", "1"], "--lr-max"),
    ],
)
def test_what_makes_no_sense_is_refused(check, words, named):
    code, _, err = check(*words)
    assert code == 2
    assert_problem(err.rstrip(), "value-out-of-range", named)


def test_a_text_is_needed(check, tool, monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    for words in ([str(tool.PLAYS)], ["my.txt"]):
        code, _, err = check("--text", *words)
        assert code == 2
        assert_problem(err.rstrip(), "file-not-readable", *words)
        assert ("fetch_quickstart_data.py" in err) == (words != ["my.txt"])
    (tmp_path / "my.txt").write_bytes(bytes(tool.LENGTH + 1))
    code, _, err = check("--text", "my.txt")
    assert code == 2
    assert_problem(err.rstrip(), "value-out-of-range", "my.txt", tool.LENGTH + 1)


def test_flags_of_the_models_are_checked(check):
    code, _, err = check(*SMALL, "--", "--optimizer", "muon", "--muon-momentum", "0.9")
    assert code == 2
    assert_problem(err.rstrip(), "mup-muon-spectral", "--muon-scale-mode")
