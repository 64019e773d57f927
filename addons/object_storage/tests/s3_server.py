"""An S3 server of the tests' own (moto), which needs no network."""

import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import fsspec
import pytest


@contextmanager
def serving(folder: Path) -> Iterator[str]:
    """The URL of an empty bucket; the environment says where its server is, whose log is in
    `folder`. fsspec keeps the file systems it made: the one of an earlier server is forgotten."""
    fsspec.get_filesystem_class("s3").clear_instance_cache()
    log = folder / "log"
    with log.open("w") as output:
        server = subprocess.Popen(
            [sys.executable, "-u", "-m", "moto.server", "-H", "127.0.0.1", "-p", "0"],
            stdout=output,
            stderr=subprocess.STDOUT,
        )
    try:
        deadline = time.monotonic() + 60
        while "Running on http://" not in log.read_text():
            assert server.poll() is None and time.monotonic() < deadline, log.read_text()
            time.sleep(0.05)
        address = log.read_text().partition("Running on ")[2].split()[0]
        with pytest.MonkeyPatch.context() as patch:
            for name, value in (
                ("AWS_ACCESS_KEY_ID", "test"),
                ("AWS_SECRET_ACCESS_KEY", "test"),
                ("AWS_DEFAULT_REGION", "us-east-1"),
                ("AWS_ENDPOINT_URL", address),
            ):
                patch.setenv(name, value)
            request = urllib.request.Request(f"{address}/bucket", method="PUT")
            urllib.request.urlopen(request, timeout=30).close()
            yield "s3://bucket"
    finally:
        server.kill()
        server.wait()
