"""Thumbnails of all images, packed into one file. 100,000 small files would take long to copy and to delete.

FOLDER/thumbnails.bin holds the JPEGs one after the other. FOLDER/thumbnails.npy holds their positions, (N + 1,) int64:
image i is `bytes[positions[i] : positions[i + 1]]`.
"""

from pathlib import Path

import numpy as np

SIDE = 64
"""Longest side of a thumbnail in pixels."""


class Thumbnails:
    """JPEGs of N images. `thumbnails[i]` are the bytes of image i.

    Args:
        folder: folder with thumbnails.bin and thumbnails.npy.
    """

    def __init__(self, folder: Path) -> None:
        self.positions = np.load(folder / "thumbnails.npy")
        self.path = folder / "thumbnails.bin"
        self._bytes = np.memmap(self.path, np.uint8, "r") if self.path.stat().st_size else np.empty(0, np.uint8)

    def __len__(self) -> int:
        return len(self.positions) - 1

    def __getitem__(self, index: int) -> bytes:
        if not 0 <= index < len(self):
            raise IndexError(index)
        return self._bytes[self.positions[index] : self.positions[index + 1]].tobytes()
