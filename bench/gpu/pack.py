"""Collects packages for a machine without a package index: `python -m bench.gpu pack FOLDER`.

Takes pure-Python packages only, so that they serve any platform: what torch's environment there is likely to lack.
"""

import argparse
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

PACKAGES = ("tyro", "pytest", "pytest-timeout", "hypothesis", "tqdm", "filelock")
"""With all that they need."""
MOST_MEGABYTES = 60.0


def main(arguments: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(prog="python -m bench.gpu pack", description=__doc__.splitlines()[0])
    parser.add_argument("folder", type=Path, help="made anew; take it along as gpu_packages")
    parser.add_argument("--python", default="3.12", help="version on the other machine (default: %(default)s)")
    options = parser.parse_args(arguments)
    if options.folder.exists() and any(options.folder.iterdir()):
        parser.error(f"{options.folder} is not empty: remove it first")
    if code := _install(options.folder, options.python):
        return code
    megabytes = sum(path.stat().st_size for path in options.folder.rglob("*") if path.is_file()) / 2**20
    print(f"{options.folder}: {megabytes:.1f} MiB")
    if megabytes > MOST_MEGABYTES:
        print(f"more than {MOST_MEGABYTES:.0f} MiB", file=sys.stderr)
        return 1
    return 0


def _install(folder: Path, python: str) -> int:
    command = [sys.executable, "-m", "pip", "install", "--quiet", "--no-compile", "--upgrade", "--target", str(folder)]
    command += ["--only-binary=:all:", "--implementation=py", "--abi=none", "--platform=any"]
    return subprocess.run([*command, f"--python-version={python}", *PACKAGES], check=False).returncode
