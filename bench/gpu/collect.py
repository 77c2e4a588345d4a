# SPDX-License-Identifier: BSD-3-Clause
"""Gathers what a machine with a GPU and no package index lacks, and says how large it is.

    python -m bench.gpu.collect gpu_packages --mps nvidia-compute-utils-580.deb

The folder holds packages for Python 3.12 on x86-64 Linux, such that ``PYTHONPATH=FOLDER`` or ``site.addsitedir`` is all
that they need there, and in ``bin`` the programs of CUDA MPS. Nothing that the machine has is gathered; installed.txt
beside this file names what it has.

FlashAttention-4 with its compiler, 0.3 GB, is an archive of two halves in two folders, as it exceeds what may travel at
once. Where both have arrived, a line of the shell that this command prints unpacks them; its compiler is found by
``site.addsitedir`` alone, which ``python -m bench.gpu --packages`` does.
"""

import lzma
import os
import shutil
import subprocess
import sys
import tarfile
import tempfile
import zipfile
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from email.parser import HeaderParser
from pathlib import Path

import tyro
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from bench.gpu.process import ROOT
from bench.record import markdown_table

WANTED = (
    "torchtitan==0.2.2",
    "torchdata==0.11.0",
    "tyro",
    "tqdm",
    "filelock",
    "numba",
    "pytest-timeout",
    "hypothesis",
)
"""What the package and its tests import."""
FLASH_ATTENTION_4 = ("nvidia-cutlass-dsl[cu13]", "flash-attn-4==4.0.0b36")
LEFT_OUT = ("nvidia-cutlass-dsl-libs-cu12",)
"""Required, but replaced by what ``FLASH_ATTENTION_4`` names."""
ARCHIVE = "flash_attn_4.tar.xz"
INSTALLED = Path(__file__).with_name("installed.txt")
PYTHON = "3.12"
MARKERS = {
    "python_version": PYTHON,
    "python_full_version": f"{PYTHON}.3",
    "implementation_name": "cpython",
    "platform_python_implementation": "CPython",
    "platform_machine": "x86_64",
    "platform_system": "Linux",
    "sys_platform": "linux",
    "os_name": "posix",
}
"""The machine, as conditions of requirements name it."""
NEWEST_GLIBC = 39
OLDEST_GLIBC = 17
"""Minor versions of glibc 2 whose wheels the machine can load."""
MIB = 2**20
MOST_MIB = 64
"""MiB that may travel to the machine at once, the working tree among them."""
MPS_PROGRAMS = ("nvidia-cuda-mps-control", "nvidia-cuda-mps-server")


@dataclass(frozen=True)
class Options:
    folder: tyro.conf.Positional[Path]
    """Folder to make, or to make anew."""
    mps: Path | None = None
    """Debian package of NVIDIA's compute utilities, or a folder with its programs, to take CUDA MPS from."""
    present: Path = INSTALLED
    """What the machine has, a package a line: the output of `pip list --format=freeze` there."""
    flash_attn_4: Path | None = None
    """Folder for the second half of FlashAttention-4, whose first half is in ``folder``."""


@dataclass(frozen=True)
class Wheel:
    """A downloaded package, with the requirements that hold on the machine."""

    path: Path
    name: str
    version: str
    requirements: tuple[Requirement, ...]


@dataclass(frozen=True)
class Collection:
    """What was gathered.

    Attributes:
        relied_on: what the gathered packages require of those that the machine has, by the package's name.
        unmet: those of them that the machine's version is known not to satisfy.
    """

    wheels: tuple[Wheel, ...]
    relied_on: Mapping[str, Sequence[str]]
    unmet: Sequence[str]


def main(options: Options) -> int:
    """Exit code 0, 1 if a folder is larger than its limit, 2 with one line of what is wrong."""
    try:
        return collect(options)
    except subprocess.CalledProcessError as error:
        print(
            f"error: {Path(error.cmd[0]).name} ended with code {error.returncode}, as it says above",
            file=sys.stderr,
        )
    except (OSError, ValueError) as error:
        print(f"error: {error}", file=sys.stderr)
    return 2


