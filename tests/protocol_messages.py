"""What the protocol's tests say to each other: strategies that make every kind of message, and a sample of some."""

from __future__ import annotations

from typing import Any, Literal

from hypothesis import strategies as st

from uma import types
from uma.constraints import hints_of
from uma.protocol import messages

N_VOCAB = 1000

characters = st.characters(exclude_categories=["Cs"])
text = st.text(characters, max_size=20)
prompt_text = st.text(st.characters(exclude_categories=["Cs"], exclude_characters="\0"), max_size=20)
ids = st.text(characters, min_size=1, max_size=128)
maybe_ids = st.none() | ids
maybe_models = st.none() | ids.filter(lambda name: "\0" not in name)
token_ids = st.lists(st.integers(0, N_VOCAB - 1), min_size=1, max_size=8).map(tuple)
finite = st.floats(allow_nan=False, allow_infinity=False)
json_values: st.SearchStrategy[Any] = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**63), 2**64 - 1) | finite | text,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(text, inner, max_size=3),
    max_leaves=8,
)
metadata = st.none() | st.dictionaries(text, json_values, max_size=3)

grammars = st.one_of(
    st.builds(types.Grammar, json_schema=st.dictionaries(text, json_values, max_size=3)),
    st.builds(types.Grammar, json_object=st.just(True)),
    st.builds(types.Grammar, choice=st.lists(prompt_text.filter(bool), min_size=1, max_size=3)),
    *(st.builds(types.Grammar, **{kind: prompt_text.filter(bool)}) for kind in ("regex", "lark", "gbnf")),
)
sampling = st.builds(
    types.SamplingParams,
    max_tokens=st.none() | st.integers(1, 2**63),
    min_tokens=st.integers(0, 100),
    temperature=st.floats(0, 2),
    top_p=st.floats(0, 1),
    top_k=st.integers(-1, 100),
    min_p=st.floats(0, 1),
    repetition_penalty=st.floats(0, 2, exclude_min=True),
    frequency_penalty=st.floats(-2, 2),
    presence_penalty=st.floats(-2, 2),
    seed=st.none() | st.integers(0, 2**32 - 1),
    stop=st.lists(st.text(characters, min_size=1, max_size=4), max_size=16),
    ignore_eos=st.booleans(),
    grammar=st.none() | grammars,
    logprobs=st.none() | st.integers(0, 20),
    prompt_logprobs=st.none() | st.integers(0, 20),
    logit_bias=st.none() | st.dictionaries(text, st.floats(-100, 100), max_size=3),
    n=st.integers(1, 128),
    best_of=st.none() | st.just(128),
    echo=st.booleans(),
    penalty_window=st.integers(0, 65_536),
    max_reasoning_tokens=st.none() | st.integers(0, 2**63),
    typical_p=st.floats(0, 1, exclude_min=True),
    top_n_sigma=st.none() | st.floats(0, 10, exclude_min=True),
    xtc_probability=st.floats(0, 1),
    xtc_threshold=st.floats(0, 0.5),
    dynatemp_range=st.floats(0, 2),
    dynatemp_exponent=st.floats(0, 10, exclude_min=True),
    mirostat=st.sampled_from((0, 1, 2)),
    mirostat_tau=st.floats(0, 10, exclude_min=True),
    mirostat_eta=st.floats(0, 1, exclude_min=True),
    dry_multiplier=st.floats(0, 100),
    dry_base=st.floats(1, 10),
    dry_allowed_length=st.integers(1, 65_536),
    dry_window=st.integers(0, 65_536),
    dry_sequence_breakers=st.lists(prompt_text.filter(bool), max_size=4),
    reproducible=st.booleans(),
)
turns = st.builds(types.Message, role=prompt_text.filter(bool), content=prompt_text)
prompts = st.one_of(
    st.fixed_dictionaries({"prompt": prompt_text}),
    st.fixed_dictionaries({"messages": st.lists(turns, min_size=1, max_size=3)}),
    st.fixed_dictionaries({"token_ids": token_ids}),
)
targets = st.none() | st.floats(0, 1e6, exclude_min=True)


@st.composite
def requests(draw: st.DrawFn) -> types.Request:
    """A request with any of its fields."""
    return types.Request(
        draw(ids),
        **draw(prompts),
        sampling=draw(sampling),
        stream=draw(st.booleans()),
        priority=draw(st.sampled_from((-1, 0, 1))),
        slo=types.Slo(draw(targets), draw(targets)),
        metadata=draw(metadata),
    )


