"""What a request asks for is what it gets: lengths, stops, seeds, prompts of each kind, and errors that say why not."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import trio
from engine_world import Answer, alone, answer, answers, ask, config_for, tokens_for

from models import BOS, EOS, IM_END, IM_START, MERGES, N_VOCAB, SHOWN, SPECIALS, write_model
from uma import Message, Request, SamplingParams, open_engine
from uma.engine.kv.checkpoints import LAST_TOKENS
from uma.errors import BadRequest, ModelError, PromptTooLarge, TemplateError
from uma.types import Finished, Token

SEEDED: dict[str, Any] = {"temperature": 1.0, "top_p": 0.95}


async def test_tokens_come_in_order_and_exactly_one_last_event_follows(tiny: Path) -> None:
    async with open_engine(config_for(tiny)) as engine, engine.generate(ask(max_tokens=7, id="x")) as stream:
        events = [event async for event in stream]
        with pytest.raises(StopAsyncIteration):
            await stream.__anext__()
    *tokens, last = events
    assert len(tokens) == 7
    assert all(isinstance(token, Token) and token.id == "x" for token in tokens)
    assert isinstance(last, Finished)
    assert (last.id, last.reason, last.text, last.token_ids) == ("x", "length", None, None)
    assert last.usage.completion_tokens == 7
    assert last.metrics.decode_iterations == 8  # the end of a prompt that is read alone has a batch of its own
    assert last.metrics.batch_size == 1
    assert last.metrics.ttft_ms >= last.metrics.queue_ms > 0


@pytest.mark.parametrize("stream", [False, True])
async def test_for_no_tokens_at_all_the_prompt_is_read_and_kept(tiny: Path, stream: bool) -> None:
    """Also where the first token would have been the end of the text."""
    prompt = tokens_for(5, 40)
    async with open_engine(config_for(tiny)) as engine:
        for wanted in (ask(prompt, max_tokens=0, stream=stream), ask(max_tokens=0, temperature=2.0, n=2)):
            got = await answer(engine, wanted)
            assert (got.tokens, got.finished.reason) == ((), "length")
            assert got.finished.usage.completion_tokens == 0
        again = await answer(engine, ask(prompt, max_tokens=1))
        assert again.finished.usage.cached_tokens == len(prompt) - LAST_TOKENS


async def test_without_streaming_the_last_event_carries_all_that_streaming_gives(tiny: Path) -> None:
    async with open_engine(config_for(tiny)) as engine:
        streamed = await answer(engine, ask(max_tokens=40))
        whole = await answer(engine, ask(max_tokens=40, stream=False))
    assert whole.tokens == ()
    assert (whole.finished.text, whole.finished.token_ids) == (streamed.text, streamed.token_ids)


def spelled(token: int) -> bytes:
    """What the test model's token stands for."""
    merged = ["".join(pair) for pair in MERGES]
    if token < 256 + len(merged):
        return bytes([token]) if token < 256 else merged[token - 256].encode()
    return SPECIALS[-1].encode() if token == SHOWN else b""


async def test_text_is_the_decoded_bytes_of_all_tokens_together(tiny: Path) -> None:
    async with open_engine(config_for(tiny)) as engine:
        got = await answer(engine, ask(max_tokens=200, temperature=1.5, seed=1))
    assert got.text == b"".join(map(spelled, got.token_ids)).decode("utf-8", "replace")


async def test_special_tokens_are_never_shown(tiny: Path) -> None:
    async with open_engine(config_for(tiny)) as engine:
        got = await answer(engine, ask(max_tokens=300, temperature=2.0, seed=3))
    control = {BOS, EOS, IM_START, IM_END}
    hidden = [token for token in got.tokens if token.token_id in control]
    assert hidden, "choose another seed: no special token came"
    assert not any(name in got.text for name in SPECIALS[:-1])


async def test_a_stop_string_ends_the_text_before_itself_wherever_tokens_end(tiny: Path) -> None:
    async with open_engine(config_for(tiny)) as engine:
        free = await answer(engine, ask(max_tokens=60))
        for start, size in ((5, 1), (8, 3), (20, 7)):
            stop = free.text[start : start + size]
            stopped = await answer(engine, ask(max_tokens=60, stop=(stop, "never comes")))
            assert stopped.text == free.text[: free.text.index(stop)]
            assert (stopped.finished.reason, stopped.finished.stop_string) == ("stop", stop)
            assert stopped.token_ids == free.token_ids[: len(stopped.token_ids)]
            assert stopped.finished.usage.completion_tokens == len(stopped.tokens)


