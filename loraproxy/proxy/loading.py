"""Start-up: register the adapters and check each file against the base model.

A configured file that cannot be applied ends the start with one line, before anything listens. One in the watched
folder or among the uploads does not: it is registered as failed, as it would be if it had come later.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Iterator

from loraproxy.adapters.folder import Found, Listing, list_folder
from loraproxy.adapters.registry import AdapterRegistry, Source
from loraproxy.adapters.uploads import UploadFolder
from loraproxy.config import Config
from loraproxy.errors import InvalidRequest, StartFailed
from loraproxy.proxy.catalog import Checks, log_registration

log = logging.getLogger(__name__)

_PROGRESS_SECONDS = 5.0


def register_configured(config: Config, registry: AdapterRegistry, checks: Checks) -> None:
    """The adapters of the configuration, in the order of their ids. Raises StartFailed."""
    for name, adapter in config.adapters.items():
        path = adapter.path.absolute()
        try:
            found = checks.survey_or_reason(name, path)
            if isinstance(found.content, str):
                raise StartFailed(found.content)
            registered = registry.put(
                name,
                path,
                found.content,
                source=Source.CONFIGURED,
                default_scale=adapter.scale,
                description=adapter.description,
                seen=found.seen,
            )
        except InvalidRequest as error:
            raise StartFailed(error.message) from error
        log_registration(registered)


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
        read = checks.survey_or_reason(name, found.path)
        log_registration(registry.put(name, found.path, read.content, source=Source.FOLDER, seen=read.seen))
    return listing


def register_uploads(uploads: UploadFolder, registry: AdapterRegistry, checks: Checks) -> None:
    """What was uploaded before; it takes the place of what has the same name, as it did when it was uploaded."""
    for stored in uploads.stored():
        about = stored.about
        try:
            read = checks.survey_or_reason(about.name, stored.path)
            adapter = registry.put(
                about.name,
                stored.path,
                read.content,
                source=Source.UPLOAD,
                default_scale=about.scale,
                description=about.description,
                seen=read.seen,
            )
        except InvalidRequest as error:  # its name, which may be the base model's by now
            log.warning("uploaded adapter %s: left alone: %s", stored.path, error.message)
            continue
        log_registration(adapter)


def _with_progress(items: list[tuple[str, Found]], what: str) -> Iterator[tuple[str, Found]]:
    """``items``, with a line in the log now and then where they take long."""
    last = time.monotonic()
    for done, item in enumerate(items):
        if time.monotonic() - last > _PROGRESS_SECONDS:
            last = time.monotonic()
            log.info("%s: %d of %d adapters read", what, done, len(items))
        yield item
