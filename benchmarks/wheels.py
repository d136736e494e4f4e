"""Make a folder of wheels for a machine with a GPU that has torch but no access to a package index.

    python benchmarks/wheels.py [--output wheels]

There, install the wheels beside the packages of the machine, and start the check:

    python3 -m pip install --no-index --no-deps --target /tmp/site wheels/*.whl
    PYTHONPATH=/tmp/site:. python3 benchmarks/device_check.py

The wheels are for Linux on x86-64. The machine must have torch, torchvision, accelerate, transformers and the other
packages of pyproject.toml that are not in `NAMES`, which images with torch commonly contain.
"""

import subprocess
import sys
from pathlib import Path

from pydantic import Field

from tessera.runtime.settings import Settings, parse

WITH_DEPENDENCIES = ("pydantic>=2.11", "pydantic-settings")
"""Packages with all that they need, because a version of pydantic needs one exact version of pydantic-core."""
NAMES = ("webdataset>=1.0", "braceexpand>=0.1.7", "hjson")
"""Packages without what they need. deepspeed needs hjson."""
SOURCES = ("deepspeed>=0.18.9",)
"""Packages of which the index has no wheels. They hold no compiled code, so the wheel is built here."""
PLATFORMS = ("manylinux_2_28_x86_64", "manylinux_2_17_x86_64", "manylinux2014_x86_64")


class WheelsSettings(Settings):
    """Make a folder of wheels for a machine with a GPU that has torch but no access to a package index."""

    output: Path = Path("wheels")
    """folder for the wheels; it must be empty or missing, because pip installs no two versions of a package"""
    python: str = "3.12"
    """version of Python of that machine"""
    limit_mb: float = Field(default=40, gt=0)
    """largest allowed size of all wheels in MB"""


def main(settings: WheelsSettings) -> None:
    """Download and build the wheels, and print their size."""
    output = settings.output
    if output.exists() and any(output.iterdir()):
        raise SystemExit(f"{output} is not empty. Remove it, or choose another folder with --output.")
    platforms = [word for name in PLATFORMS for word in ("--platform", name)]
    download = ["download", "--only-binary", ":all:", "--python-version", settings.python, *platforms]
    pip(*download, "--dest", str(output), *WITH_DEPENDENCIES)
    pip(*download, "--dest", str(output), "--no-deps", *NAMES)
    # without isolation, because deepspeed's setup imports torch, which an isolated build would download
    pip("wheel", "--no-deps", "--no-build-isolation", "--wheel-dir", str(output), *SOURCES)
    check(output, settings.limit_mb)


def pip(*arguments: str) -> None:
    """Run pip, and end with its exit code if it fails."""
    ran = subprocess.run([sys.executable, "-m", "pip", "--quiet", "--disable-pip-version-check", *arguments])
    if ran.returncode:
        raise SystemExit(f"pip failed: pip {' '.join(arguments)}")


def check(folder: Path, limit_mb: float) -> None:
    """Print the size of each wheel and of all wheels.

    Raises:
        SystemExit: the wheels are larger than `limit_mb`, or a wheel is not for Linux on x86-64.
    """
    sizes = {path.name: path.stat().st_size / 1e6 for path in sorted(folder.iterdir())}
    for name, size in sizes.items():
        print(f"{size:8.2f} MB  {name}")
    total = sum(sizes.values())
    print(f"{total:8.2f} MB in all")
    foreign = [name for name in sizes if not name.endswith(("-any.whl", "x86_64.whl"))]
    if foreign:
        raise SystemExit(f"These files are not wheels for Linux on x86-64: {', '.join(foreign)}.")
    if total > limit_mb:
        raise SystemExit(f"The wheels have {total:.1f} MB, but --limit_mb is {limit_mb:g}. Leave packages out.")


if __name__ == "__main__":
    main(parse(WheelsSettings))
