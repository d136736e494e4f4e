"""Accuracy with a share of the labels: the command `tessera few_shot`. Page: docs/evaluation.md."""
