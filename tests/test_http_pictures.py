"""Pictures and sounds over HTTP: in every dialect a file has the same answer, and what cannot be read is named."""

from __future__ import annotations

import base64
import os
import re
from collections.abc import Iterator
from io import BytesIO
from pathlib import Path
from typing import Any

import attrs
import openai
import pytest
from http_clients import claude_of, openai_of
from http_server import HttpServer, running_gateway, running_http
from PIL import Image
from projectors import MARKER, Reference, png, wav, write_projector, write_seeing_model

from harness import EXACT, ONE_THREAD, short_directory
from uma.cli.contract import prove
from uma.client.http import HttpClient
from uma.client.http_probe import HttpProbe
from uma.client.probe import SocketProbe
from uma.contracts.claims import claims_of
from uma.errors import BadRequest
from uma.llm import LLM
from uma.server.json_connection import MAX_STARTING

QUESTION, LENGTH = "What is this?", 12
FILE = png(40, 30, seed=1)
DATA = base64.b64encode(FILE).decode()
URL = f"data:image/png;base64,{DATA}"
SOUND = wav(0.4, seed=1)
SOUND_DATA = base64.b64encode(SOUND).decode()
PLAIN: dict[str, Any] = {"temperature": 0, "ignore_eos": True}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("seeing")
    write_seeing_model(folder / "model.gguf", "qwen2vl")
    write_projector(folder / "mmproj.gguf", "qwen2vl", hears="gemma4ua")
    return folder


@pytest.fixture(scope="module")
def seeing(folder: Path) -> Iterator[HttpServer]:
    with (
        short_directory() as directory,
        running_http(directory, "--model", str(folder / "model.gguf"), "--alias=*", *EXACT, *ONE_THREAD) as server,
    ):
        yield server


@pytest.fixture(scope="module")
def reference(folder: Path) -> Iterator[Reference]:
    reference = Reference(folder / "model.gguf", folder / "mmproj.gguf")
    yield reference
    reference.close()


def said_of(reference: Reference, text: str, file: bytes) -> str:
    """What llama.cpp's own helpers make of a file and a text."""
    return reference.text(f"<|im_start|>user\n{text}<|im_end|>\n<|im_start|>assistant\n", [file], LENGTH)


@pytest.fixture(scope="module")
def expected(reference: Reference) -> str:
    return said_of(reference, f"{MARKER}{QUESTION}", FILE)


