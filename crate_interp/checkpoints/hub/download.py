"""Downloads a file from the Hub: at most the promised bytes, hashed as they arrive.

huggingface_hub's own download is not used: it writes whatever a server sends, and checks the size
afterwards; between two attempts it waits as long as the server asks; and it reads the whole body of
a redirect. Only the HTTP client of huggingface_hub is used here, with its proxies and certificates.
Its Xet transfer is not used: the addresses come from the server, and Xet's requests cannot be
watched.
"""

import hashlib
import os
import shutil
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, BinaryIO
from urllib.parse import urljoin, urlsplit

from crate_interp.checkpoints.hub.metadata import Offer, check_address, refusal, shown
from crate_interp.core.errors import CheckpointError
from crate_interp.core.waiting import Watch, watched

LEAST = 2**16  # minimum number of bytes that must arrive within SILENCE seconds
_TRIES, _REDIRECTS = 5, 5
_LATER = (408, 429)  # statuses after which a request is repeated, as huggingface_hub does
REASONS = {
    401: "the Hub does not accept the token: run `hf auth login`, or give token='hf_...'",
    403: "the token has no access to the file: ask for access, or give another token",
    429: "the Hub asks to slow down (429): try again in a few minutes",
}


class _Lost(Exception):
    """The connection broke; another attempt may succeed."""


def download(offer: Offer, path: Path, what: str) -> str:
    """Downloads a file to `path`, which must not exist yet, and returns its SHA-256.

    Raises CheckpointError if the server sends something other than it promised, and TimeoutError if
    less than LEAST bytes come in SILENCE seconds. After an error or Ctrl-C, `path` does not exist.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    if shutil.disk_usage(path.parent).free < offer.size:
        raise CheckpointError(
            f"the disk is full: {what} has {offer.size} bytes and does not fit. "
            "Free some room, or give another place: cache_dir='...'."
        )
    try:
        with open(path, "xb") as file:  # a thread left behind cannot write to a closed file
            return watched(lambda watch: _Download(offer, what, file, watch).run())
    except BaseException:
        with suppress(OSError):
            path.unlink(missing_ok=True)
        raise


class _Download:
    def __init__(self, offer: Offer, what: str, file: BinaryIO, watch: Watch) -> None:
        self.offer, self.what, self.file, self.watch = offer, what, file, watch
        self.got, self.digest = 0, hashlib.sha256()

    def run(self) -> str:
        """Downloads all bytes and returns their digest. Continues after a lost connection."""
        from huggingface_hub.utils import tqdm

        tries, furthest = _TRIES, 0
        name = os.path.basename(self.offer.file)
        with tqdm(total=self.offer.size, desc=name, unit="B", unit_scale=True) as bar:
            while self.got < self.offer.size:
                try:
                    self._attempt(bar)
                except _Lost as error:
                    tries = _TRIES if self.got >= furthest + LEAST else tries - 1
                    furthest = max(furthest, self.got)
                    if not tries:
                        raise CheckpointError(
                            f"cannot download {self.what}: {error}. Nothing was kept."
                        ) from None
                    time.sleep(1)
        self.file.flush()
        found = self.digest.hexdigest()
        if len(self.offer.digest) == 64 and found != self.offer.digest:
            raise CheckpointError(
                f"{self.what} came with the digest {found}; expected {self.offer.digest}, as the "
                "Hub promised. Nothing was kept: load it again."
            )
        return found

    def _attempt(self, bar: Any) -> None:
        with _opened(self.offer, self.what, self.got) as answer:
            if answer.status_code in _LATER:
                raise _Lost(REASONS.get(answer.status_code, f"status {answer.status_code}"))
            self._begin(answer, bar)
            fresh = 0
            for piece in answer.iter_raw():
                if self.got + len(piece) > self.offer.size:
                    raise self._refusal(f"more than the {self.offer.size} bytes it had promised")
                self.file.write(piece)
                self.digest.update(piece)
                bar.update(len(piece))
                self.got, fresh = self.got + len(piece), fresh + len(piece)
                if fresh >= LEAST:
                    fresh = 0
                    self.watch.beat()
        if self.got < self.offer.size:
            raise _Lost(f"the connection ended after {self.got} of {self.offer.size} bytes")

    def _begin(self, answer: Any, bar: Any) -> None:
        """Checks the headers of an answer; starts over if the server sends the whole file again."""
        if answer.status_code not in (200, 206):
            reason = REASONS.get(answer.status_code, f"the server answers {answer.status_code}")
            raise CheckpointError(f"cannot download {self.what}: {reason}. Nothing was kept.")
        if answer.headers.get("Content-Encoding", "identity") != "identity":
            raise self._refusal("compressed bytes, which were not requested")
        if answer.status_code == 200 and self.got:  # the server has ignored the range
            self.file.seek(0)
            self.file.truncate()
            bar.update(-self.got)
            self.got, self.digest = 0, hashlib.sha256()
        part = answer.headers.get("Content-Range", "")
        if answer.status_code == 206 and not part.startswith(f"bytes {self.got}-"):
            raise self._refusal(f"the part {shown(part)}; expected the part from byte {self.got}")
        length = answer.headers.get("Content-Length")
        if length is not None and length != str(self.offer.size - self.got):
            raise self._refusal(
                f"{shown(length)} bytes; expected the {self.offer.size - self.got} it had promised"
            )

    def _refusal(self, came: str) -> CheckpointError:
        return refusal(self.what, self.offer.page, came)


@contextmanager
def _opened(offer: Offer, what: str, start: int) -> Iterator[Any]:
    """Yields the answer to a GET request before reading its body; reads no body of a redirect.

    The token is sent only to the origin of the page. Raises _Lost if the connection cannot be made,
    or breaks.
    """
    from huggingface_hub import constants, get_session

    address, session = offer.place, get_session()
    asked = {**offer.headers, "accept-encoding": "identity"}
    asked |= {"range": f"bytes={start}-"} if start else {}
    try:
        for _ in range(_REDIRECTS):
            check_address(address, offer.page, what)
            sent = asked if _origin(address) == _origin(offer.page) else _without_token(asked)
            with session.stream(
                "GET",
                address,
                headers=sent,
                timeout=constants.HF_HUB_DOWNLOAD_TIMEOUT,
                follow_redirects=False,
            ) as answer:
                if not answer.has_redirect_location:
                    yield answer
                    return
                address = urljoin(address, answer.headers["Location"])
        raise refusal(what, offer.page, f"more than {_REDIRECTS} redirects")
    except Exception as error:
        if not is_transport(error):
            raise
        raise _Lost(" ".join(str(error).split()) or type(error).__name__) from None


def is_transport(error: BaseException) -> bool:
    """Tells whether an error comes from the connection.

    The error's class is recognised by name: huggingface_hub uses httpx or httpx2, depending on the
    version of huggingface_hub.
    """
    return any(base.__name__ == "TransportError" for base in type(error).__mro__)


def _origin(address: str) -> tuple[str, str | None, int | None]:
    parts = urlsplit(address)
    return parts.scheme, parts.hostname, parts.port


def _without_token(headers: dict[str, str]) -> dict[str, str]:
    return {name: value for name, value in headers.items() if name.lower() != "authorization"}
