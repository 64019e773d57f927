#!/usr/bin/env python
"""Draw a mixture of experts next to a dense model: losses, the load of experts while training, and
after it.

  draw.py DENSE MOE --data PREFIX --output FILE

DENSE and MOE are run directories with metrics.jsonl and checkpoints, PREFIX the token ids
(--data-path), of which the last ones are the validation text. Needs matplotlib.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from pathlib import Path

sys.path.insert(0, os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__)))))

import torch
from matplotlib.figure import Figure

from megatron.data.indexed_dataset import IndexedDataset
from megatron.inference.load_model import open_trained_model
from megatron.model.blocks.moe.module import count

COLORS = {"dense": "#555555", "experts": "#d95f02"}
BATCH = 8


def read_rows(run: Path) -> tuple[list[dict], list[dict]]:
    """(iterations, evaluations) of a metrics file."""
    rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    evaluations = [row for row in rows if row.get("split") == "validation"]
    return [row for row in rows if "split" not in row], evaluations


def smooth(values: list[float], window: int) -> list[float]:
    """Means over the last `window` values."""
    return [
        sum(values[max(0, i + 1 - window) : i + 1]) / min(i + 1, window) for i in range(len(values))
    ]


def shares_of_experts(run: Path, prefix: str, samples: int = 64) -> torch.Tensor:
    """Share of the selections that each expert has on the last tokens, [MoE layers, experts]."""
    trained = open_trained_model(str(run / "checkpoints"), device="cpu")
    model = trained.config.model
    tokens = torch.cat([torch.from_numpy(one.astype("int64")) for one in _last(prefix, samples)])
    length = model.seq_length
    batches = tokens[: len(tokens) // length * length].view(-1, length)[-samples:].split(BATCH)
    counts = torch.zeros(len(model.moe_layers), model.num_experts, dtype=torch.float64)
    for row, layer in enumerate(model.moe_layers):

        def add(module, inputs, output, row=row):
            counts[row] += count(output[1], model.num_experts)

        trained.model.decoder.layers[str(layer)].mlp.router.register_forward_hook(add)
    with torch.no_grad():
        for batch in batches:
            trained.model(batch)
    return counts / counts.sum(1, keepdim=True)


def _last(prefix: str, documents: int) -> list:
    dataset = IndexedDataset(prefix)
    return [dataset[i] for i in range(max(0, len(dataset) - documents), len(dataset))]


def draw(dense: Path, moe: Path, shares: torch.Tensor, path: str, window: int) -> None:
    """Three panels: losses, the largest load of each layer over the iterations, all loads at the
    end."""
    figure = Figure(figsize=(11, 8), layout="constrained")
    grid = figure.add_gridspec(2, 2, height_ratios=(1.3, 1))
    loss = figure.add_subplot(grid[0, :])
    load = figure.add_subplot(grid[1, 0])
    last = figure.add_subplot(grid[1, 1])
    for name, run in (("dense", dense), ("experts", moe)):
        rows, evaluations = read_rows(run)
        steps = [row["iteration"] for row in rows]
        losses = smooth([row["lm_loss"] for row in rows], window)
        loss.plot(
            steps, losses, color=COLORS[name], alpha=0.5, linewidth=1, label=f"{name}: training"
        )
        loss.plot(
            [row["iteration"] for row in evaluations],
            [row["lm_loss"] for row in evaluations],
            color=COLORS[name],
            marker="o",
            markersize=4,
            label=f"{name}: validation",
        )
    loss.set(xlabel="iteration", ylabel="loss (nats per token)")
    loss.set_title("Same text, same active parameters")
    loss.legend(frameon=False)
    rows, _ = read_rows(moe)
    prefix = "moe/max_expert_load_layer_"
    for key in sorted(key for key in rows[0] if key.startswith(prefix)):
        values = smooth([row[key] for row in rows], window)
        load.plot([row["iteration"] for row in rows], values, label=f"layer {key[len(prefix) :]}")
    load.axhline(1, color="black", linewidth=0.8, linestyle=":")
    load.set(xlabel="iteration", ylabel="largest load / equal share")
    load.set_title("Most tokens of an expert, in training")
    load.legend(frameon=False, ncols=2)
    relative = shares * shares.shape[1]
    image = last.imshow(relative, vmin=0, vmax=2, cmap="RdBu_r", aspect="auto")
    for row, values in enumerate(relative.tolist()):
        for column, value in enumerate(values):
            last.text(column, row, f"{value:.2f}", ha="center", va="center", fontsize=8)
    last.set(xlabel="expert", ylabel="MoE layer", yticks=range(len(relative)))
    last.set_title("Load / equal share, validation text")
    figure.colorbar(image, ax=last)
    for axes in (loss, load):
        axes.grid(alpha=0.25)
        axes.spines[["top", "right"]].set_visible(False)
    figure.savefig(path, dpi=120)


def main() -> None:
    """Draw, and print the last validation losses and the largest load."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("dense", type=Path, help="run directory of the dense model")
    parser.add_argument("moe", type=Path, help="run directory of the mixture of experts")
    parser.add_argument("--data", required=True, metavar="PREFIX", help="token ids (--data-path)")
    parser.add_argument("--output", required=True, metavar="FILE", help=".png, .svg or .pdf")
    parser.add_argument("--smooth", type=int, default=20, help="iterations to average over")
    options = parser.parse_args()
    shares = shares_of_experts(options.moe, options.data)
    draw(options.dense, options.moe, shares, options.output, options.smooth)
    losses = [read_rows(run)[1][-1]["lm_loss"] for run in (options.dense, options.moe)]
    print(f"validation loss: dense {losses[0]:.4f}, experts {losses[1]:.4f}")
    print(f"largest load / equal share: {float(shares.max()) * shares.shape[1]:.2f}")


if __name__ == "__main__":
    main()
