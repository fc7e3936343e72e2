"""Documents beside a question: their text is what the model is given, and how much of it is told."""

from __future__ import annotations

import io
import json
import re
import zipfile

from page_browser import Visitor, violations
from playwright.sync_api import FilePayload, Route, expect

ANSWERS = "**/ui/api/answers"
WORD = (
    '<?xml version="1.0"?><w:document xmlns:w="x"><w:body><w:p><w:r><w:t>Fox &amp; owl</w:t></w:r><w:r>'
    '<w:t xml:space="preserve"> &#8211; done</w:t></w:r></w:p><w:tbl><w:tr><w:tc><w:p><w:r><w:t>a</w:t></w:r></w:p>'
    "</w:tc><w:tc><w:p><w:r><w:t>b</w:t></w:r></w:p></w:tc></w:tr></w:tbl></w:body></w:document>"
)
HTML = "<!doctype html><title>t</title><div>One</div><div>Two <b>bold</b></div><script>alert(1)</script>"


CHINESE = (
    "<< /Type /Font /Subtype /Type0 /BaseFont /SimSun /Encoding /GBK-EUC-H /DescendantFonts [<< /Type /Font /Subtype "
    "/CIDFontType0 /BaseFont /SimSun /CIDSystemInfo << /Registry (Adobe) /Ordering (GB1) /Supplement 2 >> >>] >>"
)
"""A font that is not in the file, whose encoding a reader of PDF has to know."""


def pdf(*lines: str, font: str = "<< /Type /Font /Subtype /Type1 /BaseFont /Helvetica >>") -> bytes:
    """A file of one page that says this."""
    words = " ".join(f"<{line.encode('gbk').hex()}> Tj T*" for line in lines)
    content = f"BT /F1 12 Tf 50 750 Td 14 TL {words} ET"
    objects = (
        "<< /Type /Catalog /Pages 2 0 R >>",
        "<< /Type /Pages /Kids [3 0 R] /Count 1 >>",
        "<< /Type /Page /Parent 2 0 R /MediaBox [0 0 612 792] /Contents 4 0 R "
        "/Resources << /Font << /F1 5 0 R >> >> >>",
        f"<< /Length {len(content)} >>\nstream\n{content}\nendstream",
        font,
    )
    body = "".join(f"{number} 0 obj\n{each}\nendobj\n" for number, each in enumerate(objects, 1))
    return f"%PDF-1.4\n{body}trailer << /Size 6 /Root 1 0 R >>\n%%EOF\n".encode()


def archive(**files: str) -> bytes:
    """A ZIP archive; a name's two underlines are a slash."""
    data = io.BytesIO()
    with zipfile.ZipFile(data, "w", zipfile.ZIP_DEFLATED) as zip:
        for name, text in files.items():
            zip.writestr(f"{name.replace('__', '/')}.xml", text)
    return data.getvalue()


def files(**contents: bytes) -> list[FilePayload]:
    """Files by name, whose last underline is the dot."""
    return [{"name": ".".join(name.rsplit("_", 1)), "mimeType": "", "buffer": data} for name, data in contents.items()]


def test_the_text_of_documents_is_what_the_model_is_given(here: Visitor) -> None:
    """PDF, Word and HTML are read, each with its size and tokens; what is none of these is refused by name."""
    page = here.visit().page
    page.locator("#model").wait_for()
    attached = page.locator("#attached .file")
    page.locator("#attach-file").set_input_files(
        files(
            den_pdf=pdf("The fox sleeps.", "The owl is awake."),
            den_docx=archive(word__document=WORD),
            den_html=HTML.encode(),
            scan_pdf=pdf(),
            chinese_pdf=pdf("狐狸在睡觉。", font=CHINESE),
            cut_pdf=b"%PDF-1.7\n",
            cut_docx=archive(word__document=WORD)[:100],
            endless_docx=archive(word__document=WORD)[:-22],
            twice_docx=(body := archive(word__document=WORD))[: body.index(b"PK\1\2")] + body,
            odd_docx=archive(word__document=WORD.replace("&#8211;", "&#x7fffffff;")),
            den_odt=archive(content="<x/>"),
        )
    )
    toast = page.locator(".toast")
    expect(toast).to_contain_text("Not attached: scan.pdf, cut.pdf, cut.docx and 4 more.")
    for why in ("its pages are pictures", "The PDF is damaged", "The file is damaged", "and HTML can be attached"):
        expect(toast).to_contain_text(why)
    expect(attached).to_have_count(4)
    expect(attached.nth(0)).to_contain_text("den.pdf33 bytes · ")
    for index in range(4):
        expect(attached.nth(index)).to_contain_text("tokens")
    with page.expect_request(ANSWERS) as sent:
        here.ask("What is in them?")
    told = json.loads(sent.value.post_data or "")["messages"][0]["content"]
    assert told == (
        "den.pdf:\n```\nThe fox sleeps.\nThe owl is awake.\n```\n\n"
        "den.docx:\n```\nFox & owl \u2013 done\na\tb\t\n```\n\n"
        "den.html:\n```\nOne\n\nTwo bold\n```\n\n"
        "chinese.pdf:\n```\n狐狸在睡觉。\n```\n\nWhat is in them?"
    )
    here.wait_for_answer()


