"""Inputs of `data.make_shards`: maps, and the class numbers of other shards."""

import os
from pathlib import Path

import numpy as np

from tessera.data.failures import ShardError
from tessera.data.shards.listing import MISSING, Listing, Maps, file_facts
from tessera.data.shards.tar_index import MAPS
from tessera.runtime.user_error import printable


def find_maps(listing: Listing, folder: Path | None) -> None:
    """Find the maps of all usable images, and store them in `listing.maps`.

    Args:
        listing: list of the images.
        folder: folder of maps, in which the map of the image a/x.jpg is a/x.png or a/x.npy. None if the map is
            a/x.seg.png, a/x.depth.png or a/x.depth.npy, in the folder of the image.

    Raises:
        ShardError: `folder` is not a folder, or holds no map of any image; or there are maps of several kinds.
    """
    root = listing.root
    if folder is not None:
        root = os.path.realpath(os.fsencode(folder))
        if not os.path.isdir(root):
            raise ShardError(f"--maps {folder} is not a folder. Give the folder that holds the maps.")
    suffixes = [".png", ".npy"]
    if folder is None:
        every = [f".{name}" for name in MAPS]
        suffixes = [one for one in every if one in listing.other_files] or every
    found: list[Maps] = []
    for suffix in suffixes:
        sizes, modified = np.full(len(listing), MISSING), np.zeros(len(listing), dtype=np.int64)
        maps = Maps(root, suffix.encode(), sizes, modified)
        for entry in map(int, listing.usable):
            sizes[entry], modified[entry] = file_facts(os.path.join(root, maps.path(listing.path(entry))))
        found += [maps] if (sizes != MISSING).any() else []
    if len(found) > 1:
        kinds = " and ".join(maps.suffix.decode() for maps in found)
        raise ShardError(
            f"There are maps with the suffixes {kinds}, but a sample holds one map. Move the maps of each kind to a "
            "folder, and make shards for each kind with --maps."
        )
    if found:
        listing.maps = found[0]
    elif folder is not None:
        name = os.path.splitext(listing.path(int(listing.usable[0])))[0] + b".png"
        example = printable(os.fsdecode(os.path.join(root, name)))
        raise ShardError(
            f"--maps {folder} holds no map of any image. The map of the first image would be {example}. "
            "Give the folder that holds the maps."
        )
    if folder is None:
        for suffix in suffixes:
            listing.other_files.pop(suffix, None)


def renumber(listing: Listing, classes: list[str]) -> None:
    """Renumber the classes: the new number of a class is the index of its name in `classes`.

    Raises:
        ShardError: the labels have no names, or a class name is missing from `classes`.
    """
    if listing.classes is None:
        raise ShardError("--classes needs labels with names, but these labels have no names. Leave --classes out.")
    if unknown := sorted(set(listing.classes) - set(classes)):
        raise ShardError(
            f"class {unknown[0]!r} is not in --classes ({len(unknown)} classes are missing). Add the missing classes "
            "at the end of the file."
        )
    listing.number_classes(classes)
