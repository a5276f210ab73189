"""Single files are whole or not there, whoever else writes them."""

import os
import threading
import time

import pytest

from crate_interp.core import files
from crate_interp.core.files import own_name, write, write_text


def test_two_writers_of_one_file_do_not_meet(tmp_path):
    path, parts, barrier = tmp_path / "page.html", [], threading.Barrier(2)

    def save(text):
        def writer(part):
            parts.append(part)
            part.write_text(text[:10])
            barrier.wait()  # both are half-way
            part.write_text(text)

        write(path, writer)

    threads = [threading.Thread(target=save, args=(letter * 5000,)) for letter in "ab"]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(set(parts)) == 2 and set(path.read_text()) in ({"a"}, {"b"})
    assert len(path.read_text()) == 5000 and list(tmp_path.iterdir()) == [path]


@pytest.mark.parametrize("locks", [True, False])
def test_what_a_dead_writer_left_of_a_file_goes(tmp_path, monkeypatch, locks):
    """At once if the disk tells that nobody writes it, and after a week otherwise."""
    path = tmp_path / "page.html"
    old, young = (tmp_path / own_name(".page.html.", ".part") for _ in range(2))
    others = [tmp_path / name for name in ("mine.part", ".page.html.abc.part", ".page.html.part")]
    wrong = "0" if young.name[-6] != "0" else "1"  # the last digit of a name's own digest
    others += [
        tmp_path / own_name(".other.html.", ".part"),
        tmp_path / f"{young.name[:-6]}{wrong}.part",
    ]
    for part in (old, young, *others):
        part.write_text("half")
    for part in (old, *others):
        os.utime(part, (time.time() - 8 * 24 * 3600,) * 2)
    if not locks:
        monkeypatch.setattr(files, "fcntl", None)
    write_text(path, "whole")
    assert not old.exists() and young.exists() != locks and all(part.exists() for part in others)
    with pytest.raises(ZeroDivisionError):
        write(path, lambda part: 1 / 0)
    assert path.read_text() == "whole"
    assert len(list(tmp_path.iterdir())) == 1 + len(others) + (not locks)
