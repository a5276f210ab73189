"""Files of pictures: which there are, and their names in fingerprints and labels."""

import hashlib
import os
from collections.abc import Sequence
from os.path import expanduser
from pathlib import Path, PureWindowsPath

from crate_interp.folders import listed
from crate_interp.pictures import SUFFIXES, quoted
from crate_interp.saved import META
from crate_interp.words import plain


def path_and_option(text: str) -> tuple[Path, str | None]:
    """Returns a path, and what follows its last colon.

    Where the text as it stands is a path that exists, the second is None.
    """
    text = expanduser(text)  # Path.expanduser raises where a user is unknown
    before, colon, after = text.rpartition(":")
    return (Path(text), None) if not colon or os.path.exists(text) else (Path(before), after)


def pictures_under(folder: Path, suffixes: Sequence[str] = SUFFIXES) -> list[Path]:
    """Returns the paths under a folder that have one of these endings, ordered by name.

    Folders are left out, whatever their names, and so are names that begin with a dot and what
    lies in folders with such names. Links to files count, wherever they lead: who unpacked the
    folder has allowed them. Links to folders are not followed, because they may lead in a circle.
    Pipes, broken links and the like are listed; `check_image` refuses them by name. Pictures that
    belong to a result which was saved there are left out.
    """
    found, folders, ours = [], [folder], set()
    while folders:  # a loop: folders may lie in one another deeper than Python recurses
        try:
            entries = list(os.scandir(folders.pop()))
        except OSError:  # it may not be entered, or its path is too long
            continue
        for entry in entries:
            if entry.name == META:
                ours |= {f"{Path(entry.path).parent}/{name}" for name in listed(Path(entry.path))}
            if entry.name.startswith("."):
                continue
            if entry.is_dir(follow_symlinks=False):
                folders.append(Path(entry.path))
            elif Path(entry.name).suffix.lower() in suffixes and not os.path.isdir(entry.path):
                found.append(Path(entry.path))
    return sorted(path for path in found if str(path) not in ours)


def inside(folder: Path, name: str, where: Path) -> Path:
    """Returns the path of the file `name` in a folder.

    Links in the folder are the user's own and are followed. Raises ValueError for a name that
    leads out of the folder or that no file can have; `where` is the list of names that the error
    blames.
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
    except UnicodeEncodeError:  # a lone surrogate that stands for no byte
        return False
    return True


def names_and_sizes(paths: Sequence[Path], names: Sequence[str]) -> str:
    """Returns a fingerprint of files made of their names and sizes. No content is read."""
    listing = hashlib.sha256()
    for number, (name, path) in enumerate(zip(names, paths, strict=True)):
        # bytes that are no UTF-8 count as they are; no name holds a zero
        shown = name.encode("utf-8", "surrogateescape").replace(b"\n", b"\0")
        listing.update(b"\n" * (number > 0) + shown + f" {path.stat().st_size}".encode())
    return f"names-and-sizes:sha256:{listing.hexdigest()}"


def first_folders(names: Sequence[str]) -> list[str] | None:
    """Returns the first folder of every name as labels, or None where a file lies in no folder.

    Labels are shown in tables and files: signs that would harm those are written as escapes.
    Raises ValueError where the labels of two folders would be the same.
    """
    if not all("/" in name for name in names):
        return None
    folders = [name.split("/")[0] for name in names]
    labels = {folder: plain(folder, 1000) for folder in dict.fromkeys(folders)}
    shown: dict[str, str] = {}
    for folder, label in labels.items():
        if shown.setdefault(label, folder) != folder:
            raise ValueError(
                f"two folders {quoted(folder)} differ in signs that cannot be seen: rename one."
            )
    return [labels[folder] for folder in folders]
