"""The built-in model: its text is true and varied, its file is honest, and what it says is to the point.

The recipe's text is tested without training anything; the shipped file is tested as users meet it, through `uma.LLM`.
"""

from __future__ import annotations

import argparse
import functools
import importlib.util
import re
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path
from random import Random

import attrs
import jinja2
import pytest
from llama_cpp import Llama

import uma
from uma import LLM, SamplingParams
from uma.cli.chat import COMMANDS as SLASH_COMMANDS
from uma.cli.parser import build_parser
from uma.config import BARE_HTTP, RESERVED_VARIABLES, RuntimeConfig

ROOT = Path(__file__).parent.parent
sys.path.insert(0, str(ROOT / "examples"))

from tiny_model import dialogue, grammar  # noqa: E402
from tiny_model.phrasings import MORE  # noqa: E402
from tiny_model.samples import is_right  # noqa: E402
from tiny_model.second_look import QUESTIONS  # noqa: E402
from tiny_model.uma_facts import FACTS, IDENTITY, REFUSALS  # noqa: E402

GGUF = ROOT / "uma" / "data" / "uma-story.gguf"
ANSWERS = [fact.answer for fact in FACTS + IDENTITY] + list(REFUSALS)
SMALL_TALK = [reply for _, reply in dialogue.SMALL_TALK]


# ------------------------------------------------------------------------------------------------ the facts are true


@functools.cache
def command_options() -> dict[str, set[str]]:
    """Every command of the real command line, with its options."""
    actions = build_parser()._actions
    commands = next(action for action in actions if isinstance(action, argparse._SubParsersAction))
    return {
        name: {word for action in parser._actions for word in action.option_strings}
        for name, parser in commands.choices.items()
    }


def unknown_names(text: str) -> list[str]:
    """The commands, options, variables and slash commands that a text names and `uma` does not have."""
    options = command_options()
    every_option = set().union(*options.values())
    variables = {f"UMA_{field.name.upper()}" for field in attrs.fields(RuntimeConfig)} | RESERVED_VARIABLES
    wrong = [f"uma {name}" for name in re.findall(r"(?<!from )\buma ([a-z][\w-]*)", text) if name not in options]
    wrong += [word for word in re.findall(r"(?<!\S)`?(--[a-z][\w-]*|-[a-z]\b)", text) if word not in every_option]
    wrong += [word for word in re.findall(r"\bUMA_[A-Z_]*[A-Z]", text) if word not in variables]
    wrong += [word for word in re.findall(r"(?<!\S)(/[a-z]+)", text) if word not in SLASH_COMMANDS]
    for name, rest in re.findall(r"`uma ([a-z][a-z-]*)([^`]*)`", text):
        named = re.findall(r"(?<!\S)(--[a-z][\w-]*|-[a-z]\b)", rest)
        wrong += [f"uma {name} {word}" for word in named if word not in options.get(name, ())]
    return wrong


@pytest.mark.parametrize("answer", ANSWERS + SMALL_TALK)
def test_no_answer_names_a_command_or_option_that_uma_does_not_have(answer: str) -> None:
    assert unknown_names(answer) == []


@pytest.mark.parametrize(
    "lie",
    [
        "Type `uma fly`.",
        "Type `uma engine-fly`.",
        "Add `--fly`.",
        "Add `-z`.",
        "`uma models --model x` does it.",
        "`uma embed -n 3` does it.",
        "Set UMA_FLY=1.",
        "Type /fly.",
    ],
)
def test_an_invented_command_would_be_noticed(lie: str) -> None:
    assert unknown_names(lie)


def test_the_answers_name_the_package_the_python_and_the_import_as_they_are() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    text = " ".join(ANSWERS)
    assert set(re.findall(r"pip install ([\w-]+)", text)) == {project["name"]}
    assert set(re.findall(r"Python (\d\.\d+) or newer", text)) == {project["requires-python"].removeprefix(">=")}
    assert set(re.findall(r"the (\w+) license", text)) == {project["license"]}
    assert set(re.findall(r"127\.0\.0\.1:\d+", text)) == {BARE_HTTP}
    assert importlib.util.find_spec("uma.__main__")
    for imported in re.findall(r"from uma import ([\w, ]+)", text):
        assert all(hasattr(uma, name) for name in imported.split(", "))
    for arguments in re.findall(r"SamplingParams\((\w[^)]*)\)", text):
        assert {part.split("=")[0] for part in arguments.split(", ")} <= {
            field.name for field in attrs.fields(SamplingParams)
        }


