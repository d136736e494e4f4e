"""Classifier that attends to frozen tokens: the command `tessera attentive_probe`. Page: docs/evaluation.md.

Needs: dense.
"""
