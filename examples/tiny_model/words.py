"""The words that the stories are made of: who, where, with what.

They stand apart from the grammar so that a writer can add an animal or a place without reading any code. Kinds and places that a
reader is likely to ask for are what matters here: a small model can only tell of what it has met.
"""

# ruff: noqa: E501, SIM905  (a sentence stays on its line)
from __future__ import annotations

ANIMALS: tuple[str, ...] = tuple(
    "fox owl bear rabbit mouse cat dog wolf hedgehog squirrel badger otter beaver deer frog toad turtle snail bee ant "
    "butterfly ladybird spider crow raven robin sparrow swan duck goose hen rooster pigeon parrot penguin seagull eagle "
    "horse pony donkey cow pig sheep lamb goat camel elephant lion tiger monkey giraffe zebra hippo crocodile kangaroo "
    "panda koala whale dolphin seal shark octopus crab fish starfish lizard snake bat mole hamster puppy kitten firefly "
    "moose lynx raccoon skunk peacock stork heron cricket worm salmon walrus sloth llama rat dragonfly chick calf".split()
)
CREATURES: tuple[str, ...] = (
    "dragon", "robot", "ghost", "giant", "snowman", "unicorn", "troll", "goblin", "dwarf", "elf", "scarecrow", "cloud",
    "star", "teddy bear", "toy soldier", "steam train", "lighthouse lamp", "kite", "phoenix", "monster", "alien", "gnome",
    "little boat", "moonbeam", "clockwork bird", "puppet", "raindrop", "teapot", "snowflake", "old tree", "pirate ship",
)  # fmt: skip
WOMEN: tuple[str, ...] = (
    "girl", "queen", "princess", "witch", "fairy", "mermaid", "grandmother", "sister", "nurse", "woman", "lady",
)  # fmt: skip
MEN: tuple[str, ...] = (
    "boy", "king", "prince", "wizard", "grandfather", "fisherman", "brother", "man", "monk", "shepherd boy",
)  # fmt: skip
PEOPLE: tuple[str, ...] = (
    "baker", "sailor", "knight", "farmer", "painter", "clockmaker", "gardener", "teacher", "doctor", "pirate", "inventor",
    "musician", "librarian", "tailor", "postman", "astronaut", "cook", "shoemaker", "miller", "explorer", "student",
    "blacksmith", "carpenter", "dancer", "juggler", "scientist", "programmer", "captain", "lighthouse keeper", "beekeeper",
    "detective", "child", "shepherd", "poet", "magician", "clown", "pilot", "tinker", "thief", "ninja", "cowboy",
)  # fmt: skip

FEMALE_NAMES: tuple[str, ...] = tuple(
    "Mia Luna Rosa Ada Nell Tilly Wren Ivy Poppy Hazel Maya Zara Lina Ella Nora Ruby Daisy Clara Greta Olga Fern Saskia "
    "Penny Molly Lucy Anna Emma Lily Amy Sara Yuki Mei Priya Aisha Freya Inga Bella Coco Dora Elsie Flora Gwen Hilda Juno "
    "Kiki Lotte Mina Nina Orla Pearl Queenie Rita Stella Thea Una Vera Willa Xenia Yara Zoe Alice Sophie Marta Sue".split()
)
MALE_NAMES: tuple[str, ...] = tuple(
    "Pip Bo Tom Max Finn Otto Hugo Leo Sam Ben Jack Oskar Milo Felix Rufus Barnaby Toby Gus Ned Emil Bruno Casper Dario "
    "Edgar Fritz George Henry Igor Jasper Kai Linus Marco Nico Oliver Pablo Quinn Ravi Sven Timo Ulf Victor Walter Yusuf "
    "Zeno Arlo Basil Cosmo Digby Ezra Fergus Gilbert Harold Ivan Juri Kofi Ludo Mungo Noah Omar Percy Rolf Simon Bob Tim".split()
)
SYLLABLES: tuple[str, ...] = tuple(
    "ba be bi bo bra da del di do dra el fa fen fi ga gri ha hi jo ka ki ko la len li lo lu ma mar mi mo na ne ni no "
    "tib mor gan wil ber han kar stef dor lun fin gar rob ash ell olaf bert gus in es an ver mel sim jon kat liv "
    "ol or pa pe pi po qua ra re ri ro sa sel shi so ta ti to tu ul va ver vi vo wa wi xa ya yo za zel zi zo".split()
)

TRAITS: tuple[str, ...] = tuple(
    "brave shy clever kind curious little old young lazy cheerful grumpy lonely proud gentle tiny sleepy hungry quiet noisy "
    "clumsy careful friendly nervous bold patient forgetful honest stubborn playful wise silly hopeful small big quick slow "
    "happy sad tired greedy polite dreamy serious generous merry fearless humble red blue grey white black golden "
    "purple blind strong weak fast angry poor rich".split()
)
FRIEND_TRAITS: tuple[str, ...] = tuple(
    "old young kind wise quiet friendly small tall cheerful gentle clever grumpy sleepy polite round curious patient".split()
)

