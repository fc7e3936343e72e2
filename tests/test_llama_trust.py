"""A library is trusted only with what a child process computed correctly: real children that die, hang and lie.

The children run the real probe on the real library; only their extra buffer types are made up, so that the tests say
the same on every CPU, and one of these has a fault.
"""

from __future__ import annotations

import json
import shlex
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from harness import PATIENCE_SEC, clean_environ, run_to_end, uma_command
from uma.config import RuntimeConfig
from uma.engine import sizing
from uma.errors import ModelError
from uma.llama import backend, builtin, extra_buffers, library, trust
from uma.llama.batch import Batch
from uma.llama.context import Context, ContextParams
from uma.llama.model import Model
from uma.llama.trust import Verdict

PROBE = """
import array, ctypes, os, pathlib, resource, signal, sys, threading
from uma.llama import probe

def names():
    return ("SOUND", "FAULTY")

def import_binding(real=probe._import_binding):
    binding = real()
    from uma.llama import extra_buffers
    extra_buffers.names = names
    return binding

def compute(lib, model, threads, way, real=probe.compute):
    def plain():
        return real(lib, model, threads, probe.PLAIN)
    {faults}
    return plain()

probe._import_binding = import_binding
probe.compute = compute
probe.main(sys.argv[1:])
"""

SEGFAULT = "ctypes.string_at(0)"
ILLEGAL = "signal.raise_signal(signal.SIGILL)"
KILLED = "signal.raise_signal(signal.SIGKILL)"
HANGS = "threading.Event().wait()"


def child(faults: str) -> list[str]:
    """A child program in which `faults` is the beginning of what computes `way`."""
    boot = f"import sys; sys.path[:0] = {sys.path!r}\n"
    return [sys.executable, "-c", boot + PROBE.format(faults=faults)]


def faulty(fault: str) -> list[str]:
    """A child program that does `fault` when it computes with the type FAULTY."""
    return child(f"if way == 'FAULTY': {fault}")


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A cache folder of this test's own, where nothing is known yet."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path / "cache"


def test_types_that_compute_as_the_plain_way_does_are_all_usable() -> None:
    assert trust.ask(faulty("pass")) == Verdict(usable=("SOUND", "FAULTY"))


@pytest.mark.parametrize(("fault", "name"), [(SEGFAULT, "SIGSEGV"), (ILLEGAL, "SIGILL"), ("os.abort()", "SIGABRT")])
def test_a_type_that_kills_the_child_is_left_out_and_the_others_are_not(fault: str, name: str) -> None:
    found = trust.ask(faulty(fault))
    assert found == Verdict(usable=("SOUND",), faults=(("FAULTY", f"was ended by {name}"),))


