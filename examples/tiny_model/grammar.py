"""The story grammar: from a wish (or none) to a story that honours it.

A story is one plot told by one cast. Everything that must stay the same from the first sentence to the last (hero,
pronoun, place, thing, friend) is drawn once, in the cast; everything else is drawn anew for each sentence, so that two
stories seldom share one.
The same seed always gives the same story.
"""

from __future__ import annotations

import re
import zlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from random import Random
from typing import TypeVar

from . import plots, words
from .plots import PLOTS, Beat, Plot

T = TypeVar("T")

_CHOICE = re.compile(r"\[([^\[\]]*)\]")
_SLOT = re.compile(r"\{(\w+)\}")
_SENTENCE_START = re.compile(r"(^\"?|[.!?] \"?|: \")([a-z])")
_PLACES = {name: (preposition, landscape) for preposition, name, landscape in words.PLACES}
_SEQUELS = ("storm", "contest", "night", "skill", "fear", "lost", "mistake")
_PRONOUNS = {
    "he": ("he", "him", "his", "himself"),
    "she": ("she", "her", "her", "herself"),
    "it": ("it", "it", "its", "itself"),
}


@dataclass(frozen=True)
class Place:
    """Where a story happens: `preposition` "in", `name` "the harbour", and the landscape around it."""

    preposition: str
    name: str
    landscape: str

    def __str__(self) -> str:
        return f"{self.preposition} {self.name}"


@dataclass(frozen=True)
class Wish:
    """What somebody asks a story to contain. None leaves the choice to the grammar."""

    kind: str | None = None
    trait: str | None = None
    name: str | None = None
    place: Place | None = None
    thing: str | None = None
    friend: str | None = None
    plot: str | None = None
    contest: str | None = None
    skill: str | None = None
    fear: str | None = None
    length: str = "medium"


@dataclass
class Cast:
    """Who and what stays the same throughout one story."""

    kind: str
    trait: str
    name: str | None
    pronoun: str
    place: Place
    thing: str
    friend: str
    friend_trait: str
    friend_name: str | None
    friend_pronoun: str
    contest: str
    skill: str
    fear: str
    treat: str
    is_plain: bool = False  # introduced as "a fox", not as "a brave fox"
    lesson: str = ""
    friend_met: bool = False  # in this episode
    friend_known: bool = False  # from an earlier one
    day: str | None = None
    spare: dict[str, list[str]] = field(default_factory=dict)


@dataclass(frozen=True)
class Story:
    """A story and what it is about, so that questions on it have true answers."""

    text: str
    cast: Cast
    plot: Plot
    summary: str


def expand(rng: Random, text: str) -> str:
    """Resolves every `[a|b]`, the innermost first."""
    while match := _CHOICE.search(text):
        text = text[: match.start()] + rng.choice(match.group(1).split("|")) + text[match.end() :]
    return text


def a(phrase: str) -> str:
    """`phrase` with its indefinite article."""
    vowel = phrase[0] in "aeioAEIO" or phrase.startswith(("um", "un", "ug"))
    if phrase.startswith(("uni", "one")):
        vowel = False
    return f"{'an' if vowel or phrase.startswith('honest') else 'a'} {phrase}"


def introduced(cast: Cast) -> str:
    """The hero as a story first names it: "a brave fox"."""
    return a(cast.kind if cast.is_plain else f"{cast.trait} {cast.kind}")


def place_named(name: str) -> Place:
    """A known place with its own landscape, or a plain one for a name never heard of."""
    preposition, landscape = _PLACES.get(name, ("in", "plain"))
    return Place(preposition, name, landscape)


def any_place(rng: Random) -> Place:
    if rng.random() < 0.06:
        invented = invented_name(rng)
        if rng.random() < 0.6:
            invented = f"{rng.choice(words.NEW_PLACE_KINDS)} {invented}"
        return Place("on" if "planet" in invented else "in", invented, "plain")
    return Place(*rng.choice(words.PLACES))