def test_a_question_that_is_edited_is_held_to_what_the_model_can_read_too(here: Visitor) -> None:
    page = here.visit().page
    page.locator("#model").wait_for()
    counts: dict[str, int] = {}  # nothing, as of a model that is not loaded yet
    page.route("**/tokenize", lambda route: route.fulfill(json=counts))
    page.locator("#attach-file").set_input_files(files(long_txt=b"Olga"))
    expect(page.locator("#attached")).to_contain_text("about")
    here.ask("Who is it?")
    here.wait_for_answer()
    counts["count"] = 90_000
    question = page.locator("article.user")
    page.get_by_label("Message", exact=True).press("ArrowUp")
    send = question.get_by_role("button", name="Send again", exact=True)
    expect(question.locator("li.file")).to_contain_text("90,000 tokensToo long: the context window is")
    expect(question.locator("p.fault")).to_have_text("Remove “long.txt” to send.")
    expect(question.locator("p.file")).to_be_hidden()  # without a long text no border stands there
    expect(send).to_be_disabled()
    assert violations(page) == []
    question.get_by_label("Your question").fill("Olga " * 1_000)
    expect(question.locator("p.file")).to_contain_text("90,000 tokensToo long")
    page.get_by_role("button", name="Remove long.txt").click()
    expect(question.locator("p.fault")).to_have_text("Shorten your text to send.")
    expect(send).to_be_disabled()
    question.get_by_label("Your question").fill("Olga")
    expect(question.locator("p.fault")).to_be_empty()
    expect(send).to_be_enabled()


def test_a_document_that_is_too_long_is_not_sent_and_none_is_attached_twice(here: Visitor) -> None:
    page = here.visit().page
    picker, attached = page.locator("#attach-file"), page.locator("#attached li")
    short: FilePayload = {"name": "short.txt", "mimeType": "text/plain", "buffer": b"Olga"}
    long: FilePayload = {"name": "long.txt", "mimeType": "text/plain", "buffer": b"Olga " * 20_000}
    picker.set_input_files(short)
    expect(attached).to_have_count(1)
    picker.set_input_files(short)
    expect(page.locator("#toasts")).to_contain_text("Not attached: short.txt. It is attached already.")
    expect(attached).to_have_count(1)
    picker.set_input_files(long)
    send = page.get_by_role("button", name="Send", exact=True)
    expect(page.locator("#unsendable")).to_have_text("Remove “long.txt” to send.")
    expect(send).to_be_disabled()
    here.ask("What is in them?")
    expect(attached).to_have_count(2)
    expect(page.locator("article")).to_have_count(0)
    assert violations(page) == []
    page.get_by_role("button", name="Remove long.txt").click()
    expect(page.locator("#unsendable")).to_be_empty()
    send.click()
    here.wait_for_answer()


def test_a_long_paste_can_be_a_file_and_a_long_question_is_folded(here: Visitor) -> None:
    page = here.visit().page
    box = page.get_by_label("Message", exact=True)
    box.focus()
    paste = """text => {
            const clipboardData = new DataTransfer();
            clipboardData.setData("text/plain", text);
            const input = document.getElementById("input");
            input.dispatchEvent(new ClipboardEvent("paste", { clipboardData, bubbles: true, cancelable: true }));
            input.value = text;
            input.dispatchEvent(new Event("input"));
        }"""
    page.evaluate(paste, "line\n" * 2_000)
    # It is measured before it is sent, and the offer goes with what it is about.
    expect(page.locator("#extent")).to_contain_text(re.compile(r"^Your text10 KB · [\d,]{5} tokens"))
    box.fill("")
    expect(page.locator("#extent")).to_be_empty()
    expect(page.locator(".toast")).to_have_count(0)
    page.evaluate(paste, "line\n" * 1_000)
    page.get_by_role("button", name="Attach as a file").click()
    expect(page.locator("#extent")).to_be_empty()
    expect(page.locator("#attached .file")).to_contain_text("pasted.txt5.0 KB")
    assert box.input_value() == ""
    page.get_by_role("button", name="Remove pasted.txt").click()
    here.ask("line\n" * 20 + "```python\nprint(1)\n```\nWhat does it say?")
    bubble = page.locator(".bubble")
    whole = bubble.evaluate("each => each.scrollHeight")
    assert bubble.evaluate("each => each.clientHeight") < whole
    mask = "each => getComputedStyle(each).maskImage"
    assert "linear-gradient" in bubble.evaluate(mask)  # its last line fades
    page.get_by_role("button", name="Show all").click()
    assert bubble.evaluate(mask) == "none"
    assert bubble.evaluate("each => each.scrollHeight - each.clientHeight") <= 1
    expect(bubble.get_by_role("group", name="Code in python")).to_have_text("print(1)")
    here.ask("Short")
    expect(page.locator(".bubble").nth(1)).to_have_text("Short")
    assert page.locator(".bubble").nth(1).evaluate(mask) == "none"
    expect(page.locator(".unfold:visible")).to_have_count(1)


