"""Which paths the API may name: those in allowed folders, wherever symbolic links lead."""

from __future__ import annotations

import os
from collections.abc import Iterable
from pathlib import Path, PurePath

from loraproxy.adapters.names import shorten
from loraproxy.adapters.peft_folder import CONFIG_FILE, WEIGHTS_FILE
from loraproxy.errors import InvalidRequest, NotFound

_MAX_PATH = 4096


class AllowedRoots:
    """Folders that hold what may be registered by path."""

    def __init__(self, folders: Iterable[Path]) -> None:
        self._folders = tuple(dict.fromkeys(folders))

    def resolve(self, given: str) -> Path:
        """``given``, absolute or relative to one of the folders, without symbolic links.

        Raises InvalidRequest for a path that is none or leads out of the folders, itself or by a link of an adapter
        folder's files, and NotFound for one in them where nothing is.
        """
        if not given or len(given) > _MAX_PATH or "\0" in given or not _can_be_encoded(given):
            raise InvalidRequest(f"the path {shorten(given)} is no path of an adapter")
        if ".." in PurePath(given).parts:
            raise InvalidRequest(f"the path {shorten(given)} must not contain '..'")
        if not self._folders:
            raise InvalidRequest("no folder is open to the API: start the server with --adapter-root DIR")
        inside = [path for path in (self._inside(folder, given) for folder in self._folders) if path is not None]
        if not inside:
            raise InvalidRequest(f"the path {shorten(given)} is in none of the allowed folders: {self._listed()}")
        for path in inside:
            if os.path.exists(path):
                return path
        raise NotFound(f"there is nothing at {shorten(given)}; the allowed folders are {self._listed()}")

    def _inside(self, folder: Path, given: str) -> Path | None:
        root = os.path.realpath(folder)
        path = os.path.realpath(os.path.join(root, given))  # an absolute path replaces the root
        if not _is_in(path, root):
            return None
        for name in (CONFIG_FILE, WEIGHTS_FILE):
            if not _is_in(os.path.realpath(os.path.join(path, name)), root):
                return None
        return Path(path)

    def _listed(self) -> str:
        return ", ".join(str(folder) for folder in self._folders)


def _can_be_encoded(path: str) -> bool:
    """JSON can say half of a surrogate pair, which no file's name has."""
    try:
        os.fsencode(path)
    except UnicodeEncodeError:
        return False
    return True


def _is_in(path: str, root: str) -> bool:
    return os.path.commonpath((path, root)) == root
