"""Fixtures of the tests of data."""

from tests.data.conftest import cache, photos, png, write_shards, write_tar

__all__ = ["cache", "photos", "png", "write_shards", "write_tar"]
