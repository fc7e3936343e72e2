"""The file of API keys, as `uma key new` and editors write it."""

from __future__ import annotations

from pathlib import Path

import pytest

from uma.http.keys import Keys, add


@pytest.mark.parametrize("end", ["", "\n", "\n\n", "  # mine"])
def test_a_key_is_added_to_a_file_whatever_its_last_line_ends_with(tmp_path: Path, end: str) -> None:
    path = tmp_path / "keys.toml"
    first = add(path, "first")
    path.write_text(path.read_text(encoding="utf-8").rstrip() + "\nmax_concurrent = 3" + end, encoding="utf-8")
    second = add(path, "second")
    keys = Keys.load(path)
    for name, key, most in (("first", first, 3), ("second", second, None)):
        account = keys.find(key)
        assert account is not None
        assert (account.name, account.bounds.max_concurrent) == (name, most)
