"""The plan as a dry run prints it: the seed's model, layouts worked out by hand, and that it stays
short."""

import re

import pytest

from megatron.config.plan import costs, transfers
from megatron.config.plan.plan import parameters_per_rank
from megatron.config.plan.state_bytes import bytes_per_rank
from megatron.config.plan.tables import describe
from tests import problems
from tests.core.config.plan.seed_plan import plan


def rows(lines: list[str], title: str) -> list[list[str]]:
    """The cells of the table under the line that begins with `title`, without its heading."""
    start = next(i for i, line in enumerate(lines) if line.startswith(title)) + 2
    found = []
    for line in lines[start:]:
        if not re.match(r"  \d", line):
            break
        found.append(re.split(r"  +", line.strip()))
    return found


def numbers(cells: list[str]) -> list[float]:
    return [float(cell.replace(",", "")) for cell in cells]


def test_description_names_what_follows():
    text = " ".join(" ".join(describe(*plan(2))).split())
    for part in (
        "354,871,296 parameters, 48,128 of them padding",
        "2 ranks = data 2",
        "padded to 50,304",
        "8 samples = micro-batch 4 x accumulation 1 x data-parallel 2",
        "8,192,000 tokens",
        "validation 80080",
    ):
        assert part in text, part
    assert "bubble" not in text


def test_one_rank():
    """By hand: 2 bytes of weight and gradient, 4 + 8 of optimizer a parameter; nothing is sent."""
    config, p = plan()
    lines = describe(config, p)
    n = 354871296
    (row,) = rows(lines, "bytes per rank")
    assert row[:2] == ["0", "0-23"] and numbers(row[2:6]) == [n, 2 * n, 2 * n, 12 * n]
    assert numbers(row[6:]) == [
        costs.activations(config, p, 0).total,
        pytest.approx((16 * n + costs.activations(config, p, 0).total) / 2**30, abs=0.005),
    ]
    assert not any("sends" in line for line in lines)


def test_the_longest_share_of_muon():
    """By hand, in units of 1024^3: matrices of the MLP cost 9, queries, keys and values 9, the
    projection 3. Of 64 ranks 8 have two of the 72 that cost 9."""
    flags = {"optimizer": "muon", "muon_momentum": 0.95, "use_distributed_optimizer": True}
    lines = describe(*plan(64, **flags, global_batch_size=256))
    (line,) = [line for line in lines if line.startswith("  Newton-Schulz")]
    assert f" {18 / (24 * (9 + 9 + 9 + 3) / 64):.2f} " in line
    assert not any(line.startswith("  Newton-Schulz") for line in describe(*plan(**flags)))


def test_every_stage_is_there():
    """4 uneven stages of 2 chunks on 2 x 4 x 2 ranks: the same numbers as the functions give, stage
    by stage."""
    config, p = plan(
        16,
        num_layers=30,
        pipeline_model_parallel_size=4,
        num_virtual_stages_per_pipeline_rank=2,
        bf16=True,
        fp16=False,
        tensor_model_parallel_size=2,
        sequence_parallel=True,
        use_distributed_optimizer=True,
        global_batch_size=64,
    )
    lines = describe(config, p)
    table = rows(lines, "bytes per rank, by pipeline stage (optimizer: sharded over 2 ranks)")
    assert [row[0] for row in table] == ["0", "1", "2", "3"]
    assert table[1][1] == "3-5 + 18-21"
    for stage, row in enumerate(table):
        held = bytes_per_rank(config, p, stage)
        active = costs.activations(config, p, stage).total
        assert numbers(row[2:7]) == [
            parameters_per_rank(config, p, stage),
            held["weights"],
            held["gradients"],
            held["main weights"] + held["optimizer moments"],
            active,
        ]
    sent = rows(lines, "MB (10^6 bytes) sent per rank and step")
    for row in sent:
        stages = range(int(row[0].split("-")[0]), int(row[0].split("-")[-1]) + 1)
        for stage in stages:
            expected = transfers.sent_by_axis(config, p, stage)
            assert numbers(row[2:]) == pytest.approx(
                [expected[axis] / 1e6 for axis in ("tp", "dp", "pp")], abs=0.0005
            )
    [bubble] = [line for line in lines if line.startswith("bubble: ")]
    assert problems.numbers(bubble) == [0.188, 4, 1, 2, 8]


