"""A progress bar for files that take a while."""

from crate_interp.core.progress import tqdm

SHOWN_FROM = 2**28  # bytes


def byte_bar(total: int, what: str) -> tqdm:
    """Returns a bar over `total` bytes. It is invisible for small files."""
    return tqdm(total=total, desc=what, unit="B", unit_scale=True, disable=total < SHOWN_FROM)
