"""Images of another kind than the known ones: the command `tessera ood`. Page: docs/evaluation.md."""
