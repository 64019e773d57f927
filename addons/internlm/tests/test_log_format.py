"""InternLM's log lines: the numbers of the demos' logs from their own times (seeds 000 and 001)."""

import math
import time
from datetime import datetime

import pytest

from megatron.addons.internlm.log_format import (
    StepCounts,
    TokenRates,
    failed_line,
    flops_per_token,
    internlm_line,
    skipped_line,
    start_line,
)
from megatron.analysis.run_reader import read_run
from megatron.config.model import ModelConfig
from megatron.training.logging.flops import teraflops_per_rank
from megatron.training.result import IterationResult
from tests.core.config.checks.checked_flags import checked
from tests.problems import codes_of
from tests.runs import NO_DROPOUT, SMALL, train, with_flags, write_text


def model(layers: int, hidden: int, ffn: int, heads: int, seq_length: int = 2048) -> ModelConfig:
    return ModelConfig(
        num_layers=layers,
        hidden_size=hidden,
        ffn_hidden_size=ffn,
        num_attention_heads=heads,
        swiglu=True,
        seq_length=seq_length,
    )


DEMOS = {  # with their vocabulary
    "7b": (model(32, 4096, 11008, 32), 103168),
    "20b": (model(60, 5120, 13824, 40), 103168),
    "30b": (model(60, 6144, 16384, 48), 103168),
}


@pytest.mark.parametrize(
    ("demo", "plain", "again"),
    [
        ("7b", 44_411_387_904, 58_370_031_616),
        ("20b", 123_965_276_160, 164_230_594_560),
        ("30b", 175_937_421_312, 233_315_500_032),
    ],
)
def test_operations_per_token(demo, plain, again):
    assert (flops_per_token(*DEMOS[demo], False), flops_per_token(*DEMOS[demo], True)) == (
        plain,
        again,
    )


def test_another_mlp_ratio_counts_as_it_is():
    # ratio 4: m = 6, so 32 h^2
    small = model(2, 512, 2048, 8, 128)
    assert (
        flops_per_token(small, 1000, False)
        == 3 * 2 * (32 * 512 * 512 + 4 * 128 * 512) + 6 * 512 * 1000
    )


@pytest.mark.parametrize(
    ("demo", "rate", "teraflops"),
    [
        ("7b", 1424.93, 63.2831),
        ("7b", 3871.11, 171.9214),
        ("7b", 4189.39, 186.0566),
        ("7b", 4176.61, 185.4890),
        ("7b", 4185.31, 185.8754),
        ("7b", 4179.64, 185.6236),
        ("20b", 246.32, 30.535),
        ("20b", 965.36, 119.671),
        ("20b", 1024.65, 127.022),
        ("30b", 227.37, 40.0029),
    ],
)
def test_pairs_of_rate_and_teraflops_of_the_logs(demo, rate, teraflops):
    assert teraflops_per_rank(flops_per_token(*DEMOS[demo], False) * rate, 1.0, 1) == pytest.approx(
        teraflops, rel=2e-5
    )


# the 20B log: tgs, tgs_all, tgs_avg (= SMA within the window)
LOG = [
    (246.32, 246.32, 246.32),
    (965.36, 392.49, 605.85),
    (1024.65, 494.11, 745.45),
    (1025.42, 567.64, 815.45),
    (1024.85, 623.25, 857.33),
    (1016.03, 666.17, 883.78),
]


def test_the_rates_of_the_20b_log():
    rates = TokenRates()
    for tgs, overall, mean in LOG:
        found = rates.add(4096, 4096 / tgs)
        assert found["tgs (tokens/gpu/second)"] == found["tgs/last_tgs_1"] == tgs
        assert found["tgs/tgs_all"] == found["tgs/tgs_SMA"] == pytest.approx(overall, abs=0.011)
        assert found["tgs/tgs_avg"] == pytest.approx(mean, abs=0.011)
        assert found["tgs/last_tgs_10"] == found["tgs/last_tgs_50"] == 0


def test_windows_and_blocks():
    rates = TokenRates()
    found = [rates.add(100, 1.0 if step < 60 else 2.0) for step in range(115)]
    assert [f["tgs/last_tgs_10"] for f in found[8:11]] == [0, 100, 100] and found[69][
        "tgs/last_tgs_10"
    ] == 50
    assert (
        found[59]["tgs/tgs_SMA"] == 100
        and found[109]["tgs/tgs_SMA"] == 50
        and found[84]["tgs/tgs_SMA"] == 66.67
    )
    assert [found[i]["tgs/last_tgs_50"] for i in (48, 49, 98, 99)] == [
        0,
        100,
        100,
        round(50 * 100 / (10 + 80), 2),
    ]


PACKED = {
    "num_samples_in_batch": 19,
    "largest_length": 2048,
    "largest_batch": 6,
    "smallest_batch": 3,
    "acc": 0.0,
    "tokens/en": 120836,
    "tokens/cn": 0,
    "loss/en": 11.6279,
    "loss/cn": None,
    "acc/en": 0.0,
    "acc/cn": None,
}


def step(**values) -> IterationResult:
    """The first iteration, 512 tokens in a second, with other `values`."""
    plain = {"iteration": 1, "global_batch_size": 4, "seconds": 1.0, "grad_norm": 1.5}
    return IterationResult(**plain | values)


def line_of(result: IterationResult, now=datetime(2026, 1, 1), process: int = 1, **values) -> str:
    counts = StepCounts(seq_length=128, world_size=1)
    counts.add(result)
    plain = {"teraflops": 1.0, "micro_num": 1, "consumed_tokens": 512}
    return internlm_line(result, counts, now=now, process=process, **plain | values)


