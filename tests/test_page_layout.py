"""The page's layout: wide tables, long words, and a box with much in it, in windows of many sizes."""

from __future__ import annotations

from pathlib import Path

import pytest
from http_server import HttpServer
from page_browser import Visitor, saying, visitor
from playwright.sync_api import Browser, FilePayload, Page, Route, expect

TABLE = """\
| Language | Typing | Released | Designer | Memory management | Used mostly for |
| --- | --- | --- | --- | --- | --- |
| JavaScript | dynamic | 1995 | Brendan Eich | garbage collected | interactive applications |
| Haskell | static | 1990 | n log n | garbage collected | functional programming, and theory of programs |

"""
LONG_WORD = "x" * 300
SIDEWAYS = "each => each.scrollWidth - each.clientWidth"
BROKEN_WORDS = """cells => cells.flatMap((cell) => {
    const text = cell.firstChild;
    const words = [...text.data.matchAll(/\\S+/g)];
    return words.map(({ 0: word, index }) => {
        const range = document.createRange();
        range.setStart(text, index);
        range.setEnd(text, index + word.length);
        return range.getClientRects().length > 1 ? word : "";
    });
}).filter(Boolean)"""
"""Words that stand on more than one line."""


NOTE_SHIFTS = """
window.shifts = [];
new PerformanceObserver((list) => {
    for (const { value, sources } of list.getEntries())
        shifts.push([value, ...sources.map(({ node }) => node?.id || node?.nodeName)]);
}).observe({ type: "layout-shift", buffered: true });
"""


@pytest.mark.parametrize("width", [1200, 360])
def test_nothing_jumps_while_a_new_chat_loads(browser: Browser, http_server: HttpServer, width: int) -> None:
    with visitor(browser, http_server.url, width=width, height=740) as one:
        page = one.page
        page.add_init_script(NOTE_SHIFTS)
        held: list[Route] = []

        def hold(route: Route) -> None:
            held.append(route)

        page.route("**/ui/api/info*", hold)
        one.visit()
        page.evaluate("new Promise((done) => requestAnimationFrame(() => requestAnimationFrame(done)))")
        for route in held:
            route.continue_()
        expect(page.locator("#model")).to_be_visible()
        page.evaluate("new Promise((done) => requestAnimationFrame(() => requestAnimationFrame(done)))")
        shifts = page.evaluate("shifts")
        assert sum(value for value, *_ in shifts) < 0.05, shifts  # the ideas are those for the model, once it is known


def test_a_table_keeps_its_words_whole_and_scrolls_in_its_frame(browser: Browser, tmp_path: Path) -> None:
    with saying(browser, tmp_path, f"{TABLE}{LONG_WORD}\n") as one:
        page = one.visit().page
        one.ask("Compare languages.")
        one.wait_for_answer()
        for width in (360, 1200):
            resize(page, width, 800)
            cells = page.locator(".block :is(th, td)")
            expect(cells).to_have_count(18)
            assert cells.evaluate_all(BROKEN_WORDS) == []
            frame = page.locator(".block .table")
            assert (frame.evaluate(SIDEWAYS) > 0) == (width == 360)
            # A short cell stands on one line, and what wraps beyond the window's edge makes no high rows.
            heights = cells.evaluate_all("all => all.map((each) => each.clientHeight)")
            assert width > 360 or max(heights) <= 72
            lines = """all => all.filter(({ firstChild }) => {
                const range = document.createRange();
                range.selectNode(firstChild);
                return firstChild.data.length <= 16 && range.getClientRects().length > 1;
            }).length"""
            assert cells.evaluate_all(lines) == 0
            for part in ("html", "#scroller", ".block:last-child"):
                assert page.locator(part).evaluate(SIDEWAYS) == 0, part


