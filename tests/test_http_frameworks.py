"""The frameworks that programs are built on, unchanged but for the address; `pip install ".[clients]"` has them."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import openai
import pytest
from http_server import HttpServer, running_http
from http_tap import tapped
from required import missing, required_module, separate_module
from script_model import write_script_model

from harness import PATIENCE_SEC, clean_environ, run_to_end, short_directory

pytestmark = pytest.mark.filterwarnings("ignore")  # theirs, not ours

AGENTS_PAGE = (Path(__file__).parents[1] / "docs" / "agents.md").read_text(encoding="utf-8")
QUESTION = "Tell me a story about a fox"
TURNS = [{"role": "user", "content": QUESTION}]
GREEDY: dict[str, Any] = {"temperature": 0, "max_tokens": 12}
PATIENT: dict[str, Any] = {"api_key": "none", "timeout": PATIENCE_SEC}


@pytest.fixture
def expected(http_server: HttpServer) -> str:
    """What the server says to `QUESTION` without any framework."""
    said = http_server.ask("POST", "/v1/chat/completions", {"messages": TURNS, **GREEDY})
    return str(said.json["choices"][0]["message"]["content"])


@pytest.fixture
def litellm(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    monkeypatch.setenv("LITELLM_LOCAL_MODEL_COST_MAP", "True")  # it would fetch a list of prices
    yield required_module("litellm")


def block_of_the_docs(language: str, server: HttpServer) -> str:
    """The block of docs/agents.md in this language, for this server and its model."""
    (block,) = re.findall(rf"^```{language}\n(.*?)^```", AGENTS_PAGE, re.MULTILINE | re.DOTALL)
    return str(block).replace("http://127.0.0.1:8080", server.url).replace("MODEL", "builtin")


def test_the_example_of_langchain_in_the_docs_runs_as_pasted(http_server: HttpServer) -> None:
    required_module("langchain_openai")
    done = run_to_end(sys.executable, "-c", block_of_the_docs("python", http_server))
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip()


def test_the_line_of_the_docs_about_llm_answers(http_server: HttpServer, tmp_path: Path) -> None:
    if shutil.which("llm") is None:
        missing("clients", "there is no llm: pip install llm, in an environment of its own")
    command = ["sh", "-c", block_of_the_docs("sh", http_server)]
    environ = clean_environ(HOME=str(tmp_path), LLM_USER_PATH=str(tmp_path), OPENAI_API_KEY="none")
    done = subprocess.run(command, env=environ, capture_output=True, text=True, timeout=PATIENCE_SEC, check=False)
    assert (done.returncode, done.stdout.strip() != "") == (0, True), done.stderr


def test_langchain_chats_and_streams(http_server: HttpServer, expected: str) -> None:
    langchain = required_module("langchain_openai")
    model = langchain.ChatOpenAI(base_url=f"{http_server.url}/v1", model="builtin", **PATIENT, **GREEDY)
    whole = model.invoke(QUESTION)
    assert whole.content == expected
    assert whole.usage_metadata["output_tokens"] <= 12
    assert "".join(chunk.content for chunk in model.stream(QUESTION)) == expected


@pytest.fixture(scope="module")
def storing(tmp_path_factory: pytest.TempPathFactory) -> Iterator[HttpServer]:
    """A server that stores responses, and a model that ends what it says: the Agents SDK takes nothing that is cut."""
    model = write_script_model(tmp_path_factory.mktemp("storing") / "model.gguf", "It ran away.")
    flags = ("--model", str(model), "--store-responses", "1")
    with short_directory() as place, running_http(place, *flags) as server:
        yield server


def asked_of(server: HttpServer, id: str) -> list[str]:
    """Texts of all that a stored response answers, the oldest first."""
    items = server.ask("GET", f"/v1/responses/{id}/input_items?order=asc").json["data"]
    return [each["content"] if isinstance(each["content"], str) else each["content"][0]["text"] for each in items]


def test_langchain_goes_on_from_a_stored_response(storing: HttpServer) -> None:
    langchain = required_module("langchain_openai")
    with tapped(storing.port) as tap:
        model = langchain.ChatOpenAI(
            base_url=f"{tap.url}/v1",
            model="model",
            use_responses_api=True,
            use_previous_response_id=True,
            **PATIENT,
            **GREEDY,
        )
        first = model.invoke([("user", QUESTION)])
        second = model.invoke([("user", QUESTION), first, ("user", "And then?")])
    sent = tap.asked[1].body
    assert sent["previous_response_id"] == first.response_metadata["id"] and len(sent["input"]) == 1
    assert asked_of(storing, second.response_metadata["id"]) == [QUESTION, first.text, "And then?"]


@pytest.mark.parametrize("is_local", [True, False])
def test_the_agents_sdk_goes_on_from_its_session_and_from_a_stored_response(
    storing: HttpServer, is_local: bool
) -> None:
    agents = required_module("agents")
    agents.set_tracing_disabled(True)  # it would send traces to OpenAI
    client = openai.AsyncOpenAI(base_url=f"{storing.url}/v1", **PATIENT)
    model = agents.OpenAIResponsesModel(model="model", openai_client=client)
    agent = agents.Agent(name="teller", instructions="Tell stories.", model=model)
    kept: dict[str, Any] = {"session": agents.SQLiteSession("fox")} if is_local else {}
    first = agents.Runner.run_sync(agent, QUESTION, **kept)
    if not is_local:
        kept = {"previous_response_id": first.last_response_id}
    second = agents.Runner.run_sync(agent, "And then?", **kept)
    assert second.last_response_id
    assert asked_of(storing, second.last_response_id) == [QUESTION, first.final_output, "And then?"]


def test_litellm_completes_in_two_dialects_and_knows_the_errors(
    http_server: HttpServer, litellm: Any, expected: str
) -> None:
    places = {"openai/builtin": f"{http_server.url}/v1", "ollama_chat/builtin": http_server.url}
    for model, place in places.items():
        ask = {"model": model, "api_base": place, "messages": TURNS, **PATIENT, **GREEDY}
        assert litellm.completion(**ask).choices[0].message.content == expected
        chunks = list(litellm.completion(**ask, stream=True))
        assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks) == expected
    with pytest.raises(litellm.NotFoundError):
        litellm.completion("openai/llama-9", messages=TURNS, api_base=f"{http_server.url}/v1", **PATIENT)
    long = [{"role": "user", "content": "fox " * 9_000}]
    with pytest.raises(litellm.ContextWindowExceededError):
        litellm.completion("openai/builtin", messages=long, api_base=f"{http_server.url}/v1", **PATIENT)


def test_litellm_embeds_in_two_dialects(http_server: HttpServer, litellm: Any) -> None:
    expected = http_server.ask("POST", "/v1/embeddings", {"input": "a fox"}).json["data"][0]["embedding"]
    for model, place in {"openai/builtin": f"{http_server.url}/v1", "ollama/builtin": http_server.url}.items():
        found = litellm.embedding(model, input=["a fox"], api_base=place, **PATIENT)
        assert found.data[0]["embedding"] == pytest.approx(expected, abs=1e-4)


def test_llama_index_completes_and_streams(http_server: HttpServer, expected: str) -> None:
    like = separate_module("llama_index.llms.openai_like", "llama-index-llms-openai-like")
    llms = separate_module("llama_index.core.llms", "llama-index-core")
    place = {"api_base": f"{http_server.url}/v1", "model": "builtin", "max_retries": 0, **PATIENT}
    model = like.OpenAILike(**place, is_chat_model=True, **GREEDY)
    message = llms.ChatMessage(role="user", content=QUESTION)
    assert model.chat([message]).message.content == expected
    *_, last = model.stream_chat([message])
    assert last.message.content == expected
    plain = like.OpenAILike(**place, is_chat_model=False, **GREEDY)
    assert plain.complete("Once upon").text
