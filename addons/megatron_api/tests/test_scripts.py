"""Pretraining scripts in the form of Megatron's of 2024 and 2026, of whose lines the imports alone
are ours, train as pretrain_gpt.py does."""

from __future__ import annotations

import contextlib
import functools
import os
import runpy
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from megatron.addons.megatron_api import script_names
from megatron.parallel.context import ParallelContext
from megatron.training import mpu, script_args
from tests import warm
from tests.core.parity.layouts import CP, LAYOUT
from tests.core.training.built_runs import RUNTIME, config_of
from tests.core.training.script_runs import LAYOUTS, rows_of_run, steps_of
from tests.forkrun import ROOT, RanksFailed, run_ranks
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
    spec = get_gpt_layer_with_transformer_engine_spec(args.num_experts, False)
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
            args.num_experts, False, args.qk_layernorm
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


OF_AUGUST_2026 = """
import time

began = time.time()
from functools import partial
import torch
from megatron.training import (
    BlendedMegatronDatasetBuilder,
    GPTDataset,
    GPTDatasetConfig,
    GPTFIMDataset,
    GPTFIMDatasetConfig,
    MockGPTDataset,
    ModelType,
    PackedSeqParams,
    SFTDataset,
    StragglerDetector,
    build_tokenizer,
    core_transformer_config_from_args,
    flatten_batch_for_packed_sequences,
    get_args,
    get_attr_wrapped_model,
    get_batch_on_this_cp_rank,
    get_batch_on_this_tp_rank,
    get_blend_and_blend_per_split,
    get_context_parallel_group,
    get_hybrid_data_context_parallel_groups,
    get_mtp_ranks,
    get_rerun_state_machine,
    get_te_version,
    get_timers,
    get_torch_version,
    gpt_config_from_args,
    inprocess_restart,
    is_first_or_last_pipeline_stage,
    mpu,
    mtp_on_this_rank,
    parse_and_validate_args,
    pretrain,
    pretrain_cfg_container_from_args,
    print_rank_0,
    set_startup_timestamps,
    update_seqlen_stats_from_cu_seqlens,
)

watch = StragglerDetector()
FIELDS = ("tokens", "labels", "loss_mask", "position_ids", "attention_mask")
PACKED = ("cu_seqlens", "max_seqlen", "local_cp_size", "hybrid_cp_group")

def predicts_more(stage):
    config = core_transformer_config_from_args(get_args())
    return mtp_on_this_rank(
        layout=config.pipeline_model_parallel_layout,
        mtp_num_layers=config.mtp_num_layers,
        ignore_virtual=False,
        vp_stage=stage,
    )

def load_batch(iterator, stage):
    args = get_args()
    packed = args.sft or args.dataloader_inter_document_masking
    if not (is_first_or_last_pipeline_stage(stage) or predicts_more(stage) or packed):
        return dict.fromkeys(FIELDS + PACKED)
    batch = {}
    if mpu.get_tensor_model_parallel_rank() == 0:
        data = next(iterator)
        batch = {name: data.get(name) for name in FIELDS + PACKED}
        if args.odd:
            batch["loss_mask"] = batch["loss_mask"] * (batch["tokens"] % 2)
    batch = get_batch_on_this_tp_rank(
        batch,
        broadcast_src_rank=mpu.get_tensor_model_parallel_src_rank(),
        broadcast_group=mpu.get_tensor_model_parallel_group(),
        tp_rank=mpu.get_tensor_model_parallel_rank(),
        is_hybrid_cp=args.hybrid_context_parallel,
        create_attention_mask_in_dataloader=args.create_attention_mask_in_dataloader,
        is_pipeline_first_stage=mpu.is_pipeline_first_stage(),
    )
    return get_batch_on_this_cp_rank(
        flatten_batch_for_packed_sequences(batch),
        cp_group=get_context_parallel_group(),
        hybrid_cp_group_func=get_hybrid_data_context_parallel_groups,
    )

def loss_func(mask, output, model=None):
    args = get_args()
    assert args.logits_load_dir is None
    weights = mask.view(-1).float()
    loss = (output.view(-1).float() * weights).sum()
    tokens = weights.sum().detach().clone()
    checks = get_rerun_state_machine()
    if args.check_for_nan_in_loss_and_grad:
        for wrong in (torch.isnan, torch.isinf):
            checks.validate_result(
                result=loss, rejection_func=wrong, message="loss", tolerance=0.0, fatal=True
            )
    large = partial(checks.is_unexpectedly_large, threshold=10, context="loss")
    checks.validate_result(result=loss, rejection_func=large, message="spike", fatal=False)
    both = torch.stack((loss.detach(), tokens))
    if args.summed:
        torch.distributed.all_reduce(both, group=mpu.get_data_parallel_group())
    return loss, tokens, {"lm loss": both}

def forward_step(data_iterator, model, return_schedule_plan=False):
    get_timers()("batch-generator", log_level=2).start()
    with watch(bdata=True):
        batch = load_batch(data_iterator, get_attr_wrapped_model(model, "vp_stage"))
    packing = None
    if batch["cu_seqlens"] is not None:
        update_seqlen_stats_from_cu_seqlens(batch["cu_seqlens"])
        packing = PackedSeqParams(qkv_format="thd", cu_seqlens_q=batch["cu_seqlens"])
    get_timers()("batch-generator").stop()
    with watch:
        output = model(
            batch["tokens"],
            batch["position_ids"],
            batch["attention_mask"],
            labels=batch["labels"],
            loss_mask=batch["loss_mask"],
            packed_seq_params=packing,
        )
    return output, partial(loss_func, batch["loss_mask"], model=model)

def is_read_here(stage=None):
    is_end = is_first_or_last_pipeline_stage(stage) or predicts_more(stage)
    return mpu.get_tensor_model_parallel_rank() == 0 and is_end

def datasets_provider(sizes, vp_stage=None):
    args = get_args()
    blend, per_split = get_blend_and_blend_per_split(args)
    facts = dict(
        random_seed=args.seed,
        sequence_length=args.seq_length,
        blend=blend,
        blend_per_split=per_split,
        split=args.split,
        path_to_cache=args.data_cache_path,
        tokenizer=build_tokenizer(args),
        reset_attention_mask=args.reset_attention_mask,
        eod_mask_loss=args.eod_mask_loss,
        data_parallel_size=args.data_parallel_size,
        fast_cache_load=args.dataloader_fast_cache_load,
    )
    kind, config = GPTDataset, GPTDatasetConfig
    if args.mock_data:
        kind = MockGPTDataset
    elif args.sft:
        kind = SFTDataset
    elif args.fim_data:
        kind, config = GPTFIMDataset, GPTFIMDatasetConfig
    builder = BlendedMegatronDatasetBuilder(
        kind, sizes, partial(is_read_here, vp_stage), config(**facts)
    )
    return builder.build()

def get_embedding_ranks(ranks):
    args = get_args()
    return sorted({ranks[0], ranks[-1], *get_mtp_ranks(ranks, args)})

def add_args(parser):
    parser.add_argument("--odd", action="store_true")
    parser.add_argument("--summed", action="store_true")
    return parser

if __name__ == "__main__":
    print_rank_0(f"torch {get_torch_version()}, engine {get_te_version()}")
    set_startup_timestamps(program_start=began, main_entry=time.time())
    datasets_provider.is_distributed = True
    pretrain, store = inprocess_restart.maybe_wrap_for_inprocess_restart(pretrain)
    args = parse_and_validate_args(
        extra_args_provider=add_args, args_defaults={"tokenizer_type": "NullTokenizer"}
    )
    args.note = "kept"
    full = pretrain_cfg_container_from_args(args, gpt_config_from_args(args))
    pretrain(
        full,
        datasets_provider,
        ModelType.encoder_or_decoder,
        forward_step,
        store=store,
        get_embedding_ranks=get_embedding_ranks,
    )
    assert args is get_args() and args.padded_vocab_size and args.note == "kept"
"""


