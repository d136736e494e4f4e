"""Names and shapes of published weights: `checkpoint` opens a file, one module for each family of encoders fits it."""
