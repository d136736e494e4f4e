"""Weight files of published encoders, one module per family (see `encoders.formats.checkpoint.Format`)."""
