"""Files of pictures: found, looked into and named before an hour of work, not after it."""

import hashlib
from collections.abc import Sequence
from os.path import expanduser
from pathlib import Path, PureWindowsPath

from PIL import Image


def path_and_option(text: str) -> tuple[Path, str | None]:
    """A path and what follows its last colon; nothing follows a path that exists as it stands."""
    text = expanduser(text)  # as it is where a user is unknown; Path's own raises
    before, colon, after = text.rpartition(":")
    return (Path(text), None) if not colon or Path(text).exists() else (Path(before), after)


def pictures_under(folder: Path, suffixes: Sequence[str] = ()) -> list[Path]:
    """The files under a folder with such endings (default: those that Pillow knows) in the order of their names.

    Links to files count, links to folders are not followed: they may lead in a circle.
    """
    known = set(suffixes) or set(Image.registered_extensions())
    return sorted(
        path for path in folder.rglob("*") if path.suffix.lower() in known and _is_file(path)
    )


def _is_file(path: Path) -> bool:
    try:
        return path.is_file()
    except OSError:  # in a folder that may not be entered
        return False


def inside(folder: Path, name: str, where: Path) -> Path:
    """The file `name` of a folder, as the list `where` gives it; ValueError for a name that leads out of the folder.

    Links in the folder are the user's own and are followed.
    """
    parts = PureWindowsPath(name)  # takes both / and \ as separators
    if not name or parts.anchor or ".." in parts.parts or "\0" in name:
        raise ValueError(
            f"{str(where)!r} names the file {name!r}, which is not inside {str(folder)!r}: it is not read."
        )
    return folder / name


def names_and_sizes(paths: Sequence[Path], names: Sequence[str]) -> str:
    """A fingerprint of files by their names and sizes; their content is not read."""
    listing = "\n".join(
        f"{name} {path.stat().st_size}" for name, path in zip(names, paths, strict=True)
    )
    return f"names-and-sizes:sha256:{hashlib.sha256(listing.encode()).hexdigest()}"


def first_folders(names: Sequence[str]) -> list[str] | None:
    """Labels: the first folder of every name; None where a file lies in no folder."""
    return [name.split("/")[0] for name in names] if all("/" in name for name in names) else None