CHAT, CLAUDE, RESPONSES = "/v1/chat/completions", "/v1/messages", "/v1/responses"
IMAGE_URL = {"type": "image_url", "image_url": {"url": URL, "detail": "low"}}
INPUT_IMAGE = {"type": "input_image", "image_url": URL}
INPUT_AUDIO = {"type": "input_audio", "input_audio": {"data": SOUND_DATA, "format": "wav"}}
IMAGE = {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": DATA}}


def test_openai_s_client_is_told_what_llama_cpp_says(seeing: HttpServer, expected: str) -> None:
    text: Any = {"type": "text", "text": QUESTION}
    messages: Any = [{"role": "user", "content": [IMAGE_URL, text]}]
    with openai_of(seeing) as client:
        asked: Any = {"model": "any", "temperature": 0, "extra_body": {"ignore_eos": True}}
        said = client.chat.completions.create(messages=messages, max_tokens=LENGTH, **asked)
        assert said.choices[0].message.content == expected
        given: Any = [{"role": "user", "content": [INPUT_IMAGE, {"type": "input_text", "text": QUESTION}]}]
        response = client.responses.create(input=given, max_output_tokens=LENGTH, **asked)
        assert response.output_text == expected
        assert said.usage is not None
        assert response.usage is not None
        assert response.usage.input_tokens == said.usage.prompt_tokens


def test_a_picture_is_decided_about(seeing: HttpServer, http_server: HttpServer) -> None:
    questions: Any = [{"type": "predicate", "instructions": "Is it red?"}]
    given: Any = [{"role": "user", "content": [INPUT_IMAGE, {"type": "input_text", "text": "A photo."}]}]
    with openai_of(seeing) as client:
        with_it = client.decisions.create(model="any", input=given, questions=questions)
        without = client.decisions.create(model="any", input="A photo.", questions=questions)
    assert with_it.answers[0].type == "predicate"
    assert with_it.usage.input_tokens > without.usage.input_tokens
    refused = http_server.ask("POST", "/v1/decisions", {"input": given, "questions": questions})
    assert (refused.status, refused.json["error"]["param"]) == (400, "input[0].content[0]")


@pytest.mark.parametrize(
    "url",
    [
        f" data:image/png;charset=utf-8; BASE64,{DATA[:76]}\r\n{DATA[76:].rstrip('=')}\n",
        "data:image/png;base64," + DATA.replace("+", "%2B").replace("/", "%2f").replace("=", "%3D"),
    ],
)
def test_a_data_url_is_read_as_browsers_read_it(seeing: HttpServer, expected: str, url: str) -> None:
    content = [{"type": "image_url", "image_url": {"url": url}}, {"type": "text", "text": QUESTION}]
    asked = {"messages": [{"role": "user", "content": content}], "max_tokens": LENGTH, **PLAIN}
    assert seeing.ask("POST", CHAT, asked).json["choices"][0]["message"]["content"] == expected


def test_a_sound_is_heard_in_both_of_openai_s_endpoints(seeing: HttpServer, reference: Reference) -> None:
    heard = said_of(reference, f"{MARKER}{QUESTION}", SOUND)
    for part in (INPUT_AUDIO, {"type": "audio_url", "audio_url": {"url": f"data:audio/wav;base64,{SOUND_DATA}"}}):
        content = [part, {"type": "text", "text": QUESTION}]
        asked = {"messages": [{"role": "user", "content": content}], "max_tokens": LENGTH, **PLAIN}
        assert seeing.ask("POST", CHAT, asked).json["choices"][0]["message"]["content"] == heard
    content = [INPUT_AUDIO, {"type": "input_text", "text": QUESTION}]
    asked = {"input": [{"role": "user", "content": content}], "max_output_tokens": LENGTH, **PLAIN}
    (item,) = seeing.ask("POST", RESPONSES, asked).json["output"]
    assert item["content"][0]["text"] == heard


def test_openai_s_transcriptions_are_what_the_model_writes_down(seeing: HttpServer, reference: Reference) -> None:
    """The question is llama-server's, and so is the place of the sound behind it."""
    heard = said_of(reference, f"Transcribe audio to text{MARKER}", SOUND)
    more: Any = {"max_tokens": LENGTH, "ignore_eos": True}
    with openai_of(seeing) as client:
        ask, file = client.audio.transcriptions.create, ("sound.wav", SOUND)
        whole = ask(model="any", file=file, extra_body=more)
        assert whole.text == heard
        assert whole.usage is not None
        assert whole.usage.type == "tokens"
        assert (whole.usage.output_tokens, whole.usage.total_tokens > LENGTH + 10) == (LENGTH, True)
        assert ask(model="any", file=file, response_format="text", extra_body=more) == heard
        *deltas, done = ask(model="any", file=file, stream=True, extra_body=more)
        assert "".join(each.delta for each in deltas if each.type == "transcript.text.delta") == heard
        assert done.type == "transcript.text.done"
        assert done.text == heard
        french = ask(model="any", file=file, prompt="What?", language="fr", temperature=0, extra_body=more)
        assert french.text == said_of(reference, f"What? (language: fr){MARKER}", SOUND)
        url = "data:audio/wav;base64," + base64.b64encode(SOUND).decode()
        path, kind = "/v1/audio/transcriptions", {"content_type": "application/json"}
        in_json = seeing.ask("POST", path, {"file_url": url, **more}, **kind)
        assert in_json.json["text"] == heard
        for wrong_url, told in ((url[:60], "file_url: "), ("a.wav", "file_url: expected a data URL")):
            refused = seeing.ask("POST", path, {"file_url": wrong_url}, **kind)
            assert (refused.status, refused.json["error"]["message"].startswith(told)) == (400, True)
        for wrong, told in (
            ({"response_format": "srt"}, "response_format: 'srt' has times"),
            ({"extra_body": {"response_format": "foo"}}, "response_format: expected json or text, not 'foo'"),
            ({"extra_body": {"seed": "[" * 60_000}}, "seed: expected an integer"),
            ({"file": ("a.png", FILE[:40])}, "file: cannot be decoded"),
            ({"file": ("a.ogg", b"OggS" + bytes(40))}, "file: is Ogg; send "),
            ({"temperature": 9}, "temperature: "),
        ):
            with pytest.raises(openai.BadRequestError, match=told):
                ask(**{"model": "any", "file": file, **wrong})  # type: ignore[call-overload]


def test_of_several_models_a_form_names_the_one_that_hears(tmp_path: Path) -> None:
    hearing = write_seeing_model(tmp_path / "ear.gguf", "llava")
    write_seeing_model(tmp_path / "deaf.gguf", "llava", seed=1)
    write_projector(tmp_path / "mmproj-ear.gguf", None, hears="gemma4ua")
    alone = Reference(hearing, tmp_path / "mmproj-ear.gguf")
    heard = said_of(alone, f"Transcribe audio to text{MARKER}", SOUND)
    alone.close()
    flags = ("--models", "deaf,ear", *EXACT, *ONE_THREAD)
    with (
        short_directory() as directory,
        running_http(directory, *flags, UMA_MODELS=str(tmp_path)) as server,
        openai_of(server) as client,
    ):
        more: Any = {"max_tokens": LENGTH, "ignore_eos": True}
        ask, file = client.audio.transcriptions.create, ("sound.wav", SOUND)
        assert ask(model="ear", file=file, extra_body=more).text == heard
        *_, done = ask(model="ear", file=file, stream=True, extra_body=more)
        assert done.type == "transcript.text.done"
        assert done.text == heard
        large = ("large.wav", wav(9, rate=192_000))  # as base64 it is over 8 MiB, which a body is not
        assert ask(model="ear", file=large, extra_body=more).text
        with pytest.raises(openai.BadRequestError, match="this server's model does not support audio input"):
            ask(model="deaf", file=file)
        with pytest.raises(openai.NotFoundError, match="nobody"):
            ask(model="nobody", file=file)


def test_a_picture_in_a_tool_s_result_is_seen(seeing: HttpServer, reference: Reference) -> None:
    asked = {"type": "text", "text": "Look."}
    call = {"id": "c1", "type": "function", "function": {"name": "shot", "arguments": "{}"}}
    chat: list[dict[str, Any]] = [
        {"role": "user", "content": "Take one."},
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "c1", "content": [asked, IMAGE_URL]},
    ]
    claude: Any = [
        {"role": "user", "content": "Take one."},
        {"role": "assistant", "content": [{"type": "tool_use", "id": "c1", "name": "shot", "input": {}}]},
        {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "c1", "content": [asked, IMAGE]}]},
    ]
    items = [
        {"role": "user", "content": "Take one."},
        {"type": "function_call", "call_id": "c1", "name": "shot", "arguments": "{}"},
        {"type": "function_call_output", "call_id": "c1", "output": [{**asked, "type": "input_text"}, INPUT_IMAGE]},
    ]
    tools = {"tools": [{"type": "function", "function": {"name": "shot", "parameters": {"type": "object"}}}]}
    flat = {"tools": [{"type": "function", "name": "shot", "parameters": {"type": "object"}}]}
    by_claude = {"tools": [{"name": "shot", "input_schema": {"type": "object"}}]}
    said = seeing.ask("POST", CHAT, {"messages": chat, "max_tokens": LENGTH, "tool_choice": "none", **tools, **PLAIN})
    text = said.json["choices"][0]["message"]["content"]
    blind = [chat[0], chat[1], {**chat[2], "content": "Look."}]
    counts = [
        seeing.ask("POST", f"{CHAT}/input_tokens", {"messages": turns, **tools}).json["input_tokens"]
        for turns in (chat, blind)
    ]
    assert counts[0] > counts[1] + 3
    assert said.headers["x-uma-ignored"] == "messages[2].content[1].image_url.detail"
    body = {"messages": claude, "max_tokens": LENGTH, "tool_choice": {"type": "none"}, **by_claude, **PLAIN}
    blocks = seeing.ask("POST", CLAUDE, body).json["content"]
    assert "".join(each["text"] for each in blocks if each["type"] == "text") == text
    body = {"input": items, "max_output_tokens": LENGTH, "tool_choice": "none", **flat, **PLAIN}
    (item,) = [each for each in seeing.ask("POST", RESPONSES, body).json["output"] if each["type"] == "message"]
    assert item["content"][0]["text"] == text


