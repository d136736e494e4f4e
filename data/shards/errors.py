"""Exceptions for unusable shards and images, and sentences of advice at the end of error messages."""

from runtime.errors import UserError

MOST_LISTED = 20
"""Maximum number of shards that one error message lists."""
MAKE_SHARD_AGAIN = "Make the shard again or remove it."
RESTORE_SHARD = "Restore the shard or remove it from the list."
MAKE_INDEX_AGAIN = "Make the index again with `python -m data.check_shards SHARDS --write_index true`."
REPLACE_INDEX = "Remove the index, or make it again with `python -m data.check_shards SHARDS --write_index true`."


class ShardError(UserError, ValueError):
    """Raised if a shard cannot be used. The message names the shard and says what to do."""


class MakeError(UserError, ValueError):
    """Raised if images cannot be listed, or shards cannot be made."""
