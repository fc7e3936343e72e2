"""The plots: what can happen in a story, beat by beat, each beat in several wordings.

`[a|b]` is a choice and may be nested; `{slot}` is filled in by the cast of one story (see `grammar.Cast`), so whoever is chosen
stays the same from the first sentence to the last. A beat that opens with `?` may be left out of a shorter story.
"""

# ruff: noqa: E501  (a sentence stays on its line)
from __future__ import annotations

from dataclasses import dataclass

Beat = tuple[str, ...]


@dataclass(frozen=True)
class Plot:
    """One shape of story. `about` finishes "a story about ..."; `summary` finishes "{hero}, a fox who ..."."""

    key: str
    about: tuple[str, ...]
    summary: str
    beats: tuple[Beat, ...]
    lessons: tuple[str, ...]
    needs_thing: bool = False


OPENINGS_NAMED: Beat = (
    "once upon a time, {a_hero} [named|called] {name} lived {in}.",
    "once upon a time there was {a_hero} [named|called] {name} who lived {in}.",
    "{in} there [once lived|lived] {a_hero} [named|called] {name}.",
    "long ago, {a_hero} [named|called] {name} [had a small home|made a home|lived] {in}.",
    "{name} was {a_hero} who lived {in}.",
    "there once was {a_hero} whose name was {name}. {He} lived {in}.",
    "{name} the {kind} lived {in}. {Everybody} knew that {he} was [very|rather|quite] {trait}.",
    "far away, {in}, lived {a_hero} [named|called] {name}.",
    "this is the story of {name}, {a_hero} who lived {in}.",
    "{in} lived {a_hero}. {His} name was {name}.",
    "everybody {in} knew {name}, the {trait} {kind}.",
    "not so long ago, {name} the {kind} lived {in}. {He} was [a very|a rather] {trait} {kind}.",
    "{a_hero} [named|called] {name} lived {in}.",
    "there was once {a_hero} [named|called] {name} {in}.",
    "have you heard of {name}? {He} was {a_hero} who lived {in}.",
)  # fmt: skip

OPENINGS_UNNAMED: Beat = (
    "once upon a time, {a_hero} lived {in}.",
    "once upon a time there was {a_hero} who lived {in}.",
    "{in} there [once lived|lived] {a_hero}.",
    "long ago, {a_hero} [had a small home|made a home|lived] {in}.",
    "there once was {a_hero} who lived {in}.",
    "far away, {in}, lived {a_hero}.",
    "this is the story of {a_hero} who lived {in}.",
    "{in} lived {a_hero} whom [everybody knew|nobody knew well|everybody liked].",
    "a [long|very long] time ago, {a_hero} lived {in}.",
    "one day {a_hero} came to live {in}.",
    "{a_hero} lived {in}.",
    "there was once {a_hero} {in}.",
)

# How a writer who is no storyteller begins: somebody, somewhere, and something that makes one wonder.
LOOSE_OPENINGS: Beat = (
    "it was a [dark|cold|quiet|rainy] night {in}, and {a_named} could not sleep.",
    "{a_named} sat {spot} and [waited|wondered what to do|listened].",
    "when {named_kind} woke up, everything {in} [was different|had changed|was quiet].",
    "{a_named} had never left {place}.",
    "nobody {in} had ever seen {named_kind} [smile|laugh|cry|in such a hurry].",
    "{named_kind} opened {his} eyes. {Sound}, and something {in} was strange.",
    "long ago, {a_named} found [a door|a light|footprints|something strange] {spot}.",
    "{in}, where {sound}, {a_named} was [dreaming of {treat}|looking at {detail}|thinking].",
    "there was something special about {named_hero} who lived {in}.",
    "{a_named} [walked|came|ran] past {detail} one [morning|evening|night]. {He} was [late|tired|happy|looking for somebody].",
    "every [day|night|evening], {named_kind} [sat|sang|waited] {in}, all alone.",
    "{named_kind} was not like the others {in}. {He} was {a_hero} who [loved to dream|asked too many questions|was never afraid].",
    "it all began when {a_named} came to {place}.",
    "\"I wish that something would happen,\" said {named_hero} who lived {in}.",
)  # fmt: skip

SCENES: Beat = (
    "every morning {he} [looked at|walked past|said hello to] {detail} and {hummed}.",
    "{he} knew {detail} and {detail2} [very well|by heart|better than anybody].",
    "from {his} window {he} could see {detail}.",
    "{he} loved {detail}, and most of all {he} loved [the quiet evenings|the early mornings|the time just before sunset].",
    "there {he} had all that {he} needed: {treat}, a warm bed and a view of {detail}.",
    "it was a [quiet|pretty|lively|strange] place, with {detail} and {detail2}.",
    "when {sound}, {he} always felt [at home|happy|a little dreamy].",
    "{his} favourite thing to eat was {treat}.",
    "{he} liked to sit near {detail} and [think|dream|count the clouds|tell {himself} stories].",
    "people said that there was no better {kind} [far and wide|anywhere].",
)

