"""The page of samples and the two measures, taken from the exported file through llama.cpp, as a user meets the model.

Nothing is edited or chosen: the requests stand here, the answers are the first that came.
"""

from __future__ import annotations

import argparse
from dataclasses import dataclass
from pathlib import Path
from random import Random

from uma import LLM, SamplingParams

from . import dialogue, grammar
from .second_look import QUESTIONS
from .uma_facts import FACTS, IDENTITY, Fact

Turns = list[dict[str, str]]

STORY_REQUESTS = (
    "Tell me a story about a fox in the harbour.",
    "Tell me a story about a brave owl named Pip in the harbour.",
    "tell me a story about a robot",
    "Could you make up a tale in which a shy dragon called Quillon lives in a library?",
    "A story with a baker and a golden key, please",
    "I want a story about friendship set on the moon.",
    "Write a long story about a hedgehog who is afraid of the dark.",
    "Tell me a short story about Mira the quokka in Tasmania.",
    "Tell me a story.",
)
BEGINNINGS = (
    "Once upon a time, a fox lived in the forest.",
    "Continue this story: Nobody in the village had ever seen the old clockmaker smile.",
    "Long ago, a small grey mouse named Tibbet found a door behind the stove.",
)
RAW_PROMPTS = (
    "Once upon a time, a fox lived in the forest.",
    "Tell me a story about a bear in the mountains",
    "What is UMA?",
)
CONVERSATION = (
    "Hello!",
    "Tell me a story about a penguin called Olaf in the castle.",
    "What was the name of the penguin?",
    "What happened next?",
    "Thanks! Another one about a witch, please.",
    "Where did she live?",
    "What is the capital of France?",
    "And how do I start the server?",
    "Bye!",
)


@dataclass(frozen=True)
class Measures:
    """How often the model did what was asked, on requests and phrasings it was never trained on: right ones of all."""

    questions: tuple[int, int]
    second_look: tuple[int, int]
    stories: tuple[int, int]
    misses: tuple[str, ...]


class Speaker:
    """The exported model, asked through its own chat template or with bare text. Greedy unless told otherwise."""

    def __init__(self, llm: LLM) -> None:
        self._llm = llm

    def chats(self, conversations: list[Turns], temperature: float = 0.0) -> list[str]:
        """The next answer of each conversation."""
        params = SamplingParams(max_tokens=400, temperature=temperature, top_p=0.95, seed=1)
        return [each.outputs[0].text for each in self._llm.chat(conversations, params, progress=False)]

    def ask_all(self, questions: list[str]) -> list[str]:
        return self.chats([[{"role": "user", "content": question}] for question in questions])

    def ask(self, question: str, temperature: float = 0.0) -> str:
        return self.chats([[{"role": "user", "content": question}]], temperature)[0]

    def complete(self, prompt: str) -> str:
        [given] = self._llm.generate([prompt], SamplingParams(max_tokens=400, temperature=0.0), progress=False)
        return given.outputs[0].text


def write(gguf: Path, page: Path) -> Measures:
    """Writes the page and returns the measures, which it also tells at its top."""
    with LLM(gguf) as llm:
        measures, parts = _page(Speaker(llm))
    page.write_text("\n".join(parts), encoding="utf-8")
    return measures


def _page(speaker: Speaker) -> tuple[Measures, list[str]]:
    measures = measure(speaker)
    parts = [_heading(measures)]
    parts += [_titled("Stories asked for, greedy"), *(_exchange(asked, speaker.ask(asked)) for asked in STORY_REQUESTS)]
    parts += [
        _titled("The same first request, drawn at temperature 0.8"),
        _exchange(STORY_REQUESTS[0], speaker.ask(STORY_REQUESTS[0], 0.8)),
    ]
    parts += [_titled("Beginnings to continue"), *(_exchange(asked, speaker.ask(asked)) for asked in BEGINNINGS)]
    parts += [_titled("Bare text, without the chat template")]
    parts += [_exchange(prompt, speaker.complete(prompt)) for prompt in RAW_PROMPTS]
    parts += [_titled("One conversation"), *_conversation(speaker)]
    parts += [_titled("Questions in words that were never trained on")]
    asked = [text for fact in FACTS + IDENTITY for text in fact.held_out[:1]]
    parts += map(_exchange, asked, speaker.ask_all(asked))
    return measures, parts


