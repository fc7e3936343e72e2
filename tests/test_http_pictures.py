"""Pictures over HTTP: in every dialect the same file has the same answer, and what cannot be read is named."""

from __future__ import annotations

import base64
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import anthropic
import openai
import pytest
from http_server import HttpServer, running_http
from projectors import MARKER, Reference, png, write_projector, write_seeing_model

from harness import EXACT, ONE_THREAD, PATIENCE_SEC, short_directory
from uma.llm import LLM

QUESTION, LENGTH = "What is this?", 12
FILE = png(40, 30, seed=1)
DATA = base64.b64encode(FILE).decode()
URL = f"data:image/png;base64,{DATA}"
PLAIN: dict[str, Any] = {"temperature": 0, "ignore_eos": True}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("seeing")
    write_seeing_model(folder / "model.gguf", "qwen2vl")
    write_projector(folder / "mmproj.gguf", "qwen2vl")
    return folder


@pytest.fixture(scope="module")
def seeing(folder: Path) -> Iterator[HttpServer]:
    with (
        short_directory() as directory,
        running_http(
            directory, "--model", str(folder / "model.gguf"), "--http-any-model", *EXACT, *ONE_THREAD
        ) as server,
    ):
        yield server


@pytest.fixture(scope="module")
def expected(folder: Path) -> str:
    """What llama.cpp's own helpers make of the picture and the question."""
    reference = Reference(folder / "model.gguf", folder / "mmproj.gguf")
    prompt = f"<|im_start|>user\n{MARKER}{QUESTION}<|im_end|>\n<|im_start|>assistant\n"
    found = reference.text(prompt, [FILE], LENGTH)
    reference.close()
    return found


