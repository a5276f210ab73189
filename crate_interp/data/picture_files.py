"""Finding the picture files under a folder; fingerprints and labels from their names."""

import hashlib
import os
from collections.abc import Iterable, Iterator, Sequence
from os.path import expanduser
from pathlib import Path, PureWindowsPath

from crate_interp.core.folders import listed
from crate_interp.core.pictures import SUFFIXES, quoted
from crate_interp.core.safe_text import plain
from crate_interp.results.result_reading import META


def path_and_option(text: str) -> tuple[Path, str | None]:
    """Returns a path, and the text after its last colon.

    If the whole text is an existing path, the second is None.
    """
    text = expanduser(text)  # Path.expanduser raises for an unknown user
    before, colon, after = text.rpartition(":")
    return (Path(text), None) if not colon or os.path.exists(text) else (Path(before), after)


def pictures_under(folder: Path, suffixes: Sequence[str] = SUFFIXES) -> list[Path]:
    """Returns the paths of `names_under`."""
    return [folder / name for name in names_under(folder, suffixes)]


def names_under(folder: Path, suffixes: Sequence[str] = SUFFIXES) -> Iterator[str]:
    """Yields the names under a folder that have one of these endings, in their order.

    Names are paths below the folder, with /. One folder's names are in memory at a time.

    Folders are left out, whatever their names, and so are names that begin with a dot and what
    lies in folders with such names. Links to files and folders are followed wherever they lead,
    because the user unpacked the folder; but not those that lead back to a folder around them.
    Pipes, broken links and the like are listed; `check_file` refuses them by name.
    Pictures that belong to a result which was saved there are left out.

    Raises ValueError if a folder is reached twice, because its pictures would count twice.
    """
    ours: set[str] = set()
    seen: dict[tuple[int, int], str] = {}
    left = [""]  # a list, because folders can be nested deeper than Python recurses
    while left:
        name = left.pop()
        if name and not name.endswith("/"):
            if name not in ours:
                yield name
            continue
        if _leads_back(folder, name, seen):
            continue
        inner = _entries(folder, name, suffixes, ours)
        # sorted by name, so that names come in the order of their parts; the first is popped first
        left += [name + own for own in sorted(inner, key=lambda own: own.removesuffix("/"))[::-1]]


def _leads_back(folder: Path, below: str, seen: dict[tuple[int, int], str]) -> bool:
    """Tells whether a folder links back to one of its parents. seen: folders so far, by inode."""
    try:
        found = os.stat(folder / below)
    except OSError:  # `_entries` then lists nothing
        return False
    first = seen.setdefault((found.st_dev, found.st_ino), below)
    if first != below and not below.startswith(first):
        raise ValueError(
            f"{quoted(folder / first)} and {quoted(folder / below)} are the same folder: pictures "
            "would count twice. Remove the link."
        )
    return first != below


def _entries(folder: Path, below: str, suffixes: Sequence[str], ours: set[str]) -> list[str]:
    """Returns the names to use in one folder; names of folders end in /.

    ours: a set, to which the names of files that belong to a result are added.
    """
    found = []
    try:
        with os.scandir(folder / below) as entries:
            for entry in entries:
                name = entry.name
                if name == META:
                    ours |= {below + own for own in listed(Path(entry.path))}
                if name.startswith("."):
                    continue
                # not is_dir() of an entry, which raises for a link to itself
                linked = entry.is_symlink() and os.path.isdir(entry.path)
                if linked or entry.is_dir(follow_symlinks=False):
                    found.append(f"{name}/")
                elif os.path.splitext(name)[1].lower() in suffixes:
                    found.append(name)
    except OSError:  # it may not be entered, or its path is too long
        return []
    return found


def inside(folder: Path, name: str, where: Path) -> Path:
    """Returns the path of the file `name` in a folder.

    Links in the folder are the user's own and are followed. Raises ValueError for a name that leads
    out of the folder or that no file can have; `where`: the list of names, for the error.
    """
    parts = PureWindowsPath(name)  # takes both / and \ as separators
    if not name or parts.anchor or ".." in parts.parts or "\0" in name or not _can_be_asked(name):
        raise ValueError(
            f"{quoted(where)} names the file {quoted(name)}, which is not inside "
            f"{quoted(folder)}: it is not read."
        )
    return folder / name


def _can_be_asked(name: str) -> bool:
    try:
        os.fsencode(name)
    except UnicodeEncodeError:  # a lone surrogate that does not stand for a byte
        return False
    return True


def names_and_sizes(paths: Sequence[Path], names: Sequence[str]) -> str:
    """Returns a fingerprint of files, made of names and sizes; their content is not read."""
    sizes = (path.stat().st_size for path in paths)
    return fingerprint_of(zip(map(bytes_of, names), sizes, strict=True))


def bytes_of(name: str) -> bytes:
    """Returns the bytes of a file name, also if they are not valid UTF-8."""
    return name.encode("utf-8", "surrogateescape")


def fingerprint_of(files: Iterable[tuple[bytes, int]]) -> str:
    """Returns the fingerprint made of names (`bytes_of`) and sizes."""
    listing = hashlib.sha256()
    for number, (name, size) in enumerate(files):
        shown = name.replace(b"\n", b"\0")  # names never hold a zero byte
        listing.update(b"\n" * (number > 0) + shown + f" {size}".encode())
    return f"names-and-sizes:sha256:{listing.hexdigest()}"


def first_folders(names: Iterable[str]) -> list[str] | None:
    """Returns the first folder of every name as labels, or None if a file is in no folder.

    Labels are shown in tables and files: signs that would harm those are written as escapes. Raises
    ValueError if two folders would get the same label.
    """
    found: list[str] = []
    labels: dict[str, str] = {}
    for name in names:
        folder, slash, _ = name.partition("/")
        if not slash:
            return None
        if folder not in labels:
            labels[folder] = plain(folder, 1000)
        found.append(labels[folder])
    shown: dict[str, str] = {}
    for folder, label in labels.items():
        if shown.setdefault(label, folder) != folder:
            raise ValueError(f"two folders {quoted(folder)} differ in invisible signs: rename one.")
    return found