# What can be lost, found, given, searched for. Each stands after "the" and is called "it".
THINGS: tuple[str, ...] = (
    "golden key", "silver bell", "red kite", "brass lantern", "old map", "music box", "blue scarf", "wooden flute", "glass marble",
    "tin drum", "pocket watch", "paper boat", "copper coin", "green umbrella", "magic lamp", "story book", "woollen hat", "small mirror",
    "seashell", "compass", "red balloon", "silver ring", "bag of seeds", "jar of honey", "magic stone", "telescope", "violin",
    "wooden box", "diamond", "crown", "white feather", "treasure chest", "whistle", "toy train", "straw hat", "warm blanket",
    "letter", "paint box", "pearl", "clock", "golden apple", "magic wand", "sword", "lucky coin", "red button", "spoon",
    "necklace", "candle", "crystal ball", "laptop", "bicycle", "camera", "flower", "pumpkin", "cookie jar", "guitar", "trumpet",
)  # fmt: skip

# Place: preposition, name, landscape. The landscape decides what can be seen, heard and hidden behind there.
PLACES: tuple[tuple[str, str, str], ...] = (
    ("in", "the harbour", "sea"), ("in", "the harbor", "sea"), ("on", "the island", "sea"), ("on", "the beach", "sea"),
    ("in", "the lighthouse", "sea"), ("on", "the ship", "sea"), ("in", "the bay", "sea"), ("by", "the sea", "sea"),
    ("in", "the fishing village", "sea"), ("on", "the coast", "sea"), ("under", "the sea", "deep"), ("in", "the ocean", "deep"),
    ("in", "the coral reef", "deep"), ("in", "the forest", "wood"), ("in", "the woods", "wood"), ("in", "the jungle", "wood"),
    ("in", "the valley", "wood"), ("in", "the meadow", "wood"), ("in", "the garden", "wood"), ("in", "the orchard", "wood"),
    ("in", "the park", "wood"), ("on", "the farm", "wood"), ("in", "the old oak tree", "wood"), ("in", "the treehouse", "wood"),
    ("in", "the vineyard", "wood"), ("in", "the zoo", "wood"), ("on", "the hill", "height"), ("in", "the mountains", "height"),
    ("on", "the mountain", "height"), ("on", "the cliff", "height"), ("on", "the volcano", "height"), ("in", "the village", "town"),
    ("in", "the town", "town"), ("in", "the city", "town"), ("in", "the market", "town"), ("at", "the train station", "town"),
    ("at", "the school", "house"), ("in", "the library", "house"), ("in", "the bakery", "house"), ("in", "the museum", "house"),
    ("at", "the circus", "town"), ("in", "the castle", "house"), ("in", "the palace", "house"), ("in", "the tower", "house"),
    ("in", "the attic", "house"), ("in", "the cottage", "house"), ("in", "the windmill", "house"), ("in", "the barn", "house"),
    ("in", "the kitchen", "house"), ("in", "the old house", "house"), ("in", "the toy shop", "house"), ("in", "the workshop", "house"),
    ("in", "the factory", "house"), ("in", "the office", "house"), ("in", "the supermarket", "house"), ("in", "the subway", "town"),
    ("in", "the stadium", "town"), ("in", "the church", "house"), ("in", "the hotel", "house"), ("at", "the airport", "town"),
    ("in", "the server room", "house"), ("in", "the laboratory", "house"), ("in", "the cinema", "house"), ("in", "the restaurant", "house"),
    ("in", "the shop", "house"), ("in", "the theatre", "house"), ("in", "the big city", "town"), ("in", "the dark forest", "wood"),
    ("in", "the rainforest", "wood"), ("on", "the roof", "town"), ("on", "the street", "town"), ("in", "the cellar", "house"),
    ("in", "the temple", "house"), ("in", "the hospital", "house"), ("in", "the computer room", "house"),
    ("by", "the river", "water"), ("by", "the lake", "water"), ("by", "the pond", "water"), ("in", "the swamp", "water"),
    ("near", "the waterfall", "water"), ("under", "the bridge", "water"), ("at", "the North Pole", "cold"), ("in", "the snow", "cold"),
    ("on", "the frozen lake", "cold"), ("in", "the ice palace", "cold"), ("in", "the desert", "dry"), ("in", "the cave", "dry"),
    ("in", "the canyon", "dry"), ("at", "the oasis", "dry"), ("in", "the mine", "dry"), ("on", "the moon", "sky"),
    ("in", "the clouds", "sky"), ("on", "the space station", "sky"), ("on", "a far planet", "sky"), ("in", "space", "sky"),
    ("on", "Mars", "sky"), ("in", "London", "town"), ("in", "Paris", "town"), ("in", "Africa", "wood"),
)  # fmt: skip


