"""Files in object stores (s3://bucket/path), through fsspec: opened, and asked again while a store
fails."""

from __future__ import annotations

import functools
import importlib
import json
import os
import re
import time
from collections.abc import Callable, Iterable, Mapping
from typing import Any, TypeVar

from megatron.problems import credentials_problem, printable

Result = TypeVar("Result")


# of a file: its size, and what the stores give it that another content does not have
_OF_CONTENT = ("ETag", "etag", "md5Hash", "generation")
_OF_TIME = ("LastModified", "mtime", "created")
_FACTS = ("size", *_OF_CONTENT, *_OF_TIME)
# Errors that another try does not change, by the names that boto, gcsfs and adlfs give them:
# no or wrong credentials, a name that no bucket can have.
_LASTING = re.compile(
    "Credential|ParamValidation|InvalidBucket|InvalidRegion|ProfileNotFound|Unauthori[sz]ed|"
    "AuthenticationError|RefreshError|SSOToken|InvalidToken|AuthorizationHeaderMalformed"
)
_LASTING_CODES = (401, 403)  # of HTTP


class StoreFailed(OSError):
    """A store that failed every time. The text is its last error, in one line."""

    def __init__(self, tries: int, error: Exception) -> None:
        text = printable(" ".join(str(error).split()))[:300]
        times = "once" if tries == 1 else f"{tries} times"
        super().__init__(f"tried {times}: {type(error).__name__}: {text}")


def open_store(url: str, **options: Any) -> tuple[Any, str]:
    """fsspec's file system of a URL, and the path in it. Raises ValueError for a URL that cannot be
    used here."""
    if problem := credentials_problem([url]):
        raise ValueError(f"{printable(url)}: {problem}")
    try:
        return importlib.import_module("fsspec.core").url_to_fs(url, **options)
    except ImportError as error:
        raise ValueError(
            f"{url}: {error}; run: pip install fsspec s3fs (or install this suite with its "
            "extra: [s3]) [package-missing]"
        ) from None
    except (ValueError, OSError) as error:  # of any store's own library
        text = printable(" ".join(str(error).split()))[:300]
        raise ValueError(
            f"{url}: {text}; give a URL such as s3://bucket/path [url-not-supported]"
        ) from None


def client(url: str) -> Any:
    """fsspec's file system for URLs of this kind, of which this process has one: it does not
    outlive a fork, nor may it be closed by the other process, so it is kept. Raises ValueError as
    `open_store` does."""
    if problem := credentials_problem([url]):
        raise ValueError(f"{printable(url)}: {problem}")
    return _client(url.partition("://")[0], os.getpid())


@functools.cache
def _client(protocol: str, process: int) -> Any:
    return open_store(f"{protocol}://", skip_instance_cache=True)[0]


def patiently(action: Callable[[], Result], waits: Iterable[float]) -> Result:
    """`action()`, and after each of `waits` (seconds) again while the store fails. Raises
    StoreFailed then, or at once where another try would not help; FileNotFoundError at once."""
    pauses = iter(waits)
    tries = 0
    while True:
        tries += 1
        try:
            return action()
        except FileNotFoundError:
            raise
        except Exception as error:  # every store has errors of its own
            pause = None if _lasts(error) else next(pauses, None)
            if pause is None:
                raise StoreFailed(tries, error) from error
            time.sleep(pause)


def _lasts(error: BaseException) -> bool:
    """Would another try fail, too? The error says so, or one that it was made of."""
    names = " ".join(kind.__name__ for kind in type(error).__mro__)
    code = getattr(error, "status", getattr(error, "code", None))
    response = getattr(error, "response", None)
    if isinstance(response, Mapping):  # botocore's
        names += " " + str(response.get("Error", {}).get("Code"))
        code = response.get("ResponseMetadata", {}).get("HTTPStatusCode", code)
    return (
        isinstance(error, PermissionError)
        or bool(_LASTING.search(names))
        or code in _LASTING_CODES
        or (error.__cause__ is not None and _lasts(error.__cause__))
    )


def read_range(
    files: Any, path: str, start: int, count: int, seconds: float | None = None
) -> bytes:
    """`count` bytes of a file from byte `start` on. Thread-safe. Raises what the store raises, and
    OSError where it gives more or less, or (a store that can be interrupted) takes longer than
    `seconds`."""
    limit = {"timeout": seconds} if seconds and files.async_impl else {}
    data = files.cat_file(path, start=start, end=start + count, **limit)
    if len(data) != count:
        raise OSError(f"gives {len(data)} bytes instead of {count} from byte {start} on")
    return data


def facts(info: Mapping[str, Any]) -> dict[str, Any]:
    """Of what a store says of a file: its size in bytes, and values that change with its
    content."""
    return {key: info.get(key) for key in _FACTS}


def version(info: Mapping[str, Any]) -> str:
    """Of what a store says of a file: a text that is another for another content, and the same
    whether the file was listed or looked at, where times may be rounded and quotes missing."""
    values = {key: str(info[key]).strip('"') for key in _OF_CONTENT if info.get(key)}
    if not values:
        values = {key: str(info[key]) for key in _OF_TIME if info.get(key)}
        values = dict(list(values.items())[:1])
    return json.dumps([info["size"], values])


def version_now(files: Any, path: str, seconds: float) -> str:
    """The `version` of a file as it is at this moment, at most `seconds` waited for (a store that
    can be interrupted). Thread-safe. Raises what the store raises."""
    files.invalidate_cache()
    return version(files.info(path, **({"timeout": seconds} if files.async_impl else {})))