def start(script: Path, *argv: str) -> subprocess.CompletedProcess:
    environ = {**os.environ, "PYTHONPATH": str(ROOT)}
    python = warm.elsewhere("torch._dynamo", "torch.distributed.run")
    command = [python, str(script), *argv]
    return subprocess.run(command, capture_output=True, text=True, env=environ)


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
    own = [flag for flag in FLAGS if flag != "--fp64" or "--bf16" not in flags]
    return rows_of_run(_rank, folder, script, own, *flags, world=world)


SCRIPTS = {"2024": OF_2024, "2026": OF_2026, "august 2026": OF_AUGUST_2026}


@pytest.mark.parametrize("script", SCRIPTS.values(), ids=SCRIPTS)
@pytest.mark.parametrize(
    "layout",
    [
        "one",
        *(pytest.param(x, marks=pytest.mark.campaign) for x in ("data", "tensor", "pipeline")),
    ],
)
def test_a_script_of_megatron_trains_as_ours(tmp_path, script, layout):
    world, flags = LAYOUTS[layout]
    words = ["--data-path", write_text(tmp_path / "text", 300), "--split", "80,10,10", *flags]
    if script is not OF_2024:  # its loss is the mean of each micro-batch
        words.append("--eod-mask-loss")
    wanted = steps_of(run(tmp_path / "ours", None, *words, world=world))
    rows = steps_of(run(tmp_path / "own", script, *words, world=world))
    assert len(rows) == len(wanted)
    for row, other in zip(rows, wanted, strict=True):
        assert row == pytest.approx(other, rel=1e-6)  # their losses are .float()


