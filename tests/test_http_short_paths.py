"""OpenAI's clients that are given an address without `/v1` find its endpoints, as with llama-server."""

from __future__ import annotations

from pathlib import Path

import openai
from engine_world import config_for
from http_server import hosted_http

from harness import PATIENCE_SEC
from uma.http.app import SHORTENED


def test_openai_s_client_needs_no_v1(tiny: Path) -> None:
    with hosted_http(config_for(tiny, http="127.0.0.1:0")) as hosted:
        url = f"http://127.0.0.1:{hosted.port}"
        with openai.OpenAI(base_url=url, api_key="none", max_retries=0, timeout=PATIENCE_SEC) as client:
            (name,) = [each.id for each in client.models.list()]
            turns = [{"role": "user", "content": "Hi"}]
            chat = client.chat.completions.create(model=name, messages=turns, max_tokens=2)  # type: ignore[arg-type]
            assert chat.choices[0].message.content is not None
            assert client.responses.create(model=name, input="Hi", max_output_tokens=2).output_text
        with hosted.connect() as raw:
            for path in sorted(SHORTENED):
                short = path.removeprefix("/v1")
                for method in ("GET", "POST", "DELETE"):
                    told = [raw.ask(method, each, None if method == "GET" else b"{}") for each in (path, short)]
                    assert told[0].status == told[1].status
                    assert told[0].json == told[1].json or told[0].status == 405
            claude = raw.ask("GET", "/models", **{"anthropic-version": "2023-06-01"}).json
            assert claude == raw.ask("GET", "/v1/models", **{"anthropic-version": "2023-06-01"}).json
            assert claude["has_more"] is False
            assert "; /health answers 200 once" in raw.ask("GET", "/readyz").json["error"]["message"]
