"""Files of pictures: which there are, and their names in fingerprints and labels."""

import hashlib
from collections.abc import Sequence
from os.path import expanduser
from pathlib import Path, PureWindowsPath

from PIL import Image


def path_and_option(text: str) -> tuple[Path, str | None]:
    """Returns a path, and what follows its last colon.

    Where the text as it stands is a path that exists, the second is None.
    """
    text = expanduser(text)  # Path.expanduser raises where a user is unknown
    before, colon, after = text.rpartition(":")
    return (Path(text), None) if not colon or Path(text).exists() else (Path(before), after)


def pictures_under(folder: Path, suffixes: Sequence[str] = ()) -> list[Path]:
    """Returns the files under a folder that have one of these endings, ordered by name.

    Without `suffixes`: the endings that Pillow knows. Links to files count. Links to folders
    are not followed, because they may lead in a circle.
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
    """Returns the path of the file `name` in a folder.

    Links in the folder are the user's own and are followed. Raises ValueError for a name that
    leads out of the folder; `where` is the list of names that the error blames.
    """
    parts = PureWindowsPath(name)  # takes both / and \ as separators
    if not name or parts.anchor or ".." in parts.parts or "\0" in name:
        raise ValueError(
            f"{str(where)!r} names the file {name!r}, which is not inside {str(folder)!r}: "
            "it is not read."
        )
    return folder / name


def names_and_sizes(paths: Sequence[Path], names: Sequence[str]) -> str:
    """Returns a fingerprint of files made of their names and sizes. No content is read."""
    listing = "\n".join(
        f"{name} {path.stat().st_size}" for name, path in zip(names, paths, strict=True)
    )
    return f"names-and-sizes:sha256:{hashlib.sha256(listing.encode()).hexdigest()}"


def first_folders(names: Sequence[str]) -> list[str] | None:
    """Returns the first folder of every name as labels, or None where a file lies in no folder."""
    return [name.split("/")[0] for name in names] if all("/" in name for name in names) else None
