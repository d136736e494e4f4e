"""Continue the pretraining of an encoder on own images, and say whether this pays. Page: docs/methods.md.

- `adapt`: the command `tessera adapt`. It trains methods and seeds as `tessera compare` does, scores the given encoder
  and the new ones, and writes adapt.json and a verdict for the model cards.
- `verdict`: gains with errors, and the advice to use a new encoder or to keep the given one.

Needs: compare.
"""
