"""tools/internlm_config.py: the demos' configs become runs of the right size, and nothing is
executed."""

from __future__ import annotations

import errno
import os
from pathlib import Path

import pytest

from megatron.addons.internlm.config import main
from megatron.addons.internlm.initial_values import internlm2_scheme
from megatron.addons.internlm.read_config import ConfigError, read_config
from megatron.addons.internlm.tests.configs import INTERNEVO_7B, SIZES, demo, written
from megatron.addons.internlm.to_flags import to_flags
from megatron.args_file import read_words
from megatron.arguments import config_from, parse_typed, values_of
from megatron.config import command_line
from megatron.config.plan.plan import make_plan
from megatron.config.tree import Config
from megatron.features.registry import RunConfig
from tests.load_tool import exit_code


def converted(folder: Path, text: str, world: int, capsys: pytest.CaptureFixture[str]) -> Config:
    """The configuration that the printed .args file gives."""
    assert main([str(written(folder, text)), "--world-size", str(world)]) == 0, (
        capsys.readouterr().err
    )
    (folder / "run.args").write_text(capsys.readouterr().out)
    return config_from(
        RunConfig, parse_typed(command_line.parser(RunConfig), read_words(folder / "run.args"))
    )


@pytest.mark.parametrize("name", SIZES)
def test_a_demo_becomes_the_same_run(name, tmp_path, capsys):
    *_, world, size, batch = SIZES[name]
    config = converted(tmp_path, demo(name), world, capsys)
    plan = make_plan(config, world, 103168)
    assert plan.num_parameters == size and plan.padded_vocab_size == 103168
    t = config.training
    o = config.optimizer
    p = config.precision
    assert (t.global_batch_size, t.micro_batch_size, t.train_iters, config.model.seq_length) == (
        batch,
        2,
        50000,
        2048,
    )
    assert (o.lr, o.min_lr, o.lr_warmup_iters, o.lr_warmup_first_step, o.adam_beta2) == (
        1e-4,
        1e-5,
        500,
        True,
        0.95,
    )
    assert (p.fp16, p.initial_loss_scale, p.max_loss_scale, p.loss_scale_window) == (
        True,
        65536,
        2**24,
        1000,
    )
    assert config.model.init_scheme == "internlm" and o.apply_wd_to_all and o.clip_grad == 1.0
    assert config.data.dummy_data == "internlm" and config.packed
    # the logs of the demos count short samples of the made-up data, too
    assert values_of(config)["min_sample_length"] == 0
    assert config.parallel.use_distributed_optimizer and config.parallel.overlap_grad_reduce
    # as the logs' "Number of elements on ranks"
    assert config.parallel.zero_partition == "whole-params"
    assert config.checkpoint.save is None


def test_internevos_7b_sft(tmp_path, capsys):
    """Its keys pass; with overlap_sync_param it has InternLM's shares of the optimizer state."""
    config = converted(tmp_path, INTERNEVO_7B, 8, capsys)
    assert make_plan(config, 8, 103168).num_parameters == SIZES["7b"][6]
    assert (
        config.precision.bf16
        and config.training.global_batch_size == 64
        and config.data.dummy_data == "internlm"
    )
    assert config.parallel.use_distributed_optimizer and config.parallel.zero_partition == "even"
    assert config.checkpoint.load is None and not config.model.rotary_interleaved
    config = converted(
        tmp_path,
        INTERNEVO_7B.replace("overlap_sync_param=False", "overlap_sync_param=True").replace(
            "qk_interleaved=False", "qk_interleaved=True"
        ),
        8,
        capsys,
    )
    assert config.parallel.zero_partition == "whole-params" and config.model.rotary_interleaved