def test_anthropic_s_client_too(seeing: HttpServer, expected: str) -> None:
    content: Any = [IMAGE, {"type": "text", "text": QUESTION}]
    with claude_of(seeing) as client:
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


def test_ollama_s_images_can_be_sounds_and_a_gateway_passes_both_on(
    seeing: HttpServer, reference: Reference, expected: str
) -> None:
    options = {"num_predict": LENGTH, "repeat_penalty": 1.0, "top_k": 0, "top_p": 1.0, **PLAIN}
    body: dict[str, Any] = {"model": "any", "stream": False, "options": options}
    body["messages"] = [{"role": "user", "content": QUESTION, "images": [SOUND_DATA]}]
    heard = said_of(reference, f"{MARKER}{QUESTION}", SOUND)
    with running_gateway(seeing.process, "--alias=*") as gateway:
        for server in (seeing, gateway):
            assert server.ask("POST", "/api/chat", body).json["message"]["content"] == heard
        asked = {"messages": [{"role": "user", "content": [IMAGE_URL, {"type": "text", "text": QUESTION}]}]}
        told = gateway.ask("POST", CHAT, {**asked, "max_tokens": LENGTH, **PLAIN})
        assert told.json["choices"][0]["message"]["content"] == expected


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
        (CHAT, [{**IMAGE_URL, "image_url": {"url": "ftp://x.org/a"}}], "image_url.url: expected a data URL, not"),
        (CHAT, [{"type": "input_audio", "input_audio": "AA"}], "input_audio: expected an object with data"),
        (
            "/v1/chat/completions",
            [{"type": "input_audio", "input_audio": {"data": "A"}}],
            "input_audio.data: is no base64",
        ),
        (
            "/v1/messages",
            [{"type": "image", "source": {"type": "url", "url": "https://x.org"}}],
            "source.url: .*fetches nothing",
        ),
        (CLAUDE, [{**IMAGE, "source": {"type": "base64", "data": "AAAA"}}], "source.data: has an unrecognized format"),
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


