"""llama.cpp's own server tests against `uma run --http`: `python tests/peers/run_peers.py [unit/test_basic.py …]`.

The tests come from llama-cpp-python's source package (`benchmarks/reference.py`); a temporary folder has their copy.
They start a fake `llama-server` (`fake_server.py`) with models that stand in (`standins.py`); what depends on the
model's text alone is not asserted, and counted as such. Each test that fails is either named in `accepted.py`, with a
reason, or a fault: the exit code is 1 where there is one of these. `--json FILE` keeps all results;
`--llama-server PATH` runs a real llama-server with the same stand-ins instead.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import socket
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import attrs

REPOSITORY = Path(__file__).parents[2]
sys.path[:0] = [str(REPOSITORY), str(REPOSITORY / "tests")]

from accepted import LEFT_OUT, LOOKS, reason_for  # noqa: E402
from fake_server import FOLDER, REAL  # noqa: E402
from plugin import RESULTS  # noqa: E402

from benchmarks.reference import fetch_source  # noqa: E402

HERE = Path(__file__).parent
TEST_TIMEOUT_SEC = 120
"""Of one test, which starts one or two servers."""


@attrs.frozen
class Result:
    """How one test ended."""

    test: str
    """Its file, name and parameters."""
    outcome: str
    """`passed`, `looks` (passed but for the model's own text), `accepted` (fails for a named reason), `failed`,
    `skipped`."""
    why: str
    """The reason that is accepted, or what failed."""


def main() -> int:
    """Run the tests and print the table. Returns the exit code."""
    parser = argparse.ArgumentParser(prog="python tests/peers/run_peers.py", description=__doc__)
    parser.add_argument("tests", nargs="*", default=["unit"], help="files or ids of llama.cpp's tests; default: all")
    parser.add_argument("-k", default="", metavar="WORDS", help="as pytest's")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write all results there")
    parser.add_argument("--llama-server", type=Path, metavar="PATH", help="test this instead of UMA")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="uma-peers-") as folder:
        results = run(Path(folder), options.tests, options.k, options.llama_server)
    if options.json is not None:
        options.json.write_text(json.dumps([attrs.asdict(each) for each in results], indent=1) + "\n")
    print(table(results))
    return int(any(each.outcome == "failed" for each in results))


def run(folder: Path, tests: Sequence[str], words: str = "", llama_server: Path | None = None) -> list[Result]:
    """Run llama.cpp's server tests, all but those of `LEFT_OUT`, in `folder`."""
    tree = folder / "tools" / "server" / "tests"
    copy_tests(fetch_source(), folder, tree)
    results = folder / "results.jsonl"
    results.touch()
    environment = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join([str(HERE), str(REPOSITORY), str(REPOSITORY / "tests")]),
        "PORT": str(_free_port()),
        FOLDER: str(folder),
        RESULTS: str(results),
        **({} if llama_server is None else {REAL: str(llama_server)}),
    }
    pytest = [sys.executable, "-m", "pytest", "-q", "-m", "not slow", "-p", "plugin", "-p", "no:cacheprovider"]
    pytest += ["--timeout", str(TEST_TIMEOUT_SEC), *(f"--ignore=unit/{file}" for file in LEFT_OUT)]
    subprocess.run([*pytest, *(["-k", words] if words else []), *tests], cwd=tree, env=environment, check=False)
    return [_result(json.loads(line)) for line in results.read_text().splitlines()]


def copy_tests(source: Path, folder: Path, tree: Path) -> None:
    """Copy the tests, with `LOOKS` in place of numbers that depend on the model. Their paths to templates hold."""
    folder.mkdir(exist_ok=True)
    shutil.copytree(source / "tools" / "server" / "tests", tree)
    (tree / "conftest.py").unlink()
    (folder / "models").symlink_to(source / "models")
    for file, changes in LOOKS.items():
        path = tree / file
        text = path.read_text()
        for old, new in changes.items():
            if old not in text:
                raise ValueError(f"{file} does not have {old!r}: these are tests of another llama.cpp")
            text = text.replace(old, new)
        path.write_text(text)


def _free_port() -> int:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return int(free.getsockname()[1])


def _result(line: dict[str, Any]) -> Result:
    test = line["test"].removeprefix("unit/")
    if line["outcome"] == "passed":
        return Result(test, "looks" if line["unlike"] else "passed", ", ".join(line["unlike"]))
    if line["outcome"] == "skipped":
        return Result(test, "skipped", line["why"])
    reason = reason_for(test)
    return Result(test, "failed", line["why"]) if reason is None else Result(test, "accepted", reason)


def table(results: Sequence[Result]) -> str:
    """Counts, then the reasons that are accepted with their tests' number, then what failed."""
    return "\n".join(_lines(results))


def _lines(results: Sequence[Result]) -> Iterator[str]:
    counts = Counter(each.outcome for each in results)
    yield f"{len(results)} tests: " + ", ".join(f"{count} {outcome}" for outcome, count in counts.most_common())
    for reason, count in Counter(each.why for each in results if each.outcome == "accepted").most_common():
        yield f"  accepted {count:4}  {reason}"
    for each in results:
        if each.outcome == "failed":
            yield f"  FAILED {each.test}\n         {each.why}"


if __name__ == "__main__":
    sys.exit(main())
