"""Records what llama-server says, for tests to compare with: `python tests/zoo/record_llama_server.py`.

`prompts` or `answers` behind it records these alone. It takes some minutes, and needs what `python -m
benchmarks.reference` and `python -m benchmarks.build_peers` fetch and build.
"""

from __future__ import annotations

import json
import sys
import tempfile
from pathlib import Path

sys.path[:0] = [str(Path(__file__).parents[2]), str(Path(__file__).parents[1])]

from conversations import PROMPTS  # noqa: E402
from llama_server import RECORDED, REFUSED, digest, prompt_of, running_llama_server, tokens_of  # noqa: E402
from questions import CLEAR, MODELS, QUESTIONS, SAME_ARITHMETIC, replied  # noqa: E402
from reference import llama_cpp, real_model, template, template_names  # noqa: E402
from zoo_models import nearest_vocabulary, write_zoo_model  # noqa: E402

from benchmarks.reference import RealModel  # noqa: E402


def prompts(template_name: str, directory: Path) -> dict[str, str]:
    """A digest of the tokens of each prompt that llama-server makes with a template."""
    vocabulary = nearest_vocabulary(template_name)
    model = directory / f"{vocabulary}.gguf"
    if not model.exists():
        write_zoo_model(model, vocabulary, template(template_name))
    file = llama_cpp() / "models" / "templates" / template_name
    found = {}
    with running_llama_server(model, "--jinja", "--chat-template-file", str(file), "-c", "256", "-t", "1") as client:
        for name in PROMPTS:
            text = prompt_of(client, name)
            found[name] = REFUSED if text is None else digest(tokens_of(client, text))
    return found


def answers(name: RealModel) -> dict[str, str]:
    """A real model's answers. Raises `ValueError` where one is a matter of rounding."""
    found = {}
    with running_llama_server(real_model(name), *SAME_ARITHMETIC) as client:
        for question in QUESTIONS[name]:
            reply = replied(client, name, question)
            if reply.clear < CLEAR:
                raise ValueError(f"{name}: {question!r} is no clear question: {reply.clear:.2f} in {reply.text!r}")
            found[question] = reply.text
    return found


def main() -> None:
    """Record what is named, or all."""
    said = json.loads(RECORDED.read_text()) if RECORDED.exists() else {}
    wanted = sys.argv[1:] or ["prompts", "answers"]
    if "answers" in wanted:
        said["answers"] = {name: answers(name) for name in MODELS}
    if "prompts" in wanted:
        with tempfile.TemporaryDirectory() as directory:
            said["prompts"] = {name: prompts(name, Path(directory)) for name in template_names()}
    RECORDED.write_text(json.dumps(said, indent=1, ensure_ascii=False) + "\n")


if __name__ == "__main__":
    main()