def test_the_fields_are_those_of_the_log_in_its_order():
    """Step 0 of the 7B log, with the 20B log's rates."""
    result = step(
        loss=11.6279,
        seconds=11.5,
        learning_rate=4e-07,
        loss_scale=65536.0,
        grad_norm=66.519,
        adam_beta2=0.95,
        fwd_bwd_seconds=6.874,
        counts=PACKED,
    )
    line = line_of(result, datetime(2023, 9, 5, 11, 49, 58), 6794, teraflops=63.28, micro_num=4)
    head, _, rest = line.partition(" - pid=6794 : ")
    assert head.startswith("2023-09-05T11:49:58.000")
    rest = rest.replace("tgs (tokens/gpu/second)", "tgs").replace(": ", ":")
    fields = dict(part.split("=", 1) for part in rest.rstrip().split(" "))
    assert list(fields) == [
        "tflops",
        "step",
        "loss",
        "tgs",
        "tgs/last_tgs_1",
        "tgs/tgs_all",
        "tgs/tgs_avg",
        "tgs/tgs_SMA",
        "tgs/last_tgs_10",
        "tgs/last_tgs_50",
        "lr",
        "loss_scale",
        "grad_norm",
        "micro_num",
        "num_consumed_tokens",
        "inf_nan_skip_batches",
        "num_samples_in_batch",
        "largest_length",
        "largest_batch",
        "smallest_batch",
        "adam_beta2",
        "fwd_bwd_time",
        "acc",
        "perplexity",
        "acc/en",
        "acc/cn",
        "tokens/en",
        "tokens/cn",
        "loss_from_metric",
        "loss/en",
        "loss/cn",
    ]
    assert (
        fields["tokens/en"] == "120836" and fields["loss/cn"] == "nan" and fields["acc/cn"] == "0.0"
    )
    assert (
        fields["lr"] == "4e-07"
        and fields["grad_norm"] == "{'0_default':66.519}"
        and fields["fwd_bwd_time"] == "6.87"
    )
    assert float(fields["perplexity"]) == pytest.approx(112181.7, rel=2e-4)


def test_an_infinite_perplexity_and_a_skipped_range():
    assert "perplexity=inf" in line_of(step(loss=800.0))
    assert "loss=nan" in line_of(step(loss=math.nan))
    line = skipped_line(2, 3, "user", datetime.now(), 1)
    assert line.endswith(": Skip batch count:`2-3`... skipped=1 reason=user step=2-3")
    assert failed_line(7, datetime.now(), 1).endswith(": Warning: skip parameter update at step 7.")


@pytest.fixture
def china(monkeypatch):
    """The time zone of the demos."""
    monkeypatch.setenv("TZ", "CST-8")
    time.tzset()
    yield
    monkeypatch.undo()
    time.tzset()


def test_the_beginnings_and_ends_of_lines_are_those_of_the_20b_log(china):
    """To the character: time, place in the source, process; every field has a blank behind it, the
    last one too."""
    now = datetime(2023, 11, 10, 11, 46, 16, 409000)
    result = step(loss=11.5, counts={"loss/en": None})
    line = line_of(result, now, 117775, teraflops=30.535171880622176)
    assert line.startswith(
        "2023-11-10T11:46:16.409+08:00 INFO [training_internlm.py, line 600, in "
        "record_current_batch_training_metrics] - pid=117775 : tflops=30.535171880622176 step=0 "
        "loss=11.5 "
    )
    assert line.endswith(" loss/en=nan ")
    now = datetime(2023, 11, 10, 11, 45, 40, 621000)
    assert [
        start_line(function, "x", now)
        for function in ("set_device", "launch", "_partition_param_list")
    ] == [
        "2023-11-10 11:45:40,621 INFO parallel_context.py:555 in set_device -- x",
        "2023-11-10 11:45:40,621 INFO launch.py:409 in launch -- x",
        "2023-11-10 11:45:40,621 INFO hybrid_zero_optim.py:268 in _partition_param_list -- x",
    ]


def test_its_logs_can_be_plotted(tmp_path):
    losses = [5.0, 4.0, 3.0]
    head = "data parallel size: 2, pipeline parallel size: 1, tensor parallel size: 1\n"
    lines = [line_of(step(iteration=n, loss=loss)) for n, loss in enumerate(losses, 1)]
    (tmp_path / "log").write_text(head + "\n".join(lines) + "\n")
    panels = read_run(str(tmp_path / "log")).panels
    assert panels["loss"] == ([1, 2, 3], losses)
    assert panels["tokens_per_second"][1] == pytest.approx([1024.0] * 3)


def test_its_lines_count_subsets_by_themselves():
    assert checked("--log-accuracy --log-format internlm")[0] == []
    assert codes_of(checked("--log-accuracy")[0]) == ["flag-needs-other-flag"]


def test_lines_and_metrics_have_the_subsets_and_rates(tmp_path):
    text = write_text(tmp_path / "en", 100), write_text(tmp_path / "cn", 100, seed=2)
    words = [*with_flags(SMALL, *NO_DROPOUT, "--eval-iters", "0"), "--data-path", *text]
    words += ["--train-iters", "4", "--log-interval", "1", "--log-format", "internlm"]
    run = train(tmp_path / "run", words)
    line = next(line for line in run.first_rank_log.splitlines() if " step=2 " in line)
    row = run.rows[2]
    assert f" tokens/en={row['tokens/en']} tokens/cn={row['tokens/cn']} " in line
    metric = round(row["lm_loss"], 4)
    assert f" loss_from_metric={metric} loss/en={round(row['loss/en'], 4)} " in line
    assert f" tgs/tgs_all={row['tgs/tgs_all']} " in line and " acc=" not in line
    assert row["tgs/last_tgs_1"] > 0 and row["fwd_bwd_time"] > 0
    assert row["inf_nan_skip_batches"] == 0 and row["adam_beta2"] == 0.999
