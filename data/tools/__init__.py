"""Parts of `make_shards` and `check_shards`.

`inputs` finds maps and classes, `pack` writes one shard, `offline` spreads work over processes.
"""
