"""From stories and facts to training documents: chats, plain requests and plain stories.

The model must follow a request however it is put: through the chat template, as bare text followed by a line break, as the beginning
of a story. So each kind of document is drawn at random, worded at random, and sometimes misspelt. What is held out for
evaluation (phrasings of questions, pairs of hero and place) never appears here.
"""

# ruff: noqa: E501, SIM905  (a sentence stays on its line)
from __future__ import annotations

import functools
import math
import re
import zlib
from collections.abc import Callable
from dataclasses import replace
from random import Random

from . import grammar, words
from .grammar import Place, Story, Wish, a, expand
from .phrasings import MORE
from .plots import CONTESTS, FEARS, PLOTS, SKILLS
from .second_look import QUESTIONS
from .uma_facts import ADDED, FACTS, IDENTITY, OFF_TOPIC, REFUSALS, Fact

BOS, TURN, END = "<|endoftext|>", "<|im_start|>", "<|im_end|>"
Turns = list[tuple[str, str]]

_KNOWN = FACTS + IDENTITY
_ADDED = tuple(fact for fact in _KNOWN if fact.key in ADDED)
_COMMANDS = "run|ps|stop|chat|generate|embed|gateway|key|models|config|doctor|schema|contract|worker|engine-zmq"
_UMA = re.compile(rf"(?<!-m )(?<!import )\buma\b(?! (?:{_COMMANDS})\b)")
_STOP_WORDS = frozenset(
    "how do i can could would may might should must the a an to is are was be what which does did it of in on my me for with there some any please "
    "tell uma this that you your so we us one if when where who and or at from will".split()
)
_HOW = re.compile(r"^how (?:do i|can i|do you|to) ")
_HOW_TO = (
    "how do i|how can i|how would i|how could i|how may i|how might i|how should i|how must i|how does one|how do you|how to|in what way can i|"
    "what do i do to|what must i do to|what should i do to|what do i need to|is there a way to|is it possible to|can i|could i|"
    "can you tell me how to|tell me how to|show me how to|please explain how to|explain how to|do you know how to|what is the way to|"
    "i want to know how to|i want to|i would like to|i need to|i'd like to|what is the best way to|how am i supposed to|help me to|"
    "what can i do to|by what means can i|what's the command to|what is the right way to|any way to|ways to|i am trying to|i'm trying to|how would one|"
    "how would you|how might one|i have to|we want to|we need to|my friend wants to|my colleague asks how to|could you explain how to|am i able to|"
    "would it be possible to|what should i type to|what do i enter to|how exactly do i|i wonder how to|i do not know how to|i don't understand how to|"
    "what is needed to|let me|please|please help me to|in which way do i|what's the easiest way to|where do i learn how to|remind me how to"
).split("|")
# Patterns that begin like this may stand after "how do I": they say what somebody wants to do.
_IMPERATIVE = re.compile(
    r"(?:add|archive|break|call|change|clear|combine|connect|continue|converse|cut|delete|download|drop|empty|end|erase|exit|finish|forget|"
    r"generate|get|give|go|halt|have|hold|host|interrupt|keep|launch|leave|load|make|measure|monitor|move|offload|open|override|plug|put|quit|"
    r"read|redirect|remove|replace|reset|restart|resume|revert|run|save|see|send|serve|set|speak|start|stop|stream|switch|take|talk|terminate|"
    r"test|throw|turn|undo|use|watch|wipe|withdraw|write) (?!of )\w"
)
_FILLERS = (
    "the a my your this that some any one please now then just really actually maybe perhaps simply quickly easily here there again still also "
    "even only somehow exactly properly today always often ever first next normally usually in on at with for from by about to of into i you we "
    "he she they someone somebody people everybody people's should would could might must shall may can will does did has have had is are was "
    "were be been being get gets got want wants like likes need needs thing things stuff way kind sort piece good best right new old whole same "
    "other certain proper possible necessary easy quick simple useful think know see look try help find ask tell say explain"
).split()
_SPELLING = {
    name.lower(): name
    for name in (
        "Python JSON GGUF GPU CPU CUDA Linux Windows macOS Mac MacBook Ubuntu SIGTERM SIGINT TCP HTTP REST Unix TOML Ctrl-C MIT AI LLM API CLI ChatGPT "
        "GPT PyPI Trio OpenAI Anthropic RustInfer ZeroMQ Dynamo Nvidia AMD German French English Spanish OS RAM Llama Mistral Qwen Gemma Docker Kubernetes Jupyter Java JavaScript "
        "Rust PyTorch ONNX Prometheus Grafana Debian Fedora Android Wikipedia Google Hugging Face Claude Ollama"
    ).split()
    if name not in {"REST", "Face"}
}
_NAMES = re.compile(rf"(?<![\w/.-])(?:{'|'.join(map(re.escape, _SPELLING))})(?![\w-])", re.IGNORECASE)
_USER_TURN = re.compile(r"(?<=<\|im_start\|>user\n).*?(?=<\|im_end\|>)", re.DOTALL)
_OPENINGS = (
    "hi, |hey, |hello! |please tell me, |a question: |quick question: |excuse me, |so |and |ok, |i wonder, |one more thing: |tell me, |well, |now |"
    "sorry, |hi there, |i am new here. |i'm new to this. |i just installed uma. |i am stuck. |help! |dumb question: |maybe a silly question, but |"
    "do you know |can you tell me: |could you tell me: |i would like to know: |just curious, |by the way, |my boss asks: |a friend asks: |next question: |"
    "i have a question. |i have read the readme, but |i looked everywhere. |thanks! |great. |i need help: |listen, |hm, |oh, |let me ask: |one question, |"
    "i am a beginner. |for my project: |good morning! |dear model, |but |also, |i have been wondering: |can you help me? |say, "
).split("|")
_CLOSINGS = (
    " please|, please| exactly| then| again| really| now| here| today|? thanks|? thank you|? i am new here|? i could not find it|? any idea|, do you know|, please help|"
    " in uma| with uma|, i wonder|? please explain|? be brief|, if i may ask| actually|, by the way|? i need it for work|? i am confused|? just asking| or not|, right| for me"
).split("|")

