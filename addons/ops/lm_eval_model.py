"""A checkpoint as a model of EleutherAI's lm-eval: `--model megatron_gpt`. The only importer of
lm_eval; importing this module registers the model."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import lm_eval
import lm_eval.models  # noqa: F401 (its own models; it does this only while none is registered)
from lm_eval.api.model import TemplateLM
from lm_eval.api.registry import register_model
from lm_eval.tasks import TaskManager

from megatron.data.tokenizers.base import Tokenizer
from megatron.inference.engine import Engine, Request
from megatron.inference.load_model import TrainedModel, open_trained_model
from megatron.inference.sampling import Sampling
from megatron.inference.text import TextStream
from megatron.model.gpt import GPTModel

from .perplexity import TextWindow, score, windows

NAME = "megatron_gpt"
DEVICES = ("auto", "cpu", "cuda", "xpu")
LM_EVAL_DEVICE = "cuda:0"  # what the lm_eval command gives without --device, GPU or not
FILES = ("vocab_file", "merge_file", "tokenizer_model")


@register_model(NAME)
class MegatronGPT(TemplateLM):
    """The model of a checkpoint directory, written by any layout, in this process.

    Model arguments: `checkpoint` (required), `ckpt_step`, `max_length` (default: the positions of
    the model), `max_gen_toks`, `add_bos_token` (default: as the tokenizer does), `chat_template`
    (for --apply_chat_template; default: the tokenizer's), `dtype` (of `load_model`), `vocab_file`,
    `merge_file`, `tokenizer_model`. Raises ValueError for a checkpoint that cannot be read.
    """

    def __init__(  # noqa: PLR0913
        self,
        checkpoint: str,
        ckpt_step: int | None = None,
        batch_size: int | str = 8,
        max_batch_size: int | None = None,
        device: str | None = None,
        max_length: int | None = None,
        max_gen_toks: int = 256,
        add_bos_token: bool | None = None,
        chat_template: str | None = None,
        dtype: str = "auto",
        **files: str,
    ) -> None:
        super().__init__()
        unknown = sorted(files.keys() - set(FILES))
        if unknown:
            raise ValueError(f"--model_args: {NAME} has no argument {', '.join(unknown)}")
        if not str(batch_size).isdecimal() or int(batch_size) < 1:
            raise ValueError(f"--batch_size {batch_size}: {NAME} takes a number, 1 or more")
        if device in (None, LM_EVAL_DEVICE):
            device = "auto"
        if device not in DEVICES:
            raise ValueError(f"--device {device}: {NAME} takes {', '.join(DEVICES)}")
        self._where = (str(checkpoint), ckpt_step, files, device, dtype)
        trained = self._load()
        self.use(trained.model, trained.tokenizer, int(batch_size), max_length, add_bos_token)
        self._tokenizer_folder = trained.config.data.tokenizer_model
        self._template_name = chat_template
        self.max_gen_toks = max_gen_toks
        self._engine: Engine | None = None

    def use(
        self,
        model: GPTModel,
        tokenizer: Tokenizer,
        batch_size: int,
        max_length: int | None = None,
        add_bos_token: bool | None = None,
    ) -> None:
        """Score with this model; the defaults are those of the model arguments."""
        self._model = model
        self._tokens = tokenizer
        self.batch_size = batch_size
        self.max_length = max_length or model.max_positions
        if add_bos_token is None:
            add_bos_token = tokenizer.tokenize("a")[:1] == [tokenizer.bos]
        self._add_bos = add_bos_token
        if tokenizer.eod is None:
            raise ValueError("the tokenizer has no end-of-document token, which ends an answer")
        self._eod: int = tokenizer.eod

    def _load(self) -> TrainedModel:
        checkpoint, step, files, device, dtype = self._where
        return open_trained_model(checkpoint, step, files, device, dtype=dtype)

    @property
    def eot_token_id(self) -> int:
        """The token that ends a document."""
        return self._eod

    @property
    def prefix_token_id(self) -> int:
        """The token before a text without context: begin of text, else end of document."""
        return self._eod if self._tokens.bos is None else self._tokens.bos

    def tok_encode(
        self, string: str, add_special_tokens: bool | None = None, **_: Any
    ) -> list[int]:
        """The ids of a text in which special tokens are those tokens."""
        ids = self._tokens.tokenize_spans(string, ())[0].tolist()
        begins = ids[:1] == [self._tokens.bos]
        if add_special_tokens is not False and self._add_bos and not begins:
            return [self._tokens.bos, *ids]
        return ids

    def _loglikelihood_tokens(
        self,
        requests: Sequence[tuple[tuple[str, str], list[int], list[int]]],
        **kwargs: Any,
    ) -> list[tuple[float, bool]]:
        pending = (
            TextWindow((context + target)[-(self.max_length + 1) :][:-1], target)
            for _, context, target in requests
        )
        answers = []
        for (texts, _, _), scored in zip(
            requests, score(self._model, pending, self.batch_size), strict=True
        ):
            answers.append((-float(scored.losses.sum(dtype="f8")), bool(scored.greedy.all())))
            self.cache_hook.add_partial("loglikelihood", texts, answers[-1])
        return answers

    def loglikelihood_rolling(self, requests: Sequence[Any], **_: Any) -> list[float]:
        """The log-likelihood of each text, every token predicted once."""
        answers = []
        for request in requests:
            (text,) = request.args
            ids = self.tok_encode(text)
            pending = windows(ids, self.prefix_token_id, self.max_length, self.max_length)
            scores = score(self._model, pending, self.batch_size)
            answers.append(-sum(float(scored.losses.sum(dtype="f8")) for scored in scores))
            self.cache_hook.add_partial("loglikelihood_rolling", (text,), answers[-1])
        return answers

    def generate_until(self, requests: Sequence[Any], **kwargs: Any) -> list[str]:
        """The continuation of each context, up to its first stop string. Raises ValueError if the
        model has no positions left for a context."""
        asked = [self._request(*request.args) for request in requests]
        generated: list[list[int]] = [[] for _ in asked]
        streams = [
            TextStream(request.prompt, self._tokens.detokenize, stop) for request, stop in asked
        ]
        if self._engine is None:
            # the cache takes a model over, so that it needs one of its own
            self._engine = Engine(self._load().model, self.batch_size, self.max_length)
        for number, generation, token in self._engine.run(request for request, _ in asked):
            if token is None:
                continue
            generated[number].append(token.id)
            streams[number].push(token.id)
            if streams[number].stopped:
                self._engine.stop(generation)
        answers = []
        for request, ids, (_, stop) in zip(requests, generated, asked, strict=True):
            answers.append(before(self._tokens.detokenize(ids), stop))
            self.cache_hook.add_partial("generate_until", request.args, answers[-1])
        return answers

    def _request(self, context: str, options: dict[str, Any]) -> tuple[Request, list[str]]:
        stop = options.get("until") or []
        stop = [stop] if isinstance(stop, str) else list(stop)
        count = int(
            options.get("max_gen_toks") or options.get("max_new_tokens") or self.max_gen_toks
        )
        room = self.max_length - count
        if room < 1:
            raise ValueError(
                f"max_gen_toks {count}: must be less than the {self.max_length} positions of the "
                "model"
            )
        temperature = float(options.get("temperature") or 0.0)
        sampling = Sampling(
            temperature if options.get("do_sample", temperature > 0) else 0.0,
            top_p=float(options.get("top_p") or 1.0),
            top_k=int(options.get("top_k") or 0),
        )
        prompt = self.tok_encode(context)[-room:] or [self.prefix_token_id]
        return Request(prompt, count, sampling, (self._eod,)), stop

    # --apply_chat_template

    @property
    def _template(self) -> Any:
        from ..finetuning.encode import template_for

        return template_for(self._tokens, self._template_name, self._tokenizer_folder)

    def apply_chat_template(
        self, chat_history: list[dict[str, str]], add_generation_prompt: bool = True
    ) -> str:
        """The prompt of a conversation. Raises ValueError without a chat template."""
        from ..finetuning.messages import checked

        messages = checked(chat_history)
        prompt: str = self._template.text(messages, add_generation_prompt=add_generation_prompt)
        return prompt

    def chat_template(self, chat_template: bool | str = False) -> str | None:
        """The source of the template, if one is wanted."""
        return self._template.source if chat_template else None

    @property
    def tokenizer_name(self) -> str:
        """For lm-eval's cache of requests."""
        return f"{self._where[0]}-{self._template_name}".replace("/", "__")


def before(text: str, stop: Iterable[str]) -> str:
    """A text up to the first of the strings in `stop`."""
    for end in stop:
        if end:
            text = text.partition(end)[0]
    return text


def read_tasks(file: str) -> dict[str, Any]:
    """The tasks of a YAML file by name, with their data. Raises what lm-eval raises."""
    return TaskManager(include_defaults=False).load([file])["tasks"]


def task_scores(model: MegatronGPT, tasks: dict[str, Any]) -> dict[str, float]:
    """The scores of such tasks, by task/metric."""
    evaluated = lm_eval.evaluate(
        model, {"tasks": tasks, "groups": {}}, bootstrap_iters=0, log_samples=False
    )
    return {
        f"{task}/{metric.removesuffix(',none')}": float(value)
        for task, values in evaluated["results"].items()
        for metric, value in values.items()
        if isinstance(value, float) and "_stderr" not in metric
    }
