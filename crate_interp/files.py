"""Files that are complete or not there: written beside their place, then moved into it."""

import os
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import pandas


def write(path: Path, writer: Callable[[Path], Any]) -> None:
    """Lets `writer` write a file, which then takes the place of `path` and is readable by all."""
    part = path.with_name(path.name + ".part")
    writer(part)
    part.chmod(0o644)  # safetensors leaves its files readable by their owner alone
    os.replace(part, path)


def write_text(path: Path, text: str) -> None:
    """Writes text in UTF-8."""
    write(path, lambda part: part.write_text(text, encoding="utf-8"))


def write_parquet(path: Path, table: "pandas.DataFrame") -> None:
    """Writes a pandas table as parquet, without its index."""
    write(path, lambda part: table.to_parquet(part, index=False))


def writable(out: str | Path) -> Path:
    """Returns a folder, which is made if there is none.

    Raises ValueError if nothing can be written into it.
    """
    out = Path(out)
    try:
        out.mkdir(parents=True, exist_ok=True)
        test = out / f".writable-{os.getpid()}"
        test.touch()
        test.unlink()
    except OSError as error:
        raise ValueError(
            f"cannot write into {str(out)!r}: {error.strerror}. Give another folder."
        ) from None
    return out
