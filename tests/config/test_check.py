"""Every rule of a command line: what is refused with which words, all at once, and what is only said."""

from __future__ import annotations

import pytest

from megatron.arguments import config_from
from megatron.config import check
from megatron.config.tree import Config
from tests.config.checked_flags import BASE, checked


def test_the_base_has_no_problem_and_nothing_to_note():
    assert checked("") == ([], [])
    assert checked("", world_size=64) == ([], [])


# flags added to the base, words of the one line that must come
ONE_PROBLEM = [
    ("--num-layers 0", "--num-layers 0: must be at least 1"),
    ("--fp8-format hybrid --fp64", "--fp8-format hybrid: rounds to 8 bits, which --fp64 is there to avoid"),
    ("--fp8-format e4m3 --torch-compile", "cannot follow delayed scales, which change every step; use --fp8-recipe "
     "tensorwise"),
    ("--fp8-format e4m3 --fp8-amax-history-len 0", "--fp8-amax-history-len 0: must be at least 1"),
    ("--fp8-format e4m3 --hidden-size 72 --kv-channels 16", "--fp8-format e4m3: the width of a layer is 72, and products in "
     "8 bits need a multiple of 16; change --hidden-size, or leave --fp8-format out"),
    ("--fp8-format e4m3 --kv-channels 4 --group-query-attention", "width of a rank's queries, keys and values is 24"),
    ("--fp8-format e4m3 --ffn-hidden-size 100", "a rank's width of the MLP is 100"),
    ("--fp8-format e4m3 --seq-length 28 --micro-batch-size 1", "the tokens of a rank's micro-batch is 28"),
    ("--hidden-size -64", "--hidden-size -64: must be at least 1"),
    ("--seq-length 0", "--seq-length 0: must be at least 1"),
    ("--micro-batch-size 0", "--micro-batch-size 0: must be at least 1"),
    ("--global-batch-size 0", "--global-batch-size 0: must be at least 1"),
    ("--train-iters 0", "--train-iters 0: must be at least 1"),
    ("--eval-interval 0", "--eval-interval 0: must be at least 1"),
    ("--eval-iters -1", "--eval-iters -1: must not be negative"),
    ("--log-interval 0", "--log-interval 0: must be at least 1"),
    ("--exit-interval 0", "--exit-interval 0: must be at least 1"),
    ("--exit-duration-in-mins 0", "--exit-duration-in-mins 0.0: must be greater than 0"),
    ("--num-workers -1", "--num-workers -1: must not be negative"),
    ("--make-vocab-size-divisible-by 0", "must be at least 1"),
    ("--vocab-size 0", "--vocab-size 0: must be at least 1"),
    ("--spike-snapshot-interval -1 --spike-action rewind", "--spike-snapshot-interval -1: must not be negative"),
    ("--spike-snapshot-interval 0 --spike-action rewind", "give --save DIR, or an interval such as 50"),
    ("--no-save-optim --save /tmp --save-interval 5 --spike-action rewind", "saves where it goes back to"),
    ("--seed 0", "--seed 0: must be between 1 and 4294967295"),
    ("--seed 4294967296", "--seed 4294967296: must be between"),
    ("--attention-dropout 1", "--attention-dropout 1.0: must be at least 0 and less than 1"),
    ("--hidden-dropout -0.1", "--hidden-dropout -0.1: must be at least 0 and less than 1"),
    ("--adam-beta1 1.0", "--adam-beta1 1.0: must be at least 0 and less than 1"),
    ("--adam-beta2 1.5", "--adam-beta2 1.5"),
    ("--adam-eps 0", "--adam-eps 0.0: must be greater than 0"),
    ("--norm-epsilon 0", "--norm-epsilon 0.0: must be greater than 0"),
    ("--weight-decay -0.1", "--weight-decay -0.1: must not be negative"),
    ("--clip-grad -1", "--clip-grad -1.0: must not be negative"),
    ("--init-method-std nan", "--init-method-std nan: must be a finite number"),
    ("--lr inf", "--lr inf: must be a finite number"),
    ("--lr -1e-4", "--lr -0.0001: must not be negative"),
    ("--fp16 --loss-scale 0", "--loss-scale 0.0: must be greater than 0"),
    ("--fp16 --hysteresis 0", "--hysteresis 0: must be at least 1"),
    ("--mid-level-dataset-surplus -1", "must not be negative"),
    ("--hidden-size 66", "--hidden-size 66: not a multiple of --num-attention-heads 4; use 64 or 68"),
    ("--hidden-size 3", "--hidden-size 3: not a multiple of --num-attention-heads 4; use 4"),
    ("--group-query-attention --num-query-groups 3", "--num-query-groups 3: --num-attention-heads 4 is not a multiple "
                                                     "of it; use 1, 2, 4"),
    ("--num-query-groups 2", "--num-query-groups 2: counts only with --group-query-attention"),
    ("--max-position-embeddings 16", "--max-position-embeddings 16: less than --seq-length 32; use 32 or more"),
    ("--swiglu --geglu", "--swiglu and --geglu: only one of these can be given"),
    ("--swiglu --squared-relu", "only one of these"),
    ("--use-rotary-position-embeddings --rotary-percent 0.2", "rotates 3 of the 16 channels of a head"),
    ("--position-embedding-type rope --rotary-percent 1.5", "must be greater than 0 and at most 1"),
    ("--position-embedding-type none --use-rotary-position-embeddings", "asks for rope"),
    ("--fp16 --bf16", "--fp16 and --bf16: only one of these can be given"),
    ("--bf16 --fp64", "--bf16 and --fp64: only one of these can be given"),
    ("--fp32-residual-connection", "--fp32-residual-connection: needs --fp16 or --bf16"),
    ("--bf16 --fp16-lm-cross-entropy", "--fp16-lm-cross-entropy: needs --fp16"),
    ("--fp16 --initial-loss-scale 2 --min-loss-scale 4", "--initial-loss-scale 2.0: less than --min-loss-scale 4.0"),
    ("--cp-comm-type a2a", "--cp-comm-type a2a: not supported; use p2p (keys and values go round a ring"),
    ("--cp-comm-type a2a+p2p", "--cp-comm-type a2a+p2p: not supported; use p2p"),
    ("--expert-model-parallel-size 2", "--expert-model-parallel-size 2: not supported yet"),
    ("--overlap-param-gather --overlap-grad-reduce", "--overlap-param-gather: needs --use-distributed-optimizer; add that"),
    ("--overlap-param-gather --use-distributed-optimizer", "--overlap-param-gather: needs --overlap-grad-reduce; add that"),
    ("--zero-partition whole-params", "--zero-partition whole-params: says how --use-distributed-optimizer shares its"),
    ("--ddp-bucket-size 0", "--ddp-bucket-size 0: must be at least 1"),
    ("--ddp-num-buckets 0", "--ddp-num-buckets 0: must be at least 1"),
    ("--ddp-bucket-size 9 --ddp-num-buckets 2", "--ddp-bucket-size 9 and --ddp-num-buckets 2: two sizes of one bucket"),
    ("--use-distributed-optimizer --num-distributed-optimizer-instances 0", "must be at least 1"),
    ("--use-distributed-optimizer --num-distributed-optimizer-instances 2",
     "--num-distributed-optimizer-instances 2: the 1 ranks that see other data (data x context parallel) are not a multiple "
     "of it; use 1"),
    ("--world-size 8", "--world-size 8: only for --dry-run"),
    ("--train-samples 100", "--train-iters 10 and --train-samples 100: two lengths"),
    ("--lr-decay-samples 5", "--lr-decay-samples 5: the run is counted by --train-iters; use --lr-decay-iters"),
    ("--lr-warmup-samples 5", "--lr-warmup-samples 5: the run is counted by --train-iters; use --lr-warmup-iters"),
    ("--rampup-batch-size 2 2 20 --global-batch-size 8", "--rampup-batch-size 2 2 20: changes the batch by samples"),
    (["--step-batch-size-schedule", "0:2 32:4"], "changes the batch by samples; give --train-samples"),
    ("--lr-warmup-fraction 0.1 --lr-warmup-iters 2", "--lr-warmup-iters 2 and --lr-warmup-fraction 0.1: two warm-ups"),
    ("--lr-warmup-fraction 1", "--lr-warmup-fraction 1.0: must be at least 0 and less than 1"),
    ("--lr-warmup-iters 10", "--lr-warmup-iters 10: must be less than --train-iters 10, the end of the decay"),
    ("--lr-warmup-iters 7 --lr-decay-iters 5", "--lr-warmup-iters 7: must be less than --lr-decay-iters 5"),
    ("--min-lr 0.1", "--min-lr 0.1: greater than --lr 0.001"),
    ("--lr-warmup-init 0.1", "--lr-warmup-init 0.1: greater than --lr 0.001"),
    ("--decoupled-lr -1", "--decoupled-lr -1.0: must not be negative"),
    ("--decoupled-lr 0.1 --decoupled-min-lr -1", "--decoupled-min-lr -1.0: must not be negative"),
    ("--decoupled-lr 0.1 --decoupled-min-lr 0.2", "--decoupled-min-lr 0.2: greater than --decoupled-lr 0.1"),
    ("--decoupled-lr 1e-5 --min-lr 1e-4", "--min-lr 0.0001: greater than --decoupled-lr 1e-05; use at most that"),
    ("--decoupled-lr 1e-5 --lr-warmup-init 1e-4", "--lr-warmup-init 0.0001: greater than --decoupled-lr 1e-05"),
    ("--decoupled-min-lr 1e-5", "--decoupled-min-lr 1e-05: is the floor of --decoupled-lr; give that too"),
    ("--lr-decay-style WSD", "--lr-decay-style WSD: needs the length of its anneal; give --lr-wsd-decay-iters"),
    ("--lr-decay-style WSD --lr-wsd-decay-iters 11", "--lr-wsd-decay-iters 11: longer than --train-iters 10"),
    ("--start-weight-decay 0.1", "--start-weight-decay 0.1: weight decay is constant"),
    ("--weight-decay-incr-style linear --start-weight-decay 0", "--end-weight-decay is missing"),
    ("--weight-decay-incr-style cosine --start-weight-decay 0.2 --end-weight-decay 0.1",
     "--start-weight-decay 0.2: greater than --end-weight-decay 0.1"),
    ("--override-opt_param-scheduler --use-checkpoint-opt_param-scheduler --load /", "only one of these"),
    ("--global-batch-size 5", "(5) is not divisible by micro batch size (2) times data parallel size (1); use 4 or 6"),
    ("--recompute-granularity full --recompute-method uniform", "--recompute-num-layers is missing"),
    ("--recompute-granularity full --recompute-num-layers 1", "--recompute-method is missing"),
    ("--recompute-granularity full --recompute-method block --recompute-num-layers 3", "there are only 2 layers"),
    ("--recompute-activations --recompute-method uniform", "--recompute-method uniform: needs --recompute-granularity "
                                                           "full"),
    ("--recompute-activations --recompute-granularity full", "--recompute-activations means selective"),
    ("--recompute-num-layers 1", "--recompute-num-layers 1: needs --recompute-granularity full"),
    ("--deterministic-mode --cudnn-benchmark", "--cudnn-benchmark: chooses kernels by their time"),
    ("--save x", "--save-interval is missing: --save x needs"),
    ("--ckpt-step 10", "--ckpt-step 10: needs --load DIR"),
    ("--use-checkpoint-args", "--use-checkpoint-args: needs --load DIR"),
    ("--train-range-to-skip 3", "the last one, 3, has no partner"),
    ("--train-range-to-skip 10-20", "--train-range-to-skip 10-20: not an integer; write --train-range-to-skip 10 20"),
    ("--train-range-to-skip 5 2", "did you mean 2 5?"),
    ("--train-range-to-skip 0 2", "iterations start at 1"),
    ("--train-range-to-skip 11 12", "never reached"),
    ("--train-range-to-skip 1 10", "nothing to train"),
    ("--iterations-to-skip x", "--iterations-to-skip x: not an integer"),
    ("--data-path nowhere", "--data-path and --mock-data: each names the data of the run"),
    ("--split 1,2,3,4", "--split 1,2,3,4: give the shares of train, validation and test"),
    ("--split a,b,c", "--split a,b,c: give the shares"),
    ("--split 0,0,0", "--split 0,0,0: give the shares"),
    ("--split 0,50,50", "--split 0,50,50: leaves no data for training"),
    ("--tokenizer-type GPT2BPE", "GPT2BPE: there is no such tokenizer; did you mean GPT2BPETokenizer?"),
    ("--tokenizer-type BertWordPieceCase", "BERT is not trained here"),
    ("--vocab-extra-ids -1", "--vocab-extra-ids -1: must not be negative"),
    ("--dry-run --tokenizer-type TikTokenizer", "--tiktoken-num-special-tokens 1000: must lie between 1 and --vocab-size "
                                                "(100)"),
    ("--dry-run --tokenizer-type TikTokenizer --tiktoken-num-special-tokens 9 --tiktoken-special-tokens <s> </s>",
     "--tiktoken-special-tokens <s> </s>: give each once, all of <unk> <s> </s>"),
    ("--tokenizer-type Llama2Tokenizer", "--tokenizer-model is missing: Llama2Tokenizer needs its model file"),
    ("--tokenizer-type Llama2Tokenizer --tokenizer-model /nowhere/x.model", "no such file"),
    ("--save /dev/null --save-interval 1", "--save /dev/null: /dev/null is not a directory"),
    ("--load /dev/null", "--load /dev/null: is a file"),
    ("--load / --ckpt-step 5", "--ckpt-step 5: / has no checkpoint of that iteration; there is none"),
    ("--load / --exit-on-missing-checkpoint", "--load /: no checkpoint there"),
    ("--load /nowhere", "--load /nowhere: there is no such directory"),
    ("--load /nowhere --save /elsewhere --save-interval 5", "--load /nowhere: there is no such directory"),
    ("--metrics-file /tmp", "--metrics-file /tmp: is a directory"),
    ("--control-file /no/such/file", "--control-file /no/such/file: there is no directory /no/such; make it"),
    ("--keep-last 0", "--keep-last 0"), ("--keep-every 0", "--keep-every 0"),
    ("--snapshot-interval 0", "--snapshot-interval 0"),
]