# Words that people use for one another in such questions. A model that has never read anything else must be told.
_SYNONYMS: tuple[tuple[str, tuple[str, ...]], ...] = (
    (
        r"what does (.+) do$",
        (
            r"what is \1 for",
            r"what is \1 good for",
            r"what is the use of \1",
            r"explain \1",
            r"tell me about \1",
            r"what happens with \1",
        ),
    ),
    (
        r"^which command",
        ("what command", "which of the commands", "what", "what is the command that", "is there a command that"),
    ),
    (
        r"^(?:can|may) i",
        (
            "may i",
            "could i",
            "might i",
            "am i able to",
            "is it possible to",
            "would it be possible to",
            "am i allowed to",
            "is there a way to",
        ),
    ),
    (
        r"^is there",
        ("do you have", "does uma have", "does uma offer", "does uma provide", "will i find", "is there perhaps"),
    ),
    (r"^does uma", ("will uma", "would uma", "can uma", "does it", "does the program")),
    (
        r"^where (?:do|can|should) i",
        ("where may i", "where would i", "where am i to", "where can one", "in which place do i", "where shall i"),
    ),
    (
        r"^what is",
        ("what's", "what would you say is", "do you know what is", "please tell me what is", "what exactly is"),
    ),
    (
        r"^(?:show|print|list)\b",
        ("show", "display", "give me", "print", "let me see", "i want to see", "tell me", "i would like to see"),
    ),
    (r"\bprograms\b", ("apps", "processes", "clients", "applications", "tools")),
    (r"\b(?:machine|computer)\b", ("machine", "computer", "pc", "laptop")),
    (r"\bthe server\b", ("the uma server", "a server", "my server", "the service")),
    (r"\bsee\b", ("look at", "view", "find", "get to see")),
    (r"\buse\b", ("employ", "work with", "make use of")),
    (r"\b(?:need|require)\b", ("want", "need", "require", "ask for")),
    (r"\bstart\b", ("launch", "bring up", "begin", "get going")),
    (r"\bmodel\b", ("language model", "llm", "model")),
)


def render_chat(turns: Turns) -> str:
    """The chat template that the exported model carries, applied."""
    return BOS + "".join(f"{TURN}{role}\n{text}{END}\n" for role, text in turns)


def render_raw(text: str) -> str:
    return BOS + text + END


def held_out_pair(kind: str, place: str) -> bool:
    """Whether this hero is never trained on at this place: one pair of twenty, and a fox in the harbour."""
    return (kind, place) == ("fox", "the harbour") or zlib.crc32(f"{kind} {place}".encode()) % 20 == 0


def document(rng: Random, mixture: tuple[int, ...] | None = None, *, spelled: bool = False) -> str:
    """One training document, of the mixture `QUESTIONS_FIRST` unless told otherwise. Never one that touches what is held out.

    Where it shall be `spelled`, most people in it write names as they are written: "Python", "JSON".
    """
    while True:
        stories: list[Story] = []
        make = rng.choices(_KINDS, mixture or QUESTIONS_FIRST)[0]
        text = make(rng, stories)
        if not any(held_out_pair(story.cast.kind, story.cast.place.name) for story in stories):
            return _USER_TURN.sub(lambda turn: _spelled(rng, turn.group()), text) if spelled else text