CHAT, CLAUDE, RESPONSES = "/v1/chat/completions", "/v1/messages", "/v1/responses"
IMAGE_URL = {"type": "image_url", "image_url": {"url": URL, "detail": "low"}}
INPUT_IMAGE = {"type": "input_image", "image_url": URL}
IMAGE = {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": DATA}}


def test_openai_s_client_is_told_what_llama_cpp_says(seeing: HttpServer, expected: str) -> None:
    text: Any = {"type": "text", "text": QUESTION}
    messages: Any = [{"role": "user", "content": [IMAGE_URL, text]}]
    with openai.OpenAI(base_url=f"{seeing.url}/v1", api_key="none", max_retries=0, timeout=PATIENCE_SEC) as client:
        asked: Any = {"model": "any", "temperature": 0, "extra_body": {"ignore_eos": True}}
        said = client.chat.completions.create(messages=messages, max_tokens=LENGTH, **asked)
        assert said.choices[0].message.content == expected
        given: Any = [{"role": "user", "content": [INPUT_IMAGE, {"type": "input_text", "text": QUESTION}]}]
        response = client.responses.create(input=given, max_output_tokens=LENGTH, **asked)
        assert response.output_text == expected
        assert said.usage is not None
        assert response.usage is not None
        assert response.usage.input_tokens == said.usage.prompt_tokens


def test_anthropic_s_client_too(seeing: HttpServer, expected: str) -> None:
    content: Any = [IMAGE, {"type": "text", "text": QUESTION}]
    with anthropic.Anthropic(base_url=seeing.url, api_key="none", max_retries=0, timeout=PATIENCE_SEC) as client:
        messages: Any = [{"role": "user", "content": content}]
        said = client.messages.create(model="any", max_tokens=LENGTH, messages=messages, extra_body=PLAIN)
        counted = client.messages.count_tokens(model="any", messages=messages)
    assert "".join(part.text for part in said.content if part.type == "text") == expected
    usage = said.usage
    assert counted.input_tokens == usage.input_tokens + (usage.cache_read_input_tokens or 0)


def test_ollama_s_images_stand_before_the_text(seeing: HttpServer, expected: str) -> None:
    options = {"temperature": 0, "num_predict": LENGTH, "repeat_penalty": 1.0, "top_k": 0, "top_p": 1.0}
    plain: dict[str, Any] = {"model": "any", "stream": False, "options": options, "ignore_eos": True}
    chat = {"messages": [{"role": "user", "content": QUESTION, "images": [DATA]}], **plain}
    assert seeing.ask("POST", "/api/chat", chat).json["message"]["content"] == expected
    assert (
        seeing.ask("POST", "/api/generate", {"prompt": QUESTION, "images": [DATA], **plain}).json["response"]
        == expected
    )


def test_a_picture_of_an_earlier_turn_is_seen_and_comes_from_the_cache(seeing: HttpServer) -> None:
    turns = [
        {"role": "system", "content": "You see."},
        {"role": "user", "content": [IMAGE_URL, {"type": "text", "text": QUESTION}]},
        {"role": "assistant", "content": "A thing."},
        {"role": "user", "content": "Sure?"},
    ]
    first = seeing.ask("POST", "/v1/chat/completions", {"messages": turns[:2], "max_tokens": 1, **PLAIN}).json
    told = seeing.ask("POST", "/v1/chat/completions", {"messages": turns, "max_tokens": 1, **PLAIN})
    usage = told.json["usage"]
    assert usage["prompt_tokens_details"]["cached_tokens"] > first["usage"]["prompt_tokens"] - 30
    assert "messages[1].content[0].image_url.detail" in told.headers["x-uma-ignored"]


@pytest.mark.parametrize(
    ("path", "content", "message"),
    [
        (
            "/v1/chat/completions",
            [{**IMAGE_URL, "image_url": {"url": "https://x.org/a.png"}}],
            "image_url.url: .*fetches",
        ),
        (
            "/v1/chat/completions",
            [{**IMAGE_URL, "image_url": {"url": "data:image/png,abc"}}],
            "image_url.url: expected",
        ),
        (
            "/v1/chat/completions",
            [{**IMAGE_URL, "image_url": {"url": "data:;base64,a"}}],
            "image_url.url: is no base64",
        ),
        (CHAT, [{"type": "image_url"}], "image_url: expected a data URL"),
        (
            "/v1/chat/completions",
            [{"type": "input_audio", "input_audio": {"data": "AA"}}],
            "input_audio cannot be read",
        ),
        (
            "/v1/messages",
            [{"type": "image", "source": {"type": "url", "url": "https://x.org"}}],
            "source.type: .*base64",
        ),
        (CLAUDE, [{**IMAGE, "source": {"type": "base64", "data": "AAAA"}}], "source.data: is no picture"),
        (CLAUDE, [{"type": "document", "source": {"type": "base64", "data": "AA"}}], "document cannot be read"),
        (RESPONSES, [{"type": "input_image", "file_id": "file-1"}], "file_id: files are not read"),
        (RESPONSES, [{**INPUT_IMAGE, "image_url": f"data:image/png;base64,{DATA[:40]}"}], "image_url: .*broken"),
    ],
)
def test_what_is_no_picture_is_refused_where_the_body_has_it(
    seeing: HttpServer, path: str, content: Any, message: str
) -> None:
    field = "input" if path == "/v1/responses" else "messages"
    turns = [{"role": "user", "content": "Hello"}, {"role": "user", "content": content}]
    system = {"system": "You see."} if path == "/v1/messages" else {}
    answered = seeing.ask("POST", path, {field: turns, "max_tokens": 4, **system})
    assert answered.status == 400
    told = answered.json["error"]["message"]
    assert told.startswith(f"{field}[1].content[0]")
    assert re.search(message, told), told


def test_what_the_model_sees_is_told(seeing: HttpServer) -> None:
    assert seeing.ask("GET", "/props").json["modalities"] == {"vision": True, "audio": False}
    assert "vision" in seeing.ask("POST", "/api/show", {"model": "any"}).json["capabilities"]


def test_llm_takes_a_path_or_bytes(folder: Path, tmp_path: Path, expected: str) -> None:
    file = tmp_path / "picture.png"
    file.write_bytes(FILE)
    plain: Any = {"flash_attn": "off", "cache_type_k": "f32", "cache_type_v": "f32"}
    with LLM(str(folder / "model.gguf"), **plain, threads=1, threads_batch=1) as llm:
        for image in (FILE, str(file), file):
            content = [{"type": "image", "image": image}, {"type": "text", "text": QUESTION}]
            (said,) = llm.chat([{"role": "user", "content": content}], {"max_tokens": LENGTH, **PLAIN})
            assert said.outputs[0].text == expected
