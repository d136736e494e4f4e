"""Map-style data sets of a program as data: those of torchvision and Hugging Face, or a class. Page: docs/own_data.md.

`map_style.MapStyle` opens the objects that a program passes as data, and reads one item for each sample.
"""
