"""TransformerLens' source distribution: its tests and its notebooks are in it, and in no wheel."""

import hashlib
import subprocess
import sys
import tarfile
from pathlib import Path

VERSION = "4.3.0"
SHA256 = "a2adcad2daf3dcc000ab5ca3acc6883a1f602410fe47e794a853c754705783db"


def unpacked(given: Path | None, folder: Path) -> Path:
    """Returns the folder of the source distribution.

    given: that folder, or the archive; None downloads the archive into `folder`. Raises
    ValueError if the archive is not the published one.
    """
    if given is not None and given.is_dir():
        return given
    archive = given or _downloaded(folder)
    digest = hashlib.sha256(archive.read_bytes()).hexdigest()
    if digest != SHA256:
        raise ValueError(f"{archive} has the SHA-256 {digest}, the published one {SHA256}.")
    with tarfile.open(archive) as tar:
        tar.extractall(folder, filter="data")
    return folder / f"transformer_lens-{VERSION}"


def _downloaded(folder: Path) -> Path:
    options = ["--no-deps", "--no-binary", "transformer-lens", "--dest", str(folder)]
    asked = f"transformer-lens=={VERSION}"
    command = [sys.executable, "-m", "pip", "download", *options, asked]
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        raise OSError(f"cannot download {asked}: {done.stderr.strip().splitlines()[-1]}")
    return folder / f"transformer_lens-{VERSION}.tar.gz"