@pytest.mark.parametrize(
    ("kind", "vocab", "size", "interleaved"),
    [("INTERNLM2_PUBLIC", 92544, 7_737_708_544, False), ("LLAMA2", 32000, 7_241_732_096, True)],
)
def test_internevos_newer_models(kind, vocab, size, interleaved, tmp_path, capsys):
    """7B_internlm2.py and 7B_llama2.py of InternEvo: eight groups of keys and values, no biases."""
    text = INTERNEVO_7B
    for old, new in (
        ("num_kv_attention_heads=32", "num_kv_attention_heads=8, no_bias=True"),
        ("mlp_ratio=8 / 3", "mlp_ratio=3.5"),
        ("vocab_size=103168", f"vocab_size={vocab}"),
        ("qk_interleaved=False, ", ""),
    ):
        assert old in text
        text = text.replace(old, new)
    config = converted(tmp_path, f'model_type = "{kind}"\n{text}', 8, capsys)
    assert make_plan(config, 8, vocab).num_parameters == size
    assert config.model.rotary_interleaved == interleaved
    assert config.model.init_scheme == "internlm2" and not config.model.qkv_bias
    scheme = internlm2_scheme(config.model)
    assert scheme("mlp_out", 7) == scheme("attention_output", 7) == ("normal", 0.02 / 4)
    assert scheme("qkv", 7) == scheme("output_layer", 0) == ("normal", 0.02)
    biased = converted(
        tmp_path, f'model_type = "{kind}"\n' + text.replace("no_bias=True, ", ""), 8, capsys
    )
    assert biased.model.add_qkv_bias and biased.model.add_attention_output_bias


LOADS = [
    # what stands in ckpt, and --load, --finetune, --no-load-optim, --exit-on-missing-checkpoint of
    # the run
    ("auto_resume=True, load_ckpt_folder='local:a'", None, False, False, False),
    # auto_resume is on where it is not set
    ("load_model_only_folder='local:a'", None, False, False, False),
    ("load_given_ckpt=False, load_ckpt_folder='local:a'", None, False, False, False),
    (
        "auto_resume=True, load_given_ckpt=True, load_ckpt_folder='local:a'",
        None,
        False,
        False,
        False,
    ),
    ("auto_resume=False, load_ckpt_folder='local:a'", "a", False, False, True),
    ("load_given_ckpt=True, load_ckpt_folder='local:a'", "a", False, False, True),
    ("auto_resume=False, load_ckpt_folder='local:a', load_optimizer=False", "a", False, True, True),
    ("auto_resume=False, load_model_only_folder='local:a'", "a", True, False, True),
    (
        "auto_resume=False, load_ckpt_folder='local:a', load_ckpt_info=dict(path='local:b', "
        "content=('model',), ckpt_type='internlm')",
        "b",
        True,
        False,
        True,
    ),
    (
        "auto_resume=False, load_ckpt_info=dict(path='b', content=['model', 'scheduler'], "
        "ckpt_type='internevo')",
        "b",
        False,
        True,
        True,
    ),
    (
        "auto_resume=False, load_ckpt_info=dict(path='b', content=('all',), ckpt_type='internevo')",
        "b",
        False,
        False,
        True,
    ),
    ("auto_resume=False, load_ckpt_info=None", None, False, False, False),
]


@pytest.mark.parametrize("saves", [False, True])
@pytest.mark.parametrize(
    ("keys", "load", "finetune", "no_optimizer", "must"), LOADS, ids=[row[0][:60] for row in LOADS]
)
def test_what_is_loaded_is_what_internlm_loads(
    saves, keys, load, finetune, no_optimizer, must, tmp_path, capsys
):
    text = demo("7b").replace("enable_save_ckpt=False", f"enable_save_ckpt={saves}")
    text = text.replace("    load_optimizer=True,\n", "")
    c = converted(
        tmp_path, text.replace("ckpt = dict(", f"ckpt = dict({keys}, "), 8, capsys
    ).checkpoint
    resumes = saves and load is None and "load_ckpt_info=None" not in keys
    assert c.load == ("llm_ckpts" if resumes else load)
    assert (c.finetune, c.no_load_optim, c.exit_on_missing_checkpoint) == (
        finetune,
        no_optimizer,
        must,
    )


