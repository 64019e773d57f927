"""--packed-samples in training: pieces that do not see each other, every layout alike."""

import functools
import itertools
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from megatron.addons.finetuning.loss_mask import mark
from megatron.addons.finetuning.packed_dataset import PackedFile, PackingRule
from megatron.addons.finetuning.tests.packed_files import Listed, build, write_file, write_pair
from megatron.data.sample_lookup import LABELS, POSITIONS, TOKENS
from megatron.kernels.select import kernel_table
from megatron.model import gpt
from megatron.training import step
from megatron.training.batch import (
    BatchRules,
    MicroBatch,
    make_batch,
)
from megatron.training.build import make_tokenizer, plan_run
from megatron.training.build_data import build_data
from megatron.training.logging.subset_metrics import FILLED
from tests.core.model.tiny import tiny_model
from tests.core.parity.layouts import CP, DISTRIBUTED, GATHER, LLAMA, PP, SP, TP
from tests.core.training.built_runs import RUNTIME, config_of
from tests.forkrun import RanksFailed
from tests.runs import NO_DROPOUT, SMALL, allow_workers, plot, same_tensors, train, with_flags

CPU = torch.device("cpu")


def test_each_flag_changes_the_rows(folders):
    """--packed-samples itself: a micro-batch is one row, and attention is that of documents."""
    base = ("--train-data-path", folders[0], "--eval-iters", "0")

    def first(*flags: str) -> np.ndarray:
        config = config_of(*base, *flags)
        config = replace(config, data=replace(config.data, mock_data=False))
        return build_data(config, plan_run(config, 1, 211), RUNTIME, make_tokenizer(config)).train[
            0
        ]

    plain, into_one, padded, long = (
        first("--packed-samples", *more)
        for more in ((), ("--pack-into-one",), ("--pad-samples",), ("--min-sample-length", "20"))
    )
    assert plain.shape == (4, 64) and (plain[POSITIONS, 1:] == 0).any()
    assert into_one[POSITIONS].tolist() == [*range(32), *range(32)] and np.array_equal(
        into_one[TOKENS], plain[TOKENS]
    )
    assert padded[TOKENS, -1] == 0 != plain[TOKENS, -1] and not np.array_equal(long, plain)
    for flags, documents in ((("--packed-samples",), True), ((), False)):
        config = config_of(
            *flags, "--seq-length", "64", "--max-position-embeddings", "64", *NO_DROPOUT
        )
        rows = kernel_table(CPU, torch.float64, config)
        [reason] = [row.reason for row in rows if row.operation == "attention" and row.on]
        assert ("document masks" in reason) == documents


# --- pieces do not see each other


def a_row(mode: str = "pieces", seed: int = 3) -> torch.Tensor:
    """A row of 3 x 16 tokens of samples from 1 to 40 tokens, some ids negative or 0."""
    random = np.random.default_rng(seed)
    samples = [random.integers(-3, 60, random.integers(1, 40)).tolist() for _ in range(9)]
    return torch.from_numpy(PackedFile(Listed(samples), 0, PackingRule(16, 3, mode))[0]).unsqueeze(
        0
    )