@pytest.mark.parametrize(("flags", "words"), ONE_PROBLEM, ids=[str(flags) for flags, _ in ONE_PROBLEM])
def test_one_rule_broken_is_one_line(flags, words):
    problems, _ = checked(flags)
    [line] = problems
    assert words in line and "\n" not in line and line.startswith("--")


@pytest.mark.parametrize(("flag", "words"), [
    ("--num-layers", "--num-layers is missing"), ("--hidden-size", "--hidden-size is missing"),
    ("--num-attention-heads", "--num-attention-heads is missing"), ("--seq-length", "--seq-length is missing"),
    ("--max-position-embeddings", "--max-position-embeddings is missing: give at least the sequence length, 32"),
    ("--micro-batch-size", "--micro-batch-size is missing"), ("--lr", "--lr is missing"),
    ("--train-iters", "--train-iters is missing: give it, or --train-samples"),
    ("--vocab-size", "--vocab-size is missing: the synthetic text of --mock-data needs"),
    ("--mock-data", "no data: give --data-path"),
])
def test_what_is_required(flag, words):
    flags = "--tokenizer-type NullTokenizer" if flag == "--mock-data" else ""
    problems, _ = checked(flags, drop=flag)
    [line] = problems
    assert line.startswith(words)


def test_an_empty_command_line_is_told_everything_at_once():
    config = config_from(Config, {})
    problems = check.problems(config, 1, {})
    assert [line.split()[0] for line in problems] == [
        "--num-layers", "--hidden-size", "--num-attention-heads", "--seq-length", "--max-position-embeddings",
        "--micro-batch-size", "--lr", "--train-iters", "no", "--vocab-file", "--merge-file"]