def test_traffic_by_hand():
    """GPT-2 345M over 2 tensor ranks and 2 replicas: one micro-batch a step, hidden states of 4 x
    1024 x 1024 x 2 bytes."""
    config, p = plan(4, tensor_model_parallel_size=2)
    hidden = 4 * 1024 * 1024 * 2
    tokens = 4 * 1024
    # 4 a layer, embedding, output layer; the loss in fp32
    sums = (4 * 24 + 2) * hidden + 3 * 4 * tokens
    sent = transfers.sent_by_axis(config, p, 0)
    assert sent["tp"] == sums  # 2 (2 - 1) / 2
    # fp16 gradients
    assert sent["dp"] == pytest.approx(2 * parameters_per_rank(config, p), rel=1e-6)
    assert sent["cp"] == sent["pp"] == 0


def test_alive_micro_batches_by_hand():
    """1F1B: the first of 4 stages holds 4 micro-batches of 6 layers, the last 1 and the logits."""
    config, p = plan(4, pipeline_model_parallel_size=4, global_batch_size=64)
    one = costs.chunk_activations(config, p, range(6))
    held = [costs.activations(config, p, stage) for stage in range(4)]
    assert [(a.alive, a.stored) for a in held] == [(n, n * one) for n in (4, 3, 2, 1)]
    assert [a.head > 0 for a in held] == [False, False, False, True]
    assert held[3].head == pytest.approx(4 * 1024 * 50304 * 2, rel=0.07)
    full = plan(
        4,
        pipeline_model_parallel_size=4,
        global_batch_size=64,
        recompute_granularity="full",
        recompute_method="uniform",
        recompute_num_layers=2,
    )
    again = costs.activations(*full, 0)
    assert again.stored == 4 * 3 * 4 * 1024 * 1024 * 2 and again.recomputed == one // 3


@pytest.mark.parametrize("chunks", [None, 3])
def test_sixteen_stages_fit_a_screen(chunks):
    config, p = plan(
        64,
        num_layers=96,
        pipeline_model_parallel_size=16,
        num_virtual_stages_per_pipeline_rank=chunks,
        global_batch_size=512,
    )
    lines = "\n".join(describe(config, p)).splitlines()
    assert len(lines) <= 45 and max(map(len, lines)) <= 130
    assert any(re.match(r"  1-14 +6 each", line) for line in lines), "middle stages send as much"


def test_equal_stages_share_a_row():
    """One micro-batch: the middle stages hold the same."""
    config, p = plan(8, num_layers=8, pipeline_model_parallel_size=8, global_batch_size=4)
    assert [row[:2] for row in rows(describe(config, p), "bytes per rank")] == [
        ["0", "0"],
        ["1-6", "1 each"],
        ["7", "7"],
    ]


def test_experts_are_shared_where_nothing_else_is():
    """One data-parallel rank, but both tensor-parallel ones hold all experts: each has the optimizer
    state of half of them, and sends its half of the gradients and of the weights."""
    flags = dict(
        num_experts=4,
        moe_ffn_hidden_size=512,
        add_bias_linear=False,
        tensor_model_parallel_size=2,
        sequence_parallel=True,
        expert_tensor_parallel_size=1,
    )
    config, whole = plan(2, **flags)
    sharded, same = plan(2, use_distributed_optimizer=True, **flags)
    experts = 24 * 4 * 2 * 512 * 1024
    before = bytes_per_rank(config, whole)
    after = bytes_per_rank(sharded, same)
    assert before["optimizer moments"] - after["optimizer moments"] == 8 * experts / 2
    assert before["main weights"] - after["main weights"] == 4 * experts / 2
    sent = transfers.sent_by_axis(config, whole, 0)["dp"]
    assert sent == 2 * experts  # an all-reduce in fp16
    assert transfers.sent_by_axis(sharded, same, 0)["dp"] == sent
    (row,) = rows(describe(sharded, same), "MB (10^6 bytes) sent per rank and step")
    assert numbers(row[-1:]) == [pytest.approx(sent / 1e6, abs=1e-3)]
