"""A second set of questions about UMA that nobody trained on, as users might type them.

They were written before `phrasings.py` was, and nothing was added there because of a question that stands here; where a
pattern happened to word one of them itself, another question took its place. So they tell more honestly than the
held-out phrasings of `uma_facts`, of which one had seen which failed.
"""

# ruff: noqa: E501  (a question stays on its line)
from __future__ import annotations

QUESTIONS: dict[str, tuple[str, ...]] = {
    "what": ("Can you explain to me what UMA is?", "I just found this thing called UMA, what is it for?"),
    "why": ("What's so good about UMA?", "Why not simply load the model in each of my programs?"),
    "install": ("How do I install this?", "What is the pip command to get UMA?"),
    "import": ("How do I use it from Python?", "What would a minimal Python program look like?"),
    "sampling": ("How do I change the temperature from Python?", "Where do I put max_tokens?"),
    "run": ("How do I fire up the server?", "What command starts UMA in the background for all my programs?"),
    "own_model": ("How can I use Llama 3 with UMA?", "I want to use my own weights, how?"),
    "formats": ("Does it load safetensors?", "Which model files does it support?"),
    "chat": ("I'd like to chat with the model", "Is there a way to talk to it interactively?"),
    "chat_commands": ("What commands can I use inside the chat?", "Is there a list of slash commands?"),
    "chat_reset": ("How do I clear the chat history?", "How do I start over in the chat?"),
    "chat_system": ("How can I change the system prompt?", "Can I tell the chat to behave like a pirate with a system message?"),
    "chat_undo": ("I made a typo in my last message, can I undo it?", "How do I delete the last turn in a chat?"),
    "chat_save": ("How can I save my chat to a file?", "How do I load an earlier conversation?"),
    "chat_stats": ("How do I see token speed inside the chat?",),
    "chat_quit": ("I want to leave this conversation and return to my shell", "I'm stuck in the chat, how do I get out?"),
    "ctrl_c": ("Can I stop an answer while it is being written?", "What does pressing ctrl-c do?"),
    "generate": ("How can I get a completion in the terminal?", "How do I run one prompt without opening a chat?"),
    "stdin": ("Can I pipe text into uma generate?", "How do I use the contents of a file as the prompt?"),
    "json": ("How do I get machine readable output?", "Is there an option for JSON output?"),
    "stats": ("How fast is it? Can I see tokens per second?", "Is my laptop fast enough, how do I see the numbers?"),
    "models": ("How do I see a list of the models?", "Which models do I have installed?"),
    "models_folder": ("Where do I put my model files?", "Which folder does UMA search for models?"),
    "config": ("Why is UMA not using the value I set?", "How do I find out where a setting came from?"),
    "configure": ("Can I keep all options in one TOML?", "Do command line flags override environment variables?"),
    "schema": ("Where are the messages formally described?", "How do I print the message schemas?"),
    "commands": ("What are the available commands?", "What can I do with the uma command line?"),
    "socket": ("Does UMA use TCP or a Unix socket?", "Can I move the socket to another directory?"),
    "protocol": ("What bytes do I need to send if I have no Python?", "I want to write a client in Go, how are messages framed?"),
    "cancel": ("I no longer care about a request I sent, how do I drop it?", "What happens to a request when my program crashes?"),
    "shutdown": ("How do I stop the server?", "What happens to running requests when I shut it down?"),
    "health": ("How can I check that the server is up?", "Is there a health endpoint?"),
    "metrics": ("Where do I get metrics?", "How can I see how busy the server is?"),
    "batching": ("Do we have to take turns when three of us use it?", "How does UMA handle concurrent requests?"),
    "prefix": ("Does UMA cache the system prompt when it is the same for everybody?", "All my requests have the same long instructions, does that cost me each time?"),
    "smooth": ("Will a long prompt from somebody else block my answer?", "What happens if someone pastes an entire book as a prompt?"),
    "python_version": ("Which version of Python does it need?", "Does it work with Python 3.9?"),
    "systems": ("Can I run this on Windows?", "Does it support macOS?"),
    "license": ("Do I owe anybody money if I ship UMA in my product?", "Is UMA free to use commercially?"),
    "language": ("Which programming languages and libraries did you use to build UMA?",),
    "command_name": ("It says uma: command not found, what now?", "Can I run it as a Python module?"),
    "builtin": ("Does UMA ship with a model?", "Can I try it without downloading a model?"),
    "training": ("Who taught you to tell stories?", "What data was the built-in model made from?"),
    "gpu": ("My PC has an Nvidia card, does that help?",),
    "debug": ("How do I turn on debug logging?", "Something goes wrong, how can I see more details in the log?"),
    "name": ("Does U-M-A abbreviate anything?",),
    "who": ("Am I chatting with a real human?",),
    "can": ("What can you help me with?", "What kinds of questions can you answer?"),
    "cannot": ("What are you not able to do?", "Can you look something up on the internet?"),
}  # fmt: skip
