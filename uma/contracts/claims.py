"""What a server claims, and how each claim is put to the test by asking for the thing itself.

A claim is a generator: it yields questions as the wire has them, is sent each answer, and returns what it found. So the
same claims are proven over a socket, over HTTP and in tests; nothing here does I/O.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Generator, Iterator
from functools import partial
from typing import Annotated, Any, get_args, get_origin

import attrs

from uma.constraints import Range, hints_of
from uma.contracts.capabilities import declared
from uma.types import SamplingParams, ServerInfo

PROMPT = "Once upon a time, there was a little fox who lived in the forest. One day the fox said:"
TOKENS = 24
"""Tokens of an answer: enough for a parameter to show, few enough for a slow model."""
REFUSALS = ("E_PROTO_BAD_REQUEST", "E_LIMIT_PROMPT_TOO_LARGE")


@attrs.frozen
class Question:
    """A message to the server, as the wire has it."""

    fields: dict[str, Any]
    cancel_after: int | None = None
    """Cancel the request once so many token events have come."""


@attrs.frozen
class Reply:
    """All events that a question was answered with."""

    events: tuple[dict[str, Any], ...]

    @property
    def tokens(self) -> list[dict[str, Any]]:
        """The token events."""
        return [each for each in self.events if each["event"] == "token"]

    @property
    def last(self) -> dict[str, Any]:
        """The event that ended it."""
        return self.events[-1] if self.events else {"event": "nothing"}

    @property
    def text(self) -> str:
        """The output."""
        whole = self.last.get("text")
        return whole if isinstance(whole, str) else "".join(each["text"] for each in self.tokens)

    @property
    def token_ids(self) -> list[int]:
        """The ids of the output, without events that only carry held text."""
        count = self.last.get("usage", {}).get("completion_tokens", 0)
        return [each["token_id"] for each in self.tokens][:count]

    @property
    def error(self) -> str | None:
        """`CODE: message` where it was refused or failed."""
        return f"{self.last['code']}: {self.last['message']}" if self.last["event"] == "error" else None

    def warns_of(self, field: str) -> bool:
        """Whether the end names `field` as ignored or changed."""
        return any(re.search(rf"\b{re.escape(field)}\b", warning) for warning in self.last.get("warnings", ()))


Proof = Generator[Question, Reply, str]
"""Asks, and returns a word on how it went; raises `DisprovenError` where the claim is false."""


class DisprovenError(Exception):
    """A claim is false; the message says what was seen instead."""


@attrs.frozen
class Claim:
    """Something a server says of itself, or of what it cannot do, and the proof of it."""

    name: str
    declared: str
    prove: Callable[[], Proof]


def claims_of(info: ServerInfo) -> Iterator[Claim]:
    """Everything that can be asked of a server that introduces itself as `info`."""
    if declared(info.capabilities, "generate", True):
        yield from _about_output(info)
        yield from _about_input(info)
        yield from _about_sampling(info)
        yield from _about_extras(info)
        yield from _about_bounds(info)
        yield Claim("metrics", "snapshot", _metrics)
    else:
        yield Claim("generation", "no", partial(_refused, ask().fields, "generate"))
        yield Claim("tokenize", _yes(info.capabilities.tokenize), _tokenizes)
        yield from _about_bounds_of_texts(info)
    yield from _about_embeddings(info)
    yield Claim("health", "probe", _health)
    yield Claim("unknown kind of request", "no", partial(_refused, {"type": "telepathy"}, "telepathy"))


def ask(**fields: Any) -> Question:
    """A greedy generation of `TOKENS` tokens, with `fields` in place of its own."""
    plain = {"prompt": PROMPT, "max_tokens": TOKENS, "temperature": 0.0, "ignore_eos": True}
    return Question(plain | fields)


def _answered(reply: Reply, *, ignoring: str | None = None) -> Reply:
    if reply.error is not None:
        raise DisprovenError(f"refused with {reply.error}")
    if reply.last["event"] == "nothing":
        raise DisprovenError("the server closed without an answer")
    if ignoring is not None and reply.warns_of(ignoring):
        raise DisprovenError(f"ignored: {reply.last['warnings']}")
    return reply


def _demand(is_so: bool, otherwise: str) -> None:
    if not is_so:
        raise DisprovenError(otherwise)


def _refused(fields: dict[str, Any], naming: str) -> Proof:
    """A question that must be refused, with an error that names the field."""
    reply = yield Question(fields)
    if reply.error is None:
        _demand(reply.warns_of(naming), f"{naming} was neither refused nor named in warnings")
        return "ignored, and named in warnings"
    _demand(reply.last["code"] in REFUSALS, f"refused with {reply.error}, which is no refusal of the request")
    _demand(naming in reply.last["message"], f"refused with {reply.error}, which does not name {naming}")
    return f"refused: {reply.last['message'].splitlines()[0]}"


# Output


def _about_output(info: ServerInfo) -> Iterator[Claim]:
    yield Claim("streaming", _yes(info.capabilities.streaming), partial(_streaming, info.capabilities.streaming))
    if info.capabilities.cancel:
        yield Claim("cancel", "yes", partial(_cancel, info.limits.max_tokens))


TRIES = 8
"""Times that two answers may differ which should be the same. With flash attention on a CPU logits differ in the third
digit with what else is in a batch, and with how much of a prompt was cached and where: near ties can turn a draw."""


def _streaming(is_declared: bool) -> Proof:
    if not is_declared:
        return (yield from _refused(ask(stream=True).fields, "stream"))
    for _ in range(TRIES):
        streamed = _answered((yield ask()))
        whole = _answered((yield ask(stream=False)))
        if streamed.text == whole.text:
            break
    _demand(len(streamed.tokens) > 1, f"{len(streamed.tokens)} token events for {TOKENS} tokens")
    _demand(not whole.tokens, "token events although stream was false")
    _demand(streamed.text == whole.text, "the streamed text differs from the whole one")
    completion = streamed.last["usage"]["completion_tokens"]
    _demand(completion == TOKENS, f"usage counts {completion} of {TOKENS} tokens")
    return f"{len(streamed.tokens)} events; the same text as in one piece"


def _cancel(max_tokens: int) -> Proof:
    reply = _answered((yield attrs.evolve(ask(max_tokens=max_tokens), cancel_after=1)))
    _demand(reply.last.get("reason") == "cancelled", f"ended by {reply.last.get('reason')}")
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
    reply = _answered((yield Question({"messages": [{"role": "user", "content": "Hello!"}], "max_tokens": 4})))
    return f"{reply.last['usage']['prompt_tokens']} prompt tokens"


def _token_ids() -> Proof:
    tokenized = _answered((yield Question({"type": "tokenize", "prompt": PROMPT})))
    ids = tokenized.last["token_ids"]
    by_text, by_ids = _answered((yield ask())), _answered((yield Question(_with_ids(ids))))
    _demand(by_text.text == by_ids.text, "the answer to the tokens differs from that to the text")
    _demand(by_text.last["usage"]["prompt_tokens"] == len(ids), "usage counts other prompt tokens than tokenize gave")
    return f"{len(ids)} tokens"


def _with_ids(ids: list[int]) -> dict[str, Any]:
    return {name: value for name, value in ask(token_ids=ids).fields.items() if name != "prompt"}


def _prefix(sharing: str) -> Proof:
    prompt = f"{PROMPT} {PROMPT} {PROMPT}"
    _answered((yield ask(prompt=prompt, max_tokens=1)))
    usage = _answered((yield ask(prompt=prompt, max_tokens=1))).last["usage"]
    is_claimed = not sharing.startswith("none")
    _demand(is_claimed == (usage["cached_tokens"] > 0), f"{usage['cached_tokens']} cached tokens of a repeated prompt")
    return f"{usage['cached_tokens']} of {usage['prompt_tokens']} tokens cached the second time"


# Sampling


def _about_sampling(info: ServerInfo) -> Iterator[Claim]:
    params = info.capabilities.sampling_params
    hints = hints_of(SamplingParams)
    for name in params:
        yield Claim(f"sampling: {name}", "yes", partial(_EFFECTS.get(name) or partial(_taken, name)))
        if name in hints and (bad := _out_of_range(hints[name])) is not None:
            yield Claim(f"sampling: {name} = {bad}", "no", partial(_refused, ask(**{name: bad}).fields, name))
    yield Claim("sampling: entropy_dial", "no", partial(_refused, ask(entropy_dial=11).fields, "entropy_dial"))


def _out_of_range(hint: Any) -> float | None:
    """A number just beyond what a field takes; None where it is no number or has no bound."""
    parts = get_args(hint) if get_origin(hint) is not Annotated else (hint,)
    for part in parts:
        for bound in get_args(part)[1:] if get_origin(part) is Annotated else ():
            if isinstance(bound, Range) and get_args(part)[0] in (int, float):
                low = bound.ge if bound.ge is not None else bound.gt
                return bound.le + 1 if bound.le is not None else low - 1 if low is not None else None
    return None


def _taken(name: str) -> Proof:
    """For parameters whose effect no short answer shows: its default is taken, and not named as ignored."""
    # A name that only a newer server knows has no default here; whatever it is, it must not be ignored.
    default = next((field.default for field in attrs.fields(SamplingParams) if field.name == name), 1)
    value = list(default) if isinstance(default, tuple) else default
    if value is None:
        return "its default is to leave it out"
    _answered((yield ask(**{name: value})), ignoring=name)
    return "taken"


def _limits_tokens() -> Proof:
    reply = _answered((yield ask(max_tokens=3)), ignoring="max_tokens")
    _demand(reply.last["reason"] == "length", f"ended by {reply.last['reason']}")
    _demand(reply.last["usage"]["completion_tokens"] == 3, "another number of tokens than max_tokens")
    return "3 tokens, reason length"


def _same_as_greedy(name: str, value: Any) -> Proof:
    """A setting that leaves only the likeliest token must make a hot draw greedy."""
    greedy = _answered((yield ask()))
    drawn = _answered((yield ask(temperature=1.5, seed=11, **{name: value})), ignoring=name)
    _demand(drawn.text == greedy.text, f"{name} = {value} at temperature 1.5 is not greedy")
    return f"{name} = {value} leaves only the likeliest token"


def _hot() -> Proof:
    greedy = _answered((yield ask()))
    for seed in range(4):
        if _answered((yield ask(temperature=2.0, seed=seed)), ignoring="temperature").text != greedy.text:
            return "0 and 2 give different answers"
    raise DisprovenError("four draws at temperature 2 are all greedy")


def _seeded() -> Proof:
    for seed in range(5, 5 + TRIES):
        first = _answered((yield ask(temperature=1.0, seed=seed)), ignoring="seed")
        if first.text == _answered((yield ask(temperature=1.0, seed=seed))).text:
            break
    else:
        raise DisprovenError("the same seed gave two answers")
    for _ in range(TRIES):
        drawn = _answered((yield ask(temperature=1.0)))
        if drawn.text == _answered((yield ask(temperature=1.0, seed=drawn.last["seed"]))).text:
            return "repeatable, also by the seed that was told"
    raise DisprovenError("the seed that was drawn and told gives another answer")


def _penalises(name: str) -> Proof:
    prompt = "a b c a b c a b c a b c a b c a b c"
    plain = _answered((yield ask(prompt=prompt)))
    penalised = _answered((yield ask(prompt=prompt, **{name: 2.0})), ignoring=name)
    _demand(plain.text != penalised.text, f"{name} = 2 changes nothing after a repetitive prompt")
    return "2 changes the answer to a repetitive prompt"


def _stops() -> Proof:
    text = _answered((yield ask())).text
    stop = text[len(text) // 2 :][:4]
    _demand(bool(stop), "no text to stop at")
    reply = _answered((yield ask(stop=[stop])), ignoring="stop")
    _demand(reply.last["reason"] == "stop", f"ended by {reply.last['reason']}")
    _demand(reply.text == text.partition(stop)[0], f"the text does not end where {stop!r} begins")
    return f"ended before {stop!r}"


def _waits_for_min_tokens() -> Proof:
    reply = _answered((yield ask(ignore_eos=False, min_tokens=TOKENS)), ignoring="min_tokens")
    completion = reply.last["usage"]["completion_tokens"]
    _demand(completion == TOKENS, f"ended after {completion} of {TOKENS} tokens")
    return f"{TOKENS} tokens at least"


_EFFECTS: dict[str, Callable[[], Proof]] = {
    "max_tokens": _limits_tokens,
    "min_tokens": _waits_for_min_tokens,
    "temperature": _hot,
    "top_p": partial(_same_as_greedy, "top_p", 0.0),
    "top_k": partial(_same_as_greedy, "top_k", 1),
    "min_p": partial(_same_as_greedy, "min_p", 1.0),
    "seed": _seeded,
    "stop": _stops,
    "repetition_penalty": partial(_penalises, "repetition_penalty"),
    "frequency_penalty": partial(_penalises, "frequency_penalty"),
    "presence_penalty": partial(_penalises, "presence_penalty"),
}


# Extras


def _about_extras(info: ServerInfo) -> Iterator[Claim]:
    capabilities = info.capabilities
    most = declared(capabilities, "max_logprobs", -1)
    if most >= 0:
        yield Claim("logprobs", f"up to {most}", partial(_logprobs, min(most, 3)))
        yield Claim(f"logprobs = {most + 1}", "no", partial(_refused, ask(logprobs=most + 1).fields, "logprobs"))
    else:
        yield Claim("logprobs", "no", partial(_refused, ask(logprobs=1).fields, "logprobs"))
    grammars = declared(capabilities, "grammars", ())
    for kind, (value, fits) in _GRAMMARS.items():
        if kind in grammars:
            yield Claim(f"grammar: {kind}", "yes", partial(_guided, kind, value, fits))
        else:
            yield Claim(f"grammar: {kind}", "no", partial(_refused, ask(grammar={kind: value}).fields, "grammar"))
    most = declared(capabilities, "max_answers", 1)
    if most > 1:
        yield Claim("answers", f"up to {most}", _two_answers)
    yield Claim(f"answers: n = {most + 1}", "no", partial(_refused, ask(n=most + 1).fields, "n"))
    yield from _about_tools(declared(capabilities, "tools", ()))
    if not declared(capabilities, "vision", False):
        yield Claim("vision", "no", partial(_refused, ask(images=["data:,"]).fields, "images"))


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
        yield Claim("tools", "no", partial(_refused, _with_tools("auto"), "tools"))
    for choice, name in (("auto", "auto"), ("none", "none"), ("required", "required"), ("weather", "named")):
        if name in choices:
            yield Claim(f"tools: {name}", "yes", partial(_tools, choice))
        elif choices:
            yield Claim(f"tools: {name}", "no", partial(_refused, _with_tools(choice), "tool_choice"))


def _with_tools(choice: str) -> dict[str, Any]:
    messages = [{"role": "user", "content": "What is the weather in Oslo?"}]
    return {"messages": messages, "tools": [_WEATHER], "tool_choice": choice, "temperature": 0.0, "max_tokens": 80}


def _tools(choice: str) -> Proof:
    reply = _answered((yield Question(_with_tools(choice))), ignoring="tools")
    calls = reply.last.get("tool_calls", ())
    deltas = [each for each in reply.events if each["event"] == "tool_call"]
    if choice == "none":
        _demand(not calls and not deltas, "a call although none was wanted")
        return "no call"
    for number, call in enumerate(calls):
        streamed = "".join(each["arguments"] for each in deltas if each["call"] == number)
        _demand(streamed == call["arguments"], "the streamed arguments differ from the call's")
        _demand(call["name"] == "weather", f"a call of {call['name']!r}, which is no tool of the request")
        arguments = json.loads(call["arguments"])
        is_valid = list(arguments) == ["city"] and arguments["city"] in ("Bern", "Oslo")
        _demand(is_valid, f"arguments that do not validate: {call['arguments']}")
    _demand(bool(calls) or choice == "auto", "no call although one was demanded")
    return f"{len(calls)} calls, told apart from the text"


def _about_embeddings(info: ServerInfo) -> Iterator[Claim]:
    capabilities = info.capabilities
    asked = {"type": "embed", "texts": [PROMPT, "Hello"]}
    if declared(capabilities, "embeddings", False):
        width = capabilities.embedding_dimensions
        yield Claim("embeddings", f"{width} dimensions", partial(_embeds, width))
        too_many = partial(_refused, asked | {"dimensions": width + 1}, "dimensions")
        yield Claim(f"embeddings: dimensions = {width + 1}", "no", too_many)
    else:
        yield Claim("embeddings", "no", partial(_refused, asked, "t"))
    ranking = {"type": "rerank", "query": "fox", "documents": [PROMPT, "Hello"]}
    if declared(capabilities, "rerank", False):
        yield Claim("rerank", "yes", partial(_reranks, ranking))
    else:
        yield Claim("rerank", "no", partial(_refused, ranking, "rank"))


def _embeds(width: int) -> Proof:
    both = _answered((yield Question({"type": "embed", "texts": [PROMPT, "Hello"]}))).last["embeddings"]
    cut = _answered((yield Question({"type": "embed", "texts": ["Hello"], "dimensions": 1}))).last["embeddings"]
    _demand([len(each) for each in both] == [width] * 2, f"{[len(each) for each in both]} figures, not {width} each")
    lengths = [sum(figure * figure for figure in each) for each in (*both, *cut)]
    _demand(all(abs(length - 1) < 1e-3 for length in lengths), f"squares of lengths {lengths}: not normalised")
    _demand(both[0] != both[1], "two texts have one embedding")
    return f"2 texts, {width} figures each, of length 1; also cut to 1"


def _reranks(ranking: dict[str, Any]) -> Proof:
    results = _answered((yield Question(ranking))).last["results"]
    _demand(sorted(each["index"] for each in results) == [0, 1], "not each document is ranked once")
    _demand(results[0]["score"] >= results[1]["score"], "not the best first")
    return "2 documents, the best first"


def _logprobs(top: int) -> Proof:
    reply = _answered((yield ask(logprobs=top)), ignoring="logprobs")
    for each in reply.tokens[: reply.last["usage"]["completion_tokens"]]:
        found = each.get("logprobs")
        if not isinstance(found, dict):
            raise DisprovenError("a token without logprobs")
        _demand(len(found["top"]) == top, f"{len(found['top'])} likeliest tokens, not {top}")
        _demand(found["chosen"]["token_id"] == each["token_id"], "logprobs of another token than came")
        _demand(found["chosen"]["logprob"] <= 0, "a log probability over 0")
        if top:
            _demand(found["top"][0]["token_id"] == each["token_id"], "a greedy token that is not the likeliest")
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
    reply = _answered((yield ask(grammar={kind: value}, max_tokens=4 * TOKENS, ignore_eos=False)), ignoring="grammar")
    if reply.last["reason"] != "stop":
        # An object of any shape can be longer than the answer; its beginning says enough.
        _demand(kind == "json_object" and reply.text.startswith("{"), f"not complete: {reply.text!r}")
        return "cut by max_tokens"
    try:
        is_fit = fits(reply.text)
    except ValueError:
        is_fit = False
    _demand(is_fit, f"does not match: {reply.text!r}")
    return repr(reply.text)


def _two_answers() -> Proof:
    reply = _answered((yield ask(n=2, stream=False, temperature=1.0)), ignoring="n")
    _demand(len(reply.last.get("answers", ())) == 2, f"{len(reply.last.get('answers', ()))} answers")
    return "2 answers"


# Bounds


def _about_bounds(info: ServerInfo) -> Iterator[Claim]:
    most = info.capabilities.max_stop_sequences
    yield Claim("max_stop_sequences", str(most), partial(_many_stops, most))
    yield Claim(f"{most + 1} stop sequences", "no", partial(_refused, ask(stop=_strings(most + 1)).fields, "stop"))
    yield Claim("limits.max_tokens", f"{info.limits.max_tokens:,}", partial(_cut, info.limits.max_tokens))
    too_long = _with_ids([0] * info.limits.n_ctx)
    yield Claim("a prompt as long as the context", "no", partial(_refused, too_long, "prompt"))
    beyond = _with_ids([0, info.model.vocab_size])
    yield Claim("a token beyond the vocabulary", "no", partial(_refused, beyond, "token_ids"))


def _strings(count: int) -> list[str]:
    return [f"\x01{index}" for index in range(count)]


def _many_stops(most: int) -> Proof:
    if most:
        _answered((yield ask(stop=_strings(most), max_tokens=2)), ignoring="stop")
    return f"{most} strings are taken"


def _cut(most: int) -> Proof:
    # Ended by a stop string, so that the end comes soon and tells its warnings.
    text = _answered((yield ask(max_tokens=8))).text
    _demand(bool(text), "no text to stop at")
    reply = _answered((yield ask(max_tokens=most + 1, stop=[text])))
    _demand(reply.warns_of("max_tokens"), "more than the limit was neither refused nor cut with a warning")
    return "cut, with a warning"


def _about_bounds_of_texts(info: ServerInfo) -> Iterator[Claim]:
    if declared(info.capabilities, "embeddings", False):
        beyond, too_long = [0, info.model.vocab_size], [0] * (info.limits.n_ctx + 1)
        for name, ids in (("a token beyond the vocabulary", beyond), ("a text longer than the context", too_long)):
            yield Claim(name, "no", partial(_refused, {"type": "embed", "token_ids": [ids]}, "token_ids"))
    else:
        long = {"type": "rerank", "query": "fox", "documents": ["fox " * info.limits.n_ctx]}
        yield Claim("a document longer than the context", "no", partial(_refused, long, "documents"))


def _tokenizes() -> Proof:
    tokenized = _answered((yield Question({"type": "tokenize", "prompt": PROMPT})))
    _demand(bool(tokenized.last["token_ids"]), "no tokens")
    return f"{len(tokenized.last['token_ids'])} tokens"


def _health() -> Proof:
    reply = _answered((yield Question({"type": "health"})))
    _demand(reply.last.get("status") == "ok", f"status {reply.last.get('status')}")
    _demand(reply.last.get("tokens_generated", 0) >= 1, "a probe without a token")
    return f"a token in {reply.last['latency_ms']:.0f} ms"


def _metrics() -> Proof:
    before = _answered((yield Question({"type": "metrics"}))).last
    _answered((yield ask(max_tokens=5)))
    after = _answered((yield Question({"type": "metrics"}))).last
    counted = after["tokens_generated_total"] - before["tokens_generated_total"]
    _demand(counted >= 5, f"{counted} tokens counted for an answer of 5")
    return "counts what was generated"


def _yes(is_so: bool) -> str:
    return "yes" if is_so else "no"