# what is changed in the 7B demo, and words of the .args file that it comes to
CHANGES = [
    ('skip_batches=""', 'skip_batches="2-3,7,10-11"', "--train-range-to-skip 3 4 8 8 11 12"),
    ('rampup_batch_size=""', 'rampup_batch_size="2 2 6"', "--rampup-micro-batches 2 2 6"),
    ("pack_sample_into_one=False", "pack_sample_into_one=True", "--packed-samples --pack-into-one"),
    ("checkpoint=False", "checkpoint=0.25", "--recompute-fraction 0.25"),
    ("checkpoint=False", "checkpoint=True", "--recompute-fraction 1"),
    ("embed_grad_scale=1", "embed_grad_scale=0.1", "--embed-grad-scale 0.1"),
    ("label_smoothing=0", "label_smoothing=0.1", "--label-smoothing 0.1"),
    ("adam_beta2_c=0", "adam_beta2_c=0.8", "--adam-beta2-schedule-c 0.8"),
    ("init_steps=0", "init_steps=7", "--lr-init-iters 7"),
    ("zero1=8", "zero1=4", "--use-distributed-optimizer --num-distributed-optimizer-instances 2"),
    (
        "zero1=8",
        "zero1=dict(size=4, fsdp=True)",
        "--data-parallel-sharding-strategy optim_grads_params --overlap-grad-reduce "
        "--overlap-param-gather --num-distributed-optimizer-instances 2",
    ),
    (
        "zero1=8",
        "zero1=1",
        "--clip-grad 1\n--overlap-grad-reduce\n# hybrid_zero_optimizer.overlap_sync_param = True",
    ),
    ("mlp_ratio=MLP_RATIO", "mlp_ratio=4", "--swiglu --ffn-hidden-size 16384"),
    ('dtype="torch.float16"', 'dtype="torch.bfloat16"', "--bf16"),
    ('dtype="torch.float16"', 'dtype="torch.tf32"', "--tf32"),
    (
        "enable_save_ckpt=False",
        "enable_save_ckpt=True",
        "--save llm_ckpts --save-interval 50\n--snapshot-interval 25 --snapshot-dir "
        "llm_ckpts/snapshot\n--load llm_ckpts",
    ),
    (
        "skip_batches",
        'train_folder="data/train", skip_batches',
        "--packed-samples\n--min-sample-length 50\n--train-data-path data/train\n",
    ),
    (
        "valid_every=50",
        'valid_every=50, train_folder="data/train", valid_folder="data/valid"',
        "--valid-data-path data/valid --multiple-validation-sets\n--train-iters 50000\n"
        "# data.valid_micro_num = 4: a validation reads all of it, in batches of the training's "
        "size\n"
        "--eval-interval 50 --full-validation\n",
    ),
    (
        "size=1, interleaved",
        "size=2, interleaved",
        "--tensor-model-parallel-size 1 --pipeline-model-parallel-size 2",
    ),
    ("cudnn_deterministic = False", "cudnn_deterministic = True", "--cudnn-deterministic"),
]


@pytest.mark.parametrize(("old", "new", "words"), CHANGES, ids=[row[1] for row in CHANGES])
def test_each_key_reaches_its_flag(old, new, words, tmp_path, capsys):
    text = demo("7b")
    assert text.count(old) == 1
    assert main([str(written(tmp_path, text.replace(old, new))), "--world-size", "8"]) == 0, (
        capsys.readouterr().err
    )
    assert words in "\n".join(
        line.partition("   #")[0] for line in capsys.readouterr().out.splitlines()
    )


