"""Tar shards: expand the patterns that a user gives, open the shards, and read the bytes of their samples."""

from tessera.data.shards.cache import cache_folder as cache_folder
from tessera.data.shards.classes import class_names as class_names
from tessera.data.shards.errors import MOST_LISTED as MOST_LISTED
from tessera.data.shards.errors import ShardError as ShardError
from tessera.data.shards.open import Sources as Sources
from tessera.data.shards.open import WeightedShards as WeightedShards
from tessera.data.shards.open import open_shards as open_shards
from tessera.data.shards.open import open_sources as open_sources
from tessera.data.shards.open import plan as plan
from tessera.data.shards.patterns import Shards as Shards
from tessera.data.shards.patterns import expand as expand
from tessera.data.shards.reader import Reader as Reader
from tessera.data.shards.retry import DEFAULT as DEFAULT
from tessera.data.shards.retry import SourceConfig as SourceConfig
from tessera.data.shards.shard_list import ShardList as ShardList
