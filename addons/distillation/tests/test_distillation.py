"""Distillation against torch's formula in float64, in layouts that split student and teacher."""

from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch.utils.flop_counter import FlopCounterMode

from megatron.addons.distillation.loss import divergence
from megatron.addons.distillation.settings import read
from megatron.checkpoint import reading
from megatron.config.plan import fit
from megatron.config.plan.plan import make_plan
from megatron.parallel.context import Axis, ParallelContext
from megatron.parallel.sharding import sharding_of
from megatron.timers import Timers
from megatron.training.batch import MicroBatch
from megatron.training.build import build_run, make_tokenizer
from megatron.training.checkpointing.save import save_checkpoint
from megatron.training.launch.initialize import Runtime
from megatron.training.logging.flops import flops_per_sample
from megatron.training.run import Run
from megatron.training.step import train_step
from pretrain_gpt import forward_step
from tests.core.training.built_runs import built, config_of
from tests.forkrun import run_ranks
from tests.live_memory import LiveMemory
from tests.problems import raises
from tests.runs import EXACT, NO_DROPOUT, SMALL, same_tensors, train, with_flags

EOD = 210
FLAGS = (
    "--fp64 --clip-grad 0 --weight-decay 0 --eod-mask-loss --optimizer sgd --sgd-momentum 0 --lr 1 "
    "--lr-warmup-iters 0 --lr-decay-style constant --init-method-std 0.2 --seed 1"
).split()
OTHER = (
    "--num-layers 3 --num-attention-heads 2 --swiglu --normalization RMSNorm --seed 2 "
    "--untie-embeddings-and-output-weights --position-embedding-type rope"
).split()
WIDE = [*OTHER, "--hidden-size", "48", "--num-attention-heads", "4"]
EXPERTS = "--num-experts 4 --moe-router-topk 2 --moe-aux-loss-coeff 0".split()
SOFT = "--final-logit-softcapping 3".split()
BOTH = """\
intermediate_layer_pairs:
  - - decoder.final_layernorm
    - decoder.final_layernorm
  - [decoder.layers.1, decoder.layers.0, mse]
  - [decoder.layers.1.input_layernorm, decoder.layers.2.pre_mlp_layernorm]
logit_layers: [output_layer, output_layer]
skip_lm_loss: false
kd_loss_scale: 0.7
logit_kl_temperature: 2
"""
PAIRS = {"decoder.final_layernorm": ("decoder.final_layernorm", "cosine")} | {
    "decoder.layers.1": ("decoder.layers.0", "mse"),
    "decoder.layers.1.input_layernorm": ("decoder.layers.2.pre_mlp_layernorm", "cosine"),
}


def samples() -> torch.Tensor:
    """[8, 33] tokens, with ends of documents in some."""
    rows = torch.randint(0, 200, (8, 33), generator=torch.Generator().manual_seed(0))
    rows[0, ::3] = EOD
    rows[5, 1:20] = EOD
    return rows


def teacher_in(folder: Path, *flags: str) -> str:
    """A checkpoint of a model with its initial values."""
    run = built(*with_flags(FLAGS, *flags, "--save", str(folder)))
    save_checkpoint(run)
    return str(folder)


def run_of(rank: int, world: int, flags: list[str]) -> Run:
    config = config_of(*with_flags(FLAGS, *NO_DROPOUT, *flags))
    tokenizer = make_tokenizer(config)
    plan = make_plan(config, world, tokenizer.vocab_size)
    runtime = Runtime(
        torch.device("cpu"), ParallelContext(config.parallel, world, rank), world, rank
    )
    return build_run(config, plan, runtime, Timers(), tokenizer)


def step_of(rank: int, world: int, flags: list[str]) -> tuple[dict, float]:
    """(metrics, loss) of the first step, after which it is saved."""
    run = run_of(rank, world, flags)
    ctx = run.runtime.ctx
    parts = samples().split(run.config.training.micro_batch_size)[ctx.dp.rank :: ctx.dp.size]
    result = train_step(run, forward_step, map(MicroBatch, parts), 1)
    run.progress.iteration = 1
    save_checkpoint(run)
    return result.metrics, result.loss