REFUSED = [
    (
        "load_optimizer=True",
        "auto_resume=False, load_ckpt_folder='local:a', load_model_only_folder='local:b'",
        "ckpt.load_ckpt_folder and ckpt.load_model_only_folder",
    ),
    (
        "load_optimizer=True",
        "auto_resume=False, load_ckpt_info=dict(path='a', content=('model',), ckpt_type='llama')",
        "ckpt.load_ckpt_info.ckpt_type = 'llama'",
    ),
    (
        "load_optimizer=True",
        "auto_resume=False, load_ckpt_info=dict(path='a', content=('all',), ckpt_type='hf_llama')",
        "ckpt.load_ckpt_info.content = ('all',)",
    ),
    ("use_flash_attn=True", "num_kv_attention_heads=8", "model.num_kv_attention_heads = 8"),
    (
        "num_chunks=1",
        "num_chunks=1, num_expert=4",
        "model.num_expert: is no key that this tool knows",
    ),
    ("use_flash_attn=True", "use_scaled_init=False", "only the layer-wise deviations are built in"),
    ("use_flash_attn=True", "num_experts=4", "model.num_experts = 4: there are no experts"),
    (
        'skip_batches=""',
        'skip_batches="3-2"',
        "data.skip_batches = '3-2': '3-2' is neither a batch nor a range",
    ),
    (
        'dtype="torch.float16"',
        'dtype="torch.int8"',
        "model.dtype = 'torch.int8': must be one of torch.float16",
    ),
    (
        "zero1=8",
        "zero1=3",
        "parallel.zero1 = 3: the 8 data-parallel ranks are not a multiple of it",
    ),
    ("zero1=8", "tensor=3", "8 ranks (--world-size) are not a multiple of tensor 3 x pipeline 1"),
    ("zero1=8", 'tensor=dict(size=2, mode="isp")', "only mtp and msp"),
    (
        "cudnn_benchmark = False",
        "cudnn_bench = False",
        "cudnn_bench: is no key that this tool knows",
    ),
    ("adam_eps=1e-8", 'adam_eps="small"', "adam.adam_eps = 'small': must be a number"),
    (
        "HIDDEN_SIZE = 4096",
        "HIDDEN_SIZE = 4100",
        "--hidden-size 4100: not a multiple of --num-attention-heads 32",
    ),
    (
        "HIDDEN_SIZE = 4096",
        "HIDDEN_SIZE = 4096\nmonitor = dict(alert=dict(enable_feishu_alert=True))",
        "monitor.alert.enable_feishu_alert = True",
    ),
]


@pytest.mark.parametrize(
    ("old", "new", "text"), REFUSED, ids=[row[1].split("\n")[-1] for row in REFUSED]
)
def test_what_cannot_be_honoured_is_an_error_with_its_line(old, new, text, tmp_path, capsys):
    assert main([str(written(tmp_path, demo("7b").replace(old, new))), "--world-size", "8"]) == 1
    said = capsys.readouterr()
    assert text in said.err and said.out == "" and "Traceback" not in said.err


# None of these may run anything, write anything or take long.
HOSTILE = [
    "import subprocess",
    "import os, sys",
    "from os import system",
    "import os as o",
    "x = open('/etc/passwd').read()",
    "x = __import__('os').system('touch {mark}')",
    "x = eval('1')",
    "x = (lambda: 1)()",
    "x = [y for y in (1, 2)]",
    "import os\nx = os.system('touch {mark}')",
    "import os\nos.environ['HOME'] = '/'",
    "x = os.environ['HOME']",
    "import os\nx = os.environ['NO_SUCH_VARIABLE_HERE']",
    "exec('1')",
    "def f():\n    pass",
    "class A:\n    pass",
    "while True:\n    pass",
    "for i in range(3):\n    pass",
    "with open('{mark}', 'w') as f:\n    pass",
    "x = ().__class__",
    "x = 'a'.format(1)",
    "x = 9 ** 9 ** 9 ** 9",
    "x = 'a' * 10 ** 9",
    "x = [0] * 10 ** 9",
    "x = 2 ** 100000",
    "x = y",
    "x = x",
    "a = b\nb = a",
    "x: int",
    "x[0] = 1",
    "x.y = 1",
    "x, y = 1, 2",
    "x = {{**dict(a=1)}}",
    "x = dict(**dict(a=1))",
    "x = 1 if True else 2",
    "x = 1 and 2",
    "x = f'{{1!r}}'",
    "x = f'{{1:>9999999999}}'",
    "x = 1j",
    "x = b'bytes'",
    "x = ...",
    "x = 1 / 0",
    "x = int('a')",
    "x = dict(a=1)['b']",
    "x = [1][5]",
    "assert False",
    "raise SystemExit(0)",
    "del x",
    "x = (",
    "x = '\\0'\0",
    "global x",
    "x = print('hello')",
    "x = '/'.join(open('/etc/passwd'))",
    "x = int.__subclasses__()",
    "x = " + "(" * 3000 + "1" + ")" * 3000,
    "x = " + "-" * 50000 + "1",
    "x = " + "+".join(["1"] * 40000),
    "x = str(b=1)",
    "x = @",
    "async def f(): pass",
    "x = await y",
    "x = (y := 1)",
    "print(1)",
    "x = min()",
    "x = -'a'",
    "x = not 1",
]