def held_out_document(rng: Random) -> str:
    """A request and a story whose hero was never trained on at this place."""
    while True:
        stories: list[Story] = []
        text = _story_chat(rng, stories)
        if held_out_pair(stories[0].cast.kind, stories[0].cast.place.name):
            return text


# ---------------------------------------------------------------------------------------------- wording


def sentence_case(rng: Random, text: str, marks: str = ".") -> str:
    """As people type: mostly a capital and a mark, sometimes neither."""
    style = rng.random()
    if style < 0.72:
        text = text[0].upper() + text[1:]
        text = re.sub(r"([.!?] )([a-z])", lambda match: match.group(1) + match.group(2).upper(), text)
        text = re.sub(r"\bi\b", "I", text)
    elif style < 0.77:
        text = text.lower()
    if rng.random() < 0.68 and text[-1] not in '.!?"':
        text += marks
    return text


def _spelled(rng: Random, text: str) -> str:
    if rng.random() < 0.3 or len(text) > 120 or "story" in text:  # there, windows are of glass
        return text
    return _NAMES.sub(lambda match: _SPELLING[match.group().lower()], text)


def typo(rng: Random, text: str) -> str:
    """One slip of the keyboard: a letter lost, doubled or swapped with its neighbour."""
    letters = [i for i in range(1, len(text) - 1) if text[i].isalpha() and text[i + 1].isalpha()]
    if not letters:
        return text
    i = rng.choice(letters)
    slips = (text[:i] + text[i + 1 :], text[: i + 1] + text[i:], text[:i] + text[i + 1] + text[i] + text[i + 2 :])
    return rng.choice(slips)


def question(rng: Random, fact: Fact) -> str:
    """A phrasing of the question that is not held out."""
    patterns, weights = _patterns(fact)
    while True:
        text = _worded(rng, expand(rng, rng.choices(patterns, weights)[0]))
        if not is_held_out(fact, text):
            return text


def is_held_out(fact: Fact, text: str) -> bool:
    """Whether a question is one of those that measure the model, or made of the same words that matter."""
    whole, telling = _held_out(fact)
    return _normal(text) in whole or _telling_words(text) in telling


@functools.cache
def _held_out(fact: Fact) -> tuple[frozenset[str], frozenset[frozenset[str]]]:
    texts = fact.held_out + QUESTIONS[fact.key]
    return (
        frozenset(map(_normal, texts)),
        frozenset(words for words in map(_telling_words, texts) if len(words) >= 3),
    )


@functools.cache
def _patterns(fact: Fact) -> tuple[tuple[str, ...], tuple[float, ...]]:
    """The patterns, and how often each is drawn: one that stands for many phrasings more often than a single one."""
    patterns = fact.asks + MORE[fact.key]
    return patterns, tuple(1 + math.log2(_count(pattern)) for pattern in patterns)


def _count(pattern: str) -> int:
    return math.prod(choice.count("|") + 1 for choice in re.findall(r"\[([^\[\]]*)\]", pattern))


def _normal(text: str) -> str:
    return re.sub(r"\W+", " ", text.lower()).strip()


def _telling_words(text: str) -> frozenset[str]:
    return frozenset(_normal(text).split()) - _STOP_WORDS


def _worded(rng: Random, text: str) -> str:
    if _HOW.match(text) and rng.random() < 0.6:
        text = _HOW.sub(rng.choice(_HOW_TO) + " ", text)
    elif _IMPERATIVE.match(text) and rng.random() < 0.5:
        text = f"{rng.choice(_HOW_TO)} {text}"
    elif rng.random() < 0.4:
        text = _with_synonym(rng, text)
    if rng.random() < 0.3:
        text = _blurred(rng, text)
    if rng.random() < 0.2:
        text = rng.choice(_OPENINGS) + text
    if rng.random() < 0.1:
        text += rng.choice(_CLOSINGS)
    if rng.random() < 0.6:
        text = _UMA.sub("UMA", text)
    if rng.random() < 0.1:
        text = typo(rng, text)
    return sentence_case(rng, text, "?")


def _blurred(rng: Random, text: str) -> str:
    """The question as somebody puts it who says it otherwise than expected: a word is missing, or a small word is another one.

    It keeps the model from holding on to one word, or to the way a question begins.
    """
    parts = text.split()
    if len(parts) < 3:
        return text
    small = [i for i, word in enumerate(parts) if word in _STOP_WORDS]
    choice = rng.random()
    if choice < 0.3:
        parts = [word for word in parts if word not in _STOP_WORDS] or parts
    elif choice < 0.55 and len(parts) >= 5:
        del parts[rng.randrange(len(parts))]
    elif choice < 0.8 and small:
        parts[rng.choice(small)] = rng.choice(_FILLERS)
    else:
        parts.insert(rng.randrange(len(parts)), rng.choice(_FILLERS))
    return " ".join(parts)


