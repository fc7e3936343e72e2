"""The page of samples and the two measures, taken from the exported file through llama.cpp, as a user meets the model.

Nothing is edited or chosen: the requests stand here, the answers are the first that came.
"""

from __future__ import annotations

import argparse
from dataclasses import dataclass
from pathlib import Path
from random import Random

from llama_cpp import Llama

from . import dialogue, grammar
from .uma_facts import FACTS, IDENTITY

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
    """How often the model did what was asked, on requests and phrasings it was never trained on."""

    questions: int
    questions_right: int
    stories: int
    stories_true: int
    misses: tuple[str, ...]


class Speaker:
    """The exported model, asked through its own chat template or with bare text. Greedy unless told otherwise."""

    def __init__(self, gguf: Path) -> None:
        self._llama = Llama(str(gguf), n_ctx=2048, verbose=False, seed=1)

    def chat(self, turns: Turns, temperature: float = 0.0) -> str:
        reply = self._llama.create_chat_completion(turns, max_tokens=400, temperature=temperature, top_p=0.95, seed=1)
        return str(reply["choices"][0]["message"]["content"])

    def ask(self, question: str, temperature: float = 0.0) -> str:
        return self.chat([{"role": "user", "content": question}], temperature)

    def complete(self, prompt: str) -> str:
        return str(self._llama.create_completion(prompt, max_tokens=400, temperature=0.0)["choices"][0]["text"])


def write(gguf: Path, page: Path) -> Measures:
    """Writes the page and returns the measures, which it also tells at its top."""
    speaker = Speaker(gguf)
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
    parts += [_exchange(asked, speaker.ask(asked)) for fact in FACTS + IDENTITY for asked in fact.held_out[:1]]
    page.write_text("\n".join(parts), encoding="utf-8")
    return measures


def measure(speaker: Speaker) -> Measures:
    """Held-out phrasings answered rightly; held-out pairs of hero and place that both appear in the story."""
    misses = []
    asked = [(fact, text) for fact in FACTS + IDENTITY for text in fact.held_out]
    for fact, text in asked:
        answer = speaker.ask(text)
        if not any(keyword in answer for keyword in fact.keywords):
            misses.append(f"{text} -> {answer}")
    pairs = list(_held_out_requests(60))
    for request, needed in pairs:
        story = speaker.ask(request)
        if not all(word.lower() in story.lower() for word in needed):
            misses.append(f"{request} -> {story}")
    story_misses = sum(1 for miss in misses if miss.startswith("Tell me a story"))
    return Measures(
        len(asked), len(asked) - len(misses) + story_misses, len(pairs), len(pairs) - story_misses, tuple(misses)
    )


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
        turns.append({"role": "assistant", "content": speaker.chat(turns)})
        parts.append(_exchange(asked, turns[-1]["content"]))
    return parts


def _heading(measures: Measures) -> str:
    return (
        "# Samples\n\nWritten by the recipe from the exported file, unedited. Greedy where nothing else is said.\n\n"
        f"Of {measures.questions} questions in words never trained on, "
        f"{measures.questions_right} were answered rightly. "
        f"Of {measures.stories} stories asked for with a hero never trained on at that place, "
        f"{measures.stories_true} kept hero, name and place.\n"
    )


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
    print(
        f"{measures.questions_right}/{measures.questions} questions, {measures.stories_true}/{measures.stories} stories"
    )
    print(*measures.misses, sep="\n")


if __name__ == "__main__":
    main()