def test_a_type_that_hangs_is_left_out_for_a_day(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(trust, "HANG_SEC", 8.0)
    found = trust.ask(faulty(HANGS))
    assert found.usable == ("SOUND",)
    assert found.faults == (("FAULTY", "did not end within 8 s"),)
    assert found.expires is not None
    assert time.time() < found.expires <= time.time() + trust.HANG_KEPT_SEC


@pytest.mark.parametrize(
    "lie",
    [
        "return bytes(reversed(plain()))",
        "values = array.array('f', plain()); values.reverse(); return values.tobytes()",
        "return b'\\xff' * len(plain())",
        "return plain()[:-4]",
        "x = plain(); row = 4 * 2048; return x[: 51 * row] + x[52 * row :] + x[51 * row : 52 * row]",
    ],
)
def test_a_type_whose_logits_differ_is_left_out(lie: str) -> None:
    found = trust.ask(faulty(lie))
    assert found.usable == ("SOUND",)
    assert [name for name, _ in found.faults] == ["FAULTY"]
    assert "gave logits that" in found.faults[0][1]


def test_a_fault_in_one_size_of_batch_alone_is_found() -> None:
    # Rows 1 and 2 of the batches: 1 + 2 of 563, which 560 others would hide in a mean over all.
    spoil = "values = array.array('f', plain()); values[2048:6144] = values[4096:8192]; return values.tobytes()"
    assert trust.ask(faulty(spoil)).faults[0][1].endswith("in a batch of 2")


def test_logits_may_differ_in_their_last_digits() -> None:
    near = "return array.array('f', (x * 1.001 for x in array.array('f', plain()))).tobytes()"
    assert trust.ask(faulty(near)).usable == ("SOUND", "FAULTY")


def test_a_type_that_the_model_has_no_tensors_for_is_usable() -> None:
    assert trust.ask(faulty("return b''")).usable == ("SOUND", "FAULTY")


@pytest.mark.parametrize(
    "rubbish",
    [
        "os.write(3, b'\\0\\xff{'); os._exit(0)",
        "print('hello')",
        "sys.exit(3)",
        "raise MemoryError('none left')",
        KILLED,
    ],
)
def test_a_child_that_fails_for_a_reason_of_its_own_proves_nothing(rubbish: str, cache: Path) -> None:
    command = [sys.executable, "-c", rubbish.replace("os.write(3", "os.write(1")]
    command[2] = f"import os, signal, sys\n{command[2]}"
    found = trust.verdict(command)
    assert (found.usable, found.faults) == ((), ())
    assert found.unknown
    assert not cache.exists()  # and is not remembered


def test_rubbish_among_answers_proves_nothing() -> None:
    found = trust.ask([sys.executable, "-c", 'import os; os.write(1, b\'{"begins": "AMX"}\\n[1, 2\')'])
    assert found.usable == ()
    assert found.unknown == "gave no answer that makes sense, at AMX"


def test_what_a_library_prints_is_no_rubbish() -> None:
    assert trust.ask(faulty("os.write(1, b'AMX is not ready to be used!\\n')")).usable == ("SOUND", "FAULTY")


@pytest.mark.parametrize("fault", [SEGFAULT, ILLEGAL, "return b'\\xff' * len(plain())"])
def test_a_library_that_cannot_compute_here_is_refused_in_one_sentence(fault: str) -> None:
    with pytest.raises(ModelError, match="not for this CPU") as caught:
        trust.ask(child(f"if way == probe.PLAIN: {fault}"))
    assert "pip install" in caught.value.message
    assert str(library.library_file()) in caught.value.message
    assert "\n" not in caught.value.message


@pytest.mark.parametrize("fault", [SEGFAULT, ILLEGAL, "return b'\\xff' * len(plain())"])
@pytest.mark.parametrize("setting", ["on", "off"])
def test_a_setting_that_decides_about_the_types_does_not_load_what_cannot_compute_here(
    setting: str, fault: str, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(trust, "child_command", lambda: child(f"if way == probe.PLAIN: {fault}"))
    with pytest.raises(ModelError, match="not for this CPU"):
        Model.load(builtin.builtin_path(), n_gpu_layers=0, extra_buffers=setting)  # type: ignore[arg-type]
    assert not cache.exists()  # a rebuilt library is asked again


def test_a_library_that_may_have_a_gpu_is_not_asked_for_it_before_a_child_has_computed(
    cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    started: list[bool] = []
    trust._check_plain_once.cache_clear()
    monkeypatch.setattr(library, "may_have_gpu", lambda: True)
    monkeypatch.setattr(backend, "start", lambda: started.append(True))
    monkeypatch.setattr(trust, "child_command", lambda: child(f"if way == probe.PLAIN: {ILLEGAL}"))
    with pytest.raises(ModelError, match="not for this CPU"):
        sizing.map_above_bytes(RuntimeConfig())
    assert not started
    monkeypatch.setattr(trust, "child_command", lambda: child("pass"))
    sizing.map_above_bytes(RuntimeConfig())
    assert started


@pytest.mark.parametrize("setting", ["on", "off"])
def test_a_setting_that_decides_about_the_types_has_none_of_them_asked_and_the_plain_way_once(
    setting: str, cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    record = tmp_path / "record"
    note = f"pathlib.Path({str(record)!r}).open('a').write(way + ' ')"
    monkeypatch.setattr(trust, "child_command", lambda: child(note))
    for _ in range(2):
        Model.load(builtin.builtin_path(), n_gpu_layers=0, extra_buffers=setting).close()  # type: ignore[arg-type]
    assert record.read_text() == "plain "


def test_a_plain_way_that_could_not_be_asked_is_used(cache: Path) -> None:
    trust.check_plain(["/nonexistent/python"])
    trust.check_plain(child(KILLED))
    assert not cache.exists()


def test_a_library_that_cannot_even_be_loaded_here_is_refused() -> None:
    with pytest.raises(ModelError, match="was ended by SIGILL"):
        trust.ask([sys.executable, "-c", "import signal; signal.raise_signal(signal.SIGILL)"])


@pytest.mark.parametrize("fault", [KILLED, "raise MemoryError('no memory')"])
def test_a_plain_way_that_fails_for_want_of_something_does_not_condemn_the_library(fault: str) -> None:
    assert trust.ask(child(f"if way == probe.PLAIN: {fault}")).unknown


def test_a_program_without_an_interpreter_to_start_computes_the_plain_way() -> None:
    assert "could not be started" in trust.ask(["/nonexistent/python"]).unknown


def test_no_child_leaves_a_core_file() -> None:
    check = "limits = resource.getrlimit(resource.RLIMIT_CORE); return b'' if limits == (0, 0) else b'differs'"
    assert trust.ask(faulty(check)).usable == ("SOUND", "FAULTY")


# The verdict is remembered.


@pytest.fixture
def counted(tmp_path: Path) -> tuple[list[str], Callable[[], int]]:
    """A child whose type FAULTY is, and how often children began to compute it."""
    record = tmp_path / "record"
    note = f"pathlib.Path({str(record)!r}).open('a').write('x'); {SEGFAULT}"
    return faulty(note), lambda: len(record.read_text()) if record.exists() else 0


Counted = tuple[list[str], Callable[[], int]]


def test_a_verdict_is_asked_for_once(cache: Path, counted: Counted) -> None:
    command, count = counted
    first = trust.verdict(command)
    assert first.faults
    assert trust.verdict(command) == first
    assert count() == 1
    assert trust.verdict(command, again=True) == first
    assert count() == 2


def test_another_cpu_or_library_is_asked_again(cache: Path, counted: Counted, monkeypatch: pytest.MonkeyPatch) -> None:
    command, count = counted
    trust.verdict(command)
    monkeypatch.setattr(library, "cpu_identity", lambda *_: ["another"])
    trust.verdict(command)
    assert count() == 2
    monkeypatch.setattr(library, "library_identity", lambda: [["another", 1, 2]])
    trust.verdict(command)
    assert count() == 3
    monkeypatch.undo()


def test_a_file_of_another_cpu_under_this_name_is_not_believed(cache: Path, counted: Counted) -> None:
    command, count = counted
    trust.verdict(command)
    file = trust.cache_file()
    kept = json.loads(file.read_text())
    kept["key"][2] = ["another CPU"]
    file.write_text(json.dumps(kept))
    trust.verdict(command)
    assert count() == 2


@pytest.mark.parametrize("broken", [b"", b"{", b"[]", b"{}", b"null", b"\xff\xfe", b'{"key": 1, "usable": 2}'])
def test_a_broken_file_is_asked_again_and_mended(cache: Path, counted: Counted, broken: bytes) -> None:
    command, count = counted
    first = trust.verdict(command)
    trust.cache_file().write_bytes(broken)
    assert trust.verdict(command) == first
    assert trust.verdict(command) == first
    assert count() == 2


JSON = st.recursive(
    st.none() | st.booleans() | st.floats() | st.text(max_size=9),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=9), inner, max_size=3),
)


@given(usable=JSON, faults=JSON, expires=JSON)
def test_no_file_however_strange_raises(
    usable: object, faults: object, expires: object, tmp_path_factory: pytest.TempPathFactory
) -> None:
    file = tmp_path_factory.getbasetemp() / "strange.json"
    file.write_text(json.dumps({"key": [1], "usable": usable, "faults": faults, "expires": expires}))
    found = trust.read(file, [1])
    assert found is None or all(isinstance(name, str) for name in found.usable)


def test_a_verdict_from_a_hang_is_asked_again_after_a_day(tmp_path: Path) -> None:
    file = tmp_path / "verdict.json"
    for expires, is_known in ((time.time() + 60, True), (time.time() - 60, False), (time.time() + 1e6, False)):
        trust._write(file, [1], Verdict(usable=("SOUND",), expires=expires))
        assert (trust.read(file, [1]) is not None) == is_known


@pytest.mark.parametrize("asks", [trust.verdict, trust.check_plain])
def test_a_plain_way_that_hangs_is_waited_for_once_a_day(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, asks: Callable[[list[str]], object]
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(trust, "HANG_SEC", 0.5)
    first = asks([sys.executable, "-c", "import time; time.sleep(600)"])
    begun = tmp_path / "begun"
    assert asks([sys.executable, "-c", f"open({str(begun)!r}, 'x')"]) == first
    assert not begun.exists(), "a second child was started"


def test_a_cache_that_cannot_be_written_costs_a_probe_and_nothing_else(
    tmp_path: Path, counted: Counted, monkeypatch: pytest.MonkeyPatch
) -> None:
    command, count = counted
    (tmp_path / "file").write_text("no folder")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    assert trust.verdict(command) == trust.verdict(command)
    assert count() == 2


def test_a_user_without_a_home_has_a_probe_at_each_start_and_nothing_else(
    counted: Counted, monkeypatch: pytest.MonkeyPatch
) -> None:
    def nobody() -> Path:
        raise RuntimeError("Could not determine home directory.")

    command, count = counted
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    monkeypatch.setattr(Path, "home", nobody)
    assert trust.verdict(command) == trust.verdict(command)
    assert count() == 2


def test_what_is_left_out_is_told_of_with_how_to_have_it(cache: Path, caplog: pytest.LogCaptureFixture) -> None:
    trust.verdict(faulty(SEGFAULT))
    trust.verdict(faulty(SEGFAULT))  # is known: nothing is told again
    (told,) = [record.getMessage() for record in caplog.records if record.name == "uma.llama.trust"]
    assert "FAULTY is not used" in told
    assert "SIGSEGV" in told
    assert library.rebuild_command(trust.CLANG) in told


def test_processes_that_ask_at_the_same_moment_all_find_out(cache: Path) -> None:
    ask = [sys.executable, "-c", "from uma.llama import trust; print(trust.verdict())"]
    environ = clean_environ(XDG_CACHE_HOME=str(cache))
    several = [subprocess.Popen(ask, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, env=environ) for _ in range(3)]
    answers = {process.communicate(timeout=PATIENCE_SEC)[0] for process in several}
    assert answers == {f"{trust.verdict()}\n".encode()}
    assert [file.name for file in (cache / "uma").iterdir()] == [trust.cache_file().name]


# And it is what decides how this process loads.


def test_the_first_start_on_this_very_machine_lives_and_warns_of_what_it_left_out_once(cache: Path) -> None:
    environ = clean_environ(XDG_CACHE_HOME=str(cache))
    command = uma_command(
        "generate", "--model", "builtin", "--max-tokens", "4", "--temperature", "0", "Once upon a time"
    )
    first, second = (run_to_end(*command, environ=environ) for _ in range(2))
    assert first.returncode == second.returncode == 0, first.stderr
    assert first.stdout == second.stdout != ""
    found = json.loads(trust.cache_file().read_text())
    assert first.stderr.count("extra buffer type") == len(found["faults"])
    assert "extra buffer type" not in second.stderr


def test_a_script_without_a_main_guard_is_not_run_by_its_probe(cache: Path, tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text("from uma import LLM, SamplingParams\nprint('once')\nllm = LLM(threads=1, threads_batch=1)\n")
    (tmp_path / "json.py").write_text("raise SystemExit('not the json of the standard library')")
    command = ["-c", f"import sys; sys.argv = ['--odd', '-']; exec(open({str(script)!r}).read())"]
    done = run_to_end(sys.executable, *command, environ=clean_environ(XDG_CACHE_HOME=str(cache)))
    assert (done.returncode, done.stdout) == (0, "once\n"), done.stderr
    assert trust.cache_file().exists()


def logits(**options: str) -> list[float]:
    with (
        Model.load(builtin.builtin_path(), n_gpu_layers=0, **options) as model,  # type: ignore[arg-type]
        Context(model, ContextParams(n_ctx=512, n_threads=1, n_threads_batch=1)) as context,
    ):
        batch = Batch(40)
        batch.add(range(10, 50), 0, 0, last_logits=True)
        context.decode(batch)
        return list(map(float, context.logits(1)[0]))


def test_what_is_found_usable_computes_in_this_process_as_the_plain_way_does() -> None:
    assert logits(extra_buffers="auto") == pytest.approx(logits(extra_buffers="off"), abs=1.0)


@pytest.mark.parametrize(
    ("setting", "n_gpu_layers", "has_gpu", "is_asked"),
    [
        ("auto", 0, False, True), ("auto", -1, False, True), ("off", 0, False, False),
        ("auto", -1, True, False), ("auto", 99, True, False), ("auto", 1, True, True), ("auto", 0, True, True),
    ],
)  # fmt: skip
def test_the_verdict_is_asked_for_only_where_the_cpu_computes_with_it(
    setting: str, n_gpu_layers: int, has_gpu: bool, is_asked: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[bool] = []

    def verdict() -> Verdict:
        asked.append(True)
        return Verdict()

    monkeypatch.setattr(trust, "verdict", verdict)
    monkeypatch.setattr(trust, "check_plain", lambda: None)
    monkeypatch.setattr(trust, "has_gpu", lambda: has_gpu)
    with Model.load(builtin.builtin_path(), n_gpu_layers=n_gpu_layers, extra_buffers=setting):  # type: ignore[arg-type]
        assert bool(asked) == is_asked


def test_a_model_is_loaded_with_what_the_verdict_leaves_and_nothing_else(monkeypatch: pytest.MonkeyPatch) -> None:
    offered: list[tuple[str, ...]] = []

    @contextmanager
    def only(wanted: Sequence[str]) -> Iterator[None]:
        offered.append(tuple(wanted))
        with real(wanted):
            yield

    real = extra_buffers.only
    monkeypatch.setattr("uma.llama.model.only", only)
    for usable in ((), extra_buffers.names()[:1], extra_buffers.names()):
        monkeypatch.setattr(trust, "verdict", lambda usable=usable: Verdict(usable=usable))
        Model.load(builtin.builtin_path(), n_gpu_layers=0).close()
        assert offered.pop() == usable


def test_only_offers_what_it_says_and_all_again_after() -> None:
    everything = extra_buffers.names()
    array = extra_buffers._array()
    if array is None or len(everything) == 0:
        pytest.skip("this library offers no extra buffer types here")

    def offered() -> int:
        return next(count for count in range(len(everything) + 1) if not array[count])

    assert offered() == len(everything)
    with extra_buffers.only(everything[1:]):
        assert offered() == len(everything) - 1
        with extra_buffers.only([]):
            assert offered() == 0
    assert offered() == len(everything)


def test_a_cpu_is_told_by_its_features_model_and_microcode_and_not_by_its_load(tmp_path: Path) -> None:
    core = "processor\t: {}\nmodel name\t: A\nmicrocode\t: 0x1\ncpu MHz\t\t: {}\nflags\t\t: {}\n"
    one, two, three = tmp_path / "1", tmp_path / "2", tmp_path / "3"
    one.write_text(core.format(0, 1000, "avx2") + "\n" + core.format(1, 900, "avx2"))
    two.write_text(core.format(0, 3000, "avx2"))
    three.write_text(core.format(0, 1000, "avx2 amx_tile"))
    assert library.cpu_identity(one) == library.cpu_identity(two) != library.cpu_identity(three)
    assert library.cpu_name(one) == "A"


TILES = """
#include <immintrin.h>
#include <stdio.h>
#include <sys/syscall.h>
#include <unistd.h>
struct config { unsigned char palette = 0, start = 0, reserved[14] = {0}; unsigned short bytes[16] = {0};
                unsigned char rows[16] = {0}; };
__attribute__((noinline)) void load() {
    alignas(64) config tiles = {};
    tiles.palette = 1;
    for (int at = 0; at < 8; at++) { tiles.rows[at] = at < 2 ? 8 : 16; tiles.bytes[at] = at == 2 ? 32 : 64; }
    _tile_loadconfig(&tiles);
}
int main() {
    if (syscall(SYS_arch_prctl, 0x1023, 18)) return 77;
    load();
    alignas(64) volatile unsigned char kept[64] = {};
    __asm__ volatile("sttilecfg %0" : "=m"(*(volatile unsigned char(*)[64])kept));
    printf("%d %d %d %d", kept[48], kept[50], kept[16], kept[20]);
}
"""


@pytest.mark.skipif(shutil.which("c++") is None, reason="no compiler")
@pytest.mark.skipif("amx_tile" not in " ".join(library.cpu_identity()), reason="this CPU has no AMX")
def test_the_header_of_the_rebuild_gives_amx_its_whole_configuration(tmp_path: Path) -> None:
    source, program = tmp_path / "tiles.cpp", tmp_path / "tiles"
    source.write_text(TILES)
    flags = ["-O3", "-march=native", *shlex.split(library.AMX_REPAIR)]
    subprocess.run(["c++", *flags, str(source), "-o", str(program)], check=True)
    done = run_to_end(str(program))
    if done.returncode == 77:
        pytest.skip("this system does not let programs use AMX")
    assert (done.returncode, done.stdout) == (0, "8 16 64 32")


def test_a_relative_cache_folder_is_ignored(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", "somewhere")
    assert trust.cache_file().parent == Path.home() / ".cache" / "uma"
