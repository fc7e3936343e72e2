"""A batch job over a file: one prompt a line in, one JSON object a line out, all batched together.

python examples/batch_file.py prompts.txt results.jsonl [model.gguf]
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

from uma import LLM, SamplingParams


def main(prompts_file: str, results_file: str, model: str = "builtin") -> None:
    """Continue every line of `prompts_file`; a line that fails has an `error` in the results, in its place."""
    prompts = [line for line in Path(prompts_file).read_text(encoding="utf-8").splitlines() if line.strip()]
    with LLM(model) as llm, Path(results_file).open("w", encoding="utf-8") as results:
        for out in llm.generate(prompts, SamplingParams(max_tokens=48)):
            row = {"prompt": out.prompt, "text": out.outputs[0].text, "error": str(out.error) if out.error else None}
            results.write(json.dumps(row, ensure_ascii=False) + "\n")


if __name__ == "__main__":
    main(*sys.argv[1:])
