"""Tar shards and folders of images: expand the user's shard patterns, open the shards, and read their samples."""

from tessera.data.failures import MOST_LISTED as MOST_LISTED
from tessera.data.failures import ShardError as ShardError
from tessera.data.failures import UnreadableError as UnreadableError
from tessera.data.shards.access import DEFAULT as DEFAULT
from tessera.data.shards.access import Access as Access
from tessera.data.shards.access import SourceConfig as SourceConfig
from tessera.data.shards.cache import cache_folder as cache_folder
from tessera.data.shards.cache import is_on_network as is_on_network
from tessera.data.shards.open import Shards as Shards
from tessera.data.shards.open import Sources as Sources
from tessera.data.shards.open import WeightedShards as WeightedShards
from tessera.data.shards.open import describe_remote as describe_remote
from tessera.data.shards.open import expand as expand
from tessera.data.shards.open import open_shards as open_shards
from tessera.data.shards.open import open_sources as open_sources
from tessera.data.shards.source import Source as Source
