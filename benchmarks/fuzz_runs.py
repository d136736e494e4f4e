"""Fuzz test of everything that a run of a stranger consists of: settings, descriptions, weights and checkpoints.

    pip install -e ".[test]" && python benchmarks/fuzz_runs.py

The library Hypothesis generates the test cases from valid files: it replaces values of any depth, and damages bytes. In
each case, the reader must return a value or raise a UserError, within `SECONDS`, without running anything. Any other
result of a case stops the run. Hypothesis then prints the smallest case that it finds for this failure.
"""

import contextlib
import json
import logging
import os
import pickle
import resource
import shutil
import sys
import tempfile
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import yaml
from hypothesis import HealthCheck, Phase, given, seed, settings
from hypothesis import strategies as st
from pydantic import Field
from rich.console import Console
from rich.progress import track

from tessera import encoders
from tessera.encoders.formats.checkpoint import load_weights, read
from tessera.pretrain.checkpoints import manifest, resume
from tessera.pretrain.command_line import load
from tessera.pretrain.engines.metadata import read_metadata
from tessera.pretrain.export import export
from tessera.pretrain.export import load as load_method
from tessera.pretrain.resolve import resolve
from tessera.runtime.errors import UserError
from tessera.runtime.settings import Settings, parse

CASES_PER_CHUNK = 1000  # number of cases between two updates of the progress bar
MEMORY = 2**28  # bytes by which the memory of the process may grow over all cases
ADDRESSES = 2**32  # bytes of address space, so that a case that asks for much more fails at once
SECONDS = 5.0  # limit of the processor time of a case
STEPS = 3

large = [10**9, 2**31, 2**53, 2**63 - 1, 2**70, -(2**70), 1e300]
numbers = st.sampled_from([0, -1, 1, 2, 3, 16, 0.5, -0.0, 1e-30, float("nan"), float("inf"), float("-inf"), *large])
special = st.sampled_from([None, True, False, "", "auto", "nan", "1e9", "\0"])
names = st.sampled_from(["variant", "dim", "depth", "heads", "vit_micro", "../x", "a" * 300, "\x1b[31m\nx"])
scalars = numbers | special | names | st.text(max_size=8) | st.integers()
values = st.recursive(
    scalars, lambda inner: st.lists(inner, max_size=4) | st.dictionaries(names, inner, max_size=4), max_leaves=8
)
kinds_of_change = st.sampled_from(["set", "delete", "rename", "add"])
changes = st.lists(st.tuples(st.integers(0, 10**6), kinds_of_change, values), max_size=3)
damage = st.lists(st.tuples(st.floats(0, 1), st.binary(max_size=8), st.integers(0, 64)), max_size=3)


class FuzzRunsBenchmark(Settings):
    """Fuzz test of settings files, encoder descriptions, weight files and checkpoints."""

    cases: int = Field(default=100_000, ge=1)
    """total number of cases"""
    seed: int = Field(default=0, ge=0)
    """seed of the first cases; every further chunk of cases uses the next larger seed"""
    output: Path | None = None
    """Markdown file for the result"""


def changed(value: Any, edits: list[tuple[int, str, Any]]) -> Any:
    """Return a copy of nested lists and dictionaries in which some values are replaced, removed, renamed or added."""
    value = json.loads(json.dumps(value))
    for place, kind, new in edits:
        spots = list(_spots(value))
        if not spots:
            return new
        holder, key = spots[place % len(spots)]
        if kind == "delete":
            del holder[key]
        elif kind == "rename" and isinstance(holder, dict):
            holder[str(new)[:300]] = holder.pop(key)
        elif kind == "add" and isinstance(holder, dict):
            holder["unknown"] = new
        else:
            holder[key] = new
    return value


def _spots(value: Any) -> list[tuple[Any, Any]]:
    """Return each list and dictionary in a value, with each of its keys."""
    keys = value.keys() if isinstance(value, dict) else range(len(value)) if isinstance(value, list) else ()
    own = [(value, key) for key in keys]
    return own + [spot for _, key in own for spot in _spots(value[key])]


def damaged(content: bytes, edits: list[tuple[float, bytes, int]]) -> bytes:
    """Return a copy of a file in which some bytes are replaced by others, inserted or removed."""
    for where, new, removed in edits:
        place = int(where * len(content))
        content = content[:place] + new + content[place + removed :]
    return content


