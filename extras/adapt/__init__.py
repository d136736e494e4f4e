"""Continue the pretraining of an encoder on own images, and say whether this pays. Page: docs/methods.md.

`adapt` has the command `tessera adapt`: it scores the given encoder, calls the job of `tessera pretrain`, scores the
new encoder, compares both image by image, and writes the result.

Needs: compare.
"""
