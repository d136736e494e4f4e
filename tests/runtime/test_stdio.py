"""A run outlives its terminal and the readers of its output, and names from outside forge nothing in its messages."""

import os
import pty
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tessera.pretrain import run
from tessera.runtime import preemption
from tessera.runtime.files import atomic_write
from tessera.runtime.user_error import printable, without_controls
from tests.launched import ROOT, TINY, newest_step, records

CHILD = """
import sys
from tessera.runtime import stdio
stdio.protect()
opened = open(sys.argv[1], "w")
{body}
opened.write("content")
opened.close()
"""


def child(tmp_path: Path, body: str, **options) -> tuple[int, str]:
    command = [sys.executable, "-c", CHILD.format(body=body), str(tmp_path / "file")]
    return subprocess.run(command, timeout=60, **options).returncode, (tmp_path / "file").read_text()


def test_messages_for_closed_streams_are_dropped(tmp_path: Path) -> None:
    body = "print('lost', file=sys.stderr); print('lost', flush=True); stdio.tell('lost'); sys.stdin.read()"
    closed = {"preexec_fn": lambda: [os.close(number) for number in (0, 1, 2)]}
    assert child(tmp_path, body.replace("sys.stdin.read()", "pass"), **closed) == (0, "content")


def test_writes_to_broken_streams_are_dropped(tmp_path: Path) -> None:
    read, write = os.pipe()
    os.close(read)
    body = "for _ in range(9): print('x' * 9999, file=sys.stderr); print('x' * 9999, flush=True); stdio.tell('x')"
    assert child(tmp_path, body, stdout=write, stderr=write) == (0, "content")
    os.close(write)
    with open("/dev/full", "w") as full:
        assert child(tmp_path, body, stdout=full, stderr=full) == (0, "content")


def test_characters_outside_of_the_terminals_encoding_are_escaped(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-c", CHILD.format(body="print('k\\xe4se \\udc80')"), str(tmp_path / "file")],
        capture_output=True, text=True, env=os.environ | {"PYTHONIOENCODING": "ascii"},
    )  # fmt: skip
    assert done.stdout == "k\\xe4se \\udc80\n"


@pytest.mark.slow
def test_a_closed_terminal_saves_the_run(tmp_path: Path) -> None:
    output = tmp_path / "run"
    words = [*TINY, "--steps", "5000", "--checkpoint_every", "5000", "--output", str(output)]
    pid, terminal = pty.fork()  # the child leads a session on this terminal, as a login shell would
    if pid == 0:
        os.execv(sys.executable, [sys.executable, str(ROOT / "pretrain" / "run.py"), *words])
    try:
        while len(records(output)) < 3:
            assert os.read(terminal, 65536)
        os.close(terminal)  # the kernel sends SIGHUP, and later writes fail
        assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == preemption.EXIT_CODE
    except BaseException:
        os.kill(pid, signal.SIGKILL)
        raise
    assert newest_step(output) == records(output)[-1]["step"]
    assert not list(output.glob(".lock-*"))


def test_sighup_stays_ignored_under_nohup() -> None:
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        with preemption.listening():
            os.kill(os.getpid(), signal.SIGHUP)
            assert not preemption.stop_requested()
        signal.signal(signal.SIGHUP, signal.SIG_DFL)
        with preemption.listening():
            os.kill(os.getpid(), signal.SIGHUP)
            assert "stopped by SIGHUP" in preemption.message(3, "run")
    finally:
        signal.signal(signal.SIGHUP, before)


FORGED = "a\x1b[2K\rstep 9/9  loss 0.1\nrun.py: done\x9b\u2028\udc80"


def test_names_cannot_forge_lines() -> None:
    assert printable("käse 日本 'a b'") == "käse 日本 'a b'"
    shown = printable(FORGED)
    assert shown.isprintable()
    assert shown == r"a\x1b[2K\rstep 9/9  loss 0.1\nrun.py: done\x9b\u2028\udc80"
    assert without_controls("two\nlines\x1b[0m") == "two\n    lines\\x1b[0m"


@pytest.mark.parametrize(
    "words",
    [
        ["--data", FORGED],
        ["--encoder", FORGED],
        ["--init_from", FORGED],
        ["--config", FORGED],
        ["--resume", f"/nowhere/{FORGED}"],
        [f"--{FORGED}", "3"],
        ["--help", FORGED],
        ["--evaluation.val", FORGED, "--steps", "2"],
    ],
)
def test_messages_about_names_from_outside_hold_them_escaped(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, words: list[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    assert run.main([*words, "--output", str(tmp_path / "run")] if "--resume" not in words else words) == 2
    said = capsys.readouterr().err
    assert "\x1b" not in said
    assert "\r" not in said
    assert "\nrun.py: done" not in said
    assert "step 9/9" in said


def test_temporary_files_of_killed_processes_are_removed(tmp_path: Path) -> None:
    code = "import os, sys; from tessera.runtime.files import atomic_write\n"
    code += "with atomic_write(sys.argv[1]) as part: part.write_text('half'); os.kill(os.getpid(), 9)"
    path = tmp_path / "x.json"
    subprocess.run([sys.executable, "-c", code, str(path)], cwd=ROOT)
    (left,) = tmp_path.iterdir()
    other = tmp_path / ".x.json.another-3-4.tmp"  # of another machine, which may still be writing
    other.touch()
    with atomic_write(path) as part, atomic_write(path) as second:
        assert part.exists()
        assert part != second
        assert not left.exists()
        part.write_text("1")
        second.write_text("2")
    assert sorted(tmp_path.iterdir()) == [other, path]


def test_a_missing_home_is_explained(monkeypatch: pytest.MonkeyPatch, capsys) -> None:
    for name in ("HOME", "XDG_CACHE_HOME", "TESSERA_CACHE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr("pwd.getpwuid", lambda _: (_ for _ in ()).throw(KeyError("no such user")))
    assert run.main([*TINY, "--dry_run"]) == 2
    assert "Set TESSERA_CACHE" in capsys.readouterr().err


def test_passwords_in_urls_are_hidden() -> None:
    told = "https://user:pass%2Fword@host:80/a.tar and s3://key:secret@b/c, http://host:80/x:y@z, user:x@host"
    assert without_controls(told) == told.replace("pass%2Fword", "***").replace("secret", "***")
