"""Lists the packages of this repository. All other metadata is in pyproject.toml.

The folders at the top of this repository are the subpackages of `tessera`. A folder of extras/ that was deleted is left
out of the wheel.
"""

from pathlib import Path

from setuptools import find_packages, setup

FOLDERS = ("configs", "launch", "runtime", "encoders", "data", "evaluation", "pretrain", "extras")
ROOT = Path(__file__).parent

setup(
    packages=[
        "tessera",
        *(f"tessera.{folder}" for folder in FOLDERS),
        *(f"tessera.{folder}.{package}" for folder in FOLDERS for package in find_packages(str(ROOT / folder))),
    ],
    package_dir={f"tessera.{folder}": folder for folder in FOLDERS},
)
