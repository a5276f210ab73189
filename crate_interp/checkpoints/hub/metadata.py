"""Asks the Hub for the metadata of a file, and checks it before any byte of the file is written.

huggingface_hub builds paths from these values, so an ETag such as "/home/me/.bashrc" would be a
path outside the cache. Afterwards only the checked values are used; they are not requested again.
"""

import logging
import re
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any
from urllib.parse import urljoin, urlsplit

from crate_interp.core.errors import CheckpointError
from crate_interp.core.safe_text import plain

COMMIT = re.compile(r"[0-9a-f]{40}")
_DIGEST = re.compile(r"[0-9a-f]{40}|[0-9a-f]{64}")  # git's digest, or the SHA-256 of a large file
_SMALL = {".json": 2**26, ".pkl": 2**26}  # more bytes than any config or tokenizer needs


@dataclass(frozen=True)
class Offer:
    """A file as the Hub offers it.

    file: its name. page: the requested address. place: the address of the bytes. headers: sent only
    to the origin of `page`; they include the token.
    """

    file: str
    page: str
    place: str
    digest: str
    commit: str
    size: int
    headers: dict[str, str]


def ask(
    repo: str, file: str, revision: str, token: str | bool | None, endpoint: str | None
) -> Offer | None:
    """Returns the Hub's offer, or None if the answering server is not a Hub.

    Raises CheckpointError for an answer that a Hub would not give, and huggingface_hub's errors.
    """
    import huggingface_hub as hub
    from huggingface_hub import constants
    from huggingface_hub.utils import build_hf_headers

    page = hub.hf_hub_url(repo, file, revision=revision, endpoint=endpoint)
    with _plain_warnings():
        told = hub.get_hf_file_metadata(
            page, token=token, timeout=constants.HF_HUB_ETAG_TIMEOUT, endpoint=endpoint
        )
    if told.etag is None and told.commit_hash is None:  # such as a hotel's login page
        return None
    place = urljoin(page, told.location)
    _check(told, place, page, revision, f"{repo}/{file}")
    return Offer(
        file=file,
        page=page,
        place=place,
        digest=told.etag or "",
        commit=told.commit_hash or "",
        size=told.size or 0,
        headers=build_hf_headers(token=token, library_name="crate_interp"),
    )


@contextmanager
def _plain_warnings() -> Iterator[None]:
    """Removes control characters from the warnings that huggingface_hub logs in this thread.

    huggingface_hub logs the header X-HF-Warning as the server sends it.
    """
    mine = threading.get_ident()

    def shown_plain(record: logging.LogRecord) -> bool:
        if record.thread == mine:
            record.msg, record.args = plain(record.getMessage()), ()
        return True

    log = logging.getLogger("huggingface_hub.utils._http")
    log.addFilter(shown_plain)
    try:
        yield
    finally:
        log.removeFilter(shown_plain)


def _check(told: Any, place: str, page: str, revision: str, what: str) -> None:
    """Raises CheckpointError unless every value in the answer has the form that it must have."""
    for wanted, name, value, said in (
        (_DIGEST, "ETag", told.etag, "40 or 64 hexadecimal digits"),
        (COMMIT, "commit", told.commit_hash, "40 hexadecimal digits"),
    ):
        if not isinstance(value, str) or not wanted.fullmatch(value):
            raise refusal(what, page, f"the {name} {shown(value)}; expected {said}")
    if COMMIT.fullmatch(revision) and told.commit_hash != revision:
        raise refusal(what, page, f"the commit {shown(told.commit_hash)}; expected {revision}")
    if told.size is None or told.size < 0:
        raise refusal(what, page, f"the size {told.size!r}; expected a number of bytes")
    most = next((most for end, most in _SMALL.items() if what.endswith(end)), None)
    if most is not None and told.size > most:
        raise refusal(what, page, f"{told.size} bytes; expected at most {most} for such a file")
    check_address(place, page, what)


def check_address(address: str, page: str, what: str) -> None:
    """Raises CheckpointError unless an address is http or https, and https if the page is."""
    try:
        parts = urlsplit(address)
        scheme, host, _ = parts.scheme, parts.hostname, parts.port
    except ValueError:  # such as a port number above 65535
        scheme, host = "", None
    admitted = ("https",) if page.startswith("https:") else ("http", "https")
    if scheme not in admitted or not host:
        raise refusal(what, page, f"the address {shown(address)}; expected {' or '.join(admitted)}")


def shown(value: object) -> str:
    """Returns a value that a server sent, made safe for an error message."""
    return plain(repr(value), 80)


def refusal(what: str, page: str, came: str) -> CheckpointError:
    """Returns the error for an answer that a Hub would not give."""
    host = urlsplit(page).netloc
    return CheckpointError(
        f"{host} answered for {what} with {came}: nothing was kept. "
        "The server is not a Hub, or is broken: check HF_ENDPOINT, or try again later."
    )
