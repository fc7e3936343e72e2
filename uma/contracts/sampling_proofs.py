"""A proof for each sampling parameter: an answer that only a server which honours the parameter gives.

Most proofs work in one of two ways. Some values leave one token to choose from, so that sampling at a high temperature
becomes greedy. Others decide whether an answer that is forced to repeat one token can leave it. Both work with any
model.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import Annotated, Any, get_args, get_origin

import attrs

from uma.constraints import Range, hints_of
from uma.contracts.proofs import (
    NOT_SHOWN,
    PROMPT,
    TOKENS,
    TRIES,
    Claim,
    DisprovenError,
    Proof,
    Question,
    ServerReply,
    answered,
    ask,
    demand,
    refused,
    with_ids,
)
from uma.types import SamplingParams, ServerInfo

SHORT = 8
"""Length of an answer that is compared with others: eight tokens at a high temperature are never all greedy by
chance."""
LONG = 64
"""Maximum tokens within which a chat's answer ends by itself."""
MAX_BIAS = 40
"""Maximum difference of logits between the likeliest token and all others that a proof overcomes by bias."""
WORD = object()
"""Placeholder for the text of the token that a proof forces."""


def about_sampling(info: ServerInfo, beside: Mapping[str, Callable[[], Proof]]) -> Iterator[Claim]:
    """A claim for each declared parameter, and one for a value out of its range. `beside` has further proofs."""
    effects, hints = {**beside, **_EFFECTS}, hints_of(SamplingParams)
    if not info.capabilities.chat:
        effects |= dict.fromkeys(("min_tokens", "ignore_eos"), _without_ends)
    for name in info.capabilities.sampling_params:
        yield Claim(f"sampling: {name}", "yes", effects.get(name) or partial(_taken, name))
        if name in hints and (bad := _out_of_range(hints[name])) is not None:
            yield Claim(f"sampling: {name} = {bad}", "no", partial(refused, ask(**{name: bad}).fields, name))
    yield Claim("sampling: entropy_dial", "no", partial(refused, ask(entropy_dial=11).fields, "entropy_dial"))


def _out_of_range(hint: Any) -> float | None:
    """A number that a field does not accept; None where it is not a number or has no bound.

    Two below the lower bound, not one: for many fields that would be -1, which some HTTP dialects use for "no bound".
    """
    parts = get_args(hint) if get_origin(hint) is not Annotated else (hint,)
    for part in parts:
        for bound in get_args(part)[1:] if get_origin(part) is Annotated else ():
            if isinstance(bound, Range) and get_args(part)[0] in (int, float):
                low = bound.ge if bound.ge is not None else bound.gt
                return bound.le + 1 if bound.le is not None else low - 2 if low is not None else None
    return None


def _taken(name: str) -> Proof:
    """Prove that a parameter without a proof of its own is accepted."""
    # A parameter of a newer server has no default here. It must not be ignored, whatever its value.
    default = next((field.default for field in attrs.fields(SamplingParams) if field.name == name), 1)
    if default is not None:
        answered((yield ask(**{name: list(default) if isinstance(default, tuple) else default})), ignoring=name)
    return NOT_SHOWN


# Length and end


def _limits_tokens() -> Proof:
    reply = answered((yield ask(max_tokens=3)), ignoring="max_tokens")
    demand(reply.last["reason"] == "length", f"ended by {reply.last['reason']}")
    demand(reply.last["usage"]["completion_tokens"] == 3, "another number of tokens than max_tokens")
    return "3 tokens, reason length"


def _bounds_thinking() -> Proof:
    """Prove that thinking is closed at its bound, and that usage counts fewer tokens of it."""
    chat = {"messages": [{"role": "user", "content": "Hello!"}], "reasoning": "auto", "temperature": 0.0}
    free = answered((yield Question({**chat, "max_tokens": LONG})))
    bounded = answered((yield Question({**chat, "max_tokens": LONG, "max_reasoning_tokens": 1})))
    if free.warns_of("reasoning"):
        demand(bounded.warns_of("max_reasoning_tokens"), "it is not told that this model does not think")
        return f"{NOT_SHOWN}: this model does not think, and the limit is named in warnings"
    thought, less = (answer.last["usage"].get("reasoning_tokens", 0) for answer in (free, bounded))
    if thought < LONG:
        return f"{NOT_SHOWN}: no thinking went on for {LONG} tokens"
    demand(less < thought, f"{less} tokens of thinking, with a limit of 1")
    return f"1 limits thinking to {less} tokens with its marks, which went on over {LONG}"


