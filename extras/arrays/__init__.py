"""NumPy arrays as images: .npy files, and .npz files of one array. Page: docs/own_data.md.

`arrays` is a decoder of the registry `data.decoders`. Nothing is unpickled.
"""
