import pytest

from tessera.data.shards import SourceConfig


def test_settings_of_older_runs():
    old = SourceConfig.model_validate({"unreadable": "stop", "verify": True, "retries": 2})
    assert old == SourceConfig(retries=2)
    with pytest.raises(ValueError, match=r"source\.unreadable is no longer supported.*Remove"):
        SourceConfig.model_validate({"unreadable": "skip"})
