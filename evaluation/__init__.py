"""Scores of a frozen encoder: k-NN, linear probe, and a score without labels. More evaluations are in extras/.

- `command`: the runner. An evaluation is a settings class and a function `score`; start with `knn`.
- `splits` opens the labelled sets, `features` computes features on all processes, `results` writes the result file.
- `knn`, `linear_probe`, `view_retrieval`, `embed`: one command each.
- `tokens` computes patch tokens, and `token_colours` shows them.

Labelled shards and an encoder become features, then a score, then a JSON file in RUN/evaluation. A run that trains
scores itself with the same functions (`pretrain.monitoring.online`).
"""
