"""Clients that decide, unchanged but for the address; `pip install ".[clients]"` has all but OpenAI's own."""

from __future__ import annotations

import json
import shutil
import subprocess
from typing import Any

import openai
import pytest
from http_server import HttpServer
from openai.lib.decisions_tool_runner import DecisionsToolRunner
from required import missing, required_module

from harness import PATIENCE_SEC

pytestmark = pytest.mark.filterwarnings("ignore")  # theirs, not ours

STATE = "My card was charged twice for one order."
REFUND = {"type": "predicate", "instructions": "Does the customer ask for a refund?"}
TEAM = {"type": "choice", "name": "team", "instructions": "Which team?"}
TEAMS = ("billing", True, "false")
UPSET = {"type": "score", "instructions": "How upset?", "levels": [{"label": "calm"}, {"label": "furious"}]}
QUESTIONS: Any = [REFUND, TEAM | {"choices": [{"value": team} for team in TEAMS]}, UPSET]
BAD: Any = [REFUND, TEAM | {"choices": [{"value": "billing"}]}]
PATIENT: dict[str, Any] = {"api_key": "none", "timeout": PATIENCE_SEC, "max_retries": 0}


def test_openai_s_client_gets_typed_answers_and_typed_errors(openai_client: openai.OpenAI) -> None:
    found = openai_client.decisions.create(model="builtin", input=STATE, questions=QUESTIONS)
    refund, team, upset = found.answers
    assert refund.type == "predicate"
    assert team.type == "choice"
    assert upset.type == "score"
    assert [each.name for each in found.answers] == [None, "team", None]
    assert [each.value for each in team.probabilities] == list(TEAMS)
    assert sum(each.probability for each in team.probabilities) == pytest.approx(1)
    assert found.usage.total_tokens == found.usage.input_tokens
    with pytest.raises(openai.BadRequestError) as refused:
        openai_client.decisions.create(model="builtin", input=STATE, questions=BAD)
    assert refused.value.param == "questions[1].choices"
    with pytest.raises(openai.NotFoundError):
        openai_client.decisions.create(model="llama-9", input=STATE, questions=QUESTIONS)


def test_openai_s_tool_runner_chooses_an_action_until_it_is_done(openai_client: openai.OpenAI) -> None:
    steps: list[str] = []

    def candidates(_: Any) -> Any:
        done = {"id": "done", "description": "The task is complete.", "done": True}
        again = {"id": "look", "description": "Look again.", "execute": lambda: steps.append("look")}
        return [done] if steps else [again, done]

    runner = DecisionsToolRunner(observe=lambda: [{"type": "input_text", "text": STATE}], candidates=candidates)
    told = runner.run(openai_client, {"model": "builtin", "input": "Find out what happened."})
    assert told["status"] == "unverified"
    assert told["completed_candidate_ids"] == steps
    assert len(told["decisions"]) == 1


def test_langchain_decides(http_server: HttpServer) -> None:
    kinds = required_module("langchain_openai.decisions")
    model = kinds.OpenAIDecisions(base_url=f"{http_server.url}/v1", model="builtin", **PATIENT)
    questions = {
        "refund": kinds.Predicate(instructions="Does the customer ask for a refund?"),
        "team": kinds.Choice(instructions="Which team?", choices={"billing": "money", True: None}),
        "upset": kinds.Score(instructions="How upset?", levels=["calm", "furious"]),
    }
    found = model.invoke({"input": STATE, "questions": questions})
    assert 0 < found.predicates["refund"].probability < 1
    assert found.choices["team"].choice in ("billing", True)
    assert 0 <= found.scores["upset"].score <= 1
    with pytest.raises(openai.BadRequestError, match="choices"):
        one = kinds.Choice(instructions="Which team?", choices={"billing": None})
        model.invoke({"input": STATE, "questions": {"team": one}})