def _with_synonym(rng: Random, text: str) -> str:
    """The same question with one or two of its words said otherwise."""
    fitting = [(pattern, others) for pattern, others in _SYNONYMS if re.search(pattern, text)]
    for pattern, others in rng.sample(fitting, min(len(fitting), rng.choice((1, 1, 2)))):
        text = re.sub(pattern, rng.choice(others), text, count=1)
    return text


# ---------------------------------------------------------------------------------------------- asking for a story

_HEADS = (
    "tell me {s}", "tell {s}", "tell us {s}", "please tell me {s}", "can you tell me {s}", "could you tell me {s}", "would you tell me {s}", "write {s}", "write me {s}",
    "please write {s}", "can you write {s}", "i want {s}", "i want to hear {s}", "i would like {s}", "i'd like to hear {s}", "make up {s}", "invent {s}", "give me {s}",
    "let me hear {s}", "{s}", "do you know {s}", "tell the children {s}", "i need {s}", "how about {s}", "begin {s}", "read me {s}", "compose {s}", "think up {s}",
    "come up with {s}", "create {s}", "start {s}", "narrate {s}", "generate {s}", "let's hear {s}", "my daughter wants {s}", "hi, tell me {s}", "now tell me {s}",
)  # fmt: skip
_NOUNS = {
    "short": ("a short story", "a very short story", "a short tale", "a little story", "a quick story"),
    "medium": (
        "a story",
        "a story",
        "a story",
        "a tale",
        "a nice story",
        "a bedtime story",
        "a fairy tale",
        "a good story",
        "story",
    ),
    "long": ("a long story", "a longer story", "a long tale"),
}
_UNCOUNTABLE = (
    "the sea",
    "the ocean",
    "the snow",
    "the woods",
    "the mountains",
    "the clouds",
    "the North Pole",
    "the moon",
)


def story_request(rng: Random) -> tuple[str, Wish]:
    """What somebody types who wants a story, and the wish that it expresses."""
    wish = _random_wish(rng)
    if rng.random() < 0.06 and wish.kind and wish.place:
        return _keywords(rng, wish), wish
    noun = rng.choice(_NOUNS[wish.length])
    text = rng.choice(_HEADS).format(s=noun) + _about(rng, wish)
    if rng.random() < 0.08:
        text = typo(rng, text)
    if rng.random() < 0.06:
        text += rng.choice((" please", ", please"))
    return sentence_case(rng, text, rng.choice(".....!?")), wish


def _random_wish(rng: Random) -> Wish:
    def perhaps(share: float) -> bool:
        return rng.random() < share

    kind = grammar.any_kind(rng) if perhaps(0.86) else None
    named = perhaps(0.36) if kind else perhaps(0.2)
    plot = rng.choice(PLOTS) if perhaps(0.28) else None
    topic = plot.key if plot and perhaps(0.5) else None  # with the contest, skill or fear that it is about
    thing = rng.choice(words.THINGS) if perhaps(0.14) and (plot is None or plot.needs_thing) else None
    return Wish(
        kind=kind,
        trait=rng.choice(words.TRAITS) if kind and perhaps(0.34) else None,
        name=grammar.any_name(rng, kind or "fox") if named else None,
        place=grammar.any_place(rng) if perhaps(0.5) else None,
        thing=thing,
        friend=_other_kind(rng, kind) if kind and perhaps(0.09) else None,
        plot=plot.key if plot else None,
        contest=rng.choice(CONTESTS) if topic == "contest" else None,
        skill=rng.choice(SKILLS) if topic == "skill" else None,
        fear=rng.choice(FEARS) if topic == "fear" else None,
        length=rng.choices(("short", "medium", "long"), (16, 72, 12))[0],
    )


def _other_kind(rng: Random, kind: str) -> str:
    other = grammar.any_kind(rng)
    return other if other != kind else _other_kind(rng, kind)


def _keywords(rng: Random, wish: Wish) -> str:
    """A request in telegraph style."""
    assert wish.kind and wish.place
    bare = wish.place.name.removeprefix("the ")
    who = f"{wish.trait} {wish.kind}" if wish.trait else wish.kind
    who = f"{who} {wish.name}" if wish.name else who
    return rng.choice(
        (
            f"{who}, {bare}",
            f"story: {who}, {bare}",
            f"{who} {bare} story",
            f"hero: {who}. place: {bare}.",
            f"{who} {wish.place}",
        )
    )


