"""TIFF images with any number of bands and pages. Page: docs/own_data.md.

`tiff` is a decoder of the registry `data.decoders`. It reads plain pages with tifffile, and other pages with Pillow.
"""