def _without_ends() -> Proof:
    """No proof: a model without a chat template has no known end of an answer."""
    yield from ()
    return f"{NOT_SHOWN}: this model has no chat template, and its answers end where a turn of the user's begins"


def _outlasts(name: str) -> Proof:
    """Prove that an answer that would end by itself goes on."""
    chat = {"messages": [{"role": "user", "content": "Hello!"}], "temperature": 0.0}
    ended = answered((yield Question({**chat, "max_tokens": LONG})))
    count = ended.last["usage"]["completion_tokens"]
    more = count + SHORT
    value = more if name == "min_tokens" else True
    reply = answered((yield Question({**chat, "max_tokens": more, name: value})), ignoring=name)
    if ended.last["reason"] != "stop":
        return f"{NOT_SHOWN}: no answer ended before {LONG} tokens"
    completion = reply.last["usage"]["completion_tokens"]
    demand(completion == more, f"ended after {completion} of {more} tokens")
    return f"{completion} tokens where {count} were the whole answer"


def stops_at_last_of(others: Sequence[str]) -> Proof:
    """Prove that a part of the greedy answer ends the answer when given as a stop string. `others` are stop strings
    before it that never occur.
    """
    for _ in range(TRIES):
        text = answered((yield ask())).text
        stop = text[len(text) // 2 :][:4]
        demand(bool(stop), "no text to stop at")
        reply = answered((yield ask(stop=[*others, stop])), ignoring="stop")
        if reply.last["reason"] == "stop" and reply.text == text.partition(stop)[0]:
            return f"ended before {stop!r}"
    raise DisprovenError(f"ended by {reply.last['reason']}, and not where {stop!r} begins")


# The draw


def _hot(seed: int, **fields: Any) -> Question:
    """A draw at a high temperature from all tokens. Every cut is set, because HTTP has llama-server's defaults for
    absent ones.
    """
    everything = {"temperature": 2.0, "top_p": 1.0, "top_k": 0, "min_p": 0.0, "max_tokens": SHORT, "seed": seed}
    return ask(**everything | fields)


def _heats() -> Proof:
    greedy = answered((yield ask(max_tokens=SHORT)))
    for seed in range(TRIES):
        if answered((yield _hot(seed)), ignoring="temperature").text != greedy.text:
            return "0 and 2 give different answers"
    raise DisprovenError(f"{TRIES} draws at temperature 2 are all greedy")


def _tames(name: str, tame: Any, wild: Any = None, *, max_tokens: int = SHORT, **beside: Any) -> Proof:
    """Prove that the value `tame` leaves only the likeliest token, so that a hot draw is greedy, and that `wild` (None:
    the default) does not.
    """
    beside["max_tokens"] = max_tokens
    for _ in range(TRIES):
        greedy = answered((yield ask(max_tokens=max_tokens)))
        drawn = answered((yield _hot(11, **beside, **{name: tame})), ignoring=name)
        if drawn.text == greedy.text:
            break
    else:
        raise DisprovenError(f"a draw at temperature 2 with {name} = {tame} is not greedy")
    otherwise = {} if wild is None else {name: wild}
    for seed in range(TRIES):
        if answered((yield _hot(seed, **beside, **otherwise))).text != greedy.text:
            return f"{name} = {tame} leaves only the likeliest token"
    raise DisprovenError(f"{TRIES} draws without {name} = {tame} are greedy too")


def _leaves_one() -> Proof:
    """Prove that locally typical sampling with a tiny mass leaves one token (not always the likeliest): two seeds
    agree.
    """
    for seed in range(TRIES):
        one = answered((yield _hot(2 * seed, typical_p=1e-6)), ignoring="typical_p")
        if one.text == answered((yield _hot(2 * seed + 1, typical_p=1e-6))).text:
            return "1e-06 leaves one token to choose from"
    raise DisprovenError("draws with typical_p = 1e-06 differ by their seed")


def _excludes_top_choice(name: str, excluding: float, keeping: float, **beside: Any) -> Proof:
    """Prove XTC: of the two likeliest tokens it drops the first, as both are over the threshold."""
    chosen = partial(_hot, 11, temperature=0.01, max_tokens=1, top_k=2, **beside)
    for _ in range(TRIES):
        kept = answered((yield chosen(**{name: keeping})), ignoring=name)
        if kept.token_ids != answered((yield chosen(**{name: excluding}))).token_ids:
            return f"{excluding} drops the likeliest token, {keeping} keeps it"
    raise DisprovenError(f"the same token with {name} = {excluding} and {keeping}")


def _seeded() -> Proof:
    for seed in range(5, 5 + TRIES):
        first = answered((yield ask(temperature=1.0, seed=seed)), ignoring="seed")
        if first.text == answered((yield ask(temperature=1.0, seed=seed))).text:
            break
    else:
        raise DisprovenError("the same seed gave two answers")
    for _ in range(TRIES):
        drawn = answered((yield ask(temperature=1.0)))
        if drawn.text == answered((yield ask(temperature=1.0, seed=drawn.last["seed"]))).text:
            return "repeatable, also by the seed that was told"
    raise DisprovenError("the seed that was drawn and told gives another answer")


def _reproduces() -> Proof:
    """Prove that an answer is the same before and after a request that leaves its prompt in the cache."""
    asked = partial(ask, temperature=1.0, seed=5, reproducible=True)
    first = answered((yield asked()), ignoring="reproducible")
    answered((yield ask(max_tokens=1)))
    again = answered((yield asked()))
    demand(first.text == again.text, "the same seed gave two answers with reproducible")
    cached = again.last["usage"]["cached_tokens"]
    demand(not cached, f"{cached} tokens of a reproducible request came from the cache")
    return "the same answer before and after another request with its prompt"


# Penalties and biases


def _penalises(name: str) -> Proof:
    """Prove that a penalty of 2 changes the answer to a repetitive prompt. Where the model is too sure of its tokens
    for that, a growing bias against them makes other tokens nearly as likely.
    """
    repetitive = partial(ask, prompt="a b c a b c a b c a b c a b c a b c", max_tokens=SHORT)
    sure = answered((yield repetitive()))
    for bias in range(MAX_BIAS + 1):
        asked = partial(repetitive, logit_bias=dict.fromkeys(map(str, sure.token_ids), -bias))
        plain = answered((yield asked()))
        penalised = answered((yield asked(**{name: 2.0})), ignoring=name)
        if plain.token_ids != penalised.token_ids:
            return "2 changes the answer to a repetitive prompt" + (f", {bias} less likely" if bias else "")
    raise DisprovenError(f"{name} = 2 changes nothing after a repetitive prompt, whatever its tokens' bias")


def _counts_prompt() -> Proof:
    """Prove that a word that fills the prompt is penalised more than a bias can force, unless the prompt does not
    count.
    """
    word = _a_word(answered((yield ask(max_tokens=TOKENS))))["token_id"]
    asked = with_ids([word] * 60) | {"max_tokens": 1, "frequency_penalty": 2.0, "logit_bias": {str(word): 50}}
    without = answered((yield Question(asked | {"penalize_prompt": False})), ignoring="penalize_prompt")
    counted = answered((yield Question(asked | {"penalize_prompt": True})))
    demand(without.token_ids != counted.token_ids, "penalties are the same with and without the prompt's tokens")
    return "decides whether a word that fills the prompt is penalised"


def _bans() -> Proof:
    banned = answered((yield ask(max_tokens=1))).token_ids[0]
    reply = answered((yield ask(max_tokens=SHORT, logit_bias={str(banned): -100})), ignoring="logit_bias")
    demand(banned not in reply.token_ids, f"token {banned} came although its bias was -100")
    return "-100 bans the token that began the answer"


def _releases(name: str, holding: Any, releasing: Any, bias: float = 100, **beside: Any) -> Proof:
    """Prove that of a token that a bias forces again and again, the value `releasing` lets another token follow, and
    `holding` does not.
    """
    word = _a_word(answered((yield ask(max_tokens=TOKENS))))
    text = word["text"].strip()
    if holding is WORD:
        if not _is_word(text):
            return f"{NOT_SHOWN}: no word came that could be given as a string"
        holding = [text]
    forced = {"max_tokens": SHORT, "logit_bias": {str(word["token_id"]): bias}, **beside}
    held = answered((yield ask(**forced, **{name: holding})), ignoring=name)
    demand(set(held.token_ids) == {word["token_id"]}, f"{name} = {holding} lets another token come")
    released = answered((yield ask(**forced, **{name: releasing})), ignoring=name)
    demand(released.token_ids != held.token_ids, f"{name} = {releasing} does not keep a token from repeating")
    return "decides whether a forced token goes on repeating"


def _a_word(reply: ServerReply) -> dict[str, Any]:
    """The first token that is a word, and therefore not a sequence breaker; without one the first of all."""
    return next((token for token in reply.tokens if _is_word(token["text"].strip())), reply.tokens[0])


def _is_word(text: str) -> bool:
    """Whether a token's text is certainly a word, and not a part of a character of several tokens."""
    return text.isascii() and text.isalpha()


# What comes beside the answer


def echoes() -> Proof:
    """Prove that the prompt is returned beside the answer."""
    reply = answered((yield ask(echo=True, stream=False, max_tokens=1)), ignoring="echo")
    demand(PROMPT in _prompt_of(reply).get("text", ""), "the prompt's text did not come")
    return "the prompt's text comes before the answer"


def _tells_of_prompt() -> Proof:
    question = ask(echo=True, prompt_logprobs=1, stream=False, max_tokens=1)
    found = _prompt_of(answered((yield question), ignoring="prompt_logprobs")).get("logprobs") or ()
    demand(len(found) > 1, "no log probabilities of the prompt came")
    demand(all(reply is not None for reply in found[1:]), "a prompt token but the first without a log probability")
    return f"of {len(found)} prompt tokens, all but the first"


def _prompt_of(reply: ServerReply) -> dict[str, Any]:
    found: dict[str, Any] = reply.last.get("prompt") or {}
    return found


def _draws_more() -> Proof:
    reply = answered((yield ask(best_of=2, stream=False, temperature=1.0)), ignoring="best_of")
    counted = reply.last["usage"]["completion_tokens"]
    demand(counted == 2 * TOKENS, f"usage counts {counted} tokens, not those of two answers")
    return "two answers drawn, the better one given"


_DRY: dict[str, Any] = {"dry_multiplier": 100.0, "dry_sequence_breakers": []}
_MIROSTAT: dict[str, Any] = {"mirostat": 2}
_EFFECTS: dict[str, Callable[[], Proof]] = {
    "max_tokens": _limits_tokens,
    "min_tokens": partial(_outlasts, "min_tokens"),
    "ignore_eos": partial(_outlasts, "ignore_eos"),
    "max_reasoning_tokens": _bounds_thinking,
    "stop": partial(stops_at_last_of, ()),
    "temperature": _heats,
    "top_p": partial(_tames, "top_p", 0.0),
    "top_k": partial(_tames, "top_k", 1),
    "min_p": partial(_tames, "min_p", 1.0),
    "top_n_sigma": partial(_tames, "top_n_sigma", 1e-6),
    "typical_p": _leaves_one,
    "xtc_probability": partial(_excludes_top_choice, "xtc_probability", 1.0, 0.0, xtc_threshold=0.0),
    "xtc_threshold": partial(_excludes_top_choice, "xtc_threshold", 0.0, 0.5, xtc_probability=1.0),
    # The normalised entropy to the 10th power is nearly 0, so the temperature is the lower end of its range: 0.
    "dynatemp_range": partial(_tames, "dynatemp_range", 2.0, dynatemp_exponent=10.0),
    "dynatemp_exponent": partial(_tames, "dynatemp_exponent", 10.0, 0.1, dynatemp_range=2.0),
    # Tokens of more than twice tau bits are cut: under one bit, only one token can be left.
    "mirostat": partial(_tames, "mirostat", 2, mirostat_tau=1e-3),
    "mirostat_tau": partial(_tames, "mirostat_tau", 1e-3, 20.0, **_MIROSTAT),
    # The bound grows by tau * eta with each unsurprising token: from one bit to 11 within `TOKENS` tokens.
    "mirostat_eta": partial(_tames, "mirostat_eta", 1e-6, 1.0, max_tokens=TOKENS, mirostat_tau=0.45, **_MIROSTAT),
    "seed": _seeded,
    "reproducible": _reproduces,
    "repetition_penalty": partial(_penalises, "repetition_penalty"),
    "frequency_penalty": partial(_penalises, "frequency_penalty"),
    "presence_penalty": partial(_penalises, "presence_penalty"),
    "penalty_window": partial(_releases, "penalty_window", 0, 64, 25, frequency_penalty=2.0, max_tokens=TOKENS),
    "penalize_prompt": _counts_prompt,
    "logit_bias": _bans,
    "dry_multiplier": partial(_releases, "dry_multiplier", 0.0, 100.0, dry_sequence_breakers=[]),
    "dry_base": partial(_releases, "dry_base", 1.0, 10.0, **_DRY | {"dry_multiplier": 1.0}),
    "dry_allowed_length": partial(_releases, "dry_allowed_length", 4_096, 1, **_DRY),
    "dry_window": partial(_releases, "dry_window", 0, 4_096, **_DRY),
    "dry_sequence_breakers": partial(_releases, "dry_sequence_breakers", WORD, [], dry_multiplier=100.0),
    "echo": echoes,
    "prompt_logprobs": _tells_of_prompt,
    "best_of": _draws_more,
}
