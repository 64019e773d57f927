"""Data for runs that launchers start, and what two ranks compute of them."""

from pathlib import Path

import pytest

from tests.campaigns.e2e.launched import forked
from tests.runs import Finished, write_text


@pytest.fixture
def folder(tmp_path) -> Path:
    """A folder with data under the prefix `text`."""
    write_text(tmp_path / "text", 260)
    return tmp_path


@pytest.fixture(scope="session")
def two_ranks(tmp_path_factory) -> Finished:
    """What two ranks compute in four iterations of `tests.campaigns.e2e.launched.argv`."""
    return forked(tmp_path_factory.mktemp("two"), 4)
