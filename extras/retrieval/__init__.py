"""Mean average precision of image retrieval: the command `tessera retrieval`. Page: docs/evaluation.md."""