def naive_rows(samples: list[list[int]], trained: list[list[bool]], mode: str, s: int, b: int):
    """As docs/data.md says it, token by token: rows of (id, label or None, position, segment)."""
    order = list(range(len(samples)))
    np.random.RandomState(1024).shuffle(order)
    if mode == "padded":
        for first in range(0, len(order) - b + 1, b):
            row = []
            for n in order[first : first + b]:
                for i, token in enumerate(samples[n][:s]):
                    last = i + 1 >= min(s, len(samples[n]))
                    label = None if last or not trained[n][i + 1] else samples[n][i + 1]
                    row.append((token, label, i, (n, 0)))
            padding = range(s * b - len(row))
            yield row + [(0, None, i % s, ("padding", i // s)) for i in padding]
        return
    stream = []
    for n in order:
        for i, token in enumerate(samples[n]):
            last = i + 1 == len(samples[n])
            stream.append((n, token, None if last or not trained[n][i + 1] else samples[n][i + 1]))
    for first in range(0, len(stream) - s * b + 1, s * b):
        row = []
        for at, (n, token, label) in enumerate(stream[first : first + s * b]):
            if mode == "blocks":
                row.append((token, None if at == s * b - 1 else label, at % s, at // s))
                continue
            new = not row or row[-1][3][0] != n or row[-1][2] == s - 1
            row.append((token, label, 0 if new else row[-1][2] + 1, (n, at) if new else row[-1][3]))
        yield row


@pytest.mark.parametrize("mode", ["pieces", "blocks", "padded"])
def test_masks_are_those_of_a_naive_loop(mode, tmp_path):
    """From the files of chat data to what the model gets: ids, labels that count, positions, and
    who attends to whom."""
    random = np.random.default_rng(2)
    samples = [random.integers(0, 5, random.integers(1, 25)).tolist() for _ in range(40)]
    trained = [(random.random(len(sample)) < 0.5).tolist() for sample in samples]
    stored = [
        mark(np.array(i), np.array(t)).tolist() for i, t in zip(samples, trained, strict=True)
    ]
    words = [write_pair(tmp_path / "x", stored)]
    flags = dict(pack_into_one=mode == "blocks", pad_samples=mode == "padded")
    data, *_ = build(words, seq=7, rows=3, batch=3, vocab=5, **flags)
    (file,) = data.files
    naive = list(naive_rows(samples, trained, mode, 7, 3))
    assert len(file) == len(naive) > 5
    for row, expected in enumerate(naive):
        lines = torch.from_numpy(file[row]).unsqueeze(0)
        batch = make_batch(MicroBatch(lines, packed=True), BatchRules(None), CPU)
        ids, labels, positions, segments = zip(*expected, strict=True)
        assert batch.tokens[0].tolist() == list(ids)
        assert batch.position_ids[0].tolist() == list(positions)
        assert batch.loss_mask[0].tolist() == [label is not None for label in labels]
        counted = batch.labels[0][batch.loss_mask[0] > 0].tolist()
        assert counted == [label for label in labels if label is not None]
        seen = batch.document_ids[0][:, None] == batch.document_ids[0]
        assert seen.tolist() == [[one == other for other in segments] for one in segments]


def one_by_one(model, lines: torch.Tensor) -> torch.Tensor:
    """The sum of the losses of a row's pieces, each alone at positions 0, 1, 2 ..., without a mask
    of documents."""
    starts = (lines[0, POSITIONS] == 0).nonzero().flatten().tolist()
    total = torch.zeros((), dtype=torch.float64)
    for first, end in itertools.pairwise([*starts, lines.shape[2]]):
        labels = lines[:, LABELS, first:end]
        total = total + (model(lines[:, TOKENS, first:end], labels=labels) * (labels > 0)).sum()
    return total


def gradients(model, loss: torch.Tensor) -> dict[str, torch.Tensor]:
    model.zero_grad()
    loss.backward()
    return {p.sharding.name: p.grad.clone() for p in model.parameters()}


@pytest.mark.parametrize(
    ("mode", "positions"),
    [
        ("pieces", "rope"),
        ("pieces", "learned_absolute"),
        ("blocks", "rope"),
        ("padded", "learned_absolute"),
    ],
)
def test_a_row_has_the_loss_of_its_pieces_one_by_one(mode, positions):
    model = tiny_model(torch.float64, scramble=True, position_embedding_type=positions)
    lines = a_row(mode)
    batch = make_batch(MicroBatch(lines, packed=True), BatchRules(None), CPU)
    assert batch.tokens.shape == (1, 48) and int((lines[0, POSITIONS] == 0).sum()) > 2
    loss, tokens, _ = plot().forward_step(batch, model)
    assert tokens == (lines[:, LABELS] > 0).sum() < 48
    alone = one_by_one(model, lines)
    assert abs(loss.item() - alone.item()) <= 1e-10 * abs(alone.item())
    together = gradients(model, loss)
    apart = gradients(model, one_by_one(model, lines))
    for name, grad in apart.items():
        assert (together[name] - grad).abs().max() <= 1e-10 * max(1.0, grad.abs().max()), name


def test_another_sample_changes_no_bit():
    for dtype in (torch.float32, torch.float64):
        model = tiny_model(dtype, scramble=True)
        rules = BatchRules(None)
        lines = a_row()
        batch = make_batch(MicroBatch(lines, packed=True), rules, CPU)
        logits = model(batch.tokens, batch.position_ids, document_ids=batch.document_ids)
        pieces = np.cumsum(lines[0, POSITIONS].numpy() == 0)
        assert pieces[-1] > 3
        for piece in range(1, pieces[-1] + 1):
            mine = torch.from_numpy(pieces == piece)
            tokens = torch.where(mine, (batch.tokens + 7) % 61, batch.tokens)
            changed = model(tokens, batch.position_ids, document_ids=batch.document_ids)
            assert torch.equal(changed[0, ~mine], logits[0, ~mine]) and not torch.equal(
                changed[0, mine], logits[0, mine]
            )


# --- whole runs

MARKED = 150  # ids from here on are those of one sample


def argv(folder: str, *extra: str) -> list[str]:
    mine = [
        "--packed-samples",
        "--train-data-path",
        folder,
        "--eval-iters",
        "0",
        "--train-iters",
        "4",
        "--fp64",
    ]
    return with_flags([*SMALL, *NO_DROPOUT, *mine], *LLAMA, *extra)


def write_folder(folder: Path, other: int = 0) -> str:
    """Three subsets; one token of each file's marked sample is moved by `other`."""
    random = np.random.default_rng(4)
    for name in ("en/a", "en/b", "cn/c", "code/d"):
        samples = [random.integers(-2, MARKED, random.integers(1, 70)).tolist() for _ in range(60)]
        marked = random.integers(MARKED, 200, 40).tolist()
        marked[3] += other
        for at in range(0, 60, 5):
            samples.insert(at, marked)
        write_pair(folder / name, samples)
    return str(folder)


@pytest.fixture(scope="module")
def folders(tmp_path_factory) -> tuple[str, str]:
    return write_folder(tmp_path_factory.mktemp("data")), write_folder(
        tmp_path_factory.mktemp("changed"), 1
    )


def note_logits(folder: str) -> None:
    """Every rank writes down, for each micro-batch, its tokens and the logits that go into its
    losses."""
    cross_entropy = gpt.vocab_parallel_cross_entropy
    make = step.make_batch
    batches = []
    count = itertools.count()

    def noted_batch(*args):
        batches.append(make(*args))
        return batches[-1]

    def noted(logits, labels, **more):
        tokens = next(batch.tokens for batch in batches if batch.labels is labels)
        rank = torch.distributed.get_rank() if torch.distributed.is_initialized() else 0
        np.savez(
            f"{folder}/logits.{rank}.{next(count)}.npz",
            logits=logits.detach().numpy(),
            tokens=tokens.numpy(),
        )
        return cross_entropy(logits, labels, **more)

    gpt.vocab_parallel_cross_entropy = noted
    step.make_batch = noted_batch


LAYOUTS = {
    "dp 2": (2, ()),
    "dp 4, distributed optimizer": (4, DISTRIBUTED),
    "tp 2": (2, (TP, "2")),
    "tp 2, sequence parallel": (2, (TP, "2", SP)),
    "cp 2": (2, (CP, "2")),
    "cp 2, all gathered": (2, (CP, "2", *GATHER)),
    "pp 2": (2, (PP, "2")),
    "tp 2, pp 2": (4, (TP, "2", PP, "2", SP)),
}
OFTEN = ("dp 4, distributed optimizer", "tp 2", "cp 2", "tp 2, pp 2")
COUNTS = (*FILLED, "tokens/cn", "tokens/code", "tokens/en")
MODES = {"pieces": {}, "blocks": {"pack_into_one": True}, "padded": {"pad_samples": True}}


@pytest.fixture(scope="module")
def alone(folders, tmp_path_factory):
    return train(tmp_path_factory.mktemp("alone"), argv(folders[0]))


def check_sums(run) -> None:
    """Subsets together are the step: losses weighted by tokens are the loss."""
    for row in run.rows:
        parts = [(row[f"loss/{name}"], row[f"tokens/{name}"]) for name in ("cn", "code", "en")]
        tokens = sum(count for _, count in parts)
        assert 0 < tokens < 8 * 32
        total = sum(loss * count for loss, count in parts if count)
        assert abs(total / tokens - row["lm_loss"]) < 1e-12
        assert all((loss is None) == (count == 0) for loss, count in parts)


def test_a_run_tells_how_its_rows_are_filled(alone):
    check_sums(alone)
    assert len(alone.rows) == 4 and all(row["largest_length"] <= 32 for row in alone.rows)
    assert all(
        row["smallest_batch"] <= row["num_samples_in_batch"] / 4 <= row["largest_batch"]
        for row in alone.rows
    )
    assert {row["tokens/cn"] for row in alone.rows} != {0}


@pytest.mark.campaign
@pytest.mark.parametrize(
    "layout",
    [pytest.param(name, marks=[pytest.mark.sweep] * (name not in OFTEN)) for name in LAYOUTS],
)
def test_every_layout_trains_alike_and_keeps_samples_apart(layout, folders, alone, tmp_path):
    """Numbers as in one process; and with another token in one sample, no other sample's logits
    change by a bit."""
    world, words = LAYOUTS[layout]
    runs = []
    for name, data in zip(("run", "changed"), folders, strict=True):
        (tmp_path / name).mkdir()
        hook = functools.partial(note_logits, str(tmp_path / name))
        short = ("--exit-interval", "1") if name == "changed" else ()
        runs.append(train(tmp_path / name, argv(data, *words, *short), world, hook=hook))
    run = runs[0]
    check_sums(run)
    dp = 4 if "dp 4" in layout else 2 if "dp 2" in layout else 1
    for row, other in zip(run.rows, alone.rows, strict=True):
        for key in ("lm_loss", "grad_norm", "loss/cn", "loss/code", "loss/en"):
            assert row[key] == other[key] or abs(row[key] - other[key]) <= 1e-10 * abs(
                other[key]
            ), (row["iteration"], key)
        # the rows of rank 0 are fewer with more ranks
        for key in COUNTS[4:] if dp > 1 else COUNTS:
            assert row[key] == other[key], (row["iteration"], key)
    files = sorted(path.name for path in (tmp_path / "changed").glob("logits.*"))
    moved = kept = 0
    for name in files:
        before, after = (np.load(tmp_path / which / name) for which in ("run", "changed"))
        marked = before["tokens"][0] >= MARKED
        assert np.array_equal(before["tokens"][0, ~marked], after["tokens"][0, ~marked])
        a = before["logits"][:, 0]
        b = after["logits"][:, 0]
        assert np.array_equal(a[~marked], b[~marked]), name
        kept += int((~marked).sum())
        moved += int((a[marked] != b[marked]).any(1).sum())
    assert files and moved > 20 and kept > 20, (len(files), moved, kept)


@pytest.mark.campaign
def test_each_folder_of_validation_has_a_loss_of_its_own_by_name(folders, tmp_path):
    """As if it were the only one; on two ranks as on one."""
    random = np.random.default_rng(9)
    for name in ("en", "cn/x", "cn/y"):
        samples = [random.integers(1, 200, random.integers(1, 60)).tolist() for _ in range(60)]
        write_file(tmp_path / "valid" / name / "a.bin", samples)
    words = argv(folders[0], "--eval-interval", "2", "--full-validation", "--eval-iters", "1")
    several = [
        *words,
        "--valid-data-path",
        str(tmp_path / "valid"),
        "--multiple-validation-sets",
    ]
    one, two = (train(tmp_path / str(world), several, world) for world in (1, 2))
    sets = [f"validation-{name}" for name in ("cn/x", "cn/y", "en")]
    places = [[name, where] for where in (2, 4) for name in sets]
    assert [place for *place, _ in one.evaluations] == places
    assert [place for *place, _ in two.evaluations] == places
    for name in ("en", "cn/x"):
        alone = train(
            tmp_path / name.replace("/", "-"),
            [*words, "--valid-data-path", str(tmp_path / "valid" / name / "a")],
        )
        assert [loss for *_, loss in alone.evaluations] == pytest.approx(
            [loss for which, _, loss in one.evaluations if which == f"validation-{name}"], rel=1e-6
        )


@pytest.mark.parametrize(
    "mode",
    [
        pytest.param(mode, marks=pytest.mark.sweep if MODES[mode] else pytest.mark.campaign)
        for mode in MODES
    ],
)
def test_a_resumed_run_is_the_run_bit_for_bit(mode, folders, tmp_path):
    """Over the end of an epoch; and other packing is not resumed with."""

    def words(where: Path) -> list[str]:
        save = str(where / "save")
        flags = ["--" + name.replace("_", "-") for name in MODES[mode]]
        return argv(
            folders[0],
            *flags,
            "--save",
            save,
            "--load",
            save,
            "--save-interval",
            "30",
            "--train-iters",
            "60",
        )

    straight = train(tmp_path / "straight", words(tmp_path / "straight"))
    cut = words(tmp_path / "cut")
    train(tmp_path / "cut", [*cut, "--exit-interval", "30"])
    resumed = train(tmp_path / "cut", with_flags(cut, "--num-workers", "2"), hook=allow_workers)
    same_tensors(straight.tensors(), resumed.tensors())
    keys = ("lm_loss", "grad_norm", "consumed_samples", *COUNTS)
    assert straight.series(*keys) == resumed.series(*keys)
    assert build([folders[0]], seq=32, **MODES[mode])[0].rows < 60 * 4, (
        "the run must begin a second epoch"
    )
    with pytest.raises(
        RanksFailed,
        match=r"min_length: 0.* 9 .*--min-sample-length.*\[data-order-differs\]",
    ):
        train(tmp_path / "cut", with_flags(cut, "--min-sample-length", "9"))
