"""Encoders that see one channel at a time: `--encoder each:NAME`, for images of any number of channels.

each_channel wraps an encoder of one channel. Each channel of an image is encoded like a gray image, and the features of
the channels are joined: the "bag of channels" of CHAMMI-75. The page is docs/other_images.md.
"""
