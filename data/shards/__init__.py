"""Tar shards: expand the patterns that a user gives, open the shards, and read the bytes of their samples."""

from data.shards.cache import cache_folder as cache_folder
from data.shards.classes import class_names as class_names
from data.shards.errors import MOST_LISTED as MOST_LISTED
from data.shards.errors import ShardError as ShardError
from data.shards.open import Sources as Sources
from data.shards.open import WeightedShards as WeightedShards
from data.shards.open import open_shards as open_shards
from data.shards.open import open_sources as open_sources
from data.shards.open import plan as plan
from data.shards.patterns import Shards as Shards
from data.shards.patterns import expand as expand
from data.shards.reader import Reader as Reader
from data.shards.retry import DEFAULT as DEFAULT
from data.shards.retry import SourceConfig as SourceConfig
from data.shards.shard_list import ShardList as ShardList