async def test_text_held_for_a_stop_string_comes_when_the_length_ends_it(tiny: Path) -> None:
    async with open_engine(config_for(tiny)) as engine:
        free = await answer(engine, ask(max_tokens=10))
        held = await answer(engine, ask(max_tokens=10, stop=free.text[-3:] + "and never this"))
    assert held.text == free.text
    assert (held.finished.reason, held.finished.stop_string) == ("length", None)


@pytest.fixture
def ending(tmp_path: Path) -> Path:
    """A model that likes to end: its end-of-text logit is often the highest."""
    return write_model(tmp_path / "ending.gguf", seed=4, context_length=512)


async def natural_end(path: Path) -> tuple[Request, Answer]:
    """A prompt whose greedy continuation ends by itself after some tokens, and that continuation."""
    async with open_engine(config_for(path)) as engine:
        for seed in range(60):
            request = ask(tokens_for(seed, 8), 200, ignore_eos=False)
            got = await answer(engine, request)
            if got.finished.reason == "stop" and len(got.tokens) >= 2:
                return request, got
    raise AssertionError("no prompt of this model ends by itself")


async def test_min_tokens_and_ignore_eos_put_the_end_off(ending: Path) -> None:
    request, ended = await natural_end(ending)
    assert request.token_ids is not None
    count = len(ended.tokens)
    async with open_engine(config_for(ending)) as engine:
        later = await answer(engine, ask(request.token_ids, 200, ignore_eos=False, min_tokens=count + 5))
        never = await answer(engine, ask(request.token_ids, 200))
    assert len(later.tokens) >= count + 5
    assert later.token_ids[:count] == ended.token_ids
    assert len(never.tokens) == 200
    assert never.finished.reason == "length"
    assert not {EOS, IM_END} & {*later.token_ids, *never.token_ids}


async def test_a_generation_that_reaches_the_contexts_end_ends_with_length(tiny: Path) -> None:
    async with open_engine(config_for(tiny, n_ctx=256)) as engine:
        assert engine.info.limits.n_ctx == 256
        got = await answer(engine, ask(tokens_for(1, 200), None))
        last = await answer(engine, ask(tokens_for(2, 255), None))
    assert (got.finished.reason, len(got.tokens)) == ("length", 56)
    assert (last.finished.reason, len(last.tokens)) == ("length", 1)


async def test_max_tokens_of_the_engine_bounds_every_request(tiny: Path) -> None:
    async with open_engine(config_for(tiny, max_tokens=9)) as engine:
        got = await answers(engine, [ask(max_tokens=None), ask(max_tokens=50), ask(max_tokens=4)])
    assert [len(each.tokens) for each in got] == [9, 9, 4]


async def test_a_seed_repeats_its_output_and_another_does_not(tiny: Path) -> None:
    async with open_engine(config_for(tiny)) as engine:
        one, again, other = await alone(engine, [ask(seed=seed, **SEEDED, max_tokens=30) for seed in (5, 5, 6)])
        beside = await answers(engine, [ask(seed=5, **SEEDED, max_tokens=30), ask("Another", 30, seed=1, **SEEDED)])
    assert one.token_ids == again.token_ids == beside[0].token_ids
    assert one.token_ids != other.token_ids
    assert one.finished.seed == 5


async def test_without_a_seed_one_is_drawn_and_told_and_repeats_the_output(tiny: Path) -> None:
    async with open_engine(config_for(tiny)) as engine:
        first, second = await alone(engine, [ask(**SEEDED, max_tokens=30)] * 2)
        again = await answer(engine, ask(**SEEDED, max_tokens=30, seed=first.finished.seed))
    assert first.token_ids != second.token_ids
    assert again.token_ids == first.token_ids


@pytest.mark.parametrize(
    "sampling",
    [{"temperature": 0.8}, {"top_k": 5}, {"top_p": 0.5}, {"min_p": 0.2}, {"repetition_penalty": 1.5},
     {"frequency_penalty": 1.0}, {"presence_penalty": 1.0}],
)  # fmt: skip
async def test_each_sampling_parameter_makes_a_difference(tiny: Path, sampling: dict[str, Any]) -> None:
    draws = sampling.keys() & {"top_k", "top_p", "min_p", "temperature"}
    base: dict[str, Any] = {"seed": 1} | ({"temperature": 1.5} if draws else {})
    async with open_engine(config_for(tiny)) as engine:
        without, within = await alone(engine, [ask(**base, max_tokens=60), ask(**(base | sampling), max_tokens=60)])
    assert without.token_ids != within.token_ids


async def test_top_k_of_one_is_greedy(tiny: Path) -> None:
    async with open_engine(config_for(tiny)) as engine:
        greedy, drawn = await alone(engine, [ask(max_tokens=40), ask(max_tokens=40, temperature=1.0, top_k=1)])
    assert greedy.token_ids == drawn.token_ids


