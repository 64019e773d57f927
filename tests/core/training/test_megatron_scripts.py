"""Pretraining scripts in the form of Megatron's of 2024 and 2026, of whose lines the imports alone
are ours, train as pretrain_gpt.py does."""

from __future__ import annotations

import contextlib
import json
import runpy
import sys
from pathlib import Path

import pytest
import torch

from megatron.parallel.context import ParallelContext
from megatron.training import mpu, script_args, script_names
from tests.core.parity.layouts import DISTRIBUTED, PP, TP
from tests.core.training.built_runs import RUNTIME, config_of
from tests.forkrun import RanksFailed, run_ranks
from tests.problems import raises
from tests.runs import NO_DROPOUT, SMALL, plot, with_flags, write_text

FLAGS = with_flags(
    [*SMALL, *NO_DROPOUT],
    *"--fp64 --train-iters 3 --lr-warmup-iters 1 --eval-interval 2".split(),
)

OF_2024 = """
from functools import partial
import torch
from megatron.training import (
    BlendedMegatronDatasetBuilder,
    GPTDataset,
    GPTDatasetConfig,
    GPTModel,
    MockGPTDataset,
    ModelType,
    average_losses_across_data_parallel_group,
    core_transformer_config_from_args,
    get_args,
    get_batch_on_this_cp_rank,
    get_batch_on_this_tp_rank,
    get_gpt_layer_with_transformer_engine_spec,
    get_timers,
    mpu,
    pretrain,
    print_rank_0,
)

def model_provider(pre_process=True, post_process=True):
    args = get_args()
    print_rank_0("the model is made now")
    spec = get_gpt_layer_with_transformer_engine_spec(args.num_experts, args.moe_grouped_gemm)
    return GPTModel(
        config=core_transformer_config_from_args(args),
        transformer_layer_spec=spec,
        vocab_size=args.padded_vocab_size,
        max_sequence_length=args.max_position_embeddings,
        pre_process=pre_process,
        post_process=post_process,
        fp16_lm_cross_entropy=args.fp16_lm_cross_entropy,
        parallel_output=True,
        share_embeddings_and_output_weights=not args.untie_embeddings_and_output_weights,
        position_embedding_type=args.position_embedding_type,
        rotary_percent=args.rotary_percent,
    )

def batch_of(iterator):
    if not (mpu.is_pipeline_first_stage() or mpu.is_pipeline_last_stage()):
        return 5 * (None,)
    return get_batch_on_this_cp_rank(get_batch_on_this_tp_rank(iterator)).values()

def loss_func(mask, output):
    mask = mask.view(-1)
    loss = (output.float().view(-1) * mask).sum() / mask.sum()
    if get_args().check_for_nan_in_loss_and_grad:
        assert not loss.isnan(), mpu.get_data_parallel_rank()
    mean = average_losses_across_data_parallel_group([loss])
    return loss * get_args().context_parallel_size, {"lm loss": mean[0]}

def forward_step(data_iterator, model):
    timers = get_timers()
    timers("batch-generator", log_level=2).start()
    tokens, labels, mask, attention_mask, position_ids = batch_of(data_iterator)
    timers("batch-generator").stop()
    output = model(tokens, position_ids, attention_mask, labels=labels)
    return output, partial(loss_func, mask)

def is_built_here():
    return mpu.get_tensor_model_parallel_rank() == 0

def datasets_provider(sizes):
    args = get_args()
    config = GPTDatasetConfig(
        is_built_on_rank=is_built_here,
        random_seed=args.seed,
        sequence_length=args.seq_length,
        blend=args.data_path,
        split=args.split,
        mock=args.mock_data,
        reset_position_ids=args.reset_position_ids,
    )
    kind = MockGPTDataset if config.mock else GPTDataset
    train, valid, test = BlendedMegatronDatasetBuilder(kind, sizes, config).build()
    return train, valid, test

datasets_provider.is_distributed = True

if __name__ == "__main__":
    pretrain(
        datasets_provider,
        model_provider,
        ModelType.encoder_or_decoder,
        forward_step,
        args_defaults={"tokenizer_type": "NullTokenizer"},
    )
"""

