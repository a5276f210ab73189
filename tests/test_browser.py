"""What tests/browser.py measures, on pages whose faults are known."""

import pytest

from browser import driven, looked_over, low_contrast, opened, overflow  # noqa: F401

HEAD = '<!doctype html><meta name="viewport" content="width=device-width"><body>'


def test_a_wide_page_is_found_and_a_scroller_is_not(driven):  # noqa: F811
    wide = "<p style='width: 900px'>a line</p>"
    with opened(driven, HEAD + wide, 390) as shown:
        assert any("p." in words for words in overflow(shown.page))
        assert "px wide, the window 390" in overflow(shown.page)[0]
    with opened(driven, f"{HEAD}<div style='overflow-x: auto'>{wide}</div>", 390) as shown:
        assert overflow(shown.page) == []


@pytest.mark.parametrize(
    "body, ratio",
    [
        ("<p style='color: #777; background: #fff'>text</p>", 4.48),  # by the formula of WCAG
        ("<p style='color: #000; opacity: .4'>text</p>", 2.85),  # #999 on white
        ("<div style='background: #000'><p style='color: #333'>text</p></div>", 1.66),
        ("<svg><rect width=90 height=90 fill='#000'/><text x=9 y=50 fill='#333'>text</text></svg>",
         1.66),
        ("<select style='color: #bbb; background: #fff'><option>text</select>", 1.92),
    ],
)  # fmt: skip
def test_texts_that_are_hard_to_read_are_found(driven, body, ratio):  # noqa: F811
    with opened(driven, HEAD + body) as shown:
        (words,) = low_contrast(shown.page)
        assert float(words.split("contrast ")[1].split(":")[0]) == pytest.approx(ratio, abs=0.02)


def test_texts_that_are_easy_to_read_or_hidden_are_not(driven):  # noqa: F811
    fine = (
        "<p style='color: #767676'>text</p>"  # 4.54
        "<p style='color: #fff; display: none'>text</p><details><p style='color: #fff'>a</details>"
        "<div style='background: #00000080'><p style='color: #fff; background: #000'>text</div>"
        "<svg><text y=20 x=9 fill='#000'>text</text></svg>"
    )
    with opened(driven, HEAD + fine) as shown:
        assert low_contrast(shown.page) == []