async def test_prompts_are_what_tokenize_says_they_are(tiny: Path) -> None:
    talk = Request(id="t", messages=(Message("user", "Hi!"),))
    async with open_engine(config_for(tiny)) as engine:
        text = await engine.tokenize(ask("the <|im_end|> end"))
        chat = await engine.tokenize(talk)
        got = await answer(engine, Request(id="t", messages=talk.messages, sampling=SamplingParams(max_tokens=5)))
        same = await answer(engine, ask(chat.token_ids, 5, ignore_eos=False))
    assert text.token_ids[0] == BOS
    assert IM_END not in text.token_ids, "a prompt's text must not be read as special tokens"
    assert chat.token_ids.count(IM_END) == 1
    assert got.finished.usage.prompt_tokens == len(chat.token_ids)
    assert got.token_ids == same.token_ids


async def test_token_ids_are_taken_literally(tiny: Path) -> None:
    async with open_engine(config_for(tiny)) as engine:
        got = await answer(engine, ask((104, 105), 3))
    assert got.finished.usage.prompt_tokens == 2


@pytest.mark.parametrize(("token", "says"), [(N_VOCAB, "266"), (2**31, "2147483648"), (2**70, str(2**70))])
async def test_a_token_that_is_not_in_the_vocabulary_is_refused_by_name(tiny: Path, token: int, says: str) -> None:
    async with open_engine(config_for(tiny)) as engine:
        with pytest.raises(BadRequest, match=rf"token_ids: {says}\b.*vocabulary"):
            await answer(engine, ask((1, token), 3))
        assert engine.snapshot()["requests_rejected"] == 1
        assert len((await answer(engine, ask(max_tokens=3))).tokens) == 3


async def test_a_prompt_that_can_never_fit_is_refused(tiny: Path) -> None:
    async with open_engine(config_for(tiny, n_ctx=256)) as engine:
        with pytest.raises(PromptTooLarge, match=r"256 tokens do not fit the context of 256"):
            await answer(engine, ask(tokens_for(1, 256)))
        with pytest.raises(PromptTooLarge, match=r"do not fit.*larger n_ctx \(--n-ctx\)"):
            await answer(engine, ask("long " * 2_000))
        most = engine.info.model.context_length
    async with open_engine(config_for(tiny, n_ctx=2 * most)) as engine:
        with pytest.raises(PromptTooLarge, match=r"this one takes [0-9,]+ tokens, whatever n_ctx \(--n-ctx\) says"):
            await answer(engine, ask(tokens_for(1, most)))


async def test_a_prompt_over_the_byte_limit_is_refused_before_it_is_tokenized(tiny: Path) -> None:
    async with open_engine(config_for(tiny, max_prompt_bytes=10)) as engine:
        assert (await answer(engine, ask("é" * 5))).finished.reason == "length"
        with pytest.raises(PromptTooLarge, match=r"11 bytes are over .* 10 \(max_prompt_bytes\)"):
            await answer(engine, ask("é" * 5 + "e"))
        with pytest.raises(PromptTooLarge, match="max_prompt_bytes"):
            await answer(engine, Request(id="a", messages=(Message("user", "12345678901"),)))


async def test_an_empty_prompt_of_a_model_without_bos_is_refused(tmp_path: Path) -> None:
    path = write_model(tmp_path / "no-bos.gguf", add_bos=False)
    async with open_engine(config_for(path)) as engine:
        with pytest.raises(BadRequest, match="no token at all"):
            await answer(engine, ask(""))


async def test_a_template_that_refuses_the_messages_says_why(tmp_path: Path) -> None:
    path = write_model(tmp_path / "strict.gguf", chat_template="{{ raise_exception('no ' + messages[0].role) }}")
    async with open_engine(config_for(path)) as engine:
        with pytest.raises(TemplateError, match="no system"):
            await answer(engine, Request(id="a", messages=(Message("system", "x"),)))


async def test_a_long_prompt_is_tokenized_off_the_trio_thread(tiny: Path) -> None:
    """While it is, other tasks run: more of them in a row than a thread that is blocked could give way to."""
    async with open_engine(config_for(tiny, n_ctx=32_768, max_prompt_bytes=10_000_000)) as engine:
        turns = 0

        async def spin() -> None:
            nonlocal turns
            while True:
                turns += 1
                await trio.lowlevel.checkpoint()

        async with trio.open_nursery() as nursery:
            nursery.start_soon(spin)
            assert len((await engine.tokenize(ask("word " * 400_000))).token_ids) > 400_000
            nursery.cancel_scope.cancel()
    assert turns > 100


async def test_a_model_that_cannot_be_loaded_is_an_error_of_its_own(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=r"nowhere\.gguf"):
        async with open_engine(config_for(tmp_path / "nowhere.gguf")):
            raise AssertionError("opened")
