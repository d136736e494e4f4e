"""Parquet files as shards. Page: docs/own_data.md.

`parquet_file.ParquetFile` opens local files that end in `.parquet`, with pyarrow. Each row group is copied to the cache
when one of its images is first needed.
"""
