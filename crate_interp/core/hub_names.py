"""Names on the Hugging Face Hub."""

import re

_PART = r"\w(?:[\w.-]{0,94}\w)?"
_DATA = re.compile(rf"({_PART}/{_PART}):(\w[\w.\[\]:%+-]*)", re.ASCII)


def is_repo(name: str) -> bool:
    """Tells whether a name is that of a repo, "owner/name" or "name", as huggingface_hub says."""
    from huggingface_hub.errors import HFValidationError
    from huggingface_hub.utils import validate_repo_id

    try:
        validate_repo_id(name)
    except HFValidationError:
        return False
    return True


def data_set(name: str) -> tuple[str, str] | None:
    """Returns the repo and the split that "owner/name:split" names, or None for another form."""
    parts = _DATA.fullmatch(name)
    if parts is None or ".." in name or not is_repo(parts[1]):
        return None
    return parts[1], parts[2]
