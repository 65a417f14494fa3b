"""``twistd localai-frontend``."""

from __future__ import annotations

import uuid
from dataclasses import replace

from twisted.application.service import IService
from twisted.logger import Logger

from localai_dist.cli.options import DaemonOptions
from localai_dist.cli.start import check_can_listen, make_folder, one_clear_line, prepared
from localai_dist.settings.frontend import FrontendSettings

_log = Logger()

NO_KEY = (
    "no API key is set: whoever reaches this frontend may use its models, and the operator's routes "
    "(localai-dist nodes, models, doctor) are closed; set LOCALAI_API_KEY"
)
"""Said in the log at each start without a key. Source: design §8."""


class Options(DaemonOptions, settings_type=FrontendSettings):
    """The frontend's options."""


def makeService(options: Options) -> IService:
    """
    Build the frontend that ``options`` ask for; the database is reached and migrated before this returns.

    Raises:
        SystemExit: one line that says what can't be used.
    """
    from twisted.internet import reactor

    from localai_dist.net.websocket import require_masker
    from localai_dist.roles import frontend
    from localai_dist.roles.ending import sigterm_ends_well
    from localai_dist.store.schema import migrate_sync

    with one_clear_line(FrontendSettings.program):
        settings = prepared(options, FrontendSettings)
        settings = replace(settings, instance_id=settings.instance_id or str(uuid.uuid4()))
        make_folder(settings.data_path, "data folder")
        make_folder(settings.models_path, "models folder")
        check_can_listen(settings.address, "LOCALAI_ADDRESS")
        require_masker()  # before the database: what can't start must not migrate it
        migrate_sync(settings.auth_database_url)
        sigterm_ends_well(reactor)
        warn_of_open_doors(settings)
        return frontend.make(settings, reactor)


def warn_of_open_doors(settings: FrontendSettings) -> None:
    """Say in the log that this frontend asks nobody for a key, if so; one line."""
    if not any(settings.api_key):
        _log.warn(NO_KEY)
