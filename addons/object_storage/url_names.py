"""What is in an object store is called by its URL, and not by the path that stands for it here."""

import contextlib
import os
import re
from collections.abc import Iterator

from megatron.config.data import DataConfig


def with_urls(text: str, data: DataConfig) -> str:
    """A text in which the paths of `mirror` are the URLs that they stand for."""
    folder = re.escape(os.path.abspath(data.object_storage_cache_path or ""))
    return re.sub(rf"{folder}/files/[0-9a-f]{{16}}/(\w[\w+.-]*):", r"\1://", text)


@contextlib.contextmanager
def urls_in_errors(data: DataConfig) -> Iterator[None]:
    """ValueError and FileNotFoundError of what is read below name it by `with_urls`."""
    try:
        yield
    except (ValueError, FileNotFoundError) as error:
        text = with_urls(str(error), data)
        if text == str(error):
            raise
        code = re.search(r"( \[[a-z-]+\])?$", text)
        if code and "damaged" in code[0]:
            text = (
                f"{text.removesuffix(code[0])}; if it is good in the store, remove its copy: "
                f"--object-storage-cache-path {data.object_storage_cache_path}{code[0]}"
            )
        kind = FileNotFoundError if isinstance(error, FileNotFoundError) else ValueError
        raise kind(text).with_traceback(error.__traceback__) from error.__cause__
