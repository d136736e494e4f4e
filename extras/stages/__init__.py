"""Stages of webdataset in a run (`data.stages`). Page: docs/own_data.md.

`stages.load_stages` makes one function of the stages, which the sources call for each sample in the loader workers.
"""
