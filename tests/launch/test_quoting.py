"""Nothing that a settings file, a path or a flag holds can leave its quotes in the commands that are printed."""

import subprocess
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tessera.launch.jobs import quoted, quoted_line
from tests.launch.conftest import HARD, Slurm

PIECES = [
    *("'", '"', "\\", "$(touch ran)", "`touch ran`", "!", "!!", "\n", "\r", "\t", "\x1b[201~", "\x03", "\x04", "\x7f"),
    *("END OF FILE", "\nEND OF FILE\ntouch ran\n", "#", ";", "&", "|", "~", "*", "{a,b}", "%s", "-n", "ä", "日"),
    *("\x85", "\u2028", "\u202e", "\x9b", "'\"'\"'", "$'", "\\047", "\\n", " ", ""),
]
texts = st.lists(st.sampled_from(PIECES) | st.text(st.characters(exclude_characters="\0", codec="utf-8"))).map("".join)


def words_of(script: str, *options: str) -> list[str]:
    done = subprocess.run(["bash", *options], input=script.encode(), capture_output=True, timeout=60)
    return done.stdout.decode().split("\0")[:-1]


@given(st.lists(texts, max_size=30))
@settings(max_examples=50, deadline=None)
def test_bash_reads_exactly_the_words(words: list[str]) -> None:
    line = quoted_line(["printf", r"%s\0", "", *words])
    assert line.isprintable()  # one line without anything on which a terminal acts
    assert words_of(f"{line}\n") == ["", *words]
    assert words_of(f"#     {line}\nprintf 'end\\0'\n") == ["end"]
    text = "".join(words)
    assert words_of(f"printf '%s\\0' {quoted(text, lines=True)}\n") == [text]
    assert quoted(text, lines=True).replace("\n", "").isprintable()


def test_bash_of_a_terminal_reads_exactly_the_words() -> None:
    """Such a bash replaces `!word` by an earlier command."""
    line = quoted_line(["printf", r"%s\0", *PIECES, "!before\x1b", *HARD])
    script = f"set -o history -H\necho before\n{line}\n"
    done = words_of(script, "--norc", "--noprofile", "-i")
    assert done == ["before\n" + PIECES[0], *PIECES[1:], "!before\x1b", *HARD]


@pytest.mark.parametrize("text", ["END OF FILE\n  touch ran\n", "$(touch ran)", "`touch ran`", "'; touch ran; '"])
def test_the_printed_plan_is_only_what_it_seems(slurm: Slurm, tmp_path: Path, text: str) -> None:
    lines = "\n".join(f"    {line}" for line in text.splitlines())
    config = f"data: shards.tar\nevaluation: {{train: a.tar, val: b.tar}}\nmetrics:\n  run: |\n{lines}\n\n\n"
    (tmp_path / "x.yaml").write_text(config)
    output = f"run\n{text}".replace("/", "_")
    plan = slurm.accepted("--dry_run", "--after-pretraining", "probe,knn", "--",
                          "--seed", text, output=output)  # fmt: skip
    shell = subprocess.run(["bash"], input=plan, capture_output=True, text=True, cwd=tmp_path, env=slurm.environment)
    assert shell.returncode == 0, shell.stderr
    assert not shell.stderr
    assert not list(tmp_path.rglob("ran"))
    assert (tmp_path / output / "submitted" / "config.yaml").read_text() == config
    assert next(argv[-2:] for argv in slurm.submitted()) == ["--seed", text]