def test_many_rules_broken_are_many_lines():
    problems, _ = checked("--hidden-size 65 --fp16 --bf16 --min-lr 1 --save x --split 0,1 --global-batch-size 7 "
                          "--context-parallel-size 8 --attention-dropout 2 --iterations-to-skip 99")
    assert len(problems) == 9


def test_the_run_counted_in_samples():
    base = BASE.replace("--train-iters 10", "--train-samples 100")
    assert checked("", base=base) == ([], [])
    assert checked("--rampup-batch-size 2 2 20 --global-batch-size 8", base=base) == ([], [])
    assert checked(["--step-batch-size-schedule", "0:2 640:4"], base=base) == ([], [])
    for flags, words in [
        ("--lr-decay-iters 5", "--lr-decay-iters 5: the run is counted by --train-samples; use --lr-decay-samples"),
        ("--lr-warmup-iters 5", "use --lr-warmup-samples"),
        ("--lr-wsd-decay-iters 5", "use --lr-wsd-decay-samples"),
        ("--lr-warmup-samples 100", "--lr-warmup-samples 100: must be less than --train-samples 100"),
        ("--rampup-batch-size 2 4 20 --global-batch-size 8", "no multiple of the increment 4"),
        ("--rampup-batch-size 2 1 20 --global-batch-size 4", "(3) is not divisible by micro batch size (2)"),
        (["--step-batch-size-schedule", "0:2 x:4"], "x:4 is not THRESHOLD:BATCH_SIZE"),
        (["--step-batch-size-schedule", "0:2", "--global-batch-size", "4"], "cannot be given with"),
        ("--train-range-to-skip 51 52", "never reached, training ends with iteration 50"),
    ]:
        [line] = checked(flags, base=base)[0]
        assert words in line


