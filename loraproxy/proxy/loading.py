"""Start-up: register the adapters and check each file against the base model.

A configured file that cannot be applied ends the start with one line, before anything listens. Those in the watched
folder and the uploads, of which there may be thousands, are registered unread: they are read once the server runs,
and on demand, and one that cannot be applied fails alone.
"""

from __future__ import annotations

import logging

from loraproxy.adapters.folder import Listing, list_folder
from loraproxy.adapters.registry import AdapterRegistry, Source
from loraproxy.adapters.roots import AllowedRoots
from loraproxy.adapters.uploads import UploadFolder
from loraproxy.config import Config
from loraproxy.errors import InvalidRequest, StartFailed
from loraproxy.proxy.catalog import Checks, log_registration

log = logging.getLogger(__name__)


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
    """The adapters of ``adapters_dir``, not read yet; those that are configured by name stay. Raises StartFailed."""
    if config.adapters_dir is None:
        return Listing()
    folder = config.adapters_dir.absolute()
    try:
        listing = list_folder(folder, checks.name)
    except OSError as error:
        raise StartFailed(f"adapters folder {folder}: {error.strerror or error}") from error
    for name, found in listing.adapters.items():
        if name not in registry:
            registry.put(name, found.path, None, source=Source.FOLDER)
    log.info("adapters folder %s: %d adapters", folder, len(listing.adapters))
    return listing


def allowed_roots(config: Config) -> AllowedRoots:
    """The folders from which the API may register adapters by path. Raises StartFailed for one that is none."""
    for folder in config.adapter_roots:
        if not folder.is_dir():
            reason = "is not one" if folder.exists() else "does not exist"
            raise StartFailed(f"--adapter-root: the folder {folder.absolute()} {reason}")
    return AllowedRoots(path.absolute() for path in (*config.adapter_roots, config.adapters_dir) if path)


def register_uploads(uploads: UploadFolder, registry: AdapterRegistry, checks: Checks) -> None:
    """What was uploaded before, not read yet; it takes the place of what has the same name, as it did when it came."""
    for stored in uploads.stored():
        about = stored.about
        try:
            registry.put(
                checks.name(about.name),
                stored.path,
                None,
                source=Source.UPLOAD,
                default_scale=about.scale,
                description=about.description,
            )
        except InvalidRequest as error:  # its name, which may be the base model's by now
            log.warning("uploaded adapter %s: left alone: %s", stored.path, error.message)
