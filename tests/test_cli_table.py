"""How a table stands on a terminal: its columns by width alone, long cells cut, wide characters counted as two."""

from __future__ import annotations

import pytest

from uma.cli.models import COLUMNS, SPARE
from uma.cli.table import cell_len, cut, laid_out, wrapped

PLAIN = ("gemma", "268 M", "dense", "", "Q4_K_M", "32,768", "253 MB", "yes", "UMA_MODELS")
LONG = ("Ein-sehr-langer-Name-" * 4, "268 M", "dense", "base model", "Q4_K_M", "32,768", "253 MB", "yes", "a " * 99)
WIDE = ("日本語のモデル-" * 9, "1 M", "密", "👍" * 9, "Q4_K_M", "32,768", "253 MB", "yes", "")


@pytest.mark.parametrize("width", [60, 80, 100, 160])
def test_a_tables_columns_are_those_of_its_width_whatever_is_in_it(width: int) -> None:
    plain, long, wide = (laid_out(COLUMNS, [row], width, spare=SPARE) for row in (PLAIN, LONG, WIDE))
    assert plain[0].split() == long[0].split() == wide[0].split()
    assert max(map(cell_len, [*plain, *long, *wide])) <= width


def test_columns_stand_below_each_other_beside_wide_characters() -> None:
    table = laid_out(("name", "size"), [("日本語", "1"), ("emoji 👍", "2"), ("plain", "3")], 40)
    assert {cell_len(line[: line.rindex(figure)]) for line, figure in zip(table[1:], "123", strict=True)} == {10}


def test_a_name_that_is_too_long_is_cut_in_its_middle_and_a_key_is_whole_on_its_own_line() -> None:
    rows = [("Qwen3-VL-30B-A3B-Instruct-UD-Q4_K_XL", "18 GB")]
    assert laid_out(("name", "size"), rows, 30)[1:] == ["Qwen3-VL-30…-UD-Q4_K_XL  18 GB"]
    assert laid_out(("name", "size"), rows, 30, key="name")[1:] == [rows[0][0], " " * 25 + "18 GB"]


@pytest.mark.parametrize("text", ["日本語のモデルの名前", "abc" * 9, "👍" * 9, "a日" * 9])
@pytest.mark.parametrize("width", range(1, 9))
def test_what_is_cut_fits(text: str, width: int) -> None:
    assert cell_len(cut(text, width)) <= width


def test_chinese_has_no_blanks_and_wraps_between_characters() -> None:
    lines = wrapped("模型已经加载完毕可以开始提问了", 11, "  ")
    assert max(map(cell_len, lines)) <= 11
    assert "".join(map(str.strip, lines)) == "模型已经加载完毕可以开始提问了"


def test_a_command_to_copy_stays_on_one_line() -> None:
    assert wrapped("start one with `uma run --model NAME`, or not", 30) == [
        "start one with",
        "`uma run --model NAME`, or not",
    ]
