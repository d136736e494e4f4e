"""Fixtures of tests of pretraining, which tests of benchmarks need, too."""

from tests.pretrain.conftest import fresh_engine

__all__ = ["fresh_engine"]