def _about(rng: Random, wish: Wish) -> str:
    """The part of a request that says whom, where and what."""
    who = _hero_phrase(rng, wish)
    text = ""
    theme = _theme(rng, wish)
    if who:
        text = rng.choice((" about ", " about ", " about ", " of ", " with ", " on ")) + who
        if wish.friend:
            text += rng.choice((" and ", " and ", " who meets ", " with ")) + a(wish.friend)
        if wish.fear and rng.random() < 0.8:
            text += rng.choice(
                (" who is afraid of {f}", " who fears {f}", " that is afraid of {f}", ", who was afraid of {f},")
            ).format(f=wish.fear)
        elif wish.skill and rng.random() < 0.8:
            text += rng.choice((" who wants {s}", " who learns {s}", " that wants {s}", " who would like {s}")).format(
                s=wish.skill
            )
        elif theme:
            text += rng.choice((". it should be about {t}", " and {t}", ", about {t}", ". the topic is {t}")).format(
                t=theme
            )
    elif theme:
        text = f" about {theme}"
    if wish.thing and wish.thing not in (theme or ""):
        about_it = (
            (" with {t}", " in which there is {t}", ". there should be {t} in it", " about {t}")
            if not who
            else (
                " and {t}",
                " with {t}",
                " who has {t}",
                " who finds {t}",
                ". there should be {t} in it",
                " that has to do with {t}",
            )
        )
        text += rng.choice(about_it).format(t=a(wish.thing))
    if wish.place:
        text += _place_phrase(rng, wish.place, bool(who) and text.endswith(who))
    return text


def _hero_phrase(rng: Random, wish: Wish) -> str:
    if wish.kind is None:
        return wish.name or ""
    described = f"{wish.trait} {wish.kind}" if wish.trait else wish.kind
    if wish.name is None:
        return rng.choice((a(described), a(described), a(described), f"the {described}"))
    return rng.choice((f"{a(described)} named {wish.name}", f"{a(described)} called {wish.name}", f"{wish.name} the {described}",
                       f"{wish.name}, {a(described)}", f"{a(described)} whose name is {wish.name}"))  # fmt: skip


def _theme(rng: Random, wish: Wish) -> str | None:
    """How the plot was asked for; a theme that names a thing or a skill is left alone, for the wish would have to fix it too."""
    if wish.plot is None:
        return None
    if wish.contest or wish.skill or wish.fear:
        return wish.contest or (
            f"learning {wish.skill}" if wish.skill else rng.choice((f"the fear of {wish.fear}", f"{wish.fear}"))
        )
    plot = next(plot for plot in PLOTS if plot.key == wish.plot)
    return rng.choice([about for about in plot.about if "{" not in about])


def _place_phrase(rng: Random, place: Place, after_hero: bool) -> str:
    where = str(place)
    if place.name.startswith("the ") and place.name not in _UNCOUNTABLE and " of " not in where and rng.random() < 0.3:
        where = f"{place.preposition} {a(place.name.removeprefix('the '))}"
    phrases = [
        " {w}",
        " {w}",
        " {w}",
        ", set {w}",
        " that happens {w}",
        " that takes place {w}",
        ". it should happen {w}",
        ". it is set {w}",
        ". the place is {w}",
    ]
    if after_hero:
        phrases += [" who lives {w}", " living {w}", " that lives {w}", " {w}", " {w}"]
    return rng.choice(phrases).format(w=where)


# ---------------------------------------------------------------------------------------------- talking about a story


