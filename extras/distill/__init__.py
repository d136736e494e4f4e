"""Distil a frozen encoder into one or several students. Page: docs/methods.md.

`distill` has the method `distill`: settings, the teacher beside the method, the projections, and the losses.
"""
