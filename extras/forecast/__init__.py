"""Forecast of `--dry_run`: images/s, time, and loader workers. Page: docs/performance.md.

`forecast` measures a few steps and the loader on this machine. For a GPU that is named (`--gpu h100`), it counts the
FLOP of a step, without a GPU.
"""
