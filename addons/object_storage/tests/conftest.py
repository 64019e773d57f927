"""Data for runs that save."""

from tests.core.training.checkpointing.conftest import data

__all__ = ["data"]