def bounded(name: str, action: Callable[[], object]) -> None:
    """Run one case.

    Raises:
        AssertionError: the case takes longer than `SECONDS`, or raises another error than a `UserError`.
    """
    began = time.process_time()  # not the time on the clock, because other jobs may have the cores
    try:
        action()
    except UserError:
        pass
    except RecursionError:
        raise AssertionError(f"{name}: nested too deeply") from None
    assert time.process_time() - began < SECONDS, f"{name} took {time.process_time() - began:.1f} s"


def settings_files(folder: Path) -> Callable[..., None]:
    """Return a test case for damaged settings files."""
    file = folder / "settings.yaml"
    config = load(["--data", "a.tar", "--encoder", "vit_micro", "--evaluation.val", "b.tar"])
    valid = json.loads(config.model_dump_json(exclude={"config"}))

    @given(changes, damage)
    def case(edits: list, bytes_: list) -> None:
        text = yaml.safe_dump(changed(valid, edits), sort_keys=False, allow_unicode=True)
        file.write_bytes(damaged(text.encode(errors="replace"), bytes_))

        def action() -> None:
            loaded = load(["--config", str(file)])
            assert loaded.source.commands is not True
            resolve(loaded, 1000, classes=10)

        bounded("settings", action)

    return case


def descriptions(folder: Path) -> Callable[..., None]:
    """Return a test case for damaged encoder.json files."""
    path = folder / "encoder.safetensors"
    micro = sorted(name for name in encoders.VARIANTS if name.endswith("_micro"))
    valid = {}
    for name in micro:
        encoders.save(encoders.build(name), folder / f"{name}.safetensors", step=STEPS)
        valid[name] = json.loads((folder / f"{name}.json").read_text())

    @given(st.sampled_from(micro), changes, damage)
    def case(name: str, edits: list, bytes_: list) -> None:
        shutil.copy(folder / f"{name}.safetensors", path)
        text = json.dumps(changed(valid[name], edits))
        path.with_suffix(".json").write_bytes(damaged(text.encode(errors="replace"), bytes_))
        bounded("encoder.json", lambda: encoders.load(path))

    return case


def weight_files(folder: Path) -> Callable[..., None]:
    """Return a test case for damaged .safetensors and torch files."""
    encoder = encoders.build("vit_micro", depth=1)
    encoders.save(encoder, folder / "w.safetensors")
    torch.save({"teacher": encoder.state_dict(), "epoch": 3}, folder / "w.pth")
    valid = {kind: (folder / f"w.{kind}").read_bytes() for kind in ("safetensors", "pth")}
    torch.save(encoder.state_dict(), folder / "old.pth", _use_new_zipfile_serialization=False)
    valid["old.pth"] = (folder / "old.pth").read_bytes()

    @given(st.sampled_from(sorted(valid)), damage, st.floats(0, 0.05))
    def case(kind: str, bytes_: list, head: float) -> None:
        path = folder / f"damaged.{kind}"
        # the first bytes hold the structure, and the others numbers
        path.write_bytes(damaged(valid[kind], [(where * head, new, removed) for where, new, removed in bytes_]))
        bounded("weights", lambda: read(path))
        bounded("weights", lambda: load_weights(encoders.build("vit_micro", depth=1), path))

    return case