def any_kind(rng: Random) -> str:
    """Mostly a kind that everybody knows; now and then one that nobody does, so that unknown words are kept too."""
    if rng.random() < 0.04:
        return invented_name(rng).lower()
    groups = (words.ANIMALS, words.ANIMALS, words.ANIMALS, words.CREATURES, words.PEOPLE, words.WOMEN + words.MEN)
    return rng.choice(rng.choice(groups))


def any_name(rng: Random, kind: str) -> str:
    """A name that fits the kind; now and then one never heard before, so that names are copied and not recited."""
    if rng.random() < 0.3:
        return invented_name(rng)
    if kind in words.WOMEN:
        return rng.choice(words.FEMALE_NAMES)
    if kind in words.MEN:
        return rng.choice(words.MALE_NAMES)
    return rng.choice(rng.choice((words.FEMALE_NAMES, words.MALE_NAMES)))


def invented_name(rng: Random) -> str:
    name = "".join(rng.choice(words.SYLLABLES) for _ in range(rng.choice((2, 2, 3))))
    return (
        name + rng.choice(("", "", "", "n", "x", "s", "r", "ck", "th", "y", "t", "et", "us", "f", "le", "d"))
    ).capitalize()


def pronoun_for(rng: Random, kind: str, name: str | None) -> str:
    if kind in words.WOMEN or name in words.FEMALE_NAMES:
        return "she"
    if kind in words.MEN or name in words.MALE_NAMES:
        return "he"
    if name is None and (kind in words.ANIMALS or kind in words.CREATURES):
        return rng.choice(("he", "she", "it"))
    return rng.choice(("he", "she"))


def cast_for(rng: Random, wish: Wish) -> Cast:
    """Draws whatever the wish leaves open."""
    kind = wish.kind or any_kind(rng)
    name = wish.name or (any_name(rng, kind) if rng.random() < 0.7 else None)
    pronoun = pronoun_for(rng, kind, name)
    place = wish.place or any_place(rng)
    friend = wish.friend or (_of_habit(words.ANIMALS, place.name) if rng.random() < 0.35 else any_kind(rng))
    while friend == kind:
        friend = any_kind(rng)
    friend_name = any_name(rng, friend) if rng.random() < 0.3 else None
    if friend_name == name:
        friend_name = None
    return Cast(
        kind=kind,
        trait=wish.trait or rng.choice(words.TRAITS),
        name=name,
        pronoun=pronoun,
        place=place,
        thing=wish.thing or rng.choice(words.THINGS),
        friend=friend,
        friend_trait=rng.choice(words.FRIEND_TRAITS),
        friend_name=friend_name,
        friend_pronoun=_friend_pronoun(rng, friend, friend_name, pronoun),
        contest=wish.contest or rng.choice(plots.CONTESTS),
        skill=wish.skill or rng.choice(plots.SKILLS),
        fear=wish.fear or rng.choice(plots.FEARS),
        treat=rng.choice(plots.TREATS),
        is_plain=wish.trait is None and rng.random() < 0.35,
    )


def _friend_pronoun(rng: Random, kind: str, name: str | None, hero: str) -> str:
    """The other pronoun where it is free to choose: then "he" and "she" are never mixed up."""
    fixed = kind in words.WOMEN + words.MEN or name in words.FEMALE_NAMES or name in words.MALE_NAMES
    if fixed or hero == "it":
        own = pronoun_for(rng, kind, name)
        return "he" if own == "it" else own
    return "she" if hero == "he" else "he"