def measure(speaker: Speaker) -> Measures:
    """Questions in words never trained on; stories of a hero never trained on at that place."""
    facts = FACTS + IDENTITY
    counts, misses = [], []
    for asked in (
        [(fact, text) for fact in facts for text in fact.held_out],
        [(fact, text) for fact in facts for text in QUESTIONS[fact.key]],
    ):
        answers = speaker.ask_all([text for _, text in asked])
        missed = [
            f"{text} -> {answer}"
            for (fact, text), answer in zip(asked, answers, strict=True)
            if not is_right(fact, answer)
        ]
        counts.append((len(asked) - len(missed), len(asked)))
        misses += missed
    requests = _held_out_requests(60)
    stories = speaker.ask_all([request for request, _ in requests])
    missed = [
        f"{request} -> {story}"
        for (request, needed), story in zip(requests, stories, strict=True)
        if not _has_all(story, needed)
    ]
    return Measures(counts[0], counts[1], (len(requests) - len(missed), len(requests)), (*misses, *missed))


def _has_all(story: str, needed: tuple[str, ...]) -> bool:
    return all(word.lower() in story.lower() for word in needed)


def is_right(fact: Fact, answer: str) -> bool:
    return any(keyword in answer for keyword in fact.keywords)


def _held_out_requests(count: int) -> list[tuple[str, tuple[str, ...]]]:
    rng = Random(5)
    requests: list[tuple[str, tuple[str, ...]]] = []
    while len(requests) < count:
        wish = grammar.Wish(kind=grammar.any_kind(rng), place=grammar.any_place(rng))
        assert wish.kind and wish.place
        if dialogue.held_out_pair(wish.kind, wish.place.name):
            name = grammar.any_name(rng, wish.kind)
            requests.append(
                (
                    f"Tell me a story about {grammar.a(wish.kind)} named {name} {wish.place}.",
                    (wish.kind, name, wish.place.name),
                )
            )
    return requests


def _conversation(speaker: Speaker) -> list[str]:
    turns: Turns = []
    parts = []
    for asked in CONVERSATION:
        turns.append({"role": "user", "content": asked})
        turns.append({"role": "assistant", "content": speaker.chats([turns])[0]})
        parts.append(_exchange(asked, turns[-1]["content"]))
    return parts


def _heading(measures: Measures) -> str:
    return (
        "# Samples\n\nWritten by the recipe from the exported file, unedited. Greedy where nothing else is said.\n\n"
        f"{_share(measures.questions)} in words never trained on were answered rightly, "
        f"and {_share(measures.second_look)} of the second look. "
        f"Of the stories asked for with a hero never trained on at that place, "
        f"{measures.stories[0]} of {measures.stories[1]} kept hero, name and place.\n"
    )


def _share(counts: tuple[int, int]) -> str:
    return f"{counts[0]} of {counts[1]} questions"


def _titled(title: str) -> str:
    return f"## {title}\n"


def _exchange(asked: str, answer: str) -> str:
    return (
        "**"
        + asked.replace("\n", " ")
        + "**\n\n"
        + "\n".join(f"> {line}".rstrip() for line in answer.strip().split("\n"))
        + "\n"
    )


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="python -m examples.tiny_model.samples", description="Writes the page of samples for a GGUF file."
    )
    here = Path(__file__).parent
    parser.add_argument("gguf", type=Path, nargs="?", default=here.parent.parent / "uma" / "data" / "uma-story.gguf")
    parser.add_argument("page", type=Path, nargs="?", default=here / "SAMPLES.md")
    options = parser.parse_args()
    measures = write(options.gguf, options.page)
    print(f"questions {measures.questions}, second look {measures.second_look}, stories {measures.stories}")
    print(*measures.misses, sep="\n")


if __name__ == "__main__":
    main()
