"""Compare any library with the formulas of the papers, and its resumed runs with undisturbed ones. Page: docs/trust.md.

- `conformance`: the command `tessera conformance`, which calls an adapter with fixed tensors.
- `losses`: the adapter of this project. `evaluation.references` has the expected values.
- `check_resume`: the command `tessera check_resume`, which kills and resumes a run of any trainer.
"""
