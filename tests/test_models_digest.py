"""A model's digest is its content's, wherever the file lies."""

from __future__ import annotations

from pathlib import Path

from uma.models.digest import HEAD_BYTES, digest


def test_a_digest_is_the_content_s_and_not_the_path_s(tmp_path: Path) -> None:
    data = bytes(3 * HEAD_BYTES)
    files = {"one": data, "copy": data, "head": b"x" + data[1:], "tail": data[:-1] + b"x", "longer": data + b"x"}
    for name, content in files.items():
        (tmp_path / name).write_bytes(content)
    found = {name: digest(str(tmp_path / name), len(content)) for name, content in files.items()}
    assert found["one"] == found["copy"]
    assert len(set(found.values())) == 4
    (tmp_path / "one").write_bytes(files["head"])
    assert digest(str(tmp_path / "one"), len(data)) == found["head"]
    assert len(digest(str(tmp_path / "missing"), 1)) == 64