SAYS_WHERE = OF_AUGUST_2026.replace(
    "    packing = None",
    """    stage = get_attr_wrapped_model(model, "vp_stage")
    print("predicts", predicts_more(stage), mtp_on_this_rank(), flush=True)
    packing = None""",
)


@pytest.mark.parametrize(
    "flags, said",
    [
        ([], ["True True"]),
        (["--pipeline-model-parallel-size", "2"], ["False False", "True True"]),
        (
            [*("--pipeline-model-parallel-size", "3"), *(LAYOUT, "Ett|m|L")],
            ["False False", "True True", "False False"],
        ),
    ],
    ids=["one", "pipeline", "a stage of its own"],
)
@pytest.mark.campaign
def test_a_script_of_megatron_trains_heads_for_later_tokens(tmp_path, flags, said):
    words = "--mock-data --position-embedding-type rope --mtp-num-layers 1".split() + flags
    wanted = run(tmp_path / "ours", None, *words, world=len(said))
    rows = run(tmp_path / "own", SAYS_WHERE, *words, world=len(said))
    for row, other in zip(rows, wanted, strict=True):
        names = ["lm_loss"] if "split" in row else ["lm_loss", "mtp_1 loss", "grad_norm"]
        for name in names:
            assert row[name] == pytest.approx(other[name], rel=1e-6)
    for rank, text in enumerate(said):
        lines = (tmp_path / "own" / f"log.{rank}").read_text().splitlines()
        told = {line.removeprefix("predicts ") for line in lines if line.startswith("predicts ")}
        assert told == {text}


@pytest.mark.parametrize("layout", list(LAYOUTS)[1:])
@pytest.mark.campaign
def test_what_a_script_changes_and_sums_itself(tmp_path, layout):
    """It counts odd tokens alone, and sums its report over data-parallel ranks."""
    world, flags = LAYOUTS[layout]
    words = ["--mock-data", "--odd"]
    wanted = steps_of(run(tmp_path / "one", OF_AUGUST_2026, *words))
    rows = steps_of(run(tmp_path / "own", OF_AUGUST_2026, *words, "--summed", *flags, world=world))
    assert [pytest.approx(row, rel=1e-6) for row in wanted] == rows


@pytest.mark.parametrize("layout", ["data", pytest.param("tensor", marks=pytest.mark.campaign)])
def test_a_script_in_bf16_has_the_numbers_of_ours(tmp_path, layout):
    world, flags = LAYOUTS[layout]
    words = ["--mock-data", "--bf16", *flags]
    wanted = steps_of(run(tmp_path / "ours", None, *words, world=world))
    rows = steps_of(run(tmp_path / "own", OF_AUGUST_2026, *words, world=world))
    assert [pytest.approx(row, rel=1e-6) for row in wanted] == rows  # its report is in fp32


WITH_FACTOR = OF_AUGUST_2026.replace(
    "    return loss, tokens,",
    """    share = torch.stack((loss, tokens))
    torch.distributed.all_reduce(share, group=mpu.get_context_parallel_group())
    loss, tokens = share[0] * args.context_parallel_size, share[1].detach()
    return loss, tokens,""",
)


@pytest.mark.campaign
def test_a_loss_summed_over_context_parallel_ranks_as_in_2025(tmp_path):
    wanted = steps_of(run(tmp_path / "ours", None, "--mock-data", CP, "2", world=2))
    rows = steps_of(run(tmp_path / "own", WITH_FACTOR, "--mock-data", CP, "2", world=2))
    assert [pytest.approx(row, rel=1e-6) for row in wanted] == rows


def test_checks_of_results(monkeypatch, capsys):
    monkeypatch.setitem(script_args._run, "context", RUNTIME.ctx)
    checks = script_names.RerunStateMachine()
    checks.validate_result(torch.tensor(2.0), torch.isnan, "loss")
    with raises(ValueError, "result-rejected"):
        checks.validate_result(torch.tensor(float("nan")), torch.isnan, "loss")
    large = functools.partial(
        checks.is_unexpectedly_large, threshold=10, context="x", num_samples=2
    )
    assert [large(torch.tensor(x)) for x in (1.0, -2.0, 19.9, 20.0, 1.0)] == [
        *(False, False, False, True, False)
    ]
    checks.validate_result(torch.tensor(-30.0), large, "spike", fatal=False)
    assert "-30.0" in capsys.readouterr().out


BLENDS = (None, ["a"], ["0.3", " a", "0.7", "b"], ["a", "b"], ["1", "a", "b"])