def hidden(model, names) -> dict[str, torch.Tensor]:
    seen = {}
    for name in names:
        module = model.get_submodule(name)
        module.register_forward_hook(lambda m, i, out, name=name: seen.__setitem__(name, out))
    return seen


def formula(student: list[str], teacher: list[str], both: bool) -> tuple[dict, dict, float]:
    """The same by the definition: whole logits, torch's losses."""
    run = run_of(0, 1, student)
    model = run.model[0]
    told = built(*with_flags(FLAGS, *teacher)).model[0]
    of_student = hidden(model, PAIRS if both else ())
    of_teacher = hidden(told, [name for name, _ in PAIRS.values()] if both else ())
    temperature = 2.0 if both else 1.0
    for p in model.parameters():
        p.main_grad.zero_()
    sums = torch.zeros(5, dtype=torch.float64)
    for rows in samples().split(2):
        tokens, labels = rows[:, :-1], rows[:, 1:]
        mask = (tokens != EOD).double()
        with torch.no_grad():
            target = told(tokens)
        logits = model(tokens)
        lm = (F.cross_entropy(logits.transpose(1, 2), labels, reduction="none") * mask).sum()
        log_probs = [F.log_softmax(x / temperature, -1) for x in (logits, target)]
        kl = F.kl_div(*log_probs, reduction="none", log_target=True).sum(-1)
        kd = logits_loss = (kl * mask).sum()
        inter = torch.zeros(())
        total = kd
        if both:
            losses = []
            for name, (other, kind) in PAIRS.items():
                a, b = of_student[name], of_teacher[other]
                if kind == "mse":
                    loss = F.mse_loss(a, b, reduction="none").mean(-1)
                else:
                    one = torch.ones(a.shape[0] * a.shape[1])
                    loss = F.cosine_embedding_loss(
                        a.flatten(0, 1), b.flatten(0, 1), one, reduction="none"
                    ).view(a.shape[:2])
                losses.append((loss.t() * mask).sum())
            inter = sum(losses) / 3
            kd = logits_loss + inter * (logits_loss / inter).detach()
            total = lm + 0.7 * kd * (lm / kd).detach()
        (total / (8 * 32)).backward()
        sums += torch.stack([x.detach() for x in (lm, logits_loss, inter, total, mask.sum())])
    lm, logits_loss, inter, total, count = sums.tolist()
    weights = {
        sharding_of(p).name: p.detach() - p.main_grad * (8 * 32 / count) for p in model.parameters()
    }
    metrics = {"logits distillation loss": logits_loss / count, "total loss": total / count}
    if both:
        metrics["intermediate distillation loss"] = inter / count
    return weights, metrics, lm / count


LAYOUTS = {
    "tp1": (1, "", [], OTHER, True),
    "wider": (1, "", [], WIDE, False),
    "soft caps": (1, "", SOFT, [*OTHER, "--final-logit-softcapping", "5"], True),
    "tp2": (2, "--tensor-model-parallel-size 2", SOFT, WIDE, False),
    "tp2 sp": (2, "--tensor-model-parallel-size 2 --sequence-parallel", [], OTHER, True),
    "tp4 with a rank of padding": (4, "--tensor-model-parallel-size 4", [], WIDE, False),
    "cp2": (2, "--context-parallel-size 2", [], OTHER, True),
    "dp2 zero1": (2, "--use-distributed-optimizer", [], OTHER, True),
    "dp2 zero3": (2, "--data-parallel-sharding-strategy optim_grads_params", [], OTHER, True),
    "pp2": (2, "--pipeline-model-parallel-size 2", [], WIDE, False),
    "ep2 teacher": (2, "--expert-model-parallel-size 2", EXPERTS, [*OTHER, *EXPERTS], True),
    "ep2 student": (2, "--expert-model-parallel-size 2", EXPERTS, OTHER, True),
}
DAILY = ("tp1", "tp2", "tp2 sp", "cp2", "pp2")