def test_a_resumed_run_may_have_passed_the_sizes_that_do_not_fit():
    base = BASE.replace("--train-iters 10", "--train-samples 100")
    flags = "--rampup-batch-size 2 1 20 --global-batch-size 4"
    assert len(checked(flags, base=base)[0]) == 1
    assert checked(flags + " --load /", base=base)[0] == []
    assert len(checked("--rampup-batch-size 2 1 20 --global-batch-size 5 --load /", base=base)[0]) == 1


@pytest.mark.parametrize(("world_size", "batch", "words"), [
    (3, 8, "times data parallel size (3); use 6 or 12"), (8, 8, "times data parallel size (8); use 16"),
    (3, 8, "--decrease-batch-size-if-needed, or 2 or 4 ranks"), (9, 8, "--decrease-batch-size-if-needed, or 4 ranks")])
def test_the_batch_must_fit_the_ranks(world_size, batch, words):
    [line] = checked(f"--global-batch-size {batch}", world_size)[0]
    assert words in line


TP, CP = "--tensor-model-parallel-size", "--context-parallel-size"


@pytest.mark.parametrize(("flags", "world_size", "line"), [
    (f"{TP} 3 --ffn-hidden-size 258", 3, f"{TP} 3: --num-attention-heads 4 is not a multiple of it; use 1, 2, 4"),
    (f"{TP} 4 --group-query-attention --num-query-groups 2", 4,
     f"{TP} 4: --num-query-groups 2 is not a multiple of it, and fewer key/value heads than ranks are not supported yet; "
     "use 1, 2, or more groups"),
    (f"{TP} 4 --ffn-hidden-size 130", 4,
     f"{TP} 4: the MLP width 130 is not a multiple of it; use 1, 2, 5, 10, 13, 26, 65, 130, or give --ffn-hidden-size 132"),
    (f"{TP} 4 --sequence-parallel --seq-length 30", 4,
     f"--seq-length 30: --sequence-parallel splits it over {TP} 4, of which it is not a multiple; use 28 or 32, or leave "
     "--sequence-parallel out"),
    (f"{CP} 2 --seq-length 30", 2,
     f"--seq-length 30: {CP} 2 cuts it into 4 chunks, of which it is not a multiple; use 28 or 32, or fewer "
     "context-parallel ranks"),
    (f"{CP} 16 --seq-length 30", 16,
     f"--seq-length 30: {CP} 16 cuts it into 32 chunks, of which it is not a multiple; use 32, or fewer context-parallel "
     "ranks"),
    (f"{CP} 2 {TP} 4 --sequence-parallel --seq-length 28", 8,
     f"--seq-length 28: --sequence-parallel splits it over {TP} 4 x {CP} 2, of which it is not a multiple; use 24 or 32, or "
     "leave --sequence-parallel out"),
    (f"{CP} 2 {TP} 4 --sequence-parallel --seq-length 30", 8,
     f"--seq-length 30: {CP} 2 cuts it into 4 chunks, of which it is not a multiple; use 24 or 32, or fewer "
     "context-parallel ranks"),
    (f"{CP} 2", 1, f"{CP} 2: one copy of the model takes 2 ranks, and the 1 of this run are not a multiple; use torchrun "
     "--nproc-per-node 2 (times --nnodes, where there are several)"),
    (f"{TP} 2 {CP} 2", 6, f"{TP} 2 x {CP} 2: one copy of the model takes 4 ranks, and the 6 of this run are not a multiple; "
     "use torchrun --nproc-per-node 4 or 8 (times --nnodes, where there are several)"),
    (f"{TP} 2", 1, f"{TP} 2: one copy of the model takes 2 ranks, and the 1 of this run are not a multiple; use torchrun "
     "--nproc-per-node 2 (times --nnodes, where there are several)"),
    (f"{TP} 2", 5, f"{TP} 2: one copy of the model takes 2 ranks, and the 5 of this run are not a multiple; use torchrun "
     "--nproc-per-node 4 or 6 (times --nnodes, where there are several)"),
    (f"{TP} 2 --global-batch-size 24", 7, f"{TP} 2: one copy of the model takes 2 ranks, and the 7 of this run are not a "
     "multiple; use torchrun --nproc-per-node 6 or 8 (times --nnodes, where there are several)"),
    (f"{TP} 2 --dry-run --world-size 3", 3, f"{TP} 2: one copy of the model takes 2 ranks, and the 3 of this run are not a "
     "multiple; use --world-size 2 or 4")])
