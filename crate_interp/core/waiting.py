"""Waits for work that depends on a server, and gives it up when nothing more happens."""

import threading
from collections.abc import Callable
from typing import Any, TypeVar

SILENCE = 60.0  # seconds
Result = TypeVar("Result")


class Watch:
    """Counts how often the work in another thread reports progress."""

    def __init__(self) -> None:
        self.beats = 0

    def beat(self) -> None:
        """Notes that the work made progress."""
        self.beats += 1


def watched(
    work: Callable[[Watch], Result], progress: Callable[[], object] | None = None
) -> Result:
    """Runs `work` in another thread and returns its result.

    progress: returns a value that changes if the work, which cannot beat, made progress.

    Raises TimeoutError if no beat comes for SILENCE seconds, at the latest after twice that time.
    The timeout of a socket would not do, because a server can send a byte now and then. Work that
    hangs is left behind in its thread. Ctrl-C ends the wait at once.
    """
    watch, done, outcome = Watch(), threading.Event(), []

    def run() -> None:
        try:
            outcome.append((work(watch), None))
        except BaseException as error:
            outcome.append((None, error))
        finally:
            done.set()

    def state() -> object:
        return watch.beats, progress() if progress else None

    before = state()
    threading.Thread(target=run, name="crate_interp download", daemon=True).start()
    while not done.wait(SILENCE):
        now = state()
        if now == before:
            raise TimeoutError("nothing came")
        before = now
    answer: Any
    answer, error = outcome[0]
    if error is not None:
        raise error
    return answer


def silence() -> str:
    """Returns the words for a server that was given up."""
    return f"the server sent nothing, or hardly anything, for {SILENCE:g} seconds"