def test_on_a_phone_no_ring_is_around_the_page_and_the_list_closes_at_an_import(
    browser: Browser, http_server: HttpServer
) -> None:
    context = browser.new_context(viewport={"width": 390, "height": 800}, has_touch=True, is_mobile=True)
    try:
        here = Visitor(context.new_page(), http_server.url).visit()
        page = here.page
        expect(page.locator("#main")).to_be_focused()
        assert page.locator("#main").evaluate("main => getComputedStyle(main).outlineStyle") == "none"
        begins = """each => {
            const text = document.createRange();
            text.selectNodeContents(each);
            return text.getBoundingClientRect().left;
        }"""
        opener = page.get_by_role("button", name="Show the list of conversations")
        title, model = (page.locator(each).evaluate(begins) for each in ("#title", "#model"))
        assert abs(title - model) <= 1  # one line below the other
        assert title - opener.evaluate("each => each.getBoundingClientRect().right") >= 4  # a ring is 4 px wide
        opener.click()
        expect(page.locator("#sidebar")).to_have_class("is-open")
        chat = b'[{"role": "user", "content": "Imported?"}, {"role": "assistant", "content": "Yes."}]'
        page.locator("#import-file").set_input_files(
            FilePayload(name="chat.json", mimeType="application/json", buffer=chat)
        )
        expect(page.locator(".bubble")).to_have_text("Imported?")
        expect(page.locator("#sidebar")).not_to_have_class("is-open")
        assert here.problems == []
    finally:
        context.close()


def resize(page: Page, width: int, height: int) -> None:
    """Give the window another size, and wait until the page is drawn in it."""
    page.set_viewport_size({"width": width, "height": height})
    page.evaluate("new Promise((drawn) => requestAnimationFrame(() => requestAnimationFrame(drawn)))")


LINES = "\n".join(f"Line {number} of a long question" for number in range(1, 13))
FILES: list[FilePayload] = [
    {"name": f"note-{number}.txt", "mimeType": "text/plain", "buffer": b"Olga"} for number in range(60)
]
MIN_THREAD_PX = 48
"""Two lines of the thread."""


def is_reached(page: Page, selector: str) -> bool:
    """Whether a click on the middle of the element would meet it."""
    found: bool = page.locator(selector).evaluate(
        """each => {
            const { x, y, width, height } = each.getBoundingClientRect();
            return each.contains(document.elementFromPoint(x + width / 2, y + height / 2));
        }"""
    )
    return found


@pytest.mark.parametrize("has_files", [False, True])
def test_the_box_stays_in_the_window(browser: Browser, http_server: HttpServer, has_files: bool) -> None:
    with visitor(browser, http_server.url) as one:
        page = one.visit().page
        page.get_by_label("Message", exact=True).fill(LINES)
        count = 0
        if has_files:
            page.locator("#attach-file").set_input_files(FILES)
            count = len(FILES)
        for zoomed in ((1200, 800), (360, 640), (360, 400), (640, 360), (320, 256)):
            resize(page, *zoomed)
            expect(page.locator("#attached .file")).to_have_count(count)
            for control in ("#input", "#attach", "#send"):
                assert is_reached(page, control), (zoomed, control)
            assert page.locator("#scroller").evaluate("each => each.clientHeight") >= MIN_THREAD_PX, zoomed
            assert page.locator("#input").evaluate("each => each.clientHeight") >= MIN_THREAD_PX / 2, zoomed
            if has_files:
                last = "#attached .file:last-child button"
                page.locator(last).scroll_into_view_if_needed()
                assert is_reached(page, last), zoomed
                page.locator(last).click()
                count -= 1
                expect(page.locator("#attached .file")).to_have_count(count)


