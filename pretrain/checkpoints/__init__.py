"""Checkpoints: `save` writes a folder, `resume` reads it, `continuing` compares the settings of both runs.

A checkpoint holds the sharded weights and optimizer of an engine, the step and the settings (`trainer_json`), and a
list of its files (`manifest`). It is complete when its folder has its final name.
"""