def tell(rng: Random, wish: Wish | None = None, *, loosely: bool = False) -> Story:
    """One story. Every wish can be told. `loosely` begins it as somebody might who wants to see it continued."""
    wish = wish or Wish()
    cast = cast_for(rng, wish)
    plot = _plot_for(rng, wish, cast.kind)
    cast.lesson = rng.choice(plot.lessons)
    opening = plots.OPENINGS_NAMED if cast.name else plots.OPENINGS_UNNAMED
    if loosely:
        opening = plots.LOOSE_OPENINGS
    sentences = [_say(rng, cast, opening)]
    scenes = {"short": 0, "medium": rng.choice((0, 0, 1)), "long": rng.choice((1, 2))}[wish.length]
    for scene in rng.sample(plots.SCENES, scenes):
        sentences.append(_say(rng, cast, (scene,)))
    sentences += episode(rng, cast, plot, wish.length)
    if wish.length == "long" and rng.random() < 0.7:
        sentences += _second_episode(rng, cast, plot)
    if wish.length != "short" or rng.random() < 0.5:
        sentences.append(_say(rng, cast, plots.ENDINGS))
    return Story(" ".join(sentences), cast, plot, _fill(rng, cast, plot.summary))


def episode(rng: Random, cast: Cast, plot: Plot, length: str) -> list[str]:
    """The beats of a plot. What may be left out is left out always, sometimes or never, by the length asked for."""
    keep = {"short": 0.0, "medium": 0.5, "long": 0.9}[length]
    told = []
    for beat in plot.beats:
        optional = beat[0].startswith("?")
        if not optional or rng.random() < keep:
            told.append(_say(rng, cast, beat))
    return told


def sequel(rng: Random, story: Story) -> str:
    """What happened next to the same hero: another plot, the friend known by now."""
    return " ".join(_second_episode(rng, replace(story.cast, spare={}), story.plot))


def _second_episode(rng: Random, cast: Cast, told: Plot) -> list[str]:
    plot = rng.choice([p for p in PLOTS if p.key in _SEQUELS and p.key != told.key])
    cast.friend_known, cast.friend_met = True, False
    cast.day = rng.choice(("the next morning", "the next day", "a week later", "a few days later", "some time later"))
    return episode(rng, cast, plot, "medium")


def _plot_for(rng: Random, wish: Wish, kind: str) -> Plot:
    if wish.plot is not None:
        return next(plot for plot in PLOTS if plot.key == wish.plot)
    fitting = [plot for plot in PLOTS if plot.needs_thing or wish.thing is None]
    return _of_habit(fitting, kind) if rng.random() < 0.35 else rng.choice(fitting)


def _of_habit(choices: Sequence[T], key: str) -> T:
    """What goes with a word more often than others do, so that the likeliest story is not the same for every hero."""
    return choices[zlib.crc32(key.encode()) % len(choices)]


def _say(rng: Random, cast: Cast, beat: Beat) -> str:
    """One wording of a beat, filled in, its sentences beginning with capitals."""
    text = _fill(rng, cast, rng.choice(beat).removeprefix("?"))
    return _SENTENCE_START.sub(lambda match: match.group(1) + match.group(2).upper(), text)


def _fill(rng: Random, cast: Cast, text: str) -> str:
    return expand(rng, _SLOT.sub(lambda match: expand(rng, _slot(rng, cast, match.group(1))), expand(rng, text)))


def _slot(rng: Random, cast: Cast, name: str) -> str:
    value = _SLOTS[name.lower()](rng, cast)
    return value[0].upper() + value[1:] if name[0].isupper() else value


def _hero(rng: Random, cast: Cast) -> str:
    if cast.name and rng.random() < 0.75:
        return cast.name
    return f"the {cast.kind}"


def _a_friend(rng: Random, cast: Cast) -> str:
    if cast.friend_met:
        return _friend(rng, cast)
    cast.friend_met = True
    if cast.friend_known:
        return f"{_PRONOUNS[cast.pronoun][2]} friend {cast.friend_name or 'the ' + cast.friend}"
    described = a(f"{cast.friend_trait} {cast.friend}")
    return f"{described} named {cast.friend_name}" if cast.friend_name else described


def _friend(rng: Random, cast: Cast) -> str:
    if cast.friend_name and rng.random() < 0.7:
        return cast.friend_name
    return f"the {cast.friend}"


