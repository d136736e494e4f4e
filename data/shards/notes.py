"""Notes on what a run leaves out of its data, and on what may be a mistake of the user.

A shard collects its notes when its samples are listed. The notes are stored with the index of the shard, so that every
run can print them (`Source.notes`).
"""

import json
import re
from collections import Counter
from collections.abc import Iterable, Sequence
from typing import NamedTuple

import numpy as np

from tessera.runtime.user_error import printable

LARGEST_NOTES = 2**20
"""Maximum size in bytes of the stored notes of a shard. Larger notes are ignored."""
MOST_KINDS = 10
"""Maximum number of kinds of notes that are printed."""
MOST_CLASSES = 10
"""Largest number of classes that are listed by name."""
MOST_GROUPS = 5
"""Maximum number of classes that are printed for each kind of notes."""
OTHER = "."
"""First character of the kinds that are file name extensions."""
OTHER_IMAGES = ("bmp", "dib", "gif", "heic", "heif", "avif", "jp2", "jxl", "j2k", "ppm", "pgm", "tga", "exr")
"""File name extensions of images that are not supported. Such images in a shard cause a warning."""
NAME, LINK, ORPHAN, TWICE, REST, CHOSEN, MAPPED = "name", "link", "orphan", "twice", "rest", "chosen", "maps"
LOST, MASK, PARTS, UNUSABLE, LABELS, HIDDEN, BARE = "class", "mask", "parts", "unusable", "labels", "hidden", "bare"
LOCKED, ABSENT = "locked", "absent"
DAMAGE = (ORPHAN, TWICE, REST)
"""Kinds that a tar has if it was joined, updated or sorted wrongly. A run warns of them, and a check fails."""
SENTENCES = {
    NAME: "{count} [image is|images are] not read. A name must be KEY.EXTENSION, without a dot in KEY and with an "
    "extension of images",
    LINK: "{count} [image is a link, which is|images are links, which are] not read. Write the tar again with "
    "`tar --hard-dereference -h`",
    ORPHAN: "{count} [label or map belongs|labels or maps belong] to no image. The members of a sample must follow one "
    "another: write the tar again, sorted by name",
    TWICE: "{count} [sample has|samples have] the name of an earlier sample. All of them are read. Programs such as "
    "`tar -r` leave old versions of a file in the tar",
    REST: "{count} [byte|bytes] after the end mark of the tar [is|are] not read. They may be another tar, because "
    "`cat` does not join tars: use `tar -A`, or give both files",
    CHOSEN: "{count} [sample has images|samples have images], but not the image that data.image names (--image of "
    "other commands). [It is|They are] left out: {groups}",
    MAPPED: "{count} [sample has|samples have] several maps. Only the first of KEY.seg.png, KEY.depth.png, "
    "KEY.depth.npy is read",
    LOST: "{count} of the class folders [holds|hold] no image that can be read: {groups}",
    MASK: "{count} [image looks like a mask of another image, by its name. It is read as an image. Move it out of the "
    "folder if it is a mask|images look like masks of other images, by their names. They are read as images. Move them "
    "out of the folder if they are masks]",
    PARTS: "{count} [part|parts] of the data set [is|are] missing, by the file [name|names] {groups}",
    UNUSABLE: "{count} [file is|files are] left out: {groups}",
    LABELS: "{count} [sample is|samples are] used without a label: {groups}",
    HIDDEN: "{count} hidden [file or folder is|files or folders are] left out, because [its name begins|their names "
    "begin] with a dot",
    LOCKED: "{count} [folder|folders] cannot be read, and [its|their] images are left out",
    ABSENT: "{count} [shard|shards] that index.json lists [does|do] not exist",
    BARE: "{count} [file|files] without an extension [is|are] left out",
}
"""Maps the kind of a note to its sentence. `[one|several]` is the text for a count of one, and for other counts.
A kind that begins with `OTHER` has the sentence `OF_OTHER_KIND`."""
OF_OTHER_KIND = "{count} {kind} [file is|files are] left out{of_classes}, because this format is not read{cure}"