def checkpoints(folder: Path) -> Callable[..., None]:
    """Return a test case for damaged files of a checkpoint with a valid manifest, as a stranger would write it."""
    from tests.pretrain.small import make, saver

    accelerator, engine = make()
    state = resume.TrainState(STEPS, 12, alarm={"in_a_row": {}, "largest_rank": 1.0, "rung": []})
    saver(folder / "run", accelerator, engine).save(state, engine.method.trained_encoder())
    good = folder / "run" / "checkpoints" / f"step-{STEPS:08d}"
    export(good, folder / "method.safetensors", "method")
    trainer, of_method = (
        json.loads((good / "trainer.json").read_text()),
        json.loads((folder / "method.json").read_text()),
    )
    names = sorted(path.name for path in good.iterdir())
    copy = folder / "copy" / "step-00000003"

    @given(st.sampled_from(names), changes, damage, st.booleans())
    def case(name: str, edits: list, bytes_: list, signed: bool) -> None:
        shutil.rmtree(copy, ignore_errors=True)
        shutil.copytree(good, copy)
        if name == "trainer.json":
            (copy / name).write_text(json.dumps(changed(trainer, edits)))
        (copy / name).write_bytes(damaged((copy / name).read_bytes(), bytes_))
        if signed and name != manifest.NAME:
            manifest.write(copy, manifest.describe([path for path in copy.iterdir() if path.name != manifest.NAME]))
        bounded("export", lambda: export(copy, folder / "out.safetensors", "method"))
        bounded(".metadata", lambda: read_metadata(copy / ".metadata"))
        bounded("resume", lambda: resume.restore(copy, accelerator, engine))
        shutil.copy(folder / "method.safetensors", folder / "damaged.safetensors")
        (folder / "damaged.json").write_text(json.dumps(changed(of_method, edits)))
        with contextlib.suppress(ValueError):  # documented
            bounded("exported method", lambda: load_method(folder / "damaged.safetensors"))

    return case


def pickles(folder: Path) -> Callable[..., None]:
    """Return a test case for .metadata files that name functions."""
    trap = folder / "trap"
    calls = st.sampled_from(
        ["os.mkdir", "posix.system", "builtins.eval", "subprocess.Popen", "torch.load", "torch.Size"]
    )

    @given(calls, st.sampled_from([0, 2, 4]), st.booleans())
    def case(function: str, protocol: int, legacy: bool) -> None:
        module, _, name = function.rpartition(".")
        word = str(trap) if name in ("mkdir", "load", "Size") else f"mkdir {trap}"
        if legacy:
            content = f"c{module}\n{name}\n(V{word}\ntR.".encode()
        else:
            content = pickle.dumps((word,), protocol)[:-1] + f"c{module}\n{name}\n".encode() + b"\x8c\x01x\x85R."
        (folder / "pickled").write_bytes(content)
        bounded("pickle", lambda: read_metadata(folder / "pickled"))
        assert not trap.exists(), f"{function} ran"

    return case


def fuzz(cases: int, first_seed: int, *, progress: bool = False) -> int:
    """Run about `cases` cases and return the exact number of cases."""
    kinds = {settings_files: 2, descriptions: 3, weight_files: 3, checkpoints: 1, pickles: 1}
    size, done = min(cases, CASES_PER_CHUNK), 0
    chunks = range(first_seed, first_seed + max(1, cases // CASES_PER_CHUNK))
    with tempfile.TemporaryDirectory() as folder, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        made = {}
        for kind in kinds:
            made[kind] = Path(folder) / kind.__name__
            made[kind].mkdir()
        for chunk in track(chunks, "chunks of cases", console=Console(stderr=True)) if progress else chunks:
            for kind, parts in kinds.items():
                count = max(1, size * parts // sum(kinds.values()))
                run = settings(
                    max_examples=count,
                    deadline=None,
                    database=None,
                    phases=[Phase.generate, Phase.shrink],
                    suppress_health_check=[*HealthCheck.__members__.values()],
                )
                seed(chunk)(run(kind(made[kind])))()
                done += count
    return done


def main(options: FuzzRunsBenchmark) -> None:
    logging.disable(logging.CRITICAL)
    fuzz(200, options.seed)  # to load everything that the cases need
    held = int(Path("/proc/self/statm").read_text().split()[0]) * os.sysconf("SC_PAGE_SIZE")
    resource.setrlimit(resource.RLIMIT_AS, (held + ADDRESSES, held + ADDRESSES))
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 2**10
    start = time.monotonic()
    done = fuzz(options.cases, options.seed, progress=True)
    grown = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 2**10 - before
    assert grown < MEMORY, f"the memory grew by {grown / 2**20:,.0f} MiB"
    line = (
        f"{done:,} cases: only named errors; {time.monotonic() - start:,.0f} s, memory grew by {grown / 2**20:,.0f} MiB"
    )
    print(line)
    if options.output:
        options.output.write_text(
            f"# Fuzzing of runs\n\n`python benchmarks/fuzz_runs.py --cases {options.cases}`\n\n{line}.\n"
        )


if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).parents[1]))  # for the small run of tests/
    main(parse(FuzzRunsBenchmark))