def test_the_way_to_the_end_and_notices_lie_on_no_words(browser: Browser, http_server: HttpServer) -> None:
    with visitor(browser, http_server.url, height=400) as one:
        page = one.visit().page
        for count in (1, 2):
            one.ask("Tell me a story about a fox")
            one.wait_for_answer(count)
        page.get_by_label("Message", exact=True).fill(LINES)
        page.locator("#scroller").evaluate("each => each.scrollTo(0, 0)")
        button = page.get_by_role("button", name="Go to the end")
        expect(button).to_be_in_viewport(ratio=1)
        page.evaluate("async () => (await import('/ui/dom.js')).toast('Something happened.')")
        ends_at = "each => each.getBoundingClientRect().bottom"
        begins_at = "each => each.getBoundingClientRect().top"
        words_end = page.locator("#scroller").evaluate(ends_at)
        assert button.evaluate(begins_at) >= words_end
        assert words_end <= page.locator(".toast").evaluate(begins_at)
        assert page.locator(".toast").evaluate(ends_at) <= page.locator("#composer").evaluate(begins_at)
        button.click()
        expect(button).to_be_hidden()


def test_the_list_of_conversations_shows_some_lines_and_all_around_it_is_reached(
    browser: Browser, http_server: HttpServer
) -> None:
    with visitor(browser, http_server.url) as one:
        page = one.visit().page
        for number in range(4):
            one.ask(f"Question {number}")
            one.wait_for_answer()
            page.locator("#new-chat").click()
        drawers = []
        for width, height in ((1200, 800), (640, 360), (320, 256)):
            page.set_viewport_size({"width": width, "height": height})
            one.visit()
            drawers.append(page.locator("#open-sidebar").is_visible())
            if drawers[-1]:
                page.locator("#open-sidebar").click()
            expect(page.locator(".conversation")).to_have_count(4)
            line = page.locator(".conversation").first.evaluate("each => each.offsetHeight")
            assert page.locator("#conversations").evaluate("each => each.clientHeight") >= 3 * line, width
            for part in ("#new-chat", ".entry:last-child .conversation", "#theme", "#import"):
                page.locator(part).scroll_into_view_if_needed()
                assert is_reached(page, part), (width, part)
        assert drawers[0] != drawers[-1], "the list is beside the chat, or over it"


LISTS = (
    """- [ ] outer
  - [x] inner

98. ninety-eight
99. ninety-nine
100. a hundred

***

7. seven
8. eight
9. nine
10. ten

***

1999. then
2000. now

***

"""
    + "\n".join(f"{number}. point" for number in range(1, 13))
    + "\n\nThat is all."
)


def test_numbers_of_lists_are_not_cut_and_tasks_stand_below_their_own(browser: Browser, tmp_path: Path) -> None:
    with saying(browser, tmp_path, LISTS) as one:
        page = one.visit().page
        one.ask("Lists")
        one.wait_for_answer()
        widths = """all => all.map((list) => {
            const number = document.createElement("span");
            number.textContent = `${list.start + list.children.length - 1}. `;
            list.lastElementChild.prepend(number);
            return [number.getBoundingClientRect().width, parseFloat(getComputedStyle(list).paddingInlineStart)];
        })"""
        numbered = page.locator(".blocks ol").evaluate_all(widths)
        assert len(numbered) == 4
        assert all(number <= space for number, space in numbered), numbered
        outer, inner = page.locator("li.task").evaluate_all("all => all.map((each) => each.getBoundingClientRect().x)")
        assert inner - outer >= 16


def foot_rows(page: Page) -> int:
    """The rows in which the foot of the last answer stands."""
    rows: int = page.locator(".foot-row").last.evaluate(
        """each => {
            const shown = [...each.children].map((part) => part.getBoundingClientRect()).filter(({ width }) => width);
            return new Set(shown.map(({ top, bottom }) => Math.round((top + bottom) / 2))).size;
        }"""
    )
    return rows