NATIVE, COMPLETIONS = "/completion", "/v1/completions"


def test_a_prompt_has_what_llama_server_s_object_has(seeing: HttpServer, reference: Reference) -> None:
    """Without a chat template, of one prompt or several, and the same on the socket."""
    files = [FILE, SOUND]
    asked = {
        "prompt_string": f"See <__media__> and hear <__media__>: {QUESTION}",
        "multimodal_data": [DATA, SOUND_DATA],
    }
    expected = reference.text(f"See {MARKER} and hear {MARKER}: {QUESTION}", files, LENGTH)
    assert seeing.ask("GET", "/props").json["media_marker"] == "<__media__>"
    said = seeing.ask("POST", NATIVE, {"prompt": asked, "n_predict": LENGTH, **PLAIN}).json
    assert (said["content"], said["prompt"]) == (expected, f"See  and hear : {QUESTION}")
    body = {"prompt": ["See", asked], "max_tokens": LENGTH, **PLAIN}
    of_text, of_files = seeing.ask("POST", COMPLETIONS, body).json["choices"]
    assert of_files["text"] == expected != of_text["text"]
    media = [{"data": DATA, "at": 4}, {"data": SOUND_DATA, "at": 14}]
    with seeing.process.connect() as raw:
        raw.hello(versions=["1.1"])
        told = {"id": "a", "prompt": said["prompt"], "media": media}
        raw.send({**told, "max_tokens": LENGTH, **PLAIN, "stream": False})
        answer = raw.last_of("a")
        assert answer["text"] == expected
        raw.send({"type": "tokenize", **told})
        tokenized = raw.expect("tokenize")
        assert len(tokenized["token_ids"]) == answer["usage"]["prompt_tokens"] == said["tokens_evaluated"]
        for wrong, problem in (
            ({"prompt": None, "token_ids": [1]}, "media: stands beside prompt alone"),
            ({"media": media[::-1]}, "media[1].at: 4 is before another one's"),
            ({"media": [{"path": "x.png"}]}, "media[0].path: expected an absolute path"),
            ({"media": [{"url": "http://x/"}]}, "media[0].url: this server fetches nothing"),
            ({"echo": True}, "echo: beside pictures"),
            (
                {"media": [{"data": DATA, "at": 99}]},
                "media[0].at: 99 is before another",
            ),
        ):
            raw.send({**told, **wrong})
            assert problem in raw.last_of("a")["message"]


