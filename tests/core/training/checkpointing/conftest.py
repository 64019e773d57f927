"""Data for runs that save."""

import pytest

from tests.runs import write_text


@pytest.fixture(scope="session")
def data(tmp_path_factory) -> str:
    """300 random documents, for --data-path."""
    return write_text(tmp_path_factory.mktemp("data") / "text", 300)
