"""Forecast of `--dry_run`: images/s, time, and loader workers. Page: docs/performance.md.

- `forecast`: measures a few steps and the loader on this machine, or asks `fake_device`, and says what would be faster.
- `fake_device`: counts the bytes and FLOP of a step for a GPU that is named (`--gpu h100`), without a GPU.
"""
