"""Files whose content is read whole, and given back piece by piece."""

from __future__ import annotations

import hashlib
import sys

import pytest

from loraproxy.adapters.files import opened, release


def test_a_content_is_what_was_hashed_however_small_the_file(tmp_path):
    for content in (b"", b"x", b"x" * 100_000):
        path = tmp_path / "file"
        path.write_bytes(content)
        digest = hashlib.sha256()
        with opened(path, limit=1 << 20) as file:
            file.head(10)
            assert bytes(file.load(digest)) == content
        assert digest.hexdigest() == hashlib.sha256(content).hexdigest()


@pytest.mark.skipif(sys.platform != "linux", reason="what becomes of pages that were given back is Linux's")
def test_what_is_released_goes_to_the_system_and_nothing_beside_it(tmp_path):
    path = tmp_path / "file"
    path.write_bytes(b"x" * 100_000)
    with opened(path, limit=1 << 20) as file:
        content = file.load(hashlib.sha256())
    release(content, at=10_000, n_bytes=50_000)
    assert set(content[20_000:50_000]) == {0}
    assert set(content[:10_000]) == set(content[60_000:]) == {ord("x")}


def test_a_part_within_a_page_stays_and_so_does_what_has_no_pages_of_its_own(tmp_path):
    path = tmp_path / "file"
    path.write_bytes(b"x" * 1000)
    with opened(path, limit=1 << 20) as file:
        content = file.load(hashlib.sha256())
    plain = b"x" * 100_000
    release(content, at=100, n_bytes=500)
    release(plain, at=0, n_bytes=len(plain))
    assert set(content) == set(plain) == {ord("x")}