# What a landscape offers: things seen, hiding places, sounds.
LANDSCAPES: dict[str, tuple[tuple[str, ...], tuple[str, ...], tuple[str, ...]]] = {
    "sea": (
        ("the fishing boats", "the white sails", "the grey waves", "the wet sand", "the old pier", "the salty rocks", "the gulls"),
        ("under a pile of nets", "behind the barrels", "below the old pier", "in an empty rowing boat", "among the wet rocks", "under a heap of seaweed"),
        ("the waves rolled in", "the gulls cried", "the ropes creaked", "the foghorn sounded far away"),
    ),
    "deep": (
        ("the waving seaweed", "the bright corals", "the silver bubbles", "the sunken ship", "the soft white sand", "the tiny shrimps"),
        ("inside a sunken ship", "under a flat stone", "behind a red coral", "in a giant shell", "among the sea grass"),
        ("the bubbles rose", "the current hummed", "a whale sang far away", "the water grew still"),
    ),
    "wood": (
        ("the tall trees", "the soft grass", "the wild flowers", "the narrow path", "the old fence", "the blackberry bushes"),
        ("behind a hollow log", "under a pile of leaves", "among the tall ferns", "at the foot of an old tree", "under a bush", "between two mossy stones"),
        ("the leaves whispered", "a cuckoo called", "the branches creaked", "the crickets sang"),
    ),
    "height": (
        ("the steep path", "the grey rocks", "the high grass", "the far peaks", "the stone wall", "the mountain goats"),
        ("behind a big rock", "in a crack of the stone", "under a bent pine", "at the edge of the cliff", "in a small hollow"),
        ("the wind whistled", "a stone rolled down", "an echo answered", "a far bell rang"),
    ),
    "town": (
        ("the narrow streets", "the busy stalls", "the red roofs", "the old fountain", "the bright windows", "the clock tower"),
        ("behind the fountain", "under a market stall", "at the end of a dark alley", "on a doorstep", "beside the town gate", "under a bench"),
        ("the bells rang", "a cart rattled by", "somebody whistled", "the clock struck"),
    ),
    "house": (
        ("the dusty shelves", "the creaking stairs", "the long table", "the tall windows", "the warm fireplace", "the old chairs"),
        ("behind a curtain", "under the stairs", "in a dusty drawer", "behind a row of books", "at the back of a cupboard", "under a loose board"),
        ("the floor creaked", "a door closed softly", "the clock ticked", "the wind sang in the chimney"),
    ),
    "water": (
        ("the green reeds", "the smooth stones", "the wooden boat", "the water lilies", "the muddy bank", "the dancing dragonflies"),
        ("among the reeds", "under a flat stone", "behind the willow", "in an old boat", "on the muddy bank", "under the roots of a tree"),
        ("the water splashed", "the frogs croaked", "the reeds rustled", "a fish jumped"),
    ),
    "cold": (
        ("the white snow", "the blue ice", "the long icicles", "the northern lights", "the frozen trees", "the deep footprints"),
        ("behind a heap of snow", "in a hole in the ice", "under a frozen branch", "beside an icy rock", "in a small snow cave"),
        ("the ice cracked", "the snow fell softly", "the cold wind howled", "an icicle dropped"),
    ),
    "dry": (
        ("the red rocks", "the hot sand", "the dark tunnels", "the dry thorn bushes", "the long shadows", "the glittering stones"),
        ("under a flat rock", "in a dark corner", "behind a pile of stones", "in a narrow crack", "beside an old cart"),
        ("the sand whispered", "a pebble fell", "the wind moaned", "a drop of water fell"),
    ),
    "sky": (
        ("the bright stars", "the silver dust", "the round windows", "the far blue Earth", "the silent rocks", "the blinking lights"),
        ("behind a silver rock", "in a small crater", "under a shining panel", "inside an old rocket", "at the edge of the light"),
        ("everything was silent", "a star fell", "a light blinked", "something hummed softly"),
    ),
    "plain": (
        ("the narrow path", "the old walls", "the long shadows", "the quiet corners", "the small lights", "the flat stones"),
        ("behind an old wall", "in a dark corner", "under a flat stone", "beside the path", "in a small hole", "under an old box"),
        ("the wind blew", "a bird called", "something creaked", "it grew quiet"),
    ),
}  # fmt: skip

NEW_PLACE_KINDS: tuple[str, ...] = (
    "the town of",
    "the village of",
    "the land of",
    "the kingdom of",
    "the city of",
    "the planet",
)