def collect(options: Options) -> int:
    """Gathers, and tells what; exit code 0, or 1 if a folder is larger than its limit. Raises as ``fill``."""
    present = read_present(options.present)
    with tempfile.TemporaryDirectory(prefix="bench_gpu_programs_") as programs:
        if options.mps:
            extract_mps(options.mps, Path(programs, "bin"))
        collection = fill(options.folder, WANTED, present)
        shutil.copytree(programs, options.folder, dirs_exist_ok=True)
    print("\n".join(describe(options.folder, collection)))
    folders = [options.folder]
    if options.flash_attn_4:
        folders.append(options.flash_attn_4)
        print("\n".join(add_flash_attention_4(*folders, present)))
    return 0 if all([within_limit(folder) for folder in folders]) else 1


def fill(folder: Path, wanted: Iterable[str], present: Mapping[str, str]) -> Collection:
    """Makes ``folder`` anew with the packages ``wanted`` and all that they require and the machine lacks.

    Raises:
        ValueError: ``folder`` holds something else than what this command makes.
        subprocess.CalledProcessError: pip finds no package that the machine could load; pip says which.
    """
    _check_earlier(folder)
    with tempfile.TemporaryDirectory(prefix="bench_gpu_wheels_") as downloads:
        collection = resolve(wanted, present, Path(downloads))
        installed = Path(downloads, "installed")
        install([wheel.path for wheel in collection.wheels], installed)
        # only now, so that an earlier one is there if something fails
        shutil.rmtree(folder, ignore_errors=True)
        shutil.copytree(installed, folder)
    return collection


def add_flash_attention_4(
    first: Path, second: Path, present: Mapping[str, str]
) -> list[str]:
    """Writes halves of an archive of FlashAttention-4 into two folders; returns what to tell the user.

    Raises:
        ValueError: ``second`` holds something else than such a half.
        subprocess.CalledProcessError: pip finds no package that the machine could load.
    """
    if second.exists() and [path.name for path in second.iterdir()] != [f"{ARCHIVE}.2"]:
        raise ValueError(
            f"{second} holds other files: name a folder that does not exist, or that this command has made"
        )
    second.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix="bench_gpu_flash_") as scratch:
        packages = Path(scratch, "packages")
        archive = Path(scratch, ARCHIVE)
        collection = fill(packages, FLASH_ATTENTION_4, present)
        lines = describe(packages, collection)
        compress(packages, archive)
        content = archive.read_bytes()
    half = len(content) // 2
    Path(first, f"{ARCHIVE}.1").write_bytes(content[:half])
    Path(second, f"{ARCHIVE}.2").write_bytes(content[half:])
    halves = f"{first}/{ARCHIVE}.1 {second}/{ARCHIVE}.2"
    unpack = (
        f"cat {halves} > /tmp/{ARCHIVE} && python3 -m tarfile -e /tmp/{ARCHIVE} {first}"
    )
    return [
        "",
        *lines,
        "",
        f"Two halves of {half / MIB:.1f} MiB. Where both have arrived: {unpack}",
    ]


def compress(folder: Path, archive: Path) -> None:
    """Writes what is in ``folder`` as a tar file, compressed for machine code of x86."""
    filters = [
        {"id": lzma.FILTER_X86},
        {"id": lzma.FILTER_LZMA2, "preset": 9, "dict_size": 256 * MIB},
    ]
    with (
        lzma.open(archive, "wb", filters=filters) as file,
        tarfile.open(fileobj=file, mode="w|") as tar,
    ):
        for path in sorted(folder.iterdir()):
            tar.add(path, path.name)


def _check_earlier(folder: Path) -> None:
    if not folder.exists():
        return
    is_earlier = any(folder.glob("*.dist-info"))
    if any(folder.iterdir()) and not is_earlier:
        raise ValueError(
            f"{folder} holds no packages: name a folder that does not exist, or that this command has made"
        )