class Note(NamedTuple):
    """A number of files or members of one kind."""

    kind: str
    """Key of `SENTENCES`, or a file name extension with its dot."""
    count: int  # pyright: ignore[reportIncompatibleMethodOverride]
    first: str = ""
    """Name of the first file or member; empty if a name would not help."""
    group: str = ""
    """Class of the files, or another detail."""


def describe(notes: Iterable[Note]) -> list[str]:
    """Return one sentence for each kind of notes."""
    counts, groups, firsts = Counter[str](), dict[str, Counter[str]](), dict[str, str]()
    for note in notes:
        counts[note.kind] += note.count
        groups.setdefault(note.kind, Counter())[note.group] += note.count
        firsts.setdefault(note.kind, note.first)
    lines = [_sentence(kind, count, groups[kind], firsts[kind]) for kind, count in counts.items()]
    more = [f"{len(lines) - MOST_KINDS:,} more kinds of files are left out."] if len(lines) > MOST_KINDS else []
    return lines[:MOST_KINDS] + more


def _sentence(kind: str, count: int, groups: Counter[str], first: str) -> str:
    named = [(name, number) for name, number in groups.most_common() if name]
    if kind.startswith(OTHER):
        shown = [f"{number:,} of class {printable(name)}" for name, number in named[:MOST_GROUPS]]
    elif kind == CHOSEN:
        shown = [f"{number:,} {printable(name)}" for name, number in named[:MOST_GROUPS]]
    else:
        shown = [printable(name) for name, _ in named[:MOST_GROUPS]]
    listed = ", ".join(shown) + (", ..." if len(named) > MOST_GROUPS else "")
    cure = " (convert to PNG)" if kind[1:] in OTHER_IMAGES else ""
    if kind in (".npy", ".npz"):
        cure = " beside images of other formats"
    if kind in (".csv", ".tsv"):
        cure = " here. If it has the labels, give it with --labels"
    template = OF_OTHER_KIND if kind.startswith(OTHER) else SENTENCES[kind]
    sentence = re.sub(r"\[(.*?)\|(.*?)\]", r"\1" if count == 1 else r"\2", template).format(
        cure=cure,
        count=f"{count:,}",
        kind=printable(kind),
        groups=listed,
        of_classes=f" ({listed})" if listed else "",
    )
    of_first = "Its name is" if count == 1 else "The first is"
    return f"{sentence}. {of_first} {printable(first)}." if first else f"{sentence}."


def shown_classes(counts: Sequence[tuple[str, int]]) -> str:
    """Return the names of the first classes, each with its number of images."""
    shown = [f"{printable(name)} ({count:,})" for name, count in counts[:MOST_CLASSES]]
    return ", ".join(shown) + (", ..." if len(counts) > MOST_CLASSES else "")


def named_notes(shard: str, notes: Iterable[Note]) -> tuple[Note, ...]:
    """Return notes with the name of the shard before the names of its members."""
    return tuple(note._replace(first=note.first and f"{shard}/{note.first}") for note in notes)


def valid_notes(rows: object) -> list[Note]:
    """Return stored notes. Notes that are damaged are left out, because they may come from an untrusted source."""
    try:
        found = [Note(*row) for row in rows]  # pyright: ignore[reportGeneralTypeIssues]
    except TypeError:
        return []
    return [
        note
        for note in found
        if isinstance(note.count, int)
        and all(isinstance(text, str) for text in (note.kind, note.first, note.group))
        and (note.kind in SENTENCES or note.kind.startswith(OTHER))
    ]


def packed_notes(notes: Iterable[Note]) -> np.ndarray:
    """Return notes as they are stored in an index: JSON, as uint8."""
    found = [*notes]
    return np.frombuffer(json.dumps(found).encode() if found else b"", dtype=np.uint8)


def parse_notes(content: bytes) -> list[Note]:
    """Return the notes of an index (`valid_notes`)."""
    try:
        return valid_notes(json.loads(content)) if 0 < len(content) <= LARGEST_NOTES else []
    except (ValueError, RecursionError):
        return []