def test_what_does_not_split_over_the_ranks(flags, world_size, line):
    assert checked(flags, world_size)[0] == [line]


@pytest.mark.parametrize(("flags", "world_size"), [
    (f"{TP} 2", 2), (f"{TP} 4 --sequence-parallel", 8), (f"{TP} 4 --seq-length 30", 4), (f"{TP} 2 --vocab-size 99", 2),
    (f"{TP} 2 --group-query-attention --num-query-groups 2 --sequence-parallel", 4),
    (f"{TP} 4 --hidden-size 62 --kv-channels 8", 4), (f"{CP} 2", 2), (f"{CP} 3 --seq-length 30", 3),
    (f"{CP} 4 {TP} 2 --sequence-parallel --cp-comm-type all_gather", 16), (f"{CP} 2 {TP} 4 --seq-length 28", 8)])
def test_what_splits_over_the_ranks(flags, world_size):
    """... sequence parallelism is then on without a word; a split sequence is the only reason to split the length."""
    assert checked(flags, world_size) == ([], [])


PP, PER_CHUNK = "--pipeline-model-parallel-size", "--num-layers-per-virtual-pipeline-stage"
CHUNKS, FIRST = "--num-virtual-stages-per-pipeline-rank", "--decoder-first-pipeline-num-layers"


