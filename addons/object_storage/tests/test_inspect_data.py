"""tools/inspect_data.py of data in an object store: what it says of the same data here, by URL."""

from __future__ import annotations

import json

import pytest

from tests.problems import assert_reported
from tests.tools.test_inspect_data import ask, flags, refused, texts  # noqa: F401


@pytest.mark.parametrize("more", [[], ["--data-order", "epoch"]])
def test_data_in_an_object_store_have_their_url(texts, tmp_path, capsys, more):  # noqa: F811
    a, b = texts
    url = f"file://{b}"
    cache = ("--object-storage-cache-path", str(tmp_path / "cache"))
    local = flags("--data-path", "1", a, "3", b, *more)
    stored = flags("--data-path", "1", f"file://{a}", "3", url, *cache, *more)
    at = ("at", "--iteration", "2", "--")
    found, expected = ask(capsys, *at, *stored), ask(capsys, *at, *local)
    pieces = [piece for row in found["batch"] for piece in row["pieces"]]
    assert {piece["dataset"] for piece in pieces} == {f"file://{a}", url}
    assert json.loads(json.dumps(found).replace("file://", "")) == expected
    document = next(piece["document"] for piece in pieces if piece["dataset"] == url)
    find = ("find", "--document", str(document), "--prefix")
    found = ask(capsys, *find, url, "--", *stored)
    expected = ask(capsys, *find, b, "--", *local)
    assert found == expected | {"dataset": url} and found["shown"]
    assert_reported(
        refused(capsys, "find", "--document", "999", "--prefix", url, "--", *stored),
        "value-out-of-range",
        url,
    )