def test_typesafe_s_client_decides_and_lists_models(http_server: HttpServer) -> None:
    sdk = required_module("typesafe_sdk")
    questions = {
        "refund": sdk.Noul(instructions="Does the customer ask for a refund?"),
        "team": sdk.Choice(instructions="Which team?", criteria={"billing": "money", "shipping": None}),
        "upset": sdk.Score(instructions="How upset?", criteria=["calm", "furious"]),
    }
    place = {"base_url": http_server.url, "api_key": "x", "model": "builtin", "timeout": PATIENCE_SEC}
    with sdk.TypeSafeClient(**place, retry=sdk.RetryPolicy(max_retries=0), compression=False) as client:
        found = client.system_one(state={"ticket": STATE}, questions=questions).answers
        assert 0 < found["refund"].noul < 1
        assert set(found["team"].probabilities) == {"billing", "shipping"}
        assert 0 <= found["upset"].score <= 1
        assert [each.name for each in client.models.list().models]
        with pytest.raises(sdk.TypeSafeBadRequestError, match="criteria"):
            one = sdk.Choice(instructions="Which team?", criteria={"billing": None})
            client.system_one(state=STATE, questions={"team": one})


def test_litellm_decides_in_both_dialects(http_server: HttpServer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LITELLM_LOCAL_MODEL_COST_MAP", "True")  # it would fetch a list of prices
    litellm = required_module("litellm")
    place = {"api_key": "none", "timeout": PATIENCE_SEC, "input": STATE}
    for provider, path in (("openai", "/v1"), ("hosted_vllm", "/v1"), ("typesafe", "")):
        at = place | {"api_base": f"{http_server.url}{path}"}
        found = litellm.decisions(f"{provider}/builtin", questions=[REFUND, UPSET], **at)
        assert [answer.type for answer in found.answers] == ["predicate", "score"]
        with pytest.raises(litellm.BadRequestError, match=r"questions.*(levels|criteria)"):
            litellm.decisions(f"{provider}/builtin", questions=[REFUND, UPSET | {"levels": [{"label": "calm"}]}], **at)
    noul = {"refund": {"type": "noul", "instructions": "Does the customer ask for a refund?"}}
    place = {"api_base": http_server.url, "api_key": "none", "timeout": PATIENCE_SEC, "state": {"ticket": STATE}}
    assert 0 < litellm.systemone("typesafe/builtin", questions=noul, **place).answers["refund"].noul < 1


DECIDES = """
const { experimental_decide } = require("ai"), { createOpenAI } = require("@ai-sdk/openai");
const model = createOpenAI({ baseURL: process.argv[1], apiKey: "none" }).decisionModel("builtin");
const questions = JSON.parse(process.argv[2]);
experimental_decide({ model, state: process.argv[3], questions, maxRetries: 0 })
  .then((found) => console.log(JSON.stringify(found.answers)), (error) => console.log(JSON.stringify(String(error))));
"""


def test_the_ai_sdk_decides(http_server: HttpServer) -> None:
    def decided(questions: Any) -> Any:
        script = ["node", "-e", DECIDES, "--", f"{http_server.url}/v1", json.dumps(questions), STATE]
        done = subprocess.run(script, capture_output=True, text=True, timeout=PATIENCE_SEC, check=False)
        if "MODULE_NOT_FOUND" in done.stderr:
            missing("agents", "there is no AI SDK: npm install ai @ai-sdk/openai, and NODE_PATH")
        assert done.returncode == 0, done.stderr
        return json.loads(done.stdout)

    if shutil.which("node") is None:
        missing("agents", "there is no node: apt-get install nodejs")
    questions = {"refund": {"type": "boolean", "instructions": "Does the customer ask for a refund?"}}
    assert 0 < decided(questions)["refund"]["probability"] < 1
    alone = {"type": "choice", "instructions": "Which team?", "criteria": {"billing": None}}
    assert "questions[1].choices" in decided(questions | {"team": alone})