@pytest.mark.parametrize(("flags", "world_size", "line"), [
    (f"--num-layers 80 {PP} 16 {PER_CHUNK} 2 --global-batch-size 64", 16,
     f"{PER_CHUNK} 2: --num-layers 80 is not a multiple of {PP} 16 x 2 = 32; give {PER_CHUNK} 1 or 5"),
    (f"{PP} 4", 4, f"--num-layers 2 with {PP} 4: the layers are less than 4, and each (virtual) stage needs one; give fewer "
     "stages, or more layers"),
    (f"--num-layers 8 {PP} 2 {FIRST} 8", 2, f"--num-layers 8 with {PP} 2, {FIRST} 8: the layers leave 0 for 1 stages, and "
     "each (virtual) stage needs one; give sizes that add up"),
    (f"--num-layers 8 {PP} 2 {CHUNKS} 0", 2, f"{CHUNKS} 0: must be at least 1"),
    (f"--num-layers 8 {PP} 2 {CHUNKS} 2 {PER_CHUNK} 2", 2,
     f"{PER_CHUNK} 2 and {CHUNKS} 2 say the same thing: give one of them"),
    (f"--num-layers 8 {CHUNKS} 2", 1, f"{CHUNKS} 2 makes 2 virtual stages, which {PP} 1 has no use for: remove it, or give "
     "at least 2 stages"),
    (f"{FIRST} 1", 1, f"{FIRST} 1: there is only one stage; remove it, or give {PP}"),
    (f"--num-layers 8 {PP} 4 {CHUNKS} 2 --global-batch-size 12", 4,
     f"6 micro-batches are not a multiple of {PP} 4, as 2 virtual stages per rank need: choose --global-batch-size for 8 "
     f"(or 4) of them, or remove {PER_CHUNK} / {CHUNKS}"),
    (f"{PP} 2", 5, f"{PP} 2: one copy of the model takes 2 ranks, and the 5 of this run are not a multiple; use torchrun "
     "--nproc-per-node 4 or 6 (times --nnodes, where there are several)"),
    (f"{PP} 2 {TP} 2 --dry-run --world-size 6", 6, f"{TP} 2 x {PP} 2: one copy of the model takes 4 ranks, and the 6 of "
     "this run are not a multiple; use --world-size 4 or 8"),
])
def test_what_makes_no_pipeline(flags, world_size, line):
    assert checked(flags, world_size)[0] == [line]


@pytest.mark.parametrize(("flags", "world_size"), [
    (f"--num-layers 30 {PP} 4", 4), (f"--num-layers 80 {PP} 16 {PER_CHUNK} 5 --global-batch-size 64", 32),
    (f"--num-layers 80 {PP} 16 {CHUNKS} 2 --global-batch-size 32", 16), (f"--num-layers 5 {PP} 2 {FIRST} 2", 4),
    (f"--num-layers 5 {PP} 2 --no-overlap-p2p-communication", 2),
    (f"--num-layers 8 {PP} 4 --global-batch-size 12", 4)])
def test_what_makes_a_pipeline(flags, world_size):
    assert checked(flags, world_size) == ([], [])


def test_every_phase_of_a_ramp_must_fit_an_interleaved_pipeline():
    """... of those that are still to come; evaluation has the size of the last one."""
    base = BASE.replace("--train-iters 10", "--train-samples 1000").replace("--num-layers 2", "--num-layers 8")
    flags = f"{PP} 2 {CHUNKS} 2 --global-batch-size 16 --rampup-batch-size"
    assert checked(f"{flags} 4 4 100", 2, base=base)[0] == []
    lines = checked(f"{flags} 2 2 100", 2, base=base)[0]
    assert [line.split(" are not")[0] for line in lines] == [f"{n} micro-batches" for n in (1, 3, 5, 7)]
    assert checked(f"{flags} 2 2 100 --load /", 2, base=base)[0] == []


