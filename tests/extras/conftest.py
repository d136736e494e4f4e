"""Fixtures of other folders for the extras."""

from tests.evaluation.conftest import cache, digits, shards  # noqa: F401
from tests.pretrain.conftest import chosen, fresh_engine, start  # noqa: F401