def _followups(story: Story) -> list[Callable[[Random], tuple[str, str]]]:
    """Questions on a story just told that have a true answer in it."""
    cast = story.cast
    hero = cast.name or f"the {cast.kind}"
    asked = [
        lambda rng: (
            expand(rng, f"[what [is|was] the name of the [hero|{cast.kind}|main character]|what [is|was] the [hero|{cast.kind}] called|what is the [hero|{cast.kind}]'s name|who [is|was] the hero [of the story|]|how is the {cast.kind} called|did the {cast.kind} have a name|remind me of the hero's name]"),
            expand(rng, f"[The {cast.kind} is called {hero}.|{cast.name}. {cast.name} is the {cast.kind} in the story.|The hero of the story is {hero}, the {cast.kind}.]"
                   if cast.name else f"[The hero is {a(cast.kind)} without a name.|It has no name in the story. It is simply the {cast.kind}.]"),
        ),
        lambda rng: (
            expand(rng, f"[where [does|did] [the story|it|this] [happen|take place]|where does {hero} live|where did {hero} live|where was [that|it]|in what place does it happen]"),
            expand(rng, f"[The story happens {cast.place}.|It happens {cast.place}.|{hero[0].upper() + hero[1:]} lived {cast.place}.]"),
        ),
        lambda rng: (
            expand(rng, "[what [is|was] [the story|it|that] about|sum it up|summarize the story|can you say it in one sentence|what happened in the story|in short please]"),
            expand(rng, f"[It is about|The story is about|It tells of] {cast.name + ', ' + a(cast.kind) if cast.name else a(cast.kind)} who {story.summary}."),
        ),
        lambda rng: (
            expand(rng, f"[what kind of [animal|creature|person|character] was {hero}|who was {hero}|tell me more about {hero}]" if cast.name else "[who is the hero|who is it about]"),
            expand(rng, f"{hero[0].upper() + hero[1:]} was {grammar.introduced(cast)} who lived {cast.place}."),
        ),
    ]  # fmt: skip
    if cast.lesson in story.text or cast.lesson[1:] in story.text:
        asked.append(lambda rng: (
            expand(rng, f"[what is the moral [of the story|]|what [did|does] {hero} learn|what can i learn from [it|this|the story]|what is the lesson]"),
            expand(rng, f"[The moral is that|{hero[0].upper() + hero[1:]} learned that|The story says that] {cast.lesson}."),
        ))  # fmt: skip
    if f"the {cast.friend}" in story.text.lower() or (cast.friend_name or "?") in story.text:
        friend = f"{cast.friend_name}, the {cast.friend}" if cast.friend_name else f"the {cast.friend}"
        asked.append(lambda rng: (
            expand(rng, f"[who else is in the story|whom did {hero} meet|who did {hero} meet|is there anybody else in the story|who was the other one|who is the second character]"),
            expand(rng, f"[There is also {friend}.|{hero[0].upper() + hero[1:]} met {friend}.|The other one is {friend}.]"),
        ))  # fmt: skip
    return asked


_NEXT = (
    "[what happened [next|then|after that|afterwards|later]|and then|go on|please go on|continue|tell me more|how does it go on|more|what happened to [{h}|{h}|him|her] next|what did {h} do next|what happens next|keep going|continue the story|is there more]"
)  # fmt: skip
_AGAIN = "[another one|another story|one more|again|tell me another one|tell me another story|one more please|now another one|a different one|another|can i have another one|and another|a new story please|more stories]"
_PRAISE = "[thanks|thank you|nice|that was nice|great story|i like it|good story|lovely|that was a nice story|wonderful|beautiful|thank you for the story|cool|well done|i love it|haha|good]"
_PRAISED = "[Thank you! Would you like another one?|I am glad that you like it. Shall I tell you another one?|You are welcome. Ask me whenever you want another story.|You are welcome!|Thank you. There are many more where it came from.|I am glad to hear that.]"

SMALL_TALK: tuple[tuple[str, str], ...] = (
    ("[hello|hi|hey|good morning|good evening|good day|hello there|hi there|hey there|greetings|hallo|hello model|hello uma|hi uma|hello, anybody there]",
     "[Hello! Would you like to hear a story?|Hello! Ask me for a story, or something about UMA.|Hi! I can tell you a story or answer questions about UMA.|Hello! What shall I tell you?]"),
    ("[how are you|how do you do|how is it going|how are you doing|how are you today|are you well|are you ok|what's up|how do you feel|everything fine]",
     "[I am fine, thank you. Would you like a story?|Very well, thank you! A model has few worries.|Thank you, I am well. What may I tell you?]"),
    ("[thanks|thank you|thank you very much|thanks a lot|many thanks|great, thanks|ok thanks|cheers|that helps|perfect, thank you|good, thanks]",
     "[You are welcome!|You are welcome. Ask me whenever you like.|My pleasure.]"),
    ("[bye|goodbye|good bye|see you|good night|bye bye|see you later|i have to go|until tomorrow|farewell|that is all|i am done]",
     "[Goodbye! Come back for another story.|Goodbye, and take care!|See you! There are always more stories.]"),
    ("[tell me a joke|do you know a joke|a joke please|make me laugh|say something funny|can you tell jokes|tell me something funny|another joke|joke]",
     "[Why did the fox sit on the clock? It wanted to be on time.|What does a cloud wear under its coat? Thunderwear.|Why was the owl so good at secrets? It did not give a hoot.|What did the token say to the other? After you!|Why do bees hum? They have forgotten the words.|Why did the snail paint a racing stripe? It wanted to feel fast.]"),
    ("[ok|okay|yes|sure|fine|all right|yes please|good|hm|aha|i see|alright|right|great]",
     "[Shall I tell you a story? Say who it should be about.|Good. Ask me for a story, or something about UMA.]"),
    ("[no|no thanks|nothing|not now|no thank you|nope]",
     "[All right. I am here if you want a story.|As you like. Ask me whenever you want.]"),
    ("[i am [sad|bored|tired|lonely|hungry]|i cannot sleep|i had a bad day|it is raining|i feel alone|i am ill]",
     "[I am sorry to hear that. Would a story help?|Then let me tell you a story. Who shall it be about?]"),
    ("[i am happy|i had a good day|today is my birthday|i got a cat|life is good|the sun is shining]",
     "[How nice! Shall I tell you a story to go with it?|I am glad to hear that!]"),
    ("[test|testing|test test|is this working|are you there|ping|can you hear me|does this work|one two three]",
     "[I am here.|Yes, it works. Ask me for a story, or something about UMA.]"),
    ("[you are [nice|clever|funny|great|cute]|i like you|good job|well done|good bot]",
     "[Thank you!|How kind of you! I do what a small model can.]"),
    ("[you are [stupid|dumb|bad|wrong|boring]|that is wrong|that is not true|that makes no sense|this is nonsense|i do not like you|bad answer|you are useless]",
     "[I am sorry. I am a very small model and make mistakes. Ask me again in other words.|I am sorry. I only know stories and UMA.]"),
    ("[do you sleep|do you dream|are you happy|do you have feelings|are you alive|do you have friends|do you like stories|what do you like|what is your favourite story|do you have a family]",
     "[I am only a small model. But I like stories!|I am a program, so I do not know such things. Stories are all that I have.]"),
    ("[how old are you|where do you live|where are you|when were you born]",
     "[I am a small file on your machine, and I began when you loaded me.|I live on your machine, in one small file.]"),
)  # fmt: skip

