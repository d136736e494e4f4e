"""Exports: `tessera export` writes the encoder of a run to the format of another library.

command is the command. export writes a file and loads it with the library that reads it, certificate compares both,
preparation and photograph compare how images are prepared, and model_card describes the result. The page is
docs/encoders.md, "Export".

Needs: backbones, formats, report.
"""
