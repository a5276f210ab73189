"""Names on the Hugging Face Hub, and their grammar: a name that does not fit is never asked for."""

import re

from crate_interp.core.files import stays_inside

_PART = r"[A-Za-z0-9_](?:[A-Za-z0-9._-]{0,94}[A-Za-z0-9_])?"
_REPO = re.compile(rf"(?:{_PART}/)?{_PART}")
# as datasets reads them: test, train[:10%], train[5:-5]+test
_SLICE = r"(?:\[(?:-?[0-9]{1,12}%?)?:(?:-?[0-9]{1,12}%?)?\])?"
_DATA = re.compile(
    rf"(?P<repo>{_PART}/{_PART}):(?P<split>{_PART}{_SLICE}(?:\+{_PART}{_SLICE}){{0,15}})"
)
_VERSION = r"[A-Za-z0-9_](?:[A-Za-z0-9._+-]{0,94}[A-Za-z0-9_+])?"
_REVISION = re.compile(rf"{_VERSION}(?:/{_VERSION}){{0,7}}")
_LONGEST = 255  # bytes in the name of a file or folder, on common file systems


def is_repo(name: str) -> bool:
    """Tells whether a name is that of a repo: owner/name, or name alone for the oldest repos."""
    return bool(_REPO.fullmatch(name)) and not re.search(r"--|\.\.|\.git\Z", name)


def data_set(name: str) -> tuple[str, str] | None:
    """Returns the repo and the split that "owner/name:split" names, or None for another form."""
    found = _DATA.fullmatch(name)
    if found is None or not is_repo(found["repo"]) or ".." in found["split"]:
        return None
    return found["repo"], found["split"]


def is_revision(name: object) -> bool:
    """Tells whether a name can be that of a branch, a tag or a commit."""
    return isinstance(name, str) and bool(_REVISION.fullmatch(name)) and ".." not in name


def is_file(name: object) -> bool:
    """Tells whether a name can be the path of a file in a repo."""
    return (
        isinstance(name, str)
        and stays_inside(name)
        and name.isprintable()
        and all(0 < len(part.encode()) <= _LONGEST for part in name.split("/"))
    )
