"""Chat templates: Jinja programs that write a conversation as one text, and where in that text the
assistant's turns stand. The only importer of jinja2.

Templates are those of Hugging Face tokenizers (tokenizer_config.json, chat_template.jinja). They
run in jinja2's sandbox, see plain JSON values only, and can neither read files nor import.
"""

from __future__ import annotations

import datetime
import functools
import hashlib
import importlib
import json
import re
import secrets
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

from megatron.small_files import parse_json, path_inside, read_text

from .messages import Message

JINJA = (3, 1, 6)  # earlier ones let a template out of the sandbox
START = "generation_start"
END = "generation_end"
VARIABLES = ("messages", "tools", "add_generation_prompt")  # variables, besides the special tokens
CALLS = (("tool_calls",), ("function_call",))
REASONING = ("reasoning_content", "thinking")  # two names of one thing
_CHATML = (
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\n' }}"
    "{% if message['role'] == 'assistant' %}"
    "{% generation %}{{ message['content'] + '<|im_end|>' }}{% endgeneration %}"
    "{% else %}{{ message['content'] + '<|im_end|>' }}{% endif %}{{ '\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
BUILT_IN = {
    "chatml": _CHATML,
    "internlm2": "{{ bos_token }}" + _CHATML,
    "llama3": (
        "{{ bos_token }}{% for message in messages %}"
        "{{ '<|start_header_id|>' + message['role'] + '<|end_header_id|>\n\n' }}"
        "{% if message['role'] == 'assistant' %}"
        "{% generation %}{{ message['content'] | trim + '<|eot_id|>' }}{% endgeneration %}"
        "{% else %}{{ message['content'] | trim + '<|eot_id|>' }}{% endif %}{% endfor %}"
        "{% if add_generation_prompt %}"
        "{{ '<|start_header_id|>assistant<|end_header_id|>\n\n' }}{% endif %}"
    ),
    "zephyr": (
        "{% for message in messages %}"
        "{% if message['role'] == 'assistant' %}{{ '<|assistant|>\n' }}"
        "{% generation %}{{ message['content'] + eos_token }}{% endgeneration %}"
        "{% elif message['role'] == 'user' %}{{ '<|user|>\n' + message['content'] + eos_token }}"
        "{% elif message['role'] == 'system' %}"
        "{{ '<|system|>\n' + message['content'] + eos_token }}"
        "{% else %}{{ raise_exception('zephyr has no role ' + message['role']) }}{% endif %}"
        "{{ '\n' }}{% endfor %}"
        "{% if add_generation_prompt %}{{ '<|assistant|>\n' }}{% endif %}"
    ),
}
_MARKED = re.compile(r"\{%[-+]?\s*generation\s*[-+]?%\}")
_LITERAL = re.compile(r"<\|\w+\|>")


@dataclass(frozen=True)
class Rendered:
    """A conversation as text, and the parts of it that the assistant wrote, each with its end
    token: (first, end) characters."""

    text: str
    spans: tuple[tuple[int, int], ...]


@dataclass(frozen=True)
class ChatTemplate:
    """A template: its Jinja source, its name, and the special tokens that it may use by variables
    (`bos_token`, `eos_token`). Raises ValueError, when made, if jinja2 is missing or the source is
    not Jinja."""

    name: str
    source: str
    variables: tuple[tuple[str, str], ...] = ()

    def __post_init__(self) -> None:
        self._program  # noqa: B018 (a syntax error is reported here)

    def __getstate__(self) -> dict[str, Any]:
        """For another process, which compiles the source itself."""
        return {"name": self.name, "source": self.source, "variables": self.variables}

    @property
    def fingerprint(self) -> str:
        """A hash of the source, 64 hexadecimal digits."""
        return hashlib.sha256(self.source.encode()).hexdigest()

    @property
    def literals(self) -> list[str]:
        """Texts such as <|im_end|> in the source: what the template marks turns with."""
        return list(dict.fromkeys(_LITERAL.findall(self.source)))

    def text(
        self,
        messages: Sequence[Message],
        *,
        add_generation_prompt: bool = False,
        tools: Sequence[Mapping[str, Any]] | None = None,
    ) -> str:
        """The conversation as text. With `add_generation_prompt` it ends where the assistant is to
        answer. Raises ValueError where the template refuses it."""
        return self._render(messages, add_generation_prompt, tools, {})

    def marked(
        self,
        messages: Sequence[Message],
        control: Iterable[str],
        tools: Sequence[Mapping[str, Any]] | None = None,
    ) -> Rendered:
        """The text and the assistant's spans: what the template has between {% generation %} and
        {% endgeneration %}; of a template without these, the content of each assistant message up
        to and including the first of the `control` tokens after it. A message with "weight" 0 has
        no span. Raises ValueError if the spans cannot be found."""
        if not any(message["role"] == "assistant" for message in messages):
            raise ValueError("has no assistant message, so there is nothing to train")
        self.check_written(messages, tools, (*CALLS, REASONING))
        if _MARKED.search(self.source):
            rendered = self._between_marks(messages, tools)
        else:
            rendered = self._derived(messages, tuple(control), tools)
        return _without_weight_0(rendered, messages)

    def check_written(
        self,
        messages: Sequence[Message],
        tools: Sequence[Mapping[str, Any]] | None,
        keys: Sequence[Sequence[str]] = CALLS,
    ) -> None:
        """Raise ValueError for tools, or one of the `keys` of messages (each with all its names),
        that the template does not write. Ids of calls are no part of this: many have none."""
        for names in keys:
            written = any(name in self.source for name in names)
            if not written and any(message.get(names[0]) for message in messages):
                raise ValueError(
                    f'has "{names[0]}", which the chat template {self.name} does not write'
                )
        if not tools:
            return
        try:
            without = self.text(messages)
        except ValueError:  # it needs tools
            return
        if self.text(messages, tools=tools) == without:
            raise ValueError(
                f'has "tools", which the chat template {self.name} does not write; choose another '
                "with --chat-template, or remove them"
            )

    @functools.cached_property
    def reads(self) -> frozenset[str]:
        """The variables that the template reads and nobody gives it here."""
        meta = importlib.import_module("jinja2.meta")
        environment = self._program.environment
        provided = {*VARIABLES, START, END, *dict(self.variables), *environment.globals}
        return frozenset(meta.find_undeclared_variables(environment.parse(self.source)) - provided)

    @functools.cached_property
    def _program(self) -> Any:
        jinja2 = _jinja2()
        try:
            return _environment(jinja2).from_string(self.source)
        # too deep for jinja2's parser, or for Python's of the code that it makes
        except (RecursionError, MemoryError, SyntaxError, ValueError, OverflowError) as error:
            raise ValueError(
                f"chat template {self.name}: cannot be compiled ({type(error).__name__}) "
                "[chat-template-malformed]"
            ) from None
        except jinja2.TemplateError as error:
            line = f", line {error.lineno}" if getattr(error, "lineno", None) else ""
            raise ValueError(
                f"chat template {self.name}{line}: {error} [chat-template-malformed]"
            ) from None

    def _render(
        self,
        messages: Sequence[Message],
        add_generation_prompt: bool,
        tools: Sequence[Mapping[str, Any]] | None,
        marks: Mapping[str, str],
    ) -> str:
        try:
            return self._program.render(
                messages=messages,
                tools=tools,
                documents=None,
                add_generation_prompt=add_generation_prompt,
                **dict(self.variables),
                **marks,
            )
        # a template is foreign code: besides TemplateError it raises what its operations raise
        except Exception as error:
            raise ValueError(
                f"the chat template {self.name} refuses it ({type(error).__name__}: {error})"
            ) from None

    def _between_marks(
        self, messages: Sequence[Message], tools: Sequence[Mapping[str, Any]] | None
    ) -> Rendered:
        """The text without marks, and where they stood. The marks are random, so that no message
        can hold one."""
        key = secrets.token_hex(16)
        marks = {START: f"<{key}>", END: f"</{key}>"}
        sections = re.split(f"(</?{key}>)", self._render(messages, False, tools, marks))
        text = ""
        spans = []
        for mark, section in zip(["", *sections[1::2]], sections[::2], strict=True):
            if mark == marks[START]:
                spans.append((len(text), len(text) + len(section)))
            text += section
        alternate = sections[1::2] == [*marks.values()] * (len(sections) // 4)
        if not alternate or not any(first < end for first, end in spans):
            raise ValueError(
                f"the chat template {self.name} has no text, or another block, within "
                "{% generation %}"
            )
        return Rendered(text, tuple(spans))

    def _derived(
        self,
        messages: Sequence[Message],
        control: Sequence[str],
        tools: Sequence[Mapping[str, Any]] | None,
    ) -> Rendered:
        text = self.text(messages, tools=tools)
        ends = re.compile("|".join(map(re.escape, sorted(control, key=len, reverse=True))) or "$^")
        spans = []
        for number, message in enumerate(messages):
            if message["role"] != "assistant":
                continue
            if message.get("tool_calls"):
                raise ValueError(
                    f"message {number + 1} calls tools, and the chat template {self.name} does not "
                    "mark what the assistant writes with {% generation %}"
                )
            # the same conversation with another content there: what is around it is the template's
            probe = secrets.token_hex(16)
            probed = [*messages[:number], {**message, "content": probe}, *messages[number + 1 :]]
            before, _, after = self.text(probed, tools=tools).partition(probe)
            end = ends.search(after)
            if end is None:
                raise ValueError(
                    f"the chat template {self.name} writes no special token after an assistant "
                    "message, so the model would not learn to stop"
                )
            content = message["content"]
            forms = (content, content.strip(), content.rstrip(), content.lstrip())
            tail = after[: end.end()]
            written = next((form for form in forms if text.startswith(before + form + tail)), None)
            if written is None:
                raise ValueError(
                    f"the chat template {self.name} changes message {number + 1}, and does not "
                    "mark what the assistant writes with {% generation %}"
                )
            prompt = self.text(messages[:number], add_generation_prompt=True, tools=tools)
            # white space between the prompt and the content is written by the assistant
            header = before[len(prompt) :] if before.startswith(prompt) else before
            first = len(before) - (len(header) if not header.strip() else 0)
            spans.append((first, len(before + written + tail)))
        return Rendered(text, tuple(spans))


def _without_weight_0(rendered: Rendered, messages: Sequence[Message]) -> Rendered:
    weights = [message.get("weight", 1) for message in messages if message["role"] == "assistant"]
    if all(weights):
        return rendered
    if len(weights) != len(rendered.spans):
        raise ValueError('has a "weight", but not one marked part for each assistant message')
    spans = tuple(span for span, weight in zip(rendered.spans, weights, strict=True) if weight)
    if not spans:
        raise ValueError("has no assistant message of weight 1, so there is nothing to train")
    return Rendered(rendered.text, spans)


def find_template(
    name: str | None, folder: str | None, variables: Mapping[str, str]
) -> ChatTemplate:
    """The template of this name (`BUILT_IN`), of this file, or, for None, the one in the
    tokenizer's `folder`. Raises ValueError with flag and remedy."""
    built_in = ", ".join(BUILT_IN)
    if name in BUILT_IN:
        source = BUILT_IN[name]
        missing = [
            variable
            for variable in ("bos_token", "eos_token")
            if variable in source and variable not in variables
        ]
        if missing:
            raise ValueError(
                f"--chat-template {name}: uses {missing[0]}, which the tokenizer does not have; "
                "choose another template [flag-not-with-tokenizer]"
            )
    elif name is not None:
        source = _read(Path(name), f"--chat-template {name}", f"; built in are {built_in}")
    else:
        own_template = template_in_folder(Path(folder)) if folder else None
        if own_template is None:
            raise ValueError(
                "--chat-template is missing: the tokenizer has no chat template of its own; give "
                f"one of {built_in}, or a file with a Jinja template [flag-missing]"
            )
        name, source = own_template
    return ChatTemplate(name, source, tuple(sorted(variables.items())))


def template_in_folder(folder: Path) -> tuple[str, str] | None:
    """(file, source) of a Hugging Face tokenizer's template; of several, the one named default."""
    folder = folder if folder.is_dir() else folder.parent
    file = path_inside(folder, "chat_template.jinja")
    if file.is_file():
        return str(file), _read(file, str(file), "")
    file = path_inside(folder, "tokenizer_config.json")
    if not file.is_file():
        return None
    try:
        template = parse_json(_read(file, str(file), "")).get("chat_template")
    except (json.JSONDecodeError, AttributeError) as error:
        raise ValueError(
            f"{file}: not a JSON object ({error}) [tokenizer-file-malformed]"
        ) from None
    if isinstance(template, list):
        by_name = {
            entry.get("name"): entry.get("template")
            for entry in template
            if isinstance(entry, dict)
        }
        template = by_name.get("default")
    return (str(file), template) if isinstance(template, str) else None


def _read(file: Path, subject: str, hint: str) -> str:
    try:
        return read_text(file)
    except (OSError, UnicodeDecodeError) as error:
        reason = getattr(error, "strerror", None) or error
        raise ValueError(
            f"{subject}: cannot be read ({reason}){hint} [file-not-readable]"
        ) from None


def _jinja2() -> ModuleType:
    try:
        jinja2 = importlib.import_module("jinja2")
        importlib.import_module("jinja2.ext")
        importlib.import_module("jinja2.sandbox")
    except ImportError as error:
        raise ValueError(
            f"chat templates: need the package jinja2 ({error}); run: pip install jinja2 "
            "[package-missing]"
        ) from None
    version = tuple(int(number) for number in re.findall(r"\d+", jinja2.__version__)[:3])
    if version < JINJA:
        raise ValueError(
            f"chat templates: jinja2 {jinja2.__version__} has known ways out of its sandbox; run: "
            "pip install -U jinja2 [package-missing]"
        )
    return jinja2


def _environment(jinja2: Any) -> Any:
    """The environment in which transformers runs templates: the same settings, filters and
    functions."""

    class GenerationTag(jinja2.ext.Extension):
        """{% generation %} ... {% endgeneration %}: the text between, with a mark at each end."""

        tags = frozenset({"generation"})

        def parse(self, parser: Any) -> list[Any]:
            line = next(parser.stream).lineno
            body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
            nodes = jinja2.nodes
            first, last = (
                nodes.Output([nodes.Name(name, "load")], lineno=line) for name in (START, END)
            )
            return [first, *body, last]

    class Namespace(jinja2.utils.Namespace):
        """Jinja's, without attributes that begin with an underscore."""

        def __setitem__(self, name: str, value: object) -> None:
            if str(name).startswith("_"):
                raise jinja2.exceptions.SecurityError(f"attribute {name} of a namespace")
            super().__setitem__(name, value)

    environment = jinja2.sandbox.ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[GenerationTag, jinja2.ext.loopcontrols]
    )
    environment.filters["tojson"] = _to_json
    environment.globals["raise_exception"] = _raiser(jinja2.TemplateError)
    environment.globals["strftime_now"] = lambda form: datetime.datetime.now().strftime(form)
    environment.globals["namespace"] = Namespace
    return environment


def _to_json(
    value: object,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """As text: Jinja's own filter escapes HTML."""
    return json.dumps(
        value,
        ensure_ascii=ensure_ascii,
        indent=indent,
        separators=separators,
        sort_keys=sort_keys,
    )


def _raiser(kind: type[Exception]) -> Callable[[str], None]:
    def raise_exception(message: str) -> None:
        raise kind(message)

    return raise_exception
