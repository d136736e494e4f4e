"""Open data as sources of samples, numbered from 0.

`open` expands patterns and opens each shard: `tar_shard`, `folder`, or a class of the registry (`registry`). `shard`
defines `Shard`, and `source` `Source`, a list of shards; `access` the settings and keys with which they are read;
`samples` the forms of a sample. `remote` and `cache` fetch; `tar_index`, `listing`, `manifest`, `index` and
`stored_index` list samples.
"""

from tessera.data.failures import ShardError as ShardError
from tessera.data.shards.access import DEFAULT as DEFAULT
from tessera.data.shards.access import Access as Access
from tessera.data.shards.access import SourceConfig as SourceConfig
from tessera.data.shards.open import Shards as Shards
from tessera.data.shards.open import Sources as Sources
from tessera.data.shards.open import WeightedShards as WeightedShards
from tessera.data.shards.open import describe_remote as describe_remote
from tessera.data.shards.open import expand as expand
from tessera.data.shards.open import open_shards as open_shards
from tessera.data.shards.open import open_sources as open_sources
from tessera.data.shards.source import Source as Source
