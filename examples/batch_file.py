"""A batch job over a file: one prompt a line in, one JSON object a line out, all batched together.

python examples/batch_file.py PROMPTS.txt RESULTS.jsonl [MODEL]

Each result is appended as soon as it is there. Ended in the middle, even by `kill -9`, the same command goes on where
it was.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

from uma import LLM, SamplingParams


def main(prompts_file: str, results_file: str, model: str = "builtin") -> None:
    """Continue every line of `prompts_file`; a line that fails has an `error` in its result."""
    prompts = [line for line in Path(prompts_file).read_text(encoding="utf-8").splitlines() if line.strip()]
    results = Path(results_file)
    done = keep_whole_lines(results)
    print(f"{done} of {len(prompts)} rows are done", file=sys.stderr)
    with LLM(model) as llm, results.open("a", encoding="utf-8") as file:
        for out in llm.imap(prompts[done:], SamplingParams(max_tokens=48)):
            row = {"prompt": out.prompt, "text": out.text, "error": str(out.error) if out.error else None}
            print(json.dumps(row, ensure_ascii=False), file=file, flush=True)


def keep_whole_lines(path: Path) -> int:
    """Cut off a last line that was not written to its end; the number of lines that are left."""
    if not path.exists():
        return 0
    written = path.read_bytes()
    whole = written[: written.rfind(b"\n") + 1]
    if whole != written:
        path.write_bytes(whole)
    return whole.count(b"\n")


if __name__ == "__main__":
    if len(sys.argv) not in (3, 4):
        sys.exit("usage: python batch_file.py PROMPTS.txt RESULTS.jsonl [MODEL]")
    main(*sys.argv[1:])