@pytest.mark.parametrize(
    "name",
    [pytest.param(n, marks=() if n in DAILY else pytest.mark.campaign) for n in LAYOUTS],
)
def test_a_step_by_the_formula(name, tmp_path):
    world, layout, student, teacher, both = LAYOUTS[name]
    flags = [*student, "--export-kd-teacher-load", teacher_in(tmp_path / "teacher", *teacher)]
    if both:
        (tmp_path / "kd.yaml").write_text(BOTH)
        flags += ["--export-kd-cfg", str(tmp_path / "kd.yaml")]
    weights, metrics, lm = formula(student, teacher, both)
    flags += [*layout.split(), "--save", str(tmp_path / "save")]
    for got, loss in run_ranks(world, step_of, flags):
        assert loss == pytest.approx(lm, rel=1e-12)
        assert {key: got[key] for key in metrics} == pytest.approx(metrics, rel=1e-10)
    with reading.load(tmp_path / "save").reader() as reader:
        assert set(weights) <= set(reader.names())
        for of, expected in weights.items():
            saved = reader.read(of)[: len(expected)]  # of a vocabulary with another padding
            torch.testing.assert_close(saved, expected[: len(saved)], rtol=0, atol=1e-10)


def test_a_teacher_with_the_weights_of_the_student_teaches_nothing(tmp_path):
    teacher = teacher_in(tmp_path / "teacher", *NO_DROPOUT)
    flags = ["--clip-grad", "1", "--export-kd-teacher-load", teacher, "--save", str(tmp_path / "s")]
    run = run_of(0, 1, flags)
    result = train_step(run, forward_step, map(MicroBatch, samples().split(2)), 1)
    assert result.grad_norm == result.metrics["total loss"] == 0.0
    assert result.loss > 4  # that of the labels, which is logged


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_a_gradient_of_many_small_probabilities_keeps_its_digits(dtype):
    """... in 16 bits, where most of them are below the smallest number of fp16."""
    s, b, vocab = 3, 2, 60_000
    torch.manual_seed(0)
    student, teacher = (torch.randn(s, b, vocab).to(dtype) for _ in range(2))
    exact = student.double().requires_grad_()
    log_probs = [F.log_softmax(x.double() / 2, -1) for x in (exact, teacher)]
    expected = F.kl_div(*log_probs, reduction="none", log_target=True).sum(-1).t()
    (expected.sum() * 65536).backward()
    student.requires_grad_()
    losses = divergence(student, teacher, vocab_size=vocab, tp=Axis("tp"), temperature=2.0)
    (losses.sum() * 65536).backward()
    torch.testing.assert_close(losses.double(), expected.detach(), rtol=1e-5, atol=1e-6)
    error = (student.grad.double() - exact.grad).norm() / exact.grad.norm()
    assert error < {torch.float32: 1e-5, torch.bfloat16: 4e-3, torch.float16: 6e-4}[dtype]


def test_a_killed_run_resumes_bit_for_bit_and_saves_the_student_alone(tmp_path):
    teacher = teacher_in(tmp_path / "teacher", *OTHER)
    (tmp_path / "kd.yaml").write_text(BOTH)
    flags = with_flags(SMALL, "--mock-data", "--train-iters", "6", "--save-interval", "2")
    flags += ["--tensor-model-parallel-size", "2", "--export-kd-teacher-load", teacher]
    flags += ["--export-kd-cfg", str(tmp_path / "kd.yaml"), "--use-distributed-optimizer"]

    def words(name: str) -> list[str]:
        save = str(tmp_path / name / "save")
        return [*flags, "--save", save, "--load", save]

    whole = train(tmp_path / "whole", words("whole"), world=2)
    train(tmp_path / "killed", words("killed"), world=2, kill_at=4)
    resumed = train(tmp_path / "killed", words("killed"), world=2)
    assert resumed.resumes == [2]
    names = (*EXACT, "logits distillation loss", "intermediate distillation loss", "total loss")
    assert resumed.series(*names) == whole.series(*names)
    same_tensors(resumed.tensors(), whole.tensors())
    names = whole.tensors().keys()  # of two layers, and the teacher has three
    assert "decoder.layers.1.input_layernorm.weight" in names
    assert not any(name.startswith("decoder.layers.2.") for name in names)
    assert "kd-teacher-changed" not in resumed.first_rank_log
    # other settings are said
    (tmp_path / "kd.yaml").write_text("logit_kl_temperature: 3")
    more = with_flags(words("killed"), "--train-iters", "7", "--override-opt_param-scheduler")
    assert "[kd-teacher-changed]" in train(tmp_path / "killed", more, world=2).first_rank_log