def test_instances_of_the_distributed_optimizer():
    """They divide the ranks that hold the same weights, which tensor parallelism leaves fewer of."""
    flags = f"{TP} 2 --global-batch-size 8 --num-distributed-optimizer-instances"
    for number, world_size in ((2, 8), (4, 8), (1, 8), (2, 4)):
        assert checked(f"{flags} {number} --use-distributed-optimizer", world_size) == ([], [])
    [line] = checked(f"{flags} 3 --use-distributed-optimizer", 8)[0]
    assert "the 4 ranks that see other data" in line and line.endswith("use 1, 2, 4")
    [line] = checked(f"{flags} 2", 8)[0]
    assert line == "--num-distributed-optimizer-instances 2: needs --use-distributed-optimizer; add that, or leave it out"
    every = "--use-distributed-optimizer --overlap-grad-reduce --overlap-param-gather --ddp-bucket-size 9"
    assert checked(every, 2) == ([], [])


def test_nccl_between_cpu_ranks():
    flags = "--device cpu --distributed-backend nccl"
    assert checked(flags, 2)[0] == [
        "--distributed-backend nccl: works between CUDA devices, not with --device cpu; use gloo"]
    assert checked(flags, 1) == ([], ["--distributed-backend nccl: no effect with one rank on the CPU"])
    assert checked("--device cuda --distributed-backend nccl", 2) == ([], [])


@pytest.mark.parametrize(("flags", "note"), [
    ("--save-interval 5", "--save-interval 5: no effect without --save, so that no checkpoint will be written"),
    ("--keep-last 2", "--keep-last 2: no effect without --save"),
    ("--keep-every 2", "--keep-every 2: no effect without --keep-last, without which nothing is removed"),
    ("--spike-snapshot-interval 9", "--spike-snapshot-interval 9: no effect without --spike-action rewind"),
    ("--skip-train --spike-action log", "--spike-action log: no effect without training"),
    ("--snapshot-interval 2", "--snapshot-interval 2: no effect without --save"),
    ("--initial-loss-scale 65536", "--initial-loss-scale 65536.0: no effect without --fp16 without --loss-scale"),
    ("--loss-scale 128", "--loss-scale 128.0: no effect without --fp16 or --bf16"),
    ("--sgd-momentum 0.5", "--sgd-momentum 0.5: no effect without --optimizer sgd"),
    ("--optimizer sgd --adam-eps 1e-6", "--adam-eps 1e-06: no effect without --optimizer adam"),
    ("--finetune", "--finetune: no effect without --load"),
    ("--log-memory-to-tensorboard", "--log-memory-to-tensorboard: no effect without --tensorboard-dir"),
    ("--min-lr 1e-5 --lr-decay-style constant", "--min-lr 1e-05: no effect without a decay"),
    ("--decoupled-lr 1e-3 --decoupled-min-lr 1e-5 --lr-decay-style constant",
     "--decoupled-min-lr 1e-05: no effect without a decay"),
    ("--apply-wd-to-qk-layernorm", "--apply-wd-to-qk-layernorm: no effect without --qk-layernorm"),
    ("--vocab-extra-ids 9", "--vocab-extra-ids 9: no effect without --tokenizer-type SentencePieceTokenizer"),
    ("--tiktoken-pattern v1", "--tiktoken-pattern v1: no effect without --tokenizer-type TikTokenizer"),
    ("--tiktoken-num-special-tokens 9", "--tiktoken-num-special-tokens 9: no effect without --tokenizer-type Tik"),
    ("--tiktoken-special-tokens <s>", "--tiktoken-special-tokens <s>: no effect without --tokenizer-type TikTok"),
    ("--rotary-percent 0.5", "--rotary-percent 0.5: no effect without --position-embedding-type rope"),
    ("--rope-scaling-factor 4", "--rope-scaling-factor 4.0: no effect without --use-rope-scaling"),
    ("--no-data-sharding", "--no-data-sharding: no effect without --dataloader-type cyclic"),
    ("--swiglu --no-bias-gelu-fusion", "--no-bias-gelu-fusion: no effect without a GELU with biases"),
    ("--attention-softmax-in-fp32", "no effect here, because the softmax is always computed in fp32"),
    ("--no-save-rng", "no effect here, because there is no random state to save"),
    ("--cp-comm-type all_gather", "--cp-comm-type all_gather: no effect without --context-parallel-size"),
    ("--ddp-bucket-size 100", "--ddp-bucket-size 100: no effect with one data-parallel rank"),
    ("--ddp-num-buckets 3", "--ddp-num-buckets 3: no effect with one data-parallel rank"),
    ("--use-distributed-optimizer", "--use-distributed-optimizer: no effect with one data-parallel rank"),
    ("--overlap-grad-reduce", "--overlap-grad-reduce: no effect with one data-parallel rank"),
    ("--sequence-parallel", "--sequence-parallel: switched off, because --tensor-model-parallel-size is 1"),
    ("--split 8,1,1", "--split 8,1,1: no effect without --data-path"),
    ("--no-overlap-p2p-communication", "--no-overlap-p2p-communication: no effect without --pipeline-model-parallel-size"),
    ("--weight-decay 0.1 --weight-decay-incr-style linear --start-weight-decay 0 --end-weight-decay 1",
     "--weight-decay 0.1: no effect without --weight-decay-incr-style constant"),
    ("--lr-decay-iters 5 --lr-decay-style constant", "--lr-decay-iters 5: no effect without a decay"),
    ("--lr-warmup-init 1e-5", "--lr-warmup-init 1e-05: no effect without a warm-up"),
    ("--init-method-std 0.01 --init-method-xavier-uniform", "--init-method-std 0.01: no effect without normal"),
    ("--add-qkv-bias", "--add-qkv-bias: no effect without --disable-bias-linear"),
    ("--add-attention-output-bias", "--add-attention-output-bias: no effect without --disable-bias-linear"),
    ("--add-mlp-bias", "--add-mlp-bias: no effect without --disable-bias-linear"),
    ("--reset-position-ids --position-embedding-type none", "--reset-position-ids: no effect without positions"),
    ("--snapshot-dir x", "--snapshot-dir x: no effect without --save or --load"),
    ("--control-file x", "--control-file x: nothing can be saved without --save"),
    ("--vocab-file x", "--vocab-file x: no effect without --tokenizer-type GPT2BPETokenizer"),
    ("--merge-file x --tokenizer-type NullTokenizer", "--merge-file x: no effect without --tokenizer-type GPT2BPETok"),
    ("--tokenizer-model x", "--tokenizer-model x: no effect without a --tokenizer-type"),
    ("--timing-log-option all", "--timing-log-option all: no effect without --timing-log-level"),
    ("--eval-interval 5 --eval-iters 0", "--eval-interval 5: no effect without validation"),
    ("--log-memory-to-tensorboard --tensorboard-dir x --device cpu", "no effect without an accelerator"),
])
def test_what_is_only_said(flags, note):
    problems, notes = checked(flags)
    assert not problems and len(notes) == 1 and note in notes[0]


