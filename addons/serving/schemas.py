"""The bodies of requests as OpenAI's API has them, checked, and errors in its form. Fields that are
not known are ignored, as clients send many; those that would change the answer are refused."""

from __future__ import annotations

import json
from typing import Annotated, Any, TypeVar, cast

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

# Checked up to its first wrong element: a description of each of 250,000 takes a minute and 1 GB.
_Element = TypeVar("_Element")
_List = Annotated[list[_Element], Field(fail_fast=True)]

MOST_STOPS = 16
MOST_ANSWERS = 64


class ApiError(Exception):
    """An answer with another status than 200, in OpenAI's form."""

    def __init__(
        self,
        status: int,
        message: str,
        kind: str = "invalid_request_error",
        param: str | None = None,
        code: str | None = None,
    ):
        super().__init__(message)
        self.status = status
        self.body = {"error": {"message": message, "type": kind, "param": param, "code": code}}


class StreamOptions(BaseModel):
    """What a stream has in addition to the text."""

    include_usage: bool = False


class _Body(BaseModel):
    """What both endpoints take."""

    model_config = ConfigDict(strict=True, extra="ignore")

    model: str | None = None
    max_tokens: int | None = Field(None, ge=1)
    temperature: float | None = Field(1.0, ge=0.0, le=100.0, allow_inf_nan=False)
    top_p: float | None = Field(1.0, gt=0.0, le=1.0)
    top_k: int | None = Field(0, ge=-1)
    repetition_penalty: float | None = Field(1.0, gt=0.0, le=100.0)
    n: int | None = Field(1, ge=1, le=MOST_ANSWERS)
    stop: str | _List[str] | None = None
    seed: int | None = Field(None, ge=-(2**63), lt=2**63)
    stream: bool | None = False
    stream_options: StreamOptions | None = None
    frequency_penalty: float | None = 0.0
    presence_penalty: float | None = 0.0
    logit_bias: Any = None

    @model_validator(mode="after")
    def _supported(self) -> _Body:
        for name in ("frequency_penalty", "presence_penalty", "logit_bias"):
            if getattr(self, name):
                raise ValueError(f"{name} is not supported; use repetition_penalty")
        if len(self.stop_strings) > MOST_STOPS or any(
            len(text) > 1000 for text in self.stop_strings
        ):
            raise ValueError(f"stop: at most {MOST_STOPS} strings of up to 1000 characters")
        return self

    @property
    def stop_strings(self) -> list[str]:
        """The strings that end an answer."""
        return [self.stop] if isinstance(self.stop, str) else self.stop or []


class CompletionBody(_Body):
    """POST /v1/completions."""

    prompt: str | _List[str] | _List[int] | _List[_List[int]]
    logprobs: int | None = Field(None, ge=0, le=20)
    echo: bool | None = False
    best_of: int | None = None
    suffix: str | None = None

    @model_validator(mode="after")
    def _completion(self) -> CompletionBody:
        if self.best_of not in (None, self.n or 1):
            raise ValueError("best_of must equal n")
        if self.suffix:
            raise ValueError("suffix is not supported")
        if self.echo and self.logprobs is not None:
            raise ValueError("echo with logprobs is not supported")
        return self

    @property
    def prompts(self) -> list[str] | list[list[int]]:
        """Each prompt as text or as token ids."""
        if isinstance(self.prompt, str):
            return [self.prompt]
        if self.prompt and isinstance(self.prompt[0], int):
            return [self.prompt]
        # by its first item
        return cast(list[str] | list[list[int]], self.prompt)

    @property
    def new_tokens(self) -> int | None:
        """The most tokens of an answer, None if the body does not say."""
        return self.max_tokens

    @property
    def alternatives(self) -> int | None:
        """Most likely tokens wanted with each token, None without log-probabilities."""
        return self.logprobs


class ChatBody(_Body):
    """POST /v1/chat/completions."""

    messages: list[Any] = Field(min_length=1)
    max_completion_tokens: int | None = Field(None, ge=1)
    logprobs: bool | None = False
    top_logprobs: int | None = Field(None, ge=0, le=20)
    tools: _List[dict[str, Any]] | None = None

    @property
    def new_tokens(self) -> int | None:
        """As of CompletionBody."""
        return self.max_completion_tokens or self.max_tokens

    @property
    def alternatives(self) -> int | None:
        """As of CompletionBody."""
        return (self.top_logprobs or 0) if self.logprobs else None


def read_json(data: bytes) -> dict[str, Any]:
    """The JSON object that a body is. Raises ApiError."""
    try:
        value = json.loads(data)
    except (ValueError, RecursionError) as error:
        raise ApiError(400, f"the body is not JSON ({str(error)[:200]})") from None
    if not isinstance(value, dict):
        raise ApiError(400, "the body is not a JSON object")
    return value


def parse(kind: type[BaseModel], data: Any) -> Any:
    """The body as `kind`. Raises ApiError naming the first field that is wrong."""
    try:
        return kind.model_validate(data)
    except ValidationError as error:
        first = error.errors(include_url=False, include_input=False, include_context=False)[0]
        path = [str(part) for part in first["loc"]]
        name = path[0] if path else None
        text = first["msg"].removeprefix("Value error, ")
        message = f"{name}: {text}" if name else text
        raise ApiError(400, message, param=name) from None
