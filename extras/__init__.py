"""Abilities beside the core, one folder each. To remove one, delete its folder.

An extra comes in by entry points in pyproject.toml, as a package of another author does (docs/extending.md). The core
imports no extra, and an extra imports another only if the docstring of its `__init__.py` says so.
"""