client_messages: st.SearchStrategy[messages.ClientMessage] = st.one_of(
    st.builds(
        messages.Hello,
        versions=st.lists(st.text(characters, min_size=1, max_size=32), min_size=1, max_size=4).map(tuple),
        client=text,
        strict=st.booleans(),
    ),
    st.builds(messages.Generate, request=requests(), keep_alive=st.booleans()),
    st.builds(messages.Cancel, id=ids),
    st.builds(messages.EndThinking, id=ids),
    st.builds(messages.MetricsQuery, id=maybe_ids),
    st.builds(messages.ActivityQuery, id=maybe_ids, request=st.just("") | ids),
    st.builds(messages.ExplainQuery, id=maybe_ids, request=st.just("") | ids),
    st.builds(messages.TraceQuery, id=maybe_ids, seconds=st.floats(0.1, 60)),
    st.builds(messages.EndQuery, number=st.integers(1, 2**53), id=maybe_ids),
    st.builds(messages.PauseQuery, seconds=st.floats(0, 86_400), id=maybe_ids),
    st.builds(messages.ModelsQuery, id=maybe_ids),
    st.builds(messages.LoadQuery, model=maybe_models, keep_sec=st.none() | st.floats(0, 1e9), id=maybe_ids),
    st.builds(messages.UnloadQuery, model=maybe_models, id=maybe_ids),
    st.builds(messages.PinQuery, model=maybe_models, pinned=st.booleans(), id=maybe_ids),
    st.builds(messages.HealthQuery, id=maybe_ids, probe=st.booleans()),
    st.builds(
        messages.TokenizeQuery,
        request=st.builds(lambda id, prompt: types.Request(id, **prompt), ids, prompts),
        pieces=st.booleans(),
    ),
)

listed_models = st.builds(
    types.ListedModel,
    name=text,
    path=text,
    size_bytes=st.integers(0, 2**53),
    state=st.sampled_from(("unloaded", "loading", "loaded", "leaving")),
    running=st.integers(0, 2**53),
    is_pinned=st.booleans(),
    leaves_in_sec=st.none() | st.floats(0, 1e9),
    failure=text,
)
warnings = st.lists(text, max_size=2).map(tuple)
counts = st.integers(0, 2**53)
times = st.floats(0, 1e9)
request_metrics = st.builds(
    types.RequestMetrics, *[times] * 4, batch_size=counts, tokens_per_second=times, decode_iterations=counts
)
BY_TYPE: dict[Any, st.SearchStrategy[Any]] = {
    str: text,
    int: counts,
    bool: st.booleans(),
    str | None: st.none() | text,
    dict[str, float]: st.dictionaries(text, st.floats(-100, 100), max_size=2),
    tuple[str, ...]: st.lists(text, max_size=3).map(tuple),
    Literal[-1, 0, 1]: st.sampled_from([-1, 0, 1]),
}


def filled(cls: type[Any]) -> st.SearchStrategy[Any]:
    """A `cls` with something in every field."""
    return st.builds(cls, **{name: BY_TYPE[hint] for name, hint in hints_of(cls).items()})