@pytest.mark.parametrize("path", [NATIVE, COMPLETIONS])
@pytest.mark.parametrize(
    ("prompt", "problem"),
    [
        (("a", [DATA]), ".multimodal_data: 1 files for 0 marks <__media__>"),
        (("<__media__> or <__media__>?", [DATA]), ".multimodal_data: 1 files for 2 marks"),
        (("<__media__>?", []), ".multimodal_data: 0 files for 1 marks"),
        (("<__media__>?", DATA), ".multimodal_data: expected a list of files"),
        (([1, "<__media__>?"], [DATA]), ".prompt_string: expected a string"),
        (("<__media__>?", [""]), ".multimodal_data[0]: is empty"),
        (("<__media__><__media__>?", [DATA, "AAAA"]), ".multimodal_data[1]: "),
    ],
)
def test_a_prompt_s_files_are_refused_by_name(seeing: HttpServer, path: str, prompt: Any, problem: str) -> None:
    asked = {"prompt_string": prompt[0], "multimodal_data": prompt[1]}
    refused = seeing.ask("POST", path, {"prompt": asked, "max_tokens": 1})
    assert (refused.status, refused.json["error"]["message"].startswith(f"prompt{problem}")) == (400, True)


def test_a_client_of_the_socket_names_its_own_files_alone(seeing: HttpServer, expected: str, tmp_path: Path) -> None:
    own, pipe, link = tmp_path / "own.png", tmp_path / "pipe", tmp_path / "link.png"
    own.write_bytes(FILE)
    os.mkfifo(pipe)
    strangers = tmp_path / "stranger.png" if os.geteuid() == 0 else Path("/etc/passwd")
    if os.geteuid() == 0:
        strangers.write_bytes(FILE)
        os.chown(strangers, 12_345, 12_345)
    link.symlink_to(strangers)

    def asked(path: Path | str) -> dict[str, Any]:
        message = {"role": "user", "content": QUESTION, "media": [{"path": str(path)}]}
        return {"id": "a", "messages": [message], "max_tokens": LENGTH, **PLAIN}

    with seeing.process.connect() as raw:
        raw.hello(versions=["1.1"])
        raw.send({**asked(own), "stream": False})
        assert raw.last_of("a")["text"] == expected
        raw.send({"type": "tokenize", **{name: asked(own)[name] for name in ("id", "messages")}})
        assert len(raw.expect("tokenize")["token_ids"]) > 10
        paths: list[tuple[Path | str, str]] = [
            *((each, "is no file of this client's user") for each in (strangers, link, pipe, tmp_path, tmp_path / "x")),
            ("own.png", "expected an absolute path"),
        ]
        for path, problem in paths:
            raw.send(asked(path))
            refused = raw.last_of("a")
            assert refused["event"] == "error"
            assert f"messages[0].media[0].path: {problem}" in refused["message"]