def test_the_plan_has_the_memory_of_the_teacher(tmp_path):
    sizes = "--vocab-size 4096 --seq-length 128 --max-position-embeddings 128 --hidden-size 64"
    flags = with_flags([*NO_DROPOUT, "--tokenizer-type", "NullTokenizer"], *sizes.split())
    teacher = built(*flags, "--num-layers", "3", "--save", str(tmp_path / "teacher"))
    save_checkpoint(teacher)
    (tmp_path / "kd.yaml").write_text("skip_lm_loss: false")
    load = ["--export-kd-teacher-load", str(tmp_path / "teacher")]
    rows = torch.randint(0, 4000, (8, 129))

    def peak(*more: str) -> tuple[int, int]:
        """Bytes (by the plan, measured) that are more than without a teacher."""
        run = built(*flags, *more)
        train_step(run, forward_step, map(MicroBatch, rows.split(2)), 1)
        with LiveMemory() as memory:
            train_step(run, forward_step, map(MicroBatch, rows.split(2)), 2)
        return fit.fullest(run.config, run.plan).kinds.get("teacher", 0), memory.peak

    weights = sum(p.numel() * p.element_size() for p in teacher.model.parameters())
    nothing, plain = peak()
    assert nothing == 0
    for more in ([], ["--export-kd-cfg", str(tmp_path / "kd.yaml")]):
        planned, measured = peak(*load, *more)
        assert planned - weights == pytest.approx(measured - plain, rel=0.05)


def test_the_throughput_counts_the_teachers_forward(tmp_path):
    """... which torch counts, too."""
    flags = [*NO_DROPOUT, "--tokenizer-type", "NullTokenizer", "--vocab-size", "512", "--fp64"]
    flags = with_flags([*flags, "--attention-backend", "unfused"], "--seq-length", "32")
    save_checkpoint(built(*flags, "--num-layers", "3", "--save", str(tmp_path / "teacher")))
    rows = torch.randint(0, 500, (8, 33))
    for load in ([], ["--export-kd-teacher-load", str(tmp_path / "teacher")]):
        run = built(*flags, *load)
        with FlopCounterMode(display=False) as counter:
            train_step(run, forward_step, map(MicroBatch, rows.split(2)), 1)
        assert flops_per_sample(run.config, run.plan) * 8 == counter.get_total_flops()


@pytest.mark.parametrize(
    "text, line, words",
    [
        ("skip_lm_loss: 1", 1, ("skip_lm_loss",)),
        ("# one\nkd_loss_scale: 0", 2, ("kd_loss_scale", "0")),
        ("logit_kl_temperature: warm", 1, ("warm",)),
        ("kd_loss_scale: .inf", 1, ("kd_loss_scale",)),
        ("skip_lm_loss: true\ncriterion: null", 2, ("criterion", "skip_lm_loss")),
        ("logit_layers: [output_layer, lm_head]", 1, ("lm_head",)),
        ("intermediate_layer_pairs: [[a, b, cosinus]]", 1, ("cosinus",)),
        ("intermediate_layer_pairs: [a]", 1, ("['a']",)),
        ("kd_loss_scale: 1\nkd_loss_scale: 2", 2, ("kd_loss_scale",)),
    ],
)
def test_a_wrong_file_is_named_with_its_line(text, line, words, tmp_path):
    (tmp_path / "kd.yaml").write_text(text)
    with raises(ValueError, "kd-settings", f"kd.yaml:{line}", *words):
        read(str(tmp_path / "kd.yaml"))
    for broken in ("[", "- 1", "a: &a [*a]", "\x00"):
        (tmp_path / "kd.yaml").write_text(broken)
        with raises(ValueError, "kd-settings", "kd.yaml"):
            read(str(tmp_path / "kd.yaml"))
