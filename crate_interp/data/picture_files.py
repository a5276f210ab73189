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
    """Splits a text at its last colon into a path and an option.

    The option is None if the text has no colon, or if the whole text is an existing path.
    """
    text = expanduser(text)  # Path.expanduser raises for an unknown user
    before, colon, after = text.rpartition(":")
    return (Path(text), None) if not colon or os.path.exists(text) else (Path(before), after)


def pictures_under(folder: Path, suffixes: Sequence[str] = SUFFIXES) -> list[Path]:
    """Returns the paths of the files that `names_under` yields."""
    return [folder / name for name in names_under(folder, suffixes)]


def names_under(folder: Path, suffixes: Sequence[str] = SUFFIXES) -> Iterator[str]:
    """Yields, in order, the names of the files under a folder that end in one of `suffixes`.

    A name is the path below the folder, written with /. Folders are read one at a time.

    Folders themselves are not yielded, whatever their names. Files and folders whose names begin
    with a dot are left out. Links are followed wherever they lead, because the user unpacked the
    folder, except links that lead back to a folder that contains them. Pipes, broken links and the
    like are yielded; `check_file` refuses them later, by name. Pictures that belong to a result
    which was saved under the folder are left out.

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
        # sorted without the /, so that paths are in order part by part; reversed for pop()
        left += [name + own for own in sorted(inner, key=lambda own: own.removesuffix("/"))[::-1]]


def _leads_back(folder: Path, below: str, seen: dict[tuple[int, int], str]) -> bool:
    """Tells whether a folder is a link to one of its parents. seen: earlier folders by inode."""
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
                # entry.is_dir() would raise for a link to itself
                linked = entry.is_symlink() and os.path.isdir(entry.path)
                if linked or entry.is_dir(follow_symlinks=False):
                    found.append(f"{name}/")
                elif os.path.splitext(name)[1].lower() in suffixes:
                    found.append(name)
    except OSError:  # the folder may not be entered, or its path is too long
        return []
    return found


def inside(folder: Path, name: str, where: Path) -> Path:
    """Returns the path of the file `name` in a folder.

    Links in the folder are the user's own and are followed. where: the path of the list that
    contains the name, for the error. Raises ValueError if the name leads out of the folder, or if
    no file can have this name.
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
    """Returns a fingerprint of files, made of their names and sizes; no content is read."""
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

    Labels are written into tables and files, so characters that would harm them become escapes.
    Raises ValueError if two folders would get the same label.
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
            raise ValueError(
                f"two folders {quoted(folder)} differ in invisible characters: rename one."
            )
    return found