def read_present(path: Path) -> dict[str, str]:
    """Versions of the packages that ``path`` lists, by canonical name; "" where it has none.

    Raises:
        OSError: the file cannot be read.
    """
    present = {}
    for line in path.read_text().splitlines():
        if line and not line.startswith("#"):
            name, _, version = line.partition("==")
            present[canonicalize_name(name.strip())] = version.strip()
    return present


def resolve(
    wanted: Iterable[str], present: Mapping[str, str], downloads: Path
) -> Collection:
    """Downloads ``wanted`` and what it requires, as far as the machine lacks it, into the folder ``downloads``.

    Of a package that several require, the first requirement decides the version.

    Raises:
        ValueError: a later requirement does not allow that version.
        subprocess.CalledProcessError: pip finds no such package.
    """
    wheels: dict[str, Wheel] = {}
    relied_on: dict[str, list[str]] = {}
    unmet = []
    waiting = [("", Requirement(text)) for text in wanted]
    while waiting:
        requirer, requirement = waiting.pop(0)
        name = canonicalize_name(requirement.name)
        if name in LEFT_OUT:
            continue
        if name in present:
            if requirer:
                relied_on.setdefault(name, []).append(
                    f"{requirement.specifier or 'any'} ({requirer})"
                )
            if present[name] and not requirement.specifier.contains(
                present[name], prereleases=True
            ):
                unmet.append(
                    f"{requirer or 'this command'} requires {requirement}, the machine has {present[name]}"
                )
            continue
        if name not in wheels:
            wheels[name] = wheel = read_wheel(
                download(requirement, downloads), requirement.extras
            )
            waiting += [(wheel.name, needed) for needed in wheel.requirements]
        elif not requirement.specifier.contains(wheels[name].version, prereleases=True):
            raise ValueError(
                f"{requirer} requires {requirement}, but {wheels[name].version} was chosen: name a version in WANTED"
            )
    return Collection(tuple(wheels.values()), relied_on, unmet)


def _platforms() -> list[str]:
    """Arguments by which pip takes wheels for the machine instead of this one."""
    tags = [
        f"manylinux_2_{minor}_x86_64"
        for minor in range(NEWEST_GLIBC, OLDEST_GLIBC - 1, -1)
    ]
    tags += ["manylinux2014_x86_64", "manylinux1_x86_64"]
    arguments = [
        "--only-binary=:all:",
        f"--python-version={PYTHON}",
        "--implementation=cp",
    ]
    return [*arguments, *(f"--platform={tag}" for tag in tags)]


def _pip(*arguments: str) -> None:
    subprocess.run([sys.executable, "-m", "pip", "--quiet", *arguments], check=True)


def download(requirement: Requirement, downloads: Path) -> Path:
    """Downloads the newest wheel that satisfies ``requirement``, without what it requires.

    Raises:
        subprocess.CalledProcessError: there is none.
    """
    with tempfile.TemporaryDirectory(dir=downloads) as own_folder:
        named = f"{requirement.name}{requirement.specifier}"
        _pip("download", "--no-deps", *_platforms(), "--dest", own_folder, named)
        (wheel,) = Path(own_folder).glob("*.whl")
        return wheel.rename(downloads / wheel.name)


def read_wheel(path: Path, extras: Iterable[str] = ()) -> Wheel:
    """Name, version and requirements of a wheel; those of other systems and of other extras are left out."""
    with zipfile.ZipFile(path) as archive:
        (metadata,) = (
            name for name in archive.namelist() if name.endswith(".dist-info/METADATA")
        )
        head = HeaderParser().parsestr(archive.read(metadata).decode())
    requirements = [Requirement(text) for text in head.get_all("Requires-Dist", [])]
    held = tuple(
        requirement for requirement in requirements if _holds(requirement, extras)
    )
    return Wheel(path, canonicalize_name(head["Name"]), head["Version"], held)