def test_a_session_goes_on_however_many_of_its_files_cannot_be_read(
    seeing: HttpServer, expected: str, tmp_path: Path
) -> None:
    own = tmp_path / "own.png"
    own.write_bytes(FILE)

    def asked(id: str, path: Path) -> dict[str, Any]:
        message = {"role": "user", "content": QUESTION, "media": [{"path": str(path)}]}
        return {"id": id, "messages": [message], "max_tokens": LENGTH, **PLAIN, "stream": False}

    with seeing.process.connect() as raw:
        raw.hello(versions=["1.1"])
        for number in range(MAX_STARTING + 1):
            raw.send(asked(f"{number}", tmp_path / "missing.png"))
            assert raw.last_of(f"{number}")["event"] == "error"
        for number in range(2):
            raw.send(asked(f"left{number}", own), {"type": "cancel", "id": f"left{number}"})
            raw.last_of(f"left{number}")
        raw.send(asked("good", own))
        assert raw.last_of("good")["text"] == expected


def test_that_it_sees_and_hears_is_proven_and_its_denial_found(seeing: HttpServer) -> None:
    for probe in (SocketProbe(seeing.process.socket), HttpProbe(HttpClient(seeing.url))):
        info = probe.introduce()
        for told in (True, False):
            denied = attrs.evolve(info, capabilities=attrs.evolve(info.capabilities, vision=told, audio=told))
            claims = [each for each in claims_of(denied) if each.name in ("vision", "audio", "media_urls")]
            found = {each.name: prove(each, probe) for each in claims}
            assert {name: each.is_true for name, each in found.items()} == {
                "vision": told,
                "audio": told,
                "media_urls": True,
            }
            if told:
                assert "another answer about another file" in found["vision"].seen
                assert "another answer about another file" in found["audio"].seen


def test_what_the_model_sees_is_told(seeing: HttpServer) -> None:
    assert seeing.ask("GET", "/props").json["modalities"] == {"vision": True, "audio": True}
    assert {"vision", "audio"} <= {*seeing.ask("POST", "/api/show", {"model": "any"}).json["capabilities"]}


def test_llm_takes_a_path_or_bytes_or_a_picture_of_pillow_s(
    folder: Path, tmp_path: Path, expected: str, reference: Reference
) -> None:
    file = tmp_path / "picture.png"
    file.write_bytes(FILE)
    plain: Any = {"flash_attn": "off", "cache_type_k": "f32", "cache_type_v": "f32"}
    with LLM(str(folder / "model.gguf"), **plain, threads=1) as llm:
        for image in (FILE, str(file), file, Image.open(BytesIO(FILE)), Image.open(BytesIO(FILE)).convert("RGBA")):
            content = [{"type": "image", "image": image}, {"type": "text", "text": QUESTION}]
            (said,) = llm.chat([{"role": "user", "content": content}], {"max_tokens": LENGTH, **PLAIN})
            assert said.outputs[0].text == expected
            assert DATA not in repr(said)
        content = [{"type": "audio", "audio": SOUND}, {"type": "text", "text": QUESTION}]
        (heard,) = llm.chat([{"role": "user", "content": content}], {"max_tokens": LENGTH, **PLAIN})
        assert heard.outputs[0].text == said_of(reference, f"{MARKER}{QUESTION}", SOUND)
        for wrong in ({"type": "audio", "audio": Image.open(BytesIO(FILE))}, {"type": "image", "image": 5}):
            with pytest.raises(BadRequest, match=r"content\[0\]: expected a part of type text"):
                llm.chat([{"role": "user", "content": [wrong]}])
