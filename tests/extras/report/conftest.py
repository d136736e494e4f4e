"""Fixtures of the tests of evaluations."""

from tests.evaluation.conftest import cache, shards

__all__ = ["cache", "shards"]