@pytest.mark.peers
def test_blends_are_megatron_core_s():
    utils = pytest.importorskip("megatron.core.datasets.utils")
    for blend in BLENDS:
        ours = script_names.get_blend_from_list(blend)
        theirs = utils.get_blend_from_list(blend)
        assert (ours and tuple(map(tuple, filter(None, ours)))) == (
            theirs and tuple(map(tuple, filter(None, theirs)))
        )


def test_another_blend_than_the_flags_is_refused(tmp_path):
    own = OF_AUGUST_2026.replace("blend=blend", 'blend=(["other"], None)')
    with pytest.raises(RanksFailed, match=r"\[model-argument\]"):
        run(tmp_path / "own", own, "--data-path", write_text(tmp_path / "text", 300))


@pytest.mark.parametrize(
    "old, new",
    [
        ("PACKED = (", "SFTDataset()\nPACKED = ("),
        ("from_args(args, gpt", "from_args(args, 'other' or gpt"),
        ("gpt_config_from_args(args)", "gpt_config_from_args(args, model_config_cls=int)"),
    ],
)
def test_what_cannot_be_used(tmp_path, old, new):
    with pytest.raises(RanksFailed, match="no-such-argument"):
        run(tmp_path / "own", OF_AUGUST_2026.replace(old, new), "--mock-data")


def test_a_wrong_command_line_ends_the_program_where_it_is_parsed(tmp_path):
    script = tmp_path / "own.py"
    script.write_text(OF_AUGUST_2026)
    argv = [*with_flags(FLAGS), "--no-such-flag", "--tensor-model-parallel-size", "x"]
    done = start(script, *argv)
    assert done.returncode == 2 and done.stderr.count("error: ") == 2


ABSENT = """
import os
from megatron.training import get_args, GPTModel, load_checkpoint, mpu, train_step
try:
    from megatron.training import BertModel
except ImportError:
    BertModel = None
from megatron.training.utils import get_ltor_masks_and_position_ids
from megatron.training.checkpointing import save_checkpoint
from elsewhere import T5Model
"""


def test_one_error_names_all_that_is_absent(tmp_path):
    with pytest.raises(RanksFailed, match=r"\[names-not-here\]") as caught:
        run(tmp_path / "own", ABSENT)
    lines = str(caught.value).rpartition("[names-not-here]")[2].splitlines()
    assert [line.split()[0] for line in lines if len(line.split()) > 2 or "--" in line] == [
        *("load_checkpoint", "train_step", "save_checkpoint", "elsewhere"),
    ]


def test_an_import_inside_of_try_is_the_script_s_affair(tmp_path):
    script = tmp_path / "own.py"
    script.write_text(
        ABSENT.replace(", load_checkpoint, mpu, train_step", ", mpu, loop").split(
            "from megatron.training.utils"
        )[0]
    )
    assert start(script).stderr == ""


LATER = """
from megatron.training.arguments import core_transformer_config_from_args
from megatron.training import pretrain
from megatron.core import mpu
"""


@pytest.mark.parametrize(
    "first", ["megatron.features.registry", "megatron.inference.load_model", "pretrain_gpt"]
)
def test_a_module_of_this_suite_is_imported_before_megatron_s(tmp_path, first):
    script = tmp_path / "own.py"
    script.write_text(f"import {first}\n{LATER}")
    assert start(script).stderr == ""


def test_this_suite_s_pretrain_gpt_is_edited(tmp_path):
    """It is a script of Megatron then, which the checkout's own is not."""
    for name in ("megatron", "addons"):
        shutil.copytree(ROOT / name, tmp_path / name, ignore=shutil.ignore_patterns("__pycache__"))
    shutil.copy(ROOT / "pyproject.toml", tmp_path)
    script = tmp_path / "pretrain_gpt.py"
    script.write_text(LATER)
    command = [sys.executable, str(script)]
    assert subprocess.run(command, capture_output=True, text=True, cwd=tmp_path).stderr == ""


@pytest.mark.parametrize("flags, code", [(["--mock-data"], None), ([], "data-missing")])
def test_data_of_the_flags_from_megatron_s_provider(tmp_path, flags, code):
    if code:
        with pytest.raises(RanksFailed, match=rf"\[{code}\]"):
            run(tmp_path / "own", OF_2024, *flags)
        return
    wanted = steps_of(run(tmp_path / "ours", None, *flags))
    assert steps_of(run(tmp_path / "own", OF_2024, *flags)) == [
        pytest.approx(row, rel=1e-6) for row in wanted
    ]


def test_the_ranks_of_a_run(monkeypatch):
    monkeypatch.setitem(script_args._run, "context", RUNTIME.ctx)
    assert mpu.get_tensor_model_parallel_rank() == mpu.get_data_parallel_rank() == 0
    assert mpu.get_data_parallel_world_size(with_context_parallel=True) == 1
    with pytest.raises(AttributeError, match="get_embedding_group"):
        mpu.get_embedding_group()


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
