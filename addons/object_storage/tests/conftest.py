"""Data for runs that save."""

from __future__ import annotations

from tests.core.training.checkpointing.conftest import data

__all__ = ["data"]