def test_a_text_that_the_model_cannot_read_is_not_sent_also_where_it_was_typed(here: Visitor) -> None:
    page = here.page

    def shorter(route: Route) -> None:
        info = route.fetch().json()
        route.fulfill(json={**info, "limits": {**info["limits"], "n_ctx": 1_000}})

    counts: dict[str, int] = {}  # nothing, as of a model that is not loaded yet
    page.route("**/ui/api/info", shorter)
    page.route("**/tokenize", lambda route: route.fulfill(json=counts))
    here.visit()
    page.locator("#model").wait_for()
    box, told, extent = (page.locator(f"#{each}") for each in ("input", "unsendable", "extent"))
    box.fill("Olga has a cat. " * 400)
    expect(extent).to_contain_text("about 1,600 tokensProbably too long: the context window is 1,000")
    expect(told).to_be_empty()
    box.fill("Olga has a cat. " * 600)  # so few tokens no text of this length has
    expect(told).to_have_text("Shorten your text to send.")
    counts["count"] = 1_200
    box.fill("Olga has a cat. " * 300)
    expect(extent).to_contain_text("1,200 tokensToo long: the context window is 1,000")
    expect(told).to_have_text("Shorten your text to send.")
    expect(page.get_by_role("button", name="Send", exact=True)).to_be_disabled()
    box.press("Enter")
    expect(page.locator("article")).to_have_count(0)
    here.ask("Olga")
    here.wait_for_answer()


def test_a_text_that_would_make_the_box_slow_is_attached_as_a_file_however_it_comes(here: Visitor) -> None:
    page = here.visit().page
    box, files = page.get_by_label("Message", exact=True), page.locator("#attached .file")
    box.fill("About this: ")
    page.keyboard.press("End")
    page.keyboard.insert_text("line\n" * 100_000)
    expect(files).to_contain_text("pasted.txt500 KB")
    expect(page.locator("#toasts")).to_contain_text("too long for the box")
    assert box.input_value() == "About this: "
    page.get_by_role("button", name="Remove pasted.txt").click()
    for count in range(1, 4):  # several that are each short enough
        page.keyboard.insert_text("word " * 2_500)
        expect(files).to_have_count(max(0, count - 2))
    assert len(box.input_value()) < 32_768


def test_what_is_dragged_over_the_page_is_framed_where_it_goes(here: Visitor) -> None:
    page = here.visit().page
    drag = """type => {
        const dataTransfer = new DataTransfer();
        dataTransfer.items.add(new File(["x"], "x.txt", { type: "text/plain" }));
        document.dispatchEvent(new DragEvent(type, { dataTransfer, bubbles: true, cancelable: true }));
    }"""
    for kind, framed in (("dragover", 1), ("dragleave", 0), ("dragover", 1), ("drop", 0)):
        page.evaluate(drag, kind)
        expect(page.locator(".is-target")).to_have_count(framed)
        words = page.evaluate("getComputedStyle(document.body, '::after').content")
        assert ("Drop to attach" in words) == bool(framed)
    expect(page.locator("#attached .file")).to_have_count(1)


def test_libraries_are_loaded_where_a_text_needs_them(here: Visitor) -> None:
    page = here.visit().page
    asked: list[str] = []
    page.on("request", lambda request: asked.append(request.url))
    show = """async text => {
        const { Blocks } = await import("/ui/blocks.js");
        const blocks = new Blocks();
        document.getElementById("thread").append(blocks.element);
        blocks.show(text, true);
        await document.fonts.ready;
    }"""
    page.evaluate(show, "No formula.")
    assert not [url for url in asked if "vendor" in url]
    page.evaluate(show, "`code` and\n\n    code of no language")
    assert not [url for url in asked if "vendor" in url]
    page.evaluate(show, "$x^2$")
    expect(page.locator("math")).to_have_count(1)
    page.evaluate("async () => { await document.fonts.ready; }")
    own = f"{here.url}/ui/vendor"
    assert [url for url in asked if "vendor" in url] == [f"{own}/temml.js", f"{own}/stix-two-math.woff2"]
    page.evaluate(show, "```python\npass\n```")
    expect(page.locator(".hljs-keyword")).to_have_text("pass")
    page.evaluate(show, "$y$\n\n```python\nbreak\n```")
    expect(page.locator(".hljs-keyword")).to_have_text(["pass", "break"])
    assert [url for url in asked if "vendor" in url][2:] == [f"{own}/highlight.mjs"]  # each once