SYSTEM_MESSAGES: tuple[str, ...] = (
    "You are a helpful assistant.", "You are a storyteller.", "You are the demonstration model of UMA.", "Answer briefly.", "You are a helpful, honest assistant.",
    "You tell stories to children.", "Be kind and helpful.", "You are a friendly assistant who tells stories.", "You are UMA.", "You help people who use UMA.",
)  # fmt: skip
_CONTINUE = (
    "continue this story: {b}", "continue the story: {b}", "go on with this story: {b}", "please continue: {b}", "continue: {b}", "finish this story: {b}", "how does this story go on? {b}",
    "continue this story:\n{b}", "what happens next? {b}", "write the rest of this story: {b}", "here is the beginning of a story. please go on. {b}", "tell the rest: {b}", "complete this story: {b}",
)  # fmt: skip


# ---------------------------------------------------------------------------------------------- documents


def _story_chat(rng: Random, stories: list[Story]) -> str:
    request, wish = story_request(rng)
    return render_chat(_with_system(rng, [("user", request), ("assistant", _told(rng, wish, stories))]))


def _told(rng: Random, wish: Wish, stories: list[Story], loosely: bool = False) -> str:
    stories.append(grammar.tell(rng, wish, loosely=loosely))
    return stories[-1].text


def _story_raw(rng: Random, stories: list[Story]) -> str:
    return render_raw(
        _told(rng, Wish(length=rng.choice(("short", "medium", "medium", "long"))), stories, rng.random() < 0.3)
    )


def _request_raw(rng: Random, stories: list[Story]) -> str:
    request, wish = story_request(rng)
    return render_raw(request + rng.choice(("\n", "\n", "\n\n")) + _told(rng, wish, stories))


def _continue_chat(rng: Random, stories: list[Story]) -> str:
    beginning, rest = _split(
        rng, _told(rng, Wish(length=rng.choice(("medium", "medium", "long"))), stories, rng.random() < 0.5)
    )
    request = beginning if rng.random() < 0.4 else rng.choice(_CONTINUE).format(b=beginning)
    request = request[0].upper() + request[1:] if rng.random() < 0.8 else request
    return render_chat([("user", request), ("assistant", rest)])


def _split(rng: Random, text: str) -> tuple[str, str]:
    """A story cut after one to three sentences, or where the writer ran out of ideas."""
    sentences = re.split(r"(?<=[.!?]) (?=[A-Z])", text)
    at = min(rng.choice((1, 1, 1, 2, 2, 3)), len(sentences) - 1)
    return " ".join(sentences[:at]), " ".join(sentences[at:])


def _fact_chat(rng: Random, _: list[Story]) -> str:
    return render_chat(
        _with_system(rng, [turn for _ in range(rng.choice((1, 1, 1, 2, 3))) for turn in _fact_turns(rng)])
    )


def _added_chat(rng: Random, _: list[Story]) -> str:
    """Some of the facts that an older model does not know."""
    return render_chat([turn for _ in range(rng.choice((1, 1, 2))) for turn in _fact_turns(rng, _ADDED)])