def test_the_foot_of_an_answer_is_one_row_and_a_small_window_has_no_hint(
    browser: Browser, http_server: HttpServer
) -> None:
    with visitor(browser, http_server.url, width=1200) as one:
        page = one.visit().page
        one.ask("What is UMA?")
        one.wait_for_answer()
        hint, when = page.locator("#hint"), page.locator(".made-by")
        expect(when).to_be_visible()
        time = when.inner_text().split(" ")[-1]
        expect(hint).to_be_visible()
        for width in (1200, 768, 360):
            resize(page, width, 640)
            assert foot_rows(page) == 1, width
        expect(when).to_be_hidden()
        expect(hint).to_be_hidden()
        page.locator(".figures").focus()
        expect(page.locator(".figures-more")).to_contain_text(time)
        page.reload()
        # Of what the browser has kept, that which is far off the screen is not laid out.
        expect(page.locator(".assistant .blocks")).to_have_css("content-visibility", "auto")


def test_the_models_button_is_large_enough_on_a_phone(browser: Browser, http_server: HttpServer) -> None:
    with visitor(browser, http_server.url, width=360) as one:
        button = one.visit().page.locator("#model")
        button.wait_for()
        assert button.evaluate("each => each.getBoundingClientRect().height") >= 24


def check_toast(page: Page) -> None:
    """A notice's words break, its button's do not, on the narrowest of screens."""
    page.set_viewport_size({"width": 320, "height": 640})
    words = "Not attached: one-long-name-of-a-file.png. This model cannot see pictures."
    page.evaluate(
        """async (words) => {
            const { toast } = await import("/ui/dom.js");
            toast(words, { label: "Undo all of it", run: () => {} });
        }""",
        words,
    )
    lines = """each => {
        const all = document.createRange();
        all.selectNodeContents(each);
        return all.getClientRects().length;
    }"""
    assert page.locator(".toast .link-button").evaluate(lines) == 1
    assert page.locator(".toast span").evaluate(lines) > 1
    right = page.get_by_role("button", name="Dismiss").evaluate("each => each.getBoundingClientRect().right")
    assert right <= 320
    page.set_viewport_size({"width": 390, "height": 844})


def test_what_a_finger_touches_is_large_enough_and_enter_begins_a_line(
    browser: Browser, http_server: HttpServer
) -> None:
    context = browser.new_context(
        viewport={"width": 390, "height": 844}, has_touch=True, is_mobile=True, reduced_motion="reduce"
    )
    one = Visitor(context.new_page(), http_server.url)
    page = one.visit().page
    expect(page.locator("#hint")).to_be_hidden()  # a touch screen has no such keys
    box = page.get_by_label("Message", exact=True)
    box.fill("What is UMA?")
    box.press("Enter")
    box.press_sequentially("Be short.")
    assert box.input_value() == "What is UMA?\nBe short."
    page.get_by_role("button", name="Send", exact=True).tap()
    one.wait_for_answer()
    # The model's name can be touched, and looks no larger than it is.
    assert page.locator("#model").evaluate("each => getComputedStyle(each).borderTopColor") == "rgba(0, 0, 0, 0)"
    assert page.locator(".top").evaluate("each => each.offsetHeight") <= 68
    page.set_viewport_size({"width": 360, "height": 640})
    assert foot_rows(page) == 1
    page.set_viewport_size({"width": 390, "height": 844})
    small = """all => all.filter((each) => each.checkVisibility() && !each.closest("[inert]")).flatMap((each) => {
        const { width, height } = each.getBoundingClientRect();
        return Math.min(width, height) < 44 ? [`${each.id || each.getAttribute("aria-label")} ${width} ${height}`] : [];
    })"""
    assert page.locator("button, summary, .tabs a").evaluate_all(small) == []
    page.locator("#open-sidebar").tap()
    expect(page.locator("#search kbd")).to_be_hidden()
    assert page.locator("#sidebar button").evaluate_all(small) == []
    page.locator("#close-sidebar").tap()
    page.locator("#chips").tap()
    assert (
        page.locator(".sheet :is(button, select, input:not([type=radio], [type=checkbox]), .choice)").evaluate_all(
            small
        )
        == []
    )
    page.get_by_role("button", name="Close").tap()
    check_toast(page)
    assert one.problems == []
    context.close()