BY_TYPE |= {int | None: st.none() | counts}
BY_TYPE |= {types.FillIn | None: st.none() | filled(types.FillIn)}
BY_TYPE |= {types.MemoryPlan | None: st.none() | filled(types.MemoryPlan)}
hellos = st.builds(
    messages.HelloEvent,
    version=text,
    server=text,
    model=filled(types.ModelInfo),
    capabilities=filled(types.Capabilities),
    limits=filled(types.Limits),
    warnings=warnings,
)
token_logprobs = st.builds(
    types.TokenLogprob,
    token_id=counts,
    text=text,
    bytes=st.binary(max_size=4).map(tuple),
    logprob=st.floats(-9999, 0),
    rank=st.integers(1, N_VOCAB),
)
logprobs = st.builds(types.Logprobs, chosen=token_logprobs, top=st.lists(token_logprobs, max_size=2).map(tuple))
answers = st.builds(
    types.Answer,
    index=st.integers(0, 127),
    reason=st.sampled_from(("stop", "length", "cancelled", "error")),
    seed=counts,
    completion_tokens=counts,
    text=st.none() | text,
    token_ids=st.none() | token_ids,
    logprobs=st.none() | st.lists(logprobs, max_size=2).map(tuple),
)
running_requests = st.builds(
    types.RunningRequest,
    id=ids,
    priority=st.sampled_from((-1, 0, 1)),
    prompt_tokens=counts,
    cached_tokens=counts,
    computed_tokens=counts,
    generated_tokens=counts,
    age_ms=times,
    is_preempted=st.booleans(),
    waits_for=st.sampled_from(("", "slot", "cells", "prefix", "prompt", "reader")),
    behind=ids,
    origin=text,
    number=counts,
    ttft_ms=st.none() | times,
    worst_gap_ms=times,
    model=text,
)
explained = st.builds(
    types.Explained,
    id=ids,
    priority=st.sampled_from((-1, 0, 1)),
    origin=text,
    came_at=times,
    age_ms=times,
    spent_ms=st.dictionaries(st.sampled_from(tuple(types.CAUSES)), times, max_size=3),
    prompt_tokens=counts,
    cached_tokens=counts,
    generated_tokens=counts,
    cache=st.builds(types.CacheUse, tier=text, known_tokens=counts, why=text, token_id=st.none() | counts),
    metrics=request_metrics,
    reason=text,
    now=st.none() | running_requests,
    started_before=counts,
    is_decision=st.booleans(),
    beside=st.lists(st.builds(types.Beside, ids, counts, times), max_size=2).map(tuple),
    text=st.none() | st.builds(types.RecordedText, text, text),
)
server_events: st.SearchStrategy[messages.ServerEvent] = st.one_of(
    hellos,
    st.builds(
        messages.PromptEvent,
        id=ids,
        text=text,
        token_ids=token_ids,
        logprobs=st.none() | st.lists(logprobs, max_size=2).map(lambda known: (None, *known)),
        metadata=metadata,
    ),
    st.builds(
        messages.TokenEvent,
        id=ids,
        text=text,
        token_id=counts,
        metadata=metadata,
        index=st.integers(0, 127),
        logprobs=st.none() | logprobs,
    ),
    st.builds(
        messages.EosEvent,
        id=ids,
        reason=st.sampled_from(("stop", "length", "cancelled", "error")),
        usage=st.builds(types.Usage, counts, counts, counts, counts),
        metrics=request_metrics,
        seed=counts,
        text=st.none() | text,
        token_ids=st.none() | token_ids,
        warnings=warnings,
        logprobs=st.none() | st.lists(logprobs, max_size=2).map(tuple),
        answers=st.lists(answers, max_size=2).map(tuple),
        prompt=st.none() | st.builds(types.Prompt, id=ids, text=text, token_ids=token_ids),
        metadata=metadata,
    ),
    st.builds(
        messages.ErrorEvent, code=text, message=text, id=maybe_ids, retry_after_ms=st.none() | counts, metadata=metadata
    ),
    st.builds(
        messages.MetricsEvent,
        snapshot=st.dictionaries(text.map("n_{}".format), json_values, max_size=3),
        id=maybe_ids,
        warnings=warnings,
    ),
    st.builds(
        messages.ActivityEvent,
        running=st.lists(running_requests, max_size=2).map(tuple),
        waiting_interactive=counts,
        waiting_normal=counts,
        waiting_background=counts,
        id=maybe_ids,
        warnings=warnings,
        waiting=st.lists(running_requests, max_size=2).map(tuple),
    ),
    st.builds(messages.TraceEvent, trace=text, id=maybe_ids, warnings=warnings),
    st.builds(messages.EndEvent, ended=st.booleans(), id=maybe_ids, warnings=warnings),
    st.builds(
        messages.ModelsEvent, models=st.lists(listed_models, max_size=2).map(tuple), id=maybe_ids, warnings=warnings
    ),
    st.builds(messages.ExplainEvent, request=explained, id=maybe_ids, warnings=warnings),
    st.builds(
        messages.HealthEvent,
        status=st.sampled_from(("ok", "loading", "draining", "stalled")),
        latency_ms=times,
        tokens_generated=counts,
        id=maybe_ids,
        warnings=warnings,
    ),
    st.builds(messages.LoadingEvent, percent=counts),
    st.builds(messages.TokenizeEvent, id=ids, token_ids=st.lists(counts, max_size=4).map(tuple), warnings=warnings),
)

INFO = types.ServerInfo(
    server="uma/0.1.0",
    model=types.ModelInfo(
        name="story",
        path="/models/story.gguf",
        architecture="llama",
        parameters=5_000_000,
        size_bytes=6_000_000,
        quantization="Q8_0",
        context_length=1024,
        vocab_size=N_VOCAB,
        has_chat_template=True,
    ),
    capabilities=types.Capabilities(
        streaming=True,
        chat=True,
        cancel=True,
        tokenize=True,
        token_ids_input=True,
        prefix_sharing="cells",
        kv_unified=True,
        max_stop_sequences=16,
        sampling_params=("temperature", "top_p"),
    ),
    limits=types.Limits(
        n_ctx=1024, max_tokens=512, max_prompt_bytes=10_000, max_frame_bytes=65_536, max_sessions=8, max_queue=8
    ),
)


def finished(id: str = "a", **fields: Any) -> types.Finished:
    """A request's last event."""
    metrics = types.RequestMetrics(
        queue_ms=1.0,
        prefill_ms=2.0,
        decode_ms=3.0,
        ttft_ms=3.0,
        batch_size=1,
        tokens_per_second=100.0,
        decode_iterations=4,
    )
    plain: dict[str, Any] = {"reason": "stop", "usage": types.Usage(3, 0, 4), "metrics": metrics, "seed": 7}
    return types.Finished(id, **(plain | fields))