def test_every_question_has_many_phrasings_and_some_that_are_held_out() -> None:
    rng = Random(1)
    for fact in FACTS + IDENTITY:
        drawn = {dialogue.question(rng, fact) for _ in range(100)}
        assert len(drawn) >= 50, fact.key
        assert fact.held_out and QUESTIONS[fact.key], fact.key
        assert not {plain(text) for text in drawn} & {plain(text) for text in fact.held_out + QUESTIONS[fact.key]}
        assert not any(dialogue.is_held_out(fact, text) for text in drawn)


def test_held_out_means_in_no_order_and_with_no_small_words_either() -> None:
    fact = next(fact for fact in FACTS if fact.key == "run")
    assert dialogue.is_held_out(fact, "How do I fire up the server?")
    assert dialogue.is_held_out(fact, "the server fire up, please")
    assert not dialogue.is_held_out(fact, "launch the server")


def test_no_question_is_left_without_its_fact() -> None:
    keys = {fact.key for fact in FACTS + IDENTITY}
    assert keys == set(QUESTIONS) == set(MORE)


def test_an_answer_counts_as_right_for_its_own_question_and_no_other() -> None:
    for fact in FACTS + IDENTITY:
        right = {other.key for other in FACTS + IDENTITY if is_right(fact, other.answer)}
        # How to start the server is told along with how to do so with a model of one's own.
        assert right - ({"run"} if fact.key == "own_model" else set()) == {fact.key}


def plain(text: str) -> str:
    return re.sub(r"\W+", " ", text.lower()).strip()


# ------------------------------------------------------------------------------------------------ the stories


def test_the_same_seed_tells_the_same_story() -> None:
    assert grammar.tell(Random(7)).text == grammar.tell(Random(7)).text
    assert dialogue.document(Random(7)) == dialogue.document(Random(7))


def test_a_thousand_stories_hardly_ever_repeat() -> None:
    stories = [grammar.tell(Random(seed)).text for seed in range(1000)]
    assert len(set(stories)) >= 990
    assert all(40 <= len(story.split()) <= 400 for story in stories)


def test_no_trace_of_the_grammar_is_left_in_a_document() -> None:
    for seed in range(1000):
        text = dialogue.document(Random(seed))
        for special in (dialogue.BOS, dialogue.TURN, dialogue.END, "| uma generate"):
            text = text.replace(special, "")
        assert not set("{}[]|") & set(text), text


def test_a_story_honours_what_was_asked_for() -> None:
    for seed in range(500):
        request, wish = dialogue.story_request(Random(seed))
        story = grammar.tell(Random(seed + 1), wish).text.lower()
        place = wish.place.name if wish.place else None
        for wanted in (wish.kind, wish.trait, wish.name, place, wish.thing, wish.friend):
            assert wanted is None or wanted.lower() in story, (request, wanted, story)


def test_a_story_keeps_its_hero_and_place_to_the_end() -> None:
    for seed in range(200):
        story = grammar.tell(
            Random(seed), grammar.Wish(kind="fox", name="Zarlo", place=grammar.place_named("the harbour"))
        )
        assert story.text.count("Zarlo") + story.text.count("the fox") >= 2
        assert re.findall(r"\b(?:in|on|at|under|by) the (forest|desert|castle|moon)\b", story.text) == []


def test_held_out_pairs_of_hero_and_place_are_never_trained_on() -> None:
    for seed in range(1000):
        text = dialogue.document(Random(seed))
        assert not re.search(r"\bfox\b[^.]* lived in the harbour\b", text), text


# ------------------------------------------------------------------------------------------------ the file


@pytest.fixture(scope="module")
def vocabulary() -> Iterator[Llama]:
    llama = Llama(str(GGUF), vocab_only=True, verbose=False)
    yield llama
    llama.close()


def test_the_file_is_small_and_says_what_it_is(vocabulary: Llama) -> None:
    assert GGUF.stat().st_size <= 6_000_000
    about = vocabulary.metadata
    assert about["general.architecture"] == "llama"
    assert about["general.license"] == "MIT"
    assert about["general.author"] == "The UMA authors"
    assert about["general.name"].startswith("UMA Story")
    assert "demonstration model" in about["general.description"]
    assert int(about["llama.context_length"]) >= 1024


def test_the_chat_template_is_the_one_it_was_trained_with(vocabulary: Llama) -> None:
    turns = [("system", "Be kind."), ("user", "Hello"), ("assistant", "Hi!"), ("user", "A story?")]
    template = jinja2.Template(vocabulary.metadata["tokenizer.chat_template"])
    messages = [{"role": role, "content": text} for role, text in turns]
    trained = dialogue.render_chat(turns).removeprefix(dialogue.BOS)
    assert template.render(messages=messages) == trained
    assert template.render(messages=messages, add_generation_prompt=True) == trained + "<|im_start|>assistant\n"


