"""DICOM images, read with pydicom. Page: docs/own_data.md.

`dicom` is a decoder of the registry `data.decoders`.
"""
