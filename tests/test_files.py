"""Single files are whole or not there, whoever else writes them."""

import os
import threading
import time

import pytest

from crate_interp.core.files import write, write_text


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


def test_what_a_dead_writer_left_of_a_file_goes_after_a_week(tmp_path):
    path = tmp_path / "page.html"
    old, young = tmp_path / ".page.html.abc.part", tmp_path / ".page.html.def.part"
    others = tmp_path / "mine.part", tmp_path / ".other.html.abc.part"
    for part in (old, young, *others):
        part.write_text("half")
    for part in (old, *others):
        os.utime(part, (time.time() - 8 * 24 * 3600,) * 2)
    write_text(path, "whole")
    assert not old.exists() and young.exists() and all(part.exists() for part in others)
    with pytest.raises(ZeroDivisionError):
        write(path, lambda part: 1 / 0)
    assert path.read_text() == "whole" and len(list(tmp_path.iterdir())) == 4