@pytest.mark.parametrize(
    "text",
    [
        "Tell me a story.",
        "  two  spaces\n\n\ttab\r\n",
        "日本語 🦊🎉",
        "Ünïcödé ßẞ ﬁ \u200b",
        "\x01\x7f",
        "don't!!! 12345",
        "a" * 500,
    ],
)
def test_every_text_comes_back_as_it_went_in(vocabulary: Llama, text: str) -> None:
    tokens = vocabulary.tokenize(text.encode(), add_bos=False, special=False)
    assert vocabulary.detokenize(tokens) == text.encode()


def test_the_special_tokens_are_single_tokens_and_a_text_begins_with_one(vocabulary: Llama) -> None:
    for special in (dialogue.BOS, dialogue.TURN, dialogue.END):
        assert len(vocabulary.tokenize(special.encode(), add_bos=False, special=True)) == 1
    assert vocabulary.tokenize(b"Hello")[0] == vocabulary.token_bos()
    assert vocabulary.tokenize(dialogue.END.encode(), add_bos=False, special=True) == [vocabulary.token_eos()]


# ------------------------------------------------------------------------------------------------ what it says


@pytest.fixture(scope="module")
def llm() -> Iterator[LLM]:
    with LLM() as model:
        yield model


def ask(llm: LLM, *questions: str, max_tokens: int = 150) -> list[str]:
    """The greedy answer to each question, in a chat of its own."""
    chats = [[{"role": "user", "content": question}] for question in questions]
    return [result.outputs[0].text for result in llm.chat(chats, SamplingParams(max_tokens=max_tokens, temperature=0))]


def test_stories_keep_a_hero_a_name_and_a_place_that_were_never_trained_together(llm: LLM) -> None:
    requests = [
        (f"Tell me a story about {grammar.a(kind)} named {name} in {place}.", (kind, name, place))
        for kind in ("fox", "owl", "dragon")
        for name, place in (("Pip", "the harbour"), ("Mina", "the castle"))
    ]
    stories = ask(llm, *(request for request, _ in requests), max_tokens=80)
    assert all(len(re.findall(r"[.!?]", story)) >= 3 for story in stories)
    kept = [all(word in story for word in words) for (_, words), story in zip(requests, stories, strict=True)]
    assert sum(kept) >= 5, stories


def test_questions_in_words_never_trained_on_are_answered_rightly(llm: LLM) -> None:
    """The first of each fact's held-out questions, of both sets; the recipe asks them all and tells how many."""
    asked = [(fact, text) for fact in FACTS + IDENTITY for text in (fact.held_out[0], QUESTIONS[fact.key][0])]
    answers = ask(llm, *(text for _, text in asked), max_tokens=50)
    right = [is_right(fact, answer) for (fact, _), answer in zip(asked, answers, strict=True)]
    assert sum(right) >= 0.87 * len(right), [text for (_, text), good in zip(asked, right, strict=True) if not good]


@pytest.mark.parametrize(
    "question, told",
    [
        ("How do I start the server?", "`uma run`"),
        ("What is UMA?", "llama.cpp"),
        ("How do I install UMA?", "uma-serve"),
        ("How do I load my own model?", "--model"),
        ("How do I chat with the model?", "`uma chat`"),
        ("Which license does UMA have?", "MIT"),
        ("Who are you?", "demonstration model"),
    ],
)
def test_the_plainest_questions_are_answered_in_any_case(llm: LLM, question: str, told: str) -> None:
    for answer in ask(llm, question, question.lower(), question.rstrip("?"), max_tokens=50):
        assert told in answer


def test_a_given_beginning_is_continued_with_its_hero(llm: LLM) -> None:
    (chatted,) = ask(llm, "Continue this story: Long ago, a small mouse named Luna lived in the castle.")
    assert "Luna" in chatted or "mouse" in chatted
    plain_text = llm.generate("Once upon a time, a fox lived in the forest.", SamplingParams(max_tokens=150))
    assert "the fox" in plain_text[0].outputs[0].text


def test_what_it_cannot_know_it_says_that_it_does_not_know(llm: LLM) -> None:
    answers = ask(llm, "What is the capital of France?", "Who was Napoleon?", "What is 7 times 8?")
    assert all("I" in answer and ("UMA" in answer or "stories" in answer) for answer in answers)
