"""Start-up: register the adapters and check each file against the base model.

A configured file that cannot be applied ends the start with one line, before anything listens. One in the watched
folder or among the uploads does not: it is registered as failed, as it would be if it had come later.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Iterator
from pathlib import Path

from loraproxy.adapters.folder import Found, Listing, list_folder
from loraproxy.adapters.registry import AdapterRegistry, RegisteredAdapter, Source
from loraproxy.adapters.tensors import AdapterSummary
from loraproxy.adapters.uploads import UploadFolder
from loraproxy.config import Config
from loraproxy.errors import ApiError, InvalidAdapterFile, StartFailed
from loraproxy.proxy.catalog import Checks, log_registration

log = logging.getLogger(__name__)

_PROGRESS_SECONDS = 5.0


def register_configured(config: Config, registry: AdapterRegistry, checks: Checks) -> None:
    """The adapters of the configuration, in the order of their ids. Raises StartFailed."""
    try:
        for name, adapter in config.adapters.items():
            path = adapter.path.absolute()
            registered = registry.put(
                name,
                path,
                checks.survey(name, path),
                source=Source.CONFIGURED,
                default_scale=adapter.scale,
                description=adapter.description,
            )
            log_registration(registered)
    except ApiError as error:
        raise StartFailed(error.message) from error


def register_folder(config: Config, registry: AdapterRegistry, checks: Checks) -> Listing:
    """The adapters of ``adapters_dir``; those that are configured by name stay as they are. Raises StartFailed."""
    if config.adapters_dir is None:
        return Listing()
    folder = config.adapters_dir.absolute()
    try:
        listing = list_folder(folder, checks.name)
    except OSError as error:
        raise StartFailed(f"adapters folder {folder}: {error.strerror or error}") from error
    new = [(name, found) for name, found in listing.adapters.items() if name not in registry]
    for name, found in _with_progress(new, f"adapters folder {folder}"):
        content = _survey(checks, name, found.path)
        _report(registry.put(name, found.path, content, source=Source.FOLDER))
    return listing


def register_uploads(uploads: UploadFolder, registry: AdapterRegistry, checks: Checks) -> None:
    """What was uploaded before; it takes the place of what has the same name, as it did when it was uploaded."""
    for stored in uploads.stored():
        about = stored.about
        try:
            _report(
                registry.put(
                    about.name,
                    stored.path,
                    _survey(checks, about.name, stored.path),
                    source=Source.UPLOAD,
                    default_scale=about.scale,
                    description=about.description,
                )
            )
        except ApiError as error:  # its name
            log.warning("uploaded adapter %s: left alone: %s", stored.path, error.message)


def _survey(checks: Checks, name: str, path: Path) -> AdapterSummary | str:
    try:
        return checks.survey(name, path)
    except InvalidAdapterFile as error:
        return error.message


def _report(adapter: RegisteredAdapter) -> None:
    if adapter.version is None:
        log.warning("adapter %s cannot be used: %s", adapter.name, adapter.error)
    else:
        log_registration(adapter)


def _with_progress(items: list[tuple[str, Found]], what: str) -> Iterator[tuple[str, Found]]:
    """``items``, with a line in the log now and then where they take long."""
    last = time.monotonic()
    for done, item in enumerate(items):
        if time.monotonic() - last > _PROGRESS_SECONDS:
            last = time.monotonic()
            log.info("%s: %d of %d adapters read", what, done, len(items))
        yield item
