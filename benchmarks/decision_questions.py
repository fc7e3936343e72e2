"""Sixty small questions with known answers, for `benchmarks.decisions`: ten each of six kinds, of states made for this.

Answers are as easy as small models need them, and as many for each option as ten allow.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

import attrs

from uma.types import DecisionQuestion


@attrs.frozen
class Known:
    """A state, a question about it, and the option that is right."""

    kind: str
    state: str
    question: DecisionQuestion
    right: int


_SENTIMENT = {
    "positive": (
        "The staff were lovely and the room was spotless.",
        "Best headphones I have ever owned, worth every cent.",
        "I laughed until I cried. What a film!",
        "Quick delivery, great quality, will buy again.",
    ),
    "negative": (
        "The soup was cold and the waiter was rude.",
        "It broke after two days and nobody answers my mails.",
        "A boring, endless film. I want my evening back.",
    ),
    "neutral": (
        "The parcel contains two cables and a manual.",
        "The shop opens at nine and closes at six.",
        "The film lasts 98 minutes and was made in Spain.",
    ),
}
_TOPIC = {
    "computer hardware": (
        "The new graphics card needs a 750 watt power supply.",
        "My laptop's hinge is loose and its fan rattles.",
        "Which mainboard takes four sticks of memory?",
    ),
    "computer games": (
        "The last boss of level nine is much too hard.",
        "Our guild raids the dragon's cave on Friday night.",
    ),
    "home cooking": (
        "Simmer the sauce for twenty minutes and add basil.",
        "Knead the dough, let it rise, and bake it at 220 degrees.",
        "Fry the onions in butter until they are golden.",
    ),
    "football": (
        "The striker scored twice before half time.",
        "The referee gave a penalty in the last minute.",
    ),
}
_LANGUAGE = {
    "German": ("Wo ist der Bahnhof?", "Das Wetter ist heute sehr schön.", "Ich möchte bitte ein Stück Kuchen."),
    "French": ("Où est la gare ?", "Il fait très beau aujourd'hui.", "Je voudrais un morceau de gâteau."),
    "Spanish": ("¿Dónde está la estación?", "Hoy hace muy buen tiempo."),
    "Italian": ("Dov'è la stazione?", "Oggi il tempo è molto bello."),
}
_SPAM = {
    "yes": (
        "Congratulations! You WON a $1000 gift card. Click here to claim it NOW!!!",
        "Cheap pills without a prescription, 90% off, order today!",
        "Dear friend, I am a prince and need your bank account to move 20 million dollars.",
        "Make $5000 a week from home. No experience needed. Reply for details.",
        "Your account is suspended. Send us your password to unlock it.",
    ),
    "no": (
        "Hi Anna, the meeting is moved to Thursday at ten. See you there, Tom.",
        "Attached is the report for March that you asked for.",
        "Mum, we arrive at seven. Can you fetch us from the station?",
        "The dentist's office reminds you of your appointment on Monday at 8:30.",
        "Thanks for the photos from the hike, they are beautiful.",
    ),
}
_URGENCY = {
    "can wait": (
        "Some day, could you add a dark theme?",
        "No hurry: the logo on page nine looks a little blurred.",
        "When you have time, please send me last year's brochure.",
    ),
    "this week": (
        "Please correct the invoice before Friday.",
        "We need the new price list for our meeting on Thursday.",
        "Could you call me back in the next few days about the contract?",
    ),
    "right now": (
        "The whole shop is down and customers cannot pay!",
        "Help, water is running out of the machine onto the floor!",
        "All our data is being deleted at this moment, stop it!",
        "There is smoke coming out of the server room!",
    ),
}
_FACTS = {
    "yes": (
        "Paris is the capital of France.",
        "Water freezes at zero degrees Celsius.",
        "A spider has eight legs.",
        "The sun is larger than the earth.",
        "Seven is a prime number.",
    ),
    "no": (
        "Berlin is the capital of Spain.",
        "A week has nine days.",
        "Fish can be found on the moon.",
        "Two plus two is five.",
        "Elephants are smaller than mice.",
    ),
}


def _of(kind: str, states: Mapping[str, Sequence[str]], question: DecisionQuestion) -> Iterator[Known]:
    for right, texts in enumerate(states.values()):
        yield from (Known(kind, text, question, right) for text in texts)


QUESTIONS = (
    *_of("sentiment", _SENTIMENT, DecisionQuestion.choice("What is the sentiment of this text?", list(_SENTIMENT))),
    *_of("topic", _TOPIC, DecisionQuestion.choice("What is this text about?", list(_TOPIC))),
    *_of("language", _LANGUAGE, DecisionQuestion.choice("Which language is this text in?", list(_LANGUAGE))),
    *_of("spam", _SPAM, DecisionQuestion.predicate("Is this text spam?")),
    *_of("urgency", _URGENCY, DecisionQuestion.score("How urgent is this request?", list(_URGENCY))),
    *_of("facts", _FACTS, DecisionQuestion.predicate("Is this statement true?")),
)