def _without_repeats(rng: Random, cast: Cast, key: str, values: tuple[str, ...]) -> str:
    """Draws as from a pack of cards, so that one story does not look twice behind the same barrel."""
    pack = cast.spare.get(key)
    if not pack:
        pack = cast.spare[key] = rng.sample(values, len(values))
    return pack.pop()


def _landscape(part: int, key: str) -> Callable[[Random, Cast], str]:
    return lambda rng, cast: _without_repeats(rng, cast, key, words.LANDSCAPES[cast.place.landscape][part])


def _pronoun(form: int) -> Callable[[Random, Cast], str]:
    return lambda rng, cast: _PRONOUNS[cast.pronoun][form]


def _friend_form(form: int) -> Callable[[Random, Cast], str]:
    return lambda rng, cast: _PRONOUNS[cast.friend_pronoun][form]


def _possessive(owner: str) -> str:
    return owner + ("'" if owner.endswith("s") else "'s")


_SLOTS: dict[str, Callable[[Random, Cast], str]] = {
    "hero": _hero,
    "name": lambda rng, cast: cast.name or f"the {cast.kind}",
    "kind": lambda rng, cast: cast.kind,
    "trait": lambda rng, cast: cast.trait,
    "a_hero": lambda rng, cast: introduced(cast),
    "a_named": lambda rng, cast: (
        introduced(cast) + (f" {rng.choice(('named', 'called'))} {cast.name}" if cast.name else "")
    ),
    "named_kind": lambda rng, cast: f"{cast.name} the {cast.kind}" if cast.name else f"the {cast.kind}",
    "named_hero": lambda rng, cast: f"{cast.name}, {introduced(cast)}" if cast.name else introduced(cast),
    "he": _pronoun(0),
    "him": _pronoun(1),
    "his": _pronoun(2),
    "himself": _pronoun(3),
    "his_name": lambda rng, cast: _possessive(cast.name or f"the {cast.kind}"),
    "hero_brave": lambda rng, cast: f"Brave {cast.name}" if cast.name else f"the brave {cast.kind}",
    "in": lambda rng, cast: str(cast.place),
    "place": lambda rng, cast: cast.place.name,
    "detail": _landscape(0, "detail"),
    "detail2": _landscape(0, "detail"),
    "spot": _landscape(1, "spot"),
    "spot2": _landscape(1, "spot"),
    "spot3": _landscape(1, "spot"),
    "sound": _landscape(2, "sound"),
    "thing": lambda rng, cast: cast.thing,
    "a_thing": lambda rng, cast: a(cast.thing),
    "thing_of_friend": lambda rng, cast: rng.choice(
        ("the window", "the best cup", "the garden gate", "the new lamp", "the big jug")
    ),
    "a_friend": _a_friend,
    "friend": _friend,
    "friend_possessive": lambda rng, cast: _possessive(cast.friend_name or f"the {cast.friend}"),
    "friend_call": lambda rng, cast: cast.friend_name or f"little {cast.friend}",
    "fhe": _friend_form(0),
    "fhim": _friend_form(1),
    "fhis": _friend_form(2),
    "fhimself": _friend_form(3),
    "contest": lambda rng, cast: cast.contest,
    "skill": lambda rng, cast: cast.skill,
    "fear": lambda rng, cast: cast.fear,
    "treat": lambda rng, cast: cast.treat,
    "lesson": lambda rng, cast: cast.lesson,
    "day": lambda rng, cast: cast.day or _without_repeats(rng, cast, "day", plots.DAYS),
    "hummed": lambda rng, cast: rng.choice(
        ("hummed a tune", "smiled", "felt glad", "wondered what the day would bring")
    ),
    "everybody": lambda rng, cast: rng.choice(("everybody", "everyone", "all the neighbours")),
    "everybody_low": lambda rng, cast: rng.choice(("everybody", "everyone", "all the others")),
}