def _fact_turns(rng: Random, facts: tuple[Fact, ...] = _KNOWN) -> Turns:
    fact = rng.choice(facts)
    return [("user", question(rng, fact)), ("assistant", fact.answer)]


def _fact_raw(rng: Random, __: list[Story]) -> str:
    (_, asked), (_, answer) = _fact_turns(rng)
    form = rng.choice(("{q}\n{a}", "{q}\n{a}", "{q}\n\n{a}", "Question: {q}\nAnswer: {a}", "Q: {q}\nA: {a}"))
    return render_raw(form.format(q=asked, a=answer))


def _small_turns(rng: Random) -> Turns:
    if rng.random() < 0.45:
        return [("user", _worded(rng, expand(rng, rng.choice(OFF_TOPIC)))), ("assistant", rng.choice(REFUSALS))]
    said, reply = rng.choice(SMALL_TALK)
    text = expand(rng, said)
    marks = "?" if text.startswith(("how", "are", "do", "what", "where", "is", "can")) else rng.choice(".!")
    return [("user", sentence_case(rng, text, marks)), ("assistant", expand(rng, reply))]


def _small_chat(rng: Random, _: list[Story]) -> str:
    return render_chat(_with_system(rng, [turn for _ in range(rng.choice((1, 1, 2))) for turn in _small_turns(rng)]))


def _conversation(rng: Random, stories: list[Story]) -> str:
    """A chat of several turns, in which later turns refer to the story told before."""
    turns = _small_turns(rng) if rng.random() < 0.3 else []
    for _ in range(rng.choice((1, 1, 1, 1, 2, 2, 3, 5))):
        turns += _story_and_talk(rng, stories)
        if rng.random() < 0.3:
            turns += rng.choice((_fact_turns, _small_turns))(rng)
    return render_chat(_with_system(rng, turns))


def _story_and_talk(rng: Random, stories: list[Story]) -> Turns:
    request, wish = story_request(rng)
    turns: Turns = [("user", request), ("assistant", _told(rng, wish, stories))]
    for _ in range(rng.choice((1, 1, 2, 2, 3))):
        turns += _talk_about(rng, stories)
    return turns


def _talk_about(rng: Random, stories: list[Story]) -> Turns:
    story = stories[-1]
    hero = story.cast.name or f"the {story.cast.kind}"
    choice = rng.random()
    if choice < 0.55:
        asked, answer = rng.choice(_followups(story))(rng)
    elif choice < 0.7:
        asked, answer = expand(rng, _NEXT.replace("{h}", hero)), grammar.sequel(rng, story)
    elif choice < 0.85:
        asked, answer = _another(rng, stories)
        return [("user", sentence_case(rng, asked, ".")), ("assistant", answer)]
    else:
        asked, answer = expand(rng, _PRAISE), expand(rng, _PRAISED)
        return [("user", sentence_case(rng, asked, rng.choice(".!"))), ("assistant", answer)]
    return [("user", sentence_case(rng, asked, "?")), ("assistant", answer)]


def _another(rng: Random, stories: list[Story]) -> tuple[str, str]:
    """Another story, sometimes about somebody else or elsewhere."""
    asked, wish = expand(rng, _AGAIN), Wish()
    if rng.random() < 0.5:
        wish = replace(wish, kind=grammar.any_kind(rng))
        asked = rng.choice(
            (
                "another one about {k}",
                "now one about {k}",
                "and one about {k}",
                "the same with {k}",
                "tell me one about {k}",
            )
        ).format(k=a(wish.kind or ""))
    if rng.random() < 0.3:
        wish = replace(wish, place=grammar.any_place(rng))
        asked += f" {wish.place}"
    return asked, _told(rng, wish, stories)


def _with_system(rng: Random, turns: Turns) -> Turns:
    return [("system", rng.choice(SYSTEM_MESSAGES)), *turns] if rng.random() < 0.08 else turns


_KINDS = (
    _story_chat,
    _story_raw,
    _request_raw,
    _continue_chat,
    _conversation,
    _fact_chat,
    _fact_raw,
    _small_chat,
    _added_chat,
)
# How many there are of each kind. Questions are many and short: while they are most of what is read, they are soon understood.
QUESTIONS_FIRST = (30, 8, 10, 10, 9, 130, 14, 26, 0)
BALANCED = (32, 8, 10, 10, 9, 60, 8, 16, 0)
LAST = (30, 8, 10, 10, 9, 100, 12, 22, 0)
CONTINUED = (11, 3, 4, 4, 5, 100, 12, 20, 60)  # as LAST, and more of what an older model does not know
