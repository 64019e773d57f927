"""tools/generate.py --script: a GPT with other modules in it, of the script that trained it."""

import contextlib
from pathlib import Path

import pytest
import torch

from megatron.inference.generate import load_model
from tests.forkrun import run_ranks
from tests.load_tool import exit_code, load_tool
from tests.problems import assert_problem, raises
from tests.runs import SMALL, with_flags
from tools.shared.script_file import script_of

SCRIPT = '''
import torch
from torch import nn
from megatron.training import GPTModel, ModelType, get_args, pretrain
from pretrain_gpt import forward_step

class Own(nn.Module):
    def __init__(self, hidden, scale):
        super().__init__()
        self.up, self.down = nn.Linear(hidden, 2 * hidden), nn.Linear(hidden, hidden)
        self.scale = scale
        for p in self.parameters():
            nn.init.normal_(p, std=0.2)

    def forward(self, x):
        a, b = self.up(x).chunk(2, -1)
        return self.scale * self.down(a * b)

class Before(Own):
    """Looks at the token before, which a cache does not have."""

    def forward(self, x):
        return super().forward(torch.cat((x[:1], x[:-1])))

class Whole(GPTModel):
    def forward(self, *args, **kwargs):
        logits = super().forward(*args, **kwargs)
        return logits if kwargs.get("labels") is not None else -logits

def model_provider(pre_process=True, post_process=True):
    a = get_args()
    if a.kind == "gpt":
        return GPTModel()
    if a.kind == "torch":
        return nn.Linear(2, 2)
    model = (Whole if a.kind == "whole" else GPTModel)()
    kind = Before if a.kind == "before" else Own
    model.decoder.layers["1"].mlp = kind(a.hidden_size, a.own_scale)
    return model

def add_arguments(parser):
    parser.add_argument("--own-scale", type=float, default=1.0)
    parser.add_argument("--kind", default=KIND)

def main(argv=None):
    pretrain(None, model_provider, ModelType.encoder_or_decoder, forward_step,
             extra_args_provider=add_arguments, argv=argv)

if __name__ == "__main__":
    main()
'''
FLAGS = with_flags(
    SMALL,
    *"--mock-data --train-iters 8 --eval-iters 0 --lr 1e-2 --save-interval 8".split(),
    *"--tokenizer-type NullTokenizer --own-scale 3".split(),
)


def write(folder: Path, kind: str) -> str:
    path = folder / f"script_{kind}.py"
    path.write_text(SCRIPT.replace("default=KIND", f"default={kind!r}"))
    return str(path)


def _train(rank: int, world: int, path: str, argv: list[str]) -> None:
    scope: dict = {"__name__": "script"}
    exec(compile(Path(path).read_text(), path, "exec"), scope)
    with contextlib.suppress(SystemExit):
        scope["main"](argv)


@pytest.fixture(scope="module", params=["mlp", "before", "whole"])
def trained(request, tmp_path_factory) -> tuple[str, str, str]:
    """(kind, script, run directory)."""
    folder = tmp_path_factory.mktemp(request.param)
    path = write(folder, request.param)
    run_ranks(1, _train, path, [*FLAGS, "--save", str(folder / "run")], seconds=60.0)
    return request.param, path, str(folder / "run")


def test_the_text_of_a_changed_model(trained, tmp_path, capfd):
    """Its greedy text is that of the model without a cache, with the flags of the script that it
    was trained with; what a cache would change is refused."""
    kind, path, run = trained
    if kind != "mlp":
        with raises(ValueError, "own-model", "--script"):
            load_model(run, device="cpu", script=script_of(path))
        return
    model = load_model(run, device="cpu", script=script_of(path)).trained.model
    assert model.decoder.layers["1"].mlp.scale == 3.0
    tokens = [1, 2, 3]
    with torch.no_grad():
        for _ in range(5):
            tokens.append(int(model(torch.tensor([tokens]))[0, -1].argmax()))
    tool = load_tool("generate")
    words = [run, "1 2 3", "--max-new-tokens", "5", "--temperature", "0", "--script", path]
    assert exit_code(tool.main, *words) == 0
    assert capfd.readouterr().out.split() == [str(token) for token in tokens]

    for other, name in (("gpt", "decoder.layers.1.mlp"), ("torch", "Linear")):
        assert exit_code(tool.main, *words[:-1], write(tmp_path, other)) == 1
        assert name in capfd.readouterr().err
    assert exit_code(tool.main, *words[:-2]) == 1
    assert_problem(capfd.readouterr().err.splitlines()[-1], "own-model", "--script")


@pytest.mark.parametrize(
    "text",
    [
        "raise KeyError(1)",
        "x = 1",
        "not python",
    ],
)
def test_a_script_that_gives_no_model(text, tmp_path):
    (tmp_path / "s.py").write_text(text)
    with raises(ValueError, "script-fails", str(tmp_path / "s.py")):
        script_of(str(tmp_path / "s.py"))
