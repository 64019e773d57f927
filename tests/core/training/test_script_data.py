"""Data sets of a script's own are read as ours are: the same numbers, in every layout, after a
resume and around skipped iterations."""

import contextlib
import functools
from pathlib import Path

import numpy as np
import pytest
import torch

from megatron.checkpoint import reading
from megatron.config.data import DataConfig
from megatron.data.megatron_order import build_in_megatron_order
from megatron.data.request import DataRequest
from megatron.data.script_datasets import ScriptData
from megatron.training import ModelType, get_args, get_tokenizer, pretrain
from tests.core.training.script_runs import LAYOUTS, rows_of_run
from tests.problems import raises
from tests.runs import NO_DROPOUT, SMALL, plot, same_tensors, with_flags, write_text

FLAGS = with_flags(
    [*SMALL, *NO_DROPOUT],
    *"--fp64 --train-iters 4 --lr-warmup-iters 1 --eval-interval 2 --eod-mask-loss".split(),
)


class Windows(torch.utils.data.Dataset):
    """The samples of a .bin/.idx pair, as Megatron's own data set gives them."""

    def __init__(self, dataset, form: str):
        self.dataset = dataset
        self.form = form

    def __len__(self):
        return len(self.dataset)

    def __getitem__(self, index):
        ids = torch.from_numpy(self.dataset[index])
        if self.form == "text":
            return {"text": ids.numpy()}
        tokens, labels = ids[:-1], ids[1:].clone()
        mask = (tokens != get_tokenizer().eod).float()
        labels[mask == 0] = -100
        sample = {"tokens": tokens, "labels": labels, "loss_mask": mask}
        if self.form in ("all", "documents"):
            size = len(tokens)
            hidden, positions = ~torch.ones(1, size, size).tril().bool(), torch.arange(size)
            for start in (mask == 0).nonzero().flatten() + 1 if self.form == "documents" else ():
                hidden[0, start:, :start] = True
                positions[start:] -= positions[start:][:1].clone()
            sample |= {"attention_mask": hidden, "position_ids": positions}
        return sample


def provider(form, sizes, vp_stage):
    args, tokenizer = get_args(), get_tokenizer()
    data = DataConfig(data_path=args.data_path, split=args.split)
    request = DataRequest(
        sizes=sizes, sequence_length=args.seq_length, vocab_size=211, eod=tokenizer.eod
    )  # fmt: skip
    return [Windows(dataset, form) for dataset in build_in_megatron_order(data, request, [])]


def _rank(rank: int, world: int, folder: Path, form: str | None, argv: list[str]) -> None:
    with open(folder / f"log.{rank}", "a") as log, contextlib.redirect_stdout(log):
        own = functools.partial(provider, form) if form else None
        pretrain(own, None, ModelType.encoder_or_decoder, plot().forward_step, argv=argv)


def run(folder: Path, form: str | None, *flags: str, world: int = 1) -> list[dict]:
    """All rows of the metrics file, without what differs from run to run."""
    files = ("--save", str(folder / "save"), "--load", str(folder / "save"))
    rows = rows_of_run(_rank, folder, form, FLAGS, *files, *flags, world=world)
    kept = ("iteration", "split", "lm_loss", "grad_norm", "consumed_samples")
    return [{key: row.get(key) for key in kept} for row in rows]


def tensors(folder: Path) -> dict[str, torch.Tensor]:
    with reading.load(folder / "save").reader() as reader:
        return {name: reader.read(name) for name in reader.names()}


def words_of(folder: Path) -> list[str]:
    return ["--data-path", write_text(folder / "text", 300), "--split", "80,10,10"]


@pytest.mark.parametrize(
    "layout",
    ["one", *(pytest.param(x, marks=pytest.mark.campaign) for x in list(LAYOUTS)[1:])],
)
def test_the_same_samples_give_the_same_numbers(tmp_path, layout):
    world, flags = LAYOUTS[layout]
    words = [*words_of(tmp_path), *flags]
    wanted = run(tmp_path / "ours", None, *words, world=world)
    assert [row["split"] for row in wanted].count("validation") == 2
    for form in ["all"] if layout != "one" else ["text", "all"]:
        assert run(tmp_path / form, form, *words, world=world) == wanted
        same_tensors(tensors(tmp_path / "ours"), tensors(tmp_path / form))


def test_documents_of_a_sample_are_the_script_s(tmp_path):
    words = [*words_of(tmp_path), "--reset-attention-mask"]
    wanted = run(tmp_path / "ours", None, *words, "--reset-position-ids")
    assert run(tmp_path / "own", "documents", *words) == wanted


def test_a_resume_reads_on_and_skips_skip(tmp_path):
    words = [*words_of(tmp_path), "--train-range-to-skip", "2", "2"]
    wanted = run(tmp_path / "ours", None, *words)
    run(tmp_path / "own", "all", *words, "--exit-interval", "3")
    assert run(tmp_path / "own", "all", *words) == wanted
    same_tensors(tensors(tmp_path / "ours"), tensors(tmp_path / "own"))


