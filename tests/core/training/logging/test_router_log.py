"""The numbers of routers in the log: of all MoE layers, and of each with --moe-per-layer-logging."""

import math

import pytest

from tests.core.parity.layouts import MOE, argv
from tests.runs import train, with_flags, write_text

CAPACITY = ("--moe-expert-capacity-factor", "0.5")
NAMES = ("load_balancing_loss", "z_loss", "max_expert_load", "dropped_share")


def test_each_moe_layer_has_its_numbers_in_the_metrics_file_and_not_in_the_line(tmp_path):
    model = (*with_flags(MOE, "--moe-layer-freq", "1"), *CAPACITY)
    run = train(tmp_path / "run", argv(write_text(tmp_path / "text", 100), model, 5, "--fp64"))
    for row in run.rows:
        for name in NAMES:
            layers = [row[f"moe/{name}_layer_{layer}"] for layer in range(2)]
            whole = max(layers) if name == "max_expert_load" else sum(layers) / 2
            assert row[name] == pytest.approx(whole, rel=1e-12), name
            assert name != "z_loss" or layers[0] != layers[1]
        entropies = [row[f"moe/router_entropy_layer_{layer}"] for layer in range(2)]
        assert all(0.8 * math.log(6) < value <= math.log(6) for value in entropies)
        assert 0.4 < row["dropped_share"] < 1
    assert all("z_loss" in line for line in run.lines) and "moe/" not in run.log