@pytest.mark.parametrize("text", HOSTILE, ids=[text[:30] for text in HOSTILE])
def test_nothing_is_executed(text, tmp_path):
    mark = tmp_path / "mark"
    with pytest.raises(ConfigError, match=r"config.py") as refused:
        read_config(
            written(
                tmp_path, text.replace("{mark}", str(mark)).replace("{{", "{").replace("}}", "}")
            )
        )
    assert not mark.exists() and len(str(refused.value)) < 400


def test_what_may_stand_there(tmp_path):
    path = written(
        tmp_path,
        'import os\nA: int = -2 ** 4 // 3\nB = f"{A}/x" + "y"\n'
        'C = dict(a=[1, (2.5, None)], b={"k": True})\n'
        'D = C["a"][1][0] * 2\nE = os.environ.get("NAME", "other")\nF = os.environ["HERE"]\n'
        'G = "-".join(["p", B])\nH = max(1, int(7.9), 3) % 5\n',
    )
    values, lines = read_config(path, {"HERE": "yes"})
    assert (
        values
        == {
            "A": -6,
            "B": "-6/xy",
            "C": {"a": [1, (2.5, None)], "b": {"k": True}},
            "D": 5.0,
            "E": "other",
            "F": "yes",
            "G": "p--6/xy",
            "H": 2,
        }
        and lines["D"] == 5
    )


def test_missing_parts_are_all_named_at_once():
    problems = to_flags({"data": 3}, 1).problems
    for name in ("model", "adam", "lr_scheduler"):
        assert any(problem.startswith(f"{name}: is missing") for problem in problems)
    assert any(problem.startswith("data = 3: ") for problem in problems)
    assert any(p.startswith("data.seq_len: is missing") for p in problems)


def test_command_line(tmp_path, capsys):
    assert main([str(tmp_path / "none.py"), "--world-size", "1"]) == 1
    missing = os.strerror(errno.ENOENT)
    assert capsys.readouterr().err == f"error: {tmp_path}/none.py: {missing}\n"
    with pytest.raises(SystemExit, match="2"):
        main([str(tmp_path / "none.py"), "--world-size", "0"])


def test_an_internlm_config_that_repeats_itself_is_refused(tmp_path):
    lines = ["a = [1, 1]", *["a = [a, a]"] * 30]
    (tmp_path / "config.py").write_text("\n".join(lines))
    with pytest.raises(ConfigError, match=r"line 16: .*\b100000\b"):
        read_config(tmp_path / "config.py")


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("mlp_ratio=MLP_RATIO", "mlp_ratio=1e308"),
        ('dtype="torch.float16"', "dtype=[1]"),
        ('dtype="torch.float16"', "dtype=1 .join(['a'])"),
        ("hidden_size=HIDDEN_SIZE", "hidden_size=10**400"),
        ("warmup_ratio=0.01", "warmup_ratio=1e305"),
    ],
)
def test_an_internlm_config_with_such_a_value(tmp_path, capsys, old, new):
    text = demo("7b")
    assert old in text
    path = written(tmp_path, text.replace(old, new, 1))
    assert exit_code(main, path, "--world-size", 8) in (1, 2)
    assert "error: " in capsys.readouterr().err