OF_2026 = """
from functools import partial
import torch
from megatron.training import (
    GPTModel,
    ModelType,
    StragglerDetector,
    core_transformer_config_from_args,
    get_args,
    get_gpt_layer_local_spec,
    get_ltor_masks_and_position_ids,
    get_timers,
    get_tokenizer,
    pretrain,
    tensor_parallel,
)

watch = StragglerDetector()

def builder(args, pre_process, post_process, vp_stage=None, config=None, pg_collection=None):
    if config is None:
        config = core_transformer_config_from_args(args)
    return GPTModel(
        config=config,
        transformer_layer_spec=get_gpt_layer_local_spec(
            args.num_experts, args.moe_grouped_gemm, args.qk_layernorm
        ),
        vocab_size=args.padded_vocab_size,
        max_sequence_length=args.max_position_embeddings,
        pre_process=pre_process,
        post_process=post_process,
        share_embeddings_and_output_weights=not args.untie_embeddings_and_output_weights,
        rotary_base=args.rotary_base,
        mtp_block_spec=None,
        vp_stage=vp_stage,
        pg_collection=pg_collection,
    )

def model_provider(
    build, pre_process=True, post_process=True, vp_stage=None, config=None, pg_collection=None
):
    return build(get_args(), pre_process, post_process, vp_stage, config, pg_collection)

def loss_func(mask, output, model=None):
    mask = mask.view(-1).float()
    loss = (output.view(-1).float() * mask).sum()
    tokens = mask.sum().detach().to(torch.int)
    return loss, tokens, {"lm loss": torch.cat([loss.detach().view(1), tokens.view(1)])}

def forward_step(data_iterator, model, return_schedule_plan=False):
    args = get_args()
    get_timers()("batch-generator", log_level=2).start()
    with watch(bdata=True):
        text = tensor_parallel.broadcast_data(["text"], next(data_iterator), torch.int64)["text"]
        tokens, labels = text[:, :-1].contiguous(), text[:, 1:].contiguous()
        attention_mask, mask, position_ids = get_ltor_masks_and_position_ids(
            tokens,
            get_tokenizer().eod,
            args.reset_position_ids,
            args.reset_attention_mask,
            args.eod_mask_loss,
        )
    get_timers()("batch-generator").stop()
    with watch:
        output = model(tokens, position_ids, attention_mask, labels=labels, loss_mask=mask)
    return output, partial(loss_func, mask, model=model)

if __name__ == "__main__":
    pretrain(
        None,
        partial(model_provider, builder),
        ModelType.encoder_or_decoder,
        forward_step,
        store=None,
    )
"""


def _rank(rank: int, world: int, folder: Path, script: str | None, argv: list[str]) -> None:
    with open(folder / f"log.{rank}", "a") as log, contextlib.redirect_stdout(log):
        if script is None:
            plot().main(argv)
            return
        sys.argv = [script, *argv]
        runpy.run_path(script, run_name="__main__")


def run(folder: Path, script: str | None, *flags: str, world: int = 1) -> list[dict]:
    folder.mkdir()
    if script is not None:
        (folder / "script.py").write_text(script)
        script = str(folder / "script.py")
    argv = with_flags(FLAGS, "--metrics-file", str(folder / "m"), *flags)
    run_ranks(world, _rank, folder, script, argv, seconds=100.0)
    return [json.loads(row) for row in (folder / "m").read_text().splitlines()]


def numbers(rows: list[dict]) -> list[tuple]:
    return [(row["iteration"], row["lm_loss"], row.get("grad_norm") or 0.0) for row in rows]


LAYOUTS = {
    "one": (1, []),
    "data": (2, DISTRIBUTED),
    "tensor": (2, [TP, "2"]),
    "pipeline": (2, [PP, "2"]),
}


@pytest.mark.parametrize("script", [OF_2024, OF_2026], ids=["2024", "2026"])
@pytest.mark.parametrize(
    "layout",
    ["one", "data", *(pytest.param(x, marks=pytest.mark.campaign) for x in list(LAYOUTS)[2:])],
)
def test_a_script_of_megatron_trains_as_ours(tmp_path, script, layout):
    world, flags = LAYOUTS[layout]
    words = ["--data-path", write_text(tmp_path / "text", 300), "--split", "80,10,10", *flags]
    if script is OF_2026:  # the other's loss is the mean of each micro-batch
        words.append("--eod-mask-loss")
    wanted = numbers(run(tmp_path / "ours", None, *words, world=world))
    rows = numbers(run(tmp_path / "own", script, *words, world=world))
    assert len(rows) == len(wanted)
    for row, other in zip(rows, wanted, strict=True):
        assert row == pytest.approx(other, rel=1e-6)  # their losses are .float()


@pytest.mark.parametrize("flags, code", [(["--mock-data"], None), ([], "data-missing")])
def test_data_of_the_flags_from_megatron_s_provider(tmp_path, flags, code):
    if code:
        with pytest.raises(RanksFailed, match=rf"\[{code}\]"):
            run(tmp_path / "own", OF_2024, *flags)
        return
    wanted = numbers(run(tmp_path / "ours", None, *flags))
    assert numbers(run(tmp_path / "own", OF_2024, *flags)) == [
        pytest.approx(row, rel=1e-6) for row in wanted
    ]


def test_the_ranks_of_a_run(monkeypatch):
    monkeypatch.setitem(script_args._run, "context", RUNTIME.ctx)
    assert mpu.get_tensor_model_parallel_rank() == mpu.get_data_parallel_rank() == 0
    assert mpu.get_data_parallel_world_size(with_context_parallel=True) == 1
    with pytest.raises(AttributeError, match="get_data_parallel_group"):
        mpu.get_data_parallel_group()


def mean_of_ranks(rank: int, world: int) -> list[float]:
    script_args._run["context"] = ParallelContext(config_of().parallel, world, rank)
    losses = [torch.tensor(float(rank), requires_grad=True), torch.tensor([5.0])]
    return script_names.average_losses_across_data_parallel_group(losses).tolist()


def test_losses_are_averaged_over_data_parallel_ranks():
    assert run_ranks(2, mean_of_ranks) == [[0.5, 5.0]] * 2


def test_a_text_of_other_labels_is_refused():
    data = {"tokens": torch.tensor([[1, 2]]), "labels": torch.tensor([[9, 3]])}
    with raises(ValueError, "no-such-argument"):
        script_names.tensor_parallel.broadcast_data(["text"], data, torch.int64)