def test_a_resume_with_other_samples_is_refused(tmp_path):
    items = [{"text": np.arange(start, start + 5)} for start in range(9)]
    now = built(items).order()
    assert now == built(items[:7]).order()
    assert now != built(items[1:]).order() and now != built(tuple(items)).order()


def built(train, *, reset=False, sizes=(4, 0, 0), cyclic=False):
    """The training set that a script's items make."""
    source = ScriptData(lambda sizes: (train, None, None))
    data = DataConfig(
        reset_attention_mask=reset, dataloader_type="cyclic" if cyclic else "single"
    )  # fmt: skip
    request = DataRequest(sizes=sizes, sequence_length=4, vocab_size=50, eod=9)
    return source.build(data, request, [])[0]


def sample(**others):
    ids = torch.tensor([3, 9, 5, 6])
    return {"tokens": ids, "labels": ids + 1, "loss_mask": torch.ones(4)} | others


def test_a_sample_becomes_five_lines():
    mask = torch.tensor([1.0, 0.0, 0.25, 1.0])
    labels = torch.tensor([9, -100, 6, 0])
    given = sample(loss_mask=mask, labels=labels, position_ids=torch.tensor([0, 1, 0, 1]))
    row = built([given] * 4)[3]
    assert row[:4].tolist() == [[3, 9, 5, 6], [9, 0, 6, 0], [0, 1, 0, 1], [0] * 4]
    assert row[4].astype(np.int32).view(np.float32).tolist() == mask.tolist()
    assert built([given] * 2, cyclic=True)[1].tolist() == row.tolist()


def test_an_attention_mask_must_be_the_model_s():
    causal = ~torch.ones(4, 4).tril().bool()
    inside = causal.clone()
    inside[2:, :2] = True
    built([sample(attention_mask=causal[None])] * 4)[0]
    built([sample(attention_mask=inside)] * 4, reset=True)[0]
    for mask, reset in ((inside, False), (causal, True), (~causal, False)):
        with raises(ValueError, "attention-mask-given"):
            built([sample(attention_mask=mask[None])] * 4, reset=reset).order()


WRONG = {
    "no dictionary": torch.ones(4),
    "no loss_mask": {"tokens": torch.ones(4).int(), "labels": torch.ones(4).int()},
    "short": {"text": torch.arange(4)},
    "floats": {"text": torch.ones(5)},
    "bfloat16": sample(loss_mask=torch.ones(4).bfloat16()),
    "two dimensions": sample(tokens=torch.ones(1, 4).int()),
    "beyond the vocabulary": {"text": np.arange(46, 51)},
    "a negative id": sample(tokens=torch.tensor([1, -1, 2, 3])),
    "a label that counts": sample(labels=torch.tensor([1, -100, 2, 3])),
    "positions": sample(position_ids=torch.arange(1, 5)),
}


@pytest.mark.parametrize("wrong", WRONG)
def test_a_wrong_sample_is_named(wrong):
    with raises(ValueError, "datasets-provider-result", "train sample 0 of list"):
        built([WRONG[wrong]] * 4)[0]


def test_wrong_data_sets_are_named():
    for train in (iter([sample()]), None):
        with raises(ValueError, "datasets-provider-result", "train"):
            built(train)
    assert built(None, sizes=(0, 0, 0)) is None
    with raises(ValueError, "datasets-provider-result"):
        ScriptData(lambda sizes: [sample()]).build(DataConfig(), DataRequest(
            sizes=(4, 0, 0), sequence_length=4), [])  # fmt: skip
    for items in ([], [sample()] * 3):
        with raises(ValueError, "data-exhausted", "train", str(len(items))):
            built(items)


def test_data_of_the_suite_beside_a_provider_are_refused(capfd):
    with pytest.raises(SystemExit) as leave:
        pretrain(
            *(functools.partial(provider, "text"), None, ModelType.encoder_or_decoder),
            plot().forward_step,
            argv=[*FLAGS, "--data-order", "epoch"],
        )
    said = capfd.readouterr().err
    assert leave.value.code == 2 and said.count("\n") == 1
    assert "--data-order" in said and said.rstrip().endswith("[two-data-sources]")


def test_mock_data_beside_a_provider_are_refused():
    with raises(ValueError, "two-data-sources"):
        source = ScriptData(lambda sizes: ([sample()] * 4, None, None))
        request = DataRequest(sizes=(4, 0, 0), sequence_length=4, vocab_size=50, eod=9)
        source.build(DataConfig(mock_data=True), request, [])


def test_a_dry_run_needs_no_data(capsys):
    argv = [*FLAGS, "--dry-run", "--data-path", "nowhere", "--split", "9,1,0"]
    pretrain(
        *(functools.partial(provider, "text"), None, ModelType.encoder_or_decoder),
        plot().forward_step,
        argv=argv,
    )
    said = capsys.readouterr()
    assert "train_valid_test_datasets_provider" in said.out and "nowhere" not in said.err
