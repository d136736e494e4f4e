"""The stages of `benchmarks/device_check.py`: one module for each group of stages, and what runs them."""
