"""Claims of a server about itself, each with a proof that uses the claimed feature.

A proof is a generator: it yields requests as the wire has them, is sent each reply, and returns what it found. So the
same proofs run over the socket, over HTTP and in tests; nothing here does I/O.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import attrs

from uma.contracts.chat_proofs import about_chat
from uma.contracts.embedding_proofs import about_embeddings
from uma.contracts.media_proofs import about_media
from uma.contracts.proofs import (
    PROMPT,
    REFUSALS,
    TOKENS,
    TRIES,
    Claim,
    DisprovenError,
    Proof,
    Question,
    answered,
    ask,
    demand,
    refused,
    with_ids,
)
from uma.contracts.sampling_proofs import about_sampling, echoes, stops_at_last_of
from uma.contracts.speculation_proofs import about_speculation
from uma.types import ServerInfo

CANCELLED_TOKENS = 4096
"""Length of an answer that is cancelled after its first token: more tokens than are computed before the cancel
arrives."""


def claims_of(info: ServerInfo) -> Iterator[Claim]:
    """All claims that can be proven of a server that introduces itself as `info`."""
    if info.capabilities.generate:
        yield from _about_output(info)
        yield from _about_input(info)
        yield from about_chat(info)
        yield from about_media(info)
        yield from about_sampling(info, _BESIDE)
        yield from _about_extras(info)
        yield from about_speculation(info)
        yield from _about_bounds(info)
        yield Claim("metrics", "snapshot", _metrics)
    else:
        yield Claim("generation", "no", partial(refused, ask().fields, "generate"))
        yield Claim("tokenize", _yes(info.capabilities.tokenize), _tokenizes)
        yield from _about_bounds_of_texts(info)
    yield from about_embeddings(info)
    yield Claim("health", "probe", _health)
    yield Claim("unknown kind of request", "no", partial(refused, {"type": "telepathy"}, "telepathy"))


# Output


def _about_output(info: ServerInfo) -> Iterator[Claim]:
    yield Claim("streaming", _yes(info.capabilities.streaming), partial(_streaming, info.capabilities.streaming))
    most = min(info.limits.max_tokens, CANCELLED_TOKENS)
    yield Claim("cancel", _yes(info.capabilities.cancel), partial(_cancel, info.capabilities.cancel, most))


def _streaming(is_declared: bool) -> Proof:
    if not is_declared:
        return (yield from refused(ask(stream=True).fields, "stream"))
    for number in range(TRIES):
        # Another prompt each time: where one prompt has two near-equal logits, another does not.
        prompt = PROMPT + " Well," * number
        streamed = answered((yield ask(prompt=prompt)))
        whole = answered((yield ask(prompt=prompt, stream=False)))
        if streamed.text == whole.text:
            break
    demand(len(streamed.tokens) > 1, f"{len(streamed.tokens)} token events for {TOKENS} tokens")
    demand(not whole.tokens, "token events although stream was false")
    demand(streamed.text == whole.text, f"streamed {streamed.text!r}, whole {whole.text!r}")
    completion = streamed.last["usage"]["completion_tokens"]
    demand(completion == TOKENS, f"usage counts {completion} of {TOKENS} tokens")
    return f"{len(streamed.tokens)} events; the same text as in one piece"


def _cancel(is_declared: bool, max_tokens: int) -> Proof:
    reply = yield attrs.evolve(ask(max_tokens=max_tokens), cancel_after=1)
    if not is_declared:
        demand(reply.last.get("reason") != "cancelled", "ended by a cancel although none is declared")
        if reply.error is None:
            return "ignored: the answer came to its end"
        is_refusal = reply.last["code"] in REFUSALS and "cancel" in reply.last["message"]
        demand(is_refusal, f"failed with {reply.error}, which is no refusal of a cancel")
        return f"refused: {reply.error}"
    answered(reply)
    demand(reply.last.get("reason") == "cancelled", f"ended by {reply.last.get('reason')}")
    return f"ended after {reply.last['usage']['completion_tokens']} tokens"


# Input


def _about_input(info: ServerInfo) -> Iterator[Claim]:
    capabilities = info.capabilities
    yield Claim("messages", "yes", _messages)
    if capabilities.tokenize and capabilities.token_ids_input:
        yield Claim("tokenize, token_ids", "yes", _token_ids)
    yield Claim(
        "prefix_sharing", capabilities.prefix_sharing.partition(":")[0], partial(_prefix, capabilities.prefix_sharing)
    )


def _messages() -> Proof:
    reply = answered((yield Question({"messages": [{"role": "user", "content": "Hello!"}], "max_tokens": 4})))
    return f"{reply.last['usage']['prompt_tokens']} prompt tokens"


def _token_ids() -> Proof:
    tokenized = answered((yield Question({"type": "tokenize", "prompt": PROMPT})))
    ids = tokenized.last["token_ids"]
    for _ in range(TRIES):  # near-equal logits can make two answers to one prompt differ
        by_text, by_ids = answered((yield ask())), answered((yield Question(with_ids(ids))))
        if by_text.text == by_ids.text:
            break
    demand(by_text.text == by_ids.text, "the answer to the tokens differs from that to the text")
    demand(by_text.last["usage"]["prompt_tokens"] == len(ids), "usage counts other prompt tokens than tokenize gave")
    return f"{len(ids)} tokens"


def _prefix(sharing: str) -> Proof:
    prompt = f"{PROMPT} {PROMPT} {PROMPT}"
    answered((yield ask(prompt=prompt, max_tokens=1)))
    usage = answered((yield ask(prompt=prompt, max_tokens=1))).last["usage"]
    is_claimed = not sharing.startswith("none")
    demand(is_claimed == (usage["cached_tokens"] > 0), f"{usage['cached_tokens']} cached tokens of a repeated prompt")
    return f"{usage['cached_tokens']} of {usage['prompt_tokens']} tokens cached the second time"


# Extras


def _about_extras(info: ServerInfo) -> Iterator[Claim]:
    capabilities = info.capabilities
    most = capabilities.max_logprobs
    if most >= 0:
        yield Claim("logprobs", f"up to {most}", partial(_logprobs, min(most, 3)))
        yield Claim(f"logprobs = {most + 1}", "no", partial(refused, ask(logprobs=most + 1).fields, "logprobs"))
    else:
        yield Claim("logprobs", "no", partial(refused, ask(logprobs=1).fields, "logprobs"))
    grammars = capabilities.grammars
    for kind, (value, fits) in _GRAMMARS.items():
        if kind in grammars:
            yield Claim(f"grammar: {kind}", "yes", partial(_guided, kind, value, fits))
        else:
            yield Claim(f"grammar: {kind}", "no", partial(refused, ask(grammar={kind: value}).fields, "grammar"))
    most = capabilities.max_answers
    if most > 1:
        yield Claim("answers", f"up to {most}", _two_answers)
    yield Claim(f"answers: n = {most + 1}", "no", partial(refused, ask(n=most + 1).fields, "n"))
    if capabilities.echo:
        yield Claim("echo", "yes", echoes)
    else:
        yield Claim("echo", "no", partial(refused, ask(echo=True).fields, "echo"))
    if (marks := capabilities.fill_in) is not None:
        yield Claim("fill_in", "yes", partial(_fill_in, [marks.prefix, marks.suffix, marks.middle]))
    yield from _about_tools(capabilities.tools)
    if wording := capabilities.decisions:
        yield Claim("decisions", f"wording {wording}", _decides)
    else:
        yield Claim("decisions", "no", partial(refused, _DECISION, "decide"))


_DECISION = {
    "type": "decide",
    "messages": [{"role": "user", "content": PROMPT}],
    "questions": [{"kind": "choice", "instructions": "What is it?", "options": [{"label": "story"}, {"label": "law"}]}],
}


def _decides() -> Proof:
    (decision,) = answered((yield Question(_DECISION))).last["answers"]
    total = sum(decision["probabilities"])
    demand(abs(total - 1) < 1e-6, f"the probabilities of the two options add up to {total}")
    return f"the first of two options with {decision['probabilities'][0]:.3f}"


def _fill_in(marks: list[int]) -> Proof:
    reply = answered((yield Question(with_ids(marks))))
    count = reply.last["usage"]["prompt_tokens"]
    demand(count == len(marks), f"{len(marks)} tokens around nothing count as {count}")
    return "the three tokens are a prompt"


_WEATHER = {
    "name": "weather",
    "description": "Tells the weather of a city.",
    "parameters": {
        "type": "object",
        "properties": {"city": {"enum": ["Bern", "Oslo"]}},
        "required": ["city"],
        "additionalProperties": False,
    },
}


def _about_tools(choices: Any) -> Iterator[Claim]:
    if not choices:
        yield Claim("tools", "no", partial(refused, _with_tools("auto"), "tools"))
    for choice, name in (("auto", "auto"), ("none", "none"), ("required", "required"), ("weather", "named")):
        if name in choices:
            yield Claim(f"tools: {name}", "yes", partial(_tools, choice))
        elif choices:
            yield Claim(f"tools: {name}", "no", partial(refused, _with_tools(choice), "tool_choice"))


def _with_tools(choice: str) -> dict[str, Any]:
    messages = [{"role": "user", "content": "What is the weather in Oslo?"}]
    return {"messages": messages, "tools": [_WEATHER], "tool_choice": choice, "temperature": 0.0, "max_tokens": 80}


def _tools(choice: str) -> Proof:
    reply = answered((yield Question(_with_tools(choice))), ignoring="tools")
    calls = reply.last.get("tool_calls", ())
    deltas = [event for event in reply.events if event["event"] == "tool_call"]
    if choice == "none":
        demand(not calls and not deltas, "a call although none was wanted")
        return "no call"
    for number, call in enumerate(calls):
        streamed = "".join(delta["arguments"] for delta in deltas if delta["call"] == number)
        demand(streamed == call["arguments"], "the streamed arguments differ from the call's")
        demand(call["name"] == "weather", f"a call of {call['name']!r}, which is no tool of the request")
        arguments = json.loads(call["arguments"])
        is_valid = list(arguments) == ["city"] and arguments["city"] in ("Bern", "Oslo")
        demand(is_valid, f"arguments that do not validate: {call['arguments']}")
    demand(bool(calls) or choice == "auto", "no call although one was demanded")
    return f"{len(calls)} calls, told apart from the text"


def _logprobs(top: int) -> Proof:
    reply = answered((yield ask(logprobs=top)), ignoring="logprobs")
    for token in reply.tokens[: reply.last["usage"]["completion_tokens"]]:
        found = token.get("logprobs")
        if not isinstance(found, dict):
            raise DisprovenError("a token without logprobs")
        demand(len(found["top"]) == top, f"{len(found['top'])} likeliest tokens, not {top}")
        demand(found["chosen"]["token_id"] == token["token_id"], "logprobs of another token than came")
        demand(found["chosen"]["logprob"] <= 0, "a log probability over 0")
        if top:
            demand(found["top"][0]["token_id"] == token["token_id"], "a greedy token that is not the likeliest")
    return f"{top} likeliest with each of {len(reply.tokens)} tokens"


def _is_object_with_a_number(text: str) -> bool:
    value = json.loads(text)
    return isinstance(value, dict) and set(value) == {"n"} and isinstance(value["n"], int)


_NUMBER = {
    "type": "object",
    "properties": {"n": {"type": "integer", "minimum": 0, "maximum": 99}},
    "required": ["n"],
    "additionalProperties": False,
}
_GRAMMARS: dict[str, tuple[Any, Callable[[str], bool]]] = {
    "json_schema": (_NUMBER, _is_object_with_a_number),
    "json_object": (True, lambda text: isinstance(json.loads(text), dict)),
    "regex": ("[0-9]{3}", lambda text: re.fullmatch("[0-9]{3}", text) is not None),
    "choice": (["red", "green"], lambda text: text in ("red", "green")),
    "gbnf": ('root ::= "ab" [0-9]', lambda text: re.fullmatch("ab[0-9]", text) is not None),
    "lark": ('start: "ab" /[0-9]/', lambda text: re.fullmatch("ab[0-9]", text) is not None),
}


def _guided(kind: str, value: Any, fits: Callable[[str], bool]) -> Proof:
    reply = answered((yield ask(grammar={kind: value}, max_tokens=4 * TOKENS, ignore_eos=False)), ignoring="grammar")
    if reply.last["reason"] != "stop":
        # An object of any shape can be longer than the answer, so its beginning is accepted.
        demand(kind == "json_object" and reply.text.startswith("{"), f"not complete: {reply.text!r}")
        return "cut by max_tokens"
    try:
        is_fit = fits(reply.text)
    except ValueError:
        is_fit = False
    demand(is_fit, f"does not match: {reply.text!r}")
    return repr(reply.text)


def _two_answers() -> Proof:
    reply = answered((yield ask(n=2, stream=False, temperature=1.0)), ignoring="n")
    demand(len(reply.last.get("answers", ())) == 2, f"{len(reply.last.get('answers', ()))} answers")
    return "2 answers"


_BESIDE: dict[str, Callable[[], Proof]] = {
    "grammar": partial(_guided, "json_schema", *_GRAMMARS["json_schema"]),
    "logprobs": partial(_logprobs, 1),
    "n": _two_answers,
}
"""Proofs for sampling parameters that are also capabilities."""


# Bounds


def _about_bounds(info: ServerInfo) -> Iterator[Claim]:
    most = info.capabilities.max_stop_sequences
    yield Claim("max_stop_sequences", str(most), partial(_many_stops, most))
    yield Claim(f"{most + 1} stop sequences", "no", partial(refused, ask(stop=_strings(most + 1)).fields, "stop"))
    yield Claim("limits.max_tokens", f"{info.limits.max_tokens:,}", partial(_bounded, info.limits.max_tokens))
    too_long = with_ids([0] * info.limits.n_ctx)
    yield Claim("a prompt as long as the context", "no", partial(refused, too_long, "prompt"))
    if info.limits.max_sequences:
        layout = _shares_cells if info.capabilities.kv_unified else _has_a_share
        yield Claim("kv_unified", _yes(info.capabilities.kv_unified), partial(layout, info))
    beyond = with_ids([0, info.model.vocab_size])
    yield Claim("a token beyond the vocabulary", "no", partial(refused, beyond, "token_ids"))


def _strings(count: int) -> list[str]:
    return [f"\x01{index}" for index in range(count)]


def _many_stops(most: int) -> Proof:
    if not most:
        return "none is taken"
    seen = yield from stops_at_last_of(_strings(most - 1))
    return f"{seen}, the last of {most}"


def _bounded(most: int) -> Proof:
    # A stop string ends the answer soon, and the end carries the warnings.
    text = answered((yield ask(max_tokens=8))).text
    demand(bool(text), "no text to stop at")
    reply = yield ask(max_tokens=most + 1, stop=[text])
    if reply.error is not None:
        demand("max_tokens" in reply.last["message"], f"refused with {reply.error}, which does not name max_tokens")
        return f"refused: {reply.last['message']}"
    demand(reply.warns_of("max_tokens"), "more than the limit was neither refused nor cut with a warning")
    return "cut, with a warning"


def _shares_cells(info: ServerInfo) -> Proof:
    """Prove that one request can use more cells than an equal share of them."""
    cells, longest = int(answered((yield Question({"type": "metrics"}))).last["kv_cells_total"]), info.limits.n_ctx
    share = cells // info.limits.max_sequences
    is_longer = longest > share or longest >= info.model.context_length
    demand(is_longer, f"a request has {longest:,} tokens at most, no more than its share of {cells:,} cells")
    count = min(share + 1, longest - 1)
    usage = answered((yield Question(with_ids([0] * count) | {"max_tokens": 1}))).last["usage"]
    demand(usage["prompt_tokens"] == count, f"{usage['prompt_tokens']:,} of {count:,} tokens were read")
    return f"{count:,} tokens of one request; {cells:,} cells for {info.limits.max_sequences} requests"


def _has_a_share(info: ServerInfo) -> Proof:
    """Prove that no request can use more cells than an equal share of them."""
    cells, longest = int(answered((yield Question({"type": "metrics"}))).last["kv_cells_total"]), info.limits.n_ctx
    share = cells // info.limits.max_sequences
    demand(longest <= share, f"a request can have {longest:,} tokens, more than its share of {cells:,} cells")
    yield from refused(with_ids([0] * (share + 1)), "prompt")
    return f"at most {longest:,} tokens of one request; {cells:,} cells for {info.limits.max_sequences} requests"


def _about_bounds_of_texts(info: ServerInfo) -> Iterator[Claim]:
    if info.capabilities.embeddings:
        beyond, too_long = [0, info.model.vocab_size], [0] * (info.limits.n_ctx + 1)
        for name, ids in (("a token beyond the vocabulary", beyond), ("a text longer than the context", too_long)):
            yield Claim(name, "no", partial(refused, {"type": "embed", "token_ids": [ids]}, "token_ids"))
    else:
        long = {"type": "rerank", "query": "fox", "documents": ["fox " * info.limits.n_ctx]}
        yield Claim("a document longer than the context", "no", partial(refused, long, "documents"))


def _tokenizes() -> Proof:
    tokenized = answered((yield Question({"type": "tokenize", "prompt": PROMPT})))
    demand(bool(tokenized.last["token_ids"]), "no tokens")
    return f"{len(tokenized.last['token_ids'])} tokens"


def _health() -> Proof:
    reply = answered((yield Question({"type": "health"})))
    demand(reply.last.get("status") == "ok", f"status {reply.last.get('status')}")
    demand(reply.last.get("tokens_generated", 0) >= 1, "a probe without a token")
    return f"a token in {reply.last['latency_ms']:.0f} ms"


def _metrics() -> Proof:
    before = answered((yield Question({"type": "metrics"}))).last
    answered((yield ask(max_tokens=5)))
    after = answered((yield Question({"type": "metrics"}))).last
    counted = after["tokens_generated_total"] - before["tokens_generated_total"]
    demand(counted >= 5, f"{counted} tokens counted for an answer of 5")
    return "counts what was generated"


def _yes(is_so: bool) -> str:
    return "yes" if is_so else "no"