def _holds(requirement: Requirement, extras: Iterable[str]) -> bool:
    marker = requirement.marker
    return marker is None or any(
        marker.evaluate({**MARKERS, "extra": extra}) for extra in ("", *extras)
    )


def install(wheels: Sequence[Path], folder: Path) -> None:
    """Unpacks wheels into ``folder``, without the scripts, which name this machine's Python."""
    _pip(
        "install",
        "--no-deps",
        "--no-index",
        "--no-compile",
        *_platforms(),
        "--target",
        str(folder),
        *map(str, wheels),
    )
    shutil.rmtree(folder / "bin", ignore_errors=True)


def extract_mps(source: Path, folder: Path) -> None:
    """Copies the programs of CUDA MPS from a Debian package or a folder into ``folder``.

    Raises:
        ValueError: ``source`` does not hold both.
        subprocess.CalledProcessError: ``source`` is no Debian package.
    """
    if not source.exists():
        raise ValueError(f"--mps {source}: there is no such file or folder")
    with tempfile.TemporaryDirectory(prefix="bench_gpu_mps_") as unpacked:
        where = source
        if source.is_file():
            subprocess.run(["dpkg-deb", "--extract", str(source), unpacked], check=True)
            where = Path(unpacked)
        for program in MPS_PROGRAMS:
            found = next(
                (path for path in sorted(where.rglob(program)) if path.is_file()), None
            )
            if found is None:
                raise ValueError(
                    f"{source} has no {program}; NVIDIA's nvidia-compute-utils packages do"
                )
            folder.mkdir(parents=True, exist_ok=True)
            shutil.copy(found, folder / program)
            (folder / program).chmod(0o755)


def num_bytes(folder: Path) -> int:
    """Bytes of all files under ``folder``."""
    return sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())


def working_tree_bytes() -> int:
    """Bytes of the files that git tracks or does not ignore."""
    command = ("git", "ls-files", "-z", "--cached", "--others", "--exclude-standard")
    names = subprocess.check_output(command, cwd=ROOT).split(b"\0")
    paths = {ROOT / os.fsdecode(name) for name in names if name}
    return sum(path.lstat().st_size for path in paths if path.exists())


def within_limit(folder: Path) -> bool:
    """Prints the folder's size beside its limit, MOST_MIB less the working tree."""
    limit = MOST_MIB - working_tree_bytes() / MIB
    size = num_bytes(folder) / MIB
    print(f"\n{folder}: {size:.1f} MiB in all, {limit:.1f} may travel")
    return size <= limit


def describe(folder: Path, collection: Collection) -> list[str]:
    """A table of what was gathered with sizes, and what it expects of the machine."""
    rows = [
        {"package": wheel.name, "version": wheel.version, **_sizes(wheel, folder)}
        for wheel in collection.wheels
    ]
    if programs := sorted(folder.glob("bin/*")):
        size = sum(path.stat().st_size for path in programs)
        rows.append(
            {
                "package": ", ".join(path.name for path in programs),
                "version": "",
                "MiB": f"{size / MIB:.2f}",
            }
        )
    lines = [*markdown_table(rows), "", "Expected of the machine:", ""]
    lines += [
        f"- {name} {', '.join(needs)}"
        for name, needs in sorted(collection.relied_on.items())
    ]
    return [*lines, *(f"**not met**: {reason}" for reason in collection.unmet)]


def _sizes(wheel: Wheel, folder: Path) -> dict[str, str]:
    """The size of an installed package, by its list of files."""
    (record,) = folder.glob(
        f"{wheel.path.name.split('-')[0]}-{wheel.version}.dist-info/RECORD"
    )
    files = [folder / line.split(",")[0] for line in record.read_text().splitlines()]
    size = sum(path.stat().st_size for path in files if path.is_file())
    return {"MiB": f"{size / MIB:.2f}"}


if __name__ == "__main__":
    sys.exit(main(tyro.cli(Options, description=__doc__)))