@pytest.mark.parametrize("flags", [
    "--fp16 --initial-loss-scale 65536", "--optimizer sgd --sgd-momentum 0.5", "--load / --finetune",
    "--use-rotary-position-embeddings --rotary-percent 0.5", "--dataloader-type cyclic --no-data-sharding",
    "--no-bias-gelu-fusion", "--lr-decay-style WSD --lr-wsd-decay-iters 3", "--kv-channels 7",
    "--num-query-groups 4", "--eval-iters 0", "--lr-warmup-fraction 0.01", "--save x --save-interval 1",
    "--recompute-granularity full --recompute-method block --recompute-num-layers 2", "--bf16 --loss-scale 4",
    "--weight-decay-incr-style linear --start-weight-decay 0 --end-weight-decay 0.1", "--lr 0",
    "--decoupled-lr 1 --min-lr 1e-4", "--decoupled-lr 1e-5 --min-lr 1e-4 --decoupled-min-lr 1e-5",
    "--qk-layernorm --apply-wd-to-qk-layernorm", "--fp16 --loss-scale 1000", "--lr-warmup-iters 2 --lr-warmup-init 1e-5",
    "--lr-decay-iters 9 --lr-decay-style constant --lr-warmup-fraction 0.5", "--add-qkv-bias --disable-bias-linear",
    "--reset-position-ids --position-embedding-type rope", "--control-file x --save x --save-interval 5",
    "--save x --save-interval 5 --load ./x", "--snapshot-dir x --load /",
    "--log-memory-to-tensorboard --tensorboard-dir x --device cuda", "--timing-log-option all --timing-log-level 1",
    "--timing-log-option all --log-format megatron",
    "--decrease-batch-size-if-needed --global-batch-size 5"])
def test_what_needs_no_word(flags):
    assert checked(flags) == ([], [])


def test_skipped_iterations_are_shown_normalised():
    problems, notes = checked("--train-range-to-skip 5 6 3 4 --iterations-to-skip 9")
    assert not problems
    assert notes[-1] == "skipping 5 iterations: --train-range-to-skip 3 6 9 9"
    assert notes[0] == ("WARNING: --train-range-to-skip skips 5 of 10 iterations (50.0 %), 10 samples = 320 tokens "
                        "that will not be trained on")