ENDINGS: Beat = (
    "from that day on, {hero} never forgot that {lesson}.",
    "and {hero} had learned that {lesson}.",
    "that evening {hero} [fell asleep|went to bed] with a smile, for {he} knew now that {lesson}.",
    "and if you ever come to {place}, {hero} will tell you that {lesson}.",
    'since then {hero} says to [everybody|anybody who asks]: "Remember that {lesson}."',
    "so {hero} and {friend} stayed friends, and they both knew that {lesson}.",
    '"Now I know that {lesson}," said {hero}, and {he} [smiled|laughed|went home happy].',
    'when the [stars came out|day was over|moon rose], {hero} thought: "How good to know that {lesson}."',
    "{friend} and {hero} [laughed|ate {treat} together|looked at {detail}] and were happy. {lesson}.",
)

PLOTS: tuple[Plot, ...] = (
    Plot(
        "lost",
        ("something that is lost", "losing something", "a lost {thing}", "looking for something"),
        "lost {a_thing} and had to look for it",
        (
            (
                "{day}, {hero} [wanted to play with|looked for|reached for] {his} {thing}, but it was gone.",
                "more than anything {he} loved {his} {thing}. {day}, it was gone.",
                "{he} owned only one treasure, {a_thing}. {day}, {he} [could not find it anywhere|noticed that it was missing].",
                "{day}, {hero} [lost|dropped] {his} {thing} somewhere near {detail}, and {he} did not notice until the evening.",
                "{day}, {hero} woke up and saw that {his} {thing} was missing.",
            ),
            (
                "{he} looked {spot} and {spot2}, but the {thing} was not there.",
                "\"Oh no! where is my {thing}?\" cried {hero}. {He} searched {spot}, and then {spot2}. Nothing.",
                "{hero} [searched|looked] everywhere. {He} even looked {spot}, but all {he} found was [dust|an old button|a dry leaf|a sleepy beetle].",
                "{he} turned over every stone, and {he} looked {spot}. The {thing} was nowhere to be seen.",
            ),
            (
                "?after an hour {he} sat down and [sighed|was close to tears|wondered what to do].",
                "?the sun climbed higher, and {hero} grew [tired|sadder and sadder|more and more worried].",
                "?{he} asked everybody whom {he} met, but nobody had seen it.",
            ),
            (
                "then {a_friend} came by. \"Why are you so sad?\" asked {friend}. \"I have lost my {thing},\" said {hero}.",
                "just then {he} met {a_friend}. \"Let us look together,\" said {friend}. \"Four eyes see more than two.\"",
                "{a_friend} heard {him} sigh and said, \"I will help you. Where did you see your {thing} last?\"",
                "{a_friend} [stopped|sat down beside {him}]. \"Things are seldom lost,\" said {friend}. \"They only wait in the wrong place.\"",
            ),
            (
                "so they went back, step by step, and {sound}. And there, {spot3}, lay the {thing}!",
                "together they looked {spot3}, and something [shone|glittered|moved] there. It was the {thing}!",
                "{friend} pointed to {detail2}. \"Did you look there?\" {Hero} ran, and {spot3} {he} found the {thing}.",
                "they thought hard. \"Yesterday I was resting {spot3},\" said {hero} at last. They hurried there, and found the {thing}.",
            ),
            (
                "{hero} [danced with joy|laughed out loud|jumped up and down]. \"Thank you!\" {he} said, and shared {treat} with {friend}.",
                "{he} hugged {friend} and held the {thing} tight.",
                "\"I would never have found it without you,\" said {hero} to {friend}.",
            ),
        ),
        ("two who search together find more than one alone", "a friend who helps is worth more than any treasure",
         "it helps to go back step by step", "one should ask for help in time"),
        needs_thing=True,
    ),
    Plot(
        "quest",
        ("an adventure", "a long journey", "a quest", "a treasure", "finding {a_thing}"),
        "went on a long journey to find {a_thing}",
        (
            (
                "{day}, {hero} heard of {a_thing} that was hidden far away, and {he} decided to find it.",
                "{day}, an old traveller told {him} about {a_thing} that nobody had ever found. \"I will find it,\" said {hero}.",
                "for years {he} had dreamed of {a_thing}. {day}, {he} packed {treat} and set out to look for it.",
                "{day}, {hero} found half a map near {detail}. It showed the way to {a_thing}.",
            ),
            (
                "the way was [long|hard|steep], and soon {hero} was [tired|hungry|cold]. But {he} did not turn back.",
                "{he} walked past {detail} and {detail2}, until {he} came where {he} had never been before.",
                "for three days {he} walked, and every night {he} slept {spot}.",
                "first {he} crossed [a wide plain|a dark wood|a roaring stream], and then {he} climbed [a high wall|a steep slope|over sharp rocks].",
            ),
            (
                "on the way {he} met {a_friend} who [had hurt a foot|was stuck in the mud|had nothing to eat]. {Hero} stopped to help.",
                "there {a_friend} blocked the path. \"Nobody passes who cannot answer my riddle,\" said {friend}. \"What grows when you share it?\" {Hero} thought for a while. \"Joy,\" {he} said.",
                "{a_friend} sat by the road and asked for something to eat. {Hero} gave {fhim} half of {his} {treat}.",
                "at a crossing {he} met {a_friend}. \"I know the way,\" said {friend}, \"but I am afraid to go alone.\" So they went together.",
            ),
            (
                "to thank {him}, {friend} showed {him} a secret path {spot2}.",
                "\"You have a good heart,\" said {friend}. \"Look {spot2}, and you will find what you seek.\"",
                "{friend} smiled. \"Then come with me,\" {fhe} said, and led {him} on until {sound}.",
            ),
            (
                "and there, {spot3}, lay the {thing}. It was even more beautiful than in the tales.",
                "at the end of the path, {spot3}, {hero} found the {thing}.",
                "when the sun rose, {hero} saw something shining {spot3}. It was the {thing}!",
            ),
            (
                "?{he} carried it home to {place}, and everybody came to look at it.",
                "?{he} gave the {thing} to [{friend}|the one who needed it most], for the journey itself had been the best of all.",
                "?together they brought the {thing} home, and {friend} stayed for supper.",
            ),
        ),
        ("the way is as important as the goal", "kindness opens more doors than strength", "one who helps others also helps oneself",
         "a long way begins with one small step"),
        needs_thing=True,
    ),
    Plot(
        "friend",
        ("friendship", "making a friend", "being lonely", "two friends", "a new friend"),
        "was lonely and found a friend",
        (
            (
                "but {hero} was [often|sometimes|always] lonely, for {he} had nobody to [talk to|play with|share {his} {treat} with].",
                "{he} had {treat} and a warm bed, but no friend. {day}, {he} decided to find one.",
                "{day}, {hero} sat {spot} and felt very alone.",
                "{hero} wished for a friend. {day}, {he} heard a small voice {spot}.",
            ),
            (
                "then {he} saw {a_friend} who was [new here|sitting all alone|looking at {detail}].",
                "that day {a_friend} came to {place}, with nothing but a small bag.",
                "near {detail} sat {a_friend}. {Fhe} looked just as lonely as {hero}.",
                "suddenly {a_friend} looked out from {spot2}. \"Hello,\" said {friend} [shyly|softly|with a smile].",
            ),
            (
                "at first neither of them dared to speak. {sound}, and they both laughed.",
                "\"May I sit here?\" asked {hero}. \"I was hoping that you would ask,\" said {friend}.",
                "\"Would you like some of my {treat}?\" asked {hero}. {Friend} nodded, and they ate together.",
                "{hero} was afraid that {friend} would laugh at {him}. But {friend} only asked, \"What do you like to play?\"",
            ),
            (
                "they [played hide and seek|told each other stories|built a small house of sticks] until the evening.",
                "{hero} showed {friend} all the best places: {detail}, {detail2} and a hiding place {spot3}.",
                "{friend} knew many songs, and {hero} knew many stories, so they were never bored.",
                "they found out that they both loved {treat} and were both afraid of thunder.",
            ),
            (
                "?when it grew dark, {friend} asked, \"Will you come again tomorrow?\" \"Tomorrow and every day,\" said {hero}.",
                "?the next day {friend} was [already waiting|there again], and so it went day after day.",
                "?from then on you never saw one of them without the other.",
            ),
        ),
        ("a friend is found by saying hello first", "one who shares is never alone for long", "even shy hearts can find each other",
         "a small kind word can begin a great friendship"),
    ),
    Plot(
        "storm",
        ("a storm", "a big storm", "bad weather", "a terrible storm", "thunder and rain"),
        "lived through a great storm",
        (
            (
                "{day}, black clouds [came up|gathered] over {place}, and the wind grew strong.",
                "{day}, the sky turned [dark|yellow|black as ink]. \"A storm is coming,\" said {hero}.",
                "{day}, {hero} noticed that it had become very quiet. Then {sound}, and the first lightning flashed.",
            ),
            (
                "soon the storm [roared|shook everything|bent all that stood upright]. {Hero} [hid|crept|took shelter] {spot}.",
                "the wind tore at {detail}, and {hero} could hardly stand.",
                "thunder rolled, and everybody ran to find shelter. {Hero} found a dry place {spot}.",
            ),
            (
                "then {he} heard a cry for help. It was {a_friend}, trapped {spot2}.",
                "suddenly {he} saw {a_friend} out there, who could not [move|get home|find the way].",
                "\"Help!\" called somebody. {Hero} looked out and saw {a_friend} clinging to {detail2}.",
            ),
            (
                "{hero} was [afraid|trembling], but {he} took a rope and went out into the storm.",
                "{he} did not think twice. {He} ran through wind and rain until {he} reached {friend}.",
                "\"Hold on, I am coming!\" shouted {hero}, and {he} fought {his} way through the wind.",
            ),
            (
                "{he} pulled with all {his} strength, and at last {friend} was safe.",
                "{he} took {friend} by the hand and led {fhim} to the dry place. There they waited side by side.",
                "together they crept back {spot3}, and {hero} wrapped {friend} in a blanket.",
            ),
            (
                "?in the morning the sky was clear, and a rainbow stood above {place}.",
                "?when the storm was over, they stepped outside. {Detail} [shone|sparkled] in the sun as if nothing had happened.",
                "?at dawn the wind lay down to sleep. \"You saved me,\" said {friend}. \"Anybody would have,\" said {hero}, but that was not true.",
            ),
        ),
        ("after every storm the sun comes back", "courage means to go although one is afraid", "those who hold together fear no storm",
         "one is stronger than one thinks when a friend needs help"),
    ),
    Plot(
        "contest",
        ("a contest", "a race", "winning and losing", "a competition", "{contest}"),
        "took part in {contest}",
        (
            (
                "every year there was {contest} {in}, and this year {hero} wanted to win.",
                "{day}, a poster hung near {detail}. It said that there would be {contest}, and {hero} [signed up at once|wanted to take part].",
                "{day}, everybody talked about {contest}. \"I will win,\" said {hero}.",
            ),
            (
                "{he} practised every day, from [dawn|breakfast] until {he} was too tired to stand.",
                "there was only one who was better: {a_friend}, who had won three times.",
                "\"You?\" laughed the others. \"You are much too {trait}!\" But {hero} did not listen.",
            ),
            (
                "on the great day {hero} stood next to {a_friend}. {Sound}, and it began.",
                "when the day came, {his} heart beat fast. Beside {him} stood {a_friend}.",
                "many had come to watch. {Hero} [took a deep breath|closed {his} eyes for a moment], and nodded to {a_friend} beside {him}.",
            ),
            (
                "{hero} was ahead, but then {he} saw that {friend} had [fallen|hurt {fhimself}|stumbled]. {He} stopped and went back to help.",
                "halfway through, {friend} [slipped near {detail2}|lost all {fhis} courage]. {Hero} could have won now. But {he} turned round and held out a hand.",
                "first {friend} was ahead, and then {hero}. Neither gave up, and the crowd [cheered|held its breath].",
            ),
            (
                "they reached the end together, side by side, and both won.",
                "somebody else won that day. But the loudest cheers were for {hero} and {friend}.",
                "{hero} came second, and {friend} came third. They shook hands and laughed.",
                "in the end {hero} won by a hair. {He} broke the prize, a big cake, in two and gave {friend} one half.",
            ),
            (
                "?\"I have never had so much fun,\" said {friend}.",
                "?that evening they [celebrated|ate {treat}] near {detail}, and {sound}.",
            ),
        ),
        ("there are more important things than winning", "a fair loser is a winner too", "practice makes strong, but kindness makes great",
         "it is more fun to play together than to win alone"),
    ),
    Plot(
        "mistake",
        ("saying sorry", "a mistake", "honesty", "telling the truth", "an apology"),
        "made a mistake and said sorry",
        (
            (
                "{day}, {hero} played [too wildly|without looking], and {he} broke {thing_of_friend} of {a_friend}.",
                "{day}, {a_friend} lent {him} {a_thing}. \"Be careful with it,\" said {friend}. But {hero} [dropped it|forgot it in the rain], and it broke.",
                "{day}, {hero} was so hungry that {he} ate all the {treat} which {a_friend} had [saved|baked|kept] for a feast.",
                "{day}, {hero} told a lie about {a_friend}, only because {he} was cross, and soon everybody {in} believed it.",
            ),
            (
                "{he} was so [ashamed|frightened] that {he} hid {spot}.",
                "\"It was not me,\" {he} said when {friend} asked. But {his} face turned red.",
                "nobody had seen it. {Hero} said nothing, but {his} heart felt as heavy as a stone.",
            ),
            (
                "all night {he} could not sleep. {Sound}, and {he} thought of {friend}.",
                "?not even {treat} tasted good any more.",
                "{he} saw {friend} sitting sadly near {detail}, and {he} could not bear it any longer.",
            ),
            (
                "in the morning {he} went to {friend} and said, \"It was my fault. I am sorry.\"",
                "so {he} took all {his} courage, knocked at {friend_possessive} door and told the truth.",
                "\"I did it,\" said {hero} at last, \"and I am very sorry. How can I make it good again?\"",
            ),
            (
                "{friend} was silent for a while. Then {fhe} smiled and said, \"It was brave of you to tell me.\"",
                "\"I was angry,\" said {friend}, \"but now I am glad. Come, we will mend it together.\"",
                "{friend} looked at {him} for a long time. \"I forgive you,\" {fhe} said. \"Anybody can make a mistake.\"",
            ),
            (
                "?they worked side by side until everything was as good as new.",
                "?to make up for it, {hero} brought {friend} {treat} every day for a week.",
            ),
        ),
        ("the truth is easier to carry than a lie", "a true word of sorry can mend a lot", "anybody can make a mistake, and it takes courage to say so",
         "friends forgive each other"),
    ),
    Plot(
        "secret",
        ("a secret", "a hidden door", "a secret room", "a discovery"),
        "found a secret door",
        (
            (
                "{day}, {hero} found a small door {spot} that {he} had never seen before.",
                "{day}, {hero} leaned against a wall near {detail}, and it moved. Behind it was a secret door.",
                "{day}, {he} followed a strange light and found a hidden door {spot}.",
            ),
            (
                "it was locked. But in front of it lay {a_thing}, and as soon as {hero} picked it up, the door swung open.",
                "{he} pushed and pulled, but it did not open. Then {he} saw {a_thing} hanging beside it. {He} took it down, and the door swung open.",
                "on the door stood: \"Only one who brings {a_thing} may enter.\" {Hero} ran home and fetched one.",
            ),
            (
                "behind the door [lay a garden full of silver flowers|stairs led down into the dark|was a room full of old books|began a long tunnel with tiny lamps].",
                "inside, everything was covered with dust, and {sound}.",
            ),
            (
                "there sat {a_friend}. \"At last somebody has come,\" said {friend}. \"I have waited here for a hundred years.\"",
                "{he} was not alone. {A_friend} looked up and said, \"Can you keep a secret?\"",
                "\"Who is there?\" asked a voice. It belonged to {a_friend}, who guarded the place.",
            ),
            (
                "{friend} showed {him} wonders that {he} had never seen, and {hero} promised to tell nobody.",
                "they drank tea, and {friend} told {him} how {place} had looked long ago.",
                "\"You may come as often as you like,\" said {friend}, \"but leave the {thing} here, so that the next one can find the way.\"",
            ),
            (
                "?when {hero} stepped outside again, only a minute had passed.",
                "?since then {hero} visits {friend} every [week|full moon], and nobody knows where {he} goes.",
            ),
        ),
        ("the best things are found by those who look closely", "a secret is safe with a true friend", "there is always something new to discover, even at home",
         "wonders often hide behind small doors"),
        needs_thing=True,
    ),
    Plot(
        "night",
        ("a mystery", "a strange noise", "the dark", "the night", "a mystery at night", "a ghost"),
        "solved the riddle of a strange noise at night",
        (
            (
                "one night {hero} was woken by a strange noise. [Tap, tap, tap|Knock, knock|Scratch, scratch], it went.",
                "every night, when {sound}, {hero} heard something [knock|sigh|sing softly] {spot}.",
                "one [dark|moonless|cold] night {he} saw a light that moved {spot}.",
            ),
            (
                "{his} heart beat fast. Was it a [ghost|thief|monster]?",
                "{he} pulled the blanket over {his} head. But {he} was too curious to stay in bed.",
                "the others said, \"It is a ghost!\" But {hero} wanted to know for sure.",
            ),
            (
                "{he} took a lantern and tiptoed past {detail} and {detail2}.",
                "slowly, step by step, {he} went towards it. {Sound}, and {he} almost turned back.",
                "with a candle in {his} hand {he} crept nearer and looked {spot2}.",
            ),
            (
                "there was no ghost at all. It was only {a_friend} who [could not sleep|was looking for something to eat|was stuck and could not get out].",
                "and what did {he} find? {A_friend}, who was just as frightened as {he} was!",
                "\"Who are you?\" asked {hero}. \"Only me,\" said a small voice, and {a_friend} came out into the light.",
            ),
            (
                "\"I did not want to scare anybody,\" said {friend}. {Hero} began to laugh, and {friend} laughed too.",
                "{hero} helped {friend} and gave {fhim} {treat}, and they talked until the sun came up.",
                "\"Stay with me,\" said {hero}. \"Then neither of us needs to be afraid of the dark.\"",
            ),
            (
                "?from then on, when {hero} heard a noise at night, {he} only smiled and said, \"Good night, {friend_call}.\"",
                "?the next morning everybody {in} heard the story, and they all laughed with relief.",
            ),
        ),
        ("most ghosts are small when one looks at them closely", "the dark is less dark for two", "one should look before one is afraid",
         "a lantern and a little courage go a long way"),
    ),
    Plot(
        "help",
        ("kindness", "helping others", "sharing", "a good deed", "being kind"),
        "helped somebody who was in need",
        (
            (
                "{day}, {hero} was on {his} way home when {he} saw {a_friend} {spot} who [was shivering with cold|was crying|could not walk].",
                "{day}, {a_friend} knocked at {his} door. \"I am hungry and cold,\" said {friend}. \"May I come in?\"",
                "{day}, {hero} had just one piece of bread left when {a_friend} came along who had nothing at all.",
            ),
            (
                "the others had walked past. But {hero} stopped and asked, \"What can I do for you?\"",
                "{hero} had little {himself}, but {he} did not think about it for long.",
                "\"I cannot do much,\" thought {hero}, \"but a little is better than nothing.\"",
            ),
            (
                "{he} gave {friend} {treat} and {his} warmest blanket.",
                "{he} carried {friend} home, past {detail}, and made {fhim} a bed.",
                "{he} cut the bread in two and gave {friend} the bigger half.",
            ),
            (
                "after a few days {friend} was well again. \"I will not forget this,\" {fhe} said, and went away.",
                "{friend} stayed until the spring. Then {fhe} thanked {him} and left.",
            ),
            (
                "a year later, {hero} {himself} was in trouble: {he} [had lost the way|had fallen into a deep hole|lay ill in bed]. And who came to help? It was {friend}!",
                "winter came, and {hero} had nothing left to eat. Then somebody knocked. It was {friend}, with a big basket of {treat}.",
                "and when {hero} needed help {himself}, {friend} was there before {he} could even ask.",
            ),
            (
                "?\"You helped me once,\" said {friend}. \"Now it is my turn.\"",
                "?they sat near {detail2} and ate together, and {sound}.",
            ),
        ),
        ("kindness comes back when you need it most", "what you give away is never lost", "a little help can be worth a lot",
         "even somebody small can do something great"),
    ),
    Plot(
        "skill",
        ("learning something new", "not giving up", "practice", "patience", "learning {skill}"),
        "wanted to learn {skill}",
        (
            (
                "{hero} had one big wish: {he} wanted to learn {skill}.",
                "all the others could do it, only {hero} could not: {he} had never learned {skill}.",
                "{day}, {hero} saw {a_friend} and was amazed. \"I want to learn {skill} too,\" said {hero}.",
            ),
            (
                "{he} tried it near {detail}. [Crash|Bump|Splash]! It went all wrong, and {everybody_low} laughed.",
                "the first time {he} [fell on {his} nose|got everything wrong], and the second time too.",
                "\"You will never learn it,\" said the others. {Hero} hung {his} head.",
            ),
            (
                "but {a_friend} said, \"I also failed a hundred times. Try it once more.\"",
                "then {a_friend} sat down beside {him}. \"Do it slowly,\" said {friend}, \"and do not look at the others.\"",
                "{a_friend} had watched {him}. \"You are not bad at it,\" said {friend}. \"You only need time.\"",
            ),
            (
                "so {hero} practised, in the morning and in the evening, in sun and in rain.",
                "every day {he} went to a quiet place {spot} and tried again. Every day it went a little better.",
                "{friend} showed {him} a trick, and they practised together until {sound}.",
            ),
            (
                "and one morning it worked! {Hero} could hardly believe it.",
                "when the summer was over, {hero} could do it better than anybody {in}.",
                "at the big feast {hero} showed everybody what {he} had learned. They [clapped|cheered] for a long time.",
            ),
            (
                "?the very next day, a little one asked, \"Can you teach me?\" \"Of course,\" said {hero}.",
                "?\"I knew it,\" said {friend}, and {fhe} was almost as proud as {hero}.",
            ),
        ),
        ("one who does not give up will get there", "every master was once a beginner", "small steps lead far", "one should not listen to those who laugh"),
    ),
    Plot(
        "fear",
        ("courage", "being brave", "overcoming a fear", "fear", "somebody who is afraid"),
        "was afraid of {fear} and became brave",
        (
            (
                "there was one thing that {hero} feared above all: {fear}.",
                "nobody knew it, but {hero} was afraid of {fear}.",
                "because {he} was afraid of {fear}, {hero} [seldom went out|never went further than {detail}].",
            ),
            (
                "{day}, {a_friend} came running. \"Please help! my little [brother|sister] is lost, and I cannot go alone.\"",
                "{day}, {he} heard {a_friend} calling for help {spot}.",
                "{day}, everybody {in} was looking for {a_friend}, who had not come home.",
            ),
            (
                "to get there, {hero} had to face {fear}. {His} knees [shook|trembled].",
                "{hero} thought of {fear} and wanted to hide {spot2}. But {he} thought of {friend} too.",
            ),
            (
                "{he} counted to three, took a deep breath and went on.",
                "\"I am afraid,\" {he} whispered, \"but I am going all the same.\" {He} began to sing softly, and {sound}.",
                "step by step {he} went on, and with every step {his} fear grew a little smaller.",
            ),
            (
                "soon it was done. Everybody was safe, and {friend} hugged {him}.",
                "it was not half as bad as {he} had thought. Before long they were all safe at home near {detail2}.",
                "{he} made it! \"You are the bravest {kind} I know,\" said {friend}.",
            ),
            (
                "?that night {hero} thought about {fear} and found that {he} could smile about it.",
                "?since that day {friend} calls {him} {hero_brave}.",
            ),
        ),
        ("being brave means being afraid and going all the same", "fear grows small when one walks towards it", "one can do more for a friend than for oneself",
         "even the brave are sometimes afraid"),
    ),
    Plot(
        "birthday",
        ("a birthday", "a surprise", "a party", "a present", "a gift"),
        "had a birthday that began sadly",
        (
            (
                "{day}, it was {his_name} birthday. But nobody seemed to remember it.",
                "{day}, {hero} woke up early, for it was {his} birthday. {He} waited and waited, but nobody came.",
            ),
            (
                "{he} walked past {detail}, and everybody only said \"Good day\" and hurried on.",
                "even {a_friend}, {his} best friend, had no time. \"I have to go,\" said {friend}, and was gone.",
                "{he} looked {spot} and {spot2}. No present, no cake, not even a card.",
            ),
            (
                "sadly {he} sat down {spot3} and ate {treat} all alone.",
                "\"They have forgotten me,\" thought {hero}, and a tear ran down {his} nose.",
            ),
            (
                "in the evening {sound}. Then somebody called, \"Come quickly!\" {Hero} ran, and could not believe {his} eyes.",
                "when it grew dark, {he} saw a hundred small lights near {detail2}. Curious, {he} went closer.",
            ),
            (
                "\"Surprise!\" everybody shouted. {A_friend} held out a parcel. In it was {a_thing}!",
                "there they all were, with lanterns and cake, and {a_friend} gave {him} {a_thing}. \"We have worked on it all day,\" said {friend}.",
            ),
            (
                "it was the best birthday of {his} life. {He} has kept the {thing} to this day.",
                "they danced until midnight, and {hero} did not let go of the {thing} for a moment.",
            ),
        ),
        ("good friends do not forget", "the best presents are made with love", "sometimes a surprise needs a little patience", "a feast is only a feast with friends"),
        needs_thing=True,
    ),
    Plot(
        "message",
        ("a letter", "a message in a bottle", "a message", "somebody far away"),
        "found a message from somebody far away",
        (
            (
                "{day}, {hero} found a bottle {spot}. There was a letter in it.",
                "{day}, a [pigeon|gust of wind|small balloon] brought a letter and dropped it {spot}, right in front of {hero}.",
                "{day}, {hero} found a note {spot}. The ink was almost washed away.",
            ),
            (
                "\"Whoever reads this,\" it said, \"please come. I am all alone and have only {a_thing} to keep me company.\"",
                "it said: \"Help! I am stuck, and nobody hears me. I will give {a_thing} to the one who finds me.\"",
                "on it was a drawing of {a_thing} and three words: \"Please find me.\"",
            ),
            (
                "{hero} read it three times. Then {he} packed {treat} and set out.",
                "\"Somebody needs me,\" said {hero}, and {he} left {place} that same hour.",
            ),
            (
                "{he} asked for the way, {he} followed the stars, and {sound}.",
                "it was a long way, past {detail} and far beyond {detail2}.",
            ),
            (
                "at last {he} found {a_friend}, who [jumped for joy|could not believe it]. \"You have really come!\" said {friend}.",
                "on the third day {he} saw {a_friend} waving from afar. \"I had given up hope,\" said {friend}.",
            ),
            (
                "{friend} wanted to give {him} the {thing}, but {hero} said, \"Keep it. Come home with me instead.\"",
                "together they went back to {place}, and the {thing} stood on their table from then on.",
            ),
        ),
        ("a few words can change a life", "nobody should be left alone", "somebody is always listening somewhere", "it is good to answer when somebody calls"),
        needs_thing=True,
    ),
    Plot(
        "trick",
        ("a clever trick", "a thief", "a greedy visitor", "being clever", "outwitting somebody"),
        "outwitted a greedy visitor",
        (
            (
                "{day}, {a_friend} came to {place} who was [very greedy|as greedy as could be] and took whatever {fhe} wanted.",
                "{day}, {hero} saw that somebody had stolen all the {treat}. It was {a_friend}!",
            ),
            (
                "\"Give me your {treat},\" said {friend}, \"or I will take all that you have!\"",
                "everybody was afraid of {friend}, and nobody dared to say a word. Only {hero} began to think.",
            ),
            (
                "{hero} had a plan. \"I know where there is much more,\" {he} said. \"Look {spot}.\"",
                "\"Of course,\" said {hero} politely. \"But first you must find it. It is hidden {spot}.\"",
                "that night {hero} hung bells on a string {spot} and waited until {sound}.",
            ),
            (
                "{friend} rushed there and [fell right into the mud|was caught in a net|got stuck]. {Fhe} could not move at all.",
                "before {friend} knew what was happening, {fhe} sat in the trap, and everybody came running to look.",
            ),
            (
                "\"Please let me go,\" begged {friend}. \"Only if you promise to share from now on,\" said {hero}. And {friend} promised.",
                "{hero} did not laugh at {fhim}. \"If you are hungry, you only need to ask,\" {he} said, and gave {fhim} some of {his} {treat}.",
            ),
            (
                "?{friend} kept {fhis} word and in time became a good neighbour near {detail}.",
                "?{friend} was ashamed, gave everything back and said sorry to everybody.",
            ),
        ),
        ("a clever head is worth more than big muscles", "the greedy end up with nothing", "those who ask kindly get more than those who take", "sharing makes more friends than taking"),
    ),
    Plot(
        "wish",
        ("a wish", "magic", "a magic {thing}", "three wishes", "a dream"),
        "found {a_thing} that could grant a wish",
        (
            (
                "{day}, {hero} found {a_thing} {spot}. When {he} touched it, it began to glow.",
                "{day}, {a_thing} fell from the sky and landed {spot}, right in front of {hero}.",
                "{day}, an old woman gave {him} {a_thing} and said, \"It grants one wish, and only one.\"",
            ),
            (
                "\"Make a wish,\" whispered the {thing}. {Hero} thought of [gold|a big house|wings] and of {treat}.",
                "what should {he} wish for? {He} sat down near {detail} and thought all day.",
                "\"I could be the richest {kind} in the world,\" thought {hero}.",
            ),
            (
                "then {he} saw {a_friend} who [was ill|had lost everything|could not find the way home].",
                "just then {a_friend} came by, looking very sad. \"I miss my family so much,\" said {friend}.",
            ),
            (
                "{hero} did not think any longer. {He} held the {thing} tight and wished that {friend} should be happy again.",
                "\"I know what I want,\" said {hero}. \"I wish that all will be well for {friend}.\"",
            ),
            (
                "there was a flash, and {sound}. And {friend} [laughed|danced] for joy!",
                "the {thing} shone as bright as the sun, and the wish came true.",
            ),
            (
                "after that, the {thing} was quite ordinary again. But {hero} did not mind, for {he} had won a friend.",
                "the magic was used up, but {hero} felt richer than any king.",
            ),
        ),
        ("the best wishes are those for others", "happiness grows when it is given away", "a good heart is the greatest magic", "one does not need gold to be rich"),
        needs_thing=True,
    ),
)  # fmt: skip

