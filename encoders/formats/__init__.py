"""Weight formats of published encoders. Each encoder family has one module."""
