"""`tessera preview`: sheets of images, or of the crops and masks of a run. Page: docs/report.md.

- `preview`: the command, and the sheet of images and class names.
- `crop_preview`: the sheet of the crops and masks that a run draws first.
- `sheet`: draws both with matplotlib.
"""