CONTESTS: tuple[str, ...] = (
    "a boat race", "a singing contest", "a great race", "a cake contest", "a kite contest", "a drawing contest", "a dancing contest",
    "a swimming race", "a jumping contest", "a story contest", "a snowball contest", "a riddle contest",
)  # fmt: skip
SKILLS: tuple[str, ...] = (
    "to swim", "to fly", "to dance", "to sing", "to play the flute", "to bake bread", "to read", "to whistle", "to juggle", "to climb",
    "to paint", "to ride", "to skate", "to sail", "to play the drum", "to tie knots", "to count to a thousand",
)  # fmt: skip
FEARS: tuple[str, ...] = (
    "the dark", "deep water", "thunder", "great heights", "strangers", "loud noises", "the old bridge", "the big dog", "spiders",
    "narrow tunnels", "being alone", "the cold wind",
)  # fmt: skip
TREATS: tuple[str, ...] = (
    "apple cake", "honey bread", "hot soup", "blueberries", "warm milk", "cherry pie", "toast with jam", "pancakes", "roasted nuts",
    "ginger biscuits", "plum tart", "mint tea", "fresh bread", "carrot soup", "cheese", "chocolate",
)  # fmt: skip
DAYS: tuple[str, ...] = (
    "one [sunny|rainy|windy|foggy|snowy|cold|warm|grey|bright] [morning|afternoon|day|evening]", "one day", "one morning", "one evening",
    "on a [sunny|stormy|frosty|golden|quiet] [Monday|Tuesday|Wednesday|Friday|Sunday]", "on the first day of [spring|summer|autumn|winter]",
    "one [spring|summer|autumn|winter] [morning|evening|day]",
)  # fmt: skip
