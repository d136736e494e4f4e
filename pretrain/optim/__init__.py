"""Optimizer and averages: `adamw` with its schedules and clipping, `ema` (teacher), `running_statistics` (centres)."""
